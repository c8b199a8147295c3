"""The Typer applications that commands register with, and the entry point."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks some letter must not cost a result
    app()


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
