"""Partitions: how the images of a dataset are divided among clients.

A partition is a frozen dataclass. Its fields are the settings under `data.partition`, its `shares` method divides the
images, and `fedprism list partitions` shows the first line of its docstring. Partitions by label are in `label_skew`,
those by the look of images in `feature_skew`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedprism import keys, limits
from fedprism.config import Named, plain, positive, setting, structure
from fedprism.data import Dataset
from fedprism.errors import ConfigError
from fedprism.federation.splits import Indices
from fedprism.registry import Registry

MIXED = "mixed"  # the domain of a client with images of several domains

FEW = 5  # default number of clients for a dataset with one domain


class Share(NamedTuple):
    """The images of one client."""

    client: str
    domain: str
    indices: Indices
    test: Indices | None = None  # those of its test split; None: the dataset's own test split, or a share
    noise: float = 0.0  # standard deviation of noise added to its pixels, on the scale from 0 to 255


@dataclass(frozen=True)
class Partition:
    """The base class of all partitions."""

    everything: ClassVar[bool] = True  # uses all images of the pool, except those of unused clients or domains

    clients: int | None = setting(None, "number of clients", positive, "1 or more")
    of: int | None = setting(
        None,
        "number of clients for which the partition is made; the seed draws `clients` of them. null: all take part",
        positive,
        "1 or more",
    )

    def settled(self, dataset: Dataset) -> Partition:
        """The partition with its number of clients set for this dataset; refuses an invalid one."""
        clients = self.clients or self.usual(dataset)
        if (self.of or clients) > limits.CLIENTS:
            raise ConfigError(f"{self.asked(self.of or clients)}; expected at most {limits.CLIENTS:,}.")
        if self.of is not None and self.of < clients:
            raise ConfigError(
                f"data.partition.of is {self.of}, but data.partition.clients is {clients}; "
                "expected at least as many, or leave `of` out."
            )
        self.check(dataset, self.of or clients)
        return replace(self, clients=clients)

    def deal(self, dataset: Dataset, pool: Indices, seed: int) -> list[Share]:
        """Divide the images of `pool` among clients; call it on a settled partition.

        `dataset.min_train` is here the number of images that a share needs, so that enough are left after the split.
        Clients drawn by `of` keep the images and names that they have among all clients.
        """
        clients = self.clients or self.usual(dataset)
        made = self.shares(dataset, pool, self.of or clients, seed)
        if self.of is None:
            return made
        kept = keys.numpy_generator(seed, "of").permutation(self.of)[:clients]
        return [made[i] for i in np.sort(kept)]

    def usual(self, dataset: Dataset) -> int:
        """The default number of clients."""
        return type(self)().clients or one_per_domain(dataset)

    def check(self, dataset: Dataset, clients: int) -> None:
        """Refuse a dataset or a number of clients that this partition does not support."""

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        """Divide the images of `pool` among `clients` clients."""
        raise NotImplementedError

    def asked(self, clients: int) -> str:
        """The beginning of an error about the number of clients."""
        return f"data.partition.{'clients' if self.of is None else 'of'} is {clients}"


PARTITIONS: Registry[type[Partition]] = Registry("partition")


def partition_of(named: Named) -> Partition:
    """The partition of a configuration, with checked settings."""
    return structure(plain(named.settings), PARTITIONS[named.name], "data.partition")


@PARTITIONS.register("domain")
@dataclass(frozen=True)
class Domain(Partition):
    """Each client has one domain; clients of the same domain get equal random shares of it.

    The default is one client per domain, or 5 clients for a single domain. With fewer clients than domains, the first
    domains are used. With more, clients are called `plain-1`, `plain-2` and so on, and `order` decides whether client i
    has domain i modulo the number of domains (turns) or the clients of a domain are consecutive (blocks, as in FedSCE).
    If domains are real sites (`folder:PATH`), all take part, and the number of clients must be a multiple of theirs.
    """

    clients: int | None = setting(
        None, "number of clients; null: one per domain, or 5 for a single domain", positive, "1 or more"
    )
    order: Literal["turns", "blocks"] = setting(
        "turns", "order of clients; turns: domains alternate; blocks: all clients of a domain together"
    )

    def check(self, dataset: Dataset, clients: int) -> None:
        domains = len(dataset.domain_names)
        if (dataset.sites or self.order == "blocks") and clients % domains:
            kind = "site" if dataset.sites else "domain"
            raise ConfigError(
                f"{self.asked(clients)}, but {dataset.name!r} has {domains} {kind}s; "
                f"leave it out (or write null) for one client per {kind}, or ask for a multiple of {domains}."
            )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        domains = len(dataset.domain_names)
        turns = self.order == "turns"
        return by_domain(
            dataset, pool, [i % domains if turns else i * domains // clients for i in range(clients)], seed
        )


# --- helpers of partitions -------------------------------------------------------------------------------------------


def one_per_domain(dataset: Dataset) -> int:
    """One client per domain; `FEW` for a single domain."""
    domains = len(dataset.domain_names)
    return domains if dataset.sites or domains > 1 else FEW


def by_domain(dataset: Dataset, pool: Indices, domain_of: Sequence[int], seed: int) -> list[Share]:
    """Client i gets an equal random share of domain `domain_of[i]`."""
    shares: dict[int, Share] = {}
    clients: dict[int, list[int]] = {}
    for client, number in enumerate(domain_of):
        clients.setdefault(number, []).append(client)
    domains = dataset.domains.numpy()[pool]
    order = np.argsort(domains, kind="stable")  # one sort for any number of domains
    ends = np.searchsorted(domains[order], np.arange(len(dataset.domain_names) + 1))
    for number, members in sorted(clients.items()):
        domain = dataset.domain_names[number]
        own = pool[order[ends[number] : ends[number + 1]]]
        rng = keys.numpy_generator(seed, "deal", domain)
        dealt = [np.array_split(rng.permutation(part), len(members)) for part in parts_of(dataset, own)]
        for nth, (member, indices) in enumerate(zip(members, zip(*dealt, strict=True), strict=True)):
            name = domain if len(domain_of) <= len(dataset.domain_names) else f"{domain}-{nth + 1}"
            shares[member] = Share(name, domain, np.sort(np.concatenate(indices)))
    return [shares[i] for i in range(len(domain_of))]


def numbered(dataset: Dataset, owner: Indices, clients: int) -> list[Share]:
    """Shares of `client-01`, `client-02` and so on; `owner` is the client index of each image, -1 for none.

    >>> import torch
    >>> zeros = torch.zeros(4, dtype=torch.int64)
    >>> images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    >>> four = Dataset("four", images, zeros, zeros, ("all",), ("0",), None, 0.2)
    >>> [(share.client, share.indices.tolist()) for share in numbered(four, np.array([1, 0, -1, 1]), 2)]
    [('client-01', [1]), ('client-02', [0, 3])]
    """
    order = np.argsort(owner, kind="stable")
    groups = np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]
    domain = dataset.domain_names[0] if len(dataset.domain_names) == 1 else MIXED
    width = max(2, len(str(clients)))
    return [Share(f"client-{i + 1:0{width}}", domain, indices) for i, indices in enumerate(groups)]


def no_owner(dataset: Dataset) -> Indices:
    """An owner array in which no image is assigned yet."""
    return np.full(len(dataset), -1, dtype=np.int64)


def parts_of(dataset: Dataset, indices: Indices) -> list[Indices]:
    """The training and the test images among `indices`; a single part if the dataset has no test split."""
    if dataset.is_test is None:
        return [indices]
    is_test = dataset.is_test.numpy()[indices]
    return [indices[~is_test], indices[is_test]]


def class_sizes(dataset: Dataset, indices: Indices) -> Indices:
    """int64 [classes]: images per class among `indices`."""
    return np.bincount(dataset.labels.numpy()[indices], minlength=len(dataset.class_names))


def whole(shares: NDArray[np.float64], n: int | Indices) -> Indices:
    """Round shares [..., k] of n [...] to whole numbers that sum to n, by the largest remainder.

    >>> whole(np.array([0.5, 0.3, 0.2]), 9).tolist()
    [4, 3, 2]
    """
    n = np.asarray(n)[..., None]
    exact = shares * n
    counts = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(counts - exact, axis=-1, kind="stable"), axis=-1)
    counts += rank < n - counts.sum(axis=-1, keepdims=True)
    return counts


def at_least_one(counts: Indices) -> Indices:
    """Move counts from the largest entries to empty ones, as far as possible; the sum stays the same.

    >>> at_least_one(np.array([5, 0, 2])).tolist()
    [4, 1, 2]
    """
    counts = counts.copy()
    while counts.min() < 1 < counts.max():
        counts[counts.argmax()] -= 1
        counts[counts.argmin()] += 1
    return counts
