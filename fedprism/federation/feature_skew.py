"""Partitions by what images look like: domains, subclasses or noise; and equal shares, to compare them with.

>>> from fedprism.federation import federation
>>> federation("digits-skew", partition={"name": "both", "parts": 2, "alpha": 2.0})
Federation 'digits-skew', seed 0: 5 clients, 10 classes, images 3x16x16
  plain     train 67, validation 22, test 134
  tinted    train 58, validation 19, test 115
  textured  train 61, validation 20, test 122
  blurred   train 48, validation 16, test 97
  rotated   train 54, validation 18, test 108
  left out: 838
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
from fedprism.federation.splits import Indices


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
    in size), or equally. Its test images are divided equally. (pFedVEM tests every client on all test images of its
    subclasses; here no image is two clients'.)
    """

    clients: int | None = setting(None, "how many; null: as many as a superclass has subclasses", positive, "1 or more")
    balance: Literal["uneven", "equal"] = setting(
        "uneven", "training images of a subclass at its clients; uneven: random sizes, as pFedVEM"
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

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        rng, owner = keys.numpy_generator(seed, "superclass"), nobody(dataset)
        fine, parts = _fine(dataset), parts_of(dataset, pool)
        subclasses = _subclasses(dataset)
        each = subclasses.shape[1]
        groups = clients // each
        sizes = np.bincount(fine[parts[0]], minlength=subclasses.max() + 1)[subclasses]
        if sizes.min() < groups:
            raise DataError(
                f"a subclass of {dataset.name!r} has {sizes.min()} images to train {groups} clients on; "
                f"ask for at most {sizes.min() * each} clients."
            )
        uneven = _cut(int(sizes.min()), groups, rng)
        # place[g, s, k]: which client of group g holds subclass k of superclass s
        place = rng.permuted(np.broadcast_to(np.arange(each), (groups, *subclasses.shape)), axis=2)
        for (superclass, k), subclass in np.ndenumerate(subclasses):
            held_by = np.arange(groups) * each + place[:, superclass, k]
            for number, part in enumerate(parts):
                own = rng.permutation(part[fine[part] == subclass])
                if number or self.balance == "equal":
                    counts = rng.permutation(whole(np.full(groups, 1 / groups), len(own)))
                else:
                    counts = at_least_one(whole(uneven, len(own)))
                owner[own] = np.repeat(held_by, counts)
        return numbered(dataset, owner, clients)


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
    drawn anew until every part has `least` images of the class, and the client keeps one part. A test part of the
    dataset's own is cut to the class ratio of the images that are kept, as large as it can be. The rest is left out.
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
        train, *test = parts_of(dataset, share.indices)
        counts = self._counts(dataset, class_sizes(dataset, train), share, rng)
        taken = [_take(dataset, train, counts, rng)]
        for part in test:
            taken.append(_take(dataset, part, _in_ratio(dataset, counts, class_sizes(dataset, part), share), rng))
        return share._replace(indices=np.sort(np.concatenate(taken)))

    def _counts(self, dataset: Dataset, sizes: Indices, share: Share, rng: np.random.Generator) -> Indices:
        """How many images of each class are in the part that is kept."""
        kept = np.zeros(len(sizes), dtype=np.int64)
        for label, size in enumerate(sizes):
            counts = whole(rng.dirichlet(np.full(self.parts, self.alpha), TRIES), np.full(TRIES, size))
            good = np.flatnonzero(counts.min(axis=1) >= self.least)
            if not len(good):
                name = dataset.class_names[label]
                raise DataError(
                    f"client {share.client!r} has {size} images of class {name!r}, of which {TRIES} draws with alpha "
                    f"{self.alpha:g} never left {self.least} in each of {self.parts} parts. Lower "
                    "data.partition.least, raise data.partition.alpha, or ask for fewer clients or parts."
                )
            kept[label] = counts[good[0], self.keep]
        return kept


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


def _take(dataset: Dataset, part: Indices, counts: Indices, rng: np.random.Generator) -> NDArray[np.int64]:
    """So many random images of each class."""
    labels = dataset.labels.numpy()[part]
    taken = [rng.permutation(part[labels == label])[:n] for label, n in enumerate(counts)]
    return np.concatenate([part[:0], *taken])
