"""Unpack one archive atomically: into a hidden folder, which is renamed when it is complete."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from fedprism import atomic
from fedprism.data.download import BLOCK, MAX_BYTES, Report, silent, writing
from fedprism.errors import DataError
from fedprism.files import NotAFile, open_regular, read_bytes

MAX_FILES = 500_000  # files in an archive
HEADER = 64 << 20  # bytes read from an archive at once
UNPACKING = ".unpacking-"  # prefix of an incomplete folder

# Exceptions on damaged or hostile archives, besides OSError.
DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, ValueError, LookupError, ArithmeticError, RuntimeError),
)


class BadArchive(DataError):
    """An archive that is damaged or unsafe to unpack."""


class _Member(NamedTuple):
    """A file or folder in an archive."""

    name: str
    size: int
    is_folder: bool
    open: Callable[[], IO[bytes]]


def unpack(
    archive: Path,
    folder: Path,
    *,
    keep: Sequence[str] = (),
    max_bytes: int = MAX_BYTES,
    max_files: int = MAX_FILES,
    report: Report = silent,
) -> bool:
    """Unpack a tar (gz, bz2, xz) or zip archive into a folder; return False if that was done before.

    `keep` lists patterns such as `clipart/bird/*`; other files, and all hidden ones, are skipped. Nothing is written
    outside of the folder, no existing file is overwritten, and links and devices are refused.
    """
    done = folder / f".{archive.name}.unpacked.json"
    note = _unpacked(done)
    if note and note["keep"] == list(keep) and not half_unpacked(archive, folder):
        return False
    temporary = folder / f"{UNPACKING}{archive.name}"
    with writing(f"{archive} could not be unpacked into {folder}"):
        if temporary.exists():  # left by an interrupted process
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        try:
            _extract(archive, temporary, keep, max_bytes, max_files, report)
            tops = sorted(entry.name for entry in temporary.iterdir())
            for top in tops:
                if os.path.lexists(folder / top) and top not in note.get("tops", ()):
                    raise DataError(
                        f"{folder / top} is in the way: {archive.name} holds it too, but it was not unpacked from "
                        "there. Move it away and try again."
                    )
            note = {"tops": tops, "keep": list(keep), "files": _files_in(temporary, tops)}
            if hasattr(os, "sync"):  # one call for up to 100,000 files
                os.sync()
            atomic.write_json(done, {**note, "done": False})
            for top in tops:
                if os.path.lexists(folder / top):
                    os.rename(folder / top, temporary / f".old-{top}")
                os.rename(temporary / top, folder / top)
            atomic.write_json(done, {**note, "done": True})
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return True


def half_unpacked(archive: Path, folder: Path) -> bool:
    """Whether unpacking this archive was interrupted, or some of its files have gone since."""
    note = _unpacked(folder / f".{archive.name}.unpacked.json")
    return bool(note) and not (note["done"] and _files_in(folder, note["tops"]) >= note["files"])


def remove_leftovers(folder: Path) -> None:
    """Remove the folders of interrupted unpacking; no other process may unpack there now."""
    with writing(f"{folder} could not be tidied up"):
        for leftover in folder.glob(f"{UNPACKING}*"):
            shutil.rmtree(leftover)


def _files_in(folder: Path, tops: Sequence[str]) -> int:
    within = sum(len(files) for top in tops for _, _, files in os.walk(folder / top))
    return within + sum((folder / top).is_file() for top in tops)


def _unpacked(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(read_bytes(path))
    except (OSError, ValueError, NotAFile):
        return {}
    return note if isinstance(note, dict) and {"done", "tops", "keep", "files"} <= note.keys() else {}


def _extract(archive: Path, target: Path, keep: Sequence[str], max_bytes: int, max_files: int, report: Report) -> None:
    done = files = 0
    names = _Names(archive)
    try:
        for member in _members(archive, target):
            parts = names.add(member)
            files, done = files + 1, done + member.size
            if files > max_files or done > max_bytes:
                limit = f"{max_files} files" if files > max_files else f"{max_bytes} bytes"
                raise BadArchive(f"{archive} holds more than {limit} when unpacked, more than this dataset can have.")
            name = "/".join(parts)
            hidden = not parts or any(part.startswith(".") or part == "__MACOSX" for part in parts)
            if hidden or member.is_folder or (keep and not any(fnmatchcase(name, pattern) for pattern in keep)):
                continue
            place = target.joinpath(*parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            with member.open() as source, place.open("xb") as file:
                shutil.copyfileobj(source, file, BLOCK)
            if place.stat().st_size != member.size:
                raise EOFError(f"{name} is shorter than it should be")
            report(done, None)
    except (OSError, *DAMAGED) as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip's and bz2's own errors have no errno
            raise
        raise BadArchive(f"{archive} is damaged: {error}. It must be downloaded again.") from None


class _Names:
    """Refuses names that leave the folder, or that are the same file on some systems only."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.seen: dict[str, tuple[list[str], bool]] = {}

    def add(self, member: _Member) -> list[str]:
        """Check a member's path and return its parts."""
        name, problem = member.name, ""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
            problem = "is absolute"
        elif ".." in parts:
            problem = "leaves the folder"
        elif "\\" in name or not name.isprintable():
            problem = "holds a backslash or a control character"
        for end in range(1, len(parts) + 1):
            path, is_folder = parts[:end], end < len(parts) or member.is_folder
            folded = unicodedata.normalize("NFC", "/".join(path)).casefold()
            known = folded in self.seen
            before, was_folder = self.seen.setdefault(folded, (path, is_folder))
            if before != path:
                problem = problem or f"differs only by case from {'/'.join(before)!r}"
            elif was_folder != is_folder:
                problem = problem or "is a file and a folder"
            elif known and not is_folder:
                problem = problem or "is there twice"
        if problem:
            raise BadArchive(
                f"{self.archive}: {name[:200]!r} {problem}. Nothing was unpacked; do not trust this archive."
            )
        return parts


