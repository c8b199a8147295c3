"""Contenders side by side: made and warmed up one after the other, then taking turns, round by round.

Whatever else the machine does meets all of them. On a GPU, which nobody else uses, each is through before the next is
made: many recordings at once make launching one slow, and a run has those of one engine. Figures are medians over
rounds.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from fedprism.bench.machine import Memory, wait
from fedprism.bench.serial import SERIAL, Serial, Taken, copied, defaults
from fedprism.config import Config
from fedprism.engines.choose import make_engine
from fedprism.engines.client import make_info
from fedprism.engines.cuda_graphs import CudaGraphs
from fedprism.engines.loop import Loop, make_loop
from fedprism.engines.numerics import choose_precision, numerics
from fedprism.errors import FedprismError
from fedprism.federation import Federation
from fedprism.methods import make

Weights = Mapping[str, Mapping[str, Tensor]]  # the server's and each client's
Tell = Callable[[str], None]
FAILURES = (FedprismError, RuntimeError, ImportError, OSError, MemoryError)  # no memory is a RuntimeError in PyTorch


@dataclass(frozen=True)
class Pace:
    """How long is measured: so many rounds, or fewer once the seconds are spent, but never fewer than `least`."""

    rounds: int = 5
    least: int = 1
    seconds: float = 15.0

    def steps(self, contenders: int) -> int:
        """Of a row's progress: each warms up, is measured, and does a round for its memory."""
        return contenders * (self.rounds + 2)


class Contender(Protocol):
    """Something that can do the rounds of a workload."""

    threads: int  # that compute at the same time, of all its processes together
    cold: int  # rounds until it is warm

    def one_round(self, round: int) -> Taken: ...
    def weights(self) -> Weights: ...  # empty: it has none that could be compared
    def facts(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Entry:
    """A contender to be: its name in the table, and what makes it."""

    name: str
    make: Callable[[], Contender]


@dataclass
class Standing:
    """What is known of a contender so far."""

    memory: Memory
    warm_up: float = 0.0  # seconds of making it and of its first round
    difference: float | None = None  # from the first contender's weights, after the first round
    taken: list[Taken] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)  # its threads and facts, and the most memory it took

    def through(self, pace: Pace) -> bool:
        enough = sum(each.whole for each in self.taken) >= pace.seconds and len(self.taken) >= pace.least
        return enough or len(self.taken) >= pace.rounds


@dataclass(frozen=True)
class Outcome:
    """What a comparison found: a dict a contender, and why others are not among them."""

    results: list[dict[str, Any]]
    left_out: dict[str, str]
    moved: float  # the largest change of one of the server's weights in the first round


def race(entries: Sequence[Entry], samples: int, device: torch.device, pace: Pace, tell: Tell) -> Outcome:
    """Measure all contenders on `samples` training images a round; the first one is what the others are compared to."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as in a run, whoever is first to start cuBLAS
    standings: dict[str, Standing] = {}
    contenders: dict[str, Contender] = {}  # those that are open
    left_out: dict[str, str] = {}
    reference: Weights = {}
    moved = 0.0

    def attempt(name: str, step: Callable[[], None]) -> None:
        """One that fails is closed and left out; the others are measured all the same."""
        try:
            step()
        except FAILURES as error:
            left_out[name] = _reason(error)
            standings.pop(name, None)
            if name in contenders:
                contenders.pop(name).close()

    def warm_up(entry: Entry) -> None:
        nonlocal reference, moved
        standing, begun = Standing(Memory(device)), time.perf_counter()
        contender = contenders[entry.name] = entry.make()
        first = {} if reference else copied({n: t.cpu() for n, t in contender.weights().get("server", {}).items()})
        contender.one_round(0)
        standing.memory.made()
        weights = contender.weights()
        if reference and weights:
            standing.difference = _finite(largest_difference(reference, weights))
        elif weights:
            moved = _finite(largest_difference({"server": first}, weights))
            reference = weights
        standing.warm_up = time.perf_counter() - begun
        for turn in range(1, contender.cold):
            contender.one_round(turn)
        standings[entry.name] = standing

    def one_round(name: str, turn: int) -> None:
        if not standings[name].through(pace):
            standings[name].taken.append(contenders[name].one_round(contenders[name].cold + turn))

    def memory(name: str) -> None:
        standing, last = standings[name], contenders[name].cold + pace.rounds
        standing.told = {"threads": contenders[name].threads, "facts": contenders[name].facts()}
        standing.told["peak_memory_bytes"] = standing.memory.most(
            lambda: contenders[name].one_round(last), lambda: contenders.pop(name).close()
        )

    def measure(some: Sequence[Entry]) -> None:
        for entry in some:
            tell(f"{entry.name}, warming up")
            attempt(entry.name, partial(warm_up, entry))
        for turn in range(pace.rounds):
            for name in list(contenders):
                tell(f"{name}, round {turn + 1}")
                attempt(name, partial(one_round, name, turn))
        for name in list(contenders):
            tell(f"{name}, memory")
            attempt(name, partial(memory, name))

    try:
        for group in [[entry] for entry in entries] if device.type == "cuda" else [entries]:
            measure(group)
    finally:
        for contender in contenders.values():
            contender.close()
    base = next(iter(standings.values()), None)
    return Outcome([figures(n, each, base or each, samples) for n, each in standings.items()], left_out, moved)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _finite(difference: float) -> float:
    """A difference that says something; and the file of results has no other numbers."""
    if math.isinf(difference):
        raise FedprismError("its weights after the first round, or those it is compared to, are not all finite.")
    return difference


def figures(name: str, standing: Standing, base: Standing, samples: int) -> dict[str, Any]:
    """One contender's row."""
    train, whole, evaluate = (_median(standing, part) for part in ("train", "whole", "evaluate"))
    return {
        "name": name,
        "train_per_second": _rounded(samples / train),
        "round_per_second": _rounded(samples / whole),
        "train_ratio": round(_median(base, "train") / train, 3),
        "round_ratio": round(_median(base, "whole") / whole, 3),
        "seconds": {
            "train": [_rounded(each.train) for each in standing.taken],
            "aggregate": [_rounded(each.aggregate) for each in standing.taken],
            "evaluate": [_rounded(each.evaluate) for each in standing.taken],
            "round": [_rounded(each.whole) for each in standing.taken],
        },
        "evaluate_share": round(evaluate / whole, 3),
        "warm_up_seconds": _rounded(standing.warm_up),
        "largest_difference": standing.difference,
        **standing.told,
    }


