"""Readers of the published digit files: IDX (MNIST), images with a label list (MNIST-M), .mat (SVHN, SynthDigits) and
LIBSVM's text (USPS). Each returns a `RawSplit`; the error for a damaged file names it."""

from __future__ import annotations

import bz2
import gzip
import io
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, cast

import numpy as np

from fedprism.data.matfile import variables
from fedprism.data.parts import PIECE, Pixels, RawSplit, checked, cut, damaged, reading
from fedprism.data.pictures import read_picture
from fedprism.files import DEFLATE, open_regular, read_most, read_text

UBYTE = 8  # IDX's code for unsigned bytes
MAX_IMAGES, MAX_SIDE = 10_000_000, 256  # images per file and pixels per side, checked before memory is allocated


def _checked_count(path: Path, count: int) -> int:
    if count > MAX_IMAGES:
        raise damaged(path, f"it says that it has {count} labels; at most {MAX_IMAGES:,} are read")
    return count


def _check_side(path: Path, height: int, width: int) -> None:
    if not (1 <= height <= MAX_SIDE and 1 <= width <= MAX_SIDE):
        raise damaged(path, f"its images are {height} x {width} pixels; 1 to {MAX_SIDE} per side are read")


# --- IDX -------------------------------------------------------------------------------------------------------------


def idx(images: Path, labels: Path, is_test: bool) -> RawSplit:
    """Images and labels in MNIST's format, with or without gzip; labels 0 to 9."""
    with reading(labels), _idx(labels, 1) as (file, shape):
        digits = np.frombuffer(file.read(_checked_count(labels, shape[0]) + 1), dtype=np.uint8)
        if len(digits) != shape[0]:
            more = "more" if len(digits) > shape[0] else str(len(digits))
            raise damaged(labels, f"it holds {more} labels and says that it has {shape[0]}")
    with reading(images), _idx(images, 3) as (_, shape):
        if shape[0] != len(digits):
            raise damaged(images, f"it has {shape[0]} images, but {labels.name} has {len(digits)} labels")
        _check_side(images, *shape[1:])
        most = images.stat().st_size * (DEFLATE if images.suffix == ".gz" else 1)
        if math.prod(shape) > most:  # the disk space for all of them is reserved before they are read
            raise damaged(images, f"it says that it has {shape[0]} images, more than a file of its size can hold")
    return RawSplit({"labels": checked(labels, "labels", digits, 0, 9)}, is_test, partial(_idx_pixels, images))


def _idx_pixels(path: Path) -> Iterator[Pixels]:
    with reading(path), _idx(path, 3) as (file, (count, height, width)):
        for start in range(0, count, PIECE):
            n = min(PIECE, count - start)
            content = file.read(n * height * width)
            if len(content) < n * height * width:
                raise damaged(path, f"it ends before its {count} images do")
            yield np.frombuffer(content, dtype=np.uint8).reshape(n, height, width)
        if file.read(1):
            raise damaged(path, f"it goes on after its {count} images")


@contextmanager
def _idx(path: Path, dimensions: int) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """An IDX file of unsigned bytes, open after its header, and the shape in the header."""
    with open_regular(path) as stored, cast(IO[bytes], gzip.open(stored) if path.suffix == ".gz" else stored) as file:
        head = file.read(4 + 4 * dimensions)
        if head[:4] != bytes([0, 0, UBYTE, dimensions]) or len(head) < 4 + 4 * dimensions:
            raise damaged(path, f"it is no IDX file of unsigned bytes with {dimensions} dimension(s)")
        yield file, struct.unpack(f">{dimensions}I", head[4:])


# --- .mat ------------------------------------------------------------------------------------------------------------


