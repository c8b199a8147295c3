"""FML (Shen et al. 2020): a private model p and the averaged meme m teach each other; the private one is tested.

L_p = alpha CE(p) + (1 - alpha) KL(m || p),  L_m = beta CE(m) + (1 - beta) KL(p || m), each a step of its own model;
the first argument of a KL is a target without gradient, of the same batch and the weights before both steps.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax

from .common import Scorer, Setup, get, leaves, mean, put

HYPER = {"alpha": 0.7, "beta": 0.4}
RELATIVE = ("fml", {"alpha": 0.4, "beta": 0.7})
VARIANTS = [
    {},
    {"alpha": 1.0, "beta": 1.0},
    {"alpha": 1.0, "beta": 0.0},
    {"alpha": 0.0, "beta": 1.0},
    {"meme": {"name": "smooth", "norm": False}},  # another architecture than the private models
]


def learned(q: Tensor, other: Tensor, y: Tensor, share: float) -> Tensor:
    target = softmax(other.detach(), 1)
    kl = (target * (target.log() - softmax(q, 1).log())).sum(1).mean()
    return share * cross_entropy(q, y) + (1 - share) * kl


def run(setup: Setup, alpha: float = 0.5, beta: float = 0.5, meme: Any = None) -> list[Scorer]:
    built = deepcopy(setup.built)  # which model the meme is has been decided there
    private, memes = [c.private for c in built], [c.meme for c in built]
    w = get(memes[0], leaves(memes[0]))
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(memes[i], w)
            pair = (private[i].train(), memes[i].train())
            steps = [torch.optim.SGD(m.parameters(), lr=setup.lr, momentum=setup.momentum) for m in pair]
            for epoch in range(setup.epochs):
                for x, y in setup.batches(r, i, epoch):
                    p, m = (model(x) for model in pair)
                    losses = learned(p, m, y, alpha), learned(m, p, y, beta)
                    for sgd, loss in zip(steps, losses, strict=True):
                        sgd.zero_grad()
                        loss.backward()
                        sgd.step()
        w = mean([get(memes[i], leaves(memes[i])) for i in who], [1.0] * len(who))
    return [Scorer(model) for model in private]
