"""Running out of memory: how it is recognised, and the error that says at which client and what to do."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from fedprism.errors import FedprismError

# What a RuntimeError of PyTorch says where the C library, or the system, gives it no memory.
SIGNS = ("DefaultCPUAllocator", "bad_alloc", "annot allocate memory", "not enough memory", "out of memory")
ASKED = re.compile(r"allocate ([\d.]+) ?(\w+)")


@contextmanager
def enough_memory(client_id: str | None = None) -> Iterator[None]:
    """Within: running out of memory is an error that says where, how much was asked for, and what to do."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not _ran_out(error):
            raise
        at = "memory has run out" if client_id is None else f"memory has run out at client {client_id!r}"
        raise FedprismError(
            f"{at}{_asked(str(error))}. Take a smaller model or train.batch_size, fewer run.workers (where the engine "
            "is processes), or clients.state: disk; or allow more memory (`ulimit -a` shows the limits)."
        ) from error


def _ran_out(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in SIGNS)


def _asked(text: str) -> str:
    """How much was asked for, where it is said.

    >>> _asked("you tried to allocate 4000000000 bytes."), _asked("Tried to allocate 2.00 GiB."), _asked("")
    (', where 4,000 MB were asked for at once', ', where 2.00 GiB were asked for at once', '')
    """
    found = ASKED.search(text)
    if found is None:
        return ""
    amount, unit = found.groups()
    much = f"{int(amount) / 1e6:,.0f} MB" if unit == "bytes" else f"{amount} {unit}"
    return f", where {much} were asked for at once"
