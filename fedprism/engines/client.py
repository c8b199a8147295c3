"""One client, one round: the function that every engine runs, whether in this process, in another or on a far machine.

It is given the method, the configuration, public knowledge, the client's data, its state (None: its first time) and
what was sent; it gives back the new state, the upload and what is to be recorded. It remembers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedprism.config import Config
from fedprism.engines.evaluate import Figures, Launched, Turns, ends, finish, score
from fedprism.engines.events import Score
from fedprism.engines.passes import learning_rate, run_pass
from fedprism.errors import ConfigError
from fedprism.federation import ClientData, Split
from fedprism.methods.base import Draw, Info, Me, Method, Net, Now, Pass, Seen, State, load
from fedprism.methods.leaves import everything, tensors, travelling
from fedprism.methods.states import copy_all
from fedprism.models import architectures

Scores = dict[str, dict[str, Score]]  # moment -> split
Name = TypeVar("Name")  # of a leaf


@dataclass(frozen=True)
class Job:
    """What a client works with in one round, state and download aside."""

    method: Method
    config: Config
    info: Info
    data: ClientData
    round: int  # counts from 0
    device: torch.device = torch.device("cpu")
    public: Split | None = None  # images that everybody has


@dataclass(frozen=True)
class Result:
    """What a client's round gives back."""

    state: State
    upload: State  # as sent: encoded
    samples: int
    logs: Mapping[str, float]
    scores: Scores
    checked: State | None = None  # the upload that is known to be finite: whoever changes it makes another one


@dataclass(frozen=True)
class Failure:
    """Why a client gave nothing back this round; its state stays as it was."""

    reason: str
    non_finite: bool = False


def client_round(job: Job, state: State | None, down: State, slot: Me | None = None) -> Result | Failure:
    """Receive, train, upload; and the scores of the moment `trained`, where asked for."""
    return finish(launch_round(job, state, down, slot)).result()


def client_evaluate(job: Job, state: State | None, down: State, slot: Me | None = None) -> Scores:
    """The scores of a client that has just been sent `down`; the moment `adapted` on a copy that is thrown away."""
    return finish(launch_evaluate(job, state, down, slot)).result()


def client_receive(job: Job, state: State | None, down: State, slot: Me | None = None) -> State:
    """The state of a client that is sent something and does not train."""
    return finish(launch_receive(job, state, down, slot)).result()


def client_adapt(job: Job, state: State | None, down: State) -> State:
    """The state of a client at the moment `adapted`, which no round keeps."""
    me = open_slot(job)
    finish(_adapt(me, job, _enter(me, job, state, down)))
    return take(me.model)


# --- the same in turns, without waiting for the device: for an engine that runs many clients at once ------------------


def launch_round(
    job: Job, state: State | None, down: State, slot: Me | None = None
) -> Turns[Launched[Result | Failure]]:
    method, config = job.method, job.config
    me = slot or open_slot(job)
    now = _enter(me, job, state, down)
    yield
    now = yield from _train(me, job, now, method.passes)
    kept, figures = take(me.model), Figures()
    with torch.no_grad():
        upload = _uploaded(me.model, kept, method.upload(me, now))
    names, floats = float_leaves({**kept, **upload})
    logged, counts = list(me.counts), list(me.counts.values())
    logs = figures.add(torch.stack([me.sums[name].to(job.device) for name in logged])) if logged else slice(0, 0)
    trained = "trained" in config.evaluate.moments and due(config, job.round + 1)
    scores = _score(me, job, "trained", figures) if trained else None

    def read(values: Sequence[float], ends: Sequence[float]) -> Result | Failure:
        bad = first_not_finite(names, ends)
        if bad is not None:
            return Failure(f"{bad} is not finite after local training", non_finite=True)
        means = {name: total / count for name, total, count in zip(logged, values[logs], counts, strict=True)}
        found: Scores = {} if scores is None else {"trained": scores(values)}
        with torch.no_grad():
            sent = method.encode(upload, now)
            return Result(kept, sent, len(job.data.train), means, found, upload if sent is upload else None)

    return Launched(figures.tensor(), read, floats)


def launch_evaluate(job: Job, state: State | None, down: State, slot: Me | None = None) -> Turns[Launched[Scores]]:
    me = slot or open_slot(job)
    now = _enter(me, job, state, down)
    moments, figures = job.config.evaluate.moments, Figures()
    scores = {}
    if "received" in moments:
        scores["received"] = _score(me, job, "received", figures)
    if "global" in moments and job.method.has_global and bn_policy(job.method, job.config) == "shared":
        scores["global"] = _score(me, job, "global", figures)
    if "adapted" in moments:
        yield from _adapt(me, job, now)
        scores["adapted"] = _score(me, job, "adapted", figures)
    return Launched(figures.tensor(), lambda values, _: {moment: read(values) for moment, read in scores.items()})


def launch_receive(job: Job, state: State | None, down: State, slot: Me | None = None) -> Turns[Launched[State]]:
    me = slot or open_slot(job)
    _enter(me, job, state, down)
    yield
    kept = take(me.model)
    return Launched(Figures().tensor(), lambda values, ends: kept)


# --- the pieces ------------------------------------------------------------------------------------------------------


def make_info(config: Config, clients: Sequence[str], classes: int, shape: tuple[int, ...]) -> Info:
    """Public knowledge, from the configuration and the list of clients."""
    archs = architectures(config.model, tuple(clients), classes, shape)
    return Info(tuple(clients), classes, archs, config.seed)


