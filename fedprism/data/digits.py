"""`digits-skew`: real handwritten digits in five styles, made from scikit-learn's own dataset, without a download.

Each image belongs to exactly one domain. All styles are bright on dark, so that clients can learn from each other. They
differ in what batch norm sees (contrast, background, colour, sharpness), so that one model for all is a compromise. The
position and size of each digit vary, so that a hundred images are too few to learn from alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, conv2d, grid_sample, pad

from fedprism import keys
from fedprism.config import DataConfig
from fedprism.data.base import DATASETS, Dataset, side
from fedprism.errors import DataError

SIDE, SMALLEST, LARGEST = 16, 8, 512  # pixels per side
TEST_SHARE = 0.6  # few training images, as at a small site, and enough test images
MIN_TRAIN = 20

Rng = torch.Generator


@DATASETS.register("digits-skew")
def digits_skew(config: DataConfig, seed: int) -> Dataset:
    """1,797 handwritten digits in five styles: plain, tinted, textured, blurred, rotated; no download."""
    size = side(config, SIDE)
    if not SMALLEST <= size <= LARGEST:
        raise DataError(f"digits-skew: data.image_size is {size}; expected {SMALLEST} to {LARGEST}, such as 16 or 32.")
    from sklearn.datasets import load_digits  # slow to import

    raw = load_digits()
    labels = raw.target.astype(np.int64)
    domains = _assign_domains(labels, len(STYLES), seed)
    digits = torch.from_numpy(raw.images.astype(np.float32) / 16).unsqueeze(1)  # [n, 1, 8, 8], 0 to 1
    images = torch.empty(len(labels), 3, size, size, dtype=torch.uint8)
    with keys.one_thread():  # the last bits of a convolution could change a pixel
        for number, (name, style) in enumerate(STYLES.items()):
            chosen = torch.from_numpy(np.flatnonzero(domains == number))
            styled = style(digits[chosen], size, keys.generator(seed, "digits-skew", "style", name))
            images[chosen] = (styled.clamp(0, 1) * 255).round().to(torch.uint8)
    return Dataset(
        name="digits-skew",
        images=images,
        labels=torch.from_numpy(labels),
        domains=torch.from_numpy(domains),
        domain_names=tuple(STYLES),
        class_names=tuple(str(digit) for digit in raw.target_names),
        is_test=None,
        test_share=TEST_SHARE,
        min_train=MIN_TRAIN,
    )


def _assign_domains(labels: np.ndarray, count: int, seed: int) -> np.ndarray:
    """A domain for each image, balanced within each class and overall."""
    rng = keys.numpy_generator(seed, "digits-skew", "domains")
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    domains = np.empty(len(labels), dtype=np.int64)
    domains[by_class] = np.arange(len(labels)) % count  # in turn, class after class
    return domains


# --- styles: digits [n, 1, 8, 8] of 0 to 1 -> images [n, 3, size, size] of about 0 to 1 ------------------------------


def plain(digits: Tensor, size: int, rng: Rng) -> Tensor:
    """White on black."""
    return _written(digits, size, rng).expand(-1, 3, -1, -1)


def tinted(digits: Tensor, size: int, rng: Rng) -> Tensor:
    """Low contrast, on a teal ground; brightness and contrast vary a little."""
    n = len(digits)
    ground = torch.tensor([0.12, 0.40, 0.45]).view(1, 3, 1, 1) + _uniform(rng, n, -0.05, 0.05)
    pen = torch.tensor([0.28, 0.22, 0.12]).view(1, 3, 1, 1) * _uniform(rng, n, 0.6, 1.0)
    return ground + pen * _written(digits, size, rng)


def textured(digits: Tensor, size: int, rng: Rng) -> Tensor:
    """On a woven ground: two crossing waves with a random direction, pitch and phase per image."""
    n = len(digits)
    y, x = torch.meshgrid(torch.arange(size) / size, torch.arange(size) / size, indexing="ij")
    angle, phase = _uniform(rng, n, 0, np.pi), _uniform(rng, n, 0, 2 * np.pi, 2)
    along, across = x * angle.cos() + y * angle.sin(), y * angle.cos() - x * angle.sin()
    pitch = 2 * np.pi * _uniform(rng, n, 2.5, 4.0)
    weave = 0.5 + 0.25 * ((pitch * along + phase[:, :1]).sin() + (pitch * across + phase[:, 1:]).sin())
    ground = torch.tensor([0.70, 0.42, 0.60]).view(1, 3, 1, 1) * weave
    ink = _written(digits, size, rng)
    return ground * (1 - ink) + ink


def blurred(digits: Tensor, size: int, rng: Rng) -> Tensor:
    """Out of focus and grainy."""
    soft = _blur(_written(digits, size, rng), size * 0.07) * 0.6
    return soft + 0.09 * torch.randn(len(digits), 3, size, size, generator=rng)


def rotated(digits: Tensor, size: int, rng: Rng) -> Tensor:
    """Rotated by a random angle per image, in orange on dark blue."""
    ink = _written(digits, size, rng, turn=30)
    pen = torch.tensor([1.0, 0.42, 0.18]).view(1, 3, 1, 1) + _uniform(rng, len(digits), -0.1, 0.1, 3)
    ground = torch.tensor([0.0, 0.02, 0.1]).view(1, 3, 1, 1)
    return ground + (pen - ground) * ink


STYLES: dict[str, Callable[[Tensor, int, Rng], Tensor]] = {
    "plain": plain,
    "tinted": tinted,
    "textured": textured,
    "blurred": blurred,
    "rotated": rotated,
}


def _written(digits: Tensor, size: int, rng: Rng, turn: float = 0) -> Tensor:
    """[n, 1, 8, 8] -> [n, 1, size, size]: random size and position per digit, rotated by up to `turn` degrees."""
    n = len(digits)
    angle = _uniform(rng, n, -turn, turn).flatten() * (np.pi / 180)
    shrink = _uniform(rng, n, 1.0, 1.2).flatten()
    place = torch.zeros(n, 2, 3)
    place[:, 0, 0] = place[:, 1, 1] = angle.cos() * shrink
    place[:, 1, 0] = angle.sin() * shrink
    place[:, 0, 1] = -place[:, 1, 0]
    place[:, :, 2] = _uniform(rng, n, -0.13, 0.13, 2).flatten(1)
    grid = affine_grid(place, [n, 1, size, size], align_corners=False)
    return grid_sample(digits, grid, mode="bicubic", align_corners=False).clamp(0, 1)


def _uniform(rng: Rng, n: int, low: float, high: float, channels: int = 1) -> Tensor:
    """[n, channels, 1, 1]: one number per image and channel."""
    return low + (high - low) * torch.rand(n, channels, 1, 1, generator=rng)


def _blur(images: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur of [n, 1, height, width]."""
    reach = max(1, round(3 * sigma))
    bell = torch.exp(-((torch.arange(-reach, reach + 1) / sigma) ** 2) / 2)
    bell = bell / bell.sum()
    padded = pad(images, (reach, reach, reach, reach))
    return conv2d(conv2d(padded, bell.view(1, 1, 1, -1)), bell.view(1, 1, -1, 1))
