"""A worker of the engine `processes`: it is told once what the run is, then trains clients until its parent is gone.

Messages lie in boxes, memory that both processes see and that has no name: whoever is killed, nothing stays behind.
The socket between the two carries only where in the box a message is, so that neither ever waits to be read.
"""

from __future__ import annotations

import atexit
import importlib
import io
import itertools
import math
import mmap
import multiprocessing.spawn
import os
import pickle
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from fedprism.config import SPLITS, Config, structure
from fedprism.engines.client import Job, Result, client_evaluate, client_receive, client_round, open_slot
from fedprism.engines.numerics import numerics
from fedprism.federation import ClientData, Split
from fedprism.methods import find
from fedprism.methods.base import Info, Me, Method, State
from fedprism.models import Arch

ALIGNED = 64  # bytes, as PyTorch aligns its own tensors
AHEAD = 2  # messages under way in each direction: one at work, one waiting
WATCHED = 0.5  # seconds between two looks at whether the parent still lives

Work = Callable[[Job, State | None, State, Me], Any]
KINDS: dict[str, Work] = {"train": client_round, "evaluate": client_evaluate, "receive": client_receive}

serving = False  # is this process a worker?


class Leaf(NamedTuple):
    """Where in a box a tensor is, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int


class Box:
    """Memory that two processes see, of which one writes and the other reads."""

    def __init__(self, file: int | None = None) -> None:
        self.file = _unnamed_file() if file is None else file
        self._made = None if file is not None else weakref.finalize(self, os.close, self.file)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.there: list[tuple[torch.Tensor, int]] = []  # the first state in it, with its tensors' versions

    def put(self, note: object, states: Sequence[State | None] = ()) -> bytes:
        """Write a message, in place of the one before; gives what the reader needs to find it."""
        end, plans = 0, []
        for state in states:
            plan = []
            for name, tensor in (state or {}).items():
                # A view with holes becomes what `clone` makes of it; all else keeps its memory format.
                stride = torch.empty_like(tensor, device="meta").stride()
                plan.append(Leaf(name, tensor.dtype, tuple(tensor.shape), stride, end))
                end += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
            plans.append(plan)
        head = pickle.dumps((note, [None if s is None else plan for s, plan in zip(states, plans, strict=True)]))
        self._reserve(end + len(head))
        known = self._is_there(states[0] or {} if states else {})
        for place, (state, plan) in enumerate(zip(states, plans, strict=True)):
            if place or not known:
                for leaf in plan:
                    self._view(leaf).copy_((state or {})[leaf.name].detach())
        self.memory[end : end + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return struct.pack("<QQ", end, end + len(head))

    def get(self, ticket: bytes) -> tuple[Any, list[Any]]:
        """The note and the states that were written; tensors are views that hold until the next message comes."""
        begin, end = struct.unpack("<QQ", ticket)
        if len(self.memory) < end:
            self._map()
        head = self.memory[begin:end].numpy().data
        note, plans = pickle.loads(head)  # noqa: S301 - from a parent or a child of one's own
        return note, [None if plan is None else {leaf.name: self._view(leaf) for leaf in plan} for plan in plans]

    def close(self) -> None:
        """For who made it. The memory is given back when the other process has closed it, too."""
        if self._made is not None:
            self._made()  # once: the numbers of closed files are given to others

    def _is_there(self, state: State) -> bool:
        """Is this the state that was written last, tensor by tensor? What is sent often is the same for all clients."""
        before, self.there = self.there, []
        if not any(tensor.is_inference() for tensor in state.values()):  # those do not count their changes
            self.there = [(tensor, tensor._version) for tensor in state.values()]
        return len(before) == len(self.there) > 0 and all(
            one is other and then == now for (one, then), (other, now) in zip(before, self.there, strict=True)
        )

    def _view(self, leaf: Leaf) -> torch.Tensor:
        end = leaf.begin + math.prod(leaf.shape) * leaf.dtype.itemsize
        return self.memory[leaf.begin : end].view(leaf.dtype).as_strided(leaf.shape, leaf.stride)

    def _reserve(self, size: int) -> None:
        if len(self.memory) < size:
            os.ftruncate(self.file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._map()

    def _map(self) -> None:
        self.memory = torch.frombuffer(mmap.mmap(self.file, os.fstat(self.file).st_size), dtype=torch.uint8)


def _unnamed_file() -> int:
    """Memory without a name in Linux; elsewhere a file that is deleted while it is open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedprism", os.MFD_CLOEXEC)  # not in /dev/shm, which is small in many containers
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True)
class Hello:
    """What a worker is told first. The public images come with it."""

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
    client: str
    domain: str
    keep: bool  # the data, for the rounds to come


