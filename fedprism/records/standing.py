"""Where each client stands: its latest score at one moment and split, and the best round by the mean over clients.

Not every round tests every client (`evaluate.clients: participants`, or the moment `trained` where only some train).
A client that was not tested in a round stands where its latest record before it put it. Rounds are compared only at the
widest coverage: a mean over the few clients that have been tested so far never beats a mean over more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import fsum, nan

from fedprism.engines.events import RoundRecord, Score


def mean(values: Mapping[str, float], weights: Mapping[str, int] | None = None) -> float:
    """The mean over clients, or over images where `weights` counts them. Exact sums: the order does not matter."""
    if weights is None:
        return fsum(values.values()) / len(values)
    return fsum(value * weights[name] for name, value in values.items()) / sum(weights[name] for name in values)


def part(record: RoundRecord, moment: str, path: str) -> RoundRecord:
    """The round at this moment as if one part of the model were all of it; clients without that part are left out."""
    splits = record.scores.get(moment, {})
    alone = {
        split: {n: Score(s.paths[path], s.total, nan) for n, s in scores.items() if path in s.paths}
        for split, scores in splits.items()
    }
    return replace(record, scores={moment: alone})


@dataclass
class Standing:
    """Each client's latest score."""

    moment: str
    split: str
    latest: dict[str, Score] = field(default_factory=dict)

    def see(self, record: RoundRecord) -> bool:
        """Take in a round; True if it tested anybody at this moment and split."""
        scores = record.scores.get(self.moment, {}).get(self.split, {})
        self.latest.update(scores)
        return bool(scores)

    def accuracy(self) -> dict[str, float]:
        """Client -> share of its images that are recognised; clients without images are left out."""
        return {name: score.correct / score.total for name, score in self.latest.items() if score.total}

    def images(self) -> dict[str, int]:
        return {name: score.total for name, score in self.latest.items() if score.total}

    def exact_mean(self, by: str) -> Fraction:
        """The mean accuracy over `clients` or `samples` without rounding, so that ties are ties."""
        if by == "samples":
            return Fraction(sum(s.correct for s in self.latest.values()), sum(self.images().values()))
        correct: Counter[int] = Counter()  # by size of the client: few fractions to add, however many clients
        for score in self.latest.values():
            correct[score.total] += score.correct
        return sum((Fraction(c, n) for n, c in correct.items() if n), Fraction(0)) / len(self.images())


class Best:
    """The best round so far; the earliest of equals. `round` is None until a round with images was seen."""

    def __init__(self, moment: str, split: str = "validation", by: str = "clients") -> None:
        self.round: int | None = None
        self._standing = Standing(moment, split)
        self._by = by
        self._rank = (0, Fraction(0))

    def see(self, record: RoundRecord) -> bool:
        """Take in a round; True if it is the new best."""
        if not self._standing.see(record) or not self._standing.images():
            return False
        rank = (len(self._standing.images()), self._standing.exact_mean(self._by))
        if rank <= self._rank:
            return False
        self.round, self._rank = record.round, rank
        return True
