"""Protocols: which figure is reported, computed from the records alone, so that any of them can be chosen afterwards.

A protocol says at which moment the test counts, at which round or rounds, and over what the mean is taken; and, for a
model of several branches, whether one of them is tested by itself. A client that was not tested in a chosen round
counts with its latest record before it (see standing.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import stdev
from typing import Any

from fedprism.config import MOMENTS
from fedprism.errors import ConfigError, RecordError, some, unknown
from fedprism.records.read import RunRecord
from fedprism.records.standing import Best, Standing, mean, part

_MEANS = ("clients", "samples")
_WHENS = ("last", "mean-last-K", "best-validation", "best-test")
_LAST_K = re.compile(r"(?:mean-)?last-?([0-9]+)")
_AT = {
    "received": "as received from the server",
    "trained": "after local training",
    "adapted": "after adaptation",
    "global": "of the global model",
}
_PATH = "path="
_NAMED = 12  # clients that a note names, at most
_SHORT = {"last": "last", "best": "best-validation", "best-validation": "best-validation", "best-test": "best-test"}


@dataclass(frozen=True)
class Protocol:
    """How figures are computed from a run. The default is what `demo`, `compare` and `show` print.

    >>> str(Protocol.parse("trained,last5,samples"))
    'trained,mean-last-5,samples'
    """

    moment: str | None = None  # None: the method's own
    when: str = "best-validation"  # last | mean-last-K | best-validation | best-test
    mean: str = "clients"  # clients (C.Avg) | samples (D.Avg)
    path: str | None = None  # a part of the model by itself, by its name in the records; None: the whole of it

    def __post_init__(self) -> None:
        if self.moment is not None and self.moment not in MOMENTS:
            raise ConfigError(unknown("moment", self.moment, MOMENTS))
        if self.mean not in _MEANS:
            raise ConfigError(unknown("mean", self.mean, _MEANS))
        if self.when not in _SHORT.values() and self.last < 1:
            raise ConfigError(f"{unknown('choice of rounds', self.when, _WHENS)} K is 1 or more.")
        if self.path is not None and (not self.path or "," in self.path or self.path != self.path.strip()):
            raise ConfigError(f"a protocol's path is {self.path!r}; expected a name without commas, as in path=online.")

    @classmethod
    def parse(cls, text: str) -> Protocol:
        """`trained,last5,samples`: a moment, rounds, a mean and a `path=NAME`, in any order, each with a default."""
        chosen: dict[str, str | None] = {}
        value: str | None
        for given in (piece.strip() for piece in text.split(",")):
            word = given.lower()
            last = _LAST_K.fullmatch(word)
            if word.startswith(_PATH):
                key, value = "path", given[len(_PATH) :].strip()  # a name keeps its capitals
            elif word in (*MOMENTS, "own"):
                key, value = "moment", None if word == "own" else word
            elif word in _SHORT or last:
                key, value = "when", f"mean-last-{int(last[1])}" if last else _SHORT[word]
            elif word in _MEANS:
                key, value = "mean", word
            else:
                raise ConfigError(
                    unknown("part of a protocol", word, ["own", *MOMENTS, "lastK", *_SHORT, *_MEANS, "path=NAME"])
                )
            if key in chosen:
                raise ConfigError(f"the protocol {text!r} chooses the {key} twice; keep one.")
            chosen[key] = value
        return cls(**chosen)  # type: ignore[arg-type]

    def __str__(self) -> str:
        path = () if self.path is None else (f"{_PATH}{self.path}",)
        return ",".join((self.moment or "own", self.when, self.mean, *path))

    @property
    def last(self) -> int:
        """K of `mean-last-K`; 0 otherwise."""
        match = _LAST_K.fullmatch(self.when)
        return int(match[1]) if match and self.when.startswith("mean-last-") else 0

    def describe(self, outcomes: Iterable[Outcome] = ()) -> str:
        """The sentence under a table; with outcomes, also every exception that was made."""
        outcomes = list(outcomes)
        at = _AT[self.moment] if self.moment else "at each method's own moment" + _own_moments(outcomes)
        over = {"clients": "mean over clients", "samples": "mean over all test images"}[self.mean]
        by = {"clients": "mean", "samples": "pooled"}[self.mean]
        whose, its = (f" of the path {self.path} by itself,", " of that path") if self.path else ("", "")
        rounds = {
            "last": "last round",
            "best-validation": f"round with the best {by} validation accuracy{its}",
            "best-test": f"round with the best {by} test accuracy{its} "
            "(optimistic: chosen on the test images themselves)",
        }.get(self.when, f"mean of the last {self.last} evaluated rounds")
        notes = [f" {outcome.label}: {note}." for outcome in outcomes for note in outcome.notes]
        if not self.moment and len({outcome.moment for outcome in outcomes}) > 1:
            notes.insert(
                0, " Methods are tested at different moments; --protocol received or trained takes one for all."
            )
        return f"Test accuracy{whose} {at}, {rounds}, {over}." + "".join(notes)


def _own_moments(outcomes: Sequence[Outcome]) -> str:
    """` (received)`, or where methods differ ` (received; trained: fedios)`: the most frequent first, without names."""
    methods = {m: sorted({o.method for o in outcomes if o.moment == m}) for m in {o.moment for o in outcomes}}
    first, *others = sorted(methods, key=lambda moment: (-len(methods[moment]), MOMENTS.index(moment))) or [""]
    named = [f"{moment}: {', '.join(methods[moment])}" for moment in others]
    return f" ({'; '.join([first, *named])})" if first else ""


@dataclass(frozen=True)
class Outcome:
    """One run under one protocol. Accuracies are shares, 0 to 1."""

    method: str
    seed: int
    moment: str
    rounds: tuple[int, ...]  # that were chosen
    accuracy: Mapping[str, float]  # client -> mean over the chosen rounds
    mean: float
    worst: float
    spread: float  # standard deviation over the clients (of all of them: divided by n)
    balanced: Mapping[str, float] = field(default_factory=dict)  # client -> balanced accuracy, with counts per class
    f1: Mapping[str, float] = field(default_factory=dict)  # client -> macro F1, likewise
    diverged: bool = False
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.method} (seed {self.seed})"


def outcome(run: RunRecord, protocol: Protocol | None = None) -> Outcome:
    """A run's figures under a protocol. Those of a diverged run come from its records so far and are flagged."""
    protocol = protocol or Protocol()
    moment = protocol.moment or run.moment
    whole, run = run, of_path(run, protocol)
    tested = [record.round for record in run.rounds if record.scores.get(moment, {}).get("test")]
    if not tested:
        raise RecordError(_untested(whole, moment, protocol.path))
    notes = ["diverged"] if run.diverged else []
    resumed = run.info.get("resumed", ())
    for i, entry in enumerate(resumed):
        undone = any(later["round"] <= entry["round"] for later in resumed[i + 1 :])
        if entry.get("reset") and not undone:
            notes.append(f"after round {entry['round']}, {some(entry['reset'])} began anew, the state being lost")
    chosen = _choose(run, protocol, moment, tested, notes)
    standing, seen = Standing(moment, "test"), []
    for record in run.rounds[: chosen[-1] + 1]:
        standing.add(record)
        if record.round in chosen:
            seen.append(standing.accuracy())
    accuracy = {n: mean({str(i): s[n] for i, s in enumerate(seen) if n in s}) for n in _order(run, seen[-1])}
    if not accuracy:
        raise RecordError(f"{_where(run)} has no test images; set data.split.test.")
    _note_absent(run, moment, chosen, accuracy, notes)
    centre = mean(accuracy)
    balanced, f1 = _by_class(run, moment, chosen)
    return Outcome(
        method=run.method,
        seed=run.seed,
        moment=moment,
        rounds=chosen,
        accuracy=accuracy,
        mean=mean(accuracy, standing.images() if protocol.mean == "samples" else None),
        worst=min(accuracy.values()),
        spread=sqrt(mean({name: (value - centre) ** 2 for name, value in accuracy.items()})),
        balanced=balanced,
        f1=f1,
        diverged=run.diverged,
        notes=tuple(notes),
    )


