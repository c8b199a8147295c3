"""What `fedprism data inspect` shows of a federation: who has how much of what, as a table, as CSV and as pictures."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedprism.config import SPLITS
from fedprism.federation import Federation, contact_sheet
from fedprism.federation.sheet import spread
from fedprism.records import atomic
from fedprism.report import figures, formats
from fedprism.report.bubbles import bubbles, counts
from fedprism.report.formats import Entry, Fitting, Grid

MOST_CLIENTS = 30  # rows of the table and of the contact sheet
MOST_CLASSES = 12  # a column each; of more, the largest are named
_NAMED = 3  # the largest classes of a client, where there is no column a class


@dataclass(frozen=True)
class Holdings:
    """A row a client: the sizes of its parts, and the counts of classes as columns if these fit, else in short."""

    federation: Federation

    def __rich__(self) -> Fitting:
        short = _grid(self.federation, False)
        return Fitting((_grid(self.federation, True), short) if self._few else (short,))

    def __str__(self) -> str:
        return formats.text(_grid(self.federation, self._few))

    @property
    def _few(self) -> bool:
        return self.federation.classes <= MOST_CLASSES


def _grid(federation: Federation, whole: bool) -> Grid:
    held, every = counts(federation), list(federation.clients.values())
    domains = any(client.domain != client.name for client in every) and len({c.domain for c in every}) > 1
    shown = spread(federation.names, MOST_CLIENTS)
    classes = federation.class_names if whole else ("classes", "largest")
    rows = []
    for name, row in zip(federation.names, held, strict=True):
        if name in shown:
            client = federation.clients[name]
            sizes = (f"{len(client.split(part)):,}" for part in SPLITS)
            own = (name, *((client.domain,) if domains else ()), *sizes, *_classes(row, federation, whole))
            rows.append(tuple(map(Entry, own)))
    if len(every) > 1:
        sizes = (f"{sum(len(client.split(part)) for client in every):,}" for part in SPLITS)
        total = held.sum(0)
        rows.append(
            tuple(map(Entry, ("all", *(("",) if domains else ()), *sizes, *_classes(total, federation, whole))))
        )
    notes = [f"{len(shown)} of {len(every)} clients, evenly drawn."] if len(shown) < len(every) else []
    header = ("client", *(("domain",) if domains else ()), *SPLITS, *classes)
    return Grid(header, tuple(rows), (*notes, "Classes are counted over train, validation and test together."))


def _classes(row: NDArray[np.int64], federation: Federation, whole: bool) -> list[str]:
    if whole:
        return [f"{number:,}" if number else "·" for number in row.tolist()]
    order = np.argsort(-row, kind="stable")[:_NAMED]
    largest = [f"{federation.class_names[label]} {row[label]:,}" for label in order.tolist() if row[label]]
    more = ", …" if (row > 0).sum() > _NAMED else ""
    return [str(int((row > 0).sum())), ", ".join(largest) + more]


def rest(federation: Federation) -> str:
    """What no client has."""
    inputs = "texts" if len(federation.shape) == 2 else "images"
    public = f"Public: {len(federation.public):,} {inputs}. " if len(federation.public) else ""
    return f"{public}Left out: {federation.left_out:,} {inputs}." if federation.left_out else f"{public}Left out: none."


def clients_csv(federation: Federation) -> str:
    """A line a client: name, domain, the sizes of its parts, and how many it has of each class (`class:NAME`)."""
    out = StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["client", "domain", *SPLITS, *(f"class:{name}" for name in federation.class_names)])
    for client, row in zip(federation.clients.values(), counts(federation).tolist(), strict=True):
        lines.writerow([client.name, client.domain, *(len(client.split(part)) for part in SPLITS), *row])
    return out.getvalue()


def write(federation: Federation, folder: Path, title: str | None = None) -> dict[str, str]:
    """Write clients.csv, bubbles.png and contact-sheet.png; returns what each shows, or why it was not written."""
    said = {"clients.csv": "all counts"}
    with atomic.reporting(str(folder), "Choose another --out."):
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / "clients.csv", clients_csv(federation).encode())
        if figures.available():
            bubbles(federation, folder / "bubbles.png", title)
            said["bubbles.png"] = "clients and classes"
        else:
            said["bubbles.png"] = "not drawn; it needs matplotlib: pip install 'fedprism[report]'"
        if len(federation.shape) == 3:
            out = BytesIO()
            contact_sheet(federation, rows=MOST_CLIENTS).save(out, format="PNG", optimize=True)
            atomic.write(folder / "contact-sheet.png", out.getvalue())
            some = len(federation.clients) > MOST_CLIENTS
            said["contact-sheet.png"] = "images of " + (
                f"{MOST_CLIENTS} of {len(federation.clients)} clients, evenly drawn" if some else "every client"
            )
        else:
            said["contact-sheet.png"] = "not drawn; these are texts"
    return said
