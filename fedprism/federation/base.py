"""What a federation is: clients, each with train, validation and test images of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprism import keys
from fedprism.config import SPLITS as PARTS
from fedprism.config import DataConfig, structure
from fedprism.data import check_names
from fedprism.errors import DataError, unknown
from fedprism.federation.splits import check_shares, split

SHOWN = 20  # clients that a repr lists


class Split:
    """One part of a client's data. Images stay uint8; `fedprism.data.normalise` makes them what a model sees.

    Its images are a tensor of its own or, by `Split.of`, rows of one that all clients have in common, such as a
    memory-mapped file: these are gathered when they are asked for.

    >>> everything = torch.arange(12, dtype=torch.uint8).view(4, 3, 1, 1)
    >>> part = Split.of(everything, torch.tensor([3, 1]), torch.tensor([0, 1]))
    >>> part.batch(torch.tensor([1])).flatten().tolist()
    [3, 4, 5]
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._source = x  # uint8 [n, channels, height, width], or int32 [n, length] of texts
        self._rows: Tensor | None = None
        self.y = y  # int64 [n]

    @classmethod
    def of(cls, source: Tensor, rows: Tensor, y: Tensor) -> Split:
        """Rows of `source`, which is neither copied nor read here; `y` are their labels."""
        split = cls(source, y)
        split._rows = rows
        return split

    def __repr__(self) -> str:
        dtype, shape = self.kind
        return f"Split({len(self)} of {str(dtype).removeprefix('torch.')} {list(shape)})"

    def __reduce__(self) -> tuple[type[Split], tuple[Tensor, Tensor]]:
        """What goes to another process are its own rows, not all that clients have in common."""
        return Split, (self.x.clone(), self.y.clone())

    @property
    def rows(self) -> Tensor | None:
        """Which of the rows that all clients have in common these are; None: it has a tensor of its own."""
        return self._rows

    @property
    def x(self) -> Tensor:
        """All images; of rows in common, a copy."""
        return self._source if self._rows is None else self._source[self._rows]

    def batch(self, rows: Tensor) -> Tensor:
        """The images of these rows alone."""
        return self._source[rows if self._rows is None else self._rows[rows]]

    def parts(self, size: int) -> Iterator[Tensor]:
        """All images in order, so many at a time."""
        for rows in torch.split(torch.arange(len(self), device=self.y.device), size):
            yield self.batch(rows)

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """The type and the shape of an image."""
        return self._source.dtype, tuple(self._source.shape[1:])

    @property
    def images(self) -> int:
        """How many there are, which should be as many as labels."""
        return len(self._source if self._rows is None else self._rows)

    def __len__(self) -> int:
        return len(self.y)

    def to(self, device: str | torch.device) -> Split:
        """On another device all images are gathered; on this one nothing is."""
        if self.y.device == torch.device(device) == self._source.device:
            return self
        return Split(self.x.to(device), self.y.to(device))


@dataclass(frozen=True, eq=False)
class ClientData:
    """All that one client has."""

    name: str
    domain: str
    train: Split
    validation: Split
    test: Split
    classes: int

    def to(self, device: str | torch.device) -> ClientData:
        train, validation, test = (self.split(part).to(device) for part in PARTS)
        if train is self.train and validation is self.validation and test is self.test:
            return self
        return ClientData(self.name, self.domain, train, validation, test, self.classes)

    def split(self, name: str) -> Split:
        """The part called train, validation or test."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        if name not in parts:
            raise DataError(unknown("part", name, parts))
        return parts[name]

    def class_counts(self, part: str = "train") -> Tensor:
        """int64 [classes]: images a class."""
        y = self.split(part).y  # not `bincount`, which waits for the device
        return (y.unsqueeze(1) == torch.arange(self.classes, device=y.device)).sum(0)


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Clients in their order, and what is common to all of them."""

    name: str
    clients: Mapping[str, ClientData]
    class_names: tuple[str, ...]
    shape: tuple[int, ...]  # of images: channels, height, width; of texts: length, words
    seed: int
    data: DataConfig  # what makes it again
    public: Split
    left_out: int = 0  # images that are neither a client's nor public

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
            for part in PARTS:
                _check(client.split(part), self.shape, client.classes, f"client {name!r}, {part}")
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
            sizes = ", ".join(f"{part} {len(client.split(part))}" for part in PARTS)
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
        """A federation of one's own NumPy arrays or tensors.

        `clients` maps a client's name to `(x, y)`, of which `validation` and `test` are shares, or to
        `{"train": (x, y), "test": (x, y)}` with `"validation"` if there is one (else `validation` is a share of the
        training part). Images `x` are uint8 `[n, channels, height, width]`, or `[n, height, width]` in grey; labels `y`
        are whole numbers from 0.

        >>> import numpy as np
        >>> def site(n):
        ...     return np.zeros((n, 3, 8, 8), dtype=np.uint8), np.arange(n) % 2
        >>> Federation.from_arrays({"north": site(50), "south": {"train": site(20), "test": site(10)}})
        Federation 'arrays', seed 0: 2 clients, 2 classes, images 3x8x8
          north  train 35, validation 5, test 10
          south  train 18, validation 2, test 10
        """
        check_names("client", clients)
        check_shares(validation, test)
        given = {client: _parts(client, value) for client, value in clients.items()}
        every = [part for parts in given.values() for part in parts.values()]
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
        highest = max((int(part.y.max()) for part in every if len(part)), default=0)
        names = tuple(class_names or (str(label) for label in range(highest + 1)))
        made = {}
        for client, parts in given.items():
            whole = _completed(parts, validation, test, keys.numpy_generator(seed, "split", client))
            domain = (domains or {}).get(client, client)
            made[client] = ClientData(client, domain, whole["train"], whole["validation"], whole["test"], len(names))
        empty = Split(every[0].x[:0].clone(), every[0].y[:0].clone())
        return cls(name, made, names, (channels, height, width), seed, config, empty)