def of_path(run: RunRecord, protocol: Protocol) -> RunRecord:
    """The run as if the protocol's path were its whole model; unchanged where the protocol has no path.

    There are no counts per class of a path.
    """
    if protocol.path is None:
        return run
    moment = protocol.moment or run.moment
    return replace(run, rounds=tuple(part(record, moment, protocol.path) for record in run.rounds), classes={})


def paths_of(run: RunRecord, moment: str) -> list[str]:
    """The parts of the model that were tested by themselves at this moment."""
    tests = [record.scores.get(moment, {}).get("test", {}) for record in run.rounds]
    return list(dict.fromkeys(name for scores in tests for score in scores.values() for name in score.branches))


def _choose(
    run: RunRecord, protocol: Protocol, moment: str, tested: Sequence[int], notes: list[str]
) -> tuple[int, ...]:
    if protocol.last:
        trained = [round for round in tested if round > 0] or list(tested)  # round 0 is before any training
        if len(trained) < protocol.last:
            notes.append(f"{len(trained)} instead of {protocol.last} evaluated rounds")
        return tuple(trained[-protocol.last :])
    if protocol.when == "last":
        return (tested[-1],)
    best = Best(moment, protocol.when.removeprefix("best-"), protocol.mean)
    for record in run.rounds:
        if record.scores.get(moment, {}).get("test"):
            best.add(record)
    if best.round is None:
        notes.append("no validation images, so the last round")
        return (tested[-1],)
    return (best.round,)


def _note_absent(
    run: RunRecord, moment: str, chosen: Sequence[int], accuracy: Mapping[str, float], notes: list[str]
) -> None:
    tested = [run.rounds[round].scores[moment]["test"].keys() for round in chosen]
    earlier = [name for name in accuracy if any(name not in names for names in tested)]
    if earlier:
        notes.append(
            f"{len(earlier)} of {len(accuracy)} clients count with an earlier record, being untested in a chosen round"
        )
    never = [name for name in run.clients if name not in accuracy]
    if never:
        more = f" and {len(never) - _NAMED} more of {len(run.clients)} clients" if len(never) > _NAMED else ""
        notes.append(f"without {', '.join(never[:_NAMED])}{more}, never tested")


