"""FedDyn (Acar et al., ICLR 2021): a linear term on each client, which learns its gradient, cancels its drift."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedprism.config import positive, setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Info, Me, Method, Net, Now, Pass, State, Tensors, Upload
from fedprism.methods.states import average, squared_distance


@register
@dataclass(frozen=True)
class FedDyn(Method):
    id = "feddyn"
    paper = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"
    idea = "FedAvg with a pull towards the received model and a linear term that cancels each client's drift."
    stays = "the client's estimate of its own gradient"
    group = "regularised"
    reveals = "the average, and in it the sum of all earlier updates"
    weighting = "uniform"
    has_global = True
    shows = {"pull": "squared distance from the received weights"}

    alpha: float = setting(
        1.0, "weight of the pull, alpha/2 |w - w_received|^2, and of each round in the linear term", positive, "above 0"
    )
    mean_samples: float | None = setting(
        None, "mean images of a client: alpha_k = alpha / (n_k / mean), the authors'; null: alpha", positive, "above 0"
    )

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        model.gradient = Tensors({n: torch.zeros_like(p) for n, p in model.named_parameters()})
        return model

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "body", "head")

    def server(self, model: Net, now: Now) -> State:
        first = super().server(model, now)
        return {**first, **{f"h.{n}": torch.zeros_like(first[n]) for n in leaves.parameters(model) if n in first}}

    def start(self, me: Me, now: Now) -> None:
        me.keep("received", me.parameters(now.shared))
        if self.mean_samples is not None:  # on the device: a recorded step serves many clients
            share = len(now.local.train) / self.mean_samples
            me.keep("alpha", torch.full((), self.alpha / share, device=now.device))

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, end=self.update_gradient)]

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        # CE - <g_k, theta> + alpha_k/2 |theta - w|^2 (Algorithm 1)
        own = me.parameters()
        pull = squared_distance(own, me["received"])
        along = torch.stack([(own[n] * me.model.gradient[n]).sum() for n in me["received"]]).sum()
        me.log("pull", pull)
        return super().loss(me, x, y) - along + 0.5 * self.alpha_of(me) * pull

    def alpha_of(self, me: Me) -> float | Tensor:
        alpha: float | Tensor = self.alpha if self.mean_samples is None else me["alpha"]
        return alpha

    def update_gradient(self, me: Me, now: Now) -> None:
        for n, theta in me.parameters(now.shared).items():
            me.model.gradient[n].sub_(self.alpha_of(me) * (theta - me["received"][n]))

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        # h <- h - alpha/N sum(theta_k - w) over all N clients; w <- mean theta - h/alpha, of the participants.
        after, count = super().aggregate(server, uploads, now), len(now.info.clients)
        share, part = len(uploads) / count, average([u.state for u in uploads], [1 / count] * len(uploads))
        for name in [name for name in server if name.startswith("h.")]:
            n = name.removeprefix("h.")
            after[name] = server[name] - self.alpha * (part[n] - share * server[n])
            after[n] = after[n] - after[name] / self.alpha
        return after
