"""FedBN's digit network (also FediOS's Table 8, Fed-CO2's and FedPick's): six layers with batch norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedprism.models.base import MODELS, Block, Family
from fedprism.models.conv import Conv2d


@MODELS.register("digit6")
@dataclass(frozen=True)
class Digit6(Family):
    """Three 5x5 convolutions, the last without pooling, and three fully connected layers."""

    description: ClassVar[str] = "FedBN's digit network: 3 convolutions, 3 fully connected layers, batch norm"
    smallest: ClassVar[int] = 4  # two poolings

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        channels, height, width = shape
        return [
            ("conv1", Conv2d(channels, 64, 5, padding=2)),
            ("bn1", nn.BatchNorm2d(64)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", Conv2d(64, 64, 5, padding=2)),
            ("bn2", nn.BatchNorm2d(64)),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("conv3", Conv2d(64, 128, 5, padding=2)),
            ("bn3", nn.BatchNorm2d(128)),
            ("relu3", nn.ReLU()),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(128 * (height // 4) * (width // 4), 2048)),
            ("bn4", nn.BatchNorm1d(2048)),
            ("relu4", nn.ReLU()),
            ("fc2", nn.Linear(2048, 512)),
            ("bn5", nn.BatchNorm1d(512)),
            ("relu5", nn.ReLU()),
            ("fc3", nn.Linear(512, classes)),
        ]
