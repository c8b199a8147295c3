"""Classes by name, and names of their objects: built in, from an installed package, or from somebody's own file."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedprism import keys, limits
from fedprism.config import Named, plain, structure
from fedprism.errors import ConfigError, short, shown
from fedprism.registry import Registry

T = TypeVar("T")

SESSION = "session:"  # prefix of names of classes that were written in a Python session, which no name finds again
_FILE_MODULE = "fedprism_file_"  # prefix of modules made from somebody's file


class Plugins(Registry[type[T]], Generic[T]):
    """A registry of frozen dataclasses derived from `base`, which finds classes outside fedprism, too."""

    def __init__(self, kind: str, base: type[T]) -> None:
        super().__init__(kind)
        self.base, self.group = base, f"fedprism.{kind}s"

    def find(self, name: str) -> type[T]:
        """The class behind a name: a built-in id, an entry point, `path/to/file.py:Class` or `package.module:Class`."""
        limits.check_text(name)
        if name.startswith(SESSION):  # `executes` asks nobody about it
            raise ConfigError(
                f"the {self.kind} {shown(name.removeprefix(SESSION))} was written in a Python session, so it cannot be "
                "found again; keep it in a file of its own."
            )
        if name.endswith(".py") or ".py:" in name:
            return self._from_file(name)
        if ":" in name:
            return self._from_module(name)
        if name not in self:
            for entry in entry_points(group=self.group, name=name):
                return self._checked(entry.load(), f"entry point {name!r}")
        return self[name]

    def make(self, named: Named, where: str) -> T:
        """An object from its name and settings; `where` is the key that an error names."""
        try:
            cls = self.find(named.name)
        except ConfigError as error:
            raise ConfigError(f"{error} @ {where}") from error.__cause__
        return structure(dict(named.settings), cls, where)

    def built_in(self, item: T) -> bool:
        """Is it one of the package's own?"""
        return any(known is type(item) for _, known in self.items())

    def named(self, item: T) -> Named:
        """An object as a configuration stores it: the name to find its class by, and all its settings."""
        cls = type(item)
        name = next((name for name, known in self.items() if known is cls), None)
        return Named(self._place(cls) if name is None else name, plain(item))

    def _place(self, cls: type[T]) -> str:
        module = sys.modules.get(cls.__module__)
        file = getattr(module, "__file__", None)
        if getattr(module, cls.__qualname__, None) is not cls:  # made in a function
            return f"{SESSION}{cls.__qualname__}"
        if cls.__module__ == "__main__" or is_from_file(cls.__module__):
            return f"{Path(file).resolve()}:{cls.__qualname__}" if file else f"{SESSION}{cls.__qualname__}"
        return f"{cls.__module__}:{cls.__qualname__}"

    def installed(self) -> Iterator[str]:
        """The names of entry points that are not built in."""
        yield from sorted({entry.name for entry in entry_points(group=self.group)} - set(self))

    def executes(self, name: str) -> str:
        """The file or module of somebody's own that `find` would execute, "" if none: what is built in or installed
        under this name, or what this process has already executed."""
        if name.startswith(SESSION):
            return ""  # it cannot be found
        if name.endswith(".py") or ".py:" in name:
            try:
                file = Path(name.rpartition(":")[0] if ".py:" in name else name).resolve()
            except (OSError, ValueError, RuntimeError):
                return name
            return "" if _key(file) in sys.modules else str(file)
        module, colon, _ = name.partition(":")
        return module if colon and module not in sys.modules else ""

    def _from_module(self, name: str) -> type[T]:
        path, _, wanted = name.partition(":")
        if not all(part.isidentifier() for part in (*path.split("."), wanted)):
            raise ConfigError(
                f"the {self.kind} {shown(name)} is neither path/to/file.py:Class nor package.module:Class."
            )
        try:
            return self._checked(getattr(import_module(path), wanted), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"the {self.kind} {shown(name)} cannot be imported: {short(str(error))}.") from error

    def _from_file(self, name: str) -> type[T]:
        path, _, wanted = name.rpartition(":") if ".py:" in name else (name, "", "")
        file = Path(os.path.realpath(path))  # unlike `Path.resolve`, no error where links go in a circle
        if not os.path.isfile(file):  # `Path.is_file` raises an error where a name is too long
            raise ConfigError(f"there is no file {shown(path)} to take the {self.kind} {short(wanted) or '?'} from.")
        module = _module_of(file, path)
        classes = {
            n: c
            for n, c in vars(module).items()
            if isinstance(c, type) and issubclass(c, self.base) and c.__module__ == module.__name__
        }
        if not classes:
            parent = f"fedprism.{self.base.__name__}"
            raise ConfigError(f"{path!r} holds no {self.kind}: none of its classes derives from {parent}.")
        if not wanted and len(classes) == 1:
            (wanted,) = classes
        if wanted not in classes:
            given = f", not {wanted!r}" if wanted else ""
            raise ConfigError(f"{path!r} holds the {self.kind}s {sorted(classes)}{given}; write {path}:CLASS.")
        return self._checked(classes[wanted], name)

    def _checked(self, cls: Any, where: str) -> type[T]:
        # Without the decorator, a class inherits its parent's fields and silently ignores its own.
        if not (isinstance(cls, type) and issubclass(cls, self.base) and "__dataclass_fields__" in vars(cls)):
            raise ConfigError(
                f"{where} is {cls!r}; expected a frozen dataclass that derives from fedprism.{self.base.__name__}."
            )
        return cls


def is_from_file(module: str) -> bool:
    """Was this module made of path/to/file.py?"""
    return module.startswith(_FILE_MODULE)


def _key(file: Path) -> str:
    """The name of the module that is made of a file."""
    return f"{_FILE_MODULE}{keys.key(str(file))}"


def _module_of(file: Path, named: str) -> ModuleType:
    """The file as a module; it is run once per process."""
    key = _key(file)
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{named!r} cannot be loaded as Python.")
    module = sys.modules[key] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[key]
        if isinstance(error, SyntaxError | ImportError | NameError | AttributeError | TypeError):
            raise ConfigError(f"{named} cannot be loaded: {type(error).__name__}: {error}") from error
        raise
    return module
