"""What `fedprism data list` shows: every dataset, whether its files are there, its size and its licence."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fedprism.data import DATASETS
from fedprism.data.sources import NAMES, is_there, sources_of

READY, ABSENT, BUILT_IN, YOURS = "ready", "not here", "built in", "yours"

# Classes and domains: what a name promises, so that a list needs no files.
SIZES = {
    "agnews": ("4", "1"),
    "cifar10": ("10", "1"),
    "cifar100": ("100", "1"),
    "cifar100-super": ("20", "1"),
    "digits-five": ("10", "5"),
    "digits-skew": ("10", "5"),
    "domainnet-10": ("10", "6"),
    "folder": ("any", "any"),
    "mnist": ("10", "1"),
    "office-caltech-10": ("10", "4"),
    "pacs": ("7", "4"),
    "synth-digits-like": ("10", "1"),
    "synthetic": ("any", "any"),
    "tiny-imagenet": ("200", "1"),
}


class Listed(NamedTuple):
    """A line of the list."""

    name: str
    state: str
    classes: str
    domains: str
    licence: str


def datasets(root: Path) -> list[Listed]:
    """A line a dataset, in the order of their names."""
    return [Listed(name, state(name, root), *SIZES.get(name, ("", "")), licence(name)) for name in sorted(DATASETS)]


def state(name: str, root: Path) -> str:
    """Ready, not here, or built in; where a dataset is made of several sources, how many of them are there.

    >>> state("digits-skew", Path("/nowhere")), state("cifar10", Path("/nowhere"))
    ('built in', 'not here')
    """
    if name not in NAMES:
        return YOURS if name == "folder" else BUILT_IN
    there = [is_there(source.name, root) for source in sources_of(name)]
    if all(there):
        return READY
    return f"{sum(there)} of {len(there)}" if any(there) else ABSENT


def licence(name: str) -> str:
    """In short: the first words of each source's; `prepare` shows all of it.

    >>> licence("svhn"), licence("cifar10")
    ('for non-commercial use only', 'none stated')
    """
    if name not in NAMES:
        return ""
    return "; ".join(dict.fromkeys(_short(source.licence) for source in sources_of(name)))


def _short(text: str) -> str:
    if text.startswith("No licence is stated"):
        return "none stated"
    first = text.partition(". ")[0].partition(", as ")[0].removesuffix(".")
    return first[:1].lower() + first[1:] if first.startswith("For ") else first
