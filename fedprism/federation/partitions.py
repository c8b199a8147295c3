"""Partitions: how the images of a dataset are dealt to clients.

A partition is a frozen dataclass: its fields are the settings under `data.partition`, its `shares` does the dealing,
and the first line of its docstring is what `fedprism list partitions` shows. Rules about labels are in `label_skew`,
rules about what images look like in `feature_skew`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedprism import keys
from fedprism.config import Named, plain, positive, setting, structure
from fedprism.data import Dataset
from fedprism.errors import ConfigError
from fedprism.federation.splits import Indices
from fedprism.registry import Registry

MIXED = "mixed"  # the domain of a client that has images of several

FEW = 5  # clients of a dataset with one domain, unless the configuration says how many


class Share(NamedTuple):
    """What one client is dealt."""

    client: str
    domain: str
    indices: Indices
    test: Indices | None = None  # which of them are its test part; None: the dataset's own, or a share
    noise: float = 0.0  # standard deviation of what is added to its pixels, on the scale from 0 to 255


@dataclass(frozen=True)
class Partition:
    """The base of all partitions."""

    everything: ClassVar[bool] = True  # no image of the pool is left over, unless some clients or domains are

    clients: int | None = setting(None, "how many", positive, "1 or more")
    of: int | None = setting(
        None,
        "the partition is made for so many clients, of which the seed draws `clients`; null: all of them take part",
        positive,
        "1 or more",
    )

    def settled(self, dataset: Dataset) -> Partition:
        """With the number of clients filled in for this dataset, or refused."""
        clients = self.clients or self.usual(dataset)
        if self.of is not None and self.of < clients:
            raise ConfigError(
                f"data.partition.of is {self.of}, but data.partition.clients is {clients}; "
                "expected at least as many, or leave `of` out."
            )
        self.check(dataset, self.of or clients)
        return replace(self, clients=clients)

    def deal(self, dataset: Dataset, pool: Indices, seed: int) -> list[Share]:
        """Who gets which images of `pool`; called on a settled partition.

        `dataset.least_train` is here how many a client must be dealt so that enough are left when its parts are cut.
        Clients that are drawn from more (`of`) have exactly the images and names that they have among all of them.
        """
        clients = self.clients or self.usual(dataset)
        made = self.shares(dataset, pool, self.of or clients, seed)
        if self.of is None:
            return made
        kept = keys.numpy_generator(seed, "of").permutation(self.of)[:clients]
        return [made[i] for i in np.sort(kept)]

    def usual(self, dataset: Dataset) -> int:
        """How many clients there are where the configuration does not say."""
        return type(self)().clients or one_a_domain(dataset)

    def check(self, dataset: Dataset, clients: int) -> None:
        """Refuse what this rule cannot do with this dataset and so many clients."""

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        """The rule: who of `clients` gets which images of `pool`."""
        raise NotImplementedError

    def asked(self, clients: int) -> str:
        """How an error begins that is about the number of clients."""
        return f"data.partition.{'clients' if self.of is None else 'of'} is {clients}"


PARTITIONS: Registry[type[Partition]] = Registry("partition")


def partition_of(named: Named) -> Partition:
    """The partition that the configuration names, with its settings checked."""
    return structure(plain(named.settings), PARTITIONS[named.name], "data.partition")


@PARTITIONS.register("domain")
@dataclass(frozen=True)
class Domain(Partition):
    """Every client has one domain; clients of the same domain get equal random shares of it.

    Without a number of clients there is one a domain, or 5 where a dataset has a single domain. Fewer clients than
    domains: the first domains. More: they are called `plain-1`, `plain-2` and so on, and `order` says
    whether client i has domain i modulo the number of domains (turns) or the clients of a domain stand together
    (blocks, as in FedSCE). Where domains are real sites (`folder:PATH`) all take part, and the number of clients must
    be a multiple of theirs.
    """

    clients: int | None = setting(
        None, "how many; null: one a domain, or 5 where there is one domain", positive, "1 or more"
    )
    order: Literal["turns", "blocks"] = setting(
        "turns", "of clients; turns: one of each domain after the other; blocks: all of a domain together"
    )

    def check(self, dataset: Dataset, clients: int) -> None:
        domains = len(dataset.domain_names)
        if (dataset.sites or self.order == "blocks") and clients % domains:
            kind = "site" if dataset.sites else "domain"
            raise ConfigError(
                f"{self.asked(clients)}, but {dataset.name!r} has {domains} {kind}s; "
                f"leave it out (or write null) for one client a {kind}, or ask for a multiple of {domains}."
            )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        domains = len(dataset.domain_names)
        turns = self.order == "turns"
        return by_domain(
            dataset, pool, [i % domains if turns else i * domains // clients for i in range(clients)], seed
        )


# --- what rules are made of ------------------------------------------------------------------------------------------


def one_a_domain(dataset: Dataset) -> int:
    """A client a domain; a few where one domain is all there is."""
    domains = len(dataset.domain_names)
    return domains if dataset.sites or domains > 1 else FEW


def by_domain(dataset: Dataset, pool: Indices, domain_of: Sequence[int], seed: int) -> list[Share]:
    """Client i gets an equal random share of domain `domain_of[i]`."""
    shares: dict[int, Share] = {}
    clients: dict[int, list[int]] = {}
    for client, number in enumerate(domain_of):
        clients.setdefault(number, []).append(client)
    domains = dataset.domains.numpy()[pool]
    order = np.argsort(domains, kind="stable")  # one sort, whatever the number of domains
    ends = np.searchsorted(domains[order], np.arange(len(dataset.domain_names) + 1))
    for number, members in sorted(clients.items()):
        domain = dataset.domain_names[number]
        own = pool[order[ends[number] : ends[number + 1]]]
        rng = keys.numpy_generator(seed, "deal", domain)
        dealt = [np.array_split(rng.permutation(part), len(members)) for part in parts_of(dataset, own)]
        for nth, (member, hand) in enumerate(zip(members, zip(*dealt, strict=True), strict=True)):
            name = domain if len(domain_of) <= len(dataset.domain_names) else f"{domain}-{nth + 1}"
            shares[member] = Share(name, domain, np.sort(np.concatenate(hand)))
    return [shares[i] for i in range(len(domain_of))]


def numbered(dataset: Dataset, owner: Indices, clients: int) -> list[Share]:
    """Shares of `client-01`, `client-02` and so on; `owner` says of every image whose it is, -1: nobody's.

    >>> import torch
    >>> zeros = torch.zeros(4, dtype=torch.int64)
    >>> images = torch.zeros(4, 1, 2, 2, dtype=torch.uint8)
    >>> four = Dataset("four", images, zeros, zeros, ("all",), ("0",), None, 0.2)
    >>> [(share.client, share.indices.tolist()) for share in numbered(four, np.array([1, 0, -1, 1]), 2)]
    [('client-01', [1]), ('client-02', [0, 3])]
    """
    order = np.argsort(owner, kind="stable")
    hands = np.split(order, np.searchsorted(owner[order], np.arange(clients + 1)))[1:-1]
    domain = dataset.domain_names[0] if len(dataset.domain_names) == 1 else MIXED
    width = max(2, len(str(clients)))
    return [Share(f"client-{i + 1:0{width}}", domain, hand) for i, hand in enumerate(hands)]


def nobody(dataset: Dataset) -> Indices:
    """No image has an owner yet."""
    return np.full(len(dataset), -1, dtype=np.int64)


def parts_of(dataset: Dataset, indices: Indices) -> list[Indices]:
    """The training and the test images among `indices`; all in one where the dataset has no test part of its own."""
    if dataset.is_test is None:
        return [indices]
    is_test = dataset.is_test.numpy()[indices]
    return [indices[~is_test], indices[is_test]]


def class_sizes(dataset: Dataset, indices: Indices) -> Indices:
    """int64 [classes]: how many of `indices` are of each class."""
    return np.bincount(dataset.labels.numpy()[indices], minlength=len(dataset.class_names))


def whole(shares: NDArray[np.float64], n: int | Indices) -> Indices:
    """Shares [..., k] of n [...] things as whole numbers that sum to n, by largest remainder.

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
    """The same sum with nobody left at 0, where there is enough: taken from whoever has most.

    >>> at_least_one(np.array([5, 0, 2])).tolist()
    [4, 1, 2]
    """
    counts = counts.copy()
    while counts.min() < 1 < counts.max():
        counts[counts.argmax()] -= 1
        counts[counts.argmin()] += 1
    return counts
