"""From a configuration to a federation: load, set aside what is public, deal, split, check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedprism import keys
from fedprism.config import DataConfig, Named, plain, structure
from fedprism.data import Dataset, load
from fedprism.errors import ConfigError, DataError
from fedprism.federation.base import ClientData, Federation, Split
from fedprism.federation.partitions import Partition, Share, partition_of
from fedprism.federation.splits import Indices, Parts, check_shares, split, stratified


def federation(name: str = "digits-skew", *, clients: int | None = None, seed: int = 0, **settings: Any) -> Federation:
    """A federation by its dataset's name, with any setting of `data:` in the configuration.

    `clients` is how many there are; left out, one a domain (five in digits-skew), or one a folder in `folder:PATH`.

    >>> federation("digits-skew", clients=2, samples=100)
    Federation 'digits-skew', seed 0: 2 clients, 10 classes, images 3x16x16
      plain   train 100, validation 36, test 216
      tinted  train 100, validation 36, test 216
      left out: 1093
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed is {seed!r}; expected a whole number.")
    partition = settings.pop("partition", "domain")
    raw = dict(partition) if isinstance(partition, Mapping) else plain(structure(partition, Named, "partition"))
    if clients is not None:
        if raw.get("clients", clients) != clients:
            raise ConfigError(f"clients is {clients} and partition says {raw['clients']}; give one of them.")
        raw["clients"] = clients
    return make_federation(structure({"name": name, "partition": raw, **settings}, DataConfig, "data"), seed)


def make_federation(config: DataConfig, seed: int) -> Federation:
    """The federation that a configuration describes; the same seed gives the same images to the same clients."""
    partition = partition_of(config.partition)
    if config.split.test is not None:
        check_shares(config.split.validation, config.split.test)
    dataset = load(config, seed)
    check_shares(config.split.validation, _test_share(dataset, config))
    partition = partition.settled(dataset)
    public = _set_aside(dataset, config.public, seed)
    pool = np.setdiff1d(np.arange(len(dataset)), public)
    shares = partition.deal(dataset, pool, seed)
    parts = {share.client: _divide(dataset, config, share, seed) for share in shares}
    _refuse_small(dataset, config, partition, pool, parts, seed)
    if config.samples is not None:
        parts = _cut(parts, config.samples)

    def take(indices: Indices) -> Split:
        indices = np.sort(indices)
        return Split(dataset.images[indices], dataset.labels[indices])

    clients = {}
    for share in shares:
        train, validation, test = (take(part) for part in parts[share.client])
        classes = len(dataset.class_names)
        clients[share.client] = ClientData(share.client, share.domain, train, validation, test, classes)
    used = len(public) + sum(len(part) for held in parts.values() for part in held)
    channels, height, width = dataset.images.shape[1:]
    return Federation(
        name=dataset.name,
        clients=clients,
        class_names=dataset.class_names,
        shape=(channels, height, width),
        seed=seed,
        data=replace(config, partition=Named(config.partition.name, plain(partition))),
        public=take(public),
        left_out=len(dataset) - used,
    )


def _test_share(dataset: Dataset, config: DataConfig) -> float:
    """The share to cut for the test; 0 where the dataset's own test part is used."""
    if config.split.test is not None:
        return config.split.test
    return 0.0 if dataset.is_test is not None else dataset.test_share


def _set_aside(dataset: Dataset, wanted: int, seed: int) -> Indices:
    """Images for everyone: as many of each domain, in each the classes in their shares; never of a given test part."""
    free = np.arange(len(dataset)) if dataset.is_test is None else np.flatnonzero(~dataset.is_test.numpy())
    each, more = divmod(wanted, len(dataset.domain_names))
    taken = [np.empty(0, dtype=np.int64)]
    for number, domain in enumerate(dataset.domain_names):
        own = free[dataset.domains.numpy()[free] == number]
        n = each + (number < more)
        if n > len(own):
            raise DataError(
                f"data.public is {wanted}, which takes {n} images of domain {domain!r}, but it has {len(own)}; "
                "ask for fewer."
            )
        rng = keys.numpy_generator(seed, "public", domain)
        taken.append(stratified(own, dataset.labels.numpy()[own], rng)[:n])
    return np.concatenate(taken)


def _divide(dataset: Dataset, config: DataConfig, share: Share, seed: int) -> Parts:
    """A client's three parts. An explicit split.test cuts anew, a test part of the dataset's own or not."""
    given = dataset.is_test if config.split.test is None else None
    return split(
        share.indices,
        dataset.labels.numpy()[share.indices],
        validation=config.split.validation,
        test=_test_share(dataset, config),
        own_test=None if given is None else given.numpy()[share.indices],
        rng=keys.numpy_generator(seed, "split", share.client),
    )


def _refuse_small(
    dataset: Dataset, config: DataConfig, partition: Partition, pool: Indices, parts: Mapping[str, Parts], seed: int
) -> None:
    """Name a client that has too few images, and how many clients would do."""
    small = _too_small(dataset, parts)
    if small is None:
        return
    held, clients = parts[small], len(parts)
    message = (
        f"with {clients} clients, client {small!r} is left with {len(held.train)} training and {len(held.test)} test "
        f"images; expected at least {dataset.least_train} and 1."
    )
    most = 0 if dataset.sites else min(clients - 1, len(pool) // dataset.least_train)
    for fewer in range(most, 0, -1):
        shares = replace(partition, clients=fewer).deal(dataset, pool, seed)
        if not _too_small(dataset, {share.client: _divide(dataset, config, share, seed) for share in shares}):
            raise DataError(f"{message} At most {fewer} clients are possible with these shares.")
    raise DataError(f"{message} Give it more images, or change data.split or data.public.")


def _too_small(dataset: Dataset, parts: Mapping[str, Parts]) -> str | None:
    """The first client with too few images."""
    wanting = (name for name, held in parts.items() if len(held.train) < dataset.least_train or not len(held.test))
    return next(wanting, None)


def _cut(parts: Mapping[str, Parts], samples: int) -> dict[str, Parts]:
    """Training parts of a fixed size; they lie in stratified order, so the first of them keep the classes' shares."""
    smallest = min(parts, key=lambda client: len(parts[client].train))
    if len(parts[smallest].train) < samples:
        raise DataError(
            f"data.samples is {samples}, but client {smallest!r} has {len(parts[smallest].train)} training images; "
            "ask for at most that many."
        )
    return {client: held._replace(train=held.train[:samples]) for client, held in parts.items()}
