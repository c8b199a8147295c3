"""Splits of published datasets, converted for the cache: labels first, then pixels piece by piece."""

from __future__ import annotations

import tokenize
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedprism.data.base import Dataset
from fedprism.data.cache import Arrays, ArrayWriter
from fedprism.data.pictures import DAMAGED, reason
from fedprism.errors import DataError

Pixels = NDArray[np.uint8]  # [n, height, width] grey, or [n, height, width, 3]

PIECE = 1000  # images in memory at a time


class RawSplit(NamedTuple):
    """The training or the test images of a file."""

    columns: Mapping[str, NDArray[Any]]  # [n] each; `labels` at least
    is_test: bool
    pixels: Callable[[], Iterator[Pixels]]


def dataset_of(name: str, arrays: Arrays, domains: Sequence[str], classes: Sequence[str], test_share: float) -> Dataset:
    """A dataset from cached arrays with the columns labels, domains and, if there is a test split, is_test."""
    return Dataset(
        name=name,
        images=arrays.inputs,
        labels=arrays.columns["labels"],
        domains=arrays.columns["domains"],
        domain_names=tuple(domains),
        class_names=tuple(classes),
        is_test=arrays.columns.get("is_test"),
        test_share=test_share,
        round_up=True,
    )


def fill(writer: ArrayWriter, splits: Sequence[RawSplit], side: int, channels: int = 3) -> None:
    """Write all splits, concatenated, as uint8 [n, channels, side, side], with their columns and `is_test`."""
    counts = [len(split.columns["labels"]) for split in splits]
    images = writer.inputs((sum(counts), channels, side, side), np.uint8)
    at = 0
    with writer.progress(len(images)) as step:
        for split, count in zip(splits, counts, strict=True):
            begun = at
            for piece in split.pixels():
                images[at : at + len(piece)] = _squares(piece, side, channels)
                at += len(piece)
                for _ in piece:
                    step()
            if at - begun != count:
                raise ValueError(f"{at - begun} images of a split that has {count} labels")
    for key in splits[0].columns:
        writer.columns[key] = np.concatenate([split.columns[key] for split in splits])
    writer.columns["is_test"] = np.repeat([split.is_test for split in splits], counts)


def cut(pixels: Pixels) -> Iterator[Pixels]:
    """Yield an array in pieces."""
    for start in range(0, len(pixels), PIECE):
        yield pixels[start : start + PIECE]


@contextmanager
def reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Turn the exceptions of a damaged or hostile file into an error that names it; `more` lists further ones."""
    # numpy reads a .npy header with Python's tokenizer; a header may claim any size.
    expected: tuple[type[Exception], ...] = (*DAMAGED, zipfile.BadZipFile, tokenize.TokenError, MemoryError, *more)
    try:
        yield
    except expected as error:
        if isinstance(error, OSError) and error.errno is not None:  # not the file's content
            raise DataError(f"{path}: it cannot be read: {reason(error)}.") from error
        raise damaged(path, reason(error)) from error


def damaged(path: Path, why: str) -> DataError:
    """The error for a damaged file.

    >>> str(damaged(Path("train.bin"), "it ends in the middle of an image"))
    'train.bin: it ends in the middle of an image. Remove it and get it again as it was published.'
    """
    return DataError(f"{path}: {why}. Remove it and get it again as it was published.")


def checked(path: Path, what: str, labels: NDArray[Any], low: int, high: int) -> NDArray[np.int64]:
    """Check that the labels of a file are whole numbers from `low` to `high`, and return them."""
    if not labels.size:
        raise damaged(path, f"it holds no {what}")
    if labels.ndim != 1:
        raise damaged(path, f"its {what} have shape {labels.shape}; expected one number per image")
    kind = labels.dtype.kind
    if kind not in "iuf" or (kind == "f" and not (np.isfinite(labels).all() and (labels % 1 == 0).all())):
        raise damaged(path, f"its {what} are not whole numbers")
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < low or largest > high:
        raise damaged(path, f"its {what} lie between {smallest} and {largest}; expected {low} to {high}")
    return labels.astype(np.int64)


def _squares(pixels: Pixels, side: int, channels: int) -> Pixels:
    """[n, channels, side, side], resized by Pillow (bilinear)."""
    if channels == 1 and pixels.ndim == 4:
        pixels = pixels[..., 0]  # a grey image stored in three channels
    if pixels.shape[1:3] != (side, side):
        size = (side, side)
        pixels = np.stack([np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BILINEAR)) for p in pixels])
    if pixels.ndim == 3:
        return np.broadcast_to(pixels[:, None], (len(pixels), channels, side, side))
    return pixels.transpose(0, 3, 1, 2)
