"""COPA (Wu and Gong 2021): one averaged body, and the heads of all clients, which predict together.

Client i minimises CE(C_i(f(x))) + weight * the sum over j != i of CE(C_j(f(x))) by the body f and its own head C_i. The
other heads are frozen, in eval mode, as they last came to the server. Server: the plain mean of the bodies; heads are
collected. Tested by the mean over all heads of their probabilities, or of their scores.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from .common import Loss, Scorer, Setup, get, leaves, mean, put, train

HYPER = {"weight": 0.7}
RELATIVE = ("copa", {"weight": 0.6})
VARIANTS = [{"weight": 1.0}, {"weight": 0.3, "ensemble": "logits"}]


def together(model: nn.Module, others: list[nn.Module], weight: float) -> Loss:
    """Cross-entropy through the own head and, on the same features, through those of others."""
    model.train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = model.body(x)
        total = cross_entropy(model.head(z), y)
        for head in others:
            total = total + weight * cross_entropy(head(z), y)
        return total

    return loss


class Ensemble(nn.Module):
    """A body with many heads."""

    def __init__(self, body: nn.Module, heads: list[nn.Module], of: str) -> None:
        super().__init__()
        self.body, self.heads, self.of = body, nn.ModuleList(heads), of

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        if self.of == "logits":
            return torch.stack([head(z) for head in self.heads]).mean(0)
        return torch.stack([softmax(head(z), dim=1) for head in self.heads]).mean(0).log()


def run(setup: Setup, weight: float, ensemble: str = "probabilities") -> list[Scorer]:
    models = deepcopy(setup.models)
    names = leaves(models[0], "body.")
    body, heads = get(models[0], names), [deepcopy(model.head) for model in models]
    for r in range(setup.rounds):
        who, sent = setup.participants(r), [deepcopy(head).eval().requires_grad_(False) for head in heads]
        for i in who:
            put(models[i], body)
            others = [sent[j] for j in range(len(sent)) if j != i]
            train(setup, r, i, models[i].parameters(), together(models[i], others, weight))
            heads[i] = deepcopy(models[i].head)
        body = mean([get(models[i], names) for i in who], [1.0 for _ in who])
    for model in models:
        put(model, body)
    return [Scorer(Ensemble(model.body, deepcopy(heads), ensemble)) for model in models]
