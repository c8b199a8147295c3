"""The Typer applications that commands register with, and the entry point."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from io import TextIOWrapper
from typing import Annotated, TypeVar

import typer

Command = TypeVar("Command", bound=Callable[..., None])

START, TRAIN, LEARN = "Start here", "Train", "Look things up"  # panels of `fedprism --help`
_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="fedprism",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings=_HELP,
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", context_settings=_HELP)
app.add_typer(data_app, name="data", rich_help_panel=LEARN, help="Datasets: list them, fetch one, look at one.")


def main() -> None:
    """The entry point of the installed command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout = _Output(sys.stdout)
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr = _Messages(sys.stderr)
    try:
        app()
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a failure has an exit code, and not when the interpreter ends


class _Stream(TextIOWrapper):
    """A standard stream in place of Python's. A letter that it lacks must not cost a result."""

    def __init__(self, replaced: TextIOWrapper) -> None:
        encoding, by_line, at_once = replaced.encoding, replaced.line_buffering, replaced.write_through
        super().__init__(replaced.detach(), encoding, "replace", line_buffering=by_line, write_through=at_once)

    def write(self, text: str) -> int:
        with self._writing():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._writing():
            super().flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):  # what is left goes nowhere: it would fail again when the interpreter ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        raise NotImplementedError


class Unwritten(SystemExit):
    """Standard output cannot be written. What there is to say has been said."""


class _Output(_Stream):
    """Standard output: a command that cannot write it ends, quietly where its reader has gone."""

    def _failed(self, error: OSError) -> None:
        if error.errno != errno.EPIPE:
            print(f"error: standard output could not be written: {error.strerror}.", file=sys.stderr)
        raise Unwritten(1)


class _Messages(_Stream):
    """Standard error: nobody can be told that it cannot be written, and a run must not end for that."""

    def _failed(self, error: OSError) -> None: ...


def command(panel: str | None, name: str | None = None, to: typer.Typer = app) -> Callable[[Command], Command]:
    """Register a command. Its help is its docstring: lines of a paragraph are joined, unless it begins with \\b."""

    def register(function: Command) -> Command:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        joined = [text if text.startswith("\b") else text.replace("\n", " ") for text in paragraphs]
        return to.command(name, help="\n\n".join(joined), rich_help_panel=panel)(function)

    return register


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            version = metadata.version("fedprism")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        typer.echo(f"fedprism {version}")
        raise typer.Exit


@app.callback()
def _callback(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop.")
    ] = False,
) -> None:
    """Personalised federated learning: what clients share, what stays their own, and what each one gains.

    Begin with [b]fedprism demo[/b]. Every command has a --help with an example.
    """
