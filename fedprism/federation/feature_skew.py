"""Partitions by what images look like: domains, subclasses or noise; and equal shares, to compare them with.

>>> from fedprism.federation import federation
>>> federation("digits-skew", partition={"name": "both", "parts": 2, "alpha": 2.0})
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
    nobody,
    numbered,
    parts_of,
    whole,
)
from fedprism.federation.splits import Indices, count, stratified


@PARTITIONS.register("iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Every client has an equal random share of everything, whatever the domain."""

    clients: int | None = setting(5, "how many", positive, "1 or more")

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        return _equally(dataset, pool, clients, seed)


@PARTITIONS.register("noise")
@dataclass(frozen=True)
class Noise(Partition):
    """Equal random shares whose pixels are noisier from client to client (Fed-CO2, F.3).

    Gaussian noise of standard deviation sigma * i / (clients - 1) is added to all images of client i = 0, 1, ...; the
    paper does not say on which scale: here pixels are from 0 to 255.
    """

    clients: int | None = setting(10, "how many", positive, "1 or more")
    sigma: float = setting(
        20.0, "standard deviation at the last client; pixels are 0 to 255", lambda v: v >= 0, "0 or more"
    )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        dealt = _equally(dataset, pool, clients, seed)
        return [share._replace(noise=self.sigma * i / max(1, clients - 1)) for i, share in enumerate(dealt)]