@dataclass(frozen=True)
class Answer:
    """What came of it, with what the states that come with it belong to."""

    value: Any
    seconds: float = 0.0


@dataclass(frozen=True)
class Wrong:
    """An exception: pickled where that is possible, and as text."""

    error: bytes | None
    words: str
    text: str


def pack(data: ClientData) -> State:
    """A client's images and labels as one state."""
    return {f"{part}.{leaf}": getattr(data.split(part), leaf) for part in SPLITS for leaf in ("x", "y")}


def work(link: int, inboxes: Sequence[int], outboxes: Sequence[int], parent: int) -> None:
    """A worker's life; this is what its process is started with."""
    global serving
    serving = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who then ends its workers
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what workers print is not mixed within a line
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    torch.set_num_interop_threads(1)
    connection, read, write = Connection(link), [Box(file) for file in inboxes], [Box(file) for file in outboxes]
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
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


class Worker:
    """What a worker has: the run, one slot an architecture, and the data of the clients that it keeps."""

    def do(self, note: Hello | Task, states: list[Any]) -> tuple[Answer, list[State | None]]:
        """What a message asks for, and the answer as a message."""
        if isinstance(note, Hello):
            self.begin(note, *states)
            return Answer(None), []
        start = time.perf_counter()
        with numerics(self.config.run, torch.device("cpu")):
            value = self.client(note, *states)
        seconds = time.perf_counter() - start
        if isinstance(value, Result):
            return Answer(replace(value, state={}, upload={}, checked=None), seconds), [value.state, value.upload]
        return (Answer(None, seconds), [value]) if note.kind == "receive" else (Answer(value, seconds), [])

    def begin(self, hello: Hello, public: State) -> None:
        torch.set_default_dtype(hello.dtype)
        self.config, self.info = hello.config, hello.info
        self.method = _method(hello)
        self.public = Split(public["x"].clone(), public["y"].clone())
        self.data: dict[str, ClientData] = {}
        self.slots: dict[Arch, Me] = {}

    def client(self, task: Task, down: State, state: State | None, images: State | None) -> Any:
        data = self.data[task.client] if images is None else self._unpack(task, images)
        if task.keep:
            self.data[task.client] = data
        job = Job(self.method, self.config, self.info, data, task.round, public=self.public)
        arch = self.info.arch_of(task.client)
        if arch not in self.slots:
            self.slots[arch] = open_slot(job)
        return KINDS[task.kind](job, state, down, self.slots[arch])

    def _unpack(self, task: Task, images: State) -> ClientData:
        """A client's data; what is kept is copied out of the box."""
        held = {name: tensor.clone() for name, tensor in images.items()} if task.keep else images
        train, validation, test = (Split(held[f"{part}.x"], held[f"{part}.y"]) for part in SPLITS)
        return ClientData(task.client, task.domain, train, validation, test, self.info.classes)


def _method(hello: Hello) -> Method:
    """The parent's method, made again from its class and its hyper-parameters."""
    multiprocessing.spawn.prepare(dict(hello.main))
    for module in hello.modules:
        importlib.import_module(module)
    if hello.file is not None:
        find(hello.file)
    module, name = hello.method
    made: Method = structure(dict(hello.settings), getattr(importlib.import_module(module), name), "method")
    return made


def _wrong(error: BaseException) -> Wrong:
    words = f"{type(error).__name__}: {error}"
    try:
        pickled = pickle.dumps(error)
    except Exception:  # noqa: BLE001 - whatever an exception of a user's own does when it is pickled
        pickled = None
    return Wrong(pickled, words, "".join(traceback.format_exception(error)))


def _watch(parent: int) -> None:
    """End this process when the one that started it is gone, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(WATCHED)
    os._exit(1)
