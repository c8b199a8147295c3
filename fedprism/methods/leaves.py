"""Which leaves of a model: chosen by part or by module type, never by a piece of a name."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedprism.errors import ConfigError, unknown

Names = tuple[str, ...]


def everything(model: nn.Module) -> Names:
    """Every parameter and buffer that is kept."""
    return tuple(model.state_dict())


def part(model: nn.Module, *parts: str) -> Names:
    """The leaves under these parts: `part(model, "body")`."""
    return tuple(name for name in model.state_dict() if name.startswith(tuple(f"{p}." for p in parts)))


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
    policies = {"shared": (), "local": norms(model), "local-stats": statistics(model), "local-affine": affine(model)}
    kept = policies.get(bn)
    if kept is None:
        raise ConfigError(unknown("batch-norm policy", bn, tuple(policies)))
    return tuple(name for name in names if name not in set(kept))


def _of_norms(model: nn.Module, affine: bool, running: bool) -> Names:
    return tuple(
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, module in model.named_modules()
        if isinstance(module, _NormBase)
        for leaf in module.state_dict()
        if (affine if leaf in ("weight", "bias") else running)
    )
