"""Partitions: how the images of a dataset are dealt to clients.

A partition is a frozen dataclass: its fields are the settings under `data.partition`, its `deal` does the dealing, and
the first line of its docstring is what `fedprism list partitions` shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fedprism import keys
from fedprism.config import DataConfig, Named, plain, positive, setting, structure
from fedprism.data import Dataset
from fedprism.errors import ConfigError
from fedprism.federation.splits import Indices
from fedprism.registry import Registry

# A configuration does not tell a default that was left alone from the same number written down.
_DEFAULT = DataConfig().partition.settings.get("clients")


class Share(NamedTuple):
    """What one client is dealt."""

    client: str
    domain: str
    indices: Indices


@dataclass(frozen=True)
class Partition:
    """The base of all partitions."""

    clients: int | None = setting(None, "how many", positive, "1 or more")

    def settled(self, dataset: Dataset) -> Partition:
        """With the number of clients filled in for this dataset, or refused."""
        return replace(self, clients=self.clients or len(dataset.domain_names))

    def deal(self, dataset: Dataset, pool: Indices, seed: int) -> list[Share]:
        """Who gets which images of `pool`; called on a settled partition."""
        raise NotImplementedError


PARTITIONS: Registry[type[Partition]] = Registry("partition")


def partition_of(named: Named) -> Partition:
    """The partition that the configuration names, with its settings checked."""
    return structure(plain(named.settings), PARTITIONS[named.name], "data.partition")


@PARTITIONS.register("domain")
@dataclass(frozen=True)
class Domain(Partition):
    """Every client has one domain; clients of the same domain get equal random shares of it.

    Fewer clients than domains: the first domains. More: client i has domain i modulo the number of domains, and is
    called `plain-1`, `plain-2` and so on. Where domains are real sites (`folder:PATH`) all take part: the number of
    clients left at its default means one a site, any other number must be a multiple of the number of sites.
    """

    clients: int | None = setting(None, "how many; null: one a domain", positive, "1 or more")

    def settled(self, dataset: Dataset) -> Partition:
        sites = len(dataset.domain_names)
        if dataset.sites and self.clients == _DEFAULT:
            return replace(self, clients=sites)
        if dataset.sites and self.clients is not None and self.clients % sites:
            raise ConfigError(
                f"data.partition.clients is {self.clients}, but {dataset.name!r} has {sites} sites; "
                f"leave it out for one client a site, or ask for a multiple of {sites}."
            )
        return super().settled(dataset)

    def deal(self, dataset: Dataset, pool: Indices, seed: int) -> list[Share]:
        names, clients = dataset.domain_names, self.clients or len(dataset.domain_names)
        shares: dict[int, Share] = {}
        for number, domain in enumerate(names[:clients]):
            members = range(number, clients, len(names))
            for nth, indices in enumerate(_dealt(dataset, pool, number, len(members), seed)):
                client = domain if clients <= len(names) else f"{domain}-{nth + 1}"
                shares[members[nth]] = Share(client, domain, indices)
        return [shares[i] for i in range(clients)]


def _dealt(dataset: Dataset, pool: Indices, domain: int, hands: int, seed: int) -> list[Indices]:
    """One domain's images in `hands` equal random shares; its own test part, if there is one, is dealt by itself."""
    rng = keys.numpy_generator(seed, "deal", dataset.domain_names[domain])
    pool = pool[dataset.domains.numpy()[pool] == domain]
    is_test = np.zeros(len(pool), dtype=bool) if dataset.is_test is None else dataset.is_test.numpy()[pool]
    dealt = [np.array_split(rng.permutation(pool[part]), hands) for part in (~is_test, is_test)]
    return [np.sort(np.concatenate(hand)) for hand in zip(*dealt, strict=True)]
