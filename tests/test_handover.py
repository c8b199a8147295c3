"""A client's round in a fresh process that is given files alone equals the in-process run, bit by bit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fedprism.config import Config, structure
from fedprism.engines.client import Failure, Job, make_info
from fedprism.engines.handover import read_result, run_task, write_task
from fedprism.federation import Federation, federation
from fedprism.methods import make, named
from tests.helpers import loop_for, same_result

KINDS = {
    "fedbn": {},
    "scaffold": {},
    "fedproto": {},
    "fedcp": {"gumbel": "always"},
    "fedpick": {},
    "fedsce": {"delta": "normalised"},
}
AUGMENT = {"fedbn": ["flip", {"name": "rotate", "degrees": 30}]}  # as FedBN's own experiments have it


@pytest.fixture(scope="module")
def two() -> Federation:
    return federation("digits-skew", clients=2, seed=3, samples=30)


def job_of(method: str, data: Federation, round: int, **train: object) -> Job:
    raw = {"seed": 3, "method": {"name": method, **KINDS.get(method, {})}, "train": {"rounds": 3, **train}}
    config = structure({**raw, "data": {"augment": AUGMENT.get(method, "none")}}, Config)
    held = replace(data.data, augment=config.data.augment)
    config = replace(config, data=held, method=named(make(config.method)))
    info = make_info(config, data.names, data.classes, data.shape)
    return Job(make(config.method), config, info, data.clients["tinted"], round)


@pytest.mark.parametrize("method", KINDS)
def test_a_fresh_process_gives_the_same_bits(two: Federation, tmp_path: Path, method: str) -> None:
    """First round (no state yet) and second round, each in a process of its own, against the loop in this one."""
    job = job_of(method, two, 0)
    loop = loop_for(job.method, job.config, two)
    for round in (0, 1):
        request = loop._request("tinted", loop.now(round))
        folder = tmp_path / str(round)
        write_task(folder, replace(job, round=round), request.state, request.down)
        subprocess.run([sys.executable, "-m", "fedprism.engines.handover", str(folder)], check=True, timeout=120)
        (here,) = loop.engine.train(round, {"tinted": request}).values()
        there = read_result(folder)
        assert same_result(here, there)
        loop.one_round(round)


def test_only_the_task_is_handed_over(two: Federation, tmp_path: Path) -> None:
    job = job_of("fedavg", two, 0)
    loop = loop_for(job.method, job.config, two)
    request = loop._request("tinted", loop.now(0))
    write_task(tmp_path, job, request.state, request.down)
    assert {path.name for path in tmp_path.iterdir()} == {"task.json", "data.safetensors", "down.safetensors"}


def test_a_failure_is_handed_back(two: Federation, tmp_path: Path) -> None:
    job = job_of("fedavg", two, 0, batch=8, optimizer={"lr": 1e30})
    loop = loop_for(job.method, job.config, two)
    request = loop._request("tinted", loop.now(0))
    write_task(tmp_path, job, request.state, request.down)
    run_task(tmp_path)
    answer = read_result(tmp_path)
    assert isinstance(answer, Failure)
    assert answer.non_finite
    assert loop.engine.train(0, {"tinted": request}) == {"tinted": answer}
