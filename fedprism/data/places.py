"""The folders of published data and of the cache."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fedprism.config import DataConfig
from fedprism.errors import ConfigError

DATA, CACHE = "FEDPRISM_DATA", "FEDPRISM_CACHE"  # environment variables


def root_of(config: DataConfig) -> Path:
    """The folder of published data: `data.root`, else $FEDPRISM_DATA, else `data` in the cache.

    >>> root_of(DataConfig(root="/srv/benchmarks")).as_posix()
    '/srv/benchmarks'
    """
    given = config.root or os.environ.get(DATA)
    return _folder(given, f"data.root or ${DATA}") if given else cache_home() / "data"


def cache_home() -> Path:
    """The cache: $FEDPRISM_CACHE, else $XDG_CACHE_HOME/fedprism, else ~/.cache/fedprism. It can be deleted."""
    given = os.environ.get(CACHE)
    if given:
        return _folder(given, f"${CACHE}")
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return _folder(caches if os.path.isabs(caches) else "~/.cache", f"${CACHE}") / "fedprism"


def _folder(given: str, setting: str) -> Path:
    """Check that a folder's path is valid; it need not exist. `setting` is named in the error."""
    try:
        path = Path(given).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (RuntimeError, ValueError, OSError) as error:  # unknown home, too long, or no permission
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise ConfigError(f"the folder {given[:200]!r} cannot be used: {why}. Set {setting} to another.") from None
    return path
