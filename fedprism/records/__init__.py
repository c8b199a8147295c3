"""Records: the run directory (configuration, metrics, checkpoints) and the figures that are computed from it."""

from __future__ import annotations

from fedprism.records.checkpoint import RecordWarning
from fedprism.records.protocol import Figure, Gain, Outcome, Protocol, Summary, gain, outcome, summarise
from fedprism.records.read import RunRecord, read_run, run_status
from fedprism.records.rundir import RunDirectory
from fedprism.records.runfile import flat

__all__ = [
    "Figure",
    "Gain",
    "Outcome",
    "Protocol",
    "RecordWarning",
    "RunDirectory",
    "RunRecord",
    "Summary",
    "flat",
    "gain",
    "outcome",
    "read_run",
    "run_status",
    "summarise",
]
