"""MNIST and Digits-Five; tiny files in every published format are written here."""

from __future__ import annotations

import bz2
import gzip
import io
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fedprism.config import DataConfig
from fedprism.data import Dataset, load
from fedprism.errors import ConfigError, DataError

REAL = os.environ.get("FEDPRISM_DATA")  # read here: the tests take it away
FOUR = ("mnist", "mnist-m", "svhn", "usps")
FIVE = (*FOUR, "synth-digits")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)


def read(root: Path, *domains: str, name: str = "digits-five", **settings: Any) -> Dataset:
    return load(DataConfig(name=name, root=str(root), domains=domains or None, **settings), 0)


def grey(n: int, side: int, first: int = 0) -> np.ndarray:
    """[n, side, side], all different."""
    place = np.arange(side * side).reshape(1, side, side)
    return ((np.arange(first, first + n).reshape(-1, 1, 1) * 11 + place * 3) % 256).astype(np.uint8)


def coloured(n: int, side: int, first: int = 0) -> np.ndarray:
    """[n, side, side, 3]"""
    return np.stack([grey(n, side, first + shift) for shift in (0, 5, 9)], axis=-1)


def digits(n: int, first: int = 0) -> np.ndarray:
    return (np.arange(first, first + n) * 7 % 10).astype(np.uint8)


