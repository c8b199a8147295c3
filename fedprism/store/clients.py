"""What clients keep between rounds: in memory, or in one file per client, so that memory does not grow with clients.

On disk a state is a safetensors file that is never changed. A new state is a new file, and the old one is deleted once
neither the run nor a snapshot refers to it any more: at once, or before the next stage of a round. Reading a file maps
it into memory: its tensors are read when they are used. A client that stores nothing needs no file.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fedprism import atomic
from fedprism.errors import RecordError
from fedprism.methods.base import State
from fedprism.store.serialize import serialize

AT_ONCE = 64 * 2**20  # bytes of states on disk that are used at a time
FEWEST = 16  # clients that are run at a time, however large: engines run several side by side


class StateError(RecordError):
    """A client's state on disk cannot be read or written. The run directory adds which round is safe."""


@dataclass(frozen=True, eq=False)
class File:
    """One client's state on disk. It is never changed."""

    path: Path
    sha256: str

    def read(self) -> State:
        """The state, mapped: what is written to its tensors does not reach the file."""
        if not self.sha256:  # `NO_FILE`, or a copy of it
            return {}
        try:
            with safe_open(self.path, "pt") as file:
                return {name: file.get_tensor(name) for name in json.loads(file.metadata()["order"])}
        except FileNotFoundError:
            raise StateError(
                f"{self.path} is gone: with clients.state: disk, states on a snapshot can be read while its run goes "
                "on, and those of a checkpoint until another one has replaced it. If neither has ended, something has "
                "deleted the file. Load the run again."
            ) from None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:  # it holds no state
            raise StateError(
                f"{self.path}, a client's state, cannot be read ({type(error).__name__}: {error}): something may have "
                "changed it."
            ) from error


NO_FILE = File(Path(), "")  # of a client that has trained and stores nothing


class Files(Mapping[str, State | None]):
    """States on disk by client; one is mapped whenever it is asked for."""

    def __init__(self, files: Mapping[str, File | None]) -> None:
        self.files = dict(files)

    def __getitem__(self, client_id: str) -> State | None:
        file = self.files[client_id]
        return None if file is None else file.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


