"""The clients of a federation for `fedprism data inspect`: counts as a table, as CSV and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedprism import atomic
from fedprism.config import SPLITS, Named, Normal
from fedprism.data import Dataset, load
from fedprism.data.folder import TEST_SHARE
from fedprism.federation import ClientData, Federation, Split, contact_sheet
from fedprism.federation.feature_skew import PixelNoise, Superclass
from fedprism.federation.partitions import partition_of
from fedprism.federation.sheet import spread
from fedprism.inspection.bubbles import bubbles, counts
from fedprism.inspection.datasets import shortfall
from fedprism.report.canvas import available, shorten
from fedprism.report.formats import csv_lines

MOST_CLIENTS = 30  # rows of the table and of the contact sheet
MOST_CLASSES = 12  # that have a column each; of more classes, the largest are named
_NAMED = 3  # the largest classes of a client, where classes have no columns
_LEAST = 12  # letters that their column needs; with less room there is none
_LETTERS = 24  # of a client's or domain's name on a terminal
_ENDLESS = 10_000  # columns of a file or a pipe
_COUNTS, _PLOT, _SHEET = "clients.csv", "bubbles.png", "contact-sheet.png"  # the files that are written


@dataclass(frozen=True)
class Inspection:
    """A federation and what is known about the dataset that it was dealt from."""

    federation: Federation
    counted: Federation  # the same; where subclasses are dealt, its labels are subclasses
    rows: str  # what is counted: classes or subclasses
    test: str  # where test images come from
    noise: Mapping[str, float]  # standard deviation at each client, where some is added
    short: str  # what this copy lacks of the published dataset

    @property
    def partition(self) -> str:
        """The partition with all of its settings, as they were chosen for this dataset."""
        named = self.federation.data.partition
        settings = ", ".join(f"{key} {_plain(value)}" for key, value in named.settings.items() if value is not None)
        return f"{named.name}: {settings}" if settings else named.name

    @property
    def preparation(self) -> str:
        """How the data are split and prepared, in words."""
        data, shape = self.federation.data, self.federation.shape
        cut = data.split
        if cut.rule == "smallest":
            train = "the rest" if cut.train is None else f"{cut.train:g}"
            words = [f"split as the smallest client's: {self.test}, train {train}, validation {cut.validation:g}"]
        else:
            of = "" if cut.test is not None or self.test.startswith("test ") else " of the rest"
            words = [f"split: {self.test}, validation {cut.validation:g}{of}"]
        if len(shape) == 3:
            words += [
                f"image_size {'x'.join(map(str, dict.fromkeys(shape[1:])))}",
                f"normalize {_plain(data.normalize)}",
            ]
        words += [] if data.augment == "none" else [f"augment {_plain(data.augment)}"]
        words += [] if data.samples is None else [f"samples {data.samples:,}"]
        words += [] if data.fraction == 1 else [f"fraction {data.fraction:g}"]
        words += [f"public {data.public:,}"] if data.public else []
        words += [] if data.domains is None else [f"domains {_plain(data.domains)}"]
        return "; ".join(words)


def _plain(value: Any) -> str:
    """A setting as a user writes it.

    >>> _plain(0.1), _plain(("mnist", "usps")), _plain(Normal((0.5,), (0.2,)))
    ('0.1', '[mnist, usps]', '{mean: [0.5], std: [0.2]}')
    """
    if isinstance(value, Normal):
        value = {"mean": value.mean, "std": value.std}
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, Named):
        return _plain(value.plain() if value.settings else value.name)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_plain(each)}' for key, each in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def inspect_federation(federation: Federation) -> Inspection:
    """Look up in the dataset what a federation does not keep: subclasses, test part, how much was published.

    The dataset is loaded again, which is quick if it is cached. A folder of images is loaded only for its noise.
    """
    data, kind = federation.data, federation.data.name.partition(":")[0].partition("?")[0]
    partition = partition_of(data.partition)
    noisy = isinstance(partition, PixelNoise)
    dataset = None if kind == "folder" and not noisy else load(data, federation.seed)
    if data.split.test is not None:
        test = f"test {data.split.test:g}"
    elif dataset is None:
        test = f"test/ of each client, or {TEST_SHARE:g} where there is none"
    else:
        test = f"test {dataset.test_share:g}" if dataset.is_test is None else "its own test part"
    noise, counted, rows = {}, federation, "classes"
    if noisy and dataset is not None:  # noise depends on the client's number alone, not on its images
        shares = partition.deal(dataset, np.arange(len(dataset)), federation.seed)
        noise = {share.client: share.noise for share in shares}
    elif isinstance(partition, Superclass) and dataset is not None:
        counted, rows = _by_subclass(federation, dataset), "subclasses"
    short = "" if dataset is None else shortfall(dataset, kind)
    return Inspection(federation, counted, rows, test, noise, short)


def _by_subclass(federation: Federation, dataset: Dataset) -> Federation:
    """The same clients with subclasses as labels, those of a superclass side by side."""
    assert dataset.fine is not None  # the partition has dealt them
    above = np.zeros(len(dataset.fine.names), dtype=np.int64)
    above[dataset.fine.labels.numpy()] = dataset.labels.numpy()
    order = np.argsort(above, kind="stable")
    labels = torch.from_numpy(np.argsort(order))[dataset.fine.labels]

    def below(split: Split) -> Split:
        assert split.rows is not None  # no noise, so nothing was copied
        return Split.of(dataset.images, split.rows, labels[split.rows])

    def one(client: ClientData) -> ClientData:
        train, validation, test = (below(client.split(part)) for part in SPLITS)
        return replace(client, train=train, validation=validation, test=test, classes=len(order))

    clients = {name: one(client) for name, client in federation.clients.items()}
    names = tuple(dataset.fine.names[place] for place in order)
    return replace(federation, clients=clients, class_names=names, public=below(federation.public))


@dataclass(frozen=True)
class ClientTable:
    """A row per client: the sizes of its parts and, as columns if these fit, its counts per class."""

    of: Inspection

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        shown = spread(self.of.counted.names, MOST_CLIENTS)
        if self.of.counted.classes <= MOST_CLASSES:
            table = self._table(shown, room, None)
            wide = Measurement.get(console, options.update(width=_ENDLESS), table).maximum
        if self.of.counted.classes > MOST_CLASSES or wide > room:
            bare = Measurement.get(console, options.update(width=_ENDLESS), self._table(shown, room, 0)).maximum
            table = self._table(shown, room, room - bare - 2)
        yield table
        every = len(self.of.counted.clients)
        notes = [f"{len(shown)} of {every} clients, evenly drawn."] if len(shown) < every else []
        notes.append(f"{self.of.rows.capitalize()} are counted over train, validation and test together.")
        if self.of.counted.data.partition.settings.get("test") == "all":
            notes.append("Test images that several clients have count once for each of them.")
        if self.of.noise:
            notes.append("Noise is the standard deviation of what is added to pixels, which are 0 to 255.")
        yield from (Text(note, style="dim") for note in notes)

    def __str__(self) -> str:
        out = StringIO()
        Console(file=out, color_system=None, width=_ENDLESS, legacy_windows=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")

    def _table(self, shown: Sequence[str], width: int, room: int | None) -> Table:
        """With a column per class or, if `room` (in letters) is given, the largest classes in words."""
        federation, noise = self.of.counted, self.of.noise
        every, samples = list(federation.clients.values()), counts(federation)
        domains = any(client.domain != client.name for client in every) and len({c.domain for c in every}) > 1
        named = room is not None and room >= _LEAST
        texts = ["client", *(["domain"] if domains else [])]
        numbers = [*SPLITS, *(["noise"] if noise else [])]
        numbers += federation.class_names if room is None else [self.of.rows]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold")

        def add(name: str, domain: str, clients: Sequence[ClientData], row: NDArray[np.int64]) -> None:
            cells = [_cut(name, width), *([_cut(domain, width)] if domains else [])]
            cells += [f"{sum(len(client.split(part)) for client in clients):,}" for part in SPLITS]
            cells += [f"{noise[name]:.1f}" if name in noise else ""] if noise else []
            if room is None:
                cells += [f"{number:,}" if number else "·" for number in row.tolist()]
            else:
                cells += [str(int((row > 0).sum()))]
                cells += [_largest(row, federation.class_names, room)] if named else []
            table.add_row(*map(Text, cells))

        for place, name in enumerate((*texts, *numbers, *(["largest"] if named else []))):
            number = len(texts) <= place < len(texts) + len(numbers)
            table.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
        for client, row in zip(every, samples, strict=True):
            if client.name in shown:
                add(client.name, client.domain, [client], row)
        if len(every) > 1:
            add("all", "", every, samples.sum(0))
        return table


def _cut(name: str, width: int) -> str:
    return name if width >= _ENDLESS else shorten(name, _LETTERS)


def _largest(row: NDArray[np.int64], names: Sequence[str], room: int) -> str:
    """The largest classes of a client, as many as fit, with complete numbers.

    >>> row, names = np.array([5, 1200, 0, 30]), ("cat", "dog", "horse", "ship")
    >>> _largest(row, names, 80), _largest(row, names, 24), _largest(row, names, 13)
    ('dog: 1,200, ship: 30, cat: 5', 'dog: 1,200, ship: 30, …', 'dog: 1,200, …')
    """
    order = [label for label in np.argsort(-row, kind="stable").tolist() if row[label]]
    for number in range(min(_NAMED, len(order)), 0, -1):
        words = [f"{names[label]}: {row[label]:,}" for label in order[:number]]
        text = ", ".join([*words, *(["…"] if number < len(order) else [])])
        if len(text) <= room:
            return text
    count, more = f": {row[order[0]]:,}", ", …" if len(order) > 1 else ""
    return shorten(names[order[0]], max(3, room - len(count) - len(more))) + count + more


def left_over(federation: Federation) -> str:
    """The samples that no client has, in words."""
    inputs = "texts" if len(federation.shape) == 2 else "images"
    public = f"Public: {len(federation.public):,} {inputs}. " if len(federation.public) else ""
    return f"{public}Left out: {federation.left_out:,} {inputs}." if federation.left_out else f"{public}Left out: none."


def clients_csv(of: Inspection) -> str:
    """A line per client: name, domain, the sizes of its parts, its noise if there is any, and its samples per class
    (`class:NAME`)."""
    noise = ["noise"] if of.noise else []
    lines = [["client", "domain", *SPLITS, *noise, *(f"class:{name}" for name in of.counted.class_names)]]
    for client, row in zip(of.counted.clients.values(), counts(of.counted).tolist(), strict=True):
        sizes = [len(client.split(part)) for part in SPLITS]
        added = [f"{of.noise[client.name]:g}"] if of.noise else []
        lines.append([client.name, client.domain, *map(str, (*sizes, *added, *row))])
    return csv_lines(lines)


def check_folder(folder: Path) -> None:
    """Make the folder, and refuse one that cannot be written before long work begins."""
    with atomic.reporting(str(folder), "Choose another --out."):
        for name in (_COUNTS, _PLOT, _SHEET):
            atomic.check_writable(folder / name)


def write_files(of: Inspection, folder: Path) -> dict[str, str]:
    """Write clients.csv, bubbles.png and contact-sheet.png; return what each shows, or why it was not written."""
    written, federation = {_COUNTS: "all counts"}, of.federation
    with atomic.reporting(str(folder), "Choose another --out."):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / _COUNTS, clients_csv(of).encode())
        if available():
            bubbles(of.counted, folder / _PLOT, f"{federation.name}, {of.partition}", rows=of.rows)
            written[_PLOT] = f"clients and {of.rows}"
        else:
            written[_PLOT] = "not drawn; it needs matplotlib: pip install 'fedprism[report]'"
        if len(federation.shape) == 3:
            out = BytesIO()
            contact_sheet(federation, rows=MOST_CLIENTS).save(out, format="PNG", optimize=True)
            atomic.write(folder / _SHEET, out.getvalue())
            some = len(federation.clients) > MOST_CLIENTS
            written[_SHEET] = "images of " + (
                f"{MOST_CLIENTS} of {len(federation.clients)} clients, evenly drawn" if some else "every client"
            )
        else:
            written[_SHEET] = "not drawn; these are texts"
    return written