def idx_file(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(root: Path, pack: bool = True) -> Path:
    """12 and 11 images of 28 x 28."""
    folder = root / "mnist"
    folder.mkdir(parents=True)
    for part, first, n in (("train", 0, 12), ("t10k", 12, 11)):
        held = {"images-idx3": grey(n, 28, first), "labels-idx1": digits(n, first)}
        for kind, values in held.items():
            content = idx_file(values)
            path = folder / f"{part}-{kind}-ubyte{'.gz' if pack else ''}"
            path.write_bytes(gzip.compress(content) if pack else content)
    return folder


def write_mnist_m(root: Path) -> Path:
    """6 and 3 pictures of 32 x 32, not in the order of their names."""
    folder = root / "mnist-m" / "mnist_m"
    for part, first, n in (("train", 0, 6), ("test", 6, 3)):
        (folder / f"mnist_m_{part}").mkdir(parents=True)
        lines = []
        for i, picture in enumerate(coloured(n, 32, first)):
            name = f"{(i * 5) % n:08d}.png"
            Image.fromarray(picture).save(folder / f"mnist_m_{part}" / name)
            lines.append(f"{name} {digits(n, first)[i]}\n")
        (folder / f"mnist_m_{part}_labels.txt").write_text("".join(lines))
    return folder


def write_mats(root: Path, name: str = "svhn", prefix: str = "", ten_for_zero: bool = True) -> Path:
    """11 and 4 images of 32 x 32."""
    folder = root / name
    folder.mkdir(parents=True)
    for part, first, n in (("train", 0, 11), ("test", 11, 4)):
        labels = digits(n, first)
        if ten_for_zero:
            labels = np.where(labels == 0, 10, labels).astype(np.uint8)
        x = coloured(n, 32, first).transpose(1, 2, 3, 0)
        savemat(folder / f"{prefix}{part}_32x32.mat", {"X": x, "y": labels[:, None]}, do_compression=True)
    return folder


def libsvm_text(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    values = pixels.reshape(len(pixels), -1) / 127.5 - 1
    lines = (
        f"{label + 1} " + " ".join(f"{place}:{value:.6g}" for place, value in enumerate(row, start=1))
        for row, label in zip(values, labels, strict=True)
    )
    return ("\n".join(lines) + "\n").encode()


def write_usps(root: Path) -> Path:
    """10 and 5 images of 16 x 16."""
    folder = root / "usps"
    folder.mkdir(parents=True)
    for name, first, n in (("usps.bz2", 0, 10), ("usps.t.bz2", 10, 5)):
        (folder / name).write_bytes(bz2.compress(libsvm_text(grey(n, 16, first), digits(n, first))))
    return folder


def write_all(root: Path) -> None:
    write_mnist(root)
    write_mnist_m(root)
    write_mats(root)
    write_usps(root)
    write_mats(root, "synth-digits", "synth_", ten_for_zero=False)


SIZES = {"mnist": (12, 11), "mnist-m": (6, 3), "svhn": (11, 4), "usps": (10, 5), "synth-digits": (11, 4)}


def resized(picture: np.ndarray, side: int) -> np.ndarray:
    """[3, side, side] of a grey or coloured picture."""
    image = Image.fromarray(picture).convert("RGB").resize((side, side), Image.Resampling.BILINEAR)
    return np.array(image).transpose(2, 0, 1)


def original(domain: str, n: int) -> np.ndarray:
    side = {"mnist": 28, "usps": 16}.get(domain, 32)
    return grey(n, side) if domain in ("mnist", "usps") else coloured(n, side)


# --- mnist -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [True, False])
def test_mnist_alone_is_grey(tmp_path: Path, pack: bool) -> None:
    write_mnist(tmp_path, pack)
    dataset = read(tmp_path, name="mnist")
    assert dataset.images.shape == (23, 1, 28, 28)
    assert torch.equal(dataset.images[:, 0], torch.from_numpy(grey(23, 28)))
    assert dataset.labels.tolist() == digits(23).tolist()
    assert dataset.is_test is not None
    assert dataset.is_test.tolist() == [False] * 12 + [True] * 11
    assert dataset.class_names == tuple("0123456789")
    assert dataset.domain_names == ("mnist",)
    assert dataset.round_up
    small = read(tmp_path, name="mnist", image_size=14)
    assert torch.equal(small.images[4], torch.from_numpy(resized(grey(23, 28)[4], 14)[:1].copy()))


def write_packed(root: Path, name: str, n: int = 8, side: int = 28, test: int = 4) -> Path:
    held: dict[str, Any] = {"tile": np.array([side, side])}
    for split, first, count in (("train", 0, n), ("test", n, test)):
        pictures = np.repeat(grey(count, side, first)[..., None], 3, axis=-1)
        whole = pictures.reshape(count // 4, 4, side, side, 3).swapaxes(1, 2).reshape(-1, 4 * side, 3)
        out = io.BytesIO()
        Image.fromarray(whole).save(out, "WEBP", lossless=True)
        held[f"{split}_mosaic"] = np.frombuffer(out.getvalue(), dtype=np.uint8)
        held[f"{split}_y"] = digits(count, first)
    np.savez(root / name, **held)
    return root / name


def test_the_packed_form_and_published_files_before_it(tmp_path: Path) -> None:
    write_packed(tmp_path, "digits_mnist.npz")
    packed = read(tmp_path, name="mnist")
    assert torch.equal(packed.images[:, 0], torch.from_numpy(grey(12, 28)))
    assert packed.is_test is not None
    assert packed.is_test.tolist() == [False] * 8 + [True] * 4
    write_packed(tmp_path, "digits_mnistm.npz")
    joined = read(tmp_path, "mnist-m", "mnist")
    assert joined.images.shape == (24, 3, 28, 28)
    assert joined.domains.tolist() == [0] * 12 + [1] * 12
    folder = write_mnist(tmp_path)
    assert len(read(tmp_path, name="mnist")) == 23
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()  # an incomplete release does not count
    assert len(read(tmp_path, name="mnist")) == 12


# --- digits-five -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [28, 32])
def test_five_domains_in_their_published_formats(tmp_path: Path, side: int) -> None:
    write_all(tmp_path)
    dataset = read(tmp_path, image_size="auto" if side == 28 else side)
    assert dataset.domain_names == FIVE
    assert dataset.images.shape == (77, 3, side, side)
    assert dataset.class_names == tuple("0123456789")
    assert dataset.is_test is not None
    for number, domain in enumerate(FIVE):
        train, test = SIZES[domain]
        rows = dataset.domains == number
        assert dataset.is_test[rows].tolist() == [False] * train + [True] * test
        assert dataset.labels[rows].tolist() == digits(train + test).tolist(), domain
        wanted = np.stack([resized(picture, side) for picture in original(domain, train + test)])
        assert torch.equal(dataset.images[rows], torch.from_numpy(wanted)), domain


def test_domains_are_chosen_and_ordered(tmp_path: Path) -> None:
    write_usps(tmp_path)
    write_mats(tmp_path)
    dataset = read(tmp_path, "usps", "svhn")
    assert dataset.domain_names == ("usps", "svhn")
    assert dataset.domains.tolist() == [0] * 15 + [1] * 15
    assert torch.equal(read(tmp_path, "svhn", "usps").images[:15], dataset.images[15:])
    with pytest.raises(ConfigError, match=r"unknown domain 'uspss'\. Did you mean 'usps'"):
        read(tmp_path, "uspss")


@pytest.mark.slow
def test_a_stand_in_for_synth_digits_is_drawn_where_it_is_asked_for(tmp_path: Path) -> None:
    write_usps(tmp_path)
    dataset = read(tmp_path, "usps", "synth-digits-like", image_size=16)
    rows = dataset.domains == 1
    assert dataset.is_test is not None
    assert (int(rows.sum()), int((rows & dataset.is_test).sum())) == (9298, 1860)
    assert dataset.labels[rows].bincount().min() > 500
    again = load(DataConfig(name="digits-five", root=str(tmp_path), domains=("synth-digits-like",), image_size=16), 7)
    assert torch.equal(again.images, dataset.images[rows]), "the run's seed must not matter"


def test_what_is_not_there_is_asked_for(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    with pytest.raises(DataError, match=r"fedprism data prepare digits-five") as refused:
        read(tmp_path)
    assert "Not there: mnist-m, svhn, usps, synth-digits of digits-five." in str(refused.value)
    assert str(tmp_path / "usps" / "usps.bz2") in str(refused.value)
    write_mnist_m(tmp_path)
    write_mats(tmp_path)
    with pytest.raises(DataError, match=r"(?s)Not there: usps of digits-five.*fedprism data prepare usps") as refused:
        read(tmp_path, *FOUR)
    assert "synth-digits-like" not in str(refused.value)
    write_usps(tmp_path)
    with pytest.raises(DataError, match=r"fedprism data prepare synth-digits") as refused:
        read(tmp_path)
    assert "data.domains=[mnist, mnist-m, svhn, usps]" in str(refused.value)
    assert "`synth-digits-like` in its place is a stand-in" in str(refused.value)
    assert len(read(tmp_path, *FOUR)) == 62
    with pytest.raises(DataError, match=r"fedprism data prepare mnist") as refused:
        read(tmp_path / "elsewhere", name="mnist")
    assert str(tmp_path / "elsewhere") in str(refused.value)


def test_archives_may_have_folders_of_their_own(tmp_path: Path) -> None:
    folder = write_mats(tmp_path, "synth-digits", "synth_", ten_for_zero=False)
    folder.rename(tmp_path / "SynthDigits")
    folder.mkdir()
    (tmp_path / "SynthDigits").rename(folder / "SynthDigits")
    pictures = write_mnist_m(tmp_path)
    for path in pictures.iterdir():
        path.rename(tmp_path / "mnist-m" / path.name)
    pictures.rmdir()
    assert len(read(tmp_path, "synth-digits", "mnist-m")) == 24


def test_what_is_being_unpacked_is_not_read(tmp_path: Path) -> None:
    write_mats(tmp_path / "elsewhere", "synth-digits", "synth_", ten_for_zero=False)
    folder = tmp_path / "synth-digits"
    folder.mkdir()
    shutil.move(tmp_path / "elsewhere" / "synth-digits", folder / ".unpacking-SynthDigits.zip")
    with pytest.raises(DataError, match="synth-digits: files are missing"):
        read(tmp_path, "synth-digits")
    (folder / ".unpacking-SynthDigits.zip").rename(folder / "SynthDigits")
    assert len(read(tmp_path, "synth-digits")) == 15


# --- files that are not what they should be --------------------------------------------------------------------------

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (IMAGES, lambda c: c[:-1], "it ends before its 12 images do"),
        (IMAGES, lambda c: c + b"\0", "it goes on after its 12 images"),
        (IMAGES, lambda c: c[:10], "it is no IDX file"),
        (IMAGES, lambda c: b"", "it is no IDX file"),
        (IMAGES, lambda c: b"\0\0\x0d" + c[3:], "it is no IDX file of unsigned bytes with 3 dimension"),
        (IMAGES, lambda c: c[:7] + b"\x0b" + c[8:], "it has 11 images, but train-labels-idx1-ubyte has 12 labels"),
        (IMAGES, lambda c: c[:8] + struct.pack(">2I", 60000, 60000) + c[16:], "its images are 60000 x 60000 pixels"),
        (IMAGES, lambda c: c[:8] + struct.pack(">2I", 0, 28) + c[16:], "its images are 0 x 28 pixels"),
        (LABELS, lambda c: c[:4] + struct.pack(">I", 10**9) + c[8:], "it says that it has 1000000000 labels"),
        (LABELS, lambda c: c + b"\1" * 100, "it holds more labels and says that it has 12"),
        (LABELS, lambda c: c[:-1], "it holds 11 labels and says that it has 12"),
        (LABELS, lambda c: c[:-1] + b"\x0a", "its labels lie between 0 and 10; expected 0 to 9"),
    ],
)
def test_damaged_idx_files_are_refused_by_name(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = write_mnist(tmp_path, pack=False) / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{name}: {message}"):
        read(tmp_path, name="mnist")


def flipped(content: bytes) -> bytes:
    return content[:-6] + bytes([content[-6] ^ 1]) + content[-5:]


@pytest.mark.parametrize("damage", [lambda c: c[:-20], flipped, lambda c: b"plain"])
def test_damaged_gzip_files_are_refused_by_name(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write_mnist(tmp_path) / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"{IMAGES}\.gz: "):
        read(tmp_path, name="mnist")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 4), np.uint8)}, r"expected X \[height, width, 3, n\] and y"),
        ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones((5, 1), np.uint8)}, r"it holds .*'y': \(5, 1\)"),
        ({"X": np.zeros((32, 32, 4), np.uint8), "y": np.ones((4, 1), np.uint8)}, r"'X': \(32, 32, 4\)"),
        ({"X": np.zeros((32, 32, 3, 4)), "y": np.ones((4, 1), np.uint8)}, r"its X holds float64; expected uint8"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[0], [1]])}, r"between 0 and 1; expected 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[11], [1]])}, r"between 1 and 11; expected 1 to 10"),
    ],
)
def test_mat_files_of_something_else_are_refused_by_name(tmp_path: Path, held: dict[str, Any], message: str) -> None:
    savemat(write_mats(tmp_path) / "train_32x32.mat", held)
    with pytest.raises(DataError, match=rf"train_32x32\.mat: .*{message}"):
        read(tmp_path, "svhn")


