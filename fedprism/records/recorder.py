"""The callback that records a run.

After each round it appends a line of metrics, then one of timings. At a checkpoint it forces both to disk, then writes
the counts per class, then the checkpoint's files, and last its manifest. So everything that a manifest stands for is on
disk before it, and what comes after the newest manifest can be removed and computed again to the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedprism import atomic
from fedprism.errors import RecordError
from fedprism.records import classes, metrics, runfile
from fedprism.records.checkpoint import Checkpoints
from fedprism.records.metrics import METRICS, TIMINGS, Journal
from fedprism.records.runfile import RecordWarning
from fedprism.records.standing import Best
from fedprism.round.events import Callback, Plan, RoundRecord, Snapshot, Status


class Recorder(Callback):
    """Records one run in a directory that this process has locked. `about` is more that `run.json` keeps of the run.

    `reset` names clients that go on from their first state. `check_place` raises an error where the directory is gone.
    """

    def __init__(
        self,
        path: Path,
        checkpoints: Checkpoints,
        about: Mapping[str, Any],
        reset: Sequence[str],
        check_place: Callable[[], None],
    ) -> None:
        self.path = path
        self._about, self._reset, self._check_place = about, reset, check_place
        self._checkpoints = checkpoints
        self._metrics = Journal(path / METRICS)
        self._timings = Journal(path / TIMINGS)
        self._counts: dict[str, Any] = {}  # counts per class: best and last
        self._unsaved: Snapshot | None = None
        self._safe = -1  # the newest round that has a checkpoint
        self._ready = False

    def begin(self, plan: Plan) -> None:
        """Check that this is the run that was begun, and remove what comes after its checkpoint."""
        info = runfile.read(self.path)
        runfile.check_config(self.path, runfile.recorded_config(self.path, info), plan.config, "this run")
        runfile.check_facts(self.path, info, plan)
        self._plan, self._safe = plan, plan.first_round - 1
        entries = self._history()
        self._best = Best(plan.moment)
        for entry in entries:
            self._best.add(metrics.decode(entry, {}))
        counted = classes.read_classes(self.path, expected=any(entry["scores"] for entry in entries))
        wanted = {"best": {self._best.round}, "last": range(plan.first_round)}
        self._counts = {which: counts for which, counts in counted.items() if counts["round"] in wanted[which]}
        with self._writing("the run directory"):
            self._checkpoints.drop_later(self._safe)
            self._metrics.open(self._safe)
            self._timings.open(self._safe)
            self._checkpoints.folder.mkdir(exist_ok=True)
            atomic.fsync(self.path)
            self._info = {**info, **runfile.facts(plan), "status": "running", "ended": None, "done": None}
            about = {"device": plan.device, "engine": plan.engine, "reveals": plan.reveals, **self._about}
            self._info |= {key: value for key, value in about.items() if key not in info}  # as it was begun
            if self._safe >= 0:
                self._note_resume()
            runfile.write(self.path, self._info)

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        with self._writing(METRICS):
            self._metrics.append(metrics.encode(record, self._plan.clients))
        with self._writing(TIMINGS):
            self._timings.append(metrics.encode_seconds(record))
        self._checkpoints.forget(snapshot)
        is_best = self._best.add(record)
        if record.scores:
            self._counts["last"] = classes.class_counts(record, self._plan.clients)
            if is_best:
                self._counts["best"] = self._counts["last"]
        self._unsaved = snapshot  # after the counts, which belong to it: an interruption may come in between
        run = self._plan.config.run
        regular = record.round % run.checkpoint_every == 0 or record.round == self._plan.rounds
        if regular or is_best or record.round in run.keep_rounds:
            self._save()

    def end(self, status: Status) -> None:
        """Record how the run ended. An interrupted run loses nothing: its last complete round gets a checkpoint."""
        try:
            if self._ready:
                self._save()
                with self._writing(runfile.NAME):
                    if self._safe >= 0:  # a process that was killed after the last checkpoint did not prune
                        self._checkpoints.prune(self._safe, self._keep())
                    ended = {"status": status, "ended": runfile.now(), "done": self._safe}
                    runfile.write(self.path, {**self._info, **ended})
        finally:
            self.close()

    def close(self) -> None:
        self._metrics.close()
        self._timings.close()

    def _history(self) -> list[Mapping[str, Any]]:
        """The rounds that stay; an error where they end before the checkpoint, or would be lost without need."""
        rounds = self._checkpoints.rounds()
        if self._safe not in (rounds or [-1]):
            known = ", ".join(map(str, rounds)) or "none"
            raise RecordError(
                f"{self.path} cannot go on after round {self._safe}: it has checkpoints of rounds {known}. "
                "Resume from one of them, or start a new run with another --out."
            )
        entries, damage = metrics.intact(self.path / METRICS)
        if len(entries) <= self._safe:
            end = f"{self.path / METRICS} ends before round {self._safe}, whose checkpoint the run goes on from."
            raise RecordError(damage or end)
        return list(entries[: self._safe + 1])

    def _note_resume(self) -> None:
        begun, here = self._info["versions"], runfile.versions()
        changed = [f"{n} {begun.get(n)} then, {here[n]} now" for n in ("fedprism", "torch") if begun.get(n) != here[n]]
        if self._info["device"] != self._plan.device:
            changed.append(f"device {self._info['device']} then, {self._plan.device} now")
        if changed:
            message = f"{self.path} was begun with {'; '.join(changed)}: figures may differ in the last digits."
            warnings.warn(message, RecordWarning, stacklevel=3)
        entry = {"round": self._safe, "at": runfile.now(), "versions": here, "reset": list(self._reset)}
        self._info["resumed"] = [*self._info.get("resumed", []), entry]

    def _save(self) -> None:
        snapshot = self._unsaved
        if snapshot is None:
            return
        with self._writing(METRICS):
            self._metrics.sync()
            self._timings.sync()
        if "last" in self._counts:
            with self._writing(classes.NAME):
                classes.write_classes(self.path, self._counts)
        with self._writing(f"the checkpoint of round {snapshot.round}"):
            self._checkpoints.save(snapshot, self._keep())
        self._safe, self._unsaved = snapshot.round, None

    def _keep(self) -> set[int]:
        """The rounds whose checkpoints stay, apart from the last two."""
        best = set() if self._best.round is None else {self._best.round}
        return {*self._plan.config.run.keep_rounds, *best}

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        safe = f"Everything up to round {self._safe} is safe" if self._safe >= 0 else "No round is recorded yet"
        rescue = f"{safe}; make room there, then run `fedprism resume {self.path}`."
        with atomic.reporting(f"{what} in {self.path}", rescue):
            try:
                self._check_place()
                yield
            except Exception:  # `end` must not write over what failed; an interruption leaves nothing half-written
                self._ready = False
                raise
        self._ready = True
