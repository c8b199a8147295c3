"""Clients on all cores of one machine: a pool of worker processes, each with its own slots and one thread per client.

A worker is a fresh Python process that imports fedprism and not the program that started it, so a script needs no
`if __name__ == "__main__"`. What it computes is `client_round` of the same inputs, so the bits are those of
`inprocess`, whichever worker trains which client.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fedprism.config import Config
from fedprism.engines import ENGINES
from fedprism.engines.processes.handle import POLITE, Pool, WorkerDied, WorkerHandle, end_all
from fedprism.engines.processes.imports import make_setup, why_not
from fedprism.engines.processes.worker import AHEAD, Answer, Task, WorkerError, pack, words
from fedprism.engines.queue import ClientQueue
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods.base import Info, Method, State
from fedprism.models import Arch
from fedprism.round.engine import ClientScores, Engine, Failure, Request, Result
from fedprism.round.memory import enough_memory
from fedprism.store.serialize import size

KEPT_BYTES = 2**29  # bytes of clients' data that all workers together keep; what goes beyond is sent every time
WAITING = 2**26  # bytes of answers that may wait for those of earlier clients, where two per worker take less
MOST = 16  # clients per worker within the window, at most: more gain nothing
MAX_DEATHS = 3  # of workers at one client; then the client is to blame
FILES = 1 + 2 * 2 * AHEAD  # that this process has open for a worker: the connection, each buffer and its mapping
OTHERS = 128  # files that may be open besides
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # how much of the cores a container may use
POLL = 1.0  # seconds between two checks that a silent worker still lives


@ENGINES.register("processes")
class Processes(Engine):
    """clients on all cores of a CPU at once, in worker processes: the same bits as inprocess"""

    name = "processes"

    def __init__(
        self, method: Method, config: Config, info: Info, federation: Federation, device: torch.device
    ) -> None:
        if device.type != "cpu":
            raise ConfigError(
                f"run.engine is processes, which is for a CPU, and the device is {device}; set "
                "run.device: cpu, or run.engine: auto."
            )
        hindrance = why_not(method)
        if hindrance is not None:
            raise ConfigError(f"run.engine is processes, but {hindrance}, or set run.engine: inprocess.")
        self.config, self.info, self.clients = config, info, federation.clients
        self.setup, self.public = make_setup(method, config, info), federation.public
        self.workers = workers(config)
        _allow_files(min(self.workers, len(self.clients)))
        self.pace: dict[Arch, float] = {}  # seconds an image, as last seen
        self.answer_size = 0  # bytes of the largest so far: what is stored, and the upload
        self.pool: Pool = []
        weakref.finalize(self, end_all, self.pool, os.getpid())

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        return self._each("train", round, requests, window=self._window())

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, ClientScores | Failure]]:
        return self._each("evaluate", round, requests)

    def receive(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, State | Failure]]:
        return self._each("receive", round, requests)

    def close(self) -> None:
        """End all workers; a further request would start new ones."""
        end_all(self.pool, os.getpid())

    def _each(
        self, kind: str, round: int, requests: Mapping[str, Request], window: int | None = None
    ) -> Iterator[tuple[str, Any]]:
        try:
            yield from self._deal(kind, round, requests, ClientQueue(list(requests), self._cost, window))
        except BaseException:  # Ctrl-C, too: nobody would read what the workers are working on
            self.close()
            raise

    def _deal(
        self, kind: str, round: int, requests: Mapping[str, Request], queue: ClientQueue
    ) -> Iterator[tuple[str, Any]]:
        """Clients to workers, each to a worker that is free; answers as they come."""
        deaths: Counter[str | None] = Counter()
        done = 0
        while len(self.pool) < min(self.workers, len(requests)):
            self._start()
        while done < len(requests):
            for handle in self.pool:
                if not handle.under_way and (next_one := queue.take()) is not None:
                    self._give(handle, kind, round, next_one, requests)
            # The next client is there before the last answer is read; but the last ones wait for who is free first.
            for handle in self.pool:
                if len(queue) < len(self.pool) or len(handle.under_way) >= AHEAD:
                    continue
                if (next_one := queue.take()) is not None:
                    self._give(handle, kind, round, next_one, requests)
            for handle in self._ready():
                client_id = handle.under_way[0]
                try:
                    with _granted(), enough_memory(client_id):
                        answer, states = handle.answer()
                except WorkerDied:
                    queue.put_back([each for each in handle.under_way if each is not None])
                    deaths[client_id] += 1
                    self._replace(handle, client_id, deaths[client_id])
                    continue
                if isinstance(answer, WorkerError):
                    raise _raised(answer, client_id)
                if client_id is not None:
                    self.pace[self.info.arch_of(client_id)] = answer.seconds / len(self.clients[client_id].train)
                    done += 1
                    queue.answered(client_id)
                    if queue.window:
                        self.answer_size = max(self.answer_size, sum(map(size, states)))
                        queue.window = self._window()
                    yield client_id, _joined(answer, states)
                    self.on_progress(done, len(requests))

    def _window(self) -> int:
        """How many clients may be begun from the first one without an answer on. With few of them workers idle while a
        large one is under way."""
        few, many = AHEAD * self.workers, MOST * self.workers
        return max(few, min(many, WAITING // self.answer_size)) if self.answer_size else few

    def _cost(self, client_id: str) -> float:
        """Seconds, roughly; clients of an architecture that was not seen yet come first."""
        return len(self.clients[client_id].train) * self.pace.get(self.info.arch_of(client_id), 1.0)

    def _give(
        self, handle: WorkerHandle, kind: str, round: int, client_id: str, requests: Mapping[str, Request]
    ) -> None:
        data, request, images, keep = self.clients[client_id], requests[client_id], None, False
        if client_id not in handle.keeps:
            images = pack(data)
            keep = handle.kept_bytes + size(images) <= KEPT_BYTES // self.workers
            if keep:
                handle.keeps.add(client_id)
                handle.kept_bytes += size(images)
        task = Task(kind, round, client_id, data.domain, keep)
        with _granted(), enough_memory(client_id):
            handle.give(client_id, task, [request.download, request.state, images])

    def _ready(self) -> list[WorkerHandle]:
        """Those that have answered, or are dead."""
        busy = {handle.connection: handle for handle in self.pool if handle.under_way}
        while True:
            ready = [busy[each] for each in wait(list(busy), POLL) if isinstance(each, Connection)]
            # A process that a dead worker has left behind may hold the connection open.
            ready = ready or [handle for handle in busy.values() if handle.process.poll() is not None]
            if ready:
                return ready

    def _start(self) -> None:
        with _granted(), enough_memory():
            self._set_up(WorkerHandle(self.pool))

    def _set_up(self, handle: WorkerHandle) -> None:
        """Tell a worker what the run is."""
        handle.keeps, handle.kept_bytes = set(), 0
        handle.give(None, self.setup, [{"x": self.public.x, "y": self.public.y}])

    def _replace(self, handle: WorkerHandle, client_id: str | None, deaths: int) -> None:
        """Another worker in the place of a dead one, unless the same client has cost too many."""
        code = handle.end(POLITE)  # it is about to end where it has not yet
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if code == -signal.SIGKILL:
            how += ", as a system without memory left does"
        at = f"at client {client_id!r}" if client_id is not None else "while it started"
        if deaths >= MAX_DEATHS:
            raise FedprismError(
                f"{deaths} worker processes have died {at}, the last {how}. What they said is above, if anything; "
                "run.engine: inprocess shows it in one process, and fewer run.workers need less memory."
            )
        warnings.warn(
            f"worker process {handle.process.pid} {how} {at}; another one does it again, to the same bits.",
            stacklevel=2,
        )
        self.pool.remove(handle)
        self._start()


@contextmanager
def _granted() -> Iterator[None]:
    """Within: an error says what to do where the system grants no process, thread or open file for a worker."""
    try:
        yield
    except OSError as error:
        raise FedprismError(
            "run.engine is processes, and the system does not grant what its workers need: "
            f"{error.strerror or error}. Set fewer run.workers or run.engine: inprocess, or raise the limit that was "
            "met: of processes and threads (`ulimit -u`), or of open files (`ulimit -n`)."
        ) from error


def _joined(answer: Answer, states: list[State]) -> Any:
    """An answer with the states that came beside it."""
    if isinstance(answer.value, Result):
        (state, upload), checked = states, answer.value.checked
        checked = None if checked is None else replace(checked, upload=upload)
        return replace(answer.value, state=state, upload=upload, checked=checked)
    return states[0] if states else answer.value


def _raised(wrong: WorkerError, client_id: str | None) -> BaseException:
    """A worker's exception, with its traceback as a note. One that cannot be made again, or would then say something
    else, such as one of a user's own whose `__init__` is not that of Exception, is a RuntimeError of the same words."""
    error: BaseException = RuntimeError(wrong.words)
    if wrong.error is not None:
        with suppress(Exception):
            made = pickle.loads(wrong.error)  # noqa: S301 - from a child of one's own
            error = made if isinstance(made, BaseException) and words(made) == wrong.words else error
    at = f"at client {client_id!r}" if client_id is not None else "while it started"
    error.add_note(f"In a worker process, {at}:\n{wrong.text.rstrip()}")
    return error


def workers(config: Config) -> int:
    """How many: as many as asked for, or one for each core, as far as this process may open their files."""
    asked = config.run.workers
    return asked if isinstance(asked, int) else max(1, min(cores() // config.run.threads, _allowed()))


def cores() -> int:
    """How many this process may use: those it is bound to, and no more than its container is granted."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # not there, or "max": all of them
        return bound
    return min(bound, max(1, math.ceil(quota / period)))


def _allowed() -> int:
    """How many workers' files this process may have open, if it asks for all that it is allowed."""
    import resource  # not there on Windows

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if most == resource.RLIM_INFINITY else (most - OTHERS) // FILES


def _allow_files(count: int) -> None:
    """Let this process open the files of `count` workers."""
    import resource

    (soft, hard), needed = resource.getrlimit(resource.RLIMIT_NOFILE), OTHERS + FILES * count
    if count > _allowed():
        raise ConfigError(
            f"run.engine is processes, and {count} workers take up to {needed} open files in all, of which this "
            f"process may have {hard} (`ulimit -Hn`); set fewer run.workers, or raise that limit."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
