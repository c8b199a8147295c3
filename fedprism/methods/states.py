"""What methods are made of: states as flat dicts of tensors, modules side by side, noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedprism.errors import FedprismError

State = dict[str, Tensor]
Net = Any  # an nn.Module whose parts are reached by name, which torch's own types cannot follow


def average(states: Sequence[State], weights: Sequence[float]) -> State:
    """The weighted mean of states, leaf by leaf; whole-number counters are rounded.

    Summed in the order given (client order), so the bits do not depend on who finished first.
    """
    if not states:
        return {}
    mean: State = {}
    for name, first in states[0].items():
        total = torch.zeros_like(first, dtype=first.dtype if first.is_floating_point() else torch.float64)
        for state, weight in zip(states, weights, strict=True):
            total.add_(state[name], alpha=weight) if first.is_floating_point() else total.add_(
                state[name].double() * weight
            )
        mean[name] = total if first.is_floating_point() else total.round().to(first.dtype)
    return mean


@torch.no_grad()
def load(model: Net, state: Mapping[str, Tensor]) -> None:
    """Copy a (partial) state into a model, in place; an unknown leaf or a wrong shape is an error."""
    own = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if name not in own or own[name].shape != tensor.shape:
            held = f"{tuple(own[name].shape)} here" if name in own else "not in this model"
            raise FedprismError(f"cannot load {name!r} of shape {tuple(tensor.shape)}: it is {held}.")
        own[name].copy_(tensor)


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """|a - b|^2 over the leaves of b."""
    return torch.stack([(a[name] - anchor).square().sum() for name, anchor in b.items()]).sum()


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise from uniform noise in [0, 1): -log(-log U), finite at both ends.

    >>> gumbel(torch.tensor([0.0, 0.5, 1 - 2**-24])).isfinite().all().item()
    True
    """
    return -(-uniform.clamp(1e-20, 1 - 2**-24).log()).log()


class Parts(nn.Module):
    """Named modules side by side: what `build` returns when a client owns more than one model."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class Tensors(nn.Module):
    """Named tensors that are kept with a model but not trained: control variates, prototypes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name.replace(".", "/"), tensor.detach().clone())

    def __getitem__(self, name: str) -> Tensor:
        return self.get_buffer(name.replace(".", "/"))

    def tensors(self) -> State:
        return {name.replace("/", "."): tensor for name, tensor in self.named_buffers()}
