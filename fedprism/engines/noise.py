"""Uniform noise by purpose: drawn for some steps at once, so that a captured step finds it at a fixed address."""

from __future__ import annotations

import torch
from torch import Tensor

from fedprism import keys
from fedprism.methods.base import Draw

BLOCK = 16  # steps whose noise is drawn at once


class Noise:
    """The noise of one epoch of a pass: by name, shape and step, whoever asks and in which order.

    >>> noise = Noise(torch.device("cpu"), 0, "example")
    >>> torch.equal(noise.at(3)("mask", 2), Noise(torch.device("cpu"), 0, "example").at(3)("mask", 2))
    True
    """

    def __init__(self, device: torch.device, *purpose: int | str) -> None:
        self.device, self.purpose = device, purpose
        self.blocks: dict[tuple[str, tuple[int, ...]], tuple[int, Tensor]] = {}

    def at(self, step: int) -> Draw:
        """What `me.draw` is in this step."""
        return lambda name, *shape: self._block(name, shape, step // BLOCK)[step % BLOCK]

    def fill(self, name: str, out: Tensor, step: int) -> None:
        """Write the noise of the steps from `step` on into `out`, `[steps, *shape]`, which lie in one block."""
        place, shape = step % BLOCK, tuple(out.shape[1:])
        if len(out) == BLOCK:
            out.uniform_(generator=self._generator(name, shape, step // BLOCK))
        else:
            out.copy_(self._block(name, shape, step // BLOCK)[place : place + len(out)])

    def _block(self, name: str, shape: tuple[int, ...], block: int) -> Tensor:
        held = self.blocks.get((name, shape))
        if held is None or held[0] != block:
            values = torch.rand(BLOCK, *shape, generator=self._generator(name, shape, block), device=self.device)
            held = self.blocks[name, shape] = (block, values)
        return held[1]

    def _generator(self, name: str, shape: tuple[int, ...], block: int) -> torch.Generator:
        return keys.generator(*self.purpose, name, "x".join(map(str, shape)), block, device=self.device)


def keyed_draw(device: torch.device, *purpose: int | str) -> Draw:
    """Uniform noise that depends on its purpose and name alone: for one step by itself."""

    def draw(name: str, *shape: int) -> Tensor:
        return torch.rand(shape, generator=keys.generator(*purpose, name, device=device), device=device)

    return draw
