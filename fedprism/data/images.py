"""From stored pixels to model inputs: augmentation of training images, then normalisation. Both are batched tensor
operations on the device of the images."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from fedprism.config import DataConfig, Named, Normal, plain, setting, structure
from fedprism.errors import ConfigError, unknown
from fedprism.registry import Registry

Draw = Callable[..., Tensor]  # draw(name, *shape): uniform noise in [0, 1) for one purpose

NORMAL = {  # mean and standard deviation of red, green and blue, for pixels from 0 to 1
    "imagenet": Normal((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": Normal((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),  # Fed-CO2's
    "cifar100": Normal((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),  # Fed-CO2's
}


TEXTS = "data.augment changes images, but this dataset has texts; set data.augment to none."


def normalise(x: Tensor, how: str | Normal) -> Tensor:
    """Convert pixels `[batch, channels, height, width]` of 0 to 255 to floats: `half` to [-1, 1], `none` to [0, 1], or
    by the mean and standard deviation of each channel. Texts `[batch, length]` become int64, as embeddings require.

    >>> normalise(torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1), "half").flatten().tolist()
    [-1.0, 1.0]
    """
    if x.ndim == 2:
        return x.to(torch.int64)
    floats = x.to(torch.get_default_dtype())  # float32, unless a test asks for more
    if how == "half":
        return floats / 127.5 - 1
    if how == "none":
        return floats / 255
    normal = _normal(how, x.shape[1])
    mean, std = (_channels(values, floats) for values in (normal.mean, normal.std))
    return (floats / 255 - mean) / std


def _normal(how: str | Normal, channels: int) -> Normal:
    """Mean and standard deviation for images with this number of channels."""
    normal = how if isinstance(how, Normal) else NORMAL.get(how)
    if normal is None:
        raise ConfigError(unknown("value of data.normalize", str(how), ("half", "none", *NORMAL)))
    if len(normal.mean) != channels:
        raise ConfigError(
            f"data.normalize has {len(normal.mean)} channels, and these images have {channels}; take half or none, "
            f"or write {{mean: [...], std: [...]}} with {channels} numbers each."
        )
    return normal


def check_inputs(config: DataConfig, shape: tuple[int, ...]) -> None:
    """Refuse a normalisation or an augmentation that does not fit inputs of this shape."""
    made = changes(config.augment)
    if len(shape) == 2 and made:
        raise ConfigError(TEXTS)
    if len(shape) == 3 and config.normalize not in ("half", "none"):
        _normal(config.normalize, shape[0])


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    """One number per channel, filled on the device: no copy, so no synchronisation."""
    return torch.cat([torch.full((1, 1, 1), value, dtype=like.dtype, device=like.device) for value in values])


# --- augmentation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A random change of each image; the fields are its settings in `data.augment`."""

    def __call__(self, x: Tensor, draw: Draw) -> Tensor:
        """Change floats `[batch, channels, height, width]`, where 0 is black; `draw(name, *shape)` is uniform noise."""
        raise NotImplementedError


CHANGES: Registry[type[Change]] = Registry("augmentation")


@CHANGES.register("flip")
@dataclass(frozen=True)
class Flip(Change):
    """Flip horizontally."""

    p: float = setting(0.5, "probability", lambda v: 0 <= v <= 1, "0 to 1")

    def __call__(self, x: Tensor, draw: Draw) -> Tensor:
        flipped = draw("flip", len(x)).view(-1, 1, 1, 1) < self.p
        return torch.where(flipped, x.flip(3), x)


@CHANGES.register("rotate")
@dataclass(frozen=True)
class Rotate(Change):
    """Rotate about the centre; the corners become black."""

    degrees: float = setting(30.0, "maximum angle, in both directions", lambda v: 0 <= v <= 180, "0 to 180")
    interpolation: Literal["nearest", "bilinear"] = setting("nearest", "nearest is torchvision's default, so FedBN's")

    def __call__(self, x: Tensor, draw: Draw) -> Tensor:
        angle = (2 * draw("angle", len(x)).to(x.dtype) - 1) * (self.degrees * math.pi / 180)
        height, width = x.shape[2:]
        cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(angle)
        # The grid spans -1 to 1 along both axes, so the axes of a non-square image have different scales.
        across = torch.stack([cos, -sin * (height / width), none], dim=1)
        down = torch.stack([sin * (width / height), cos, none], dim=1)
        grid = affine_grid(torch.stack([across, down], dim=1), list(x.shape), align_corners=False)
        return grid_sample(x, grid, mode=self.interpolation, align_corners=False)


@CHANGES.register("crop")
@dataclass(frozen=True)
class Crop(Change):
    """Pad with black and crop a random window of the image's size."""

    padding: int = setting(4, "pixels of padding", lambda v: v >= 1, "1 or more")

    def __call__(self, x: Tensor, draw: Draw) -> Tensor:
        n, _, height, width = x.shape
        # The clamp guards against a product that rounds up to 2 * padding + 1.
        top, left = (draw("window", 2, n, 1) * (2 * self.padding + 1)).long().clamp(max=2 * self.padding)
        rows = top + torch.arange(height, device=x.device)
        columns = left + torch.arange(width, device=x.device)
        wide = pad(x, (self.padding,) * 4)
        image = torch.arange(n, device=x.device).view(n, 1, 1)
        # Index arrays around a slice move the channels to the end.
        return wide[image, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def changes(augment: str | tuple[Named, ...]) -> list[Change]:
    """The changes named in `data.augment`, in order, with checked settings."""
    if isinstance(augment, str):
        return []
    return [structure(plain(named.settings), CHANGES[named.name], f"data.augment: {named.name}") for named in augment]


def augmentation(augment: str | tuple[Named, ...]) -> Callable[[Tensor, Draw], Tensor]:
    """A function that augments a batch with the given noise."""
    made = changes(augment)

    def change(x: Tensor, draw: Draw) -> Tensor:
        if not made:
            return x
        if x.ndim != 4:
            raise ConfigError(TEXTS)
        x = x.to(torch.get_default_dtype())
        for i, each in enumerate(made):
            x = each(x, lambda name, *shape, i=i: draw(f"{i}/{name}", *shape))
        return x

    return change
