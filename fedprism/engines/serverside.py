"""What the server does with the average: take it, go a part of the way, or let an optimiser make the step.

With delta = average - w for weights w (the paper's pseudo-gradient, pointing forward):

    none      w + lr delta                                               FedAvg with lr 1
    momentum  v <- m v + delta                         w + lr v          FedAvgM (Hsu et al., 2019)
    adam      v <- b2 v + (1 - b2) delta^2                               FedAdam (Reddi et al., ICLR 2021, Algorithm 2)
    yogi      v <- v - (1 - b2) delta^2 sign(v - delta^2)                FedYogi (the same)
              both: m <- b1 m + (1 - b1) delta, w + lr m / (sqrt(v) + tau); m starts at 0, v at tau^2, and neither is
              corrected for its start

Nothing waits for the device, and no tensor is changed in place once it has been handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedprism.config import ServerConfig
from fedprism.errors import ConfigError, FedprismError
from fedprism.methods import METHODS
from fedprism.methods.base import State

OPTIMIZERS = {  # beside none
    "momentum": "FedAvgM: Hsu et al., Measuring the Effects of Non-Identical Data Distribution, arXiv 1909.06335, 2019",
    "adam": "FedAdam: Reddi et al., Adaptive Federated Optimization, ICLR 2021",
    "yogi": "FedYogi: Reddi et al., Adaptive Federated Optimization, ICLR 2021",
}
PREFIX = "server.optimizer:"  # of what it keeps, beside the method's own state in a snapshot; methods never see it


def is_plain(config: ServerConfig) -> bool:
    """Is the average itself the new state?"""
    return config.optimizer == "none" and config.lr == 1


def refuse(config: ServerConfig, method: str) -> None:
    """Say that there is nothing for the server's step to move, and of a method that is known what there is instead."""
    key, value, rest = ("optimizer", config.optimizer, "none") if config.optimizer != "none" else ("lr", config.lr, "1")
    instead = f": what it shares is {METHODS[method].shares}" if method in METHODS else ""
    raise ConfigError(f"server.{key} is {value}, but {method} averages no weights{instead}. Leave it at {rest}.")


def first(config: ServerConfig, weights: State) -> State:
    """What the optimiser keeps from round to round, before the first one."""
    if config.optimizer == "none":
        return {}
    held = {f"m/{name}": torch.zeros_like(w) for name, w in weights.items()}
    if config.optimizer != "momentum":
        held |= {f"v/{name}": torch.full_like(w, config.tau**2) for name, w in weights.items()}
    return held


def step(config: ServerConfig, names: Sequence[str], server: State, mean: State, held: State) -> tuple[State, State]:
    """The named weights after the server's step, and what the optimiser keeps from now on."""
    if config.optimizer == "none":
        return {n: server[n] + config.lr * (mean[n] - server[n]) for n in names}, held
    if not names:
        return {}, held
    weights, average = [server[n] for n in names], [mean[n] for n in names]
    delta = torch._foreach_sub(average, weights)
    decay, new = (config.momentum, 1.0) if config.optimizer == "momentum" else (config.betas[0], 1 - config.betas[0])
    m = torch._foreach_mul([held[f"m/{n}"] for n in names], decay)
    torch._foreach_add_(m, delta, alpha=new)
    kept = {f"m/{n}": t for n, t in zip(names, m, strict=True)}
    if config.optimizer == "momentum":
        # w + lr v, written as the average less what is missing: momentum 0 and lr 1 give it bit by bit.
        moved = torch._foreach_sub(average, torch._foreach_sub(delta, torch._foreach_mul(m, config.lr)))
    else:
        old, share = [held[f"v/{n}"] for n in names], 1 - config.betas[1]
        square = torch._foreach_mul(delta, delta)
        if config.optimizer == "adam":
            v = torch._foreach_mul(old, config.betas[1])
            torch._foreach_add_(v, square, alpha=share)
        else:
            sign = torch._foreach_sign(torch._foreach_sub(old, square))
            v = torch._foreach_sub(old, torch._foreach_mul(square, sign), alpha=share)
        kept |= {f"v/{n}": t for n, t in zip(names, v, strict=True)}
        scale = torch._foreach_sqrt(v)
        torch._foreach_add_(scale, config.tau)
        moved = torch._foreach_addcdiv(weights, m, scale, value=config.lr)
    return dict(zip(names, moved, strict=True)), {**held, **kept}


# --- in a snapshot: beside the method's state, so that checkpoints are files of the same kind -------------------------


def packed(server: State, held: State) -> State:
    """The server's whole state."""
    return {**server, **{PREFIX + name: tensor for name, tensor in held.items()}}


def of_method(state: State) -> State:
    """The method's part of a snapshot's server."""
    return {name: tensor for name, tensor in state.items() if not name.startswith(PREFIX)}


def of_optimizer(state: State, like: State) -> State:
    """The optimiser's part of a snapshot's server; it must hold what `like` holds."""
    held = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    if held.keys() != like.keys():
        raise FedprismError(
            "the checkpoint is of another server.optimizer, or of other weights, than this run; start a new run."
        )
    return {name: held[name] for name in like}
