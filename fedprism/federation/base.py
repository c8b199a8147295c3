"""The `Federation` class: clients, each with its own training, validation and test images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprism import keys, limits
from fedprism.config import SPLITS, DataConfig, structure
from fedprism.data import check_names
from fedprism.errors import ConfigError, DataError, shown, unknown
from fedprism.federation.splits import check_shares, split

SHOWN = 20  # clients in a repr
DIGESTED_AT_ONCE = 1024  # images, so that a memory-mapped file is not copied as a whole
COMPARED_AT_ONCE = 2**24  # labels times classes


class Split:
    """The training, validation or test data of a client. Images are uint8; `fedprism.data.normalise` converts them.

    The images are a tensor or, with `Split.of`, rows of a tensor that all clients share, such as a memory-mapped file.
    Shared rows are gathered when they are used.

    >>> everything = torch.arange(12, dtype=torch.uint8).view(4, 3, 1, 1)
    >>> split = Split.of(everything, torch.tensor([3, 1]), torch.tensor([0, 1]))
    >>> split.batch(torch.tensor([1])).flatten().tolist()
    [3, 4, 5]
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._source = x  # uint8 [n, channels, height, width], or int32 [n, length] of texts
        self._rows: Tensor | None = None
        self.y = y  # int64 [n]

    @classmethod
    def of(cls, source: Tensor, rows: Tensor, y: Tensor) -> Split:
        """Rows of `source` with labels `y`; `source` is neither copied nor read."""
        split = cls(source, y)
        split._rows = rows
        return split

    def __repr__(self) -> str:
        dtype, shape = self.kind
        return f"Split({len(self)} of {str(dtype).removeprefix('torch.')} {list(shape)})"

    def __reduce__(self) -> tuple[type[Split], tuple[Tensor, Tensor]]:
        """Pickle only this split's rows, not the shared tensor."""
        return Split, (self.x.clone(), self.y.clone())

    @property
    def rows(self) -> Tensor | None:
        """The row indices into the shared tensor; None if the split has its own tensor."""
        return self._rows

    @property
    def x(self) -> Tensor:
        """All images; a copy if the tensor is shared."""
        return self._source if self._rows is None else self._source[self._rows]

    def numbers(self, begin: int, end: int) -> Tensor:
        """The row numbers from `begin` to below `end`, on the device of the images."""
        return torch.arange(begin, end, device=self.y.device)

    def placed(self, rows: Tensor) -> Tensor:
        """Row indices on the device of the split."""
        return rows.to(self.y.device)

    def batch(self, rows: Tensor) -> Tensor:
        """The images of these rows."""
        return self._source[rows if self._rows is None else self._rows[rows]]

    def parts(self, size: int) -> Iterator[Tensor]:
        """Yield all images in order, `size` at a time."""
        for rows in torch.split(torch.arange(len(self), device=self.y.device), size):
            yield self.batch(rows)

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of one image."""
        return self._source.dtype, tuple(self._source.shape[1:])

    @property
    def images(self) -> int:
        """The number of images, which should equal the number of labels."""
        return len(self._source if self._rows is None else self._rows)

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: str | torch.device) -> Split:
        """Move to a device, which gathers shared rows; a no-op if it is there already."""
        if self.y.device == torch.device(device) == self._source.device:
            return self
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, eq=False)
class ClientData:
    """The data of one client."""

    name: str
    domain: str
    train: Split
    validation: Split
    test: Split
    classes: int

    def to(self, device: str | torch.device) -> ClientData:
        train, validation, test = (self.split(name).to(device) for name in SPLITS)
        if train is self.train and validation is self.validation and test is self.test:
            return self
        return ClientData(self.name, self.domain, train, validation, test, self.classes)

    def split(self, name: str) -> Split:
        """The split called train, validation or test."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        if name not in splits:
            raise DataError(unknown("split", name, splits))
        return splits[name]

    def digest(self) -> str:
        """A hash of the images and labels: a run is resumed only on the same data."""
        content = blake2b(digest_size=8)
        for name in SPLITS:
            split = self.split(name)
            content.update(repr((len(split), *split.kind[1])).encode())
            for images in split.parts(DIGESTED_AT_ONCE):
                content.update(images.cpu().contiguous().numpy().data)
            content.update(repr(tuple(split.y.shape)).encode())
            content.update(split.y.cpu().contiguous().numpy().data)
        return content.hexdigest()

    def class_counts(self, part: str = "train") -> Tensor:
        """int64 [classes]: images per class."""
        y = self.split(part).y  # not `bincount`, which synchronises with the device
        classes = torch.arange(self.classes, device=y.device)
        pieces = torch.split(y, max(1, COMPARED_AT_ONCE // self.classes))
        return torch.stack([(piece.unsqueeze(1) == classes).sum(0) for piece in pieces]).sum(0)


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Clients in order, and what they have in common."""

    name: str
    clients: Mapping[str, ClientData]
    class_names: tuple[str, ...]
    shape: tuple[int, ...]  # images: channels, height, width; texts: length, vocabulary size
    seed: int
    data: DataConfig  # the configuration that reproduces it
    public: Split
    left_out: int = 0  # images that belong to no client and are not public

    def __post_init__(self) -> None:
        if not self.clients:
            raise DataError(f"federation {self.name!r} has no clients; expected one or more.")
        check_names("client", self.clients)
        for name, client in self.clients.items():
            if client.name != name or client.classes != len(self.class_names):
                raise DataError(
                    f"client {name!r} calls itself {client.name!r} and knows {client.classes} classes; "
                    f"expected {name!r} and {len(self.class_names)}."
                )
            for split_name in SPLITS:
                _check(client.split(split_name), self.shape, client.classes, f"client {name!r}, {split_name}")
            if len(client.train) < 2 or not len(client.test):
                raise DataError(
                    f"client {name!r} has {len(client.train)} training and {len(client.test)} test images; "
                    "expected at least 2 and 1. Give it more images, or change data.split, data.fraction or "
                    "data.samples."
                )
        _check(self.public, self.shape, len(self.class_names), "public")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.clients)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def __repr__(self) -> str:
        size = f"{len(self.clients)} clients, {self.classes} classes, {inputs_in_words(self.shape)}"
        lines = [f"Federation {self.name!r}, seed {self.seed}: {size}"]
        shown = list(self.clients.values())[:SHOWN]
        width = max(len(client.name) for client in shown)
        for client in shown:
            sizes = ", ".join(f"{name} {len(client.split(name))}" for name in SPLITS)
            domain = f" ({client.domain})" if client.domain != client.name else ""
            lines.append(f"  {client.name:{width}}  {sizes}{domain}")
        if len(self.clients) > SHOWN:
            lines.append(f"  and {len(self.clients) - SHOWN} more")
        if len(self.public):
            lines.append(f"  public: {len(self.public)}")
        if self.left_out:
            lines.append(f"  left out: {self.left_out}")
        return "\n".join(lines)

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, Any],
        *,
        name: str = "arrays",
        seed: int = 0,
        class_names: tuple[str, ...] | None = None,
        domains: Mapping[str, str] | None = None,
        validation: float = 0.1,
        test: float = 0.2,
        normalize: str = "half",
    ) -> Federation:
        """Make a federation from NumPy arrays or tensors.

        `clients` maps a client's name to `(x, y)`, of which `validation` and `test` are shares, or to
        `{"train": (x, y), "test": (x, y)}` with an optional `"validation"` (default: the share `validation` of the
        training split). Images `x` are uint8 `[n, channels, height, width]`, or `[n, height, width]` in grey; labels
        `y` are whole numbers from 0.

        >>> import numpy as np
        >>> def site(n):
        ...     return np.zeros((n, 3, 8, 8), dtype=np.uint8), np.arange(n) % 2
        >>> Federation.from_arrays({"north": site(50), "south": {"train": site(20), "test": site(10)}})
        Federation 'arrays', seed 0: 2 clients, 2 classes, images 3x8x8
          north  train 35, validation 5, test 10
          south  train 18, validation 2, test 10
        """
        check_seed(seed)
        check_names("client", clients)
        check_shares(validation, test)
        given = {client: _given_splits(client, value) for client, value in clients.items()}
        every = [one for splits in given.values() for one in splits.values()]
        if not every:
            raise DataError("Federation.from_arrays was given no clients; expected {'name': (x, y), ...}.")
        channels, height, width = every[0].x.shape[1:]
        data = {
            "name": f"arrays:{name}",
            "partition": {"name": "domain", "clients": len(given)},
            "split": {"validation": validation, "test": test},
            "image_size": height,
            "normalize": normalize,
        }
        config = structure(data, DataConfig, "data")
        highest = max((int(one.y.max()) for one in every if len(one)), default=0)
        if highest >= limits.CLASSES:
            raise DataError(
                f"the highest label is {highest:,}; labels count classes from 0, so that would be {highest + 1:,} "
                f"classes, and at most {limits.CLASSES:,} are possible. Number the classes that there are from 0."
            )
        names = tuple(class_names or (str(label) for label in range(highest + 1)))
        made = {}
        for client, splits in given.items():
            complete = _completed(splits, validation, test, keys.numpy_generator(seed, "split", client))
            domain = (domains or {}).get(client, client)
            made[client] = ClientData(client, domain, **complete, classes=len(names))
        empty = Split(every[0].x[:0].clone(), every[0].y[:0].clone())
        return cls(name, made, names, (channels, height, width), seed, config, empty)


def check_seed(seed: Any) -> None:
    """Refuse what is no seed."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed is {shown(seed)}; expected a whole number.")
    limits.check_plain(seed)


def _given_splits(client: str, value: Any) -> dict[str, Split]:
    """The splits that a user gave for a client; a pair is called 'all'."""
    if isinstance(value, Mapping):
        if not {"train", "test"} <= set(value) <= set(SPLITS):
            given = ", ".join(sorted(map(str, value))) or "none"
            raise DataError(
                f"client {client!r} has the splits {given}; expected train, test and, if there is one, validation."
            )
        return {name: _as_split(f"client {client!r}, {name}", pair) for name, pair in value.items()}
    return {"all": _as_split(f"client {client!r}", value)}


def _completed(given: dict[str, Split], validation: float, test: float, rng: np.random.Generator) -> dict[str, Split]:
    """All three splits, copied from the caller's arrays; those not given are taken from the others."""
    copied = {
        name: Split(own.x.clone(), own.y.clone()) for name, own in given.items() if name in ("validation", "test")
    }
    source = given["all"] if "all" in given else given["train"]
    indices = split(
        np.arange(len(source)),
        source.y.numpy(),
        validation=0.0 if "validation" in given else validation,
        test=0.0 if "test" in given else test,
        own_test=None,
        rng=rng,
    )
    return {n: Split(source.x[np.sort(i)], source.y[np.sort(i)]) for n, i in indices._asdict().items()} | copied


def _as_split(what: str, pair: Any) -> Split:
    """Convert (x, y), as NumPy arrays, tensors or lists, to a checked `Split`."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(f"{what}: expected a pair (x, y) of images and labels, not {type(pair).__name__}.")
    if any(np.ma.is_masked(each) or (isinstance(each, Tensor) and each.layout != torch.strided) for each in pair):
        raise DataError(f"{what}: images and labels must be dense arrays without masked values.")
    try:
        x, y = (
            torch.as_tensor(np.require(a, requirements=("C", "W")) if isinstance(a, np.ndarray) else a).cpu()
            for a in pair
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what}: images and labels must be arrays of numbers ({error}).") from None
    if x.dtype != torch.uint8:
        hint = "Convert images of 0 to 1 with `(x * 255).round().astype('uint8')`." if x.is_floating_point() else ""
        raise DataError(f"{what}: images are {x.dtype}; expected uint8, 0 to 255. {hint}".rstrip())
    if x.ndim == 3:
        x = x.unsqueeze(1)
    if x.ndim == 4 and x.shape[3] <= 4 < x.shape[1]:
        raise DataError(
            f"{what}: images are {tuple(x.shape)}, which looks like channels last; "
            "expected [n, channels, height, width]: `x.transpose(0, 3, 1, 2)`."
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"{what}: labels are {y.dtype}; expected whole numbers from 0.")
    if x.ndim != 4 or y.ndim != 1 or len(x) != len(y):
        raise DataError(
            f"{what}: images are {tuple(x.shape)} and labels {tuple(y.shape)}; "
            "expected [n, channels, height, width] and [n]."
        )
    if 0 in x.shape[1:]:
        raise DataError(f"{what}: images are {tuple(x.shape)}: there is nothing in them.")
    return Split(x, y.to(torch.int64))


def inputs_in_words(shape: tuple[int, ...]) -> str:
    """A description of the inputs.

    >>> inputs_in_words((3, 16, 16)), inputs_in_words((200, 5000))
    ('images 3x16x16', 'texts of 200 tokens, 5,000 words')
    """
    if len(shape) == 2:
        return f"texts of {shape[0]} tokens, {shape[1]:,} words"
    return "images " + "x".join(str(side) for side in shape)


def _check(own: Split, shape: tuple[int, ...], classes: int, what: str) -> None:
    expected = (torch.int32, shape[:1]) if len(shape) == 2 else (torch.uint8, shape)
    if own.kind != expected or own.images != len(own):
        given, wanted = (
            f"{str(dtype).removeprefix('torch.')} [n, {str(each)[1:-1]}]" for dtype, each in (own.kind, expected)
        )
        raise DataError(f"{what}: {len(own)} labels and {own.images} inputs {given}; expected as many, {wanted}.")
    if len(own) and (int(own.y.min()) < 0 or int(own.y.max()) >= classes):
        expected_labels = f"0 to {classes - 1}" if classes > 0 else "whole numbers from 0"
        raise DataError(
            f"{what}: labels range from {int(own.y.min())} to {int(own.y.max())}; expected {expected_labels}."
        )
