"""Clients on all cores of one machine: a pool of worker processes, each with its own slots and one thread a client.

A worker is a fresh Python process that imports fedprism and not the program that started it, so a script needs no
`if __name__ == "__main__"`. What it computes is `client_round` of the same inputs, so the bits are those of
`inprocess`, whoever trains whom.
"""

from __future__ import annotations

import ast
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fedprism.config import Config, plain
from fedprism.data.images import CHANGES
from fedprism.engines.client import Failure, Result, Scores
from fedprism.engines.inprocess import ENGINES, Request
from fedprism.engines.passes import SCHEDULES
from fedprism.engines.wire import size
from fedprism.engines.worker import AHEAD, Answer, Box, Hello, Task, Wrong, pack
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods import METHODS, named
from fedprism.methods.base import Info, Method, State
from fedprism.models import MODELS, Arch

KEPT = 2**29  # bytes of clients' data that all workers together keep; what goes beyond is sent every time
DEATHS = 3  # of workers at one client, after which the client is to blame
FILES = 1 + 2 * 2 * AHEAD  # that this process has open for a worker: the connection, each box and its mapping
OTHERS = 128  # files that may be open besides
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # how much of the cores a container may use
POLITE = 5.0  # seconds in which an idle worker may end by itself
LOOK = 1.0  # seconds between two looks at whether a silent worker still lives

Pool = list["Hand"]


@ENGINES.register("processes")
class Processes:
    """clients on all cores of a CPU at once, in worker processes: the same bits as inprocess"""

    name = "processes"

    def __init__(
        self, method: Method, config: Config, info: Info, federation: Federation, device: torch.device
    ) -> None:
        if device.type != "cpu":
            raise ConfigError(f"run.engine is processes, which is for a CPU, and the device is {device}; {ON_CPU}")
        hindrance = why_not(method)
        if hindrance is not None:
            raise ConfigError(f"run.engine is processes, but {hindrance}, or set run.engine: inprocess.")
        self.config, self.info, self.clients = config, info, federation.clients
        self.hello, self.public = _hello(method, config, info), federation.public
        self.workers = workers(config)
        _make_room(min(self.workers, len(self.clients)))
        self.pace: dict[Arch, float] = {}  # seconds an image, as last seen
        self.pool: Pool = []
        self.tell: Callable[[int, int], None] = lambda done, of: None
        self.say: Callable[[str], None] = lambda text: None
        weakref.finalize(self, _end, self.pool, os.getpid())

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        return self._each("train", round, requests)

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> dict[str, Scores | Failure]:
        return self._each("evaluate", round, requests)

    def receive(self, round: int, requests: Mapping[str, Request]) -> dict[str, State | Failure]:
        return self._each("receive", round, requests)

    def close(self) -> None:
        """End all workers; a further request would start new ones."""
        _end(self.pool, os.getpid())

    def _each(self, kind: str, round: int, requests: Mapping[str, Request]) -> dict[str, Any]:
        try:
            answers = self._deal(kind, round, requests)
        except BaseException:  # Ctrl-C, too: nobody would read what the workers are still at
            self.close()
            raise
        return {client: answers[client] for client in requests}

    def _deal(self, kind: str, round: int, requests: Mapping[str, Request]) -> dict[str, Any]:
        """Clients to workers, the largest first, each to whoever is free; an answer a client."""
        queue = deque(sorted(requests, key=self._cost, reverse=True))
        deaths: Counter[str | None] = Counter()
        answers: dict[str, Any] = {}
        while len(self.pool) < min(self.workers, len(requests)):
            self._start()
        while len(answers) < len(requests):
            for hand in self.pool:
                if queue and not hand.under_way:
                    self._give(hand, kind, round, queue.popleft(), requests)
            # The next client is there before the last answer is read; but the last ones wait for who is free first.
            for hand in self.pool:
                if len(queue) >= len(self.pool) and len(hand.under_way) < AHEAD:
                    self._give(hand, kind, round, queue.popleft(), requests)
            for hand in self._heard():
                client = hand.under_way[0]
                try:
                    answer, states = hand.answer()
                except (EOFError, OSError):
                    queue.extendleft(each for each in reversed(hand.under_way) if each is not None)
                    deaths[client] += 1
                    self._replace(hand, client, deaths[client])
                    continue
                if isinstance(answer, Wrong):
                    raise _raised(answer, client)
                if client is not None:
                    self.pace[self.info.arch_of(client)] = answer.seconds / len(self.clients[client].train)
                    answers[client] = _joined(answer, states)
                    self.tell(len(answers), len(requests))
        return answers

    def _cost(self, client: str) -> float:
        """Seconds, roughly; clients of an architecture that was not seen yet come first."""
        return len(self.clients[client].train) * self.pace.get(self.info.arch_of(client), 1.0)

    def _give(self, hand: Hand, kind: str, round: int, client: str, requests: Mapping[str, Request]) -> None:
        data, request, images, keep = self.clients[client], requests[client], None, False
        if client not in hand.keeps:
            images = pack(data)
            keep = hand.kept + size(images) <= KEPT // self.workers
            if keep:
                hand.keeps.add(client)
                hand.kept += size(images)
        hand.give(client, Task(kind, round, client, data.domain, keep), [request.down, request.state, images])

    def _heard(self) -> list[Hand]:
        """Those that have answered, or are dead."""
        busy = {hand.connection: hand for hand in self.pool if hand.under_way}
        while True:
            ready = [busy[each] for each in wait(list(busy), LOOK) if isinstance(each, Connection)]
            # A process that a dead worker has left behind may hold the connection open.
            ready = ready or [hand for hand in busy.values() if hand.process.poll() is not None]
            if ready:
                return ready

    def _start(self) -> None:
        self._greet(Hand(self.pool))

    def _greet(self, hand: Hand) -> None:
        """Tell a worker what the run is; it forgets what it knew."""
        hand.keeps, hand.kept = set(), 0
        hand.give(None, self.hello, [{"x": self.public.x, "y": self.public.y}])

    def _replace(self, hand: Hand, client: str | None, deaths: int) -> None:
        """Another worker in the place of a dead one, unless the same client has cost too many."""
        code = hand.end(at_once=True)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if code == -signal.SIGKILL:
            how += ", as a system without memory left does"
        at = f"at client {client!r}" if client is not None else "while it started"
        if deaths >= DEATHS:
            raise FedprismError(
                f"{deaths} worker processes have died {at}, the last {how}. What they said is above, if anything; "
                "run.engine: inprocess shows it in one process, and fewer run.workers need less memory."
            )
        warnings.warn(
            f"worker process {hand.process.pid} {how} {at}; another one does it again, to the same bits.", stacklevel=2
        )
        self.pool.remove(hand)
        self._start()


