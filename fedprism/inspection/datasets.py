"""The list of `fedprism data list`: every dataset, whether its files are there, its size and its licence."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from fedprism.data import DATASETS, Dataset
from fedprism.data.sources import NAMES, is_there, sources_of

READY, COMPACT, ABSENT, BUILT_IN, YOURS = "ready", "compact", "not here", "built in", "yours"

# Classes and domains by name, so that a list needs no files.
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

# Inputs per domain as published. A copy may have fewer. A domain without a count here is not compared.
PUBLISHED = {
    "agnews": {"agnews": 127_600},
    "cifar10": {"cifar10": 60_000},
    "cifar100": {"cifar100": 60_000},
    "cifar100-super": {"cifar100-super": 60_000},
    "digits-five": {"mnist": 70_000, "mnist-m": 68_002, "svhn": 99_289, "usps": 9_298},
    "mnist": {"mnist": 70_000},
    "office-caltech-10": {"amazon": 958, "caltech": 1_123, "dslr": 157, "webcam": 295},
    "pacs": {"art_painting": 2_048, "cartoon": 2_344, "photo": 1_670, "sketch": 3_929},
    "tiny-imagenet": {"tiny-imagenet": 110_000},
}


class DatasetRow(NamedTuple):
    """A row of the list."""

    name: str
    state: str
    classes: str
    domains: str
    licence: str


def datasets(root: Path) -> list[DatasetRow]:
    """A row per dataset, sorted by name."""
    return [DatasetRow(name, state(name, root), *SIZES.get(name, ("", "")), licence(name)) for name in sorted(DATASETS)]


def state(name: str, root: Path) -> str:
    """Ready, compact, not here, or built in. Where a dataset has several sources, the number of those that are there.

    >>> state("digits-skew", Path("/nowhere")), state("cifar10", Path("/nowhere"))
    ('built in', 'not here')
    """
    if name not in NAMES:
        return YOURS if name == "folder" else BUILT_IN
    sources = sources_of(name)
    there = [is_there(source.name, root) for source in sources]
    if all(there):
        return COMPACT if any(source.lacks(root) for source in sources) else READY
    return f"{sum(there)} of {len(there)}" if any(there) else ABSENT


def shortfall(dataset: Dataset, kind: str) -> str:
    """What a copy has of the dataset that was published as `kind`, in words; empty if it has all of it.

    >>> import torch
    >>> labels, images = torch.arange(4) % 2, torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    >>> shortfall(Dataset("mnist", images, labels, labels * 0, ("mnist",), ("0", "1"), None, 0.2), "mnist")
    '4 of the published 70,000 images'
    """
    published, inputs = PUBLISHED.get(kind, {}), "texts" if dataset.words else "images"
    sizes = torch.bincount(dataset.domains, minlength=len(dataset.domain_names)).tolist()
    short = {d: n for d, n in zip(dataset.domain_names, sizes, strict=True) if n != published.get(d, n)}
    words = [f"{number:,} of the published {published[domain]:,} {inputs}" for domain, number in short.items()]
    if len(dataset.domain_names) == 1:
        return "".join(words)
    return "; ".join(f"{domain}: {text}" for domain, text in zip(short, words, strict=True))


def licence(name: str) -> str:
    """The licence in short: the first words of each source's. `prepare` shows all of it.

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
