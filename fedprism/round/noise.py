"""Uniform noise, keyed by what it is for. It is drawn for `BLOCK` steps at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism import keys
from fedprism.methods.base import Draw

BLOCK = 16  # steps whose noise is drawn together


class Noise:
    """The noise of one epoch of a pass: a function of name, shape and step, in whatever order it is asked for.

    `like` is a tensor beside which the noise is used.

    >>> like = torch.zeros(1)
    >>> torch.equal(Noise(like, 0, "example").at(3)("mask", 2), Noise(like, 0, "example").at(3)("mask", 2))
    True
    """

    def __init__(self, like: Tensor, *purpose: int | str) -> None:
        self.like, self.purpose = like, purpose
        self.blocks: dict[tuple[str, tuple[int, ...]], tuple[int, Tensor]] = {}

    def at(self, step: int) -> Draw:
        """What `client.draw` is in this step."""
        return lambda name, *shape: self._block(name, shape, step // BLOCK)[step % BLOCK]

    def fill(self, name: str, out: Tensor, step: int) -> None:
        """Write the noise of `len(out)` steps from `step` on, which lie in one block."""
        out.copy_(self._block(name, tuple(out.shape[1:]), step // BLOCK)[step % BLOCK :][: len(out)])

    def _block(self, name: str, shape: tuple[int, ...], block: int) -> Tensor:
        drawn = self.blocks.get((name, shape))
        if drawn is None or drawn[0] != block:
            generator = self._generator(name, shape, block)
            drawn = block, torch.rand(BLOCK, *shape, generator=generator, device=self.like.device)
            self.blocks[name, shape] = drawn
        return drawn[1]

    def _generator(self, name: str, shape: tuple[int, ...], block: int) -> torch.Generator:
        return keys.generator(*self.purpose, name, "x".join(map(str, shape)), block, like=self.like)


def keyed_draw(like: Tensor | None, *purpose: int | str) -> Draw:
    """Noise that depends on its purpose and name alone: for one batch by itself."""

    def draw(name: str, *shape: int) -> Tensor:
        generator = keys.generator(*purpose, name, like=like)
        return torch.rand(shape, generator=generator, device=generator.device)

    return draw
