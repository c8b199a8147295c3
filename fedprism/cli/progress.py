"""Progress of a run or a comparison: one live line on a terminal, one plain line per finished run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from fedprism.records.standing import Standing
from fedprism.round.events import Callback, Plan, RoundRecord, Snapshot, Status

SLOW = 2.0  # seconds after which a round's clients are counted


class Progress(Callback):
    """Method, round, accuracy so far and the time that all runs together still need.

    `waiting` names the methods of the runs to come, in any order. A method that has run before is timed by that.
    """

    def __init__(self, console: Console, waiting: Sequence[str] = (), rounds: int = 0, seeds: int = 1) -> None:
        self.console = console
        self._waiting = list(waiting)
        self._rounds = rounds  # of a waiting run
        self._several_seeds = seeds > 1
        self._spent: dict[str, tuple[float, int]] = {}  # method -> seconds, rounds
        self._done = 0
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[round]}"),
            TextColumn("{task.fields[accuracy]}"),
            _TimeLeft(self),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hide()

    def begin(self, plan: Plan) -> None:
        if plan.method in self._waiting:
            self._waiting.remove(plan.method)
        self._plan, self._accuracy = plan, ""
        self._standings = [Standing(plan.moment, split) for split in ("validation", "test")]
        self._round = max(0, plan.first_round - 1)
        self._begun = self._last = time.monotonic()
        if self.console.is_terminal:  # shown only while rounds are run: loading data may have a line of its own
            self._task = self._bar.add_task("") if self._task is None else self._task
            self._show()
            self._bar.start()

    def clients(self, done: int, total: int) -> None:
        if time.monotonic() - self._last > SLOW:
            self._show(f", client {done}/{total}")

    def note(self, text: str) -> None:
        self._show(f", {text}" if text else "")

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        now = time.monotonic()
        seconds, rounds = self._spent.get(self._plan.method, (0.0, 0))
        if record.round > 0:
            self._spent[self._plan.method] = (seconds + now - self._last, rounds + 1)
            self._done += 1
        self._last, self._round = now, record.round
        for standing in self._standings:  # the test images only where there are none for validation
            if standing.add(record) and standing.tested:
                shown = f"{100 * float(standing.exact_mean('clients')):.1f} %"
                self._accuracy = f"{shown} {standing.split} ({self._plan.moment})"
                break
        self._show()

    def end(self, status: Status) -> None:
        self._hide()
        took = time.monotonic() - self._begun
        if status == "diverged":
            self.console.print(Text(f"{self._name()} diverged in round {self._round}.", style="yellow"))
        elif not self.console.is_terminal and status == "finished":
            figures = f", {self._accuracy}" if self._accuracy else ""
            self.console.print(Text(f"{self._name()}: {self._round} rounds{figures}, {took:.0f} s"), soft_wrap=True)

    def seconds_left(self) -> float | None:
        """Seconds that this run and the waiting ones still need; None before the first round is done."""
        seconds, rounds = (sum(values) for values in zip(*self._spent.values(), strict=True)) if self._spent else (0, 0)
        if not rounds:
            return None

        def per_round(method: str) -> float:
            spent, done = self._spent.get(method, (seconds, rounds))
            return float(spent / done)

        here = (self._plan.rounds - self._round) * per_round(self._plan.method)
        later = sum(self._rounds * per_round(method) for method in self._waiting)
        return max(0.0, here + later - (time.monotonic() - self._last))

    def _show(self, within: str = "") -> None:
        if self._task is None:
            return
        left = self._plan.rounds - self._round + self._rounds * len(self._waiting)
        self._bar.update(
            self._task,
            description=escape(self._name()),  # a name may have brackets
            total=self._done + left,
            completed=self._done,
            round=f"round {self._round}/{self._plan.rounds}{within}",
            accuracy=self._accuracy,
        )

    def _hide(self) -> None:
        if self._bar.live.is_started:  # stopping what never ran would print an empty line
            self._bar.stop()

    def _name(self) -> str:
        return f"{self._plan.method}, seed {self._plan.config.seed}" if self._several_seeds else self._plan.method


class _TimeLeft(ProgressColumn):
    """The time left over all runs; counts down between rounds."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        left = self._progress.seconds_left()
        return Text("" if left is None else f"{_clock(left)} left", style="cyan")


def _clock(seconds: float) -> str:
    """
    >>> _clock(59.6), _clock(3725)
    ('1:00', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
