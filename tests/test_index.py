"""What is read from the source files is what the registries hold, and reading it imports nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedprism.engines.choose  # noqa: F401 - registers every engine
from fedprism import index
from fedprism.data import DATASETS
from fedprism.engines import ENGINES
from fedprism.federation import PARTITIONS
from fedprism.methods import GROUPS, METHODS
from fedprism.methods.server_optimizer import OPTIMIZERS
from fedprism.models import MODELS

REGISTRIES: dict[Any, Any] = {
    "methods": METHODS,
    "models": MODELS,
    "datasets": DATASETS,
    "partitions": PARTITIONS,
    "engines": ENGINES,
}
LISTED = {"methods": {"id", "group", "stays", "paper", "moment"}, "models": {"description"}}  # facts that are used


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_index_is_the_registry(kind: Any) -> None:
    found, registry = index.entries(kind), REGISTRIES[kind]
    built_in = [name for name, item in registry.items() if item.__module__.startswith("fedprism.")]
    assert list(found) == built_in
    for name, entry in found.items():
        item = registry[name]
        assert (entry.module, entry.definition) == (item.__module__, item.__qualname__)
        assert entry.path == Path(sys.modules[item.__module__].__file__ or "")
        assert LISTED.get(kind, set()) <= entry.facts.keys()
        assert {fact: getattr(item, fact) for fact in entry.facts} == entry.facts
        if kind not in LISTED:
            assert entry.line == (item.__doc__ or "").strip().partition("\n")[0]
            assert entry.line


def test_constants_are_read_too() -> None:
    assert index.constant("fedprism.methods", "GROUPS") == GROUPS
    assert index.constant("fedprism.methods.server_optimizer", "OPTIMIZERS") == OPTIMIZERS


def test_code_lines_leave_out_prose_and_imports(tmp_path: Path) -> None:
    source = '"""What it is for."""\n\n# why\nclass Three:\n    """Of\n    two."""\n\n    x = 1\n    y = 2  # because\n'
    (tmp_path / "counted.py").write_text(source)
    assert index.code_lines(tmp_path / "counted.py") == 3


def test_the_index_imports_nothing() -> None:
    code = "import sys; from fedprism import index; index.entries('methods'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
