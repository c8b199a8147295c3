"""Checkpoints: a manifest with checksums of immutable files, one a client and one for the server.

    checkpoints/manifest-000005.json       names the files of round 5 and holds a checksum of itself
    checkpoints/files/<sha256>.safetensors named by content, so a file is never changed and equal states share one

Order makes it safe to be killed at any moment: files first, then the manifest, then the deletion of manifests that
are not kept, then of files that no manifest names. A state that did not change (the same objects as last time) is named
again without being serialised or written.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprism import atomic
from fedprism.engines.events import Snapshot, State
from fedprism.engines.wire import deserialise, serialise
from fedprism.errors import RecordError

FORMAT = 1
_SERVER = ""  # the server's key beside the clients' names, none of which is empty


class RecordWarning(UserWarning):
    """Something in a run directory was damaged or differs, and the run goes on without it."""


class Damaged(Exception):
    """A manifest or a file of it is missing or is not what was written; the message names it."""


@dataclass(frozen=True)
class Entry:
    """One file of a checkpoint."""

    sha256: str
    bytes: int

    @property
    def file(self) -> str:
        return f"{self.sha256}.safetensors"


@dataclass(frozen=True)
class Manifest:
    round: int
    server: Entry
    clients: Mapping[str, Entry | None]

    def entries(self) -> list[Entry]:
        return [self.server, *(entry for entry in self.clients.values() if entry is not None)]


def _same(state: State | None, known: State) -> bool:
    """Is this the same state? Told by identity: states are never changed in place, and comparing content is slow."""
    if state is None or state is known:
        return state is known
    return list(state) == list(known) and all(state[name] is tensor for name, tensor in known.items())


# --- manifests as bytes ----------------------------------------------------------------------------------------------


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _plain(entry: Entry) -> dict[str, Any]:
    return {"file": entry.file, "sha256": entry.sha256, "bytes": entry.bytes}


def _entry(raw: Mapping[str, Any]) -> Entry:
    return Entry(str(raw["sha256"]), int(raw["bytes"]))


def _read_manifest(path: Path) -> Manifest:
    data = _read(path)
    try:
        body = json.loads(data)
        checksum = body.pop("checksum")
        if checksum != _checksum(body):
            raise Damaged(f"{path} does not match its checksum")
        clients = {name: raw and _entry(raw) for name, raw in body["clients"].items()}
        return Manifest(int(body["round"]), _entry(body["server"]), clients)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{path} is not a manifest") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except PermissionError as error:
        raise RecordError(f"{path} may not be read ({error.strerror}); check its permissions.") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        self._sound: set[str] = set()  # checksums that this process has written or verified
        self._named: dict[str, tuple[State, Entry]] = {}  # states whose file is known

    def rounds(self) -> list[int]:
        """The rounds that have a manifest, in order; whether they are sound shows when they are loaded."""
        names = [path.stem.removeprefix("manifest-") for path in self.folder.glob("manifest-*.json")]
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, snapshot: Snapshot, keep: Collection[int]) -> None:
        """Write a checkpoint, then `prune`."""
        self.files.mkdir(exist_ok=True)  # without parents: a run directory that was deleted must not come back half
        server = self._store(_SERVER, snapshot.server)
        clients = {n: None if s is None else self._store(n, s) for n, s in snapshot.clients.items()}
        atomic.fsync(self.files)
        plain = {n: None if entry is None else _plain(entry) for n, entry in clients.items()}
        body = {"format": FORMAT, "round": snapshot.round, "server": _plain(server), "clients": plain}
        atomic.write_json(self.manifest(snapshot.round), {**body, "checksum": _checksum(body)})
        self.prune(snapshot.round, keep)

    def load(self, round: int) -> Snapshot:
        """The checkpoint of one round, every checksum verified, or `Damaged`."""
        manifest = _read_manifest(self.manifest(round))
        if manifest.round != round:
            raise Damaged(f"{self.manifest(round)} is of round {manifest.round}")
        return Snapshot(
            round,
            self._fetch(_SERVER, manifest.server),
            {n: None if entry is None else self._fetch(n, entry) for n, entry in manifest.clients.items()},
        )

    def newest(self, rounds: Sequence[int], last: int) -> Snapshot | None:
        """The newest sound checkpoint of `rounds` and at most round `last`; warns of each one that is passed over."""
        for round in reversed(rounds):
            try:
                if round > last:
                    raise Damaged(f"{self.manifest(round)} is ahead of metrics.jsonl, which ends at round {last}")
                return self.load(round)
            except Damaged as damage:
                if self.manifest(round).exists():  # else a run that goes on has pruned it meanwhile
                    warnings.warn(f"{damage}: the checkpoint before it is used.", RecordWarning, stacklevel=2)
        return None

    def forget(self, snapshot: Snapshot) -> None:
        """Let go of states that are no longer current, so that no old state stays in memory."""
        current = {_SERVER: snapshot.server, **snapshot.clients}
        self._named = {name: known for name, known in self._named.items() if _same(current.get(name), known[0])}

    def manifest(self, round: int) -> Path:
        return self.folder / f"manifest-{round:06d}.json"

    def _store(self, name: str, state: State) -> Entry:
        known = self._named.get(name)
        if known is not None and _same(state, known[0]):
            return known[1]
        data = serialise(state)
        entry = Entry(hashlib.sha256(data).hexdigest(), len(data))
        path = self.files / entry.file
        # A file of that name from before this process may be damaged: trust its content, not its name.
        if entry.sha256 not in self._sound and not (path.exists() and path.read_bytes() == data):
            atomic.write(path, data, sync=False)
        self._sound.add(entry.sha256)
        self._named[name] = (state, entry)
        return entry

    def _fetch(self, name: str, entry: Entry) -> State:
        path = self.files / entry.file
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise Damaged(f"{path} does not match its checksum")
        state = deserialise(data)
        self._sound.add(entry.sha256)
        self._named[name] = (state, entry)
        return state

    def prune(self, now: int, keep: Collection[int]) -> None:
        """Delete all but the last two up to round `now`, which is on disk, and those of the rounds in `keep`."""
        # After a fall-back there may be manifests of later rounds: damaged, and about to be made again.
        sound: dict[int, Manifest] = {}
        for round in self.rounds():
            if round <= now:
                try:
                    sound[round] = _read_manifest(self.manifest(round))
                except Damaged:
                    continue  # it can never be used again
        kept = {*sorted(sound)[-2:], *(round for round in sound if round in keep)}
        for round in self.rounds():
            if round not in kept:
                self.manifest(round).unlink(missing_ok=True)
        atomic.fsync(self.folder)
        named = {entry.file for round in kept for entry in sound[round].entries()}
        for path in self.files.glob("*.safetensors"):
            if path.name not in named:
                path.unlink(missing_ok=True)
                self._sound.discard(path.stem)
