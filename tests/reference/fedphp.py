"""FedPHP (Li et al. 2021): FedAvg's w beside an inherited private model p_k (HPM), which teaches w_k and is tested.

w_k is trained by (1 - lam) CE(w_k) + lam D, where D is the MMD between the features of w_k and those of p_k. Then
p_k <- mu_t p_k + (1 - mu_t) w_k with mu_t = mu t / T, for every float of the model, batch norm's statistics included;
after a client's first round p_k = w_k, and until then p_k is the model that it receives. p_k runs in eval mode.
Options of D: kernels scaled by the mean distance; soft labels, -sum softmax(p / 4) log softmax(w).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, get, leaves, mean, put, train

HYPER = {"mu": 0.8, "lam": 0.3}
RELATIVE = ("fedphp", {"mu": 0.8, "lam": 0.25})
VARIANTS = [
    {},
    {"mu": 0.0, "lam": 0.0},
    {"mu": 1.0, "lam": 0.5, "transfer": "mmd-scaled"},
    {"mu": 0.8, "lam": 0.4, "transfer": "soft-labels"},
    {"mu": 0.8, "lam": 0.3, "inference": "local"},
]
Kernel = Callable[[Tensor], Tensor]  # of squared distances


def mmd(a: Tensor, b: Tensor, k: Kernel) -> Tensor:
    """Mean of k over the pairs within a, plus those within b, less twice those between a and b."""
    pairs = ((a, a, 1), (b, b, 1), (a, b, -2))
    return sum(sign * k((u[:, None] - v[None]).square().sum(2)).mean() for u, v, sign in pairs)


def fixed(d: Tensor) -> Tensor:
    """Four Gaussian kernels of variance 10, 15, 20 and 50."""
    return sum((-d / (2 * q)).exp() for q in (10, 15, 20, 50))


def scaled(a: Tensor, b: Tensor) -> Kernel:
    """Five kernels exp(-d / s), with s = m/4, m/2, m, 2m and 4m; m: mean over pairs of different rows of a and b."""
    rows = torch.cat([a, b]).detach()
    m = torch.nn.functional.pdist(rows).square().mean()
    return lambda d: sum((-d / (m * 2.0**i)).exp() for i in range(-2, 3))


def local(w: nn.Module, p: nn.Module, lam: float, transfer: str) -> Loss:
    w.train()
    p.eval()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z, target = w.body(x), p.body(x).detach()
        if transfer == "soft-labels":
            soft = torch.softmax(p.head(target).detach() / 4, dim=1)
            apart = -(soft * torch.log_softmax(w.head(z), dim=1)).sum(1).mean()
        else:
            apart = mmd(z, target, fixed if transfer == "mmd" else scaled(z, target))
        return (1 - lam) * cross_entropy(w.head(z), y) + lam * apart

    return loss


def run(setup: Setup, mu: float = 0.9, lam: float = 0.1, transfer: str = "mmd", inference: str = "hpm") -> list[Scorer]:
    models = deepcopy(setup.models)
    personal: dict[int, nn.Module] = {}
    names = leaves(models[0])
    w = get(models[0], names)
    for t in range(setup.rounds):
        who = setup.participants(t)
        for i in who:
            put(models[i], w)
            teacher = personal.get(i, deepcopy(models[i]))
            train(setup, t, i, models[i].parameters(), local(models[i], teacher, lam, transfer))
            own, share = get(models[i], names), mu * t / setup.rounds
            if i in personal:
                old = get(teacher, names)
                put(teacher, {n: share * old[n] + (1 - share) * own[n] for n in names})
            else:
                personal[i] = deepcopy(models[i])
        w = mean([get(models[i], names) for i in who], [setup.samples[i] for i in who])
    for model in models:
        put(model, w)
    tested = [personal.get(i, model) if inference == "hpm" else model for i, model in enumerate(models)]
    return [Scorer(model) for model in tested]
