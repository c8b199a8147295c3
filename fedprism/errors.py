"""The errors that a user can cause and repair. The command line prints them without a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedprismError(Exception):
    """Something that was given cannot be used; the message says what, what was expected, and what to do."""


class ConfigError(FedprismError):
    """A configuration has an unknown key or a value that cannot be."""


class DataError(FedprismError):
    """A dataset, a folder of images or a split cannot be used as it is."""


class RecordError(FedprismError):
    """A run directory is locked, damaged, of another version, or in the way."""


def unknown(kind: str, given: str, known: Iterable[str]) -> str:
    """'unknown method 'fedavgg': did you mean 'fedavg'? Known: …' — the same sentence everywhere."""
    names = sorted(known)
    lower = {name.lower(): name for name in names}
    near = [lower[name] for name in get_close_matches(given.lower(), lower, n=1, cutoff=0.5)]
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {given!r}.{hint} Known: {', '.join(names) or 'none'}."