def largest_difference(a: Weights, b: Weights) -> float:
    """Of all float leaves that both have, the largest difference; the server's leaves must be the same ones.

    A number that is not finite, on either side, makes it infinite.
    """
    floats, others = ({n for n, t in each.get("server", {}).items() if t.is_floating_point()} for each in (a, b))
    odd = floats ^ others
    if odd:
        raise FedprismError(f"two contenders have other weights on the server: {', '.join(sorted(odd)[:3])}.")
    found = [
        float((tensor.to(b[owner][name].device) - b[owner][name]).abs().max())
        for owner in a.keys() & b.keys()
        for name, tensor in a[owner].items()
        if name in b[owner] and tensor.is_floating_point() and tensor.numel()
    ]
    return max(found, default=0.0) if all(map(math.isfinite, found)) else math.inf


def _median(standing: Standing, part: str) -> float:
    return float(statistics.median(getattr(each, part) for each in standing.taken))


def _rounded(value: float) -> float:
    """Four digits: no timing has more.

    >>> _rounded(123456.7), _rounded(0.00123456)
    (123500.0, 0.001235)
    """
    return float(f"{value:.4g}")


# --- contenders ------------------------------------------------------------------------------------------------------


def open_loop(config: Config, federation: Federation, device: torch.device) -> Loop:
    """The round loop on the engine that the configuration names."""
    method = make(config.method)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    engine = make_engine(method, config, info, federation, device)
    try:
        return make_loop(method, config, info, federation, engine, device)
    except BaseException:
        engine.close()
        raise


class Engined:
    """The round loop on one of the engines."""

    def __init__(self, config: Config, federation: Federation, device: torch.device) -> None:
        self.config, self.device = config, device
        with numerics(config.run, device):
            self.loop = open_loop(config, federation, device)
        self.engine = self.loop.engine
        self.cold = 2 if isinstance(self.engine, CudaGraphs) else 1  # in the second it finds its slots
        self.threads = config.run.threads * min(getattr(self.engine, "workers", 1), len(federation.clients))
        if device.type == "cuda":
            untimed = self.engine.train

            def train(round: int, requests: Any) -> Any:
                answers = untimed(round, requests)
                wait(device)  # or the end of training would be timed before the device is through
                return answers

            self.engine.train = train  # type: ignore[method-assign]

    def one_round(self, round: int) -> Taken:
        with numerics(self.config.run, self.device):
            begun = time.perf_counter()
            record, diverged = self.loop.one_round(round)
            wait(self.device)
            whole = time.perf_counter() - begun
        if diverged or record.failed:
            reasons = ", ".join(f"{client}: {reason}" for client, reason in list(record.failed.items())[:2])
            raise FedprismError(f"round {round} was not done by every client: {reasons}.")
        if not record.scores:
            raise FedprismError(f"round {round} was not evaluated; a whole round is.")
        return Taken(record.seconds["train"], record.seconds["aggregate"], record.seconds["evaluate"], whole)

    def weights(self) -> Weights:
        states = {client: self.loop.states[client] for client in self.loop.info.clients}
        return {"server": self.loop.server, **{client: state for client, state in states.items() if state is not None}}

    def facts(self) -> dict[str, Any]:
        """What the engine tells of itself, where it does."""
        told = getattr(self.engine, "facts", None)
        with numerics(self.config.run, self.device):
            return dict(json.loads(json.dumps(told(), default=str))) if callable(told) else {}

    def close(self) -> None:
        self.engine.close()
        self.loop.states.close()


class ByHand:
    """The plain loop of `serial.py`."""

    cold = 1

    def __init__(
        self, config: Config, federation: Federation, device: torch.device, threads: int | None = None
    ) -> None:
        self.threads = threads or config.run.threads
        self.settings = (choose_precision(config.run.precision, device) == "tf32", self.threads)
        with self.context():
            info = make_info(config, federation.names, federation.classes, federation.shape)
            self.serial: Serial = SERIAL[config.method.name](config, info, federation, device)

    def context(self) -> AbstractContextManager[None]:
        return defaults(*self.settings)

    def one_round(self, round: int) -> Taken:
        with self.context():
            return self.serial.one_round(round)

    def weights(self) -> Weights:
        return self.serial.weights()

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing is left running."""
