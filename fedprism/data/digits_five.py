"""`mnist`, and `digits-five`: digits of five domains, each with its own training and test split.

    <root>/mnist/train-images-idx3-ubyte(.gz), train-labels-idx1-ubyte(.gz), t10k-images-..., t10k-labels-...
    <root>/mnist-m/mnist_m/mnist_m_train/*.png, mnist_m_train_labels.txt, mnist_m_test/*.png, mnist_m_test_labels.txt
    <root>/svhn/train_32x32.mat, test_32x32.mat
    <root>/usps/usps.bz2, usps.t.bz2
    <root>/synth-digits/synth_train_32x32.mat, synth_test_32x32.mat
    <root>/digits_mnist.npz, digits_mnistm.npz, digits_svhn.npz, digits_usps.npz: packed mosaics

Images are resized to 28 x 28 pixels in three channels, as in FedBN; `data.image_size: 32` sets another size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedprism.config import DataConfig
from fedprism.data.base import DATASETS, Dataset, chosen_domains, side
from fedprism.data.cache import Arrays, ArrayWriter, converted
from fedprism.data.digit_files import idx, libsvm, listed, mat
from fedprism.data.packed import mosaic
from fedprism.data.parts import RawSplit, cut, dataset_of, fill
from fedprism.data.places import root_of
from fedprism.data.sources import looking, missing, visible
from fedprism.errors import DataError

VERSION = 1
SIDE = 28
TEST_SHARE = 0.2  # FedBN's, where train and test are merged
DIGITS = tuple("0123456789")

SYNTH, STAND_IN = "synth-digits", "synth-digits-like"
DOMAINS = ("mnist", "mnist-m", "svhn", "usps", SYNTH)
STAND_IN_SIZE = (0, 7438, 1860)  # seed, training and test images: the same in every run


@DATASETS.register("mnist")
def mnist(config: DataConfig, seed: int) -> Dataset:
    """70,000 handwritten digits in grey, 28 x 28 pixels; 10,000 of them are the test split."""
    arrays = _arrays("mnist", ("mnist",), root_of(config), side(config, SIDE), channels=1)
    return dataset_of("mnist", arrays, ("mnist",), DIGITS, TEST_SHARE)


@DATASETS.register("digits-five")
def digits_five(config: DataConfig, seed: int) -> Dataset:
    """Digits of five domains, MNIST, MNIST-M, SVHN, USPS and SynthDigits, in colour, 28 x 28 pixels."""
    domains = chosen_domains(config, (*DOMAINS, STAND_IN), DOMAINS)
    arrays = _arrays("digits-five", domains, root_of(config), side(config, SIDE), channels=3)
    return dataset_of("digits-five", arrays, domains, DIGITS, TEST_SHARE)


# --- files -----------------------------------------------------------------------------------------------------------


class DomainFiles(NamedTuple):
    """A domain's files and the reader of its two splits."""

    files: tuple[Path, ...]
    read: Callable[[], Sequence[RawSplit]]


@looking()
def _arrays(name: str, domains: Sequence[str], root: Path, size: int, channels: int) -> Arrays:
    """The chosen domains in one cached array: concatenating cached arrays later would copy them into memory."""
    files_of = {domain: _find(domain, root, size) for domain in domains}
    found = [domain for domain in files_of.values() if domain is not None]
    if len(found) < len(domains):
        raise _missing(name, root, [domain for domain in domains if files_of[domain] is None])

    def convert(writer: ArrayWriter) -> None:
        splits = []
        for number, domain in enumerate(found):
            for split in domain.read():
                own = np.full(len(split.columns["labels"]), number, dtype=np.int64)
                splits.append(split._replace(columns={**split.columns, "domains": own}))
        fill(writer, splits, size, channels)

    settings: dict[str, object] = {"side": size, "domains": list(domains)}
    if STAND_IN in domains:
        from fedprism.data import synth_digits

        settings[STAND_IN] = [synth_digits.VERSION, *STAND_IN_SIZE]
    files = [path for domain in found for path in domain.files]
    return converted(name, VERSION, files, settings, convert)