class Hand:
    """The parent's end of a worker: its process, the boxes between the two, and what it was given."""

    def __init__(self, pool: Pool) -> None:
        """Start a worker and put it into the pool: whenever Ctrl-C comes, none is running that is not there."""
        here, there = socket.socketpair()
        self.connection = Connection(here.detach())
        self.inboxes, self.outboxes = [Box() for _ in range(AHEAD)], [Box() for _ in range(AHEAD)]
        files = [[box.file for box in boxes] for boxes in (self.inboxes, self.outboxes)]
        program = f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
        program += "from fedprism.engines.worker import work; "
        program += f"work({there.fileno()}, {files[0]}, {files[1]}, {os.getpid()})"
        self.under_way: deque[str | None] = deque()  # clients, in the order of work; None: it is starting
        self.given = self.answered = 0
        self.keeps: set[str] = set()  # clients whose data it has, in all so many bytes:
        self.kept = 0
        with there, _ctrl_c_later():
            self.process = _process(program, (there.fileno(), *files[0], *files[1]))
            pool.append(self)

    def give(self, client: str | None, note: object, states: list[State | None]) -> None:
        """One more to do. Whether the worker still lives is seen when its answer is awaited."""
        self.under_way.append(client)
        ticket = self.inboxes[self.given % AHEAD].put(note, states)
        self.given += 1
        with suppress(OSError):
            self.connection.send_bytes(ticket)

    def answer(self) -> tuple[Any, list[State]]:
        """The next answer, in memory of this process's own."""
        if not self.connection.poll() and self.process.poll() is not None:
            raise EOFError
        note, states = self.outboxes[self.answered % AHEAD].get(self.connection.recv_bytes())
        self.answered += 1
        self.under_way.popleft()
        return note, [{name: tensor.clone() for name, tensor in state.items()} for state in states]

    def end(self, at_once: bool) -> int:
        """No process, no connection and no memory is left; the exit code."""
        self.connection.close()
        if at_once:
            self.process.kill()
        try:
            code = self.process.wait(POLITE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        for box in (*self.inboxes, *self.outboxes):
            box.close()
        return code


def _process(program: str, files: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """A Python process; its threads are one each until it sets run.threads."""
    few = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=files, env={**few, **os.environ}
    )


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Within: Ctrl-C waits. A process that is started has the same mask, so it never reaches that one."""
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    # The mask is this thread's alone: of Ctrl-C in another one Python tells the main thread all the same.
    told = handler is not None and threading.current_thread() is threading.main_thread()
    if told:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        if told:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _end(pool: Pool, owner: int) -> None:
    """End all workers: those at work at once. A fork of the process that started them leaves them alone."""
    if os.getpid() == owner:
        idle = not any(hand.under_way for hand in pool)
        for hand in pool:
            hand.connection.close()  # all of them, before the first is waited for
        while pool:
            pool[-1].end(at_once=not idle)  # again by whoever calls this next, if Ctrl-C comes here
            pool.pop()


def _joined(answer: Answer, states: list[State]) -> Any:
    """An answer with the states that came beside it."""
    if isinstance(answer.value, Result):
        state, upload = states
        return replace(answer.value, state=state, upload=upload)
    return states[0] if states else answer.value


def _raised(wrong: Wrong, client: str | None) -> BaseException:
    """A worker's exception, with its traceback as a note."""
    error: BaseException = FedprismError(wrong.words)
    if wrong.error is not None:
        with suppress(Exception):  # an exception of a user's own that cannot be made again
            error = pickle.loads(wrong.error)  # noqa: S301 - from a child of one's own
    at = f"at client {client!r}" if client is not None else "while it started"
    error.add_note(f"In a worker process, {at}:\n{wrong.text.rstrip()}")
    return error


def workers(config: Config) -> int:
    """How many: as many as asked for, or one for each core, as far as this process may open their files."""
    asked = config.run.workers
    return asked if isinstance(asked, int) else max(1, min(cores() // config.run.threads, _room()))


def cores() -> int:
    """How many this process may use: those it is bound to, and no more than its container is granted."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = map(int, QUOTA.read_text().split())
    except (OSError, ValueError):  # not there, or "max": all of them
        return bound
    return min(bound, max(1, math.ceil(quota / period)))


def _room() -> int:
    """How many workers' files this process may have open, if it asks for all that it is allowed."""
    import resource  # not there on Windows

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if most == resource.RLIM_INFINITY else (most - OTHERS) // FILES


def _make_room(count: int) -> None:
    """Let this process open the files of so many workers."""
    import resource

    (soft, hard), needed = resource.getrlimit(resource.RLIMIT_NOFILE), OTHERS + FILES * count
    if count > _room():
        raise ConfigError(
            f"run.engine is processes, and {count} workers take up to {needed} open files in all, of which this "
            f"process may have {hard} (`ulimit -Hn`); set fewer run.workers, or raise that limit."
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


# --- what a worker must import ---------------------------------------------------------------------------------------

ON_CPU = "set run.device: cpu, or run.engine: auto."


def why_not(method: Method) -> str | None:
    """What keeps a method from worker processes and what to do about it; None: nothing."""
    if os.name != "posix" or not sys.executable:
        return "worker processes need Linux or macOS; set run.engine: auto"
    cls = type(method)
    name, homes = cls.__qualname__, _homes(method)
    for home in sorted(homes - {"__main__"}):
        if not _from_file(home) and not _importable(home):
            what = f"the method {name}" if home == cls.__module__ else "a model or the like that the run may need"
            return (
                f"{what} is defined in the module {home!r}, which a worker does not find by that name; put its file "
                "where Python finds it (a folder of sys.path), or name the method as path/to/file.py:CLASS"
            )
    if getattr(sys.modules.get(cls.__module__), name, None) is not cls:
        return f"the method {name} was made in a function, where a worker cannot import it; put it into a file"
    if "__main__" not in homes:
        return None
    main = sys.modules["__main__"]
    what = f"the method {name}" if cls.__module__ == "__main__" else "a model or the like that the run may need"
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        return f"{what} was written in a Python session, where a worker cannot import it; put it into a file"
    if not _guarded(main):
        return (
            f"{what} is defined in {file}, and a worker that imports it there would run all of that file, training "
            'included; put what is no definition below `if __name__ == "__main__":`, or the method into another file'
        )
    return None


def _hello(method: Method, config: Config, info: Info) -> Hello:
    homes, main = _homes(method), sys.modules["__main__"]
    begun: dict[str, str] = {}
    if "__main__" in homes:
        spec = getattr(main, "__spec__", None)
        file = str(Path(getattr(main, "__file__", "")).resolve())
        begun = {"init_main_from_path": file} if spec is None else {"init_main_from_name": spec.name}
    cls, asked = type(method), named(method).name
    return Hello(
        main=begun,
        modules=tuple(sorted(home for home in homes - {"__main__"} if not _from_file(home))),
        file=asked if _from_file(cls.__module__) else None,
        method=(cls.__module__, cls.__qualname__),
        settings=plain(method),
        config=config,
        info=info,
        dtype=torch.get_default_dtype(),
    )


def _homes(method: Method) -> set[str]:
    """The modules outside fedprism that define the method, or have filed something that a run may name."""
    filed = [type(method)] + [kind for table in (METHODS, MODELS, CHANGES, SCHEDULES) for _, kind in table.items()]
    return {kind.__module__ for kind in filed if kind.__module__.partition(".")[0] != "fedprism"}


def _from_file(module: str) -> bool:
    """Was this module made of path/to/file.py:CLASS?"""
    return module.startswith("fedprism_method_")


def _importable(module: str) -> bool:
    """Would a new process find this very module by its name? `importlib.util.find_spec` says what is loaded here."""
    package = module.rpartition(".")[0]
    if package and not _importable(package):
        return False
    path = getattr(sys.modules[package], "__path__", ()) if package else None
    found = next(filter(None, (finder.find_spec(module, path) for finder in sys.meta_path)), None)
    loaded = getattr(sys.modules.get(module), "__spec__", None)
    return found is not None and loaded is not None and found.origin == loaded.origin


def _guarded(main: ModuleType) -> bool:
    """Does a program say what is not to be done when it is imported?"""
    tree = ast.parse(Path(str(main.__file__)).read_bytes())
    tests = [node.test for node in tree.body if isinstance(node, ast.If)]
    return any(isinstance(part, ast.Name) and part.id == "__name__" for test in tests for part in ast.walk(test))
