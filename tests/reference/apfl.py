"""APFL (Deng et al. 2020): v_k learns from the loss at v_bar = a v_k + (1 - a) w_k, w_k from its own; v_bar is tested.

One step on a batch, all from the same point: w <- w - lr grad CE(w); v <- v - lr a grad CE(v_bar) (the gradient with
respect to v, so by the chain rule times a); on a round's first batch also a <- a - lr (v - w) . grad CE(v_bar), kept in
[0, 1]. The steps of v and w are the optimiser's. w is averaged plainly. The forward pass of v_bar moves v's running
statistics; v_bar's are mixed as weights are. Until its first round a client's v is w, unless w has no share at all.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .common import Scorer, Setup, get, leaves, mean, put

HYPER = {"alpha": 0.6}
VARIANTS = ({"alpha": 0.3, "adaptive": False}, {"alpha": 0.0}, {"alpha": 1.0, "adaptive": False})
RELATIVE = ("apfl", {"alpha": 0.59})


def mixture(v: nn.Module, w: nn.Module, a: float) -> nn.Module:
    mixed, names = deepcopy(v), leaves(v)
    ours, common = get(v, names), get(w, names)
    put(mixed, {name: a * ours[name] + (1 - a) * common[name] for name in names})
    return mixed


def run(setup: Setup, alpha: float, adaptive: bool = True) -> list[Scorer]:
    models, personal, alphas = deepcopy(setup.models), deepcopy(setup.models), [alpha for _ in setup.models]
    names = leaves(models[0])
    statistics = [name for name in names if name not in dict(models[0].named_parameters())]
    w, new = get(models[0], names), set(range(len(models)))
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            if i in new and (adaptive or alpha < 1):
                put(personal[i], w)
            new.discard(i)
            both = [list(models[i].parameters()), list(personal[i].parameters())]
            sgd = torch.optim.SGD([*both[0], *both[1]], lr=setup.lr, momentum=setup.momentum)
            for epoch in range(setup.epochs):
                for step, (x, y) in enumerate(setup.batches(r, i, epoch)):
                    bar = mixture(personal[i], models[i], alphas[i]).train()
                    put(bar, get(personal[i], statistics))
                    slopes = torch.autograd.grad(cross_entropy(bar(x), y), list(bar.parameters()))
                    put(personal[i], get(bar, statistics))
                    common = torch.autograd.grad(cross_entropy(models[i].train()(x), y), both[0])
                    turn = sum(((v - u).detach() * g).sum().item() for u, v, g in zip(*both, slopes, strict=True))
                    for u, v, g, h in zip(*both, slopes, common, strict=True):
                        u.grad, v.grad = h, alphas[i] * g
                    sgd.step()
                    if adaptive and epoch == step == 0:
                        alphas[i] = min(1.0, max(0.0, alphas[i] - setup.lr * turn))
        w = mean([get(models[i], names) for i in who], [1.0 for _ in who])
    for i, model in enumerate(models):
        put(model, w)
        if i in new and (adaptive or alpha < 1):
            put(personal[i], w)
    return [Scorer(mixture(v, u, a)) for v, u, a in zip(personal, models, alphas, strict=True)]
