"""pFedMe (Dinh et al. 2020): theta takes K steps of min CE(theta) + lam/2 |theta - w_k|^2 a batch, and w_k follows it.

As Algorithm 1: everybody trains, those who take part are averaged plainly. theta begins a round at the received w, goes
on from batch to batch, stays at the client and is tested. Running statistics are theta's, and what is sent of them is
theta's at the end of the round.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch.nn.functional import cross_entropy

from .common import Scorer, Setup, State, get, leaves, mean

HYPER = {"lam": 12.0, "inner_steps": 3, "personal_lr": 0.03}
RELATIVE = ("pfedme", {"lam": 12.0, "inner_steps": 2, "personal_lr": 0.03})


def run(setup: Setup, lam: float, inner_steps: int, personal_lr: float) -> list[Scorer]:
    personal = deepcopy(setup.models)
    names = [name for name, _ in personal[0].named_parameters()]
    statistics = [name for name in leaves(personal[0]) if name not in names]
    w = get(personal[0], leaves(personal[0]))
    for r in range(setup.rounds):
        sent: list[State] = []
        for i, model in enumerate(personal):
            theta, own = list(model.parameters()), [w[name].clone() for name in names]
            with torch.no_grad():
                for t, received in zip(theta, own, strict=True):
                    t.copy_(received)
            model.train()
            for epoch in range(setup.epochs):
                for x, y in setup.batches(r, i, epoch):
                    for _ in range(inner_steps):
                        slopes = torch.autograd.grad(cross_entropy(model(x), y), theta)
                        with torch.no_grad():
                            for t, slope, anchor in zip(theta, slopes, own, strict=True):
                                t.sub_(personal_lr * (slope + lam * (t - anchor)))
                    own = [a - setup.lr * lam * (a - t.detach()) for a, t in zip(own, theta, strict=True)]
            sent.append({**dict(zip(names, own, strict=True)), **get(model, statistics)})
        who = setup.participants(r)
        w = mean([sent[i] for i in who], [1.0 for _ in who])
    return [Scorer(model) for model in personal]
