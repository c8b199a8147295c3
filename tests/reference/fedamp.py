"""FedAMP (Huang et al. 2021): u_k = sum_j xi_kj w_j, and w_k = argmin CE + lambda/(2 alpha) |w - u_k|^2, from u_k.

xi_kj = alpha A'(|w_k - w_j|^2) = alpha/sigma exp(-|w_k - w_j|^2 / sigma), xi_kk = 1 - the others. The w_j are the last
uploads of those who have sent one; who has not yet is given their plain mean. Distances are over parameters; batch
norm's statistics are mixed by the same xi. sigma None: the (lower) median squared distance of the round's uploads, of
all kept ones if there is one alone; alpha None: sigma / number of clients. mu is lambda/alpha.
"""

from __future__ import annotations

import math
from copy import deepcopy
from statistics import median_low

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, State, distance, get, leaves, mean, put, train

HYPER = {"mu": 0.7}
RELATIVE = ("fedamp", {"mu": 0.7, "sigma": 1e6})  # without attention: a plain mean
VARIANTS = ({"mu": 0.2, "sigma": 2.0}, {"mu": 0.7, "sigma": 3.0, "alpha": 1.4})


def near(model: nn.Module, u: list[Tensor], mu: float) -> Loss:
    model.train()
    return lambda x, y: cross_entropy(model(x), y) + mu / 2 * distance(model.parameters(), u)


def clouds(
    kept: dict[int, State], who: list[int], weights: list[str], clients: int, sigma: float | None, alpha: float | None
) -> list[State]:
    """What each client is sent, from the uploads that there are."""
    plain = mean(list(kept.values()), [1.0 for _ in kept])
    far = {
        (k, j): float(distance([kept[k][n] for n in weights], [kept[j][n] for n in weights]))
        for k in kept
        for j in kept
        if j != k
    }
    round = [d for pair, d in far.items() if len(who) == 1 or set(pair) <= set(who)]
    sigma = (median_low(round) if round else 1.0) if sigma is None else sigma
    alpha = sigma / clients if alpha is None else alpha
    found = [plain] * clients
    for k in kept:
        xi = {j: alpha / sigma * math.exp(-far[k, j] / sigma) for j in kept if j != k}
        xi[k] = 1 - sum(xi.values())
        found[k] = mean(list(kept.values()), [xi[j] for j in kept])
    return found


def run(setup: Setup, mu: float, sigma: float | None = None, alpha: float | None = None) -> list[Scorer]:
    models = deepcopy(setup.models)
    names, weights = leaves(models[0]), [name for name, _ in models[0].named_parameters()]
    kept: dict[int, State] = {}
    u = [get(model, names) for model in models]
    for r in range(setup.rounds):
        for i in setup.participants(r):
            put(models[i], u[i])
            anchor = [p.detach().clone() for p in models[i].parameters()]
            train(setup, r, i, models[i].parameters(), near(models[i], anchor, mu))
            kept[i] = get(models[i], names)
        u = clouds(kept, list(setup.participants(r)), weights, len(models), sigma, alpha)
    for model, cloud in zip(models, u, strict=True):
        put(model, cloud)
    return [Scorer(model) for model in models]
