"""Atomic file writes: temporary file in the same folder, fsync, rename, fsync of the folder."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedprism.errors import RecordError

_SUFFIX = ".partial"
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def write(path: Path, data: bytes, sync: bool = True, lasting: bool = True) -> None:
    """Replace the content of `path` by `data` atomically.

    With `sync=False` the caller syncs the folder, once for many files. With `lasting=False` the content may be lost in
    a power cut until `link` syncs it.
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
    """Replace `path` by a hard link to `source` atomically; the caller syncs the folder.

    `path` is a copy where the file system has no hard links, or where it differs from `source`'s.
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
        temporary.unlink(missing_ok=True)  # `replace` leaves it there if both already link to the same file


def write_json(path: Path, value: Any) -> None:
    """Replace the content of `path` by indented JSON."""
    write(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def write_all(descriptor: int, data: bytes) -> None:
    """Call `os.write` until all data is written: on a nearly full disk it writes a part before it fails."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def fsync(path: Path) -> None:
    """Flush a file, or the renames and deletions in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders, and its renames need no fsync
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_partial(path: Path) -> bool:
    """Whether this is a temporary file of an interrupted write."""
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)


def sweep(folder: Path) -> None:
    """Remove temporary files of interrupted writes; call it only while holding the lock."""
    for path in folder.glob(f".*{_SUFFIX}"):
        path.unlink(missing_ok=True)


@contextmanager
def reporting(what: str, rescue: str) -> Iterator[None]:
    """Turn an `OSError`, such as a full disk, into an error that says what is safe and what to do.

    Where `rescue` says to make room, and permission is what is missing, it says to allow writing.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            rescue = rescue.replace("make room", "allow writing").replace("Make room", "Allow writing")
        raise RecordError(f"{what} could not be written: {error.strerror or error}. {rescue}") from error
