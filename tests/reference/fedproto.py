"""FedProto (Tan et al. 2022): clients share the class means of their features (prototypes) and keep their models.

Loss CE + lam * mean((f(x) - P_y)^2) over batch and features, zero where P_y is unknown; the server's P_c is the mean
over this round's participants, weighted by how many samples of c each has; tested by the nearest P_c, or by
the client's head (`inference`).
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, train

HYPER = {"lam": 2.0}
VARIANTS = [{"lam": 2.0, "inference": "head"}]
RELATIVE = ("fedproto", {"lam": 1.5})


def attracted(model: nn.Module, prototypes: dict[int, Tensor], lam: float) -> Loss:
    model.train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = model.body(x)
        targets = torch.stack([prototypes.get(int(c), row.detach()) for c, row in zip(y, z, strict=True)])
        known = torch.tensor([[float(int(c) in prototypes)] for c in y])
        return cross_entropy(model.head(z), y) + lam * (known * (z - targets) ** 2).mean()

    return loss


@torch.no_grad()
def features_of(model: nn.Module, x: Tensor, y: Tensor) -> dict[int, Tensor]:
    """Every class's features `[samples, width]`."""
    z = model.eval().body(x)
    return {int(c): z[y == c] for c in y.unique()}


def run(setup: Setup, lam: float, inference: str = "prototype") -> list[Scorer]:
    models = deepcopy(setup.models)
    prototypes: dict[int, Tensor] = {}
    for r in range(setup.rounds):
        found = []
        for i in setup.participants(r):
            train(setup, r, i, models[i].parameters(), attracted(models[i], prototypes, lam))
            found.append(features_of(models[i], *setup.train[i]))
        for c in set().union(*found):  # means weighted by counts: the mean of all samples' features
            prototypes[c] = torch.cat([classes[c] for classes in found if c in classes]).mean(0)

    def nearest(model: nn.Module, x: Tensor) -> Tensor:
        z = model.body(x)
        classes = range(model.head(z).shape[1])
        scores = torch.stack([-(z - prototypes.get(c, 0 * z[0])).square().sum(1) for c in classes], dim=1)
        last = scores.amin(1) - 1e6  # a class without a prototype is never the nearest
        for c in classes:
            scores[:, c] = scores[:, c] if c in prototypes else last
        return scores if prototypes else model.head(z)

    return [Scorer(model, nearest) if inference == "prototype" else Scorer(model) for model in models]
