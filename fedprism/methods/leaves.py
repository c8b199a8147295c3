"""Leaves of a model (its parameters and buffers), chosen by part or by module type, never by a piece of a name."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedprism.errors import ConfigError, FedprismError, unknown

Names = tuple[str, ...]
Place = tuple[str, dict[str, Any], str]  # a leaf's name, and where its module keeps it

# What was found of models whose parts stay as they are (`seal`). Others are searched every time: a method's
# `build` may ask for leaves before it adds a part.
_sealed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_places: weakref.WeakKeyDictionary[nn.Module, list[Place]] = weakref.WeakKeyDictionary()
_norms: weakref.WeakKeyDictionary[nn.Module, tuple[Names, Names]] = weakref.WeakKeyDictionary()

M = TypeVar("M", bound=nn.Module)


def seal(model: M) -> M:
    """Promise that a model gets no more parts: its leaves are looked up once from now on."""
    for module in model.modules():
        _sealed.add(module)
        _places.pop(module, None)
        _norms.pop(module, None)
    return model


def places(model: nn.Module) -> list[Place]:
    """Where a model keeps each leaf of its state dict."""
    found = _places.get(model)
    if found is None:
        names, found = list(model.state_dict()), []
        for prefix, module in model.named_modules(remove_duplicate=False):
            start = f"{prefix}." if prefix else ""
            for owner in (module._parameters, module._buffers):
                found += [(f"{start}{leaf}", owner, leaf) for leaf in owner if f"{start}{leaf}" in names]
        if [name for name, _, _ in found] != names:
            raise FedprismError(
                f"{type(model).__name__} says for itself what its state is; a model's state must be its parameters and "
                "buffers by their own names."
            )
        if model in _sealed:
            _places[model] = found
    return found


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with the tensors themselves, quickly."""
    return {name: owner[leaf] for name, owner, leaf in places(model)}


def parameters(model: nn.Module) -> Names:
    """Every leaf that is trained: the names of `named_parameters`, quickly."""
    return tuple(name for name, owner, leaf in places(model) if isinstance(owner[leaf], nn.Parameter))


def everything(model: nn.Module) -> Names:
    """Every parameter and buffer that is kept."""
    return tuple(tensors(model))


def others(model: nn.Module, names: Collection[str]) -> Names:
    """Every leaf but these."""
    left_out = set(names)
    return tuple(name for name in tensors(model) if name not in left_out)


def part(model: nn.Module, *parts: str) -> Names:
    """The leaves under these parts: `part(model, "body")`."""
    return tuple(name for name in tensors(model) if name.startswith(tuple(f"{p}." for p in parts)))


def last(model: nn.Module, layers: int) -> Names:
    """The parameters of the last layers, or of all where there are fewer; norm layers count.

    A layer is a module with parameters of its own. They are in the order in which they were defined, which in every
    model here is that of the forward pass.
    """
    own = [
        [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)]
        for prefix, module in model.named_modules()
    ]
    return tuple(name for names in [names for names in own if names][-layers:] for name in names)


def norms(model: nn.Module) -> Names:
    """The leaves of batch (and instance) norm layers: affine, statistics and counter."""
    return _of_norms(model, affine=True, running=True)


def affine(model: nn.Module) -> Names:
    """The weights and biases of batch (and instance) norm layers."""
    return _of_norms(model, affine=True, running=False)


def statistics(model: nn.Module) -> Names:
    """The running statistics and counters of batch (and instance) norm layers."""
    return _of_norms(model, affine=False, running=True)


def travelling(model: nn.Module, names: tuple[str, ...], bn: str) -> Names:
    """`names` less what the batch-norm policy keeps at home."""
    if bn == "shared":
        return names
    policies = {"local": norms, "local-stats": statistics, "local-affine": affine}
    if bn not in policies:
        raise ConfigError(unknown("batch-norm policy", bn, ("shared", *policies)))
    kept = set(policies[bn](model))
    return tuple(name for name in names if name not in kept)


def _of_norms(model: nn.Module, affine: bool, running: bool) -> Names:
    found = _norms.get(model)
    if found is None:
        every = [
            (f"{prefix}.{leaf}" if prefix else leaf, leaf in ("weight", "bias"))
            for prefix, module in model.named_modules()
            if isinstance(module, _NormBase)
            for leaf in module.state_dict()
        ]
        found = (tuple(n for n, is_affine in every if is_affine), tuple(n for n, is_affine in every if not is_affine))
        if model in _sealed:
            _norms[model] = found
    wanted = {*(found[0] if affine else ()), *(found[1] if running else ())}
    return tuple(name for name in tensors(model) if name in wanted) if wanted else ()
