"""The only round loop: cohort -> send -> clients (through an engine) -> check uploads -> aggregate -> evaluate.

It knows who takes part, who is sent the new state and who trains; a method knows what, an engine knows where. Records,
progress and trackers are callbacks.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from fedprism import keys
from fedprism.config import SPLITS, ClientsConfig, Config
from fedprism.engines import serverside
from fedprism.engines.client import Failure, Result, chosen, due, float_leaves, make_now
from fedprism.engines.evaluate import ends
from fedprism.engines.events import Callback, Plan, RoundRecord, Score, Snapshot, Status
from fedprism.engines.inprocess import ENGINES, Engine, Request
from fedprism.engines.keeping import InMemory, Kept, OnDisk, at_once
from fedprism.engines.wire import size
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import ClientData, Federation
from fedprism.methods import leaves
from fedprism.methods.base import Info, Method, Now, State, Upload
from fedprism.methods.mixed import check_mixed
from fedprism.models import Arch

T = TypeVar("T")

DIGESTED_AT_ONCE = 1024  # images, so that those of a memory-mapped file are not all copied

Scores = dict[str, dict[str, dict[str, Score]]]  # moment -> split -> client


@dataclass
class Loop:
    """A run in memory: the server's state, every client's state, and what moves them by one round."""

    method: Method
    config: Config
    info: Info
    federation: Federation
    engine: Engine
    device: torch.device
    models: dict[Arch, nn.Module]  # one of each architecture, to ask the method what travels
    server: State
    states: Kept
    held: State = field(default_factory=dict)  # what the server's optimiser keeps from round to round
    kept_old: bool = False  # has a round in which every client failed been told of?
    counted: tuple[int, int] = (0, 0)  # clients that earlier parts have run, and how many there are in all parts

    def run(self, callbacks: Sequence[Callback], start: Snapshot | None = None, folder: Path | None = None) -> Status:
        """All rounds (after `start`, if given); returns `finished` or `diverged`.

        `folder` is where clients' states lie meanwhile, if on disk; None: a temporary one. It is gone in the end.
        """
        try:
            self.states.open(folder)
            return self._run(callbacks, start)
        finally:
            try:
                self.engine.close()
            finally:
                self.states.close()

    def _run(self, callbacks: Sequence[Callback], start: Snapshot | None) -> Status:
        first = 0
        if start is not None:
            first = start.round
            self.states.restore(start.clients)
            whole = {name: tensor.to(self.device) for name, tensor in start.server.items()}
            self.server, self.held = serverside.of_method(whole), serverside.of_optimizer(whole, self.held)
        plan = self.plan(0 if start is None else first + 1)
        for callback in callbacks:
            callback.begin(plan)

        def tell(done: int, of: int) -> None:
            before, every = self.counted
            for callback in callbacks:
                if isinstance(callback, Callback):  # not one that was written before there was `clients`
                    callback.clients(before + done, every)

        def say(text: str) -> None:
            for callback in callbacks:
                if isinstance(callback, Callback):
                    callback.note(text)

        self.engine.tell, self.engine.say = tell, say
        status: Status = "interrupted"
        try:
            if start is None:
                self._tell(callbacks, self.first_record())
            diverged = False
            for round in range(first, self.config.train.rounds):
                record, diverged = self.one_round(round)
                self._tell(callbacks, record)
                if diverged:
                    break
            status = "diverged" if diverged else "finished"
        finally:
            for callback in callbacks:
                callback.end(status)
        return status

    def one_round(self, round: int) -> tuple[RoundRecord, bool]:
        """Move everything by one round; the record, and whether training has diverged."""
        clock = _Clock()
        config, clients = self.config, self.config.clients
        now = self.now(round)
        cohort = draw_cohort(clients, self.info, round)
        trainers = self.info.clients if chosen(clients.train, self.method.trainers) == "all" else cohort
        told = self.info.clients if chosen(clients.broadcast, self.method.broadcast) == "all" else trainers

        # A client that drops out has trained in vain: nothing of it stays or arrives, so its training is not computed.
        dropped = drop_outs(clients, self.info, cohort, round)
        failed: dict[str, str] = dict.fromkeys(dropped, "dropped out after training")
        down = {client: size(self._sent(client, now)) for client in dropped}
        training, averaged = [c for c in trainers if c not in failed], set(cohort)
        uploads, up, logs, trained, lost = [], {}, {}, {}, 0
        for part in self._parts(training):
            requests = self._requests(part, now, down)
            answers = self.engine.train(round, requests)
            del requests
            clock.lap("train")
            results = {c: answer for c in part if isinstance(answer := answers[c], Result) and c in averaged}
            accepted = self._in_room(partial(self._accept, results, now))
            for client in part:
                answer = accepted.get(client, answers[client])
                if isinstance(answer, Failure):
                    failed[client] = answer.reason
                    lost += answer.non_finite
                    continue
                self.states[client] = answer.state
                logs[client], trained[client] = answer.logs, answer.scores
                if client in averaged:
                    up[client] = size(results[client].upload)
                    uploads.append(Upload(client, answer.samples, answer.upload))
            del answers, results, accepted  # on disk, memory holds one part at a time
            clock.lap("aggregate")
        busy = set(trainers)
        for part in self._parts([client for client in told if client not in busy]):
            for client, state in self.engine.receive(round, self._requests(part, now, down)).items():
                if not isinstance(state, Failure):
                    self.states[client] = state
        if uploads:
            self.server = self._in_room(partial(self._aggregate, uploads, now))
            logs = {client: {**values, **now.logs.get(client, {})} for client, values in logs.items()}
        diverged = lost > 0 and lost == len(training)
        if not uploads and not diverged and not self.kept_old:
            self.kept_old = True
            reasons = ", ".join(dict.fromkeys(failed.values()))
            warnings.warn(
                f"in round {round + 1} every client failed ({reasons}), so the old state is kept. Further rounds like "
                "this are named in the records alone.",
                stacklevel=2,
            )
        clock.lap("aggregate")

        scores: Scores = {}
        if due(config, round + 1):
            scores = self.evaluate(round + 1, cohort)
            _add(scores, trained)
        clock.lap("evaluate")
        record = RoundRecord(round + 1, cohort, failed, down, up, logs, scores, clock.seconds())
        return record, diverged

    def evaluate(self, round: int, cohort: Sequence[str]) -> Scores:
        """The moments that follow an aggregation, for the clients that the configuration names."""
        clients = self.info.clients if self.config.evaluate.clients == "all" else cohort
        if not set(self.config.evaluate.moments) - {"trained"}:
            return {}
        now = self.now(round)
        scores: Scores = {}
        for part in self._parts(clients):
            answers = self.engine.evaluate(round, {client: self._request(client, now) for client in part})
            _add(scores, {client: answer for client, answer in answers.items() if not isinstance(answer, Failure)})
        return scores

    def first_record(self) -> RoundRecord:
        """Round 0: the first state, before any training."""
        clock = _Clock()
        scores = self.evaluate(0, draw_cohort(self.config.clients, self.info, 0))
        clock.lap("evaluate")
        return RoundRecord(0, (), {}, {}, {}, {}, scores, clock.seconds())

    def now(self, round: int) -> Now:
        """The server's `now`."""
        now = make_now(self.method, self.config, self.info, self.models[self.info.arch], round)
        return now.but(device=self.device)

    def plan(self, first: int) -> Plan:
        """What callbacks are told at the start."""
        parts = {n: (len(d.train), len(d.validation), len(d.test)) for n, d in self.federation.clients.items()}
        sizes = {arch: sum(p.numel() for p in model.parameters()) for arch, model in self.models.items()}
        engines: dict[object, str] = {kind: name for name, kind in ENGINES.items()}
        return Plan(
            config=self.config,
            method=self.method.id,
            clients=self.info.clients,
            samples=parts,
            class_names=self.federation.class_names,
            shape=self.federation.shape,
            parameters={n: sizes[self.info.archs[n]] for n in self.info.clients},
            rounds=self.config.train.rounds,
            first_round=first,
            images={n: digest(d) for n, d in self.federation.clients.items()},
            device=str(self.device),
            engine=engines.get(type(self.engine), type(self.engine).__name__),
            moment=self.method.moment,
            reveals=self.method.reveals,
        )

    def _parts(self, clients: Sequence[str]) -> Iterator[Sequence[str]]:
        """Clients that an engine is given together; progress is counted over all of them."""
        done = 0
        for part in self.states.parts(clients):
            self.counted = done, len(clients)
            yield part
            done += len(part)

    def _requests(self, clients: Sequence[str], now: Now, down: dict[str, int]) -> dict[str, Request]:
        """What an engine is given; the bytes that are sent are noted in `down`."""
        requests = {client: self._request(client, now) for client in clients}
        down.update({client: size(request.down) for client, request in requests.items()})
        return requests

    def _request(self, client: str, now: Now) -> Request:
        return Request(self.states[client], self._sent(client, now))

    def _sent(self, client: str, now: Now) -> State:
        now = now.but(client=client)
        return self.method.encode(self.method.send(self.server, client, now), now)

    def _in_room(self, work: Callable[[], T]) -> T:
        """The server's work; where a GPU has no memory left for it, the engine is asked for some of its own."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError as error:
                make_room, short = getattr(self.engine, "make_room", None), str(error)
                if make_room is None:
                    raise
            make_room(short)  # past the exception, which holds what was under way

    def _accept(self, results: Mapping[str, Result], now: Now) -> dict[str, Result | Failure]:
        """Clients' answers with their uploads decoded, or why they are refused."""
        uploads, declared, refused = {}, {}, dict[str, Failure]()
        for client, result in results.items():
            model = self.models[self.info.archs[client]]
            here = make_now(self.method, self.config, self.info, model, now.round, client)
            try:
                uploads[client] = self.method.decode(result.upload, now.but(client=client))
            except torch.OutOfMemoryError:
                raise
            except (FedprismError, RuntimeError, LookupError, ValueError, TypeError) as error:
                refused[client] = Failure(f"its upload cannot be decoded: {type(error).__name__}: {error}")
                continue
            declared[client] = self.method.uploads(model, here)
        # Of an upload that is what the client's own check saw, only the kinds are checked again.
        checked = {c for c, upload in uploads.items() if results[c].checked is upload}
        refused |= check_uploads(uploads, declared, self.server, checked)
        return {c: refused.get(c) or replace(result, upload=uploads[c]) for c, result in results.items()}

    def _aggregate(self, uploads: list[Upload], now: Now) -> State:
        """The method's average, or where the server's step leads; nothing has changed if memory runs out."""
        mean = self.method.aggregate(self.server, uploads, now)
        if mean.keys() != self.server.keys():
            changed = sorted(mean.keys() ^ self.server.keys())
            raise FedprismError(
                f"{self.method.id}.aggregate changed the server's keys: {changed[:3]}; they must stay constant."
            )
        config = self.config.server
        if serverside.is_plain(config):
            return mean
        sent = self.sent_weights(now.round, [upload.client for upload in uploads])
        stepped, self.held = serverside.step(config, sent, self.server, mean, self.held)
        return {**mean, **stepped}

    def sent_weights(self, round: int, clients: Sequence[str]) -> list[str]:
        """The trained leaves of the server's model that these clients send as weights in a round."""
        sent = set()
        for client in clients:
            model = self.models[self.info.archs[client]]
            now = make_now(self.method, self.config, self.info, model, round, client)
            sent |= {name for name, kind in self.method.uploads(model, now).items() if kind == "weights"}
        return [n for n in leaves.parameters(self.models[self.info.arch]) if n in sent and n in self.server]

    def _tell(self, callbacks: Sequence[Callback], record: RoundRecord) -> None:
        snapshot = Snapshot(record.round, serverside.packed(self.server, self.held), self.states.frozen())
        for callback in callbacks:
            callback.round(record, snapshot)


