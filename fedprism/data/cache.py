"""Convert data once to memory-mapped arrays, so that images are read only when they are used.

`arrays/<name>-<key>` in the cache contains `inputs.npy`, `columns.npz` and `facts.json`. The key is a hash of the name,
the version of the conversion, its settings and the size and time of every source file, so a changed file is converted
again. Conversion is atomic; if two processes need the same arrays, one converts and the other waits.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tokenize
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from fedprism import atomic
from fedprism.data.pictures import DAMAGED
from fedprism.data.places import CACHE, cache_home
from fedprism.data.progress import progress
from fedprism.errors import DataError

FORMAT = 1  # of the folder; part of the key
INPUTS, COLUMNS, FACTS = "inputs.npy", "columns.npz", "facts.json"
ZEROS = bytes(1 << 20)


@dataclass(frozen=True)
class Arrays:
    """The result of a conversion."""

    inputs: Tensor  # [n, ...], mapped copy-on-write: writes stay in this process
    columns: dict[str, Tensor]  # int64 or bool [n]
    facts: dict[str, Any]  # JSON


class ArrayWriter:
    """The target of a conversion: call `inputs` once, then fill `columns` and `facts`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.columns: dict[str, NDArray[Any]] = {}
        self.facts: dict[str, Any] = {}
        self._folder = folder
        self._name = name
        self._inputs: np.memmap[Any, Any] | None = None

    def inputs(self, shape: Sequence[int], dtype: DTypeLike = np.uint8) -> np.memmap[Any, Any]:
        """A memory-mapped file of zeros [n, ...] to write to. Its disk space is reserved at once."""
        if self._inputs is not None or not shape or min(shape) < 1:
            raise ValueError(f"inputs of shape {tuple(shape)}: call it once, with sizes of 1 or more.")
        path = self._folder / INPUTS
        with _writing():
            with path.open("wb") as file:
                header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
                np.lib.format.write_array_header_1_0(file, {**header, "shape": tuple(int(size) for size in shape)})
                file.flush()
                _reserve(file.fileno(), file.tell(), math.prod(map(int, shape)) * np.dtype(dtype).itemsize)
            self._inputs = np.load(path, mmap_mode="r+", allow_pickle=False)
        return self._inputs

    def progress(self, total: int) -> AbstractContextManager[Callable[[], None]]:
        """Yields a function to call after each of `total` steps of the conversion."""
        return progress(f"converting {self._name}", total)

    def close(self) -> None:
        """Write everything to the disk."""
        if self._inputs is None:
            raise ValueError(f"the conversion of {self._name!r} has made no inputs.")
        n = len(self._inputs)
        columns = {}
        for key, values in self.columns.items():
            columns[key] = np.ascontiguousarray(values, dtype=bool if values.dtype == bool else np.int64)
            if values.shape != (n,):
                raise ValueError(f"column {key!r} of {self._name!r} has shape {values.shape}; expected ({n},).")
        with _writing():
            self._inputs.flush()
            np.savez(self._folder / COLUMNS, **columns)  # type: ignore[arg-type]
            summary = {
                "facts": self.facts,
                "bytes": (self._folder / INPUTS).stat().st_size,
                "columns": _digest((self._folder / COLUMNS).read_bytes()),
            }
            (self._folder / FACTS).write_text(json.dumps(summary, indent=1), encoding="utf-8")
            for path in (self._folder / INPUTS, self._folder / COLUMNS, self._folder / FACTS, self._folder):
                atomic.fsync(path)


def converted(
    name: str,
    version: int,
    sources: Sequence[Path],
    settings: Mapping[str, Any],
    convert: Callable[[ArrayWriter], None],
) -> Arrays:
    """Return the arrays that `convert` makes of `sources`, from the cache if they are there.

    A larger `version` of the conversion invalidates older caches. `settings` are all else that the arrays depend on,
    such as the image size. A source may be a folder: its modification time counts. For example:

        def convert(writer: ArrayWriter) -> None:
            images = writer.inputs((n, 3, side, side))
            for i, path in enumerate(paths):
                images[i] = read_picture(path, side)
            writer.columns["labels"] = labels

        arrays = converted("own", 1, paths, {"side": side}, convert)
    """
    arrays = cache_home() / "arrays"
    stem = f"{name}-{_key(name, version, sources, settings)}"
    target = arrays / stem
    found = _read(target)
    if found is not None:
        return found
    with _writing():
        arrays.mkdir(parents=True, exist_ok=True)
        lock = FileLock(arrays / f".{stem}.lock")
        lock.acquire()
    try:
        return _read(target) or _convert(target, arrays / f".{stem}.partial", name, convert)
    finally:
        lock.release()


def _convert(target: Path, partial: Path, name: str, convert: Callable[[ArrayWriter], None]) -> Arrays:
    """Convert into `partial` and rename it; an existing `partial` is of an interrupted process."""
    with _writing():
        _remove(partial)
        partial.mkdir()
    try:
        writer = ArrayWriter(partial, name)
        convert(writer)
        writer.close()
        with _writing():
            _remove(target)  # damaged: it could not be read
            partial.rename(target)
            atomic.fsync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    found = _read(target)
    if found is None:
        raise DataError(f"{target} cannot be read back right after it was written; is the disk in order?")
    return found


def _read(folder: Path) -> Arrays | None:
    """The arrays in `folder`, or None if they are missing or damaged."""
    try:
        summary = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        if (folder / INPUTS).stat().st_size != summary["bytes"]:
            return None
        if _digest((folder / COLUMNS).read_bytes()) != summary["columns"]:
            return None
        inputs = np.load(folder / INPUTS, mmap_mode="c", allow_pickle=False)
        with np.load(folder / COLUMNS, allow_pickle=False) as columns:
            tensors = {key: torch.from_numpy(columns[key]) for key in columns.files}
        return Arrays(torch.from_numpy(inputs), tensors, summary["facts"])
    except (*DAMAGED, zipfile.BadZipFile, tokenize.TokenError, MemoryError):
        return None


def _key(name: str, version: int, sources: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """A hash of the sources and settings. Paths are relative to the common folder, so that data may be moved."""
    paths = [os.path.abspath(path) for path in sources]
    shared = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    stamps = []
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
        stamps.append([Path(path).relative_to(shared).as_posix(), stat.st_size, stat.st_mtime_ns])
    text = json.dumps([FORMAT, name, version, stamps, dict(settings)], sort_keys=True)
    return _digest(text.encode())[:16]


@contextmanager
def _writing() -> Iterator[None]:
    """Turn an `OSError` into an error that says what to do."""
    try:
        yield
    except OSError as error:
        where = cache_home()
        raise DataError(
            f"the cache {where} cannot be written: {error.strerror or error}. "
            f"Make room or allow writing there, or set {CACHE} to another folder."
        ) from error


def _reserve(descriptor: int, start: int, size: int) -> None:
    """Reserve disk space: writing to a mapped file without it kills the process when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, size)
        return
    os.lseek(descriptor, start, os.SEEK_SET)
    while size > 0:
        size -= os.write(descriptor, ZEROS[:size])


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
