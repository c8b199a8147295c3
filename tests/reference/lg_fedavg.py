"""LG-FedAvg (Liang et al. 2020): `warmup` rounds of FedAvg, whose model everyone takes, then averaged heads only.

All of a client's model is trained jointly in both phases; every average is uniform, as in the authors' code.
"""

from __future__ import annotations

from copy import deepcopy

from .common import Scorer, Setup, get, leaves, mean, plain, put, train

HYPER = {"warmup": 1}
QUICK = {"warmup": 2}
RELATIVE = ("lg-fedavg", {"warmup": 2})


def run(setup: Setup, warmup: int) -> list[Scorer]:
    models = deepcopy(setup.models)
    w = get(models[0], leaves(models[0]))
    for r in range(setup.rounds):
        names = leaves(models[0]) if r < warmup else leaves(models[0], "head.")
        who = setup.participants(r)
        for i in who:
            put(models[i], {name: w[name] for name in names})
            train(setup, r, i, models[i].parameters(), plain(models[i]))
        w = mean([get(models[i], names) for i in who], [1.0 for _ in who])
        for model in models:  # a body arrives for the last time after the last round of the warm-up
            put(model, w)
    return [Scorer(model) for model in models]
