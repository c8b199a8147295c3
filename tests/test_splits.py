"""SplitIndices of a client's data: FedBN's rule, fractions, rows in common, noise, and a choice of domains."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedprism.config import DataConfig, Named, SplitConfig
from fedprism.data import DATASETS, Dataset
from fedprism.data.base import Level, load
from fedprism.errors import ConfigError, DataError
from fedprism.federation import ClientData, Federation, Split, build, build_federation, make_federation
from fedprism.federation.build import noisy
from fedprism.federation.splits import SplitIndices, as_the_smallest, count


def sizes(made: Federation) -> list[tuple[int, int, int]]:
    return [(len(c.train), len(c.validation), len(c.test)) for c in made.clients.values()]


def test_the_rule_of_fedbn() -> None:
    """Office: 125 images at the smallest client; 62 to train on, 50 to choose the round by, at every client."""
    parts = {"dslr": SplitIndices(np.arange(125), np.empty(0, int), np.arange(3))}
    parts["amazon"] = SplitIndices(np.arange(1000, 1766), np.empty(0, int), np.arange(5))
    made = as_the_smallest(parts, SplitConfig(rule="smallest", train=0.5, validation=0.4))
    assert made["dslr"].train.tolist() == list(range(62))
    assert made["dslr"].validation.tolist() == list(range(75, 125))
    assert made["amazon"].train.tolist() == list(range(1000, 1062))
    assert made["amazon"].validation.tolist() == list(range(1716, 1766))
    assert len(made["amazon"].test) == 5
    rest = as_the_smallest(parts, SplitConfig(rule="smallest", validation=0.4))
    assert [len(held.train) for held in rest.values()] == [75, 75]
    none = as_the_smallest(parts, SplitConfig(rule="smallest", train=0.05, validation=0.0))
    assert [(len(held.train), len(held.validation)) for held in none.values()] == [(6, 0), (6, 0)]


def test_shares_that_are_whole_numbers_up_to_float_error() -> None:
    """0.07 * 100 is 7.000000000000001 in floating point, and 0.29 * 100 is 28.999999999999996."""
    assert count(0.07, 100, up=True) == 7
    parts = {"a": SplitIndices(np.arange(100), np.empty(0, int), np.arange(3))}
    made = as_the_smallest(parts, SplitConfig(rule="smallest", train=0.29, validation=0.57))["a"]
    assert (len(made.train), len(made.validation)) == (29, 57)


def test_the_rule_of_fedbn_in_a_federation() -> None:
    made = make_federation("digits-skew", split={"rule": "smallest", "train": 0.5, "validation": 0.4})
    assert {s[:2] for s in sizes(made)} == {(72, 57)}  # of 144 images that are not for the test
    used = sum(map(sum, sizes(made)))
    assert made.left_out == 1797 - used > 0
    for client in made.clients.values():
        assert client.class_counts().min() >= 5  # the first of a stratified order keep the classes' shares


@pytest.mark.parametrize(
    ("split", "why"),
    [
        ({"train": 0.5}, "data.fraction"),
        ({"rule": "smallest", "train": 0.7, "validation": 0.4}, "overlap"),
        ({"rule": "smallest", "validation": 1.0}, "something to train on"),
        ({"rule": "largest"}, "Known: shares, smallest"),
    ],
)
def test_shares_that_do_not_fit_are_refused(split: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_federation("digits-skew", split=split)


def test_a_fraction_of_the_training_images() -> None:
    whole, part = make_federation("digits-skew"), make_federation("digits-skew", fraction=0.25)
    for name, client in part.clients.items():
        full = whole.clients[name]
        assert len(client.train) == 27
        assert torch.equal(client.test.x, full.test.x)
        assert torch.equal(client.validation.x, full.validation.x)
        held = {image.numpy().tobytes() for image in full.train.x}
        assert {image.numpy().tobytes() for image in client.train.x} <= held
        assert client.class_counts().min() >= 1
    assert part.left_out == 5 * 81
    assert sizes(make_federation("digits-skew", fraction=0.5, samples=20))[0][0] == 20
    with pytest.raises(DataError, match="at most that many"):
        make_federation("digits-skew", fraction=0.1, samples=20)
    with pytest.raises(DataError, match="training"):
        make_federation("digits-skew", fraction=0.001)


def test_rows_in_common_are_gathered_when_asked_for() -> None:
    source = torch.arange(40, dtype=torch.uint8).view(10, 1, 2, 2)
    split = Split.of(source, torch.tensor([7, 2, 5]), torch.tensor([1, 0, 1]))
    assert torch.equal(split.x, source[[7, 2, 5]])
    assert torch.equal(split.batch(torch.tensor([2, 0])), source[[5, 7]])
    assert [len(part) for part in split.parts(2)] == [2, 1]
    assert torch.equal(torch.cat(list(split.parts(2))), split.x)
    assert split.kind == (torch.uint8, (1, 2, 2))
    assert split.to("cpu") is split
    source[7] = 99  # nothing was copied
    assert (split.x[0] == 99).all()


def test_a_split_takes_its_own_rows_to_another_process() -> None:
    source = torch.arange(100_000 * 12).to(torch.uint8).view(100_000, 3, 2, 2)
    rows = torch.arange(20) * 4999
    split = Split.of(source, rows, rows % 3)
    written = pickle.dumps(split)
    assert len(written) < 4096
    read = pickle.loads(written)  # noqa: S301 - written above
    assert isinstance(read, Split)
    assert torch.equal(read.x, source[rows])
    assert torch.equal(read.y, split.y)
    assert torch.equal(read.batch(torch.tensor([19])), source[rows[19:]])


def test_a_split_says_how_many_and_of_what_shape() -> None:
    shown = repr(Split.of(torch.zeros(90, 3, 5, 7, dtype=torch.uint8), torch.arange(20), torch.zeros(20).long()))
    assert "20" in shown
    assert "uint8 [3, 5, 7]" in shown
    assert "90" not in shown
    assert "int32 [11]" in repr(Split(torch.zeros(4, 11, dtype=torch.int32), torch.zeros(4).long()))


def test_clients_hold_rows_of_the_dataset_and_no_copies() -> None:
    made = make_federation("digits-skew")
    storages = {client.split(part)._source.data_ptr() for client in made.clients.values() for part in ("train", "test")}
    assert len(storages) == 1


def of_levels(name: str = "a") -> ClientData:
    """A client of 20 images, each of a grey of its own, in every part."""
    levels = (50 + 8 * torch.arange(20)).to(torch.uint8).view(20, 1, 1, 1).expand(20, 3, 8, 8).contiguous()
    part = Split(levels, torch.arange(20) % 2)
    return ClientData(name, name, part, part, part, 2)


def test_noise_in_blocks_is_added_to_the_images_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "NOISY_AT_ONCE", 6)  # 20 images: three whole blocks, and a rest
    client = of_levels()
    for part in ("train", "validation", "test"):
        given, made = client.split(part), noisy(client, 1.0, seed=0).split(part)
        noise = made.x.float() - given.x.float()
        assert float(noise.abs().max()) < 7
        assert float(noise.flatten(1).std(1).min()) > 0.8
        assert len(noise.unique(dim=0)) == 20  # no block has the noise of another
        assert torch.equal(made.y, given.y)


def test_each_client_has_noise_of_its_own() -> None:
    one, other = (noisy(of_levels(name), 5.0, seed=0) for name in ("a", "b"))
    for part in ("train", "validation", "test"):
        assert not torch.equal(one.split(part).x, other.split(part).x)


def test_noise_has_its_deviation_is_clipped_and_keyed() -> None:
    grey = torch.full((400, 3, 8, 8), 128, dtype=torch.uint8)
    part = Split(grey, torch.zeros(400, dtype=torch.int64))
    empty = Split(grey[:0], part.y[:0])
    first = next(iter(make_federation("digits-skew").clients.values()))
    client = replace(first, train=part, validation=empty, test=part)
    made = noisy(client, 10.0, seed=0)
    assert made.train.x.dtype == torch.uint8
    assert made.train.x.float().std().item() == pytest.approx(10, rel=0.02)
    assert made.train.x.float().mean().item() == pytest.approx(128, abs=0.1)
    assert torch.equal(made.train.x, noisy(client, 10.0, seed=0).train.x)
    assert not torch.equal(made.train.x, noisy(client, 10.0, seed=1).train.x)
    assert not torch.equal(made.train.x, made.test.x)  # each part has noise of its own
    assert (grey == 128).all()
    white = noisy(replace(client, train=Split(torch.full_like(grey, 250), part.y)), 20.0, seed=0).train.x
    assert int(white.max()) == 255  # clipped, not wrapped around
    assert int(white.min()) > 100


def _texts(length: int = 5, words: int = 50) -> Dataset:
    tokens = torch.arange(40 * length, dtype=torch.int32).view(40, length) % words
    labels = torch.arange(40) % 2
    names = ("a", "b")
    return Dataset("texts", tokens, labels, torch.zeros(40).long(), ("only",), names, None, 0.25, words=words)


def test_texts_make_a_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS._items, "texts", lambda config, seed: _texts())
    made = make_federation("texts", clients=2)
    assert made.shape == (5, 50)
    assert "texts of 5 tokens, 50 words" in repr(made)
    assert next(iter(made.clients.values())).train.x.dtype == torch.int32
    with pytest.raises(DataError, match="words is 0"):
        replace(_texts(), words=0)
    with pytest.raises(ConfigError, match="this dataset has texts"):
        noisy(next(iter(made.clients.values())), 5.0, 0)


def test_a_choice_of_domains_in_its_order() -> None:
    made = make_federation("digits-skew", domains=("rotated", "plain"), clients=2)
    assert made.names == ("rotated", "plain")
    whole = make_federation("digits-skew")
    assert sum(map(sum, sizes(made))) == sum(
        len(whole.clients[name].split(part)) for name in made.names for part in ("train", "validation", "test")
    )
    assert made.left_out == 0
    for wrong, why in ((("plane",), "Did you mean 'plain'"), (("plain", "plain"), "each once"), ((), "one or more")):
        with pytest.raises(ConfigError, match=why):
            make_federation("digits-skew", domains=wrong)


def test_levels_and_test_parts_follow_a_choice_of_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 12
    whole = Dataset(
        "levels",
        torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1),
        torch.arange(n) % 2,
        torch.arange(n) % 3,
        ("a", "b", "c"),
        ("x", "y"),
        torch.arange(n) % 4 == 0,
        0.2,
        coarse=Level(torch.arange(n) % 2, ("u", "v")),
    )
    monkeypatch.setitem(DATASETS._items, "levels", lambda config, seed: whole)
    held = load(DataConfig(name="levels", domains=("c", "a")), 0)
    pixels = held.images.flatten()
    assert sorted(pixels.tolist()) == [i for i in range(n) if i % 3 != 1]
    assert torch.equal(held.domains == 0, pixels % 3 == 2)
    assert held.is_test is not None
    assert torch.equal(held.is_test, pixels % 4 == 0)
    assert held.coarse is not None
    assert torch.equal(held.coarse.labels, (pixels % 2).long())


def test_options_are_for_datasets_that_have_some() -> None:
    with pytest.raises(DataError, match="takes no options"):
        load(DataConfig(name="digits-skew?size=3"), 0)


def test_a_test_part_that_is_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """157 images of DSLR: 20 % are 31.4, and the published split tests on 32."""
    labels = torch.arange(157) % 10
    images = torch.zeros(157, 1, 2, 2, dtype=torch.uint8)
    names = tuple(map(str, range(10)))
    held = Dataset("dslr", images, labels, torch.zeros(157).long(), ("dslr",), names, None, 0.2, round_up=True)
    monkeypatch.setitem(DATASETS._items, "dslr", lambda config, seed: held)
    config = DataConfig(name="dslr", partition=Named("domain", {"clients": 1}), split=SplitConfig(validation=0.0))
    assert sizes(build_federation(config, 0)) == [(125, 0, 32)]
    assert sizes(build_federation(replace(config, split=SplitConfig(validation=0.0, test=0.2)), 0)) == [(125, 0, 32)]


@pytest.mark.parametrize("seed", [1, 7, 31])
def test_a_dirichlet_draw_leaves_enough_to_train_on(seed: int) -> None:
    """Of 64 images 20 are for training, of 65 and of 66 only 19: what a client is dealt must do for any more, too."""
    made = make_federation("digits-skew", seed=seed, partition={"name": "dirichlet", "clients": 14, "alpha": 1.0})
    assert min(size[0] for size in sizes(made)) >= 20
