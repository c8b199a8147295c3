"""A multi-layer perceptron: the smallest network that every method can train."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import ClassVar

from torch import nn

from fedprism.config import setting
from fedprism.models.base import MODELS, Block, Family


@MODELS.register("mlp")
@dataclass(frozen=True)
class MLP(Family):
    """Flatten, then fully connected layers with ReLU between them."""

    description: ClassVar[str] = "fully connected layers with ReLU; no convolution, no batch norm"

    hidden: tuple[int, ...] = setting(
        (128, 64), "widths of the hidden layers", lambda v: all(w > 0 for w in v), "1 or more each"
    )

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        widths = [prod(shape), *self.hidden]
        blocks: list[Block] = [("flatten", nn.Flatten())]
        for layer, (before, after) in enumerate(pairwise(widths), start=1):
            blocks += [(f"fc{layer}", nn.Linear(before, after)), (f"relu{layer}", nn.ReLU())]
        return [*blocks, (f"fc{len(widths)}", nn.Linear(widths[-1], classes))]
