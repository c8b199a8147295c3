"""MOON (Li et al. 2021): FedAvg of CE(w) + mu * con, with R_w the network before its output layer and

con = -log( exp(cos(z, z_glob) / tau) / (exp(cos(z, z_glob) / tau) + exp(cos(z, z_prev) / tau)) ),

z = R_w(x), z_glob = R of the received model, z_prev = R of the client's model after its last round; both frozen, in
eval mode. Before its first round a client has no such model, and the received one stands in: con is then log 2.
With a projection the network is encoder, K to K, ReLU, K to P, output layer, and R_w ends before the output layer.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, get, leaves, mean, put, train

HYPER = {"mu": 6.0, "tau": 0.3}
RELATIVE = ("moon", {"mu": 5.0, "tau": 0.3})
VARIANTS = [{}, {"mu": 0.0}, {"mu": 6.0, "tau": 1.5}, {"mu": 6.0, "projection": 7}, {"mu": 6.0, "projection": 16}]


class Projected(nn.Module):
    """The original network: its first weights are those that the method drew, as both sides must start alike."""

    def __init__(self, model: nn.Module, built: nn.Module) -> None:
        super().__init__()
        first, _, second = built.net.body.projection
        self.encoder, self.l1, self.l2, self.head = (
            model.body,
            deepcopy(first),
            deepcopy(second),
            deepcopy(built.net.head),
        )
        assert self.l1.in_features == self.l1.out_features == self.l2.in_features

    def body(self, x: Tensor) -> Tensor:
        return self.l2(self.l1(self.encoder(x)).clamp(min=0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def cos(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


def local(w: nn.Module, received: nn.Module, previous: nn.Module, mu: float, tau: float) -> Loss:
    w.train()
    received.eval()
    previous.eval()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = w.body(x)
        near, far = (torch.exp(cos(z, model.body(x).detach()) / tau) for model in (received, previous))
        return cross_entropy(w.head(z), y) - mu * torch.log(near / (near + far)).mean()

    return loss


def run(setup: Setup, mu: float = 1.0, tau: float = 0.5, projection: int | None = None) -> list[Scorer]:
    models = deepcopy(setup.models)
    if projection is not None:
        models = [Projected(model, built) for model, built in zip(models, setup.built, strict=True)]
    previous: dict[int, nn.Module] = {}
    names = leaves(models[0])
    w = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            received = deepcopy(models[i])
            terms = local(models[i], received, previous.get(i, received), mu, tau)
            train(setup, r, i, models[i].parameters(), terms)
            previous[i] = deepcopy(models[i])
        w = mean([get(models[i], names) for i in who], [setup.samples[i] for i in who])
    for model in models:
        put(model, w)
    return [Scorer(model) for model in models]
