"""Read real-valued arrays from MATLAB's .mat files of version 5 (those of `save` up to -v7).

A file is a header and a sequence of elements, each a variable: its class, shape and name, then its values in column-
major order. Everything is checked before use and values are read piece by piece, so that a small file that claims or
unpacks to a large size costs no memory. A damaged file raises ValueError, EOFError or zlib.error.
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

from fedprism.files import DEFLATE, open_regular

HEADER = 128
ORDERS = {b"IM": "<", b"MI": ">"}  # byte order marks
VERSION = 0x0100
PACKED, MATRIX = 15, 14  # data types of elements: miCOMPRESSED, miMATRIX
INT8, INT32, UINT32 = 1, 5, 6
STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
CLASSES = dict(
    enumerate(("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"), start=6)
)  # numeric array classes
COMPLEX = 0x0800
MAX_DIMENSIONS, MAX_NAME = 32, 64
BLOCK = 1 << 16


class Variable:
    """A variable of real numbers, open before its values."""

    def __init__(self, stream: _Stream, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.name, self.shape, self.dtype = name, shape, np.dtype(dtype)
        data_type, size, self._padding = stream.tag()
        if data_type not in STORED:
            raise ValueError(f"the values of {name!r} are of the unknown data type {data_type}")
        self._stream, self._stored = stream, np.dtype(stream.order + STORED[data_type])
        if size != math.prod(shape) * self._stored.itemsize:
            raise ValueError(f"{name!r} of shape {shape} has {size} bytes")
        if size > stream.most:
            raise ValueError(f"{name!r} says that it has {size} bytes, more than are stored")

    def values(self, count: int) -> NDArray[Any]:
        """Read the next `count` values; MATLAB may have stored them in a smaller type than their class, `dtype`."""
        return np.frombuffer(self._stream.read(count * self._stored.itemsize), dtype=self._stored)

    def end(self) -> None:
        """Refuse data after the last value, or a wrong checksum."""
        self._stream.read(self._padding)
        self._stream.end()


def variables(path: Path) -> Iterator[Variable]:
    """Yield each variable of real numbers, to be read before the next one is requested; others are skipped."""
    with open_regular(path) as file:
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
            data_type, size = struct.unpack(order + "II", tag) if len(tag) == 8 else (0, 0)
            if data_type not in (PACKED, MATRIX) or at + 8 + size > length:
                raise ValueError(f"byte {at} begins no whole variable")
            at += 8 + size
            stream = _Stream(file, size, order, packed=data_type == PACKED)
            if data_type == PACKED and stream.tag()[0] != MATRIX:
                raise ValueError("a packed element is no variable")
            variable = _variable(stream)
            if variable is not None:
                yield variable


def _variable(stream: _Stream) -> Variable | None:
    flags = np.frombuffer(stream.element(UINT32, 8), dtype=stream.order + "u4")
    if len(flags) != 2:
        raise ValueError("a variable has no class")
    array_class = int(flags[0]) & 0xFF
    if array_class not in CLASSES or int(flags[0]) & COMPLEX:
        return None
    shape = np.frombuffer(stream.element(INT32, 4 * MAX_DIMENSIONS), dtype=stream.order + "i4").tolist()
    if len(shape) < 2 or min(shape) < 0:
        raise ValueError(f"a variable has the shape {shape}")
    name = stream.element(INT8, MAX_NAME).decode("ascii")
    return Variable(stream, name, tuple(shape), CLASSES[array_class])


class _Stream:
    """The content of one element, decompressed while reading."""

    def __init__(self, file: IO[bytes], size: int, order: str, packed: bool) -> None:
        self.order = order
        self.most = DEFLATE * size if packed else size  # bytes that it can hold
        self._file, self._left = file, size
        self._unpacker = zlib.decompressobj() if packed else None

    def tag(self) -> tuple[int, int, int]:
        """Data type and size in bytes of what follows, and the bytes of padding after it."""
        (word,) = struct.unpack(self.order + "I", self.read(4))
        if word >> 16:  # the short form, of at most four bytes
            data_type, size = word & 0xFFFF, word >> 16
            if size > 4:
                raise ValueError(f"a short element of {size} bytes")
            return data_type, size, 4 - size
        (size,) = struct.unpack(self.order + "I", self.read(4))
        return word, size, -size % 8

    def element(self, data_type: int, limit: int) -> bytes:
        """Read a small element of the given data type."""
        given, size, padding = self.tag()
        if given != data_type or size > limit:
            raise ValueError(f"an element of type {given} and {size} bytes; expected {data_type} and at most {limit}")
        content = self.read(size)
        self.read(padding)
        return content

    def read(self, size: int) -> bytes:
        """Read exactly `size` bytes."""
        content = bytearray()
        while len(content) < size:
            block = self._read_some(size - len(content))
            if not block:
                raise EOFError("it ends in the middle of a variable")
            content += block
        return bytes(content)

    def end(self) -> None:
        if self._read_some(1) or (self._unpacker is not None and not self._unpacker.eof):
            raise ValueError("a variable goes on after its values")

    def _read_some(self, limit: int) -> bytes:
        """Read up to `limit` bytes; none at the end."""
        if self._unpacker is None:
            return self._raw(limit)
        while not self._unpacker.eof:
            packed = self._unpacker.unconsumed_tail or self._raw(BLOCK)
            block = self._unpacker.decompress(packed, limit)
            if block or not packed:
                return block
        return b""

    def _raw(self, limit: int) -> bytes:
        block = self._file.read(min(limit, self._left))
        self._left -= len(block)
        return block
