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
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Parts, Pass, Tensors
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
        None, "width of an MLP between body and head (the original: 256); null: no MLP", positive, "1 or more"
    )

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        net, width, out = arch.model(seed), arch.width, self.projection
        if out is not None:
            mlp = fresh(lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out)), seed, "mlp")
            net.body.add_module("projection", mlp)
            net.head = fresh(lambda: replace(arch, features=out).hollow().head, seed, "")  # takes `out` features
        return Parts(net=net, previous=copy.deepcopy(net.body), own=Tensors({"trained": torch.tensor(False)}))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "net")

    def start(self, client: Client, ctx: Context) -> None:
        client.freeze("received", client.model.net.body)
        # Before a client's first training, the received model is its previous one. Chosen on the device.
        body, own = leaves.tensors(client.model.net.body), leaves.tensors(client.model.previous)
        load(client.model.previous, {n: torch.where(client.model.own["trained"], own[n], t) for n, t in body.items()})

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, trains=leaves.part(client.model, "net"), end=self.remember)]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z = client.model.net.body(x)
        with torch.no_grad():  # neither is trained, so both run in eval mode
            received, previous = client["received"](x), client.model.previous(x)
        term = contrast(z, received, previous, self.tau)
        client.log("contrast", term)
        return cross_entropy(client.model.net.head(z), y) + self.mu * term

    def remember(self, client: Client, ctx: Context) -> None:
        load(client.model.previous, leaves.tensors(client.model.net.body))
        client.model.own["trained"].fill_(True)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.net(x)


def contrast(z: Tensor, received: Tensor, previous: Tensor, tau: float) -> Tensor:
    """-log(e^a / (e^a + e^b)) = log(1 + e^(b - a)); a, b: cosines of z with the received and the previous, over tau."""
    exact = torch.promote_types(z.dtype, torch.float32)  # the difference of two cosines needs more than bfloat16
    near, far = (cosine_similarity(z.to(exact), other.to(exact)) for other in (received, previous))
    return softplus((far - near) / tau).mean()
