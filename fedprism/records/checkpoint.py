"""Checkpoints: a manifest with checksums of immutable files, one per client and one for the server.

    checkpoints/manifest-000005.json        names the files of round 5 and has a checksum of itself
    checkpoints/files/<sha256>.safetensors  named by content, so a file is never changed and equal states share one
    checkpoints/copies/<sha256>.safetensors a second copy of each file that several checkpoints share

The order of writing makes it safe to be killed at any moment: first files, then the manifest, then copies, then the
deletion of old manifests, then the deletion of files that no manifest names. A state that did not change (the same
objects as last time) is named again without being serialised or written. A state that is already on disk
(`clients.state: disk`) is not read: its file gets a second name here. A client that stores nothing has no file: the
manifest names it with "".

A damaged file that only one checkpoint names costs this checkpoint alone. One that several name would cost them all,
so there is a copy of it: checkpoints never take more room than they would without sharing.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from fedprism import atomic
from fedprism.methods.base import State
from fedprism.records.manifest import (
    Damaged,
    Manifest,
    Unreadable,
    manifest_path,
    manifest_rounds,
    read_manifest,
    reading,
    write_manifest,
)
from fedprism.records.runfile import RecordWarning
from fedprism.round.events import Snapshot
from fedprism.store.clients import NO_FILE, File, Files
from fedprism.store.serialize import deserialize, serialize

_SERVER = ""  # the server's key beside the clients' names, none of which is empty


def _same(state: State | None, known: State) -> bool:
    """Whether this is the same state. Identity decides: states are never changed in place, and content is large."""
    if state is None or state is known:
        return state is known
    return list(state) == list(known) and all(state[name] is tensor for name, tensor in known.items())


class Checkpoints:
    """The checkpoints of one run directory.

    With `mapped`, a client's state is read when it is first used. With `repairs`, a damaged file is replaced by its
    copy.
    """

    def __init__(self, folder: Path, mapped: bool = False, repairs: bool = False) -> None:
        self.folder = folder
        self.files, self.copies = folder / "files", folder / "copies"
        self._mapped, self._repairs = mapped, repairs
        self._sound: set[str] = set()  # checksums of files that this process has written or verified
        self._copied: set[str] = set()  # checksums of copies, once this process has looked for them
        self._named: dict[str, tuple[State, str]] = {}  # states in memory whose file is known
        self._manifests: dict[int, tuple[object, Manifest]] = {}  # read or written, with the signature of the file then
        self._swept = False  # whether this process has looked for files that no manifest names

    def rounds(self) -> list[int]:
        """The rounds that have a manifest, in order. Damage shows when they are loaded."""
        return manifest_rounds(self.folder)

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
        path = write_manifest(self.folder, manifest)
        self._manifests[snapshot.round] = (_signature(path), manifest)
        self.prune(snapshot.round, keep)

    def load(self, round: int, lost: list[str] | None = None) -> Snapshot:
        """The checkpoint of one round, every checksum verified, or `Damaged`.

        With a list `lost`, clients whose states are damaged are named there, and stand in the checkpoint as if they
        had never trained.
        """
        manifest = read_manifest(self.folder, round)
        server = self._fetch(_SERVER, manifest.server)
        files: dict[str, File | None] = {}
        states: dict[str, State | None] = {}
        for name, checksum in manifest.clients.items():
            files[name] = states[name] = None
            try:
                if checksum is not None and self._mapped:
                    files[name] = self._verified(checksum)
                elif checksum is not None:
                    states[name] = self._fetch(name, checksum)
            except Damaged:
                if lost is None:
                    raise
                lost.append(name)
        return Snapshot(round, server, Files(files) if self._mapped else states, manifest.usual_length)

    def newest(self, rounds: Sequence[int], last: int, lost: list[str] | None = None) -> Snapshot | None:
        """The newest sound checkpoint of `rounds` up to round `last`, with a warning for each one that is skipped. With
        a list `lost`, where none is whole, the newest whose server is sound, as in `load`."""
        lacking: list[int] = []  # rounds whose checkpoints lack nothing but states of clients
        for round in reversed(rounds):
            missing: list[str] = []
            try:
                if round > last:
                    raise Damaged(f"{self.manifest(round)} is ahead of metrics.jsonl, which ends at round {last}")
                snapshot = self.load(round, None if lost is None else missing)
            except Damaged as damage:
                if self.manifest(round).exists():  # otherwise a run that goes on has pruned it meanwhile
                    warnings.warn(f"{damage}: the checkpoint before it is used.", RecordWarning, stacklevel=2)
                continue
            if missing:
                lacking.append(round)
                continue
            for later in lacking:
                message = f"{self.manifest(later)} names damaged files: the checkpoint of round {round} is used."
                warnings.warn(message, RecordWarning, stacklevel=2)
            return snapshot
        return self.load(lacking[0], lost) if lacking else None

    def drop_later(self, round: int) -> None:
        """Delete the manifests of later rounds, which are about to be made again."""
        for later in self.rounds():
            if later > round:
                self.manifest(later).unlink()

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
        return manifest_path(self.folder, round)

    def _file(self, checksum: str) -> Path:
        return self.files / f"{checksum}.safetensors"

    def _copy(self, checksum: str) -> Path:
        return self.copies / f"{checksum}.safetensors"

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
        if checksum not in self._sound and not atomic.holds(path, checksum):
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
        state = deserialize(atomic.read(self._intact(checksum)))
        self._named[name] = (state, checksum)
        return state

    def _verified(self, checksum: str) -> File:
        """A file whose content matches its checksum. It is read piece by piece and not kept in memory."""
        return NO_FILE if checksum == NO_FILE.sha256 else File(self._intact(checksum), checksum)

    def _intact(self, checksum: str) -> Path:
        """The file with this content, or its copy where the file is damaged; `Damaged` where both are."""
        path, copy = self._file(checksum), self._copy(checksum)
        try:
            with reading(path):
                if atomic.sha256(path) != checksum:
                    raise Damaged(f"{path} does not match its checksum")
        except Damaged as damage:
            if not atomic.holds(copy, checksum):
                raise
            warnings.warn(f"{damage}: its copy is used.", RecordWarning, stacklevel=2)
            if not self._repairs:
                return copy
            atomic.write(path, atomic.read(copy))
        self._sound.add(checksum)
        return path

    def prune(self, now: int, keep: Collection[int]) -> None:
        """Delete all checkpoints but the last two up to round `now`, which is on disk, and those in `keep`. Copy what
        several of these share."""
        # After a fall-back there may be damaged manifests of later rounds, which are about to be made again.
        rounds = self.rounds()
        sound: dict[int, Manifest] = {}
        unread: set[int] = set()
        for round in rounds:
            if round <= now:
                try:
                    sound[round] = self._manifest(round)
                except Unreadable:
                    unread.add(round)
                except Damaged as damage:  # it can never be used again
                    if round in keep:
                        message = f"{damage}: the checkpoint of round {round}, which was to be kept, is lost."
                        warnings.warn(message, RecordWarning, stacklevel=2)
        kept = {*sorted(sound)[-2:], *(round for round in sound if round in keep)}
        self._copy_shared([sound[round] for round in kept])
        gone = [round for round in rounds if round not in kept | unread]
        for round in gone:
            if not self.manifest(round).is_dir():  # which may be somebody's
                self.manifest(round).unlink(missing_ok=True)
            self._manifests.pop(round, None)
        atomic.fsync(self.folder)
        if unread:
            self._swept = False  # which files these name is not known now
            return
        if self._swept and sound.keys() >= set(gone):
            loose = set[str]().union(*(sound[round].files for round in gone))
        else:  # a killed process, or a damaged manifest, may have left more files behind
            loose = {path.stem for path in self.files.glob("*.safetensors")}
        for name in loose.difference(*(sound[round].files for round in kept)):
            self._file(name).unlink(missing_ok=True)
            self._sound.discard(name)
        self._swept = True

    def _copy_shared(self, kept: Sequence[Manifest]) -> None:
        """Let exactly those files have a copy that several of these checkpoints name."""
        if not self._swept:
            self._copied = set(self._sound_copies())
        seen, shared = set[str](), set[str]()
        for manifest in kept:
            shared |= seen & manifest.files
            seen |= manifest.files
        if shared:
            self.copies.mkdir(exist_ok=True)
        for checksum in shared - self._copied:
            file, copy = self._file(checksum), self._copy(checksum)
            if copy.is_dir():  # it may be somebody's
                message = f"{copy} is a folder, so {file} has no second copy. Move the folder away."
                warnings.warn(message, RecordWarning, stacklevel=2)
            elif atomic.holds(file, checksum):  # else it is damaged already, as loading will say
                atomic.write(copy, atomic.read(file), sync=False, lasting=False)
                self._copied.add(checksum)
        for checksum in self._copied - shared:
            self._copy(checksum).unlink(missing_ok=True)
        self._copied &= shared

    def _sound_copies(self) -> Iterator[str]:
        """The checksums of copies that are as they were written; damaged ones are deleted."""
        for path in list(self.copies.glob("*.safetensors")):
            if atomic.holds(path, path.stem):
                yield path.stem
            elif not path.is_dir():  # a folder is somebody's
                path.unlink()

    def _manifest(self, round: int) -> Manifest:
        """A manifest, read again only if its file has changed."""
        path = self.manifest(round)
        signature, known = _signature(path), self._manifests.get(round)
        if known is None or signature is None or known[0] != signature:
            known = self._manifests[round] = (signature, read_manifest(self.folder, round))
        return known[1]


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Inode, size and time of a file: while they are the same, so is its content."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
