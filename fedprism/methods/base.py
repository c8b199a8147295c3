"""What a method is: the hooks that make it differ from FedAvg. Read this file first.

A method is a frozen dataclass. Its fields are its hyper-parameters; nothing else lives on `self`. Every hook defaults
to FedAvg, so a method's file holds only what is special about it:

    server                                  client, one round
    ------                                  -----------------
    send(server, client_id)  ------------>  receive, start, passes (each: loss or step, epochs), upload
    combine(server, mean)  <--------------------------------------------------------------------+

What crosses is a flat dict of tensors (`State`), so that it can be counted, checked, written and sent without a method
knowing. What a client keeps between rounds are leaves of the module that `build` returns: those that `stored` names.

A loss works with tensors only: no `.item()`, no `if tensor`, no boolean indexing. Some engines run it once and then
repeat the same operations for every batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism import keys
from fedprism.config import TrainConfig, setting
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import ClientData, Split
from fedprism.methods import leaves
from fedprism.methods.states import Net, Parts, State, Tensors, average, copy_all, gumbel, load, squared_distance
from fedprism.models import Arch

Draw = Callable[..., Tensor]
UploadKind = Literal["weights", "buffers", "scalar", "prototype", "factors"]


@dataclass(frozen=True)
class Info:
    """What everybody knows of the federation: all that a real site knows."""

    clients: tuple[str, ...]
    classes: int
    archs: Mapping[str, Arch]
    seed: int
    later: tuple[str, ...] = ()  # clients that joined after the start, in the order in which they joined

    def arch_of(self, client_id: str) -> Arch:
        """The architecture of a client; one that joined later may have the server's."""
        return self.archs.get(client_id, self.arch) if client_id in self.later else self.archs[client_id]

    @property
    def arch(self) -> Arch:
        """The architecture of the server's model: the first client's, where clients differ."""
        return self.archs[self.clients[0]]

    @cached_property
    def mixed(self) -> bool:
        """Do clients have different architectures?"""
        return len(set(self.archs.values())) > 1

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Client -> its position in client order."""
        return {client_id: i for i, client_id in enumerate((*self.clients, *self.later))}


@dataclass(frozen=True)
class Context:
    """Where the run stands, for the hooks that are called once per round (never for a loss)."""

    round: int  # counts from 0
    rounds: int
    info: Info
    train: TrainConfig
    lr: float  # of this round, after the schedule; in an adaptation the full one
    weighting: str
    client_id: str | None = None  # None: the server
    shared: tuple[str, ...] = ()  # leaves that travel: `Method.shared` without what the batch-norm policy keeps local
    data: ClientData | None = None
    public: Split | None = None  # images that everybody has (`data.public`)
    download: State = field(default_factory=dict)  # what was received this round
    steps: Mapping[str, int] = field(default_factory=dict)  # optimiser steps done this round, per pass
    is_new: bool = False  # this client's first round
    constant_shared: bool = False  # for `stored` alone: are the shared leaves the same in every round?
    logs: dict[str, dict[str, float]] = field(default_factory=dict)  # of the server: client -> name -> value

    def replace(self, **changes: Any) -> Context:
        """A copy with some fields changed. `dataclasses.replace` takes four times as long."""
        other = object.__new__(Context)
        other.__dict__.update(self.__dict__, **changes)
        return other

    def rng(self, *purpose: int | str, like: Tensor | None = None) -> torch.Generator:
        """A generator keyed by seed, purpose, round and client. `like` is a tensor beside which it is used."""
        return keys.generator(self.info.seed, *purpose, self.round, self.client_id or "server", like=like)

    def log(self, name: str, client_id: str, value: float | Tensor) -> None:
        """Record what the server found out about a client this round."""
        if self.client_id is not None:
            raise FedprismError(
                f"`ctx.log({name!r}, ...)` was called on a client; it is the server's, a client's is client.log."
            )
        self.logs.setdefault(client_id, {})[name] = float(value)

    @property
    def local(self) -> ClientData:
        """This client's data."""
        if self.data is None:
            raise FedprismError("`ctx.local` was asked for where there is no data: on the server, or in `stored`.")
        return self.data

    def split(self, name: str) -> Split:
        """The data that a pass runs over: train, validation, test or public."""
        if name != "public":
            return self.local.split(name)
        if self.public is None or not len(self.public):
            raise ConfigError("the method trains on public images, but there are none; set data.public to some number.")
        return self.public

    def weights(self, uploads: Sequence[Upload]) -> list[float]:
        """The weight of each upload in an average: by training samples or uniform, as configured."""
        return self.shares([upload.samples for upload in uploads])

    def shares(self, samples: Sequence[int]) -> list[float]:
        """The weights in an average of clients with these numbers of training samples."""
        sizes = [float(count) if self.weighting == "samples" else 1.0 for count in samples]
        total = sum(sizes)
        return [size / total for size in sizes]


