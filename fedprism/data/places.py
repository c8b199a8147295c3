"""Where published data lies, and where what is made of it is kept."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedprism.config import DataConfig
from fedprism.errors import ConfigError

DATA, CACHE = "FEDPRISM_DATA", "FEDPRISM_CACHE"  # environment variables


def root_of(config: DataConfig) -> Path:
    """The folder with published data: `data.root`, else $FEDPRISM_DATA, else `data` in the cache home.

    >>> root_of(DataConfig(root="/srv/benchmarks")).as_posix()
    '/srv/benchmarks'
    """
    given = config.root or os.environ.get(DATA)
    return _folder(given, f"data.root or ${DATA}") if given else cache_home() / "data"


def cache_home() -> Path:
    """$FEDPRISM_CACHE, else $XDG_CACHE_HOME/fedprism, else ~/.cache/fedprism. All in it can be made again."""
    given = os.environ.get(CACHE)
    if given:
        return _folder(given, f"${CACHE}")
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return _folder(caches if os.path.isabs(caches) else "~/.cache", f"${CACHE}") / "fedprism"


def _folder(given: str, setting: str) -> Path:
    """A folder that need not be there, but could be; `setting` names another."""
    try:
        path = Path(given).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (RuntimeError, ValueError, OSError) as error:  # no such user's home; too long; no way to it
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"the folder {given[:200]!r} cannot be used: {why}. Set {setting} to another.") from None
    return path
