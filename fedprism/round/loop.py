"""The only round loop: sample clients -> send -> train (through an engine) -> check -> aggregate -> evaluate.

It knows who takes part, who receives the new state and who trains. A method knows what, an engine knows where. Records,
progress and trackers are callbacks.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from fedprism import keys
from fedprism.aggregators import Aggregator, check_aggregator, make_aggregator
from fedprism.config import ClientsConfig, Config
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods import leaves, server_optimizer
from fedprism.methods.base import Context, Info, Method, State, UploadKind
from fedprism.methods.mixed import check_mixed
from fedprism.models import Arch
from fedprism.round.client import chosen, due, make_context, stored_bytes, uploaded_kinds
from fedprism.round.engine import ClientScores, Engine, Failure, Request, Result
from fedprism.round.events import Callback, Plan, RoundRecord, Score, Snapshot, Status
from fedprism.round.memory import enough_memory
from fedprism.round.server import RoundUploads
from fedprism.round.signals import ending_in_order
from fedprism.store.clients import ClientStore, DiskStore, MemoryStore, clients_at_once
from fedprism.store.serialize import size
from fedprism.transforms import make_transforms
from fedprism.transforms.base import Transform, check_transforms

T = TypeVar("T")

ScoreTable = dict[str, dict[str, dict[str, Score]]]  # moment -> split -> client


@dataclass
class Loop:
    """A run in memory: the server's state, every client's state, and what moves them by one round."""

    method: Method
    config: Config
    info: Info
    federation: Federation
    engine: Engine
    models: dict[Arch, nn.Module]  # one of each architecture, to ask the method what travels
    server: State
    states: ClientStore
    transforms: tuple[Transform, ...] = ()
    aggregator: Aggregator = field(default_factory=Aggregator)
    optimizer_state: State = field(default_factory=dict)  # of the server's optimiser
    usual_length: float | None = None  # median length of the updates of the last round that had any
    warned: bool = False  # of a round in which every client failed
    progress: tuple[int, int] = (0, 0)  # clients that are done in this stage before the current part, and all of it

    def run(self, callbacks: Sequence[Callback], start: Snapshot | None = None, folder: Path | None = None) -> Status:
        """All rounds (those after `start`, if given); returns `finished` or `diverged`.

        `folder` holds clients' states meanwhile, where they live on disk (None: a temporary one).
        """
        first = 0 if start is None else start.round
        status: Status = "interrupted"

        def on_progress(done: int, total: int) -> None:
            for callback in callbacks:
                callback.clients(self.progress[0] + done, self.progress[1])

        def on_note(text: str) -> None:
            for callback in callbacks:
                callback.note(text)

        def end() -> None:
            for callback in callbacks:
                callback.end(status)

        with ExitStack() as stack:
            stack.enter_context(enough_memory())
            stack.enter_context(ending_in_order())
            stack.callback(self.states.close)
            stack.callback(self.engine.close)
            self.states.open(folder)
            if start is not None:
                self.restore(start)
            plan = self.plan(0 if start is None else first + 1)
            for callback in callbacks:
                callback.begin(plan)
            stack.callback(end)
            self.engine.listen(on_progress, on_note)
            if start is None:
                self.report(callbacks, self.first_record())
            diverged = False
            for round in range(first, self.config.train.rounds):
                record, diverged = self.one_round(round)
                self.report(callbacks, record)
                if diverged:
                    break
            status = "diverged" if diverged else "finished"
        return status

    def one_round(self, round: int) -> tuple[RoundRecord, bool]:
        """Move everything by one round; the record, and whether training has diverged."""
        clock, clients, ctx = _Clock(), self.config.clients, self.context(round)
        cohort = draw_cohort(clients, self.info, round)
        trainers = self.info.clients if chosen(clients.train, self.method.trainers) == "all" else cohort
        recipients = self.info.clients if chosen(clients.broadcast, self.method.broadcast) == "all" else trainers

        # A client that drops out trains in vain: nothing of it stays or arrives, so its training is not computed.
        dropped = drop_outs(clients, self.info, cohort, round)
        down = {client_id: size(self.download(client_id, ctx)) for client_id in dropped}
        arrived = _Arrived(dict.fromkeys(dropped, "dropped out after training"))
        training = [client_id for client_id in trainers if client_id not in arrived.failed]
        asked = {client_id: len(self.federation.clients[client_id].train) for client_id in cohort}
        how = self.method, self.transforms, self.aggregator
        uploads = RoundUploads(*how, self.server, ctx, asked, self.usual_length)
        for part in self.parts(training):
            requests = self.requests(part, ctx, down)
            for client_id, answer in in_order(part, self.engine.train(round, requests)):
                clock.lap("train")
                self.take_in(arrived, uploads, client_id, answer, requests[client_id])
                requests.answered(client_id)
                del answer  # the next client trains without it in memory
                clock.lap("aggregate")
        clock.lap("train")
        busy = set(trainers)
        for part in self.parts([client_id for client_id in recipients if client_id not in busy]):
            requests = self.requests(part, ctx, down)
            for client_id, state in self.engine.receive(round, requests):
                requests.answered(client_id)
                if not isinstance(state, Failure):
                    self.states[client_id] = state
        if uploads.lengths:
            self.server = self.with_memory(partial(self.aggregate, uploads))
            self.usual_length = uploads.usual_length
        diverged = arrived.non_finite > 0 and arrived.non_finite == len(training)
        if not uploads.lengths and not diverged:
            self.warn_once(round, arrived.failed)
        clock.lap("aggregate")

        scores: ScoreTable = {}
        if due(self.config, round + 1):
            scores = self.evaluate(round + 1, cohort)
            _add(scores, arrived.scores)
        clock.lap("evaluate")
        logs = {c: {**values, **ctx.logs.get(c, {})} for c, values in arrived.logs.items()}  # the server's last
        down = {client_id: down[client_id] for client_id in self.info.clients if client_id in down}
        record = RoundRecord(round + 1, cohort, arrived.failed, down, arrived.up, logs, scores, clock.seconds())
        return record, diverged

    def take_in(
        self, arrived: _Arrived, uploads: RoundUploads, client_id: str, answer: Result | Failure, request: Request
    ) -> None:
        """Keep what a client answered. Only the cohort is averaged; a client whose upload is refused fails."""
        if isinstance(answer, Result) and client_id in uploads.weights:
            ctx, kinds = self.at_client(client_id, uploads.ctx, request), self.declared(client_id, uploads.ctx.round)
            sent = self.with_memory(partial(uploads.check, client_id, answer, kinds, ctx))
            if isinstance(sent, Failure):
                answer = sent
            else:
                uploads.add(client_id, sent)
                arrived.up[client_id] = size(answer.upload)
        if isinstance(answer, Failure):
            arrived.fail(client_id, answer)
            return
        self.states[client_id] = answer.state
        arrived.logs[client_id], arrived.scores[client_id] = answer.logs, answer.scores

    def evaluate(self, round: int, cohort: Sequence[str]) -> ScoreTable:
        """The moments that follow an aggregation, for the clients that the configuration names."""
        clients = self.info.clients if self.config.evaluate.clients == "all" else cohort
        if not set(self.config.evaluate.moments) - {"trained"}:
            return {}
        ctx = self.context(round)
        scores: ScoreTable = {}
        for part in self.parts(clients):
            requests, answers = self.requests(part, ctx), dict[str, ClientScores]()
            for client_id, answer in self.engine.evaluate(round, requests):
                requests.answered(client_id)
                if not isinstance(answer, Failure):
                    answers[client_id] = answer
            _add(scores, {c: answers[c] for c in part if c in answers})
        return scores

    def first_record(self) -> RoundRecord:
        """Round 0: the first state, before any training."""
        clock = _Clock()
        scores = self.evaluate(0, draw_cohort(self.config.clients, self.info, 0))
        clock.lap("evaluate")
        return RoundRecord(0, (), {}, {}, {}, {}, scores, clock.seconds())

    # --- the server --------------------------------------------------------------------------------------------------

    def context(self, round: int) -> Context:
        """The server's context."""
        return make_context(self.method, self.config, self.info, self.models[self.info.arch], round)

    def download(self, client_id: str, ctx: Context) -> State:
        """What the server sends to a client, encoded."""
        ctx = ctx.replace(client_id=client_id)
        return self.method.encode(dict(self.method.send(self.server, client_id, ctx)), ctx)

    def requests(self, clients: Sequence[str], ctx: Context, down: dict[str, int] | None = None) -> Requests:
        """What an engine is given; the bytes that are sent are noted in `down`."""

        def make(client_id: str) -> Request:
            request = Request(self.states[client_id], self.download(client_id, ctx))
            if down is not None:
                down[client_id] = size(request.download)
            return request

        return Requests(clients, make)

    def at_client(self, client_id: str, ctx: Context, request: Request) -> Context:
        """The client's context, as far as the server knows it."""
        own = ctx.replace(client_id=client_id)
        return own.replace(download=self.method.decode(dict(self.engine.place(request.download)), own))

    def declared(self, client_id: str, round: int) -> Mapping[str, UploadKind]:
        """What a client will upload in a round: name -> kind."""
        model = self.models[self.info.archs[client_id]]
        return self.method.uploads(model, make_context(self.method, self.config, self.info, model, round, client_id))

    def aggregate(self, uploads: RoundUploads) -> State:
        """The server's next state: the method's average, moved on by the server's optimiser."""
        mean = uploads.aggregate()
        if server_optimizer.is_plain(self.config.server):
            return mean
        names = self.sent_weights(uploads.ctx.round, list(uploads.lengths))
        stepped, self.optimizer_state = server_optimizer.optimizer_step(
            self.config.server, names, self.server, mean, self.optimizer_state
        )
        return {**mean, **stepped}

    def sent_weights(self, round: int, clients: Sequence[str]) -> list[str]:
        """The parameters of the server's model that these clients upload as weights in a round."""
        sent = {n for c in clients for n, kind in self.declared(c, round).items() if kind == "weights"}
        return [n for n in leaves.parameters(self.models[self.info.arch]) if n in sent and n in self.server]

    def with_memory(self, work: Callable[[], T]) -> T:
        """The server's work. Where memory runs out, the engine is asked to release some of its own."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                if not self.engine.can_release_memory:
                    raise
                short = str(error)
            self.engine.release_memory(short)  # after the exception, which keeps alive what was under way

    # --- around a round ----------------------------------------------------------------------------------------------

    def parts(self, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        """Clients that an engine is given together; progress is counted over all of them."""
        done = 0
        for part in self.states.parts(clients):
            self.progress = done, len(clients)
            yield part
            done += len(part)

    def restore(self, start: Snapshot) -> None:
        """Go on from a snapshot."""
        self.states.restore(start.clients)
        packed = self.engine.place(start.server)
        self.server = server_optimizer.method_part(packed)
        self.optimizer_state = server_optimizer.optimizer_part(packed, self.optimizer_state)
        self.usual_length = start.usual_length

    def report(self, callbacks: Sequence[Callback], record: RoundRecord) -> None:
        """Hand a round to the callbacks."""
        server = server_optimizer.pack(self.server, self.optimizer_state)
        snapshot = Snapshot(record.round, server, self.states.snapshot(), self.usual_length)
        for callback in callbacks:
            callback.round(record, snapshot)

    def warn_once(self, round: int, failed: Mapping[str, str]) -> None:
        if not self.warned:
            self.warned = True
            reasons = ", ".join(dict.fromkeys(failed.values()))
            warnings.warn(
                f"in round {round + 1} every client failed ({reasons}), so the old state is kept. Further rounds like "
                "this are named in the records alone.",
                stacklevel=3,
            )

    def plan(self, first: int) -> Plan:
        """What callbacks hear at the start."""
        clients = self.federation.clients
        sizes = {arch: sum(p.numel() for p in model.parameters()) for arch, model in self.models.items()}
        return Plan(
            config=self.config,
            method=self.method.id,
            clients=self.info.clients,
            samples={n: (len(d.train), len(d.validation), len(d.test)) for n, d in clients.items()},
            class_names=self.federation.class_names,
            shape=self.federation.shape,
            parameters={n: sizes[self.info.archs[n]] for n in self.info.clients},
            rounds=self.config.train.rounds,
            first_round=first,
            images={n: data.digest() for n, data in clients.items()},
            device=self.engine.device,
            engine=self.engine.name or type(self.engine).__name__,
            moment=self.method.moment,
            reveals=self.method.reveals,
        )


class Requests(Mapping[str, Request]):
    """One request per client, made when it is first asked for and kept until it is answered: where downloads are made
    per client, only those of clients under way are in memory."""

    def __init__(self, clients: Sequence[str], make: Callable[[str], Request]) -> None:
        self._clients, self._make = dict.fromkeys(clients), make
        self._made: dict[str, Request] = {}

    def __getitem__(self, client_id: str) -> Request:
        if client_id not in self._clients:
            raise KeyError(client_id)
        if client_id not in self._made:
            self._made[client_id] = self._make(client_id)
        return self._made[client_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def answered(self, client_id: str) -> None:
        """Let go of a client's request."""
        self._made.pop(client_id, None)


