"""The reader of .mat files, against what scipy writes and against files that lie."""

from __future__ import annotations

import io
import random
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from fedprism.data.digit_files import mat
from fedprism.data.matfile import variables
from fedprism.errors import DataError

RNG = np.random.default_rng(0)


def held(path: Path) -> dict[str, np.ndarray]:
    """All variables, as MATLAB shows them."""
    read = {}
    for variable in variables(path):
        values = variable.values(int(np.prod(variable.shape))).astype(variable.dtype)
        variable.end()
        read[variable.name] = values.reshape(variable.shape, order="F")
    return read


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
def test_numbers_are_read_as_scipy_reads_them(tmp_path: Path, dtype: str, packed: bool) -> None:
    numbers = {
        "one": np.array([[7]]).astype(dtype),
        "y": RNG.integers(0, 100, (5, 1)).astype(dtype),
        "a_longer_name": RNG.integers(0, 100, (4, 3, 2, 6)).astype(dtype),
        "none": np.zeros((0, 3)).astype(dtype),
    }
    others = {"text": "abc", "wave": np.array([[1 + 2j]]), "cell": np.array([[None, 1]], dtype=object)}
    others["cell"][:] = [["a", np.ones(3)]]
    savemat(tmp_path / "a.mat", {**numbers, **others, "deep": {"a": 1}, "last": np.eye(2)}, do_compression=packed)
    read, known = held(tmp_path / "a.mat"), loadmat(tmp_path / "a.mat")
    assert set(read) == {*numbers, "last"}
    for name, values in read.items():
        assert values.dtype == known[name].dtype
        assert np.array_equal(values, known[name])


def element(order: str, kind: int, content: bytes) -> bytes:
    return struct.pack(order + "II", kind, len(content)) + content + bytes(-len(content) % 8)


def variable(order: str, name: str, shape: tuple[int, ...], values: bytes, stored: int = 2, of: int = 9) -> bytes:
    flags = element(order, 6, struct.pack(order + "II", of, 0))
    dimensions = element(order, 5, struct.pack(f"{order}{len(shape)}i", *shape))
    return element(order, 14, flags + dimensions + element(order, 1, name.encode()) + element(order, stored, values))


def whole(order: str, *elements: bytes) -> bytes:
    mark = {"<": b"IM", ">": b"MI"}[order]
    return b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(order + "H", 0x0100) + mark + b"".join(elements)


@pytest.mark.parametrize("order", ["<", ">"])
def test_both_byte_orders(tmp_path: Path, order: str) -> None:
    """MATLAB stores doubles in fewer bytes where they are small and whole."""
    words = np.arange(6).astype(order + "u2")
    plain = variable(order, "words", (2, 3), words.tobytes(), stored=4, of=6)
    deflated = zlib.compress(variable(order, "b", (1, 3), b"abc"))
    (tmp_path / "a.mat").write_bytes(whole(order, plain, struct.pack(order + "II", 15, len(deflated)) + deflated))
    read = held(tmp_path / "a.mat")
    assert read["words"].dtype == np.float64
    assert read["words"].tolist() == [[0, 2, 4], [1, 3, 5]]
    assert read["b"].tobytes() == b"abc"
    assert np.array_equal(loadmat(tmp_path / "a.mat")["words"], read["words"])


one = partial(variable, "<")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no .mat file"),
        (b"MATLAB 7.3 MAT-file".ljust(124) + b"\0\2IM" + b"\x89HDF" + bytes(600), "another version"),
        (whole("<", one("y", (4, 1), b"abc")), "has 3 bytes"),
        (whole("<", one("y", (2**31 - 1, 2**31 - 1), b"abc")), "has 3 bytes"),
        (whole("<", one("y", (-4, 1), b"abc")), "the shape"),
        (whole("<", one("y", (4,), b"abcd")), "the shape"),
        (whole("<", one("y", (1,) * 40, b"a")), "expected 5 and at most 128"),
        (whole("<", one("y" * 100, (1, 1), b"a")), "expected 1 and at most 64"),
        (whole("<", one("y", (1, 1), b"a", stored=200)), "unknown data type 200"),
        (whole("<", one("y", (4, 1), b"abcd"))[:-3], "no whole variable"),
        (whole("<", one("y", (4, 1), b"abcd"), b"xyz"), "no whole variable"),
        (whole("<", struct.pack("<II", 15, 4) + b"junk"), "."),
        (whole("<", element("<", 14, b"")), "ends in the middle"),
    ],
)
def test_what_a_file_says_is_checked(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.mat").write_bytes(content)
    with pytest.raises((ValueError, EOFError, zlib.error), match=message):
        held(tmp_path / "a.mat")


def digits(**settings: Any) -> bytes:
    """A small file of SVHN's kind."""
    file = io.BytesIO()
    x = RNG.integers(0, 256, (8, 8, 3, 5), dtype=np.uint8)
    savemat(file, {"X": x, "y": np.arange(1, 6, dtype=np.uint8)[:, None]}, **settings)
    return file.getvalue()


def used(path: Path) -> list[np.ndarray]:
    return list(mat(path, 1, 10, False).pixels())


def test_a_file_that_would_fill_the_memory_is_refused_early(tmp_path: Path) -> None:
    count = 4 * 10**9
    begin = variable("<", "y", (count // 4, 4), b"")[8:-8] + struct.pack("<II", 2, count)
    content = zlib.compress(struct.pack("<II", 14, len(begin) + count) + begin + bytes(1 << 20))
    (tmp_path / "a.mat").write_bytes(whole("<", struct.pack("<II", 15, len(content)) + content))
    with pytest.raises(DataError, match=r"a\.mat: 'y' says that it has 4000000000 bytes, more than are stored"):
        used(tmp_path / "a.mat")
    images = variable("<", "X", (300, 1, 3, 2), bytes(1800))
    (tmp_path / "a.mat").write_bytes(whole("<", images, variable("<", "y", (2, 1), b"\1\2")))
    with pytest.raises(DataError, match=r"a\.mat: its images are 300 x 1 pixels; 1 to 256 per side"):
        used(tmp_path / "a.mat")


@pytest.mark.parametrize("packed", [True, False])
def test_damaged_files_are_refused_or_read_but_never_end_the_process(tmp_path: Path, packed: bool) -> None:
    content, rng, path = digits(do_compression=packed), random.Random(0), tmp_path / "a.mat"
    refused = 0
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 3, 10))):
            place = rng.choice((rng.randrange(100, 260), rng.randrange(len(content)), rng.randrange(1, 150) * -1))
            changed[place] = rng.randrange(256)
        if rng.random() < 0.1:
            del changed[rng.randrange(len(changed)) :]
        path.write_bytes(changed)
        try:
            pieces = used(path)
        except DataError as error:
            assert "a.mat: " in str(error)  # noqa: PT017
            refused += 1
        else:
            assert all(piece.dtype == np.uint8 and piece.ndim == 4 for piece in pieces)
    assert 100 < refused < 400
