"""What brings a body's features to another number of them, so that bodies of different widths meet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedprism.errors import ConfigError, unknown


class Pool(nn.Module):
    """`nn.AdaptiveAvgPool1d` over the feature vector, as a product: its own gradient is not repeatable on a GPU.

    >>> Pool(6, 3)(torch.tensor([[1.0, 3.0, 5.0, 5.0, 0.0, 1.0]]))
    tensor([[2.0000, 5.0000, 0.5000]])
    """

    member: Tensor  # [width, features]: 1 where a feature is in a window
    size: Tensor  # [features]: of each window

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        # Known from the two numbers, so neither saved nor sent.
        self.register_buffer("member", torch.empty(width, features), persistent=False)
        self.register_buffer("size", torch.empty(features), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        width, features = self.member.shape
        place, window = torch.arange(width).unsqueeze(1), torch.arange(features)
        start, end = window * width // features, ((window + 1) * width + features - 1) // features
        with torch.no_grad():
            self.member.copy_((start <= place) & (place < end))
            self.size.copy_(end - start)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.member / self.size

    def extra_repr(self) -> str:
        return "{} -> {}".format(*self.member.shape)


ADAPTERS: dict[str, type[nn.Module]] = {"pool": Pool, "linear": nn.Linear}


def check(features: object, adapter: object) -> None:
    """Refuse what is no number of features or no adapter."""
    if features is not None and (not isinstance(features, int) or isinstance(features, bool) or features < 1):
        raise ConfigError(f"model.features is {features!r}; expected auto, own, or 1 or more.")
    if not isinstance(adapter, str) or adapter not in ADAPTERS:
        raise ConfigError(f"model.adapter: {unknown('adapter', str(adapter), ADAPTERS)}")


def adapt(kind: str, first: nn.Linear, features: int) -> nn.Module:
    """What to put before a head's first layer, which from then on takes `features` inputs."""
    block = ADAPTERS[kind](first.in_features, features)
    first.in_features = features
    first.weight = nn.Parameter(torch.empty(first.out_features, features, device=first.weight.device))
    return block
