"""Adapters between bodies and heads of different feature widths."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedprism.errors import ConfigError, unknown


def windows(width: int, features: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The windows of adaptive pooling: membership, bool [width, features], and sizes, int64 [features]."""
    position, window = torch.arange(width, device=device).unsqueeze(1), torch.arange(features, device=device)
    start, end = window * width // features, ((window + 1) * width + features - 1) // features
    return (start <= position) & (position < end), end - start


class Pool(nn.Module):
    """`nn.AdaptiveAvgPool1d` over the features as a product: PyTorch's gradient is not deterministic on a GPU.

    >>> Pool(6, 3)(torch.tensor([[1.0, 3.0, 5.0, 5.0, 0.0, 1.0]]))
    tensor([[2.0000, 5.0000, 0.5000]])
    """

    member: Tensor  # [width, features]: 1 if a feature is in a window
    size: Tensor  # [features]: size of each window

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        # Computed from the two widths, so neither saved nor sent.
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
    """`nn.AdaptiveAvgPool2d` to `height` x `width` as a product: PyTorch's gradient is not deterministic on a GPU.

    `of` is the height and width of the input maps, if known; the matrix is then made once.

    >>> Pool2d(1, 2)(torch.arange(8.0).view(1, 1, 2, 4)).flatten()
    tensor([2.5000, 4.5000])
    """

    means: Tensor | None  # [input pixels, output pixels]

    def __init__(self, height: int, width: int, of: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.height = height
        self.width = width
        self.of = of
        empty = None if of is None else torch.empty(of[0] * of[1], height * width)
        self.register_buffer("means", empty, persistent=False)  # computed from the sizes: neither saved nor sent
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.means is not None and self.of is not None:
            with torch.no_grad():
                self.means.copy_(self._means(*self.of, self.means))

    def forward(self, x: Tensor) -> Tensor:
        means = self._means(x.shape[-2], x.shape[-1], x) if self.means is None else self.means
        return (x.flatten(-2) @ means).view(*x.shape[:-2], self.height, self.width)

    def extra_repr(self) -> str:
        return f"to {self.height} x {self.width}"

    def _means(self, height: int, width: int, like: Tensor) -> Tensor:
        """The matrix that maps a flattened map to the means of its windows."""
        rows, columns = _means(like, height, self.height), _means(like, width, self.width)
        return torch.kron(rows, columns)


def _means(like: Tensor, width: int, features: int) -> Tensor:
    """[width, features]: the matrix that maps a row to the means of its windows."""
    member, size = windows(width, features, like.device)
    return member.to(like.dtype) / size


ADAPTERS: dict[str, type[nn.Module]] = {"pool": Pool, "linear": nn.Linear}


def check(features: object, adapter: object) -> None:
    """Refuse an invalid number of features or an unknown adapter."""
    if features is not None and (not isinstance(features, int) or isinstance(features, bool) or features < 1):
        raise ConfigError(f"model.features is {features!r}; expected auto, own, or 1 or more.")
    if not isinstance(adapter, str) or adapter not in ADAPTERS:
        raise ConfigError(f"model.adapter: {unknown('adapter', str(adapter), ADAPTERS)}")


def adapt(kind: str, first: nn.Linear, features: int) -> nn.Module:
    """Make the adapter before a head's first layer, and change that layer to take `features` inputs."""
    block = ADAPTERS[kind](first.in_features, features)
    first.in_features = features
    first.weight = nn.Parameter(torch.empty(first.out_features, features, device=first.weight.device))
    return block
