"""CIFAR-10 and CIFAR-100 in the binary, the pickled and the packed form; tiny files of each are written here."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedprism.config import DataConfig
from fedprism.data import Dataset, load
from fedprism.errors import DataError
from tests.faults.injection import as_any_user

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
EACH = 3  # images a batch of CIFAR-10
REAL = os.environ.get("FEDPRISM_DATA")  # read here: the tests take it away


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)


def read(root: Path, name: str = "cifar10", **settings: Any) -> Dataset:
    return load(DataConfig(name=name, root=str(root), **settings), 0)


def images(n: int, first: int = 0) -> np.ndarray:
    """[n, 3, 32, 32], all different, also by colour and place."""
    place = np.arange(3 * 32 * 32).reshape(1, 3, 32, 32)
    return ((np.arange(first, first + n).reshape(-1, 1, 1, 1) * 7 + place * 3) % 251).astype(np.uint8)


def labels(n: int, first: int, classes: int = 10) -> np.ndarray:
    return (np.arange(first, first + n) * 3 % classes).astype(np.uint8)


def write_binary(root: Path) -> Path:
    folder = root / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        pixels = images(EACH, number * EACH).reshape(EACH, -1)
        records = np.concatenate([labels(EACH, number * EACH)[:, None], pixels], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def write_pickled(root: Path, dump: Callable[[Any], bytes]) -> Path:
    folder = root / "cifar10" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, name in enumerate(BATCHES):
        pixels = images(EACH, number * EACH).reshape(EACH, -1)
        batch = {b"data": pixels, b"labels": labels(EACH, number * EACH).tolist(), b"batch_label": b"some batch"}
        (folder / name).write_bytes(dump(batch))
    return folder


def write_hundred(root: Path, kind: str, train: int = 10, test: int = 2) -> Path:
    """CIFAR-100: train with five times as many images as test."""
    folder = root / "cifar100" / f"cifar-100-{kind}"
    folder.mkdir(parents=True)
    for name, first, n in (("train", 0, train), ("test", train, test)):
        fine, pixels = labels(n, first, 100), images(n, first).reshape(n, -1)
        if kind == "binary":
            records = np.concatenate([(fine // 5)[:, None], fine[:, None], pixels], axis=1)
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            batch = {"data": pixels, "fine_labels": fine.tolist(), "coarse_labels": (fine // 5).tolist()}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def old_pickle(batch: dict[bytes, Any]) -> bytes:
    """As Python 2 wrote it, text and bytes being the same: protocol 2, with numpy's old names."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    data, numbers = batch[b"data"], batch[b"labels"]
    rows, columns = data.shape
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
        b"(K\x01" + b"K" + bytes([rows]) + b"M" + struct.pack("<H", columns) + b"\x86"
        b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", data.size) + data.tobytes() + b"tb"
    )
    listed = b"](" + b"".join(b"K" + bytes([number]) for number in numbers) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def check_ten(dataset: Dataset) -> None:
    n = len(BATCHES) * EACH
    assert torch.equal(dataset.images, torch.from_numpy(images(n)))
    assert dataset.labels.tolist() == labels(n, 0).tolist()
    assert dataset.is_test is not None
    assert dataset.is_test.nonzero().flatten().tolist() == list(range(n - EACH, n))
    assert dataset.class_names[0] == "airplane"
    assert dataset.class_names[9] == "truck"
    assert dataset.domain_names == ("cifar10",)
    assert dataset.round_up
    assert dataset.coarse is None
    assert dataset.fine is None


def test_the_binary_release(tmp_path: Path) -> None:
    write_binary(tmp_path)
    check_ten(read(tmp_path))


@pytest.mark.parametrize("dump", [old_pickle, *(partial(pickle.dumps, protocol=protocol) for protocol in (2, 3, 4))])
def test_the_pickled_release(tmp_path: Path, dump: Callable[[Any], bytes]) -> None:
    write_pickled(tmp_path, dump)
    check_ten(read(tmp_path))


