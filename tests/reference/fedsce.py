"""FedSCE (CVPR 2025): a local and a shared auxiliary model teach each other; updates are drawn towards a subspace.

Equations by the paper's numbers. A client's step lowers the sum of both losses of Eq. 10; where the other side is
detached, that is one step of each model for itself. `without` leaves out the projection loss (lsl), the auxiliary
model with all that depends on it (dml), or the weights by contribution (ce: then each client counts the same).

Eq. 8 is the SVD of the tall matrix itself. `keep-singular-values` starts from values of 0, and then [P S, d] does not
say which directions of P are to stay. Here it is the limit of small equal values: those with a value come first, and
the others are what is left of P beside them, the largest part of it first.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from .common import Loss, Scorer, Setup, get, leaves, mean, put, train

HYPER = {"mu": 0.7, "p": 3, "R": 2}
RELATIVE = ("fedsce", {"mu": 0.6, "p": 3, "R": 2})
KEEP = "keep-singular-values"
VARIANTS = [
    {},
    {"without": ["lsl"]},  # the rows of Table 4, and the other combinations
    {"without": ["dml"]},
    {"without": ["ce"]},
    {"without": ["lsl", "dml"]},
    {"without": ["lsl", "ce"]},
    {"without": ["dml", "ce"]},
    {"without": ["lsl", "dml", "ce"]},
    {"mu": 0.0},
    {"mu": 20.0},
    {"p": 1},
    {"p": 2, "R": 5},
    {"p": 20},
    {"s": 2},
    {"R": 1, "delta": "normalised"},
    {"delta": "normalised", "p": 20, "R": 4},
    {"delta": "normalised", "s": 2, "without": ["dml"]},
    {"delta": KEEP},
    {"delta": KEEP, "R": 1, "p": 20},
    {"delta": KEEP, "R": 4, "mu": 1.0},  # more directions than rounds
    {"delta": KEEP, "R": 2, "s": 2, "without": ["dml", "ce"]},
    {"p": 20, "mu": 33.0},  # updates longer than 1: the step is too long for this mu
    {"p": 20, "mu": 33.0, "delta": "normalised"},
    {"p": 20, "mu": 33.0, "delta": KEEP},
    {"kl_weight": "sample"},
    {"detach_weight": False},
    {"detach_target": False},
    {"reduction": "mean"},
    {"detach_weight": False, "detach_target": False, "reduction": "mean"},  # what the authors' code may have
    {"detach_weight": False, "detach_target": False, "kl_weight": "sample"},
    {"kl_weight": "sample", "reduction": "mean", "without": ["lsl"]},
]


def constrained(model: nn.Module, p: int) -> list[Tensor]:
    """Parameters of the last p layers; a layer is a module that has parameters of its own."""
    layers = [own for module in model.modules() if (own := list(module.parameters(recurse=False)))]
    return [parameter for own in layers[-p:] for parameter in own]


def flat(parameters: Collection[Tensor]) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in parameters])


def updated(basis: Tensor, values: Tensor, d: Tensor, delta: str) -> tuple[Tensor, Tensor]:
    """Eq. 8: the next subspace [L, R], and its singular values where they are kept."""
    if delta == "normalised":
        d = d / d.norm()
    rank = basis.shape[1]
    u, s, _ = torch.linalg.svd(torch.cat([basis * values, d.unsqueeze(1)], 1), full_matrices=False)
    if delta != KEEP:
        return u[:, :rank], values
    u, s = u[:, :rank], s[:rank]
    known = u[:, s > 1e-12 * s[0]]
    rest = torch.linalg.svd(basis - known @ (known.T @ basis), full_matrices=False)[0]
    return torch.cat([known, rest], 1)[:, :rank], torch.where(s > 1e-12 * s[0], s, 0)


def mutual(local: Tensor, aux: Tensor, y: Tensor, each: bool, weight: bool, target: bool, classes: bool) -> Tensor:
    """Both models' Eq. 4 and 6; `weight` and `target` say what is detached."""
    ce = [cross_entropy(q, y, reduction="none") for q in (local, aux)]
    s = sum(ce) if each else sum(ce).mean()
    s = (s.detach() if weight else s).clamp(min=1e-6)
    total = sum(ce).mean()
    for student, teacher in ((local, aux), (aux, local)):
        q, p = log_softmax(student, 1), log_softmax(teacher.detach() if target else teacher, 1)
        kl = (p.exp() * (p - q)).sum(1)  # Eq. 5, of each sample
        total = total + (kl / s).mean() / (local.shape[1] if classes else 1)
    return total


def run(
    setup: Setup,
    mu: float = 5.0,
    p: int = 5,
    R: int = 3,  # how many columns the first basis has already says it
    s: int = 1,
    delta: str = "raw",
    without: Collection[str] = (),
    kl_weight: str = "batch",
    detach_weight: bool = True,
    detach_target: bool = True,
    reduction: str = "batchmean",
) -> list[Scorer]:
    lsl, dml, ce = (part not in without for part in ("lsl", "dml", "ce"))
    built = deepcopy(setup.built)
    local, aux = [c.local for c in built], [c.aux if dml else nn.Module() for c in built]
    spaces = [(c.space["basis"], torch.full((R,), float(delta != KEEP))) if lsl else None for c in built]
    w = get(aux[0], leaves(aux[0]))

    def loss_of(i: int, start: Tensor) -> Loss:
        local[i].train()
        aux[i].train()

        def loss(x: Tensor, y: Tensor) -> Tensor:
            q = local[i](x)
            options = (kl_weight == "sample", detach_weight, detach_target, reduction == "mean")
            total = mutual(q, aux[i](x), y, *options) if dml else cross_entropy(q, y)
            if lsl:
                basis, d = spaces[i][0], flat(constrained(local[i], p)) - start
                total = total + mu * (basis @ (basis.T @ d) - d).square().sum()  # Eq. 9
            return total

        return loss

    @torch.no_grad()
    def distances(i: int, received: nn.Module) -> tuple[float, float]:
        """Eq. 13."""
        now, before = ((flat(list(m.parameters())), m.eval().body(setup.train[i][0])) for m in (aux[i], received))
        return float((now[0] - before[0]).norm()), float((now[1] - before[1]).norm())

    for r in range(setup.rounds):
        who, moved = setup.participants(r), []
        for i in who:
            put(aux[i], w)
            received, start = deepcopy(aux[i]), flat(constrained(local[i], p)).detach().clone()
            train(setup, r, i, [*local[i].parameters(), *aux[i].parameters()], loss_of(i, start))
            if dml:
                moved.append(distances(i, received))
            if lsl and r % s == 0:
                spaces[i] = updated(*spaces[i], flat(constrained(local[i], p)).detach() - start, delta)
        if dml:
            totals = [sum(column) for column in zip(*moved, strict=True)]
            shares = [f1 / totals[0] + f2 / totals[1] for f1, f2 in moved]  # Eq. 14
            w = mean([get(aux[i], leaves(aux[i])) for i in who], shares if ce else [1.0] * len(who))  # Eq. 15
    return [Scorer(model) for model in local]
