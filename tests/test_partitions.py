"""Partitions: nobody's image is another's, nothing gets lost, and each rule does what its paper says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedprism.config import Named
from fedprism.data import Dataset
from fedprism.data.base import Level
from fedprism.errors import ConfigError, DataError
from fedprism.federation import PARTITIONS, Partition, Share, make_federation
from fedprism.federation.partitions import at_least_one, partition_of, whole
from fedprism.federation.splits import Indices

quick = settings(derandomize=True, max_examples=25, deadline=None, database=None)

OTHER = sorted(set(PARTITIONS) - {"domain", "both"})  # whose clients are numbered


def dataset_of(
    classes: int,
    each: int | tuple[int, int],
    *,
    domains: int = 1,
    tested: float | None = None,
    subclasses: int = 2,
    seed: int = 0,
) -> Dataset:
    """`each` images (or from, to) of every subclass of every class in every domain; a share of them is for the test."""
    rng = np.random.default_rng(seed)
    low, high = each if isinstance(each, tuple) else (each, each)
    fine_of_all = np.repeat(
        np.arange(domains * classes * subclasses), rng.integers(low, high + 1, domains * classes * subclasses)
    )
    is_test = np.zeros(len(fine_of_all), dtype=bool)
    for cell in np.unique(fine_of_all):
        members = np.flatnonzero(fine_of_all == cell)
        is_test[members[: max(1, round((tested or 0) * len(members)))]] = True
    order = rng.permutation(len(fine_of_all))
    number, is_test = fine_of_all[order], is_test[order]
    fine = number % (classes * subclasses)
    labels = fine // subclasses
    return Dataset(
        "made",
        torch.zeros(1, 1, 2, 2, dtype=torch.uint8).expand(len(order), 1, 2, 2),
        torch.from_numpy(labels),
        torch.from_numpy(number // (classes * subclasses)),
        tuple(f"domain{d}" for d in range(domains)),
        tuple(f"class{c}" for c in range(classes)),
        None if tested is None else torch.from_numpy(is_test),
        0.2,
        coarse=Level(torch.from_numpy(labels // 2), tuple(f"super{c}" for c in range(-(-classes // 2)))),
        fine=Level(torch.from_numpy(fine), tuple(f"sub{f}" for f in range(classes * subclasses))),
    )


def everyone(dataset: Dataset) -> Indices:
    return np.arange(len(dataset))


def dealt(name: str, dataset: Dataset, seed: int = 0, **settings: Any) -> list[Share]:
    return PARTITIONS[name](**settings).settled(dataset).deal(dataset, everyone(dataset), seed)


def table(dataset: Dataset, shares: list[Share], part: str = "all") -> NDArray[np.int64]:
    """[clients, classes]: how many images; `part` is train, test or all."""
    rows = []
    for share in shares:
        own = share.indices
        if part != "all" and dataset.is_test is not None:
            own = own[dataset.is_test.numpy()[own] == (part == "test")]
        rows.append(np.bincount(dataset.labels.numpy()[own], minlength=len(dataset.class_names)))
    return np.array(rows)


def same(a: list[Share], b: list[Share]) -> bool:
    return len(a) == len(b) and all(
        (x.client, x.domain, x.noise) == (y.client, y.domain, y.noise) and np.array_equal(x.indices, y.indices)
        for x, y in zip(a, b, strict=True)
    )


# --- what holds for every partition ----------------------------------------------------------------------------------


@st.composite
def made(draw: st.DrawFn, tested: bool | None = None, domains: int = 3) -> Dataset:
    """A small dataset: unequal classes, one or more domains, with or without a test part."""
    own_test = draw(st.booleans()) if tested is None else tested
    return dataset_of(
        draw(st.integers(2, 6)),
        (8, draw(st.integers(8, 20))),
        domains=draw(st.integers(1, domains)),
        tested=draw(st.sampled_from([0.2, 0.4])) if own_test else None,
        subclasses=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 99)),
    )


def possible(draw: st.DrawFn, name: str, dataset: Dataset) -> Partition:
    """A partition of this name that this dataset allows."""
    classes, domains = len(dataset.class_names), len(dataset.domain_names)
    some: dict[str, Any] = {"clients": draw(st.integers(2, 6))}
    if name == "domain":
        order = draw(st.sampled_from(["turns", "blocks"]))
        some = {"order": order, "clients": domains * draw(st.integers(1, 3)) + (order == "turns")}
    elif name == "pathological" and draw(st.booleans()):
        each = draw(st.sampled_from([c for c in range(1, classes + 1) if classes % c == 0]))
        some = {"classes": each, "clients": classes // each * draw(st.integers(1, 2)), "rule": "groups"}
    elif name == "pathological":
        each = draw(st.integers(1, classes))
        some = {"classes": each, "clients": -(-classes // each) + draw(st.integers(0, 4)), "rule": "slots"}
    elif name == "dirichlet":
        form = draw(st.sampled_from(["plain", "capped"]))
        some = {"clients": draw(st.integers(1, 3)), "alpha": draw(st.floats(0.5, 50)), "form": form, "least": 1}
    elif name == "pachinko":
        some |= {"alpha": draw(st.floats(0.01, 10)), "beta": draw(st.floats(0.1, 10))}
        some["each"] = draw(st.sampled_from([None, 5, len(dataset) // 20]))
    elif name == "superclass":
        subclasses = len(dataset.fine.names) // classes if dataset.fine else 0
        some = {"clients": subclasses * draw(st.integers(1, 3)), "balance": draw(st.sampled_from(["uneven", "equal"]))}
    elif name == "both":
        some = {"clients": domains, "parts": draw(st.integers(1, 3)), "least": 1, "alpha": draw(st.floats(1, 5))}
    return PARTITIONS[name](**some).settled(dataset)


@pytest.mark.parametrize("name", PARTITIONS)
@given(data=st.data())
@quick
def test_nothing_twice_nothing_lost_nothing_from_elsewhere(name: str, data: st.DataObject) -> None:
    dataset = data.draw(made())
    partition = possible(data.draw, name, dataset)
    pool = np.setdiff1d(everyone(dataset), data.draw(st.sets(st.integers(0, len(dataset) - 1), max_size=5)))
    shares = partition.deal(dataset, pool, seed=1)
    held = np.concatenate([share.indices for share in shares])
    assert len(held) == len(np.unique(held))
    assert np.isin(held, pool).all()
    if partition.everything:
        assert len(held) == len(pool)
    names = [share.client for share in shares]
    assert len(set(names)) == len(names) == partition.clients
    if name in OTHER:
        assert names == sorted(names)
        assert {share.domain for share in shares} <= {*dataset.domain_names, "mixed"}
    assert all(np.array_equal(share.indices, np.sort(share.indices)) for share in shares)
    assert same(shares, partition.deal(dataset, pool, seed=1))


@pytest.mark.parametrize("name", PARTITIONS)
@given(data=st.data())
@quick
def test_some_of_more_clients_are_what_they_are_among_all(name: str, data: st.DataObject) -> None:
    dataset = data.draw(made(domains=2))
    whole_one = possible(data.draw, name, dataset)
    assert whole_one.clients is not None
    everybody = {share.client: share for share in whole_one.deal(dataset, everyone(dataset), 3)}
    kept: list[set[str]] = []
    for clients in range(1, whole_one.clients + 1):
        some = replace(whole_one, clients=clients, of=whole_one.clients).settled(dataset)
        shares = some.deal(dataset, everyone(dataset), 3)
        assert same(shares, [everybody[share.client] for share in shares])
        kept.append({share.client for share in shares})
        assert len(kept[-1]) == clients
    assert all(fewer < more for fewer, more in pairwise(kept))


def test_which_clients_are_kept_depends_on_the_seed() -> None:
    dataset = dataset_of(2, 30)
    kept = {tuple(share.client for share in dealt("iid", dataset, seed, clients=3, of=10)) for seed in range(20)}
    assert len(kept) > 10
    assert len({name for names in kept for name in names}) == 10


FIXED: dict[str, dict[str, Any]] = {
    "domain": {"clients": 6},
    "iid": {"clients": 4},
    "noise": {"clients": 4},
    "pathological": {"clients": 6, "classes": 2},
    "dirichlet": {"clients": 4, "alpha": 1.0, "least": 5},
    "pachinko": {"clients": 4},
    "superclass": {"clients": 4},
    "both": {"least": 1, "alpha": 1.0},
}


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("tested", [None, 0.25])
def test_another_seed_deals_otherwise_and_global_generators_stay(name: str, tested: float | None) -> None:
    dataset = dataset_of(6, 24, domains=2, tested=tested)
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    first, other = (dealt(name, dataset, seed, **FIXED[name]) for seed in (0, 1))
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]
    assert not same(first, other)
    assert same(first, dealt(name, dataset, 0, **FIXED[name]))


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"pachinko"}))
def test_who_trains_is_tested(name: str) -> None:
    """Of a test part everybody gets some, where there is enough."""
    dataset = dataset_of(6, 24, domains=2, tested=0.25)
    shares = dealt(name, dataset, **FIXED[name])
    assert (table(dataset, shares, "train").sum(axis=1) >= 2).all()
    assert (table(dataset, shares, "test").sum(axis=1) >= 1).all()


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"pachinko", "superclass"}))
def test_every_partition_makes_a_federation(name: str) -> None:
    settings = {**FIXED[name], "clients": 5} | ({"classes": 5} if name == "pathological" else {})
    made = make_federation("digits-skew", partition={"name": name, **settings}, split={"test": 0.25})
    assert len(made.clients) == 5
    held = made.left_out + sum(len(c.split(p)) for c in made.clients.values() for p in ("train", "validation", "test"))
    assert held == 1797
    assert (made.left_out > 0) == (name == "both")


@given(
    st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
    st.integers(0, 500),
)
@quick
def test_whole_numbers_sum_up_and_are_near(weights: list[float], n: int) -> None:
    shares = np.array(weights) / sum(weights)
    counts = whole(shares, n)
    assert counts.sum() == n
    assert (np.abs(counts - shares * n) < 1).all()
    filled = at_least_one(counts)
    assert filled.sum() == n
    assert filled.min() >= min(1, n // len(weights))


def test_settings_are_checked_where_they_are_read() -> None:
    for name, wrong, why in (
        ("dirichlet", {"alpha": 0.0}, "data.partition.alpha is 0.0; expected 0.001 to"),
        ("dirichlet", {"least": "fedpc"}, "unknown value 'fedpc'"),
        ("dirichlet", {"least": 0}, "expected 1 or more, or fedcp"),
        ("pathological", {"rule": "group"}, "Did you mean 'groups'"),
        ("pathological", {"class": 2}, "Did you mean 'classes'"),
        ("noise", {"sigma": -1.0}, "expected 0 or more"),
        ("iid", {"of": 0}, "expected 1 or more"),
    ):
        with pytest.raises(ConfigError, match=why):
            partition_of(Named(name, wrong))
    assert partition_of(Named("dirichlet", {"least": "fedcp", "alpha": 1})) == PARTITIONS["dirichlet"](
        least="fedcp",  # type: ignore[call-arg]
        alpha=1.0,
    )


@pytest.mark.parametrize(
    ("name", "settings", "kind", "why"),
    [
        ("iid", {"clients": 5, "of": 4}, ConfigError, "of is 4, but data.partition.clients is 5; expected at least"),
        ("domain", {"clients": 3, "order": "blocks"}, ConfigError, "clients is 3, but 'made' has 2 domains; .* of 2"),
        ("domain", {"clients": 2, "of": 5, "order": "blocks"}, ConfigError, "of is 5, but 'made' has 2 domains"),
        ("pathological", {"classes": 7}, ConfigError, "classes is 7, but 'made' has 6; ask for no more"),
        ("pathological", {"clients": 2}, ConfigError, "clients is 2, .* to nobody; ask for at least 3 clients"),
        ("pathological", {"classes": 4}, ConfigError, "need a divisor of the 6 classes; .*rule: slots"),
        ("pathological", {"clients": 4}, ConfigError, "leaves the last without clients; ask for 3 or 5 clients"),
        (
            "pathological",
            {"clients": 300},
            DataError,
            "class 'class0' of 'made' has 48 training images for 100 clients",
        ),
        ("dirichlet", {"clients": 30}, DataError, "30 clients cannot have 10 images each: there are 288 images"),
        (
            "dirichlet",
            {"least": 14},
            DataError,
            "in 1000 draws with alpha 0.1 .* fewer than 14 images; the best that was seen is",
        ),
        ("pachinko", {"clients": 5, "each": 60}, DataError, "5 clients of 60 images need 300, but 'made' has 288"),
        ("pachinko", {"clients": 289}, DataError, "289 clients of 1 images need 289"),
        ("superclass", {"clients": 3}, ConfigError, "has 2 subclasses, one per client; ask for a multiple of 2"),
        ("superclass", {"clients": 50}, DataError, "has 24 training images for 25 clients; ask for at most 48 clients"),
        ("both", {"clients": 3}, ConfigError, "clients is 3, but 'made' has 2 domains; .* a multiple of 2"),
        ("both", {"keep": 3}, ConfigError, "keep is 3, but there are 3 parts, counted from 0; ask for at most 2"),
        ("both", {"least": 9}, DataError, "'domain0' has 20 images of class 'class0', .* never left 9 in each of 3"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    name: str, settings: dict[str, Any], kind: type[Exception], why: str
) -> None:
    dataset = dataset_of(6, 24, domains=2) if name in ("domain", "both") else dataset_of(6, 24)
    dataset = dataset_of(6, 12, domains=2) if name == "both" else dataset
    with pytest.raises(kind, match=why):
        dealt(name, dataset, **settings)


def test_rules_about_superclasses_need_them() -> None:
    without = replace(dataset_of(4, 10), coarse=None, fine=None)
    with pytest.raises(ConfigError, match=r"pachinko, which needs a superclass .* 'made' has none; use cifar100,"):
        dealt("pachinko", without, clients=2)
    with pytest.raises(ConfigError, match="'made' has no subclasses; use cifar100-super"):
        dealt("superclass", without, clients=2)
    some = dataset_of(4, 10)
    assert some.fine is not None
    lopsided = replace(some, fine=Level(torch.where(some.labels == 0, 0, some.fine.labels), some.fine.names))
    with pytest.raises(ConfigError, match="have 1 to 2 subclasses; expected equally many"):
        dealt("superclass", lopsided, clients=2)


# --- domains ---------------------------------------------------------------------------------------------------------


def test_turns_and_blocks_deal_the_same_in_another_order() -> None:
    dataset = dataset_of(3, 10, domains=3)
    turns, blocks = (dealt("domain", dataset, clients=6, order=order) for order in ("turns", "blocks"))
    assert [share.client for share in turns] == [f"domain{d}-{n}" for n in (1, 2) for d in range(3)]
    assert [share.client for share in blocks] == [f"domain{d}-{n}" for d in range(3) for n in (1, 2)]
    assert same(sorted(turns), sorted(blocks))


def test_the_default_number_of_clients_is_one_a_domain() -> None:
    for domains, clients in ((1, 5), (3, 3), (7, 7)):
        dataset = dataset_of(2, 10, domains=domains)
        assert PARTITIONS["domain"]().settled(dataset).clients == clients
        assert PARTITIONS["domain"](clients=5).settled(dataset).clients == 5  # what is asked for holds
    assert PARTITIONS["domain"](clients=4).settled(dataset_of(2, 10, domains=3)).clients == 4
    assert PARTITIONS["domain"](clients=5, of=6).settled(dataset_of(2, 10, domains=3)).clients == 5


def test_names_sort_and_say_whether_domains_are_mixed() -> None:
    one, two = (dealt("iid", dataset_of(2, 60, domains=d), clients=100) for d in (1, 2))
    assert [one[i].client for i in (0, 8, 99)] == ["client-001", "client-009", "client-100"]
    assert dealt("iid", dataset_of(2, 60), clients=5)[4].client == "client-05"
    assert {share.domain for share in one} == {"domain0"}
    assert {share.domain for share in two} == {"mixed"}


# --- iid and noise ---------------------------------------------------------------------------------------------------


@given(made(), st.integers(1, 9))
@quick
def test_equal_shares_are_equal(dataset: Dataset, clients: int) -> None:
    shares = dealt("iid", dataset, clients=clients)
    for part in ("train", "test"):
        assert np.ptp(table(dataset, shares, part).sum(axis=1)) <= 1


def test_noise_grows_evenly_from_none_to_sigma() -> None:
    """Fed-CO2 F.3: ten clients, up to 20."""
    dataset = dataset_of(2, 50)
    noisy = dealt("noise", dataset)
    assert [share.noise for share in noisy] == pytest.approx([20 / 9 * i for i in range(10)])
    assert noisy[0].noise == 0
    assert noisy[-1].noise == 20
    assert dealt("noise", dataset, clients=1)[0].noise == 0
    assert same([share._replace(noise=0.0) for share in noisy], dealt("iid", dataset, clients=10))
    some = dealt("noise", dataset, clients=3, of=10)
    assert {share.noise for share in some} < {share.noise for share in noisy}


# --- pathological ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["groups", "slots"])
@given(data=st.data())
@quick
def test_every_client_has_exactly_its_number_of_classes(rule: str, data: st.DataObject) -> None:
    dataset = data.draw(made())
    classes = len(dataset.class_names)
    each = data.draw(st.sampled_from([c for c in range(1, classes + 1) if rule == "slots" or classes % c == 0]))
    fewest = -(-classes // each)
    clients = fewest * 2 if rule == "groups" else data.draw(st.integers(fewest, fewest + 5))
    shares = dealt("pathological", dataset, rule=rule, classes=each, clients=clients)
    held = table(dataset, shares, "train") > 0
    assert (held.sum(axis=1) == each).all()
    assert np.ptp(held.sum(axis=0)) <= 1


def test_a_tiny_share_is_at_least_one_training_image() -> None:
    dataset = dataset_of(2, 40, tested=0.5, subclasses=1)
    for seed in range(30):
        held = table(dataset, dealt("pathological", dataset, seed, classes=1, clients=8, least=1), "train")
        assert ((held > 0).sum(axis=1) == 1).all()


def published_groups(clients: int, classes: int, each: int) -> list[list[int]] | None:
    """FedCP's assignment step by step; None where a class or a client is left without."""
    need = [each] * clients
    holders = []
    for _ in range(classes):
        chosen = [i for i in range(clients) if need[i] > 0][: int(np.ceil(round(clients / classes * each, 9)))]
        for i in chosen:
            need[i] -= 1
        holders.append(chosen)
    return None if any(need) or not all(holders) else holders