class ClientStore(Mapping[str, State | None]):
    """What clients keep between rounds: client -> state (None: it has never trained)."""

    def __setitem__(self, client_id: str, state: State) -> None:
        raise NotImplementedError

    def open(self, folder: Path | None) -> None:
        """Before the first round. `folder` is where files may lie; None: anywhere."""

    def restore(self, states: Mapping[str, State | None]) -> None:
        """Go on from the states of a snapshot."""
        raise NotImplementedError

    def snapshot(self) -> Mapping[str, State | None]:
        """The states as they are now, whatever is set later."""
        raise NotImplementedError

    def parts(self, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        """Clients whose states may be in memory together: by default all of them."""
        yield clients

    def close(self) -> None:
        """After the last round: nothing is left behind."""


class MemoryStore(ClientStore):
    """States in memory, on the run's device."""

    def __init__(self, states: Mapping[str, State | None]) -> None:
        self._states = dict(states)

    def __getitem__(self, client_id: str) -> State | None:
        return self._states[client_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __setitem__(self, client_id: str, state: State) -> None:
        self._states[client_id] = state

    def restore(self, states: Mapping[str, State | None]) -> None:
        self._states = dict(states)

    def snapshot(self) -> Mapping[str, State | None]:
        return dict(self._states)


class DiskStore(Files, ClientStore):
    """States in files of one folder, which exists from `open` to `close`. `place` brings a state that is read to where
    it is used."""

    def __init__(self, clients: Sequence[str], place: Callable[[State], State], at_once: int) -> None:
        super().__init__(dict.fromkeys(clients))
        self._place, self._at_once = place, at_once
        self._folder: Path | None = None
        self._temporary: weakref.finalize[..., object] | None = None
        self._identity: tuple[int, int] | None = None  # of the folder
        self._own: dict[Path, weakref.ref[File]] = {}
        self._written = 0

    def open(self, folder: Path | None) -> None:
        """Begin with an empty folder: this one, whose leftovers of a killed run go, or a temporary one."""
        self.close()
        if folder is None:
            self._folder = atomic.temporary_folder("fedprism-states-")
            self._temporary = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        else:
            try:
                with suppress(FileNotFoundError):
                    shutil.rmtree(folder)
            except OSError as error:
                raise RecordError(
                    f"{folder}, which an earlier run has left, cannot be removed ({error}). Delete it, then run or "
                    "resume again."
                ) from error
            try:
                folder.mkdir()
            except OSError as error:
                raise StateError(f"{folder} could not be made: {error.strerror}. Make room there.") from error
            self._folder = folder
        self._identity = _identity(self._folder)

    def __getitem__(self, client_id: str) -> State | None:
        state = super().__getitem__(client_id)
        return None if state is None else self._place(state)

    def __setitem__(self, client_id: str, state: State) -> None:
        """Write a state, unless it is empty or what the client has already."""
        if not state:
            self.files[client_id] = NO_FILE
            return
        data = serialize(state)
        checksum, old = hashlib.sha256(data).hexdigest(), self.files[client_id]
        if old is not None and old.sha256 == checksum:
            return
        if self._folder is None:
            self.open(None)
        assert self._folder is not None
        self._written += 1
        path = self._folder / f"{self._written:08d}.safetensors"
        try:
            if not self._is_own():
                raise FileNotFoundError
            atomic.write(path, data, sync=False, lasting=False)
        except OSError as error:
            if not self._is_own():
                raise StateError(
                    f"{self._folder} is gone: something has moved or deleted it, and with clients.state: disk a run "
                    "needs it until it ends."
                ) from None
            room = "Make room there" if self._temporary is None else "Make room there, or set TMPDIR to another folder"
            raise StateError(
                f"the state of {client_id!r} in {path} could not be written: {error.strerror or error}. {room}."
            ) from error
        file = self.files[client_id] = File(path, checksum)
        self._own[path] = weakref.ref(file)
        if old is not None:
            replaced = old.path
            del old
            self._remove_unused([replaced])

    def restore(self, states: Mapping[str, State | None]) -> None:
        """Go on from a snapshot's states; where these are files, none is read."""
        if isinstance(states, Files):
            self.files = dict(states.files)
            return
        self.files = dict.fromkeys(states)
        for client_id, state in states.items():
            if state is not None:
                self[client_id] = state

    def snapshot(self) -> Mapping[str, State | None]:
        """Their files stay as long as somebody has this."""
        return Files(self.files)

    def parts(self, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        """Clients whose states may be in memory together, so that memory stays bounded."""
        self._remove_unused(list(self._own))
        for start in range(0, max(1, len(clients)), self._at_once):
            yield clients[start : start + self._at_once]
            _give_back()

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        self._own.clear()  # from here on a file of the same name is another run's
        if self._temporary is not None:
            self._temporary()
        elif self._folder is not None and self._is_own():
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._folder.exists():
                message = f"{self._folder} could not be removed; nothing needs it any more, so remove it yourself."
                warnings.warn(message, stacklevel=2)
        self._folder = self._temporary = None

    def _remove_unused(self, paths: Iterable[Path]) -> None:
        """Delete those of these files that nothing names any more.

        A callback of `weakref` would do it at once, but Python drops what is raised in one: Ctrl-C would be lost there.
        """
        for path in paths:
            file = self._own.get(path)
            if file is not None and file() is None:
                with suppress(OSError):  # where a file that is mapped cannot go, it goes with its folder
                    path.unlink()
                del self._own[path]

    def _is_own(self) -> bool:
        """Whether the folder is there, and not another one in its place."""
        return self._folder is not None and self._identity == _identity(self._folder) is not None


def clients_at_once(largest: int, workers: int = 1) -> int:
    """How many clients are run at a time, where the largest state has `largest` bytes: at least two per worker.

    >>> clients_at_once(200_000), clients_at_once(40_000_000), clients_at_once(40_000_000, workers=64)
    (335, 16, 128)
    """
    return max(FEWEST, 2 * workers, AT_ONCE // max(1, largest))


def _give_back() -> None:
    """Let the C library return what is free to the system: small uploads between large states keep it from doing so."""
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None  # glibc has it


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder; None: it is not there."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
