"""FedPHP (Li et al., ECML-PKDD 2021): a moving average of a client's local models teaches the next one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Parts, Pass, Tensors
from fedprism.methods.fedcp import mmd
from fedprism.methods.states import average, inherit


@register
@dataclass(frozen=True)
class FedPHP(Method):
    id = "fedphp"
    paper = "Li et al., FedPHP: Federated Personalization with Inherited Private Models, ECML-PKDD 2021"
    idea = "FedAvg beside a personal moving average of the client's local models, which teaches them features."
    shares = "the common model"
    stays = "the inherited private model (HPM)"
    group = "two models"
    has_global = True
    shows = {"transfer": "how far the local model is from what the personal one teaches"}

    mu: float = setting(0.9, "final share of the old HPM: mu t/T in round t of T", lambda v: 0 <= v <= 1, "0 to 1")
    lam: float = setting(0.1, "the loss is (1 - lam) CE + lam transfer", lambda v: 0 <= v < 1, "0 or more, below 1")
    transfer: Literal["mmd", "mmd-scaled", "soft-labels"] = setting(
        "mmd", "features by MMD with FedCP's kernels, or with kernels scaled by the mean distance; or soft labels"
    )
    inference: Literal["hpm", "local"] = setting("hpm", "model to test: the HPM, or the trained local model")

    def __post_init__(self) -> None:
        if self.inference == "local":  # before training it is the global model
            object.__setattr__(self, "moment", "trained")

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return Parts(common=arch.model(seed), personal=arch.model(seed), own=Tensors({"trained": torch.tensor(False)}))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "common")

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared if self.inference == "hpm" else ())

    def receive(self, client: Client, ctx: Context) -> None:
        super().receive(client, ctx)
        inherit(client.model, leaves.tensors(client.model.personal))

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, trains=leaves.part(client.model, "common"), end=self.update)]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        common, personal = client.model.common, client.model.personal  # the latter is not trained: it is in eval mode
        z, target = common.body(x), personal.body(x).detach()
        scores = common.head(z)
        if self.transfer == "soft-labels":
            apart = cross_entropy(scores, (personal.head(target).detach() / 4).softmax(1))
        else:
            apart = (mmd if self.transfer == "mmd" else scaled_mmd)(z.double(), target.double())
        client.log("transfer", apart)
        ce = cross_entropy(scores, y)
        return (1 - self.lam) * ce + self.lam * apart.to(ce.dtype)

    def update(self, client: Client, ctx: Context) -> None:
        old, new = leaves.tensors(client.model.personal), leaves.tensors(client.model.common)
        share = self.mu * ctx.round / ctx.rounds
        inherit(client.model, average([old, new], [share, 1 - share]))
        client.model.own["trained"].fill_(True)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.personal(x) if self.inference == "hpm" else model.common(x)

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.common(x)


def scaled_mmd(a: Tensor, b: Tensor) -> Tensor:
    """MMD of two sets of features with five kernels exp(-d / s), with s from 1/4 to 4 times the mean distance d."""
    rows, half = torch.cat([a, b]), len(a)
    d = rows.square().sum(1)[:, None] + rows.square().sum(1) - 2 * rows @ rows.T
    mean = (d.detach().sum() / (len(rows) * (len(rows) - 1))).clamp(min=1e-8)
    k = torch.stack([(-d / (mean * 2.0**i)).exp() for i in range(-2, 3)]).sum(0)
    return k[:half, :half].mean() + k[half:, half:].mean() - 2 * k[:half, half:].mean()
