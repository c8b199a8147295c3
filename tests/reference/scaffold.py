"""SCAFFOLD (Karimireddy et al. 2020), Algorithm 1 with option II: steps y <- y - lr (g - c_k + c), server step 1.

After S steps c_k+ = c_k - c + (w - y) / (S lr); w += mean(y - w), c += sum(c_k+ - c_k) / N, N being all clients. Plain
SGD whatever the setup's momentum; batch norm's statistics have no control variate and are averaged, uniformly as well.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Scorer, Setup, get, leaves, mean, put

RELATIVE = ("fedavg", {})


def descend(setup: Setup, r: int, i: int, model: nn.Module, c_own: list[Tensor], c: list[Tensor]) -> int:
    model.train()
    steps = 0
    for epoch in range(setup.epochs):
        for x, y in setup.batches(r, i, epoch):
            gradients = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
            with torch.no_grad():
                for p, g, own, all_ in zip(model.parameters(), gradients, c_own, c, strict=True):
                    p -= setup.lr * (g - own + all_)
            steps += 1
    return steps


def run(setup: Setup) -> list[Scorer]:
    models = deepcopy(setup.models)
    names = leaves(models[0])
    w = get(models[0], names)
    c = [torch.zeros_like(p) for p in models[0].parameters()]
    own = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
    for r in range(setup.rounds):
        who = setup.participants(r)
        change = [torch.zeros_like(p) for p in c]
        for i in who:
            put(models[i], w)
            received = [p.detach().clone() for p in models[i].parameters()]
            steps = descend(setup, r, i, models[i], own[i], c)
            moved = [
                (a - p.detach()) / (steps * setup.lr) for a, p in zip(received, models[i].parameters(), strict=True)
            ]
            new = [o - a + m for o, a, m in zip(own[i], c, moved, strict=True)]
            change = [d + n - o for d, n, o in zip(change, new, own[i], strict=True)]
            own[i] = new
        w = mean([get(models[i], names) for i in who], [1.0 for _ in who])  # w + mean(y - w)
        c = [a + d / len(models) for a, d in zip(c, change, strict=True)]
    for model in models:
        put(model, w)
    return [Scorer(model) for model in models]