@enough_memory()
def make_loop(method: Method, config: Config, info: Info, federation: Federation, engine: Engine) -> Loop:
    """A loop at its first state."""
    check_mixed([method], info)
    archs = dict.fromkeys(info.archs.values())
    models = {arch: leaves.seal(method.build(arch, None, info, info.seed)) for arch in archs}
    if config.train.batch_size < 2 and any(leaves.norms(model) for model in models.values()):
        raise ConfigError(
            "train.batch_size is 1, but batch norm cannot train on one image; set train.batch_size to 2 or more."
        )
    server = method.server(models[info.arch], make_context(method, config, info, models[info.arch], 0))
    owners = {arch: client_id for client_id, arch in info.archs.items()}  # a client of each
    states: ClientStore = MemoryStore(dict.fromkeys(info.clients))
    if config.clients.state == "disk":
        largest = max(stored_bytes(method, config, info, client_id) for client_id in owners.values())
        states = DiskStore(info.clients, engine.place, clients_at_once(largest, engine.workers))
    transforms, aggregator = make_transforms(config.transforms), make_aggregator(config.server.aggregator)
    loop = Loop(method, config, info, federation, engine, models, engine.place(server), states, transforms, aggregator)
    check_aggregator(aggregator, method)
    check_transforms(transforms, method.id, uploaded_kinds(method, config, info))
    if not server_optimizer.is_plain(config.server):
        rounds = {0, config.train.rounds - 1}  # after a warm-up less may be sent, or more
        if not any(loop.sent_weights(round, [*owners.values()]) for round in rounds):
            server_optimizer.refuse(config.server, method.id)
        weights = [name for name in leaves.parameters(models[info.arch]) if name in server]
        first = {name: loop.server[name] for name in weights}
        loop.optimizer_state = server_optimizer.first_optimizer_state(config.server, first)
    return loop