@pytest.mark.parametrize("kind", ["binary", "python"])
def test_both_levels_of_cifar_100(tmp_path: Path, kind: str) -> None:
    write_hundred(tmp_path, kind)
    fine, coarse = labels(12, 0, 100).tolist(), (labels(12, 0, 100) // 5).tolist()
    own = read(tmp_path, "cifar100")
    assert torch.equal(own.images, torch.from_numpy(images(12)))
    assert own.labels.tolist() == fine
    assert own.coarse is not None
    assert own.coarse.labels.tolist() == coarse
    assert own.is_test is not None
    assert int(own.is_test.sum()) == 2
    above = read(tmp_path, "cifar100-super")
    assert above.name == "cifar100-super"
    assert above.labels.tolist() == coarse
    assert above.fine is not None
    assert above.fine.labels.tolist() == fine
    assert torch.equal(above.images, own.images)
    assert above.class_names == own.coarse.names
    assert above.fine.names == own.class_names
    assert len(above.class_names) == 20
    assert (own.class_names[0], own.class_names[99], above.class_names[9]) == (
        "apple",
        "worm",
        "large_man-made_outdoor_things",
    )
    assert len(list((tmp_path / "cache" / "arrays").glob("[!.]*"))) == 1, "one conversion is enough for both"


def write_packed(root: Path, name: str) -> None:
    """A mosaic of CIFAR-100 or CIFAR-10 without loss, so that pixels can be compared."""
    held: dict[str, Any] = {"tile": np.array([32, 32])}
    for split, first, n in (("train", 0, 4), ("test", 4, 2)):
        whole = images(n, first).transpose(0, 2, 3, 1).reshape(n // 2, 2, 32, 32, 3).swapaxes(1, 2)
        out = io.BytesIO()
        Image.fromarray(whole.reshape(n * 16, 64, 3)).save(out, "WEBP", lossless=True)
        held[f"{split}_mosaic"] = np.frombuffer(out.getvalue(), dtype=np.uint8)
        held[f"{split}_y"] = labels(n, first)
        held[f"{split}_coarse"] = labels(n, first) // 5
    np.savez(root / f"{name}.npz", **held)


def test_the_packed_form_and_published_files_before_it(tmp_path: Path) -> None:
    write_packed(tmp_path, "cifar10")
    write_packed(tmp_path, "cifar100")
    packed = read(tmp_path)
    assert torch.equal(packed.images, torch.from_numpy(images(6)))
    assert packed.labels.tolist() == labels(6, 0).tolist()
    assert packed.is_test is not None
    assert packed.is_test.tolist() == [False] * 4 + [True] * 2
    hundred = read(tmp_path, "cifar100")
    assert hundred.coarse is not None
    assert hundred.coarse.labels.tolist() == (labels(6, 0) // 5).tolist()
    folder = write_binary(tmp_path)
    check_ten(read(tmp_path))
    (folder / "data_batch_4.bin").unlink()  # an incomplete release does not count
    assert len(read(tmp_path)) == 6


def test_another_side_is_resized(tmp_path: Path) -> None:
    write_binary(tmp_path)
    small = read(tmp_path, image_size=8)
    assert small.images.shape == (18, 3, 8, 8)
    picture = Image.fromarray(images(1)[0].transpose(1, 2, 0)).resize((8, 8), Image.Resampling.BILINEAR)
    assert torch.equal(small.images[0].permute(1, 2, 0), torch.from_numpy(np.array(picture)))
    assert read(tmp_path).images.shape == (18, 3, 32, 32)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "cifar100-super"])
def test_what_is_not_there_is_asked_for(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"fedprism data prepare cifar10") as refused:
        read(tmp_path, name)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], r"it has 9218 bytes; expected a multiple of 3073"),
        (lambda content: b"", r"it has 0 bytes"),
        (lambda content: content[:-3073], r"it has 2 images, expected 1 times the 3 of test_batch\.bin"),
        (lambda content: b"\x0a" + content[1:], r"its labels lie between \d and 10; expected 0 to 9"),
    ],
)
def test_a_damaged_binary_release_is_refused_by_name(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = write_binary(tmp_path) / "data_batch_2.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=rf"data_batch_2\.bin: {message}"):
        read(tmp_path)
    assert not list((tmp_path / "cache" / "arrays").glob("[!.]*"))


def test_files_that_may_not_be_read_are_named(tmp_path: Path) -> None:
    path = write_binary(tmp_path) / "data_batch_2.bin"
    path.chmod(0)
    with as_any_user(), pytest.raises(DataError, match=r"data_batch_2\.bin: it cannot be read: Permission denied\.$"):
        read(tmp_path)


def test_a_shortened_part_of_cifar_100_is_refused_by_name(tmp_path: Path) -> None:
    write_hundred(tmp_path, "binary", train=9)
    with pytest.raises(DataError, match=r"train\.bin: it has 9 images, expected 5 times the 2 of test\.bin"):
        read(tmp_path, "cifar100")


class Calls:
    """Pickled, it asks for a function to be called when it is read."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.what = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.what


PIXELS = images(EACH).reshape(EACH, -1)
GOOD = {"data": PIXELS, "labels": [1, 2, 3]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps({**GOOD, "x": Calls(os.system, "touch ran")}, protocol=4),
            r"it names posix\.system, and only arrays",
        ),
        (pickle.dumps({**GOOD, "x": Calls(eval, "open('ran', 'w')")}, protocol=4), r"it names builtins\.eval"),
        (pickle.dumps({**GOOD, "x": Calls(np.load, "ran")}, protocol=4), r"it names numpy\.load"),
        (pickle.dumps({**GOOD, "x": Calls(getattr, "a", "join")}, protocol=4), r"it names builtins\.getattr"),
        (pickle.dumps({**GOOD, "data": PIXELS.astype(object)}, protocol=2), r"of dtype 'O8'; expected u1"),
        (pickle.dumps({**GOOD, "data": PIXELS.astype(np.int16)}, protocol=2), r"of dtype 'i2'; expected u1"),
        (pickle.dumps({**GOOD, "data": PIXELS[:, :-1].copy()}, protocol=2), r"shape \(3, 3071\)"),
        (pickle.dumps({**GOOD, "data": [1, 2]}), r"it holds no array `data`"),
        (pickle.dumps([1, 2]), r"it holds no array `data`"),
        (pickle.dumps({**GOOD, "labels": [1, 2]}, protocol=2), r"its labels are no list of 3 numbers"),
        (pickle.dumps({**GOOD, "labels": [1, 2, "3"]}, protocol=2), r"its labels are no list of 3 numbers"),
        (pickle.dumps({**GOOD, "labels": [1, 2, 10]}, protocol=2), r"lie between 1 and 10; expected 0 to 9"),
        (pickle.dumps({**GOOD, "labels": [1, 2, 10**30]}, protocol=2), r"."),
        (pickle.dumps(GOOD, protocol=2)[:-200], r"."),
        (b"cnumpy.core.multiarray\n_reconstruct\n)R.", r"it holds no array `data`"),
        (b"(U\x04datacnumpy.core.multiarray\n_reconstruct\n)Rd.", r"."),
        (b"(U\x04datacnumpy.core.multiarray\n_reconstruct\n)RK\x01bd.", r"."),
        (b"cnumpy\nndarray\n}b.", r"."),
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.", r"it ends too early"),
        (b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".", r"it holds no array `data`"),
        (b"I" + b"9" * 6000 + b"\n.", r"."),
        (b"", r"."),
        (b"not a pickle", r"."),
    ],
)
def test_a_hostile_or_damaged_pickle_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_pickled(tmp_path, pickle.dumps) / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"data_batch_1: .*{message}"):
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_hostile_pickle_would_have_run_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above shows something."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Calls(os.system, "touch ran")))  # noqa: S301
    assert (tmp_path / "ran").exists()


# --- real images -----------------------------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Path]:
    if not REAL:
        pytest.skip("FEDPRISM_DATA is not set; it names the folder with benchmark files")
    yield Path(REAL)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # a few hundred MB


def counts(dataset: Dataset, part: bool) -> list[int]:
    assert dataset.is_test is not None
    return dataset.labels[dataset.is_test == part].bincount(minlength=len(dataset.class_names)).tolist()


@pytest.mark.slow
def test_real_cifar_10(real: Path) -> None:
    dataset = read(real)
    assert dataset.images.shape == (60_000, 3, 32, 32)
    assert counts(dataset, False) == [5000] * 10
    assert counts(dataset, True) == [1000] * 10
    assert 110 < dataset.images[::50].float().mean() < 130  # a mean of 0.4734 over the channels, as published


@pytest.mark.slow
def test_real_cifar_100(real: Path) -> None:
    dataset, above = read(real, "cifar100"), read(real, "cifar100-super")
    assert dataset.images.shape == (60_000, 3, 32, 32)
    assert counts(dataset, False) == [500] * 100
    assert counts(dataset, True) == [100] * 100
    assert counts(above, False) == [2500] * 20
    assert counts(above, True) == [500] * 20
    assert above.fine is not None
    pairs = {(int(a), int(b)) for a, b in zip(above.fine.labels, above.labels, strict=True)}
    assert len(pairs) == 100, "every class belongs to one superclass"
    named = {above.fine.names[fine] for fine, coarse in pairs if above.class_names[coarse] == "trees"}
    assert named == {"maple_tree", "oak_tree", "palm_tree", "pine_tree", "willow_tree"}
