"""FedRoD (Chen & Chao 2022), linear: body and generic head g by balanced softmax, personal head p on top of both.

Loss CE(g(z) + gamma log n_c) + CE(stop(g(z)) + p(stop(z))) in one SGD; p starts as a copy of g; body and g are
averaged; a client is tested with g + p.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, get, leaves, mean, put, train

HYPER = {"gamma": 1.0}
RELATIVE = ("fedrod", {"gamma": 0.9})


class TwoHeads(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body, self.head, self.personal = model.body, model.head, deepcopy(model.head)

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return self.head(z) + self.personal(z)


def both(model: nn.Module, labels: Tensor, gamma: float) -> Loss:
    model.train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = model.body(x)
        g = model.head(z)
        counts = torch.bincount(labels, minlength=g.shape[1]).float()
        prior = gamma * counts.log() if gamma else torch.zeros_like(counts)  # 0 * log 0 would be NaN
        return cross_entropy(g + prior, y) + cross_entropy(g.detach() + model.personal(z.detach()), y)

    return loss


def run(setup: Setup, gamma: float = 1.0) -> list[Scorer]:
    models = [TwoHeads(model) for model in deepcopy(setup.models)]
    names = leaves(models[0], "body.") + leaves(models[0], "head.")
    w = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            train(setup, r, i, models[i].parameters(), both(models[i], setup.train[i][1], gamma))
        w = mean([get(models[i], names) for i in who], [setup.samples[i] for i in who])
    for model in models:
        put(model, w)
    return [Scorer(model) for model in models]
