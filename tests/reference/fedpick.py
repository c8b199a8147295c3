"""FedPick (Zhu et al. 2024): a personal mask network picks features of a shared body for a personal head.

Equations by the paper's numbers. The losses are means over the batch of what the paper prints for one sample. The
cross-entropies get the minus that the print lacks; the entropy term needs none (its minimum is an uncertain p).
Eq. 13 has a gradient on both sides, unless `detach` stops it at the first argument. The mean of Eq. 16 is weighted by
samples and leaves batch norm out. The softmax of the scores is the mean of both heads' probabilities.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from .common import Loss, Scorer, Setup, get, leaves, mean, norm_leaves, put, train

HYPER = {"tau": 2.0, "lam_lce": 1.5, "lam_ent": 0.1, "lam_dis": 0.8}
RELATIVE = ("fedpick", {"tau": 2.0, "lam_lce": 1.5, "lam_ent": 0.0, "lam_dis": 0.8})
VARIANTS = [
    {"tau": 10.0, "lam_lce": 10.0, "lam_dis": 10.0},  # Table III, Digits-Five
    {"pfsm": False},  # the rows of Table IV
    {"lam_lce": 0.0},
    {"lam_ent": 0.0},
    {"lam_dis": 0.0},
    {"mask": "soft"},
    {"share_pfsm": True},
    {"ensemble": "none"},
    {"ensemble": "logits"},  # where the paper is silent
    {"detach": True},
    {"threshold": 0.3, "tau": 3.0},
    {"mask": "soft", "share_pfsm": True, "ensemble": "logits", "lam_ent": 0.1},
    {"detach": True, "mask": "soft", "tau": 0.5, "lam_dis": 3.0},
]


class Threshold(torch.autograd.Function):
    """1 where the soft mask reaches the threshold, else 0; backwards as if it were the soft mask itself."""

    @staticmethod
    def forward(ctx: object, soft: Tensor, epsilon: float) -> Tensor:
        return torch.where(soft < epsilon, torch.zeros_like(soft), torch.ones_like(soft))

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q), the mean over the batch."""
    return (p * (p / q).log()).sum(1).mean()


def run(
    setup: Setup,
    tau: float = 1.0,
    lam_lce: float = 1.0,
    lam_ent: float = 0.001,
    lam_dis: float = 1.0,
    pfsm: bool = True,
    share_pfsm: bool = False,
    mask: str = "hard",
    threshold: float = 0.5,
    ensemble: str = "probabilities",
    detach: bool = False,
) -> list[Scorer]:
    clients = deepcopy(setup.built)
    names = set(leaves(clients[0], "" if share_pfsm else "net.")) - norm_leaves(clients[0])
    w = get(clients[0], names)

    def select(c: nn.Module, z: Tensor, noise: Tensor) -> Tensor:
        soft = 1 / (1 + (-(c.mask(z) + noise) / tau).exp())  # Eq. 9
        return soft if mask == "soft" else Threshold.apply(soft, threshold)

    def loss_of(c: nn.Module, r: int, i: int) -> Loss:
        c.train()
        steps = count()

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z, step = c.net.body(x), next(steps)
            scores = c.net.head(z)
            total = cross_entropy(scores, y)  # Eq. 8
            if not pfsm:
                return total
            one, two = (setup.noise(r, i, "train", step, name, tuple(z.shape)) for name in ("plus", "minus"))
            m = select(c, z, -(-one.log()).log() + (-two.log()).log())
            own = c.relevant(z * m)  # Eq. 10
            g, p, u = softmax(scores, 1), softmax(own, 1), softmax(c.irrelevant(z * (1 - m)), 1)
            teachers = (p.detach(), g.detach()) if detach else (p, g)
            distilled = divergence(teachers[0], g) + divergence(teachers[1], p)  # Eq. 13
            entropy = (u * u.log()).sum(1).mean()  # Eq. 12
            return total + lam_lce * cross_entropy(own, y) + lam_ent * entropy + lam_dis * distilled  # Eq. 11, 15

        return loss

    def ensembled(c: nn.Module, x: Tensor) -> Tensor:
        z = c.net.body(x)
        g = c.net.head(z)
        if not pfsm or ensemble == "none":
            return g
        p = c.relevant(z * select(c, z, torch.zeros_like(z)))
        return g + p if ensemble == "logits" else ((softmax(g, 1) + softmax(p, 1)) / 2).log()  # Eq. 14

    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(clients[i], w)
            train(setup, r, i, clients[i].parameters(), loss_of(clients[i], r, i))
        w = mean([get(clients[i], names) for i in who], [setup.samples[i] for i in who])
    for c in clients:
        put(c, w)
    return [Scorer(c, ensembled) for c in clients]
