"""`fedprism fsck`: is every file of a run as it was written?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fedprism.cli.app import LEARN, command
from fedprism.cli.output import stdout, user_errors

if TYPE_CHECKING:
    from fedprism.records.fsck import Finding


@command(LEARN)
def fsck(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories.")],
    repair: Annotated[bool, typer.Option("--repair", help="Do what can be done; what is replaced is kept.")] = False,
) -> None:
    """Check every file of a run: checksums, rounds, what checkpoints refer to, links.

    It says what is damaged and what can still be done, and changes nothing. With --repair it does it: whatever is
    replaced is moved into a folder `replaced-...` of the run directory. The exit code is 1 if something is wrong.

    \b
    Example:
      fedprism fsck runs/digits-skew/fedbn-0
      fedprism fsck runs/digits-skew/fedbn-0 --repair
    """
    wrong = False
    for path in paths:
        with user_errors():
            from fedprism.records.fsck import fsck as check
            from fedprism.records.fsck import repair as mend

            found, done = mend(path) if repair else (check(path), [])
        for finding in done:
            _print(path, finding, "repaired")
        for finding in found.findings:
            _print(path, finding, "damaged")
        style = "red" if found.findings else "green"
        count = f"Files that are as they were written: {found.verified}. " if not found.stopped else ""
        stdout().print(Text.assemble((f"{path}", "bold"), (f": {count}{found.verdict}.", style)), soft_wrap=True)
        if not repair and any(finding.repair for finding in found.findings):
            stdout().print(f"repair what can be: fedprism fsck {path} --repair", style="dim", soft_wrap=True)
        wrong = wrong or bool(found.findings)
    if wrong:
        raise typer.Exit(1)


def _print(path: Path, finding: Finding, state: str) -> None:
    line = f"{state}: {path / finding.where} {finding.problem}: {finding.remedy}."
    stdout().print(Text(line, style="red" if state == "damaged" else "yellow"), soft_wrap=True)
