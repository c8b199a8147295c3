"""What commands print, and how errors are shown. No name can bring a control character to the terminal."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fedprism.cli.app import Unwritten
from fedprism.errors import FedprismError, escaped_lines, printable
from fedprism.round.memory import enough_memory
from fedprism.round.signals import Ended, ending_in_order

if TYPE_CHECKING:
    from fedprism.inspection.clients import ClientTable
    from fedprism.report.formats import Grid
    from fedprism.report.table import Table


class _Console(Console):
    """Writes the control characters of texts out; its own, for colours and progress, stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escaped_lines(segment.text), segment.style)


def stdout() -> Console:
    return _Console()


def stderr() -> Console:
    return _Console(stderr=True)


def print_text(text: str, end: str = "\n") -> None:
    """A text as it is, such as a table for a file."""
    typer.echo(escaped_lines(text) + end, nl=False)


def print_message(text: str, style: str) -> None:
    """A line on stderr."""
    stderr().print(Text(text, style=style), soft_wrap=True)


def print_next_steps(*hints: tuple[str, str]) -> None:
    """Where to look now: what, and the path or command."""
    out = stdout()
    out.print()
    for what, where in hints:
        out.print(Text.assemble((f"{what}: ", "dim"), where), soft_wrap=True)


def print_table(table: Table | Grid | ClientTable) -> None:
    """As wide as the terminal allows; in a file or a pipe as wide as it is."""
    out = stdout()
    if out.is_terminal:
        out.print(table)
    else:
        print_text(str(table))


@contextmanager
def user_errors(interrupted: str = "", begun: Path | None = None) -> Iterator[None]:
    """Print errors, interruptions and warnings as one message each, without a traceback.

    `interrupted` says how to go on after an interruption, also one by somebody's code. If `begun` does not exist, there
    is nothing to go on with.
    """

    def warn(message: Warning | str, *_: Any, **__: Any) -> None:
        print_message(f"warning: {message}", "yellow")

    def left() -> str:
        return "Nothing was begun." if begun is not None and not begun.exists() else interrupted

    try:
        with ending_in_order(), enough_memory(), warnings.catch_warnings():
            warnings.showwarning = warn
            yield
    except FedprismError as error:
        print_message(f"error: {error}", "red")
        raise typer.Exit(2) from None
    except OSError as error:
        if error.filename is None:  # no path of the user's
            raise
        where = printable(os.fsdecode(error.filename))
        print_message(f"error: {where} cannot be used: {error.strerror}. Name another path, or repair this one.", "red")
        raise typer.Exit(2) from None
    except (KeyboardInterrupt, Ended) as stopped:
        print_message(f"stopped. {left()}".strip(), "yellow")
        raise typer.Exit(stopped.exit_code if isinstance(stopped, Ended) else 130) from None
    except Unwritten:
        raise
    except SystemExit as end:  # of somebody's own code: its exit code may be 0, and nothing would be said
        problem = "Python code that is not part of fedprism has ended the program by sys.exit(), so nothing is complete"
        print_message(f"error: {problem}. Take the call out. {left()}".strip(), "red")
        raise typer.Exit(2) from end


@contextmanager
def loading() -> Iterator[None]:
    """Show on a terminal that PyTorch is being loaded, which takes seconds."""
    console = stderr()
    if console.is_terminal and "torch" not in sys.modules:
        with console.status("loading PyTorch …"):
            yield
    else:
        yield
