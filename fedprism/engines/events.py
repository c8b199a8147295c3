"""What the round loop tells its callbacks: plain data about the plan, each round, and the states after it.

Records, progress bars and trackers see nothing else of a run, so the arrow from engines to them stays one-way.
Rounds count from 1; round 0 is the first state, before any training. `R` rounds make `R + 1` records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedprism.config import Config
from fedprism.methods.base import State as State

Status = Literal["finished", "diverged", "interrupted"]


@dataclass(frozen=True)
class Score:
    """One model on one client's part of the data: counts, so that any mean can be taken afterwards."""

    correct: int
    total: int
    loss: float  # the sum over the images; may be infinite or not a number
    right: tuple[int, ...] = ()  # images of each class that were recognised
    predicted: tuple[int, ...] = ()  # images that were taken for each class
    actual: tuple[int, ...] = ()  # images of each class
    paths: Mapping[str, int] = field(default_factory=dict)  # images that a part of the model by itself recognised
    inside: Mapping[str, float] = field(default_factory=dict)  # what the method shows of itself: means, quantiles


Scores = Mapping[str, Mapping[str, Mapping[str, Score]]]  # moment -> split -> client


@dataclass(frozen=True)
class RoundRecord:
    """What happened in one round."""

    round: int
    cohort: tuple[str, ...] = ()  # who was sampled
    failed: Mapping[str, str] = field(default_factory=dict)  # client -> reason
    down: Mapping[str, int] = field(default_factory=dict)  # client -> bytes sent to it
    up: Mapping[str, int] = field(default_factory=dict)  # client -> bytes it sent
    logs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # client -> name -> mean value
    scores: Scores = field(default_factory=dict)  # empty when this round was not evaluated
    seconds: Mapping[str, float] = field(default_factory=dict)  # train, aggregate, evaluate, total


@dataclass(frozen=True)
class Snapshot:
    """All that is needed to go on after `round`: randomness is keyed, so no generator is part of it.

    States lie on the run's device and are never changed in place. A state that did not change since the last snapshot
    is the same object, or holds the same tensor objects.
    """

    round: int
    server: State  # with what the optimiser of the server keeps (`serverside.packed`)
    clients: Mapping[str, State | None]  # None: this client has never trained


@dataclass(frozen=True)
class Plan:
    """What is about to run."""

    config: Config
    method: str  # its id
    clients: tuple[str, ...]
    samples: Mapping[str, tuple[int, int, int]]  # client -> train, validation, test
    class_names: tuple[str, ...]
    shape: tuple[int, ...]  # of an image: channels, height, width; of a text: length, words
    parameters: Mapping[str, int]  # client -> parameters of its model
    rounds: int
    first_round: int = 0  # the first that will be reported: 0 for a new run, r + 1 after a checkpoint of round r
    moment: str = "received"  # the method's own
    reveals: str = ""  # what others learn of a client
    images: Mapping[str, str] = field(default_factory=dict)  # client -> fingerprint of its data
    device: str = "cpu"  # where it runs
    engine: str = "inprocess"  # what runs it


class Callback:
    """Base class: does nothing. The loop calls `begin`, then `round` after every round (0 included), then `end`.

    Within a round an engine calls `clients` whenever one has trained, and again whenever one has been tested.
    """

    def begin(self, plan: Plan) -> None:
        """Before the first round."""

    def clients(self, done: int, of: int) -> None:
        """After each client of a round, in training and again in evaluation."""

    def note(self, text: str) -> None:
        """What takes long now beside the clients, such as compiling; an empty text: it is done."""

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """After each round."""

    def end(self, status: Status) -> None:
        """After the last round, or when the run diverged or was interrupted."""
