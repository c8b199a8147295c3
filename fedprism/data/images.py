"""From stored pixels to what a model sees."""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism.errors import ConfigError, unknown


def normalise(x: Tensor, how: str) -> Tensor:
    """Pixels `[batch, channels, height, width]` of 0 to 255 as float32: `half` to [-1, 1], `none` to [0, 1].

    >>> normalise(torch.tensor([0, 255], dtype=torch.uint8), "half").tolist()
    [-1.0, 1.0]
    """
    if how == "half":
        return x.to(torch.float32) / 127.5 - 1
    if how == "none":
        return x.to(torch.float32) / 255
    raise ConfigError(unknown("value of data.normalize", how, ("half", "none")))
