"""The methods, one file each; read `base.py` first."""

from __future__ import annotations

import warnings
from importlib import import_module

from fedprism.config import Named, structure
from fedprism.errors import ConfigError
from fedprism.methods.base import Method
from fedprism.plugins import SESSION, Plugins

METHODS: Plugins[Method] = Plugins("method", Method)

_FILES = (
    "local",
    "fedavg",
    "fedprox",
    "fedbn",
    "silobn",
    "fedper",
    "fedrep",
    "lg_fedavg",
    "ditto",
    "scaffold",
    "fedproto",
    "fedrod",
    "fedfomo",
    "copa",
    "moon",
    "fedphp",
    "finetune",
    "fedbabu",
    "fml",
    "feddyn",
    "fedamp",
    "pfedvem",
    "feddistill",
    "fedtgp",
    "fedkd",
    "pfedme",
    "per_fedavg",
    "apfl",
    "fedcp",
    "fed_co2",
    "fedpick",
    "fedios",
    "fedsce",
)


# The groups by which methods are listed, in this order; a method sets its own as `group`.
GROUPS = (
    "alone",
    "global",
    "fine-tuning",
    "split",
    "two models",
    "regularised",
    "prototypes",
    "distillation",
    "mixture",
    "server-side",
)


def register(cls: type[Method]) -> type[Method]:
    """Register a method under its `id`."""
    return METHODS.register(cls.id)(cls)


def make(named: Named) -> Method:
    """Make a method from its name and hyper-parameters."""
    return structure(dict(named.settings), find(named.name), "method")


def find(name: str) -> type[Method]:
    """The class behind a name: a built-in id, an entry point, `path/to/file.py:Class` or `package.module:Class`."""
    if name.startswith(SESSION):
        raise ConfigError(
            f"the method {name.removeprefix(SESSION)} was written in a Python session, so it cannot be found again; "
            "give it to `fp.load` or `fp.resume` as `method=`, or keep it in a file of its own."
        )
    return METHODS.find(name)


def available() -> dict[str, type[Method]]:
    """Every method that a name reaches: the built-in ones, then those of installed packages."""
    found = dict(METHODS.items())
    for name in METHODS.installed():
        try:
            found[name] = find(name)
        except (ConfigError, ImportError, AttributeError, SyntaxError) as error:
            warnings.warn(f"the installed method {name!r} cannot be loaded: {error}", stacklevel=2)
    return found


def named(method: Method) -> Named:
    """A method as a configuration stores it: the name to find it by, and all its hyper-parameters."""
    return METHODS.named(method)


for _file in _FILES:
    import_module(f"fedprism.methods.{_file}")
