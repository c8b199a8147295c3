"""One process at a time writes a run directory."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from fedprism.errors import RecordError

LOCK = ".lock"


def locked(path: Path) -> FileLock:
    """The lock of a run directory, held until it is released or this process ends."""
    lock = FileLock(path / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise RecordError(
            f"{path} is being written by another process; wait until it has ended, stop it, or choose another --out."
        ) from None
    except NotImplementedError as error:
        raise RecordError(
            f"{path} lies on a file system that cannot lock files ({error}); choose another --out."
        ) from None
    return lock
