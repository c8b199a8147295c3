"""A small LeNet with batch norm: it trains on small images in seconds on a CPU, with norm layers in body and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedprism.models.base import MODELS, Block, Family
from fedprism.models.conv import Conv2d


@MODELS.register("lenet-bn")
@dataclass(frozen=True)
class LeNetBN(Family):
    """Two 5x5 convolutions and two fully connected layers, each but the last with batch norm."""

    description: ClassVar[str] = "a small LeNet with batch norm: 2 convolutions, 2 fully connected layers"
    smallest: ClassVar[int] = 4  # two poolings

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        channels, height, width = shape
        return [
            ("conv1", Conv2d(channels, 16, 5, padding=2)),
            ("bn1", nn.BatchNorm2d(16)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", Conv2d(16, 32, 5, padding=2)),
            ("bn2", nn.BatchNorm2d(32)),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(32 * (height // 4) * (width // 4), 64)),
            ("bn3", nn.BatchNorm1d(64)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(64, classes)),
        ]
