"""`kill -9` at any moment, then resume: the records are those of a run that was never killed, bit by bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fedprism import api
from fedprism.config import Config, dump, read, structure
from fedprism.records import RunDirectory
from tests.harness import RUN, killed, same

pytestmark = pytest.mark.full

RESUME = "import sys, fedprism as fp; fp.resume(sys.argv[1])"
ROUNDS = 14
AUGMENT = {"fedbn": ["flip", {"name": "rotate", "degrees": 30}]}  # as FedBN's own experiments have it


def write_config(path: Path, method: str) -> Path:
    raw = {
        "method": method,
        "data": {
            "partition": {"name": "domain", "clients": 3},
            "samples": 40,
            "augment": AUGMENT.get(method, "none"),
        },
        "train": {"rounds": ROUNDS},
        "clients": {"participation": 0.67, "dropout": 0.1},
        "run": {"checkpoint_every": 3, "keep_rounds": [4]},
    }
    path.write_text(dump(structure(raw, Config)), encoding="utf-8")
    return path


# Of each kind of state one; all methods are resumed, without a kill, in the conformance suite.
METHODS = ["fedbn", "scaffold", "lg-fedavg", "fedpick", "fedsce"]


@pytest.mark.parametrize("method", [pytest.param(m, marks=() if m == "fedpick" else pytest.mark.slow) for m in METHODS])
def test_killed_twice_and_resumed_is_the_straight_run(tmp_path: Path, method: str) -> None:
    config = write_config(tmp_path / "config.yaml", method)
    straight = api.run_config(read(config), "x", out=tmp_path / "straight")
    moments = random.Random(method)  # a fixed moment for each method, another one for each
    run = tmp_path / "killed"
    first = killed([RUN, str(config), str(run)], run, after=moments.randint(2, 5), delay=moments.uniform(0, 0.1))
    second = killed([RESUME, str(run)], run, after=moments.randint(7, 10), delay=moments.uniform(0, 0.1))
    assert first, "the first process ended before it could be killed"
    resumed = api.resume(run)
    assert resumed.status == straight.status == "finished"
    assert (run / "metrics.jsonl").read_bytes() == (straight.path / "metrics.jsonl").read_bytes(), (
        f"second kill: {second}"
    )
    assert (run / "classes.json").read_bytes() == (straight.path / "classes.json").read_bytes()
    with RunDirectory.open(run) as a, RunDirectory.open(straight.path) as b:
        for one, other in ((a.latest(), b.latest()), (a.best(), b.best()), (a.at(4), b.at(4))):
            assert one is not None
            assert other is not None
            assert one.round == other.round
            assert same(one.server, other.server)
            assert all(same(one.clients[c], other.clients[c]) for c in one.clients)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", "fedavg")
    run = api.run_config(read(config, ["train.rounds=2"]), "x", out=tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file()}
    assert api.resume(run.path).status == "finished"
    assert {
        path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"
    } == {path: when for path, when in before.items() if path.name != ".lock"}
