"""Partitions by the look of images: domains, subclasses or noise; and equal shares as a baseline.

>>> from fedprism.federation import make_federation
>>> make_federation("digits-skew", partition={"name": "both", "parts": 2, "alpha": 2.0})
Federation 'digits-skew', seed 0: 5 clients, 10 classes, images 3x16x16
  plain     train 52, validation 6, test 135
  tinted    train 89, validation 10, test 160
  textured  train 80, validation 9, test 144
  blurred   train 65, validation 7, test 128
  rotated   train 73, validation 8, test 153
  left out: 678
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedprism import keys
from fedprism.config import positive, setting
from fedprism.data import Dataset
from fedprism.errors import ConfigError, DataError
from fedprism.federation.label_skew import TRIES, steep
from fedprism.federation.partitions import (
    PARTITIONS,
    Partition,
    Share,
    at_least_one,
    by_domain,
    class_sizes,
    no_owner,
    numbered,
    parts_of,
    whole,
)
from fedprism.federation.splits import Indices, count, stratified


@PARTITIONS.register("iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Each client has an equal random share of all images, of all domains."""

    clients: int | None = setting(5, "number of clients", positive, "1 or more")

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        return _equally(dataset, pool, clients, seed)


@PARTITIONS.register("noise")
@dataclass(frozen=True)
class PixelNoise(Partition):
    """Equal random shares with increasing pixel noise from client to client (Fed-CO2, F.3).

    Gaussian noise of standard deviation sigma * i / (clients - 1) is added to all images of client i = 0, 1, ... The
    paper does not give the scale; here pixels are from 0 to 255.
    """

    clients: int | None = setting(10, "number of clients", positive, "1 or more")
    sigma: float = setting(
        20.0, "standard deviation at the last client; pixels are 0 to 255", lambda v: v >= 0, "0 or more"
    )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        dealt = _equally(dataset, pool, clients, seed)
        return [share._replace(noise=self.sigma * i / max(1, clients - 1)) for i, share in enumerate(dealt)]


