"""The command that checks a method against what every method promises: check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from fedprism import config as configuration
from fedprism.cli.app import LEARN, command
from fedprism.cli.options import parse_names
from fedprism.cli.output import loading, stderr, stdout, user_errors
from fedprism.config import Config
from fedprism.errors import ConfigError

if TYPE_CHECKING:
    from fedprism.conformance import Promise, Verdict
    from fedprism.methods.base import Method

_STYLES = {"ok": "green", "broken": "bold red", "note": "yellow", "does not apply": "dim"}


@command(LEARN)
def check(
    method: Annotated[
        str | None,
        typer.Argument(
            metavar="METHOD",
            help="path/to/file.py:Class, package.module:Class, or a name of [b]fedprism list methods[/b].",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="method.KEY=VALUE", help="A setting of the method. May be repeated."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="These promises alone, by their keys in --list.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", "--settings", help="Also promises about settings: optimisers, precision, models and so on."
        ),
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List all promises and stop.")] = False,
) -> None:
    """Does a method keep what every method promises? A verdict on each promise, with the reason where one is broken.

    The same seed gives the same bits, a resumed run is the straight run, any subset of uploads aggregates, and so on:
    engines, checkpoints and comparisons rely on it. Each promise is tried in tiny real runs on the CPU, which takes
    about 20 seconds in all. The exit code is 1 if a promise is broken.

    \b
    Example:
      fedprism check my_method.py:MyMethod
      fedprism check my_method.py:MyMethod --set method.mu=0.1 --all
      fedprism check my_method.py:MyMethod --only resume,order
      fedprism check --list
    """
    with user_errors(), loading():
        from fedprism.conformance import PROMISES, find

        if listed:
            _print_list(list(PROMISES.values()))
            return
        wanted = find(
            () if only is None else parse_names(only, "--only", "resume,order"),
            ("structure", "settings") if everything else ("structure",),
        )
        make = _maker(method, settings or [])
    with user_errors():
        verdicts = _judge(make, wanted)
    out = stdout()
    for verdict in verdicts:
        _print_reason(out, verdict)
    counts = Counter(str(verdict.outcome) for verdict in verdicts)
    out.print()
    out.print(Text(f"{make().id}: {_summary(counts)}", style="red" if counts["broken"] else "green"))
    if counts["broken"]:
        raise typer.Exit(1)


def _maker(method: str | None, settings: Sequence[str]) -> Callable[[], Method]:
    """What makes a fresh method of this name and these settings."""
    from fedprism.explain import REQUIRED, settings_of
    from fedprism.methods import find, make

    if method is None:
        raise ConfigError("there is no method to check; name one, such as `fedprism check my_method.py:MyMethod`.")
    odd = [text for text in settings if not text.startswith("method.")]
    if odd:
        raise ConfigError(f"--set {odd[0]!r}: `check` takes settings of the method only, such as method.mu=0.1.")
    cls, raw = find(method), configuration.override({"method": {"name": method}}, settings)
    given = configuration.structure(raw, Config).method
    missing = [name for name, default, *_ in settings_of(cls) if default == REQUIRED and name not in given.settings]
    if missing:
        raise ConfigError(
            f"{method} has no default for {', '.join(missing)}, so it cannot be tried; give it one, or write "
            f"--set method.{missing[0]}=VALUE."
        )
    make(given)  # a mistaken setting is an error before anything runs
    return lambda: make(given)


def _judge(make: Callable[[], Method], wanted: Sequence[Promise]) -> list[Verdict]:
    """One verdict after the other, each printed as soon as it is there."""
    from fedprism.conformance import Case, Verdict, judge

    out, verdicts, width = stdout(), list[Verdict](), max(len(each.text) for each in wanted)
    # Two consoles on one terminal would write into each other's lines.
    with (out if out.is_terminal else stderr()).status("three clients with 40 images each …") as line:
        case = Case(make)
        line.update("the plain run, with which others are compared …")
        with suppress(Exception):  # a promise of its own says what is wrong with it
            _ = case.straight
        for number, each in enumerate(wanted, start=1):
            line.update(f"{number} of {len(wanted)}: {each.text} …")
            verdict = judge(case, each)
            row = Text(f"{each.text:{width}}  ")
            row.append(f"{verdict.outcome:14}", _STYLES[verdict.outcome])
            row.append(f"  {verdict.seconds:5.1f} s", "dim")
            out.print(row, soft_wrap=True)
            verdicts.append(verdict)
    return verdicts


def _print_reason(out: Console, verdict: Verdict) -> None:
    if verdict.outcome == "ok":
        return
    out.print()
    heading = Text(f"{verdict.outcome}: ", _STYLES[verdict.outcome])
    out.print(heading.append(f"{verdict.promise.text} ({verdict.promise.key})", "bold"), soft_wrap=True)
    for line in (*verdict.reason.splitlines(), *([f"Hint: {verdict.hint}"] if verdict.hint else [])):
        if out.is_terminal:
            out.print(Padding(Text(line), (0, 0, 0, 2)))  # wrapped between words
        else:
            out.print(Text(f"  {line}"), soft_wrap=True)


def _print_list(promises: Sequence[Promise]) -> None:
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "group", "promise"):
        table.add_column(column, no_wrap=column != "promise")
    for each in promises:
        table.add_row(each.key, each.group, each.text)
    stdout().print(table)


def _summary(counts: Counter[str]) -> str:
    """The verdicts by number.

    >>> _summary(Counter({"ok": 20, "broken": 1, "note": 2}))
    '20 promises kept, 1 broken, 2 noted.'
    """
    parts = [f"{counts['ok']} promise{'s' if counts['ok'] != 1 else ''} kept", f"{counts['broken']} broken"]
    parts += [f"{counts['note']} noted"] if counts["note"] else []
    parts += [f"{counts['does not apply']} not applicable"] if counts["does not apply"] else []
    return ", ".join(parts) + "."
