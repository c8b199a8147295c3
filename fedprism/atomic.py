"""Files that are there whole or not at all: temporary file in the same folder, fsync, rename, fsync of the folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedprism.errors import RecordError

_SUFFIX = ".partial"


def write(path: Path, data: bytes, sync: bool = True, lasting: bool = True) -> None:
    """Replace `path` by `data` in one step. `sync=False`: the caller syncs the folder, once for many files.

    `lasting=False`: the content need not last through a power cut yet; `link` sees to that later.
    """
    temporary = path.with_name(f".{path.name}{_SUFFIX}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(descriptor, data)
            if lasting:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        fsync(path.parent)


def link(source: Path, path: Path) -> None:
    """Replace `path` by another name of `source`'s content in one step; the caller syncs the folder.

    It is a copy where the file system has no such names, or where it is another one.
    """
    temporary = path.with_name(f".{path.name}{_SUFFIX}")
    try:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # also where both were names of one file: then `replace` does nothing


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by readable JSON."""
    write(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def write_all(descriptor: int, data: bytes) -> None:
    """`os.write` until everything is written: on a disk that is almost full it writes a part before it fails."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def fsync(path: Path) -> None:
    """Make a file, or the renames and deletions in a folder, last through a power cut."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there, and a rename needs no such help
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_partial(path: Path) -> bool:
    """Is this a temporary file that a killed process left behind?"""
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)


def sweep(folder: Path) -> None:
    """Remove what killed writers left behind; only for the holder of the lock."""
    for path in folder.glob(f".*{_SUFFIX}"):
        path.unlink(missing_ok=True)


@contextmanager
def reporting(what: str, rescue: str) -> Iterator[None]:
    """Turn a full disk or any other refusal of the system into an error that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"{what} could not be written: {error.strerror or error}. {rescue}") from error
