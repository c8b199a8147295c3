"""Federations by name: who is dealt what, and how it is split."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedprism import config as configuration
from fedprism import keys
from fedprism.config import DataConfig, Named, SplitConfig
from fedprism.data import load
from fedprism.errors import ConfigError, DataError
from fedprism.federation import (
    PARTITIONS,
    ClientData,
    Federation,
    Split,
    build_federation,
    contact_sheet,
    make_federation,
)
from fedprism.federation.sheet import HEAD
from fedprism.federation.splits import count, split, stratified

STYLES = ("plain", "tinted", "textured", "blurred", "rotated")
PARTS = ("train", "validation", "test")


@cache
def digits(seed: int = 0, clients: int = 5, public: int = 0, samples: int | None = None) -> Federation:
    return make_federation("digits-skew", clients=clients, seed=seed, public=public, samples=samples)


def sizes(made: Federation) -> dict[str, tuple[int, int, int]]:
    return {c.name: (len(c.train), len(c.validation), len(c.test)) for c in made.clients.values()}


def bag(*parts: Split) -> Counter[tuple[bytes, int]]:
    """Images with their labels, as things that can be compared."""
    return Counter((x.numpy().tobytes(), int(y)) for part in parts for x, y in zip(part.x, part.y, strict=True))


def every(made: Federation) -> list[Split]:
    return [client.split(part) for client in made.clients.values() for part in PARTS]


def same(a: Federation, b: Federation) -> bool:
    return a.names == b.names and all(
        torch.equal(p.x, q.x) and torch.equal(p.y, q.y) for p, q in zip(every(a), every(b), strict=True)
    )


def folder_of(root: Path, clients: dict[str, int], parts: tuple[str, ...] = ("",)) -> Path:
    """`clients` names how many images of each of two classes there are, in each of `parts`."""
    for c, (client, n) in enumerate(clients.items()):
        for p, part in enumerate(parts):
            for k, label in enumerate(("cat", "dog")):
                path = root / client / part / label
                path.mkdir(parents=True)
                for i in range(n):
                    Image.new("RGB", (8, 8), (60 * c + 20 * p + k, i, 0)).save(path / f"{i:03d}.png")
    return root


# --- the built-in federation -----------------------------------------------------------------------------------------


def test_five_clients_with_about_108_training_images() -> None:
    made = digits()
    assert made.names == STYLES
    assert [client.domain for client in made.clients.values()] == list(STYLES)
    assert made.classes == 10
    assert made.shape == (3, 16, 16)
    assert made.left_out == 0
    assert len(made.public) == 0
    for train, validation, test in sizes(made).values():
        assert (train, validation) == (108, 36)
        assert test in (215, 216)


@pytest.mark.parametrize(("clients", "public"), [(5, 0), (7, 52), (25, 0)])
def test_parts_are_disjoint_and_complete(clients: int, public: int) -> None:
    made = digits(0, clients, public)
    dataset = load(DataConfig(), 0)
    whole = bag(Split(dataset.images, dataset.labels))
    assert set(whole.values()) == {1}
    assert bag(*every(made), made.public) == whole
    assert made.left_out == 0
    assert len(made.public) == public


def test_parts_hold_the_classes_in_their_shares() -> None:
    for client in digits().clients.values():
        overall = sum(torch.bincount(client.split(part).y, minlength=10) for part in PARTS)
        for part in PARTS:
            own = client.split(part)
            counts = torch.bincount(own.y, minlength=10)
            expected = overall * len(own) / sum(len(client.split(p)) for p in PARTS)
            assert (counts - expected).abs().max() < 2, (client.name, part)


def test_the_seed_fixes_everything_and_leaves_global_generators_alone() -> None:
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index]
    again = make_federation("digits-skew", clients=5, seed=0)
    assert same(again, digits())
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()  # type: ignore[index]
    assert not same(digits(1), digits(0))


def test_the_test_part_does_not_depend_on_validation_or_samples() -> None:
    base = digits()
    for changed in (
        make_federation("digits-skew", split={"validation": 0.3}),
        digits(0, 5, 0, 50),
        make_federation("digits-skew", clients=2),
    ):
        for name, client in changed.clients.items():
            assert torch.equal(client.test.x, base.clients[name].test.x)


def test_explicit_shares() -> None:
    made = make_federation("digits-skew", clients=2, split={"validation": 0.2, "test": 0.5})
    assert sizes(made) == {"plain": (108, 72, 180), "tinted": (108, 72, 180)}
    none = make_federation("digits-skew", clients=1, split={"validation": 0})
    assert sizes(none) == {"plain": (144, 0, 216)}


def test_fewer_clients_are_the_first_styles_and_the_rest_is_left_out() -> None:
    made = digits(0, 3)
    assert made.names == STYLES[:3]
    assert made.left_out == 1797 - sum(sum(s) for s in sizes(made).values()) == 359 + 359
    assert all(torch.equal(made.clients[n].train.x, digits().clients[n].train.x) for n in made.names)


def test_more_clients_share_styles_in_equal_parts() -> None:
    made = digits(0, 7)
    assert made.names == ("plain-1", "tinted-1", "textured-1", "blurred-1", "rotated-1", "plain-2", "tinted-2")
    assert [client.domain for client in made.clients.values()] == [*STYLES, "plain", "tinted"]
    totals = {name: sum(parts) for name, parts in sizes(made).items()}
    assert totals["plain-1"] == totals["plain-2"] == 180
    assert totals["textured-1"] == 359


def test_too_many_clients_are_refused_with_the_largest_number_that_works() -> None:
    with pytest.raises(DataError, match=r"client 'plain-1' is left with 18 training .* At most 25 clients"):
        make_federation("digits-skew", clients=26)
    with pytest.raises(DataError, match="At most 25 clients"):
        make_federation("digits-skew", clients=3000)
    assert min(train for train, _, _ in sizes(digits(0, 25)).values()) >= 20
    with pytest.raises(DataError, match=r"change data\.split"):
        make_federation("digits-skew", clients=1, split={"validation": 0, "test": 0.99})


def test_samples_cut_the_training_part_only() -> None:
    made = digits(0, 5, 0, 50)
    for name, client in made.clients.items():
        full = digits().clients[name]
        assert len(client.train) == 50
        assert bag(client.train) <= bag(full.train)
        assert torch.equal(client.validation.x, full.validation.x)
        assert client.class_counts().min() >= 3
    assert made.left_out == 5 * 58


def test_more_samples_than_there_are_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"data\.samples is 109, but client 'plain' has 108 training images"):
        make_federation("digits-skew", samples=109)
    with pytest.raises(DataError, match="client 'plain' has 1 training"):
        make_federation("digits-skew", samples=1)


def test_public_images_are_balanced_and_nobodys() -> None:
    made = digits(0, 5, 52)
    dataset = load(DataConfig(), 0)
    number = {x.numpy().tobytes(): int(d) for x, d in zip(dataset.images, dataset.domains, strict=True)}
    assert Counter(number[x.numpy().tobytes()] for x in made.public.x) == {0: 11, 1: 11, 2: 10, 3: 10, 4: 10}
    assert torch.bincount(made.public.y, minlength=10).min() >= 2
    assert not bag(made.public) & bag(*every(made))
    with pytest.raises(DataError, match=r"data\.public is 1800, which takes 360 images of domain 'textured'"):
        make_federation("digits-skew", public=1800)


def test_images_stay_uint8_and_labels_int64() -> None:
    for part in every(digits()):
        assert part.x.dtype == torch.uint8
        assert part.y.dtype == torch.int64


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"image_sise": 32}, "Did you mean 'image_size'"),
        ({"partition": "domian"}, "Did you mean 'domain'"),
        ({"partition": {"name": "domain", "client": 3}}, "Did you mean 'clients'"),
        ({"clients": 0}, "expected 1 or more"),
        ({"clients": "five"}, "is not a whole number"),
        ({"split": {"validation": 0.5, "test": 0.5}}, "leave nothing to train on"),
        ({"split": {"validation": 0.4}}, "leave nothing to train on"),
        ({"split": {"test": 1.5}}, "expected 0 to 1"),
        ({"samples": 0}, "expected 1 or more"),
        ({"public": -1}, "expected 0 or more"),
        ({"clients": 3, "partition": {"name": "domain", "clients": 4}}, "give one of them"),
        ({"partition": 3}, "neither a name"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_federation("digits-skew", **settings)


def test_no_test_images_are_refused() -> None:
    with pytest.raises(DataError, match=r"'plain' is left with .* 0 test images"):
        make_federation("digits-skew", split={"test": 0})


def test_partition_may_be_given_in_any_form() -> None:
    for partition in ("domain", {"name": "domain"}, {"name": "domain", "clients": 5}, Named("domain", {"clients": 5})):
        assert same(make_federation("digits-skew", partition=partition), digits())
    assert same(make_federation(), digits())


def test_the_federation_can_be_made_again_from_its_configuration() -> None:
    made = make_federation("digits-skew", partition="domain", samples=60, image_size=20, seed=4)
    assert made.data.partition == Named("domain", {"clients": 5, "of": None, "order": "turns"})
    text = configuration.plain(made.data)
    again = build_federation(configuration.structure(text, DataConfig), made.seed)
    assert same(made, again)
    assert again.data == made.data


def test_every_partition_has_a_line_for_the_list() -> None:
    for name, partition in PARTITIONS.items():
        assert 20 < len((partition.__doc__ or "").splitlines()[0]) < 120, name


def test_repr_is_readable() -> None:
    text = repr(digits(0, 7, 52))
    assert "7 clients, 10 classes, images 3x16x16" in text
    assert "textured-1  train 105, validation 35, test 209 (textured)" in text
    assert "public: 52" in text
    assert "left out: 718" in repr(digits(0, 3))
    assert "and 5 more" in repr(digits(0, 25))


# --- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_with_the_default_number_of_clients(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a": 10, "b": 20, "c": 5})
    made = build_federation(DataConfig(name=f"folder:{tmp_path}", image_size=8), 0)
    assert sizes(made) == {"a": (14, 2, 4), "b": (28, 4, 8), "c": (7, 1, 2)}
    assert made.data.partition.settings["clients"] == 3
    assert same(build_federation(made.data, 0), made)
    assert same(make_federation(f"folder:{tmp_path}", image_size=8), made)
    assert same(make_federation(f"folder:{tmp_path}", clients=3, image_size=8), made)


def test_a_folder_with_a_multiple_of_clients_or_a_number_that_does_not_fit(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a": 10, "b": 20, "c": 10})
    made = make_federation(f"folder:{tmp_path}", clients=6, image_size=8)
    assert made.names == ("a-1", "b-1", "c-1", "a-2", "b-2", "c-2")
    assert [sum(s) for s in sizes(made).values()] == [10, 20, 10] * 2
    for wrong in (2, 4, 7):
        with pytest.raises(ConfigError, match=f"clients is {wrong}, but .* has 3 sites; .* multiple of 3"):
            make_federation(f"folder:{tmp_path}", clients=wrong, image_size=8)


@pytest.mark.parametrize("clients", [2, 4])
def test_a_given_test_part_is_used(tmp_path: Path, clients: int) -> None:
    """Validation is then a share of the rest."""
    folder_of(tmp_path, {"a": 20, "b": 20}, ("train", "test"))
    made = make_federation(f"folder:{tmp_path}", clients=clients, image_size=8)
    each = 2 // (clients // 2)
    for c, client in enumerate(made.clients.values()):
        assert (len(client.train), len(client.validation), len(client.test)) == (18 * each, 2 * each, 20 * each)
        assert set(client.test.x[:, 0, 0, 0].tolist()) == {60 * (c % 2) + 20, 60 * (c % 2) + 21}
        assert set(client.train.x[:, 0, 0, 0].tolist()) == {60 * (c % 2), 60 * (c % 2) + 1}
    assert sum(bag(*every(made)).values()) == len(bag(*every(made))) == 160


def test_an_explicit_share_cuts_a_given_test_part_anew(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a": 20, "b": 20}, ("train", "test"))
    made = make_federation(f"folder:{tmp_path}", image_size=8, split={"test": 0.25})
    assert sizes(made) == {"a": (52, 8, 20), "b": (52, 8, 20)}
    assert len(set(made.clients["a"].test.x[:, 0, 0, 0].tolist())) == 4


def test_public_images_never_come_from_a_given_test_part(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a": 10, "b": 10}, ("train", "test"))
    made = make_federation(f"folder:{tmp_path}", image_size=8, public=10)
    assert sorted(set(made.public.x[:, 0, 0, 0].tolist())) == [0, 1, 60, 61]
    assert all(len(client.test) == 20 for client in made.clients.values())


def test_a_small_site_is_refused_by_name(tmp_path: Path) -> None:
    folder_of(tmp_path, {"large": 20, "tiny": 1})
    with pytest.raises(DataError, match="client 'tiny' is left with 2 training and 0 test images; expected at least 2"):
        make_federation(f"folder:{tmp_path}", image_size=8)


# --- splitting -------------------------------------------------------------------------------------------------------


def test_split_is_disjoint_complete_and_of_exact_size() -> None:
    labels = np.random.default_rng(0).integers(0, 7, 101)
    indices = np.arange(1000, 1101)
    parts = split(indices, labels, validation=0.15, test=0.3, own_test=None, rng=keys.numpy_generator("test"))
    assert [len(part) for part in parts] == [101 - 15 - 30, 15, 30]
    assert sorted(np.concatenate(parts)) == list(indices)


def test_every_stretch_of_a_stratified_order_is_balanced() -> None:
    labels = np.repeat(np.arange(4), [100, 50, 25, 25])
    order = stratified(np.arange(200), labels, keys.numpy_generator("test"))
    for start in range(0, 200, 40):
        counts = np.bincount(labels[order[start : start + 40]], minlength=4)
        assert np.abs(counts - [20, 10, 5, 5]).max() <= 1


def test_a_rare_class_is_not_always_on_the_same_side() -> None:
    labels = np.array([0] * 9 + [1])
    where = {
        int(np.flatnonzero(stratified(np.arange(10), labels, keys.numpy_generator("rare", i)) == 9)[0])
        for i in range(40)
    }
    assert len(where) > 5


def test_counts_are_rounded_to_the_nearest() -> None:
    assert [count(0.1, n) for n in (0, 4, 5, 14, 15)] == [0, 0, 1, 1, 2]


# --- the plain things ------------------------------------------------------------------------------------------------


def test_client_data_by_part_and_device() -> None:
    client = digits().clients["plain"]
    assert client.split("train") is client.train
    with pytest.raises(DataError, match="Did you mean 'train'"):
        client.split("trian")
    moved = client.to("meta")
    assert moved.train.x.device.type == moved.test.y.device.type == "meta"
    assert (moved.name, moved.domain, moved.classes) == ("plain", "plain", 10)
    counts = client.class_counts()
    assert counts.dtype == torch.int64
    assert counts.tolist() == [int((client.train.y == label).sum()) for label in range(10)]


def test_class_counts_include_classes_that_are_missing() -> None:
    part = Split(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.tensor([1, 1, 0]))
    assert ClientData("a", "a", part, part, part, 4).class_counts().tolist() == [1, 2, 0, 0]


def test_a_federation_checks_its_clients() -> None:
    good = digits()
    plain = good.clients["plain"]
    for clients, why in (
        ({}, "no clients"),
        ({"tinted": plain}, "calls itself 'plain'"),
        ({"../x": dataclasses.replace(plain, name="../x")}, "begins with a dot"),
        ({"a/b": dataclasses.replace(plain, name="a/b")}, "'/'"),
        ({"plain": plain, "PLAIN": dataclasses.replace(plain, name="PLAIN")}, "differ only by case"),
        ({"plain": dataclasses.replace(plain, classes=9)}, "knows 9 classes"),
        ({"plain": dataclasses.replace(plain, train=Split(plain.train.x[:, :1], plain.train.y))}, "train: "),
        ({"plain": dataclasses.replace(plain, train=Split(plain.train.x, plain.train.y[:5]))}, "train: 5 labels"),
        (
            {"plain": dataclasses.replace(plain, test=Split(plain.test.x, plain.test.y + 9))},
            "labels range from 9 to 18",
        ),
        ({"plain": dataclasses.replace(plain, test=Split(plain.test.x[:0], plain.test.y[:0]))}, "0 test images"),
    ):
        with pytest.raises(DataError, match=why):
            dataclasses.replace(good, clients=clients)


def test_a_contact_sheet_has_a_row_a_client() -> None:
    made = digits()
    sheet = contact_sheet(made, per_client=4)
    assert sheet.mode == "RGB"
    assert sheet.height == HEAD + 5 * (48 + 4) + 4
    pixels = np.asarray(sheet)[HEAD:]
    first = made.clients["plain"].train
    where = int((first.y == 0).nonzero()[0])
    tile = pixels[4:52, -4 * 52 : -4 * 52 + 48][::3, ::3]
    assert (tile == first.x[where].permute(1, 2, 0).numpy()).all()


def test_a_contact_sheet_of_any_channels_names_and_few_images() -> None:
    for channels in (1, 2, 3):
        x, y = np.zeros((20, channels, 6, 9), dtype=np.uint8), np.arange(20) % 2
        made = Federation.from_arrays({"病院": (x, y), "b": (x, y)})
        assert contact_sheet(made, per_client=100).width > 100 * 48
    with pytest.raises(Exception, match="expected 1 or more"):
        contact_sheet(digits(), per_client=0)


def test_a_contact_sheet_names_classes_that_all_rows_have_in_common() -> None:
    """As many columns as classes, from 8 to 12; no names above where a row has other classes."""
    x = np.full((60, 1, 16, 16), 255, dtype=np.uint8)
    same = Federation.from_arrays({"a": (x, np.arange(60) % 10), "b": (x[:40], np.arange(40) % 10)})
    named = contact_sheet(same)
    assert named.height == HEAD + 2 * 52 + 4
    assert 10 * 52 < named.width < 11 * 52
    assert all(
        (np.asarray(named)[:HEAD, column - 48 : column] < 128).any() for column in range(named.width - 4, 60, -52)
    )
    other = Federation.from_arrays({"a": (x, np.arange(60) % 10), "b": (x, np.arange(60) % 5)})
    assert contact_sheet(other).height == 2 * 52 + 4
    for classes, columns in ((2, 8), (20, 12)):
        made = Federation.from_arrays({"a": (x, np.arange(60) % classes)})
        assert columns * 52 < contact_sheet(made).width < (columns + 1) * 52


def test_default_split_config_is_the_documented_one() -> None:
    assert SplitConfig() == SplitConfig(validation=0.1, test=None)
