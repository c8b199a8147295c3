"""The parent's end of a worker: its process, the buffers between the two, and what it was given."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from fedprism.engines.processes.buffer import SharedBuffer
from fedprism.engines.processes.worker import AHEAD
from fedprism.methods.base import State

POLITE = 5.0  # seconds in which an idle worker may end by itself

Pool = list["WorkerHandle"]


class WorkerHandle:
    """The parent's end of a worker: its process, the buffers between the two, and what it was given."""

    def __init__(self, pool: Pool) -> None:
        """Start a worker and put it into the pool: whenever Ctrl-C comes, none is running that is not there."""
        here, there = socket.socketpair()
        self.connection = Connection(here.detach())
        self.inbound, self.outbound = [SharedBuffer() for _ in range(AHEAD)], [SharedBuffer() for _ in range(AHEAD)]
        files = [[buffer.file for buffer in buffers] for buffers in (self.inbound, self.outbound)]
        program = f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
        program += "from fedprism.engines.processes.worker import work; "
        program += f"work({there.fileno()}, {files[0]}, {files[1]}, {os.getpid()})"
        self.under_way: deque[str | None] = deque()  # clients, in the order of work; None: it is starting
        self.given = self.answered = 0
        self.keeps: set[str] = set()  # clients whose data it has
        self.kept_bytes = 0
        with there, _ctrl_c_later():
            self.process = _process(program, (there.fileno(), *files[0], *files[1]))
            pool.append(self)

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
            raise EOFError
        note, states = self.outbound[self.answered % AHEAD].get(self.connection.recv_bytes())
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
        for buffer in (*self.inbound, *self.outbound):
            buffer.close()
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
    # The mask holds for this thread alone; Python hands a Ctrl-C of any thread to the main thread.
    ours = handler is not None and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def end_all(pool: Pool, owner: int) -> None:
    """End all workers: those at work at once. A fork of the process that started them leaves them alone."""
    if os.getpid() == owner:
        idle = not any(handle.under_way for handle in pool)
        for handle in pool:
            handle.connection.close()  # all of them, before the first is waited for
        while pool:
            pool[-1].end(at_once=not idle)  # called again if Ctrl-C comes here
            pool.pop()