@dataclass(frozen=True)
class Upload:
    """What one client sent, and its number of training samples."""

    client_id: str
    samples: int
    state: State


@dataclass(frozen=True)
class Mean:
    """The weighted mean of a round's uploads, added up as they came."""

    clients: tuple[str, ...]  # whose uploads are in it, in client order
    state: State
    totals: State = field(default_factory=dict)  # of the names in `Method.totals`: their sum over N, all clients


@dataclass(frozen=True)
class Output:
    """The prediction for one batch, and what every evaluation records beside it."""

    scores: Tensor  # [batch, classes]: what `predict` returns
    branches: Mapping[str, Tensor] = field(default_factory=dict)  # scores of parts of the model: their accuracy is kept
    means: Mapping[str, Tensor] = field(default_factory=dict)  # values [batch, ...] whose mean is kept
    quantiles: Mapping[str, Tensor] = field(default_factory=dict)  # values [batch, ...] whose quantiles are kept


@dataclass(frozen=True)
class Pass:
    """One phase of local training. `trains=()`: a sweep over the data in eval mode, without gradients."""

    loss: Callable[[Client, Tensor, Tensor], Tensor | None]
    name: str = "train"  # part of the key of its noise; unique within a round
    # Leaves that are trained; None: all. Norm layers outside run in eval mode. A pass with a `step` must name them.
    trains: Collection[str] | None = None
    epochs: int | None = None  # None: train.epochs
    steps: int | None = None  # at most this many steps, whatever the epochs
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # overrides train.optimizer
    scheduled: bool = True  # does its learning rate follow train.schedule? In an adaptation it should not
    batch_size: int | None = None  # None: train.batch_size
    min_batch: int = 2  # a smaller last batch is merged into the one before (batch norm cannot train on one sample)
    data: Literal["train", "validation", "public"] = "train"
    stream: str = ""  # key of its own batch order; "": the order that all passes share
    step: Callable[[Client, Tensor, Tensor, torch.optim.Optimizer], None] | None = None  # replaces loss and update
    start: Callable[[Client, Context], None] | None = None
    end: Callable[[Client, Context], None] | None = None

    def __post_init__(self) -> None:
        # A step of one's own often trains one part only, and would move the statistics of every norm layer with it.
        if self.step is not None and self.trains is None:
            raise ConfigError(
                f"pass {self.name!r} has a step of its own, so say what it trains: trains=leaves.part(model, ...), or "
                "trains=leaves.everything(model) for all of it. Norm layers outside of that run in eval mode."
            )


class Client:
    """The client whose turn it is: its model, and all that a loss or a step may read.

    One object serves many clients, one after the other. `keep` and `freeze` therefore allocate once and refill in
    place. Scratch does not outlive the round; what inference needs belongs into the model that `build` returns.
    """

    def __init__(self, model: Net, config: TrainConfig, info: Info) -> None:
        self.model = model
        self.config = config
        self.info = info
        self.scratch: dict[str, Tensor | State | nn.Module] = {}
        self.log_sums: State = {}  # name -> sum of what was logged this round
        self.log_counts: dict[str, int] = {}  # name -> number of values in the sum
        self.draw: Draw = no_draw  # uniform noise in (0, 1): client.draw("name", *shape)

    def keep(self, name: str, value: Tensor | Mapping[str, Tensor] | float) -> None:
        """Copy a tensor, a dict of tensors or a number into scratch; read it back as `client[name]`."""
        old = self.scratch.get(name)
        if isinstance(value, Mapping):
            kept = old if isinstance(old, dict) else {}
            self.scratch[name] = {leaf: _refilled(kept.get(leaf), tensor) for leaf, tensor in value.items()}
        elif isinstance(value, Tensor):
            self.scratch[name] = _refilled(old, value)
        else:
            beside = next(iter(leaves.tensors(self.model).values()))
            self.scratch[name] = _refilled(old, beside.new_full((), value, dtype=torch.get_default_dtype()))

    def freeze(
        self, name: str, module: nn.Module, state: Mapping[str, Tensor] | None = None, training: bool = False
    ) -> None:
        """Keep a copy of `module`, with `state` if given, that does not train; call it as `client[name](x)`."""
        old = self.scratch.get(name)
        if not isinstance(old, nn.Module):
            old = self.scratch[name] = leaves.seal(copy.deepcopy(module).requires_grad_(False))
        own, given = leaves.tensors(old), leaves.tensors(module) if state is None else state
        copy_all(list(own.values()), [given[leaf] for leaf in own])
        old.train(training)

    def __getitem__(self, name: str) -> Any:
        return self.scratch[name]

    def log(self, name: str, value: Tensor) -> None:
        """Record the mean of a value over the round."""
        if name not in self.log_sums:
            self.log_sums[name] = value.new_zeros((), dtype=torch.float64)
        self.log_sums[name].add_(logged(value))
        self.log_counts[name] = self.log_counts.get(name, 0) + 1

    def clear_logs(self) -> None:
        """Forget what was logged."""
        self.log_counts.clear()
        if self.log_sums:
            torch._foreach_zero_(list(self.log_sums.values()))

    def parameters(self, names: Collection[str] | None = None) -> State:
        """The model's parameters by name, or those of them that are in `names`."""
        return {n: p for n, p in self.model.named_parameters() if names is None or n in names}


