"""The fast engine for one GPU: slots on streams of their own, whose training steps are recorded once and replayed.

A slot is a model of one architecture with its optimiser, scratch and recordings at fixed places. A client's state is
copied into a free slot, its steps are replayed, and its state is copied out; many slots at once keep the GPU busy. So
memory grows with slots, not with clients, and nothing waits for the GPU within a round: all numbers are read at its
end. The bits are those of `inprocess` on the same GPU, whatever the number of slots.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch

from fedprism.config import Config
from fedprism.engines.client import (
    Failure,
    Job,
    Result,
    Scores,
    launch_evaluate,
    launch_receive,
    launch_round,
    open_slot,
)
from fedprism.engines.compiled import ENGINE, Compiler, capture, launches
from fedprism.engines.evaluate import Launched, Turns, ends
from fedprism.engines.inprocess import ENGINES, Request
from fedprism.engines.replay import COMPILED, Recorder, Replay, again
from fedprism.engines.shelf import Arena, Data, Shelf
from fedprism.engines.wire import size
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Info, Me, Method, State
from fedprism.models import Arch

T = TypeVar("T")
Launch = Callable[[Job, State | None, State, Me | None], Turns[Launched[T]]]
log = logging.getLogger("fedprism")

NAME = ENGINE

MOST_SLOTS = 24  # more gave nothing on the GPU that was measured
TURN = 3e-4  # seconds for which a slot launches recordings before the next one has its turn
AHEAD = 8  # recordings that it launches in its first turn, at most, to be busy until all others have begun
BEGIN = 2.5e-4  # seconds in which the host begins with a slot and launches little, about
SHARE = 0.4  # of the memory that is free at the start: for clients' data; and as much again for their states


# Streams share hardware queues, eight by default: with more of them more slots run at once. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


class Graphs:
    """Records a function as a CUDA graph on the current stream; its memory is the slot's own."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.pool, self.seconds = torch.cuda.graph_pool_handle(), seconds
        self.first = torch.cuda.CUDAGraph()  # of nothing: a pool whose last graph is gone cannot be used again
        place = torch.zeros(1, device=torch.cuda.current_stream().device)
        capture(self.first, place.zero_, self.pool)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        graph, begun = torch.cuda.CUDAGraph(), time.perf_counter()
        try:
            capture(graph, work, self.pool)
        finally:
            self.seconds["capture_seconds"] += time.perf_counter() - begun
        return Graph(graph, work)


@dataclass(frozen=True)
class Graph:
    """A recording, and the function that it is of: what that holds must live as long, since a graph reads addresses."""

    graph: torch.cuda.CUDAGraph
    of: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


@dataclass
class Slot:
    """One place at which clients are trained, with a model of each architecture that came by."""

    stream: Any  # torch.cuda.Stream
    recorder: Recorder
    shelf: Shelf | None  # for its client's data, where not all data fit on the device
    here: dict[Arch, Me] = field(default_factory=dict)


Play = tuple[Slot, tuple[int, Callable[[], None]]]  # a slot, the steps of a recording, and what replays it


@dataclass
class Line(Generic[T]):
    """The clients that a slot has yet to serve, and what it is at."""

    slot: Slot
    clients: list[str]  # the first one is under way, if any is
    work: Turns[Launched[T]] | None = None

    def turn(
        self, begin: Callable[[Slot, str], Turns[Launched[T]]], least: int, seconds: float
    ) -> list[tuple[str, Launched[T]]]:
        """Launch so many recordings, and more while there is time; what is through with that."""
        try:
            if self.work is None:
                self.work = begin(self.slot, self.clients[0])
                next(self.work)  # up to what is launched
            end = time.perf_counter() + seconds
            for _ in range(least):
                next(self.work)
            while time.perf_counter() < end:
                next(self.work)
        except StopIteration as through:
            self.work = None
            return [(self.clients.pop(0), through.value)]
        return []


