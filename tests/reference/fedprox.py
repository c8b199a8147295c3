"""FedProx (Li et al. 2020): FedAvg whose clients minimise CE(w_k) + mu/2 |w_k - w|^2, w as received this round."""

from __future__ import annotations

from copy import deepcopy

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, distance, get, leaves, mean, put, train

HYPER = {"mu": 0.5}
RELATIVE = ("fedprox", {"mu": 0.4})


def proximal(model: nn.Module, mu: float) -> Loss:
    model.train()
    received = [p.detach().clone() for p in model.parameters()]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y) + mu / 2 * distance(model.parameters(), received)

    return loss


def run(setup: Setup, mu: float) -> list[Scorer]:
    models = deepcopy(setup.models)
    names = leaves(models[0])
    w = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            train(setup, r, i, models[i].parameters(), proximal(models[i], mu))
        w = mean([get(models[i], names) for i in who], [setup.samples[i] for i in who])
    for model in models:
        put(model, w)
    return [Scorer(model) for model in models]
