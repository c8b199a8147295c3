"""Fine-tuned FedAvg (FPE; Wang et al. 2019): a client tests the received w after some epochs of CE on its own data.

`tunes` says whether all of w, its head or its body moves; what does not move is in eval mode, batch norm included.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from torch import nn
from torch.nn.functional import cross_entropy

from . import fedavg
from .common import Loss, Scorer, Setup, train

HYPER = {"epochs": 2, "lr": 0.03}
MOMENT = "adapted"
RELATIVE = ("finetune", {"epochs": 2, "lr": 0.02})
VARIANTS = [{}, {"epochs": 0}, {"tunes": "head"}, {"tunes": "body", "epochs": 1}, {"tunes": "head", "lr": 0.2}]


def moving(model: nn.Module, tunes: str) -> tuple[list[nn.Parameter], Loss]:
    """The parameters of the part that moves, and the loss with this part alone in training mode."""
    part = model if tunes == "all" else getattr(model, tunes)
    model.eval()
    part.train()
    return list(part.parameters()), lambda x, y: cross_entropy(model(x), y)


def tuned(setup: Setup, received: list[nn.Module], epochs: int, tunes: str, lr: float | None) -> list[Scorer]:
    """Each client's copy of what it received after the last round, fine-tuned on what it would train on next."""
    rated, models = replace(setup, lr=0.1 * setup.lr if lr is None else lr), deepcopy(received)
    for i, model in enumerate(models):
        train(rated, setup.rounds, i, *moving(model, tunes), epochs=epochs)
    return [Scorer(model) for model in models]


def run(setup: Setup, epochs: int = 5, tunes: str = "all", lr: float | None = None) -> list[Scorer]:
    return tuned(setup, [scorer.model for scorer in fedavg.run(setup)], epochs, tunes, lr)
