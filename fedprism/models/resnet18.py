"""ResNet-18 in torchvision's layout (He et al. 2016), untrained; its 7x7 stem stays on small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedprism.config import positive, setting
from fedprism.models.base import MODELS, Block, Family


class Conv(nn.Conv2d):
    """A convolution without bias whose first weights are He's, by fan-out."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv(inputs, outputs, 3, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = Conv(outputs, outputs, 3)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(Conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.downsample(x))


@MODELS.register("resnet18")
@dataclass(frozen=True)
class ResNet18(Family):
    """A stem, four stages of two basic blocks, and one fully connected layer on the mean over pixels."""

    description: ClassVar[str] = (
        "ResNet-18 as in torchvision (7x7 stem), untrained; `width` channels in its first stage"
    )

    width: int = setting(64, "channels of the first stage; the last has eight times as many", positive, "1 or more")

    def blocks(self, classes: int, shape: tuple[int, int, int]) -> list[Block]:
        w = self.width
        return [
            ("conv1", Conv(shape[0], w, 7, 2)),
            ("bn1", nn.BatchNorm2d(w)),
            ("relu", nn.ReLU()),
            ("maxpool", nn.MaxPool2d(3, 2, 1)),
            ("layer1", nn.Sequential(BasicBlock(w, w, 1), BasicBlock(w, w, 1))),
            ("layer2", nn.Sequential(BasicBlock(w, 2 * w, 2), BasicBlock(2 * w, 2 * w, 1))),
            ("layer3", nn.Sequential(BasicBlock(2 * w, 4 * w, 2), BasicBlock(4 * w, 4 * w, 1))),
            ("layer4", nn.Sequential(BasicBlock(4 * w, 8 * w, 2), BasicBlock(8 * w, 8 * w, 1))),
            ("avgpool", nn.AdaptiveAvgPool2d(1)),
            ("flatten", nn.Flatten()),
            ("fc", nn.Linear(8 * w, classes)),
        ]
