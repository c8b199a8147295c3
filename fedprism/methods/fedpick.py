"""FedPick (Zhu et al., TMC 2024): each client picks, image by image, the shared features that its task needs."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import positive, setting
from fedprism.errors import ConfigError
from fedprism.methods import leaves, register
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Method, Net, Output, Parts, gumbel
from fedprism.models import fresh, initialise

PFSM = ("mask", "relevant", "irrelevant")


@register
@dataclass(frozen=True)
class FedPick(Method):
    id = "fedpick"
    paper = (
        "Zhu et al., Take Your Pick: Enabling Effective Personalized Federated Learning within Low-dimensional "
        "Feature Space, TMC 2024"
    )
    idea = "Body and head are shared; a mask network at each client picks the features that a personal head uses."
    shares = "the body and the global head, without batch norm"
    stays = "the mask network, the heads for relevant and irrelevant features, and batch norm"
    group = "split"
    bn = "local"
    shows = {
        "selected": "share of the features that the mask lets through",
        "global": "the global head on all features",
        "relevant": "the personal head on selected features",
        "irrelevant": "the head on the other features, which is trained to be unsure",
    }

    tau: float = setting(1.0, "temperature of the mask; the paper: 10 on digits", positive, "above 0")
    lam_lce: float = setting(
        1.0, "weight of the cross-entropy on relevant features; digits: 10", lambda v: v >= 0, "0 or more"
    )
    lam_ent: float = setting(
        0.001, "weight of the negative entropy on irrelevant features", lambda v: v >= 0, "0 or more"
    )
    lam_dis: float = setting(
        1.0, "weight of the distillation between both heads; digits: 10", lambda v: v >= 0, "0 or more"
    )
    pfsm: bool = setting(True, "use personal feature selection; without it this is FedBN")
    share_pfsm: bool = setting(False, "average mask networks and personal heads too")
    mask: Literal["hard", "soft"] = setting(
        "hard", "hard: features are selected or not; soft: weighted between 0 and 1"
    )
    threshold: float = setting(
        0.5, "a feature is selected if its soft mask reaches this", lambda v: 0 < v < 1, "between 0 and 1"
    )
    ensemble: Literal["probabilities", "logits", "none"] = setting(
        "probabilities", "which outputs of both heads are added to predict; none: the global head alone"
    )
    detach: bool = setting(False, "stop the gradient at the teacher's side of both distillation terms")

    def __post_init__(self) -> None:
        if self.share_pfsm and not self.pfsm:
            raise ConfigError("method.share_pfsm is true, but without method.pfsm there is nothing of it; drop one.")

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        net, width = arch.model(seed), arch.width
        if not self.pfsm:
            return Parts(net=net)
        mask = fresh(lambda: mask_network(width), seed, "mask")
        heads = {name: copy.deepcopy(net.head) for name in ("relevant", "irrelevant")}
        for name, head in heads.items():
            initialise(head, seed, name)
        return Parts(net=net, mask=mask, **heads)

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "net", *(PFSM if self.share_pfsm else ()))  # Eq. 16

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z = client.model.net.body(x)
        g = client.model.net.head(z)
        loss = cross_entropy(g, y)  # Eq. 8
        if not self.pfsm:
            return loss
        noise = gumbel(client.draw("plus", *z.shape)) - gumbel(client.draw("minus", *z.shape))
        soft, m = self.pick(client.model, z, noise)
        client.log("selected", soft >= self.threshold)
        p, u = client.model.relevant(z * m), client.model.irrelevant(z * (1 - m)).log_softmax(1)  # Eq. 10
        loss = loss + self.lam_lce * cross_entropy(p, y)  # Eq. 11
        loss = loss + self.lam_ent * (u.exp() * u).sum(1).mean()  # Eq. 12
        log_g, log_p = g.log_softmax(1), p.log_softmax(1)
        return loss + self.lam_dis * (self.distance(log_p, log_g) + self.distance(log_g, log_p))  # Eq. 13 and 15

    def pick(self, model: Net, z: Tensor, noise: Tensor | float) -> tuple[Tensor, Tensor]:
        """Eq. 9: the soft mask and the mask to use; a hard mask has the gradient of the soft one."""
        soft = ((model.mask(z) + noise) / self.tau).sigmoid()
        if self.mask == "soft":
            return soft, soft
        return soft, (soft >= self.threshold).to(soft.dtype) + (soft - soft.detach())

    def distance(self, teacher: Tensor, student: Tensor) -> Tensor:
        """KL(teacher || student) of log-probabilities, mean over the batch."""
        teacher = teacher.detach() if self.detach else teacher
        return (teacher.exp() * (teacher - student)).sum(1).mean()

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        z = model.net.body(x)
        g = model.net.head(z)
        if not self.pfsm:
            return Output(g)
        soft, m = self.pick(model, z, 0.0)
        p = model.relevant(z * m)
        branches = {"global": g, "relevant": p, "irrelevant": model.irrelevant(z * (1 - m))}
        scores = {  # Eq. 14
            "probabilities": torch.logaddexp(g.log_softmax(1), p.log_softmax(1)) - math.log(2),
            "logits": g + p,
            "none": g,
        }[self.ensemble]
        return Output(scores, branches, means={"selected": (soft >= self.threshold).float()})


def mask_network(width: int) -> nn.Sequential:
    """One logit per feature."""
    hidden = max(1, width // 2)
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
