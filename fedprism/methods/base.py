"""What a method is: the hooks that make it differ from FedAvg. Read this file first.

A method is a frozen dataclass: its fields are its hyper-parameters and nothing else lives on `self`. Every hook has
FedAvg's behaviour as its default, so a method's file holds only what is special about it:

    server                              client (one round)
    ------                              ------------------
    send(server, client)  ----------->  receive, start, passes (each: loss or step, epochs), upload
    aggregate(server, uploads)  <-----------------------------------------------------------+

What crosses is a flat dict `State` (name -> tensor), so that it can be counted, checked, written and sent without a
method knowing. What a client keeps between rounds is the state dict of the module that `build` makes: its keys never
change. A loss must not wait for the device (`.item()`, `if tensor`, boolean indexing): then an engine can record it
once and replay it.
"""

from __future__ import annotations

import copy
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
Kind = Literal["weights", "buffers", "scalar", "prototype", "factors"]


@dataclass(frozen=True)
class Info:
    """Public knowledge: all that a real site knows of the federation it is in."""

    clients: tuple[str, ...]
    classes: int
    archs: Mapping[str, Arch]
    seed: int
    later: tuple[str, ...] = ()  # clients that came after the set-up, in the order in which they came

    def arch_of(self, client: str) -> Arch:
        """A client's architecture; who came later has the server's."""
        return self.archs.get(client, self.arch) if client in self.later else self.archs[client]

    @property
    def arch(self) -> Arch:
        """The architecture of the server's model: everybody's, or the first client's where they differ."""
        return self.archs[self.clients[0]]

    @cached_property
    def mixed(self) -> bool:
        return len(set(self.archs.values())) > 1

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Which client in order each one is."""
        return {client: place for place, client in enumerate((*self.clients, *self.later))}


@dataclass(frozen=True)
class Now:
    """Where we are, for the hooks that run once a round (never for a loss)."""

    round: int  # counts from 0
    rounds: int
    info: Info
    train: TrainConfig
    lr: float  # as the schedule has it in this round; in an adaptation the full one
    weighting: str
    client: str | None = None  # None: the server
    shared: tuple[str, ...] = ()  # what travels: `Method.shared` less what the batch-norm policy keeps at home
    data: ClientData | None = None
    public: Split | None = None  # images that everybody has (`data.public`)
    down: State = field(default_factory=dict)  # what was received this round
    steps: Mapping[str, int] = field(default_factory=dict)  # optimiser steps done this round, by pass
    new: bool = False  # this client's first time
    device: torch.device = torch.device("cpu")
    logs: dict[str, dict[str, float]] = field(default_factory=dict)  # of the server: client -> name -> value

    def but(self, **changes: Any) -> Now:
        """With some fields changed: `dataclasses.replace` in a quarter of the time, which many clients make felt."""
        other = object.__new__(Now)
        other.__dict__.update(self.__dict__, **changes)
        return other

    def rng(self, *purpose: int | str) -> torch.Generator:
        """A generator of this seed, round, client and purpose."""
        return keys.generator(self.info.seed, *purpose, self.round, self.client or "server", device=self.device)

    def log(self, name: str, client: str, value: float | Tensor) -> None:
        """Record what the server found of a client this round, beside what the client itself logs."""
        if self.client is not None:
            raise FedprismError(
                f"`now.log({name!r}, ...)` was called on a client; it is the server's, a client's is me.log."
            )
        self.logs.setdefault(client, {})[name] = float(value)

    @property
    def local(self) -> ClientData:
        """This client's data; only on a client."""
        if self.data is None:
            raise FedprismError("`now.local` was asked for on the server, which has no data.")
        return self.data

    def split(self, name: str) -> Split:
        """The part of the data that a pass runs over: train, validation, test or public."""
        if name != "public":
            return self.local.split(name)
        if self.public is None or not len(self.public):
            raise ConfigError("the method trains on public images, but there are none; set data.public to some number.")
        return self.public

    def weights(self, uploads: Sequence[Upload]) -> list[float]:
        """Each upload's share of an average: by training samples or uniform, as configured."""
        sizes = [float(u.samples) if self.weighting == "samples" else 1.0 for u in uploads]
        return [size / sum(sizes) for size in sizes]


@dataclass(frozen=True)
class Upload:
    """What one client sent, with its number of training samples."""

    client: str
    samples: int
    state: State


