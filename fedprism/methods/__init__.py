"""The methods, one file each; read `base.py` first."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedprism import keys
from fedprism.config import Named, plain, structure
from fedprism.errors import ConfigError
from fedprism.methods.base import Method
from fedprism.registry import Registry

METHODS: Registry[type[Method]] = Registry("method")

_FILE_MODULE = "fedprism_method_"  # prefix of modules made from a user's file
_SESSION = "session:"  # prefix of methods without a file

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
    if name.endswith(".py") or ".py:" in name:
        return _from_file(name)
    if name.startswith(_SESSION):
        raise ConfigError(
            f"the method {name.removeprefix(_SESSION)} was written in a Python session, so it cannot be found again; "
            "give it to `fp.load` or `fp.resume` as `method=`, or keep it in a file of its own."
        )
    if ":" in name:
        return _from_module(name)
    if name not in METHODS:
        for entry in entry_points(group="fedprism.methods", name=name):
            return _checked(entry.load(), f"entry point {name!r}")
    return METHODS[name]


def available() -> dict[str, type[Method]]:
    """Every method that a name reaches: the built-in ones, then those of installed packages."""
    found = dict(METHODS.items())
    for name in sorted({entry.name for entry in entry_points(group="fedprism.methods")} - set(METHODS)):
        try:
            found[name] = find(name)
        except (ConfigError, ImportError, AttributeError, SyntaxError) as error:
            warnings.warn(f"the installed method {name!r} cannot be loaded: {error}", stacklevel=2)
    return found


def named(method: Method) -> Named:
    """A method as a configuration stores it: the name to find it by, and all its hyper-parameters."""
    cls = type(method)
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls.id in METHODS and METHODS[cls.id] is cls:
        name = cls.id
    elif getattr(module, cls.__qualname__, None) is not cls:  # made in a function or a session
        name = f"{_SESSION}{cls.__qualname__}"
    elif cls.__module__ == "__main__" or cls.__module__.startswith(_FILE_MODULE):
        name = f"{Path(file).resolve()}:{cls.__qualname__}" if file else f"{_SESSION}{cls.__qualname__}"
    else:
        name = f"{cls.__module__}:{cls.__qualname__}"
    return Named(name, plain(method))


def _from_module(name: str) -> type[Method]:
    path, _, wanted = name.partition(":")
    try:
        return _checked(getattr(import_module(path), wanted), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"the method {name!r} cannot be imported: {error}.") from error


def _from_file(name: str) -> type[Method]:
    path, _, wanted = name.rpartition(":") if ".py:" in name else (name, "", "")
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"there is no file {path!r} to take the method {wanted or '?'} from.")
    key = f"{_FILE_MODULE}{keys.key(str(file))}"
    module = sys.modules.get(key)
    if module is None:
        spec = importlib.util.spec_from_file_location(key, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path!r} cannot be loaded as Python.")
        module = sys.modules[key] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[key]
            if isinstance(error, SyntaxError | ImportError | NameError | AttributeError | TypeError):
                raise ConfigError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
            raise
    classes = {
        n: c for n, c in vars(module).items() if isinstance(c, type) and issubclass(c, Method) and c.__module__ == key
    }
    if not wanted and len(classes) == 1:
        (wanted,) = classes
    if wanted not in classes:
        raise ConfigError(
            f"{path!r} holds the methods {sorted(classes) or 'none'}, not {wanted!r}; write {path}:CLASS."
        )
    return _checked(classes[wanted], name)


def _checked(cls: Any, where: str) -> type[Method]:
    # Without the decorator, a class inherits its parent's fields and silently ignores its own.
    if not (isinstance(cls, type) and issubclass(cls, Method) and "__dataclass_fields__" in vars(cls)):
        raise ConfigError(f"{where} is {cls!r}; expected a frozen dataclass that derives from fedprism.Method.")
    return cls


for _file in _FILES:
    import_module(f"fedprism.methods.{_file}")