def _order(run: RunRecord, names: Iterable[str]) -> list[str]:
    place = {name: i for i, name in enumerate(run.clients)}
    return sorted(names, key=lambda name: place.get(name, len(place)))


def _where(run: RunRecord) -> str:
    return str(run.path or f"the run of {run.method} with seed {run.seed}")


def _untested(run: RunRecord, moment: str, path: str | None) -> str:
    moments = {m for record in run.rounds for m, splits in record.scores.items() if splits.get("test")}
    if not moments and run.status in ("finished", "diverged"):
        return f"{_where(run)} has {run.status}, but none of its rounds was tested: there is nothing to show."
    if not moments:
        return f"{_where(run)} has no tested round yet (status: {run.status}); go on with it by `fedprism resume`."
    if path is not None and moment in moments:
        known = ", ".join(paths_of(run, moment)) or "none"
        return f"{run.method} has no path {path!r} at the moment {moment!r}. Its paths: {known}."
    known = ", ".join(sorted(moments, key=MOMENTS.index))
    return (
        f"{_where(run)} was not tested at the moment {moment!r}, but at: {known}. Choose one of these with --protocol."
    )


# --- figures of classes ----------------------------------------------------------------------------------------------


def balanced_accuracy(counts: Mapping[str, Sequence[int]]) -> float:
    """The mean over the classes that occur of the share that is recognised."""
    shares = [right / actual for right, actual in zip(counts["right"], counts["actual"], strict=True) if actual]
    return sum(shares) / len(shares)


def macro_f1(counts: Mapping[str, Sequence[int]]) -> float:
    """The mean of 2 right / (predicted + actual) over the classes that occur or were predicted."""
    rows = zip(counts["right"], counts["predicted"], counts["actual"], strict=True)
    scores = [2 * right / (predicted + actual) for right, predicted, actual in rows if predicted + actual]
    return sum(scores) / len(scores)


def _by_class(run: RunRecord, moment: str, chosen: Sequence[int]) -> tuple[dict[str, float], dict[str, float]]:
    """Balanced accuracy and F1 of the clients tested in the chosen round, if its counts are kept."""
    kept: list[dict[str, Any]] = [counts for counts in run.classes.values() if tuple(chosen) == (counts["round"],)]
    clients = kept[0]["scores"].get(moment, {}).get("test", {}) if kept else {}
    counted = {name: clients[name] for name in _order(run, clients) if sum(clients[name]["actual"])}
    return {n: balanced_accuracy(c) for n, c in counted.items()}, {n: macro_f1(c) for n, c in counted.items()}


# --- over seeds, and against training alone --------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """Mean and sample standard deviation over runs; None where there is a single run."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Summary:
    """One method over its seeds."""

    accuracy: Mapping[str, Figure]  # client
    mean: Figure
    worst: Figure  # of each run's worst client
    spread: Figure
    runs: int
    diverged: int


@dataclass(frozen=True)
class Gain:
    """Accuracy above that of training alone."""

    clients: Mapping[str, Figure]
    mean: Figure


def figure(values: Sequence[float]) -> Figure:
    """The mean and the sample standard deviation (divided by n - 1).

    >>> figure([1.0, 2.0, 3.0])
    Figure(mean=2.0, deviation=1.0)
    """
    return Figure(sum(values) / len(values), stdev(values) if len(values) > 1 else None)


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """The summary of one method's outcomes over seeds."""

    def over(value: Callable[[Outcome], float]) -> Figure:
        return figure([value(outcome) for outcome in outcomes])

    return Summary(
        accuracy=_per_client([outcome.accuracy for outcome in outcomes]),
        mean=over(lambda o: o.mean),
        worst=over(lambda o: o.worst),
        spread=over(lambda o: o.spread),
        runs=len(outcomes),
        diverged=sum(outcome.diverged for outcome in outcomes),
    )


def gain(outcomes: Sequence[Outcome], local: Sequence[Outcome]) -> Gain | None:
    """The gain over Local, seed by seed; None where no seed has both."""
    alone = {outcome.seed: outcome for outcome in local}
    pairs = [(outcome, alone[outcome.seed]) for outcome in outcomes if outcome.seed in alone]
    if not pairs:
        return None
    for one, other in pairs:
        if one.accuracy.keys() != other.accuracy.keys():
            raise RecordError(
                f"{one.label} has clients {', '.join(one.accuracy)}, {other.label} has {', '.join(other.accuracy)}: "
                "the gain over training alone needs runs on the same federation."
            )
    differences = [{name: value - other.accuracy[name] for name, value in one.accuracy.items()} for one, other in pairs]
    return Gain(_per_client(differences), figure([one.mean - other.mean for one, other in pairs]))


def _per_client(runs: Sequence[Mapping[str, float]]) -> dict[str, Figure]:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: figure([run[name] for run in runs if name in run]) for name in names}
