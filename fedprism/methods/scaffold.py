"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates on both sides correct each client's drift."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.methods import leaves, register
from fedprism.methods.base import (
    Arch,
    Client,
    Context,
    Draw,
    Info,
    Mean,
    Method,
    Net,
    Parts,
    Pass,
    State,
    Tensors,
    UploadKind,
)
from fedprism.methods.states import load


@register
@dataclass(frozen=True)
class Scaffold(Method):
    id = "scaffold"
    paper = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    idea = "FedAvg whose gradients are corrected by the difference of the server's and the client's control variate."
    shares = "the model and the server's control variate"
    stays = "the client's control variate"
    group = "regularised"
    reveals = "the average, and the average of the control variates"
    weighting = "uniform"
    has_global = True

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        return Parts(net=model, control=Tensors({n: torch.zeros_like(p) for n, p in model.named_parameters()}))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "net")

    def server(self, model: Net, ctx: Context) -> State:
        control = {f"c.{n}": torch.zeros_like(p) for n, p in _travelling(model, ctx).items()}
        return {**super().server(model, ctx), **control}

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        return server

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, ctx.shared)

    def receive(self, client: Client, ctx: Context) -> None:
        load(client.model, {n: t for n, t in ctx.download.items() if n in ctx.shared})

    def start(self, client: Client, ctx: Context) -> None:
        net, own = _travelling(client.model, ctx), client.model.control.tensors()
        client.keep("received", net)
        client.keep("correction", {n: ctx.download[f"c.{n}"] - own[n] for n in net})

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        # Option II divides by (steps x learning rate), which is valid for plain SGD only.
        plain = {"name": "sgd", "momentum": 0.0}
        return [Pass(self.loss, optimizer=plain, trains=leaves.part(client.model, "net"), end=self.update_control)]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        # The gradient of <w, c - c_k> is c - c_k: a step along g - c_k + c (Algorithm 1, line 10).
        net = dict(client.model.net.named_parameters())
        drift = torch.stack([(net[n] * c).sum() for n, c in client["correction"].items()]).sum()
        return cross_entropy(client.model.net(x), y) + drift

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        control: dict[str, UploadKind] = {f"c.{n}": "buffers" for n in _travelling(model, ctx)}
        return {**super().uploads(model, ctx), **control}

    def update_control(self, client: Client, ctx: Context) -> None:
        # c_k+ = c_k - c + (w - y_k) / (S lr) (option II, line 12); what is sent is c_k+ - c_k.
        scale, own = 1 / (ctx.steps["train"] * ctx.lr), client.model.control.tensors()
        moved = {n: (client["received"][n] - y) * scale for n, y in _travelling(client.model, ctx).items()}
        client.keep("change", {n: t - client["correction"][n] - own[n] for n, t in moved.items()})
        for n, change in client["change"].items():
            own[n].add_(change)

    def upload(self, client: Client, ctx: Context) -> State:
        return {**super().upload(client, ctx), **{f"c.{n}": t for n, t in client["change"].items()}}

    def origin(self, ctx: Context) -> State:
        return {n: ctx.download[n] for n in ctx.shared}  # changes of control variates are sent as such

    def totals(self, server: State, ctx: Context) -> Collection[str]:
        return [n for n in server if n.startswith("c.")]

    def combine(self, server: State, mean: Mean, ctx: Context) -> State:
        # c += sum(c_k+ - c_k) / N over all N clients; w moves to the mean of the y_k (lines 16 and 17; lr_g is
        # server.lr).
        control = {n: server[n] + change for n, change in mean.totals.items()}
        return {**server, **mean.state, **control}

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.net(x)


def _travelling(model: Net, ctx: Context) -> State:
    """The network's shared parameters, by their names in the network."""
    return {n: p for n, p in model.net.named_parameters() if f"net.{n}" in ctx.shared}
