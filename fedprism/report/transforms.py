"""What the transforms of a run did to its uploads, from its records."""

from __future__ import annotations

from statistics import fmean

from fedprism.records import RunRecord
from fedprism.report.formats import Entry, Grid


def transforms(record: RunRecord) -> Grid | None:
    """A row for each value that a transform records, with its mean over all uploads; None where there is none."""
    rows, uploads = [], 0
    for shows in record.transforms.values():
        for name, meaning in shows.items():
            logs = [each.logs.get(client, {}) for each in record.rounds for client in each.up]
            values = [of_client[name] for of_client in logs if name in of_client]
            if values:
                rows.append((f"{name}: {meaning}", f"{fmean(values):.3g}"))
                uploads = max(uploads, len(values))
    if not rows:
        return None
    sent = [count for each in record.rounds for count in each.up.values()]
    rows.append(("bytes of an upload, as it is sent", f"{fmean(sent):,.0f}" if sent else "–"))
    cells = tuple(tuple(Entry(text) for text in row) for row in rows)
    return Grid(("recorded by", "mean"), cells, (f"Means over {uploads:,} uploads.",))
