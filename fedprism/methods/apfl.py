"""APFL (Deng et al., 2020): each client is served by a mixture of the global model and one of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedprism.config import setting, share
from fedprism.methods import register
from fedprism.methods.base import Arch, Draw, Info, Me, Method, Net, Now, Parts, Pass, State, Tensors, leaves
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

    alpha: float = setting(0.5, "share of the personal model in the mixture, at first", share, "0 to 1")
    adaptive: bool = setting(True, "learn that share, for each client; false: it stays")

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        own = Tensors({"alpha": torch.tensor(self.alpha), "trained": torch.tensor(False)})
        return Parts(common=arch.model(seed), personal=arch.model(seed), own=own)

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "common")

    def receive(self, me: Me, now: Now) -> None:
        super().receive(me, now)
        alone = self.alpha == 1 and not self.adaptive and now.client not in now.info.later  # as Local
        if not alone:  # until it trains: half of the mixture would be a model that nobody has trained
            inherit(me.model, leaves.tensors(me.model.personal))

    def start(self, me: Me, now: Now) -> None:
        me.keep("lr", torch.full((), now.lr, device=now.device))  # of alpha: 0 after its step

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, end=self.note)]

    def note(self, me: Me, now: Now) -> None:
        me.model.own["trained"].fill_(True)

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        common, personal, held = me.model.common, me.model.personal, me.model.own["alpha"]
        a, v = held.clone(), dict(personal.named_parameters())
        w = {n: p.detach() for n, p in common.named_parameters()}
        bar = mixed(v, w, a)
        loss = cross_entropy(functional_call(personal, bar, (x,)), y)
        slopes = dict(zip(bar, torch.autograd.grad(loss, list(bar.values()), materialize_grads=True), strict=True))
        if self.adaptive:  # d loss / d alpha = <v - w, gradient at the mixture>; once a round, while w is as received
            turn = torch.stack([((v[n].detach() - w[n]) * slope).sum() for n, slope in slopes.items()]).sum()
            held.copy_((a - me["lr"] * turn).clamp(0, 1))
            me["lr"].zero_()
        me.log("alpha", held)
        return cross_entropy(common(x), y) + steered(loss, bar, slopes)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        both = mixed(leaves.tensors(model.personal), leaves.tensors(model.common), model.own["alpha"])
        return functional_call(model.personal, both, (x,))

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.common(x)


def mixed(v: State, w: State, a: Tensor) -> State:
    """a v + (1 - a) w; counters, which are whole numbers, are v's."""
    return {n: a * t + (1 - a) * w[n] if t.is_floating_point() else t for n, t in v.items()}
