"""FedSCE (CVPR 2025): clients of different architectures learn from a shared auxiliary model, and it from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from fedprism.config import Named, positive, setting
from fedprism.methods import leaves, register
from fedprism.methods.base import (
    Arch,
    Client,
    Context,
    Draw,
    Info,
    Method,
    Net,
    Output,
    Parts,
    Pass,
    State,
    Upload,
    UploadKind,
)
from fedprism.methods.mixed import one_for_all
from fedprism.methods.states import average, squared_distance
from fedprism.methods.subspaces import Subspace

DISTANCES = ("distance/parameters", "distance/features")


@register
@dataclass(frozen=True)
class FedSCE(Method):
    id = "fedsce"
    paper = (
        "Zhang et al., Subspace Constraint and Contribution Estimation for Heterogeneous Federated Learning, CVPR 2025"
    )
    idea = "Local models of any architecture and one shared auxiliary model teach each other on every batch."
    shares = "the auxiliary model, and how far it moved"
    stays = "the local model and its subspace"
    group = "two models"
    weighting = "contribution"
    reveals = (
        "nothing beyond the average; "
        "the server: how far the auxiliary model moved at each client, in weights and in features"
    )
    shows = {
        "auxiliary": "the auxiliary model alone",
        "weight": "share of a client's auxiliary model in the average",
        "distance/parameters": "how far training moved the auxiliary model: its weights",
        "distance/features": "how far training moved the auxiliary model: its features of the training images",
        "update": "length of the update of the last p layers",
        "subspace/used": "share of that update inside the subspace that constrained it",
        "subspace/next": "share of it inside the subspace of the next round",
    }

    mu: float = setting(5.0, "weight of the update's part outside of the subspace", lambda v: v >= 0, "0 or more")
    p: int = setting(5, "layers that the subspace constrains, counted from the output", positive, "1 or more")
    R: int = setting(3, "dimensions of the subspace", positive, "1 or more")
    s: int = setting(1, "rounds between updates of the subspace", positive, "1 or more")
    delta: Literal["raw", "normalised", "keep-singular-values"] = setting(
        "raw", "how an update enters the subspace: unchanged, at length 1, or next to P times its singular values"
    )
    without: tuple[Literal["lsl", "dml", "ce"], ...] = setting(
        (), "parts to leave out (Table 4): the subspace, the auxiliary model, the contribution weights"
    )
    auxiliary: Named = setting(Named("smallest"), "the auxiliary model; smallest: the smallest of the clients' models")
    kl_weight: Literal["batch", "sample"] = setting("batch", "divide the KL by the loss of the batch or of each image")
    detach_weight: bool = setting(True, "no gradient through the divisor of the KL terms")
    detach_target: bool = setting(True, "no gradient to the teacher")
    reduction: Literal["batchmean", "mean"] = setting("batchmean", "mean of the KL over images; mean: over classes too")

    mixed = True

    @property
    def estimates(self) -> bool:
        return not {"dml", "ce"} & set(self.without)

    # Without contributions it is a weighted mean.
    needs_all_uploads = property(lambda self: self.estimates or type(self).aggregate is not FedSCE.aggregate)

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        parts: dict[str, nn.Module] = {"local": arch.model(seed)}
        if "dml" not in self.without:
            parts["aux"] = self.aux_arch(info).model(seed)
        if "lsl" not in self.without:
            size = self.flat(parts["local"]).numel()
            parts["space"] = Subspace(size, self.R, self.delta, seed, "subspace", client_id or "")
        return Parts(**parts)

    def aux_arch(self, info: Info) -> Arch:
        return one_for_all(self.auxiliary, "method.auxiliary", info)

    def facts(self, info: Info) -> Mapping[str, str]:
        return {} if "dml" in self.without else {"auxiliary model": self.aux_arch(info).words}

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "aux")

    # --- the client --------------------------------------------------------------------------------------------------

    def start(self, client: Client, ctx: Context) -> None:
        if "dml" not in self.without:
            client.freeze("received", client.model.aux)
            client.keep("far", 0.0)
        if "lsl" not in self.without:
            client.keep("begin", self.flat(client.model.local))

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        measured = [Pass(self.measure, "measure", trains=())] if self.estimates else []
        return [Pass(self.loss, end=self.turn if "lsl" not in self.without else None), *measured]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        own = client.model.local(x)
        loss = cross_entropy(own, y) if "dml" in self.without else self.mutual(own, client.model.aux(x), y)
        if "lsl" not in self.without:
            d = self.flat(client.model.local) - client["begin"]
            loss = loss + self.mu * client.model.space.outside(d).square().sum()  # Eq. 9
        return loss

    def mutual(self, own: Tensor, aux: Tensor, y: Tensor) -> Tensor:
        """Eq. 4 to 6 and 10: both models learn from the labels and from each other."""
        ce = cross_entropy(own, y, reduction="none") + cross_entropy(aux, y, reduction="none")
        kl = torch.zeros_like(ce)
        for teacher, student in ((own, aux), (aux, own)):
            target = (teacher.detach() if self.detach_target else teacher).log_softmax(1)
            kl = kl + kl_div(student.log_softmax(1), target, reduction="none", log_target=True).sum(1)
        scale = ce.mean() if self.kl_weight == "batch" else ce
        kl = kl / (scale.detach() if self.detach_weight else scale).clamp(min=1e-6)  # also for a memorised batch
        return ce.mean() + kl.mean() / (own.shape[1] if self.reduction == "mean" else 1)

    def measure(self, client: Client, x: Tensor, y: Tensor) -> None:
        client["far"].add_((client.model.aux.body(x) - client["received"].body(x)).square().sum())

    # --- the subspace ------------------------------------------------------------------------------------------------

    def flat(self, local: nn.Module) -> Tensor:
        """The last p layers as one vector."""
        return torch.cat([attrgetter(name)(local).flatten() for name in leaves.last(local, self.p)])

    def turn(self, client: Client, ctx: Context) -> None:
        d, space = self.flat(client.model.local) - client["begin"], client.model.space
        client.log("update", d.norm())
        client.log("subspace/used", space.share(d))
        if ctx.round % self.s == 0:
            space.turn(d)  # Eq. 8
        client.log("subspace/next", space.share(d))

    # --- the contribution of each client -----------------------------------------------------------------------------

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        far: dict[str, UploadKind] = dict.fromkeys(DISTANCES if self.estimates else (), "scalar")
        return {**super().uploads(model, ctx), **far}

    def upload(self, client: Client, ctx: Context) -> State:
        if not self.estimates:
            return super().upload(client, ctx)
        moved = squared_distance(dict(client.model.aux.named_parameters()), dict(client["received"].named_parameters()))
        far = dict(zip(DISTANCES, (moved.sqrt(), client["far"].sqrt()), strict=True))  # Eq. 13
        for name, value in far.items():
            client.log(name, value)
        return {**super().upload(client, ctx), **far}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        if not self.estimates:
            return super().aggregate(server, uploads, ctx)
        weights = contributions(torch.stack([torch.stack([u.state[name] for name in DISTANCES]) for u in uploads]))
        for upload, weight in zip(uploads, weights, strict=True):
            ctx.log("weight", upload.client_id, weight)
        return {**server, **average([{name: u.state[name] for name in server} for u in uploads], weights)}

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        return Output(model.local(x), branches={} if "dml" in self.without else {"auxiliary": model.aux(x)})


def contributions(distances: Tensor) -> list[float]:
    """Eq. 14 and 15: `[clients, 2]` to weights. If all distances are zero, all clients have the same weight."""
    far = distances.double().clamp(min=0)
    shares = torch.where(far.sum(0) > 0, far / far.sum(0).clamp(min=1e-300), 1 / len(far)).sum(1)
    return [float(share) for share in shares / shares.sum()]
