"""From stored pixels to what a model sees."""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism.errors import ConfigError, unknown


def normalise(x: Tensor, how: str) -> Tensor:
    """Pixels `[batch, channels, height, width]` of 0 to 255 as floats: `half` to [-1, 1], `none` to [0, 1].

    >>> normalise(torch.tensor([0, 255], dtype=torch.uint8), "half").tolist()
    [-1.0, 1.0]
    """
    floats = x.to(torch.get_default_dtype())  # float32, unless a test asks for more
    if how == "half":
        return floats / 127.5 - 1
    if how == "none":
        return floats / 255
    raise ConfigError(unknown("value of data.normalize", how, ("half", "none")))
