"""LG-FedAvg (Liang et al., 2020): the body is personal, the head is shared, after warm-up rounds of plain FedAvg."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedprism.config import setting
from fedprism.errors import ConfigError
from fedprism.methods import register
from fedprism.methods.base import Arch, Info, Me, Method, Net, Now, Pass, State, Upload, leaves, load


@register
@dataclass(frozen=True)
class LGFedAvg(Method):
    id = "lg-fedavg"
    paper = "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020"
    idea = "Body personal, head shared, trained jointly; both start from a FedAvg model of `warmup` rounds."
    shares = "the head (in the warm-up everything)"
    stays = "the body (after the warm-up)"
    group = "split"
    weighting = "uniform"
    mixed_with = {"warmup": 0}

    warmup: int = setting(10, "rounds of FedAvg that give everyone the first model", lambda v: v >= 0, "0 or more")

    @property
    def mixed(self) -> bool:
        return self.warmup == 0

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        heads = {a.label: a.hollow().head.state_dict() for a in dict.fromkeys(info.archs.values())}
        if len({frozenset(head) for head in heads.values()}) > 1:
            layers = "; ".join(f"{label}: {', '.join(head)}" for label, head in heads.items())
            raise ConfigError(
                f"lg-fedavg averages heads, so all models need heads of the same layers, but they have {layers}. "
                "Choose models whose heads agree, as those of all ResNets and vision transformers do."
            )
        if len({tuple(leaf.shape for leaf in head.values()) for head in heads.values()}) > 1:
            widths = sorted({a.width for a in info.archs.values()})
            raise ConfigError(
                f"lg-fedavg averages heads, so all bodies need one number of features, but they have {widths}; "
                "set model.features to auto or to a number, and leave it out of the entries of model.per_client."
            )
        model = arch.model(seed)
        model.register_buffer("started", torch.tensor(False))  # has this client trained the body that is its own now?
        return model

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "body", "head") if now.round < self.warmup else leaves.part(model, "head")

    # The averaged body must reach every client once after the warm-up, however late it is sampled, and never again. So
    # the server sends the whole model to those from whom it has not heard since, and a client with a body keeps it.
    def server(self, model: Net, now: Now) -> State:
        return {**super().server(model, now), "started": torch.zeros(len(now.info.clients), dtype=torch.bool)}

    def send(self, server: State, client: str | None, now: Now) -> State:
        has_body = client in now.info.clients and bool(server["started"][now.info.place[client]])
        return {n: t for n, t in server.items() if n != "started" and (n in now.shared or not has_body)}

    def receive(self, me: Me, now: Now) -> None:
        own = {name: leaves.tensors(me.model)[name] for name in leaves.part(me.model, "body")}
        # Chosen on the device: to ask for `started` here would be to wait for all that was launched before.
        load(me.model, {n: torch.where(me.model.started, own[n], t) if n in own else t for n, t in now.down.items()})

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, end=self.settle)]

    def settle(self, me: Me, now: Now) -> None:
        me.model.started.fill_(now.round >= self.warmup)

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        started = server["started"].clone()
        if now.round >= self.warmup:
            started[[now.info.place[u.client] for u in uploads if u.client in now.info.clients]] = True
        return {**super().aggregate(server, uploads, now), "started": started}