def make_loop(
    method: Method, config: Config, info: Info, federation: Federation, engine: Engine, device: torch.device
) -> Loop:
    """A loop at its first state."""
    check_mixed([method], info)
    models = {arch: method.build(arch, None, info, info.seed) for arch in dict.fromkeys(info.archs.values())}
    if config.train.batch < 2 and any(leaves.norms(model) for model in models.values()):
        raise ConfigError("train.batch is 1, but batch norm cannot train on one image; set train.batch to 2 or more.")
    server = method.server(models[info.arch], make_now(method, config, info, models[info.arch], 0))
    on_device = {name: tensor.to(device) for name, tensor in server.items()}
    states: Kept = InMemory(dict.fromkeys(info.clients))
    owners = {arch: client for client, arch in info.archs.items()}  # a client of each
    if config.clients.state == "disk":
        largest = max(size(method.build(a, client, info, info.seed).state_dict()) for a, client in owners.items())
        states = OnDisk(info.clients, device, at_once(largest, getattr(engine, "workers", 1)))
    loop = Loop(method, config, info, federation, engine, device, models, on_device, states)
    if not serverside.is_plain(config.server):
        rounds = {0, config.train.rounds - 1}  # after a warm-up less may be sent, or more
        if not any(loop.sent_weights(round, [*owners.values()]) for round in rounds):
            serverside.refuse(config.server, method.id)
        weights = [name for name in leaves.parameters(models[info.arch]) if name in server]
        loop.held = serverside.first(config.server, {name: on_device[name] for name in weights})
    return loop


