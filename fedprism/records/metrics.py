"""metrics.jsonl and timings.jsonl: one line per round, only ever appended to.

`metrics.jsonl` holds what must be the same bits after a resume; line n is round n - 1, with a checksum at its end.
`timings.jsonl` holds the clock, which is no result: it has no checksums. A torn last line (the process was killed while
writing it) is ignored by readers and cut off before a line is appended.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from fedprism import atomic
from fedprism.config import MOMENTS, SPLITS
from fedprism.errors import RecordError
from fedprism.records.sealed import seal, unseal
from fedprism.round.events import RoundRecord, Score

METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"

T = TypeVar("T")


# --- a round as a line -----------------------------------------------------------------------------------------------


def encode(record: RoundRecord, clients: Sequence[str]) -> bytes:
    """A round as a line of `metrics.jsonl`; the order of its keys does not depend on who finished first."""
    index = _indices(tuple(clients))
    logs = {client: {n: _finite(v) for n, v in sorted(values.items())} for client, values in record.logs.items()}
    entry = {
        "round": record.round,
        "cohort": sorted(record.cohort, key=lambda name: index.get(name, len(index))),
        "failed": ordered(record.failed, clients),
        "down": ordered(record.down, clients),
        "up": ordered(record.up, clients),
        "logs": ordered(logs, clients),
        "scores": {
            moment: {
                split: {client: _entry(score) for client, score in ordered(scores, clients).items()}
                for split, scores in ordered(splits, SPLITS).items()
            }
            for moment, splits in ordered(record.scores, MOMENTS).items()
        },
    }
    return seal(entry, separators=(",", ":"))


def decode(entry: Mapping[str, Any], seconds: Mapping[str, float]) -> RoundRecord:
    """The inverse of `encode`. A line has no counts per class; a value that was not finite comes back as NaN."""
    return RoundRecord(
        round=entry["round"],
        cohort=tuple(entry["cohort"]),
        failed=entry["failed"],
        down=entry["down"],
        up=entry["up"],
        logs={client: {n: _number(v) for n, v in values.items()} for client, values in entry["logs"].items()},
        scores={
            moment: {
                split: {client: _score(*entry) for client, entry in scores.items()} for split, scores in splits.items()
            }
            for moment, splits in entry["scores"].items()
        },
        seconds=seconds,
    )


def _entry(score: Score) -> list[Any]:
    """Counts and loss; then, only where the method reports something, its branches and diagnostics."""
    entry = [score.correct, score.total, _finite(score.loss)]
    details = [dict(score.branches), {name: _finite(value) for name, value in score.diagnostics.items()}]
    return [*entry, *details] if any(details) else entry


def _score(
    correct: int,
    total: int,
    loss: float | None,
    branches: Mapping[str, int] | None = None,
    diagnostics: Mapping[str, float | None] | None = None,
) -> Score:
    values = {name: _number(value) for name, value in (diagnostics or {}).items()}
    return Score(correct, total, _number(loss), branches=branches or {}, diagnostics=values)


def encode_seconds(record: RoundRecord) -> bytes:
    """A round as a line of `timings.jsonl`."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    entry = {"round": record.round, "seconds": {n: round(s, 6) for n, s in record.seconds.items()}, "at": at}
    return json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def ordered(values: Mapping[str, T], order: Sequence[str]) -> dict[str, T]:
    """`values` in the order given; names that are not in it come last, sorted."""
    index = _indices(tuple(order))
    return {name: values[name] for name in sorted(values, key=lambda name: (index.get(name, len(index)), name))}


@lru_cache(maxsize=8)  # every round asks for it several times, and there may be ten thousand clients
def _indices(order: tuple[str, ...]) -> dict[str, int]:
    return {name: i for i, name in enumerate(order)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


# --- lines from a file -----------------------------------------------------------------------------------------------


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Every round of a `metrics.jsonl`; none where there is no file yet. A torn last line is ignored."""
    entries, damage = intact(path)
    if damage:
        raise RecordError(damage)
    return entries


def read_seconds(path: Path) -> dict[int, dict[str, float]]:
    """Round -> seconds by phase. Timings are no results: a line that cannot be read is skipped."""
    entries = [timing_of(line) for line in lines_of(path)]
    return {entry["round"]: entry.get("seconds", {}) for entry in entries if entry is not None}


def intact(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The rounds before the first damaged line, and an error message for that line ("": no line is damaged)."""
    entries: list[dict[str, Any]] = []
    lines = lines_of(path)
    for number, line in enumerate(lines, 1):
        try:
            entry = unseal(line)
        except ValueError:
            if number == len(lines):
                break  # torn: the last write was cut short
            entry = {}
        if entry.get("round") != number - 1:
            return entries, (
                f"line {number} of {path} is damaged: expected the record of round {number - 1}. Restore the file from "
                f"a copy; `fedprism fsck {path.parent}` says what can be done without one."
            )
        entries.append(entry)
    return entries, ""


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file, each with its line feed; none where there is no file yet."""
    return BytesIO(_bytes(path)).readlines()  # `splitlines` would split at a carriage return, too


def _bytes(path: Path) -> bytes:
    try:
        return atomic.read(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}.") from error


def timing_of(line: bytes) -> dict[str, Any] | None:
    """The round on a complete line of `timings.jsonl`; None for anything else."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("round"), int) else None


class Journal:
    """A file that lines are appended to; each line reaches the operating system before the next round begins."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def open(self, last: int) -> None:
        """Remove torn and unreadable lines and those after round `last` in one step, then open the file to append."""
        lines = [(line, timing_of(line)) for line in lines_of(self.path)]
        kept = [line for line, entry in lines if entry is not None and entry["round"] <= last]
        if len(kept) < len(lines):
            atomic.write(self.path, b"".join(kept))
        self._descriptor = atomic.append_to(self.path)

    def append(self, line: bytes) -> None:
        size = os.fstat(self._descriptor).st_size
        try:
            atomic.write_all(self._descriptor, line)
        except OSError:
            with suppress(OSError):  # the disk is full: take back the half of a line that may have been written
                os.ftruncate(self._descriptor, size)
            raise

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
