"""Protocols, from records that can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score

from fedprism.config import Config
from fedprism.errors import ConfigError, RecordError
from fedprism.records import Figure, Outcome, Protocol, RunRecord, gain, outcome, summarise
from fedprism.records.protocol import balanced_accuracy, figure, macro_f1
from fedprism.round.events import RoundRecord, Score

Counts = Mapping[str, tuple[int, int]]  # client -> correct, total


def make_run(
    rounds: Sequence[Mapping[str, Mapping[str, Counts]]],  # moment -> split -> client -> correct, total
    clients: tuple[str, ...] = ("a", "b"),
    moment: str = "received",
    status: str = "finished",
    seed: int = 0,
    classes: Mapping[str, Any] | None = None,
) -> RunRecord:
    def scores(moments: Mapping[str, Mapping[str, Counts]]) -> Any:
        return {
            m: {s: {c: Score(*n, 0.0) for c, n in of.items()} for s, of in splits.items()}
            for m, splits in moments.items()
        }

    records = tuple(RoundRecord(round, scores=scores(moments)) for round, moments in enumerate(rounds))
    info = {"status": status, "method": "toy", "moment": moment, "clients": list(clients)}
    return RunRecord(Config(seed=seed), info, records, classes or {})


def received(validation: Counts, test: Counts) -> dict[str, dict[str, Counts]]:
    return {"received": {"validation": validation, "test": test}}


# Clients of 10 and 40 test images. Client mean and sample mean disagree about the best round, on either split.
RUN = make_run(
    [
        received({"a": (0, 10), "b": (0, 40)}, {"a": (1, 10), "b": (4, 40)}),
        received({"a": (9, 10), "b": (12, 40)}, {"a": (8, 10), "b": (16, 40)}),  # 60 % of clients, 48 % of images
        received({"a": (2, 10), "b": (36, 40)}, {"a": (3, 10), "b": (32, 40)}),  # 55 %, 70 %
        received({"a": (5, 10), "b": (20, 40)}, {"a": (6, 10), "b": (24, 40)}),  # 60 %, 60 %
        {},  # not evaluated
        received({"a": (5, 10), "b": (20, 40)}, {"a": (5, 10), "b": (16, 40)}),  # 45 %, 42 %
    ]
)


@pytest.mark.parametrize(
    ("protocol", "rounds", "expected"),
    [
        ("last", (5,), 0.45),
        ("last,samples", (5,), 21 / 50),
        ("last1", (5,), 0.45),
        ("last2", (3, 5), (0.6 + 0.45) / 2),
        ("last3", (2, 3, 5), (0.55 + 0.6 + 0.45) / 3),
        ("last3,samples", (2, 3, 5), (35 + 30 + 21) / 150),
        ("best-validation", (1,), 0.6),  # 0.9 + 0.3 on validation
        ("best-validation,samples", (2,), 0.7),  # 38 of 50
        ("best-test", (1,), 0.6),  # the earlier of two with 60 %
        ("best-test,samples", (2,), 0.7),
    ],
)
def test_by_hand(protocol: str, rounds: tuple[int, ...], expected: float) -> None:
    result = outcome(RUN, Protocol.parse(protocol))
    assert result.rounds == rounds
    assert result.mean == pytest.approx(expected, abs=1e-12)


def test_clients_worst_and_spread_by_hand() -> None:
    result = outcome(RUN, Protocol(when="mean-last-3"))
    assert result.accuracy == pytest.approx({"a": (0.3 + 0.6 + 0.5) / 3, "b": (0.8 + 0.6 + 0.4) / 3})
    assert list(result.accuracy) == ["a", "b"]
    assert result.worst == pytest.approx(1.4 / 3)
    assert result.spread == pytest.approx(0.4 / 3 / 2)  # of two values: half of their distance
    assert result.notes == ()
    assert (result.method, result.seed, result.moment, result.diverged) == ("toy", 0, "received", False)


def test_the_default_is_the_best_on_validation_and_the_client_mean() -> None:
    assert outcome(RUN) == outcome(RUN, Protocol(None, "best-validation", "clients"))


def test_the_first_state_is_in_no_mean_of_last_rounds_but_may_be_the_best() -> None:
    short = make_run([received({"a": (9, 10)}, {"a": (9, 10)}), received({"a": (1, 10)}, {"a": (1, 10)})], ("a",))
    result = outcome(short, Protocol(when="mean-last-5"))
    assert result.rounds == (1,)
    assert result.notes == ("1 instead of 5 evaluated rounds",)
    assert outcome(short).rounds == (0,)
    only_first = make_run([received({"a": (9, 10)}, {"a": (9, 10)})], ("a",))
    assert outcome(only_first, Protocol(when="mean-last-5")).rounds == (0,)


def test_no_validation_images_fall_back_to_the_last_round_and_say_so() -> None:
    for validation in ({}, {"a": (0, 0)}):
        run = make_run([received(validation, {"a": (9, 10)}), received(validation, {"a": (1, 10)})], ("a",))
        result = outcome(run)
        assert result.rounds == (1,)
        assert "toy (seed 0): no validation images, so the last round." in Protocol().describe([result])
    assert "no validation images" not in Protocol().describe([outcome(RUN)])


# --- not everybody in every round ------------------------------------------------------------------------------------


def trained(validation: Counts, test: Counts) -> dict[str, dict[str, Counts]]:
    return {"trained": {"validation": validation, "test": test}}


PARTIAL = make_run(
    [
        {},
        trained({"a": (10, 10)}, {"a": (9, 10)}),  # perfect, but only one client has been tested
        trained({"b": (2, 10)}, {"b": (4, 10)}),  # a stands at 10: mean 0.6
        trained({"a": (8, 10)}, {"a": (7, 10)}),  # b stands at 2: mean 0.5
        trained({"c": (0, 10)}, {"c": (1, 10)}),  # everybody for the first time: 8, 2, 0
        trained({"b": (1, 10)}, {"b": (5, 10)}),  # 8, 1, 0
    ],
    clients=("a", "b", "c", "d"),
    moment="trained",
)


def test_a_client_that_was_not_tested_counts_with_its_latest_record() -> None:
    result = outcome(PARTIAL, Protocol(when="last"))
    assert result.rounds == (5,)
    assert result.accuracy == {"a": 0.7, "b": 0.5, "c": 0.1}
    assert any("2 of 3 clients" in note for note in result.notes)
    assert any("without d, never tested" in note for note in result.notes)


def test_rounds_are_compared_only_where_most_clients_are_known() -> None:
    result = outcome(PARTIAL)
    assert result.rounds == (4,)  # not round 1, whose mean over its only client is 1
    assert result.accuracy == {"a": 0.7, "b": 0.4, "c": 0.1}


def test_a_mean_of_rounds_takes_for_each_client_the_rounds_in_which_it_stands_somewhere() -> None:
    result = outcome(PARTIAL, Protocol(when="mean-last-3"))
    assert result.rounds == (3, 4, 5)
    assert result.accuracy == pytest.approx({"a": 0.7, "b": (0.4 + 0.4 + 0.5) / 3, "c": 0.1})


def test_clients_without_test_images_are_left_out() -> None:
    run = make_run([received({"a": (1, 2)}, {"a": (1, 2), "b": (0, 0)})])
    assert outcome(run).accuracy == {"a": 0.5}
    nobody = make_run([received({"a": (1, 2)}, {"a": (0, 0)})])
    with pytest.raises(RecordError, match="no test images"):
        outcome(nobody)


# --- a part of the model by itself -----------------------------------------------------------------------------------


def with_paths(run: RunRecord, *rounds: Mapping[str, Mapping[str, Mapping[str, int]]]) -> RunRecord:
    """The run with parts that were tested by themselves: for each round, path -> split -> client -> correct."""
    records = []
    for record, paths in zip(run.rounds, rounds, strict=True):
        scores = {
            moment: {
                split: {
                    client: replace(
                        score, branches={name: of[split][client] for name, of in paths.items() if client in of[split]}
                    )
                    for client, score in clients.items()
                }
                for split, clients in splits.items()
            }
            for moment, splits in record.scores.items()
        }
        records.append(replace(record, scores=scores))
    return replace(run, rounds=tuple(records))


def both(a: int, b: int) -> dict[str, dict[str, int]]:
    return {split: {"a": a, "b": b} for split in ("validation", "test")}


PARTS = with_paths(
    make_run(
        [
            received({"a": (1, 10), "b": (1, 40)}, {"a": (1, 10), "b": (4, 40)}),
            received({"a": (9, 10), "b": (36, 40)}, {"a": (8, 10), "b": (16, 40)}),  # the whole's best
            received({"a": (2, 10), "b": (4, 40)}, {"a": (3, 10), "b": (32, 40)}),
            received({"a": (5, 10), "b": (20, 40)}, {"a": (5, 10), "b": (16, 40)}),
        ],
    ),
    {"up": both(0, 0), "down": both(1, 1)},
    {"up": both(1, 8), "down": both(2, 40)},  # up: 10, 20 %; down: 20, 100 %
    {"up": both(6, 20), "down": both(9, 0)},  # up: 60, 50 %; down: 90, 0 %
    {"up": both(4, 12), "down": both(5, 20)},  # up: 40, 30 %; down: 50, 50 %
)


@pytest.mark.parametrize(
    ("protocol", "rounds", "expected"),
    [
        ("best", (1,), 0.6),
        ("last,path=up", (3,), 0.35),
        ("last,samples,path=up", (3,), 16 / 50),
        ("last2,path=up", (2, 3), (0.55 + 0.35) / 2),
        ("best,path=up", (2,), 0.55),  # its own best round, not that of the whole
        ("best,path=down", (1,), 0.6),
        ("best,samples,path=down", (1,), 42 / 50),
        ("best-test,path=up", (2,), 0.55),
    ],
)
def test_a_path_by_hand(protocol: str, rounds: tuple[int, ...], expected: float) -> None:
    result = outcome(PARTS, Protocol.parse(protocol))
    assert result.rounds == rounds
    assert result.mean == pytest.approx(expected, abs=1e-12)
    assert result.notes == ()


def test_a_path_has_clients_of_its_own_and_no_figures_of_classes() -> None:
    counts = {"a": {"right": [4, 1], "predicted": [6, 4], "actual": [5, 5]}}
    kept = {"last": {"round": 3, "scores": {"received": {"test": counts}}}}
    run = replace(PARTS, classes=kept)
    assert outcome(run, Protocol(when="last")).f1
    result = outcome(run, Protocol(when="last", path="down"))
    assert result.accuracy == {"a": 0.5, "b": 0.5}
    assert result.balanced == result.f1 == {}  # the counts are those of the whole model
    only_a = with_paths(PARTS, *({"up": {"validation": {"a": 1}, "test": {"a": 1}}} for _ in PARTS.rounds))
    result = outcome(only_a, Protocol(when="last", path="up"))
    assert result.accuracy == {"a": 0.1}
    assert result.notes == ("without b, never tested",)


def test_a_path_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(RecordError, match=r"toy has no path 'left' at the moment 'received'\. Its paths: up, down\."):
        outcome(PARTS, Protocol(path="left"))
    with pytest.raises(RecordError, match=r"no path 'up' at the moment 'received'\. Its paths: none\."):
        outcome(RUN, Protocol(path="up"))
    with pytest.raises(RecordError, match="not tested at the moment 'trained', but at: received"):
        outcome(PARTS, Protocol("trained", path="up"))


# --- what cannot be --------------------------------------------------------------------------------------------------


def test_a_moment_that_was_not_tested_is_named_with_those_that_were() -> None:
    with pytest.raises(RecordError, match=r"not tested at the moment 'adapted', but at: received.*--protocol"):
        outcome(RUN, Protocol("adapted"))
    with pytest.raises(RecordError, match=r"not tested at the moment 'trained', but at: received"):
        outcome(replace(RUN, info={**RUN.info, "moment": "trained"}))
    with pytest.raises(RecordError, match=r"no tested round yet \(status: running\)"):
        outcome(make_run([], status="running"))


def test_a_diverged_run_has_an_outcome_and_a_flag() -> None:
    result = outcome(replace(RUN, info={**RUN.info, "status": "diverged"}), Protocol(when="last"))
    assert result.diverged
    assert result.mean == pytest.approx(0.45)
    assert "toy (seed 0): diverged." in Protocol().describe([result])
    assert summarise([result, outcome(RUN)]).diverged == 1


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trained,last5,samples", Protocol("trained", "mean-last-5", "samples")),
        ("samples, last-5 ,TRAINED", Protocol("trained", "mean-last-5", "samples")),
        ("mean-last-05", Protocol(None, "mean-last-5")),
        ("last", Protocol(None, "last")),
        ("best", Protocol()),
        ("own", Protocol()),
        ("best-test", Protocol(when="best-test")),
        ("global,clients", Protocol("global")),
        ("received,last,path=online", Protocol("received", "last", path="online")),
        ("PATH= Own Part ,samples", Protocol(mean="samples", path="Own Part")),  # a name keeps its capitals
        ("path=global", Protocol(path="global")),  # not the moment of that name
    ],
)
def test_parsing(text: str, expected: Protocol) -> None:
    assert Protocol.parse(text) == expected
    assert Protocol.parse(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("traned", "Did you mean 'trained'"),
        ("best-validaton", "Did you mean 'best-validation'"),
        ("trained,received", "chooses the moment twice"),
        ("own,received", "chooses the moment twice"),
        ("last,last5", "chooses the when twice"),
        ("last0", "K is 1 or more"),
        ("", "unknown part of a protocol ''"),
        ("last,", "unknown part of a protocol ''"),
        ("path", "Did you mean 'path=NAME'"),
        ("path=", "path is ''; expected a name"),
        ("path=a,last,path=b", "chooses the path twice"),
    ],
)
def test_mistaken_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Protocol.parse(text)


def test_a_mistaken_protocol_in_python() -> None:
    for wrong in (
        {"moment": "later"},
        {"when": "first"},
        {"when": "mean-last-0"},
        {"when": "last5"},
        {"mean": "median"},
    ):
        with pytest.raises(ConfigError, match="unknown"):
            Protocol(**wrong)
    for path in ("", "a,b", " a"):  # could not be read back
        with pytest.raises(ConfigError, match="a name without commas"):
            Protocol(path=path)


def test_the_sentence_under_a_table() -> None:
    assert Protocol().describe() == (
        "Test accuracy at each method's own moment, round with the best mean validation accuracy, mean over clients."
    )
    assert "(received)" in Protocol().describe([outcome(RUN)])
    assert "(received; trained: toy)" in Protocol().describe([outcome(PARTIAL), outcome(RUN)])
    text = Protocol.parse("trained,best-test,samples").describe()
    assert "after local training" in text
    assert "optimistic" in text
    assert "mean over all test images" in text
    assert "mean of the last 5 evaluated rounds" in Protocol.parse("last5").describe()
    assert Protocol.parse("last,path=online").describe() == (
        "Test accuracy of the path online by itself, at each method's own moment, last round, mean over clients."
    )
    assert "validation accuracy of that path, mean" in Protocol(path="online").describe()


# --- classes ---------------------------------------------------------------------------------------------------------


def test_balanced_accuracy_and_f1_agree_with_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    for classes in (2, 5, 9):
        actual, predicted = draw.integers(0, classes, 40), draw.integers(0, classes - 1, 40)
        if classes == 9:
            actual = actual % 5  # classes that do not occur, some of which are predicted
        counts = {
            "right": np.bincount(actual[actual == predicted], minlength=classes).tolist(),
            "predicted": np.bincount(predicted, minlength=classes).tolist(),
            "actual": np.bincount(actual, minlength=classes).tolist(),
        }
        with np.errstate(all="ignore"):
            assert balanced_accuracy(counts) == pytest.approx(
                np.mean([np.mean(predicted[actual == c] == c) for c in np.unique(actual)])
            )
            if classes != 9:
                assert balanced_accuracy(counts) == pytest.approx(balanced_accuracy_score(actual, predicted))
        assert macro_f1(counts) == pytest.approx(f1_score(actual, predicted, average="macro", zero_division=0))


def test_class_figures_are_there_for_the_kept_rounds_only() -> None:
    def counts(right: list[int]) -> dict[str, Any]:
        of_client = {"right": right, "predicted": [6, 4], "actual": [5, 5]}
        return {"received": {"test": {"b": {**of_client, "actual": [0, 0]}, "a": of_client}}}

    run = replace(
        RUN, classes={"best": {"round": 1, "scores": counts([5, 3])}, "last": {"round": 5, "scores": counts([2, 3])}}
    )
    best = outcome(run)
    assert best.balanced == {"a": pytest.approx(0.8)}  # b has no images of any class
    assert best.f1 == {"a": pytest.approx((10 / 11 + 6 / 9) / 2)}
    assert outcome(run, Protocol(when="last")).balanced == {"a": pytest.approx(0.5)}
    assert outcome(run, Protocol(when="mean-last-2")).balanced == {}
    assert outcome(run, Protocol(when="best-validation", mean="samples")).f1 == {}


# --- over seeds and against training alone ---------------------------------------------------------------------------


def at(seed: int, a: float, b: float) -> Outcome:
    return Outcome("toy", seed, "received", (1,), {"a": a, "b": b}, (a + b) / 2, min(a, b), abs(a - b) / 2)


def test_mean_and_sample_deviation_over_seeds() -> None:
    summary = summarise([at(0, 0.5, 0.7), at(1, 0.6, 0.9), at(2, 0.7, 0.2)])
    assert summary.mean.mean == pytest.approx((0.6 + 0.75 + 0.45) / 3)
    assert summary.mean.deviation == pytest.approx(0.15)
    assert summary.accuracy["a"].mean == pytest.approx(0.6)
    assert summary.accuracy["a"].deviation == pytest.approx(0.1)
    assert summary.worst.mean == pytest.approx((0.5 + 0.6 + 0.2) / 3)
    assert summary.runs == 3
    assert summarise([at(0, 0.5, 0.7)]).mean == Figure(0.6, None)
    assert figure([1.0, 3.0]).deviation == pytest.approx(sqrt(2))


def test_the_gain_is_taken_seed_by_seed() -> None:
    better = gain([at(0, 0.5, 0.7), at(1, 0.8, 0.9), at(7, 0.0, 0.0)], [at(1, 0.7, 0.9), at(0, 0.6, 0.6)])
    assert better is not None
    assert better.clients["a"].mean == pytest.approx(0.0)
    assert better.clients["a"].deviation == pytest.approx(sqrt(0.02))
    assert better.clients["b"].mean == pytest.approx(0.05)
    assert better.mean.mean == pytest.approx((0.0 + 0.05) / 2)
    assert gain([at(0, 0.5, 0.7)], [at(1, 0.5, 0.7)]) is None
    assert gain([at(0, 0.5, 0.7)], []) is None
    with pytest.raises(RecordError, match="same federation"):
        gain([at(0, 0.5, 0.7)], [replace(at(0, 0.5, 0.7), accuracy={"a": 0.5})])
