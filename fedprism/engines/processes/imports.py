"""What a worker must import to make the parent's method again, and what keeps it from doing so."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from fedprism.config import Config, plain
from fedprism.data.images import CHANGES
from fedprism.engines.processes.worker import Setup
from fedprism.methods import METHODS, named
from fedprism.methods.base import Info, Method
from fedprism.models import MODELS
from fedprism.plugins import is_from_file
from fedprism.schedules import SCHEDULES
from fedprism.transforms import TRANSFORMS


def why_not(method: Method) -> str | None:
    """What keeps a method from worker processes and what to do about it; None: nothing."""
    if os.name != "posix" or not sys.executable:
        return "worker processes need Linux or macOS; set run.engine: auto"
    cls = type(method)
    name, homes = cls.__qualname__, _homes(method)
    for home in sorted(homes - {"__main__"}):
        if not is_from_file(home) and not _importable(home):
            what = f"the method {name}" if home == cls.__module__ else "a model or the like that the run may need"
            return (
                f"{what} is defined in the module {home!r}, which a worker does not find by that name; put its file "
                "where Python finds it (a folder of sys.path), or name the method as path/to/file.py:CLASS"
            )
    if getattr(sys.modules.get(cls.__module__), name, None) is not cls:
        return f"the method {name} was made in a function, where a worker cannot import it; put it into a file"
    if "__main__" not in homes:
        return None
    main = sys.modules["__main__"]
    what = f"the method {name}" if cls.__module__ == "__main__" else "a model or the like that the run may need"
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():
        return f"{what} was written in a Python session, where a worker cannot import it; put it into a file"
    if not _guarded(main):
        return (
            f"{what} is defined in {file}, and a worker that imports it there would run all of that file, training "
            'included; put what is no definition below `if __name__ == "__main__":`, or the method into another file'
        )
    return None


def make_setup(method: Method, config: Config, info: Info) -> Setup:
    homes, main = _homes(method), sys.modules["__main__"]
    begun: dict[str, str] = {}
    if "__main__" in homes:
        spec = getattr(main, "__spec__", None)
        file = str(Path(getattr(main, "__file__", "")).resolve())
        begun = {"init_main_from_path": file} if spec is None else {"init_main_from_name": spec.name}
    cls, asked = type(method), named(method).name
    return Setup(
        main=begun,
        modules=tuple(sorted(home for home in homes - {"__main__"} if not is_from_file(home))),
        file=asked if is_from_file(cls.__module__) else None,
        method=(cls.__module__, cls.__qualname__),
        settings=plain(method),
        config=config,
        info=info,
        dtype=torch.get_default_dtype(),
    )


def _homes(method: Method) -> set[str]:
    """The modules outside fedprism that define the method, or have filed something that a run may name."""
    tables = (METHODS, MODELS, CHANGES, SCHEDULES, TRANSFORMS)
    filed = [type(method)] + [kind for table in tables for _, kind in table.items()]
    return {kind.__module__ for kind in filed if kind.__module__.partition(".")[0] != "fedprism"}


def _importable(module: str) -> bool:
    """Would a new process find this very module by its name? `importlib.util.find_spec` says what is loaded here."""
    package = module.rpartition(".")[0]
    if package and not _importable(package):
        return False
    path = getattr(sys.modules[package], "__path__", ()) if package else None
    found = next(filter(None, (finder.find_spec(module, path) for finder in sys.meta_path)), None)
    loaded = getattr(sys.modules.get(module), "__spec__", None)
    return found is not None and loaded is not None and found.origin == loaded.origin


def _guarded(main: ModuleType) -> bool:
    """Does a program say what is not to be done when it is imported?"""
    tree = ast.parse(Path(str(main.__file__)).read_bytes())
    tests = [node.test for node in tree.body if isinstance(node, ast.If)]
    return any(isinstance(part, ast.Name) and part.id == "__name__" for test in tests for part in ast.walk(test))
