"""FedPer (Arivazhagan et al. 2019): the body is averaged, each head stays; both are trained jointly."""

from __future__ import annotations

from copy import deepcopy

from .common import Scorer, Setup, get, leaves, mean, plain, put, train

RELATIVE = ("fedavg", {})


def run(setup: Setup) -> list[Scorer]:
    models = deepcopy(setup.models)
    names = leaves(models[0], "body.")
    body = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], body)
            train(setup, r, i, models[i].parameters(), plain(models[i]))
        body = mean([get(models[i], names) for i in who], [setup.samples[i] for i in who])
    for model in models:
        put(model, body)
    return [Scorer(model) for model in models]
