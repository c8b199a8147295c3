"""The largest inputs that are accepted.

They are far above what anybody needs. Beyond them time or memory would run out without a word, so they are checked
before anything of that size is made.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping
from typing import Any

from fedprism.errors import ConfigError, shown

YAML_BYTES = 4 * 2**20  # of a file
YAML_NODES = 200_000  # keys and values of a configuration, with its aliases written out
DEPTH = 100  # lists and mappings inside each other
DIGITS = 100  # characters of a number
NUMBER = 1e30  # of a setting; PyTorch raises an error where a factor becomes larger than 32 bits hold, 3.4e38
COUNT = 1_000_000_000  # of a setting that is a whole number with a range
TEXT = 4000  # characters of a setting that is a name or a path
PATH_BYTES, PART_BYTES = 3900, 255  # of a run directory, and of one part of it; most systems allow 4096 and 255
CLASSES = 1_000_000
CLIENTS = 1_000_000
SIDE = 4096  # pixels


def check_text(value: Any) -> str:
    """Refuse what is no name and no path."""
    if not isinstance(value, str):
        raise ConfigError(f"{shown(value)} is not a text")
    if len(value) > TEXT:
        raise ConfigError(f"{shown(value)} has {len(value):,} characters; expected at most {TEXT:,}")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in value):
        raise ConfigError(f"{shown(value)} holds control characters; expected a text of one line without any")
    return value


def check_plain(value: Any) -> None:
    """Refuse lists and mappings that hold themselves, or more than can be gone through. Without recursion."""
    found, rest = 0, [(value, 1)]
    while rest:
        each, level = rest.pop()
        found += 1
        if level > DEPTH:
            raise ConfigError(f"lists and mappings are nested more than {DEPTH} deep")
        if found > YAML_NODES:
            raise ConfigError(f"there are more than {YAML_NODES:,} values")
        if isinstance(each, int) and abs(each) >= 10**DIGITS:
            raise ConfigError(f"a whole number has more than {DIGITS} digits")
        if isinstance(each, Mapping | list | tuple):
            rest += [(inner, level + 1) for inner in (each.values() if isinstance(each, Mapping) else each)]


def check_memory(what: str, needed: int, advice: str) -> None:
    """Refuse what does not fit into memory: the system would kill the process without a message."""
    available = machine_memory()
    if available is not None and needed > available:
        raise ConfigError(
            f"{what} need {needed / 2**30:,.1f} GiB, and this machine has {available / 2**30:,.1f}; {advice}."
        )


def machine_memory() -> int | None:
    """Memory of this machine in bytes; None if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
