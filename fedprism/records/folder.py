"""The folder of a run: what in it is the run's own, who may write in it, and how one run makes room for its successor.

A run that is to be replaced is set aside in `.NAME.replaced` beside it, and goes when its successor has its first round
and its first checkpoint on disk. Whatever happens before that, it comes back: at once, or, after a kill, with the next
attempt to write there (`recover`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from fedprism import atomic
from fedprism.errors import RecordError
from fedprism.files import NotAFile
from fedprism.records import classes, metrics, runfile
from fedprism.records.runfile import RecordWarning

CONFIG = "config.yaml"
LOCK = ".lock"
STATES = "states"
CHECKPOINTS = "checkpoints"

Identity = tuple[int, int]  # device and inode

_PARTIAL = ".*.partial"
_OWN = {  # folder -> the names that a run gives its files; run.json and the lock go last
    f"{CHECKPOINTS}/files": ("*.safetensors", _PARTIAL),
    f"{CHECKPOINTS}/copies": ("*.safetensors", _PARTIAL),
    CHECKPOINTS: ("manifest-*.json", _PARTIAL),
    STATES: ("*.safetensors", _PARTIAL),
    "": (metrics.METRICS, metrics.TIMINGS, classes.NAME, _PARTIAL, CONFIG, runfile.NAME, LOCK),
}

FOLDERS = tuple(filter(None, _OWN))
FILES = (metrics.METRICS, metrics.TIMINGS, classes.NAME, CONFIG, runfile.NAME, LOCK)


# --- what is the run's own -------------------------------------------------------------------------------------------


def own_files(folder: Path) -> Iterator[Path]:
    """The files in a folder that have the names of a run's; links to folders elsewhere are not followed."""
    for name, patterns in _OWN.items():
        place = folder / name
        if os.path.realpath(place) == os.path.join(os.path.realpath(folder), name).rstrip(os.sep):
            for pattern in patterns:
                yield from (path for path in sorted(place.glob(pattern)) if path.is_symlink() or path.is_file())


def identity(path: Path) -> Identity:
    """Device and inode of a file, or of a link itself."""
    found = path.lstat()
    return found.st_dev, found.st_ino


def identities(folder: Path) -> set[Identity]:
    """Device and inode of each of a run's files."""
    return set(map(identity, own_files(folder)))


def remove(folder: Path, made: Collection[Identity] | None = None) -> None:
    """Remove a run's files, and its folders that are empty then. Nothing else is touched, and `folder` itself stays.

    With `made`, only those of its files go, and empty ones.
    """
    for path in list(own_files(folder)):
        if made is None or identity(path) in made or not path.lstat().st_size:
            path.unlink()
    for name in FOLDERS:
        with suppress(OSError):  # it is not there, or it holds something else
            (folder / name).rmdir()


def complete(folder: Path) -> bool:
    """Whether a run has its first round and its first checkpoint on disk."""
    return _has_rounds(folder) and _has_checkpoint(folder)


def begun(folder: Path) -> bool:
    """Whether a round has been recorded. A checkpoint is of one, even if the metrics are gone."""
    return _has_rounds(folder) or _has_checkpoint(folder)


def _has_checkpoint(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("manifest-*.json"))


def _has_rounds(folder: Path) -> bool:
    """Whether there are metrics of a round; those that cannot be read may be some."""
    try:
        return bool(metrics.intact(folder / metrics.METRICS)[0])
    except RecordError:
        return True


def refuse_links(folder: Path) -> None:
    """Refuse a run directory of which a part lies elsewhere: what is written or deleted there is not the run's. Refuse
    pipes, too, which nobody may write to."""
    for name in (*FILES, *FOLDERS):
        if os.path.islink(folder / name):  # unlike pathlib's, no error where a folder may not be read
            raise RecordError(
                f"{folder / name} is a link. A run directory holds all of its files itself: nothing is read, written "
                "or deleted through a link. If you trust it, put a copy of what it points to in its place."
            )
        if os.path.exists(folder / name) and not (os.path.isfile(folder / name) or os.path.isdir(folder / name)):
            raise NotAFile(folder / name, (folder / name).stat().st_mode)


# --- who may write ---------------------------------------------------------------------------------------------------


def locked(folder: Path, named: Path | None = None) -> FileLock:
    """The lock of a run's folder. `named` is what a message calls it."""
    if (folder / LOCK).is_symlink():  # not every version of filelock refuses one
        raise RecordError(f"{folder / LOCK} is a link, and nothing is written through a link: remove it.")
    named, lock = named or folder, FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RecordError(
            f"{named} is being written by another process; wait until it has ended, stop it, or choose another --out."
        ) from None
    except NotImplementedError as error:
        raise RecordError(
            f"{named} lies on a file system that cannot lock files ({error}); choose another --out."
        ) from None
    return lock


