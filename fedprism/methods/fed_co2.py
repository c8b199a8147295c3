"""Fed-CO2 (Cai et al., NeurIPS 2023): an online model that is averaged and an offline one that stays, as partners."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from fedprism import keys
from fedprism.config import setting
from fedprism.methods import leaves, register
from fedprism.methods.base import (
    Arch,
    Client,
    Context,
    Draw,
    Info,
    Method,
    Net,
    Output,
    Parts,
    Pass,
    State,
    Upload,
    UploadKind,
)
from fedprism.methods.collecting import client_key, owner, owners
from fedprism.methods.states import average, load

PAIR = ("online", "offline")
Which = Literal["none", "online", "offline", "both"]


@register
@dataclass(frozen=True)
class FedCO2(Method):
    id = "fed-co2"
    paper = (
        "Cai et al., Fed-CO2: Cooperation of Online and Offline Models for Severe Data Heterogeneity in Federated "
        "Learning, NeurIPS 2023"
    )
    idea = (
        "An averaged model and a local one learn from each other and from other clients' heads; they predict together."
    )
    shares = "the online model without batch norm, and the head of the offline model, which all others are sent"
    stays = "the body of the offline model, and batch norm"
    group = "two models"
    reveals = "the head of every client's offline model"
    bn = "local"
    weighting = "uniform"
    shows = {
        "online": "the averaged model alone",
        "offline": "the local model alone",
    }

    mu: float = setting(1.0, "weight of the loss under the other clients' heads", lambda v: v >= 0, "0 or more")
    intra: Which = setting("both", "which models learn from their partner before they adapt (Table 11)")
    inter: Which = setting("both", "which models adapt under the other clients' heads too (Table 12)")
    personal: Literal["bn", "head", "both"] = setting("bn", "which part of the online model is not averaged (Fig. 7)")
    skip_first: bool = setting(False, "no learning from the partner in the first round, as in the authors' code")
    offline_start: Literal["same", "own"] = setting(
        "same", "initial weights of the offline model: the online model's, or each client's own (label-skew code)"
    )

    def __post_init__(self) -> None:
        if self.personal == "head":  # then batch norm is averaged, unless train.bn is set
            object.__setattr__(self, "bn", "shared")

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return Parts(online=arch.model(seed), offline=self.offline(arch, client_id, seed))

    def offline(self, arch: Arch, client_id: str | None, seed: int) -> nn.Module:
        return arch.model(seed if self.offline_start == "same" else keys.key(seed, "offline model", client_id or ""))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "online" if self.personal == "bn" else "online.body")

    # --- the server: the mean of the online models, and the head of each client's offline model ----------------------

    def server(self, model: Net, ctx: Context) -> State:
        state, info = super().server(model, ctx), ctx.info
        for client_id in info.clients if self.inter != "none" else ():
            same = self.offline_start == "same"
            first: Net = model.offline if same else self.offline(info.arch, client_id, info.seed)
            state |= {client_key(client_id, leaf): tensor.clone() for leaf, tensor in first.head.state_dict().items()}
        return state

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        others = {name: tensor for name, tensor in server.items() if owner(name) not in (None, client_id)}
        return {**super().send(server, client_id, ctx), **others}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        heads = {n: t for u in uploads for n, t in u.state.items() if owner(n) is not None and n in server}
        online = [{n: t for n, t in u.state.items() if owner(n) is None} for u in uploads]
        return {**server, **average(online, ctx.weights(uploads)), **heads}  # Eq. 2

    # --- the client: Algorithm 1; without both transfers Algorithm 2 -------------------------------------------------

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared)

    def receive(self, client: Client, ctx: Context) -> None:
        load(client.model, {name: ctx.download[name] for name in ctx.shared})

    def start(self, client: Client, ctx: Context) -> None:
        for student, teacher in (PAIR, PAIR[::-1]):
            if self.intra in (student, "both"):
                client.freeze(teacher, getattr(client.model, teacher))
        own = client.model.offline.head
        for place, other in enumerate(owners(ctx)):
            theirs = {leaf: ctx.download[client_key(other, leaf)] for leaf in leaves.tensors(own)}
            client.freeze(f"head {place}", own, theirs)

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        first = PAIR if ctx.round > 0 or not self.skip_first else ()
        part = {which: leaves.part(client.model, which) for which in PAIR}
        mutual = [
            Pass(partial(self.mutual, which), f"mutual {which}", part[which], epochs=1)
            for which in first
            if self.intra in (which, "both")
        ]
        heads = {which: len(owners(ctx)) if self.inter in (which, "both") else 0 for which in PAIR}
        return mutual + [Pass(partial(self.adaptation, which, heads[which]), which, part[which]) for which in PAIR]

    def mutual(self, which: str, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """Eq. 4 and 5: KL(partner's copy from the start of the round || this model)."""
        with torch.no_grad():
            target = client["offline" if which == "online" else "online"](x).softmax(1)
        return kl_div(getattr(client.model, which)(x).log_softmax(1), target, reduction="batchmean")

    def adaptation(self, which: str, heads: int, client: Client, x: Tensor, y: Tensor) -> Tensor:
        """Eq. 6 and 7: cross-entropy with the model's own head and with each of the other clients' frozen heads."""
        model = getattr(client.model, which)
        z = model.body(x)
        loss = cross_entropy(model.head(z), y)
        for place in range(heads):
            loss = loss + self.mu * cross_entropy(client[f"head {place}"](z), y)
        return loss

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        head, trained = model.offline.head.state_dict(), dict(model.offline.head.named_parameters())
        kinds: dict[str, UploadKind] = {
            client_key(ctx.client_id, leaf): "weights" if leaf in trained else "buffers" for leaf in head
        }
        return {**super().uploads(model, ctx), **(kinds if self.inter != "none" else {})}

    def upload(self, client: Client, ctx: Context) -> State:
        head = leaves.tensors(client.model.offline.head) if self.inter != "none" else {}
        own = {client_key(ctx.client_id, leaf): tensor for leaf, tensor in head.items()}
        return {**super().upload(client, ctx), **own}

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        online, offline = model.online(x), model.offline(x)
        return Output(online + offline, branches={"online": online, "offline": offline})  # Eq. 3
