"""`folder:PATH`: a user's own images, one folder per client.

    PATH/<client>/<class>/*.png                  a share of each client's images is the test split
    PATH/<client>/{train,test}/<class>/*.png     the test split is given

Options follow the path: `folder:PATH?unreadable=skip,background=white`. A relative PATH starts at `data.root` if set,
else at the working directory. The classes are the union over clients. Hidden files and folders are ignored.
`pictures.py` describes how an image becomes RGB pixels. With `model.per_client: folder`, PATH/<client>/model.yaml names
the client's model.
"""

from __future__ import annotations

import errno
import os
import stat
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedprism.config import DataConfig, setting, structure
from fedprism.data.base import DATASETS, Dataset, check_names, side
from fedprism.data.pictures import DAMAGED, SUFFIXES, read_picture, reason
from fedprism.data.progress import progress
from fedprism.errors import ConfigError, DataError, shown, some
from fedprism.yamlfile import read_yaml

TEST_SHARE = 0.2
SIDE = 16  # default pixels per side
WORKERS = min(8, os.cpu_count() or 1)  # each may have a large image in memory
LAYOUT = "expected PATH/<client>/<class>/ with images, or PATH/<client>/train/<class>/ and PATH/<client>/test/<class>/"
CLUTTER = ("thumbs.db", "desktop.ini")
MODEL = "model.yaml"  # a client's own model, in its folder


class Item(NamedTuple):
    """One image file with the client, class and split of its folders."""

    client: str
    label: str
    is_test: bool | None
    path: Path


@dataclass(frozen=True)
class Options:
    """The options after the path."""

    unreadable: Literal["refuse", "skip"] = setting("refuse", "what to do with images that cannot be read")
    background: Literal["black", "white"] = setting("black", "background of transparent images")


@DATASETS.register("folder")
def folder(config: DataConfig, seed: int) -> Dataset:
    """`folder:PATH`: your own images, PATH/<client>/<class>/*.png or PATH/<client>/{train,test}/<class>/*.jpg."""
    root, options = parse(config.name, config.root)
    try:
        items, labels = _list(root)
        _check_content(root, items, labels)
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be listed: {error.strerror or error}.") from None
    images, failed = _read(items, side(config, SIDE), options.background)
    if failed:
        _report_unreadable(root, items, failed, options)
        kept = [i for i in range(len(items)) if i not in failed]
        items, images = [items[i] for i in kept], images[kept]
        _check_content(root, items, labels)
    return _dataset(root, items, images, labels)


def parse(name: str, base: str | None = None) -> tuple[Path, Options]:
    """Parse `folder:PATH?option=value,...` into a path and options."""
    text = name.partition(":")[2]
    path, mark, tail = text.rpartition("?")
    if not mark or "=" not in tail:
        path, tail = text, ""
    if not path:
        raise DataError(f"dataset {name!r} names no folder; write folder:PATH, such as folder:data/sites.")
    pairs = {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in tail.split(",") if part)}
    try:
        root = Path(base or "").expanduser() / Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{path!r}, below {base!r}: no user on this machine has that home; write the path.") from None
    return root, structure(pairs, Options, f"the options of {name!r}")


def own_models(config: DataConfig) -> dict[Path, Any]:
    """The content of each client's model.yaml by path: a model's name, or a mapping with one. Reads no image."""
    root, _ = parse(config.name, config.root)
    try:
        files = [client / MODEL for client in _clients(root)]
    except OSError as error:
        raise DataError(f"{error.filename or root} cannot be listed: {error.strerror or error}.") from None
    without = [file.parent.name for file in files if not file.is_file()]
    if without:
        raise DataError(
            f"{root}: model.per_client is folder, so every client names its own model, but there is no {MODEL} in "
            f"{', '.join(without)}. Write one into each: a model's name, such as `resnet18`, or a mapping, such as "
            "`{name: resnet18, width: 16}`."
        )
    return {file: _model(file) for file in files}


