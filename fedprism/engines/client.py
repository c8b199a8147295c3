"""One client, one round: the function that every engine runs, whether in this process, in another or on a far machine.

It is given the method, the configuration, public knowledge, the client's data, its state (None: its first time) and
what was sent; it gives back the new state, the upload and what is to be recorded. It remembers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedprism.config import Config
from fedprism.engines.evaluate import score
from fedprism.engines.events import Score
from fedprism.engines.passes import learning_rate, run_pass
from fedprism.errors import ConfigError
from fedprism.federation import ClientData, Split
from fedprism.methods.base import Draw, Info, Me, Method, Net, Now, Pass, Seen, State, load
from fedprism.methods.leaves import travelling
from fedprism.models import architectures

Scores = dict[str, dict[str, Score]]  # moment -> split


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


@dataclass(frozen=True)
class Failure:
    """Why a client gave nothing back this round; its state stays as it was."""

    reason: str
    non_finite: bool = False


def client_round(job: Job, state: State | None, down: State, slot: Me | None = None) -> Result | Failure:
    """Receive, train, upload; and the scores of the moment `trained`, where asked for."""
    method, config = job.method, job.config
    me = slot or open_slot(job)
    now = _enter(me, job, state, down)
    now = _train(me, job, now, method.passes)
    with torch.no_grad():
        upload = {name: tensor.detach().clone() for name, tensor in method.upload(me, now).items()}
    kept = take(me.model)
    bad = not_finite({**kept, **upload})
    if bad is not None:
        return Failure(f"{bad} is not finite after local training", non_finite=True)
    logs = {name: float(torch.stack(values).mean()) for name, values in me.logs.items()}
    scores: Scores = {}
    if "trained" in config.evaluate.moments and due(config, job.round + 1):
        scores["trained"] = _score(me, job, "trained")
    return Result(kept, method.encode(upload, now), len(job.data.train), logs, scores)


def client_evaluate(job: Job, state: State | None, down: State, slot: Me | None = None) -> Scores:
    """The scores of a client that has just been sent `down`; the moment `adapted` on a copy that is thrown away."""
    me = slot or open_slot(job)
    now = _enter(me, job, state, down)
    moments = job.config.evaluate.moments
    scores: Scores = {}
    if "received" in moments:
        scores["received"] = _score(me, job, "received")
    if "global" in moments and job.method.has_global and bn_policy(job.method, job.config) == "shared":
        scores["global"] = _score(me, job, "global")
    if "adapted" in moments:
        _train(me, job, now, job.method.adapt)
        scores["adapted"] = _score(me, job, "adapted")
    return scores


def client_receive(job: Job, state: State | None, down: State, slot: Me | None = None) -> State:
    """The state of a client that is sent something and does not train."""
    me = slot or open_slot(job)
    _enter(me, job, state, down)
    return take(me.model)


# --- the pieces ------------------------------------------------------------------------------------------------------


def make_info(config: Config, clients: Sequence[str], classes: int, shape: tuple[int, ...]) -> Info:
    """Public knowledge, from the configuration and the list of clients."""
    archs = architectures(config.model, tuple(clients), classes, shape)
    return Info(tuple(clients), classes, archs, config.seed)


def make_now(
    method: Method, config: Config, info: Info, model: nn.Module, round: int, client: str | None = None
) -> Now:
    """Where we are; `model` is that client's (or the server's), which decides what travels."""
    weighting = chosen(config.clients.weighting, method.weighting)
    now = Now(round, config.train.rounds, info, config.train, learning_rate(config.train, round), weighting, client)
    wanted = set(method.shared(model, now))
    odd = wanted - model.state_dict().keys()
    if odd:
        raise ConfigError(f"{method.id}.shared names {', '.join(sorted(odd)[:3])}, which the model does not have.")
    names = tuple(name for name in model.state_dict() if name in wanted)
    return replace(now, shared=travelling(model, names, bn_policy(method, config)))


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
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def not_finite(state: State) -> str | None:
    """The first leaf that holds a NaN or an infinity; waits for the device once."""
    names = [name for name, tensor in state.items() if tensor.is_floating_point() and tensor.numel()]
    if not names:
        return None
    # The smallest and the largest value in one pass: both are NaN if any value is.
    ends = torch.stack([torch.stack(torch.aminmax(state[name])).float() for name in names])
    sound = ends.isfinite().all(dim=1).tolist()
    return next((name for name, good in zip(names, sound, strict=True) if not good), None)


def due(config: Config, after: int) -> bool:
    """Is the state after so many rounds evaluated? The first, the last and every k-th are."""
    return after % config.evaluate.every == 0 or after == config.train.rounds


def _enter(me: Me, job: Job, state: State | None, down: State) -> Now:
    """Load the client's state into the slot and let the method receive what was sent."""
    client, info = job.data.name, job.info
    me.logs.clear()
    new = state is None
    load(me.model, state or job.method.build(info.arch_of(client), client, info, info.seed).state_dict())
    now = make_now(job.method, job.config, info, me.model, job.round, client)
    now = replace(now, data=job.data.to(job.device), public=job.public, new=new, device=job.device)
    with torch.no_grad():
        sent = {name: tensor.to(job.device) for name, tensor in down.items()}
        now = replace(now, down=job.method.decode(sent, now))
        job.method.receive(me, now)
    return now


def _train(me: Me, job: Job, now: Now, plan: Callable[[Me, Now], list[Pass]]) -> Now:
    """Run the passes that `plan` (the method's `passes` or `adapt`) names, after `start`."""
    passes = plan(me, now)
    if not passes:
        return now
    with torch.no_grad():
        job.method.start(me, now)
    for each in passes:
        now = run_pass(me, each, now, job.config)
    return now


def _only(predict: Callable[[Net, Tensor, Draw], Tensor]) -> Callable[[Net, Tensor, Draw], Seen]:
    """A look that shows the prediction alone."""
    return lambda model, x, draw: Seen(predict(model, x, draw))


def _score(me: Me, job: Job, moment: str) -> dict[str, Score]:
    """Every configured split of this client, scored with the model in the slot."""
    config = job.config
    examine = job.method.examine if moment != "global" else _only(job.method.predict_global)
    splits = list(config.evaluate.splits)
    if config.evaluate.train_loss and "train" not in splits:
        splits.insert(0, "train")
    data = job.data.to(job.device)
    purpose = (job.info.seed, "predict", job.round, job.data.name, moment)
    return {
        s: score(examine, me.model, data.split(s), config, data.classes, (*purpose, s))
        for s in splits
        if len(data.split(s))
    }