_TARS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}


def _members(archive: Path, target: Path) -> Iterator[_Member]:
    with open_regular(archive) as file:
        head = file.read(512)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        yield from _zip_members(archive)
        return
    openers = [opener for magic, opener in _TARS.items() if head.startswith(magic)]
    if not openers and head[257:262] != b"ustar":
        page = " It looks like a web page." if head.lstrip().lower().startswith((b"<!doctype", b"<html")) else ""
        raise BadArchive(f"{archive} is neither a tar nor a zip archive.{page} It must be downloaded again.")
    with openers[0](archive) if openers else archive.open("rb") as stream:
        yield from _tar_members(archive, stream, target)


class _Bounded:
    """A stream for tarfile that limits the size of a read: a header may claim any size."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.seek, self.tell = stream, stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self.stream.read(size)


def _tar_members(archive: Path, stream: IO[bytes], target: Path) -> Iterator[_Member]:
    with tarfile.open(fileobj=cast("IO[bytes]", _Bounded(stream)), mode="r:") as tar:
        for info in tar:
            if not (info.isreg() or info.isdir()):
                kind = f"a link to {info.linkname[:200]!r}" if info.issym() or info.islnk() else "a device or pipe"
                raise _strange(archive, info.name, kind)

            def opened(info: tarfile.TarInfo = info) -> IO[bytes]:
                if hasattr(tarfile, "data_filter"):  # missing before Python 3.11.4
                    tarfile.data_filter(info, str(target))
                return cast("IO[bytes]", tar.extractfile(info))

            yield _Member(info.name, info.size, info.isdir(), opened)


def _zip_members(archive: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _strange(archive, info.filename, "a link" if kind == stat.S_IFLNK else "a device or pipe")
            if info.flag_bits & 1:
                raise BadArchive(f"{archive}: {info.filename[:200]!r} is encrypted.")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # Python unpacks others unbounded
                raise BadArchive(f"{archive}: {info.filename[:200]!r} is packed in another way than deflate.")

            def opened(info: zipfile.ZipInfo = info) -> IO[bytes]:
                return file.open(info)

            yield _Member(info.orig_filename, info.file_size, info.is_dir(), opened)


def _strange(archive: Path, name: str, kind: str) -> BadArchive:
    return BadArchive(f"{archive}: {name[:200]!r} is {kind}. Nothing was unpacked; do not trust this archive.")
