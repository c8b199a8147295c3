"""ResNets in torchvision's layout (He et al. 2016), untrained: 18 and 34 of basic blocks, 50 of bottlenecks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedprism.config import positive, setting
from fedprism.models.base import MODELS, Block, Family


class Conv(nn.Conv2d):
    """A convolution without bias, with He initialisation by fan-out."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The shortcut of a block: the identity, or a 1x1 convolution if the shape changes."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(Conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    widens: ClassVar[int] = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = Conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut; the stride is in the 3x3, the last has four times more outputs."""

    widens: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = Conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = Conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = Conv(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = _shortcut(inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        inner = self.bn3(self.conv3(torch.relu(self.bn2(self.conv2(inner)))))
        return torch.relu(inner + self.downsample(x))


@dataclass(frozen=True)
class ResNet(Family):
    """A stem, four stages of blocks, and one fully connected layer on the mean over pixels."""

    block: ClassVar[type[BasicBlock] | type[Bottleneck]] = BasicBlock
    depths: ClassVar[tuple[int, int, int, int]]  # blocks of each stage

    width: int = setting(
        64, "channels inside the blocks of the first stage; each stage doubles them", positive, "1 or more"
    )
    stem: Literal["imagenet", "small"] = setting(
        "imagenet", "imagenet: 7x7 convolution and pooling, each with stride 2; small: 3x3 convolution with stride 1"
    )

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        widths = [self.width * 2**stage for stage in range(4)]
        outputs = [self.width, *(self.block.widens * width for width in widths)]  # of the stem and of each stage
        large = self.stem == "imagenet"
        stem: list[Block] = [
            ("conv1", Conv(shape[0], self.width, 7, 2) if large else Conv(shape[0], self.width, 3)),
            ("bn1", nn.BatchNorm2d(self.width)),
            ("relu", nn.ReLU()),
        ]
        pool: list[Block] = [("maxpool", nn.MaxPool2d(3, 2, 1))] if large else []
        stages: list[Block] = [
            (f"layer{stage + 1}", self._stage(stage, before, width))
            for stage, (before, width) in enumerate(zip(outputs[:-1], widths, strict=True))
        ]
        end: list[Block] = [
            ("avgpool", nn.AdaptiveAvgPool2d(1)),
            ("flatten", nn.Flatten()),
            ("fc", nn.Linear(outputs[-1], classes)),
        ]
        return [*stem, *pool, *stages, *end]

    def _stage(self, stage: int, inputs: int, width: int) -> nn.Sequential:
        """Blocks of one width; the first of a later stage halves the image."""
        first = self.block(inputs, width, 1 if stage == 0 else 2)
        rest = (self.block(self.block.widens * width, width, 1) for _ in range(1, self.depths[stage]))
        return nn.Sequential(first, *rest)


@MODELS.register("resnet18")
@dataclass(frozen=True)
class ResNet18(ResNet):
    """Two basic blocks per stage."""

    description: ClassVar[str] = (
        "ResNet-18 as in torchvision (7x7 stem), untrained; `width` channels in its first stage"
    )
    depths: ClassVar[tuple[int, int, int, int]] = (2, 2, 2, 2)


@MODELS.register("resnet34")
@dataclass(frozen=True)
class ResNet34(ResNet):
    """Three, four, six and three basic blocks."""

    description: ClassVar[str] = (
        "ResNet-34 as in torchvision (7x7 stem), untrained; `width` channels in its first stage"
    )
    depths: ClassVar[tuple[int, int, int, int]] = (3, 4, 6, 3)


@MODELS.register("resnet50")
@dataclass(frozen=True)
class ResNet50(ResNet):
    """Three, four, six and three bottlenecks."""

    description: ClassVar[str] = (
        "ResNet-50 as in torchvision (7x7 stem), untrained; its blocks output four times `width`"
    )
    block: ClassVar[type[BasicBlock] | type[Bottleneck]] = Bottleneck
    depths: ClassVar[tuple[int, int, int, int]] = (3, 4, 6, 3)
