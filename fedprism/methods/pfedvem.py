"""pFedVEM (Zhu et al., CVPR 2023): Gaussian heads around a common one, in which confident clients weigh more."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, softplus

from fedprism.config import positive, setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Pass, State, Upload, UploadKind
from fedprism.methods.states import average, load


@register
@dataclass(frozen=True)
class PFedVEM(Method):
    id = "pfedvem"
    paper = (
        "Zhu et al., Confidence-aware Personalized Federated Learning via Variational Expectation Maximization, "
        "CVPR 2023"
    )
    idea = "Body shared; heads are Gaussian and near a common one, to which confident clients add more."
    shares = "the body, the mean of the head and one number for its confidence"
    stays = "the Gaussian head: a mean and a deviation of every weight"
    group = "split"
    reveals = "nothing beyond the average; the server: how sure each client is of its head"
    trainers = broadcast = "all"
    moment = "trained"
    has_global = True
    shows = {"kl": "divergence of the head from its prior", "rho": "the prior's deviation; small is confident"}

    samples: int = setting(5, "heads drawn per step", positive, "1 or more")
    sigma: float = setting(0.1, "initial deviation of the head's weights", lambda v: 0 < v < 100, "above 0, below 100")
    head_steps: int = setting(10, "head steps per round, each on all images", positive, "1 or more")
    head_batch: int = setting(1024, "maximum images of such a step, a sample of all", positive, "1 or more")
    head_lr: float | None = setting(None, "learning rate of the head; null: that of the body", positive, "above 0")
    kl: float = setting(1.0, "weight of the divergence from the prior", lambda v: v >= 0, "0 or more")

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        mu = flat(model.head).detach()
        model.register_parameter("spread", nn.Parameter(torch.full_like(mu, self.sigma * math.log(math.expm1(1)))))
        model.register_buffer("common", mu)
        model.register_buffer("rho2", mu.new_zeros(()))  # 0: the client has not trained yet
        return model

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return set(leaves.everything(model)) - {"spread", "rho2", *(f"head.{name}" for name in gaussian(model.head))}

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        return {**super().uploads(model, ctx), "common": "weights", "rho2": "scalar"}

    def deviation(self, model: Net) -> Tensor:
        """Deviation of each head weight: a softplus scaled by sigma, so that small deviations train as fast."""
        return self.sigma * softplus(model.spread / self.sigma)

    def log_deviation(self, model: Net) -> Tensor:
        """Its logarithm, also where it underflows: there softplus is an exponential, which keeps the KL's slope."""
        x, tiny = model.spread / self.sigma, torch.finfo(model.spread.dtype).tiny
        return torch.where(x < -15, x + math.log(self.sigma), self.deviation(model).clamp(min=tiny).log())

    def squares(self, model: Net) -> Tensor:
        """sigma^2 + (mu - m)^2 of each head weight."""
        return self.deviation(model).square() + (flat(model.head) - model.common).square()

    def receive(self, client: Client, ctx: Context) -> None:
        load(client.model, ctx.download)
        mu = torch.where(client.model.rho2 > 0, flat(client.model.head), client.model.common)
        load(client.model.head, named(client.model.head, mu))

    def start(self, client: Client, ctx: Context) -> None:
        client.model.rho2.copy_(self.squares(client.model).mean().clamp(min=1e-12))  # the M-step
        client.log("rho", client.model.rho2.sqrt())
        client.keep("images", float(len(ctx.local.train)))

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        body, most = set(self.shared(client.model, ctx)) - {"common"}, self.head_steps
        head, rate = set(leaves.parameters(client.model)) - body, {} if self.head_lr is None else {"lr": self.head_lr}
        full = Pass(self.e_step, "head", head, epochs=most, steps=most, batch_size=self.head_batch, optimizer=rate)
        return [full, Pass(self.loss, "body", body)]

    def e_step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        rho2 = client.model.rho2
        kl = 0.5 * (self.squares(client.model) / rho2 - 1 + rho2.log() - 2 * self.log_deviation(client.model)).sum()
        client.log("kl", kl)
        return self.loss(client, x, y) + (self.kl * kl / client["images"] if self.kl else 0.0)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z, head, mu = client.model.body(x), client.model.head, flat(client.model.head)
        drawn = mu + self.deviation(client.model) * normal(client.draw("head", self.samples, len(mu)))
        scores = [functional_call(head, named(head, weights), z) for weights in drawn]
        return torch.stack([cross_entropy(each, y) for each in scores]).mean()

    def upload(self, client: Client, ctx: Context) -> State:
        return {**super().upload(client, ctx), "common": flat(client.model.head), "rho2": client.model.rho2}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        known = torch.stack([u.state["rho2"] for u in uploads]).tolist()
        tiny = torch.finfo(torch.float32).tiny
        sure = [1 / rho2 if rho2 >= tiny else 0.0 for rho2 in known]  # an invalid variance gets no weight
        rest = [replace(u, state={name: u.state[name] for name in server}) for u in uploads]
        after = {**super().aggregate(server, rest, ctx), "common": server["common"]}
        if not any(sure):
            return after
        return after | average([{"common": u.state["common"]} for u in uploads], [each / sum(sure) for each in sure])

    def predict_global(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        scores: Tensor = functional_call(model.head, named(model.head, model.common), model.body(x))
        return scores


def gaussian(head: nn.Module) -> State:
    """The parameters of the head's fully connected layers; its norm layers are not Gaussian."""
    layers = {name for name, part in head.named_modules() if isinstance(part, nn.Linear)}
    return {name: p for name, p in head.named_parameters() if name.rpartition(".")[0] in layers}


def flat(head: nn.Module) -> Tensor:
    return torch.cat([p.flatten() for p in gaussian(head).values()])


def named(head: nn.Module, weights: Tensor) -> State:
    """The parameters in a flat vector, by name."""
    own = gaussian(head)
    pieces = torch.split(weights, [p.numel() for p in own.values()])
    return {name: piece.view_as(p) for (name, p), piece in zip(own.items(), pieces, strict=True)}


def normal(uniform: Tensor) -> Tensor:
    """Standard normal noise from uniform noise in [0, 1), finite at both ends."""
    return math.sqrt(2) * torch.erfinv(2 * uniform.clamp(2**-25, 1 - 2**-24) - 1)
