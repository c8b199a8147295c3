"""Checkpoints: a manifest with checksums of immutable files, one per client and one for the server.

    checkpoints/manifest-000005.json       names the files of round 5 and has a checksum of itself
    checkpoints/files/<sha256>.safetensors named by content, so a file is never changed and equal states share one

The order of writing makes it safe to be killed at any moment: first files, then the manifest, then the deletion of old
manifests, then the deletion of files that no manifest names. A state that did not change (the same objects as last
time) is named again without being serialised or written. A state that is already on disk (`clients.state: disk`) is not
read: its file gets a second name here. A client that stores nothing has no file: the manifest names it with "".
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedprism import atomic
from fedprism.errors import RecordError
from fedprism.methods.base import State
from fedprism.records.runfile import RecordWarning
from fedprism.round.events import Snapshot
from fedprism.store.clients import NO_FILE, File, Files
from fedprism.store.serialize import deserialize, serialize

FORMAT = 3
_SHA256 = re.compile("[0-9a-f]{64}")
_SERVER = ""  # the server's key beside the clients' names, none of which is empty


class Damaged(Exception):
    """A manifest or one of its files is missing or is not what was written; the message names it."""


@dataclass(frozen=True)
class Manifest:
    """The checksums of a round's files."""

    round: int
    server: str
    clients: Mapping[str, str | None]
    usual_length: float | None = None  # `Snapshot.usual_length`

    @cached_property
    def files(self) -> frozenset[str]:
        return frozenset((self.server, *filter(None, self.clients.values())))


def _same(state: State | None, known: State) -> bool:
    """Whether this is the same state. Identity decides: states are never changed in place, and content is large."""
    if state is None or state is known:
        return state is known
    return list(state) == list(known) and all(state[name] is tensor for name, tensor in known.items())


# --- manifests as bytes ----------------------------------------------------------------------------------------------


def _manifest_text(manifest: Manifest) -> bytes:
    """Compact JSON: there may be ten thousand clients, and every checkpoint writes it."""
    body = {
        "format": FORMAT,
        "round": manifest.round,
        "server": manifest.server,
        "clients": dict(manifest.clients),
        "usual_length": manifest.usual_length,
    }
    text = json.dumps(body)
    return f'{text[:-1]}, "checksum": "{_checksum(text)}"}}\n'.encode()


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read_manifest(path: Path) -> Manifest:
    data = _read(path)
    try:
        body = json.loads(data)
        checksum = body.pop("checksum")
        if checksum != _checksum(json.dumps(body)):
            raise Damaged(f"{path} does not match its checksum")
        files = {_SERVER: body["server"], **body["clients"]}
        if body["format"] != FORMAT:
            raise RecordError(
                f"{path} has format {body['format']}, and this version of fedprism reads format {FORMAT}. Nothing is "
                "damaged: resume or load the run with the version that wrote it, which run.json names."
            )
        # Checksums become names of files.
        if not files[_SERVER] or not all(not each or _SHA256.fullmatch(each) for each in files.values()):
            raise Damaged(f"{path} is not a manifest of format {FORMAT}")
        usual = None if body["usual_length"] is None else float(body["usual_length"])
        return Manifest(int(body["round"]), str(files.pop(_SERVER)), files, usual)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{path} is not a manifest") from None


def _read(path: Path) -> bytes:
    with _reading(path):
        return path.read_bytes()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except PermissionError as error:
        raise RecordError(f"{path} may not be read ({error.strerror}); check its permissions.") from error
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error


