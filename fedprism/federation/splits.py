"""Train, validation and test parts: stratified by class as far as whole images allow, and fixed by the seed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedprism.errors import ConfigError

Indices = NDArray[np.int64]


def stratified(indices: Indices, labels: Indices, rng: np.random.Generator) -> Indices:
    """`indices` in a random order of which every stretch holds the classes in about their overall shares.

    `labels` are those of `indices`. Each class is shuffled and spread evenly over [0, 1) from a random start.
    """
    place = np.empty(len(indices))
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        place[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return indices[np.argsort(place, kind="stable")]


def count(share: float, n: int) -> int:
    """How many images a share of n is.

    >>> count(0.6, 359), count(0.1, 359), count(0.5, 3)
    (215, 36, 2)
    """
    return int(share * n + 0.5)


def check_shares(validation: float, test: float) -> None:
    """Refuse shares that leave nothing to train on."""
    if validation + test >= 1:
        raise ConfigError(
            f"data.split: validation {validation:g} and test {test:g} leave nothing to train on; "
            "expected a sum below 1."
        )


class Parts(NamedTuple):
    """Where a client's images go."""

    train: Indices
    validation: Indices
    test: Indices


def split(
    indices: Indices,
    labels: Indices,
    *,
    validation: float,
    test: float,
    own_test: NDArray[np.bool_] | None,
    rng: np.random.Generator,
) -> Parts:
    """Divide a client's images; shares are of all of them or, with a test part of its own, of the rest.

    `labels` and `own_test` are those of `indices`. The test part is drawn first, so that it does not depend on the
    other shares.
    """
    if own_test is not None:
        held = indices[own_test]
        indices, labels = indices[~own_test], labels[~own_test]
    n = len(indices)
    order = stratified(indices, labels, rng)
    if own_test is None:
        held, order = np.split(order, [count(test, n)])
    validated, trained = np.split(order, [count(validation, n)])
    return Parts(trained, validated, held)
