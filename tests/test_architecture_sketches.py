"""docs/architecture.md claims that its sketches need no special case: each block is taken from the page and trained."""

from __future__ import annotations

import re
import sys
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedprism.config import Config, structure
from fedprism.engines.events import Snapshot
from fedprism.engines.wire import deserialise, serialise
from fedprism.federation import federation
from fedprism.methods.base import Method
from tests.helpers import Collect, loop_for, same

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
NAMES = [
    "FedTGP",
    "FedFomo",
    "FedAMP",
    "PerFedAvg",
    "PFedMe",
    "FedKD",
]


@pytest.fixture(scope="module")
def sketches() -> ModuleType:
    module = ModuleType("sketches")
    sys.modules["sketches"] = module
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), module.__dict__)
    return module


def test_no_sketch_is_forgotten(sketches: ModuleType) -> None:
    found = [
        n for n, c in vars(sketches).items() if is_dataclass(c) and issubclass(c, Method) and c.__module__ == "sketches"
    ]
    assert found == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_sketch_trains_two_rounds(sketches: ModuleType, name: str) -> None:
    method: Method = getattr(sketches, name)()
    config = structure(
        {
            "train": {"rounds": 2},
            "clients": {"participation": 0.67},
            "evaluate": {"moments": ["received", "trained", "adapted"]},
        },
        Config,
    )
    loop = loop_for(method, config, federation("digits-skew", clients=3, seed=0, samples=40))
    seen = Collect()
    assert loop.run([seen]) == "finished"
    assert all(not record.failed for record in seen.records)
    assert all(
        state is None or all(t.isfinite().all() for t in state.values() if t.is_floating_point())
        for state in loop.states.values()
    )
    trained = {client for record in seen.records for client in record.cohort}
    fresh = method.build(loop.info.arch, "plain", loop.info, 0).state_dict()
    for client in trained:
        state = loop.states[client]
        assert any(not torch.equal(state[n], fresh[n]) for n in fresh if fresh[n].is_floating_point())
    assert set(seen.records[-1].scores) == {"received", "trained", "adapted"}


@pytest.mark.parametrize("name", NAMES)
def test_sketch_gives_the_same_bits_again_and_after_a_resume(sketches: ModuleType, name: str) -> None:
    method: Method = getattr(sketches, name)()
    config = structure({"train": {"rounds": 2}, "model": "mlp", "clients": {"participation": 0.67}}, Config)
    data = federation("digits-skew", clients=3, seed=0, samples=40)
    seen = Collect()
    straight = loop_for(method, config, data)
    straight.run([seen])
    middle = seen.snapshots[1]
    clients = {c: None if s is None else deserialise(serialise(s)) for c, s in middle.clients.items()}
    resumed = loop_for(method, config, data)
    resumed.run([], start=Snapshot(1, deserialise(serialise(middle.server)), clients))
    assert same(straight.server, resumed.server)
    assert all(same(straight.states[c], resumed.states[c]) for c in data.names)


def test_different_architectures_share_fedtgp_prototypes(sketches: ModuleType) -> None:
    config = structure({"train": {"rounds": 2}, "model": {"per_client": ["lenet-bn", "mlp"]}}, Config)
    loop = loop_for(sketches.FedTGP(), config, federation("digits-skew", clients=3, seed=0, samples=40))
    assert loop.run([]) == "finished"
    assert loop.states["plain"].keys() != loop.states["tinted"].keys()


def test_compressed_traffic_is_counted_as_sent(sketches: ModuleType) -> None:
    config = structure({"train": {"rounds": 1}}, Config)
    seen = Collect()
    loop = loop_for(sketches.FedKD(), config, federation("digits-skew", clients=2, seed=0, samples=40))
    loop.run([seen])
    whole = sum(t.numel() * t.element_size() for t in loop.server.values())
    assert 0 < seen.records[1].up["plain"] < whole
