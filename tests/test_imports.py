"""Imports point one way: data <- federation <- models <- methods <- engines <- records <- report <- api <- cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fedprism"
ORDER = [
    "errors",
    "atomic",
    "keys",
    "registry",
    "config",
    "data",
    "federation",
    "models",
    "methods",
    "engines",
    "records",
    "report",
    "api",
    "bench",
    "cli",
]


def layer(module: str) -> int:
    """The place of `fedprism.engines.loop` in the order; the package itself and __main__ stand above all."""
    parts = module.split(".")
    return ORDER.index(parts[1]) if len(parts) > 1 and parts[1] in ORDER else len(ORDER)


def imports(path: Path) -> list[str]:
    """Every fedprism module that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} uses a relative import"
            found += [
                f"{node.module}.{alias.name}" if node.module == "fedprism" else node.module for alias in node.names
            ]
    return [name for name in found if name.split(".")[0] == "fedprism"]


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_left(path: Path) -> None:
    own = layer(".".join(("fedprism", *path.relative_to(PACKAGE).with_suffix("").parts)))
    wrong = [name for name in imports(path) if layer(name) > own]
    assert not wrong, f"{path.name} imports {wrong}, which stand to its right in {ORDER}"


def test_every_part_has_its_place() -> None:
    parts = {path.name if path.is_dir() else path.stem for path in PACKAGE.iterdir()} - {
        "__init__",
        "__main__",
        "__pycache__",
        "py",
    }
    assert parts == set(ORDER)
