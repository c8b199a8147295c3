"""Who takes part, who drops out, who joins later, and who has few images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fedprism.conformance.case import Case, Trained, cut, sound, trained
from fedprism.conformance.compare import difference, shapes
from fedprism.conformance.states import unchanged
from fedprism.conformance.verdicts import Broken, DoesNotApply, Note, promise
from fedprism.errors import FedprismError
from fedprism.methods.base import State, Upload
from fedprism.methods.states import not_finite
from fedprism.round.client import Job, client_evaluate, client_model, client_receive, client_round
from fedprism.round.engine import Result
from fedprism.round.events import RoundRecord, Snapshot

FEW = {"participation": 0.34}  # one client of three
SELDOM = {"every": 99}  # the first state and the last round alone

_IS_NEW = (
    "a client may come for the first time in any round, and miss some: ask `ctx.is_new`, not the round. The server may "
    "not have heard of a client yet."
)


@promise("a client may miss rounds or drop out", needs=("runs", "subset"))
def few(case: Case) -> None:
    method, run = case.method, case.run(case.config(clients=FEW, evaluate=SELDOM))
    _sound(run, _IS_NEW)
    for record in run.records[1:]:
        _equal(set(record.up), set(record.cohort), f"round {record.round}: clients that upload", "the cohort")
        if (method.broadcast, method.trainers) == ("participants", "participants"):
            changed = run.changed(record.round)
            _equal(changed, set(record.cohort), f"round {record.round}: clients whose model changed", "the cohort")
            _equal(set(record.down), changed, f"round {record.round}: clients that are sent something", "the cohort")
    _drop_outs(case)


def _drop_outs(case: Case) -> None:
    """Who drops out leaves no trace; nor does a round in which everybody does."""
    run = case.run(case.config(clients={"dropout": 0.5}, evaluate=SELDOM))
    nobody = case.run(case.config(clients={"dropout": 1.0}, evaluate=SELDOM), until=2)
    for record, before, after in (*_rounds(run), *_rounds(nobody)):
        for client_id, reason in record.failed.items():
            if "dropped out" not in reason:
                raise Broken(f"round {record.round}: client {client_id} failed: {reason}.", _IS_NEW)
            differs = difference(after.clients[client_id], before.clients[client_id])
            if differs is not None:
                raise Broken(f"round {record.round}: client {client_id} dropped out, but its state changed: {differs}.")
        rest = set(case.federation.names) - set(record.failed)
        _equal(set(record.up), rest, f"round {record.round}: clients that upload", "those that have not dropped out")
        differs = None if record.up else difference(after.server, before.server)
        if differs is not None:
            raise Broken(f"round {record.round}: nobody answered, but the server's state changed: {differs}.")


@promise("a client may train without being averaged", needs=("runs", "subset"))
def all_train(case: Case) -> None:
    run = case.run(case.config(train={"rounds": 2}, clients={**FEW, "train": "all"}, evaluate=SELDOM))
    _sound(
        run, "clients.train: all lets everybody train; what the server knows of a client may be older than its state."
    )
    every = set(run.loop.info.clients)
    for record in run.records[1:]:
        _equal(set(record.up), set(record.cohort), f"round {record.round}: clients that upload", "the cohort")
        _equal(set(record.down), every, f"round {record.round}: clients that are sent something", "all clients")
        _equal(set(record.logs), every, f"round {record.round}: clients with logs", "all clients")
        changed = run.changed(record.round)
        _equal(changed, every, f"round {record.round}: clients whose model changed", "all clients")


@promise("a client may receive without training", needs=("runs", "subset"))
def all_receive(case: Case) -> None:
    """It has then received, and nothing else."""
    clients = {**FEW, "broadcast": "all", "train": "participants"}
    run = case.run(case.config(train={"rounds": 2}, clients=clients, evaluate=SELDOM))
    hint = "`receive` may be called for a client that does not train in that round, or has never trained."
    _sound(run, hint)
    loop, before = run.loop, run.snapshots[1]
    for client_id in set(loop.info.clients) - set(run.records[2].cohort):
        ctx = loop.context(1).replace(client_id=client_id)
        down = loop.method.encode(loop.method.send(before.server, client_id, ctx), ctx)
        job, state = run.job(client_id, 1), before.clients[client_id]
        differs = difference(run.state(client_id), client_receive(job, state, down))
        differs = differs or difference(run.model(client_id, 1), client_model(job, state, down))
        if differs is not None:
            raise Broken(f"client {client_id} received twice from the same state and download: {differs}.", hint)


@promise("a client smaller than a batch trains")
def small(case: Case) -> None:
    few_images = cut(case.federation, [2, 7, 33])
    for last in ("keep", "drop"):
        train = {"rounds": 1, "batch_size": 32, "last_batch": last}
        trained(case, case.run(case.config(train=train, evaluate=SELDOM), federation=few_images))


@promise("newcomers can be onboarded", needs=("runs", "subset"))
def newcomer(case: Case) -> None:
    """One is sent what a stranger is, adapts it on its own data, and can take part from then on."""
    *known, new = case.federation.names
    others = replace(case.federation, clients={client_id: case.federation.clients[client_id] for client_id in known})
    run = case.run(case.config(train={"rounds": 2}, evaluate=SELDOM), federation=others)
    sound(run)
    method, loop = run.loop.method, run.loop
    config = case.config(train={"rounds": 4}, evaluate={"moments": ["received", "adapted"], "splits": ["train"]})
    info, data, ctx = replace(loop.info, later=(new,)), case.federation.clients[new], loop.context(2)
    job = Job(method, config, info, data, 2, case.federation.public)
    try:
        with unchanged("send", {"the server's state": loop.server}):
            down = method.encode(method.send(loop.server, None, ctx), ctx)
        scores = client_evaluate(job, None, down)
        result = client_round(job, None, down)
    except FedprismError as error:
        raise DoesNotApply(f"the method refuses newcomers: {error}") from None
    received, adapted = scores["received"]["train"], scores["adapted"]["train"]
    if not np.isfinite([received.loss, adapted.loss]).all():
        raise Broken(f"the losses of a newcomer are not finite: {received.loss} received, {adapted.loss} adapted.")
    if adapted.loss > received.loss:
        raise Broken(
            f"a newcomer gets worse by its adaptation: its loss is {received.loss:.4g} as received, and "
            f"{adapted.loss:.4g} adapted.",
        )
    if not isinstance(result, Result):
        raise Broken(f"a newcomer fails in its first round: {result.reason}.", _IS_NEW)
    _takes_part(job, loop.server, {known[0]: run.state(known[0]), new: None}, run)
    if adapted.loss == received.loss:
        raise Note("a newcomer is as good adapted as received: `adapt` trains nothing for it.")


def _takes_part(job: Job, server: State, states: dict[str, State | None], run: Trained) -> None:
    """A newcomer is sent something by its name, and what it uploads aggregates, alone and beside a member's."""
    method, new = job.method, [*states][-1]
    for round in (2, 3):
        uploads, ctx = [], run.loop.context(round).replace(info=job.info)
        for client_id, state in states.items():
            own = ctx.replace(client_id=client_id)
            down = method.encode(method.send(server, client_id, own), own)
            data = job.data if client_id == new else run.loop.federation.clients[client_id]
            result = client_round(replace(job, data=data, round=round), state, down)
            if not isinstance(result, Result):
                raise Broken(
                    f"round {round + 1}, with a newcomer: client {client_id} failed: {result.reason}.", _IS_NEW
                )
            states[client_id] = result.state
            uploads.append(Upload(client_id, len(data.train), method.decode(result.upload, own)))
        declared = method.uploads(run.loop.models[run.loop.info.arch], ctx.replace(client_id=new))
        _equal(set(uploads[-1].state), set(declared), "names that a newcomer uploads", "those that are declared")
        for some in (uploads[1:], uploads):
            after = method.aggregate(server, some, ctx)
            bad, whose = not_finite(after), "a newcomer alone" if len(some) == 1 else "a newcomer and a member"
            if bad is not None or shapes(after) != shapes(server):
                what = f"{bad} is not finite" if bad is not None else "names or shapes are others"
                raise Broken(f"aggregate, given the uploads of {whose}: {what}.")
        server = after


def _rounds(run: Trained) -> Iterator[tuple[RoundRecord, Snapshot, Snapshot]]:
    """Each round's record, with the states before and after it."""
    for record in run.records[1:]:
        yield record, run.snapshots[record.round - 1], run.snapshots[record.round]


def _sound(run: Trained, hint: str) -> None:
    try:
        sound(run)
    except Broken as broken:
        raise Broken(str(broken), hint) from None


def _equal(found: set[str], expected: set[str], what: str, wanted: str) -> None:
    if found != expected:
        raise Broken(f"{what} are {sorted(found) or 'none'}; expected {wanted}: {sorted(expected)}.")