def test_groups_are_those_of_the_published_procedure() -> None:
    compared = 0
    for classes in range(1, 9):
        dataset = dataset_of(classes, 15)
        for each in range(1, classes + 1):
            for clients in range(1, 14):
                expected = published_groups(clients, classes, each)
                if expected is None:
                    with pytest.raises(ConfigError):
                        dealt("pathological", dataset, classes=each, clients=clients)
                    continue
                held = table(dataset, dealt("pathological", dataset, classes=each, clients=clients)) > 0
                assert [np.flatnonzero(column).tolist() for column in held.T] == expected
                compared += 1
    assert compared > 100


def test_groups_have_the_same_classes_and_unequal_sizes() -> None:
    """FedCP on ten classes of 400: twenty clients in five groups of four, two classes a group."""
    dataset = dataset_of(10, 200)
    counts = table(dataset, dealt("pathological", dataset))
    for group in range(5):
        own = counts[4 * group : 4 * group + 4]
        assert own[:, 2 * group : 2 * group + 2].sum() == own.sum() == 800
        for column in own[:, 2 * group : 2 * group + 2].T:
            assert (column[:3] >= 10).all()  # of 400: max(100 / 10, 40 / 10)
            assert (column[:3] < 100).all()
            assert column[3] > 100
    assert len(np.unique(counts[counts > 0])) > 20
    equal = table(dataset, dealt("pathological", dataset, balance="equal"))
    assert set(equal[equal > 0]) == {100}


