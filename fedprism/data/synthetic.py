"""`synthetic`: a federation of any size, made on the spot, with the strength of each skew as a number.

`synthetic?clients=10000,samples=50,label_skew=0.5`. A class is a smooth random pattern and an image is its class's
pattern under noise, so that a linear model can learn it. With all skews at 0 clients differ by nothing but noise.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from fedprism import keys
from fedprism.config import DataConfig, positive, setting, share
from fedprism.data.base import DATASETS, WITH_OPTIONS, Dataset, chosen_domains, options, side
from fedprism.errors import DataError

Indices = NDArray[np.int64]

NAME = "synthetic"
OWN_SIDE = 16  # pixels
SMALLEST, LARGEST = 4, 512  # pixels a side
LEAST = 4  # images a client: one to test on, and some to train on
TEST_SHARE = 0.2
COARSE = 4  # a pattern is this many random numbers a side, made smooth
SPREAD = 45.0  # of pixels around 127.5, so that few leave 0 to 255
OF_A_CLIENT, OF_A_CLASS, OF_AN_IMAGE = 300, 600, 40  # bytes, roughly, beside the pixels: names, numbers, objects
PIECE = 1 << 20  # pixels made at once: the rest of the memory is the result's


@dataclass(frozen=True)
class Options:
    """What may follow the name."""

    clients: int = setting(10, "how many", positive, "1 or more")
    samples: int = setting(100, "images a client, of all parts together", lambda v: v >= LEAST, f"{LEAST} or more")
    classes: int = setting(10, "how many", lambda v: v >= 2, "2 or more")
    channels: int = setting(3, "of an image", positive, "1 or more")
    label_skew: float = setting(0.0, "share of a client's images that are of one class, its own", share, "0 to 1")
    feature_skew: float = setting(
        0.0, "how far a client's colours, contrast and background are its own", lambda v: 0 <= v <= 5, "0 to 5"
    )
    size_skew: float = setting(
        0.0, "standard deviation of the logarithm of clients' sizes", lambda v: 0 <= v <= 5, "0 to 5"
    )
    concept: float = setting(0.0, "share of clients at which labels stand for other patterns", share, "0 to 1")
    noise: float = setting(1.0, "strength of noise beside the patterns", lambda v: 0 <= v <= 100, "0 to 100")


WITH_OPTIONS.add(NAME)


@DATASETS.register(NAME)
def synthetic(config: DataConfig, seed: int) -> Dataset:
    """A federation of any size, made here, no download: synthetic?clients=20,samples=60,label_skew=0.5.

    label_skew: this share of a client's images is of its own class, the rest is spread evenly; 1 is one class a client.
    feature_skew: a client's colours are turned, its contrast is changed and a pattern is added, by this strength.
    size_skew: sizes are 4 and a log-normal number of this deviation, `samples` on average; 0 is equal sizes.
    concept: at this share of clients every label stands for the pattern of another class.

    >>> dataset = synthetic(DataConfig("synthetic?clients=3,samples=20"), seed=0)
    >>> dataset.domain_names, len(dataset), dataset.shape
    (('client-0001', 'client-0002', 'client-0003'), 60, (3, 16, 16))
    """
    given, size = options(config, Options), side(config, OWN_SIDE)
    if not SMALLEST <= size <= LARGEST:
        raise DataError(f"{NAME}: data.image_size is {size}; expected {SMALLEST} to {LARGEST}, such as 16.")
    _refuse_too_much(given, size)
    names = _names(given.clients)
    wanted = chosen_domains(config, names)
    number = {name: i for i, name in enumerate(names)}
    clients = np.array([number[name] for name in wanted])
    sizes = _sizes(given, seed)[clients]
    domains = np.repeat(np.arange(len(clients)), sizes)
    labels = torch.from_numpy(_labels(given, seed, clients, sizes, domains))
    images = torch.empty(len(labels), given.channels, size, size, dtype=torch.uint8)
    patterns = torch.stack([_pattern(given.channels, size, seed, "class", k) for k in range(given.classes)])
    shifts = _shifts(given, seed)
    with keys.one_thread():
        for client, end, n in zip(clients.tolist(), np.cumsum(sizes).tolist(), sizes.tolist(), strict=True):
            shown = (labels[end - n : end] + shifts[client]) % given.classes
            _fill(images[end - n : end], shown, patterns, given, seed, client)
    return Dataset(
        name=NAME,
        images=images,
        labels=labels,
        domains=torch.from_numpy(domains),
        domain_names=wanted,
        class_names=tuple(str(k) for k in range(given.classes)),
        is_test=None,
        test_share=TEST_SHARE,
        sites=True,
    )


def _refuse_too_much(given: Options, size: int) -> None:
    """Before anything of that size is made: a machine without enough memory ends the process without a word."""
    images, pixels = given.clients * given.samples, given.channels * size**2
    needed = given.clients * OF_A_CLIENT + images * (OF_AN_IMAGE + pixels) + given.classes * (OF_A_CLASS + 8 * pixels)
    needed += 12 * given.channels**2 if given.feature_skew else 0  # a client's colours are turned by such a matrix
    there = _memory()
    if there is not None and needed > there:
        raise DataError(
            f"{NAME}: {given.clients:,} clients x {given.samples:,} images of {given.channels:,} x {size} x {size}, "
            f"and {given.classes:,} patterns, need {needed / 2**30:,.1f} GiB, and this machine has "
            f"{there / 2**30:,.1f}; ask for fewer or smaller ones."
        )


def _memory() -> int | None:
    """Bytes of this machine, where the system says so."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def _names(clients: int) -> tuple[str, ...]:
    """client-0001 and so on, in an order that sorting keeps."""
    digits = max(4, len(str(clients)))
    return tuple(f"client-{i + 1:0{digits}d}" for i in range(clients))


