"""Reading a run directory, also while the run goes on. It takes no lock, repairs nothing and needs no PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedprism.config import Config
from fedprism.errors import RecordError
from fedprism.records import metrics, runfile
from fedprism.records.classes import read_classes
from fedprism.records.folder import refuse_links
from fedprism.records.manifest import manifest_rounds
from fedprism.round.events import RoundRecord


def read_run(path: str | Path) -> RunRecord:
    """The records of a run: finished, stopped, or going on."""
    path = Path(path)
    refuse_links(path)
    info = runfile.read(path)
    config = runfile.recorded_config(path, info)
    reached = rounds_done(path, info)  # before the metrics, which are always ahead of it
    seconds = metrics.read_seconds(path / metrics.TIMINGS)
    entries = metrics.read_rounds(path / metrics.METRICS)
    if not rounds_fit(info, len(entries), reached):
        file = path / metrics.METRICS
        ends = f"ends at round {len(entries) - 1}" if entries else "is empty" if file.exists() else "is missing"
        raise RecordError(
            f"{file} {ends}, but the run has got to round {reached}. Restore the file from a copy; "
            f"`fedprism fsck {path}` says what can be done without one."
        )
    return RunRecord(
        path=path,
        config=config,
        info=info,
        rounds=tuple(metrics.decode(entry, seconds.get(entry["round"], {})) for entry in entries),
        classes=read_classes(path, expected=any(entry["scores"] for entry in entries[: reached + 1])),
    )


def rounds_done(path: Path, info: Mapping[str, Any]) -> int:
    """The last round that the run has surely recorded, by `run.json` and its checkpoints; -1: none."""
    done = info.get("done")
    return max([-1 if done is None else int(done), *manifest_rounds(path / "checkpoints")])


def rounds_fit(info: Mapping[str, Any], recorded: int, reached: int) -> bool:
    """Whether a run that has got to round `reached` can have recorded so many rounds: more only before it has ended."""
    return recorded == reached + 1 or (recorded > reached and info.get("status") not in runfile.ENDED)


def run_status(path: str | Path) -> str | None:
    """`running` (or killed), `finished`, `diverged`, `interrupted`; None where no run was begun."""
    return str(runfile.read(Path(path))["status"]) if runfile.exists(Path(path)) else None


def runs_below(folder: Path) -> list[Path]:
    """The run directories in a folder, at any depth, but not what a repair or a replacement has set aside.

    One that has lost its `run.json` is among them: reading it says so.
    """
    found = []
    for place, folders, files in os.walk(folder):
        is_run = not {runfile.NAME, metrics.METRICS}.isdisjoint(files)
        if is_run:
            found.append(Path(place))
        aside = "replaced-" if is_run else "."
        folders[:] = [name for name in folders if not name.startswith(aside)]
    return sorted(found)


def common_folder(paths: Iterable[Path]) -> Path:
    """The folder that all of these run directories lie in.

    >>> str(common_folder([Path("runs/a/fedavg-0"), Path("runs/b/local-0")]))
    'runs'
    """
    return Path(os.path.commonpath([path.parent for path in paths]))


@dataclass(frozen=True)
class Architecture:
    """One architecture of a run, and the clients that have it."""

    label: str
    parameters: int
    features: int  # that the body passes to the head
    clients: tuple[str, ...]


@dataclass(frozen=True)
class RunRecord:
    """A run directory as plain data. Tables, figures and protocols are computed from it alone."""

    config: Config
    info: Mapping[str, Any]  # run.json
    rounds: tuple[RoundRecord, ...]  # round 0, 1, ...; scores without counts per class
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
    def architectures(self) -> tuple[Architecture, ...]:
        """The architectures of the clients' models; empty where the run has not begun."""
        return tuple(
            Architecture(each["label"], each["parameters"], each["features"], tuple(each["clients"]))
            for each in self.info.get("architectures", ())
        )

    @property
    def shows(self) -> dict[str, str]:
        """Each value that the method reports of its inside -> its meaning."""
        return dict(self.info.get("shows", {}))

    @property
    def transforms(self) -> dict[str, dict[str, str]]:
        """Each transform of the uploads -> what it records of each -> its meaning."""
        return {each["name"]: dict(each["shows"]) for each in self.info.get("transforms", ())}

    @property
    def decided(self) -> dict[str, str]:
        """What the method chose by looking at the clients, such as FedSCE's auxiliary model."""
        return dict(self.info.get("decided", {}))

    @property
    def diverged(self) -> bool:
        return self.status == "diverged"
