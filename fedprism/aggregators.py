"""How the server makes one state of many uploads (`server.aggregator`), for methods whose aggregation is a mean.

The mean adds uploads up as they come. All others need every upload of the round at once. Whole-number counters are
rounded.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedprism.config import Named, positive, setting
from fedprism.errors import ConfigError
from fedprism.methods.base import Method, State, average
from fedprism.methods.states import WeightedSum, added_to, length, update_of
from fedprism.plugins import Plugins

AT_ONCE = 2**20  # numbers of all uploads together that are sorted at a time


@dataclass(frozen=True)
class AcceptedUpload:
    """One accepted upload, and what an aggregator may ask about it."""

    state: State
    kinds: Mapping[str, str]
    origin: State  # what it is an update of, by name; a leaf that is not here is an update already
    length: float  # of the update (`update_length`)
    weight: float  # in a mean; the weights of all that were accepted add up to 1


@dataclass(frozen=True)
class Aggregator:
    """The weighted mean."""

    id: ClassVar[str] = ""
    idea: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "id" not in cls.__dict__:
            cls.id = cls.__name__.lower()

    @property
    def is_mean(self) -> bool:
        """Is it the mean, which can be added up?"""
        return type(self).aggregate is Aggregator.aggregate

    def aggregate(self, uploads: Sequence[AcceptedUpload]) -> State:
        """One state of all uploads, which have the same names. Changes no input in place."""
        return average([each.state for each in uploads], [each.weight for each in uploads])


AGGREGATORS: Plugins[Aggregator] = Plugins("aggregator", Aggregator)


def make_aggregator(named: Named) -> Aggregator:
    """The aggregator of a configuration."""
    return AGGREGATORS.make(named, "server.aggregator")


def check_aggregator(aggregator: Aggregator, method: Method) -> None:
    """Refuse another aggregator than the mean for a method whose aggregation is none."""
    if method.needs_all_uploads and not aggregator.is_mean:
        raise ConfigError(
            f"server.aggregator is {aggregator.id}, but {method.id} has an aggregation of "
            "its own, which is no mean of uploads. Leave it at mean."
        )


@AGGREGATORS.register("mean")
@dataclass(frozen=True)
class WeightedMean(Aggregator):
    """the weighted mean, added up as uploads come: no protection"""

    id = "mean"
    idea = "sum of weight times upload"


@AGGREGATORS.register("trimmed_mean")
@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """per number, the plain mean without the largest and the smallest values"""

    id = "trimmed_mean"
    idea = (
        "Coordinate-wise trimmed mean (Yin et al., ICML 2018). Every client counts once, whatever its weight: "
        "otherwise one that claims many images would outvote the others."
    )

    trim: float = setting(
        0.2,
        "share of uploads left out at each end, rounded up; at least one stays",
        lambda v: 0 <= v < 0.5,
        "0 to below 0.5",
    )

    def aggregate(self, uploads: Sequence[AcceptedUpload]) -> State:
        # A product such as 0.28 x 25 is a little more than 7; 9 digits are enough for a share.
        many = len(uploads)
        return _trimmed(uploads, min(-int(-round(self.trim * many, 9) // 1), (many - 1) // 2))


@AGGREGATORS.register("median")
@dataclass(frozen=True)
class Median(Aggregator):
    """per number, the median"""

    id = "median"
    idea = "Coordinate-wise median (Yin et al., ICML 2018); of an even number, the mean of the middle two."

    def aggregate(self, uploads: Sequence[AcceptedUpload]) -> State:
        return _trimmed(uploads, (len(uploads) - 1) // 2)


@AGGREGATORS.register("norm_bounded")
@dataclass(frozen=True)
class NormBounded(Aggregator):
    """the weighted mean of updates that are scaled down to a bound"""

    id = "norm_bounded"
    idea = (
        "Norm bounding (Sun et al., Can You Really Backdoor Federated Learning?, 2019): an update u becomes "
        "u min(1, max / |u|) before the weighted mean. Weights and buffers are bounded each by itself: statistics of "
        "batch norm move further than weights, and would hide a long update of these."
    )

    max: float | None = setting(
        None, "maximum length of an update, per kind of leaf; null: the median length of the round", positive, "above 0"
    )

    def aggregate(self, uploads: Sequence[AcceptedUpload]) -> State:
        kinds = dict.fromkeys(kind for each in uploads for kind in each.kinds.values() if kind != "scalar")
        lengths = {kind: [float(length(_update(each, kind))) for each in uploads] for kind in kinds}
        bounds = {kind: statistics.median(lengths[kind]) if self.max is None else self.max for kind in kinds}
        total = WeightedSum()
        for place, each in enumerate(uploads):
            state = dict(each.state)
            for kind, bound in bounds.items():
                if lengths[kind][place] > bound:
                    update = {name: u * (bound / lengths[kind][place]) for name, u in _update(each, kind).items()}
                    state |= added_to(each.origin, update)
            total.add(state, each.weight)
        return total.result()


def _update(sent: AcceptedUpload, kind: str) -> State:
    """The update that the floating leaves of a kind make."""
    leaves = {n: t for n, t in sent.state.items() if sent.kinds.get(n) == kind and t.is_floating_point()}
    return update_of(leaves, sent.origin)


def _trimmed(uploads: Sequence[AcceptedUpload], cut: int) -> State:
    """Per number, the plain mean without the `cut` largest and smallest; whole numbers in double precision, rounded.

    A part of a leaf at a time: sorting takes several times the memory of what is sorted.
    """
    many, merged = len(uploads), State()
    columns = max(1, AT_ONCE // many)
    for name, first in uploads[0].state.items():
        dtype = first.dtype if first.is_floating_point() else torch.float64
        pieces = zip(*(torch.split(each.state[name].flatten(), columns) for each in uploads), strict=True)
        means = [torch.stack(rows).to(dtype).sort(0).values[cut : many - cut].mean(0) for rows in pieces]
        found = torch.cat(means) if dtype == first.dtype else torch.cat(means).round().to(first.dtype)
        merged[name] = found.view(first.shape)
    return merged
