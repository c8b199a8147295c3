"""The manifest of a checkpoint: which files it is made of, with their checksums. Reading one needs no PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedprism import atomic
from fedprism.errors import RecordError
from fedprism.files import NotAFile
from fedprism.records.sealed import seal, unseal

FORMAT = 4
_SHA256 = re.compile("[0-9a-f]{64}")


class Damaged(Exception):
    """A manifest or one of its files is missing or is not what was written; the message names it."""


class Unreadable(Damaged):
    """The system has failed to read it. It may be whole, so nothing is deleted for that."""


@dataclass(frozen=True)
class Manifest:
    """The checksums of a round's files. That of a client that stores nothing is "", of one that never trained None."""

    round: int
    server: str
    clients: Mapping[str, str | None]
    usual_length: float | None = None  # `Snapshot.usual_length`

    @cached_property
    def files(self) -> frozenset[str]:
        return frozenset((self.server, *filter(None, self.clients.values())))


def manifest_path(folder: Path, round: int) -> Path:
    return folder / f"manifest-{round:06d}.json"


def manifest_rounds(folder: Path) -> list[int]:
    """The rounds that have a manifest in a folder of checkpoints, in order. Damage shows when they are read."""
    names = [path.stem.removeprefix("manifest-") for path in folder.glob("manifest-*.json")]
    return sorted(int(name) for name in names if name.isdecimal())


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    body = {
        "format": FORMAT,
        "round": manifest.round,
        "server": manifest.server,
        "clients": dict(manifest.clients),
        "usual_length": manifest.usual_length,
    }
    path = manifest_path(folder, manifest.round)
    atomic.write(path, seal(body))  # compact: there may be ten thousand clients, and every checkpoint writes it
    return path


def read_manifest(folder: Path, round: int) -> Manifest:
    """The manifest of a round, or `Damaged`."""
    path = manifest_path(folder, round)
    with reading(path):
        data = atomic.read(path)
    try:
        body = unseal(data)
        if body["format"] != FORMAT:
            raise RecordError(
                f"{path} has format {body['format']}, and this version of fedprism reads format {FORMAT}. Nothing is "
                "damaged: resume or load the run with the version that wrote it, which run.json names."
            )
        manifest = Manifest(int(body["round"]), body["server"], body["clients"], body["usual_length"])
        if manifest.round != round or not all(_SHA256.fullmatch(name) for name in manifest.files):
            raise Damaged(f"{path} is not the manifest of round {round}")  # checksums become names of files
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{path} does not match its checksum") from None
    return manifest


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` at a file of a checkpoint into `Damaged`, or into an error where nothing is damaged."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except PermissionError as error:
        raise RecordError(f"{path} may not be read ({error.strerror}); check its permissions.") from error
    except IsADirectoryError:
        raise Damaged(f"{path} is a folder") from None
    except OSError as error:
        raise Unreadable(f"{path} cannot be read ({error.strerror})") from error
    except NotAFile as error:
        raise Damaged(f"{path} is {error.kind}") from error
