"""What a comparison writes beside its runs: a table as CSV and Markdown, and the page with curves and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedprism import atomic
from fedprism.federation import Federation
from fedprism.inspection.pictures import pictures_of
from fedprism.records import Protocol, RunRecord
from fedprism.report.html import write_page
from fedprism.report.table import TOO_MANY, table

CSV, MARKDOWN, PAGE = "comparison.csv", "comparison.md", "report.html"


def write_report(
    path: str | Path,
    records: Sequence[RunRecord],
    protocol: Protocol | str | None = None,
    federation: Federation | None = None,
) -> Path:
    """Write the page about some runs, with images of the clients. The federation is built again unless it is given."""
    return write_page(path, records, protocol, pictures_of(records[0], federation))


def write_comparison(
    folder: str | Path,
    records: Sequence[RunRecord],
    protocol: Protocol | str | None = None,
    federation: Federation | None = None,
) -> None:
    """Write comparison.csv, comparison.md and report.html into a folder."""
    folder = Path(folder)
    result = table(records, protocol)
    texts = {CSV: result.csv(), MARKDOWN: result.markdown(clients=len(result.clients) <= TOO_MANY or None)}
    for name, text in texts.items():
        path = folder / name
        with atomic.reporting(str(path), "The runs are safe; make room and use `fedprism show` on them."):
            folder.mkdir(parents=True, exist_ok=True)
            atomic.write(path, text.encode())
    write_report(folder / PAGE, records, protocol, federation)
