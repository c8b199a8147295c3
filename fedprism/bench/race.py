"""Compare contenders side by side: each is made and warmed up, then they take turns, round by round.

Other load on the machine therefore affects all of them. On a GPU, which is not shared, each contender finishes before
the next is made: many captured graphs at once make launches slow, and a run has those of one engine only. Results are
medians over rounds.
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
from fedprism.bench.serial import SERIAL, RoundSeconds, Serial, copied, defaults
from fedprism.config import Config
from fedprism.engines.choose import make_engine
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.numerics import choose_precision, numerics
from fedprism.errors import FedprismError
from fedprism.federation import Federation
from fedprism.methods import make
from fedprism.round.client import make_info
from fedprism.round.loop import Loop, make_loop

Weights = Mapping[str, Mapping[str, Tensor]]  # the server's and each client's
Progress = Callable[[str], None]
FAILURES = (
    FedprismError,
    RuntimeError,
    ImportError,
    OSError,
    MemoryError,
)  # out of memory is a RuntimeError in PyTorch


@dataclass(frozen=True)
class Pace:
    """How long to measure: `rounds` rounds, or fewer once `seconds` have passed, but at least `min_rounds`."""

    rounds: int = 5
    min_rounds: int = 1
    seconds: float = 15.0

    def steps(self, contenders: int) -> int:
        """Progress steps of a row: each contender warms up, is measured, and runs a round to measure its memory."""
        return contenders * (self.rounds + 2)


class Contender(Protocol):
    """An implementation that runs the rounds of a workload."""

    threads: int  # concurrent threads of all its processes
    cold: int  # rounds until it is warm

    def one_round(self, round: int) -> RoundSeconds: ...
    def weights(self) -> Weights: ...  # empty: nothing to compare
    def facts(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ContenderSpec:
    """A contender's name in the table and a function that makes it."""

    name: str
    make: Callable[[], Contender]


@dataclass
class Measurement:
    """The measurements of a contender so far."""

    memory: Memory
    warm_up: float = 0.0  # seconds for making it and its first round
    difference: float | None = None  # from the first contender's weights, after the first round
    taken: list[RoundSeconds] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # its threads, facts and peak memory

    def finished(self, pace: Pace) -> bool:
        enough = sum(each.whole for each in self.taken) >= pace.seconds and len(self.taken) >= pace.min_rounds
        return enough or len(self.taken) >= pace.rounds


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison: one dict per contender, and why others are missing."""

    results: list[dict[str, Any]]
    left_out: dict[str, str]
    moved: float  # the largest change of one of the server's weights in the first round


def race(
    entries: Sequence[ContenderSpec], samples: int, device: torch.device, pace: Pace, progress: Progress
) -> Comparison:
    """Measure all contenders on `samples` training images per round; the first one is the baseline."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as in a run, before anyone starts cuBLAS
    measurements: dict[str, Measurement] = {}
    contenders: dict[str, Contender] = {}  # those that are open
    left_out: dict[str, str] = {}
    reference: Weights = {}
    moved = 0.0

    def attempt(name: str, step: Callable[[], None]) -> None:
        """Close and leave out a contender that fails; the others continue."""
        try:
            step()
        except FAILURES as error:
            left_out[name] = _reason(error)
            measurements.pop(name, None)
            if name in contenders:
                contenders.pop(name).close()

    def warm_up(entry: ContenderSpec) -> None:
        nonlocal reference, moved
        measurement, begun = Measurement(Memory(device)), time.perf_counter()
        contender = contenders[entry.name] = entry.make()
        first = {} if reference else copied({n: t.cpu() for n, t in contender.weights().get("server", {}).items()})
        contender.one_round(0)
        measurement.memory.made()
        weights = contender.weights()
        if reference and weights:
            measurement.difference = _finite(largest_difference(reference, weights))
        elif weights:
            moved = _finite(largest_difference({"server": first}, weights))
            reference = weights
        measurement.warm_up = time.perf_counter() - begun
        for turn in range(1, contender.cold):
            contender.one_round(turn)
        measurements[entry.name] = measurement

    def one_round(name: str, turn: int) -> None:
        if not measurements[name].finished(pace):
            measurements[name].taken.append(contenders[name].one_round(contenders[name].cold + turn))

    def memory(name: str) -> None:
        measurement, last = measurements[name], contenders[name].cold + pace.rounds
        measurement.details = {"threads": contenders[name].threads, "facts": contenders[name].facts()}
        measurement.details["peak_memory_bytes"] = measurement.memory.peak(
            lambda: contenders[name].one_round(last), lambda: contenders.pop(name).close()
        )

    def measure(group: Sequence[ContenderSpec]) -> None:
        for entry in group:
            progress(f"{entry.name}, warming up")
            attempt(entry.name, partial(warm_up, entry))
        for turn in range(pace.rounds):
            for name in list(contenders):
                progress(f"{name}, round {turn + 1}")
                attempt(name, partial(one_round, name, turn))
        for name in list(contenders):
            progress(f"{name}, memory")
            attempt(name, partial(memory, name))

    try:
        for group in [[entry] for entry in entries] if device.type == "cuda" else [entries]:
            measure(group)
    finally:
        for contender in contenders.values():
            contender.close()
    base = next(iter(measurements.values()), None)
    return Comparison([figures(n, each, base or each, samples) for n, each in measurements.items()], left_out, moved)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _finite(difference: float) -> float:
    """Refuse an infinite difference, which means nothing and is not valid JSON."""
    if math.isinf(difference):
        raise FedprismError("its weights after the first round, or those it is compared to, are not all finite.")
    return difference


