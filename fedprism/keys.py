"""Keyed randomness: every random draw uses a generator that is seeded by the purpose of the draw.

A result therefore does not depend on the order in which clients finish, on the engine or on a resume, and checkpoints
store no generator state. The state of the global generators is neither used nor changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch


def key(*purpose: int | str) -> int:
    """A 63-bit seed that is the same for the same purpose on every machine.

    >>> key("batches", 0, "plain") == key("batches", 0, "plain")
    True
    >>> key("ab", "c") == key("a", "bc")
    False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in purpose)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*purpose: int | str, like: torch.Tensor | None = None) -> torch.Generator:
    """A torch generator for one purpose, on the device of `like` (default: the CPU)."""
    return torch.Generator(device="cpu" if like is None else like.device).manual_seed(key(*purpose))


def numpy_generator(*purpose: int | str) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    return np.random.default_rng(key(*purpose))


@contextmanager
def keyed(*purpose: int | str) -> Iterator[None]:
    """Seed torch's global CPU generator for code that takes no generator, and restore its state afterwards."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(key(*purpose))
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread, for bitwise equal results: the last bits of a sum depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def orthonormal(rows: int, columns: int, *purpose: int | str) -> torch.Tensor:
    """Random orthonormal columns in double precision, uniformly distributed.

    They are Q of the QR decomposition of a Gaussian matrix, with signs that make R's diagonal positive.
    """
    noise = torch.randn(rows, columns, dtype=torch.float64, generator=generator(*purpose))
    with one_thread():
        q, r = torch.linalg.qr(noise)
    return torch.mul(q, r.diagonal().sign())


# The same, cached for repeated calls. Do not change the result in place.
orthogonal = lru_cache(maxsize=8)(orthonormal)