# --- making room for a successor -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replaced:
    """A run that is set aside, locked."""

    path: Path  # where it was
    place: Path  # where it is
    lock: FileLock

    def restore(self) -> bool:
        """Put it back; if that is impossible, warn and say where it is."""
        try:
            if self.path.is_dir():
                if unused(self.path):
                    remove(self.path)
                self.path.rmdir()
            self.place.rename(self.path)
        except OSError as error:
            warnings.warn(
                f"the run that was to be replaced cannot be put back into {self.path} ({error.strerror}). It is whole "
                f"and lies in {self.place}: move it to where you want it.",
                RecordWarning,
                stacklevel=2,
            )
            return False
        finally:
            self.lock.release()
        return True

    def drop(self) -> None:
        """Its successor is on disk: remove its files. Other files that lie with them move to the successor."""
        try:
            try:
                _clear(self.place, self.path)
            except (KeyboardInterrupt, SystemExit):  # it takes a moment, and half of it would hide a user's files
                _clear(self.place, self.path)
                raise
        except OSError as error:
            warnings.warn(
                f"the run in {self.path} has been replaced, but something of the old one is left in {self.place} "
                f"({error.strerror}). Look at it, then remove it.",
                RecordWarning,
                stacklevel=2,
            )
        finally:
            self.lock.release()


def set_aside(path: Path) -> Replaced | None:
    """Make room for a successor: an empty folder at `path`. None: there was no run.

    A run that is being written, and what is no run, are refused. Through a symbolic link, the run that it leads to is
    replaced, and the link stays.
    """
    if not path.exists() or (path.is_dir() and unused(path)):
        return None
    runfile.read(path)
    real = Path(os.path.realpath(path))
    old = Replaced(real, _beside(real), locked(real, path))
    what = f"{old.place}, where the run in {path} is kept until it is replaced,"
    try:
        with atomic.reporting(what, "That run stays as it is; choose another --out."):
            real.rename(old.place)
            try:
                real.mkdir()
            except BaseException:
                old.place.rename(real)
                raise
    except BaseException:
        old.lock.release()
        raise
    return old


def recover(path: Path) -> None:
    """Finish what a killed process has begun: put the run that it had set aside back, or remove it if the new one is on
    disk."""
    real = Path(os.path.realpath(path))
    place = _beside(real)
    if not os.path.isdir(place) or place.is_symlink():
        return
    with atomic.reporting(str(path), f"A run that was to be replaced lies in {place}; make room and try again."):
        old = Replaced(real, place, locked(place, path))
        if not runfile.exists(place) or complete(real):  # without run.json, the kill came while it was removed
            old.drop()
            return
        if real.is_dir():
            locked(real, path).release()
            remove(real)
    if old.restore():
        warnings.warn(
            f"a process that was to replace the run in {path} was stopped before the new run was on disk: the earlier "
            "run is back in its place.",
            RecordWarning,
            stacklevel=3,
        )


def _clear(place: Path, successor: Path) -> None:
    """Remove a run that has been replaced. Other files that lie with it move to its successor."""
    remove(place)
    _move(place, successor)


def _move(folder: Path, to: Path) -> None:
    """Move all that is in a folder to another one, but for what is taken there; the folder goes if it is empty then."""
    for entry in list(folder.iterdir()):
        target = to / entry.name
        if not os.path.lexists(target):
            to.mkdir(exist_ok=True)
            entry.rename(target)
        elif entry.is_dir() and target.is_dir() and not (entry.is_symlink() or target.is_symlink()):
            _move(entry, target)
    folder.rmdir()


def refuse_set_aside(path: Path) -> None:
    """An error where there is no run to read because it has been set aside."""
    place = _beside(Path(os.path.realpath(path)))
    if os.path.isdir(place) and runfile.exists(place) and not runfile.exists(path):
        raise RecordError(
            f"the run in {path} was set aside to be replaced, and lies in {place}. If no process is replacing it now, "
            f"`fedprism resume {path}` puts it back."
        )


def _beside(real: Path) -> Path:
    return real.parent / f".{real.name}.replaced"  # not `with_name`: the root has no name


# --- what may become a run's folder ----------------------------------------------------------------------------------


def refuse_dead_ends(path: Path) -> None:
    """Refuse a path through a symbolic link that leads nowhere, or through a file."""
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            raise RecordError(
                f"{each} is a symbolic link to {os.readlink(each)}, which leads nowhere. Make what it leads to, or "
                "choose another --out."
            )
        if each.exists() and not each.is_dir():
            raise RecordError(f"{each} is a file; expected a new or empty directory: choose another --out.")


def unused(folder: Path) -> bool:
    """Whether a folder is empty, or holds only what the interrupted creation of a run has left."""
    return all(entry.name == LOCK or atomic.is_partial(entry) for entry in folder.iterdir())