@ENGINES.register(NAME)
class CudaGraphs:
    """many clients at once on one GPU: training steps are recorded once and replayed"""

    name = NAME

    def __init__(
        self, method: Method, config: Config, info: Info, federation: Federation, device: torch.device
    ) -> None:
        self.method, self.config, self.info, self.device = method, config, info, device
        self.clients = federation.clients
        self.tell: Callable[[int, int], None] = lambda done, of: None
        self.say: Callable[[str], None] = lambda text: None
        self.cuda = device.type == "cuda"
        self.slots: list[Slot] = []
        self.most = MOST_SLOTS if config.run.slots == "auto" else config.run.slots
        self.trained = 0  # calls of `train` so far
        self.probed = config.run.slots != "auto"
        self.takes: float | None = None  # seconds of a recording alone, once that is known
        self.alone = False  # has memory run out with one slot?
        self.seconds = {"capture_seconds": 0.0, "compile_seconds": 0.0}
        self.reasons: dict[str, str] = {}  # passes that are not recorded, and why
        self.compiler = Compiler(device, self._compiling) if config.run.compile is True else None
        free = torch.cuda.mem_get_info(device)[0] if self.cuda else 2**62
        self.room = int(SHARE * free)
        self.data, self.arena = Data(federation, device, self.room), Arena(device)

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        if not requests:
            return {}
        if self.trained and not self.probed and len(requests) >= len(self.slots):
            self.probed = True
            self.most = self._probe(requests)
            self._drop()
        if self.trained and self.takes is None:
            self.takes = self._takes()
        answers = self._all(launch_round, round, requests)
        self.trained += 1
        if self.trained == 1 and self.cuda:  # what is there by now stays: looking through it again and again takes long
            gc.collect()
            gc.freeze()
        states = self._parked({client: a.state for client, a in answers.items() if isinstance(a, Result)})
        return {c: replace(a, state=states[c]) if isinstance(a, Result) else a for c, a in answers.items()}

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> dict[str, Scores | Failure]:
        answers: dict[str, Scores] = self._all(launch_evaluate, round, requests)
        return dict(answers)

    def receive(self, round: int, requests: Mapping[str, Request]) -> dict[str, State | Failure]:
        answers: dict[str, State] = self._all(launch_receive, round, requests)
        return dict(self._parked(answers))

    def close(self) -> None:
        """Let go of slots, recordings and data."""
        with suppress(RuntimeError):  # of a device that has failed; that was told already
            self._wait()  # after an exception, recordings that were launched may still run
        self.tell, self.say = lambda done, of: None, lambda text: None  # whoever listened lives longer
        self.most = 0
        self._drop()
        self.data.clear()
        if self.cuda:
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()

    def _all(self, launch: Launch[T], round: int, requests: Mapping[str, Request]) -> dict[str, T]:
        """Launch every client in a slot, largest first, each where there is least to do; read all answers together."""
        launched: dict[str, Launched[T]] = {}
        self.data.fetch(requests)
        self.arena.reset()
        self._open_slots(min(self.most, len(requests)))

        def begin(slot: Slot, client: str) -> Turns[Launched[T]]:
            data, request = self.data.at(client, slot.shelf), requests[client]
            job = Job(self.method, self.config, self.info, data, round, self.device, self.data.public)
            return launch(job, request.state, request.down, self._me(slot, job))

        fitted, waiting = bool(self.trained), self._largest_first(requests)
        while waiting := [client for client in waiting if client not in launched]:
            self._begin()
            before = torch.cuda.memory_reserved(self.device) if self.cuda else 0
            some, short = waiting if fitted else waiting[:1], ""
            lines = self._dealt(self._largest_first(requests), len(self.slots))[1]
            try:
                for client, answer in self._in_turn(begin, [[c for c in line if c in some] for line in lines]):
                    launched[client] = answer
                    self.tell(len(launched), len(requests))
            except torch.OutOfMemoryError as error:
                short = str(error)
            if short:  # past the exception, which holds what was under way; that is begun anew
                self.make_room(short)
                continue
            if not fitted:
                self._fit_memory(before)
                fitted = True
        self.alone = False
        self._join()
        return read_all({client: launched[client] for client in requests})

    def _in_turn(
        self, begin: Callable[[Slot, str], Turns[Launched[T]]], clients: Sequence[list[str]]
    ) -> Iterator[tuple[str, Launched[T]]]:
        """Serve each slot's clients, all slots in turn, so that each has something in its queue; their answers.

        The queue of a stream is not long. A launch that finds it full waits, and all other slots with it.
        """
        lines: list[Line[T]] = [Line(slot, line) for slot, line in zip(self.slots, clients, strict=True) if line]
        least, seconds = enough(len(lines), self.takes), 0.0  # at first a few each: all are under way soon
        while lines:
            for line in lines:
                with self._on(line.slot):
                    finished = line.turn(begin, least, seconds)
                yield from finished
            lines, least, seconds = [line for line in lines if line.clients], 1, TURN

    def _largest_first(self, clients: Iterable[str]) -> list[str]:
        return sorted(clients, key=lambda name: -len(self.clients[name].train))

    def _dealt(self, clients: Sequence[str], slots: int) -> tuple[list[int], list[list[str]]]:
        """So many slots' images and clients: each client goes where there is least to do."""
        loads, lines = [0] * slots, [list[str]() for _ in range(slots)]
        for client in clients:
            place = loads.index(min(loads))
            loads[place] += max(1, len(self.clients[client].train))
            lines[place].append(client)
        return loads, lines

    def _open_slots(self, count: int) -> None:
        """Slots, so many or as many as there is room for."""
        while len(self.slots) < count:
            try:
                self.slots.append(self._open())
            except torch.OutOfMemoryError:
                if not self.slots:
                    raise
                self.most = count = len(self.slots)

    def _drop(self) -> None:
        """Let go of slots that are too many."""
        for slot in self.slots[self.most :]:
            for me in slot.here.values():
                me.replay.close()
                me.replay = None
        del self.slots[self.most :]

    def _open(self) -> Slot:
        shelf = self.data.own_shelf()
        if not self.cuda:
            return Slot(None, again, shelf)
        make: Any = torch.cuda.Stream
        stream = make(self.device)
        with torch.cuda.stream(stream):
            return Slot(stream, Graphs(self.seconds), shelf)

    def _me(self, slot: Slot, job: Job) -> Me:
        arch = self.info.arch_of(job.data.name)
        if arch not in slot.here:
            me = open_slot(job)
            me.replay = Replay(me, self.device, slot.recorder, self.arena, self._not_recorded, self.compiler)
            slot.here[arch] = me
        return slot.here[arch]

    def _not_recorded(self, name: str, why: str) -> None:
        if name not in self.reasons:
            self.reasons[name] = why
            how = "is recorded as it is" if name.endswith(COMPILED) else "runs step by step on the GPU, not recorded"
            log.warning("%s: %s %s: %s.", self.method.id, name, how, why)

    def _compiling(self, text: str, seconds: float | None) -> None:
        self.say(text)
        self.seconds["compile_seconds"] += seconds or 0.0

    # --- memory ------------------------------------------------------------------------------------------------------

    def _fit_memory(self, before: int) -> None:
        """Once a slot is in use: no more of them than there is room for."""
        if not self.cuda or self.trained or self.config.run.slots != "auto":
            return
        torch.cuda.synchronize(self.device)
        one = max(1, torch.cuda.memory_reserved(self.device) - before)  # what activations took is reserved, not in use
        free = torch.cuda.mem_get_info(self.device)[0]
        self.most = max(1, min(self.most, 1 + int(0.8 * free / one)))
        self._drop()

    def make_room(self, error: str) -> None:
        """Out of memory: half the slots; what is complete stays. One slot is tried again, with all memory freed."""
        if len(self.slots) < 2 and self.alone:
            raise ConfigError(
                f"the GPU's memory does not hold one client ({error.splitlines()[0]}); take a smaller train.batch or "
                "model, or set run.device: cpu."
            )
        self._wait()
        self.alone = len(self.slots) < 2
        if not self.alone:
            self.most = len(self.slots) // 2
            warnings.warn(f"out of GPU memory: going on with {self.most} slots instead of more.", stacklevel=3)
        self._drop()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _parked(self, states: dict[str, State]) -> dict[str, State]:
        """States in pinned memory of the host where those of all clients do not fit on the device."""
        if max(map(size, states.values()), default=0) * len(self.info.clients) <= self.room:
            return states
        parked = {
            client: {name: torch.empty_like(t, device="cpu", pin_memory=self.cuda) for name, t in state.items()}
            for client, state in states.items()
        }
        for client, state in parked.items():
            for name, tensor in state.items():
                tensor.copy_(states[client][name], non_blocking=True)
        self._wait()
        return parked

    # --- streams: every slot starts after what came before, and what comes after waits for all of them ---------------

    def _begin(self) -> None:
        for slot in self.slots if self.cuda else ():
            slot.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _join(self) -> None:
        for slot in self.slots if self.cuda else ():
            torch.cuda.current_stream(self.device).wait_stream(slot.stream)

    def _on(self, slot: Slot) -> Any:
        return torch.cuda.stream(slot.stream) if self.cuda else nullcontext()

    # --- measured ----------------------------------------------------------------------------------------------------

    def _probe(self, clients: Iterable[str]) -> int:
        """How many slots are fastest for these clients: the fewest that come within one percent of the best.

        Recordings are replayed. A slot whose clients are through leaves the GPU to the others.
        """
        plays = self.longest()
        waiting = self._largest_first(clients)
        turns = range(1, len(waiting) + 1)  # that a slot has, if clients are dealt evenly
        counts = sorted({count for turn in turns if (count := math.ceil(len(waiting) / turn)) <= len(plays)})
        if len(counts) < 2:
            return self.most
        speeds = {n: self._speed(plays[:n]) for n in counts}
        times = {n: duration(self._dealt(waiting, n)[0], speeds) for n in counts}
        return next(n for n in counts if 0.99 * times[n] <= min(times.values()))

    def _takes(self) -> float | None:
        """Seconds that a recording takes alone: the slowest one of any pass and architecture."""
        here = [(slot, arch, me) for slot in self.slots for arch, me in slot.here.items()]
        plays = {(arch, name): (slot, p) for slot, arch, me in here for name, (_, p) in me.replay.longest().items()}
        taken = []
        for slot, play in plays.values():
            for _ in range(2):  # the first to warm up
                self._wait()
                begun = time.perf_counter()
                with self._on(slot):
                    play()
                self._wait()
            taken.append(time.perf_counter() - begun)
        return max(taken, default=None)

    def longest(self) -> list[Play]:
        """The longest recording of each slot that has one."""
        plays = []
        for slot in self.slots:
            found = [pair for me in slot.here.values() for pair in me.replay.longest().values()]
            if found:
                plays.append((slot, max(found, key=lambda pair: pair[0])))
        return plays

    def _speed(self, plays: list[Play]) -> float:
        """Steps a second of recordings that are replayed at once; what they do to the slots is forgotten."""
        turns = 5
        for repeats in (1, turns):  # the first to warm up
            self._wait()
            begun = time.perf_counter()
            for _ in range(repeats):
                for slot, (_, play) in plays:
                    with self._on(slot):
                        play()
            self._wait()
        return turns * sum(steps for _, (steps, _) in plays) / (time.perf_counter() - begun)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def facts(self) -> dict[str, Any]:
        """How it ran, for those who measure."""
        captured: dict[str, bool | str] = {}
        kernels: dict[str, float] = {}
        for slot in self.slots[:1] if self.cuda else ():
            for me in slot.here.values():
                for name, (steps, play) in me.replay.longest().items():
                    with self._on(slot):
                        count = launches(play.of, play.graph.pool())  # of the recording, made once more
                    captured[name] = True
                    kernels |= {} if count is None else {name: count / steps}
                me.model.zero_grad(set_to_none=True)
        facts = {"slots": len(self.slots), "captured": captured | self.reasons, "kernels_per_step": kernels}
        facts["ahead"] = enough(len(self.slots), self.takes)
        return {**facts, **self.seconds}


