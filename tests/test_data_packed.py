"""The two compact formats: one picture of many tiles, and many JPEG files in one array."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedprism.data.packed import Jpegs, mosaic
from fedprism.errors import DataError

HIGH, WIDE, ACROSS = 8, 16, 4


def tiles(n: int) -> np.ndarray:
    """n images, each of a colour of its own, with a bright corner."""
    images = np.zeros((n, HIGH, WIDE, 3), dtype=np.uint8)
    images[:] = (np.arange(n)[:, None] * np.array([20, 10, 5]) % 200).astype(np.uint8)[:, None, None]
    images[:, 0, 0] = 255
    return images


def picture_of(images: np.ndarray, kind: str = "WEBP", mode: str = "RGB") -> np.ndarray:
    """All images in one picture, row by row, as the bytes of a file."""
    down = -(-len(images) // ACROSS)
    full = np.zeros((down * ACROSS, HIGH, WIDE, 3), dtype=np.uint8)
    full[: len(images)] = images
    whole = full.reshape(down, ACROSS, HIGH, WIDE, 3).swapaxes(1, 2).reshape(down * HIGH, ACROSS * WIDE, 3)
    out = io.BytesIO()
    settings = {"lossless": True} if kind == "WEBP" else {"quality": 95, "subsampling": 0}
    Image.fromarray(whole).convert(mode).save(out, kind, **settings)
    return np.frombuffer(out.getvalue(), dtype=np.uint8)


def write(path: Path, **arrays: Any) -> Path:
    held = {
        "tile": np.array([HIGH, WIDE]),
        "train_mosaic": picture_of(tiles(10)),
        "train_y": np.arange(10, dtype=np.uint8),
        "train_coarse": np.arange(10, dtype=np.uint8) // 5,
        "test_mosaic": picture_of(tiles(4)),
        "test_y": np.array([3, 2, 1, 0], dtype=np.uint8),
    }
    held.update(arrays)
    np.savez(path, **{name: values for name, values in held.items() if values is not None})
    return path


def pixels(path: Path, split: str = "train", classes: int = 10) -> np.ndarray:
    return np.concatenate(list(mosaic(path, split, classes).pixels()))


def test_tiles_are_read_row_by_row_and_unused_ones_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "digits.npz")
    train = mosaic(path, "train", 10, [("coarse", 2)])
    assert train.columns["labels"].tolist() == list(range(10))
    assert train.columns["coarse"].tolist() == [0] * 5 + [1] * 5
    assert train.columns["labels"].dtype == np.int64
    assert not train.is_test
    assert [len(piece) for piece in train.pixels()] == [4, 4, 2]
    assert np.array_equal(pixels(path), tiles(10))
    test = mosaic(path, "test", 10)
    assert test.is_test
    assert test.columns["labels"].tolist() == [3, 2, 1, 0]
    assert np.array_equal(pixels(path, "test"), tiles(4))


def test_jpeg_mosaics_and_grey_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", train_mosaic=picture_of(tiles(10), "JPEG"))
    difference = pixels(path)[:, 2:, 2:].astype(int) - tiles(10)[:, 2:, 2:]
    assert np.abs(difference).max() <= 20
    grey = pixels(write(tmp_path / "b.npz", train_mosaic=picture_of(tiles(10), "JPEG", "L")))
    assert grey.shape == (10, HIGH, WIDE, 3)
    assert np.array_equal(grey[..., 0], grey[..., 2])


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_the_limit_that_pillow_has_for_others_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = write(tmp_path / "a.npz", train_mosaic=picture_of(tiles(10), kind))
    limit = 12 * HIGH * WIDE * 3 // 4
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Image.DecompressionBombWarning):
            Image.open(io.BytesIO(np.load(path)["train_mosaic"].tobytes()))
        assert len(pixels(path)) == 10
    assert limit == Image.MAX_IMAGE_PIXELS


def test_mosaics_beyond_all_reason_are_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("L", (16_000, 16_000)).save(out, "JPEG", quality=1)
    path = write(tmp_path / "a.npz", train_mosaic=np.frombuffer(out.getvalue(), dtype=np.uint8))
    with pytest.raises(DataError, match=r"a\.npz: a mosaic of 16000 x 16000, at most 160,000,000 pixels"):
        pixels(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_y": None}, r"it has no array 'train_y'"),
        ({"train_mosaic": None}, r"it has no array 'train_mosaic'"),
        ({"train_y": np.arange(11, dtype=np.uint8)}, r"train_y lie between 0 and 10; expected 0 to 9"),
        ({"train_y": np.empty(0, dtype=np.uint8)}, r"it holds no train_y"),
        ({"train_y": np.zeros(13, dtype=np.uint8)}, r"64 x 24 pixels does not hold 13 tiles of 16 x 8"),
        ({"tile": np.array([7, 16])}, r"does not hold 10 tiles of 16 x 7"),
        ({"tile": np.array([0, 16])}, r"its tile is \[0, 16\]; expected height and width"),
        ({"tile": np.array(8)}, r"its tile is 8"),
        ({"train_mosaic": picture_of(tiles(10), "JPEG")[:400]}, r"."),
        ({"train_mosaic": picture_of(tiles(10))[:100]}, r"."),
        ({"train_mosaic": np.zeros(100, dtype=np.uint8)}, r"."),
        ({"train_y": np.array([None] * 10, dtype=object)}, r"its train_y holds Python objects"),
        ({"train_y": np.full(10, np.nan)}, r"its train_y are not whole numbers"),
        ({"train_y": np.full(10, 1.7)}, r"its train_y are not whole numbers"),
        ({"train_y": np.full(10, 1 + 0j)}, r"its train_y are not whole numbers"),
        ({"train_y": np.array(["1"] * 10)}, r"its train_y are not whole numbers"),
        ({"train_y": np.full(10, True)}, r"its train_y are not whole numbers"),
        ({"train_y": np.zeros(10, dtype="M8[s]")}, r"its train_y are not whole numbers"),
        ({"train_y": np.array(3)}, r"its train_y have shape \(\)"),
        ({"train_y": np.zeros((10, 1), dtype=int)}, r"its train_y have shape \(10, 1\)"),
    ],
)
def test_mosaics_that_are_not_what_they_should_be_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "digits.npz", **change)
    with pytest.raises(DataError, match=rf"digits\.npz: .*{message}"):
        pixels(path)


@pytest.mark.parametrize(
    "header", [b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d,)}" % 10**15, b"{'descr':(((", b"("]
)
def test_headers_that_lie_are_refused_by_name(tmp_path: Path, header: bytes) -> None:
    path = write(tmp_path / "digits.npz", train_y=None)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("train_y.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header) + 1) + header + b"\n" + bytes(10))
    with pytest.raises(DataError, match=r"digits\.npz: "):
        pixels(path)


def test_files_that_are_cut_short_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "digits.npz")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"digits\.npz"):
        pixels(path)


# --- one JPEG file an image ------------------------------------------------------------------------------------------


def jpeg(level: int, size: tuple[int, int] = (12, 10), mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (level, 0, 255 - level)).convert(mode).save(out, "JPEG", quality=95)
    return out.getvalue()


def write_jpegs(target: Path, files: list[bytes], prefix: str = "", **arrays: Any) -> Path:
    held = {
        "jpeg": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "label": np.arange(len(files), dtype=np.uint8) % 3,
    }
    held.update(arrays)
    np.savez(target, classes=np.array(["mug", "bike", "mouse"]), **{prefix + name: held[name] for name in held})
    return target


@pytest.mark.parametrize("prefix", ["", "train_"])
def test_files_in_an_array_are_read_one_by_one(tmp_path: Path, prefix: str) -> None:
    files = [jpeg(level) for level in (0, 100, 200)] + [jpeg(50, mode="L")]
    path = write_jpegs(tmp_path / "office.npz", files, prefix, path=np.array(["a", "b", "c", "d"]))
    packed = Jpegs(path, prefix)
    assert len(packed) == 4
    assert packed.column("label", 3).tolist() == [0, 1, 2, 0]
    assert packed.names("classes") == ("mug", "bike", "mouse")
    assert packed.names(prefix + "path") == ("a", "b", "c", "d")
    for i, level in enumerate((0, 100, 200)):
        for side in (10, 6):
            picture = packed.picture(i, side)
            assert picture.shape == (3, side, side)
            assert picture.dtype == np.uint8
            wanted = np.array([level, 0, 255 - level])
            assert np.abs(picture.mean((1, 2)) - wanted).max() < 3
    assert np.array_equal(packed.picture(3, 10)[0], packed.picture(3, 10)[1])


@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 3], [0], [0, 10**9], [-1, 5], [[0, 5]], [0, 5, 5], [0.0, 5.0], [0.0, np.nan], ["a", "b"], 5],
    ids=lambda offsets: str(offsets),
)
def test_offsets_that_cut_nothing_are_refused(tmp_path: Path, offsets: list[Any]) -> None:
    path = write_jpegs(tmp_path / "office.npz", [jpeg(1)], offsets=np.array(offsets))
    with pytest.raises(DataError, match=r"office\.npz: its offsets do not cut jpeg"):
        Jpegs(path)


def test_columns_and_pictures_that_are_not_what_they_should_be_are_refused(tmp_path: Path) -> None:
    path = write_jpegs(tmp_path / "office.npz", [jpeg(1), jpeg(2)[:-300]], label=np.array([0, 7]), domain=np.zeros(3))
    packed = Jpegs(path)
    with pytest.raises(DataError, match=r"office\.npz: its label lie between 0 and 7; expected 0 to 2"):
        packed.column("label", 3)
    with pytest.raises(DataError, match=r"office\.npz: its domain has shape \(3,\); expected \(2,\)"):
        packed.column("domain", 3)
    with pytest.raises(DataError, match=r"office\.npz: it has no array 'y'"):
        packed.column("y", 3)
    with pytest.raises(DataError, match=r"(?i)office\.npz: .*truncated"):
        packed.picture(1, 10)


@pytest.mark.parametrize(
    "files", [np.array(5, np.uint8), np.array(["a"] * 700), np.zeros((9, 9), np.uint8), np.zeros(700)]
)
def test_files_that_are_no_bytes_are_refused(tmp_path: Path, files: np.ndarray) -> None:
    path = write_jpegs(tmp_path / "office.npz", [jpeg(1)], jpeg=files)
    with pytest.raises(DataError, match=r"office\.npz: its jpeg is .*; expected bytes"):
        Jpegs(path)


@pytest.mark.parametrize("names", [np.array(["a"]), np.array("ab"), np.arange(2), np.array([["a", "b"]])])
def test_names_that_are_not_one_an_image_are_refused(tmp_path: Path, names: np.ndarray) -> None:
    packed = Jpegs(write_jpegs(tmp_path / "office.npz", [jpeg(1), jpeg(2)], path=names))
    with pytest.raises(DataError, match=r"office\.npz: its path is .*; expected 2 texts"):
        packed.names("path", 2)
