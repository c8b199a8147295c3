"""`cifar10`, `cifar100`, `cifar100-super`: the binary release, the pickled one ("python version"), or a packed mosaic.

    <root>/cifar10/cifar-10-batches-bin/data_batch_1.bin ... data_batch_5.bin, test_batch.bin
    <root>/cifar10/cifar-10-batches-py/data_batch_1 ... data_batch_5, test_batch
    <root>/cifar100/cifar-100-binary/train.bin, test.bin
    <root>/cifar100/cifar-100-python/train, test
    <root>/cifar10.npz, <root>/cifar100.npz

The first one found is used. Pickles may contain arrays and plain values only: nothing that a file names is called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedprism.config import DataConfig
from fedprism.data.base import DATASETS, Dataset, Level, side
from fedprism.data.cache import Arrays, ArrayWriter, converted
from fedprism.data.packed import mosaic
from fedprism.data.parts import Pixels, RawSplit, checked, cut, damaged, fill, reading
from fedprism.data.places import root_of
from fedprism.data.sources import looking, missing
from fedprism.files import open_regular, read_bytes

VERSION = 1
SIDE = 32
PIXELS = 3 * SIDE * SIDE
TEST_SHARE = 0.25  # FedCP's, where train and test are merged

_10 = "airplane automobile bird cat deer dog frog horse ship truck"
_100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_20 = """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
    vehicles_1 vehicles_2
"""
CLASSES_10, CLASSES_100, SUPERCLASSES = tuple(_10.split()), tuple(_100.split()), tuple(_20.split())


@DATASETS.register("cifar10")
def cifar10(config: DataConfig, seed: int) -> Dataset:
    """60,000 photographs of 10 classes, 32 x 32 pixels; 10,000 of them are the test split."""
    arrays = _arrays("cifar10", root_of(config), side(config, SIDE))
    return _dataset("cifar10", arrays, "labels", CLASSES_10)


@DATASETS.register("cifar100")
def cifar100(config: DataConfig, seed: int) -> Dataset:
    """60,000 photographs of 100 classes in 20 superclasses, 32 x 32 pixels; 10,000 of them are the test split."""
    arrays = _arrays("cifar100", root_of(config), side(config, SIDE))
    coarse = Level(arrays.columns["coarse"], SUPERCLASSES)
    return _dataset("cifar100", arrays, "labels", CLASSES_100, coarse=coarse)


@DATASETS.register("cifar100-super")
def cifar100_super(config: DataConfig, seed: int) -> Dataset:
    """CIFAR-100 with its 20 superclasses, of five classes each, as labels."""
    arrays = _arrays("cifar100", root_of(config), side(config, SIDE))
    fine = Level(arrays.columns["labels"], CLASSES_100)
    return _dataset("cifar100-super", arrays, "coarse", SUPERCLASSES, fine=fine)


def _dataset(name: str, arrays: Arrays, labels: str, classes: tuple[str, ...], **levels: Level) -> Dataset:
    return Dataset(
        name=name,
        images=arrays.inputs,
        labels=arrays.columns[labels],
        domains=torch.zeros(len(arrays.inputs), dtype=torch.int64),
        domain_names=(name,),
        class_names=classes,
        is_test=arrays.columns["is_test"],
        test_share=TEST_SHARE,
        round_up=True,
        coarse=levels.get("coarse"),
        fine=levels.get("fine"),
    )


# --- files -----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A label column, as the releases name it."""

    name: str
    pickled: str
    values: int


class Release(NamedTuple):
    """A published folder and the reader of its files."""

    folder: str
    train: tuple[str, ...]
    test: str
    read: Callable[[Path, Sequence[Column], bool], RawSplit]


# In the order of a binary record's label bytes.
COLUMNS = {
    "cifar10": (Column("labels", "labels", 10),),
    "cifar100": (Column("coarse", "coarse_labels", 20), Column("labels", "fine_labels", 100)),
}


@looking()
def _arrays(name: str, root: Path, size: int) -> Arrays:
    """The images at the requested size, converted from the first release found."""
    columns, packed = COLUMNS[name], root / f"{name}.npz"
    for release in RELEASES[name]:
        files = [root / name / release.folder / file for file in (*release.train, release.test)]
        if all(path.is_file() for path in files):
            read = partial(_published, release, files, columns)
            break
    else:
        if not packed.is_file():
            raise missing(name, root)
        files, read = [packed], partial(_packed, packed, columns)

    def convert(writer: ArrayWriter) -> None:
        fill(writer, read(), size)

    return converted(name, VERSION, files, {"side": size}, convert)


def _published(release: Release, files: Sequence[Path], columns: Sequence[Column]) -> list[RawSplit]:
    """Read all files of a release. The known ratio of their image counts reveals a truncated file."""
    splits = [release.read(path, columns, path.name == release.test) for path in files]
    counts = [len(split.columns["labels"]) for split in splits]
    ratio = 1 if len(release.train) > 1 else 5
    for path, count in zip(files[:-1], counts[:-1], strict=True):
        if count != ratio * counts[-1]:
            raise damaged(path, f"it has {count} images, expected {ratio} times the {counts[-1]} of {release.test}")
    return splits


def _packed(path: Path, columns: Sequence[Column]) -> list[RawSplit]:
    also = [(column.name, column.values) for column in columns if column.name != "labels"]
    classes = next(column.values for column in columns if column.name == "labels")
    return [mosaic(path, split, classes, also) for split in ("train", "test")]


