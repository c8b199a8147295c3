"""From a configuration to a federation: load, set aside public data, partition, split, check."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedprism import keys
from fedprism.config import SPLITS, DataConfig, Named, plain, structure
from fedprism.data import Dataset, load
from fedprism.errors import ConfigError, DataError, shown
from fedprism.federation.base import ClientData, Federation, Split, check_seed
from fedprism.federation.partitions import Domain, Partition, Share, partition_of, parts_of
from fedprism.federation.splits import Indices, SplitIndices, as_the_smallest, check_split, count, split, stratified

NOISY_AT_ONCE = 1024  # images: the noise needs four times their memory


def make_federation(
    name: str = "digits-skew", *, clients: int | None = None, seed: int = 0, **settings: Any
) -> Federation:
    """Make a federation from a dataset's name and any setting of `data:` in the configuration.

    `clients` is the number of clients; by default one per domain (five in digits-skew), or one per folder in
    `folder:PATH`.

    >>> make_federation("digits-skew", clients=2, samples=100)
    Federation 'digits-skew', seed 0: 2 clients, 10 classes, images 3x16x16
      plain   train 100, validation 36, test 216
      tinted  train 100, validation 36, test 216
      left out: 1093
    """
    check_seed(seed)
    partition = settings.pop("partition", "domain")
    raw = dict(partition) if isinstance(partition, Mapping) else plain(structure(partition, Named, "partition"))
    if clients is not None:
        if "clients" in raw and raw["clients"] != clients:
            both = f"clients is {shown(clients)} and partition says {shown(raw['clients'])}"
            raise ConfigError(f"{both}; give one of them.")
        raw["clients"] = clients
    return build_federation(structure({"name": name, "partition": raw, **settings}, DataConfig, "data"), seed)


def build_federation(config: DataConfig, seed: int) -> Federation:
    """Make the federation of a configuration; the same seed gives the same images to the same clients.

    Images are not copied, unless noise is added to them: a client refers to rows of the dataset, which may be a
    memory-mapped file.
    """
    partition = partition_of(config.partition)
    check_split(config.split)
    dataset = load(config, seed)
    if config.split.test is not None:  # an explicit share replaces the dataset's own test split
        dataset = replace(dataset, is_test=None, test_share=config.split.test)
    check_split(replace(config.split, test=0.0 if dataset.is_test is not None else dataset.test_share))
    partition = partition.settled(dataset)
    public = _set_aside(dataset, config.public, seed)
    pool = np.setdiff1d(np.arange(len(dataset)), public)
    _refuse_many(dataset, config, partition, pool)
    shares = partition.deal(replace(dataset, min_train=_to_deal(dataset, config)), pool, seed)
    splits = {share.client: _divide(dataset, config, share, seed) for share in shares}
    _refuse_small(dataset, config, partition, pool, splits)
    if config.split.rule == "smallest":
        splits = as_the_smallest(splits, config.split)
    splits = _cut(splits, config.fraction, config.samples)

    def take(indices: Indices) -> Split:
        rows = torch.from_numpy(np.sort(indices))
        return Split.of(dataset.images, rows, dataset.labels[rows])

    clients = {}
    for share in shares:
        train, validation, test = (take(indices) for indices in splits[share.client])
        classes = len(dataset.class_names)
        data = ClientData(share.client, share.domain, train, validation, test, classes)
        clients[share.client] = noisy(data, share.noise, seed) if share.noise else data
    used = np.unique(np.concatenate([public, *(indices for own in splits.values() for indices in own)]))
    return Federation(
        name=dataset.name,
        clients=clients,
        class_names=dataset.class_names,
        shape=dataset.shape,
        seed=seed,
        data=replace(config, partition=Named(config.partition.name, plain(partition))),
        public=take(public),
        left_out=len(dataset) - len(used),
    )


def _set_aside(dataset: Dataset, wanted: int, seed: int) -> Indices:
    """Public images: equally many per domain, stratified by class; none from the dataset's own test split."""
    if not wanted:
        return np.empty(0, dtype=np.int64)
    free = np.arange(len(dataset)) if dataset.is_test is None else np.flatnonzero(~dataset.is_test.numpy())
    per_domain, more = divmod(wanted, len(dataset.domain_names))
    taken = []
    for number, domain in enumerate(dataset.domain_names):
        own = free[dataset.domains.numpy()[free] == number]
        n = per_domain + (number < more)
        if n > len(own):
            raise DataError(
                f"data.public is {wanted}, which takes {n} images of domain {domain!r}, but it has {len(own)}; "
                "ask for fewer."
            )
        rng = keys.numpy_generator(seed, "public", domain)
        taken.append(stratified(own, dataset.labels.numpy()[own], rng)[:n])
    return np.concatenate(taken)


def _to_deal(dataset: Dataset, config: DataConfig) -> int:
    """Images that a share needs so that `min_train` are left after the split (without a given test split)."""
    validation = config.split.validation if config.split.rule == "shares" else 0.0
    test = 0.0 if dataset.is_test is not None else dataset.test_share
    n = math.ceil((dataset.min_train + 2) / (1 - validation - test))  # rounding takes less than two
    while n > 1 and _left(n - 1, validation, test, dataset.round_up) >= dataset.min_train:
        n -= 1
    return n


def _left(n: int, validation: float, test: float, round_up: bool) -> int:
    """The number of training images among n images."""
    return n - count(validation, n) - count(test, n, round_up)


