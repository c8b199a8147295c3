"""Reading a run directory: no lock, nothing repaired, also while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedprism.config import Config
from fedprism.engines.events import RoundRecord
from fedprism.records import metrics, recorder, runfile


def read_run(path: str | Path) -> RunRecord:
    """The records of a run: finished, stopped, or going on."""
    path = Path(path)
    info = runfile.read(path)
    config = runfile.recorded_config(path, info)
    seconds = metrics.read_seconds(path / recorder.TIMINGS)
    entries = metrics.read_rounds(path / recorder.METRICS)
    return RunRecord(
        path=path,
        config=config,
        info=info,
        rounds=tuple(metrics.decode(entry, seconds.get(entry["round"], {})) for entry in entries),
        classes=recorder.read_classes(path),
    )


def run_status(path: str | Path) -> str | None:
    """`running` (or killed), `finished`, `diverged`, `interrupted`; None where no run was begun."""
    return str(runfile.read(Path(path))["status"]) if runfile.exists(Path(path)) else None


@dataclass(frozen=True)
class RunRecord:
    """What a run directory says, as plain data: tables, figures and protocols come from nothing else."""

    config: Config
    info: Mapping[str, Any]  # run.json
    rounds: tuple[RoundRecord, ...]  # round 0, 1, ...; scores without counts a class
    classes: Mapping[str, Any] = field(default_factory=dict)  # classes.json: best and last -> round, scores
    path: Path | None = None

    @property
    def status(self) -> str:
        """`running` also where the process was killed."""
        return str(self.info["status"])

    @property
    def method(self) -> str:
        return str(self.info.get("method", self.config.method.name))

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def moment(self) -> str:
        """The moment at which the method's paper tests."""
        return str(self.info.get("moment", "received"))

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(self.info.get("clients", ()))

    @property
    def samples(self) -> dict[str, tuple[int, int, int]]:
        """Client -> images for training, validation and test."""
        return {name: (train, val, test) for name, (train, val, test) in self.info.get("samples", {}).items()}

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.info.get("classes", ()))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an image: channels, height, width; of a text: length, words."""
        return tuple(self.info["shape"])

    @property
    def parameters(self) -> dict[str, int]:
        return dict(self.info.get("parameters", {}))

    @property
    def diverged(self) -> bool:
        return self.status == "diverged"