def figures(name: str, measurement: Measurement, base: Measurement, samples: int) -> dict[str, Any]:
    """One contender's row."""
    train, whole, evaluate = (_median(measurement, part) for part in ("train", "whole", "evaluate"))
    return {
        "name": name,
        "train_per_second": _rounded(samples / train),
        "round_per_second": _rounded(samples / whole),
        "train_ratio": round(_median(base, "train") / train, 3),
        "round_ratio": round(_median(base, "whole") / whole, 3),
        "seconds": {
            "train": [_rounded(each.train) for each in measurement.taken],
            "aggregate": [_rounded(each.aggregate) for each in measurement.taken],
            "evaluate": [_rounded(each.evaluate) for each in measurement.taken],
            "round": [_rounded(each.whole) for each in measurement.taken],
        },
        "evaluate_share": round(evaluate / whole, 3),
        "warm_up_seconds": _rounded(measurement.warm_up),
        "largest_difference": measurement.difference,
        **measurement.details,
    }


def largest_difference(a: Weights, b: Weights) -> float:
    """The largest difference of all float leaves that both have; the server's leaves must be the same.

    It is infinite if a number on either side is not finite.
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


def _median(measurement: Measurement, part: str) -> float:
    return float(statistics.median(getattr(each, part) for each in measurement.taken))


def _rounded(value: float) -> float:
    """Round to four digits: no timing has more.

    >>> _rounded(123456.7), _rounded(0.00123456)
    (123500.0, 0.001235)
    """
    return float(f"{value:.4g}")


# --- contenders ------------------------------------------------------------------------------------------------------


def open_loop(config: Config, federation: Federation, device: torch.device) -> Loop:
    """The round loop on the configured engine."""
    method = make(config.method)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    engine = make_engine(method, config, info, federation, device)
    try:
        return make_loop(method, config, info, federation, engine)
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
        self.cold = 2 if isinstance(self.engine, CudaGraphs) else 1  # it chooses its slots in the second round
        self.threads = config.run.threads * min(self.engine.workers, len(federation.clients))
        if device.type == "cuda":
            untimed = self.engine.train

            def train(round: int, requests: Any) -> Any:
                answers = list(untimed(round, requests))
                wait(device)  # launches are asynchronous: training ends when the device has finished
                return iter(answers)

            self.engine.train = train  # type: ignore[method-assign]

    def one_round(self, round: int) -> RoundSeconds:
        with numerics(self.config.run, self.device):
            begun = time.perf_counter()
            record, diverged = self.loop.one_round(round)
            wait(self.device)
            whole = time.perf_counter() - begun
        if diverged or record.failed:
            reasons = ", ".join(f"{client}: {reason}" for client, reason in list(record.failed.items())[:2])
            raise FedprismError(f"round {round} was not done by every client: {reasons}.")
        if not record.scores:
            raise FedprismError(f"round {round} was not evaluated; expected an evaluation in every round.")
        return RoundSeconds(record.seconds["train"], record.seconds["aggregate"], record.seconds["evaluate"], whole)

    def weights(self) -> Weights:
        states = {client: self.loop.states[client] for client in self.loop.info.clients}
        return {"server": self.loop.server, **{client: state for client, state in states.items() if state is not None}}

    def facts(self) -> dict[str, Any]:
        """The engine's facts as plain data."""
        with numerics(self.config.run, self.device):
            return dict(json.loads(json.dumps(self.engine.facts(), default=str)))

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

    def one_round(self, round: int) -> RoundSeconds:
        with self.context():
            return self.serial.one_round(round)

    def weights(self) -> Weights:
        return self.serial.weights()

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing to close."""
