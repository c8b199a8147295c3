"""States keep their shape, inputs stay as they are, and whatever arrives can be aggregated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations

from torch import Tensor

from fedprism.config import MOMENTS
from fedprism.conformance.case import ROUNDS, Case, Trained, storing_everything
from fedprism.conformance.compare import copied, difference, first_difference, kind, same, shapes
from fedprism.conformance.spies import BlankSlots
from fedprism.conformance.verdicts import Broken, DoesNotApply, promise
from fedprism.federation import ClientData, Split
from fedprism.methods.base import State, Upload
from fedprism.methods.leaves import tensors
from fedprism.methods.states import not_finite
from fedprism.round.client import client_evaluate, client_model, client_receive, client_round, open_slot
from fedprism.round.engine import Result

_UNSTORED = "what a client does not store held no number (NaN) before it received, trained and was tested"
_NAME_IT = (
    "something of the model is read that is neither stored nor in the download: name it in `stored`, the leaves that a "
    "client keeps until its next round, or write it in `receive`."
)


@promise("states keep their shape")
def shape(case: Case) -> None:
    run = case.straight
    server = run.snapshots[0].server
    models = {client_id: run.first_model(client_id).state_dict() for client_id in run.loop.info.clients}
    for round, snapshot in run.snapshots.items():
        _same_shapes(snapshot.server, server, f"round {round}: the server's state")
        for client_id, state in snapshot.clients.items():
            if state is not None:  # what a client stores may be a part of its model
                own = {name: models[client_id][name] for name in state if name in models[client_id]}
                _same_shapes(state, own, f"round {round}: the state of client {client_id}")
        for client_id, model in run.models.get(round - 1, {}).items():
            _same_shapes(model, models[client_id], f"round {round}: the model of client {client_id}")


def _same_shapes(found: State, expected: State, whose: str) -> None:
    a, b = shapes(found), shapes(expected)
    odd = next((leaf for leaf in {**a, **b} if a.get(leaf) != b.get(leaf)), None)
    if odd is not None:
        is_, was = (kind(state[odd]) if odd in state else "not there" for state in (found, expected))
        raise Broken(
            f"{whose} has changed its shape: {odd} is {is_}; at first it was {was}.",
            "names, shapes and types are fixed by `build` and `server`: make room there for all that a round may need.",
        )


@promise("what is not stored is never read", needs=("says",))
def stored(case: Case) -> None:
    """The method as it is, in slots that hold no number before each client, and with clients that store all leaves."""
    # Clients train, receive without training and are tested at every moment.
    config = case.config(
        clients={"participation": 0.67, "broadcast": "all"}, evaluate={"moments": list(MOMENTS)}, train={"rounds": 3}
    )

    def keeping() -> Trained:
        return case.run(config, method=storing_everything(case.make()))

    try:
        whole = keeping()
    except Exception:  # noqa: BLE001 - that promise is `runs`, which says what was raised
        raise DoesNotApply("a run of clients that store everything stops with an error; see 'it trains'") from None
    try:
        run = case.run(config, BlankSlots)
        differs = _first_read(run, whole)
    except Exception as error:
        raise Broken(f"{_UNSTORED}, and the run stops with an error.", _NAME_IT) from error
    if differs is None:
        return
    if first_difference(keeping(), whole) is not None:
        raise DoesNotApply("two runs with the same seed differ; see 'the same seed gives the same bits'")
    raise Broken(f"{_UNSTORED}, and the run departs from that of clients that store everything, {differs}.", _NAME_IT)


def _first_read(run: Trained, whole: Trained) -> str | None:
    """Where a run departs from that of clients that store everything."""
    snapshots = {
        round: replace(snapshot, clients={c: _cut(state, run.snapshots[round].clients[c]) for c, state in clients})
        for round, snapshot in whole.snapshots.items()
        if round in run.snapshots and (clients := snapshot.clients.items())
    }
    differs = first_difference(run, replace(whole, snapshots=snapshots))
    if differs is not None:
        return differs
    for client_id in run.loop.info.clients:
        differs = difference(run.received(client_id), whole.received(client_id))
        if differs is not None:
            return f"at the end: the model of client {client_id} as received: {differs}"
        own = whole.last.clients[client_id]
        if run.loop.method.moment == "trained" and own is not None:
            served = {**run.first_model(client_id).state_dict(), **run.state(client_id)}
            differs = difference(served, own)
        if differs is not None:
            return f"at the end: the trained model of client {client_id}, at which the method is tested: {differs}"
    return None


def _cut(state: State | None, like: State | None) -> State | None:
    return state if state is None or like is None else {name: state[name] for name in like if name in state}


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
            slot = open_slot(job)
            result = client_round(job, state, down, slot)
            model = copied(tensors(slot.model))
            client_evaluate(job, state, down)
            client_receive(job, state, down)
    if not isinstance(result, Result):
        raise Broken(f"round {round + 1}: client {client_id} failed: {result.reason}.")
    if same(model, client_model(job, state, down)):
        raise Broken(f"round {round + 1}: client {client_id} has trained, but its model is what it received.")
    with unchanged("decode", {"the upload": result.upload}):
        upload = method.decode(result.upload, own)
    uploads = [Upload(client_id, len(data.train), upload), Upload(run.loop.info.clients[0], 2, upload)]
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
