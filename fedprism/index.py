"""What is built in: names and descriptions of methods, models, datasets, transforms, engines and so on.

The facts are read from the source files, which are parsed and not imported. Importing them would import PyTorch, which
takes seconds, and `fedprism list` and `fedprism show` need names and texts only. Nothing is stored, so nothing can go
stale; `tests/test_index.py` compares every entry with the registries.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

Definition = ast.ClassDef | ast.FunctionDef
Registered = Literal["methods", "models", "datasets", "partitions", "transforms", "aggregators", "engines"]

_ROOT = Path(__file__).parent.parent
_REGISTRIES: dict[Registered, tuple[str, str]] = {  # its name, and the module whose import fills it
    "methods": ("METHODS", "fedprism.methods"),
    "models": ("MODELS", "fedprism.models"),
    "datasets": ("DATASETS", "fedprism.data"),
    "partitions": ("PARTITIONS", "fedprism.federation"),
    "transforms": ("TRANSFORMS", "fedprism.transforms"),
    "aggregators": ("AGGREGATORS", "fedprism.aggregators"),
    "engines": ("ENGINES", "fedprism.engines.choose"),
}


@dataclass(frozen=True)
class IndexEntry:
    """A class or function in a registry."""

    name: str  # that it is registered under
    module: str
    definition: str  # its name in the module
    doc: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # class attributes that are literals, inherited ones too

    @property
    def line(self) -> str:
        """The first line of the docstring."""
        return self.doc.partition("\n")[0]

    @property
    def path(self) -> Path:
        return _path(self.module)


@cache
def entries(kind: Registered) -> Mapping[str, IndexEntry]:
    """Everything that is registered, by name, in the order of the registry."""
    registry, module = _REGISTRIES[kind]
    reader = _Reader(registry, package=".".join(module.split(".")[:2]))
    reader.read(module)
    return reader.entries


def constant(module: str, name: str) -> Any:
    """A literal that a module assigns to a name."""
    return _literals(_parse(_path(module)))[name]


def code_lines(path: Path) -> int:
    """Lines of a file without blank lines, comments, docstrings and imports."""
    prose: set[int] = set()
    tree = _parse(path)
    for node in (tree, *_statements(tree)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or node.body[0].lineno) + 1))
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return sum(1 for number, line in lines if number not in prose and line.strip() and not line.strip().startswith("#"))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """All statements inside, without their expressions."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, block, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from _statements(each)


# --- reading the files of one package --------------------------------------------------------------------------------


class _Reader:
    """Follows the imports within one package in Python's order, so that entries have the order of the registry."""

    def __init__(self, registry: str, package: str) -> None:
        self.entries: dict[str, IndexEntry] = {}
        self._registry, self._package = registry, package
        self._read: set[str] = set()
        self._classes: dict[str, ast.ClassDef] = {}

    def read(self, module: str) -> None:
        if module in self._read or not f"{module}.".startswith(f"{self._package}.") or not _path(module).is_file():
            return
        self.read(module.rpartition(".")[0])
        self._read.add(module)
        tree = _parse(_path(module))
        literals = _literals(tree)
        for node in tree.body:
            for name in _imported(node):
                self.read(name)
            if isinstance(node, ast.ClassDef):
                self._classes.setdefault(node.name, node)
            if isinstance(node, Definition):
                self._register(node, module, literals)
        for file in literals.get("_FILES", ()):  # one per method
            self.read(f"{module}.{file}")

    def _register(self, node: Definition, module: str, literals: Mapping[str, Any]) -> None:
        facts = self._facts(node) if isinstance(node, ast.ClassDef) else {}
        for decorator in node.decorator_list:
            match decorator:
                case ast.Name("register"):
                    name = facts["id"]
                case ast.Call(ast.Attribute(ast.Name(self._registry), "register"), [ast.Constant(str(name))]):
                    pass
                case ast.Call(ast.Attribute(ast.Name(self._registry), "register"), [ast.Name(variable)]):
                    name = literals[variable]
                case _:
                    continue
            self.entries[name] = IndexEntry(name, module, node.name, ast.get_docstring(node) or "", facts)

    def _facts(self, node: ast.ClassDef) -> dict[str, Any]:
        """Literals of the class and those that it inherits."""
        facts: dict[str, Any] = {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name) and base.id in self._classes:
                facts |= self._facts(self._classes[base.id])
        own = _literals(node)
        overridden = {name for name, _ in _assigned(node)} - own.keys()  # by what is no literal
        return {name: value for name, value in (facts | own).items() if name not in overridden}


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _path(module: str) -> Path:
    place = _ROOT.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _imported(node: ast.stmt) -> Iterator[str]:
    """The modules that an import statement may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _assigned(node: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for each in node.body:
        match each:
            case ast.Assign(targets, value):
                yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                yield name, value


def _literals(node: ast.Module | ast.ClassDef) -> dict[str, Any]:
    """The names that are assigned a literal."""
    found: dict[str, Any] = {}
    for name, value in _assigned(node):
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:  # no literal
            found.pop(name, None)
    return found
