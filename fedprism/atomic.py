"""Files of a run: written atomically (temporary file in the same folder, fsync, rename, fsync of the folder), and never
through a link."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedprism.errors import FedprismError, RecordError, short
from fedprism.files import BINARY, NO_LINK, NotAFile, open_regular, read_bytes

_SUFFIX = ".partial"
_PROBE = 1 << 16  # bytes
_SHOWN = 500  # characters of a path in an error
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """The name of a temporary file beside `path`; after a failure there is no such file."""
    temporary = path.with_name(f".{path.name}{_SUFFIX}")
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_new(path: Path, data: bytes, lasting: bool = True) -> None:
    """Make a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
    try:
        write_all(descriptor, data)
        if lasting:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes, sync: bool = True, lasting: bool = True) -> None:
    """Replace the content of `path` by `data` atomically.

    With `sync=False` the caller syncs the folder, once for many files. With `lasting=False` the content may be lost in
    a power cut until `link` syncs it.
    """
    with _temporary(path) as temporary:
        _write_new(temporary, data, lasting)
        os.replace(temporary, path)
    if sync:
        fsync(path.parent)


def check_writable(path: Path) -> None:
    """Raise before long work what writing this file after it would raise: make its folder, and write one beside it."""
    if path.exists():
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise NotAFile(path, mode)  # it would be replaced, even the null device
    path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(path) as temporary:
        _write_new(temporary, bytes(_PROBE))  # an empty file fits on a full disk
        temporary.unlink()


def link(source: Path, path: Path) -> None:
    """Replace `path` by a hard link to `source` atomically; the caller syncs the folder.

    `path` is a copy where the file system has no hard links, or where it differs from `source`'s.
    """
    with _temporary(path) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        fsync(temporary)
        os.replace(temporary, path)
        temporary.unlink(missing_ok=True)  # `replace` leaves it there if both already link to the same file


def write_json(path: Path, value: Any) -> None:
    """Replace the content of `path` by indented JSON."""
    write(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def read(path: Path) -> bytes:
    """The content of a regular file. A link is not followed: it may lead out of the run directory."""
    return read_bytes(path, follow=False)


def sha256(path: Path) -> str:
    """The checksum of a regular file, which is read piece by piece. A link is not followed."""
    with open_regular(path, follow=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def holds(path: Path, checksum: str) -> bool:
    """Is there a regular file with this checksum?"""
    try:
        return sha256(path) == checksum
    except (OSError, NotAFile):
        return False


def append_to(path: Path) -> int:
    """A descriptor to append to a file that nothing else shares: a link is refused, and of a file with more names a
    copy takes its place."""
    if path.exists() and path.stat().st_nlink > 1:
        write(path, read(path))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | NO_LINK | BINARY, 0o666)


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


def temporary_folder(prefix: str) -> Path:
    """A new folder for what is not kept."""
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise FedprismError(
            f"a run without a directory needs a temporary folder, and none can be made: {error.strerror or error}. Set "
            "TMPDIR to a folder that can be written, or give the run a directory (`out`)."
        ) from error


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
        raise RecordError(f"{short(what, _SHOWN)} could not be written: {error.strerror or error}. {rescue}") from error
