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
from fedprism.methods.base import Arch, Draw, Info, Kind, Me, Method, Net, Now, Parts, Pass, Seen, State, Upload
from fedprism.methods.collecting import of, owner, owners
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
    personal: Literal["bn", "head", "both"] = setting("bn", "what of the online model is not averaged (Fig. 7)")
    skip_first: bool = setting(False, "no learning from the partner in the first round, as in the authors' code")
    offline_start: Literal["same", "own"] = setting(
        "same", "first weights of the offline model: the online model's, or each client's own (label-skew code)"
    )

    def __post_init__(self) -> None:
        if self.personal == "head":  # then batch norm is averaged, unless train.bn says otherwise
            object.__setattr__(self, "bn", "shared")

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        return Parts(online=arch.model(seed), offline=self.offline(arch, client, seed))

    def offline(self, arch: Arch, client: str | None, seed: int) -> nn.Module:
        return arch.model(seed if self.offline_start == "same" else keys.key(seed, "offline model", client or ""))

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "online" if self.personal == "bn" else "online.body")

    # --- the server: the mean of the online models, and the head of each client's offline model ----------------------

    def server(self, model: Net, now: Now) -> State:
        state, info = super().server(model, now), now.info
        for client in info.clients if self.inter != "none" else ():
            first: Net = model.offline if self.offline_start == "same" else self.offline(info.arch, client, info.seed)
            state |= {of(client, leaf): tensor.clone() for leaf, tensor in first.head.state_dict().items()}
        return state

    def send(self, server: State, client: str | None, now: Now) -> State:
        others = {name: tensor for name, tensor in server.items() if owner(name) not in (None, client)}
        return {**super().send(server, client, now), **others}

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        heads = {n: t for u in uploads for n, t in u.state.items() if owner(n) is not None and n in server}
        online = [{n: t for n, t in u.state.items() if owner(n) is None} for u in uploads]
        return {**server, **average(online, now.weights(uploads)), **heads}  # Eq. 2

    # --- the client: Algorithm 1; with neither transfer it is Algorithm 2 --------------------------------------------

    def receive(self, me: Me, now: Now) -> None:
        load(me.model, {name: now.down[name] for name in now.shared})

    def start(self, me: Me, now: Now) -> None:
        for student, teacher in (PAIR, PAIR[::-1]):
            if self.intra in (student, "both"):
                me.freeze(teacher, getattr(me.model, teacher))
        own = me.model.offline.head
        for place, other in enumerate(owners(now)):
            me.freeze(f"head {place}", own, {leaf: now.down[of(other, leaf)] for leaf in leaves.tensors(own)})

    def passes(self, me: Me, now: Now) -> list[Pass]:
        first = PAIR if now.round > 0 or not self.skip_first else ()
        part = {which: leaves.part(me.model, which) for which in PAIR}
        mutual = [
            Pass(partial(self.mutual, which), f"mutual {which}", part[which], epochs=1)
            for which in first
            if self.intra in (which, "both")
        ]
        heads = {which: len(owners(now)) if self.inter in (which, "both") else 0 for which in PAIR}
        return mutual + [Pass(partial(self.adaptation, which, heads[which]), which, part[which]) for which in PAIR]

    def mutual(self, which: str, me: Me, x: Tensor, y: Tensor) -> Tensor:
        """Eq. 4 and 5: KL(partner's copy from the start of the round || this model)."""
        with torch.no_grad():
            target = me["offline" if which == "online" else "online"](x).softmax(1)
        return kl_div(getattr(me.model, which)(x).log_softmax(1), target, reduction="batchmean")

    def adaptation(self, which: str, heads: int, me: Me, x: Tensor, y: Tensor) -> Tensor:
        """Eq. 6 and 7: cross-entropy, under the own head and under each of the other clients' frozen ones."""
        model = getattr(me.model, which)
        z = model.body(x)
        loss = cross_entropy(model.head(z), y)
        for place in range(heads):
            loss = loss + self.mu * cross_entropy(me[f"head {place}"](z), y)
        return loss

    def uploads(self, model: Net, now: Now) -> Mapping[str, Kind]:
        head, trained = model.offline.head.state_dict(), dict(model.offline.head.named_parameters())
        kinds: dict[str, Kind] = {of(now.client, leaf): "weights" if leaf in trained else "buffers" for leaf in head}
        return {**super().uploads(model, now), **(kinds if self.inter != "none" else {})}

    def upload(self, me: Me, now: Now) -> State:
        head = leaves.tensors(me.model.offline.head) if self.inter != "none" else {}
        return {**super().upload(me, now), **{of(now.client, leaf): tensor for leaf, tensor in head.items()}}

    def examine(self, model: Net, x: Tensor, draw: Draw) -> Seen:
        online, offline = model.online(x), model.offline(x)
        return Seen(online + offline, paths={"online": online, "offline": offline})  # Eq. 3
