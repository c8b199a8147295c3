"""Fed-CO2 (Cai et al. 2023): an online model (all but its personal part is averaged) beside an offline one (at home).

Mutual learning, one epoch, Eqs. 4 and 5: each model learns from a frozen copy of the other as it was when the round
began, KL(teacher || student). Adaptation, Eqs. 6 and 7: CE(h(f(x))) + mu * the sum over j != i of CE(h_j(f(x))), where
h_j is the head of client j's offline model as it last came to the server, frozen and in eval mode. Plain means (Eq. 2);
tested by the sum of both models' scores (Eq. 3). The mutual epoch sees the batches of the adaptation's first epoch.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from .common import Loss, Scorer, Setup, get, leaves, mean, norm_leaves, put, train

HYPER = {"mu": 0.7}
RELATIVE = ("fed-co2", {"mu": 0.6})
WHO = ("none", "online", "offline", "both")
VARIANTS = [
    *({"intra": intra, "inter": inter} for intra, inter in product(WHO, WHO)),
    *({"personal": part, "mu": 0.3} for part in ("head", "both")),
    {"personal": "head", "intra": "none", "inter": "none"},
    {"skip_first": True},
    {"skip_first": True, "intra": "online", "inter": "offline"},
    {"offline_start": "own"},
    {"offline_start": "own", "skip_first": True, "personal": "both"},
    {"offline_start": "own", "intra": "none", "inter": "none"},
    {"mu": 0.0},
]


def towards(student: nn.Module, teacher: nn.Module) -> Loss:
    """KL(teacher || student) of softmax outputs, mean over the batch; no gradient to the teacher."""
    student.train()
    teacher.eval()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            p = softmax(teacher(x), dim=1)
        return (p * (p.log() - log_softmax(student(x), dim=1))).sum(1).mean()

    return loss


def recognised(model: nn.Module, others: list[nn.Module], mu: float) -> Loss:
    """Cross-entropy through the own head and, on the same features, through the heads of others."""
    model.train()
    for head in others:
        head.eval()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = model.body(x)
        return cross_entropy(model.head(z), y) + mu * sum(cross_entropy(head(z), y) for head in others)

    return loss


class Pair(nn.Module):
    """Both models of a client; scores are added."""

    def __init__(self, online: nn.Module, offline: nn.Module) -> None:
        super().__init__()
        self.online, self.offline = online, offline

    def forward(self, x: Tensor) -> Tensor:
        return self.online(x) + self.offline(x)


def run(
    setup: Setup,
    mu: float = 1.0,
    intra: str = "both",
    inter: str = "both",
    personal: str = "bn",
    skip_first: bool = False,
    offline_start: str = "same",
) -> list[Scorer]:
    offline = deepcopy(setup.models) if offline_start == "same" else [deepcopy(b.offline) for b in setup.built]
    pairs = [Pair(a, b) for a, b in zip(deepcopy(setup.models), offline, strict=True)]
    model = pairs[0].online
    stays = {"bn": norm_leaves(model), "head": set(leaves(model, "head."))}
    names = set(leaves(model)) - (stays["bn"] | stays["head"] if personal == "both" else stays[personal])
    w = get(model, names)
    heads = [deepcopy(pair.offline.head) for pair in pairs]  # what the server knows of everybody
    for r in range(setup.rounds):
        who, sent = setup.participants(r), deepcopy(heads)
        for i in who:
            put(pairs[i].online, w)
            teacher = deepcopy({"online": pairs[i].offline, "offline": pairs[i].online})
            for part, student in pairs[i].named_children():
                if intra in (part, "both") and not (skip_first and r == 0):
                    train(setup, r, i, student.parameters(), towards(student, teacher[part]), epochs=1)
                others = [sent[j] for j in range(len(pairs)) if j != i] if inter in (part, "both") else []
                train(setup, r, i, student.parameters(), recognised(student, others, mu))
            heads[i] = deepcopy(pairs[i].offline.head)
        w = mean([get(pairs[i].online, names) for i in who], [1.0 for _ in who])
    for pair in pairs:
        put(pair.online, w)
    return [Scorer(pair) for pair in pairs]
