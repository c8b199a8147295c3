"""A progress bar for slow loading; shown on a terminal only, and removed when done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import Progress, TaskID

PATIENCE = 2.0  # seconds before a bar is shown


@contextmanager
def progress(label: str, total: int, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of `total` steps; `console` defaults to the error stream."""
    console = console or Console(stderr=True)
    begun, done = time.monotonic(), 0
    shown: list[tuple[Progress, TaskID]] = []
    with ExitStack() as stack:

        def step() -> None:
            nonlocal done
            done += 1
            if not shown and console.is_terminal and time.monotonic() - begun > PATIENCE:
                bar = stack.enter_context(Progress(console=console, transient=True))
                shown.append((bar, bar.add_task(label, total=total)))
            for bar, task in shown:
                bar.update(task, completed=done)

        yield step
