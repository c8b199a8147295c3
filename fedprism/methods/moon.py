"""MOON (Li et al., CVPR 2021): FedAvg whose features stay near the received model's, away from the last local one's."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, softplus

from fedprism.config import positive, setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Draw, Info, Me, Method, Net, Now, Parts, Pass, Tensors
from fedprism.methods.states import load
from fedprism.models import fresh


@register
@dataclass(frozen=True)
class MOON(Method):
    id = "moon"
    paper = "Li et al., Model-Contrastive Federated Learning, CVPR 2021"
    idea = "FedAvg whose features are drawn to those of the received model and pushed from the last local one's."
    stays = "the body of the last local model"
    group = "regularised"
    has_global = True
    shows = {"contrast": "the contrastive term: log 2 where received and last local model give the same features"}

    mu: float = setting(1.0, "weight of the contrastive term", lambda v: v >= 0, "0 or more")
    tau: float = setting(0.5, "temperature of the contrastive term", positive, "above 0")
    projection: int | None = setting(
        None, "width of an MLP between body and head, the original's: 256; null: none", positive, "1 or more"
    )

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        net, width, out = arch.model(seed), arch.width, self.projection
        if out is not None:
            mlp = fresh(lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out)), seed, "mlp")
            net.body.add_module("projection", mlp)
            net.head = fresh(lambda: replace(arch, features=out).hollow().head, seed, "")  # takes `out` features
        return Parts(net=net, previous=copy.deepcopy(net.body), own=Tensors({"trained": torch.tensor(False)}))

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "net")

    def start(self, me: Me, now: Now) -> None:
        me.freeze("received", me.model.net.body)
        # Before a client's first training the received model is its previous one; chosen on the device.
        body, own = leaves.tensors(me.model.net.body), leaves.tensors(me.model.previous)
        load(me.model.previous, {n: torch.where(me.model.own["trained"], own[n], t) for n, t in body.items()})

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, trains=leaves.part(me.model, "net"), end=self.remember)]

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        z = me.model.net.body(x)
        with torch.no_grad():  # neither is trained, so both run in eval mode
            received, previous = me["received"](x), me.model.previous(x)
        term = contrast(z, received, previous, self.tau)
        me.log("contrast", term)
        return cross_entropy(me.model.net.head(z), y) + self.mu * term

    def remember(self, me: Me, now: Now) -> None:
        load(me.model.previous, leaves.tensors(me.model.net.body))
        me.model.own["trained"].fill_(True)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.net(x)


def contrast(z: Tensor, received: Tensor, previous: Tensor, tau: float) -> Tensor:
    """-log(e^a / (e^a + e^b)) = log(1 + e^(b - a)); a, b: cosines of z with the received and the previous, over tau."""
    exact = torch.promote_types(z.dtype, torch.float32)  # what is left of a difference of two cosines in bfloat16?
    near, far = (cosine_similarity(z.to(exact), other.to(exact)) for other in (received, previous))
    return softplus((far - near) / tau).mean()
