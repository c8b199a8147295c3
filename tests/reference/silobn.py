"""SiloBN (Andreux et al. 2020): FedAvg of all parameters, batch norm's affine ones too; its statistics stay local."""

from __future__ import annotations

from copy import deepcopy

from .common import Scorer, Setup, get, leaves, mean, norm_leaves, plain, put, train

RELATIVE = ("fedavg", {})


def run(setup: Setup) -> list[Scorer]:
    models = deepcopy(setup.models)
    names = set(leaves(models[0])) - norm_leaves(models[0], ("running_mean", "running_var"))
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
