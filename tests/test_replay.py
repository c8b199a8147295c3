"""Recorded steps without a GPU: everything of the `cuda-graphs` engine but the recording itself, which runs again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedprism.config import Config, structure
from fedprism.engines import compiled
from fedprism.engines.client import make_info
from fedprism.engines.cuda_graphs import CudaGraphs
from fedprism.engines.inprocess import InProcess
from fedprism.engines.loop import Loop, make_loop
from fedprism.federation import Federation, make_federation
from fedprism.methods import METHODS
from fedprism.methods.base import Method
from tests.helpers import CPU, Collect, cut, same

RAW: dict[str, Any] = {
    "data": {"partition": {"name": "domain", "clients": 3}, "samples": 40},
    "train": {"rounds": 3, "epochs": 2, "batch": 8},
    "evaluate": {"moments": ["received", "trained", "adapted", "global"]},
}


@pytest.fixture(scope="module")
def unequal() -> Federation:
    """Three clients of 40, 21 and 17 images: whole batches, a last one that is smaller, and one that is merged."""
    config = structure(RAW, Config)
    return cut(make_federation(config.data, 0), [40, 21, 17])


def trained(kind: type, method: Method, config: Config, federation: Federation) -> tuple[Loop, Collect]:
    info = make_info(config, federation.names, federation.classes, federation.shape)
    loop = make_loop(method, config, info, federation, kind(method, config, info, federation, CPU), CPU)
    seen = Collect()
    loop.run([seen])
    return loop, seen


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_gives_the_bits_of_the_reference(method: str, slots: int, unequal: Federation) -> None:
    config = structure({**RAW, "run": {"slots": slots}}, Config)
    one, seen = trained(InProcess, METHODS[method](), config, unequal)
    two, replayed = trained(CudaGraphs, METHODS[method](), config, unequal)
    assert same(one.server, two.server)
    assert all(same(one.states[client], two.states[client]) for client in unequal.names)
    assert [replace(r, seconds={}) for r in seen.records] == [replace(r, seconds={}) for r in replayed.records]
    assert two.engine.reasons == {}  # type: ignore[attr-defined]


def as_traced(graph: torch.fx.GraphModule, examples: object) -> torch.fx.GraphModule:
    return graph


@pytest.mark.parametrize("method", list(METHODS))
def test_a_traced_step_computes_the_same_to_rounding(
    method: str, unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph that would be compiled, run as it is: convolutions as products and batch norm written out included."""
    config = structure({**RAW, "train": {**RAW["train"], "rounds": 1}, "model": "lenet-bn"}, Config)
    monkeypatch.setattr(compiled, "inductor", as_traced)
    compiling = replace(config, run=replace(config.run, compile=True))
    torch.set_default_dtype(torch.float64)
    try:
        one, _ = trained(InProcess, METHODS[method](), config, unequal)
        two, _ = trained(CudaGraphs, METHODS[method](), compiling, unequal)
    finally:
        torch.set_default_dtype(torch.float32)
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    for name, tensor in one.server.items():
        assert torch.allclose(tensor, two.server[name], rtol=1e-9, atol=1e-9), name
    for client in unequal.names:
        state, other = one.states[client], two.states[client]
        for name, tensor in state.items():
            assert torch.allclose(tensor, other[name], rtol=1e-9, atol=1e-9), name
