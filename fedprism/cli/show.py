"""`fedprism show`: tables and pages of runs, from their records."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedprism import atomic, index
from fedprism.cli.app import LEARN, command
from fedprism.cli.options import ProtocolOption, check_protocol
from fedprism.cli.output import loading, print_message, print_table, print_text, stdout, user_errors
from fedprism.errors import ConfigError, RecordError, shown

if TYPE_CHECKING:
    from fedprism.records import RunRecord


class TableFormat(StrEnum):
    """How `show` writes a table."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    html = "html"


@command(LEARN)
def show(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs, or folders that hold some.")],
    protocol: ProtocolOption = None,
    form: Annotated[TableFormat, typer.Option("--format", help="How the table is written.")] = TableFormat.terminal,
    report: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the page with curves, too.")] = None,
) -> None:
    """Print the table of runs again, from their records; another protocol needs no new training.

    Runs that are named go into one table. A folder is searched: the runs of each folder in it make a table. Under the
    table of a single run are the models of its clients, where these differ, what its transforms did, and what its
    method shows of its inside.

    \b
    Example:
      fedprism show runs/digits-skew
      fedprism show runs/digits-skew --protocol trained,last5,samples --format latex
    """
    with user_errors():
        from fedprism.records.read import common_folder, read_run
        from fedprism.report.table import table

        check_protocol(protocol)
        groups = _find_runs(paths)
        if report is not None and len(groups) > 1:
            raise ConfigError(f"--report makes one page, but the runs lie in {len(groups)} folders; name one of them.")
        if report is not None:
            if report.suffix.lower() not in (".html", ".htm"):  # a record of a run, perhaps
                raise ConfigError(f"--report is {shown(str(report))}; expected the name of a page, FILE.html.")
            with atomic.reporting(str(report), "Choose another --report."):
                atomic.check_writable(report)
    failed = 0
    for group in groups:
        try:
            with user_errors():
                records = _sorted([read_run(path) for path in group])
                result = table(records, protocol)
                if report is not None:
                    _write_report(report, records, protocol)
        except typer.Exit as ended:
            if ended.exit_code != 2:  # somebody has stopped the command
                raise
            failed = 2  # its error is printed; the next folder may be sound
            continue
        if form is TableFormat.terminal:
            if len(groups) > 1:
                stdout().print(Text(str(common_folder(group)), style="bold"))
            print_table(result)
            if len(records) == 1:
                _print_details(records[0], protocol)
        else:
            texts = {"markdown": result.markdown, "latex": result.latex, "csv": result.csv, "html": result.html}
            print_text(texts[form](), end="\n" if form is TableFormat.html else "")
    if report is not None and not failed:
        print_message(f"wrote {report}", "")
    if failed:
        raise typer.Exit(failed)


def _find_runs(paths: Sequence[Path]) -> list[list[Path]]:
    """Run directories by table: those that are named together, those that are found by their folder."""
    from fedprism.records import runfile
    from fedprism.records.folder import refuse_set_aside
    from fedprism.records.read import runs_below

    named = [path for path in paths if runfile.exists(path)]
    groups: dict[Path, list[Path]] = {}
    for path in paths:
        if path in named:
            continue
        if not path.is_dir():
            runfile.read(path)  # raises the error
        below = runs_below(path)
        if not below:
            refuse_set_aside(path)
            raise RecordError(f"there is no run in {path} or below it; `fedprism run` makes one.")
        for directory in below:
            groups.setdefault(directory.parent, []).append(directory)
    return [*([named] if named else []), *groups.values()]


def _sorted(records: list[RunRecord]) -> list[RunRecord]:
    """Runs in the order of the built-in methods; others come last, by name."""
    known = list(index.entries("methods")) if len(records) > 1 else []

    def place(record: RunRecord) -> tuple[int, str, int]:
        return known.index(record.method) if record.method in known else len(known), record.method, record.seed

    return sorted(records, key=place)


def _write_report(path: Path, records: Sequence[RunRecord], protocol: str | None) -> None:
    with loading():
        from fedprism.summary import write_report
    write_report(path, records, protocol)


def _print_details(record: RunRecord, protocol: str | None) -> None:
    """What is printed of a single run under its table."""
    from fedprism.report.diagnostics import last_values
    from fedprism.report.models import models
    from fedprism.report.transforms import transforms

    if (different := models(record)) is not None:
        stdout().print(Text("\nmodels", style="bold"))
        print_table(different)
    for name, value in record.decided.items():
        print_text(f"\n{name}: {value}")
    if (done := transforms([record])) is not None:
        stdout().print(Text("\ntransforms of uploads", style="bold"))
        print_table(done)
    if (values := last_values(record, protocol)) is not None:
        stdout().print(Text("\ninside the method", style="bold"))
        print_table(values)
