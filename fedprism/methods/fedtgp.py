"""FedTGP (Zhang et al., AAAI 2024): FedProto whose class prototypes are trained on the server, with a margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot

from fedprism.config import positive, setting
from fedprism.methods import register
from fedprism.methods.base import Context, Net, State, Upload
from fedprism.methods.fedproto import FedProto
from fedprism.models import fresh

PREFIX = "generator."


@register
@dataclass(frozen=True)
class FedTGP(FedProto):
    id = "fedtgp"
    paper = (
        "Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data "
        "and Model Heterogeneity in Federated Learning, AAAI 2024"
    )
    idea = "FedProto whose prototypes the server trains: near those of the clients, and far from other classes."
    weighting = "uniform"
    reveals = (
        "prototypes that were trained on everybody's, and how many samples of a class there are; "
        "the server: mean features and numbers of each client"
    )
    shows = {
        "pull": "squared distance of the features from their class prototype",
        "margin": "by how much a client's prototype has to be nearer to its own class than to others",
    }

    lam: float = setting(1.0, "weight of the pull towards the class prototype", lambda v: v >= 0, "0 or more")
    margin: float = setting(100.0, "maximum margin", lambda v: v >= 0, "0 or more")
    server_epochs: int = setting(100, "server epochs over the received prototypes, per round", positive, "1 or more")
    server_lr: float = setting(0.01, "learning rate of the server's SGD", positive, "above 0")
    server_batch: int | None = setting(
        None, "prototypes per server step; null: train.batch_size", positive, "1 or more"
    )

    def server(self, model: Net, ctx: Context) -> State:
        made = fresh(lambda: generator(*model.prototypes["mean"].shape), ctx.info.seed, "generator")
        return {**super().server(model, ctx), **{PREFIX + name: t for name, t in made.state_dict().items()}}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        merged = super().aggregate(server, uploads, ctx)  # FedProto's mean: used for the margin
        means, counts = (torch.stack([u.state[f"prototypes.{leaf}"] for u in uploads]) for leaf in ("mean", "count"))
        points, labels = means[counts > 0], (counts > 0).nonzero()[:, 1]
        if not len(labels):
            return {**server, **merged}
        centres = merged["prototypes.mean"][(counts > 0).any(0)]
        apart = distances(centres, centres).fill_diagonal_(torch.inf).amin(1).amax().clamp(max=self.margin)
        for upload in uploads:
            ctx.log("margin", upload.client_id, apart)
        weights = {n.removeprefix(PREFIX): t.clone() for n, t in server.items() if n.startswith(PREFIX)}
        with torch.device("meta"):
            module = generator(*merged["prototypes.mean"].shape)
        every = torch.arange(means.shape[1], device=means.device)
        sgd = torch.optim.SGD([t.requires_grad_() for t in weights.values()], lr=self.server_lr)
        with torch.enable_grad():
            for epoch in range(self.server_epochs):
                shuffle = ctx.rng("prototypes", epoch, like=means)
                order = torch.randperm(len(labels), generator=shuffle, device=means.device)
                for rows in torch.split(order, self.server_batch or ctx.train.batch_size):
                    y = labels[rows]
                    far = distances(points[rows], functional_call(module, weights, every))
                    sgd.zero_grad()
                    cross_entropy(-(far + apart * one_hot(y, len(every))), y).backward()  # type: ignore[no-untyped-call]
                    sgd.step()
        made = {"prototypes.mean": functional_call(module, weights, every).detach()}
        return {**merged, **made, **{PREFIX + name: t.detach() for name, t in weights.items()}}


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Pairwise distances of rows; not by matrix products, whose TF32 rounding exceeds small distances."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def generator(classes: int, width: int) -> nn.Module:
    """Maps a class index to its prototype."""
    return nn.Sequential(nn.Embedding(classes, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
