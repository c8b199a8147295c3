"""What the transforms of runs did to their uploads, from the records."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedprism.records import RunRecord
from fedprism.report.formats import Entry, Grid


def transforms(records: Sequence[RunRecord]) -> Grid | None:
    """Runs of one configuration: a row for each value that a transform records, with its mean over all uploads; None
    where there is none."""
    rounds = [each for record in records for each in record.rounds]
    logs = [each.logs.get(client, {}) for each in rounds for client in each.up]
    rows, uploads = [], 0
    for shows in records[0].transforms.values():
        for name, meaning in shows.items():
            values = [of_client[name] for of_client in logs if name in of_client]
            if values:
                rows.append((f"{name}: {meaning}", f"{fmean(values):.3g}"))
                uploads = max(uploads, len(values))
    if not rows:
        return None
    sent = [count for each in rounds for count in each.up.values()]
    rows.append(("bytes of an upload, as it is sent", f"{fmean(sent):,.0f}"))
    cells = tuple(tuple(Entry(text) for text in row) for row in rows)
    return Grid(("recorded by", "mean"), cells, (f"Means over {uploads:,} uploads.",))