@pytest.mark.parametrize("damage", [lambda c: c[:-1000], lambda c: c[:50], lambda c: b"", lambda c: b"x" * 500])
def test_damaged_mat_files_are_refused_by_name(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write_mats(tmp_path) / "test_32x32.mat"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"test_32x32\.mat: "):
        read(tmp_path, "svhn")


@pytest.mark.parametrize(
    "labels",
    [
        np.full((11, 1), 1.5),
        np.full((11, 1), np.nan),
        np.full((11, 1), np.inf),
        np.full((11, 1), 1 + 2j),
        np.array([["a"]] * 11),
        np.array([[None]] * 11, dtype=object),
    ],
    ids=["fraction", "nan", "inf", "complex", "text", "cells"],
)
def test_mat_labels_that_are_no_whole_numbers(tmp_path: Path, labels: np.ndarray) -> None:
    if labels.dtype == object:
        labels[:] = [[np.array([1, 2])]] * 11
    x = coloured(11, 32).transpose(1, 2, 3, 0)
    savemat(write_mats(tmp_path) / "train_32x32.mat", {"X": x, "y": labels})
    with pytest.raises(DataError, match=r"train_32x32\.mat: its labels are not whole|it holds {'X': .* and y \[n, 1\]"):
        read(tmp_path, "svhn")


