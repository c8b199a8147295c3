"""One client, one round: the function that every engine runs, in this process, in another, or on a far machine.

It takes the method, the configuration, public knowledge, the client's data, its state (None: its first round) and the
download. It returns the new state, the upload and what is recorded. It remembers nothing.

`client_round` is three steps: `arrive` (load the state, receive the download), `train` (every pass) and `depart`
(state, upload, logs, scores). An engine that runs many clients at once calls the same three steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedprism.config import Config
from fedprism.errors import ConfigError, FedprismError, some
from fedprism.federation import ClientData, Split
from fedprism.methods.base import Client, Context, Draw, Info, Method, Net, Output, Pass, State, UploadKind, load
from fedprism.methods.leaves import everything, seal, tensors, travelling
from fedprism.methods.states import (
    copy_of,
    fill_nan,
    malformed,
    not_finite,
    rest_length,
    same_tensors,
    unchanged,
    update_length,
)
from fedprism.models import architectures
from fedprism.round.engine import Checked, ClientScores, Failure, Result
from fedprism.round.evaluation import Evaluation, Tally, score_split
from fedprism.round.training import Operations, finish_pass, fit, start_pass
from fedprism.schedules import learning_rate
from fedprism.store.serialize import size
from fedprism.transforms import make_transforms
from fedprism.transforms.base import UploadContext, to_wire

ScoreSplit = Callable[[Evaluation, Client, Split], Tally]
Tallies = dict[str, dict[str, Tally]]  # moment -> split


@dataclass(frozen=True)
class Job:
    """What a client works with in one round, apart from its state and the download."""

    method: Method
    config: Config
    info: Info
    data: ClientData
    round: int  # counts from 0
    public: Split | None = None  # images that everybody has
    operations: Operations = field(default_factory=Operations)


# --- what an engine calls --------------------------------------------------------------------------------------------


def client_round(job: Job, state: State | None, download: State, slot: Client | None = None) -> Result | Failure:
    """Receive, train, upload; and the scores of the moment `trained`, where asked for."""
    client = slot or open_slot(job)
    ctx = arrive(client, job, state, download)
    ctx = train(client, job, ctx, job.method.passes(client, ctx))
    left = depart(client, job, ctx)
    return finish(left, not_finite({**left.state, **left.upload}))


def client_evaluate(job: Job, state: State | None, download: State, slot: Client | None = None) -> ClientScores:
    """The scores of a client that has just received `download`. What the moment `adapted` trains is thrown away."""
    client = slot or open_slot(job)
    ctx = arrive(client, job, state, download)
    tallies = tally_received(client, job)
    if "adapted" in job.config.evaluate.moments:
        adapt(client, job, ctx)
        tallies["adapted"] = tally(client, job, "adapted")
    return read_scores(tallies)


def client_receive(job: Job, state: State | None, download: State, slot: Client | None = None) -> State:
    """The state of a client that receives something and does not train."""
    client = slot or open_slot(job)
    return copy_stored(client, job, arrive(client, job, state, download))


def client_model(job: Job, state: State | None, download: State, adapted: bool = False) -> State:
    """All leaves of a client's model after it has received, or at the moment `adapted`. No round keeps them."""
    client = open_slot(job)
    ctx = arrive(client, job, state, download)
    if adapted:
        adapt(client, job, ctx)
    return copy_of(tensors(client.model))


# --- the steps -------------------------------------------------------------------------------------------------------


def open_slot(job: Job) -> Client:
    """A client object for this architecture; it can serve every client that has the same one, one after the other."""
    model = job.method.build(job.info.arch_of(job.data.name), job.data.name, job.info, job.info.seed)
    layout = torch.channels_last if job.config.run.memory_format == "channels_last" else torch.contiguous_format
    model = model.to(job.data.train.y.device, memory_format=layout)  # type: ignore[call-overload]
    return Client(seal(model), job.config.train, job.info)


