"""A method under check: its tiny federation, its runs, and the plain run that many promises are compared with."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from fedprism.config import MOMENTS, Config, structure
from fedprism.conformance.compare import apart, copied, same
from fedprism.conformance.spies import Spy
from fedprism.conformance.verdicts import CPU, Broken, Verdict
from fedprism.engines.numerics import numerics
from fedprism.federation import Federation, Split, make_federation
from fedprism.methods import leaves
from fedprism.methods.base import Client, Context, Info, Method, Net, Pass, State
from fedprism.methods.server_optimizer import method_part
from fedprism.methods.states import not_finite
from fedprism.round.client import Job, client_model, make_info
from fedprism.round.engine import Engine, Failure, Request, Result
from fedprism.round.events import Callback, RoundRecord, Snapshot, Status
from fedprism.round.loop import Loop, make_loop

ROUNDS = 4
MakeEngine = Callable[[Method, Config, Info, Federation, torch.device], Engine]


@cache
def tiny() -> Federation:
    """Three clients with 40 training, 7 validation and 36 test images each, 8 pixels per side; 40 public images."""
    split = {"validation": 0.02, "test": 0.1}
    made = make_federation("digits-skew", clients=4, seed=0, samples=40, split=split, image_size=8)
    *known, other = made.names
    clients = {client_id: made.clients[client_id] for client_id in known}
    return replace(made, clients=clients, public=made.clients[other].train)


def cut(given: Federation, sizes: Sequence[int]) -> Federation:
    """The same clients with `sizes` training images."""
    clients = {}
    for (name, data), size in zip(given.clients.items(), sizes, strict=True):
        clients[name] = replace(data, train=Split(data.train.x[:size], data.train.y[:size]))
    return replace(given, clients=clients)


@dataclass(frozen=True)
class Trained:
    """A run that is over. Its snapshots are copies: a method that changes a state in place does not change them."""

    loop: Loop
    engine: Engine
    records: list[RoundRecord]
    snapshots: dict[int, Snapshot]  # by round; 0 is the first state
    status: Status  # `interrupted` where it was stopped on purpose
    requests: Mapping[int, Mapping[str, Request]]  # round, counted from 0 -> client
    answers: Mapping[int, Mapping[str, Result | Failure]]
    models: Mapping[int, Mapping[str, State]]  # all leaves of who has trained in a round, or received without training
    generators_changed: tuple[str, ...]  # the global generators that it left in another state

    @property
    def last(self) -> Snapshot:
        return self.snapshots[max(self.snapshots)]

    def result(self, round: int, client_id: str) -> Result:
        """What a client that did not fail gave back."""
        answer = self.answers[round][client_id]
        if isinstance(answer, Failure):
            raise Broken(f"round {round + 1}: client {client_id} failed: {answer.reason}.")
        return answer

    def state(self, client_id: str) -> State:
        """What a client has stored at the end."""
        state = self.last.clients[client_id]
        if state is None:
            raise Broken(f"client {client_id} has never trained in {max(self.snapshots)} rounds.")
        return state

    def model(self, client_id: str, round: int | None = None) -> State:
        """All leaves of a client's model as it has trained it in a round, counted from 0; left out: the last time."""
        for each in sorted(self.models, reverse=True) if round is None else (round,):
            if client_id in self.models.get(each, {}):
                return self.models[each][client_id]
        when = f"in {max(self.snapshots)} rounds" if round is None else f"in round {round + 1}"
        raise Broken(f"client {client_id} has never trained {when}.")

    def received(self, client_id: str, after: int | None = None) -> State:
        """All leaves of a client's model as it receives them after a round; left out: the last one."""
        method, snapshot = self.loop.method, self.last if after is None else self.snapshots[after]
        ctx = self.loop.context(snapshot.round).replace(client_id=client_id)
        down = method.encode(method.send(method_part(snapshot.server), client_id, ctx), ctx)
        return client_model(self.job(client_id, snapshot.round), snapshot.clients[client_id], down)

    def changed(self, round: int) -> set[str]:
        """The clients that have another model after a round, counted from 1, than they received in it, or have stored
        something else."""
        before, after, models = self.snapshots[round - 1], self.snapshots[round], self.models.get(round - 1, {})
        trained = {c for c, model in models.items() if not same(model, self.received(c, round - 1))}
        return trained | {c for c in self.loop.info.clients if not same(after.clients[c], before.clients[c])}

    def first_model(self, client_id: str) -> nn.Module:
        """The client's model before it has ever trained."""
        info = self.loop.info
        return self.loop.method.build(info.archs[client_id], client_id, info, info.seed)

    def moved(self, client_id: str) -> float:
        """How far a parameter of the client is from its first value, at most."""
        model = self.model(client_id)
        return max(apart(model[name], p) for name, p in self.first_model(client_id).named_parameters())

    def job(self, client_id: str, round: int, **changes: Any) -> Job:
        """What a client works with in a round of this run."""
        loop = self.loop
        job = Job(loop.method, loop.config, loop.info, loop.federation.clients[client_id], round)
        return replace(job, public=loop.federation.public, **changes)