def test_whole_labels_of_any_type_are_taken(tmp_path: Path) -> None:
    folder = write_mats(tmp_path)
    before = read(tmp_path, "svhn")
    for part, first, n in (("train", 0, 11), ("test", 11, 4)):
        labels = np.where(digits(n, first) == 0, 10, digits(n, first))
        x = coloured(n, 32, first).transpose(1, 2, 3, 0)
        savemat(folder / f"{part}_32x32.mat", {"y": labels[None].astype(float), "more": "text", "X": x})
    after = read(tmp_path, "svhn")
    assert torch.equal(before.labels, after.labels)
    assert torch.equal(before.images, after.images)


def test_ten_is_no_digit_of_synth_digits(tmp_path: Path) -> None:
    write_mats(tmp_path, "synth-digits", "synth_", ten_for_zero=True)
    with pytest.raises(DataError, match=r"synth_train_32x32\.mat: .* between 1 and 10; expected 0 to 9"):
        read(tmp_path, "synth-digits")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"1 1:0.5 257:1\n", "."),
        (b"1 0:0.5\n", "."),
        (b"1 1:half\n", "."),
        (b"1 1:1.5\n", "its values lie between 0 and 1.5; expected -1 to 1"),
        (b"1 1:nan\n", "its values lie between nan and nan"),
        (b"0 1:1\n", "its labels lie between 0 and 0; expected 1 to 10"),
        (b"11 1:1\n", "its labels lie between 11 and 11; expected 1 to 10"),
        (b"1.5 1:1\n", "its labels are not whole numbers"),
        (b"", "."),
    ],
)
def test_libsvm_files_of_something_else_are_refused_by_name(tmp_path: Path, text: bytes, message: str) -> None:
    (write_usps(tmp_path) / "usps.bz2").write_bytes(bz2.compress(text))
    with pytest.raises(DataError, match=rf"usps\.bz2: .*{message}"):
        read(tmp_path, "usps")


