"""pFedMe (Dinh et al., NeurIPS 2020): each step solves for a personal model near the common one, which then follows it.

The client minimises the Moreau envelope of its loss, min over theta of f(theta) + lam/2 |theta - w|^2, whose gradient
with respect to w is lam (w - theta).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import positive, setting
from fedprism.errors import ConfigError
from fedprism.methods import register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Parts, Pass, State, Tensors, leaves
from fedprism.methods.states import inherit, load, squared_distance


@register
@dataclass(frozen=True)
class PFedMe(Method):
    id = "pfedme"
    paper = "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"
    idea = "A personal model is fitted to each batch near the common one, and the common one steps towards it."
    shares = "the common model"
    stays = "a second, personal model"
    group = "two models"
    weighting = "uniform"
    broadcast = "all"
    trainers = "all"
    has_global = True
    shows = {"pull": "squared distance of the personal model from the client's common one"}

    lam: float = setting(15.0, "weight of the pull: lam/2 |theta - w|^2", lambda v: v >= 0, "0 or more")
    inner_steps: int = setting(5, "steps of the personal model on each batch", positive, "1 or more")
    personal_lr: float = setting(0.01, "learning rate of these plain SGD steps", positive, "above 0")

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return Parts(common=arch.model(seed), personal=arch.model(seed), own=Tensors({"trained": torch.tensor(False)}))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "common")

    def server(self, model: Net, ctx: Context) -> State:
        if ctx.train.optimizer.lr * self.lam >= 1:
            raise ConfigError(
                "pfedme moves the common model by train.optimizer.lr x method.lam of its way to the personal one. This "
                f"must be below 1: set lr below {1 / self.lam:.3g}, or lam below {1 / ctx.train.optimizer.lr:.3g}."
            )
        return super().server(model, ctx)

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared)

    def receive(self, client: Client, ctx: Context) -> None:
        super().receive(client, ctx)
        # Before its first training a client has no personal model.
        inherit(client.model, leaves.tensors(client.model.personal))

    def start(self, client: Client, ctx: Context) -> None:
        # Not in `receive`: that moment tests the personal model of the last training.
        load(client.model.personal, dict(client.model.common.named_parameters()))
        client.keep("share", ctx.lr * self.lam)

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        plain = {"name": "sgd", "lr": self.personal_lr, "momentum": 0.0}
        personal = leaves.part(client.model, "personal")
        return [Pass(self.loss, trains=personal, optimizer=plain, step=self.envelope, end=self.finish)]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        model = client.model
        pull = squared_distance(dict(model.personal.named_parameters()), dict(model.common.named_parameters()))
        client.log("pull", pull)
        return cross_entropy(model.personal(x), y) + 0.5 * self.lam * pull

    def envelope(self, client: Client, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(self.inner_steps):
            optimizer.zero_grad(set_to_none=True)
            loss = self.loss(client, x, y)
            loss.backward()  # type: ignore[no-untyped-call]
            if client.config.clip is not None:
                nn.utils.clip_grad_norm_(client.model.personal.parameters(), client.config.clip)
            optimizer.step()
            client.log("loss/train", loss)
        for w, theta in zip(client.model.common.parameters(), client.model.personal.parameters(), strict=True):
            w.lerp_(theta.detach(), client["share"])  # w - lr lam (w - theta)

    def finish(self, client: Client, ctx: Context) -> None:
        # The common model makes no forward pass in training, so it takes batch norm's statistics from the personal one.
        own, trained = leaves.tensors(client.model.personal), set(leaves.parameters(client.model.personal))
        load(client.model.common, {name: tensor for name, tensor in own.items() if name not in trained})
        client.model.own["trained"].fill_(True)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.personal(x)

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.common(x)
