"""Local: every client minimises its own cross-entropy; nothing is sent."""

from __future__ import annotations

from copy import deepcopy

from .common import Scorer, Setup, plain, train

RELATIVE = ("fedavg", {})


def run(setup: Setup) -> list[Scorer]:
    models = deepcopy(setup.models)
    for r in range(setup.rounds):
        for i in setup.participants(r):
            train(setup, r, i, models[i].parameters(), plain(models[i]))
    return [Scorer(model) for model in models]
