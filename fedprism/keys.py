"""Keyed randomness: every draw comes from a generator that is seeded by what the draw is for.

So a result depends neither on the order in which clients finish, nor on the engine, nor on a resume, and nothing needs
to be stored to continue. The global generators are neither relied on nor left changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch


def key(*purpose: int | str) -> int:
    """A 63-bit number that is the same for the same purpose on every machine.

    >>> key("batches", 0, "plain") == key("batches", 0, "plain")
    True
    >>> key("ab", "c") == key("a", "bc")
    False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in purpose)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*purpose: int | str, device: str | torch.device = "cpu") -> torch.Generator:
    """A torch generator for one purpose."""
    return torch.Generator(device=device).manual_seed(key(*purpose))


def numpy_generator(*purpose: int | str) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    return np.random.default_rng(key(*purpose))


@contextmanager
def keyed(*purpose: int | str) -> Iterator[None]:
    """Seed torch's global CPU generator for code that takes no generator, and put it back afterwards."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(key(*purpose))
    try:
        yield
    finally:
        torch.set_rng_state(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """For what must be the same everywhere: the last bits of a sum depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def orthonormal(rows: int, columns: int, *purpose: int | str) -> torch.Tensor:
    """Random orthonormal columns in double precision, uniformly distributed.

    They are Q of a Gaussian matrix, with the signs that make R's diagonal positive.
    """
    noise = torch.randn(rows, columns, dtype=torch.float64, generator=generator(*purpose))
    with one_thread():
        q, r = torch.linalg.qr(noise)
    return torch.mul(q, r.diagonal().sign())


# The same, remembered for those who ask for it often; not to be changed in place.
orthogonal = lru_cache(maxsize=8)(orthonormal)