def make_now(
    method: Method, config: Config, info: Info, model: nn.Module, round: int, client: str | None = None, **more: Any
) -> Now:
    """Where we are; `model` is that client's (or the server's), which decides what travels."""
    train, weighting = config.train, chosen(config.clients.weighting, method.weighting)
    now = Now(round, train.rounds, info, train, learning_rate(train, round), weighting, client, **more)
    wanted = set(method.shared(model, now))
    have = everything(model)
    odd = wanted - set(have)
    if odd:
        raise ConfigError(f"{method.id}.shared names {', '.join(sorted(odd)[:3])}, which the model does not have.")
    names = tuple(name for name in have if name in wanted)
    return now.but(shared=travelling(model, names, bn_policy(method, config)))


def chosen(configured: str, of_method: str) -> str:
    """A setting's value, where `method` means what the method's paper says."""
    return of_method if configured == "method" else configured


def bn_policy(method: Method, config: Config) -> str:
    return chosen(config.train.bn, method.bn)


def open_slot(job: Job) -> Me:
    """A slot for this client's architecture; it can serve every client that has the same one."""
    model = job.method.build(job.info.arch_of(job.data.name), job.data.name, job.info, job.info.seed)
    layout = torch.channels_last if job.config.run.memory_format == "channels_last" else torch.contiguous_format
    return Me(model.to(job.device, memory_format=layout), job.config.train, job.info)  # type: ignore[call-overload]


def take(model: nn.Module) -> State:
    """A copy of a model's state that the slot's next client cannot touch."""
    return copied(tensors(model))


def copied(state: State) -> State:
    """Copies of tensors."""
    copies = [torch.empty_like(tensor, requires_grad=False) for tensor in state.values()]
    copy_all(copies, list(state.values()))
    return dict(zip(state, copies, strict=True))


def _uploaded(model: nn.Module, kept: State, upload: State) -> State:
    """Copies of what is uploaded; of the model's own leaves those that are kept, since states are never changed."""
    leaf = {id(tensor): name for name, tensor in tensors(model).items()}
    own = {name: kept[leaf[id(tensor)]] for name, tensor in upload.items() if id(tensor) in leaf}
    rest = copied({name: tensor for name, tensor in upload.items() if name not in own})
    return {name: own[name] if name in own else rest[name] for name in upload}


def float_leaves(state: Mapping[Name, Tensor]) -> tuple[list[Name], list[Tensor]]:
    """The leaves that can be something else than finite: their names and tensors."""
    found = {name: tensor for name, tensor in state.items() if tensor.is_floating_point() and tensor.numel()}
    return list(found), list(found.values())


def first_not_finite(names: Sequence[str], ends: Sequence[float]) -> str | None:
    """The first leaf whose number is a NaN or an infinity."""
    return next((name for name, end in zip(names, ends, strict=True) if not math.isfinite(end)), None)


def not_finite(state: State) -> str | None:
    """The first leaf that holds a NaN or an infinity; waits for the device once."""
    names, floats = float_leaves(state)
    return first_not_finite(names, ends(floats).tolist())


def due(config: Config, after: int) -> bool:
    """Is the state after so many rounds evaluated? The first, the last and every k-th are."""
    return after % config.evaluate.every == 0 or after == config.train.rounds


def _enter(me: Me, job: Job, state: State | None, down: State) -> Now:
    """Load the client's state into the slot and let the method receive what was sent."""
    client, info = job.data.name, job.info
    me.clear_logs()
    given = {"data": job.data.to(job.device), "public": job.public, "new": state is None, "device": job.device}
    now = make_now(job.method, job.config, info, me.model, job.round, client, **given)
    with torch.no_grad():
        sent = {name: tensor.to(job.device) for name, tensor in down.items()}
        now = now.but(down=job.method.decode(sent, now))
        replaced = now.down if type(job.method).receive is Method.receive else {}  # it loads these, whatever is there
        if any(name not in replaced for name in everything(me.model)):
            state = state or job.method.build(info.arch_of(client), client, info, info.seed).state_dict()
            load(me.model, {name: tensor for name, tensor in state.items() if name not in replaced})
        job.method.receive(me, now)
    return now


def _train(me: Me, job: Job, now: Now, plan: Callable[[Me, Now], list[Pass]]) -> Turns[Now]:
    """Run the passes that `plan` (the method's `passes` or `adapt`) names, after `start`."""
    passes = plan(me, now)
    if not passes:
        return now
    with torch.no_grad():
        job.method.start(me, now)
    for each in passes:
        now = yield from run_pass(me, each, now, job.config)
    return now


def _adapt(me: Me, job: Job, now: Now) -> Turns[Now]:
    """What comes before the moment `adapted`: at the full learning rate, whatever a schedule has come to."""
    return _train(me, job, now.but(lr=job.config.train.optimizer.lr), job.method.adapt)


def _only(predict: Callable[[Net, Tensor, Draw], Tensor], model: Net, x: Tensor, draw: Draw) -> Seen:
    """A look that shows the prediction alone."""
    return Seen(predict(model, x, draw))


def _score(me: Me, job: Job, moment: str, figures: Figures) -> Callable[[Sequence[float]], dict[str, Score]]:
    """Every configured split of this client, scored with the model in the slot."""
    config = job.config
    examine = job.method.examine if moment != "global" else partial(_only, job.method.predict_global)
    splits = list(config.evaluate.splits)
    if config.evaluate.train_loss and "train" not in splits:
        splits.insert(0, "train")
    data = job.data.to(job.device)
    purpose = (job.info.seed, "predict", job.round, job.data.name, moment)
    reads = {
        s: score(examine, me, data.split(s), config, data.classes, (*purpose, s), figures)
        for s in splits
        if len(data.split(s))
    }
    return lambda values: {s: read(values) for s, read in reads.items()}
