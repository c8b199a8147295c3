"""What brings a body's features to another number of them, so that bodies of different widths meet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedprism.errors import ConfigError, unknown


def windows(width: int, features: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """bool [width, features]: is a place in a window of adaptive pooling? And int64 [features]: how many are."""
    place, window = torch.arange(width, device=device).unsqueeze(1), torch.arange(features, device=device)
    start, end = window * width // features, ((window + 1) * width + features - 1) // features
    return (start <= place) & (place < end), end - start


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
        member, size = windows(*self.member.shape)
        with torch.no_grad():
            self.member.copy_(member)
            self.size.copy_(size)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.member / self.size

    def extra_repr(self) -> str:
        return "{} -> {}".format(*self.member.shape)


class Pool2d(nn.Module):
    """`nn.AdaptiveAvgPool2d` to `height` x `width`, as two products: its own gradient is not repeatable on a GPU.

    >>> Pool2d(1, 2)(torch.arange(8.0).view(1, 1, 2, 4)).flatten()
    tensor([2.5000, 4.5000])
    """

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height = height
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = _means(x, x.shape[-2], self.height), _means(x, x.shape[-1], self.width)
        return rows.T @ x @ columns

    def extra_repr(self) -> str:
        return f"to {self.height} x {self.width}"


def _means(like: Tensor, width: int, features: int) -> Tensor:
    """[width, features]: times this, a row becomes the means of its windows."""
    member, size = windows(width, features, like.device)
    return member.to(like.dtype) / size


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
