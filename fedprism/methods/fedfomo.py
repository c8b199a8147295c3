"""FedFomo (Zhang et al., ICLR 2021): each client mixes the models of others that lower its own validation loss."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedprism.config import positive, setting
from fedprism.methods import register
from fedprism.methods.base import Arch, Client, Context, Info, Net, Pass, State, Tensors, average, leaves, load
from fedprism.methods.collecting import Collecting, client_key, epsilon_greedy, owners


@register
@dataclass(frozen=True)
class FedFomo(Collecting):
    id = "fedfomo"
    paper = "Zhang et al., Personalized Federated Learning with First Order Model Optimization, ICLR 2021"
    idea = "Each client is sent a few models of others and goes on from a mixture of those that lower its loss."
    shares = "the model of each client, by itself"
    stays = "the mixture of models"
    group = "mixture"
    reveals = "the models of other clients, each by itself; the server: whose models help whom, too"
    weighting = "contribution"
    newcomers = "get a plain mean of clients' models; at the moment `adapted` they have trained one round"
    shows = {"own": "share of the client's own model in the mixture", "others": "share of those that it was sent"}

    models: int = setting(5, "other clients' models that a client receives", positive, "1 or more")
    epsilon: float = setting(
        0.3, "probability that one of them is random, not the best", lambda v: 0 <= v <= 1, "0 to 1"
    )
    decay: float = setting(0.05, "decrease of this probability per round", lambda v: v >= 0, "0 or more")
    images: Literal["validation", "train"] = setting("validation", "images of a client on which models are compared")

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        model.previous = Tensors(model.state_dict())  # theta^(t-1): the start of its last training
        # Sum of each client's weights; number of rounds.
        model.register_buffer("liked", torch.zeros(len(info.clients) + 1))
        return model

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "body", "head")

    def collected(self, model: Net, ctx: Context) -> Collection[str]:
        return (*ctx.shared, "liked")

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        clients, place = ctx.info.clients, ctx.info.index
        rounds = torch.stack([server[client_key(c, "liked")][-1] for c in clients]).tolist()
        there = [c for c, count in zip(clients, rounds, strict=True) if count > 0]  # clients that have sent a model
        if client_id is None:  # a new client: the mean of all
            return mean([{n: server[client_key(c, n)] for n in ctx.shared} for c in there or clients])
        liked = server[client_key(client_id, "liked")].tolist() if client_id in clients else [0.0] * len(clients)
        scores = {c: liked[place[c]] for c in there if c != client_id}
        epsilon = self.epsilon - self.decay * ctx.round
        chosen = epsilon_greedy(scores, self.models, epsilon, ctx.info.seed, ctx.round, client_id)
        return {client_key(c, n): server[client_key(c, n)] for c in chosen for n in ctx.shared}

    def receive(self, client: Client, ctx: Context) -> None:
        if not ctx.is_new:  # the download is mixed in before training, since that needs images
            return
        super().receive(client, ctx)
        if ctx.client_id not in ctx.info.clients and (sent := owners(ctx)):  # joined later: it has no model yet
            load(client.model, mean([{n: ctx.download[client_key(c, n)] for n in ctx.shared} for c in sent]))

    def start(self, client: Client, ctx: Context) -> None:
        own, previous, sent = leaves.tensors(client.model), client.model.previous.tensors(), owners(ctx)
        others = [{n: ctx.download[client_key(c, n)] for n in ctx.shared} for c in sent]
        spare = min(self.models, len(ctx.info.clients) - 1) - len(sent)  # padding: scratch keeps its shape
        models = [previous, own, *others, *[previous] * spare]
        floats = [n for n in ctx.shared if own[n].is_floating_point()]
        client.keep("models", {n: torch.stack([model[n] for model in models]) for n in floats})
        client.keep("losses", client.model.liked.new_zeros(len(models)))

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        data = self.images if len(ctx.local.validation) else "train"
        return [Pass(self.measure, "measure", trains=(), data=data, end=self.mix), Pass(self.loss)]

    def adapt(self, client: Client, ctx: Context) -> list[Pass]:
        return [replace(spec, scheduled=False) for spec in self.passes(client, ctx)[: 2 if ctx.is_new else 1]]

    def measure(self, client: Client, x: Tensor, y: Tensor) -> None:
        for k, loss in enumerate(client["losses"]):
            scores = functional_call(client.model, {n: t[k] for n, t in client["models"].items()}, (x,))
            loss.add_(cross_entropy(scores, y, reduction="sum"))

    def mix(self, client: Client, ctx: Context) -> None:
        models, trained, sent = client["models"], client.parameters(), owners(ctx)
        squares = [(t - t[0]).square().flatten(1).sum(1) for n, t in models.items() if n in trained]
        far = torch.stack(squares).sum(0).sqrt()
        gain = torch.where(far > 0, (client["losses"][0] - client["losses"]) / far, 0.0)
        weights = gain.relu()
        weights[1] += weights.sum() == 0  # no model helps: it keeps its own
        weights /= weights.sum()
        mixed = {n: (t.movedim(0, -1) * weights).sum(-1) for n, t in models.items()}
        load(client.model, mixed)
        load(client.model.previous, {n.replace(".", "/"): t for n, t in mixed.items()})
        client.model.liked[[ctx.info.index[c] for c in sent]] += gain[2 : 2 + len(sent)]
        client.model.liked[-1] += 1
        client.log("own", weights[1])
        client.log("others", weights[2:].sum())


def mean(models: list[State]) -> State:
    """The plain mean of models."""
    return average(models, [1 / len(models)] * len(models))
