"""FedProx (Li et al., MLSys 2020): FedAvg with a pull towards the received weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedprism.config import setting
from fedprism.methods import register
from fedprism.methods.base import Client, Context, Method, squared_distance


@register
@dataclass(frozen=True)
class FedProx(Method):
    id = "fedprox"
    paper = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    idea = "FedAvg, with a proximal term that keeps each client near the received model."
    group = "regularised"
    has_global = True
    shows = {"pull": "squared distance from the received weights"}

    mu: float = setting(0.1, "weight of the pull: mu/2 |w - w_received|^2 (squared)", lambda v: v >= 0, "0 or more")

    def start(self, client: Client, ctx: Context) -> None:
        client.keep("anchor", client.parameters(ctx.shared))

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        pull = squared_distance(client.parameters(), client["anchor"])
        client.log("pull", pull)
        return super().loss(client, x, y) + 0.5 * self.mu * pull
