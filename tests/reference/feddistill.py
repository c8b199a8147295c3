"""FedDistill (Jeong et al. 2018): clients share their mean output of each class and keep their models.

Loss CE(f(x), y) + lam * CE(f(x), T_y), where T_y is the mean of what the other clients last sent for class y; without
one the second term is zero. A client sends means over all outputs that its steps of the round gave, as probabilities,
or as logits: then T_y is the softmax of their mean.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss, softmax

from .common import Loss, Scorer, Setup, train

HYPER = {"lam": 2.0}
RELATIVE = ("feddistill", {"lam": 1.5})
VARIANTS = [{"average": "logits"}, {"average": "logits", "lam": 3.0}, {}]

Classes = dict[int, Tensor]


def taught(model: nn.Module, targets: Classes, seen: dict[int, list[Tensor]], lam: float, average: str) -> Loss:
    """The loss of a step, which also notes its outputs in `seen`."""
    model.train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        total = nll_loss(log_softmax(scores, 1), y)
        for c, row in zip(y.tolist(), scores, strict=True):
            if c in targets:
                target = softmax(targets[c], 0) if average == "logits" else targets[c]
                total = total - lam / len(y) * (target @ log_softmax(row, 0))
            seen.setdefault(c, []).append(row.detach() if average == "logits" else softmax(row.detach(), 0))
        return total

    return loss


def run(setup: Setup, lam: float = 1.0, average: str = "probabilities") -> list[Scorer]:
    models = deepcopy(setup.models)
    sent: list[Classes] = [{} for _ in models]
    for r in range(setup.rounds):
        new = {}
        for i in setup.participants(r):
            others = sent[:i] + sent[i + 1 :]
            known = set().union(*others)
            targets = {c: torch.stack([each[c] for each in others if c in each]).mean(0) for c in known}
            seen: dict[int, list[Tensor]] = {}
            train(setup, r, i, models[i].parameters(), taught(models[i], targets, seen, lam, average))
            new[i] = {c: torch.stack(rows).mean(0) for c, rows in seen.items()}
        for i, means in new.items():
            sent[i] = means
    return [Scorer(model) for model in models]
