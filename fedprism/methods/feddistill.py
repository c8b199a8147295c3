"""FedDistill (Jeong et al., 2018): clients send their mean output per class and learn from those of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism import limits
from fedprism.config import setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Info, Net, Parts, Pass, State, Tensors, Upload
from fedprism.methods.fedproto import FedProto


@register
@dataclass(frozen=True)
class FedDistill(FedProto):
    """FedProto of outputs: the prototype of a class is the mean output of the other clients."""

    id = "feddistill"
    paper = (
        "Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation "
        "under Non-IID Private Data, 2018"
    )
    idea = "Clients send their mean output of each class and learn from the mean of the others beside the labels."
    shares = "the mean output of each class"
    group = "distillation"
    weighting = "uniform"
    reveals = (
        "the mean output of each class over the other clients, and of how many clients or images it is; "
        "the server: those of each client"
    )
    shows = {"pull": "cross-entropy of the outputs to the others' mean output of the class"}

    lam: float = setting(1.0, "weight of the distillation from the others' mean output", lambda v: v >= 0, "0 or more")
    average: Literal["probabilities", "logits"] = setting(
        "probabilities", "what is averaged: softmax outputs (paper), or logits, with the softmax of their mean"
    )
    inference: ClassVar[Literal["prototype", "head"]] = "head"  # type: ignore[misc]  # no setting here

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        what = f"the mean outputs of {info.classes:,} classes, at {len(info.clients)} clients and the server,"
        limits.check_memory(what, 4 * info.classes**2 * (2 * len(info.clients) + 2), "choose another method")
        means = {"mean": torch.zeros(info.classes, info.classes), "count": torch.zeros(info.classes)}
        return Parts(net=arch.model(seed), prototypes=Tensors(means))

    def start(self, client: Client, ctx: Context) -> None:
        self.clear(client, ctx)

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, trains=leaves.part(client.model, "net"))]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        scores, mean, logits = client.model.net(x), client.model.prototypes["mean"][y], self.average == "logits"
        self.note(client, scores.detach() if logits else scores.detach().softmax(1), y)
        target = mean.softmax(1) if logits else mean
        known = client.model.prototypes["count"][y] > 0  # a class that no other client has does not pull
        pull = -((target * scores.log_softmax(1)).sum(1) * known).mean()
        client.log("pull", pull)
        return cross_entropy(scores, y) + self.lam * pull

    # The server keeps each client's last upload and the sum of all. A client receives the sum without its own part.
    def server(self, model: Net, ctx: Context) -> State:
        first, many = super().server(model, ctx), len(ctx.info.clients)
        total = torch.zeros_like(first["prototypes.mean"], dtype=torch.float64)
        return {**first, "sum": total, **{f"of.{n}": t.new_zeros(many, *t.shape) for n, t in first.items()}}

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared)

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        if client_id not in ctx.info.clients:
            return super().send(server, client_id, ctx)
        weights, own = self.counted(server["of.prototypes.count"], ctx), ctx.info.index[client_id]
        rest = weights.sum(0) - weights[own]
        others = server["sum"] - weights[own].unsqueeze(1) * server["of.prototypes.mean"][own].double()
        mean = (others / torch.where(rest > 0, rest, 1).unsqueeze(1)).to(server["prototypes.mean"].dtype)
        return {"prototypes.mean": mean, "prototypes.count": rest.to(mean.dtype)}

    def counted(self, counts: Tensor, ctx: Context) -> Tensor:
        """The weight of each client in the mean of each class, `[clients, classes]`, in double precision."""
        return counts.double().clamp(min=0) if ctx.weighting == "samples" else (counts > 0).double()

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        last = {name: server[f"of.{name}"].clone() for name in uploads[0].state}
        for upload in uploads:
            if upload.client_id in ctx.info.clients:  # later clients have no entry
                for name, tensor in upload.state.items():
                    last[name][ctx.info.index[upload.client_id]] = tensor
        every = [Upload(c, 0, {n: t[i] for n, t in last.items()}) for i, c in enumerate(ctx.info.clients)]
        weights = self.counted(last["prototypes.count"], ctx).unsqueeze(2)
        total = (weights * last["prototypes.mean"].double()).sum(0)
        return {**super().aggregate(server, every, ctx), "sum": total, **{f"of.{n}": t for n, t in last.items()}}
