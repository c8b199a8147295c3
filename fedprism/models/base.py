"""What a model is: an ordered list of named blocks, cut into a body and a head at one of its fully connected layers.

A family (one a file beside this one) is a frozen dataclass: its fields are its settings, its `blocks` are the network.
`Arch` is a family with settings, classes, shape of the data, cut and number of features; it makes models whose first
weights are keyed by the seed and by each module's name in the uncut network, so they depend neither on the cut nor on
any other module.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedprism import keys
from fedprism.config import structure
from fedprism.errors import ConfigError, FedprismError
from fedprism.models import adapter as adapters
from fedprism.registry import Registry

MOST_KEPT = 20_000_000  # parameters of a first model that is kept in memory

Block = tuple[str, nn.Module]
Part = TypeVar("Part", bound=nn.Module)


def initialise(module: nn.Module, seed: int, prefix: str = "") -> None:
    """Draw every submodule's first weights under its own name, `prefix` and dots before it.

    A module that holds parameters says how to draw them by `reset_parameters`, as PyTorch's own layers do.
    """
    for name, part in _drawn(module, prefix):
        reset: Callable[[], None] | None = getattr(part, "reset_parameters", None)
        own = list(part.parameters(recurse=False))
        if own and reset is None:
            raise _undrawn(name, part, "parameters")
        if any(parameter.device.type != "cpu" for parameter in own):
            raise FedprismError(
                f"{name!r} is on {own[0].device}; first weights are drawn on the CPU: initialise, then move."
            )
        if reset is not None:
            with keys.keyed(seed, "init", name):
                reset()


class Whole(nn.Module):
    """A module whose `reset_parameters` draws everything inside it at once, under its own name."""

    def reset_parameters(self) -> None:
        raise NotImplementedError


def _drawn(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that draw their first weights, with their names: none from inside a `Whole`."""
    inside: set[int] = set()
    for name, part in module.named_modules(prefix=prefix):
        if id(part) not in inside:
            yield name, part
            if isinstance(part, Whole):  # asked after it was drawn, since that may replace what is inside
                inside.update(id(inner) for inner in part.modules())


def _undrawn(name: str, part: nn.Module, what: str) -> FedprismError:
    return FedprismError(
        f"{name!r} ({type(part).__name__}) holds {what} but does not say how to fill them; "
        "give its class a `reset_parameters` method."
    )


def _allocate(name: str, block: nn.Module) -> nn.Module:
    """Storage for a block that was made without any; `initialise` fills it, so it must be able to."""
    for inner, part in _drawn(block, name):
        if any(True for _ in part.buffers(recurse=False)) and not hasattr(part, "reset_parameters"):
            raise _undrawn(inner, part, "buffers")
    return block.to_empty(device="cpu")


def fresh(make: Callable[[], Part], seed: int, name: str) -> Part:
    """A new part of a model with its first weights, drawn under its name; the global generator is left as it was.

    >>> policy = fresh(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU()), seed=0, name="policy")
    """
    with torch.device("meta"):
        part = make()
    initialise(_allocate(name, part), seed, name)
    return part


def last_linear(module: nn.Module) -> nn.Linear:
    """The fully connected layer that gives the class scores: the last one in a head or a model."""
    linears = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not linears:
        raise FedprismError(f"{type(module).__name__} has no fully connected layer; a head ends in one.")
    return linears[-1]


@dataclass(frozen=True)
class Family:
    """A kind of network: the fields of a subclass are its settings, as `config.setting` describes them."""

    description: ClassVar[str] = ""  # one line for `fedprism list models`
    takes: ClassVar[str] = "images"  # or texts
    smallest: ClassVar[int] = 1  # the fewest pixels a side that leave anything to classify

    def blocks(self, classes: int, shape: tuple[int, ...]) -> list[Block]:
        """The whole network in order; a fully connected layer is a block of its own, after `flatten`.

        A pooling of maxima stands before its ReLU, not after it: the same bits, gradients too, for less work.
        `shape` is (channels, height, width) of images, (length, words) of texts.
        """
        raise NotImplementedError

    @classmethod
    def of(cls, model: str) -> type[Family]:
        """The family of one model of another library; for families that are filed as `library:NAME`."""
        raise NotImplementedError


class Models(Registry[type[Family]]):
    """Families by name. `timm:resnet18` is found in what is filed as `timm:NAME`."""

    def __getitem__(self, name: str) -> type[Family]:
        library, model = self._library(name)
        return super().__getitem__(library).of(model) if library else super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and bool(self._library(name)[0]))

    def _library(self, name: str) -> tuple[str, str]:
        """What the library is filed as, and the model's name there; two empty texts where it is no such name."""
        library, _, model = name.partition(":")
        filed = f"{library}:NAME"
        return (filed, model) if name != filed and super().__contains__(filed) else ("", "")


