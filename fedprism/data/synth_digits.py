"""`synth-digits-like`: a stand-in for SynthDigits, rendered after its recipe.

Ganin and Lempitsky ("Unsupervised Domain Adaptation by Backpropagation", 2015) describe SynthDigits as about 500,000
images made from Windows fonts by varying the text (numbers of one, two and three digits), its position and
orientation, the colours of stroke and background, and the amount of blur. The label is the middle digit. The authors
chose the strengths by hand to look like house numbers. This generator varies the same properties with its own
strengths. It has one font, Pillow's own, so that the images need no file and are the same on every machine; weight,
width and slant vary instead, and some digits have an outline. Results on these images are not results on SynthDigits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample, pad

from fedprism import keys
from fedprism.config import DataConfig, setting
from fedprism.data.base import DATASETS, WITH_OPTIONS, Dataset, options, side
from fedprism.data.cache import ArrayWriter, converted
from fedprism.errors import DataError

NAME = "synth-digits-like"
VERSION = 1  # of the images; increase it if they change
OWN_SIDE = 32  # as the original
TEST_SHARE = 0.2  # 1860 of 9298
SMALLEST, LARGEST = 16, 256  # pixels per side
MAX_IMAGES = 10_000_000  # per split
BLOCK = 128  # images drawn at once; a constant, as the last bits may depend on the batch size

TILE, FONT = 128, 128  # pixels: size of a digit's tile and of the font
WEIGHTS = (-2, 0, 2, 4, 6, 9)  # pixels added to the font's stroke width
OUTLINE = 8  # pixels
HEIGHT, ADVANCE = 0.71, 0.58  # of a digit, as fractions of the tile
CONTRAST = 0.35  # minimum difference of brightness between pen and ground
NUMBERS = 28  # random numbers per image


@dataclass(frozen=True)
class Options:
    """The options after the name."""

    train: int = setting(7438, "training images", lambda v: 1 <= v <= MAX_IMAGES, f"1 to {MAX_IMAGES:,}")
    test: int = setting(1860, "test images", lambda v: 1 <= v <= MAX_IMAGES, f"1 to {MAX_IMAGES:,}")
    seed: int = setting(0, "seed of the images; independent of the run's seed")


WITH_OPTIONS.add(NAME)


@DATASETS.register(NAME)
def loader(config: DataConfig, seed: int) -> Dataset:
    """Digits rendered after the recipe of SynthDigits, not the original; no download; ?train=7438,test=1860."""
    given, size = options(config, Options), side(config, OWN_SIDE)
    _check_side(size)

    def convert(writer: ArrayWriter) -> None:
        inputs = writer.inputs((given.train + given.test, 3, size, size))
        writer.columns["labels"] = np.empty(len(inputs), dtype=np.int64)
        with writer.progress(_blocks(given.train) + _blocks(given.test)) as step:
            for place, images, labels in _pieces(size, given.seed, given.train, given.test):
                inputs[place], writer.columns["labels"][place] = images.numpy(), labels.numpy()
                step()

    settings = {"side": size, "seed": given.seed, "train": given.train, "test": given.test}
    arrays = converted(NAME, VERSION, [], settings, convert)
    return Dataset(
        name=NAME,
        images=arrays.inputs,
        labels=arrays.columns["labels"],
        domains=torch.zeros(len(arrays.inputs), dtype=torch.int64),
        domain_names=(NAME,),
        class_names=tuple("0123456789"),
        is_test=torch.arange(len(arrays.inputs)) >= given.train,
        test_share=TEST_SHARE,
        round_up=True,
    )


def synth_digits_like(side: int, seed: int, train: int, test: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images uint8 [n, 3, side, side], labels int64 [n] and is_test bool [n]; the training images come first.

    An image depends on the seed, the side, its split and its index there, not on the number of images.

    >>> images, labels, is_test = synth_digits_like(32, 0, train=3, test=2)
    >>> images.shape, is_test.tolist()
    (torch.Size([5, 3, 32, 32]), [False, False, False, True, True])
    """
    _check_side(side)
    if train < 0 or test < 0:
        raise DataError(f"{NAME}: {train} training and {test} test images; expected 0 or more.")
    images = torch.empty(train + test, 3, side, side, dtype=torch.uint8)
    labels = torch.empty(train + test, dtype=torch.int64)
    for place, drawn, digits in _pieces(side, seed, train, test):
        images[place], labels[place] = drawn, digits
    return images, labels, torch.arange(train + test) >= train


