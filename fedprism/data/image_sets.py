"""Published image collections: Office-Caltech-10, ten classes of DomainNet, PACS, Tiny-ImageNet.

    <root>/office-caltech-10/<domain>/<class>/*.jpg      amazon, caltech, dslr, webcam
    <root>/domainnet-10/<domain>/<class>/*.jpg           with the lists <domain>_train.txt and <domain>_test.txt
    <root>/pacs/<domain>/<class>/*.jpg                   art_painting, cartoon, photo, sketch
    <root>/tiny-imagenet/train/<wnid>/images/*.JPEG      with val/images, val/val_annotations.txt, wnids.txt, words.txt
    <root>/office_caltech10.npz, pacs_128.npz, tiny_imagenet_subset.npz: packed JPEG files

The folders may be up to two levels deeper, as in some archives. Other classes are ignored, so that Office-31,
Caltech-256 and the whole DomainNet can be used as they are. `pictures.py` describes how a file becomes pixels. The
cache checks names and times of folders, so it does not notice an image that is changed in place.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedprism.config import DataConfig
from fedprism.data.base import DATASETS, Dataset, chosen_domains, side
from fedprism.data.cache import Arrays, ArrayWriter, converted
from fedprism.data.folder import WORKERS
from fedprism.data.packed import Jpegs
from fedprism.data.parts import damaged, dataset_of, reading
from fedprism.data.pictures import DAMAGED, SUFFIXES, read_picture, reason
from fedprism.data.places import root_of
from fedprism.data.sources import looking, missing
from fedprism.errors import DataError, some
from fedprism.files import read_text

VERSION = 1
TEST_SHARE = 0.2  # as papers on Office-Caltech-10; also for PACS, which has no test split either

# Other spellings of domains and classes, in Office-31, Caltech-256 and collections of both.
Spellings = Mapping[str, Collection[str]]
OFFICE_DOMAINS: Spellings = {
    "amazon": (),
    "caltech": ("caltech10", "caltech_10", "256_objectcategories"),
    "dslr": (),
    "webcam": (),
}
OFFICE: Spellings = {
    "backpack": ("back_pack",),
    "bike": ("touring_bike",),
    "calculator": (),
    "headphones": ("head_phones",),
    "keyboard": ("computer_keyboard",),
    "laptop": ("laptop_computer", "laptop_101"),
    "monitor": ("computer_monitor",),
    "mouse": ("computer_mouse",),
    "mug": ("coffee_mug",),
    "projector": ("video_projector",),
}
PACS_DOMAINS: Spellings = dict.fromkeys(("art_painting", "cartoon", "photo", "sketch"), ())
PACS: Spellings = dict.fromkeys(("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"), ())
DOMAINNET_DOMAINS: Spellings = dict.fromkeys(("clipart", "infograph", "painting", "quickdraw", "real", "sketch"), ())
# FedBN's ten, in its order.
DOMAINNET: Spellings = dict.fromkeys(
    ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra"), ()
)


class Pictures(NamedTuple):
    """The images to read, [n] each, and their reader: `read(i, side)` returns uint8 [3, side, side]."""

    names: Sequence[str]
    columns: Mapping[str, NDArray[np.int64] | NDArray[np.bool_]]
    read: Callable[[int, int], NDArray[np.uint8]]
    class_names: Sequence[str] = ()  # if they are not known in advance


@DATASETS.register("office-caltech-10")
def office_caltech_10(config: DataConfig, seed: int) -> Dataset:
    """2,533 photographs of ten office objects: amazon, caltech, dslr, webcam; 256 x 256 pixels."""
    return _by_domain(config, "office-caltech-10", OFFICE_DOMAINS, OFFICE, "office_caltech10.npz", (256, 256))


@DATASETS.register("pacs")
def pacs(config: DataConfig, seed: int) -> Dataset:
    """9,991 images of seven classes: art_painting, cartoon, photo, sketch; 227 x 227 pixels (packed: 128 x 128)."""
    return _by_domain(config, "pacs", PACS_DOMAINS, PACS, "pacs_128.npz", (227, 128))


@DATASETS.register("domainnet-10")
@looking()
def domainnet_10(config: DataConfig, seed: int) -> Dataset:
    """FedBN's ten classes of DomainNet: clipart, infograph, painting, quickdraw, real, sketch; 256 x 256 pixels."""
    name, root = "domainnet-10", root_of(config)
    base, domains = root / name, chosen_domains(config, tuple(DOMAINNET_DOMAINS))
    there = _domain_folders(base, DOMAINNET_DOMAINS)
    folders = _class_folders(name, root, {domain: there.get(domain) for domain in domains}, DOMAINNET)
    lists = []
    for file in (f"{domain}_{part}.txt" for domain in domains for part in ("train", "test")):
        found = next((folder / file for level in _levels(base) for folder in level if (folder / file).is_file()), None)
        if found is None:
            raise missing(name, root, f"The list {file} is missing.")
        lists.append(found)
    sources = [*lists, *folders]
    arrays = _arrays(name, sources, side(config, 256), domains, lambda: _domainnet(base, lists, there))
    return dataset_of(name, arrays, domains, tuple(DOMAINNET), TEST_SHARE)


