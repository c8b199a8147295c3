"""Federations of a user's own arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedprism import config as configuration
from fedprism.config import DataConfig
from fedprism.errors import ConfigError, DataError
from fedprism.federation import Federation, build_federation


def pair(n: int, classes: int = 2, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """n images, each of a grey level of its own."""
    levels = np.arange(first, first + n, dtype=np.uint8).reshape(n, 1, 1, 1)
    return np.broadcast_to(levels, (n, 3, 6, 5)).copy(), np.arange(n) % classes


def levels(part: Any) -> list[int]:
    return sorted(part.x[:, 0, 0, 0].tolist())


def test_pairs_are_split_by_share() -> None:
    made = Federation.from_arrays({"a": pair(50), "b": pair(20)}, validation=0.1, test=0.2, seed=3)
    a = made.clients["a"]
    assert [len(a.train), len(a.validation), len(a.test)] == [35, 5, 10]
    assert sorted(levels(a.train) + levels(a.validation) + levels(a.test)) == list(range(50))
    assert made.shape == (3, 6, 5)
    assert made.class_names == ("0", "1")
    assert made.seed == 3
    assert a.test.y.bincount().tolist() == [5, 5]
    for level, label in zip(a.train.x[:, 0, 0, 0].tolist(), a.train.y.tolist(), strict=True):
        assert level % 2 == label


def test_the_seed_decides_the_split() -> None:
    one, again, other = (Federation.from_arrays({"a": pair(100)}, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.clients["a"].test.x, again.clients["a"].test.x)
    assert not torch.equal(one.clients["a"].test.x, other.clients["a"].test.x)


def test_parts_that_are_given_are_kept() -> None:
    given = {"train": pair(20), "test": pair(10, first=100)}
    made = Federation.from_arrays({"a": given, "b": {**given, "validation": pair(4, first=50)}})
    a, b = made.clients["a"], made.clients["b"]
    assert levels(a.test) == levels(b.test) == list(range(100, 110))
    assert len(a.train) == 18
    assert sorted(levels(a.train) + levels(a.validation)) == list(range(20))
    assert levels(b.train) == list(range(20))
    assert levels(b.validation) == list(range(50, 54))


def test_tensors_lists_and_grey_images_are_taken() -> None:
    x, y = pair(10)
    made = Federation.from_arrays({"a": (torch.from_numpy(x[:, 0]), y.tolist()), "b": (x[:, 0], y.astype(np.uint8))})
    assert made.shape == (1, 6, 5)
    assert made.clients["b"].train.y.dtype == torch.int64


def test_names_of_classes_and_domains() -> None:
    made = Federation.from_arrays({"a": pair(10), "b": pair(10)}, class_names=("x", "y", "z"), domains={"b": "tinted"})
    assert made.classes == 3
    assert made.clients["a"].class_counts().tolist()[2] == 0
    assert (made.clients["a"].domain, made.clients["b"].domain) == ("a", "tinted")


def test_its_configuration_survives_a_file_and_says_why_it_cannot_be_made_again() -> None:
    made = Federation.from_arrays({"a": pair(10)}, name="mine", normalize="none")
    data = configuration.structure(configuration.plain(made.data), DataConfig)
    assert data == made.data
    assert data.normalize == "none"
    with pytest.raises(DataError, match="'mine' were arrays in a Python program"):
        build_federation(data, 0)


def test_arrays_are_not_shared_with_the_caller() -> None:
    x, y = pair(10)
    made = Federation.from_arrays({"a": (x, y)})
    before = made.clients["a"].train.x.clone()
    x[:] = 255
    assert torch.equal(made.clients["a"].train.x, before)
    given = {"train": pair(10), "validation": pair(5), "test": pair(5)}
    kept = Federation.from_arrays({"a": given})
    given["test"][0][:] = 255
    assert levels(kept.clients["a"].test) == list(range(5))


@pytest.mark.filterwarnings("error")
def test_arrays_that_may_not_be_written_to_are_taken() -> None:
    x, y = pair(10)
    x.flags.writeable = False
    turned = np.asfortranarray(x)
    made = Federation.from_arrays({"a": (x, y), "b": (turned, y), "c": (x[::-1], y[::-1])})
    assert levels(made.clients["a"].train)
    assert made.clients["b"].train.x.is_contiguous()


X, Y = pair(10)


@pytest.mark.parametrize(
    ("clients", "why"),
    [
        ({}, "no clients"),
        ({"a/b": (X, Y)}, "'/'"),
        ({"a": (X, Y), "A": (X, Y)}, "differ only by case"),
        ({"a": (X / 255, Y)}, r"expected uint8.*astype\('uint8'\)"),
        ({"a": (X.transpose(0, 2, 3, 1), Y)}, "channels last"),
        ({"a": (X, Y[:5])}, r"labels \(5,\)"),
        ({"a": (X, Y.reshape(-1, 1))}, "labels"),
        ({"a": (X[0, 0], Y)}, "expected .n, channels"),
        ({"a": (X, Y.astype(float))}, "whole numbers"),
        ({"a": (X, Y - 1)}, "labels range from -1"),
        ({"a": X}, "expected a pair"),
        ({"a": (X, ["cat"] * 10)}, "arrays of numbers"),
        ({"a": (X, np.array(["cat"] * 10))}, "arrays of numbers"),
        ({"a": {"train": (X, Y)}}, "has the splits train; expected train, test"),
        ({"a": {"train": (X, Y), "test": (X, Y), "extra": (X, Y)}}, "has the splits extra, test, train"),
        ({"a": (X, Y), "b": (X[:, :1], Y)}, "client 'b'.*expected as many, uint8 .n, 3, 6, 5"),
        ({"a": (X[:2], Y[:2])}, "client 'a' has 2 training and 0 test"),
    ],
)
def test_what_cannot_be_used_is_refused(clients: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        Federation.from_arrays(clients)


def test_shares_and_labels_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="leave nothing"):
        Federation.from_arrays({"a": (X, Y)}, test=0.9)
    with pytest.raises(ConfigError, match="expected 0 to 1"):
        Federation.from_arrays({"a": (X, Y)}, test=-0.5)
    with pytest.raises(DataError, match="expected 0 to 0"):
        Federation.from_arrays({"a": (X, Y)}, class_names=("only",))
    with pytest.raises(ConfigError, match="Did you mean 'half'"):
        Federation.from_arrays({"a": (X, Y)}, normalize="hlaf")