def _parts(client: str, value: Any) -> dict[str, Split]:
    """What a user gave for a client, as splits; a pair is called 'all'."""
    if isinstance(value, Mapping):
        if not {"train", "test"} <= set(value) <= set(PARTS):
            given = ", ".join(sorted(map(str, value))) or "none"
            raise DataError(
                f"client {client!r} has the parts {given}; expected train, test and, if there is one, validation."
            )
        return {part: _as_split(f"client {client!r}, {part}", pair) for part, pair in value.items()}
    return {"all": _as_split(f"client {client!r}", value)}


def _completed(parts: dict[str, Split], validation: float, test: float, rng: np.random.Generator) -> dict[str, Split]:
    """The three parts, with what was not given cut from what was; nothing is shared with the caller's arrays."""
    whole = {
        part: Split(given.x.clone(), given.y.clone()) for part, given in parts.items() if part in ("validation", "test")
    }
    source = parts["all"] if "all" in parts else parts["train"]
    cut = split(
        np.arange(len(source)),
        source.y.numpy(),
        validation=0.0 if "validation" in parts else validation,
        test=0.0 if "test" in parts else test,
        own_test=None,
        rng=rng,
    )
    return {p: Split(source.x[np.sort(i)], source.y[np.sort(i)]) for p, i in cut._asdict().items()} | whole


def _as_split(what: str, pair: Any) -> Split:
    """(x, y) of NumPy arrays, tensors or lists as a checked `Split`."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise DataError(f"{what}: expected a pair (x, y) of images and labels, not {type(pair).__name__}.")
    try:
        x, y = (
            torch.as_tensor(np.require(a, requirements=("C", "W")) if isinstance(a, np.ndarray) else a).cpu()
            for a in pair
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what}: images and labels must be arrays of numbers ({error}).") from None
    if x.dtype != torch.uint8:
        hint = "Images of 0 to 1 become so by `(x * 255).round().astype('uint8')`." if x.is_floating_point() else ""
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
    return Split(x, y.to(torch.int64))


def inputs_in_words(shape: tuple[int, ...]) -> str:
    """What an input is.

    >>> inputs_in_words((3, 16, 16)), inputs_in_words((200, 5000))
    ('images 3x16x16', 'texts of 200 tokens, 5,000 words')
    """
    if len(shape) == 2:
        return f"texts of {shape[0]} tokens, {shape[1]:,} words"
    return "images " + "x".join(str(side) for side in shape)


def _check(part: Split, shape: tuple[int, ...], classes: int, what: str) -> None:
    expected = (torch.int32, shape[:1]) if len(shape) == 2 else (torch.uint8, shape)
    if part.kind != expected or part.images != len(part):
        held, wanted = (
            f"{str(dtype).removeprefix('torch.')} [n, {str(each)[1:-1]}]" for dtype, each in (part.kind, expected)
        )
        raise DataError(f"{what}: {len(part)} labels and {part.images} inputs {held}; expected as many, {wanted}.")
    if len(part) and (int(part.y.min()) < 0 or int(part.y.max()) >= classes):
        raise DataError(
            f"{what}: labels reach from {int(part.y.min())} to {int(part.y.max())}; expected 0 to {classes - 1}."
        )