@pytest.mark.parametrize("tested", [None, 0.25])
def test_slots_are_divided_by_numbers_from_four_to_six(tested: float | None) -> None:
    """Fed-CO2: no client of a class has more than 0.6 / 0.4 times another's."""
    dataset = dataset_of(10, 300, tested=tested)
    shares = dealt("pathological", dataset, rule="slots", clients=20)
    for part in ("train", "test"):
        for column in table(dataset, shares, part).T:
            own = column[column > 0]
            assert len(own) in (0, 4)  # 20 clients of 2 in 10 classes
            assert not len(own) or own.max() <= 1.5 * (own.min() + 1) + 1
    assert len(np.unique(table(dataset, shares, "train"))) > 20
    assert len({tuple(row > 0) for row in table(dataset, shares)}) > 5  # no groups


# --- Dirichlet -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dirichlet", {"clients": 4, "alpha": 0.5, "least": 3}),
        ("dirichlet", {"clients": 4, "alpha": 0.5, "least": 3, "form": "capped"}),
        ("pathological", {"clients": 6, "classes": 2, "rule": "slots"}),
        ("pathological", {"clients": 6, "classes": 2, "rule": "groups", "balance": "equal"}),
    ],
)
@given(seed=st.integers(0, 1000))
@quick
def test_the_test_part_is_divided_like_the_training_part(name: str, settings: dict[str, Any], seed: int) -> None:
    dataset = dataset_of(6, (30, 40), tested=0.3, seed=seed)
    shares = dealt(name, dataset, seed, **settings)
    train, test = (table(dataset, shares, part) for part in ("train", "test"))
    n, m = train.sum(axis=0), test.sum(axis=0)
    assert (np.abs(train / n - test / m) < 1 / n + 1 / m).all()


