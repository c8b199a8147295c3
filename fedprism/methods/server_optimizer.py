"""Server optimisers: FedAvgM, FedAdam and FedYogi, for every method that averages weights.

With delta = average - w for weights w (the pseudo-gradient of the papers, pointing forward), `server.optimizer` is

    none      w + lr delta                                               FedAvg with lr 1
    momentum  v <- m v + delta                         w + lr v          FedAvgM (Hsu et al., 2019)
    adam      v <- b2 v + (1 - b2) delta^2                               FedAdam (Reddi et al., ICLR 2021, Algorithm 2)
    yogi      v <- v - (1 - b2) delta^2 sign(v - delta^2)                FedYogi (the same)
              both: m <- b1 m + (1 - b1) delta, w + lr m / (sqrt(v) + tau); m starts at 0, v at tau^2, and neither is
              corrected for its start

No tensor is changed in place after it was returned.
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
PREFIX = "server.optimizer:"  # of the optimiser's state, beside the method's own in a snapshot; methods never see it


def is_plain(config: ServerConfig) -> bool:
    """Whether the new state is the average itself."""
    return config.optimizer == "none" and config.lr == 1


def refuse(config: ServerConfig, method: str) -> None:
    """Raise: the method averages no weights that a step could move."""
    key, value, rest = ("optimizer", config.optimizer, "none") if config.optimizer != "none" else ("lr", config.lr, "1")
    instead = f": what it shares is {METHODS[method].shares}" if method in METHODS else ""
    raise ConfigError(f"server.{key} is {value}, but {method} averages no weights{instead}. Leave it at {rest}.")


def first_optimizer_state(config: ServerConfig, weights: State) -> State:
    """The initial state of the optimiser."""
    if config.optimizer == "none":
        return {}
    state = {f"m/{name}": torch.zeros_like(w) for name, w in weights.items()}
    if config.optimizer != "momentum":
        state |= {f"v/{name}": torch.full_like(w, config.tau**2) for name, w in weights.items()}
    return state


def optimizer_step(
    config: ServerConfig, names: Sequence[str], server: State, mean: State, state: State
) -> tuple[State, State]:
    """The named weights after the server's step, and the optimiser's next state."""
    if config.optimizer == "none":
        return {n: server[n] + config.lr * (mean[n] - server[n]) for n in names}, state
    if not names:
        return {}, state
    weights, average = [server[n] for n in names], [mean[n] for n in names]
    delta = torch._foreach_sub(average, weights)
    decay, new = (config.momentum, 1.0) if config.optimizer == "momentum" else (config.betas[0], 1 - config.betas[0])
    m = torch._foreach_mul([state[f"m/{n}"] for n in names], decay)
    torch._foreach_add_(m, delta, alpha=new)
    after = {f"m/{n}": t for n, t in zip(names, m, strict=True)}
    if config.optimizer == "momentum":
        # w + lr v, written relative to the average: momentum 0 and lr 1 give the average bit for bit.
        moved = torch._foreach_sub(average, torch._foreach_sub(delta, torch._foreach_mul(m, config.lr)))
    else:
        old, share = [state[f"v/{n}"] for n in names], 1 - config.betas[1]
        square = torch._foreach_mul(delta, delta)
        if config.optimizer == "adam":
            v = torch._foreach_mul(old, config.betas[1])
            torch._foreach_add_(v, square, alpha=share)
        else:
            sign = torch._foreach_sign(torch._foreach_sub(old, square))
            v = torch._foreach_sub(old, torch._foreach_mul(square, sign), alpha=share)
        after |= {f"v/{n}": t for n, t in zip(names, v, strict=True)}
        scale = torch._foreach_sqrt(v)
        torch._foreach_add_(scale, config.tau)
        moved = torch._foreach_addcdiv(weights, m, scale, value=config.lr)
    return dict(zip(names, moved, strict=True)), {**state, **after}


# A snapshot stores the optimiser's state with the method's, so that all checkpoints have one format.


def pack(server: State, optimizer_state: State) -> State:
    """The server's whole state, as a snapshot stores it."""
    return {**server, **{PREFIX + name: tensor for name, tensor in optimizer_state.items()}}


def method_part(packed: State) -> State:
    """The method's part of a snapshot's server."""
    return {name: tensor for name, tensor in packed.items() if not name.startswith(PREFIX)}


def optimizer_part(packed: State, like: State) -> State:
    """The optimiser's part of a snapshot's server; it must have the names of `like`."""
    state = {name.removeprefix(PREFIX): tensor for name, tensor in packed.items() if name.startswith(PREFIX)}
    if state.keys() != like.keys():
        raise FedprismError(
            "the checkpoint is of another server.optimizer, or of other weights, than this run; start a new run."
        )
    return {name: state[name] for name in like}