@DATASETS.register("tiny-imagenet")
@looking()
def tiny_imagenet(config: DataConfig, seed: int) -> Dataset:
    """Tiny-ImageNet: photographs of 200 classes, 64 x 64 pixels; its validation split is the test split."""
    name, root = "tiny-imagenet", root_of(config)
    homes = (folder for level in _levels(root / name) for folder in level if (folder / "train").is_dir())
    home = next(homes, None)
    packed = root / "tiny_imagenet_subset.npz"
    if home is not None:
        lists = [home / "wnids.txt", home / "words.txt", home / "val" / "val_annotations.txt"]
        for path in lists:
            if not path.is_file():
                raise missing(name, root, f"{path} is missing.")
        wnids = sorted(set(_lines(lists[0])))  # 200
        folders = [*(home / "train" / wnid / "images" for wnid in wnids), home / "val" / "images"]
        for path in folders:
            if not path.is_dir():
                raise missing(name, root, f"{path} is missing.")
        sources = [*lists, *folders]
    elif packed.is_file():
        sources = [packed]
    else:
        raise missing(name, root)

    def pictures() -> Pictures:
        return _tiny_packed(packed) if home is None else _tiny(home, wnids)

    arrays = _arrays(name, sources, side(config, 64), (name,), pictures)
    return dataset_of(name, arrays, (name,), arrays.facts["class_names"], TEST_SHARE)


# --- one folder per domain and class ---------------------------------------------------------------------------------


@looking()
def _by_domain(
    config: DataConfig, name: str, known: Spellings, classes: Spellings, packed_name: str, own_sides: tuple[int, int]
) -> Dataset:
    """A dataset without a test split; `own_sides` are the sizes of the published and the packed form."""
    root, domains = root_of(config), chosen_domains(config, tuple(known))
    packed, there = root / packed_name, _domain_folders(root / name, known)
    if there:
        folders = _class_folders(name, root, {domain: there.get(domain) for domain in domains}, classes)
        sources, size = list(folders), side(config, own_sides[0])
    elif packed.is_file():
        sources, size = [packed], side(config, own_sides[1])
    else:
        raise missing(name, root)

    def pictures() -> Pictures:
        if not there:
            return _packed(packed, domains, tuple(classes))
        return _published(root / name, [(path, *place) for folder, place in folders.items() for path in _files(folder)])

    return dataset_of(name, _arrays(name, sources, size, domains, pictures), domains, tuple(classes), TEST_SHARE)


def _class_folders(
    name: str, root: Path, domains: Mapping[str, Path | None], classes: Spellings
) -> dict[Path, tuple[int, int]]:
    """Each folder of images with the indices of its class and domain."""
    folders = {}
    for number, (domain, folder) in enumerate(domains.items()):
        if folder is None:
            raise missing(name, root, f"The domain {domain!r} is missing.")
        inside = folder / "images"  # Office-31 has one more level
        found = _spelled(inside if inside.is_dir() else folder, classes)
        for label, spelling in enumerate(classes):
            if spelling not in found:
                raise missing(name, root, f"The class {spelling!r} is missing in {folder}.")
            folders[found[spelling]] = (label, number)
    return folders


def _domain_folders(folder: Path, known: Spellings) -> dict[str, Path]:
    """The folder of each domain that is there, up to two levels deep."""
    found: dict[str, Path] = {}
    for level in _levels(folder):
        for candidate in level:
            found = _spelled(candidate, known) | found
        if len(found) == len(known):
            break
    return found