@given(made(), st.integers(1, 5), st.sampled_from(["plain", "capped"]), st.integers(0, 50))
@quick
def test_the_least_number_of_images_holds_for_each_part(dataset: Dataset, clients: int, form: str, seed: int) -> None:
    parts = ("all",) if dataset.is_test is None else ("train", "test")
    least = min(table(dataset, dealt("iid", dataset, clients=1), part).sum() for part in parts) // (2 * clients)
    shares = dealt("dirichlet", dataset, seed, clients=clients, alpha=5.0, least=max(1, int(least)), form=form)
    for part in parts:
        assert (table(dataset, shares, part).sum(axis=1) >= least).all()


def test_ten_training_and_ten_test_images_as_fed_co2() -> None:
    dataset = dataset_of(6, 30, tested=0.2)
    for seed in range(20):
        shares = dealt("dirichlet", dataset, seed, clients=4, alpha=0.5)
        for part in ("train", "test"):
            assert table(dataset, shares, part).sum(axis=1).min() >= 10


def test_fedcps_least_is_40_or_half_an_equal_share() -> None:
    small, large = dataset_of(4, 25), dataset_of(4, 250)
    for dataset, least in ((small, 20), (large, 40)):
        sizes = [
            table(dataset, dealt("dirichlet", dataset, s, clients=5, least="fedcp")).sum(axis=1).min()
            for s in range(20)
        ]
        assert least <= min(sizes) < 4 * least
    assert (
        min(table(large, dealt("dirichlet", large, s, clients=5, least=1)).sum(axis=1).min() for s in range(40)) < 40
    )  # or it would show nothing


