"""The `Dataset` class: images, labels and domains as arrays, without clients."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fedprism.config import DataConfig, structure
from fedprism.errors import ConfigError, DataError, unknown
from fedprism.registry import Registry
from fedprism.yamlfile import parse_yaml

T = TypeVar("T")
Loader = Callable[[DataConfig, int], "Dataset"]

# A loader takes the configuration and the seed. `fedprism list datasets` shows the first line of its docstring. It
# parses what follows a colon (`folder:PATH`) or a question mark (`synthetic?clients=100`) in its name itself.
DATASETS: Registry[Loader] = Registry("dataset")

WITH_OPTIONS = {"folder"}  # datasets whose names may end in ?key=value,...; a module that calls `options` adds its own
NAME_LENGTH = 100


def load(config: DataConfig, seed: int) -> Dataset:
    """Load the dataset of a configuration."""
    kind, colon, rest = config.name.partition(":")
    kind = kind.partition("?")[0]
    if kind == "arrays":
        raise DataError(
            f"the images of {rest or 'this federation'!r} were arrays in a Python program and are not stored anywhere; "
            "make the federation there again with `Federation.from_arrays` and pass it on."
        )
    loader = DATASETS[kind]
    if colon and kind != "folder":
        raise DataError(f"dataset {config.name!r}: only `folder:PATH` takes a colon; write {kind!r}.")
    if "?" in config.name and kind not in WITH_OPTIONS:
        raise DataError(f"dataset {config.name!r}: {kind} takes no options; write {kind!r}.")
    return _select_domains(loader(config, seed), config)


def _select_domains(dataset: Dataset, config: DataConfig) -> Dataset:
    """The configured domains of a dataset; its loader may have skipped the others already."""
    wanted = chosen_domains(config, dataset.domain_names)
    if wanted == dataset.domain_names:
        return dataset
    number = torch.full((len(dataset.domain_names),), -1)
    number[[dataset.domain_names.index(name) for name in wanted]] = torch.arange(len(wanted))
    domains = number[dataset.domains]
    rows = domains >= 0

    def kept(level: Level | None) -> Level | None:
        return level and level._replace(labels=level.labels[rows])

    return replace(
        dataset,
        images=dataset.images[rows],
        labels=dataset.labels[rows],
        domains=domains[rows],
        domain_names=wanted,
        is_test=None if dataset.is_test is None else dataset.is_test[rows],
        coarse=kept(dataset.coarse),
        fine=kept(dataset.fine),
    )


def options(config: DataConfig, kind: type[T]) -> T:
    """Parse the options in a dataset's name, `name?key=value,key=value`, as a checked dataclass.

    >>> from dataclasses import dataclass, replace
    >>> @dataclass(frozen=True)
    ... class Size:
    ...     clients: int = 10
    >>> options(DataConfig("synthetic?clients=100"), Size).clients
    100
    """
    raw = {}
    for pair in filter(None, config.name.partition("?")[2].split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"data.name is {config.name!r}: {pair!r} is not key=value.")
        raw[key.strip()] = parse_yaml(value, f"data.name is {config.name!r}: the value of {key.strip()}")
    return structure(raw, kind, f"the options of {config.name!r}")


def side(config: DataConfig, own: int) -> int:
    """Pixels per side: the configured size, or the dataset's own."""
    return own if config.image_size == "auto" else config.image_size


def chosen_domains(config: DataConfig, known: Sequence[str], default: Sequence[str] | None = None) -> tuple[str, ...]:
    """The configured domains, or else `default` (None: all known domains)."""
    if config.domains is None:
        return tuple(known if default is None else default)
    for name in config.domains:
        if name not in known:
            raise ConfigError(f"data.domains of {config.name!r}: {unknown('domain', name, known)}")
    if not config.domains or len(set(config.domains)) < len(config.domains):
        raise ConfigError(f"data.domains is {list(config.domains)}; expected one or more domains, each once.")
    return config.domains


def check_names(kind: str, names: Iterable[str]) -> None:
    """Refuse names that are not valid file names on every system; `kind` is 'client' or 'class'.

    >>> check_names("client", ["plain", "Plain"])
    Traceback (most recent call last):
    fedprism.errors.DataError: client names 'plain' and 'Plain' differ only by case; rename one of them.
    """
    seen: dict[str, str] = {}
    for name in names:
        problem = _name_problem(name)
        if problem:
            raise DataError(f"{kind} name {str(name)[:NAME_LENGTH]!r} {problem}; rename it.")
        composed = unicodedata.normalize("NFC", name)
        folded = composed.casefold()
        other = seen.get(folded)
        seen[folded] = name
        if other is None:
            continue
        if other == name:
            raise DataError(f"{kind} name {name!r} is given twice; rename one of them.")
        if unicodedata.normalize("NFC", other) != composed:
            raise DataError(f"{kind} names {other!r} and {name!r} differ only by case; rename one of them.")
        raise DataError(
            f"{kind} names {other!a} and {name!a} differ only by how Unicode spells the same letters ({composed!r}); "
            "rename one of them."
        )


def _name_problem(name: object) -> str:
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


class Level(NamedTuple):
    """A second label per image, above its class (a superclass) or below it (a subclass)."""

    labels: Tensor  # int64 [n], index into names
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images (or texts) with their labels and domains."""

    name: str
    images: Tensor  # uint8 [n, channels, height, width]; or int32 [n, length]: texts as token ids, 0 is padding
    labels: Tensor  # int64 [n], index into class_names
    domains: Tensor  # int64 [n], index into domain_names
    domain_names: tuple[str, ...]
    class_names: tuple[str, ...]
    is_test: Tensor | None  # bool [n]: the dataset's own test split; None: it has none
    test_share: float  # test share where there is no test split and split.test is null
    min_train: int = 2  # minimum number of training images per client (batch norm needs two)
    sites: bool = False  # the domains are real sites, so every one must become a client
    coarse: Level | None = None  # superclass of each image
    fine: Level | None = None  # subclass of each image
    words: int = 0  # texts only: vocabulary size
    round_up: bool = False  # round the size of a test split up, as scikit-learn does, instead of to the nearest

    def __post_init__(self) -> None:
        n, what = len(self.images), f"dataset {self.name!r}"
        kinds = {"uint8 [n, channels, height, width]": (torch.uint8, 4), "int32 [n, length]": (torch.int32, 2)}
        if (self.images.dtype, self.images.ndim) not in kinds.values():
            given = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise DataError(f"{what}: images are {given}; expected {' or, of texts, '.join(kinds)}.")
        if (self.images.ndim == 2) != (self.words > 0):
            raise DataError(f"{what}: words is {self.words}; texts need the number of tokens, images have none.")
        columns = [("labels", self.labels, self.class_names), ("domains", self.domains, self.domain_names)]
        columns += [(name, *level) for name, level in (("coarse", self.coarse), ("fine", self.fine)) if level]
        for kind, values, names in columns:
            if values.dtype != torch.int64 or values.shape != (n,):
                raise DataError(f"{what}: {kind} are {values.dtype} {tuple(values.shape)}; expected int64 [{n}].")
            if n and (int(values.min()) < 0 or int(values.max()) >= len(names)):
                raise DataError(f"{what}: {kind} must lie between 0 and {len(names) - 1}.")
        if self.is_test is not None and (self.is_test.dtype != torch.bool or self.is_test.shape != (n,)):
            raise DataError(f"{what}: is_test must be bool [{n}].")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Images: (channels, height, width). Texts: (length, vocabulary size)."""
        shape = tuple(self.images.shape[1:])
        return (*shape, self.words) if self.words else shape