def _spelled(folder: Path, known: Spellings) -> dict[str, Path]:
    """The known folders in `folder`, in any spelling: `back_pack` and `003.backpack` are backpack."""
    names = {spelling: name for name, others in known.items() for spelling in (name, *others)}
    found: dict[str, Path] = {}
    for entry in _entries(folder):
        name = names.get(re.sub(r"^\d{3}\.", "", entry.name.lower()).replace("-", "_").replace(" ", "_"))
        if name is None or not entry.is_dir():
            continue
        if name in found:
            raise DataError(f"{folder} holds {found[name].name} and {entry.name}, which are both {name!r}; remove one.")
        found[name] = entry
    return found


def _packed(path: Path, domains: Sequence[str], classes: Sequence[str]) -> Pictures:
    """The packed form, with the domains and classes in our order."""
    jpegs = Jpegs(path)
    own_domains, own_classes = jpegs.names("domains"), jpegs.names("classes")
    for what, wanted, known in (("domain", domains, own_domains), ("class", classes, own_classes)):
        for name in wanted:
            if name not in known:
                raise damaged(path, f"it has no {what} {name!r}, but {', '.join(known)}")
    domain = _renumbered(jpegs.column("domain", len(own_domains)), own_domains, domains)
    label = _renumbered(jpegs.column("label", len(own_classes)), own_classes, classes)
    kept = np.flatnonzero((domain >= 0) & (label >= 0))
    kept = kept[np.lexsort((label[kept], domain[kept]))]
    names = jpegs.names("path", len(jpegs))
    return Pictures(
        [names[i] for i in kept],
        {"labels": label[kept], "domains": domain[kept]},
        lambda i, size: jpegs.picture(int(kept[i]), size),
    )


def _renumbered(numbers: NDArray[np.int64], own: Sequence[str], wanted: Sequence[str]) -> NDArray[np.int64]:
    """Map indices into `own` to indices into `wanted`; -1: not wanted."""
    return np.array([wanted.index(name) if name in wanted else -1 for name in own])[numbers]


# --- lists -----------------------------------------------------------------------------------------------------------


