"""Train, validation and test splits: stratified by class and fixed by the seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedprism.config import SplitConfig
from fedprism.errors import ConfigError

Indices = NDArray[np.int64]


def stratified(indices: Indices, labels: Indices, rng: np.random.Generator) -> Indices:
    """Return `indices` in a random order in which each slice has about the overall class shares.

    `labels` are the labels of `indices`. Each class is shuffled and spread evenly over [0, 1) from a random start.
    """
    position = np.empty(len(indices))
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        position[members] = (np.arange(len(members)) + rng.random()) / len(members)
    return indices[np.argsort(position, kind="stable")]


def count(share: float, n: int, up: bool = False) -> int:
    """The number of images in a share of n, rounded to the nearest or `up`.

    >>> count(0.6, 359), count(0.1, 359), count(0.5, 3), count(0.2, 157, up=True), count(0.2, 295, up=True)
    (215, 36, 2, 32, 59)
    """
    return math.ceil(round(share * n, 6)) if up else int(share * n + 0.5)


def check_shares(validation: float, test: float) -> None:
    """Refuse shares that leave no training images."""
    if validation + test >= 1:
        raise ConfigError(
            f"data.split: validation {validation:g} and test {test:g} leave nothing to train on; "
            "expected a sum below 1."
        )


def check_split(config: SplitConfig) -> None:
    """Refuse shares that contradict each other."""
    if config.rule == "shares":
        if config.train is not None:
            raise ConfigError(
                f"data.split.train is {config.train:g}, which is for data.split.rule: smallest; use data.fraction."
            )
        check_shares(config.validation, config.test or 0.0)
    elif (config.train or 0.0) + config.validation > 1 or config.validation == 1:
        raise ConfigError(
            f"data.split: train {config.train or 0:g} and validation {config.validation:g} of the smallest client's "
            "images overlap; expected a sum of at most 1, and something to train on."
        )


class SplitIndices(NamedTuple):
    """The indices of a client's images per split."""

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
    round_up: bool = False,
) -> SplitIndices:
    """Split a client's images; shares are of all of them or, with a given test split, of the rest.

    `labels` and `own_test` belong to `indices`. The test split is drawn first, so that it does not depend on the
    other shares.
    """
    if own_test is not None:
        tested = indices[own_test]
        indices, labels = indices[~own_test], labels[~own_test]
    n = len(indices)
    order = stratified(indices, labels, rng)
    if own_test is None:
        tested, order = np.split(order, [count(test, n, round_up)])
    validated, trained = np.split(order, [count(validation, n)])
    return SplitIndices(trained, validated, tested)


def as_the_smallest(splits: Mapping[str, SplitIndices], config: SplitConfig) -> dict[str, SplitIndices]:
    """FedBN's rule: with m training images at the smallest client, each client trains on its first `train` * m images
    and validates on its last `validation` * m; those between are left out. Shares are rounded down."""
    smallest = min(len(own.train) for own in splits.values())
    validated = int(config.validation * smallest + 1e-9)
    trained = smallest - validated if config.train is None else int(config.train * smallest + 1e-9)
    return {
        client: SplitIndices(own.train[:trained], own.train[len(own.train) - validated :], own.test)
        for client, own in splits.items()
    }