@pytest.mark.parametrize("damage", [lambda c: c[:-20], lambda c: b"plain"])
def test_damaged_bz2_files_are_refused_by_name(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = write_usps(tmp_path) / "usps.t.bz2"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"usps\.t\.bz2: "):
        read(tmp_path, "usps")


def test_values_that_libsvm_leaves_out_are_zero(tmp_path: Path) -> None:
    folder = write_usps(tmp_path)
    (folder / "usps.bz2").write_bytes(bz2.compress(b"1 1:-1 256:1\n10 2:-1\n"))
    dataset = read(tmp_path, "usps", image_size=16)
    assert dataset.labels[:2].tolist() == [0, 9]
    assert dataset.images[0, 0].flatten()[[0, 1, 255]].tolist() == [0, 128, 255]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("00000000.png", "line 7 is '00000000.png'; expected a file's name and a digit"),
        ("../../00000000.png 3", "line 7 is"),
        ("00000000.png three", "line 7 is"),
        ("00000000.png 10", "its labels lie between 0 and 10; expected 0 to 9"),
    ],
)
def test_label_lists_of_something_else_are_refused_by_name(tmp_path: Path, line: str, message: str) -> None:
    path = write_mnist_m(tmp_path) / "mnist_m_train_labels.txt"
    path.write_text(path.read_text() + line)
    with pytest.raises(DataError, match=rf"mnist_m_train_labels\.txt: {message}"):
        read(tmp_path, "mnist-m")


def test_pictures_that_are_missing_or_damaged_are_refused_by_name(tmp_path: Path) -> None:
    picture = write_mnist_m(tmp_path) / "mnist_m_test" / "00000002.png"
    picture.write_bytes(picture.read_bytes()[:100])
    with pytest.raises(DataError, match=r"00000002\.png: "):
        read(tmp_path, "mnist-m")
    picture.unlink()
    with pytest.raises(DataError, match=r"00000002\.png: it cannot be read: No such file or directory\.$"):
        read(tmp_path, "mnist-m")


# --- real images -----------------------------------------------------------------------------------------------------

REAL_COUNTS = {
    ("mnist", False): [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    ("mnist", True): [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ("mnist-m", False): [716, 805, 751, 774, 684, 647, 744, 793, 794, 730],
    ("mnist-m", True): [461, 569, 508, 508, 516, 450, 488, 514, 484, 502],
    ("svhn", False): [489, 1399, 1082, 851, 755, 705, 560, 575, 531, 491],
    ("svhn", True): [329, 965, 810, 530, 498, 486, 366, 395, 292, 329],
    ("usps", False): [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644],
    ("usps", True): [359, 264, 198, 166, 200, 160, 170, 147, 166, 177],
}


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Path]:
    if not REAL:
        pytest.skip("FEDPRISM_DATA is not set; it names the folder with benchmark files")
    yield Path(REAL)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # a few hundred MB


@pytest.mark.slow
def test_real_digits(real: Path) -> None:
    """Counts of the packed files, of which MNIST-M and SVHN are subsets."""
    dataset = read(real, *FOUR)
    assert dataset.images.shape == (104_174, 3, 28, 28)
    assert dataset.is_test is not None
    for (domain, part), counts in REAL_COUNTS.items():
        rows = (dataset.domains == FOUR.index(domain)) & (dataset.is_test == part)
        assert dataset.labels[rows].bincount().tolist() == counts, (domain, part)
    alone = read(real, name="mnist")
    assert alone.images.shape == (70_000, 1, 28, 28)
    assert torch.equal(alone.images[:, 0], dataset.images[:70_000, 1])
    with pytest.raises(DataError, match="synth-digits-like"):
        read(real)
