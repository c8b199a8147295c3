"""Which client has which architecture, from a run's records."""

from __future__ import annotations

from fedprism.records import RunRecord
from fedprism.report.formats import Entry, Grid
from fedprism.report.table import MANY


def models(record: RunRecord) -> Grid | None:
    """The clients' models where they differ: a row per client or, of many clients, a row per architecture."""
    archs = record.architectures
    if len(archs) < 2:
        return None
    of_client = {client: arch for arch in archs for client in arch.clients}
    if len(of_client) <= MANY:
        rows = [(client, of_client[client].label, of_client[client]) for client in record.clients]
        header = ("client", "model")
    else:
        rows = [(arch.label, str(len(arch.clients)), arch) for arch in archs]
        header = ("model", "clients")
    cells = [(*texts, f"{arch.parameters:,}", str(arch.features)) for *texts, arch in rows]
    return Grid((*header, "parameters", "features"), tuple(tuple(Entry(text) for text in row) for row in cells))
