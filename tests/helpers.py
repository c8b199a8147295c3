"""Small pieces that several test files share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedprism.config import Config
from fedprism.engines.client import Failure, Result, make_info
from fedprism.engines.events import Callback, Plan, RoundRecord, Snapshot, Status
from fedprism.engines.inprocess import Engine, InProcess
from fedprism.engines.loop import Loop, make_loop
from fedprism.federation import Federation, Split
from fedprism.methods.base import Method, State

CPU = torch.device("cpu")


class Collect(Callback):
    """A callback that keeps everything it is told."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.snapshots: list[Snapshot] = []
        self.plan: Plan | None = None
        self.status: Status | None = None

    def begin(self, plan: Plan) -> None:
        self.plan = plan

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        self.records.append(record)
        self.snapshots.append(snapshot)

    def end(self, status: Status) -> None:
        self.status = status


def loop_for(method: Method, config: Config, federation: Federation, engine: Engine | None = None) -> Loop:
    """A round loop at its first state, in memory: no run directory."""
    info = make_info(config, federation.names, federation.classes, federation.shape)
    engine = engine or InProcess(method, config, info, federation, CPU)
    return make_loop(method, config, info, federation, engine, CPU)


def same(a: State | None, b: State | None) -> bool:
    """Are two states equal, bit by bit?"""
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_result(a: Result | Failure, b: Result | Failure) -> bool:
    """Did two rounds of a client give the same, bit by bit? A failure is no result."""
    return (
        isinstance(a, Result)
        and isinstance(b, Result)
        and same(a.state, b.state)
        and same(a.upload, b.upload)
        and (a.samples, a.logs, a.scores) == (b.samples, b.logs, b.scores)
    )


def cut(federation: Federation, sizes: Sequence[int]) -> Federation:
    """The same clients with so many training images each."""
    clients = {}
    for (name, data), size in zip(federation.clients.items(), sizes, strict=True):
        clients[name] = replace(data, train=Split(data.train.x[:size], data.train.y[:size]))
    return replace(federation, clients=clients)
