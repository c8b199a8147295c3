"""FedProto (Tan et al., AAAI 2022): clients share class prototypes instead of weights, so architectures may differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import setting
from fedprism.errors import ConfigError
from fedprism.methods import leaves, register
from fedprism.methods.base import (
    Arch,
    Client,
    Context,
    Draw,
    Info,
    Method,
    Net,
    Parts,
    Pass,
    State,
    Tensors,
    Upload,
    UploadKind,
)

BELOW = 1e6  # how far the score of a class without a prototype is below all others


@register
@dataclass(frozen=True)
class FedProto(Method):
    id = "fedproto"
    paper = "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    idea = "Clients send the mean feature of each class and are pulled towards everybody's mean."
    shares = "the mean feature of each class"
    stays = "the whole model"
    group = "prototypes"
    bn = "local"
    reveals = (
        "the mean features of each class over all clients, and how many samples of it there are; "
        "the server: those of each client"
    )
    shows = {"pull": "squared distance of the features from their class prototype"}

    lam: float = setting(1.0, "weight of the pull towards the class prototype", lambda v: v >= 0, "0 or more")
    inference: Literal["prototype", "head"] = setting("prototype", "nearest prototype (paper) or the client's own head")

    @property
    def mixed(self) -> bool:
        return True

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        widths = {a.width for a in info.archs.values()}
        if len(widths) > 1:
            raise ConfigError(
                f"{self.id} compares features, so all bodies need one number of them, but they have {sorted(widths)}; "
                "set model.features to auto or to a number, and leave it out of the entries of model.per_client."
            )
        means = {"mean": torch.zeros(info.classes, arch.width), "count": torch.zeros(info.classes)}
        return Parts(net=arch.model(seed), prototypes=Tensors(means))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "prototypes")

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        return {"prototypes.mean": "prototype", "prototypes.count": "scalar"}

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [
            Pass(self.loss, trains=leaves.part(client.model, "net")),
            Pass(self.collect, "collect", trains=(), start=self.clear),
        ]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z = client.model.net.body(x)
        mean, count = client.model.prototypes["mean"], client.model.prototypes["count"]
        known = (count[y] > 0).unsqueeze(1)
        pull = ((z - mean[y]) * known).square().mean()  # a class without a prototype does not pull
        client.log("pull", pull)
        return cross_entropy(client.model.net.head(z), y) + self.lam * pull

    def clear(self, client: Client, ctx: Context) -> None:
        client.keep("sum", torch.zeros_like(client.model.prototypes["mean"]))
        client.keep("count", torch.zeros_like(client.model.prototypes["count"]))

    def collect(self, client: Client, x: Tensor, y: Tensor) -> None:
        self.note(client, client.model.net.body(x), y)

    def note(self, client: Client, rows: Tensor, y: Tensor) -> None:
        """Add rows `[batch, ...]` to the sums of their classes."""
        client["sum"].index_add_(0, y, rows.to(client["sum"].dtype))
        client["count"].index_add_(0, y, torch.ones_like(y, dtype=client["count"].dtype))

    def upload(self, client: Client, ctx: Context) -> State:
        count, received = client["count"].unsqueeze(1), client.model.prototypes["mean"]
        mean = torch.where(count > 0, client["sum"] / count.clamp(min=1), received)  # without images: no update
        return {"prototypes.mean": mean, "prototypes.count": client["count"]}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        # Weighted by the class's samples (Eq. 6), or the plain mean over clients that have the class. A class without
        # samples in this round keeps its prototype.
        counts = torch.stack([u.state["prototypes.count"] for u in uploads]).clamp(min=0)  # negative counts as none
        means = torch.stack([u.state["prototypes.mean"] for u in uploads])
        weights = counts if ctx.weighting == "samples" else (counts > 0).to(means.dtype)
        total = weights.sum(0)
        seen = total > 0
        mean = (weights.unsqueeze(2) * means).sum(0) / torch.where(seen, total, 1).unsqueeze(1)
        return {
            "prototypes.mean": torch.where(seen.unsqueeze(1), mean, server["prototypes.mean"]),
            "prototypes.count": torch.where(seen, counts.sum(0), server["prototypes.count"]),
        }

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        z = model.net.body(x)
        if self.inference == "head":
            return model.net.head(z)
        known = model.prototypes["count"] > 0
        near = -(z.unsqueeze(1) - model.prototypes["mean"]).square().sum(2)
        near = torch.where(known, near, near.amin(1, keepdim=True) - BELOW)
        return torch.where(known.any(), near, model.net.head(z))  # before the first prototypes: the head
