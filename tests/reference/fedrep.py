"""FedRep (Collins et al. 2021): first the own head on the received body, then that body, which is averaged.

What is frozen in a pass runs its batch norm in eval mode. Both passes see the same batches, from epoch 0 on.
"""

from __future__ import annotations

from copy import deepcopy

from torch import nn
from torch.nn.functional import cross_entropy

from .common import Scorer, Setup, get, leaves, mean, put, train

HYPER = {"head_epochs": 2, "body_epochs": 1}
RELATIVE = ("fedper", {})


def one_part(setup: Setup, r: int, i: int, model: nn.Module, part: nn.Module, epochs: int) -> None:
    model.eval()
    part.train()
    train(setup, r, i, part.parameters(), lambda x, y: cross_entropy(model(x), y), epochs)


def run(setup: Setup, head_epochs: int, body_epochs: int) -> list[Scorer]:
    models = deepcopy(setup.models)
    names = leaves(models[0], "body.")
    body = get(models[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], body)
            one_part(setup, r, i, models[i], models[i].head, head_epochs)
            one_part(setup, r, i, models[i], models[i].body, body_epochs)
        body = mean([get(models[i], names) for i in who], [1.0 for _ in who])
    for model in models:
        put(model, body)
    return [Scorer(model) for model in models]
