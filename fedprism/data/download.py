"""Fetch one file and unpack one archive, so that nothing is ever half there.

A download goes to `NAME.part` beside its place and gets its name only after its checksum was found right. A broken one
is resumed: `NAME.part.json` keeps what the server said of the file, so that two versions are never mixed. An archive is
unpacked into a hidden folder beside its place and then moved.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import http.client
import json
import lzma
import os
import re
import shutil
import ssl
import stat
import struct
import tarfile
import time
import unicodedata
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from urllib.parse import urlsplit

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedprism.errors import DataError

Report = Callable[[int, int | None], None]  # called with the bytes so far and the bytes in all (None: nobody knows)

BLOCK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte before a connection counts as broken
TRIES = 5  # attempts in a row that bring nothing
QUICK_TRIES = 2  # the same, where no connection could be made at all
LONGEST_WAIT = 60.0  # seconds between two attempts
MOST_BYTES = 2 << 30  # a download without a known size, and an unpacked archive, may be this large
MOST_FILES = 500_000  # an archive may hold this many
HEADER = 64 << 20  # more than this is never read from an archive in one piece
CHECKSUM = re.compile(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}")
AGENT = "fedprism (dataset download)"
UNPACKING = ".unpacking-"  # begins the name of a folder that is not whole yet


def silent(done: int, total: int | None) -> None:
    """A report that nobody sees."""


@contextmanager
def byte_bar(label: str, console: Console) -> Iterator[Report]:
    """A bar with bytes, speed and time left: on a terminal only, and gone when done."""
    if not console.is_terminal:
        yield silent
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}", markup=False), *columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        last = -1

        def report(done: int, total: int | None) -> None:
            nonlocal last
            if last < 0 or done < last:  # what was there before does not count for the speed
                bar.reset(task, completed=done, total=total)
            else:
                bar.update(task, completed=done, total=total)
            last = done

        yield report


def digest(path: Path, kind: str = "sha256", report: Report = silent) -> str:
    """A file's checksum, written as `md5:...` or `sha256:...`."""
    total, done, made = path.stat().st_size, 0, hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            made.update(block)
            done += len(block)
            report(done, total)
    return f"{kind}:{made.hexdigest()}"


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by readable JSON in one step."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn a full disk, an unwritable folder or any other refusal of the system into a clear error."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise DataError(
            f"{what}: {error.strerror or error}{where}. Make room or make the folder writable, or name another folder "
            "with data.root or $FEDPRISM_DATA."
        ) from error


