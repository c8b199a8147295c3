"""FedKD (Wu et al. 2022): a local teacher, which is tested, and a shared student teach each other.

With CE_t and CE_s of a batch, h their features and D = CE_t + CE_s, a number: the teacher steps down the gradient of
CE_t + lam (KL(s || t) + MSE(h_t, W h_s)) / D, the student that of CE_s + lam (KL(t || s) + MSE) / D, each by its own
parameters, and W that of lam MSE / D. What is sent is the student's change over the round, each matrix (a layer's
weights by output) as U S V with the fewest singular values whose squares are a share T of all; as it is where that is
no larger. The plain mean of the changes goes back the same way, and everybody's student moves by it.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from .common import Loss, Scorer, Setup, State, get, leaves, mean, put, train

HYPER = {"T_start": 0.5, "T_end": 0.8}
RELATIVE = ("fedkd", {"T_start": 0.5, "T_end": 0.7})
VARIANTS = [{}, {"lam": 0.3}, {"T_start": 1.0, "T_end": 1.0}, {"T_start": 0.3, "T_end": 0.3, "lam": 2.0}]
QUICK = {"T_start": 0.95, "T_end": 0.95}  # the same whatever the number of rounds


def sent(change: State, share: float) -> State:
    """What the other side makes of it."""
    return {n: low_rank(t.reshape(len(t), -1), share).reshape(t.shape) if t.ndim > 1 else t for n, t in change.items()}


def low_rank(matrix: Tensor, share: float) -> Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    rank = next((k for k in range(1, len(s)) if s[:k].square().sum() >= share * s.square().sum()), len(s))
    if rank * (sum(matrix.shape) + 1) >= matrix.numel():
        return matrix
    return u[:, :rank] @ torch.diag(s[:rank]) @ v[:rank]


def divergence(target: Tensor, scores: Tensor) -> Tensor:
    p, q = log_softmax(target.detach(), 1), log_softmax(scores, 1)
    return (p.exp() * (p - q)).sum(1).mean()


def mutual(parts: nn.Module, lam: float) -> Loss:
    parts.train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        h_t, h_s = parts.teacher.body(x), parts.student.body(x)
        t, s = parts.teacher.head(h_t), parts.student.head(h_s)
        ce = cross_entropy(t, y) + cross_entropy(s, y)
        hidden = (h_t - h_s @ parts.map.weight.T).square().mean()
        return ce + lam * (divergence(s, t) + divergence(t, s) + hidden) / ce.item()

    return loss


def run(setup: Setup, T_start: float = 0.95, T_end: float = 0.98, lam: float = 1.0) -> list[Scorer]:
    clients = deepcopy(setup.built)
    names = leaves(clients[0].student)
    student, change = get(clients[0].student, names), {}
    for r in range(setup.rounds):
        share = T_start + (T_end - T_start) * (r + 1) / setup.rounds
        moved = sent(change, share)
        student = {n: t + moved[n] if moved else t for n, t in student.items()}
        found = []
        for i in setup.participants(r):
            put(clients[i].student, student)
            train(setup, r, i, clients[i].parameters(), mutual(clients[i], lam))
            after = get(clients[i].student, names)
            found.append(sent({n: after[n] - student[n] for n in names}, share))
        change = mean(found, [1.0] * len(found))
    return [Scorer(client.teacher) for client in clients]