MODELS = Models("model")


class Model(nn.Module):
    """A body, which turns inputs into features `[batch, width]`, and a head, which turns those into class scores."""

    def __init__(self, body: nn.Sequential, head: nn.Sequential) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Images `[batch, channels, height, width]` or texts `[batch, length]` to scores `[batch, classes]`."""
        return self.head(self.body(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Arch:
    """One architecture, as a value: two that are equal make models with the same leaves.

    >>> Arch("lenet-bn", classes=10, shape=(3, 16, 16)).width
    64
    """

    name: str
    classes: int
    shape: tuple[int, ...]  # of images: channels, height, width; of texts: length, words
    head_layers: int | str = 1  # how many of the fully connected layers are the head; "all" becomes their number
    settings: tuple[tuple[str, Any], ...] = ()  # of the family; defaults are filled in
    features: int | None = None  # bring the body's features to so many; None: as the family makes them
    adapter: str = "pool"  # how: pool (means of neighbours, no parameters) or linear (a layer)

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
        if self.features in (None, self._body_width()):  # nothing to adapt: equal to an Arch that never asked
            object.__setattr__(self, "features", None)
            object.__setattr__(self, "adapter", "pool")

    def _check_shape(self, kind: type[Family]) -> None:
        given = "texts" if len(self.shape) == 2 else "images"
        if kind.takes != given:
            fit = ", ".join(name for name, family in MODELS.items() if family.takes == given)
            raise ConfigError(f"{self.name} takes {kind.takes}, and these data are {given}; models for {given}: {fit}.")
        least = kind.smallest
        if given == "images" and min(self.shape[1:]) < least:
            height, width = self.shape[1:]
            raise ConfigError(
                f"{self.name} needs images of {least} x {least} pixels or more, and these are {height} x {width}; "
                f"set data.image_size to {least} or more (in explain, --image-size), or choose another model."
            )

    def model(self, seed: int) -> Model:
        """Body and head with their first weights, on the CPU."""
        if self.parameters > MOST_KEPT:
            return self._drawn(seed)
        return copy.deepcopy(
            _first(self, seed, torch.get_default_dtype())
        )  # every client begins with them: drawn once, then copied

    def _drawn(self, seed: int) -> Model:
        blocks, cut = self._blocks()
        for name, block in blocks:
            initialise(_allocate(name, block), seed, name)
        return _model(blocks, cut)

    def hollow(self) -> Model:
        """Body and head without storage, on the meta device: for names, shapes and numbers of parameters."""
        return _model(*self._blocks())

    @cached_property
    def width(self) -> int:
        """How many features go from body to head."""
        return self.features or self._body_width()

    @cached_property
    def parameters(self) -> int:
        """How many parameters body and head have."""
        return sum(parameter.numel() for parameter in self.hollow().parameters())

    @property
    def label(self) -> str:
        """The name, with what differs from the defaults.

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
        """The family's network without storage: weights are drawn once, by key, and not first by the constructors."""
        with torch.device("meta"):
            return MODELS[self.name](**dict(self.settings)).blocks(self.classes, self.shape)

    def _body_width(self) -> int:
        """How many features the body makes before they are adapted."""
        blocks = self._uncut()
        return _linear(blocks[self._cut(blocks)][1]).in_features

    def _blocks(self) -> tuple[list[Block], int]:
        """The whole network without storage, and which block is the head's first."""
        blocks = self._uncut()
        cut = self._cut(blocks)
        if self.features is None:
            return blocks, cut
        with torch.device("meta"):
            between = adapters.adapt(self.adapter, _linear(blocks[cut][1]), self.features)
        return [*blocks[:cut], ("adapter", between), *blocks[cut:]], cut + 1

    def _cut(self, blocks: list[Block]) -> int:
        """Which block is the head's first."""
        linears = [place for place, (_, block) in enumerate(blocks) if isinstance(block, nn.Linear)]
        wanted = self.head_layers
        if not isinstance(wanted, int) or isinstance(wanted, bool) or not 1 <= wanted <= len(linears):
            has = "1 fully connected layer" if len(linears) == 1 else f"{len(linears)} fully connected layers"
            can = ", ".join(str(layers) for layers in range(1, len(linears) + 1))
            raise ConfigError(
                f"model.head_layers is {self.head_layers!r}, and {self.name} has {has}; set it to {can} or all."
            )
        return linears[-wanted]


@lru_cache(maxsize=4)
def _first(arch: Arch, seed: int, dtype: torch.dtype) -> Model:
    return arch._drawn(seed)


def _linear(block: nn.Module) -> nn.Linear:
    assert isinstance(block, nn.Linear)
    return block


def _model(blocks: list[Block], cut: int) -> Model:
    return Model(nn.Sequential(OrderedDict(blocks[:cut])), nn.Sequential(OrderedDict(blocks[cut:])))
