"""A worker of the engine `processes`: it learns once what the run is, then trains clients until its parent is gone."""

from __future__ import annotations

import atexit
import importlib
import io
import itertools
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedprism.config import SPLITS, Config, structure
from fedprism.engines.numerics import numerics
from fedprism.engines.processes.buffer import SharedBuffer
from fedprism.federation import ClientData, Split
from fedprism.methods import find
from fedprism.methods.base import Client, Info, Method, State
from fedprism.models import Arch
from fedprism.round.client import Job, client_evaluate, client_receive, client_round, open_slot
from fedprism.round.engine import Result
from fedprism.round.memory import enough_memory

AHEAD = 2  # messages under way in each direction: one at work, one waiting
PARENT_POLL = 0.5  # seconds between two checks that the parent still lives

Work = Callable[[Job, State | None, State, Client], Any]
KINDS: dict[str, Work] = {"train": client_round, "evaluate": client_evaluate, "receive": client_receive}

serving = False  # is this process a worker?


@dataclass(frozen=True)
class Setup:
    """The first message to a worker: what the run is. The public images come with it."""

    main: Mapping[str, str]  # the parent's program, where something that is needed was defined in it
    modules: tuple[str, ...]  # that file models, methods and the like
    file: str | None  # file.py:CLASS of the method
    method: tuple[str, str]  # module and name of its class
    settings: Mapping[str, Any]
    config: Config
    info: Info
    dtype: torch.dtype


@dataclass(frozen=True)
class Task:
    """One client's work. With it come what is sent to it, its state and, if the worker does not have them, its data."""

    kind: str
    round: int
    client_id: str
    domain: str
    keep: bool  # the data, for the rounds to come


@dataclass(frozen=True)
class Answer:
    """What came of it, with what the states that come with it belong to."""

    value: Any
    seconds: float = 0.0


@dataclass(frozen=True)
class WorkerError:
    """An exception: pickled where that is possible, and as text."""

    error: bytes | None
    words: str
    text: str


def pack(data: ClientData) -> State:
    """A client's images and labels as one state."""
    return {f"{part}.{leaf}": getattr(data.split(part), leaf) for part in SPLITS for leaf in ("x", "y")}


def work(link: int, inbound: Sequence[int], outbound: Sequence[int], parent: int, tied: bool) -> None:
    """A worker's life; this is what its process is started with. `tied`: it ends with its parent by itself."""
    global serving
    serving = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who then ends its workers
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what workers print is not mixed within a line
    if os.getppid() != parent:  # gone before this process was tied to it
        os._exit(1)
    if not tied:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    torch.set_num_interop_threads(1)
    connection, read, write = (
        Connection(link),
        [SharedBuffer(file) for file in inbound],
        [SharedBuffer(file) for file in outbound],
    )
    worker = Worker()
    with suppress(EOFError, OSError):  # the parent has closed its end
        for turn in itertools.count():
            note, states = read[turn % AHEAD].get(connection.recv_bytes())
            try:
                ticket = write[turn % AHEAD].put(*worker.do(note, states))
            except BaseException as error:  # noqa: BLE001 - the parent raises it, sys.exit() too
                ticket = write[turn % AHEAD].put(_wrong(error))
            connection.send_bytes(ticket)
    _leave()


def _leave() -> None:
    """End at once: to take PyTorch down piece by piece lasts seconds on a busy machine, and a thread that a method has
    left would keep the process. What is to be done at exit is done."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a stream may be broken, closed, or None from the start
            stream.flush()
    os._exit(0)


class Worker:
    """What a worker has: the run, one slot per architecture, and the data of the clients that it keeps."""

    def do(self, note: Setup | Task, states: list[Any]) -> tuple[Answer, list[State | None]]:
        """What a message asks for, and the answer as a message."""
        if isinstance(note, Setup):
            with enough_memory():
                self.begin(note, *states)
            return Answer(None), []
        start = time.perf_counter()
        with numerics(self.config.run, torch.device("cpu")), enough_memory(note.client_id):
            value = self.run(note, *states)
        seconds = time.perf_counter() - start
        if isinstance(value, Result):
            checked = value.checked and replace(value.checked, upload={})
            value, states = replace(value, state={}, upload={}, checked=checked), [value.state, value.upload]
            return Answer(value, seconds), states
        return (Answer(None, seconds), [value]) if note.kind == "receive" else (Answer(value, seconds), [])

    def begin(self, setup: Setup, public: State) -> None:
        torch.set_default_dtype(setup.dtype)
        self.config, self.info = setup.config, setup.info
        self.method = _method(setup)
        self.public = Split(public["x"].clone(), public["y"].clone())
        self.data: dict[str, ClientData] = {}
        self.slots: dict[Arch, Client] = {}

    def run(self, task: Task, down: State, state: State | None, images: State | None) -> Any:
        data = self.data[task.client_id] if images is None else self._unpack(task, images)
        if task.keep:
            self.data[task.client_id] = data
        job = Job(self.method, self.config, self.info, data, task.round, public=self.public)
        arch = self.info.arch_of(task.client_id)
        if arch not in self.slots:
            self.slots[arch] = open_slot(job)
        return KINDS[task.kind](job, state, down, self.slots[arch])

    def _unpack(self, task: Task, images: State) -> ClientData:
        """A client's data; what is kept is copied out of the buffer."""
        parts = {name: tensor.clone() for name, tensor in images.items()} if task.keep else images
        train, validation, test = (Split(parts[f"{part}.x"], parts[f"{part}.y"]) for part in SPLITS)
        return ClientData(task.client_id, task.domain, train, validation, test, self.info.classes)


def _method(setup: Setup) -> Method:
    """The parent's method, made again from its class and its hyper-parameters."""
    multiprocessing.spawn.prepare(dict(setup.main))
    for module in setup.modules:
        importlib.import_module(module)
    if setup.file is not None:
        find(setup.file)
    module, name = setup.method
    made: Method = structure(dict(setup.settings), getattr(importlib.import_module(module), name), "method")
    return made


def words(error: BaseException) -> str:
    """The class of an exception and what it says."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as second:  # noqa: BLE001 - whatever the `__str__` of a user's own does
        return f"{name}, whose message cannot be printed ({type(second).__name__})"


def _wrong(error: BaseException) -> WorkerError:
    try:
        pickled = pickle.dumps(error)
    except BaseException:  # noqa: BLE001 - whatever an exception of a user's own does when it is pickled
        pickled = None
    return WorkerError(pickled, words(error), "".join(traceback.format_exception(error)))


def _watch(parent: int) -> None:
    """End this process when the one that started it is gone, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL)
    os._exit(1)