def _domainnet(base: Path, lists: Sequence[Path], folders: Mapping[str, Path]) -> Pictures:
    """The listed images of the ten classes; a line is a path, `<domain>/<class>/<file>`, and a class index of 345."""
    items: list[tuple[Path, int, int]] = []
    is_test: list[NDArray[np.bool_]] = []
    number = {label: i for i, label in enumerate(DOMAINNET)}
    for nth, listed in enumerate(lists):  # two per domain: train, test
        domain, before = listed.name.partition("_")[0], len(items)
        for line in _lines(listed):
            given, _, label = line.rpartition(" ")
            path = PurePosixPath(given).parts
            if not label.isdecimal() or len(path) != 3 or path[0] != domain or ".." in path:
                wanted = f"a path, {domain}/<class>/<file>, and a number"
                raise damaged(listed, f"one of its lines is {line[:100]!r}; expected {wanted}")
            if path[1] in number:
                items.append((folders[domain] / path[1] / path[2], number[path[1]], nth // 2))
        if len(items) == before:
            raise damaged(listed, f"it names no images of {', '.join(DOMAINNET)}")
        is_test.append(np.full(len(items) - before, nth % 2 == 1))
    pictures = _published(base, items)
    twice = [name for name, times in Counter(pictures.names).items() if times > 1]
    if twice:
        raise DataError(f"{base}: the lists name {some(twice)} more than once; get them again as they were published.")
    return pictures._replace(columns={**pictures.columns, "is_test": np.concatenate(is_test)})


def _tiny(home: Path, wnids: Sequence[str]) -> Pictures:
    """Training images by folder, those of val/ by its list."""
    number = {wnid: i for i, wnid in enumerate(wnids)}
    items = [(path, i, 0) for wnid, i in number.items() for path in _files(home / "train" / wnid / "images")]
    trained = len(items)
    listed = home / "val" / "val_annotations.txt"
    for nth, line in enumerate(_lines(listed), 1):
        file, wnid = (*line.split("\t"), "")[:2]
        if wnid not in number or Path(file).name != file:
            raise damaged(listed, f"line {nth} is {line[:100]!r}; expected a file's name, a tab and one of wnids.txt")
        items.append((home / "val" / "images" / file, number[wnid], 0))
    pictures = _published(home, items)
    words = dict(line.split("\t", 1) for line in _lines(home / "words.txt") if "\t" in line)
    return pictures._replace(
        columns={**pictures.columns, "is_test": np.arange(len(items)) >= trained},
        class_names=_first_words(wnids, [words.get(wnid, wnid) for wnid in wnids]),
    )


def _tiny_packed(path: Path) -> Pictures:
    train, test = Jpegs(path, "train_"), Jpegs(path, "test_")
    wnids = train.names("classes")
    labels = np.concatenate([part.column("y", len(wnids)) for part in (train, test)])
    if list(wnids) != sorted(set(wnids)):
        raise damaged(path, "its classes are not sorted")
    return Pictures(
        [*train.names("train_path", len(train)), *test.names("test_path", len(test))],
        {"labels": labels, "domains": np.zeros_like(labels), "is_test": np.arange(len(labels)) >= len(train)},
        lambda i, size: train.picture(i, size) if i < len(train) else test.picture(i - len(train), size),
        _first_words(wnids, train.names("class_words", len(wnids))),
    )


def _first_words(wnids: Sequence[str], words: Sequence[str]) -> list[str]:
    """`goldfish` of 'goldfish, Carassius auratus'; classes with the same name get their numbers appended.

    >>> _first_words(["n1", "n2", "n3"], ["goldfish, Carassius", "crane", "crane, bird"])
    ['goldfish', 'crane n2', 'crane n3']
    """
    first = [word.split(",")[0].strip() for word in words]
    return [name if first.count(name) == 1 else f"{name} {wnid}" for name, wnid in zip(first, wnids, strict=True)]


# --- files -----------------------------------------------------------------------------------------------------------


def _levels(folder: Path) -> Iterator[list[Path]]:
    """`folder`, then its subfolders, then their subfolders."""
    level = [folder] if folder.is_dir() else []
    yield level
    for _ in range(2):
        level = [entry for candidate in level for entry in _entries(candidate) if entry.is_dir()]
        yield level


def _entries(folder: Path) -> list[Path]:
    """The visible entries of a folder, sorted by name."""
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX")))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error.strerror or error}.") from None


def _files(folder: Path) -> list[Path]:
    """The images in a folder."""
    files = [path for path in _entries(folder) if path.suffix.lower() in SUFFIXES]
    if not files:
        raise DataError(f"{folder} holds no images; expected files that end in {', '.join(SUFFIXES)}.")
    return files


def _lines(path: Path) -> list[str]:
    """The lines of a list; an empty list is refused."""
    with reading(path):
        lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise damaged(path, "it is empty")
    return lines


def _published(home: Path, items: Sequence[tuple[Path, int, int]]) -> Pictures:
    """Files with the indices of their class and domain."""
    return Pictures(
        [path.relative_to(home).as_posix() for path, _, _ in items],
        {
            "labels": np.array([label for _, label, _ in items], dtype=np.int64),
            "domains": np.array([domain for _, _, domain in items], dtype=np.int64),
        },
        lambda i, size: read_picture(items[i][0], size),
    )


# --- into the cache --------------------------------------------------------------------------------------------------


def _arrays(
    name: str, sources: Sequence[Path], size: int, domains: Sequence[str], pictures: Callable[[], Pictures]
) -> Arrays:
    """Read the images once, at `size` x `size` pixels; the error for damaged images names them."""

    def convert(writer: ArrayWriter) -> None:
        found = pictures()
        images = writer.inputs((len(found.names), 3, size, size))

        def read(i: int) -> str | None:
            try:
                images[i] = found.read(i, size)
            except (*DAMAGED, DataError) as error:
                return f"{found.names[i]} ({reason(error)})"
            return None

        failed = []
        total = len(images)
        with warnings.catch_warnings(), ThreadPoolExecutor(WORKERS) as pool, writer.progress(total) as step:
            warnings.simplefilter("ignore")  # Pillow's, on odd but readable files
            try:
                for problem in pool.map(read, range(total)):
                    if problem:
                        failed.append(problem)
                    step()
            finally:
                pool.shutdown(cancel_futures=True)
        if failed:
            raise DataError(
                f"{len(failed)} of {total} images of {name} cannot be read: {some(failed, '; ')}. "
                "Get them again as they were published."
            )
        writer.columns.update(found.columns)
        writer.facts["class_names"] = list(found.class_names)

    return converted(name, VERSION, sources, {"side": size, "domains": list(domains)}, convert)