def _check_side(side: int) -> None:
    if not SMALLEST <= side <= LARGEST:
        raise DataError(f"{NAME}: data.image_size is {side}; expected {SMALLEST} to {LARGEST}, such as 28 or 32.")


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _pieces(side: int, seed: int, train: int, test: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks: their slice of the dataset, the images and the labels."""
    for split, start, n in (("train", 0, train), ("test", train, test)):
        for block in range(_blocks(n)):
            images, labels = _drawn(side, seed, split, block)
            here = min(BLOCK, n - block * BLOCK)
            first = start + block * BLOCK
            yield slice(first, first + here), images[:here], labels[:here]


# --- one block of images ---------------------------------------------------------------------------------------------


class _Numbers:
    """The random numbers [images, NUMBERS] of a block, used column by column."""

    def __init__(self, uniform: Tensor) -> None:
        self._uniform, self._next = uniform, 0

    def between(self, low: float, high: float, width: int = 1) -> Tensor:
        """[images, width]"""
        taken = self._uniform[:, self._next : self._next + width]
        self._next += width
        return low + (high - low) * taken

    def below(self, n: int) -> Tensor:
        """Whole numbers, [images]"""
        return self.between(0, n).flatten().long().clamp(max=n - 1)


def _drawn(side: int, seed: int, split: str, block: int) -> tuple[Tensor, Tensor]:
    """The images and labels of one block."""
    uniform = np.empty((BLOCK, NUMBERS), dtype=np.float32)
    grain = np.empty((BLOCK, 3, side, side), dtype=np.float32)
    for i in range(BLOCK):
        rng = keys.numpy_generator(seed, NAME, split, block * BLOCK + i)
        rng.random(dtype=np.float32, out=uniform[i])
        rng.standard_normal(dtype=np.float32, out=grain[i])
    with keys.one_thread():
        numbers = _Numbers(torch.from_numpy(uniform))
        text = _text(numbers)
        fill, outline = _written(text, side, numbers).unbind(2)
        images = _coloured(fill, outline, numbers)
        images = _blurred(images, numbers.between(0.05, 1.0).flatten() * (side / OWN_SIDE))
        images += numbers.between(0, 0.06).view(-1, 1, 1, 1) * torch.from_numpy(grain)
    return (images.clamp_(0, 1) * 255).round().to(torch.uint8), text.middle


class _Text(NamedTuple):
    """The digits of a number, [images] each; 10 means no digit."""

    left: Tensor
    middle: Tensor
    right: Tensor


def _text(numbers: _Numbers) -> _Text:
    """Numbers of one, two and three digits; with two, the other digit is left or right of the label."""
    middle, left, right, shape = (numbers.below(n) for n in (10, 10, 10, 4))
    none = torch.full_like(middle, 10)
    return _Text(torch.where((shape & 1) == 1, left, none), middle, torch.where((shape & 2) == 2, right, none))


def _written(text: _Text, side: int, numbers: _Numbers) -> Tensor:
    """[images, 1, 2, side, side] of 0 to 1: masks of the pen, and of pen and outline."""
    n = len(text.middle)
    angle = numbers.between(-22, 22).flatten() * (np.pi / 180)
    slant = numbers.between(-0.25, 0.25).flatten()
    height = numbers.between(0.5, 0.85).flatten() / HEIGHT  # of a tile, as fractions of the image
    width = height * numbers.between(0.75, 1.2).flatten()
    weight = numbers.below(len(WEIGHTS))
    wider = 2 * torch.tensor(WEIGHTS)[weight] / TILE
    apart = 2 * (ADVANCE * numbers.between(0.92, 1.12).flatten() + wider)  # a tile is 2 wide
    # The inverse transform, from image to tile coordinates: rotate back, remove the slant, scale.
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1).view(n, 2, 2)
    back = torch.zeros(n, 2, 2)
    back[:, 0, 0], back[:, 0, 1], back[:, 1, 1] = 1 / width, slant / width, 1 / height
    back = back @ turn
    shift = -(back @ numbers.between(-0.13, 0.13, 2).unsqueeze(2))
    ink = torch.zeros(n, 2, 2 * side, 2 * side)
    for digit, position in zip(text, (-1, 0, 1), strict=True):
        theta = torch.cat([back, shift], 2)
        theta[:, 0, 2] -= position * apart
        grid = affine_grid(theta.contiguous(), [n, 2, 2 * side, 2 * side], align_corners=False)
        tiles = _tiles()[digit, weight]
        ink = torch.maximum(ink, grid_sample(tiles, grid, mode="bilinear", align_corners=False))
    return avg_pool2d(ink, 2).unsqueeze(1)


def _coloured(fill: Tensor, outline: Tensor, numbers: _Numbers) -> Tensor:
    """[images, 3, side, side]: a shaded ground, an outline on some images, and the pen."""
    n, side = len(fill), fill.shape[-1]
    ground = numbers.between(0, 1, 3)
    pen = _standing_out(numbers.between(0, 1, 3), ground)
    rim, shade = numbers.between(0, 1, 3), numbers.between(-0.16, 0.16, 3)
    with_rim = numbers.between(0, 1) < 0.35
    angle = numbers.between(0, 2 * np.pi).view(n, 1, 1, 1)
    across = torch.linspace(-1, 1, side)
    ramp = angle.cos() * across + angle.sin() * across.unsqueeze(1)  # [images, 1, side, side]
    rim = torch.where(with_rim, rim, ground)
    images = (ground.view(n, 3, 1, 1) + shade.view(n, 3, 1, 1) * ramp).clamp(0, 1)
    images = images + (rim.view(n, 3, 1, 1) - images) * (outline * with_rim.view(n, 1, 1, 1))
    return images + (pen.view(n, 3, 1, 1) - images) * fill


def _standing_out(pen: Tensor, ground: Tensor) -> Tensor:
    """The colours [images, 3], mixed with as much white or black as the contrast requires."""
    own, other = (colour @ torch.tensor([[0.299], [0.587], [0.114]]) for colour in (pen, ground))
    brighter = ((own >= other) | (other < CONTRAST)) & (other <= 1 - CONTRAST)
    white = ((other + CONTRAST - own) / (1 - own).clamp(min=1e-6)).clamp(0, 1)
    black = ((own - other + CONTRAST) / own.clamp(min=1e-6)).clamp(0, 1)
    return torch.where(brighter, pen + (1 - pen) * white, pen * (1 - black))


def _blurred(images: Tensor, sigma: Tensor) -> Tensor:
    """A Gaussian blur with one standard deviation per image, in pixels."""
    reach = max(1, round(3 * float(sigma.max())))
    steps = torch.arange(-reach, reach + 1)
    bell = torch.exp(-((steps / sigma.unsqueeze(1)) ** 2) / 2)
    bell = (bell / bell.sum(1, keepdim=True)).view(len(images), 1, 1, 1, -1)
    for axis in (2, 3):
        size = images.shape[axis]
        margins = (reach, reach, 0, 0) if axis == 3 else (0, 0, reach, reach)
        wide = pad(images, margins, mode="replicate")
        images = torch.zeros_like(images)
        for i in range(2 * reach + 1):
            images += bell[..., i] * wide.narrow(axis, i, size)
    return images


@cache
def _tiles() -> Tensor:
    """[11, weights, 2, TILE / 2, TILE / 2]: each digit in each weight, without and with outline; the last is empty."""
    try:
        font = ImageFont.load_default(FONT)
    except (ImportError, TypeError) as error:  # built without FreeType, or older than 10.1
        raise DataError(
            f"{NAME} needs the scalable font of Pillow 10.1 or later, built with FreeType ({error}); "
            "`pip install --upgrade Pillow` brings it."
        ) from None
    tiles = np.zeros((11, len(WEIGHTS), 2, TILE // 2, TILE // 2), dtype=np.float32)
    for digit in range(10):
        for number, weight in enumerate(WEIGHTS):
            for layer, more in enumerate((0, OUTLINE)):
                tiles[digit, number, layer] = _tile(str(digit), font, weight + more)
    return torch.from_numpy(tiles)


def _tile(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, stroke: int) -> NDArray[np.float32]:
    """A digit with a stroke that is `stroke` pixels wider, centred on its tile."""
    tile = Image.new("L", (TILE, TILE))
    draw = ImageDraw.Draw(tile)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    place = ((TILE - left - right) / 2, (TILE - top - bottom) / 2)
    draw.text(place, text, fill=255, font=font, stroke_width=max(0, stroke))
    if stroke < 0:
        tile = tile.filter(ImageFilter.MinFilter(1 - 2 * stroke))
    return np.asarray(tile.reduce(2), dtype=np.float32) / np.float32(255)
