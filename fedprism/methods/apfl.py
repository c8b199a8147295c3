"""APFL (Deng et al., 2020): each client uses a mixture of the global model and its own model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedprism.config import setting, share
from fedprism.methods import register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Parts, Pass, State, Tensors, leaves
from fedprism.methods.states import inherit, steered


@register
@dataclass(frozen=True)
class APFL(Method):
    id = "apfl"
    paper = "Deng et al., Adaptive Personalized Federated Learning, arXiv 2003.13461, 2020"
    idea = "FedAvg trains a global model; each client also trains a model that is mixed with it, in a share it learns."
    shares = "the common model"
    stays = "a second, personal model and the share of it in the mixture"
    group = "mixture"
    weighting = "uniform"
    has_global = True
    shows = {"alpha": "share of the personal model in the mixture"}

    alpha: float = setting(0.5, "initial share of the personal model in the mixture", share, "0 to 1")
    adaptive: bool = setting(True, "learn this share, per client; false: it is fixed")

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        own = Tensors({"alpha": torch.tensor(self.alpha), "trained": torch.tensor(False)})
        return Parts(common=arch.model(seed), personal=arch.model(seed), own=own)

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "common")

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared)

    def receive(self, client: Client, ctx: Context) -> None:
        super().receive(client, ctx)
        alone = self.alpha == 1 and not self.adaptive and ctx.client_id not in ctx.info.later  # as Local
        if not alone:  # before its first training: half of the mixture would be an untrained model
            inherit(client.model, leaves.tensors(client.model.personal))

    def start(self, client: Client, ctx: Context) -> None:
        client.keep("lr", ctx.lr)  # learning rate of alpha: 0 after its step

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, end=self.note)]

    def note(self, client: Client, ctx: Context) -> None:
        client.model.own["trained"].fill_(True)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        common, personal, alpha = client.model.common, client.model.personal, client.model.own["alpha"]
        a, v = alpha.clone(), dict(personal.named_parameters())
        w = {n: p.detach() for n, p in common.named_parameters()}
        bar = mixed(v, w, a)
        loss = cross_entropy(functional_call(personal, bar, (x,)), y)
        slopes = dict(zip(bar, torch.autograd.grad(loss, list(bar.values()), materialize_grads=True), strict=True))
        if self.adaptive:  # d loss / d alpha = <v - w, gradient at the mixture>; once per round, while w is as received
            turn = torch.stack([((v[n].detach() - w[n]) * slope).sum() for n, slope in slopes.items()]).sum()
            alpha.copy_((a - client["lr"] * turn).clamp(0, 1))
            client["lr"].zero_()
        client.log("alpha", alpha)
        return cross_entropy(common(x), y) + steered(loss, bar, slopes)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        both = mixed(leaves.tensors(model.personal), leaves.tensors(model.common), model.own["alpha"])
        return functional_call(model.personal, both, (x,))

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.common(x)


def mixed(v: State, w: State, a: Tensor) -> State:
    """a v + (1 - a) w; integer counters are those of v."""
    return {n: a * t + (1 - a) * w[n] if t.is_floating_point() else t for n, t in v.items()}
