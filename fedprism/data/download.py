"""Download one file atomically.

A download goes to `NAME.part` and is renamed after its checksum was verified. An interrupted download is resumed:
`NAME.part.json` stores the server's headers, so that two versions of a file are never mixed.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fedprism import atomic
from fedprism.errors import DataError
from fedprism.files import NotAFile, open_regular, read_bytes

Report = Callable[[int, int | None], None]  # called with the bytes so far and the total (None: unknown)

BLOCK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte before a connection counts as broken
TRIES = 5  # consecutive attempts without a new byte
QUICK_TRIES = 2  # the same if no connection was ever made
MAX_WAIT = 60.0  # seconds between two attempts
MAX_BYTES = 2 << 30  # of a download of unknown size, or of an unpacked archive
CHECKSUM = re.compile(r"md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}")
AGENT = "fedprism (dataset download)"


def silent(done: int, total: int | None) -> None:
    """A report that shows nothing."""


@contextmanager
def byte_bar(label: str, console: Console) -> Iterator[Report]:
    """A progress bar with bytes, speed and time left; shown on a terminal only, and removed when done."""
    if not console.is_terminal:
        yield silent
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}", markup=False), *columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        last = -1

        def report(done: int, total: int | None) -> None:
            nonlocal last
            if last < 0 or done < last:  # bytes of an earlier download do not count for the speed
                bar.reset(task, completed=done, total=total)
            else:
                bar.update(task, completed=done, total=total)
            last = done

        yield report


def digest(path: Path, kind: str = "sha256", report: Report = silent) -> str:
    """A file's checksum, written as `md5:...` or `sha256:...`."""
    total, done, checksum = path.stat().st_size, 0, hashlib.new(kind, usedforsecurity=False)
    with open_regular(path) as file:
        while block := file.read(BLOCK):
            checksum.update(block)
            done += len(block)
            report(done, total)
    return f"{kind}:{checksum.hexdigest()}"


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn an `OSError`, such as a full disk or an unwritable folder, into a clear error."""
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise DataError(
            f"{what}: {error.strerror or error}{where}. Make room or make the folder writable, or name another folder "
            "with data.root or $FEDPRISM_DATA."
        ) from error


# --- fetching ---------------------------------------------------------------------------------------------------------


class _Broken(Exception):
    """An attempt failed, but a retry may succeed."""

    def __init__(self, why: str, wait: float = 0.0, connected: bool = True) -> None:
        super().__init__(why)
        self.wait, self.connected = wait, connected


class _Refused(Exception):
    """The file cannot be downloaded from this address."""


class NotFetched(DataError):
    """The file cannot be downloaded from any address."""


def fetch(
    addresses: Sequence[str],
    path: Path,
    *,
    checksum: str | None = None,
    origin: str = "published",
    size: int | None = None,
    max_bytes: int = MAX_BYTES,
    report: Report = silent,
    tries: int = TRIES,
    pause: float = 1.0,
) -> str:
    """Download `path` from the first address that works and return that address.

    `origin` names the source of `checksum` in errors. Without a known `size`, more than `max_bytes` are refused. If a
    connection breaks, this or a later call resumes the download. An existing file at `path` is replaced only after the
    checksum of the new one was verified.

    >>> fetch(["file:///etc/hosts"], Path("hosts"))
    Traceback (most recent call last):
    fedprism.errors.DataError: 'file:///etc/hosts' is not an http or https address.
    """
    for address in addresses:
        _check_address(address)
    if checksum is not None and not CHECKSUM.fullmatch(checksum):
        raise DataError(f"checksum {checksum!r} is not md5: with 32 or sha256: with 64 lower-case hexadecimal digits.")
    part, problems = _PartialFile(path), []
    with writing(f"{path} could not be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        for address in addresses:
            try:
                _download(address, part, checksum is not None, size, max_bytes, report, tries, pause)
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


class _PartialFile:
    """The downloaded part of a file and the server's headers for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.with_name(path.name + ".part")
        self.note = path.with_name(path.name + ".part.json")

    def length(self) -> int:
        return self.file.stat().st_size if self.file.is_file() else 0

    def metadata(self) -> dict[str, Any]:
        """The address, ETag, date and size at the start of the download; empty if unknown."""
        try:
            metadata = json.loads(read_bytes(self.note))
        except (OSError, ValueError, NotAFile):
            return {}
        return metadata if isinstance(metadata, dict) else {}

    def begin(self, address: str, headers: http.client.HTTPMessage, total: int | None) -> None:
        """Empty the file, then store the metadata; in this order, so that they never disagree."""
        self.file.write_bytes(b"")
        tag, date = headers.get("ETag"), headers.get("Last-Modified")
        atomic.write_json(self.note, {"address": address, "etag": tag, "modified": date, "total": total})

    def drop(self) -> None:
        self.file.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def publish(self) -> None:
        """Rename the file to its final name."""
        with self.file.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.file, self.path)
        self.note.unlink(missing_ok=True)
        atomic.fsync(self.path.parent)


def _download(
    address: str,
    part: _PartialFile,
    checked: bool,
    size: int | None,
    max_bytes: int,
    report: Report,
    tries: int,
    pause: float,
) -> None:
    """Try until the file is complete, the address refuses, or `tries` attempts in a row bring nothing new."""
    fruitless, begun = 0, part.length()
    reached = begun
    while True:
        try:
            return _attempt(address, part, checked, size, max_bytes, report)
        except _Broken as error:
            fruitless = 0 if part.length() > reached else fruitless + 1
            reached = max(reached, part.length())
            offline = not error.connected and reached == begun
            if fruitless >= (min(tries, QUICK_TRIES) if offline else tries):
                raise _Refused(f"{error} ({fruitless} attempts)") from None
            time.sleep(min(MAX_WAIT, max(error.wait, pause * 2 ** max(0, fruitless - 1))))


