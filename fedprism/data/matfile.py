"""MATLAB's .mat files of version 5 (what `save` writes up to -v7), as far as they hold real numbers.

A file is a header and a row of elements, each a variable: its class, shape and name, then its values, column-major.
Nothing is believed before it is checked, and values are handed out piece by piece, so that a small file that claims or
unpacks to a large one costs nothing. What is wrong raises ValueError, EOFError or zlib.error.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

HEADER = 128
ORDERS = {b"IM": "<", b"MI": ">"}  # how the two letters of the byte order look in the file
VERSION = 0x0100
PACKED, MATRIX = 15, 14  # kinds of elements
INT8, INT32, UINT32 = 1, 5, 6
STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = dict(enumerate(("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"), start=6))  # others: no numbers
COMPLEX = 0x0800
MOST_DIMENSIONS, LONGEST_NAME = 32, 64
BLOCK = 1 << 16


class Variable:
    """A variable of real numbers, opened in front of its values."""

    def __init__(self, stream: _Stream, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, np.dtype(dtype)
        kind, size, self._padding = stream.tag()
        if kind not in STORED:
            raise ValueError(f"the values of {name!r} are of the unknown kind {kind}")
        self._stream, self._stored = stream, np.dtype(stream.order + STORED[kind])
        if size != math.prod(shape) * self._stored.itemsize:
            raise ValueError(f"{name!r} of shape {shape} has {size} bytes")

    def values(self, count: int) -> NDArray[Any]:
        """The next of them; MATLAB may have stored them as a smaller type than their class, `dtype`."""
        return np.frombuffer(self._stream.read(count * self._stored.itemsize), dtype=self._stored)

    def end(self) -> None:
        """Refuse what goes on after the last value, or whose checksum is wrong."""
        self._stream.read(self._padding)
        self._stream.end()


def variables(path: Path) -> Iterator[Variable]:
    """Every variable of real numbers, each to be used before the next is asked for; others are left out."""
    with path.open("rb") as file:
        head, length = file.read(HEADER), os.fstat(file.fileno()).st_size
        order = ORDERS.get(head[126:128])
        if order is None:
            raise ValueError("it is no .mat file of version 5")
        if struct.unpack(order + "H", head[124:126])[0] != VERSION:
            raise ValueError("it is a .mat file of another version than 5; MATLAB's `save -v7` writes that")
        at = HEADER
        while at < length:
            file.seek(at)
            tag = file.read(8)
            kind, size = struct.unpack(order + "II", tag) if len(tag) == 8 else (0, 0)
            if kind not in (PACKED, MATRIX) or at + 8 + size > length:
                raise ValueError(f"byte {at} begins no whole variable")
            at += 8 + size
            stream = _Stream(file, size, order, packed=kind == PACKED)
            if kind == PACKED and stream.tag()[0] != MATRIX:
                raise ValueError("a packed element is no variable")
            variable = _variable(stream)
            if variable is not None:
                yield variable


def _variable(stream: _Stream) -> Variable | None:
    flags = np.frombuffer(stream.element(UINT32, 8), dtype=stream.order + "u4")
    if len(flags) != 2:
        raise ValueError("a variable has no class")
    kind = int(flags[0]) & 0xFF
    if kind not in CLASSES or int(flags[0]) & COMPLEX:
        return None
    shape = np.frombuffer(stream.element(INT32, 4 * MOST_DIMENSIONS), dtype=stream.order + "i4").tolist()
    if len(shape) < 2 or min(shape) < 0:
        raise ValueError(f"a variable has the shape {shape}")
    name = stream.element(INT8, LONGEST_NAME).decode("ascii")
    return Variable(stream, name, tuple(shape), CLASSES[kind])


class _Stream:
    """The content of one element, unpacked on the way."""

    def __init__(self, file: IO[bytes], size: int, order: str, packed: bool) -> None:
        self.order = order
        self._file, self._left = file, size
        self._unpacker = zlib.decompressobj() if packed else None

    def tag(self) -> tuple[int, int, int]:
        """Kind and bytes of what follows, and how many bytes to skip then."""
        (word,) = struct.unpack(self.order + "I", self.read(4))
        if word >> 16:  # a short form, of at most four bytes
            kind, size = word & 0xFFFF, word >> 16
            if size > 4:
                raise ValueError(f"a short element of {size} bytes")
            return kind, size, 4 - size
        (size,) = struct.unpack(self.order + "I", self.read(4))
        return word, size, -size % 8

    def element(self, kind: int, most: int) -> bytes:
        """A small element of the kind that must stand here."""
        given, size, padding = self.tag()
        if given != kind or size > most:
            raise ValueError(f"an element of kind {given} and {size} bytes; expected {kind} and at most {most}")
        content = self.read(size)
        self.read(padding)
        return content

    def read(self, size: int) -> bytes:
        """Exactly so many bytes."""
        content = bytearray()
        while len(content) < size:
            block = self._some(size - len(content))
            if not block:
                raise EOFError("it ends in the middle of a variable")
            content += block
        return bytes(content)

    def end(self) -> None:
        if self._some(1) or (self._unpacker is not None and not self._unpacker.eof):
            raise ValueError("a variable goes on after its values")

    def _some(self, most: int) -> bytes:
        """At most so many bytes; none: it is over."""
        if self._unpacker is None:
            return self._raw(most)
        while not self._unpacker.eof:
            packed = self._unpacker.unconsumed_tail or self._raw(BLOCK)
            block = self._unpacker.decompress(packed, most)
            if block or not packed:
                return block
        return b""

    def _raw(self, most: int) -> bytes:
        block = self._file.read(min(most, self._left))
        self._left -= len(block)
        return block
