"""FedTGP (Zhang et al. 2024): FedProto whose prototypes are made by a small network that the server trains.

The network turns class c into P_c = W2 relu(W1 e_c + b1) + b2 and goes on from round to round. It is trained by SGD on
every prototype p (of class y) that was sent this round, with CE of -(|p - P_c| + margin [c = y]) over the classes c.
The margin: of each class the distance of its mean prototype to the nearest other one, the largest of these, at most
`margin`. All that was sent is one batch here, so that its order does not matter; and every class is known.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss, relu

from .common import Scorer, Setup, train
from .fedproto import attracted, features_of

HYPER = {"lam": 2.0, "server_epochs": 7, "server_lr": 0.1, "server_batch": 1000}
RELATIVE = ("fedtgp", {**HYPER, "margin": 0.0})
VARIANTS = [
    {**HYPER, "margin": 0.1},
    {**HYPER, "server_lr": 0.02, "lam": 10.0},
    {**HYPER, "inference": "head"},
]
QUICK = {"server_epochs": 5}


def largest_gap(means: list[Tensor]) -> float:
    nearest = [min((float((a - b).norm()) for b in means if b is not a), default=float("inf")) for a in means]
    return max(nearest)


def run(
    setup: Setup,
    lam: float,
    server_epochs: int,
    server_lr: float,
    server_batch: int,
    margin: float = 100.0,
    inference: str = "prototype",
) -> list[Scorer]:
    models, known = deepcopy(setup.models), set()
    made: dict[int, Tensor] = {}
    weights = [t.clone().requires_grad_() for n, t in setup.server.items() if n.startswith("generator.")]
    embedding, w1, b1, w2, b2 = weights

    def generated() -> Tensor:
        return relu(embedding @ w1.T + b1) @ w2.T + b2

    for r in range(setup.rounds):
        found = []
        for i in setup.participants(r):
            train(setup, r, i, models[i].parameters(), attracted(models[i], made, lam))
            found.append({c: z.mean(0) for c, z in features_of(models[i], *setup.train[i]).items()})
        classes = sorted(set().union(*found))
        means = [torch.stack([each[c] for each in found if c in each]).mean(0) for c in classes]
        gap = min(largest_gap(means), margin)
        sent = [(p, c) for each in found for c, p in each.items()]
        assert len(sent) <= server_batch
        points, labels = torch.stack([p for p, _ in sent]), torch.tensor([c for _, c in sent])
        sgd = torch.optim.SGD(weights, lr=server_lr)
        for _ in range(server_epochs):
            far = (points[:, None] - generated()[None]).square().sum(2).sqrt()
            own = labels[:, None] == torch.arange(far.shape[1])
            sgd.zero_grad()
            nll_loss(log_softmax(-far - gap * own, 1), labels).backward()
            sgd.step()
        known |= set(classes)
        made = {c: generated()[c].detach() for c in known}

    def nearest(model: nn.Module, x: Tensor) -> Tensor:
        z = model.body(x)
        if inference == "head":
            return model.head(z)
        return torch.stack([-(z - made[c]).square().sum(1) for c in range(len(embedding))], 1)

    return [Scorer(model, nearest) for model in models]