@dataclass(frozen=True)
class Seen:
    """What one look at a batch shows: the prediction, and what the records keep beside it at every evaluation."""

    scores: Tensor  # [batch, classes]: what `predict` gives
    paths: Mapping[str, Tensor] = field(default_factory=dict)  # scores of parts by themselves: their accuracy is kept
    means: Mapping[str, Tensor] = field(default_factory=dict)  # values [batch, ...]: their mean is kept
    spreads: Mapping[str, Tensor] = field(default_factory=dict)  # values [batch, ...]: their quantiles are kept


@dataclass(frozen=True)
class Pass:
    """One stretch of local training. `trains=()` is a sweep without gradient, in eval mode, that fills scratch."""

    loss: Callable[[Me, Tensor, Tensor], Tensor | None]
    name: str = "train"  # keys noise and captured graphs
    trains: Collection[str] | None = None  # leaves that are trained; None: all. Norm layers outside it run in eval mode
    epochs: int | None = None  # None: train.epochs
    steps: int | None = None  # at most so many steps, whatever the epochs
    optimizer: Mapping[str, Any] = field(default_factory=dict)  # laid over train.optimizer
    scheduled: bool = True  # does its learning rate follow train.schedule? In an adaptation it should not
    batch: int | None = None  # None: train.batch
    least: int = 2  # a smaller last batch is merged into the one before (batch norm cannot train on one sample)
    data: Literal["train", "validation", "public"] = "train"
    stream: str = ""  # batch order of its own; "": the same order as every other pass
    step: Callable[[Me, Tensor, Tensor, torch.optim.Optimizer], None] | None = None  # instead of loss, backward, update
    start: Callable[[Me, Now], None] | None = None
    end: Callable[[Me, Now], None] | None = None


class Me:
    """A slot: one client's turn at training, and all that a loss or a step may read.

    `keep` and `freeze` allocate once and refill in place, because a slot serves many clients and a captured graph reads
    fixed addresses. Scratch does not outlive the round; what inference needs belongs into the model that `build` makes.
    """

    def __init__(self, model: Net, config: TrainConfig, info: Info) -> None:
        self.model = model
        self.config = config
        self.info = info
        self.scratch: dict[str, Tensor | State | nn.Module] = {}
        self.sums: State = {}  # of what was logged this round, by name; and how many values each is of
        self.counts: dict[str, int] = {}
        self.draw: Draw = no_draw  # uniform noise in (0, 1), keyed by the engine: me.draw("name", *shape)
        self.ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.replay: Any = None  # an engine's: what records the steps of a pass and replays them

    def keep(self, name: str, value: Tensor | Mapping[str, Tensor]) -> None:
        """Copy a tensor, or a dict of them, into scratch; read it back as `me[name]`."""
        old = self.scratch.get(name)
        if isinstance(value, Tensor):
            self.scratch[name] = _refilled(old, value)
        else:
            held = old if isinstance(old, dict) else {}
            self.scratch[name] = {leaf: _refilled(held.get(leaf), tensor) for leaf, tensor in value.items()}

    def freeze(
        self, name: str, module: nn.Module, state: Mapping[str, Tensor] | None = None, training: bool = False
    ) -> None:
        """Keep a copy of `module`, with `state` if given, whose parameters do not train; call it as `me[name](x)`."""
        old = self.scratch.get(name)
        if not isinstance(old, nn.Module):
            old = self.scratch[name] = copy.deepcopy(module).requires_grad_(False)
        own, given = leaves.tensors(old), leaves.tensors(module) if state is None else state
        copy_all(list(own.values()), [given[leaf] for leaf in own])
        old.train(training)

    def __getitem__(self, name: str) -> Any:
        return self.scratch[name]

    def log(self, name: str, value: Tensor) -> None:
        """Record the mean of a value over the round, without waiting for the device."""
        if name not in self.sums:
            self.sums[name] = torch.zeros((), dtype=torch.float64, device=value.device)
        self.log_into(self.sums, name, value)
        self.counts[name] = self.counts.get(name, 0) + 1

    def log_into(self, sums: State, name: str, value: Tensor) -> None:
        """Add the mean of a value to its sum."""
        value = value.detach()
        value = value.float().mean() if value.ndim else value
        if name in sums:
            sums[name].add_(value)
        else:
            sums[name] = value.to(torch.float64, copy=True)

    def clear_logs(self) -> None:
        """Forget what was logged; the sums stay where they are."""
        self.counts.clear()
        if self.sums:
            torch._foreach_zero_(list(self.sums.values()))

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss; what they start from is made once, not in every step."""
        kind = (loss.dtype, loss.device)
        if kind not in self.ones:
            self.ones[kind] = torch.ones_like(loss)
        loss.backward(self.ones[kind])  # type: ignore[no-untyped-call]

    def parameters(self, names: Collection[str] | None = None) -> State:
        """The model's parameters by name, or those of them that are in `names`."""
        return {n: p for n, p in self.model.named_parameters() if names is None or n in names}


