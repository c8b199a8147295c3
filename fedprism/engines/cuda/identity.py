"""When two passes do the same: a captured step is used again only where it does."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from fedprism.methods.base import Client
from fedprism.methods.leaves import Place, places
from fedprism.round.training import PassRun

Name = tuple[str, str]
Addresses = dict[Name, Hashable]  # of tensors, by name: where they lie, their shape and type


def pass_key(run: PassRun) -> Hashable:
    """What captured steps of a pass depend on, beside addresses: two passes with equal keys do the same."""
    spec = run.spec
    trains = None if spec.trains is None else frozenset(spec.trains)
    rules = tuple(sorted((k, v) for k, v in spec.optimizer.items() if k != "lr"))
    loss, step = identity_key(spec.loss), None if spec.step is None else identity_key(spec.step)
    return (spec.name, loss, step, trains, rules, spec.data, run.split.kind)


def identity_key(function: Any) -> Hashable:
    """A function by what it is: a method by its object, a partial by its arguments, a closure by what it holds."""
    if isinstance(function, functools.partial):
        settings = tuple(sorted(function.keywords.items()))
        return ("partial", identity_key(function.func), tuple(identity_key(a) for a in function.args), settings)
    if isinstance(function, types.MethodType):
        return ("method", id(function.__self__), function.__func__)
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        cells += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if cells:
            return ("closure", function.__code__, tuple(identity_key(cell) for cell in cells))
    if isinstance(function, Tensor | nn.Module):
        return id(function)
    hash(function)
    return function  # type: ignore[no-any-return]


def readable(client: Client) -> dict[Name, Place]:
    """All that a loss may read or change, by where it is kept: the model and scratch."""
    found = {("model", place[0]): place for place in places(client.model)}
    for name, kept in client.scratch.items():
        if isinstance(kept, Tensor):
            found["scratch", name] = (name, client.scratch, name)
        elif isinstance(kept, nn.Module):
            found |= {(f"scratch {name}", place[0]): place for place in places(kept)}
        else:
            found |= {(f"scratch {name}", leaf): (leaf, kept, leaf) for leaf in kept}
    return found


def readable_tensors(client: Client) -> dict[Name, Tensor]:
    """The tensors of `readable`, by name."""
    return {name: kept[leaf].detach() for name, (_, kept, leaf) in readable(client).items()}


def addresses(client: Client) -> Addresses:
    """Where everything lies that a loss may read: a captured step reads these addresses."""
    tensors = ((name, kept[leaf]) for name, (_, kept, leaf) in readable(client).items())
    return {name: (t.data_ptr(), t.shape, t.dtype) for name, t in tensors}


def unmoved(captured: Addresses, now: Addresses) -> bool:
    """Does all that was there at the capture lie where it lay? What came later is not read.

    But a dict in scratch must hold what it held: a loss goes over all of it.
    """
    if captured == now:
        return True
    groups = {group for group, _ in captured if group not in ("model", "scratch", "buffer")}
    same = all(now.get(name) == address for name, address in captured.items())
    return same and all(name in captured for name in now if name[0] in groups)
