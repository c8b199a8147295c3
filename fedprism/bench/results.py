"""Results on disk: one JSON file, written anew after every row, and a Markdown page beside it.

So a machine that is lent for ten minutes can do a part of it: the same command again goes on with the rows that are
not there yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedprism import atomic
from fedprism.bench.machine import machine, moment, slug
from fedprism.bench.tables import page
from fedprism.errors import RecordError

FORMAT = 2
SECTIONS = ("engines", "options", "workers", "growth", "roofline")
FOLDER = Path("benchmarks") / "results"
MACHINE = ("device", "cpu", "cores")  # what tells one from another

Row = dict[str, Any]


class Results:
    """The rows of one machine, by section and key."""

    def __init__(self, path: Path, device: torch.device, quick: bool) -> None:
        self.path = path
        own: dict[str, Any] = {"format": FORMAT, "quick": quick, "machine": machine(device)}
        held = read(path) if path.exists() else own
        compared = [(name, held["machine"][name], own["machine"][name]) for name in MACHINE]
        for name, there, here in (*compared, ("--quick", held["quick"], quick)):
            if there != here:
                raise RecordError(
                    f"{path} holds results of another kind ({name}: {there}, and now {here}); choose another --out."
                )
        self.head = own  # versions of the newest run; a row that is kept has its own date
        self.sections: dict[str, list[Row]] = {name: list(held.get(name, [])) for name in SECTIONS}

    def __getitem__(self, section: str) -> list[Row]:
        return self.sections[section]

    def find(self, section: str, key: str) -> Row | None:
        return next((row for row in self.sections[section] if row["key"] == key), None)

    def has(self, section: str, key: str, asked: Iterable[str] = ()) -> bool:
        """Is this row there, with all that is asked of it? What failed is not: it is tried again."""
        row = self.find(section, key)
        return row is not None and "failed" not in row and set(asked) <= set(row.get("done", ()))

    def add(self, section: str, key: str, row: Row, command: str) -> None:
        """Put a row in the place of one with the same key, or at the end; and write the files."""
        full = {"key": key, **moment(), "command": command, "versions": self.head["machine"]["versions"], **row}
        rows = self.sections[section]
        before = self.find(section, key)
        if before is not None:
            rows[rows.index(before)] = full
        else:
            rows.append(full)
        self.write()

    def write(self) -> None:
        with atomic.reporting(str(self.path), "Choose another --out; what was measured so far is in it."):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_json(self.path, {**self.head, **self.sections})
            atomic.write(self.path.with_suffix(".md"), page(self).encode())


def read(path: Path) -> dict[str, Any]:
    """A file of results; anything else is an error."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["format"] != FORMAT or not {*MACHINE, "versions"} <= held["machine"].keys():
            raise KeyError("format")
        held["quick"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} is not a file of `fedprism bench` ({error}); choose another --out.") from None
    return dict(held)


def place(out: Path | None, device: torch.device, quick: bool) -> Path:
    """The JSON file: `out` itself, or in the folder `out` the newest of this machine and these versions, or today's."""
    if out is not None and out.suffix == ".json":
        return out
    folder, name = out or FOLDER, f"-{slug(device)}{'-quick' if quick else ''}.json"
    dated = re.compile(r"\d{4}-\d\d-\d\d" + re.escape(name))
    here = machine(device)
    for path in sorted((path for path in folder.glob(f"*{name}") if dated.fullmatch(path.name)), reverse=True):
        with suppress(RecordError):
            there = read(path)["machine"]
            if all(there[each] == here[each] for each in (*MACHINE, "versions")):
                return path
    return folder / f"{moment()['date'][:10]}{name}"
