"""FedDyn (Acar et al., ICLR 2021): a linear term per client, which learns its gradient, cancels its drift."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedprism.config import positive, setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Info, Mean, Method, Net, Pass, State, Tensors
from fedprism.methods.states import squared_distance


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
        None,
        "mean images per client, for the authors' alpha_k = alpha / (n_k / mean); null: alpha_k = alpha",
        positive,
        "above 0",
    )

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        model.gradient = Tensors({n: torch.zeros_like(p) for n, p in model.named_parameters()})
        return model

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "body", "head")

    def server(self, model: Net, ctx: Context) -> State:
        first = super().server(model, ctx)
        return {**first, **{f"h.{n}": torch.zeros_like(first[n]) for n in leaves.parameters(model) if n in first}}

    def start(self, client: Client, ctx: Context) -> None:
        client.keep("received", client.parameters(ctx.shared))
        if self.mean_samples is not None:  # in scratch: one captured step serves many clients
            share = len(ctx.local.train) / self.mean_samples
            client.keep("alpha", self.alpha / share)

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, end=self.update_gradient)]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        # CE - <g_k, theta> + alpha_k/2 |theta - w|^2 (Algorithm 1)
        own = client.parameters()
        pull = squared_distance(own, client["received"])
        along = torch.stack([(own[n] * client.model.gradient[n]).sum() for n in client["received"]]).sum()
        client.log("pull", pull)
        return super().loss(client, x, y) - along + 0.5 * self.alpha_of(client) * pull

    def alpha_of(self, client: Client) -> float | Tensor:
        alpha: float | Tensor = self.alpha if self.mean_samples is None else client["alpha"]
        return alpha

    def update_gradient(self, client: Client, ctx: Context) -> None:
        for n, theta in client.parameters(ctx.shared).items():
            client.model.gradient[n].sub_(self.alpha_of(client) * (theta - client["received"][n]))

    def totals(self, server: State, ctx: Context) -> Collection[str]:
        return [name.removeprefix("h.") for name in server if name.startswith("h.")]

    def combine(self, server: State, mean: Mean, ctx: Context) -> State:
        # h <- h - alpha/N sum(theta_k - w) over all N clients; w <- mean theta - h/alpha, of the participants.
        after, share = super().combine(server, mean, ctx), len(mean.clients) / len(ctx.info.clients)
        for n, part in mean.totals.items():
            after[f"h.{n}"] = server[f"h.{n}"] - self.alpha * (part - share * server[n])
            after[n] = after[n] - after[f"h.{n}"] / self.alpha
        return after