def _model(file: Path) -> Any:
    try:
        raw = read_yaml(file)
    except ConfigError as error:
        raise DataError(str(error)) from None
    if not isinstance(raw.get("name") if isinstance(raw, dict) else raw, str):
        found = "is empty" if raw is None else f"holds {shown(raw)}"
        raise DataError(
            f"{file} {found}; expected a model's name, such as `resnet18`, or a mapping with a `name` and its "
            "settings, such as `{name: resnet18, width: 16}`."
        )
    return raw


# --- files -----------------------------------------------------------------------------------------------------------


def _list(root: Path) -> tuple[list[Item], list[str]]:
    """All image files in a fixed order, and all class names."""
    clients = _clients(root)
    _one_layout(root, clients)
    items: list[Item] = []
    labels: set[str] = set()
    ignored: list[Path] = []
    for client in clients:
        splits, _ = _entries(client)
        given = {split.name for split in splits} == {"train", "test"}
        for split in splits if given else [client]:
            for label in _entries(split)[0]:
                labels.add(label.name)
                pictures, others = _pictures(label)
                ignored += others
                items += [
                    Item(client.name, label.name, split.name == "test" if given else None, path) for path in pictures
                ]
    if ignored:
        names = [path.relative_to(root).as_posix() for path in ignored]
        kinds = ", ".join(SUFFIXES)
        warnings.warn(f"{root}: ignored files that are not {kinds}: {some(names)}.", stacklevel=2)
    check_names("class", sorted(labels))
    return items, sorted(labels)


