"""A web server on this machine that cuts off, changes its mind or lies, and archives for it to send."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DATA = bytes(range(256)) * 2000
FILES = {"top/a.txt": b"first", "top/deep/b.txt": b"second" * 100, "c.txt": b""}


@dataclass
class Page:
    """How the server answers for one path."""

    data: bytes = b""
    cuts: list[int] = field(default_factory=list)  # bytes that each of the first answers sends before it hangs up
    ranges: bool = True
    tag: str | None = '"one"'
    forgets: bool = False  # to send the tag with a part
    says_length: bool = True
    status: int = 200
    kind: str = "application/octet-stream"
    to: str = ""  # redirect
    headers: dict[str, str] = field(default_factory=dict)  # more of them, or others
    busy: int = 0  # answer the first requests with 503
    hold: threading.Event | None = None  # the first time, wait for it after half of the file


@dataclass
class Server:
    """A web server on this machine; `seen` are the requests with their headers."""

    address: str
    pages: dict[str, Page] = field(default_factory=dict)
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def put(self, path: str, data: bytes = DATA, **how: object) -> str:
        self.pages[path] = Page(data, **how)  # type: ignore[arg-type]
        return self.address + path

    def ranges(self) -> list[str | None]:
        return [headers.get("Range") for _, headers in self.seen]


@contextmanager
def serve() -> Iterator[Server]:
    """A server while the block runs; tests have it as the fixture `server`."""
    made = Server("")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            made.seen.append((self.path, dict(self.headers)))
            page = made.pages.get(self.path, Page(status=404))
            if page.busy:
                page.busy -= 1
                page = Page(status=503)
            start, status = 0, page.status
            wanted = self.headers.get("Range")
            same = self.headers.get("If-Range", page.tag) == page.tag
            if wanted and page.ranges and same:
                start, status = int(wanted.removeprefix("bytes=").removesuffix("-")), 206
                if start >= len(page.data):
                    status = 416
            self.send_response(302 if page.to else status)
            if page.to:
                self.send_header("Location", page.to)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{len(page.data) - 1}/{len(page.data)}")
            if status == 416:
                self.send_header("Content-Range", f"bytes */{len(page.data)}")
            if page.tag and not (status == 206 and page.forgets):
                self.send_header("ETag", page.tag)
            body = page.data[start:] if status in (200, 206) and not page.to else b""
            self.send_header("Content-Type", page.kind)
            if page.says_length and "Content-Length" not in page.headers:
                self.send_header("Content-Length", str(len(body)))
            for name, value in page.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if page.hold:
                hold, page.hold = page.hold, None
                self.wfile.write(body[: len(body) // 2])
                hold.wait(30)
            elif page.cuts and body:
                self.wfile.write(body[: page.cuts.pop(0)])
            else:
                self.wfile.write(body)

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.daemon_threads = True
    made.address = f"http://127.0.0.1:{web.server_port}"
    thread = threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        web.shutdown()
        web.server_close()


def md5(data: bytes) -> str:
    return "md5:" + hashlib.md5(data).hexdigest()


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def tar_of(files: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in more:
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return out.getvalue()


def zip_of(files: dict[str, bytes], modes: dict[str, int] | None = None) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (modes or {}).get(name, 0o100644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, data)
    return out.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    """What a reader sees."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }
