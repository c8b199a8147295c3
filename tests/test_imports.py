"""Imports point one way: federation <- models <- methods <- store <- round <- engines <- records <- report <- api."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.harness import ORDER

PACKAGE = Path(__file__).parent.parent / "fedprism"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in ORDER)
HARDWARE = {"cuda", "gpu", "replay", "graph"}  # words that the round and a method's interface do without


def name_of(path: Path) -> str:
    """The module of a file: `fedprism.round.loop`."""
    return ".".join(("fedprism", *path.relative_to(PACKAGE).with_suffix("").parts))


def layer(module: str) -> int:
    """The place of `fedprism.round.loop` in the order; the package itself and __main__ stand above all."""
    parts = module.split(".")
    return ORDER.index(parts[1]) if len(parts) > 1 and parts[1] in ORDER else len(ORDER)


def imports(path: Path) -> list[str]:
    """Every fedprism module that a file imports, wherever in the file, with the name that it takes from there."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} uses a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] == "fedprism"]


def imported_from(part: str, by: str) -> dict[str, list[str]]:
    """What files of one part of the package (a folder or a file) import from another one: file -> names."""
    files = [path for path in FILES if name_of(path) == by or name_of(path).startswith(f"{by}.")]
    assert files, f"there is no {by}"
    found = {name_of(path): [name for name in imports(path) if f"{name}.".startswith(f"{part}.")] for path in files}
    return {file: names for file, names in found.items() if names}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_left(path: Path) -> None:
    own = layer(name_of(path))
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


# --- within a layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "part"),
    [
        ("fedprism.round", "fedprism.engines"),
        ("fedprism.store", "fedprism.round"),
        ("fedprism.engines.cuda", "fedprism.engines.processes"),
        ("fedprism.engines.processes", "fedprism.engines.cuda"),
    ],
)
def test_one_part_does_not_know_the_other(by: str, part: str) -> None:
    assert imported_from(part, by) == {}


@pytest.mark.parametrize(
    ("by", "part", "allowed"),
    [
        ("fedprism.engines.inprocess", "fedprism.engines.cuda", "fedprism.engines.cuda.operations"),
        ("fedprism.records", "fedprism.round", "fedprism.round.events"),
    ],
)
def test_one_part_knows_a_single_file_of_the_other(by: str, part: str, allowed: str) -> None:
    found = [name for names in imported_from(part, by).values() for name in names]
    assert found
    assert [name for name in found if not f"{name}.".startswith(f"{allowed}.")] == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "round").glob("*.py")), ids=lambda p: p.name)
def test_a_round_does_not_know_its_hardware(path: Path) -> None:
    assert words(path) & HARDWARE == set()


def test_a_methods_interface_does_not_know_its_hardware() -> None:
    assert words(PACKAGE / "methods" / "base.py") & {*HARDWARE, "device"} == set()


def words(path: Path) -> set[str]:
    """Every word of a file, in lower case: `torch.device` has two, `device_of` is one."""
    return set(re.findall(r"\w+", path.read_text(encoding="utf-8").lower()))
