"""FediOS (Gao et al. 2023): a shared and a personal body, each behind a fixed projection of its own, and a shared head.

a = P_g f_g(x), b = P_i f_p(x) (Eq. 8), u = alpha a + (1 - alpha) b (Eq. 9), all in one SGD:
loss CE(h(u)) + CE(h(a)) + CE(h(b)) + lam mean |a . b| (Eq. 10 to 12). f_g and h are averaged; a client is tested with
h(u). Projections are written out as full matrices here: P = O O^T, or for `tall` O^T put into one of N + 1 blocks.
Without personal bodies u = a and the loss is 2 CE(h(a)), as there is nothing else to fuse.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .common import Loss, Scorer, Setup, get, leaves, mean, put, train

HYPER = {"alpha": 0.4, "lam": 0.3, "re_on": "raw"}
RELATIVE = ("fedios", {"alpha": 0.4, "lam": 0.3, "re_on": "projected"})
VARIANTS = [
    {},
    {"lam": 0.0, "alpha": 0.0},
    {"alpha": 1.0},
    {"rank": 2},
    {"max_clients": 6},
    {"re_on": "raw", "lam": 1.0},
    {"subspaces": "random", "lam": 1.0},
    {"subspaces": "random", "rank": 5, "lam": 0.3},
    {"subspaces": "tall"},
    {"subspaces": "tall", "max_clients": 4, "re_on": "raw"},
    {"without": ["projections"], "lam": 1.0},
    {"without": ["projections"], "lam": 1.0, "re_on": "raw"},
    {"without": ["personal"]},
    {"without": ["personal"], "subspaces": "tall"},
    {"without": ["re"], "re_on": "raw"},
    {"without": ["projections", "personal"]},
    {"without": ["projections", "re"]},
    {"without": ["personal", "re"], "re_on": "raw"},
    {"without": ["projections", "personal", "re"]},
]


class Client(nn.Module):
    """The parts of a client; the projections are plain tensors, so nothing can train or average them."""

    def __init__(self, built: nn.Module, clients: int, place: int, subspaces: str, without: Collection[str]) -> None:
        super().__init__()
        self.body, self.head = built.net.body, built.net.head
        self.personal = None if "personal" in without else built.personal
        self.project = [lambda z: z, lambda z: z]
        if "projections" not in without:
            o = [built.basis["generic"], built.basis["personal"]]
            if subspaces == "tall":  # [(N + 1) K, K], K rows of it not zero
                made = [torch.kron(torch.eye(clients + 1)[:, [at]], q.T) for at, q in zip((0, place), o, strict=True)]
            else:  # [K, K]
                made = [q @ q.T for q in o]
            self.project = [lambda z, p=p: z @ p.T for p in made]

    def features(self, x: Tensor) -> tuple[Tensor, ...]:
        """f_g(x), f_p(x), a and b."""
        raw = self.body(x)
        own = raw if self.personal is None else self.personal(x)
        return raw, own, self.project[0](raw), self.project[1](own)

    def fused(self, a: Tensor, b: Tensor, alpha: float) -> Tensor:
        return a if self.personal is None else alpha * a + (1 - alpha) * b


def loss_of(client: Client, alpha: float, lam: float, re_on: str) -> Loss:
    client.train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        raw, own, a, b = client.features(x)
        if client.personal is None:
            return 2 * cross_entropy(client.head(a), y)
        # Fused features go last: where a head has batch norm, what inference sees is what its statistics know best.
        ce = sum(cross_entropy(client.head(z), y) for z in (a, b, client.fused(a, b, alpha)))
        one, other = (raw, own) if re_on == "raw" else (a, b)
        return ce + lam * (one * other).sum(1).abs().mean()

    return loss


def run(
    setup: Setup,
    alpha: float = 0.5,
    lam: float = 0.1,
    without: Collection[str] = (),
    re_on: str = "projected",
    subspaces: str = "orthogonal",
    rank: int | None = None,  # what this and the next decide is already in the projections
    max_clients: int | None = None,
) -> list[Scorer]:
    places = max_clients or len(setup.models)
    clients = [Client(built, places, 1 + i, subspaces, without) for i, built in enumerate(deepcopy(setup.built))]
    names = leaves(clients[0], "body.") + leaves(clients[0], "head.")
    w = get(clients[0], names)
    for r in range(setup.rounds):
        who = setup.participants(r)
        for i in who:
            put(clients[i], w)
            loss = loss_of(clients[i], alpha, 0.0 if "re" in without else lam, re_on)
            train(setup, r, i, clients[i].parameters(), loss)
        w = mean([get(clients[i], names) for i in who], [setup.samples[i] for i in who])
    for client in clients:
        put(client, w)

    def scores(client: nn.Module, x: Tensor) -> Tensor:
        _, _, a, b = client.features(x)
        return client.head(client.fused(a, b, alpha))

    return [Scorer(client, scores) for client in clients]
