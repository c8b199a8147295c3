"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
import pkgutil
from importlib import import_module

import pytest

import fedprism

MODULES = [m.name for m in pkgutil.walk_packages(fedprism.__path__, "fedprism.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    result = doctest.testmod(import_module(name))
    assert result.failed == 0


def test_there_are_examples() -> None:
    found = (test for name in MODULES for test in doctest.DocTestFinder().find(import_module(name)))
    assert sum(len(test.examples) for test in found) > 10
