"""Learning-rate schedules: a factor per round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from fedprism import limits
from fedprism.config import Named, TrainConfig, positive, setting, structure
from fedprism.errors import ConfigError
from fedprism.registry import Registry

SCHEDULES: Registry[type[Constant]] = Registry("schedule")


@SCHEDULES.register("none")
@dataclass(frozen=True)
class Constant:
    """The same learning rate in every round."""

    def factor(self, round: int, rounds: int) -> float:
        return 1.0


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(Constant):
    """From the full rate down to zero along half a cosine."""

    def factor(self, round: int, rounds: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * round / rounds))


@SCHEDULES.register("step")
@dataclass(frozen=True)
class Step(Constant):
    """Times `gamma` after every `every` rounds."""

    every: int = setting(10, "rounds between two steps", positive, "1 or more")
    gamma: float = setting(0.5, "factor of a step", positive, "above 0")

    def factor(self, round: int, rounds: int) -> float:
        return float(self.gamma ** (round // self.every))


@SCHEDULES.register("exponential")
@dataclass(frozen=True)
class Exponential(Constant):
    """Times `gamma` after every round."""

    gamma: float = setting(0.99, "factor of a round", positive, "above 0")

    def factor(self, round: int, rounds: int) -> float:
        return float(self.gamma**round)


def learning_rate(train: TrainConfig, round: int, base: float | None = None) -> float:
    """The learning rate of a round, counted from 0."""
    # After the last round, where its result is evaluated, the last round's rate holds.
    round, full = min(round, train.rounds - 1), train.optimizer.lr if base is None else base
    try:
        rate = full * make_schedule(train.schedule).factor(round, train.rounds)
    except OverflowError:
        rate = math.inf
    if rate > limits.NUMBER:
        raise ConfigError(
            f"train.schedule makes the learning rate of round {round + 1} larger than {limits.NUMBER:g}; "
            "expected a smaller train.optimizer.lr, or a gamma of at most 1."
        )
    return rate


@lru_cache(maxsize=16)
def make_schedule(named: Named) -> Constant:
    """The schedule of a configuration."""
    return structure(dict(named.settings), SCHEDULES[named.name], "train.schedule")
