"""Pixels to floats, names that are refused, and datasets by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedprism.config import DataConfig
from fedprism.data import DATASETS, Dataset, check_names, load, normalise
from fedprism.errors import ConfigError, DataError


def test_normalise_to_the_ranges_that_are_promised() -> None:
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    half, none = normalise(x, "half"), normalise(x, "none")
    assert half.dtype == none.dtype == torch.float32
    assert half.shape == none.shape == x.shape
    assert (half.min(), half.max()) == (-1, 1)
    assert (none.min(), none.max()) == (0, 1)
    torch.testing.assert_close(half, none * 2 - 1)


def test_normalise_changes_nothing_in_place() -> None:
    x = torch.full((1, 1, 2, 2), 200.0)
    normalise(x, "half")
    assert (x == 200).all()


def test_normalise_keeps_the_memory_format() -> None:
    x = torch.zeros(2, 3, 4, 4, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    assert normalise(x, "half").is_contiguous(memory_format=torch.channels_last)


def test_normalise_refuses_an_unknown_way() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'half'"):
        normalise(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), "hlaf")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("a/b", "'/'"),
        ("a\\b", "holds"),
        ("..", "dot"),
        ("a..b", "'..'"),
        (".hidden", "dot"),
        ("a\nb", "control"),
        ("a\x00", "control"),
        ("a\u202eb", "invisible"),
        (" a", "space"),
        ("x" * 101, "101 characters"),
    ],
)
def test_bad_names_are_refused(name: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        check_names("client", ["good", name])


def test_names_that_differ_only_by_case_or_spelling_of_an_accent_are_refused() -> None:
    with pytest.raises(DataError, match="'site' and 'SITE' differ only by case"):
        check_names("client", ["site", "other", "SITE"])
    with pytest.raises(DataError, match="differ"):
        check_names("client", ["caf\u00e9", "cafe\u0301"])
    with pytest.raises(DataError, match="'site' is given twice"):
        check_names("client", ["site", "site"])


def test_good_names_pass() -> None:
    check_names("client", ["plain", "plain-1", "Zürich 2", "x" * 100, "a.b", "病院"])


def test_every_dataset_has_a_line_for_the_list() -> None:
    assert set(DATASETS) >= {"digits-skew", "folder"}
    for name, loader in DATASETS.items():
        line = (loader.__doc__ or "").splitlines()[0]
        assert 20 < len(line) < 120, name


def test_unknown_datasets_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'digits-skew'"):
        load(DataConfig(name="digit-skew"), 0)
    with pytest.raises(DataError, match="write 'digits-skew'"):
        load(DataConfig(name="digits-skew:x"), 0)
    with pytest.raises(DataError, match="from_arrays"):
        load(DataConfig(name="arrays:mine"), 0)


def test_a_dataset_checks_its_arrays() -> None:
    good = Dataset(
        name="tiny",
        images=torch.zeros(4, 1, 2, 2, dtype=torch.uint8),
        labels=torch.tensor([0, 1, 0, 1]),
        domains=torch.tensor([0, 0, 0, 0]),
        domain_names=("only",),
        class_names=("a", "b"),
        is_test=None,
        test_share=0.5,
    )
    assert len(good) == 4
    for change, why in (
        ({"images": torch.zeros(4, 1, 2, 2)}, "uint8"),
        ({"images": torch.zeros(4, 2, 2, dtype=torch.uint8)}, "channels"),
        ({"labels": torch.tensor([0, 1, 0, 2])}, "labels must lie between 0 and 1"),
        ({"labels": torch.tensor([0, 1, 0, -1])}, "labels must lie between 0 and 1"),
        ({"labels": torch.tensor([0, 1])}, "labels are"),
        ({"domains": torch.tensor([0, 0, 0, 1])}, "domains must lie"),
        ({"is_test": torch.tensor([True])}, "is_test"),
    ):
        with pytest.raises(DataError, match=why):
            dataclasses.replace(good, **change)  # type: ignore[arg-type]