def logged(value: Tensor) -> Tensor:
    """The number that a log adds up: a value's mean."""
    value = value.detach()
    return value.float().mean() if value.ndim else value


def _refilled(old: object, value: Tensor) -> Tensor:
    """A copy of `value`: in the memory of `old`, where that is a tensor of the same kind."""
    if isinstance(old, Tensor) and old.shape == value.shape and old.type() == value.type():
        return old.copy_(value.detach())
    return value.detach().clone()


def no_draw(name: str, *shape: int) -> Tensor:
    raise FedprismError(f"noise {name!r} was asked for outside of a pass or a prediction.")


@dataclass(frozen=True)
class Method:
    """FedAvg, hook by hook. Override what differs."""

    # What users read (`fedprism list methods`, `fedprism explain METHOD`).
    id: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    idea: ClassVar[str] = ""
    shares: ClassVar[str] = "the whole model"
    stays: ClassVar[str] = "nothing"
    group: ClassVar[str] = "global"
    reveals: ClassVar[str] = "nothing beyond the average"
    newcomers: ClassVar[str] = "get what is shared; at the moment `adapted` they have trained one round"
    # What its paper says where the configuration says `method`.
    bn: ClassVar[str] = "shared"  # shared | local | local-stats | local-affine; a setting may change it (Fed-CO2)
    weighting: ClassVar[str] = "samples"  # samples | uniform | contribution: its own weights, else uniform
    broadcast: ClassVar[str] = "participants"  # participants | all
    trainers: ClassVar[str] = "participants"  # participants | all
    moment: ClassVar[str] = "received"  # when its paper tests
    has_global: ClassVar[bool] = False  # is there one model for everybody?
    shows: ClassVar[Mapping[str, str]] = {}  # what the names mean that it logs and shows
    mixed_with: ClassVar[Mapping[str, Any]] = {}  # settings that `mixed` needs, where the defaults do not allow it

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "id" not in cls.__dict__:  # a user's own method need not name itself
            cls.id = cls.__name__.lower()
        _check_hooks(cls)
        # What a parent stores is right for what the parent shares, sends and receives, and for when it is tested.
        if any(_defined(cls, hook) < _defined(cls, "stored") for hook in ("shared", "send", "receive", "moment")):
            cls.stored = Method.stored  # type: ignore[method-assign]

    @property
    def mixed(self) -> bool:
        """May clients have different architectures?"""
        return False

    # --- what there is -----------------------------------------------------------------------------------------------

    def facts(self, info: Info) -> Mapping[str, str]:
        """What the method decides from the list of clients, for people to read: name -> words."""
        return {}

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        """The model of this client (None: the server's) with its first weights: all that the client owns."""
        return arch.model(seed)

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        """Which leaves travel this round: the same for all clients of an architecture. By part or module type, never by
        a piece of a name."""
        return leaves.everything(model)

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        """What `upload` will hold, and of which kind each entry is."""
        parameters = set(leaves.parameters(model))
        return {name: "weights" if name in parameters else "buffers" for name in ctx.shared}

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        """Leaves that a client keeps until its next round. All others hold no number when `receive` begins.

        Default: what is not shared, if `send` and `receive` are the default ones and `shared` does not look at the
        round; else everything. A method that is tested after training keeps everything, too: that model is its result.
        A class that replaces its parent's `shared`, `send`, `receive` or `moment` has this default again, unless it has
        a `stored` of its own.
        """
        loads = type(self).send is Method.send and type(self).receive is Method.receive
        spares = loads and ctx.constant_shared and self.moment != "trained"
        return leaves.others(model, ctx.shared) if spares else leaves.everything(model)

    # --- the server --------------------------------------------------------------------------------------------------

    def server(self, model: Net, ctx: Context) -> State:
        """The server's first state; its keys never change."""
        state = model.state_dict()
        return {name: state[name].clone() for name in ctx.shared}

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        """What goes to this client: the same for all, or its own. None: a client that nobody knows yet."""
        return {name: server[name] for name in ctx.shared}

    def combine(self, server: State, mean: Mean, ctx: Context) -> State:
        """The server's next state from the weighted mean of the uploads of any subset of clients. Changes no input."""
        return {**server, **mean.state}

    def totals(self, server: State, ctx: Context) -> Collection[str]:
        """Names of the upload whose plain sum, divided by the number of all clients, `combine` needs beside means."""
        return ()

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        """The server's next state from all uploads at once, in client order. Changes no input.

        Override it where a weighted mean is not enough. All uploads of a round then wait in memory; otherwise they are
        added up as they come, and only `combine` is called.
        """
        every, states = len(ctx.info.clients), [u.state for u in uploads]
        plain = [{name: state[name] for name in self.totals(server, ctx)} for state in states]
        totals = average(plain, [1 / every] * len(uploads))
        clients = tuple(upload.client_id for upload in uploads)
        return self.combine(server, Mean(clients, average(states, ctx.weights(uploads)), totals), ctx)

    @property
    def needs_all_uploads(self) -> bool:
        """Are uploads kept until the round is over, for `aggregate`? Otherwise they are added up as they come."""
        return type(self).aggregate is not Method.aggregate

    # --- the client --------------------------------------------------------------------------------------------------

    def receive(self, client: Client, ctx: Context) -> None:
        """Put what was sent into the model, and only that: it is what the moment `received` tests."""
        load(client.model, ctx.download)

    def start(self, client: Client, ctx: Context) -> None:
        """Fill scratch (snapshots, teachers); called only when something will train."""

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one batch."""
        return cross_entropy(client.model(x), y)

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        """What is trained, in which order, for how long, by which loss."""
        return [Pass(self.loss)]

    def adapt(self, client: Client, ctx: Context) -> list[Pass]:
        """Passes on a throw-away copy before the moment `adapted`; by default training for new clients, else none.

        They use the full learning rate: a client that joins when a schedule has ended would learn nothing otherwise.
        """
        return [replace(spec, scheduled=False) for spec in self.passes(client, ctx)] if ctx.is_new else []

    def upload(self, client: Client, ctx: Context) -> State:
        """What goes to the server, as declared by `uploads`."""
        state = leaves.tensors(client.model)
        return {name: state[name] for name in ctx.shared}

    def origin(self, ctx: Context) -> State:
        """What an upload is an update of, by the names of the upload: the update is upload minus origin. A name that is
        not here starts from zero. Default: the download."""
        return ctx.download

    # --- the wire ----------------------------------------------------------------------------------------------------

    def encode(self, state: State, ctx: Context) -> State:
        """Compress what is about to be sent, in either direction."""
        return state

    def decode(self, state: State, ctx: Context) -> State:
        """The inverse of `encode`."""
        return state

    # --- inference ---------------------------------------------------------------------------------------------------

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        """Scores `[batch, classes]` of a client's own model; their softmax is the prediction."""
        plain = type(self).forward_details is Method.forward_details
        return model(x) if plain else self.forward_details(model, x, draw).scores

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        """The scores, and what is recorded beside them: a method that has some overrides this instead of `predict`."""
        return Output(model(x) if type(self).predict is Method.predict else self.predict(model, x, draw))

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        """Scores of the one global model, where there is one (`has_global`)."""
        return self.predict(model, x, draw)


