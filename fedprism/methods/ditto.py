"""Ditto (Li et al., ICML 2021): a personal model beside FedAvg's, pulled towards the received global one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import positive, setting
from fedprism.methods import register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Parts, Pass, leaves, squared_distance


@register
@dataclass(frozen=True)
class Ditto(Method):
    id = "ditto"
    paper = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    idea = "FedAvg trains a global model; each client also trains a personal one near it."
    shares = "the common model"
    stays = "a second, personal model"
    group = "two models"
    weighting = "uniform"
    has_global = True
    shows = {"pull": "squared distance of the personal model from the received one"}

    lam: float = setting(0.1, "weight of the pull: lam/2 |v - w_received|^2", lambda v: v >= 0, "0 or more")
    personal_epochs: int | None = setting(
        None, "epochs of the personal model; null: train.epochs", positive, "1 or more"
    )

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return Parts(common=arch.model(seed), personal=arch.model(seed))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "common")

    def start(self, client: Client, ctx: Context) -> None:
        client.keep("anchor", dict(client.model.common.named_parameters()))

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        common, personal = leaves.part(client.model, "common"), leaves.part(client.model, "personal")
        return [
            Pass(self.common_loss, "common", trains=common),
            Pass(self.loss, "personal", trains=personal, epochs=self.personal_epochs),
        ]

    def common_loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(client.model.common(x), y)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        pull = squared_distance(dict(client.model.personal.named_parameters()), client["anchor"])
        client.log("pull", pull)
        return cross_entropy(client.model.personal(x), y) + 0.5 * self.lam * pull

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.personal(x)

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.common(x)