def in_order(
    clients: Sequence[str], answers: Iterable[tuple[str, Result | Failure]]
) -> Iterator[tuple[str, Result | Failure]]:
    """One answer per client, in client order, each as soon as those before it are there. An early one waits."""
    early: dict[str, Result | Failure] = {}
    missing = deque(clients)
    for client_id, answer in answers:
        early[client_id] = answer
        del answer  # it is not kept here while somebody works with it
        while missing and missing[0] in early:
            yield missing[0], early.pop(missing.popleft())
    for client_id in missing:
        yield client_id, early.pop(client_id, Failure("gave no answer"))


def draw_cohort(clients: ClientsConfig, info: Info, round: int) -> tuple[str, ...]:
    """Who takes part in a round, in client order; at least one client."""
    order = keys.numpy_generator(info.seed, "cohort", round)
    share = clients.participation
    if isinstance(share, tuple):
        share = float(order.uniform(*share))
    count = max(1, int(share * len(info.clients) + 0.5))
    places = sorted(order.permutation(len(info.clients))[:count].tolist())
    return tuple(info.clients[i] for i in places)


def drop_outs(clients: ClientsConfig, info: Info, cohort: Sequence[str], round: int) -> tuple[str, ...]:
    """Who of the cohort fails after training."""
    chance = {c: keys.numpy_generator(info.seed, "dropout", round, c).uniform() for c in cohort}
    return tuple(client_id for client_id in cohort if chance[client_id] < clients.dropout)


def _add(scores: ScoreTable, of_clients: Mapping[str, ClientScores]) -> None:
    """Turn client -> moment -> split into moment -> split -> client."""
    for client_id, moments in of_clients.items():
        for moment, splits in moments.items():
            for split, value in splits.items():
                scores.setdefault(moment, {}).setdefault(split, {})[client_id] = value


@dataclass
class _Arrived:
    """What has arrived at the server in one round."""

    failed: dict[str, str]  # client -> reason
    non_finite: int = 0  # clients whose training has diverged
    up: dict[str, int] = field(default_factory=dict)
    logs: dict[str, Mapping[str, float]] = field(default_factory=dict)
    scores: dict[str, ClientScores] = field(default_factory=dict)

    def fail(self, client_id: str, failure: Failure) -> None:
        self.failed[client_id] = failure.reason
        self.non_finite += failure.non_finite


class _Clock:
    """Seconds of each stage of a round."""

    def __init__(self) -> None:
        self.begun = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = self.laps.get(stage, 0.0) + now - self.last
        self.last = now

    def seconds(self) -> dict[str, float]:
        return {**self.laps, "total": self.last - self.begun}
