"""The parent's end of a worker: its process, the buffers between the two, and what it was given."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from fedprism.engines.processes.buffer import SharedBuffer
from fedprism.engines.processes.worker import AHEAD
from fedprism.methods.base import State

POLITE = 5.0  # seconds in which idle workers may end by themselves
# Linux ends a worker with its parent, also one that is stopped or busy: prctl(PR_SET_PDEATHSIG, SIGKILL). It comes
# before the imports, which take seconds.
TIE = "import ctypes; tied = ctypes.CDLL(None).prctl(1, 9) == 0; " if sys.platform == "linux" else "tied = False; "

Pool = list["WorkerHandle"]


class WorkerDied(Exception):
    """A worker is gone, without an answer."""


class WorkerHandle:
    """The parent's end of a worker: its process, the buffers between the two, and what it was given."""

    def __init__(self, pool: Pool) -> None:
        """Start a worker. It is in the pool before: whenever Ctrl-C comes, none is running that is not there."""
        _take_standard_files()
        here, there = socket.socketpair()
        self.connection = Connection(here.detach())
        self.inbound, self.outbound = [SharedBuffer() for _ in range(AHEAD)], [SharedBuffer() for _ in range(AHEAD)]
        files = [[buffer.file for buffer in buffers] for buffers in (self.inbound, self.outbound)]
        program = f"{TIE}import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
        program += "from fedprism.engines.processes.worker import work; "
        program += f"work({there.fileno()}, {files[0]}, {files[1]}, {os.getpid()}, tied)"
        self.under_way: deque[str | None] = deque()  # clients, in the order of work; None: it is starting
        self.given = self.answered = 0
        self.keeps: set[str] = set()  # clients whose data it has
        self.kept_bytes = 0
        self.started: Future[subprocess.Popen[bytes]] = Future()
        self.over = threading.Event()
        pool.append(self)
        work = (self.started, self.over, program, there, (*files[0], *files[1]))
        try:
            threading.Thread(target=_start, args=work, daemon=True).start()
        except RuntimeError as error:  # there are too many; Python says it otherwise than of processes
            raise OSError(errno.EAGAIN, str(error)) from error
        self.started.result()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.started.result()

    def give(self, client_id: str | None, note: object, states: list[State | None]) -> None:
        """One more to do. Whether the worker still lives is seen when its answer is awaited."""
        self.under_way.append(client_id)
        ticket = self.inbound[self.given % AHEAD].put(note, states)
        self.given += 1
        with suppress(OSError):
            self.connection.send_bytes(ticket)

    def answer(self) -> tuple[Any, list[State]]:
        """The next answer, in memory of this process's own."""
        if not self.connection.poll() and self.process.poll() is not None:
            raise WorkerDied
        try:
            ticket = self.connection.recv_bytes()
        except (EOFError, OSError):
            raise WorkerDied from None
        note, states = self.outbound[self.answered % AHEAD].get(ticket)
        self.answered += 1
        self.under_way.popleft()
        return note, [{name: tensor.clone() for name, tensor in state.items()} for state in states]

    def let_go(self, at_once: bool) -> None:
        """Close the connection, upon which an idle worker ends; `at_once` ends it whatever it does."""
        self.connection.close()
        if self._runs():
            self.process.send_signal(signal.SIGKILL if at_once else signal.SIGCONT)  # one that is stopped goes on, too

    def end(self, patience: float = 0.0) -> int:
        """No process, no connection and no memory is left; the exit code."""
        self.connection.close()
        code = 0
        if self._runs():
            try:
                code = self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                code = self.process.wait()
        self.over.set()
        for buffer in (*self.inbound, *self.outbound):
            buffer.close()
        return code

    def _runs(self) -> bool:
        """Has a process been started? One that is about to be is waited for, and none is started any more."""
        return not self.started.cancel() and self.started.exception() is None


def _start(
    started: Future[subprocess.Popen[bytes]],
    over: threading.Event,
    program: str,
    there: socket.socket,
    files: tuple[int, ...],
) -> None:
    """Start a process, in a thread that lasts until it is over: with the thread it would end (`TIE`), and a user may
    train in one that does not last. No signal interrupts this thread."""
    with there:
        if not started.set_running_or_notify_cancel():
            return
        try:
            process = _process(program, (there.fileno(), *files))
        except BaseException as error:  # noqa: BLE001 - whoever waits for the process raises it
            started.set_exception(error)
            return
    started.set_result(process)
    over.wait()


def _process(program: str, files: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """A Python process that Ctrl-C does not reach; its threads are one each until it sets run.threads."""
    few = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a process has the mask of its starting thread
    try:
        return subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=files, env={**few, **os.environ}
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _take_standard_files() -> None:
    """Let no file be 0, 1 or 2 that is opened from here on, where the program was started with these closed: a worker
    would print into it."""
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)


def end_all(pool: Pool, owner: int) -> None:
    """End all workers: those at work at once. A fork of the process that started them leaves them alone."""
    if os.getpid() == owner:
        at_once = any(handle.under_way for handle in pool)
        for handle in pool:
            handle.let_go(at_once)  # all of them, before the first is waited for
        deadline = time.monotonic() + POLITE
        while pool:
            pool[-1].end(max(0.0, deadline - time.monotonic()))  # called again if Ctrl-C comes here
            pool.pop()
