"""Results on disk: one JSON file, written anew after every row, and a Markdown page beside it.

So a machine that is lent for ten minutes can do a part of it: the same command again goes on with the rows that are
not there yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fedprism import atomic
from fedprism.bench.machine import machine, moment, slug
from fedprism.bench.tables import page
from fedprism.errors import RecordError

FORMAT = 1
SECTIONS = ("engines", "options", "workers", "growth", "roofline")
FOLDER = Path("benchmarks") / "results"

Row = dict[str, Any]


class Results:
    """The rows of one machine, by section and key."""

    def __init__(self, path: Path, device: torch.device, quick: bool) -> None:
        self.path = path
        own: dict[str, Any] = {"format": FORMAT, "quick": quick, "machine": machine(device)}
        held = read(path) if path.exists() else own
        for name, there, here in (
            ("device", held["machine"]["device"], own["machine"]["device"]),
            ("--quick", held["quick"], quick),
        ):
            if there != here:
                raise RecordError(
                    f"{path} holds results of another kind ({name}: {there}, and now {here}); choose another --out."
                )
        self.head = own  # versions of the newest run; a row that is kept has its own date
        self.sections: dict[str, list[Row]] = {name: list(held.get(name, [])) for name in SECTIONS}

    def __getitem__(self, section: str) -> list[Row]:
        return self.sections[section]

    def has(self, section: str, key: str, asked: Iterable[str] = ()) -> bool:
        """Is this row there, with all that is asked of it?"""
        return any(row["key"] == key and set(asked) <= set(row.get("asked", ())) for row in self.sections[section])

    def add(self, section: str, key: str, row: Row, command: str) -> None:
        """Put a row in the place of one with the same key, or at the end; and write the files."""
        full = {"key": key, **moment(), "command": command, "versions": self.head["machine"]["versions"], **row}
        rows = self.sections[section]
        places = [place for place, each in enumerate(rows) if each["key"] == key]
        if places:
            rows[places[0]] = full
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
        if held["format"] != FORMAT or not isinstance(held["machine"]["device"], str):
            raise KeyError("format")
        held["quick"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not a file of `fedprism bench` ({error}); choose another --out.") from None
    return dict(held)


def place(out: Path | None, device: torch.device, quick: bool) -> Path:
    """The JSON file: `out` itself, or a file of today's and of this device in the folder `out`."""
    if out is not None and out.suffix == ".json":
        return out
    name = f"{moment()['date'][:10]}-{slug(device)}{'-quick' if quick else ''}.json"
    return (out or FOLDER) / name