def _equally(dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
    rng, owner = keys.numpy_generator(seed, "iid"), no_owner(dataset)
    for part in parts_of(dataset, pool):
        owner[rng.permutation(part)] = np.arange(len(part)) % clients
    return numbered(dataset, owner, clients)


@PARTITIONS.register("superclass")
@dataclass(frozen=True)
class Superclass(Partition):
    """Labels are superclasses, and each client has one subclass of each (FediOS, after pFedVEM; CIFAR-100).

    A group has one client per subclass of a superclass. In each group the subclasses of every superclass are shuffled
    and assigned to clients, so that a subclass has one client per group. Its training images are divided among these
    clients by random distinct cut points, the same for all subclasses (uneven, as in pFedVEM: the groups differ in
    size), or equally. Its test images are divided equally, so that no two clients share an image; with `test: all`
    each client is tested on all test images of its subclasses, as in pFedVEM.
    """

    clients: int | None = setting(
        None, "number of clients; null: the number of subclasses of a superclass", positive, "1 or more"
    )
    balance: Literal["uneven", "equal"] = setting(
        "uneven", "training images of a subclass among its clients; uneven: random sizes, as in pFedVEM"
    )
    test: Literal["dealt", "all"] = setting(
        "dealt", "test images of a subclass among its clients; all: each has all of them, as in pFedVEM"
    )

    def usual(self, dataset: Dataset) -> int:
        return int(_subclasses(dataset).shape[1])

    def check(self, dataset: Dataset, clients: int) -> None:
        each = _subclasses(dataset).shape[1]
        if clients % each:
            raise ConfigError(
                f"{self.asked(clients)}, but each superclass of {dataset.name!r} has {each} subclasses, one per "
                f"client; ask for a multiple of {each}."
            )
        if self.test == "all" and dataset.is_test is None:
            raise ConfigError(
                "data.partition.test is all, which needs the dataset's own test split, but data.split.test replaces "
                "it, or there is none; remove one of the two settings."
            )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        rng, owner = keys.numpy_generator(seed, "superclass"), no_owner(dataset)
        fine, parts = _fine(dataset), parts_of(dataset, pool)
        subclasses = _subclasses(dataset)
        each = subclasses.shape[1]
        groups = clients // each
        sizes = np.bincount(fine[parts[0]], minlength=subclasses.max() + 1)[subclasses]
        if sizes.min() < groups:
            advice = f"ask for at most {sizes.min() * each} clients" if sizes.min() else "every subclass needs some"
            raise DataError(
                f"a subclass of {dataset.name!r} has {sizes.min()} training images for {groups} clients; {advice}."
            )
        tested: dict[int, list[Indices]] = {client: [] for client in range(clients)}
        uneven = _cut(int(sizes.min()), groups, rng)
        # member[g, s, k]: the client of group g that has subclass k of superclass s
        member = rng.permuted(np.broadcast_to(np.arange(each), (groups, *subclasses.shape)), axis=2)
        for (superclass, k), subclass in np.ndenumerate(subclasses):
            owners = np.arange(groups) * each + member[:, superclass, k]
            for number, part in enumerate(parts):
                own = rng.permutation(part[fine[part] == subclass])
                if number and self.test == "all":
                    for client in owners:
                        tested[client].append(own)
                    continue
                if number or self.balance == "equal":
                    counts = rng.permutation(whole(np.full(groups, 1 / groups), len(own)))
                else:
                    counts = at_least_one(whole(uneven, len(own)))
                owner[own] = np.repeat(owners, counts)
        dealt = numbered(dataset, owner, clients)
        return [
            share._replace(indices=np.sort(np.concatenate([share.indices, *tested[client]])))
            for client, share in enumerate(dealt)
        ]


def _cut(n: int, pieces: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """The shares of n items that are cut at distinct random points."""
    cuts = np.sort(rng.choice(np.arange(1, n), pieces - 1, replace=False))
    return np.divide(np.diff(cuts, prepend=0, append=n), n)


def _fine(dataset: Dataset) -> Indices:
    """The subclass of each image."""
    if dataset.fine is None:
        raise ConfigError(
            f"data.partition is superclass, which needs labels that are superclasses with subclasses, but "
            f"{dataset.name!r} has no subclasses; use cifar100-super, or another partition."
        )
    return dataset.fine.labels.numpy()


def _subclasses(dataset: Dataset) -> Indices:
    """int64 [superclasses, subclasses of each]."""
    pairs = np.unique(np.stack([dataset.labels.numpy(), _fine(dataset)]), axis=1)
    sizes = np.bincount(pairs[0], minlength=len(dataset.class_names))
    if len(np.unique(pairs[1])) < pairs.shape[1] or sizes.min() < 1 or sizes.min() < sizes.max():
        raise ConfigError(
            f"data.partition is superclass, but the superclasses of {dataset.name!r} have {sizes.min()} to "
            f"{sizes.max()} subclasses; expected equally many, each subclass in one superclass."
        )
    return np.reshape(pairs[1], (len(sizes), -1))


@PARTITIONS.register("both")
@dataclass(frozen=True)
class Both(Partition):
    """Each client has one domain, and of that only some of each class (Fed-CO2's both skews).

    Each client's share of its domain is divided, class by class, into `parts` with shares from a Dirichlet
    distribution, drawn until every part has `least` images of the class. The client keeps one part. The test images,
    the dataset's own or a share set aside first, are reduced to the class ratio of the kept images, as many as
    possible. The rest is left out.
    """

    everything: ClassVar[bool] = False

    clients: int | None = setting(
        None, "number of clients, a multiple of the domains; null: one per domain", positive, "1 or more"
    )
    alpha: float = setting(0.3, "concentration of the shares of a class", steep, "0.001 to 1000000")
    parts: int = setting(
        3, "number of parts per domain; Fed-CO2: digits 3, Office 2, DomainNet 5", positive, "1 or more"
    )
    keep: int = setting(0, "index of the part to keep, from 0", lambda v: v >= 0, "0 or more")
    least: int = setting(2, "minimum number of images per class and part", lambda v: v >= 0, "0 or more")
    images: int | None = setting(
        None,
        "number of training images per client to divide, drawn at random; null: all; Fed-CO2's code: 2231 of digits",
        positive,
        "1 or more",
    )

    def check(self, dataset: Dataset, clients: int) -> None:
        domains = len(dataset.domain_names)
        if clients % domains:
            raise ConfigError(
                f"{self.asked(clients)}, but {dataset.name!r} has {domains} domains; "
                f"leave it out for one client per domain, or ask for a multiple of {domains}."
            )
        if self.keep >= self.parts:
            raise ConfigError(
                f"data.partition.keep is {self.keep}, but there are {self.parts} parts, counted from 0; "
                f"ask for at most {self.parts - 1}."
            )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        domains = len(dataset.domain_names)
        dealt = by_domain(dataset, pool, [i % domains for i in range(clients)], seed)
        return [self._kept(dataset, share, seed) for share in dealt]

    def _kept(self, dataset: Dataset, share: Share, seed: int) -> Share:
        rng = keys.numpy_generator(seed, "both", share.client)
        train, test = self._apart(dataset, share, rng)
        if self.images is not None:
            if len(train) < self.images:
                raise DataError(
                    f"data.partition.images is {self.images}, but client {share.client!r} has {len(train)} training "
                    "images to divide; ask for at most that many."
                )
            train = np.sort(rng.permutation(train)[: self.images])
        table = self._counts(dataset, class_sizes(dataset, train), share, rng)
        counts = table[:, self.keep]
        kept = _take(dataset, train, counts, rng, table[:, : self.keep].sum(axis=1))
        tested = _take(dataset, test, _in_ratio(dataset, counts, class_sizes(dataset, test), share), rng)
        return share._replace(indices=np.sort(np.concatenate([kept, tested])), test=tested)

    @staticmethod
    def _apart(dataset: Dataset, share: Share, rng: np.random.Generator) -> tuple[Indices, Indices]:
        """The training and the test images of a share."""
        if dataset.is_test is not None:
            train, test = parts_of(dataset, share.indices)
            return train, test
        order = stratified(share.indices, dataset.labels.numpy()[share.indices], rng)
        cut = count(dataset.test_share, len(order), dataset.round_up)
        return np.sort(order[cut:]), np.sort(order[:cut])

    def _counts(self, dataset: Dataset, sizes: Indices, share: Share, rng: np.random.Generator) -> Indices:
        """[classes, parts]: numbers of images."""
        table = np.zeros((len(sizes), self.parts), dtype=np.int64)
        for label, size in enumerate(sizes):
            counts = whole(rng.dirichlet(np.full(self.parts, self.alpha), TRIES), np.full(TRIES, size))
            good = np.flatnonzero(counts.min(axis=1) >= self.least)
            if not len(good):
                name, enough = dataset.class_names[label], size >= self.least * self.parts
                alpha = "raise data.partition.alpha, or " if enough else "or "
                raise DataError(
                    f"client {share.client!r} has {size} images of class {name!r}, of which {TRIES} draws with alpha "
                    f"{self.alpha:g} never left {self.least} in each of {self.parts} parts. Lower "
                    f"data.partition.least, {alpha}ask for fewer clients or parts."
                )
            table[label] = counts[good[0]]
        return table


def _in_ratio(dataset: Dataset, wanted: Indices, sizes: Indices, share: Share) -> Indices:
    """The largest counts in the ratio of `wanted` that `sizes` allows, rounded."""
    present = wanted > 0
    scale = min(sizes[present] / wanted[present], default=1.0)
    if not scale:
        name = dataset.class_names[int(np.flatnonzero(present & (sizes == 0))[0])]
        raise DataError(
            f"client {share.client!r} has training but no test images of class {name!r}, so its test split cannot "
            "have their class ratio; ask for fewer clients, or replace the test split by data.split.test."
        )
    nearest: Indices = np.floor(scale * wanted + 0.5).astype(np.int64)
    return np.minimum(nearest, sizes)


def _take(
    dataset: Dataset, part: Indices, counts: Indices, rng: np.random.Generator, start: Indices | int = 0
) -> Indices:
    """Take `counts` images per class, in a random order, from position `start` on."""
    labels, starts = dataset.labels.numpy()[part], np.broadcast_to(start, counts.shape)
    each = zip(starts, starts + counts, strict=True)
    taken = [rng.permutation(part[labels == label])[first:last] for label, (first, last) in enumerate(each)]
    return np.concatenate([part[:0], *taken])