def _sync_folder(path: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there, and a rename needs no such help
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- fetching ---------------------------------------------------------------------------------------------------------


class _Broken(Exception):
    """An attempt that may work when tried again."""

    def __init__(self, why: str, wait: float = 0.0, connected: bool = True) -> None:
        super().__init__(why)
        self.wait, self.connected = wait, connected


class _Refused(Exception):
    """This address cannot give the file."""


class NotFetched(DataError):
    """No address gives the file."""


class BadArchive(DataError):
    """An archive that is damaged or means harm."""


def fetch(
    addresses: Sequence[str],
    path: Path,
    *,
    checksum: str | None = None,
    origin: str = "published",
    size: int | None = None,
    most: int = MOST_BYTES,
    report: Report = silent,
    tries: int = TRIES,
    pause: float = 1.0,
) -> str:
    """Download `path` from the first address that gives it and return that address; `origin` says whose `checksum`.
    Where no `size` is known, `most` bytes are too many.

    What has arrived when a connection breaks is kept and resumed, also by a later call. An existing file at `path` is
    replaced only by one with the right checksum.

    >>> fetch(["file:///etc/hosts"], Path("hosts"))
    Traceback (most recent call last):
    fedprism.errors.DataError: 'file:///etc/hosts' is not an http or https address.
    """
    for address in addresses:
        _check_address(address)
    if checksum is not None and not CHECKSUM.fullmatch(checksum):
        raise DataError(f"checksum {checksum!r} is not md5: with 32 or sha256: with 64 lower-case hexadecimal digits.")
    part, problems = _Part(path), []
    with writing(f"{path} could not be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        for address in addresses:
            try:
                _from(address, part, checksum is not None, size, most, report, tries, pause)
                _verify(part, checksum, origin, size, report)
            except _Refused as error:
                problems.append(f"  {address}: {error}")
                continue
            part.publish()
            return address
    kept = " What has arrived is kept and resumed." if part.length() else ""
    raise NotFetched(
        "\n".join((f"{path.name} could not be downloaded:", *problems))
        + f"\nTry again later.{kept} Or fetch the file by other means and put it there: {path}"
    )


def _check_address(address: str) -> None:
    try:
        parts = urlsplit(address)
        fine = parts.scheme in ("http", "https") and parts.hostname and not re.search(r"[\s\x00-\x1f]", address)
    except ValueError:
        fine = False
    if not fine:
        raise DataError(f"{address!r} is not an http or https address.")


class _Part:
    """What has arrived of a file, and what the server said of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.with_name(path.name + ".part")
        self.note = path.with_name(path.name + ".part.json")

    def length(self) -> int:
        return self.file.stat().st_size if self.file.is_file() else 0

    def said(self) -> dict[str, Any]:
        """The address, ETag, date and size that the part began with; empty where that is unknown."""
        try:
            held = json.loads(self.note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return held if isinstance(held, dict) else {}

    def begin(self, address: str, headers: http.client.HTTPMessage, total: int | None) -> None:
        """Forget what was there, and note what the new part belongs to; in this order, so that they never disagree."""
        self.file.write_bytes(b"")
        tag, date = headers.get("ETag"), headers.get("Last-Modified")
        write_json(self.note, {"address": address, "etag": tag, "modified": date, "total": total})

    def drop(self) -> None:
        self.file.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def publish(self) -> None:
        """Give the file its name."""
        with self.file.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.file, self.path)
        self.note.unlink(missing_ok=True)
        _sync_folder(self.path.parent)


def _from(
    address: str, part: _Part, checked: bool, size: int | None, most: int, report: Report, tries: int, pause: float
) -> None:
    """Attempt until all is there, the address refuses, or `tries` attempts in a row brought nothing new."""
    fruitless, begun = 0, part.length()
    reached = begun
    while True:
        try:
            return _attempt(address, part, checked, size, most, report)
        except _Broken as error:
            fruitless = 0 if part.length() > reached else fruitless + 1
            reached = max(reached, part.length())
            offline = not error.connected and reached == begun
            if fruitless >= (min(tries, QUICK_TRIES) if offline else tries):
                raise _Refused(f"{error} ({fruitless} attempts)") from None
            time.sleep(min(LONGEST_WAIT, max(error.wait, pause * 2 ** max(0, fruitless - 1))))


def _attempt(address: str, part: _Part, checked: bool, size: int | None, most: int, report: Report) -> None:
    """One request: all that is missing arrives, or `_Broken` or `_Refused` says why not."""
    said = part.said()
    tag, date = said.get("etag"), said.get("modified")
    strong = tag if tag and not tag.startswith("W/") else date  # a weak tag must not stand in If-Range
    start = part.length() if said.get("address") == address and (strong or checked) else 0
    if start and start == said.get("total"):
        return
    asked = {"User-Agent": AGENT}
    if start:
        asked["Range"] = f"bytes={start}-"
        if strong:
            asked["If-Range"] = strong
    with _opened(address, asked, part, start) as response:
        if response is None:
            return
        total = _number(response.headers.get("Content-Length"))
        if response.status == 206 and start:
            first, total = _range(response.headers.get("Content-Range", ""))
            now = {"etag": response.headers.get("ETag"), "modified": response.headers.get("Last-Modified")}
            moved = any(value and said.get(key) not in (None, value) for key, value in now.items())
            unsure = not checked and strong not in now.values()
            if first != start or moved or unsure or said.get("total") not in (None, total):
                part.drop()
                raise _Broken("the server answered with a part of another file")
        elif response.status != 200:
            raise _Refused(f"the server answered {response.status} {response.reason}")
        coding = response.headers.get("Content-Encoding", "identity")
        if coding != "identity" and not checked:  # with a checksum, what arrives is either the file or not
            raise _Refused(f"the server sends the file packed once more ({coding})")
        if response.headers.get_content_type() == "text/html" and part.path.suffix not in (".html", ".htm"):
            raise _Refused("the server answered with a web page instead of the file; open the address in a browser")
        if size is not None and total is not None and total != size:
            part.drop()
            raise _Refused(f"the file has {total} bytes there; expected {size}")
        if response.status == 200:
            start = 0
            part.begin(address, response.headers, total)
        _room(part.path.parent, (total or size or 0) - start, part.path.name)
        got = _receive(response, part, start, total, size or most, report)
    if total is not None and got < total:
        raise _Broken(f"the connection was cut off after {got} of {total} bytes")


@contextmanager
def _opened(
    address: str, headers: dict[str, str], part: _Part, start: int
) -> Iterator[http.client.HTTPResponse | None]:
    """The server's answer, or None where it says that there is nothing left to send."""
    try:
        opener = urllib.request.build_opener(_Redirects)
        response = opener.open(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416 and start:
                if _range(error.headers.get("Content-Range", ""))[1] == start:
                    yield None
                    return
                part.drop()
                raise _Broken("the server has no such rest of the file") from None
            why = f"the server answered {error.code} {error.reason}"
            if error.code in (408, 425, 429) or error.code >= 500:
                raise _Broken(why, _number(error.headers.get("Retry-After")) or 0.0) from None
            raise _Refused(why) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise _Refused(f"the server's certificate is not trusted: {reason}") from None
        raise _Broken(f"no connection: {reason}", connected=not isinstance(error, urllib.error.URLError)) from None
    except ValueError as error:
        raise _Refused(f"it redirects to an address that cannot be read ({error})") from None
    with response:
        yield response


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from https to http."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        if urlsplit(newurl).scheme not in ("http", "https") or (
            req.type == "https" and urlsplit(newurl).scheme == "http"
        ):
            raise _Refused(f"it redirects to {newurl}, which is not safe")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _receive(
    response: http.client.HTTPResponse, part: _Part, start: int, total: int | None, most: int, report: Report
) -> int:
    """Append what arrives to the part and return its length."""
    got = start
    with part.file.open("ab") as file:
        report(got, total)
        while True:
            try:
                block = response.read1(BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise _Broken(f"the connection broke after {got} bytes: {error}") from None
            if not block:
                return got
            got += len(block)
            if got > most:
                part.drop()
                raise _Refused(f"more than the expected {most} bytes arrived")
            file.write(block)
            report(got, total)


def _verify(part: _Part, checksum: str | None, origin: str, size: int | None, report: Report) -> None:
    """Refuse a wrong file, and remove it, so that the next try starts anew."""
    if size is not None and part.length() != size:
        wrong = f"{part.length()} bytes arrived; expected {size}"
    elif checksum is not None and (got := digest(part.file, checksum.partition(":")[0], report)) != checksum:
        wrong = f"the file has the checksum {got}; expected {checksum} ({origin})"
    else:
        return
    part.drop()
    raise _Refused(f"{wrong}. It was removed")


def _room(folder: Path, need: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise DataError(
            f"{name} needs {decimal(need)} in {folder}, where {decimal(free)} are free. Make room, or name another "
            "folder with data.root or $FEDPRISM_DATA."
        )


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\s*\d{1,18}\s*", text) else None


def _range(text: str) -> tuple[int | None, int | None]:
    """First byte and size in all of `bytes 5-9/10` or `bytes */10`."""
    found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", text.strip())
    return (_number(found[1]), _number(found[2])) if found else (None, None)


# --- what was downloaded ----------------------------------------------------------------------------------------------


class Checksums:
    """`<root>/checksums.json`: the checksum of each file as it was first seen, and whether a published one agreed."""

    NAME = "checksums.json"

    def __init__(self, root: Path) -> None:
        self.path = root / self.NAME
        self.files: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            try:
                held = json.loads(self.path.read_text(encoding="utf-8"))
                self.files = {str(key): dict(value) for key, value in held["files"].items()}
                fine = all(CHECKSUM.fullmatch(value["checksum"]) for value in self.files.values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                fine = False
            if not fine:
                raise DataError(
                    f"{self.path} cannot be read as the list of downloaded files. Move it away; the checksums are "
                    "then taken anew from the files that are there."
                )

    def of(self, key: str) -> str | None:
        """The checksum on record for a file, by its path under the root."""
        return str(self.files[key]["checksum"]) if key in self.files else None

    def record(self, key: str, checksum: str, size: int, address: str, verified: bool) -> None:
        """Note a file; `verified`: its checksum was published."""
        status = "verified" if verified else "unverified"
        self.files[key] = {"checksum": checksum, "size": size, "address": address, "status": status}
        self._write()

    def forget(self, key: str) -> None:
        """Drop a file from the record, as it turned out to be useless."""
        del self.files[key]
        self._write()

    def _write(self) -> None:
        with writing(f"{self.path} could not be written"):
            write_json(self.path, {"files": self.files})


# --- unpacking --------------------------------------------------------------------------------------------------------

# What the readers of archives raise on damaged or hostile ones, beside OSError.
DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, ValueError, LookupError, ArithmeticError, RuntimeError),
)


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
    most_bytes: int = MOST_BYTES,
    most_files: int = MOST_FILES,
    report: Report = silent,
) -> bool:
    """Unpack a tar (gz, bz2, xz) or zip archive into a folder; False: that was done already.

    `keep` are patterns such as `clipart/bird/*`; other files are left out, and hidden ones always. Nothing is written
    outside of the folder, nothing that is there is overwritten, and links and devices are refused.
    """
    done = folder / f".{archive.name}.unpacked.json"
    note = _unpacked(done)
    if note and note["keep"] == list(keep) and not half_unpacked(archive, folder):
        return False
    temporary = folder / f"{UNPACKING}{archive.name}"
    with writing(f"{archive} could not be unpacked into {folder}"):
        if temporary.exists():  # left by a process that was killed
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        try:
            _extract(archive, temporary, keep, most_bytes, most_files, report)
            tops = sorted(entry.name for entry in temporary.iterdir())
            for top in tops:
                if os.path.lexists(folder / top) and top not in note.get("tops", ()):
                    raise DataError(
                        f"{folder / top} is in the way: {archive.name} holds it too, but it was not unpacked from "
                        "there. Move it away and try again."
                    )
            note = {"tops": tops, "keep": list(keep), "files": _files_in(temporary, tops)}
            if hasattr(os, "sync"):  # one call for what may be 100 000 files
                os.sync()
            write_json(done, {**note, "done": False})
            for top in tops:
                if os.path.lexists(folder / top):
                    os.rename(folder / top, temporary / f".old-{top}")
                os.rename(temporary / top, folder / top)
            write_json(done, {**note, "done": True})
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return True


def half_unpacked(archive: Path, folder: Path) -> bool:
    """Was an archive unpacked here, and was that interrupted, or are some of its files gone since?"""
    note = _unpacked(folder / f".{archive.name}.unpacked.json")
    return bool(note) and not (note["done"] and _files_in(folder, note["tops"]) >= note["files"])


def remove_leftovers(folder: Path) -> None:
    """Of an unpacking that was killed; nobody else may unpack there now."""
    with writing(f"{folder} could not be tidied up"):
        for left in folder.glob(f"{UNPACKING}*"):
            shutil.rmtree(left)


def _files_in(folder: Path, tops: Sequence[str]) -> int:
    within = sum(len(files) for top in tops for _, _, files in os.walk(folder / top))
    return within + sum((folder / top).is_file() for top in tops)


def _unpacked(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) and {"done", "tops", "keep", "files"} <= note.keys() else {}


def _extract(
    archive: Path, target: Path, keep: Sequence[str], most_bytes: int, most_files: int, report: Report
) -> None:
    done = files = 0
    names = _Names(archive)
    try:
        for member in _members(archive, target):
            parts = names.add(member)
            files, done = files + 1, done + member.size
            if files > most_files or done > most_bytes:
                most = f"{most_files} files" if files > most_files else f"{most_bytes} bytes"
                raise BadArchive(f"{archive} holds more than {most} when unpacked, more than this dataset can have.")
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
        if isinstance(error, OSError) and error.errno is not None:  # without: gzip's and bz2's
            raise
        raise BadArchive(f"{archive} is damaged: {error}. It must be downloaded again.") from None


class _Names:
    """Refuses names that leave the folder, or that are one file on some systems and two on others."""

    def __init__(self, archive: Path) -> None:
        self.archive = archive
        self.seen: dict[str, tuple[list[str], bool]] = {}

    def add(self, member: _Member) -> list[str]:
        """A member's folders and name."""
        name, wrong = member.name, ""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
            wrong = "is absolute"
        elif ".." in parts:
            wrong = "leaves the folder"
        elif "\\" in name or not name.isprintable():
            wrong = "holds a backslash or a control character"
        for end in range(1, len(parts) + 1):
            path, is_folder = parts[:end], end < len(parts) or member.is_folder
            folded = unicodedata.normalize("NFC", "/".join(path)).casefold()
            known = folded in self.seen
            before, was_folder = self.seen.setdefault(folded, (path, is_folder))
            if before != path:
                wrong = wrong or f"differs only by case from {'/'.join(before)!r}"
            elif was_folder != is_folder:
                wrong = wrong or "is a file and a folder"
            elif known and not is_folder:
                wrong = wrong or "is there twice"
        if wrong:
            raise BadArchive(
                f"{self.archive}: {name[:200]!r} {wrong}. Nothing was unpacked; do not trust this archive."
            )
        return parts


_TARS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}


def _members(archive: Path, target: Path) -> Iterator[_Member]:
    with archive.open("rb") as file:
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
    """A stream for tarfile that never hands out much in one piece: a header may claim any size."""

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

            def opened(info: zipfile.ZipInfo = info) -> IO[bytes]:
                return file.open(info)

            yield _Member(info.orig_filename, info.file_size, info.is_dir(), opened)


def _strange(archive: Path, name: str, kind: str) -> BadArchive:
    return BadArchive(f"{archive}: {name[:200]!r} is {kind}. Nothing was unpacked; do not trust this archive.")
