"""FedDistill (Jeong et al., 2018): mean outputs of each class travel, and a client learns from those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Info, Me, Net, Now, Parts, Pass, State, Tensors, Upload
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

    lam: float = setting(1.0, "weight of what the others' mean output teaches", lambda v: v >= 0, "0 or more")
    average: Literal["probabilities", "logits"] = setting(
        "probabilities", "what is averaged: outputs after the softmax (paper), or logits, of whose mean it is taken"
    )
    inference: ClassVar[Literal["prototype", "head"]] = "head"  # type: ignore[misc]  # no setting here

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        means = {"mean": torch.zeros(info.classes, info.classes), "count": torch.zeros(info.classes)}
        return Parts(net=arch.model(seed), prototypes=Tensors(means))

    def start(self, me: Me, now: Now) -> None:
        self.clear(me, now)

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, trains=leaves.part(me.model, "net"))]

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        scores, mean, logits = me.model.net(x), me.model.prototypes["mean"][y], self.average == "logits"
        self.note(me, scores.detach() if logits else scores.detach().softmax(1), y)
        target = mean.softmax(1) if logits else mean
        known = me.model.prototypes["count"][y] > 0  # a class that nobody else has does not pull
        pull = -((target * scores.log_softmax(1)).sum(1) * known).mean()
        me.log("pull", pull)
        return cross_entropy(scores, y) + self.lam * pull

    # The server keeps what each client sent last, and the sum of all; of that sum a client is sent the others' part.
    def server(self, model: Net, now: Now) -> State:
        first, many = super().server(model, now), len(now.info.clients)
        total = torch.zeros_like(first["prototypes.mean"], dtype=torch.float64)
        return {**first, "sum": total, **{f"of.{n}": t.new_zeros(many, *t.shape) for n, t in first.items()}}

    def send(self, server: State, client: str | None, now: Now) -> State:
        if client not in now.info.clients:
            return super().send(server, client, now)
        weights, own = self.counted(server["of.prototypes.count"], now), now.info.place[client]
        rest = weights.sum(0) - weights[own]
        others = server["sum"] - weights[own].unsqueeze(1) * server["of.prototypes.mean"][own].double()
        mean = (others / torch.where(rest > 0, rest, 1).unsqueeze(1)).to(server["prototypes.mean"].dtype)
        return {"prototypes.mean": mean, "prototypes.count": rest.to(mean.dtype)}

    def counted(self, counts: Tensor, now: Now) -> Tensor:
        """What each client weighs in the mean of each class, `[clients, classes]`, exactly."""
        return counts.double().clamp(min=0) if now.weighting == "samples" else (counts > 0).double()

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        last = {name: server[f"of.{name}"].clone() for name in uploads[0].state}
        for upload in uploads:
            if upload.client in now.info.clients:  # what a client sends that came later has no place here
                for name, tensor in upload.state.items():
                    last[name][now.info.place[upload.client]] = tensor
        every = [Upload(c, 0, {n: t[i] for n, t in last.items()}) for i, c in enumerate(now.info.clients)]
        weights = self.counted(last["prototypes.count"], now).unsqueeze(2)
        total = (weights * last["prototypes.mean"].double()).sum(0)
        return {**super().aggregate(server, every, now), "sum": total, **{f"of.{n}": t for n, t in last.items()}}
