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
from fedprism.methods.base import Arch, Draw, Info, Me, Net, Now, Parts, Pass, Seen, Tensors
from fedprism.methods.collecting import Collecting, of


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
    ensemble: Literal["probabilities", "logits"] = setting("probabilities", "what of all heads is averaged to predict")

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        net = arch.model(seed)
        heads = {leaf: torch.stack([tensor] * len(info.clients)) for leaf, tensor in net.head.state_dict().items()}
        model = Parts(net=net, heads=Tensors(heads))
        # Whose heads count, its own last; who came later is not among them, and has none before it has trained.
        votes = [client != other for other in info.clients] + [client in info.clients]
        model.register_buffer("votes", torch.tensor(votes, dtype=torch.get_default_dtype()))
        return model

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "net.body")

    def collected(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "net.head")

    def receive(self, me: Me, now: Now) -> None:
        super().receive(me, now)
        for leaf, own in leaves.tensors(me.model.net.head).items():
            sent = [now.down.get(of(client, f"net.head.{leaf}"), own) for client in now.info.clients]
            torch.stack(sent, out=me.model.heads[leaf])

    def start(self, me: Me, now: Now) -> None:
        me.freeze("head", me.model.net.head)  # the layers of a head in eval mode, for everybody's weights

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, end=self.vote)]

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        z = me.model.net.body(x)
        scores = under(me["head"], me.model.heads, z)
        each = cross_entropy(scores.movedim(0, -1), y.unsqueeze(1).expand(-1, len(scores)), reduction="none").mean(0)
        others = torch.dot(each, me.model.votes[:-1])
        me.log("others", others)
        return cross_entropy(me.model.net.head(z), y) + self.weight * others

    def vote(self, me: Me, now: Now) -> None:
        me.model.votes[-1] = 1

    def examine(self, model: Net, x: Tensor, draw: Draw) -> Seen:
        z = model.net.body(x)
        own, votes = model.net.head(z), model.votes.view(-1, 1, 1) / model.votes.sum()
        scores = torch.cat([under(model.net.head, model.heads, z), own.unsqueeze(0)])
        if self.ensemble == "logits":
            return Seen((votes * scores).sum(0), {"own": own})
        return Seen((scores.log_softmax(2) + votes.log()).logsumexp(0), {"own": own})


def under(head: nn.Module, states: Tensors, z: Tensor) -> Tensor:
    """Scores `[heads, batch, classes]` of a head's layers with each of these weights."""
    return vmap(lambda state: functional_call(head, state, (z,)))(states.tensors())
