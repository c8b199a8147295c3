"""FedBABU (Oh et al. 2022): bodies are trained under a head that keeps its first weights, and averaged by samples.

Before the test the received body and that head are fine-tuned, as in `finetune`.
"""

from __future__ import annotations

from copy import deepcopy

from .common import Scorer, Setup, get, leaves, mean, put, train
from .finetune import moving, tuned

HYPER = {"epochs": 2, "lr": 0.03}
MOMENT = "adapted"
RELATIVE = ("finetune", HYPER)
VARIANTS = [{}, {"epochs": 0}, {"tunes": "head", "lr": 0.2}, {"tunes": "body", "epochs": 1}]


def run(setup: Setup, epochs: int = 5, tunes: str = "all", lr: float | None = None) -> list[Scorer]:
    models = deepcopy(setup.models)
    names = leaves(models[0], "body.")
    body = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], body)
            train(setup, r, i, *moving(models[i], "body"))
        body = mean([get(models[i], names) for i in who], [setup.samples[i] for i in who])
    for model in models:
        put(model, body)
    return tuned(setup, models, epochs, tunes, lr)