def mat(path: Path, low: int, high: int, is_test: bool) -> RawSplit:
    """`X` [height, width, 3, n] and `y` [n, 1] in SVHN's format; labels `low` to `high`, where 10 is the digit 0."""
    shapes, labels = {}, np.empty(0)
    with reading(path):
        for variable in variables(path):
            if variable.name in shapes:
                raise damaged(path, f"it holds {variable.name!r} twice")
            shapes[variable.name] = variable.shape
            if variable.name == "y":
                labels = variable.values(_checked_count(path, math.prod(variable.shape)))
                variable.end()
            if variable.name == "X" and variable.dtype != np.uint8:
                raise damaged(path, f"its X holds {variable.dtype}; expected uint8")
    x, y = shapes.get("X", ()), shapes.get("y", ())
    if len(x) != 4 or x[2] != 3 or min(x) < 1 or sorted(y) != sorted((1, x[3])):
        raise damaged(path, f"it holds {shapes or 'no numbers'}; expected X [height, width, 3, n] and y [n, 1]")
    _check_side(path, *x[:2])
    return RawSplit({"labels": checked(path, "labels", labels, low, high) % 10}, is_test, partial(_mat_pixels, path))


def _mat_pixels(path: Path) -> Iterator[Pixels]:
    """Column-major values with the image index last: image by image, colour by colour, column by column."""
    with reading(path):
        for variable in variables(path):
            if variable.name == "X":
                height, width, colours, count = variable.shape
                for start in range(0, count, PIECE):
                    n = min(PIECE, count - start)
                    size = n * colours * width * height
                    values = variable.values(size).astype(np.uint8, casting="safe", copy=False)
                    yield values.reshape(n, colours, width, height).transpose(0, 3, 2, 1)
                variable.end()


# --- LIBSVM's text ---------------------------------------------------------------------------------------------------

USPS_SIDE = 16
MAX_TEXT, MAX_LINES = 128 << 20, 100_000  # published: 20 MB in 7,291 lines


def libsvm(path: Path, is_test: bool) -> RawSplit:
    """USPS: one image per line, `label 1:value 2:value ...`; labels 1 to 10 are the digits 0 to 9, values -1 to 1."""
    from sklearn.datasets import load_svmlight_file

    with reading(path), open_regular(path) as stored:
        with cast(IO[bytes], bz2.open(stored) if path.suffix == ".bz2" else stored) as file:
            content = read_most(file, MAX_TEXT)
        if content.count(b"\n") > MAX_LINES:
            raise damaged(path, f"it has more than {MAX_LINES:,} lines, the most that are read")
        values, labels = load_svmlight_file(io.BytesIO(content), n_features=USPS_SIDE**2, zero_based=False)
    values = values.toarray()
    if len(values) and not np.abs(values).max() <= 1:
        raise damaged(path, f"its values lie between {values.min():g} and {values.max():g}; expected -1 to 1")
    digits = checked(path, "labels", labels, 1, 10) - 1
    pixels = ((values + 1) * 127.5).round().astype(np.uint8).reshape(-1, USPS_SIDE, USPS_SIDE)
    return RawSplit({"labels": digits}, is_test, lambda: cut(pixels))


# --- images with a list of labels ------------------------------------------------------------------------------------


def listed(labels: Path, folder: Path, side: int, is_test: bool) -> RawSplit:
    """MNIST-M: `labels` has lines such as `00000001.png 7`; the images are in `folder` and resized to `side`."""
    names, digits = [], []
    with reading(labels):
        for number, line in enumerate(read_text(labels).splitlines(), start=1):
            words = line.split()
            if len(words) != 2 or not words[1].isascii() or not words[1].isdigit() or Path(words[0]).name != words[0]:
                raise damaged(labels, f"line {number} is {line[:80]!r}; expected a file's name and a digit")
            names.append(words[0])
            digits.append(int(words[1]))
    values = checked(labels, "labels", np.array(digits, dtype=np.int64), 0, 9)
    return RawSplit({"labels": values}, is_test, partial(_pictures, folder, names, side))


def _pictures(folder: Path, names: list[str], side: int) -> Iterator[Pixels]:
    for start in range(0, len(names), PIECE):
        piece = []
        for name in names[start : start + PIECE]:
            with reading(folder / name):
                piece.append(read_picture(folder / name, side).transpose(1, 2, 0))
        yield np.stack(piece)
