"""`synthetic`: a generated federation of any size, with adjustable strength of each skew.

`synthetic?clients=10000,samples=50,label_skew=0.5`. A class is a smooth random pattern and an image is its class's
pattern with noise, so that a linear model can learn it. With all skews at 0, clients differ only by noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from fedprism import keys, limits
from fedprism.config import DataConfig, positive, setting, share
from fedprism.data.base import DATASETS, WITH_OPTIONS, Dataset, chosen_domains, options, side
from fedprism.errors import DataError

Indices = NDArray[np.int64]

NAME = "synthetic"
OWN_SIDE = 16  # pixels
SMALLEST, LARGEST = 4, 512  # pixels per side
MIN_SAMPLES = 4  # images per client: one for the test and some for training
TEST_SHARE = 0.2
COARSE = 4  # a pattern is interpolated from 4 x 4 random numbers
SPREAD = 45.0  # standard deviation of pixels around 127.5, so that few leave 0 to 255
CLIENT_BYTES, CLASS_BYTES, IMAGE_BYTES = 300, 600, 40  # roughly, without the pixels: names, numbers, objects
PIECE = 1 << 20  # pixels made at once, so that most of the memory is the result's


@dataclass(frozen=True)
class Options:
    """The options after the name."""

    clients: int = setting(10, "number of clients", positive, "1 or more")
    samples: int = setting(
        100,
        "mean number of images per client, all splits together",
        lambda v: v >= MIN_SAMPLES,
        f"{MIN_SAMPLES} or more",
    )
    classes: int = setting(10, "number of classes", lambda v: v >= 2, "2 or more")
    channels: int = setting(3, "channels of an image", positive, "1 or more")
    label_skew: float = setting(0.0, "share of a client's images that are of its own class", share, "0 to 1")
    feature_skew: float = setting(
        0.0, "how much colours, contrast and background differ between clients", lambda v: 0 <= v <= 5, "0 to 5"
    )
    size_skew: float = setting(
        0.0, "standard deviation of the logarithm of clients' sizes", lambda v: 0 <= v <= 5, "0 to 5"
    )
    concept: float = setting(0.0, "share of clients whose labels are permuted", share, "0 to 1")
    noise: float = setting(1.0, "strength of the noise relative to the patterns", lambda v: 0 <= v <= 100, "0 to 100")


WITH_OPTIONS.add(NAME)


@DATASETS.register(NAME)
def synthetic(config: DataConfig, seed: int) -> Dataset:
    """A generated federation of any size, no download: synthetic?clients=20,samples=60,label_skew=0.5.

    label_skew: share of a client's images of its own class; the rest is spread evenly. 1: one class per client.
    feature_skew: strength of a client's rotation of colours, change of contrast and added pattern.
    size_skew: a size is 4 plus a log-normal number with this deviation, `samples` on average; 0: equal sizes.
    concept: share of clients at which each label belongs to the pattern of another class.

    >>> dataset = synthetic(DataConfig("synthetic?clients=3,samples=20"), seed=0)
    >>> dataset.domain_names, len(dataset), dataset.shape
    (('client-0001', 'client-0002', 'client-0003'), 60, (3, 16, 16))
    """
    given, size = options(config, Options), side(config, OWN_SIDE)
    if not SMALLEST <= size <= LARGEST:
        raise DataError(f"{NAME}: data.image_size is {size}; expected {SMALLEST} to {LARGEST}, such as 16.")
    _check_memory(given, size)
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


def _check_memory(given: Options, size: int) -> None:
    """Refuse a dataset that does not fit into memory: the system would kill the process without a message."""
    images, pixels = given.clients * given.samples, given.channels * size**2
    needed = given.clients * CLIENT_BYTES + images * (IMAGE_BYTES + pixels) + given.classes * (CLASS_BYTES + 8 * pixels)
    needed += 12 * given.channels**2 if given.feature_skew else 0  # the matrix that rotates a client's colours
    available = limits.machine_memory()
    if available is not None and needed > available:
        raise DataError(
            f"{NAME}: {given.clients:,} clients x {given.samples:,} images of {given.channels:,} x {size} x {size}, "
            f"and {given.classes:,} patterns, need {needed / 2**30:,.1f} GiB, and this machine has "
            f"{available / 2**30:,.1f}; choose fewer or smaller ones."
        )


def _names(clients: int) -> tuple[str, ...]:
    """client-0001 and so on, padded so that they sort in order."""
    digits = max(4, len(str(clients)))
    return tuple(f"client-{i + 1:0{digits}d}" for i in range(clients))


# --- sizes and labels ------------------------------------------------------------------------------------------------


def _sizes(given: Options, seed: int) -> Indices:
    """Images per client: MIN_SAMPLES each, and the rest of the total in log-normal shares."""
    normal = keys.numpy_generator(seed, NAME, "sizes").standard_normal(given.clients)
    weights = np.exp(given.size_skew * (normal - normal.max()))
    exact = weights / weights.sum() * (given.samples - MIN_SAMPLES) * given.clients
    sizes: Indices = np.floor(exact).astype(np.int64)
    short = (given.samples - MIN_SAMPLES) * given.clients - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:short]] += 1
    return sizes + MIN_SAMPLES


def _labels(given: Options, seed: int, clients: Indices, sizes: Indices, domains: Indices) -> Indices:
    """First a client's own class, then all classes in turn from a random start."""
    first = keys.numpy_generator(seed, NAME, "labels").integers(given.classes, size=given.clients)[clients]
    own = np.floor(given.label_skew * sizes + 0.5).astype(np.int64)
    nth = np.arange(len(domains)) - np.repeat(np.cumsum(sizes) - sizes + own, sizes)  # below 0: its own class
    return np.where(nth < 0, (clients % given.classes)[domains], (first[domains] + nth) % given.classes)


def _shifts(given: Options, seed: int) -> list[int]:
    """The shift of each client's labels against the patterns."""
    rng = keys.numpy_generator(seed, NAME, "concept")
    order, shifts = rng.permutation(given.clients), rng.integers(1, given.classes, size=given.clients)
    shifts[order[int(given.concept * given.clients + 0.5) :]] = 0
    return [int(shift) for shift in shifts]


# --- images ----------------------------------------------------------------------------------------------------------


def _pattern(channels: int, size: int, *purpose: int | str) -> Tensor:
    """[channels, size, size], smooth, with mean 0 and standard deviation 1; the same picture at every size."""
    rng = keys.generator(NAME, *purpose)
    coarse = torch.randn(1, channels, COARSE, COARSE, generator=rng)
    smooth = interpolate(coarse, (size, size), mode="bicubic", align_corners=True)[0]
    return (smooth - smooth.mean()) / smooth.std()


def _fill(images: Tensor, shown: Tensor, patterns: Tensor, given: Options, seed: int, client: int) -> None:
    """Fill one client's images piece by piece; `shown` are the indices of their patterns."""
    channels, size = patterns.shape[1:3]
    rng = keys.generator(NAME, seed, "noise", client)
    strength = given.feature_skew
    # All images of a federation have the same scale, so that few pixels leave 0 to 255 with any options.
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
