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
from fedprism.methods.base import Arch, Info, Me, Net, Now, Pass, State, Tensors, average, leaves, load
from fedprism.methods.collecting import Collecting, epsilon_greedy, of, owners


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

    models: int = setting(5, "models of others that a client is sent", positive, "1 or more")
    epsilon: float = setting(0.3, "chance that one of them is any, not the best", lambda v: 0 <= v <= 1, "0 to 1")
    decay: float = setting(0.05, "what this chance loses each round", lambda v: v >= 0, "0 or more")
    images: Literal["validation", "train"] = setting("validation", "a client's images on which models are compared")

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        model.previous = Tensors(model.state_dict())  # theta^(t-1): what it began its last training with
        model.register_buffer("liked", torch.zeros(len(info.clients) + 1))  # each client's weights, added up; rounds
        return model

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "body", "head")

    def collected(self, model: Net, now: Now) -> Collection[str]:
        return (*now.shared, "liked")

    def send(self, server: State, client: str | None, now: Now) -> State:
        clients, place = now.info.clients, now.info.place
        rounds = torch.stack([server[of(c, "liked")][-1] for c in clients]).tolist()
        there = [c for c, count in zip(clients, rounds, strict=True) if count > 0]  # who has ever sent a model
        if client is None:  # somebody new: the mean of all
            return mean([{n: server[of(c, n)] for n in now.shared} for c in there or clients])
        liked = server[of(client, "liked")].tolist() if client in clients else [0.0] * len(clients)
        scores = {c: liked[place[c]] for c in there if c != client}
        epsilon = self.epsilon - self.decay * now.round
        chosen = epsilon_greedy(scores, self.models, epsilon, now.info.seed, now.round, client)
        return {of(c, n): server[of(c, n)] for c in chosen for n in now.shared}

    def receive(self, me: Me, now: Now) -> None:
        if not now.new:  # what was sent is mixed in before training, since that needs images
            return
        super().receive(me, now)
        if now.client not in now.info.clients and (sent := owners(now)):  # who has come later has no model of its own
            load(me.model, mean([{n: now.down[of(c, n)] for n in now.shared} for c in sent]))

    def start(self, me: Me, now: Now) -> None:
        own, previous, sent = leaves.tensors(me.model), me.model.previous.tensors(), owners(now)
        others = [{n: now.down[of(c, n)] for n in now.shared} for c in sent]
        spare = min(self.models, len(now.info.clients) - 1) - len(sent)  # filled up: scratch keeps its shape
        models = [previous, own, *others, *[previous] * spare]
        floats = [n for n in now.shared if own[n].is_floating_point()]
        me.keep("models", {n: torch.stack([model[n] for model in models]) for n in floats})
        me.keep("losses", torch.zeros(len(models), device=now.device))

    def passes(self, me: Me, now: Now) -> list[Pass]:
        data = self.images if len(now.local.validation) else "train"
        return [Pass(self.measure, "measure", trains=(), data=data, end=self.mix), Pass(self.loss)]

    def adapt(self, me: Me, now: Now) -> list[Pass]:
        return [replace(each, scheduled=False) for each in self.passes(me, now)[: 2 if now.new else 1]]

    def measure(self, me: Me, x: Tensor, y: Tensor) -> None:
        for k, loss in enumerate(me["losses"]):
            scores = functional_call(me.model, {n: t[k] for n, t in me["models"].items()}, (x,))
            loss.add_(cross_entropy(scores, y, reduction="sum"))

    def mix(self, me: Me, now: Now) -> None:
        models, trained, sent = me["models"], me.parameters(), owners(now)
        squares = [(t - t[0]).square().flatten(1).sum(1) for n, t in models.items() if n in trained]
        far = torch.stack(squares).sum(0).sqrt()
        gain = torch.where(far > 0, (me["losses"][0] - me["losses"]) / far, 0.0)
        weights = gain.relu()
        weights[1] += weights.sum() == 0  # nothing helps: its own model stays
        weights /= weights.sum()
        mixed = {n: (t.movedim(0, -1) * weights).sum(-1) for n, t in models.items()}
        load(me.model, mixed)
        load(me.model.previous, {n.replace(".", "/"): t for n, t in mixed.items()})
        me.model.liked[[now.info.place[c] for c in sent]] += gain[2 : 2 + len(sent)]
        me.model.liked[-1] += 1
        me.log("own", weights[1])
        me.log("others", weights[2:].sum())


def mean(models: list[State]) -> State:
    """The plain mean of models."""
    return average(models, [1 / len(models)] * len(models))