class Checkpoints:
    """The checkpoints of one run directory. With `mapped`, a client's state is read when it is first used."""

    def __init__(self, folder: Path, mapped: bool = False) -> None:
        self.folder = folder
        self.files = folder / "files"
        self._mapped = mapped
        self._sound: set[str] = set()  # checksums that this process has written or verified
        self._named: dict[str, tuple[State, str]] = {}  # states in memory whose file is known
        self._manifests: dict[int, tuple[object, Manifest]] = {}  # read or written, with the signature of the file then
        self._swept = False  # whether this process has looked for files that no manifest names

    def rounds(self) -> list[int]:
        """The rounds that have a manifest, in order. Damage shows when they are loaded."""
        names = [path.stem.removeprefix("manifest-") for path in self.folder.glob("manifest-*.json")]
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, snapshot: Snapshot, keep: Collection[int]) -> None:
        """Write a checkpoint, then `prune`."""
        self.files.mkdir(exist_ok=True)  # without parents: a deleted run directory must not come back in part
        server = self._store(_SERVER, snapshot.server)
        if isinstance(snapshot.clients, Files):
            clients = {n: None if file is None else self._adopt(file) for n, file in snapshot.clients.files.items()}
        else:
            clients = {n: None if s is None else self._store(n, s) for n, s in snapshot.clients.items()}
        atomic.fsync(self.files)
        manifest = Manifest(snapshot.round, server, clients, snapshot.usual_length)
        path = self.manifest(snapshot.round)
        atomic.write(path, _manifest_text(manifest))
        self._manifests[snapshot.round] = (_signature(path), manifest)
        self.prune(snapshot.round, keep)

    def load(self, round: int) -> Snapshot:
        """The checkpoint of one round, every checksum verified, or `Damaged`."""
        manifest = _read_manifest(self.manifest(round))
        if manifest.round != round:
            raise Damaged(f"{self.manifest(round)} is of round {manifest.round}")
        server, files = self._fetch(_SERVER, manifest.server), manifest.clients.items()
        clients: Mapping[str, State | None] = (
            Files({name: None if file is None else self._verified(file) for name, file in files})
            if self._mapped
            else {name: None if file is None else self._fetch(name, file) for name, file in files}
        )
        return Snapshot(round, server, clients, manifest.usual_length)

    def newest(self, rounds: Sequence[int], last: int) -> Snapshot | None:
        """The newest sound checkpoint of `rounds` up to round `last`, with a warning for each one that is skipped."""
        for round in reversed(rounds):
            try:
                if round > last:
                    raise Damaged(f"{self.manifest(round)} is ahead of metrics.jsonl, which ends at round {last}")
                return self.load(round)
            except Damaged as damage:
                if self.manifest(round).exists():  # otherwise a run that goes on has pruned it meanwhile
                    warnings.warn(f"{damage}: the checkpoint before it is used.", RecordWarning, stacklevel=2)
        return None

    def forget(self, snapshot: Snapshot) -> None:
        """Drop states that are no longer current, so that no old state stays in memory."""
        current = {_SERVER: snapshot.server}
        if not isinstance(snapshot.clients, Files):
            current |= {name: state for name, state in snapshot.clients.items() if state is not None}
        self._named = {
            name: known
            for name, known in self._named.items()
            if (state := current.get(name)) is known[0] or _same(state, known[0])
        }

    def manifest(self, round: int) -> Path:
        return self.folder / f"manifest-{round:06d}.json"

    def _file(self, checksum: str) -> Path:
        return self.files / f"{checksum}.safetensors"

    def _store(self, name: str, state: State) -> str:
        """Write a state unless it is empty or its file is known; return its checksum."""
        if not state and name != _SERVER:
            return NO_FILE.sha256
        known = self._named.get(name)
        if known is not None and _same(state, known[0]):
            return known[1]
        data = serialize(state)
        checksum = hashlib.sha256(data).hexdigest()
        path = self._file(checksum)
        # A file of that name from before this process may be damaged: trust its content, not its name.
        if checksum not in self._sound and not (path.exists() and path.read_bytes() == data):
            atomic.write(path, data, sync=False)
        self._sound.add(checksum)
        self._named[name] = (state, checksum)
        return checksum

    def _adopt(self, file: File) -> str:
        """Link the file of a state that is already on disk; return its checksum."""
        if file.sha256 and file.sha256 not in self._sound:
            atomic.link(file.path, self._file(file.sha256))
            self._sound.add(file.sha256)
        return file.sha256

    def _fetch(self, name: str, checksum: str) -> State:
        if checksum == NO_FILE.sha256:
            return {}
        path = self._file(checksum)
        data = _read(path)
        if hashlib.sha256(data).hexdigest() != checksum:
            raise Damaged(f"{path} does not match its checksum")
        state = deserialize(data)
        self._sound.add(checksum)
        self._named[name] = (state, checksum)
        return state

    def _verified(self, checksum: str) -> File:
        """A file whose content matches its checksum. It is read piece by piece and not kept in memory."""
        if checksum == NO_FILE.sha256:
            return NO_FILE
        path = self._file(checksum)
        with _reading(path), path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                raise Damaged(f"{path} does not match its checksum")
        self._sound.add(checksum)
        return File(path, checksum)

    def prune(self, now: int, keep: Collection[int]) -> None:
        """Delete all checkpoints but the last two up to round `now`, which is on disk, and those in `keep`."""
        # After a fall-back there may be damaged manifests of later rounds, which are about to be made again.
        rounds = self.rounds()
        sound: dict[int, Manifest] = {}
        for round in rounds:
            if round <= now:
                try:
                    sound[round] = self._manifest(round)
                except Damaged:
                    continue  # it can never be used again
        kept = {*sorted(sound)[-2:], *(round for round in sound if round in keep)}
        gone = [round for round in rounds if round not in kept]
        for round in gone:
            self.manifest(round).unlink(missing_ok=True)
            self._manifests.pop(round, None)
        atomic.fsync(self.folder)
        if self._swept and sound.keys() >= set(gone):
            loose = set[str]().union(*(sound[round].files for round in gone))
        else:  # a killed process, or a damaged manifest, may have left more files behind
            loose = {path.stem for path in self.files.glob("*.safetensors")}
        for name in loose.difference(*(sound[round].files for round in kept)):
            self._file(name).unlink(missing_ok=True)
            self._sound.discard(name)
        self._swept = True

    def _manifest(self, round: int) -> Manifest:
        """A manifest, read again only if its file has changed."""
        path = self.manifest(round)
        signature, known = _signature(path), self._manifests.get(round)
        if known is None or signature is None or known[0] != signature:
            known = self._manifests[round] = (signature, _read_manifest(path))
        return known[1]


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Inode, size and time of a file: while they are the same, so is its content."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
