"""SCAFFOLD (Karimireddy et al., ICML 2020): control variates on both sides correct each client's drift."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Draw, Info, Kind, Me, Method, Net, Now, Parts, Pass, State, Tensors, Upload
from fedprism.methods.states import average, load


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

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        return Parts(net=model, control=Tensors({n: torch.zeros_like(p) for n, p in model.named_parameters()}))

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "net")

    def server(self, model: Net, now: Now) -> State:
        return {
            **super().server(model, now),
            **{f"c.{n}": torch.zeros_like(p) for n, p in _travelling(model, now).items()},
        }

    def send(self, server: State, client: str | None, now: Now) -> State:
        return server

    def receive(self, me: Me, now: Now) -> None:
        load(me.model, {n: t for n, t in now.down.items() if n in now.shared})

    def start(self, me: Me, now: Now) -> None:
        net, own = _travelling(me.model, now), me.model.control.tensors()
        me.keep("received", net)
        me.keep("correction", {n: now.down[f"c.{n}"] - own[n] for n in net})

    def passes(self, me: Me, now: Now) -> list[Pass]:
        # Option II divides by (steps x learning rate), which holds for plain SGD alone.
        plain = {"name": "sgd", "momentum": 0.0}
        return [Pass(self.loss, optimizer=plain, trains=leaves.part(me.model, "net"), end=self.update_control)]

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        # The gradient of <w, c - c_k> is c - c_k: a step along g - c_k + c (Algorithm 1, line 10).
        net = dict(me.model.net.named_parameters())
        drift = torch.stack([(net[n] * c).sum() for n, c in me["correction"].items()]).sum()
        return cross_entropy(me.model.net(x), y) + drift

    def uploads(self, model: Net, now: Now) -> Mapping[str, Kind]:
        control: dict[str, Kind] = {f"c.{n}": "weights" for n in _travelling(model, now)}
        return {**super().uploads(model, now), **control}

    def update_control(self, me: Me, now: Now) -> None:
        # c_k+ = c_k - c + (w - y_k) / (S lr) (option II, line 12); what is sent is c_k+ - c_k.
        scale, own = 1 / (now.steps["train"] * now.lr), me.model.control.tensors()
        moved = {n: (me["received"][n] - y) * scale for n, y in _travelling(me.model, now).items()}
        me.keep("change", {n: t - me["correction"][n] - own[n] for n, t in moved.items()})
        for n, change in me["change"].items():
            own[n].add_(change)

    def upload(self, me: Me, now: Now) -> State:
        return {**super().upload(me, now), **{f"c.{n}": t for n, t in me["change"].items()}}

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        # c += sum(c_k+ - c_k) / N over all N clients; w moves to the mean of the y_k (lines 16 and 17; lr_g is
        # server.lr).
        change = average([u.state for u in uploads], [1 / len(now.info.clients)] * len(uploads))
        control = {n: t + change[n] for n, t in server.items() if n.startswith("c.")}
        return {**super().aggregate(server, uploads, now), **control}

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return model.net(x)


def _travelling(model: Net, now: Now) -> State:
    """The network's parameters that are shared, by their name in the network."""
    return {n: p for n, p in model.net.named_parameters() if f"net.{n}" in now.shared}