def _equally(dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
    rng, owner = keys.numpy_generator(seed, "iid"), nobody(dataset)
    for part in parts_of(dataset, pool):
        owner[rng.permutation(part)] = np.arange(len(part)) % clients
    return numbered(dataset, owner, clients)


@PARTITIONS.register("superclass")
@dataclass(frozen=True)
class Superclass(Partition):
    """Labels are superclasses, and each client has one subclass of each (FediOS, after pFedVEM; CIFAR-100).

    Clients come in groups of as many as a superclass has subclasses: in each group the subclasses of every superclass
    are shuffled and dealt one to a client, so that a subclass is held by one client a group. Its training images are
    divided among them by random distinct cut points, the same for all subclasses (uneven, as pFedVEM: the groups differ
    in size), or equally. Its test images are divided equally, so that no image is two clients'; with `test: all` every
    client is tested on all test images of its subclasses, as in pFedVEM.
    """

    clients: int | None = setting(None, "how many; null: as many as a superclass has subclasses", positive, "1 or more")
    balance: Literal["uneven", "equal"] = setting(
        "uneven", "training images of a subclass at its clients; uneven: random sizes, as pFedVEM"
    )
    test: Literal["dealt", "all"] = setting(
        "dealt", "test images of a subclass at its clients; all: each has all of them, as pFedVEM"
    )

    def usual(self, dataset: Dataset) -> int:
        return int(_subclasses(dataset).shape[1])

    def check(self, dataset: Dataset, clients: int) -> None:
        each = _subclasses(dataset).shape[1]
        if clients % each:
            raise ConfigError(
                f"{self.asked(clients)}, but each superclass of {dataset.name!r} has {each} subclasses, one a client; "
                f"ask for a multiple of {each}."
            )
        if self.test == "all" and dataset.is_test is None:
            raise ConfigError(
                "data.partition.test is all, which is about a test part of the dataset's own, but data.split.test cuts "
                "one anew, or there is none; leave one of them out."
            )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        rng, owner = keys.numpy_generator(seed, "superclass"), nobody(dataset)
        fine, parts = _fine(dataset), parts_of(dataset, pool)
        subclasses = _subclasses(dataset)
        each = subclasses.shape[1]
        groups = clients // each
        sizes = np.bincount(fine[parts[0]], minlength=subclasses.max() + 1)[subclasses]
        if sizes.min() < groups:
            most = f"ask for at most {sizes.min() * each} clients" if sizes.min() else "every subclass needs some"
            raise DataError(
                f"a subclass of {dataset.name!r} has {sizes.min()} images to train {groups} clients on; {most}."
            )
        held: dict[int, list[Indices]] = {client: [] for client in range(clients)}
        uneven = _cut(int(sizes.min()), groups, rng)
        # place[g, s, k]: which client of group g holds subclass k of superclass s
        place = rng.permuted(np.broadcast_to(np.arange(each), (groups, *subclasses.shape)), axis=2)
        for (superclass, k), subclass in np.ndenumerate(subclasses):
            held_by = np.arange(groups) * each + place[:, superclass, k]
            for number, part in enumerate(parts):
                own = rng.permutation(part[fine[part] == subclass])
                if number and self.test == "all":
                    for client in held_by:
                        held[client].append(own)
                    continue
                if number or self.balance == "equal":
                    counts = rng.permutation(whole(np.full(groups, 1 / groups), len(own)))
                else:
                    counts = at_least_one(whole(uneven, len(own)))
                owner[own] = np.repeat(held_by, counts)
        dealt = numbered(dataset, owner, clients)
        return [
            share._replace(indices=np.sort(np.concatenate([share.indices, *held[client]])))
            for client, share in enumerate(dealt)
        ]


def _cut(n: int, pieces: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Shares of a row of n things that is cut at distinct random places."""
    cuts = np.sort(rng.choice(np.arange(1, n), pieces - 1, replace=False))
    return np.divide(np.diff(cuts, prepend=0, append=n), n)


def _fine(dataset: Dataset) -> Indices:
    """The subclass of every image."""
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
    """Every client has one domain, and of that only some of each class (Fed-CO2's both skews).

    Each client's share of its domain is divided, class by class, into `parts` in shares from a Dirichlet distribution,
    drawn anew until every part has `least` images of the class, and the client keeps one part. The test images, the
    dataset's own or a share that is set aside first, are cut to the class ratio of the images that are kept, as many as
    can be. The rest is left out.
    """

    everything: ClassVar[bool] = False

    clients: int | None = setting(
        None, "how many, a multiple of the domains; null: one a domain", positive, "1 or more"
    )
    alpha: float = setting(0.3, "concentration of the shares of a class", steep, "0.001 to 1000000")
    parts: int = setting(
        3, "into which a domain is divided; Fed-CO2: digits 3, Office 2, DomainNet 5", positive, "1 or more"
    )
    keep: int = setting(0, "which of them, counted from 0", lambda v: v >= 0, "0 or more")
    least: int = setting(2, "images of every class in every part", lambda v: v >= 0, "0 or more")
    images: int | None = setting(
        None,
        "how many training images of a client are divided, drawn at random; null: all; Fed-CO2's code: 2231 of digits",
        positive,
        "1 or more",
    )

    def check(self, dataset: Dataset, clients: int) -> None:
        domains = len(dataset.domain_names)
        if clients % domains:
            raise ConfigError(
                f"{self.asked(clients)}, but {dataset.name!r} has {domains} domains; "
                f"leave it out for one client a domain, or ask for a multiple of {domains}."
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
        """The training and the test images of a domain."""
        if dataset.is_test is not None:
            train, test = parts_of(dataset, share.indices)
            return train, test
        order = stratified(share.indices, dataset.labels.numpy()[share.indices], rng)
        cut = count(dataset.test_share, len(order), dataset.round_up)
        return np.sort(order[cut:]), np.sort(order[:cut])

    def _counts(self, dataset: Dataset, sizes: Indices, share: Share, rng: np.random.Generator) -> Indices:
        """[classes, parts]: how many images."""
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
    """The largest numbers in the ratio of `wanted` that `sizes` allows, rounded."""
    present = wanted > 0
    scale = min(sizes[present] / wanted[present], default=1.0)
    if not scale:
        name = dataset.class_names[int(np.flatnonzero(present & (sizes == 0))[0])]
        raise DataError(
            f"client {share.client!r} has training but no test images of class {name!r}, so that its test part cannot "
            "have their class ratio; ask for fewer clients, or cut the test part anew by data.split.test."
        )
    nearest: Indices = np.floor(scale * wanted + 0.5).astype(np.int64)
    return np.minimum(nearest, sizes)


def _take(
    dataset: Dataset, part: Indices, counts: Indices, rng: np.random.Generator, start: Indices | int = 0
) -> Indices:
    """So many images of each class, in a random order, from place `start` on."""
    labels, starts = dataset.labels.numpy()[part], np.broadcast_to(start, counts.shape)
    each = zip(starts, starts + counts, strict=True)
    taken = [rng.permutation(part[labels == label])[first:last] for label, (first, last) in enumerate(each)]
    return np.concatenate([part[:0], *taken])