def over_the_cap(dataset: Dataset, form: str, seed: int) -> int:
    """Images that went to clients who held an equal share of everything when their class's turn came."""
    counts = table(dataset, dealt("dirichlet", dataset, seed, clients=5, alpha=0.3, form=form, least=1))
    before = np.cumsum(counts, axis=1) - counts
    return int(counts[before >= len(dataset) / 5].sum())


def test_the_capped_form_gives_nothing_to_a_full_client() -> None:
    dataset = dataset_of(8, 50)
    assert [over_the_cap(dataset, "capped", seed) for seed in range(10)] == [0] * 10
    assert max(over_the_cap(dataset, "plain", seed) for seed in range(10)) > 0


def concentration(deal: Callable[[int], NDArray[np.int64]]) -> float:
    """The mean share of a client's largest column."""
    tables = [deal(seed) for seed in range(10)]
    return float(np.mean([(t.max(axis=1) / t.sum(axis=1)).mean() for t in tables]))


def test_the_smaller_alpha_the_fewer_classes_a_client_has() -> None:
    dataset = dataset_of(8, 50)
    found = [
        concentration(lambda s, a=alpha: table(dataset, dealt("dirichlet", dataset, s, clients=4, alpha=a)))  # type: ignore[misc]
        for alpha in (0.1, 1.0, 100.0)
    ]
    assert found[0] > found[1] + 0.1 > found[2] + 0.2
    assert found[2] < 0.2  # 1 / 8, were it even