def _find(domain: str, root: Path, size: int) -> DomainFiles | None:
    """The published files of a domain if all of them are there, else its packed file."""
    if domain == STAND_IN:
        return DomainFiles((), lambda: _stand_in(size))
    packed = root / f"digits_{domain.replace('-', '')}.npz"
    published = _PUBLISHED[domain](root / domain, size)
    if published is None and packed.is_file():
        return DomainFiles((packed,), lambda: [mosaic(packed, split, len(DIGITS)) for split in ("train", "test")])
    return published


def _missing(name: str, root: Path, domains: Sequence[str]) -> DataError:
    detail = "" if name == domains[0] else f"Not there: {', '.join(domains)} of {name}."
    if SYNTH in domains:
        detail += (
            f" `--set 'data.domains=[mnist, mnist-m, svhn, usps]'` goes without {SYNTH}; `{STAND_IN}` in its place is "
            "a stand-in that is drawn here, not the original."
        )
    return missing(domains[0] if len(domains) == 1 else name, root, detail)


def _mnist(folder: Path, size: int) -> DomainFiles | None:
    stems = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    files = [_first(folder / stem, folder / f"{stem}.gz") for stem in stems]
    images, labels, test_images, test_labels = files
    return _if_present(files, lambda: [idx(images, labels, False), idx(test_images, test_labels, True)])


def _mnist_m(folder: Path, size: int) -> DomainFiles | None:
    """The cache key has only the names and times of the image folders: checking every image would take too long."""
    folder = _first(folder / "mnist_m", folder)
    lists = [folder / f"mnist_m_{part}_labels.txt" for part in ("train", "test")]
    pictures = [folder / f"mnist_m_{part}" for part in ("train", "test")]
    return _if_present(
        [*lists, *pictures], lambda: [listed(lists[i], pictures[i], size, is_test=bool(i)) for i in range(2)]
    )


def _svhn(folder: Path, size: int) -> DomainFiles | None:
    train, test = folder / "train_32x32.mat", folder / "test_32x32.mat"
    return _if_present([train, test], lambda: [mat(train, 1, 10, False), mat(test, 1, 10, True)])


def _usps(folder: Path, size: int) -> DomainFiles | None:
    train, test = _first(folder / "usps", folder / "usps.bz2"), _first(folder / "usps.t", folder / "usps.t.bz2")
    return _if_present([train, test], lambda: [libsvm(train, False), libsvm(test, True)])


def _synth(folder: Path, size: int) -> DomainFiles | None:
    """The archive may contain a folder of its own."""
    names = ("synth_train_32x32.mat", "synth_test_32x32.mat")
    train, test = (_first(folder / name, *visible(folder, f"*/{name}")) for name in names)
    return _if_present([train, test], lambda: [mat(train, 0, 9, False), mat(test, 0, 9, True)])


_PUBLISHED: dict[str, Callable[[Path, int], DomainFiles | None]] = {
    "mnist": _mnist,
    "mnist-m": _mnist_m,
    "svhn": _svhn,
    "usps": _usps,
    SYNTH: _synth,
}


def _if_present(files: Sequence[Path], read: Callable[[], Sequence[RawSplit]]) -> DomainFiles | None:
    return DomainFiles(tuple(files), read) if all(path.exists() for path in files) else None


def _first(*paths: Path) -> Path:
    """The first path that exists, or else the last."""
    return next((path for path in paths if path.exists()), paths[-1])


def _stand_in(size: int) -> list[RawSplit]:
    from fedprism.data.synth_digits import synth_digits_like

    images, labels, is_test = (tensor.numpy() for tensor in synth_digits_like(size, *STAND_IN_SIZE))
    pixels: NDArray[np.uint8] = images.transpose(0, 2, 3, 1)
    return [
        RawSplit({"labels": labels[is_test == test]}, test, partial(cut, pixels[is_test == test]))
        for test in (False, True)
    ]
