"""FedBN's AlexNet for Office-Caltech-10 and DomainNet: batch norm after every layer but the last, no dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedprism.models.adapter import Pool2d
from fedprism.models.base import MODELS, Block, Family
from fedprism.models.conv import Conv2d


def side_after(pixels: int) -> int:
    """Pixels per side after the first convolution's stride of 4 and three poolings of 3x3.

    >>> side_after(256), side_after(63)
    (7, 1)
    """
    side = (pixels - 7) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


@MODELS.register("alexnet-bn")
@dataclass(frozen=True)
class AlexNetBN(Family):
    """Five convolutions, a mean over 6 x 6 windows of the map (7 x 7 at 256 pixels), three fully connected layers."""

    description: ClassVar[str] = "FedBN's AlexNet with batch norm: 5 convolutions, 3 fully connected layers"
    smallest: ClassVar[int] = 63  # a stride of 4 and three poolings of 3x3

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        sides = side_after(shape[1]), side_after(shape[2])
        return [
            ("conv1", Conv2d(shape[0], 64, 11, stride=4, padding=2)),
            ("bn1", nn.BatchNorm2d(64)),
            ("pool1", nn.MaxPool2d(3, 2)),
            ("relu1", nn.ReLU()),
            ("conv2", Conv2d(64, 192, 5, padding=2)),
            ("bn2", nn.BatchNorm2d(192)),
            ("pool2", nn.MaxPool2d(3, 2)),
            ("relu2", nn.ReLU()),
            ("conv3", Conv2d(192, 384, 3, padding=1)),
            ("bn3", nn.BatchNorm2d(384)),
            ("relu3", nn.ReLU()),
            ("conv4", Conv2d(384, 256, 3, padding=1)),
            ("bn4", nn.BatchNorm2d(256)),
            ("relu4", nn.ReLU()),
            ("conv5", Conv2d(256, 256, 3, padding=1)),
            ("bn5", nn.BatchNorm2d(256)),
            ("pool5", nn.MaxPool2d(3, 2)),
            ("relu5", nn.ReLU()),
            ("avgpool", Pool2d(6, 6, of=sides)),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(256 * 6 * 6, 4096)),
            ("bn6", nn.BatchNorm1d(4096)),
            ("relu6", nn.ReLU()),
            ("fc2", nn.Linear(4096, 4096)),
            ("bn7", nn.BatchNorm1d(4096)),
            ("relu7", nn.ReLU()),
            ("fc3", nn.Linear(4096, classes)),
        ]
