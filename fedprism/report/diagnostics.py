"""What methods report of their inside, from records: each value per client and round, and the short table of one run.

Names and values are those of the records; nothing here depends on a method. A client that was not tested (or did not
train) in a round counts with its latest value, as in the tables of accuracy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean

from fedprism.records import Protocol, RunRecord, Score, outcome
from fedprism.records.standing import Standing
from fedprism.report.formats import Entry, Grid
from fedprism.report.table import MANY

WHOLE = "whole model"
_QUANTILE = re.compile(r"(.+)/q(\d{2,3})")

Course = dict[int, float]  # round -> value
Courses = dict[str, dict[str, Course]]  # name -> client -> course


@dataclass(frozen=True)
class Diagnostics:
    """One run's test at a moment and its training, of the first clients. Values that are not finite are left out."""

    branches: Courses = field(default_factory=dict)  # accuracy of each branch and of the whole model, 0 to 1
    means: dict[str, Course] = field(default_factory=dict)  # the same, mean over all clients that were tested by then
    values: Courses = field(default_factory=dict)  # means and quantiles over the test images
    logs: Courses = field(default_factory=dict)  # means over the training of a round, without losses and transforms

    @property
    def last(self) -> int:
        """The last evaluated round."""
        tested = [*self.means.values(), *(course for of in self.values.values() for course in of.values())]
        return max((max(course) for course in tested), default=0)


def diagnostics_of(record: RunRecord, moment: str | None = None) -> Diagnostics:
    """All that a run records of the inside of its method, at the method's own moment unless another is named."""
    found, standing = Diagnostics(), Standing(moment or record.moment, "test")
    shown, logged = record.clients[:MANY], dict[str, Mapping[str, float]]()
    elsewhere = {name for of_transform in record.transforms.values() for name in of_transform}  # a table of their own
    latest: dict[str, dict[str, float]] = {}  # branch -> client -> its latest accuracy
    for each in record.rounds:
        tested = each.scores.get(standing.moment, {}).get(standing.split, {})
        for client, score in tested.items():
            own = _branches(score)
            for name in (*latest, *own):
                of_clients = latest.setdefault(name, {})
                of_clients.pop(client, None)
                of_clients |= {client: own[name]} if name in own else {}
        if standing.add(each):
            for name, of_clients in latest.items():
                found.means.setdefault(name, {}).update({each.round: fmean(of_clients.values())} if of_clients else {})
        for client in (name for name in shown if name in standing.latest) if tested else ():
            _add(found.branches, client, each.round, _branches(standing.latest[client]))
            _add(found.values, client, each.round, standing.latest[client].diagnostics)
        for client in (name for name in shown if name in each.logs):
            own = {n: v for n, v in each.logs[client].items() if not n.startswith("loss/")}
            logged[client] = {n: v for n, v in own.items() if n not in elsewhere}
        for client, values in logged.items() if each.logs else ():
            _add(found.logs, client, each.round, values)
    return found


def _branches(score: Score) -> dict[str, float]:
    """The accuracy of every branch and of the whole model; empty where the model has no branches."""
    right = {**score.branches, WHOLE: score.correct} if score.branches and score.total else {}
    return {name: count / score.total for name, count in right.items()}


def _add(courses: Courses, client: str, round: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if isfinite(value):
            courses.setdefault(name, {}).setdefault(client, {})[round] = value


def families(names: Iterable[str]) -> tuple[list[str], dict[str, dict[int, str]]]:
    """Names that are no quantiles, and quantiles by the value that they belong to.

    >>> families(["pir", "s/q05", "s/q100"])
    (['pir'], {'s': {5: 's/q05', 100: 's/q100'}})
    """
    plain: list[str] = []
    quantiles: dict[str, dict[int, str]] = {}
    for name in names:
        match = _QUANTILE.fullmatch(name)
        if match:
            quantiles.setdefault(match[1], {})[int(match[2])] = name
        else:
            plain.append(name)
    return plain, quantiles


def last_values(record: RunRecord, protocol: Protocol | str | None = None) -> Grid | None:
    """The values at a protocol's moment and last chosen round, a row per client; None where nothing is reported."""
    chosen = outcome(record, Protocol.parse(protocol) if isinstance(protocol, str) else protocol)
    found, last = diagnostics_of(record, chosen.moment), chosen.rounds[-1]
    names, quantiles = families(found.values)
    if not (found.branches or found.values):
        return None

    def value(courses: Mapping[str, Course], client: str) -> float | None:
        return courses.get(client, {}).get(last)

    rows = []
    for client in record.clients[:MANY]:
        cells = [_shown(value(courses, client), ".1f", 100) for courses in found.branches.values()]
        cells += [_shown(value(found.values[name], client)) for name in names]
        for of in quantiles.values():
            low, middle, high = (_shown(value(found.values.get(of.get(q, ""), {}), client)) for q in (5, 50, 95))
            cells.append(f"{middle} ({low} to {high})")
        rows.append(tuple(Entry(text) for text in (client, *cells)))
    notes = [f"Test images, moment {chosen.moment}, round {last}."]
    if found.branches:
        notes.append(f"{', '.join(found.branches)}: accuracy in percent.")
    if names:
        notes.append(f"{', '.join(names)}: mean.")
    if quantiles:
        notes.append(f"{', '.join(quantiles)}: median (5th to 95th percentile).")
    if len(record.clients) > MANY:
        notes.append(f"The first {MANY} of {len(record.clients)} clients; metrics.jsonl has the others.")
    return Grid(("client", *found.branches, *names, *quantiles), tuple(rows), (" ".join(notes),))


def _shown(value: float | None, form: str = "#.3g", times: int = 1) -> str:
    return "–" if value is None else format(times * value, form).rstrip(".")