# --- Pachinko --------------------------------------------------------------------------------------------------------


def superclasses(dataset: Dataset, shares: list[Share]) -> NDArray[np.int64]:
    assert dataset.coarse is not None
    above = dataset.coarse.labels.numpy()
    return np.array([np.bincount(above[s.indices], minlength=len(dataset.coarse.names)) for s in shares])


def test_pachinko_concentrates_as_alpha_falls() -> None:
    dataset = dataset_of(10, 100)  # five superclasses

    def concentrated(**settings: float) -> float:
        return concentration(
            lambda seed: superclasses(dataset, dealt("pachinko", dataset, seed, clients=4, each=100, **settings))
        )

    found = [concentrated(alpha=alpha) for alpha in (0.05, 0.3, 100.0)]
    assert found[0] > found[1] + 0.1 > found[2] + 0.2
    assert found[2] < 0.3  # 1 / 5, were it even

    def of_classes(beta: float) -> float:
        return concentration(
            lambda seed: table(dataset, dealt("pachinko", dataset, seed, clients=4, each=100, alpha=100.0, beta=beta))
        )

    assert of_classes(0.05) > of_classes(1000.0) + 0.05


def test_pachinko_gives_everybody_the_same_number_and_keeps_parts() -> None:
    dataset = dataset_of(10, 120, tested=1 / 6)
    shares = dealt("pachinko", dataset, clients=7)
    assert {len(share.indices) for share in shares} == {2400 // 7}
    tested = table(dataset, shares, "test").sum(axis=1)
    assert (np.abs(tested - 2400 / 7 / 6) < 25).all()
    assert {len(share.indices) for share in dealt("pachinko", dataset, clients=7, each=50)} == {50}


def with_sizes(sizes: list[int], above: list[int]) -> Dataset:
    """Classes of these sizes under these superclasses."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    return Dataset(
        "made",
        torch.zeros(1, 1, 2, 2, dtype=torch.uint8).expand(len(labels), 1, 2, 2),
        torch.from_numpy(labels),
        torch.zeros(len(labels), dtype=torch.int64),
        ("all",),
        tuple(map(str, range(len(sizes)))),
        None,
        0.2,
        coarse=Level(torch.from_numpy(np.array(above)[labels]), tuple(map(str, range(max(above) + 1)))),
    )


def test_a_class_that_has_run_out_leaves_the_draw() -> None:
    """One image of class 0 and three of class 1, equally likely: among two draws it is in 1/2 + 1/4 of the cases."""
    dataset = with_sizes([1, 3], [0, 0])
    held = [table(dataset, dealt("pachinko", dataset, s, clients=1, each=2, beta=1e6))[0, 0] for s in range(600)]
    assert abs(np.mean(held) - 0.75) < 0.06


def test_a_superclass_keeps_its_share_while_it_has_classes() -> None:
    """Half of 20 draws are of either superclass, though a class of the first is gone at once."""
    dataset = with_sizes([1, 40, 41], [0, 0, 1])
    held = [
        table(dataset, dealt("pachinko", dataset, s, clients=1, each=20, alpha=1e6, beta=1e6))[0, :2].sum()
        for s in range(200)
    ]
    assert abs(np.mean(held) - 10) < 0.6


def test_a_superclass_without_classes_leaves_too() -> None:
    dataset = with_sizes([2, 3, 40], [0, 0, 1])
    for alpha in (0.001, 1.0):
        shares = dealt("pachinko", dataset, clients=9, each=5, alpha=alpha, beta=0.001)
        assert sum(len(share.indices) for share in shares) == 45


# --- superclasses ----------------------------------------------------------------------------------------------------


@given(made(), st.integers(1, 3), st.sampled_from(["uneven", "equal"]))
@quick
def test_each_client_has_one_subclass_of_each_superclass(dataset: Dataset, groups: int, balance: str) -> None:
    assert dataset.fine is not None
    classes = len(dataset.class_names)
    each = len(dataset.fine.names) // classes
    shares = dealt("superclass", dataset, clients=groups * each, balance=balance)
    held = []
    for share in shares:
        own = np.unique(dataset.fine.labels.numpy()[share.indices])
        assert sorted(own // each) == list(range(classes))
        held.append(set(own.tolist()))
    for group in range(groups):
        assert set.union(*held[group * each : group * each + each]) == set(range(classes * each))


def test_superclass_shares_differ_by_group_and_test_images_are_divided_equally() -> None:
    dataset = dataset_of(4, 60, tested=0.2, subclasses=5)
    assert PARTITIONS["superclass"]().settled(dataset).clients == 5
    shares = dealt("superclass", dataset, clients=15)
    train, test = (table(dataset, shares, part) for part in ("train", "test"))
    assert set(test.flat) == {4}  # 12 of a subclass, three clients
    groups = train.reshape(3, 5, 4)
    assert all(len(np.unique(group)) == 1 for group in groups)  # the same cut points for all subclasses
    assert len({int(group[0, 0]) for group in groups}) > 1
    assert [sum(int(group[0, 0]) for group in groups)] == [48]
    equal = table(dataset, dealt("superclass", dataset, clients=15, balance="equal"), "train")
    assert set(equal.flat) == {16}


# --- both skews ------------------------------------------------------------------------------------------------------


@given(made(tested=True), st.integers(1, 3), st.integers(0, 30))
@quick
def test_both_cuts_the_test_part_to_the_class_ratio(dataset: Dataset, parts: int, seed: int) -> None:
    shares = dealt("both", dataset, seed, clients=len(dataset.domain_names), parts=parts, least=1, alpha=1.0)
    train, test = (table(dataset, shares, part) for part in ("train", "test"))
    assert train.min() >= 1
    is_test, labels, domains = (column.numpy() for column in (dataset.is_test, dataset.labels, dataset.domains))  # type: ignore[union-attr]
    for number, share in enumerate(shares):
        assert set(domains[share.indices]) == {number}
        there = np.bincount(labels[is_test & (domains == number)], minlength=len(dataset.class_names))
        scale = (there / train[number]).min()
        assert (np.abs(test[number] - scale * train[number]) <= 0.5).all()
        assert (test[number] == there).any()  # no larger test part has this ratio
    if parts == 1:
        assert (train.sum(axis=0) == np.bincount(labels[~is_test])).all()


def test_both_keeps_one_part_and_the_parts_make_the_whole() -> None:
    dataset = dataset_of(5, 40, domains=2, tested=0.25)
    parts = [dealt("both", dataset, keep=keep, parts=3, alpha=0.3) for keep in range(3)]
    trained = [[share._replace(indices=np.setdiff1d(share.indices, share.test)) for share in part] for part in parts]
    counts = np.array([table(dataset, part) for part in trained])
    assert dataset.is_test is not None
    whole = [torch.bincount(dataset.labels[(dataset.domains == d) & ~dataset.is_test]).tolist() for d in range(2)]
    assert counts.sum(axis=0).tolist() == whole
    assert counts.min() >= 2
    assert np.ptp(counts) > 40
    assert [share.client for share in parts[0]] == ["domain0", "domain1"]


def test_both_without_a_test_part_sets_a_share_aside_first() -> None:
    """20 of 100 images are for the test; of these as many stay as the ratio of what is kept for training allows."""
    dataset = replace(dataset_of(2, 25), test_share=0.2)
    assert len(dataset) == 100
    share = dealt("both", dataset, clients=1, parts=2, alpha=1.0)[0]
    assert share.test is not None
    labels = dataset.labels.numpy()
    kept = np.bincount(labels[np.setdiff1d(share.indices, share.test)], minlength=2)
    tested = np.bincount(labels[share.test], minlength=2)
    assert tested.max() <= 10
    assert tested.tolist() == np.floor(kept * (10 / kept.max()) + 0.5).tolist()
    assert len(share.test) > 0.2 * len(share.indices)  # more than a share of what is kept would be


def test_both_divides_as_many_images_as_it_is_told() -> None:
    dataset = dataset_of(3, 100, tested=0.2)
    shares = [dealt("both", dataset, clients=1, parts=3, keep=keep, alpha=1.0, images=120)[0] for keep in range(3)]
    trained = [np.setdiff1d(share.indices, share.test) for share in shares]
    assert sum(map(len, trained)) == 120
    assert len(np.unique(np.concatenate(trained))) == 120
    with pytest.raises(DataError, match="images is 1000, but client 'domain0' has 480 training images"):
        dealt("both", dataset, clients=1, images=1000)


def test_superclass_with_all_test_images_of_its_subclasses() -> None:
    dataset = dataset_of(3, 40, tested=0.25)
    shares = dealt("superclass", dataset, clients=4, test="all")
    assert dataset.is_test is not None
    assert dataset.fine is not None
    fine, is_test = dataset.fine.labels.numpy(), dataset.is_test.numpy()
    for share in shares:
        trained, tested = share.indices[~is_test[share.indices]], share.indices[is_test[share.indices]]
        own = np.unique(fine[trained])
        assert tested.tolist() == np.flatnonzero(is_test & np.isin(fine, own)).tolist()
    every = np.concatenate([share.indices for share in shares])
    assert len(np.unique(every)) == len(dataset) < len(every)


def test_all_test_images_need_a_test_part() -> None:
    with pytest.raises(ConfigError, match=r"test is all, .* data\.split\.test replaces it"):
        dealt("superclass", dataset_of(3, 40), clients=2, test="all")


def test_dirichlet_draws_until_enough_is_left_to_train_on() -> None:
    """`min_train` is what a client must be dealt, here more than `least`."""
    dataset = replace(dataset_of(4, 200), min_train=60)
    for seed in range(5):
        assert min(len(share.indices) for share in dealt("dirichlet", dataset, seed, clients=5, alpha=0.5)) >= 60
    most = len(dataset) // 5
    with pytest.raises(DataError, match=rf"fewer than {most} images; .* give less to data\.split"):
        dealt("dirichlet", replace(dataset, min_train=most), clients=5, alpha=0.1)


def test_both_with_several_clients_a_domain() -> None:
    dataset = dataset_of(3, 80, domains=2, tested=0.25)
    shares = dealt("both", dataset, clients=4, alpha=2.0)
    assert [share.client for share in shares] == ["domain0-1", "domain1-1", "domain0-2", "domain1-2"]
    assert len(np.unique(np.concatenate([s.indices for s in shares]))) == sum(len(s.indices) for s in shares)


def test_both_needs_test_images_of_what_is_trained() -> None:
    dataset = dataset_of(3, 20, tested=0.25)
    assert dataset.is_test is not None
    lacking = replace(dataset, is_test=dataset.is_test & (dataset.labels != 1))
    with pytest.raises(DataError, match=r"training but no test images of class 'class1', .* data\.split\.test"):
        dealt("both", lacking, clients=1)