def arrive(client: Client, job: Job, state: State | None, download: State) -> Context:
    """Load what the client has stored and let the method receive the download."""
    client_id, method, info = job.data.name, job.method, job.info
    client.clear_logs()
    given = {"data": job.data, "public": job.public, "is_new": state is None}
    ctx = make_context(method, job.config, info, client.model, job.round, client_id, **given)
    with torch.no_grad():
        ctx = ctx.replace(download=method.decode(dict(download), ctx))
        replaced = ctx.download if type(method).receive is Method.receive else {}  # what the default receive overwrites
        own = {name: tensor for name, tensor in tensors(client.model).items() if name not in replaced}
        if own:
            if state is None:
                state = method.build(info.arch_of(client_id), client_id, info, info.seed).state_dict()
            lost = {name: tensor for name, tensor in own.items() if name not in state}  # another client's, in this slot
            missing = lost if type(method).stored is Method.stored else [name for name in ctx.shared if name in lost]
            if missing and type(method).receive is Method.receive:
                raise FedprismError(
                    f"{method.id}: {some(missing)} of client {client_id!r} is neither received nor stored. Let "
                    "`shared` name the same leaves for all clients, let `send` and `decode` give all that is shared, "
                    "or name in `stored` what a client needs besides."
                )
            fill_nan(lost.values())
            load(client.model, {name: tensor for name, tensor in state.items() if name not in replaced})
        method.receive(client, ctx)
    return ctx


def train(client: Client, job: Job, ctx: Context, passes: Sequence[Pass]) -> Context:
    """Run the passes, one after the other."""
    if passes:
        with torch.no_grad():
            job.method.start(client, ctx)
    for spec in passes:
        run = start_pass(client, spec, ctx, job.config, job.operations)
        ctx = finish_pass(run, fit(run))
    return ctx


def adapt(client: Client, job: Job, ctx: Context) -> Context:
    """What comes before the moment `adapted`."""
    ctx = adapting(job, ctx)
    return train(client, job, ctx, job.method.adapt(client, ctx))


def adapting(job: Job, ctx: Context) -> Context:
    """The context of an adaptation: at the full learning rate, wherever a schedule has got to."""
    return ctx.replace(lr=job.config.train.optimizer.lr)


@dataclass(frozen=True)
class Departure:
    """What a client leaves behind after training. No number of it has been read yet."""

    job: Job
    ctx: Context
    state: State
    upload: State
    kinds: Mapping[str, UploadKind]  # of the upload, as declared
    length: Tensor  # of the update that the upload makes
    rest: Tensor  # the length of the rest of it
    log_sums: State
    log_counts: dict[str, int]
    tallies: Tallies
    wrong: str | None = None  # why the upload is none


def depart(client: Client, job: Job, ctx: Context, score: ScoreSplit = score_split) -> Departure:
    """Copy out what is stored and the upload; test the moment `trained`, where asked for."""
    state, method = copy_stored(client, job, ctx), job.method
    with torch.no_grad():
        upload, kinds = method.upload(client, ctx), method.uploads(client.model, ctx)
        wrong = malformed(upload)
        upload = {} if wrong else _copy_upload(client.model, state, upload)
        length, rest = update_length(upload, method.origin(ctx), kinds), rest_length(upload, kinds)
    sums = copy_of({name: client.log_sums[name] for name in client.log_counts})
    tested = "trained" in job.config.evaluate.moments and due(job.config, job.round + 1)
    tallies = {"trained": tally(client, job, "trained", score)} if tested else {}
    return Departure(job, ctx, state, upload, kinds, length, rest, sums, dict(client.log_counts), tallies, wrong)


