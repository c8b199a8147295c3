"""Where each client stands: its latest score at one moment and split, and the best round by the mean over clients.

Not every round tests every client (`evaluate.clients: participants`, or the moment `trained` where only some train).
A client that was not tested in a round counts with its latest score before it. Rounds are compared only at the widest
coverage: a mean over the few clients that have been tested so far never beats a mean over more of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import fsum, nan

from fedprism.round.events import RoundRecord, Score


def mean(values: Mapping[str, float], weights: Mapping[str, int] | None = None) -> float:
    """The mean over clients, or over images where `weights` has their numbers. Sums are exact, in any order."""
    if weights is None:
        return fsum(values.values()) / len(values)
    return fsum(value * weights[name] for name, value in values.items()) / sum(weights[name] for name in values)


def part(record: RoundRecord, moment: str, path: str) -> RoundRecord:
    """The round at this moment as if one branch were the whole model; clients without that branch are left out."""
    splits = record.scores.get(moment, {})
    alone = {
        split: {n: Score(s.branches[path], s.total, nan) for n, s in scores.items() if path in s.branches}
        for split, scores in splits.items()
    }
    return replace(record, scores={moment: alone})


@dataclass
class Standing:
    """Each client's latest score, and sums over all of them. An update costs only what the round has tested."""

    moment: str
    split: str
    latest: dict[str, Score] = field(default_factory=dict)
    tested: int = 0  # clients with images
    # By number of images of the client: few fractions, however many clients there are.
    _correct: Counter[int] = field(default_factory=Counter)
    _images: int = 0

    def add(self, record: RoundRecord) -> bool:
        """Add a round; True if it tested a client at this moment and split."""
        scores = record.scores.get(self.moment, {}).get(self.split, {})
        for client, score in scores.items():
            old = self.latest.get(client)
            if old is not None:
                self._count(old, -1)
            self._count(score, 1)
            self.latest[client] = score
        return bool(scores)

    def _count(self, score: Score, sign: int) -> None:
        if score.total:
            self.tested += sign
            self._images += sign * score.total
            self._correct[score.total] += sign * score.correct

    def accuracy(self) -> dict[str, float]:
        """Client -> accuracy; clients without images are left out."""
        return {name: score.correct / score.total for name, score in self.latest.items() if score.total}

    def images(self) -> dict[str, int]:
        return {name: score.total for name, score in self.latest.items() if score.total}

    def exact_mean(self, by: str) -> Fraction:
        """The mean accuracy over `clients` or `samples` without rounding, so that ties are ties."""
        if by == "samples":
            return Fraction(self._correct.total(), self._images)
        return sum((Fraction(c, n) for n, c in self._correct.items()), Fraction(0)) / self.tested


class Best:
    """The best round so far; of equals, the earliest. `round` is None until a round with images was added."""

    def __init__(self, moment: str, split: str = "validation", by: str = "clients") -> None:
        self.round: int | None = None
        self._standing = Standing(moment, split)
        self._by = by
        self._rank = (0, Fraction(0))

    def add(self, record: RoundRecord) -> bool:
        """Add a round; True if it is the new best."""
        if not self._standing.add(record) or not self._standing.tested:
            return False
        rank = (self._standing.tested, self._standing.exact_mean(self._by))
        if rank <= self._rank:
            return False
        self.round, self._rank = record.round, rank
        return True
