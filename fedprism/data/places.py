"""Where published data lies, and where what is made of it is kept."""

from __future__ import annotations

import os
from pathlib import Path

from fedprism.config import DataConfig

DATA, CACHE = "FEDPRISM_DATA", "FEDPRISM_CACHE"  # environment variables


def root_of(config: DataConfig) -> Path:
    """The folder with published data: `data.root`, else $FEDPRISM_DATA, else `data` in the cache home.

    >>> root_of(DataConfig(root="/srv/benchmarks")).as_posix()
    '/srv/benchmarks'
    """
    given = config.root or os.environ.get(DATA)
    return Path(given).expanduser() if given else cache_home() / "data"


def cache_home() -> Path:
    """$FEDPRISM_CACHE, else $XDG_CACHE_HOME/fedprism, else ~/.cache/fedprism. All in it can be made again."""
    given = os.environ.get(CACHE)
    if given:
        return Path(given).expanduser()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path("~/.cache").expanduser()) / "fedprism"
