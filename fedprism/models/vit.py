"""Vision transformers in torchvision's structure (Dosovitskiy et al. 2021), untrained, for images of any size.

Attention is written out, so that results are reproducible bit for bit on a GPU and double precision works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedprism.config import positive, setting
from fedprism.errors import ConfigError
from fedprism.models.base import MODELS, Block, Family

EPS = 1e-6  # of the layer norms


class Patches(nn.Conv2d):
    """Images `[batch, channels, height, width]` to one vector per patch, `[batch, patches, outputs]`."""

    def __init__(self, channels: int, outputs: int, patch: int) -> None:
        super().__init__(channels, outputs, patch, stride=patch)
        self.patch = patch

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        right, below = -x.shape[3] % self.patch, -x.shape[2] % self.patch  # zeros up to a whole patch
        return super().forward(pad(x, (0, right, 0, below))).flatten(2).transpose(1, 2)


class Tokens(nn.Module):
    """Prepend the class token and add the position embeddings."""

    def __init__(self, width: int, patches: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.places = nn.Parameter(torch.empty(1, 1 + patches, width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.token)
        nn.init.normal_(self.places, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places


class Into(nn.Linear):
    """The projection to queries, keys and values."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)


class Out(nn.Linear):
    """The output projection: PyTorch's initialisation, but zero bias."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.bias)


class Inner(nn.Linear):
    """A layer of a block's MLP."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)
        nn.init.normal_(self.bias, std=1e-6)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into = Into(width, 3 * width)
        self.out = Out(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.into(x).unflatten(2, (3, self.heads, -1))  # [batch, tokens, 3, heads, width of a head]
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        weights = torch.softmax(q @ k.transpose(2, 3) * q.shape[3] ** -0.5, 3)  # [batch, heads, tokens, tokens]
        return self.out((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class EncoderBlock(nn.Module):
    """Attention and an MLP, each after a layer norm and with a shortcut."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = nn.Sequential(Inner(width, inner), nn.GELU(), Inner(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class First(nn.Module):
    """Select the class token: `[batch, tokens, width]` to `[batch, width]`."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


@dataclass(frozen=True)
class ViT(Family):
    """Patches as tokens, blocks of attention, and one fully connected layer on the class token."""

    patch: int = setting(16, "side of a patch, in pixels", positive, "1 or more")
    width: int = setting(768, "features of a token", positive, "1 or more")
    depth: int = setting(12, "blocks", lambda v: 1 <= v <= 1000, "1 to 1000")
    heads: int = setting(12, "attention heads of a block; must divide width", positive, "1 or more")
    mlp: int = setting(4, "inner width of a block's MLP, as a multiple of width", positive, "1 or more")

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        if self.width % self.heads:
            raise ConfigError(
                f"model.heads is {self.heads} and model.width is {self.width}, but heads share the width evenly; "
                "set heads to a number that divides width."
            )
        channels, height, width = shape
        patches = -(-height // self.patch) * -(-width // self.patch)
        encoder = (EncoderBlock(self.width, self.heads, self.mlp * self.width) for _ in range(self.depth))
        return [
            ("patches", Patches(channels, self.width, self.patch)),
            ("tokens", Tokens(self.width, patches)),
            ("encoder", nn.Sequential(*encoder)),
            ("first", First()),
            ("norm", nn.LayerNorm(self.width, eps=EPS)),
            ("fc", nn.Linear(self.width, classes)),
        ]


@MODELS.register("vit-b-16")
@dataclass(frozen=True)
class ViTB16(ViT):
    """The base size with patches of 16 x 16."""

    description: ClassVar[str] = "ViT-B/16 as in torchvision, untrained: patches of 16 x 16, 12 blocks; 86 M parameters"


@MODELS.register("vit-b-32")
@dataclass(frozen=True)
class ViTB32(ViT):
    """The base size with patches of 32 x 32."""

    description: ClassVar[str] = "ViT-B/32 as in torchvision, untrained: patches of 32 x 32, 12 blocks; 88 M parameters"

    patch: int = setting(32, "side of a patch, in pixels", positive, "1 or more")


@MODELS.register("vit-tiny")
@dataclass(frozen=True)
class ViTTiny(ViT):
    """A size for small images and a CPU."""

    description: ClassVar[str] = "a vision transformer for small images: patches of 8 x 8, 2 blocks; 0.1 M parameters"

    patch: int = setting(8, "side of a patch, in pixels", positive, "1 or more")
    width: int = setting(64, "features of a token", positive, "1 or more")
    depth: int = setting(2, "blocks", lambda v: 1 <= v <= 1000, "1 to 1000")
    heads: int = setting(4, "attention heads of a block; must divide width", positive, "1 or more")
