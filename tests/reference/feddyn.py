"""FedDyn (Acar et al. 2021) in the form of the authors' code: every client keeps h_k = -g_k / alpha, zero at first.

theta_k = argmin CE + alpha <theta, h_k - w> + alpha/2 |theta|^2; h_k += theta_k - w; w = mean of the participants'
theta + mean of all clients' h_k. Up to a constant the loss is the paper's CE - <g_k, theta> + alpha/2 |theta - w|^2;
with h = mean of all g_k the server's step is the paper's w = mean theta - h/alpha. Batch norm's statistics are averaged
plainly. With `mean_samples` a client's alpha is alpha / (n_k / mean n), the rest is as it is.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, get, leaves, mean, put, train

HYPER = {"alpha": 0.5}
RELATIVE = ("feddyn", {"alpha": 0.45})
VARIANTS = ({"alpha": 0.5, "mean_samples": 24.0},)  # of 40, 23 and 9


def regularised(model: nn.Module, linear: list[Tensor], alpha: float) -> Loss:
    """The loss with `linear` = h_k - w."""
    model.train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        along = sum((p * a).sum() for p, a in zip(model.parameters(), linear, strict=True))
        length = sum(p.square().sum() for p in model.parameters())
        return cross_entropy(model(x), y) + alpha * along + alpha / 2 * length

    return loss


def run(setup: Setup, alpha: float, mean_samples: float | None = None) -> list[Scorer]:
    models = deepcopy(setup.models)
    names, weights = leaves(models[0]), [name for name, _ in models[0].named_parameters()]
    w = get(models[0], names)
    mean_n = sum(setup.samples) / len(setup.samples)
    assert mean_samples in (None, mean_n)
    alphas = [alpha if mean_samples is None else alpha / (n / mean_n) for n in setup.samples]
    h = [{n: torch.zeros_like(w[n]) for n in weights} for _ in models]
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            loss = regularised(models[i], [h[i][n] - w[n] for n in weights], alphas[i])
            train(setup, r, i, models[i].parameters(), loss)
            theta = get(models[i], weights)
            h[i] = {n: h[i][n] + theta[n] - w[n] for n in weights}
        w = mean([get(models[i], names) for i in who], [1.0 for _ in who])
        shift = mean(h, [1.0 for _ in h])
        w |= {n: w[n] + shift[n] for n in weights}
    for model in models:
        put(model, w)
    return [Scorer(model) for model in models]
