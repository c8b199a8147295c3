"""What a dataset is: images, labels and domains as arrays. It knows nothing of clients."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprism.config import DataConfig
from fedprism.errors import DataError
from fedprism.registry import Registry

Loader = Callable[[DataConfig, int], "Dataset"]

# A loader takes the configuration and the seed; the first line of its docstring is what `fedprism list datasets` shows.
# What follows a colon in a dataset's name (`folder:PATH`) is the loader's own business.
DATASETS: Registry[Loader] = Registry("dataset")

NAME_LENGTH = 100


def load(config: DataConfig, seed: int) -> Dataset:
    """The dataset that the configuration names."""
    kind, colon, rest = config.name.partition(":")
    if kind == "arrays":
        raise DataError(
            f"the images of {rest or 'this federation'!r} were arrays in a Python program and are not stored anywhere; "
            "make the federation there again with `Federation.from_arrays` and hand it over."
        )
    loader = DATASETS[kind]
    if colon and kind != "folder":
        raise DataError(f"dataset {config.name!r}: only `folder:PATH` takes a colon; write {kind!r}.")
    return loader(config, seed)


def check_names(kind: str, names: Iterable[str]) -> None:
    """Refuse names that cannot be a file's name everywhere; `kind` is 'client' or 'class'.

    >>> check_names("client", ["plain", "Plain"])
    Traceback (most recent call last):
    fedprism.errors.DataError: client names 'plain' and 'Plain' differ only by case; rename one of them.
    """
    seen: dict[str, str] = {}
    for name in names:
        wrong = _wrong_with(name)
        if wrong:
            raise DataError(f"{kind} name {str(name)[:NAME_LENGTH]!r} {wrong}; rename it.")
        folded = unicodedata.normalize("NFC", name).casefold()
        if folded in seen:
            how = "is given twice" if seen[folded] == name else "differ only by case"
            pair = f"name {name!r}" if seen[folded] == name else f"names {seen[folded]!r} and {name!r}"
            raise DataError(f"{kind} {pair} {how}; rename one of them.")
        seen[folded] = name


def _wrong_with(name: object) -> str:
    if not isinstance(name, str):
        return "is not a text"
    if not name:
        return "is empty"
    if len(name) > NAME_LENGTH:
        return f"has {len(name)} characters; at most {NAME_LENGTH} are possible"
    if not name.isprintable():
        return "holds control or invisible characters"
    if name != name.strip():
        return "begins or ends with a space"
    if name.startswith("."):
        return "begins with a dot"
    for part in ("/", "\\", ".."):
        if part in name:
            return f"holds {part!r}"
    return ""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with their labels and the domain that each was taken from."""

    name: str
    images: Tensor  # uint8 [n, channels, height, width]
    labels: Tensor  # int64 [n], index into class_names
    domains: Tensor  # int64 [n], index into domain_names
    domain_names: tuple[str, ...]
    class_names: tuple[str, ...]
    is_test: Tensor | None  # bool [n]: the dataset's own test part; None: there is none
    test_share: float  # share for the test where there is no test part and split.test is null
    least_train: int = 2  # fewer training images than this are too few for a client (batch norm needs two)
    sites: bool = False  # the domains are real sites: none may be left out

    def __post_init__(self) -> None:
        n, what = len(self.images), f"dataset {self.name!r}"
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            given = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise DataError(f"{what}: images are {given}; expected uint8 [n, channels, height, width].")
        for kind, values, names in (
            ("labels", self.labels, self.class_names),
            ("domains", self.domains, self.domain_names),
        ):
            if values.dtype != torch.int64 or values.shape != (n,):
                raise DataError(f"{what}: {kind} are {values.dtype} {tuple(values.shape)}; expected int64 [{n}].")
            if n and (int(values.min()) < 0 or int(values.max()) >= len(names)):
                raise DataError(f"{what}: {kind} must lie between 0 and {len(names) - 1}.")
        if self.is_test is not None and (self.is_test.dtype != torch.bool or self.is_test.shape != (n,)):
            raise DataError(f"{what}: is_test must be bool [{n}].")

    def __len__(self) -> int:
        return len(self.labels)
