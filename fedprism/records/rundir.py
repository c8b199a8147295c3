"""The run directory: made once, written by one process at a time, opened again to resume or to read.

config.yaml      the resolved configuration; can be run again
run.json         versions, machine, federation, status
metrics.jsonl    one line per round; the same bits after a resume
timings.jsonl    one line per round; the clock
classes.json     counts per class of the best and the last round
checkpoints/     see checkpoint.py
states/          while it runs with clients.state: disk; see store/clients.py
.lock            locked while a process writes; the operating system unlocks it when the process ends
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock

from fedprism import atomic
from fedprism import config as configuration
from fedprism.config import Config
from fedprism.errors import RecordError, some
from fedprism.records import metrics, runfile
from fedprism.records.checkpoint import Checkpoints
from fedprism.records.locking import LOCK, locked
from fedprism.records.manifest import Damaged
from fedprism.records.metrics import METRICS
from fedprism.records.read import RunRecord, read_run
from fedprism.records.recorder import Recorder
from fedprism.records.runfile import RecordWarning
from fedprism.records.standing import Best
from fedprism.round.events import Callback, Snapshot

CONFIG = "config.yaml"
STATES = "states"


class RunDirectory:
    """One run's files. Use it as a context manager: leaving it releases the lock."""

    def __init__(self, path: Path, config: Config, lock: FileLock | None = None) -> None:
        self.path = path
        self.config = config
        self._lock = lock
        self._recorder: Recorder | None = None
        mapped = config.clients.state == "disk"
        self._checkpoints = Checkpoints(path / "checkpoints", mapped, repairs=lock is not None)

    @classmethod
    def create(cls, path: str | Path, config: Config) -> RunDirectory:
        """Make a run directory and lock it. A directory that is not empty is refused."""
        path = Path(path)
        with atomic.reporting(str(path), "Nothing was begun; make room or choose another --out."):
            _refuse_used(path)
            path.mkdir(parents=True, exist_ok=True)
            lock = locked(path)
            try:
                _refuse_used(path)  # another process may have been faster
                _write_first(path, config)
            except BaseException:
                lock.release()
                raise
        return cls(path, config, lock)

    @classmethod
    def open(cls, path: str | Path, write: bool = False, expect: Config | None = None) -> RunDirectory:
        """Open a run to read, or with `write` to go on: that locks it and refuses an edited configuration."""
        path = Path(path)
        runfile.refuse_links(path)
        recorded = runfile.recorded_config(path, runfile.read(path))
        if expect is not None:
            runfile.check_config(path, recorded, expect, "the one given")
        if not write:
            return cls(path, recorded)
        with atomic.reporting(str(path), "Nothing was changed; make room there and try again."):
            lock = locked(path)
            try:
                if (path / CONFIG).exists():
                    runfile.check_config(path, recorded, configuration.read(path / CONFIG), CONFIG)
                else:  # the process was killed while it made the directory
                    _write_config(path, recorded)
                for folder in (path, *(path / name for name in runfile.FOLDERS)):
                    atomic.sweep(folder)
                shutil.rmtree(path / STATES, ignore_errors=True)  # a killed run goes on from its checkpoint
            except BaseException:
                lock.release()
                raise
        return cls(path, recorded, lock)

    def begun(self) -> bool:
        """Whether a round has been recorded."""
        return bool(metrics.intact(self.path / METRICS)[0])

    @property
    def status(self) -> str:
        """`running` (or killed), `finished`, `diverged` or `interrupted`."""
        return str(runfile.read(self.path)["status"])

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients that the run was begun with; none before it has begun."""
        return tuple(runfile.read(self.path).get("clients") or ())

    @property
    def states(self) -> Path:
        """The folder for clients' states while the run goes on."""
        return self.path / STATES

    def latest(self, lost: list[str] | None = None) -> Snapshot | None:
        """The newest sound checkpoint, with a warning for each damaged one; None: begin with round 0.

        With a list `lost`, damaged states of clients do no harm: these clients are named there, and stand in the
        checkpoint as if they had never trained.
        """
        rounds = self._checkpoints.rounds()  # before the metrics, which are always ahead of it
        entries, damage = metrics.intact(self.path / METRICS)
        if damage and any(round >= len(entries) for round in rounds):
            raise RecordError(damage)
        snapshot = self._checkpoints.newest(rounds, len(entries) - 1, lost)
        if snapshot is None and self._checkpoints.rounds() != rounds:
            return self.latest(lost)  # the run goes on and has replaced them all meanwhile
        # Round 0 has a checkpoint before round 1 is recorded: without one, it has been lost.
        if snapshot is None and (rounds or len(entries) > 1):
            damaged: list[str] = []
            if lost is None and (usable := self._checkpoints.newest(rounds, len(entries) - 1, damaged)) is not None:
                raise RecordError(
                    f"{self.path} has no checkpoint that is whole. That of round {usable.round} lacks only the "
                    f"{'state' if len(damaged) == 1 else 'states'} of {some(damaged)}. Restore "
                    f"{self._checkpoints.folder} from a copy, or go on without: `fedprism resume {self.path} "
                    "--reset-damaged` lets these clients begin anew, and records it."
                )
            raise RecordError(
                f"{self.path} had checkpoints, but none of them can be used: the run cannot be resumed. Restore "
                f"{self._checkpoints.folder} from a copy, or delete {self.path} to start anew from round 0."
            )
        return snapshot

    def best(self, lost: list[str] | None = None) -> Snapshot | None:
        """The checkpoint of the best round by mean validation accuracy; the newest one where there is no such round.

        With a list `lost`, damaged states of clients do no harm, as in `latest`.
        """
        rounds = self._checkpoints.rounds()
        record = self.record()
        best = Best(record.moment)
        for entry in record.rounds:
            if rounds and entry.round <= rounds[-1]:  # a later round has no checkpoint yet
                best.add(entry)
        if best.round is not None:
            try:
                return self.at(best.round, lost)
            except RecordError as error:
                if self._checkpoints.rounds() != rounds:
                    return self.best(lost)  # the run goes on and has a better one now
                warnings.warn(f"{error} The newest checkpoint is used instead.", RecordWarning, stacklevel=2)
        return self.latest(lost)

    def at(self, round: int, lost: list[str] | None = None) -> Snapshot:
        """The checkpoint of one round: one of the last two, the best, or one of `run.keep_rounds`."""
        rounds = self._checkpoints.rounds()
        if round not in rounds:
            known = ", ".join(map(str, rounds)) or "none"
            raise RecordError(f"{self.path} has no checkpoint of round {round}; it has: {known}. See run.keep_rounds.")
        try:
            return self._checkpoints.load(round, lost)
        except Damaged as damage:
            raise RecordError(f"the checkpoint of round {round} cannot be used: {damage}.") from None

    def recorder(self, about: Mapping[str, Any] | None = None, reset: Sequence[str] = ()) -> Callback:
        """The callback that records the run; its plan says after which checkpoint it goes on.

        `about` is what `run.json` keeps about the run beside the plan, as it was when the run was begun. `reset` names
        clients that begin anew, because their states are lost.
        """
        if self._lock is None:
            raise RecordError(f"{self.path} was opened for reading; open it with write=True to record.")
        self._recorder = Recorder(self.path, self._checkpoints, about or {}, reset)
        return self._recorder

    def record(self) -> RunRecord:
        return read_run(self.path)

    def close(self) -> None:
        """Close open files and release the lock."""
        if self._recorder is not None:
            self._recorder.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_used(path: Path) -> None:
    """Accept an empty directory, or one whose creation was interrupted; anything else is somebody's work."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RecordError(f"{path} is a file; expected a new or empty directory: choose another --out.")
    if any(entry.name != LOCK and not atomic.is_partial(entry) for entry in path.iterdir()):
        raise RecordError(
            f"{path} exists and is not empty. Choose another --out, go on with the run in it by "
            f"`fedprism resume {path}`, or delete it."
        )


def _write_first(path: Path, config: Config) -> None:
    """Write run.json first: with it alone the run can be resumed, without it the directory counts as unused."""
    atomic.sweep(path)
    try:
        runfile.write(path, runfile.first(config))
        _write_config(path, config)
        atomic.fsync(path.parent)
    except OSError:
        for name in (CONFIG, runfile.NAME):
            (path / name).unlink(missing_ok=True)
        raise


def _write_config(path: Path, config: Config) -> None:
    atomic.write(path / CONFIG, configuration.dump(config).encode())