def _attempt(address: str, part: _PartialFile, checked: bool, size: int | None, max_bytes: int, report: Report) -> None:
    """Make one request for all missing bytes; raise `_Broken` or `_Refused` if they do not arrive."""
    before = part.metadata()
    tag, date = before.get("etag"), before.get("modified")
    strong = tag if tag and not tag.startswith("W/") else date  # If-Range does not allow a weak tag
    start = part.length() if before.get("address") == address and (strong or checked) else 0
    if start and start == before.get("total"):
        return
    headers = {"User-Agent": AGENT}
    if start:
        headers["Range"] = f"bytes={start}-"
        if strong:
            headers["If-Range"] = strong
    with _opened(address, headers, part, start) as response:
        if response is None:
            return
        total = _number(response.headers.get("Content-Length"))
        if response.status == 206 and start:
            first, total = _range(response.headers.get("Content-Range", ""))
            now = {"etag": response.headers.get("ETag"), "modified": response.headers.get("Last-Modified")}
            changed = any(value and before.get(key) not in (None, value) for key, value in now.items())
            unsure = not checked and strong not in now.values()
            if first != start or changed or unsure or before.get("total") not in (None, total):
                part.drop()
                raise _Broken("the server answered with a part of another file")
        elif response.status != 200:
            raise _Refused(f"the server answered {response.status} {response.reason}")
        coding = response.headers.get("Content-Encoding", "identity")
        if coding != "identity" and not checked:  # otherwise the checksum decides
            raise _Refused(f"the server sends the file packed once more ({coding})")
        if response.headers.get_content_type() == "text/html" and part.path.suffix not in (".html", ".htm"):
            raise _Refused("the server answered with a web page instead of the file; open the address in a browser")
        if size is not None and total is not None and total != size:
            part.drop()
            raise _Refused(f"the file has {total} bytes there; expected {size}")
        if response.status == 200:
            start = 0
            part.begin(address, response.headers, total)
        _check_space(part.path.parent, (total or size or 0) - start, part.path.name)
        got = _receive(response, part, start, total, size or max_bytes, report)
    if total is not None and got < total:
        raise _Broken(f"the connection was cut off after {got} of {total} bytes")


@contextmanager
def _opened(
    address: str, headers: dict[str, str], part: _PartialFile, start: int
) -> Iterator[http.client.HTTPResponse | None]:
    """The server's response, or None if the server has nothing left to send."""
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
    response: http.client.HTTPResponse,
    part: _PartialFile,
    start: int,
    total: int | None,
    max_bytes: int,
    report: Report,
) -> int:
    """Append the response to the partial file and return its length."""
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
            if got > max_bytes:
                part.drop()
                raise _Refused(f"more than the expected {max_bytes} bytes arrived")
            file.write(block)
            report(got, total)


def _verify(part: _PartialFile, checksum: str | None, origin: str, size: int | None, report: Report) -> None:
    """Refuse and remove a wrong file, so that the next attempt starts from the beginning."""
    if size is not None and part.length() != size:
        problem = f"{part.length()} bytes arrived; expected {size}"
    elif checksum is not None and (got := digest(part.file, checksum.partition(":")[0], report)) != checksum:
        problem = f"the file has the checksum {got}; expected {checksum} ({origin})"
    else:
        return
    part.drop()
    raise _Refused(f"{problem}. It was removed")


def _check_space(folder: Path, need: int, name: str) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise DataError(
            f"{name} needs {decimal(need)} in {folder}, where {decimal(free)} are free. Make room, or name another "
            "folder with data.root or $FEDPRISM_DATA."
        )


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"\s*\d{1,18}\s*", text) else None


def _range(text: str) -> tuple[int | None, int | None]:
    """First byte and total size in `bytes 5-9/10` or `bytes */10`."""
    found = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(?:(\d+)|\*)", text.strip())
    return (_number(found[1]), _number(found[2])) if found else (None, None)


# --- downloaded files -------------------------------------------------------------------------------------------------


class Checksums:
    """`<root>/checksums.json`: the first checksum of each file, and whether it matched a published one."""

    NAME = "checksums.json"

    def __init__(self, root: Path) -> None:
        self.path = root / self.NAME
        self.files: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            try:
                raw = json.loads(read_bytes(self.path))
                self.files = {str(key): dict(value) for key, value in raw["files"].items()}
                fine = all(CHECKSUM.fullmatch(value["checksum"]) for value in self.files.values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError, NotAFile):
                fine = False
            if not fine:
                raise DataError(
                    f"{self.path} cannot be read as the list of downloaded files. Move it away; the checksums are "
                    "then computed again from the existing files."
                )

    def of(self, key: str) -> str | None:
        """The recorded checksum of a file, by its path under the root."""
        return str(self.files[key]["checksum"]) if key in self.files else None

    def record(self, key: str, checksum: str, size: int, address: str, verified: bool) -> None:
        """Record a file; `verified`: its checksum was published."""
        status = "verified" if verified else "unverified"
        self.files[key] = {"checksum": checksum, "size": size, "address": address, "status": status}
        self._write()

    def forget(self, key: str) -> None:
        """Remove a file that turned out to be unusable from the record."""
        del self.files[key]
        self._write()

    def _write(self) -> None:
        with writing(f"{self.path} could not be written"):
            atomic.write_json(self.path, {"files": self.files})
