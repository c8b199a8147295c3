"""Partitions by label: clients differ in their classes and in the number of images per class.

>>> from fedprism.federation import make_federation
>>> partition = {"name": "pathological", "clients": 10, "classes": 2, "rule": "slots"}
>>> made = make_federation("digits-skew", partition=partition)
>>> {len(client.class_counts().nonzero()) for client in made.clients.values()}
{2}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedprism import keys
from fedprism.config import positive, setting
from fedprism.data import Dataset
from fedprism.errors import ConfigError, DataError
from fedprism.federation.partitions import (
    PARTITIONS,
    Partition,
    Share,
    at_least_one,
    class_sizes,
    no_owner,
    numbered,
    parts_of,
    whole,
)
from fedprism.federation.splits import Indices

TRIES = 1000  # draws of a Dirichlet partition before giving up


def steep(value: float) -> bool:
    """Whether a Dirichlet distribution of this concentration can be sampled; far below, all draws underflow."""
    return 1e-3 <= value <= 1e6


@PARTITIONS.register("pathological")
@dataclass(frozen=True)
class Pathological(Partition):
    """Each client has a fixed number of classes, by groups (FedCP) or by slots (Fed-CO2).

    groups: each class, in order, goes to the first ceil(clients * classes / all classes) clients that still need one,
    so that clients form groups with the same classes. If n is an equal share of a class, each of its clients but the
    last gets a random number of images from max(n / 10, least / all classes) to below n, and the last one the rest.

    slots: all classes have equally many slots (or one more). Each client takes the classes with the most slots left,
    ties broken at random. A class is divided in proportion to numbers from U(0.4, 0.6).

    A dataset's own test split is divided in the same shares.
    """

    clients: int | None = setting(20, "number of clients", positive, "1 or more")
    classes: int = setting(2, "classes per client", positive, "1 or more")
    rule: Literal["groups", "slots"] = setting(
        "groups", "how classes are assigned; groups: as in FedCP; slots: as in Fed-CO2"
    )
    balance: Literal["unbalanced", "equal"] = setting(
        "unbalanced", "shares of a class among its clients; unbalanced: random, by the rule"
    )
    least: int = setting(
        40,
        "with rule groups: bounds the smallest draw of a class; FedCP's value: batch of 10 / test share of 0.25",
        positive,
        "1 or more",
    )

    def check(self, dataset: Dataset, clients: int) -> None:
        classes = len(dataset.class_names)
        if self.classes > classes:
            raise ConfigError(
                f"data.partition.classes is {self.classes}, but {dataset.name!r} has {classes}; ask for no more."
            )
        if clients * self.classes < classes:
            raise ConfigError(
                f"{self.asked(clients)}, which with {self.classes} classes each leaves some of the {classes} of "
                f"{dataset.name!r} to nobody; ask for at least {-(-classes // self.classes)} clients, or for more "
                "data.partition.classes."
            )
        if self.rule == "groups":
            self._check_groups(clients, classes)

    def _check_groups(self, clients: int, classes: int) -> None:
        groups, left = divmod(classes, self.classes)
        if left:
            raise ConfigError(
                f"data.partition.classes is {self.classes}, but groups that share no class need a divisor of the "
                f"{classes} classes; choose another number, or data.partition.rule: slots."
            )
        if _empty_group(clients, groups):
            fewer, more = clients, clients
            while _empty_group(fewer, groups):
                fewer -= 1
            while _empty_group(more, groups):
                more += 1
            raise ConfigError(
                f"{self.asked(clients)}, which fills {groups} groups one after the other and leaves the last without "
                f"clients; ask for {fewer} or {more} clients, or take data.partition.rule: slots."
            )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        rng = keys.numpy_generator(seed, "pathological")
        labels, classes = dataset.labels.numpy(), len(dataset.class_names)
        holders = self._grouped(clients, classes) if self.rule == "groups" else self._slotted(clients, classes, rng)
        parts, sizes, owner = parts_of(dataset, pool), class_sizes(dataset, pool), no_owner(dataset)
        for label, owners in enumerate(holders):
            members = [part[labels[part] == label] for part in parts]
            if len(members[0]) < len(owners):
                advice = "ask for fewer clients, or for fewer data.partition.classes"
                raise DataError(
                    f"class {dataset.class_names[label]!r} of {dataset.name!r} has {len(members[0])} training images "
                    f"for {len(owners)} clients; {advice if len(members[0]) else 'every class needs some'}."
                )
            shares = self._divided(int(sizes[label]), len(owners), classes, rng)
            for own in members:
                owner[rng.permutation(own)] = np.repeat(owners, at_least_one(whole(shares, len(own))))
        return numbered(dataset, owner, clients)

    def _grouped(self, clients: int, classes: int) -> list[Indices]:
        """The clients of each class: group g of clients has group g of classes; all groups but the last are equal."""
        size = -(-clients * self.classes // classes)
        groups = (label // self.classes for label in range(classes))
        return [np.arange(group * size, min((group + 1) * size, clients)) for group in groups]

    def _slotted(self, clients: int, classes: int, rng: np.random.Generator) -> list[Indices]:
        """The clients of each class: each client takes the classes with the most slots left."""
        slots = rng.permutation(np.arange(clients * self.classes, clients * self.classes + classes) // classes)
        holders: list[list[int]] = [[] for _ in range(classes)]
        for client in range(clients):
            taken = np.lexsort((rng.random(classes), -slots))[: self.classes]
            slots[taken] -= 1
            for label in taken:
                holders[label].append(client)
        return [np.array(owners) for owners in holders]

    def _divided(self, size: int, holders: int, classes: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """The shares of a class of `size` images among its clients."""
        if self.balance == "equal":
            return np.full(holders, 1 / holders)
        if self.rule == "slots":
            return _normal(rng.uniform(0.4, 0.6, holders))
        high = max(1, -(-size // holders) - 1)  # the largest whole number below an equal share
        low = min(high, max(-(-size // (10 * holders)), -(-self.least // classes)))
        counts = rng.integers(low, high, holders - 1, endpoint=True)
        return _normal(np.append(counts, size - counts.sum()))


def _normal(weights: NDArray[Any]) -> NDArray[np.float64]:
    """Scale the weights to the sum 1."""
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def _empty_group(clients: int, groups: int) -> bool:
    """Whether the last group is empty if each takes an equal share of the clients, rounded up."""
    return (groups - 1) * -(-clients // groups) >= clients


@PARTITIONS.register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is divided among all clients in shares from a Dirichlet distribution.

    A smaller `alpha` makes clients differ more. A dataset's own test split is divided in the same shares. The draw is
    repeated until every client has `least` images (of both splits, if the dataset has two).

    capped, as in the code of FedCP and Fed-CO2: clients that have an equal share of all images or more get nothing of
    the next class; the shares of the others come from a Dirichlet distribution among them.
    """

    clients: int | None = setting(20, "number of clients", positive, "1 or more")
    alpha: float = setting(0.1, "concentration of the shares of a class", steep, "0.001 to 1000000")
    form: Literal["plain", "capped"] = setting("plain", "capped: clients with an equal share already get no more")
    least: int | Literal["fedcp"] = setting(
        10,
        "minimum number of images per client and split; fedcp: 40, or half an equal share if that is less",
        lambda v: v == "fedcp" or v > 0,
        "1 or more, or fedcp",
    )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        rng = keys.numpy_generator(seed, "dirichlet")
        parts = parts_of(dataset, pool)
        sizes = np.stack([class_sizes(dataset, part) for part in parts])
        counts = self._counts(sizes, clients, dataset.min_train, rng)
        labels, owner = dataset.labels.numpy(), no_owner(dataset)
        for part, table in zip(parts, counts, strict=True):
            for label, row in enumerate(table):
                owner[rng.permutation(part[labels[part] == label])] = np.repeat(np.arange(clients), row)
        return numbered(dataset, owner, clients)

    def _counts(self, sizes: Indices, clients: int, needed: int, rng: np.random.Generator) -> Indices:
        """Images per part, class and client; `sizes` [parts, classes] are the available images.

        Each client needs at least `needed` training images (of all images, if there is no test split).
        """
        total = sizes.sum(axis=1)
        asked = np.array([self._least(int(n), clients) for n in total])
        least = np.maximum(asked, [needed, *[1] * (len(total) - 1)])
        lower = "lower data.partition.least" if asked[0] >= least[0] else "give less to data.split"
        if (clients * least > total).any():
            raise DataError(
                f"{clients} clients cannot have {_images(least)} each: there are {_images(total)}. "
                f"Ask for fewer clients, or {lower}."
            )
        draw, best = self._plain if self.form == "plain" else self._capped, np.zeros_like(least)
        for _ in range(TRIES):
            counts = draw(sizes, clients, rng)
            fewest = counts.sum(axis=1).min(axis=1)
            if (fewest >= least).all():
                return counts
            best = np.maximum(best, fewest)
        raise DataError(
            f"in {TRIES} draws with alpha {self.alpha:g} there was always one of {clients} clients with fewer than "
            f"{_images(least)}; the best that was seen is {_images(best)}. Raise data.partition.alpha, {lower}, or ask "
            "for fewer clients."
        )

    def _least(self, n: int, clients: int) -> int:
        return min(40, n // (2 * clients)) if self.least == "fedcp" else self.least

    def _plain(self, sizes: Indices, clients: int, rng: np.random.Generator) -> Indices:
        shares = rng.dirichlet(np.full(clients, self.alpha), sizes.shape[1])
        return whole(shares, sizes)

    def _capped(self, sizes: Indices, clients: int, rng: np.random.Generator) -> Indices:
        """Draw among the free clients: that equals drawing for all, dropping the others and scaling up the rest."""
        counts = np.zeros((*sizes.shape, clients), dtype=np.int64)
        totals, cap = np.zeros(clients, dtype=np.int64), sizes.sum() / clients
        for label in range(sizes.shape[1]):
            free = np.flatnonzero(totals < cap)
            if len(free):  # empty once all images are assigned: the last classes may have none
                counts[:, label, free] = whole(rng.dirichlet(np.full(len(free), self.alpha)), sizes[:, label])
            totals += counts[:, label].sum(axis=0)
        return counts


def _images(counts: Indices) -> str:
    """'10 images', or with two parts '10 training and 10 test images'."""
    return f"{counts[0]} images" if len(counts) == 1 else f"{counts[0]} training and {counts[1]} test images"


@PARTITIONS.register("pachinko")
@dataclass(frozen=True)
class Pachinko(Partition):
    """Each client draws its images by superclass, then class, from its own Dirichlet distributions (CIFAR-100).

    Pachinko allocation (Reddi et al. 2020, as in Fed-CO2): an image's superclass is drawn from the client's shares of
    the superclasses, from Dirichlet(alpha); its class from the client's shares of that superclass's classes, from
    Dirichlet(beta); the image at random, without replacement. Empty classes and superclasses leave the draw, and the
    other shares are scaled up. Training and test images are drawn alike and keep their split.
    """

    everything: ClassVar[bool] = False

    clients: int | None = setting(100, "number of clients", positive, "1 or more")
    alpha: float = setting(0.3, "concentration of a client's shares of the superclasses", steep, "0.001 to 1000000")
    beta: float = setting(10.0, "concentration of its shares of a superclass's classes", steep, "0.001 to 1000000")
    each: int | None = setting(
        None, "images per client, test images included; null: an equal share of all", positive, "1 or more"
    )

    def check(self, dataset: Dataset, clients: int) -> None:
        if dataset.coarse is None:
            raise ConfigError(
                f"data.partition is pachinko, which needs a superclass of every class, but {dataset.name!r} has none; "
                "use cifar100, or another partition."
            )

    def shares(self, dataset: Dataset, pool: Indices, clients: int, seed: int) -> list[Share]:
        assert dataset.coarse is not None  # a settled partition
        each = self.each or len(pool) // clients
        if each < 1 or clients * each > len(pool):
            raise DataError(
                f"{clients} clients of {max(each, 1)} images need {clients * max(each, 1)}, but {dataset.name!r} has "
                f"{len(pool)}; ask for fewer clients, or for a smaller data.partition.each."
            )
        rng = keys.numpy_generator(seed, "pachinko")
        pairs = np.stack([dataset.coarse.labels.numpy()[pool], dataset.labels.numpy()[pool]])
        (above, _), cell_of = np.unique(pairs, axis=1, return_inverse=True)
        stock = [rng.permutation(pool[cell_of.ravel() == cell]) for cell in range(len(above))]
        left, owner = np.array([len(cell) for cell in stock]), no_owner(dataset)
        for client in range(clients):
            before = left.copy()
            self._draw(each, left, above, rng)
            for cell in np.flatnonzero(before > left):
                owner[stock[cell][left[cell] : before[cell]]] = client
        return numbered(dataset, owner, clients)

    def _draw(self, wanted: int, left: Indices, above: Indices, rng: np.random.Generator) -> None:
        """Draw `wanted` images, one by one, from what is `left` of each class.

        The shares change only when a class runs out, so draws are independent until then: all are drawn at once, and
        those after the first class runs out are discarded and drawn again.
        """
        shares = self._shares(left, above, rng)
        while wanted:
            drawn = rng.choice(len(left), wanted, p=shares)
            counts = np.bincount(drawn, minlength=len(left))
            out = np.flatnonzero((counts >= left) & (left > 0))
            if len(out):
                ends = [np.flatnonzero(drawn == cell)[left[cell] - 1] for cell in out]
                drawn = drawn[: min(ends) + 1]
                counts = np.bincount(drawn, minlength=len(left))
            left -= counts
            wanted -= len(drawn)
            if wanted and len(out):
                shares = self._without(int(drawn[-1]), shares, left, above, rng)

    def _shares(self, left: Indices, above: Indices, rng: np.random.Generator) -> NDArray[np.float64]:
        """A client's shares of all non-empty classes."""
        shares = np.zeros(len(left))
        free = np.unique(above[left > 0])
        for superclass, share in zip(free, rng.dirichlet(np.full(len(free), self.alpha)), strict=True):
            inside = np.flatnonzero((above == superclass) & (left > 0))
            shares[inside] = share * rng.dirichlet(np.full(len(inside), self.beta))
        return _normal(shares)

    def _without(
        self, cell: int, shares: NDArray[np.float64], left: Indices, above: Indices, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """The shares after a class runs out: its superclass keeps its share while it has other classes."""
        inside = above == above[cell]
        whole_superclass = shares[inside].sum()
        shares[cell] = 0
        rest = shares[inside].sum()
        if rest > 0:
            shares[inside] = shares[inside] / rest * whole_superclass  # this order avoids overflow
        if shares.sum() > 0:
            return _normal(shares)
        return self._shares(left, above, rng)  # the remaining shares underflowed: draw them again