def _defined(cls: type[Method], name: str) -> int:
    """How far up its line of classes a hook is defined."""
    return next(i for i, each in enumerate(cls.__mro__) if name in vars(each))


def _check_hooks(cls: type[Method]) -> None:
    """Refuse a helper that has a hook's name by accident: it would silently replace the hook."""
    for name, own in vars(cls).items():
        hook = getattr(Method, name, None)
        if name.startswith("_") or hook is None or name not in vars(Method):
            continue
        if inspect.isfunction(hook):
            count = len(inspect.signature(hook).parameters)
            try:
                inspect.signature(own).bind(*range(count))
                fits = inspect.isfunction(own)
            except (TypeError, ValueError):
                fits = False
            expected = f"def {name}{inspect.signature(hook)}"
        else:
            fits = not inspect.isfunction(own)
            expected = f"a value: {name} is what a method says of itself"
        if not fits:
            raise ConfigError(
                f"{cls.__name__}.{name} has the name of a hook of fedprism.Method, but not its form; expected "
                f"{expected}. Give your helper another name."
            )


# All that a method's file needs: `from fedprism.methods.base import ...`.
__all__ = [
    "Arch",
    "Client",
    "ClientData",
    "Context",
    "Draw",
    "Info",
    "Mean",
    "Method",
    "Net",
    "Output",
    "Parts",
    "Pass",
    "State",
    "Tensors",
    "Upload",
    "UploadKind",
]
__all__ += ["average", "gumbel", "keys", "leaves", "load", "setting", "squared_distance"]
