"""Ditto (Li et al. 2021): FedAvg's w beside a personal v_k of CE(v) + lam/2 |v - w|^2, which is tested.

v goes on from the last round's v; w is the one received this round; both are trained on the same batches.
"""

from __future__ import annotations

from copy import deepcopy

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, distance, get, leaves, mean, plain, put, train

HYPER = {"lam": 0.7}
RELATIVE = ("ditto", {"lam": 0.6})


def towards(v: nn.Module, w: list[Tensor], lam: float) -> Loss:
    v.train()
    return lambda x, y: cross_entropy(v(x), y) + lam / 2 * distance(v.parameters(), w)


def run(setup: Setup, lam: float) -> list[Scorer]:
    models, personal = deepcopy(setup.models), deepcopy(setup.models)
    names = leaves(models[0])
    w = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            received = [p.detach().clone() for p in models[i].parameters()]
            train(setup, r, i, models[i].parameters(), plain(models[i]))
            train(setup, r, i, personal[i].parameters(), towards(personal[i], received, lam))
        w = mean([get(models[i], names) for i in who], [1.0 for _ in who])
    return [Scorer(v) for v in personal]
