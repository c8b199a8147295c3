"""Any classification model of torchvision or timm, untrained: `torchvision:efficientnet_b0`, `timm:convnext_tiny`.

The fully connected layer that outputs the class scores becomes the head, all before it the body. The library
initialises the body, under one key; the head has PyTorch's initialisation. Dropout and stochastic depth are off, since
they draw from the global generator: results would not be reproducible, least of all after a resume. Attention and
adaptive pooling are matrix products, whose gradients are deterministic on a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.dropout import _DropoutNd

from fedprism import keys
from fedprism.config import setting
from fedprism.errors import ConfigError, short
from fedprism.models.adapter import Pool2d
from fedprism.models.base import MODELS, Block, Family, Whole

# Exceptions of a library for a network that cannot be made, or cannot take these images.
REFUSALS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
RATES = (
    "drop_prob",
    "drop_rate",
    "dropout",
    "attention_dropout",
)  # attributes; dropout modules are found by their types


# --- from a network to a body and a head -----------------------------------------------------------------------------


def classifier_of(model: nn.Module, classes: int) -> nn.Linear:
    """The layer that outputs the class scores: that of `get_classifier`, else the last fully connected one."""
    getter: Callable[[], object] | None = getattr(model, "get_classifier", None)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    found: object = getter() if getter is not None else (linears[-1] if linears else None)
    if isinstance(found, nn.Linear) and found.out_features == classes:
        return found
    given = "no fully connected layer" if found is None else "more than one layer"
    if isinstance(found, nn.Module):
        given = f"{type(found).__name__}({found.extra_repr()})"
    raise ConfigError(f"its classifier is {given}; expected one fully connected layer with {classes} outputs.")


def split(model: nn.Module, classes: int) -> tuple[nn.Module, nn.Linear]:
    """Split a network, which is changed, into a body and its classifier, the head.

    >>> body, head = split(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), classes=3)
    >>> body(torch.zeros(1, 4)).shape, head.out_features
    (torch.Size([1, 8]), 3)
    """
    head = classifier_of(model, classes)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is head:
            _put(model, name, nn.Identity())
    return model, head


def ends_in(model: nn.Module, layer: nn.Linear, x: Tensor) -> bool:
    """Whether the model's scores are exactly this layer's output for one vector per input."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = layer.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
    scores = model(x)
    hook.remove()
    return len(seen) == 1 and scores is seen[0][1] and seen[0][0].shape == (len(x), layer.in_features)


def repeatable(model: nn.Module) -> None:
    """Turn off dropout and stochastic depth, and replace the pooling whose gradient is not deterministic on a GPU."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, _DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for rate in RATES:
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
        if isinstance(module, nn.AdaptiveAvgPool2d):
            size = module.output_size
            height, width = size if isinstance(size, tuple) else (size, size)
            if height is not None and width is not None and (height, width) != (1, 1):
                _put(model, name, Pool2d(height, width))


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


class LibraryBody(Whole):
    """A body that its library initialises, under one key."""

    def __init__(self, net: nn.Module, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = net
        self.make = make

    def reset_parameters(self) -> None:
        self.net = self.make()

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the fast kernels have gradients that are not deterministic
            return self.net(x)  # type: ignore[no-any-return]


# --- the libraries ---------------------------------------------------------------------------------------------------


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        problem = f"{error.name} is not installed"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another version of PyTorch
        problem = f"it cannot be imported: {error}"
    raise ConfigError(f'models of {name} need {name}, and {problem}. `pip install "fedprism[vision]"` brings it.')


def _known(library: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        near = get_close_matches(name.lower(), names, n=5, cutoff=0.5)
        hint = f" Nearest: {', '.join(near)}." if near else ""
        raise ConfigError(f"{library} has no classification model {name!r}.{hint}")


def _built(build: Callable[..., nn.Module], tries: Sequence[Mapping[str, Any]]) -> nn.Module:
    """Build with the first of these arguments that the model takes: the name of the image size differs."""
    for arguments in tries[:-1]:
        try:
            return build(**arguments)
        except TypeError:
            continue
    return build(**tries[-1])


def _torchvision(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    models = _library("torchvision").models
    _known("torchvision", name, models.list_models(module=models))
    channels, height, width = shape
    if channels != 3:
        raise ConfigError(f"torchvision's models take 3 channels, but these images have {channels}; use a timm model.")
    single = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    build = partial(models.get_model, name, weights=None, num_classes=classes, **single)
    return _built(build, ({"image_size": height}, {"input_size": (height, width)}, {}))


def _timm(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    timm = _library("timm")
    if not timm.is_model(name):
        _known("timm", name, timm.list_models())
    channels, height, width = shape
    build = partial(timm.create_model, name, pretrained=False, num_classes=classes, in_chans=channels)
    return _built(build, ({"img_size": (height, width)}, {}))


LIBRARIES = {"torchvision": _torchvision, "timm": _timm}


def _network(library: str, name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    model = LIBRARIES[library](name, classes, shape)
    repeatable(model)
    return model


def _body(library: str, name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    return split(_network(library, name, classes, shape), classes)[0]


@lru_cache(maxsize=64)
def _device(library: str, name: str, classes: int, shape: tuple[int, ...]) -> str:
    """The device on which the network can be made and run: meta, or else the CPU. Refuses unusable networks."""
    tried: Exception | None = None
    for device in ("meta", "cpu"):
        with keys.keyed("outside"), torch.device(device), torch.no_grad():
            try:
                model = _network(library, name, classes, shape)
                head = classifier_of(model, classes)
                whole = ends_in(model, head, torch.zeros(2, *shape))
            except ConfigError as error:
                raise ConfigError(f"{library}:{short(name)} cannot be used: {error}") from None
            except REFUSALS as error:
                tried = error
                continue
        if whole:
            return device
        raise ConfigError(f"{library}:{short(name)} cannot be used: its scores are not its classifier's output.")
    raise ConfigError(
        f"{library}:{name} cannot take images of {' x '.join(map(str, shape))}: {short(str(tried))}. "
        "Set data.image_size to what it takes, or choose another model."
    )


@dataclass(frozen=True)
class Outside(Family):
    """A model of another library."""

    library: ClassVar[str]
    model: ClassVar[str] = "NAME"

    pretrained: Literal[False] = setting(False, "must be false: pretrained weights are not supported yet")

    @classmethod
    def of(cls, model: str) -> type[Family]:
        return type(cls.__name__, (cls,), {"model": model})

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        what = (self.library, self.model, classes, tuple(shape))
        with keys.keyed("outside"), torch.device(_device(*what)):
            body, head = split(_network(*what), classes)
        return [(self.library, LibraryBody(body.to("meta"), partial(_body, *what))), ("fc", head.to("meta"))]


@MODELS.register("torchvision:NAME")
@dataclass(frozen=True)
class Torchvision(Outside):
    """By its name in `torchvision.models.list_models()`."""

    description: ClassVar[str] = "any classification model of torchvision, untrained, such as torchvision:densenet121"
    library: ClassVar[str] = "torchvision"


@MODELS.register("timm:NAME")
@dataclass(frozen=True)
class Timm(Outside):
    """By its name in `timm.list_models()`."""

    description: ClassVar[str] = "any classification model of timm, untrained, such as timm:mobilenetv3_small_050"
    library: ClassVar[str] = "timm"
