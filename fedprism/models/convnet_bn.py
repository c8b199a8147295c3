"""Fed-CO2's small CNN for label skew on CIFAR: no padding, optional batch norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedprism.config import setting
from fedprism.models.base import MODELS, Block, Family
from fedprism.models.cnn4 import side_after
from fedprism.models.conv import Conv2d


@MODELS.register("convnet-bn")
@dataclass(frozen=True)
class ConvNetBN(Family):
    """Two 5x5 convolutions and three fully connected layers."""

    description: ClassVar[str] = "Fed-CO2's small CNN for label skew: 2 convolutions, 3 fully connected layers"
    smallest: ClassVar[int] = 16

    bn: bool = setting(True, "batch norm after every layer but the last; Fed-CO2's baselines except FedBN have none")

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        channels, height, width = shape
        blocks: list[Block] = [
            ("conv1", Conv2d(channels, 16, 5)),
            ("bn1", nn.BatchNorm2d(16)),
            ("pool1", nn.MaxPool2d(2)),
            ("relu1", nn.ReLU()),
            ("conv2", Conv2d(16, 32, 5)),
            ("bn2", nn.BatchNorm2d(32)),
            ("pool2", nn.MaxPool2d(2)),
            ("relu2", nn.ReLU()),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(32 * side_after(height) * side_after(width), 120)),
            ("bn3", nn.BatchNorm1d(120)),
            ("relu3", nn.ReLU()),
            ("fc2", nn.Linear(120, 84)),
            ("bn4", nn.BatchNorm1d(84)),
            ("relu4", nn.ReLU()),
            ("fc3", nn.Linear(84, classes)),
        ]
        return [block for block in blocks if self.bn or not block[0].startswith("bn")]