def finish(left: Departure, bad: str | None) -> Result | Failure:
    """Read the numbers and encode the upload; `bad` names a leaf that is not finite."""
    if left.wrong is not None:
        return Failure(left.wrong)
    if bad is not None:
        return Failure(f"{bad} is not finite after local training", non_finite=True)
    logs = {name: total.item() / left.log_counts[name] for name, total in left.log_sums.items()}
    changed, done = transform_upload(left.job, left.ctx, left.upload, left.kinds)
    bad = None if changed is left.upload else not_finite(changed)
    if bad is not None:
        return Failure(f"{bad} is not finite after the transforms", non_finite=True)
    method = left.job.method
    with torch.no_grad(), unchanged(f"{method.id}.encode", changed):
        sent = method.encode(dict(changed), left.ctx)
    wrong = malformed(sent)
    if wrong is not None:
        return Failure(wrong)
    found = Checked(left.upload, float(left.length), float(left.rest))
    checked = found if same_tensors(sent, left.upload) else None
    return Result(left.state, sent, {**done, **logs}, read_scores(left.tallies), checked)


@torch.no_grad()
def transform_upload(
    job: Job, ctx: Context, upload: State, kinds: Mapping[str, UploadKind]
) -> tuple[State, Mapping[str, float]]:
    """What transforms make of the upload, not encoded yet, and what they log."""
    context = UploadContext(ctx, kinds, job.method.origin(ctx))
    return to_wire(make_transforms(job.config.transforms), upload, context), context.logs


def copy_stored(client: Client, job: Job, ctx: Context) -> State:
    """Copies of the leaves that the client keeps between rounds."""
    own = tensors(client.model)
    return copy_of({name: own[name] for name in stored_names(job.method, client.model, ctx)})


def _copy_upload(model: nn.Module, state: State, upload: State) -> State:
    """Copies of what is uploaded; leaves of the model are those of `state`, which is a copy already."""
    leaf = {id(tensor): name for name, tensor in tensors(model).items() if name in state}
    own = {name: state[leaf[id(tensor)]] for name, tensor in upload.items() if id(tensor) in leaf}
    rest = copy_of({name: tensor for name, tensor in upload.items() if name not in own})
    return {name: own[name] if name in own else rest[name] for name in upload}


# --- scores ----------------------------------------------------------------------------------------------------------


def tally_received(client: Client, job: Job, score: ScoreSplit = score_split) -> Tallies:
    """The moments `received` and `global`, where asked for."""
    moments, tallies = job.config.evaluate.moments, Tallies()
    if "received" in moments:
        tallies["received"] = tally(client, job, "received", score)
    if "global" in moments and job.method.has_global and bn_policy(job.method, job.config) == "shared":
        tallies["global"] = tally(client, job, "global", score)
    return tallies


def tally(client: Client, job: Job, moment: str, score: ScoreSplit = score_split) -> dict[str, Tally]:
    """Test the model as it is on every configured part of the client's data."""
    config, data = job.config, job.data
    forward = job.method.forward_details if moment != "global" else partial(_global_only, job.method.predict_global)
    splits = list(config.evaluate.splits)
    if config.evaluate.train_loss and "train" not in splits:
        splits.insert(0, "train")
    purpose = (job.info.seed, "predict", job.round, data.name, moment)
    parts = {part: data.split(part) for part in splits if len(data.split(part))}
    tests = {part: Evaluation(forward, config, data.classes, (*purpose, part), job.operations) for part in parts}
    return {part: score(tests[part], client, split) for part, split in parts.items()}


def _global_only(predict: Callable[[Net, Tensor, Draw], Tensor], model: Net, x: Tensor, draw: Draw) -> Output:
    return Output(predict(model, x, draw))


def read_scores(tallies: Tallies) -> ClientScores:
    return {moment: {part: found.score() for part, found in parts.items()} for moment, parts in tallies.items()}


def due(config: Config, round: int) -> bool:
    """Is this round (counted from 1) evaluated? The first state and the last round always are."""
    return round % config.evaluate.every == 0 or round == config.train.rounds


# --- public knowledge ------------------------------------------------------------------------------------------------


