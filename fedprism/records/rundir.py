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

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock

from fedprism import atomic
from fedprism import config as configuration
from fedprism.config import Config
from fedprism.errors import ConfigError, RecordError, some
from fedprism.records import folder, metrics, runfile
from fedprism.records.checkpoint import Checkpoints
from fedprism.records.folder import CHECKPOINTS, CONFIG, STATES, Identity, Replaced, locked, recover, set_aside
from fedprism.records.manifest import Damaged
from fedprism.records.metrics import METRICS
from fedprism.records.read import RunRecord, read_run
from fedprism.records.recorder import Recorder
from fedprism.records.runfile import RecordWarning
from fedprism.records.standing import Best
from fedprism.round.events import Callback, Plan, RoundRecord, Snapshot, Status
from fedprism.store.clients import StateError


class Moved(RecordError):
    """The run directory is no longer where it was."""


class RunDirectory:
    """One run's files. Use it as a context manager: leaving it releases the lock."""

    def __init__(self, path: Path, config: Config, lock: FileLock | None = None) -> None:
        self.path = path
        self.config = config
        self._lock = lock
        self._recorder: Recorder | None = None
        mapped = config.clients.state == "disk"
        self._checkpoints = Checkpoints(path / CHECKPOINTS, mapped, repairs=lock is not None)
        # Kept open while it is locked: until then no other directory can get the same device and inode.
        self._handle = os.open(path, os.O_RDONLY) if lock is not None and os.name != "nt" else -1
        self._before: Mapping[str, Any] = {}  # run.json when the directory was opened
        self._created = False  # has this process made the directory?
        self._made: set[Identity] | None = None  # the files of a new run before its first round
        self._old: Replaced | None = None  # the run that this one replaces

    @classmethod
    def create(cls, path: str | Path, config: Config, overwrite: bool = False) -> RunDirectory:
        """Make a run directory and lock it. A directory that is not empty is refused.

        With `overwrite`, a run that is there is set aside, until this one is on disk (`settle`) or fails (`give_up`).
        """
        path, directory, created, ours = Path(path), None, False, False
        with atomic.reporting(str(path), "Nothing was begun; make room or choose another --out."):
            folder.refuse_dead_ends(path)
            recover(path)
            old = set_aside(path) if overwrite else None
            try:
                _refuse_used(path)
                created = not path.exists()
                path.mkdir(parents=True, exist_ok=True)
                directory = cls(path, config, locked(path))
                _refuse_used(path)  # another process may have been faster
                directory._created, directory._old, ours = created, old, True
                _write_first(path, config)
                directory._made = folder.identities(path)
            except BaseException:
                if directory is not None:
                    if ours:
                        directory._take_back()
                    directory.close()
                elif created:
                    with suppress(OSError):
                        path.rmdir()
                if old is not None:
                    old.restore()
                raise
        return directory

    @classmethod
    def open(cls, path: str | Path, write: bool = False, expect: Config | None = None) -> RunDirectory:
        """Open a run to read, or with `write` to go on: that locks it and refuses an edited configuration."""
        path = Path(path)
        if write:
            recover(path)
        else:
            folder.refuse_set_aside(path)
        folder.refuse_links(path)
        info = runfile.read(path)
        recorded = runfile.recorded_config(path, info)
        if expect is not None:
            runfile.check_config(path, recorded, expect, "the one given")
        if not write:
            return cls(path, recorded)
        with atomic.reporting(str(path), "Nothing was changed; make room there and try again."):
            lock = locked(path)
            try:
                _check_readable(path / CHECKPOINTS)
                if (path / CONFIG).exists():
                    runfile.check_config(path, recorded, _read_config(path), CONFIG)
                else:  # the process was killed while it made the directory
                    _write_config(path, recorded)
                for each in (path, *(path / name for name in folder.FOLDERS)):
                    atomic.sweep(each)
                shutil.rmtree(path / STATES, ignore_errors=True)  # a killed run goes on from its checkpoint
                directory = cls(path, recorded, lock)
            except BaseException:
                lock.release()
                raise
        directory._before = info
        return directory

    def note(self) -> None:
        """Remember the files that a new run has made when it begins, for `give_up`."""
        if self._made is not None:
            self._made = folder.identities(self.path)  # not those from before: their inodes may be used again

    def note_end(self) -> None:
        """The same of run.json, which is written anew when the run ends."""
        if self._made is not None:
            with suppress(OSError):
                self._made.add(folder.identity(self.path / runfile.NAME))

    def settle(self) -> None:
        """Let the run that this one replaces go, if this one is on disk."""
        if self._old is not None and self._in_place() and folder.complete(self.path):
            old, self._old = self._old, None
            old.drop()

    def give_up(self, error: BaseException) -> None:
        """After a failure, leave nothing behind if nothing was recorded, so that it is not in the way of the next try.

        A run that was to be replaced comes back, unless this one is on disk.
        """
        self.settle()
        if not self._in_place():
            if self._old is not None:
                self._old.restore()
            return
        if self._old is None and folder.begun(self.path):
            return
        self._take_back(None if self._old is not None else self._made)
        back = self._old is not None and self._old.restore()
        if isinstance(error, RecordError) and isinstance(error.__cause__, OSError):
            there = ", and the run that was there is back in its place" if back else ""
            with atomic.reporting(str(self.path), f"Nothing was begun{there}; make room or choose another --out."):
                raise error.__cause__

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
        rounds = self._rounds()  # before the metrics, which are always ahead of it
        entries, damage = metrics.intact(self.path / METRICS)
        if rounds and rounds[0] >= len(entries):
            raise RecordError(self._why_not(rounds, len(entries), damage))
        if damage and rounds and rounds[-1] >= len(entries):
            raise RecordError(damage)
        snapshot = self._checkpoints.newest(rounds, len(entries) - 1, lost)
        if snapshot is None and self._rounds() != rounds:
            return self.latest(lost)  # the run goes on and has replaced them all meanwhile
        # Round 0 has a checkpoint before round 1 is recorded: without one, it has been lost.
        if snapshot is None and (rounds or len(entries) > 1):
            damaged: list[str] = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RecordWarning)  # they have been given
                usable = self._checkpoints.newest(rounds, len(entries) - 1, damaged) if lost is None else None
            if usable is not None:
                raise RecordError(
                    f"{self.path} has no checkpoint that is whole. That of round {usable.round} lacks only the "
                    f"{'state' if len(damaged) == 1 else 'states'} of {some(damaged)}. Restore "
                    f"{self._checkpoints.folder} from a copy, or go on without: `fedprism resume {self.path} "
                    "--reset-damaged` lets these clients begin anew, and records it."
                )
            raise RecordError(self._why_not(rounds, len(entries)))
        return snapshot

    def _why_not(self, rounds: list[int], recorded: int, damage: str = "") -> str:
        """Why a run cannot go on that has recorded so many rounds and has checkpoints of these."""
        listed = ", ".join(map(str, rounds))
        if rounds and rounds[0] >= recorded:
            lost = self.path / METRICS
            end = f"ends with round {recorded - 1}" if recorded else "is empty" if lost.exists() else "is missing"
            end = f"is damaged in line {recorded + 1}" if damage else end
            why = f"{lost} {end}, and the checkpoints are of rounds {listed}: a run goes on after recorded rounds only"
        elif rounds:
            lost = self._checkpoints.folder
            why = f"{self.path} has checkpoints of rounds {listed}, but none of them can be used"
        else:
            lost = self._checkpoints.folder
            end = "holds no checkpoint" if lost.exists() else "is missing"
            why = f"{self.path} has recorded {recorded} rounds, but {lost} {end}"
        return (
            f"{why}. Restore {lost} from a copy, then run `fedprism resume {self.path}`. Without a copy the run cannot "
            f"go on; `fedprism run {self.path / CONFIG} --out ELSEWHERE` begins it anew."
        )

    def _rounds(self) -> list[int]:
        """The rounds that have a checkpoint; an error where that cannot be seen."""
        _check_readable(self._checkpoints.folder)
        return self._checkpoints.rounds()

    def best(self, lost: list[str] | None = None) -> Snapshot | None:
        """The checkpoint of the best round by mean validation accuracy; the newest one where there is no such round.

        With a list `lost`, damaged states of clients do no harm, as in `latest`.
        """
        rounds = self._rounds()
        record = self.record()
        best = Best(record.moment)
        for entry in record.rounds:
            if rounds and entry.round <= rounds[-1]:  # a later round has no checkpoint yet
                best.add(entry)
        if best.round is not None:
            try:
                return self.at(best.round, lost)
            except RecordError as error:
                if self._rounds() != rounds:
                    return self.best(lost)  # the run goes on and has a better one now
                warnings.warn(f"{error} The newest checkpoint is used instead.", RecordWarning, stacklevel=2)
        return self.latest(lost)

    def at(self, round: int, lost: list[str] | None = None) -> Snapshot:
        """The checkpoint of one round: one of the last two, the best, or one of `run.keep_rounds`."""
        rounds = self._rounds()
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
        self._recorder = Recorder(self.path, self._checkpoints, about or {}, reset, self._check_place)
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
        self._let_go()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and self._recorder is not None:
                self._note_end()
                if isinstance(error, RecordError | OSError) and not isinstance(error, Moved):
                    self._check_place()  # which may be why
                if isinstance(error, StateError):
                    rounds = self._rounds()
                    safe = f"Everything up to round {rounds[-1]} is safe" if rounds else "No round is recorded yet"
                    raise RecordError(f"{error} {safe}: `fedprism resume {self.path}` goes on from there.") from error
        finally:
            self.close()

    def _note_end(self) -> None:
        """Record that the run has stopped, where its recorder could not: it was interrupted as it began or ended."""
        with suppress(OSError, RecordError):
            place = self.path if self._in_place() else self._moved_to()
            if place is None:
                return
            info = runfile.read(place)
            if info["status"] == "running" and info != self._before:
                runfile.write(place, {**info, "status": "interrupted", "ended": runfile.now()})

    # --- the directory itself ----------------------------------------------------------------------------------------

    def _in_place(self) -> bool:
        """Whether the directory is still where it was, and no other one is there."""
        if self._handle < 0:
            return True
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except OSError:
            return False

    def _moved_to(self) -> Path | None:
        """Where the directory is now, as far as the system tells."""
        with suppress(OSError):
            place = Path(os.readlink(f"/proc/self/fd/{self._handle}"))
            if os.path.samestat(os.stat(place), os.fstat(self._handle)):
                return place
        return None

    def _check_place(self) -> None:
        """Before anything is written: never into a directory that has taken this one's place."""
        if self._in_place():
            return
        place = self._moved_to()
        if place is not None:
            raise Moved(
                f"{self.path} was moved to {place} while the run went on, so the run has stopped. "
                f"`fedprism resume {place}` goes on with it there."
            )
        raise Moved(
            f"{self.path} was deleted or moved away while the run went on, so the run has stopped. If it was moved, "
            "`fedprism resume` with its new place goes on; if it was deleted, begin it anew."
        )

    def _take_back(self, made: set[Identity] | None = None) -> None:
        """Remove the run's files (only those that were `made`, if given), and the directory if this process made it
        and it is empty then."""
        if self._in_place():
            with suppress(OSError):
                folder.remove(self.path, made)
                if self._created:
                    self.path.rmdir()
        self._let_go()

    def _let_go(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Settling(Callback):
    """Comes after the recorder: notes what a new run has made, and lets the run go that it replaces."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def begin(self, plan: Plan) -> None:
        self._directory.note()

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        self._directory.settle()

    def end(self, status: Status) -> None:
        self._directory.note_end()


def _check_readable(checkpoints: Path) -> None:
    try:
        os.scandir(checkpoints).close()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RecordError(
            f"{checkpoints} cannot be read: {error.strerror}. Nothing is known to be lost; check its permissions, and "
            "whether it is a folder, and try again."
        ) from error


def _refuse_used(path: Path) -> None:
    """Accept an empty directory, or one whose creation was interrupted; anything else is somebody's work."""
    if not path.exists() or folder.unused(path):
        return
    way = f", or go on with the run in it by `fedprism resume {path}`" if runfile.exists(path) else ""
    raise RecordError(f"{path} exists and is not empty. Choose another --out{way}.")


def _write_first(path: Path, config: Config) -> None:
    """Write run.json first: with it alone the run can be resumed, without it the directory counts as unused."""
    atomic.sweep(path)
    runfile.write(path, runfile.first(config))
    _write_config(path, config)
    atomic.fsync(path.parent)


def _read_config(path: Path) -> Config:
    try:
        return configuration.read(path / CONFIG)
    except ConfigError as error:
        raise RecordError(
            f"{path / CONFIG} cannot be used; {runfile.NAME} holds the configuration, too, and `fedprism fsck {path} "
            f"--repair` writes the file again: {error}"
        ) from None


def _write_config(path: Path, config: Config) -> None:
    atomic.write(path / CONFIG, configuration.dump(config).encode())
