"""FedSCE (CVPR 2025): clients of different architectures learn from a shared auxiliary model, and it from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from fedprism.config import Named, positive, setting
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Draw, Info, Kind, Me, Method, Net, Now, Parts, Pass, Seen, State, Upload
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
        "subspace/used": "share of that update inside the subspace that it was held to",
        "subspace/next": "share of it inside the subspace of the next round",
    }

    mu: float = setting(5.0, "weight of the update's part outside of the subspace", lambda v: v >= 0, "0 or more")
    p: int = setting(5, "layers that the subspace holds, counted from the output", positive, "1 or more")
    R: int = setting(3, "dimensions of the subspace", positive, "1 or more")
    s: int = setting(1, "rounds from one update of the subspace to the next", positive, "1 or more")
    delta: Literal["raw", "normalised", "keep-singular-values"] = setting(
        "raw", "how an update enters the subspace: as it is, at length 1, or beside P times its singular values"
    )
    without: tuple[Literal["lsl", "dml", "ce"], ...] = setting(
        (), "parts to leave out (Table 4): the subspace, the auxiliary model, the contribution weights"
    )
    auxiliary: Named = setting(Named("smallest"), "the auxiliary model; smallest: of the clients' models")
    kl_weight: Literal["batch", "sample"] = setting("batch", "divide the KL by the loss of the batch or of each image")
    detach_weight: bool = setting(True, "no gradient through what the KL terms are divided by")
    detach_target: bool = setting(True, "no gradient to the model that teaches")
    reduction: Literal["batchmean", "mean"] = setting("batchmean", "of the KL over images; mean: over classes too")

    mixed = True

    @property
    def estimates(self) -> bool:
        return not {"dml", "ce"} & set(self.without)

    def build(self, arch: Arch, client: str | None, info: Info, seed: int) -> nn.Module:
        parts: dict[str, nn.Module] = {"local": arch.model(seed)}
        if "dml" not in self.without:
            parts["aux"] = self.aux_arch(info).model(seed)
        if "lsl" not in self.without:
            size = self.flat(parts["local"]).numel()
            parts["space"] = Subspace(size, self.R, self.delta, seed, "subspace", client or "")
        return Parts(**parts)

    def aux_arch(self, info: Info) -> Arch:
        return one_for_all(self.auxiliary, "method.auxiliary", info)

    def facts(self, info: Info) -> Mapping[str, str]:
        return {} if "dml" in self.without else {"auxiliary model": self.aux_arch(info).words}

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return leaves.part(model, "aux")

    # --- the client --------------------------------------------------------------------------------------------------

    def start(self, me: Me, now: Now) -> None:
        if "dml" not in self.without:
            me.freeze("received", me.model.aux)
            me.keep("far", torch.zeros((), device=now.device))
        if "lsl" not in self.without:
            me.keep("begin", self.flat(me.model.local))

    def passes(self, me: Me, now: Now) -> list[Pass]:
        measured = [Pass(self.measure, "measure", trains=())] if self.estimates else []
        return [Pass(self.loss, end=self.turn if "lsl" not in self.without else None), *measured]

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        own = me.model.local(x)
        loss = cross_entropy(own, y) if "dml" in self.without else self.mutual(own, me.model.aux(x), y)
        if "lsl" not in self.without:
            d = self.flat(me.model.local) - me["begin"]
            loss = loss + self.mu * me.model.space.outside(d).square().sum()  # Eq. 9
        return loss

    def mutual(self, own: Tensor, aux: Tensor, y: Tensor) -> Tensor:
        """Eq. 4 to 6 and 10: what both models learn from the labels, and each from the other."""
        ce = cross_entropy(own, y, reduction="none") + cross_entropy(aux, y, reduction="none")
        kl = torch.zeros_like(ce)
        for teacher, student in ((own, aux), (aux, own)):
            target = (teacher.detach() if self.detach_target else teacher).log_softmax(1)
            kl = kl + kl_div(student.log_softmax(1), target, reduction="none", log_target=True).sum(1)
        scale = ce.mean() if self.kl_weight == "batch" else ce
        kl = kl / (scale.detach() if self.detach_weight else scale).clamp(min=1e-6)  # learned by heart: no bound else
        return ce.mean() + kl.mean() / (own.shape[1] if self.reduction == "mean" else 1)

    def measure(self, me: Me, x: Tensor, y: Tensor) -> None:
        me["far"].add_((me.model.aux.body(x) - me["received"].body(x)).square().sum())

    # --- the subspace ------------------------------------------------------------------------------------------------

    def flat(self, local: nn.Module) -> Tensor:
        """The last p layers as one vector."""
        names = set(leaves.last(local, self.p))
        return torch.cat([tensor.flatten() for name, tensor in local.named_parameters() if name in names])

    def turn(self, me: Me, now: Now) -> None:
        d, space = self.flat(me.model.local) - me["begin"], me.model.space
        me.log("update", d.norm())
        me.log("subspace/used", space.share(d))
        if now.round % self.s == 0:
            space.turn(d)  # Eq. 8
        me.log("subspace/next", space.share(d))

    # --- the contribution of each client -----------------------------------------------------------------------------

    def uploads(self, model: Net, now: Now) -> Mapping[str, Kind]:
        far: dict[str, Kind] = dict.fromkeys(DISTANCES if self.estimates else (), "scalar")
        return {**super().uploads(model, now), **far}

    def upload(self, me: Me, now: Now) -> State:
        if not self.estimates:
            return super().upload(me, now)
        moved = squared_distance(dict(me.model.aux.named_parameters()), dict(me["received"].named_parameters()))
        far = dict(zip(DISTANCES, (moved.sqrt(), me["far"].sqrt()), strict=True))  # Eq. 13
        for name, value in far.items():
            me.log(name, value)
        return {**super().upload(me, now), **far}

    def aggregate(self, server: State, uploads: Sequence[Upload], now: Now) -> State:
        if not self.estimates:
            return super().aggregate(server, uploads, now)
        weights = contributions(torch.stack([torch.stack([u.state[name] for name in DISTANCES]) for u in uploads]))
        for upload, weight in zip(uploads, weights, strict=True):
            now.log("weight", upload.client, weight)
        return {**server, **average([{name: u.state[name] for name in server} for u in uploads], weights)}

    def examine(self, model: Net, x: Tensor, draw: Draw) -> Seen:
        return Seen(model.local(x), paths={} if "dml" in self.without else {"auxiliary": model.aux(x)})


def contributions(distances: Tensor) -> list[float]:
    """Eq. 14 and 15: `[clients, 2]` to weights. Distances that are all zero say nothing: then all count the same."""
    far = distances.double().clamp(min=0)
    shares = torch.where(far.sum(0) > 0, far / far.sum(0).clamp(min=1e-300), 1 / len(far)).sum(1)
    return [float(share) for share in shares / shares.sum()]