def digest(data: ClientData) -> str:
    """A fingerprint of a client's images and labels: a run is resumed on the same ones or not at all."""
    content = blake2b(digest_size=8)
    for name in SPLITS:
        split = data.split(name)
        content.update(repr((len(split), *split.kind[1])).encode())
        for images in split.parts(DIGESTED_AT_ONCE):
            content.update(images.cpu().contiguous().numpy().data)
        content.update(repr(tuple(split.y.shape)).encode())
        content.update(split.y.cpu().contiguous().numpy().data)
    return content.hexdigest()


def draw_cohort(clients: ClientsConfig, info: Info, round: int) -> tuple[str, ...]:
    """Who takes part in a round, in client order; never nobody."""
    order = keys.numpy_generator(info.seed, "cohort", round)
    share = clients.participation
    if isinstance(share, tuple):
        share = float(order.uniform(*share))
    count = max(1, int(share * len(info.clients) + 0.5))
    chosen = sorted(order.permutation(len(info.clients))[:count].tolist())
    return tuple(info.clients[i] for i in chosen)


def drop_outs(clients: ClientsConfig, info: Info, cohort: Sequence[str], round: int) -> tuple[str, ...]:
    """Who of the cohort fails after training."""
    chance = {client: keys.numpy_generator(info.seed, "dropout", round, client).uniform() for client in cohort}
    return tuple(client for client in cohort if chance[client] < clients.dropout)


