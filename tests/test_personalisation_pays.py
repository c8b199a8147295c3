"""What the built-in federation is for: one model for all falls behind, personalisation pays. Takes a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedprism import api
from fedprism.config import Config, structure
from fedprism.records import Protocol, outcome


@pytest.mark.slow
def test_fedbn_is_five_points_above_local_over_three_seeds_and_fedavg_falls_behind(tmp_path: Path) -> None:
    config = structure({"evaluate": {"every": 5, "moments": ["received"]}}, Config)  # fewer tests, in half the time
    runs = api.compare(config, ["local", "fedavg", "fedbn"], [0, 1, 2], "x", out=tmp_path)
    mean = {
        m: sum(100 * outcome(r.record, Protocol()).mean for r in runs if r.method == m) / 3
        for m in ("local", "fedavg", "fedbn")
    }
    assert mean["fedbn"] >= mean["local"] + 5, mean
    assert mean["fedavg"] < mean["local"], mean