def _divide(dataset: Dataset, config: DataConfig, share: Share, seed: int) -> SplitIndices:
    """A client's three splits; with rule `smallest`, the training split still includes the validation images."""
    own_test = None if dataset.is_test is None else dataset.is_test.numpy()[share.indices]
    if share.test is not None:
        own_test = np.isin(share.indices, share.test)
    return split(
        share.indices,
        dataset.labels.numpy()[share.indices],
        validation=config.split.validation if config.split.rule == "shares" else 0.0,
        test=dataset.test_share,
        own_test=own_test,
        rng=keys.numpy_generator(seed, "split", share.client),
        round_up=dataset.round_up,
    )


def _refuse_many(dataset: Dataset, config: DataConfig, partition: Partition, pool: Indices) -> None:
    """Refuse more clients than there are images for, before anything is made for each of them."""
    asked = partition.of or partition.clients or 0
    # The images of those that `of` leaves out are not needed, so there may be few of them.
    if asked <= (len(pool) // dataset.min_train if partition.of is None else len(pool)):
        return
    possible = _possible(dataset, config, partition, pool)
    raise DataError(
        f"{partition.asked(asked)}, but there are {len(pool):,} images to divide, and a client needs at least "
        f"{dataset.min_train} to train on. "
        + (f"At most {possible} clients are possible with these shares." if possible else "Ask for fewer clients.")
    )


def _refuse_small(
    dataset: Dataset,
    config: DataConfig,
    partition: Partition,
    pool: Indices,
    splits: Mapping[str, SplitIndices],
) -> None:
    """Refuse a client with too few images; say how many clients are possible, if that can be found."""
    small = _too_small(dataset, splits)
    if small is None:
        return
    own, clients = splits[small], len(splits)
    message = (
        f"with {clients} clients, client {small!r} is left with {len(own.train)} training and {len(own.test)} test "
        f"images; expected at least {dataset.min_train} and 1."
    )
    possible = _possible(dataset, config, partition, pool)
    if possible is None:
        fewer = "Ask for fewer clients, or change" if clients > 1 else "Change"
        raise DataError(f"{message} {fewer} data.partition, data.split or data.public.")
    if possible:
        raise DataError(f"{message} At most {possible} clients are possible with these shares.")
    raise DataError(f"{message} Give it more images, or change data.split or data.public.")


def _possible(dataset: Dataset, config: DataConfig, partition: Partition, pool: Indices) -> int | None:
    """The largest number of clients that all have enough images, below the one asked for; None if unknown."""
    if not isinstance(partition, Domain) or partition.of or partition.order != "turns":
        return None

    validation = config.split.validation if config.split.rule == "shares" else 0.0
    domains = len(dataset.domain_names)
    parts = [np.bincount(dataset.domains.numpy()[part], minlength=domains) for part in parts_of(dataset, pool)]

    def fails(fewer: int) -> bool:
        """Shares of a domain are equal, or differ by one image, so their sizes are enough."""
        for number in range(min(domains, fewer)):
            members = len(range(number, fewer, domains))
            train, *own_test = ({int(part[number]) // members, -(-int(part[number]) // members)} for part in parts)
            test = 0.0 if own_test else dataset.test_share
            tested = min(own_test[0]) if own_test else min(count(test, n, dataset.round_up) for n in train)
            left = min(_left(n, validation, test, dataset.round_up) for n in train)
            if left < dataset.min_train or not tested:
                return True
        return False

    upper = 0 if dataset.sites else min((partition.clients or 1) - 1, len(pool) // dataset.min_train)
    return bisect_left(range(1, upper + 1), True, key=fails)  # more clients have fewer images each


def _too_small(dataset: Dataset, splits: Mapping[str, SplitIndices]) -> str | None:
    """The first client with too few images."""
    small = (name for name, own in splits.items() if len(own.train) < dataset.min_train or not len(own.test))
    return next(small, None)


def _cut(splits: Mapping[str, SplitIndices], fraction: float, samples: int | None) -> dict[str, SplitIndices]:
    """Shorten training splits; their order is stratified, so the first images keep the shares of the classes."""
    kept = {name: own._replace(train=own.train[: count(fraction, len(own.train))]) for name, own in splits.items()}
    if samples is None:
        return kept
    smallest = min(kept, key=lambda client: len(kept[client].train))
    if len(kept[smallest].train) < samples:
        raise DataError(
            f"data.samples is {samples}, but client {smallest!r} has {len(kept[smallest].train)} training images; "
            "ask for at most that many."
        )
    return {client: own._replace(train=own.train[:samples]) for client, own in kept.items()}


def noisy(client: ClientData, deviation: float, seed: int) -> ClientData:
    """Add Gaussian noise to all images of a client; `deviation` is on the scale from 0 to 255."""
    if client.train.kind[0] != torch.uint8:
        raise ConfigError("noise is added to pixels, but this dataset has texts; choose another data.partition.")

    def add(name: str) -> Split:
        rng, split = keys.generator(seed, "pixel-noise", client.name, name), client.split(name)
        made = torch.empty(len(split), *split.kind[1], dtype=torch.uint8)
        for i, images in enumerate(split.parts(NOISY_AT_ONCE)):
            noise = deviation * torch.randn(images.shape, generator=rng)
            made[i * NOISY_AT_ONCE :][: len(images)] = (images + noise).round().clamp(0, 255).to(torch.uint8)
        return Split(made, split.y)

    train, validation, test = map(add, SPLITS)
    return replace(client, train=train, validation=validation, test=test)
