"""FedFomo (Zhang et al. 2021): each client begins a round with a mixture of models that help on its own images.

With L_i the loss of client i on images that it compares by, b = theta_i^(t-1) the model with which it began to train
last time, and j over its own trained model and those of others: w_j = max(0, (L_i(b) - L_i(theta_j)) / |theta_j - b|),
divided by their sum; theta_i <- b + sum_j w_j (theta_j - b), or where no w_j is above 0 its own trained model. Then it
trains theta_i and sends it; that one is tested. Here everybody is sent the last model of all others who have sent one,
so the server has nothing to choose.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Scorer, Setup, distance, get, leaves, plain, put, train

HYPER = {"images": "train"}
RELATIVE = ("local", {})


@torch.no_grad()
def helps(base: nn.Module, other: nn.Module, x: Tensor, y: Tensor) -> float:
    """By how much the loss falls from one model to the other, for each unit of the way between them; 0 if it rises."""
    far = distance(base.parameters(), other.parameters()).sqrt().item()
    loss, others = (cross_entropy(deepcopy(model).eval()(x), y).item() for model in (base, other))
    return max(0.0, (loss - others) / far) if far > 0 else 0.0


def mixed(base: nn.Module, others: list[nn.Module], weights: list[float]) -> dict[str, Tensor]:
    """The base moved towards others; all that is a number, running statistics too."""
    start, moved = get(base, leaves(base)), get(base, leaves(base))
    for other, weight in zip(others, weights, strict=True):
        for name, tensor in get(other, leaves(other)).items():
            moved[name] += weight / sum(weights) * (tensor - start[name])
    return moved


def run(setup: Setup, images: str) -> list[Scorer]:
    assert images == "train"  # a setup has no others; a test may put validation images into their place
    models = deepcopy(setup.models)
    begun, sent = deepcopy(models), {}
    for r in range(setup.rounds):
        news = {}
        for i in setup.participants(r):
            others = [models[i], *(model for j, model in sent.items() if j != i)]
            weights = [helps(begun[i], other, *setup.train[i]) for other in others]
            if sum(weights) > 0:
                put(models[i], mixed(begun[i], others, weights))
            begun[i] = deepcopy(models[i])
            train(setup, r, i, models[i].parameters(), plain(models[i]))
            news[i] = deepcopy(models[i])
        sent |= news
    return [Scorer(model) for model in models]
