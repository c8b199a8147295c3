"""What goes wrong at one client stays there: its state is kept, and the others are aggregated without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedprism.conformance.case import Case, Trained, with_passes
from fedprism.conformance.compare import difference, first_difference, same
from fedprism.conformance.reproducible import as_stored
from fedprism.conformance.spies import Replayed, Without
from fedprism.conformance.verdicts import Broken, DoesNotApply, promise
from fedprism.federation import Federation, Split
from fedprism.methods.base import Client, Method, Pass, State
from fedprism.round.engine import Failure, Result

ROUND = 2  # in which it happens, counted from 0
OWN = "of my own"  # what nobody has declared


def not_a_number(upload: State) -> State:
    first_float(upload)[1].view(-1)[-1] = torch.nan
    return upload


def wrong_shape(upload: State) -> State:
    name, tensor = first_float(upload)
    return {**upload, name: tensor.unsqueeze(0).repeat(2, *[1] * tensor.ndim)}


def wrong_type(upload: State) -> State:
    name, tensor = first_float(upload)
    return {**upload, name: tensor.double()}


def missing(upload: State) -> State:
    upload.pop(first_float(upload)[0])
    return upload


def not_declared(upload: State) -> State:
    return {**upload, OWN: torch.ones(2)}


@promise("a bad upload is refused by its name", needs=("runs", "same-seed", "subset"))
def bad_upload(case: Case) -> None:
    run, victim = case.straight, case.straight.loop.info.clients[1]
    upload, encoded = run.result(ROUND, victim).upload, _encodes(run.loop.method)
    floats = any(tensor.is_floating_point() for tensor in upload.values())
    without = _tampered(case, victim, lambda result: Failure("gone"))
    # What is encoded has names and types of its own, so that only what is missing or no number must be seen.
    kinds = [not_a_number, missing] if encoded else [not_a_number, wrong_shape, wrong_type, missing, not_declared]
    for change in kinds:
        if not floats and change is not not_declared:
            continue
        after, what = _tampered(case, victim, partial(_changed, change)), change.__name__.replace("_", " ")
        name = OWN if change is not_declared else first_float(upload)[0]
        reason = after.records[-1].failed.get(victim)
        if reason is None:
            raise Broken(
                f"{name} in the upload of client {victim} was made bad on its way ({what}), but it was averaged.",
                "`decode` must not repair or leave out anything: the server refuses what is not as declared.",
            )
        if name not in reason and not encoded:
            raise Broken(f"{name} in the upload of client {victim} is bad ({what}), but the reason is: {reason}.")
        _as_if_gone(after, without, victim, run.snapshots[ROUND].clients[victim])
    if upload and same(without.last.server, run.snapshots[ROUND].server):
        raise Broken("one client's upload is refused, and those of the others change nothing on the server.")


@promise("a client that fails leaves its state", needs=("runs", "same-seed", "order", "subset"))
def failing(case: Case) -> None:
    victim, rounds = case.federation.names[1], 2
    after = case.run(method=allergic(case.make()), federation=marked(case.federation, victim), until=rounds)
    for record in after.records[1:]:
        reason = record.failed.get(victim)
        if reason is None:
            raise DoesNotApply("a loss that is not a number does not make a client fail")
        if "not finite" not in reason:
            raise Broken(f"the loss of client {victim} is not a number, but its failure is: {reason}.")
    _as_if_gone(after, case.run(engine=partial(Without, victim), until=rounds), victim, None)
    every = marked(case.federation, *case.federation.names)
    ended = case.run(method=allergic(case.make()), federation=every)
    if ended.status != "diverged" or len(ended.records) != 2:
        raise Broken(f"every client fails in round 1, but the run goes on to round {len(ended.records) - 1}.")
    differs = difference(ended.last.server, ended.snapshots[0].server)
    if differs is not None or any(state is not None for state in ended.last.clients.values()):
        raise Broken(f"every client fails in round 1, but something changes: {differs or 'a state of a client'}.")


def _as_if_gone(after: Trained, without: Trained, victim: str, state: State | None) -> None:
    """The client has the state that it had, and for all others it is as if it had never answered."""
    differs = difference(after.last.clients[victim], state)
    if differs is not None or victim in after.records[-1].up:
        raise Broken(f"client {victim} failed, but not without a trace: {differs or 'its upload is counted'}.")
    differs = first_difference(after, without, states_only=True)
    if differs is not None:
        raise Broken(
            f"client {victim} failed, and the round is not what it is where this client does not answer: {differs}.",
            "what a client finds out reaches the server in its upload and no other way.",
        )


def _tampered(case: Case, victim: str, change: Callable[[Result], Result | Failure]) -> Trained:
    """One round of the plain run, with its answers, of which one is changed on its way."""
    run = case.straight
    engine = partial(Replayed, run.answers, victim, change)
    config = case.config(evaluate={"every": 99})
    return case.run(config, engine, start=as_stored(run.snapshots[ROUND]), until=ROUND + 1)


def _changed(change: Callable[[State], State], result: Result) -> Result:
    return replace(result, upload=change({name: tensor.clone() for name, tensor in result.upload.items()}))


def _encodes(method: Method) -> bool:
    return type(method).encode is not Method.encode or type(method).decode is not Method.decode


def first_float(state: State) -> tuple[str, Tensor]:
    return next((name, tensor) for name, tensor in state.items() if tensor.is_floating_point())


def marked(federation: Federation, *names: str) -> Federation:
    """These clients' first training image is white all over."""
    clients = dict(federation.clients)
    for name in names:
        x = clients[name].train.x.clone()
        x[0] = 255
        clients[name] = replace(clients[name], train=Split(x, clients[name].train.y))
    return replace(federation, clients=clients)


def allergic(method: Method) -> Method:
    """The same method, whose loss is not a number on a batch with a white image."""

    def change(each: Pass) -> Pass:
        def loss(client: Client, x: Tensor, y: Tensor) -> Tensor | None:
            value = each.loss(client, x, y)
            return None if value is None else value * _nan_if_marked(x)

        def step(client: Client, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
            assert each.step is not None
            each.step(client, x * _nan_if_marked(x), y, optimizer)

        return replace(each, loss=loss, step=None if each.step is None else step)

    return with_passes(method, change)


def _nan_if_marked(x: Tensor) -> Tensor:
    return torch.where((x == 1).flatten(1).all(1).any(), torch.nan, 1.0)
