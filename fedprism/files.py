"""Files that are read are regular files: opening a named pipe that nobody writes to would wait for ever."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import IO

from fedprism.errors import FedprismError

NO_LINK, BINARY = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_BINARY", 0)  # each is missing on some system
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | BINARY
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}

_BLOCK = 1 << 20

DEFLATE = 1032  # bytes that one byte of a zip, gzip or zlib stream can become, at most


class NotAFile(FedprismError):
    """A named pipe, a socket, a device or, where none is followed, a link is where a file should be."""

    def __init__(self, path: str | Path, mode: int) -> None:
        self.kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
        super().__init__(f"{path} is {self.kind}; expected a regular file. Replace it by one, or remove it.")


def open_regular(path: str | Path, follow: bool = True) -> io.BufferedReader:
    """Open a regular file to read bytes. Everything else is a `NotAFile`; a folder or a missing file, an `OSError`.

    Without `follow`, so is a link.
    """
    try:
        descriptor = os.open(path, _FLAGS if follow else _FLAGS | NO_LINK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # what a socket answers
            raise NotAFile(path, os.stat(path).st_mode) from None
        if not follow and os.path.islink(path):
            raise NotAFile(path, os.lstat(path).st_mode) from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise NotAFile(path, mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | Path, follow: bool = True) -> bytes:
    """The content of a regular file."""
    with open_regular(path, follow) as file:
        return file.read()


def read_most(stream: IO[bytes], most: int) -> bytes:
    """The content of a stream that unpacks a file, read piece by piece; a ValueError where it is longer than `most`."""
    content = bytearray()
    while block := stream.read(_BLOCK):
        content += block
        if len(content) > most:
            raise ValueError(f"it unpacks to more than {most:,} bytes, the most that are read")
    return bytes(content)


def read_text(path: str | Path) -> str:
    """The content of a regular file in UTF-8, with lines that end in a newline alone."""
    return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
