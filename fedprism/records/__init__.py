"""Records: the run directory (configuration, metrics, checkpoints) and the figures that are computed from it.

Reading a run needs no PyTorch. `RunDirectory`, which writes runs and loads checkpoints, does: it is imported when it is
first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedprism.records.protocol import Figure, Gain, Outcome, Protocol, Summary, gain, outcome, summarise
from fedprism.records.read import RunRecord, read_run, run_status
from fedprism.records.runfile import RecordWarning, flat
from fedprism.round.events import RoundRecord, Score

if TYPE_CHECKING:
    from fedprism.records.rundir import RunDirectory

__all__ = [
    "Figure",
    "Gain",
    "Outcome",
    "Protocol",
    "RecordWarning",
    "RoundRecord",
    "RunDirectory",
    "RunRecord",
    "Score",
    "Summary",
    "flat",
    "gain",
    "outcome",
    "read_run",
    "run_status",
    "summarise",
]


def __getattr__(name: str) -> Any:
    if name == "RunDirectory":
        return import_module("fedprism.records.rundir").RunDirectory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
