"""A client's round in parts: the steps of `round/client.py`, between which the engine may turn to another slot.

Nothing here waits for the device. What is to be read is collected by `PendingScalars` and read for all clients at once.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fedprism.engines.cuda.steps import SlotCapture, Steps
from fedprism.methods.base import Context, Pass, State
from fedprism.methods.states import measurable
from fedprism.round.client import (
    Departure,
    Job,
    Tallies,
    adapting,
    arrive,
    copy_stored,
    depart,
    finish,
    read_scores,
    tally,
    tally_received,
)
from fedprism.round.engine import ClientScores, Failure, Result
from fedprism.round.training import finish_pass, start_pass

T = TypeVar("T")


def round_steps(slot: SlotCapture, job: Job, state: State | None, download: State) -> Steps[Departure]:
    """`client_round`, up to where numbers are read."""
    ctx = arrive(slot.client, job, state, download)
    yield
    ctx = yield from _train(slot, job, ctx, job.method.passes(slot.client, ctx))
    return depart(slot.client, job, ctx, slot.score_split)


def evaluate_steps(slot: SlotCapture, job: Job, state: State | None, download: State) -> Steps[Tallies]:
    """`client_evaluate`, up to where numbers are read."""
    ctx = arrive(slot.client, job, state, download)
    tallies = tally_received(slot.client, job, slot.score_split)
    if "adapted" in job.config.evaluate.moments:
        ctx = adapting(job, ctx)
        yield from _train(slot, job, ctx, job.method.adapt(slot.client, ctx))
        tallies["adapted"] = tally(slot.client, job, "adapted", slot.score_split)
    return tallies


def receive_steps(slot: SlotCapture, job: Job, state: State | None, download: State) -> Steps[State]:
    """`client_receive`."""
    ctx = arrive(slot.client, job, state, download)
    yield
    return copy_stored(slot.client, job, ctx)


def _train(slot: SlotCapture, job: Job, ctx: Context, passes: Sequence[Pass]) -> Generator[None, None, Context]:
    if passes:
        with torch.no_grad():
            job.method.start(slot.client, ctx)
    for spec in passes:
        run = start_pass(slot.client, spec, ctx, job.config, job.operations)
        ctx = finish_pass(run, (yield from slot.fit(run)))
    return ctx


# --- reading ---------------------------------------------------------------------------------------------------------


def read_rounds(departures: Mapping[str, Departure]) -> dict[str, Result | Failure]:
    """The results of many clients, with one wait for the device."""
    pending = PendingScalars()
    floats = {c: measurable({**left.state, **left.upload}) for c, left in departures.items()}
    probe = pending.add(finite_probe([tensor for leaves in floats.values() for tensor in leaves.values()]))
    logs = {c: {name: pending.add(t) for name, t in left.log_sums.items()} for c, left in departures.items()}
    tallies = {c: pending.add_tallies(left.tallies) for c, left in departures.items()}
    lengths = {c: (pending.add(left.length), pending.add(left.rest)) for c, left in departures.items()}
    pending.fetch()
    probes, begin, results = pending[probe].tolist(), 0, {}
    for client_id, left in departures.items():
        end = begin + len(floats[client_id])
        ends = zip(floats[client_id], probes[begin:end], strict=True)
        bad = next((name for name, value in ends if not math.isfinite(value)), None)
        sums = {name: pending[place] for name, place in logs[client_id].items()}
        pending.read_tallies(left.tallies, tallies[client_id])
        length, rest = (pending[place] for place in lengths[client_id])
        read = replace(left, log_sums=sums, length=length, rest=rest)
        results[client_id], begin = finish(read, bad), end
    return results


def read_evaluations(tallies: Mapping[str, Tallies]) -> dict[str, ClientScores]:
    """The scores of many clients, with one wait for the device."""
    pending = PendingScalars()
    places = {client_id: pending.add_tallies(found) for client_id, found in tallies.items()}
    pending.fetch()
    for client_id, found in tallies.items():
        pending.read_tallies(found, places[client_id])
    return {client_id: read_scores(found) for client_id, found in tallies.items()}


def read_states(states: Mapping[str, State]) -> dict[str, State]:
    """Nothing is read."""
    return dict(states)


class PendingScalars:
    """Small tensors on the device that are read together, so that the host waits once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[Tensor] = []

    def add(self, values: Tensor) -> int:
        """Note some values, which nobody changes any more; their place."""
        self.tensors.append(values.detach())
        return len(self.tensors) - 1

    def add_tallies(self, tallies: Tallies) -> list[int]:
        """Note all numbers of an evaluation; their places."""
        found = [one for parts in tallies.values() for one in parts.values()]
        return [self.add(t) for one in found for t in (one.values, *one.quantiles.values()) if t is not None]

    def read_tallies(self, tallies: Tallies, places: Sequence[int]) -> None:
        """Put the numbers that were read into an evaluation."""
        values = iter([self[place] for place in places])
        for one in (one for parts in tallies.values() for one in parts.values()):
            if one.values is not None:
                one.values = next(values)
            one.quantiles = {name: next(values) for name in one.quantiles}

    def fetch(self) -> None:
        """Read everything, in double precision."""
        remote = [t.double().flatten() for t in self.tensors if t.device.type != "cpu"]
        read = iter(torch.split(torch.cat(remote).cpu(), [len(t) for t in remote]) if remote else ())
        self.values = [t.double() if t.device.type == "cpu" else next(read).view(t.shape) for t in self.tensors]

    def __getitem__(self, place: int) -> Tensor:
        return self.values[place]


@torch.no_grad()
def finite_probe(floats: Sequence[Tensor]) -> Tensor:
    """One number per tensor (none of them empty) that is not finite if one of its values is not."""
    if not floats:
        return torch.empty(0, dtype=torch.float64)
    return torch.stack(torch._foreach_norm([tensor.detach() for tensor in floats], math.inf)).double()