def _refilled(old: object, value: Tensor) -> Tensor:
    """A copy of `value`, in the place of an old tensor of the same kind where there is one."""
    if isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device):
        return old.copy_(value.detach())
    return value.detach().clone()


def no_draw(name: str, *shape: int) -> Tensor:
    raise FedprismError(f"noise {name!r} was asked for outside of a pass or a prediction.")


@dataclass(frozen=True)
class Method:
    """FedAvg, hook by hook. Override what differs."""

    # What a user is told (`fedprism list methods`, `fedprism explain METHOD`).
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

    @property
    def mixed(self) -> bool:
        """May clients have different architectures?"""
        return False

    # --- what there is -----------------------------------------------------------------------------------------------

    def facts(self, info: Info) -> Mapping[str, str]:
        """What it decides by looking at the clients, for people: name and words."""
        return {}

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        """The named parts that this client owns (None: the server's), with their first weights."""
        return arch.model(seed)

    def shared(self, model: Net, now: Now) -> Collection[str]:
        """Which leaves travel this round; by part or module type, never by a piece of a name."""
        return leaves.everything(model)

    def uploads(self, model: Net, now: Now) -> Mapping[str, Kind]:
        """What `upload` will hold, and of which kind each entry is."""
        parameters = set(leaves.parameters(model))
        return {name: "weights" if name in parameters else "buffers" for name in now.shared}

    # --- the server --------------------------------------------------------------------------------------------------

    def server(self, model: Net, now: Now) -> State:
        """The server's first state; its keys never change."""
        state = model.state_dict()
        return {name: state[name].clone() for name in now.shared}

    def send(self, server: State, client: str | None, now: Now) -> State:
        """What goes to this client: the same for all, or its own. None: a stranger."""
        return {name: server[name] for name in now.shared}

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        """The server's next state from any subset of uploads, given in client order. Mutates nothing."""
        return {**server, **average([u.state for u in uploads], now.weights(uploads))}

    # --- the client --------------------------------------------------------------------------------------------------

    def receive(self, me: Me, now: Now) -> None:
        """Put what was sent into the model, and only that: it is what the moment `received` tests."""
        load(me.model, now.down)

    def start(self, me: Me, now: Now) -> None:
        """Fill scratch (snapshots, teachers); called only when something will train."""

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one batch."""
        return cross_entropy(me.model(x), y)

    def passes(self, me: Me, now: Now) -> list[Pass]:
        """What is trained, in which order, for how long, by which loss."""
        return [Pass(self.loss)]

    def adapt(self, me: Me, now: Now) -> list[Pass]:
        """Run on a throw-away copy before the moment `adapted`; by default a newcomer's training, else nothing.

        At the full learning rate: a client that comes when a schedule has ended is not to learn nothing.
        """
        return [replace(each, scheduled=False) for each in self.passes(me, now)] if now.new else []

    def upload(self, me: Me, now: Now) -> State:
        """What goes to the server, as declared by `uploads`."""
        state = leaves.tensors(me.model)
        return {name: state[name] for name in now.shared}

    # --- the wire ----------------------------------------------------------------------------------------------------

    def encode(self, state: State, now: Now) -> State:
        """Compress what is about to be sent, in either direction."""
        return state

    def decode(self, state: State, now: Now) -> State:
        """The inverse of `encode`."""
        return state

    # --- inference ---------------------------------------------------------------------------------------------------

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        """Scores `[batch, classes]` of a client's own model; their softmax is the prediction."""
        return model(x) if type(self).examine is Method.examine else self.examine(model, x, draw).scores

    def examine(self, model: Net, x: Tensor, draw: Draw) -> Seen:
        """The scores with what there is to see inside; a method that has something overrides this, not `predict`."""
        return Seen(model(x) if type(self).predict is Method.predict else self.predict(model, x, draw))

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        """Scores of the one global model, where there is one (`has_global`)."""
        return self.predict(model, x, draw)


# All that a method's file needs: `from fedprism.methods.base import ...`.
__all__ = [
    "Arch",
    "ClientData",
    "Draw",
    "Info",
    "Kind",
    "Me",
    "Method",
    "Net",
    "Now",
    "Parts",
    "Pass",
    "Seen",
    "State",
    "Tensors",
    "Upload",
]
__all__ += ["average", "gumbel", "keys", "leaves", "load", "setting", "squared_distance"]
