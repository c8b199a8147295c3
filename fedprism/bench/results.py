"""Results on disk: one JSON file, rewritten after every row, and a Markdown page beside it.

A benchmark can therefore run in several sessions: the same command continues with the missing rows.
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
from fedprism.files import NotAFile, read_bytes

FORMAT = 2
SECTIONS = ("engines", "options", "workers", "growth", "roofline")
FOLDER = Path("benchmarks") / "results"
MACHINE = ("device", "cpu", "cores")  # what identifies a machine

Row = dict[str, Any]


class Results:
    """The rows of one machine, by section and key."""

    def __init__(self, path: Path, device: torch.device, quick: bool) -> None:
        self.path = path
        own: dict[str, Any] = {"format": FORMAT, "quick": quick, "machine": machine(device)}
        existing = read(path) if path.exists() else own
        compared = [(name, existing["machine"][name], own["machine"][name]) for name in MACHINE]
        for name, there, here in (*compared, ("--quick", existing["quick"], quick)):
            if there != here:
                raise RecordError(
                    f"{path} holds results of another kind ({name}: {there}, and now {here}); choose another --out."
                )
        self.head = own  # versions of the newest run; each row has its own date
        self.sections: dict[str, list[Row]] = {name: list(existing.get(name, [])) for name in SECTIONS}

    def __getitem__(self, section: str) -> list[Row]:
        return self.sections[section]

    def find(self, section: str, key: str) -> Row | None:
        return next((row for row in self.sections[section] if row["key"] == key), None)

    def has(self, section: str, key: str, asked: Iterable[str] = ()) -> bool:
        """Whether this row is there with all that is asked; failed rows do not count, so they are retried."""
        row = self.find(section, key)
        return row is not None and "failed" not in row and set(asked) <= set(row.get("done", ()))

    def add(self, section: str, key: str, row: Row, command: str) -> None:
        """Replace the row with the same key, or append the row, and write the files."""
        full = {"key": key, **moment(), "command": command, "versions": self.head["machine"]["versions"], **row}
        rows = self.sections[section]
        before = self.find(section, key)
        if before is not None:
            rows[rows.index(before)] = full
        else:
            rows.append(full)
        self.write()

    def check_place(self) -> None:
        """Refuse a place that cannot be written, before anything is measured."""
        with atomic.reporting(str(self.path), "Choose another --out."):
            for path in (self.path, self.path.with_suffix(".md")):
                atomic.check_writable(path)

    def write(self) -> None:
        with atomic.reporting(str(self.path), "Choose another --out; what was measured so far is in it."):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_json(self.path, {**self.head, **self.sections})
            atomic.write(self.path.with_suffix(".md"), page(self).encode())


def read(path: Path) -> dict[str, Any]:
    """Read a file of results; refuse any other file."""
    try:
        raw = json.loads(read_bytes(path))
        if raw["format"] != FORMAT or not {*MACHINE, "versions"} <= raw["machine"].keys():
            raise KeyError("format")
        raw["quick"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotAFile) as error:
        raise RecordError(f"{path} is not a file of `fedprism bench` ({error}); choose another --out.") from None
    return dict(raw)


def place(out: Path | None, device: torch.device, quick: bool) -> Path:
    """The JSON file: `out` itself, or the newest in the folder `out` of this machine and these versions, or today's."""
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
