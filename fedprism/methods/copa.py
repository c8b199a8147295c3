"""COPA (Wu and Gong, ICCV 2021): one averaged body that suits the heads of all clients, which predict together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from fedprism.config import setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Net, Output, Parts, Pass, Tensors
from fedprism.methods.collecting import Collecting, client_key


@register
@dataclass(frozen=True)
class COPA(Collecting):
    id = "copa"
    paper = (
        "Wu and Gong, Collaborative Optimization and Aggregation for Decentralized Domain Generalization and "
        "Adaptation, ICCV 2021"
    )
    idea = "The body is averaged and trained under the heads of all clients; these predict together."
    shares = "the body, and the head of each client, which all others are sent"
    stays = "nothing"
    group = "mixture"
    reveals = "the head of every client"
    weighting = "uniform"
    has_global = True
    shows = {"others": "loss under the other clients' heads, added up", "own": "the client's own head alone"}

    weight: float = setting(1.0, "weight of the loss under the other clients' heads", lambda v: v >= 0, "0 or more")
    ensemble: Literal["probabilities", "logits"] = setting(
        "probabilities", "which outputs of all heads are averaged to predict"
    )

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        net = arch.model(seed)
        heads = {leaf: torch.stack([tensor] * len(info.clients)) for leaf, tensor in net.head.state_dict().items()}
        model = Parts(net=net, heads=Tensors(heads))
        # Which heads vote, the client's own last. A later client is not in the list and votes only after training.
        votes = [client_id != other for other in info.clients] + [client_id in info.clients]
        model.register_buffer("votes", torch.tensor(votes, dtype=torch.get_default_dtype()))
        return model

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "net.body")

    def collected(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "net.head")

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.others(model, {*ctx.shared, *leaves.part(model, "heads")})  # all heads are sent in every round

    def receive(self, client: Client, ctx: Context) -> None:
        super().receive(client, ctx)
        for leaf, own in leaves.tensors(client.model.net.head).items():
            sent = [ctx.download.get(client_key(client_id, f"net.head.{leaf}"), own) for client_id in ctx.info.clients]
            torch.stack(sent, out=client.model.heads[leaf])

    def start(self, client: Client, ctx: Context) -> None:
        client.freeze("head", client.model.net.head)  # a head in eval mode, run with each client's weights

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, end=self.vote)]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z = client.model.net.body(x)
        scores = under(client["head"], client.model.heads, z)
        each = cross_entropy(scores.movedim(0, -1), y.unsqueeze(1).expand(-1, len(scores)), reduction="none").mean(0)
        others = torch.dot(each, client.model.votes[:-1])
        client.log("others", others)
        return cross_entropy(client.model.net.head(z), y) + self.weight * others

    def vote(self, client: Client, ctx: Context) -> None:
        client.model.votes[-1] = 1

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        z = model.net.body(x)
        own, votes = model.net.head(z), model.votes.view(-1, 1, 1) / model.votes.sum()
        scores = torch.cat([under(model.net.head, model.heads, z), own.unsqueeze(0)])
        if self.ensemble == "logits":
            return Output((votes * scores).sum(0), {"own": own})
        return Output((scores.log_softmax(2) + votes.log()).logsumexp(0), {"own": own})


def under(head: nn.Module, states: Tensors, z: Tensor) -> Tensor:
    """Scores `[heads, batch, classes]` of a head with each of these weights."""
    return vmap(lambda state: functional_call(head, state, (z,)))(states.tensors())