def _clients(root: Path) -> list[Path]:
    """The clients' folders, in order."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise DataError(
            f"{root.absolute()} {what}; {LAYOUT}. A relative path starts at data.root, else in the working directory."
        )
    clients, _ = _entries(root)
    if not clients:
        raise DataError(f"{root} holds no folders; {LAYOUT}.")
    check_names("client", [client.name for client in clients])
    return clients


def _one_layout(root: Path, clients: Sequence[Path]) -> None:
    """Refuse a mix of clients with and without train/ and test/, and images outside of class folders."""
    with_splits: list[str] = []
    without: list[str] = []
    for client in clients:
        folders, files = _entries(client)
        names = {folder.name for folder in folders}
        given = {"train", "test"} <= names
        if given and len(names) > 2:
            raise DataError(
                f"{client} holds train/ and test/ and also {some(sorted(names - {'train', 'test'}))}; move training "
                "images into train/ (the validation split is taken from it), or remove them."
            )
        (with_splits if given else without).append(client.name)
        for level in [files, *(_entries(folder)[1] for folder in folders if given)]:
            stray = [path for path in level if path.suffix.lower() in SUFFIXES]
            if stray:
                raise DataError(
                    f"{stray[0].parent} holds images outside of a class folder, such as {stray[0].name!r}; {LAYOUT}."
                )
    if with_splits and without:
        raise DataError(
            f"{root}: some clients have train/ and test/ ({some(with_splits)}), others not ({some(without)}); "
            "use one layout for all."
        )


def _pictures(label: Path) -> tuple[list[Path], list[Path]]:
    """The image files of a class folder, and the other files."""
    folders, files = _entries(label, of_images=True)
    if folders:
        raise DataError(
            f"{label} should be a class folder but holds folders ({some([f.name for f in folders])}); {LAYOUT}."
        )
    pictures = [path for path in files if path.suffix.lower() in SUFFIXES]
    return pictures, [
        path for path in files if path.suffix.lower() not in SUFFIXES and path.name.lower() not in CLUTTER
    ]


def _entries(path: Path, of_images: bool = False) -> tuple[list[Path], list[Path]]:
    """Visible folders and files, sorted by name.

    What a broken link should be nobody knows, so it is refused. Among images (`of_images`) one with the name of an
    image is an image that cannot be read.
    """
    folders: list[Path] = []
    files: list[Path] = []
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        try:
            is_folder = stat.S_ISDIR(entry.stat().st_mode)
        except OSError as error:
            if not (of_images and entry.suffix.lower() in SUFFIXES):
                raise _unusable(entry, error) from None
            is_folder = False
        (folders if is_folder else files).append(entry)
    return folders, files


def _unusable(entry: Path, error: OSError) -> DataError:
    if not entry.is_symlink():
        return DataError(f"{entry} cannot be used: {error.strerror or error}. Make it readable, or remove it.")
    problem = "leads back to itself" if error.errno == errno.ELOOP else f"cannot be followed: {error.strerror or error}"
    return DataError(
        f"{entry} is a link to {os.readlink(entry)}, and {problem}. Mount or restore what it names, or remove the link."
    )


def _check_content(root: Path, items: Sequence[Item], labels: Sequence[str]) -> None:
    """Check that every client and every class has images, in train/ and test/ if these exist."""
    per_client = Counter((item.client, item.is_test) for item in items)
    given = any(item.is_test is not None for item in items)
    for client in _entries(root)[0]:
        for is_test in (False, True) if given else (None,):
            if not per_client[client.name, is_test]:
                where = {None: "", False: "/train", True: "/test"}[is_test]
                raise DataError(
                    f"client {client.name!r} has no images in {client}{where}; expected class folders with files that "
                    f"end in {', '.join(SUFFIXES)}. Add some, or remove the client."
                )
    trained = {item.label for item in items if not item.is_test}
    missing = [label for label in labels if label not in trained]
    if missing:
        what = "training images" if given else "images"
        raise DataError(
            f"{root}: no client has {what} of the classes {some(missing)}; add some, or remove the empty folders."
        )
    if len(labels) < 2:
        raise DataError(f"{root} has one class only ({labels[0]!r}); expected two or more class folders per client.")


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(items: Sequence[Item], size: int, background: str) -> tuple[Tensor, dict[int, str]]:
    """All images, uint8 [n, 3, size, size], and the reason for each image that cannot be read."""
    images = torch.zeros(len(items), 3, size, size, dtype=torch.uint8)
    failed: dict[int, str] = {}

    def read(item: Item) -> NDArray[np.uint8] | str:
        try:
            return read_picture(item.path, size, background)
        except DAMAGED as error:
            return reason(error)

    with warnings.catch_warnings(), ThreadPoolExecutor(WORKERS) as pool, progress("reading images", len(items)) as step:
        warnings.simplefilter("ignore")  # Pillow's, on odd but readable files
        try:
            for i, result in enumerate(pool.map(read, items)):
                if isinstance(result, str):
                    failed[i] = result
                else:
                    images[i] = torch.tensor(result)
                step()
        finally:
            pool.shutdown(cancel_futures=True)
    return images, failed


def _report_unreadable(root: Path, items: Sequence[Item], failed: dict[int, str], options: Options) -> None:
    """Refuse unreadable images, or warn that they are skipped."""
    names = [f"{items[i].path.relative_to(root).as_posix()} ({why})" for i, why in failed.items()]
    message = f"{len(failed)} of {len(items)} images in {root} cannot be read: {some(names, '; ')}."
    if options.unreadable == "refuse":
        raise DataError(f"{message} Repair or remove them, or leave them out with `folder:PATH?unreadable=skip`.")
    warnings.warn(f"{message} They are left out.", stacklevel=2)


def _dataset(root: Path, items: Sequence[Item], images: Tensor, labels: Sequence[str]) -> Dataset:
    clients = sorted({item.client for item in items})
    present = {client: {item.label for item in items if item.client == client} for client in clients}
    lacking = [
        f"{c!r} lacks {some([x for x in labels if x not in present[c]])}"
        for c in clients
        if len(present[c]) < len(labels)
    ]
    if lacking:
        warnings.warn(
            f"{root}: clients have different classes; the model gets all {len(labels)}, and {some(lacking, '; ')}.",
            stacklevel=2,
        )
    label_number = {label: number for number, label in enumerate(labels)}
    client_number = {client: number for number, client in enumerate(clients)}
    return Dataset(
        name=root.resolve().name or "folder",
        images=images,
        labels=torch.tensor([label_number[item.label] for item in items]),
        domains=torch.tensor([client_number[item.client] for item in items]),
        domain_names=tuple(clients),
        class_names=tuple(labels),
        is_test=None if items[0].is_test is None else torch.tensor([bool(item.is_test) for item in items]),
        test_share=TEST_SHARE,
        sites=True,
    )