def check_uploads(
    uploads: Mapping[str, State],
    declared: Mapping[str, Mapping[str, str]],
    server: State,
    finite: Collection[str] = (),
) -> dict[str, Failure]:
    """Which uploads are not what the method declares, of a wrong shape or not finite; waits for the device once.

    Those of clients in `finite` are known to be that.
    """
    refused: dict[str, Failure] = {}
    leaves: dict[tuple[str, str], torch.Tensor] = {}
    for client, upload in uploads.items():
        wrong = _check_kinds(upload, declared[client], server)
        if wrong is not None:
            refused[client] = wrong
        elif client not in finite:
            leaves.update({(client, name): tensor for name, tensor in upload.items()})
    names, floats = float_leaves(leaves)
    for (client, name), end in zip(names, ends(floats).tolist(), strict=True):
        if not math.isfinite(end) and client not in refused:
            refused[client] = Failure(f"{name} in its upload is not finite", non_finite=True)
    return refused


def _check_kinds(upload: State, declared: Mapping[str, str], server: State) -> Failure | None:
    if upload.keys() != declared.keys():
        odd = sorted(upload.keys() ^ declared.keys())
        return Failure(f"its upload is not what the method declares: {', '.join(odd[:3])} missing or unknown")
    for name, tensor in upload.items():
        kind = (tensor.dtype, tensor.shape)
        like = tensor.new_empty(()) if declared[name] == "scalar" else tensor
        expected = server.get(name, like)
        if kind != (expected.dtype, expected.shape):
            return Failure(f"{name} in its upload is {_kind(tensor)}, expected {_kind(expected)}")
    return None


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _add(scores: Scores, of_clients: Mapping[str, Mapping[str, Mapping[str, Score]]]) -> None:
    """Turn client -> moment -> split into moment -> split -> client."""
    for client, moments in of_clients.items():
        for moment, splits in moments.items():
            for split, value in splits.items():
                scores.setdefault(moment, {}).setdefault(split, {})[client] = value


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