def make_info(config: Config, clients: Sequence[str], classes: int, shape: tuple[int, ...]) -> Info:
    """Public knowledge, from the configuration and the list of clients."""
    archs = architectures(config.model, tuple(clients), classes, shape)
    return Info(tuple(clients), classes, archs, config.seed)


def make_context(
    method: Method, config: Config, info: Info, model: nn.Module, round: int, client_id: str | None = None, **more: Any
) -> Context:
    """Where the run stands. `model` is the client's (or the server's), which decides what travels."""
    train, weighting = config.train, chosen(config.clients.weighting, method.weighting)
    ctx = Context(round, train.rounds, info, train, learning_rate(train, round), weighting, client_id, **more)
    wanted = set(method.shared(model, ctx))
    have = everything(model)
    odd = wanted - set(have)
    if odd:
        raise ConfigError(f"{method.id}.shared names {', '.join(sorted(odd)[:3])}, which the model does not have.")
    names = tuple(name for name in have if name in wanted)
    return ctx.replace(shared=travelling(model, names, bn_policy(method, config)))


class _Round(Exception):
    """Somebody has asked which round it is."""


class _AnyRound(Context):
    """A context of no round in particular: it raises `_Round` if anything is read that differs between rounds."""

    def __init__(self, ctx: Context) -> None:
        object.__getattribute__(self, "__dict__").update(ctx.__dict__)

    def __getattribute__(self, name: str) -> Any:
        if name in {"round", "lr", "download", "steps", "is_new", "logs", "rng", "log", "replace", "__dict__"}:
            raise _Round
        return super().__getattribute__(name)


def constant_shared(method: Method, model: nn.Module, ctx: Context) -> bool:
    """Does the method share the same leaves in every round? It does if `shared` does not ask which one it is."""
    try:
        method.shared(model, _AnyRound(ctx))
    except _Round:
        return False
    return True


def stored_names(method: Method, model: nn.Module, ctx: Context) -> tuple[str, ...]:
    """The leaves of its model that a client keeps between rounds, in their order."""
    ctx = ctx.replace(constant_shared=constant_shared(method, model, ctx), data=None)
    have, found = everything(model), method.stored(model, ctx)
    if isinstance(found, str) or not isinstance(found, Collection):
        raise ConfigError(f"{method.id}.stored returned {found!r}; expected a collection of names of leaves.")
    wanted = set(found)
    odd = sorted(wanted - set(have))
    if odd:
        raise ConfigError(f"{method.id}.stored names {', '.join(odd[:3])}, which the model does not have.")
    return tuple(name for name in have if name in wanted)


def stored_bytes(method: Method, config: Config, info: Info, client_id: str) -> int:
    """Bytes of what a client keeps between rounds: after the first or the last, whichever are more."""
    model = method.build(info.arch_of(client_id), client_id, info, info.seed)
    own, rounds = tensors(model), (0, max(0, config.train.rounds - 1))
    contexts = [make_context(method, config, info, model, round, client_id) for round in rounds]
    return max(size({name: own[name] for name in stored_names(method, model, ctx)}) for ctx in contexts)


def uploaded_kinds(method: Method, config: Config, info: Info) -> list[UploadKind]:
    """The kinds of leaves that clients upload, in the first round or the last: after a warm-up they may be others."""
    found: list[UploadKind] = []
    for client_id in {arch: client_id for client_id, arch in info.archs.items()}.values() if config.transforms else ():
        model = method.build(info.archs[client_id], client_id, info, info.seed)
        for round in (0, config.train.rounds - 1):
            ctx = make_context(method, config, info, model, round, client_id)
            found += method.uploads(model, ctx).values()
    return list(dict.fromkeys(found))


def chosen(configured: str, of_method: str) -> str:
    """A setting's value, where `method` means what the method's paper says."""
    return of_method if configured == "method" else configured


def bn_policy(method: Method, config: Config) -> str:
    return chosen(config.train.bn, method.bn)
