"""LG-FedAvg (Liang et al., 2020): the body is personal, the head is shared, after warm-up rounds of plain FedAvg."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from fedprism.config import setting
from fedprism.errors import ConfigError
from fedprism.methods import register
from fedprism.methods.base import Arch, Client, Context, Info, Mean, Method, Net, Pass, State, leaves, load


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

    warmup: int = setting(10, "rounds of FedAvg that train the initial model", lambda v: v >= 0, "0 or more")

    @property
    def mixed(self) -> bool:
        return self.warmup == 0

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
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
        model.register_buffer("started", torch.tensor(False))  # whether this client has trained its own body
        return model

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "body", "head") if ctx.round < self.warmup else leaves.part(model, "head")

    # The averaged body must reach every client exactly once after the warm-up, however late the client is sampled. So
    # the server sends the whole model to clients without an upload since, and a client with its own body keeps it.
    def server(self, model: Net, ctx: Context) -> State:
        return {**super().server(model, ctx), "started": torch.zeros(len(ctx.info.clients), dtype=torch.bool)}

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        has_body = client_id in ctx.info.clients and bool(server["started"][ctx.info.index[client_id]])
        return {n: t for n, t in server.items() if n != "started" and (n in ctx.shared or not has_body)}

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared)

    def receive(self, client: Client, ctx: Context) -> None:
        own = {name: leaves.tensors(client.model)[name] for name in leaves.part(client.model, "body")}
        # Chosen on the device: reading `started` here would synchronise with it.
        load(
            client.model,
            {n: torch.where(client.model.started, own[n], t) if n in own else t for n, t in ctx.download.items()},
        )

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, end=self.mark_started)]

    def mark_started(self, client: Client, ctx: Context) -> None:
        client.model.started.fill_(ctx.round >= self.warmup)

    def combine(self, server: State, mean: Mean, ctx: Context) -> State:
        started = server["started"].clone()
        if ctx.round >= self.warmup:
            started[[ctx.info.index[c] for c in mean.clients if c in ctx.info.clients]] = True
        return {**super().combine(server, mean, ctx), "started": started}
