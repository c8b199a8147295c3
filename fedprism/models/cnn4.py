"""The papers' 4-layer CNN without batch norm (FedAvg's, also FedCP's and FediOS's Table 9): no padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedprism.models.base import MODELS, Block, Family
from fedprism.models.conv import Conv2d


def side_after(pixels: int) -> int:
    """Pixels per side after two unpadded 5x5 convolutions with pooling."""
    return ((pixels - 4) // 2 - 4) // 2


@MODELS.register("cnn4")
@dataclass(frozen=True)
class CNN4(Family):
    """Two 5x5 convolutions and two fully connected layers."""

    description: ClassVar[str] = "the papers' 4-layer CNN: 2 convolutions, 2 fully connected layers, no batch norm"
    smallest: ClassVar[int] = 16

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        channels, height, width = shape
        return [
            ("conv1", Conv2d(channels, 32, 5)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", Conv2d(32, 64, 5)),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(64 * side_after(height) * side_after(width), 512)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(512, classes)),
        ]
