"""Scores of a model on one part of a client's data: counts that any protocol can be computed from afterwards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import Config
from fedprism.engines.events import Score
from fedprism.engines.passes import SWEEP_BATCH, inputs, keyed_draw
from fedprism.federation import Split
from fedprism.methods.base import Draw


@torch.no_grad()
def score(
    predict: Callable[[nn.Module, Tensor, Draw], Tensor],
    model: nn.Module,
    split: Split,
    config: Config,
    classes: int,
    purpose: tuple[int | str, ...],
) -> Score:
    """Right, predicted and actual counts a class, and the summed loss; fetched from the device once."""
    model.eval()
    counts = torch.zeros(3, classes, dtype=torch.int64, device=split.y.device)
    loss = torch.zeros((), dtype=torch.float64, device=split.y.device)
    for step, rows in enumerate(torch.split(torch.arange(len(split), device=split.y.device), SWEEP_BATCH)):
        y = split.y[rows]
        scores = predict(model, inputs(split.x[rows], config), keyed_draw(split.y.device, *purpose, step))
        guess = scores.argmax(dim=1)
        for row, labels in enumerate((y[guess == y], guess, y)):
            counts[row] += torch.bincount(labels, minlength=classes)
        loss += cross_entropy(scores, y, reduction="sum")
    right, predicted, actual = (tuple(row) for row in counts.tolist())
    return Score(sum(right), len(split), float(loss), right, predicted, actual)
