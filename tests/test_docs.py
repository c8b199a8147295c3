"""The documentation keeps its word: it builds, its links lead somewhere, its code runs, its tables are the code's."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import shlex
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import fedprism
from fedprism.config import Config, ModelConfig, Named, plain, read, structure
from fedprism.data import DATASETS
from fedprism.data.folder import Options
from fedprism.engines.passes import SCHEDULES
from fedprism.federation import PARTITIONS, federation
from fedprism.methods import METHODS
from fedprism.methods.base import Method
from fedprism.models import MODELS
from tests.helpers import Collect, loop_for

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BYTES = re.compile(r"receives ([\d,]+) bytes and sends ([\d,]+) bytes")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(language: str) -> list[Any]:
    """Every block of a language, with its page and place as the test's id."""
    found = []
    for page in PAGES:
        matches = [code for kind, code in BLOCK.findall(text_of(page)) if kind == language]
        found += [pytest.param(code, id=f"{name_of(page)}-{place}") for place, code in enumerate(matches, 1)]
    return found


# --- rows of tables, made from the code ------------------------------------------------------------------------------


def row(name: str, f: dataclasses.Field[Any], kind: Any) -> str:
    """The line of a settings table that a dataclass field asks for."""
    cells = [f"`{name}`", f"`{flow(default_of(f))}`", values(f, kind), f.metadata.get("doc", "")]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def rows(cls: type, prefix: str = "") -> list[str]:
    """The lines that the settings of a dataclass ask for; sections in it are gone into."""
    kinds, found = typing.get_type_hints(cls), []
    for f in dataclasses.fields(cls):
        kind, name = kinds[f.name], prefix + f.name
        if dataclasses.is_dataclass(kind) and kind is not Named:
            found += rows(typing.cast(type, kind), f"{name}.")
        elif not (cls is ModelConfig and f.name == "settings"):  # what it holds is written beside `name`
            found.append(row(name, f, kind))
    return found


def default_of(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def flow(value: Any) -> str:
    """A value as it is written in YAML, on one line; a name without settings is just the name."""
    if isinstance(value, Named) and not value.settings:
        value = value.name
    return yaml.safe_dump(plain(value), default_flow_style=True, sort_keys=False, width=10_000).removesuffix("...\n").strip()


def values(f: dataclasses.Field[Any], kind: Any) -> str:
    """What may stand there: the range if there is one, else the choices or the type."""
    expected = f.metadata.get("expected")
    if not expected:
        return words(kind)
    return f"{expected}, or `null`" if type(None) in typing.get_args(kind) else str(expected)


def words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{flow(choice)}`" for choice in typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(words(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {words(typing.get_args(kind)[0])}".replace("number", "numbers")
    plain_words = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`", type(None): "`null`"}
    return plain_words.get(kind, "a name, or a mapping with `name`" if kind is Named else "see below")


def assert_rows(page: Path, wanted: list[str]) -> None:
    lines = set(text_of(page).splitlines())
    missing = [line for line in wanted if line not in lines]
    assert not missing, f"{name_of(page)} should hold these lines:\n" + "\n".join(missing)
