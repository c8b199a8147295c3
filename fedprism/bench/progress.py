"""Progress of a benchmark: one live line on a terminal (row, contender, time left), elsewhere one line per row."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text


class Rows:
    """Progress over the rows to measure."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            TextColumn("{task.fields[within]}", style="dim"),
            BarColumn(bar_width=None),
            TextColumn("row {task.fields[row]} of {task.total:.0f}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._done, self._of, self._steps, self._step = 0, 0, 1, 0
        self._title, self._begun = "", 0.0

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar.live.is_started:
            self._bar.stop()

    def expect(self, rows: int, there: int = 0) -> None:
        """Announce `rows` more rows, and `there` rows that are skipped."""
        self._of += rows
        if there:
            many = there > 1
            text = f"{there} row{'s are' if many else ' is'} there already; --force measures {'them' if many else 'it'}"
            self.note(f"{text} again.")

    def begin(self, title: str, steps: int) -> None:
        """Begin a row of `steps` steps."""
        self._title, self._steps, self._step, self._begun = title, max(steps, 1), 0, time.monotonic()
        if self.console.is_terminal:
            if self._task is None:
                self._task = self._bar.add_task(title, total=self._of, within="", row=1)
                self._bar.start()
            self._show("")

    def step(self, within: str) -> None:
        """Begin the next step of the row."""
        self._step = min(self._step + 1, self._steps)
        self._show(within)

    def end(self, words: str = "") -> None:
        """End the row."""
        self._done += 1
        self._step = 0
        self._show("")
        if not self.console.is_terminal:
            took = time.monotonic() - self._begun
            text = f"{self._title}: {words + ', ' if words else ''}{took:.0f} s"
            self.console.print(Text(text), soft_wrap=True)

    def note(self, words: str) -> None:
        """Print a line that stays."""
        self.console.print(Text(words, style="dim"), soft_wrap=True)

    def _show(self, within: str) -> None:
        if self._task is not None:
            self._bar.update(
                self._task,
                description=self._title,
                total=self._of,
                completed=self._done + max(self._step - 1, 0) / self._steps,
                within=within,
                row=min(self._done + 1, self._of),
            )