# --- who has what ----------------------------------------------------------------------------------------------------


def _sizes(given: Options, seed: int) -> Indices:
    """Images of every client: LEAST, and what is above it on average dealt in log-normal shares, to the last image."""
    normal = keys.numpy_generator(seed, NAME, "sizes").standard_normal(given.clients)
    weights = np.exp(given.size_skew * (normal - normal.max()))
    exact = weights / weights.sum() * (given.samples - LEAST) * given.clients
    sizes: Indices = np.floor(exact).astype(np.int64)
    short = (given.samples - LEAST) * given.clients - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:short]] += 1
    return sizes + LEAST


def _labels(given: Options, seed: int, clients: Indices, sizes: Indices, domains: Indices) -> Indices:
    """First a client's own class, then all classes in turn from a start of its own."""
    first = keys.numpy_generator(seed, NAME, "labels").integers(given.classes, size=given.clients)[clients]
    own = np.floor(given.label_skew * sizes + 0.5).astype(np.int64)
    nth = np.arange(len(domains)) - np.repeat(np.cumsum(sizes) - sizes + own, sizes)  # below 0: of its own class
    return np.where(nth < 0, (clients % given.classes)[domains], (first[domains] + nth) % given.classes)


def _shifts(given: Options, seed: int) -> list[int]:
    """By how much each client's labels are shifted against the patterns."""
    rng = keys.numpy_generator(seed, NAME, "concept")
    order, shifts = rng.permutation(given.clients), rng.integers(1, given.classes, size=given.clients)
    shifts[order[int(given.concept * given.clients + 0.5) :]] = 0
    return [int(shift) for shift in shifts]


# --- images ----------------------------------------------------------------------------------------------------------


def _pattern(channels: int, size: int, *purpose: int | str) -> Tensor:
    """[channels, size, size], smooth, of mean 0 and deviation 1; the same picture at every size."""
    rng = keys.generator(NAME, *purpose)
    coarse = torch.randn(1, channels, COARSE, COARSE, generator=rng)
    smooth = interpolate(coarse, (size, size), mode="bicubic", align_corners=True)[0]
    return (smooth - smooth.mean()) / smooth.std()


def _fill(images: Tensor, shown: Tensor, patterns: Tensor, given: Options, seed: int, client: int) -> None:
    """One client's images, a piece at a time; `shown` are the numbers of their patterns."""
    channels, size = patterns.shape[1:3]
    rng = keys.generator(NAME, seed, "noise", client)
    strength = given.feature_skew
    # All images of a federation are scaled alike, so that few pixels leave 0 to 255 whatever is asked for.
    scale = SPREAD / (1 + given.noise**2 + strength**2) ** 0.5
    if strength:
        own = keys.generator(NAME, seed, "client", client)
        mix = torch.randn(channels, channels, generator=own)
        turn = torch.linalg.matrix_exp(strength / 2 * (mix - mix.T))  # a rotation of the colours
        contrast = float(torch.exp(0.3 * strength * torch.randn((), generator=own)))
        ground = strength * _pattern(channels, size, seed, "ground", client)
    step = max(1, PIECE // (channels * size**2))
    for start in range(0, len(images), step):
        piece = patterns[shown[start : start + step]]
        noise = torch.randn(piece.shape, generator=rng)
        if strength:
            piece = contrast * torch.einsum("ij,njhw->nihw", turn, piece) + ground
            noise *= contrast
        pixels = piece.add_(noise, alpha=given.noise).mul_(scale).add_(127.5).round_().clamp_(0, 255)
        images[start : start + step] = pixels.to(torch.uint8)
