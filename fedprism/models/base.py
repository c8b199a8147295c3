"""A model is an ordered list of named blocks, split into a body and a head at one of its fully connected layers.

A family is a frozen dataclass: its fields are its settings, its `blocks` are the network. `Arch` is a family with
settings, classes, input shape, split point and number of features. It makes models whose initial weights are keyed by
the seed and each module's name in the whole network, so that they do not depend on the split point or other modules.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedprism import keys, limits
from fedprism.config import structure
from fedprism.errors import ConfigError, FedprismError, short
from fedprism.models import adapter as adapters
from fedprism.registry import Registry

MAX_CACHED = 20_000_000  # parameters of an initial model that stays in memory

Block = tuple[str, nn.Module]
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def initialise(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Initialise every submodule's weights, keyed by its name with `prefix`.

    A module with parameters needs a `reset_parameters` method, as PyTorch's own layers have.
    """
    for name, inner in _initialised(module, prefix):
        reset: Callable[[], None] | None = getattr(inner, "reset_parameters", None)
        own = list(inner.parameters(recurse=False))
        if own and reset is None:
            raise _no_reset(name, inner, "parameters")
        if any(parameter.device.type != "cpu" for parameter in own):
            raise FedprismError(
                f"{name!r} is on {own[0].device}; initial weights are drawn on the CPU: initialise, then move."
            )
        if reset is not None:
            with keys.keyed(seed, "init", name):
                reset()


class Whole(nn.Module):
    """A module whose `reset_parameters` initialises everything inside it at once."""

    def reset_parameters(self) -> None:
        raise NotImplementedError