# --- the binary release ----------------------------------------------------------------------------------------------


def _binary(path: Path, columns: Sequence[Column], is_test: bool) -> RawSplit:
    """Records of one byte per label, then the red, green and blue pixels."""
    record = len(columns) + PIXELS
    with reading(path):
        size = path.stat().st_size
        if not size or size % record:
            raise damaged(path, f"it has {size} bytes; expected a multiple of {record}")
        with open_regular(path) as file:
            records = np.memmap(file, dtype=np.uint8, mode="r", shape=(size // record, record))
    labels = {
        column.name: checked(path, column.pickled, records[:, i], 0, column.values - 1)
        for i, column in enumerate(columns)
    }
    return RawSplit(labels, is_test, lambda: _planes(records[:, len(columns) :]))


def _planes(rows: Pixels) -> Iterator[Pixels]:
    """Yield [n, 3072] colour planes in pieces of [m, 32, 32, 3]."""
    for piece in cut(rows):
        yield piece.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)


# --- the pickled release ---------------------------------------------------------------------------------------------


def _pickled(path: Path, columns: Sequence[Column], is_test: bool) -> RawSplit:
    """A pickled dictionary of `data` [n, 3072] and lists of labels."""
    with reading(path, pickle.UnpicklingError, AttributeError):
        raw = _PlainUnpickler(read_bytes(path)).load()
        batch = {_text(key): value for key, value in raw.items()} if isinstance(raw, dict) else {}
    data = batch.get("data")
    if not isinstance(data, _Array):
        raise damaged(path, "it holds no array `data`")
    with reading(path, AttributeError):
        rows = data.values()
    if rows.ndim != 2 or rows.shape[1] != PIXELS:
        raise damaged(path, f"its data has shape {rows.shape}; expected [n, {PIXELS}]")
    labels = {}
    for column in columns:
        given = batch.get(column.pickled)
        if not isinstance(given, list) or len(given) != len(rows) or not all(type(label) is int for label in given):
            raise damaged(path, f"its {column.pickled} are no list of {len(rows)} numbers")
        with reading(path):
            labels[column.name] = checked(path, column.pickled, np.array(given, dtype=np.int64), 0, column.values - 1)
    return RawSplit(labels, is_test, lambda: _planes(rows))


class _PlainUnpickler(pickle._Unpickler):  # in Python: the one in C allocates as much memory as a file claims
    """Loads plain values and arrays and refuses all else; numpy's own unpickling is not used.

    What it makes cannot be much larger than the content: a size that is claimed is cut to what is there (reading from a
    file would reserve it first), and nothing is copied again and again.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._left = len(content)  # bytes that `_codecs.encode` may still make

    def _begin_dict(self) -> None:
        self.append(_Named())  # type: ignore[attr-defined]

    def _begin_old_dict(self) -> None:
        if self.pop_mark():  # type: ignore[attr-defined]
            self._refuse()
        self._begin_dict()

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("it holds something else than arrays, lists, numbers and texts by name")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.EMPTY_DICT[0]: _begin_dict,
        pickle.DICT[0]: _begin_old_dict,
        pickle.BYTEARRAY8[0]: _refuse,  # it is made in the size that is claimed
        **dict.fromkeys((pickle.EMPTY_SET[0], pickle.ADDITEMS[0], pickle.FROZENSET[0]), _refuse),
    }

    def find_class(self, module: str, name: str) -> Any:
        known = f"{module}.{name}".replace("numpy._core.", "numpy.core.")
        if known == "numpy.core.multiarray._reconstruct":
            return lambda *_: _Array()
        if known == "numpy.dtype":
            return lambda code, *_: _DType(_text(code))
        if known == "numpy.ndarray":
            return None  # only passed to _reconstruct
        if known == "_codecs.encode":  # how Python 3 writes bytes for Python 2
            return self._encode
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only arrays and plain values are read")

    def _encode(self, text: str, _: object) -> bytes:
        self._left -= len(text)
        if self._left < 0:
            raise pickle.UnpicklingError("it encodes more text than it holds")
        return str.encode(text, "latin-1")


class _Named(dict[Any, Any]):
    """A dictionary with texts as keys: to hash tuples in tuples may take for ever."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | bytes):
            raise pickle.UnpicklingError(f"one of its keys is a {type(key).__name__}; expected a text")
        super().__setitem__(key, value)


class _DType:
    """Replaces a dtype: its code, such as u1."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None: ...  # byte order: one byte has none


class _Array:
    """Replaces an array and reads its state itself."""

    def __setstate__(self, state: Any) -> None:
        _, self._shape, self._dtype, self._fortran, self._content = state

    def values(self) -> NDArray[np.uint8]:
        if self._dtype.code.lstrip("|") != "u1":
            raise ValueError(f"its data are of dtype {self._dtype.code!r}; expected u1, unsigned bytes")
        flat = np.frombuffer(self._content, dtype=np.uint8)
        return flat.reshape(self._shape, order="F" if self._fortran else "C")


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


RELEASES = {
    "cifar10": (
        Release("cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", _binary),
        Release("cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", _pickled),
    ),
    "cifar100": (
        Release("cifar-100-binary", ("train.bin",), "test.bin", _binary),
        Release("cifar-100-python", ("train",), "test", _pickled),
    ),
}
