"""Contenders side by side: made and warmed up one after the other, then taking turns, round by round.

Whatever else the machine does meets all of them. Figures are medians over rounds.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedprism.bench.machine import Memory, wait
from fedprism.bench.serial import SERIAL, Serial, Taken, copied, defaults
from fedprism.config import Config
from fedprism.engines.choose import make_engine
from fedprism.engines.client import make_info
from fedprism.engines.loop import Loop, make_loop
from fedprism.engines.numerics import choose_precision, numerics
from fedprism.errors import FedprismError
from fedprism.federation import Federation
from fedprism.methods import make

Weights = Mapping[str, Mapping[str, Tensor]]  # the server's and each client's
Tell = Callable[[str], None]
FAILURES = (FedprismError, RuntimeError, ImportError)  # out of memory is a RuntimeError


@dataclass(frozen=True)
class Pace:
    """How long is measured: so many rounds, or fewer once the seconds are spent, but never fewer than `least`."""

    rounds: int = 5
    least: int = 1
    seconds: float = 15.0


class Contender(Protocol):
    """Something that can do the rounds of a workload."""

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

    name: str
    contender: Contender
    memory: Memory
    warm_up: float  # seconds of making it and of its first round
    difference: float | None  # of the first contender's weights, after the first round
    taken: list[Taken] = field(default_factory=list)

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
    standings: list[Standing] = []
    left_out: dict[str, str] = {}
    reference: Weights | None = None
    moved = 0.0
    try:
        for entry in entries:
            tell(f"{entry.name}, warming up")
            memory, begun = Memory(device), time.perf_counter()
            contender: Contender | None = None
            try:
                with memory.first():
                    contender = entry.make()
                    first = copied(contender.weights()["server"]) if reference is None else {}
                    contender.one_round(0)
            except FAILURES as error:  # the others are measured all the same
                left_out[entry.name] = _reason(error)
                if contender is not None:
                    contender.close()
                continue
            weights, apart = contender.weights(), None
            if reference is None:
                reference, moved = weights, largest_difference({"server": first}, weights)
            elif weights:
                apart = largest_difference(reference, weights)
            standings.append(Standing(entry.name, contender, memory, time.perf_counter() - begun, apart))
        reference = None
        gc.collect()
        for turn in range(1, pace.rounds + 1):
            for standing in list(standings):
                tell(f"{standing.name}, round {turn}")
                if standing.through(pace):
                    continue
                try:
                    with standing.memory.round():
                        standing.taken.append(standing.contender.one_round(turn))
                except FAILURES as error:
                    left_out[standing.name] = _reason(error)
                    standings.remove(standing)
                    standing.contender.close()
        return Outcome([figures(each, standings[0], samples) for each in standings], left_out, moved)
    finally:
        for standing in standings:
            standing.contender.close()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def figures(standing: Standing, base: Standing, samples: int) -> dict[str, Any]:
    """One contender's row."""
    train, whole, evaluate = (_median(standing, part) for part in ("train", "whole", "evaluate"))
    return {
        "name": standing.name,
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
        "peak_memory_bytes": standing.memory.peak,
        "largest_difference": standing.difference,
        "facts": standing.contender.facts(),
    }


def largest_difference(a: Weights, b: Weights) -> float:
    """Of all float leaves that both have, the largest difference; the server's leaves must be the same ones."""
    floats = {n for n, t in a["server"].items() if t.is_floating_point()}
    odd = floats ^ {n for n, t in b["server"].items() if t.is_floating_point()}
    if odd:
        raise FedprismError(f"two contenders have other weights on the server: {', '.join(sorted(odd)[:3])}.")
    found = [
        float((tensor.to(b[owner][name].device) - b[owner][name]).abs().max())
        for owner in a.keys() & b.keys()
        for name, tensor in a[owner].items()
        if name in b[owner] and tensor.is_floating_point() and tensor.numel()
    ]
    return max(found, default=0.0)


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
        return dict(json.loads(json.dumps(told(), default=str))) if callable(told) else {}

    def close(self) -> None:
        self.engine.close()
        self.loop.states.close()


class ByHand:
    """The plain loop of `serial.py`."""

    def __init__(
        self, config: Config, federation: Federation, device: torch.device, threads: int | None = None
    ) -> None:
        precision = choose_precision(config.run.precision, device)
        self.settings = (precision == "tf32", threads or config.run.threads)
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
