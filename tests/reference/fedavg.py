"""FedAvg (McMahan et al. 2017): w <- sum_k n_k / n w_k over the participants; batch norm's statistics too."""

from __future__ import annotations

from copy import deepcopy

from .common import Scorer, Setup, get, leaves, mean, plain, put, train

RELATIVE = ("local", {})


def run(setup: Setup) -> list[Scorer]:
    models = deepcopy(setup.models)
    names = leaves(models[0])
    w = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            train(setup, r, i, models[i].parameters(), plain(models[i]))
        w = mean([get(models[i], names) for i in who], [setup.samples[i] for i in who])
    for model in models:
        put(model, w)
    return [Scorer(model) for model in models]
