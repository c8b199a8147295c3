"""Check every file of a run directory: what is damaged, what that costs, and what can still be done.

`repair` does it. Whatever it replaces is moved into a folder `replaced-1`, `replaced-2`, ... of the run directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fedprism import atomic
from fedprism import config as configuration
from fedprism.config import Config
from fedprism.errors import FedprismError, RecordError, some
from fedprism.files import NotAFile, open_regular
from fedprism.records import classes, folder, metrics, runfile
from fedprism.records.folder import CONFIG, LOCK, locked
from fedprism.records.manifest import Damaged, Manifest, manifest_path, manifest_rounds, read_manifest
from fedprism.records.read import rounds_done, rounds_fit
from fedprism.records.sealed import unseal

_PASSES = 4  # of repair: what one repairs shows what is left to do


@dataclass(frozen=True)
class Finding:
    """Something in a run directory that is not as it was written."""

    where: str  # the file, below the run directory
    problem: str
    remedy: str  # what can be done
    repair: Callable[[], None] | None = None  # does it, where a program can


@dataclass
class Checkup:
    """What `fsck` has found."""

    findings: list[Finding] = field(default_factory=list)
    verified: int = 0  # files that are as they were written
    rounds: int = 0  # that can be read, from round 0 on
    whole: list[int] = field(default_factory=list)  # rounds whose checkpoints are whole
    stopped: bool = False  # a folder is a link, so that the rest was not checked

    @property
    def verdict(self) -> str:
        """What can be read, and from where the run can go on."""
        if self.stopped:
            return "The rest was not checked, since what lies behind a link is not the run's"
        read = f"{self.rounds} rounds can be read (0 to {self.rounds - 1})" if self.rounds else "No round can be read"
        usable = [round for round in self.whole if round < self.rounds]
        if usable:
            return f"{read}. Whole checkpoints: {_rounds(usable)}"
        return f"{read}. No checkpoint of these rounds is whole"


def fsck(path: Path) -> Checkup:
    """Check a run directory that nobody is writing. Nothing is changed, and no link is followed."""
    _refuse_others(path)
    lock = None
    if (path / LOCK).is_file() and not (path / LOCK).is_symlink():
        with suppress(OSError):  # may not be written: then the run is most likely not being written either
            lock = locked(path)
    try:
        return _Check(path).all()
    finally:
        if lock is not None:
            lock.release()


def _refuse_others(path: Path) -> None:
    folder.refuse_set_aside(path)
    if not path.is_dir():
        raise RecordError(f"{path} is no folder; expected a run directory.")
    if not any((path / name).exists() for name in (runfile.NAME, CONFIG, metrics.METRICS)):
        raise RecordError(f"{path} is no run directory: it has neither {runfile.NAME} nor {metrics.METRICS}.")


def repair(path: Path) -> tuple[Checkup, list[Finding]]:
    """Do what can be done, and check again. Returns what is left, and what was repaired."""
    _refuse_others(path)
    done: list[Finding] = []
    with atomic.reporting(str(path), "What was replaced so far lies in its folders replaced-...; make room there."):
        if (path / LOCK).is_symlink():
            _set_aside(path, path / LOCK)
        lock = locked(path)
        try:
            found = _Check(path).all()
            for _ in range(_PASSES):
                repairable = [finding for finding in found.findings if finding.repair is not None]
                for finding in repairable:
                    finding.repair()  # type: ignore[misc]
                done += repairable
                found = _Check(path).all() if repairable else found
        finally:
            lock.release()
    return found, done


class _Check:
    """One check of one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.found = Checkup()
        self.scored = False  # has a round that a checkpoint stands for tested any client?

    def all(self) -> Checkup:
        self.check_permissions()
        self.check_kinds()
        if any((self.path / name).is_symlink() for name in folder.FOLDERS):
            self.found.stopped = True
            return self.found
        info = self.check_run_file()
        if info is not None:
            self.check_config(runfile.recorded_config(self.path, info))
        self.check_checkpoints(info or {})
        self.check_rounds(info)
        self.check_end(info or {})
        self.check_timings()
        self.check_classes()
        return self.found

    def add(self, file: Path, problem: str, remedy: str, repair: Callable[[], None] | None = None) -> None:
        self.found.findings.append(Finding(str(file.relative_to(self.path)), problem, remedy, repair))

    def set_aside(self, file: Path) -> None:
        _set_aside(self.path, file)

    def replace(self, file: Path, data: bytes) -> None:
        """Set a file aside, where there is one, and write another in its place."""
        self.set_aside(file)
        file.parent.mkdir(exist_ok=True)
        atomic.write(file, data)

    def replace_by(self, file: Path, good: Path) -> None:
        self.replace(file, atomic.read(good))

    # --- what kind of file it is -------------------------------------------------------------------------------------

    def check_permissions(self) -> None:
        """What may not be read is not damaged: an error, before anything is called so, or replaced."""
        try:
            places = [self.path, *(self.path / name for name in folder.FOLDERS)]
            inside = [each for place in places if os.path.isdir(place) for each in sorted(place.iterdir())]
            for file in (each for each in inside if each.parent != self.path or each.name in folder.FILES):
                try:
                    open_regular(file, follow=False).close()
                except PermissionError:
                    raise
                except (NotAFile, OSError):
                    continue  # it is found below
        except PermissionError as error:
            raise RecordError(
                f"{error.filename} may not be read ({error.strerror}). Nothing is known to be damaged, and nothing was "
                "changed: check its permissions, then try again."
            ) from error

    def check_kinds(self) -> None:
        """Links, and other things that are neither files nor folders, or one in place of the other."""
        folders = [self.path / name for name in folder.FOLDERS]
        real = [place for place in folders if place.is_dir() and not place.is_symlink()]
        inside = [each for place in real for each in place.iterdir() if each not in folders]
        for each in [*folders, *(self.path / name for name in folder.FILES), *inside]:
            wanted = stat.S_ISDIR if each in folders else stat.S_ISREG
            if each.is_symlink() or (each.exists() and not wanted(each.lstat().st_mode)):
                kind, remedy = "is no folder" if each in folders else "is no regular file", "it is moved aside"
                if each.is_symlink():
                    kind = "is a link"
                    remedy += ", and what it points to stays; if you trust that, put a copy of it here instead"
                self.add(each, kind, remedy, partial(self.set_aside, each))

    # --- run.json and config.yaml ------------------------------------------------------------------------------------

    def check_run_file(self) -> dict[str, Any] | None:
        file = self.path / runfile.NAME
        if _is_sealed(file, runfile.unpacked):
            self.found.verified += 1
            return runfile.read(self.path)  # or an error: another version of fedprism has written it
        try:
            config = configuration.read(self.path / CONFIG)
            whole = configuration.dump(config).encode() == atomic.read(self.path / CONFIG)
        except FedprismError:
            whole = False
        if not whole:  # what is cut off would be taken for settings left out
            self.add(file, _state_of(file), f"restore it from a copy: {CONFIG} is not as it was written, either")
            return None
        data = runfile.packed(runfile.first(config))
        remedy = f"it is written again from {CONFIG}; `fedprism resume` adds the rest, but not who had begun anew"
        self.add(file, _state_of(file), remedy, lambda: self.replace(file, data))
        return None

    def check_config(self, recorded: Config) -> None:
        file = self.path / CONFIG
        try:
            runfile.check_config(self.path, recorded, configuration.read(file), CONFIG)
            self.found.verified += 1
        except FedprismError:
            problem = "is not the configuration that was run" if file.exists() else "is missing"
            data = configuration.dump(recorded).encode()
            self.add(file, problem, f"it is written again from {runfile.NAME}", lambda: self.replace(file, data))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def check_checkpoints(self, info: dict[str, Any]) -> None:
        manifests: dict[int, Manifest] = {}
        damaged: list[Path] = []
        for round in manifest_rounds(self.checkpoints):
            file = manifest_path(self.checkpoints, round)
            try:
                manifests[round] = read_manifest(self.checkpoints, round)
                self.found.verified += 1
            except Damaged:
                damaged.append(file)
        used = f"the checkpoint of round {max(manifests)} is used" if manifests else "there is none before it"
        for file in damaged:
            self.add(file, _state_of(file), f"it is moved aside; {used}", partial(self.set_aside, file))
        named: dict[str, list[int]] = {}
        for round, manifest in manifests.items():
            for checksum in manifest.files:
                named.setdefault(checksum, []).append(round)
        lost = [name for name, rounds in sorted(named.items()) if not self.check_state(name, shared=len(rounds) > 1)]
        self.found.whole = [round for round, manifest in manifests.items() if manifest.files.isdisjoint(lost)]
        if len(manifests) == len(manifest_rounds(self.checkpoints)) > 0 and info.get("status", "running") != "running":
            self.check_unnamed(named)
        ended = info.get("status") in runfile.ENDED
        known = any(manifest.server not in lost for manifest in manifests.values())
        for checksum in lost:
            file = self.checkpoints / "files" / f"{checksum}.safetensors"
            owners = [c for r in named[checksum] for c, name in manifests[r].clients.items() if name == checksum]
            self.add(file, _state_of(file), self.without(owners, named[checksum], known, ended))

    def check_unnamed(self, named: Collection[str]) -> None:
        """A run that has stopped in good order leaves no file that no manifest names."""
        for file in sorted((self.checkpoints / "files").glob("*.safetensors")):
            if file.stem not in named and file.is_file() and not file.is_symlink():
                remedy = "it is moved aside; if a manifest is missing, restore that one from a copy first"
                self.add(file, "is named by no checkpoint", remedy, partial(self.set_aside, file))

    def check_state(self, checksum: str, shared: bool) -> bool:
        """Whether a state is there, as a file or as its copy. Both should be, where several checkpoints name it."""
        file, copy = (self.checkpoints / name / f"{checksum}.safetensors" for name in ("files", "copies"))
        sound = [atomic.holds(each, checksum) for each in (file, copy)]
        self.found.verified += sum(sound)
        for bad, good, anyway in ((file, copy, True), (copy, file, shared)):
            if (anyway or bad.exists()) and not sound[bad == copy] and sound[good == copy]:
                remedy = f"it is replaced by its {'copy' if bad == file else 'original'}"
                self.add(bad, _state_of(bad), remedy, partial(self.replace_by, bad, good))
        return any(sound)

    def without(self, owners: list[str], rounds: list[int], known: bool, ended: bool) -> str:
        """What can be done without the state of these clients (none: of the server). Clients can begin anew where the
        server's state of any round is `known` and the run has not `ended`."""
        whose = f"the state of {some(dict.fromkeys(owners))}" if owners else "the server's state"
        text = f"it is {whose} ({_rounds(rounds)}): restore it from a copy"
        if self.found.whole:
            way = "whole checkpoints" if ended else "or resume, which uses a whole checkpoint"
            return f"{text}, {way} ({_rounds(self.found.whole)})"
        if ended or not known:
            return f"{text}; all else of these can be had" if owners else text
        return f"{text}, or go on without: `fedprism resume {self.path} --reset-damaged`" if owners else text

    # --- rounds ------------------------------------------------------------------------------------------------------

    def check_rounds(self, info: dict[str, Any] | None) -> None:
        file = self.path / metrics.METRICS
        try:
            entries, damage = metrics.intact(file)
        except FedprismError:  # it cannot be read at all
            entries, damage = [], "all of it"
        last, reached = len(entries) - 1, rounds_done(self.path, info or {})
        self.scored = any(entry["scores"] for entry in entries[: reached + 1])
        self.found.rounds = len(entries)
        if not damage and rounds_fit(info or {}, len(entries), reached):
            self.found.verified += file.exists()
            return
        ends = f"ends at round {last}" if entries else "has no round"
        problem = f"is damaged at line {last + 2}" if damage else f"{ends}, but the run has got to round {reached}"
        if not damage and last > reached:
            self.add(file, problem, "it is that of another run: restore this run's from a copy")
            return
        usable = [round for round in self.found.whole if round <= last]
        remedy = f"restore it from a copy; or --repair it, and {_again(usable)}, to the same bits"

        def keep_what_is_whole() -> None:
            if usable:
                self.replace(file, b"".join(metrics.lines_of(file)[: len(entries)]))
                later = [round for round in manifest_rounds(self.checkpoints) if round > last]
                gone = [manifest_path(self.checkpoints, round) for round in later]
            else:
                gone = [self.path / name for name in (metrics.METRICS, metrics.TIMINGS, classes.NAME)]
                gone.append(self.checkpoints)
            for each in gone:
                self.set_aside(each)
            if info is not None:
                self.reopen(info)

        self.add(file, problem, remedy, keep_what_is_whole)

    def check_end(self, info: dict[str, Any]) -> None:
        """A run has the checkpoint that it ended with, and one that has not ended has one from round 1 on."""
        done, rounds = info.get("done"), manifest_rounds(self.checkpoints)
        if done in self.found.whole or (done is None and (rounds or self.found.rounds < 2)):
            return
        file = self.checkpoints if done is None else manifest_path(self.checkpoints, done)
        usable = [round for round in self.found.whole if round < self.found.rounds]
        if done not in rounds and not usable:
            problem = "is missing" if done is not None or not file.exists() else "holds no checkpoint"
            anew = f"`fedprism run {self.path / CONFIG} --out ELSEWHERE` begins it anew"
            left = "what it has recorded can be read, but the run cannot go on"
            self.add(file, problem, f"restore it from a copy. Without one, {left}; {anew}")
        elif usable and (done not in rounds or info["status"] in runfile.ENDED):
            problem = "is missing" if done not in rounds else "names the last checkpoint, which is not whole"
            remedy = f"restore it from a copy; or --repair it, and {_again(usable)}, to the same bits"
            self.add(file, problem, remedy, partial(self.reopen, info))

    def reopen(self, info: dict[str, Any]) -> None:
        """Let a run that has ended go on from its newest checkpoint."""
        self.replace(self.path / runfile.NAME, runfile.packed({**info, "status": "interrupted", "done": None}))

    def check_timings(self) -> None:
        file = self.path / metrics.TIMINGS
        try:
            lines = metrics.lines_of(file)
        except NotAFile:
            return  # which was said
        except RecordError:
            self.add(file, "cannot be read", "restore it from a copy; timings are no results")
            return
        if not file.exists() and self.found.rounds:
            remedy = "timings are no results, and an empty file takes its place"
            self.add(file, "is missing", remedy, lambda: self.replace(file, b""))
            return
        good = [line for line in lines if metrics.timing_of(line) is not None]
        self.found.verified += file.exists()
        if len(good) < len(lines):
            odd, remedy = len(lines) - len(good), "timings are no results, and go on without"
            problem = f"has lines that cannot be read ({odd} of {len(lines)})"
            self.add(file, problem, remedy, lambda: self.replace(file, b"".join(good)))

    def check_classes(self) -> None:
        file = self.path / classes.NAME
        if _is_sealed(file):
            self.found.verified += 1
        elif file.exists() or self.scored:
            remedy = "restore it from a copy; or --repair it, and tables go on without balanced accuracy and F1"
            self.add(file, _state_of(file), remedy, lambda: self.replace(file, classes.packed(classes.NO_COUNTS)))


