"""Which client has which architecture, from a run's records."""

from __future__ import annotations

from collections import Counter

from fedprism.engines.client import make_info
from fedprism.errors import FedprismError
from fedprism.methods import METHODS, make
from fedprism.methods.base import Info
from fedprism.models import Arch
from fedprism.records import RunRecord
from fedprism.report.formats import Entry, Grid
from fedprism.report.table import MANY


def architectures_of(record: RunRecord) -> dict[str, Arch]:
    """Every client's architecture; empty where the run has not begun, or was made by a version without its models."""
    info = _info(record)
    return {} if info is None else dict(info.archs)


def decided(record: RunRecord) -> dict[str, str]:
    """What a built-in method decided by looking at the clients, such as FedSCE's auxiliary model."""
    info, method = _info(record), record.config.method
    if info is None or method.name not in METHODS:  # a user's file is not run for a page
        return {}
    try:
        return dict(make(method).facts(info))
    except FedprismError:  # of a version with other settings
        return {}


def _info(record: RunRecord) -> Info | None:
    if "shape" not in record.info:
        return None
    try:
        return make_info(record.config, record.clients, len(record.class_names), record.shape)
    except FedprismError:
        return None


def models(record: RunRecord) -> Grid | None:
    """The model of each client where they differ, a row a client; of many clients, a row an architecture."""
    archs = architectures_of(record)
    counts = Counter(archs.values())
    if len(counts) < 2:
        return None
    few = len(archs) <= MANY
    rows = [(client, arch.label, arch) for client, arch in archs.items()]
    if not few:
        rows = [(arch.label, str(count), arch) for arch, count in counts.items()]
    header = ("client", "model") if few else ("model", "clients")
    cells = [(*texts, f"{arch.parameters:,}", str(arch.width)) for *texts, arch in rows]
    return Grid((*header, "parameters", "features"), tuple(tuple(Entry(text) for text in row) for row in cells))
