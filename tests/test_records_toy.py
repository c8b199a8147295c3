"""The toy run of the tests of records is itself reproducible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.toy_records import results, toy_config, toy_run


def test_a_toy_run_is_the_same_twice_and_depends_on_its_seed(tmp_path: Path) -> None:
    first, second = (results(toy_run(tmp_path / name)) for name in ("first", "second"))
    assert first == second
    other = results(toy_run(tmp_path / "other", replace(toy_config(), seed=1)))
    assert other["metrics.jsonl"] != first["metrics.jsonl"]