def _set_aside(path: Path, file: Path) -> None:
    """Move a file, a link or a folder of a run directory into a folder of what was replaced, if it is there."""
    if not (file.exists() or file.is_symlink()):
        return
    number = 1
    while not _free(path, target := path / f"replaced-{number}" / file.relative_to(path)):
        number += 1
    target.parent.mkdir(parents=True, exist_ok=True)
    file.rename(target)


def _free(path: Path, target: Path) -> bool:
    """Whether a file can be moved here: nothing is there, and between it and the run directory are folders alone."""
    between = target.parents[: len(target.relative_to(path).parts) - 1]
    odd = any(each.is_symlink() or (each.exists() and not each.is_dir()) for each in between)
    return not odd and not os.path.lexists(target)


def _is_sealed(file: Path, read: Callable[[bytes], object] = unseal) -> bool:
    """Is it as it was written?"""
    try:
        read(atomic.read(file))
    except (OSError, ValueError, NotAFile):
        return False
    return True


def _state_of(file: Path) -> str:
    return "does not match its checksum" if file.exists() else "is missing"


def _rounds(rounds: list[int]) -> str:
    return f"{'round' if len(rounds) == 1 else 'rounds'} {', '.join(map(str, sorted(rounds)))}"


def _again(usable: list[int]) -> str:
    """What resuming does from the newest of these checkpoints."""
    return f"`fedprism resume` computes {f'the rounds after {usable[-1]}' if usable else 'all rounds'} again"
