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
from fedprism.methods.base import Arch, Draw, Info, Me, Method, Net, Now, Parts, Pass, State, Tensors, leaves
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
    personal_lr: float = setting(0.01, "learning rate of these steps, which are plain SGD", positive, "above 0")

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        return Parts(common=arch.model(seed), personal=arch.model(seed), own=Tensors({"trained": torch.tensor(False)}))

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "common")

    def server(self, model: Net, now: Now) -> State:
        if now.train.optimizer.lr * self.lam >= 1:
            raise ConfigError(
                "pfedme moves the common model by train.optimizer.lr x method.lam of its way to the personal one. This "
                f"must be below 1: set lr below {1 / self.lam:.3g}, or lam below {1 / now.train.optimizer.lr:.3g}."
            )
        return super().server(model, now)

    def receive(self, me: Me, now: Now) -> None:
        super().receive(me, now)
        inherit(me.model, leaves.tensors(me.model.personal))  # who has not trained yet has no personal model

    def start(self, me: Me, now: Now) -> None:
        # Not in `receive`: what is tested there is the personal model of the last training.
        load(me.model.personal, dict(me.model.common.named_parameters()))
        me.keep("share", torch.full((), now.lr * self.lam, device=now.device))

    def passes(self, me: Me, now: Now) -> list[Pass]:
        plain, personal = {"name": "sgd", "lr": self.personal_lr, "momentum": 0.0}, leaves.part(me.model, "personal")
        return [Pass(self.loss, trains=personal, optimizer=plain, step=self.envelope, end=self.finish)]

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        pull = squared_distance(dict(me.model.personal.named_parameters()), dict(me.model.common.named_parameters()))
        me.log("pull", pull)
        return cross_entropy(me.model.personal(x), y) + 0.5 * self.lam * pull

    def envelope(self, me: Me, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(self.inner_steps):
            optimizer.zero_grad(set_to_none=True)
            loss = self.loss(me, x, y)
            me.backward(loss)
            if me.config.clip is not None:
                nn.utils.clip_grad_norm_(me.model.personal.parameters(), me.config.clip)
            optimizer.step()
            me.log("loss/train", loss)
        for w, theta in zip(me.model.common.parameters(), me.model.personal.parameters(), strict=True):
            w.lerp_(theta.detach(), me["share"])  # w - lr lam (w - theta)

    def finish(self, me: Me, now: Now) -> None:
        # The common model makes no forward pass in training: what is sent of batch norm's statistics is the personal's.
        own, trained = leaves.tensors(me.model.personal), set(leaves.parameters(me.model.personal))
        load(me.model.common, {name: tensor for name, tensor in own.items() if name not in trained})
        me.model.own["trained"].fill_(True)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.personal(x)

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.common(x)
