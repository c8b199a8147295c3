"""FedRoD (Chen and Chao, ICLR 2022): a generic head with a balanced loss, and a personal head on top of it."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import setting
from fedprism.methods import register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Parts, leaves


@register
@dataclass(frozen=True)
class FedRoD(Method):
    id = "fedrod"
    paper = "Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022"
    idea = "Body and generic head are shared and trained with a balanced softmax; a personal head corrects it at home."
    shares = "the body and the generic head"
    stays = "the personal head"
    group = "two models"
    has_global = True

    gamma: float = setting(
        1.0, "strength of the balanced softmax: logits + gamma log n_c", lambda v: v >= 0, "0 or more"
    )

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        generic = arch.model(seed)
        return Parts(generic=generic, personal=copy.deepcopy(generic.head))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "generic")

    def start(self, client: Client, ctx: Context) -> None:
        # gamma log n_c: a class that the client lacks gets -inf, so that its probability is zero.
        counts = ctx.local.class_counts().float()
        absent = float("-inf") if self.gamma > 0 else 0.0
        client.keep("prior", torch.where(counts > 0, self.gamma * counts.clamp(min=1).log(), absent))

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z = client.model.generic.body(x)
        generic = client.model.generic.head(z)
        # The personal head learns from detached features and logits, so that it does not change shared weights.
        personal = generic.detach() + client.model.personal(z.detach())
        return cross_entropy(generic + client["prior"], y) + cross_entropy(personal, y)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        z = model.generic.body(x)
        return model.generic.head(z) + model.personal(z)

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.generic(x)
