"""FedBN (Li et al. 2021): FedAvg of all but batch norm, whose affine parameters and statistics stay local."""

from __future__ import annotations

from copy import deepcopy

from .common import Scorer, Setup, get, leaves, mean, norm_leaves, plain, put, train

RELATIVE = ("silobn", {})


def run(setup: Setup) -> list[Scorer]:
    models = deepcopy(setup.models)
    names = set(leaves(models[0])) - norm_leaves(models[0])
    w = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            train(setup, r, i, models[i].parameters(), plain(models[i]))
        w = mean([get(models[i], names) for i in who], [1.0 for _ in who])
    for model in models:
        put(model, w)
    return [Scorer(model) for model in models]