def enough(slots: int, takes: float | None) -> int:
    """Recordings that each slot launches at first: as many as keep it busy until all have begun.

    No more than that: some, for instance of large networks with channels last, cannot be launched a few times ahead
    without waiting, and all other slots would wait, too. `takes`: seconds of one, if that is known.

    >>> enough(20, 0.0017), enough(20, 0.005), enough(20, 0.0001), enough(1, 0.005), enough(20, None)
    (3, 1, 8, 1, 8)
    """
    return AHEAD if takes is None else max(1, min(AHEAD, round(slots * BEGIN / takes)))


def duration(loads: Sequence[int], speeds: Mapping[int, float]) -> float:
    """How long slots with so much to do take; `speeds`: what so many of them do together, given for some numbers.

    >>> duration([4, 2], {1: 1.0, 2: 1.0}), duration([4, 2], {1: 1.0, 2: 2.0})
    (6.0, 4.0)
    """
    known, seconds, done = sorted(speeds), 0.0, 0
    for through, load in enumerate(sorted(loads)):
        active = len(loads) - through  # which do equally much until the next one is through
        below, above = max(n for n in known if n <= active), min(n for n in known if n >= active)
        part = (active - below) / (above - below) if above > below else 0.0
        seconds += active * (load - done) / (speeds[below] + part * (speeds[above] - speeds[below]))
        done = load
    return seconds


def read_all(launched: Mapping[str, Launched[T]]) -> dict[str, T]:
    """All answers, with one wait for the device."""
    if not launched:
        return {}
    every = ends([tensor for each in launched.values() for tensor in each.floats])
    figures = [each.figures for each in launched.values()]
    there = [part for part in (*figures, every) if len(part)]  # what is empty may be on another device
    values = torch.cat(there).tolist() if there else []
    answers, begin, last = {}, 0, len(values) - len(every)
    for client, each in launched.items():
        end, until = begin + len(each.figures), last + len(each.floats)
        answers[client] = each.read(values[begin:end], values[last:until])
        begin, last = end, until
    return answers
