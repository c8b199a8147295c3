"""FedCP (Zhang et al., KDD 2023): a policy splits each image's features between a global and a personal head."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fedprism import keys
from fedprism.config import setting
from fedprism.errors import ConfigError
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Output, Parts, Pass, State, Tensors
from fedprism.methods.states import average, gumbel, load
from fedprism.models import fresh


@register
@dataclass(frozen=True)
class FedCP(Method):
    id = "fedcp"
    paper = (
        "Zhang et al., FedCP: Separating Feature Information for Personalized Federated Learning via Conditional "
        "Policy, KDD 2023"
    )
    idea = "A policy network splits each image's features between a frozen global head and a personal one."
    shares = "the body, the policy network and the mean of the global and the personal head"
    stays = "the personal head, and batch-norm statistics"
    group = "split"
    bn = "local-stats"
    shows = {
        "pir": "personalisation identification ratio: the share of the features that the personal head gets",
        "s": "that share, of each feature and image",
        "mmd": "how far the features are from those of the received body",
    }

    lam: float = setting(1.0, "weight of the feature alignment; the paper's CNN: 5", lambda v: v >= 0, "0 or more")
    without: tuple[Literal["cs", "ss", "gfm", "cpn", "gh"], ...] = setting(
        (), "parts to leave out: client-specific or sample-specific input, frozen body and MMD, policy, global head"
    )
    gumbel: Literal["never", "training", "always"] = setting(
        "never", "Gumbel noise on the policy's logits; the authors' code: always, also at test time"
    )
    first_vector: Literal["head", "random"] = setting(
        "head", "client vector in a client's first round: of its initial head, or random as in the authors' code"
    )
    cpn_layers: int = setting(
        1, "fully connected layers of the policy network", lambda v: 1 <= v <= 16, "a whole number from 1 to 16"
    )
    cpn_norm: Literal["layer", "batch", "group"] = setting("layer", "normalisation in the policy network")
    cpn_activation: Literal["relu", "tanh", "sigmoid"] = setting("relu", "activation in the policy network")

    def __post_init__(self) -> None:
        if "gh" in self.without and "cpn" not in self.without:
            raise ConfigError(
                f"method.without is {list(self.without)}: the policy splits features between two heads, so the global "
                "head (gh) can only be left out together with it; write [cpn, gh]."
            )
        if "cpn" in self.without and {"cs", "ss"} & set(self.without):
            raise ConfigError(
                f"method.without is {list(self.without)}: cs and ss are inputs of the policy network, which cpn leaves "
                "out; drop cs and ss, or keep the network."
            )

    @property
    def blind(self) -> bool:
        """Whether the policy gets one random vector, which depends on neither client nor image."""
        return {"cs", "ss"} <= set(self.without)

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        net, width = arch.model(seed), arch.width
        parts: dict[str, nn.Module] = {"net": net}
        if "gh" not in self.without:
            parts["common"] = copy.deepcopy(net.head)
        if "cpn" not in self.without:
            parts["policy"] = fresh(lambda: self.policy(width), seed, "policy")
            draw = keys.generator(seed, "client vector", "" if self.blind else client_id or "")
            parts["client"] = Tensors({"v": normalize(torch.rand(width, generator=draw), dim=0)})
        return Parts(**parts)

    def policy(self, width: int) -> nn.Sequential:
        """Table 10: fully connected layers, the last with two logits per feature; a norm; an activation."""
        extra = [layer for _ in range(self.cpn_layers - 1) for layer in (nn.Linear(width, width), nn.ReLU())]
        out = 2 * width
        norms = {"layer": nn.LayerNorm(out), "batch": nn.BatchNorm1d(out), "group": nn.GroupNorm(2, out)}
        activations = {"relu": nn.ReLU(), "tanh": nn.Tanh(), "sigmoid": nn.Sigmoid()}
        return nn.Sequential(*extra, nn.Linear(width, out), norms[self.cpn_norm], activations[self.cpn_activation])

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "net.body", "policy", "common")

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared)

    def receive(self, client: Client, ctx: Context) -> None:
        model = client.model
        if "gh" not in self.without:
            load(model.common, leaves.tensors(model.net.head))  # local leaves (batch norm) are the client's own
        load(model, ctx.download)
        if "cpn" in self.without or self.blind or (self.first_vector == "random" and ctx.is_new):
            return
        # v_i: the personal head's weight [classes, width] summed over classes; for several layers, their product.
        last, *before = [part.weight for part in model.net.head.modules() if isinstance(part, nn.Linear)][::-1]
        model.client["v"].copy_(normalize(reduce(torch.matmul, before, last.sum(0)), dim=0))

    def start(self, client: Client, ctx: Context) -> None:
        if "gfm" not in self.without:
            client.freeze("body", client.model.net.body, training=True)

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, trains=leaves.part(client.model, "net", "policy"))]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z = client.model.net.body(x)  # Eq. 2
        scores, s = self.scores(client.model, z, client.draw if self.gumbel != "never" else None)
        loss = cross_entropy(scores, y)  # Eq. 5
        if s is not None:
            client.log("pir", s)
        if "gfm" not in self.without:
            with torch.no_grad():
                target = client["body"](x)
            apart = mmd(z, target)  # Eq. 7
            client.log("mmd", apart)
            loss = loss + self.lam * apart  # Eq. 8
        return loss

    def scores(self, model: Net, z: Tensor, draw: Draw | None) -> tuple[Tensor, Tensor | None]:
        """The sum of both heads' scores, each on its share of the features, and the personal share s."""
        if "gh" in self.without:
            return model.net.head(z), None
        if "cpn" in self.without:
            return model.common(z) + model.net.head(z), None
        v = model.client["v"].expand_as(z)
        c = v if "ss" in self.without else z if "cs" in self.without else v * z
        a = model.policy(c).view(len(z), 2, -1)
        if draw is not None:
            a = a + gumbel(draw("policy", *a.shape))
        r, s = a.softmax(dim=1).unbind(1)  # Eq. 3 and 4: r + s = 1
        return model.common(r * z) + model.net.head(s * z), s

    def upload(self, client: Client, ctx: Context) -> State:
        sent, own = super().upload(client, ctx), leaves.tensors(client.model.net.head)
        heads = {name: own[name.removeprefix("common.")] for name in sent if name.startswith("common.")}
        return {**sent, **average([{name: sent[name] for name in heads}, heads], [0.5, 0.5])}  # Eq. 6

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        scores, s = self.scores(model, model.net.body(x), draw if self.gumbel == "always" else None)
        return Output(scores) if s is None else Output(scores, means={"pir": s.mean(1)}, quantiles={"s": s})


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Squared maximum mean discrepancy of two sets of features `[batch, width]`: biased, four Gaussian kernels."""
    return _kernel(a, a).mean() + _kernel(b, b).mean() - 2 * _kernel(a, b).mean()


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    x, y = a.double(), b.double()  # |x|^2 + |y|^2 - 2 x y cancels: TF32 would lose most of it
    squares = x.square().sum(1)[:, None] + y.square().sum(1)[None] - 2 * x @ y.T
    return torch.stack([(-squares / (2 * q)).exp() for q in (10, 15, 20, 50)]).sum(0).to(a.dtype)