@dataclass
class Case:
    """A method under check. `make` gives a fresh one for every run, so that nothing kept on it goes from run to run."""

    make: Callable[[], Method]
    federation: Federation = field(default_factory=tiny)
    base: Mapping[str, Any] = field(default_factory=dict)  # sections of the configuration, where a check sets none
    least: float = 0.0  # how far training must move a parameter: by more than this
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @cached_property
    def method(self) -> Method:
        """One of it, to ask what it is."""
        return self.make()

    def config(self, **sections: Any) -> Config:
        """Four rounds on batches of 16, tested on the test images, unless a section says otherwise."""
        raw: dict[str, Any] = {"train": {"rounds": ROUNDS, "batch_size": 16}, "evaluate": {"splits": ["test"]}}
        for name, value in (*self.base.items(), *sections.items()):
            laid_over = isinstance(value, Mapping) and name != "model"
            raw[name] = {**raw.get(name, {}), **value} if laid_over else value
        return structure(raw, Config)

    def run(
        self,
        config: Config | None = None,
        engine: MakeEngine = Spy,
        *,
        method: Method | None = None,
        federation: Federation | None = None,
        start: Snapshot | None = None,
        until: int | None = None,
    ) -> Trained:
        """Train for real, in memory: after `start`, where it is given, and up to round `until`."""
        method, config, federation = method or self.make(), config or self.config(), federation or self.federation
        info = make_info(config, federation.names, federation.classes, federation.shape)
        made, seen = engine(method, config, info, federation, CPU), _Seen(until)
        status: Status = "interrupted"
        loop, before = make_loop(method, config, info, federation, made), _generators()
        with numerics(config.run, CPU), warnings.catch_warnings(), suppress(_Enough):
            warnings.filterwarnings("ignore", message="in round .* every client failed", category=UserWarning)
            status = loop.run([seen], start)
        changed = tuple(name for name, state in _generators().items() if state != before[name])
        requests, answers, models = (getattr(made, name, {}) for name in ("requests", "answers", "models"))
        return Trained(loop, made, seen.records, seen.snapshots, status, requests, answers, models, changed)

    @property
    def straight(self) -> Trained:
        """The plain run of four rounds."""
        if isinstance(self._straight, Exception):
            raise self._straight
        return self._straight

    @cached_property
    def often(self) -> Trained:
        """Three of its rounds, with an evaluation of every moment after each."""
        return self.run(self.config(evaluate={"moments": list(MOMENTS)}), until=3)

    @cached_property
    def _straight(self) -> Trained | Exception:
        try:
            return self.run()
        except Exception as error:  # noqa: BLE001 - raised to whoever asks; a run that fails is not repeated
            return error


def with_passes(method: Method, change: Callable[[Pass], Pass]) -> Method:
    """The same method, each of its passes changed."""
    kind: Any = type(method)

    class Changed(kind):  # type: ignore[misc]
        id = method.id

        def passes(self, client: Client, ctx: Context) -> list[Pass]:
            return [change(each) for each in super().passes(client, ctx)]

    return _of_class(method, Changed)


def storing_everything(method: Method) -> Method:
    """The same method, whose clients keep all leaves of their models between rounds."""
    kind: Any = type(method)

    class StoresAll(kind):  # type: ignore[misc]
        id = method.id

        def stored(self, model: Net, ctx: Context) -> Collection[str]:
            return leaves.everything(model)

    return _of_class(method, StoresAll)


def _of_class(method: Method, kind: type[Method]) -> Method:
    changed = copy.copy(method)
    object.__setattr__(changed, "__class__", kind)
    return changed


def sound(run: Trained) -> None:
    """It ended well, nobody failed, and every number is finite."""
    for record in run.records:
        for client_id, reason in record.failed.items():
            raise Broken(f"round {record.round}: client {client_id} failed: {reason}.")
    for round, snapshot in run.snapshots.items():
        for owner, state in {"the server": snapshot.server, **snapshot.clients}.items():
            bad = None if state is None else not_finite(state)
            if bad is not None:
                raise Broken(f"after round {round}, {bad} of {owner} is not finite.")
    for round, models in run.models.items():
        for client_id, model in models.items():
            bad = not_finite(model)
            if bad is not None:
                raise Broken(f"in round {round + 1}, {bad} of the model of client {client_id} is not finite.")


def trained(case: Case, run: Trained) -> None:
    """It is sound, and every client has learned something."""
    sound(run)
    for client_id in run.loop.info.clients:
        if not run.moved(client_id) > case.least:
            raise Broken(
                f"client {client_id} has trained for {max(run.snapshots)} rounds, but no parameter of its model has "
                f"moved by more than {case.least:g}.",
                "what is trained must be a part of the model that `build` returns: the state is copied from there.",
            )


class _Enough(Exception):
    """All rounds that were asked for are over."""


class _Seen(Callback):
    """Collects records and copies of the states."""

    def __init__(self, until: int | None) -> None:
        self.records: list[RoundRecord] = []
        self.snapshots: dict[int, Snapshot] = {}
        self.until = until

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        clients = {client_id: None if state is None else copied(state) for client_id, state in snapshot.clients.items()}
        self.records.append(record)
        server = copied(snapshot.server)
        self.snapshots[record.round] = Snapshot(snapshot.round, server, clients, snapshot.usual_length)
        if record.round == self.until:
            raise _Enough


def _generators() -> dict[str, object]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": repr(np.random.get_state(legacy=False)),
        "random": random.getstate(),
    }
