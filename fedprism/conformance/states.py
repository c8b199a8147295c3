"""States keep their shape, inputs stay as they are, and whatever arrives can be aggregated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations

from torch import Tensor

from fedprism.config import MOMENTS
from fedprism.conformance.case import ROUNDS, Case
from fedprism.conformance.compare import copied, difference, kind, same, shapes
from fedprism.conformance.verdicts import Broken, promise
from fedprism.federation import ClientData, Split
from fedprism.methods.base import State, Upload
from fedprism.methods.states import not_finite
from fedprism.round.client import client_evaluate, client_receive, client_round
from fedprism.round.engine import Result


@promise("states keep their shape")
def shape(case: Case) -> None:
    run = case.straight
    server = run.snapshots[0].server
    models = {client_id: run.first_model(client_id).state_dict() for client_id in run.loop.info.clients}
    for round, snapshot in run.snapshots.items():
        _same_shapes(snapshot.server, server, f"round {round}: the server's state")
        for client_id, state in snapshot.clients.items():
            if state is not None:
                _same_shapes(state, models[client_id], f"round {round}: the state of client {client_id}")


def _same_shapes(found: State, expected: State, whose: str) -> None:
    a, b = shapes(found), shapes(expected)
    odd = next((leaf for leaf in {**a, **b} if a.get(leaf) != b.get(leaf)), None)
    if odd is not None:
        is_, was = (kind(state[odd]) if odd in state else "not there" for state in (found, expected))
        raise Broken(
            f"{whose} has changed its shape: {odd} is {is_}; at first it was {was}.",
            "names, shapes and types are fixed by `build` and `server`: make room there for all that a round may need.",
        )


@promise("any subset of uploads aggregates")
def subset(case: Case) -> None:
    run, last = case.straight, ROUNDS - 1
    method, info, server, ctx = run.loop.method, run.loop.info, run.snapshots[last].server, run.loop.context(last)
    sent = {c: method.decode(run.result(last, c).upload, ctx.replace(client_id=c)) for c in info.clients}
    uploads = [Upload(c, len(run.loop.federation.clients[c].train), sent[c]) for c in info.clients]
    whole = shapes(method.aggregate(copied(server), uploads, run.loop.context(last)))
    for count in range(1, len(uploads) + 1):
        for some in combinations(uploads, count):
            whose = f"the uploads of {' and '.join(upload.client_id for upload in some)}"
            hint = "`aggregate` is called with the uploads of any subset of clients: use those that are there."
            try:
                after = method.aggregate(copied(server), list(some), run.loop.context(last))
            except Exception as error:
                raise Broken(f"aggregate fails on {whose}.", hint) from error
            bad = not_finite(after)
            if bad is not None:
                raise Broken(f"aggregate makes {bad} not finite of {whose}.", hint)
            if shapes(after) != whole:
                odd = next(n for n in {**whole, **after} if shapes(after).get(n) != whole.get(n))
                raise Broken(f"aggregate gives another {odd} for {whose} than for those of all clients.", hint)


@promise("inputs are not changed")
def inputs(case: Case) -> None:
    for round in (0, 2):  # in its first one a client has no state
        _one_round(case, round)


def _one_round(case: Case, round: int) -> None:
    """All that one client and the server do in a round, with a look at what they were given."""
    run = case.straight
    method, client_id, ctx = run.loop.method, run.loop.info.clients[1], run.loop.context(round)
    server, before = copied(run.snapshots[round].server), run.snapshots[round].clients[client_id]
    state, own = None if before is None else copied(before), ctx.replace(client_id=client_id)
    data = _own_tensors(run.loop.federation.clients[client_id])
    job = run.job(client_id, round, config=case.config(evaluate={"moments": list(MOMENTS)}), data=data)
    images = {"x": data.train.x, "y": data.train.y, "test.x": data.test.x}
    with unchanged("a hook of the client", {"its state": state or {}, "the images": images}):
        with unchanged("send", {"the server's state": server}):
            sent = method.send(server, client_id, own)
        with unchanged("encode", {"what is sent": sent}):
            down = method.encode(sent, own)
        with unchanged("a hook of the client", {"the download": down, "the server's state": server}):
            result = client_round(job, state, down)
            client_evaluate(job, state, down)
            client_receive(job, state, down)
    if not isinstance(result, Result):
        raise Broken(f"round {round + 1}: client {client_id} failed: {result.reason}.")
    if same(result.state, state):
        raise Broken(f"round {round + 1}: client {client_id} has trained, but its state is what it was before.")
    with unchanged("decode", {"the upload": result.upload}):
        upload = method.decode(result.upload, own)
    uploads = [Upload(client_id, result.samples, upload), Upload(run.loop.info.clients[0], 2, upload)]
    with unchanged("aggregate", {"the upload": upload, "the server's state": server}):
        method.aggregate(server, uploads, ctx)


@contextmanager
def unchanged(who: str, given: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
    before = {what: copied(state) for what, state in given.items()}
    yield
    for what, state in given.items():
        differs = difference(dict(state), before[what])
        if differs is not None:
            raise Broken(
                f"{who} changes {what} in place: {differs}.",
                "states belong to whoever holds them: clone before an operation with a trailing underscore.",
            )


def _own_tensors(data: ClientData) -> ClientData:
    """The same data in tensors of their own, so that a change of them is seen and nobody else's data change."""
    train, validation, test = (
        Split(part.x.clone(), part.y.clone()) for part in (data.train, data.validation, data.test)
    )
    return replace(data, train=train, validation=validation, test=test)
