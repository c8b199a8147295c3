"""The fast engine for one GPU: slots on streams of their own, whose training steps are captured once and replayed.

A slot is a model of one architecture with its optimiser, scratch and captures at fixed addresses. A client's state is
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
from fedprism.engines import ENGINES
from fedprism.engines.cuda.buffers import ClientBuffers, DeviceBuffer, PinnedPool
from fedprism.engines.cuda.capture import CapturedGraph, GraphCapture, launches
from fedprism.engines.cuda.operations import operations_for
from fedprism.engines.cuda.rounds import (
    evaluate_steps,
    read_evaluations,
    read_rounds,
    read_states,
    receive_steps,
    round_steps,
)
from fedprism.engines.cuda.steps import COMPILED, Capture, SlotCapture, Steps, no_capture
from fedprism.engines.cuda.trace import Compiler
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Info, Method, State
from fedprism.models import Arch
from fedprism.round.client import Departure, Job, open_slot
from fedprism.round.engine import ClientScores, Engine, Failure, Request, Result
from fedprism.round.training import Operations
from fedprism.store.serialize import size

P = TypeVar("P")  # what a client's work leaves on the device
T = TypeVar("T")
Work = Callable[[SlotCapture, Job, State | None, State], Steps[P]]
Read = Callable[[Mapping[str, P]], Mapping[str, T]]
log = logging.getLogger("fedprism")

NAME = "cuda-graphs"

MAX_SLOTS = 24  # more gave nothing on the GPU that was measured
TURN = 3e-4  # seconds for which a slot launches captures before the next one has its turn
AHEAD = 8  # captures that it launches in its first turn, at most, to be busy until all others have begun
BEGIN = 2.5e-4  # seconds in which the host begins with a slot and launches little, about
SHARE = 0.4  # of the memory that is free at the start: for clients' data; and as much again for their states


# Streams share hardware queues, eight by default: with more of them more slots run at once. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


@dataclass
class Slot:
    """One place at which clients are trained, with a client object of each architecture that came by."""

    stream: Any  # torch.cuda.Stream
    capture: Capture
    buffer: DeviceBuffer | None  # for its client's data, where not all data fit on the device
    operations: Operations
    here: dict[Arch, SlotCapture] = field(default_factory=dict)


@dataclass
class SlotQueue(Generic[P]):
    """The clients that a slot has yet to serve, and the work that is under way."""

    slot: Slot
    clients: list[str]  # the first one is under way, if any is
    work: Steps[P] | None = None

    def turn(self, begin: Callable[[Slot, str], Steps[P]], least: int, seconds: float) -> list[tuple[str, P]]:
        """Launch at least `least` captures, and more while there is time; the client that is finished by that."""
        try:
            if self.work is None:
                self.work = begin(self.slot, self.clients[0])
                next(self.work)  # up to what is launched
            end = time.perf_counter() + seconds
            for _ in range(least):
                next(self.work)
            while time.perf_counter() < end:
                next(self.work)
        except StopIteration as finished:
            self.work = None
            return [(self.clients.pop(0), finished.value)]
        return []


@ENGINES.register(NAME)
class CudaGraphs(Engine):
    """many clients at once on one GPU: training steps are captured once and replayed"""

    name = NAME
    can_release_memory = True

    def __init__(
        self, method: Method, config: Config, info: Info, federation: Federation, device: torch.device
    ) -> None:
        self.method, self.config, self.info = method, config, info
        self.where, self.device = device, str(device)
        self.clients = federation.clients
        self.cuda = device.type == "cuda"
        self.slots: list[Slot] = []
        self.max_slots = MAX_SLOTS if config.run.slots == "auto" else config.run.slots
        self.trained = 0  # groups of clients so far
        self.answer_size: int | None = None  # bytes of the largest so far: what is stored, and the upload
        self.probed = config.run.slots != "auto"
        self.replay_seconds: float | None = None  # of one capture alone, once that is known
        self.alone = False  # has memory run out with one slot?
        self.seconds = {"capture_seconds": 0.0, "compile_seconds": 0.0}
        self.reasons: dict[str, str] = {}  # passes that are not captured, and why
        self.compiler = Compiler(device, self._compiling) if config.run.compile is True else None
        free = torch.cuda.mem_get_info(device)[0] if self.cuda else 2**62
        self.limit = int(SHARE * free)
        self.data, self.pool = ClientBuffers(federation, device, self.limit), PinnedPool(device)

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        if self.trained and not self.probed and len(requests) >= len(self.slots):
            self.probed = True
            self.max_slots = self._probe(requests)
            self._drop_slots()
        if self.trained and self.replay_seconds is None:
            self.replay_seconds = self._time_a_replay()
        for answers in self._in_groups(round_steps, self._read_rounds, round, requests):
            self.trained += 1
            if self.trained == 1 and self.cuda:  # what exists by now stays; scanning it again and again is slow
                gc.collect()
                gc.freeze()
            results = {c: answer for c, answer in answers.items() if isinstance(answer, Result)}
            states = self._parked({c: result.state for c, result in results.items()})
            del results
            for client_id in list(answers):
                answer = answers.pop(client_id)  # which is kept by nobody but the loop
                yield client_id, replace(answer, state=states.pop(client_id)) if isinstance(answer, Result) else answer

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, ClientScores | Failure]]:
        yield from self._all(evaluate_steps, read_evaluations, round, requests).items()

    def receive(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, State | Failure]]:
        for states in self._in_groups(receive_steps, read_states, round, requests):
            yield from self._parked(states).items()

    def place(self, state: State) -> State:
        return {name: tensor.to(self.where) for name, tensor in state.items()}

    def close(self) -> None:
        """Let go of slots, captures and data."""
        with suppress(RuntimeError):  # of a device that has failed, which was reported already
            self._wait()  # after an exception, captures that were launched may still run
        self.listen(Engine.on_progress, Engine.on_note)  # listeners outlive the engine
        self.max_slots = 0
        self._drop_slots()
        self.data.clear()
        if self.cuda:
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()

    def _in_groups(
        self, work: Work[P], read: Read[P, T], round: int, requests: Mapping[str, Request]
    ) -> Iterator[dict[str, T]]:
        """The answers of all clients or, where the device does not hold so many, of some after the others."""
        clients, done = list(requests), 0
        while done < len(clients):
            at_once = 2 * MAX_SLOTS if self.answer_size is None else max(2 * MAX_SLOTS, self.limit // self.answer_size)
            group = {client_id: requests[client_id] for client_id in clients[done : done + at_once]}
            yield self._all(work, read, round, group, done, len(clients))
            done += len(group)

    def _read_rounds(self, departures: Mapping[str, Departure]) -> dict[str, Result | Failure]:
        """The answers of a group, and how much of the device one of them takes: its upload is not packed yet."""
        sizes = [size({**left.state, **left.upload}) for left in departures.values()]
        self.answer_size = max(1, self.answer_size or 0, *sizes)
        return read_rounds(departures)

    def _all(
        self,
        work: Work[P],
        read: Read[P, T],
        round: int,
        requests: Mapping[str, Request],
        done: int = 0,
        total: int | None = None,
    ) -> dict[str, T]:
        """Launch every client in a slot, largest first, each where there is least to do; read all answers together."""
        launched: dict[str, P] = {}
        self.data.fetch(requests)
        self.pool.reset()
        self._open_slots(min(self.max_slots, len(requests)))

        def begin(slot: Slot, client_id: str) -> Steps[P]:
            data, request = self.data.at(client_id, slot.buffer), requests[client_id]
            job = Job(self.method, self.config, self.info, data, round, self.data.public, slot.operations)
            return work(self._slot_capture(slot, job), job, request.state, self.place(request.download))

        fitted, waiting = bool(self.trained), self._largest_first(requests)
        while waiting := [client_id for client_id in waiting if client_id not in launched]:
            self._begin()
            before = torch.cuda.memory_reserved(self.where) if self.cuda else 0
            some, short = waiting if fitted else waiting[:1], ""
            queues = self._dealt(self._largest_first(requests), len(self.slots))[1]
            try:
                for client_id, left in self._in_turn(begin, [[c for c in queue if c in some] for queue in queues]):
                    launched[client_id] = left
                    self.on_progress(done + len(launched), total or len(requests))
            except torch.OutOfMemoryError as error:
                short = str(error)
            if short:  # past the exception, which holds what was under way; that is begun anew
                self.release_memory(short)
                continue
            if not fitted:
                self._fit_memory(before)
                fitted = True
        self.alone = False
        self._join()
        return dict(read({client_id: launched[client_id] for client_id in requests}))

    def _in_turn(self, begin: Callable[[Slot, str], Steps[P]], clients: Sequence[list[str]]) -> Iterator[tuple[str, P]]:
        """Serve each slot's clients, all slots in turn, so that each has something in its queue; what they leave.

        The queue of a stream is not long. A launch that finds it full waits, and all other slots with it.
        """
        queues: list[SlotQueue[P]] = [
            SlotQueue(s, names) for s, names in zip(self.slots, clients, strict=True) if names
        ]
        least, seconds = first_launches(len(queues), self.replay_seconds), 0.0  # so that all are under way soon
        while queues:
            for queue in queues:
                with self._on(queue.slot):
                    finished = queue.turn(begin, least, seconds)
                yield from finished
            queues, least, seconds = [queue for queue in queues if queue.clients], 1, TURN

    def _largest_first(self, clients: Iterable[str]) -> list[str]:
        return sorted(clients, key=lambda name: -len(self.clients[name].train))

    def _dealt(self, clients: Sequence[str], slots: int) -> tuple[list[int], list[list[str]]]:
        """The images and clients of each slot: each client goes where there is least to do."""
        loads, queues = [0] * slots, [list[str]() for _ in range(slots)]
        for client_id in clients:
            place = loads.index(min(loads))
            loads[place] += max(1, len(self.clients[client_id].train))
            queues[place].append(client_id)
        return loads, queues

    def _open_slots(self, count: int) -> None:
        """`count` slots, or as many as there is memory for."""
        while len(self.slots) < count:
            try:
                self.slots.append(self._open())
            except torch.OutOfMemoryError:
                if not self.slots:
                    raise
                self.max_slots = count = len(self.slots)

    def _drop_slots(self) -> None:
        """Let go of slots that are too many."""
        for slot in self.slots[self.max_slots :]:
            for captures in slot.here.values():
                captures.close()
            slot.here.clear()
        del self.slots[self.max_slots :]

    def _open(self) -> Slot:
        buffer = self.data.slot_buffer()
        if not self.cuda:
            return Slot(None, no_capture, buffer, operations_for(self.where))
        make: Any = torch.cuda.Stream
        stream = make(self.where)
        with torch.cuda.stream(stream):
            return Slot(stream, GraphCapture(self.seconds), buffer, operations_for(self.where))

    def _slot_capture(self, slot: Slot, job: Job) -> SlotCapture:
        arch = self.info.arch_of(job.data.name)
        if arch not in slot.here:
            client = open_slot(job)
            slot.here[arch] = SlotCapture(client, self.where, slot.capture, self.pool, self._uncaptured, self.compiler)
        return slot.here[arch]

    def _uncaptured(self, name: str, why: str) -> None:
        if name not in self.reasons:
            self.reasons[name] = why
            how = "is captured as it is" if name.endswith(COMPILED) else "runs step by step on the GPU, not captured"
            log.warning("%s: %s %s: %s.", self.method.id, name, how, why)

    def _compiling(self, text: str, seconds: float | None) -> None:
        self.on_note(text)
        self.seconds["compile_seconds"] += seconds or 0.0

    # --- memory ------------------------------------------------------------------------------------------------------

    def _fit_memory(self, before: int) -> None:
        """Once a slot is in use: no more of them than there is room for."""
        if not self.cuda or self.trained or self.config.run.slots != "auto":
            return
        torch.cuda.synchronize(self.where)
        one = max(1, torch.cuda.memory_reserved(self.where) - before)  # what activations took is reserved, not in use
        free = torch.cuda.mem_get_info(self.where)[0]
        self.max_slots = max(1, min(self.max_slots, 1 + int(0.8 * free / one)))
        self._drop_slots()

    def release_memory(self, reason: str) -> None:
        """Halve the slots; what is complete stays. One slot is tried again, with all memory freed."""
        if len(self.slots) < 2 and self.alone:
            raise ConfigError(
                f"the GPU's memory does not hold one client ({reason.splitlines()[0]}); take a smaller "
                "train.batch_size or model, or set run.device: cpu."
            )
        self._wait()
        self.alone = len(self.slots) < 2
        if not self.alone:
            self.max_slots = len(self.slots) // 2
            warnings.warn(f"out of GPU memory: going on with {self.max_slots} slots instead of more.", stacklevel=3)
        self._drop_slots()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def _parked(self, states: dict[str, State]) -> dict[str, State]:
        """States in pinned memory of the host where those of all clients do not fit on the device."""
        if max(map(size, states.values()), default=0) * len(self.info.clients) <= self.limit:
            return states
        parked = {
            client_id: {name: torch.empty_like(t, device="cpu", pin_memory=self.cuda) for name, t in state.items()}
            for client_id, state in states.items()
        }
        for client_id, state in parked.items():
            for name, tensor in state.items():
                tensor.copy_(states[client_id][name], non_blocking=True)
        self._wait()
        return parked

    # --- streams: every slot starts after what came before, and what comes after waits for all of them ---------------

    def _begin(self) -> None:
        for slot in self.slots if self.cuda else ():
            slot.stream.wait_stream(torch.cuda.current_stream(self.where))

    def _join(self) -> None:
        for slot in self.slots if self.cuda else ():
            torch.cuda.current_stream(self.where).wait_stream(slot.stream)

    def _on(self, slot: Slot) -> Any:
        return torch.cuda.stream(slot.stream) if self.cuda else nullcontext()

    # --- measured ----------------------------------------------------------------------------------------------------

    def _probe(self, clients: Iterable[str]) -> int:
        """How many slots are fastest for these clients: the fewest that come within one percent of the best.

        Captures are replayed. A slot whose clients are done leaves the GPU to the others.
        """
        replays = self.longest()
        waiting = self._largest_first(clients)
        turns = range(1, len(waiting) + 1)  # that a slot has, if clients are dealt evenly
        counts = sorted({count for turn in turns if (count := math.ceil(len(waiting) / turn)) <= len(replays)})
        if len(counts) < 2:
            return self.max_slots
        speeds = {n: self._speed(replays[:n]) for n in counts}
        times = {n: duration(self._dealt(waiting, n)[0], speeds) for n in counts}
        return next(n for n in counts if 0.99 * times[n] <= min(times.values()))

    def _time_a_replay(self) -> float | None:
        """Seconds that a capture takes alone: the slowest one of any pass and architecture."""
        replays: dict[tuple[Arch, str], tuple[Slot, Callable[[], None]]] = {}
        for slot in self.slots:
            for arch, captures in slot.here.items():
                replays |= {(arch, name): (slot, replay) for name, (_, replay) in captures.longest().items()}
        taken = []
        for slot, replay in replays.values():
            for _ in range(2):  # the first to warm up
                self._wait()
                begun = time.perf_counter()
                with self._on(slot):
                    replay()
                self._wait()
            taken.append(time.perf_counter() - begun)
        return max(taken, default=None)

    def longest(self) -> list[tuple[Slot, int, Callable[[], None]]]:
        """The longest capture of each slot that has one: the slot, its steps, and what replays it."""
        found = []
        for slot in self.slots:
            pairs = [pair for captures in slot.here.values() for pair in captures.longest().values()]
            if pairs:
                found.append((slot, *max(pairs, key=lambda pair: pair[0])))
        return found

    def _speed(self, replays: Sequence[tuple[Slot, int, Callable[[], None]]]) -> float:
        """Steps per second of captures that are replayed at once; what they do to the slots is forgotten."""
        turns = 5
        for repeats in (1, turns):  # the first to warm up
            self._wait()
            begun = time.perf_counter()
            for _ in range(repeats):
                for slot, _, replay in replays:
                    with self._on(slot):
                        replay()
            self._wait()
        return turns * sum(steps for _, steps, _ in replays) / (time.perf_counter() - begun)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.where)

    def facts(self) -> dict[str, Any]:
        captured: dict[str, bool | str] = {}
        kernels: dict[str, float] = {}
        for slot in self.slots[:1] if self.cuda else ():
            for captures in slot.here.values():
                for name, (steps, replay) in captures.longest().items():
                    assert isinstance(replay, CapturedGraph)
                    with self._on(slot):
                        count = launches(replay.function, replay.graph.pool())  # captured once more
                    captured[name] = True
                    kernels |= {} if count is None else {name: count / steps}
                captures.client.model.zero_grad(set_to_none=True)
        facts = {"slots": len(self.slots), "captured": captured | self.reasons, "kernels_per_step": kernels}
        facts["ahead"] = first_launches(len(self.slots), self.replay_seconds)
        return {**facts, **self.seconds}


def first_launches(slots: int, seconds: float | None) -> int:
    """Captures that each slot launches at first: as many as keep it busy until all slots have begun.

    No more than that: some, for instance of large networks with channels last, cannot be launched a few times ahead
    without waiting, and all other slots would wait, too. `seconds`: what one capture takes, if that is known.

    >>> first_launches(20, 0.0017), first_launches(20, 0.005), first_launches(20, 0.0001), first_launches(1, 0.005)
    (3, 1, 8, 1)
    >>> first_launches(20, None)
    8
    """
    return AHEAD if seconds is None else max(1, min(AHEAD, round(slots * BEGIN / seconds)))


def duration(loads: Sequence[int], speeds: Mapping[int, float]) -> float:
    """How long slots with these loads take. `speeds`: what n of them do together per second, given for some n.

    >>> duration([4, 2], {1: 1.0, 2: 1.0}), duration([4, 2], {1: 1.0, 2: 2.0})
    (6.0, 4.0)
    """
    known, seconds, done = sorted(speeds), 0.0, 0
    for finished, load in enumerate(sorted(loads)):
        active = len(loads) - finished  # which do equally much until the next one has finished
        below, above = max(n for n in known if n <= active), min(n for n in known if n >= active)
        part = (active - below) / (above - below) if above > below else 0.0
        seconds += active * (load - done) / (speeds[below] + part * (speeds[above] - speeds[below]))
        done = load
    return seconds