def _initialised(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules to initialise, with their names; those inside a `Whole` are skipped."""
    inside: set[int] = set()
    for name, inner in module.named_modules(prefix=prefix):
        if id(inner) not in inside:
            yield name, inner
            if isinstance(inner, Whole):  # after the yield: initialisation may replace what is inside
                inside.update(id(each) for each in inner.modules())


def _no_reset(name: str, module: nn.Module, what: str) -> FedprismError:
    return FedprismError(
        f"{name!r} ({type(module).__name__}) has {what} but no way to initialise them; "
        "give its class a `reset_parameters` method."
    )


def _allocate(name: str, block: nn.Module) -> nn.Module:
    """Allocate a block of the meta device; refuse one that `initialise` cannot fill."""
    for inner_name, inner in _initialised(block, name):
        if any(True for _ in inner.buffers(recurse=False)) and not hasattr(inner, "reset_parameters"):
            raise _no_reset(inner_name, inner, "buffers")
    return block.to_empty(device="cpu")


def fresh(make: Callable[[], ModuleT], seed: int, name: str) -> ModuleT:
    """Make a new module of a model with initial weights keyed by its name; the global generator is unchanged.

    >>> policy = fresh(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU()), seed=0, name="policy")
    """
    with _hollow(name):
        module = make()
    _refuse_large(name, sum(parameter.numel() for parameter in module.parameters()))
    initialise(_allocate(name, module), seed, name)
    return module


@contextmanager
def _hollow(name: str) -> Iterator[None]:
    """Make modules on the meta device, without storage: `initialise` draws the weights, so constructors need not."""
    try:
        with torch.device("meta"):
            yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ConfigError(f"{name} is too large for any computer: {short(str(error))}. Choose a smaller one.") from None


def _refuse_large(name: str, parameters: int) -> None:
    """Refuse a model of which memory does not hold two: there are at least the server's and a client's."""
    what = f"the {parameters:,} parameters of {name}, at the server and one client,"
    limits.check_memory(what, 2 * 4 * parameters, "choose a smaller model, or smaller images")


def last_linear(module: nn.Module) -> nn.Linear:
    """The fully connected layer that outputs the class scores: the last one of a head or a model."""
    linears = [inner for inner in module.modules() if isinstance(inner, nn.Linear)]
    if not linears:
        raise FedprismError(f"{type(module).__name__} has no fully connected layer; a head ends in one.")
    return linears[-1]


@dataclass(frozen=True)
class Family:
    """A family of networks; the fields of a subclass are its settings, made with `config.setting`."""

    description: ClassVar[str] = ""  # one line for `fedprism list models`
    takes: ClassVar[str] = "images"  # or texts
    smallest: ClassVar[int] = 1  # minimum number of pixels per side

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        """The whole network in order; each fully connected layer is a separate block, after `flatten`.

        Max pooling comes before its ReLU: values and gradients are bitwise equal, with less work. `shape` is
        (channels, height, width) for images, (length, vocabulary size) for texts.
        """
        raise NotImplementedError

    @classmethod
    def of(cls, model: str) -> type[Family]:
        """The family of one model of another library; for families registered as `library:NAME`."""
        raise NotImplementedError


class FamilyRegistry(Registry[type[Family]]):
    """Families by name; `timm:resnet18` is found in the family registered as `timm:NAME`."""

    def __getitem__(self, name: str) -> type[Family]:
        library, model = self._library(name)
        return super().__getitem__(library).of(model) if library else super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and bool(self._library(name)[0]))

    def _library(self, name: str) -> tuple[str, str]:
        """The library's registered name and the model's name in it; two empty strings for other names."""
        library, _, model = name.partition(":")
        registered = f"{library}:NAME"
        return (registered, model) if name != registered and super().__contains__(registered) else ("", "")


MODELS = FamilyRegistry("model")


class Model(nn.Module):
    """A body, which maps inputs to features `[batch, width]`, and a head, which maps features to class scores."""

    def __init__(self, body: nn.Sequential, head: nn.Sequential) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Images `[batch, channels, height, width]` or texts `[batch, length]` to scores `[batch, classes]`."""
        return self.head(self.body(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Arch:
    """An architecture as a value: equal ones make models with the same leaves.

    >>> Arch("lenet-bn", classes=10, shape=(3, 16, 16)).width
    64
    """

    name: str
    classes: int
    shape: tuple[int, ...]  # images: channels, height, width; texts: length, vocabulary size
    head_layers: int | str = 1  # number of fully connected layers in the head; "all" becomes their number
    settings: tuple[tuple[str, Any], ...] = ()  # of the family; defaults are filled in
    features: int | None = None  # width of the features from body to head; None: the family's own
    adapter: str = "pool"  # how to get that width: pool (means of neighbours, no parameters) or linear (a layer)

    def __post_init__(self) -> None:
        kind = MODELS[self.name]
        family = structure(dict(self.settings), kind, f"model {self.name}")
        filled = tuple((f.name, getattr(family, f.name)) for f in dataclasses.fields(family))
        object.__setattr__(self, "settings", filled)
        object.__setattr__(self, "shape", tuple(self.shape))
        self._check_shape(kind)
        if self.head_layers == "all":
            layers = sum(isinstance(block, nn.Linear) for _, block in self._uncut())
            object.__setattr__(self, "head_layers", layers)
        adapters.check(self.features, self.adapter)
        if self.features in (None, self._body_width()):  # nothing to adapt: equal to an Arch without features
            object.__setattr__(self, "features", None)
            object.__setattr__(self, "adapter", "pool")

    def _check_shape(self, kind: type[Family]) -> None:
        given = "texts" if len(self.shape) == 2 else "images"
        if kind.takes != given:
            fit = ", ".join(name for name, family in MODELS.items() if family.takes == given)
            raise ConfigError(f"{self.name} takes {kind.takes}, but the data are {given}; models for {given}: {fit}.")
        smallest = kind.smallest
        if given == "images" and min(self.shape[1:]) < smallest:
            height, width = self.shape[1:]
            raise ConfigError(
                f"{self.name} needs images of {smallest} x {smallest} pixels or more, and these are {height} x "
                f"{width}; set data.image_size to {smallest} or more (in explain, --image-size), or choose another "
                "model."
            )

    def model(self, seed: int) -> Model:
        """Body and head with initial weights, on the CPU."""
        if self.parameters > MAX_CACHED:
            return self._initialised(seed)
        # All clients start from these weights, so they are drawn once and then copied.
        return copy.deepcopy(_initial_model(self, seed, torch.get_default_dtype()))

    def _initialised(self, seed: int) -> Model:
        _refuse_large(self.label, self.parameters)
        blocks, cut = self._blocks()
        for name, block in blocks:
            initialise(_allocate(name, block), seed, name)
        return _model(blocks, cut)

    def hollow(self) -> Model:
        """Body and head on the meta device, without storage: for names, shapes and numbers of parameters."""
        return _model(*self._blocks())

    @cached_property
    def width(self) -> int:
        """The number of features from body to head."""
        return self.features or self._body_width()

    @cached_property
    def parameters(self) -> int:
        """The number of parameters of body and head."""
        return sum(parameter.numel() for parameter in self.hollow().parameters())

    @property
    def label(self) -> str:
        """The name, with all settings that differ from the defaults.

        >>> Arch("resnet18", classes=10, shape=(3, 32, 32), settings=(("width", 16),), features=64).label
        'resnet18 (width 16, features 64)'
        """
        settings = dict(self.settings)
        for f in dataclasses.fields(MODELS[self.name]):
            if f.default is not dataclasses.MISSING and f.default == settings[f.name]:
                del settings[f.name]
        own = {f.name: f.default for f in dataclasses.fields(self) if f.name in ("head_layers", "features", "adapter")}
        settings |= {name: getattr(self, name) for name, default in own.items() if getattr(self, name) != default}
        words = (f"{k} {list(v) if isinstance(v, tuple) else v}" for k, v in settings.items())
        return f"{self.name} ({', '.join(words)})" if settings else self.name

    @property
    def words(self) -> str:
        """The label and the number of parameters."""
        return f"{self.label}, {self.parameters:,} parameters"

    def _uncut(self) -> list[Block]:
        """The family's network on the meta device."""
        with _hollow(self.name):
            return MODELS[self.name](**dict(self.settings)).blocks(self.classes, self.shape)

    def _body_width(self) -> int:
        """The number of features of the body before the adapter."""
        blocks = self._uncut()
        return _linear(blocks[self._cut(blocks)][1]).in_features

    def _blocks(self) -> tuple[list[Block], int]:
        """The whole network on the meta device, and the index of the head's first block."""
        blocks = self._uncut()
        cut = self._cut(blocks)
        if self.features is None:
            return blocks, cut
        with _hollow(self.name):
            between = adapters.adapt(self.adapter, _linear(blocks[cut][1]), self.features)
        return [*blocks[:cut], ("adapter", between), *blocks[cut:]], cut + 1

    def _cut(self, blocks: list[Block]) -> int:
        """The index of the head's first block."""
        linears = [i for i, (_, block) in enumerate(blocks) if isinstance(block, nn.Linear)]
        wanted = self.head_layers
        if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= len(linears):
            has = "1 fully connected layer" if len(linears) == 1 else f"{len(linears)} fully connected layers"
            can = ", ".join(str(layers) for layers in range(1, len(linears) + 1))
            raise ConfigError(
                f"model.head_layers is {self.head_layers!r}, and {self.name} has {has}; set it to {can} or all."
            )
        return linears[-wanted]


@lru_cache(maxsize=4)
def _initial_model(arch: Arch, seed: int, dtype: torch.dtype) -> Model:
    return arch._initialised(seed)


def _linear(block: nn.Module) -> nn.Linear:
    assert isinstance(block, nn.Linear)
    return block


def _model(blocks: list[Block], cut: int) -> Model:
    return Model(nn.Sequential(OrderedDict(blocks[:cut])), nn.Sequential(OrderedDict(blocks[cut:])))
