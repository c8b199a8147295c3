"""What ends a run from outside: SIGTERM and SIGHUP, upon which everything is put in order first, as upon Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Ended(SystemExit):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number  # which a shell gives a program that the signal ended
        super().__init__(self.exit_code)


ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Within: SIGTERM and SIGHUP, unless the program handles or ignores them, raise `Ended`, so that workers end and
    temporary files go. Python hears signals in its main thread alone."""
    heard = threading.current_thread() is threading.main_thread()
    ours = [number for number in ENDING if heard and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, _: FrameType | None) -> None:
    raise Ended(number)
