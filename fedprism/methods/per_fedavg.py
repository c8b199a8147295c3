"""Per-FedAvg (Fallah et al., NeurIPS 2020): FedAvg of a model that is good after one step on a client's data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedprism.config import positive, setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Client, Context, Method, Net, Pass, State
from fedprism.methods.states import steered


@register
@dataclass(frozen=True)
class PerFedAvg(Method):
    id = "per-fedavg"
    paper = (
        "Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning "
        "Approach, NeurIPS 2020"
    )
    idea = "The shared model is trained to be good after one step on a client's own data, which is made before a test."
    group = "fine-tuning"
    weighting = "uniform"
    moment = "adapted"
    newcomers = "get the model and make its steps before they are tested, as all clients do"
    has_global = True

    variant: Literal["first-order", "hessian-free"] = setting(
        "first-order", "the meta-gradient: without second derivatives, or with them by finite differences"
    )
    alpha: float = setting(
        0.05, "learning rate of the adaptation step, without schedule", lambda v: v >= 0, "0 or more"
    )
    delta: float = setting(1e-3, "with hessian-free: distance of both gradients from w", positive, "above 0")
    adapt_steps: int = setting(1, "adaptation steps before a test", positive, "1 or more")

    @property
    def parts(self) -> int:
        """Batches per step."""
        return 2 if self.variant == "first-order" else 3

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        size = ctx.train.batch_size
        return [Pass(self.loss, batch_size=self.parts * size, min_batch=self.parts * min(2, size))]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        least = min(2, client.config.batch_size)
        first, second, *third = [(x[rows], y[rows]) for rows in cut(len(x), self.parts, least)]
        w = client.parameters()
        _, inner = gradient(client.model, w, *first)
        loss, outer = gradient(client.model, moved(w, inner, -self.alpha), *second)
        for batch in third:  # H g' = (g(w + delta g') - g(w - delta g')) / (2 delta)
            ahead, behind = (gradient(client.model, moved(w, outer, d), *batch)[1] for d in (self.delta, -self.delta))
            share = self.alpha / (2 * self.delta)
            outer = {n: g - share * (ahead[n] - behind[n]) for n, g in outer.items()}
        return steered(loss, w, outer)

    def adapt(self, client: Client, ctx: Context) -> list[Pass]:
        plain = {"name": "sgd", "lr": self.alpha, "momentum": 0.0, "weight_decay": 0.0}
        steps, step = self.adapt_steps, None if ctx.train.clip is None else self.unclipped
        everything = leaves.everything(client.model)
        return [Pass(super().loss, "adapt", everything, steps, steps, optimizer=plain, scheduled=False, step=step)]

    def unclipped(self, client: Client, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """A step without clipping: `train.clip` applies to the meta-gradient."""
        optimizer.zero_grad(set_to_none=True)
        loss = super().loss(client, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        client.log("loss/adapt", loss)


def cut(rows: int, parts: int, least: int = 2) -> list[slice]:
    """Cut a batch into equal parts of at least two images, as batch norm needs; parts of a small batch overlap.

    >>> [[(part.start, part.stop) for part in cut(rows, 2)] for rows in (64, 7, 3, 2)]
    [[(0, 32), (32, 64)], [(0, 3), (3, 7)], [(0, 2), (1, 3)], [(0, 2), (0, 2)]]
    """
    begins = [max(0, min(rows * i // parts, rows - least)) for i in range(parts)]
    return [slice(begin, max(rows * (i + 1) // parts, begin + least)) for i, begin in enumerate(begins)]


def gradient(model: Net, weights: State, x: Tensor, y: Tensor) -> tuple[Tensor, State]:
    """The cross-entropy of a model at these weights, and its gradient there."""
    loss = cross_entropy(functional_call(model, weights, (x,)), y)
    found = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return loss, dict(zip(weights, found, strict=True))


def moved(weights: State, direction: State, rate: float) -> State:
    return {n: w + rate * direction[n] for n, w in weights.items()}
