"""What the round loop reports to its callbacks: plain data about the plan, each round, and the states after it.

Records, progress bars and trackers see nothing else of a run. Rounds count from 1; round 0 is the first state, before
any training. `R` rounds make `R + 1` records. Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fedprism.config import Config

if TYPE_CHECKING:
    from fedprism.methods.base import State

Status = Literal["finished", "diverged", "interrupted"]


@dataclass(frozen=True)
class Score:
    """One model on one part of a client's data: counts, so that any mean can be taken afterwards."""

    correct: int
    total: int
    loss: float  # the sum over the images; may be infinite or not a number
    right: tuple[int, ...] = ()  # per class: images that were recognised
    predicted: tuple[int, ...] = ()  # per class: images that were taken for it
    actual: tuple[int, ...] = ()  # per class: images that belong to it
    branches: Mapping[str, int] = field(default_factory=dict)  # images that a part of the model recognised by itself
    diagnostics: Mapping[str, float] = field(default_factory=dict)  # what the method reports: means and quantiles


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

    States are never changed in place. A state that did not change since the last snapshot is the same object, or holds
    the same tensor objects.
    """

    round: int
    server: State  # with the state of the server's optimiser (`server_optimizer.pack`)
    clients: Mapping[str, State | None]  # None: this client has never trained
    usual_length: float | None = None  # median length of the updates that were accepted last; None: there were none yet


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
    reveals: str = ""  # what others learn about a client
    images: Mapping[str, str] = field(default_factory=dict)  # client -> fingerprint of its data
    device: str = "cpu"  # where it runs
    engine: str = "inprocess"  # what runs it


class Callback:
    """Base class: does nothing. The loop calls `begin`, then `round` after every round (0 included), then `end`."""

    def begin(self, plan: Plan) -> None:
        """Before the first round."""

    def clients(self, done: int, total: int) -> None:
        """After each client of a round, in training and again in evaluation."""

    def note(self, text: str) -> None:
        """What takes long beside the clients, such as compiling. An empty text: it is over."""

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        """After each round."""

    def end(self, status: Status) -> None:
        """After the last round, or when the run diverged or was interrupted."""
