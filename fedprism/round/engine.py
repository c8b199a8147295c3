"""The contract between the round loop and whatever runs clients: all of it.

The loop hands an engine one `Request` per client and takes one answer per client, in any order. Uploads are added up in
client order, and one that comes early waits: an engine that begins clients roughly in this order keeps few of them in
memory. Where a client runs, on which hardware, how often it is tried again and how it is reached are the engine's
business:

- A client that fails alone (its training diverges, its machine is gone, it answers too late) is a `Failure`. Its state
  stays as it was, and the others are aggregated.
- A worker that dies is replaced by the engine, or its clients are `Failure`s. The loop never hears of workers.
- A mistake in a method is an exception: it would be the same for every client.
- A client that lives elsewhere keeps its state there. Its `Result.state` is empty, and the empty state that comes back
  in the next `Request` says that it has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedprism.errors import printable
from fedprism.methods.base import State
from fedprism.round.events import Score

ClientScores = Mapping[str, Mapping[str, Score]]  # moment -> split -> score


@dataclass(frozen=True)
class Request:
    """What one client is given: its state (None: it has never trained) and what the server sends, encoded."""

    state: State | None
    download: State


@dataclass(frozen=True)
class Checked:
    """An upload that is sound: every number is finite."""

    upload: State
    length: float  # of the update that it makes (`update_length`)
    rest: float = 0.0  # of what is no update (`rest_length`)


@dataclass(frozen=True)
class Result:
    """What one client gives back after training."""

    state: State
    upload: State  # encoded, as it is sent
    logs: Mapping[str, float]
    scores: ClientScores
    checked: Checked | None = None  # what the client itself has found of these very tensors


@dataclass(frozen=True)
class Failure:
    """Why a client gave nothing back this round."""

    reason: str  # in one short line that can be printed: it may quote what the client has sent
    non_finite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))


class Engine:
    """Where clients run. A subclass implements `train`, `evaluate` and `receive`; the rest has defaults.

    Every method answers each request exactly once, in any order. Nobody changes a tensor of a request or an answer in
    place.
    """

    name = ""
    device = "cpu"  # where it runs, for the records
    workers = 1  # clients that it runs at the same time, at most, where each of them holds a state in memory
    can_release_memory = False
    # Called after each client: how many of how many are done; and with what takes long beside clients ("": it is over).
    on_progress: Callable[[int, int], None] = staticmethod(lambda done, total: None)
    on_note: Callable[[str], None] = staticmethod(lambda text: None)

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        """Each client receives its download, trains and uploads."""
        raise NotImplementedError

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, ClientScores | Failure]]:
        """Each client receives its download and is tested. Nothing of it stays."""
        raise NotImplementedError

    def receive(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, State | Failure]]:
        """Each client receives its download and keeps what its method makes of it, without training."""
        raise NotImplementedError

    def place(self, state: State) -> State:
        """The state where this engine, and the server beside it, work with it."""
        return state

    def release_memory(self, reason: str) -> None:
        """Free some memory for the server's own work, which ran out; called where `can_release_memory`."""

    def facts(self) -> dict[str, Any]:
        """How it ran, for benchmarks."""
        return {}

    def close(self) -> None:
        """Stop whatever is running and let go of everything; the engine is not used again."""

    def listen(self, on_progress: Callable[[int, int], None], on_note: Callable[[str], None]) -> None:
        """Set who hears of progress."""
        self.on_progress, self.on_note = on_progress, on_note
