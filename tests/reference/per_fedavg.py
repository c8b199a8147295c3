"""Per-FedAvg (Fallah et al. 2020): w <- w - b (I - a H(w; B3)) g', where g' is the gradient at w - a g(w; B1) on B2.

First order drops H; Hessian-free has H g' = (g(w + delta g'; B3) - g(w - delta g'; B3)) / (2 delta). The step of rate b
is the optimiser's. B1, B2 (and B3) are the parts of a batch that is as many times larger; a rest of fewer than two
images a part joins the batch before it. Every forward pass moves the running statistics. The mean is uniform. Before a
test a client makes `adapt_steps` plain steps of rate a from w, on the next batches that it would train on as FedAvg.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Scorer, Setup, get, leaves, mean, put

HYPER = {"alpha": 0.3}
MOMENT = "adapted"
VARIANTS = (
    {"alpha": 0.3, "adapt_steps": 3},
    {"alpha": 0.3, "variant": "hessian-free", "delta": 1e-2},
    {"alpha": 0.0, "variant": "hessian-free"},
)
RELATIVE = ("per_fedavg", {"alpha": 0.29})

Batch = tuple[Tensor, Tensor]


def gradient(model: nn.Module, weights: list[Tensor], batch: Batch) -> list[Tensor]:
    """Of the cross-entropy at these weights; the model's own are put back."""
    parameters = list(model.parameters())
    before = [p.detach().clone() for p in parameters]
    write(parameters, weights)
    found = torch.autograd.grad(cross_entropy(model(batch[0]), batch[1]), parameters)
    write(parameters, before)
    return list(found)


@torch.no_grad()
def write(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)


def along(weights: list[Tensor], direction: list[Tensor], rate: float) -> list[Tensor]:
    return [w + rate * d for w, d in zip(weights, direction, strict=True)]


def meta_gradient(model: nn.Module, parts: list[Batch], alpha: float, delta: float) -> list[Tensor]:
    w = [p.detach().clone() for p in model.parameters()]
    adapted = along(w, gradient(model, w, parts[0]), -alpha)
    outer = gradient(model, adapted, parts[1])
    if len(parts) == 2:
        return outer
    ahead, behind = (gradient(model, along(w, outer, sign * delta), parts[2]) for sign in (1, -1))
    return [g - alpha * (a - b) / (2 * delta) for g, a, b in zip(outer, ahead, behind, strict=True)]


def recut(batches: list[Batch], size: int, count: int) -> list[list[Batch]]:
    """The same images in the same order, in batches of `count` parts of `size`."""
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    ends = list(range(0, len(y), count * size))[1:]
    if ends and len(y) - ends[-1] < 2 * count:
        ends.pop()
    cut = zip(x.tensor_split(ends), y.tensor_split(ends), strict=True)
    return [
        [
            (a[len(b) * i // count : len(b) * (i + 1) // count], b[len(b) * i // count : len(b) * (i + 1) // count])
            for i in range(count)
        ]
        for a, b in cut
    ]


def adapted(setup: Setup, i: int, model: nn.Module, alpha: float, steps: int) -> Scorer:
    model.train()
    coming = (batch for epoch in range(steps) for batch in setup.batches(setup.rounds, i, epoch))
    for batch in islice(coming, steps):
        w = [p.detach().clone() for p in model.parameters()]
        write(list(model.parameters()), along(w, gradient(model, w, batch), -alpha))
    return Scorer(model)


def run(
    setup: Setup, alpha: float, variant: str = "first-order", delta: float = 1e-3, adapt_steps: int = 1
) -> list[Scorer]:
    models = deepcopy(setup.models)
    w = get(models[0], leaves(models[0]))
    largest = max(range(len(models)), key=lambda i: setup.samples[i])
    size = len(setup.batches(0, largest, 0)[0][1])
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(models[i], w)
            models[i].train()
            sgd = torch.optim.SGD(models[i].parameters(), lr=setup.lr, momentum=setup.momentum)
            for epoch in range(setup.epochs):
                for parts in recut(setup.batches(r, i, epoch), size, 2 if variant == "first-order" else 3):
                    found = meta_gradient(models[i], parts, alpha, delta)
                    for p, g in zip(models[i].parameters(), found, strict=True):
                        p.grad = g
                    sgd.step()
        w = mean([get(models[i], leaves(models[i])) for i in who], [1.0 for _ in who])
    for model in models:
        put(model, w)
    return [adapted(setup, i, model, alpha, adapt_steps) for i, model in enumerate(models)]
