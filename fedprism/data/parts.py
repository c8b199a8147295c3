"""Parts of published datasets on their way into the cache: labels first, then pixels piece by piece."""

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
from fedprism.data.cache import Arrays, Store
from fedprism.data.pictures import DAMAGED, reason
from fedprism.errors import DataError

Pixels = NDArray[np.uint8]  # [n, height, width] grey, or [n, height, width, 3]

PIECE = 1000  # images in memory at a time


class Part(NamedTuple):
    """The training or the test images of a file."""

    columns: Mapping[str, NDArray[Any]]  # [n] each; `labels` at least
    is_test: bool
    pixels: Callable[[], Iterator[Pixels]]


def dataset_of(name: str, arrays: Arrays, domains: Sequence[str], classes: Sequence[str], test_share: float) -> Dataset:
    """What was converted, as a dataset: its columns are labels, domains and, where it has a test part, is_test."""
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


def fill(store: Store, parts: Sequence[Part], side: int, channels: int = 3) -> None:
    """All parts after one another, uint8 [n, channels, side, side], with their columns and `is_test`."""
    counts = [len(part.columns["labels"]) for part in parts]
    images = store.inputs((sum(counts), channels, side, side), np.uint8)
    at = 0
    with store.progress(len(images)) as step:
        for part, count in zip(parts, counts, strict=True):
            begun = at
            for piece in part.pixels():
                images[at : at + len(piece)] = _squares(piece, side, channels)
                at += len(piece)
                for _ in piece:
                    step()
            if at - begun != count:
                raise ValueError(f"{at - begun} images of a part that has {count} labels")
    for key in parts[0].columns:
        store.columns[key] = np.concatenate([part.columns[key] for part in parts])
    store.columns["is_test"] = np.repeat([part.is_test for part in parts], counts)


def cut(pixels: Pixels) -> Iterator[Pixels]:
    """What is in memory, or mapped, in pieces."""
    for start in range(0, len(pixels), PIECE):
        yield pixels[start : start + PIECE]


@contextmanager
def reading(path: Path, *more: type[Exception]) -> Iterator[None]:
    """Turns what a damaged or hostile file raises into an error that names it; `more` are a reader's own errors."""
    # numpy reads a .npy file's header with Python's tokenizer; a header or a size may ask for any amount of memory.
    expected: tuple[type[Exception], ...] = (*DAMAGED, zipfile.BadZipFile, tokenize.TokenError, MemoryError, *more)
    try:
        yield
    except expected as error:
        if isinstance(error, OSError) and error.errno is not None:  # not the file's content
            raise DataError(f"{path}: it cannot be read: {reason(error)}.") from error
        raise damaged(path, reason(error)) from error


def damaged(path: Path, why: str) -> DataError:
    """
    >>> str(damaged(Path("train.bin"), "it ends in the middle of an image"))
    'train.bin: it ends in the middle of an image. Remove it and get it again as it was published.'
    """
    return DataError(f"{path}: {why}. Remove it and get it again as it was published.")


def checked(path: Path, what: str, labels: NDArray[Any], low: int, high: int) -> NDArray[np.int64]:
    """Labels of a file, whole numbers from `low` to `high`, or refused."""
    if not labels.size:
        raise damaged(path, f"it holds no {what}")
    if labels.ndim != 1:
        raise damaged(path, f"its {what} have shape {labels.shape}; expected one number an image")
    kind = labels.dtype.kind
    if kind not in "iuf" or (kind == "f" and not (np.isfinite(labels).all() and (labels % 1 == 0).all())):
        raise damaged(path, f"its {what} are not whole numbers")
    least, most = int(labels.min()), int(labels.max())
    if least < low or most > high:
        raise damaged(path, f"its {what} lie between {least} and {most}; expected {low} to {high}")
    return labels.astype(np.int64)


def _squares(pixels: Pixels, side: int, channels: int) -> Pixels:
    """[n, channels, side, side]; resized by Pillow, bilinear."""
    if channels == 1 and pixels.ndim == 4:
        pixels = pixels[..., 0]  # stored as colours, but grey
    if pixels.shape[1:3] != (side, side):
        size = (side, side)
        pixels = np.stack([np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BILINEAR)) for p in pixels])
    if pixels.ndim == 3:
        return np.broadcast_to(pixels[:, None], (len(pixels), channels, side, side))
    return pixels.transpose(0, 3, 1, 2)
