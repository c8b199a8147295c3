"""Compiled steps of the engine `cuda-graphs`, without a GPU: tracing, what a step is rewritten to, and the compiler."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from fedprism import keys
from fedprism.config import Config, structure
from fedprism.engines.choose import resolve_compile
from fedprism.engines.cuda import rewrite, trace, tune
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.inprocess import InProcess
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Client, Context, Method, Pass
from fedprism.methods.factors import multiplied
from fedprism.models.alexnet_bn import AlexNetBN
from tests.harness import (
    CPU,
    PARTS_OF_TENSORS,
    THREE_ROUNDS,
    by_method,
    compiled_and_plain,
    engine_run,
    left_by,
    three_sizes,
)

pytestmark = pytest.mark.full

DATA, TRAIN = THREE_ROUNDS["data"], THREE_ROUNDS["train"]


@pytest.fixture(scope="module")
def unequal() -> Federation:
    return three_sizes()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs that would be compiled: they run as they are."""
    found: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(trace, "inductor", lambda graph, examples: found.append(graph) or graph)
    return found


def compiling(config: Config) -> Config:
    return replace(config, run=replace(config.run, compile=True))


# --- traced steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", by_method(default=("fedavg", "fedcp", "fedfomo", "fedsce")))
@pytest.mark.usefixtures("graphs")
def test_a_traced_step_computes_the_same_to_rounding(method: str, unequal: Federation) -> None:
    """The graph that would be compiled, run as it is: convolutions as products and batch norm written out included."""
    train = {**TRAIN, "rounds": 1, "epochs": 1}
    config = structure({"data": DATA, "train": train, "model": "lenet-bn"}, Config)
    torch.set_default_dtype(torch.float64)
    try:
        one, _ = engine_run(InProcess, METHODS[method](), config, unequal)
        two, _ = engine_run(CudaGraphs, METHODS[method](), compiling(config), unequal)
    finally:
        torch.set_default_dtype(torch.float32)
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    for name, tensor in one.server.items():
        assert torch.allclose(tensor, two.server[name], rtol=1e-9, atol=1e-9), name
    for client_id in unequal.names:
        # FedKD's factors are given up to their signs; what they make is not.
        state, other = (multiplied(left_by(loop)[client_id], {}) for loop in (one, two))
        for name, tensor in state.items():
            assert torch.allclose(tensor, other[name], rtol=1e-9, atol=1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"momentum": 0.9, "weight_decay": 1e-3}, {"name": "adam", "lr": 1e-3}])
@pytest.mark.usefixtures("graphs")
def test_the_traced_update_is_the_optimisers(settings: dict[str, Any], unequal: Federation) -> None:
    """On batches of one size, with a limit to gradients: Adam and SGD as PyTorch has them."""
    train = {**TRAIN, "rounds": 2, "optimizer": settings, "clip": 0.5}
    torch.set_default_dtype(torch.float64)
    try:
        config = structure({**THREE_ROUNDS, "train": train}, Config)
        one, _ = engine_run(InProcess, METHODS["fedavg"](), config, unequal)
        two, _ = engine_run(CudaGraphs, METHODS["fedavg"](), compiling(config), unequal)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in one.server.items():
        assert torch.allclose(tensor, two.server[name], rtol=1e-8, atol=1e-8), name


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
def test_a_step_is_compiled_for_each_architecture(unequal: Federation) -> None:
    models = ["lenet-bn", {"name": "mlp", "hidden": [16]}, {"name": "mlp", "hidden": [24]}]
    raw = {**THREE_ROUNDS, "model": {"per_client": models}, "method": "local", "run": {"slots": 1}}
    config = structure(raw, Config)
    one, _ = engine_run(InProcess, METHODS["local"](), config, unequal)
    two, _ = engine_run(CudaGraphs, METHODS["local"](), compiling(config), unequal)
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    for client_id in unequal.names:
        state, other = left_by(one)[client_id], left_by(two)[client_id]
        assert all(torch.allclose(state[name], other[name], rtol=1e-3, atol=1e-4) for name in state)


@dataclass(frozen=True)
class LogsTwice(Method):
    """A pass that logs a value twice per step."""

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, "first", epochs=1), Pass(self.second, "second")]

    def second(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(client, x, y)
        client.log("value", loss)
        client.log("value", 3 * loss)
        return loss


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
def test_what_compiled_steps_log_is_counted_for_each_pass(unequal: Federation) -> None:
    config = structure({**THREE_ROUNDS, "train": {**TRAIN, "rounds": 2}}, Config)
    _, seen = engine_run(InProcess, LogsTwice(), config, unequal)
    _, replayed = engine_run(CudaGraphs, LogsTwice(), compiling(config), unequal)
    for record, other in zip(seen.records, replayed.records, strict=True):
        for client_id, logs in record.logs.items():
            assert other.logs[client_id] == pytest.approx(dict(logs), rel=1e-3)


# --- in a traced graph -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_compiler_gets_no_sum_of_two_products(unequal: Federation, graphs: list[torch.fx.GraphModule]) -> None:
    """FediOS scores a batch three times with one head; of products over a small batch it could not make such a sum."""
    raw = {**THREE_ROUNDS, "train": {**TRAIN, "rounds": 1}, "run": {"slots": 1}}
    engine_run(CudaGraphs, METHODS["fedios"](), compiling(structure(raw, Config)), unequal)
    (graph,) = graphs
    from_products = [
        node
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.addmm.default and node.args[0].target is torch.ops.aten.mm.default
    ]
    assert len(from_products) == 1
    assert from_products[0].meta["val"].shape == from_products[0].args[0].meta["val"].shape


def test_products_with_a_large_matrix_are_left_to_cublas(
    unequal: Federation, graphs: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward: those with the weights, not the one that gives their gradient."""
    monkeypatch.setattr(rewrite, "LARGE", 128 * 512)
    model, train = {"name": "mlp", "hidden": [128, 512]}, {**TRAIN, "rounds": 1}
    config = structure({**THREE_ROUNDS, "model": model, "train": train, "run": {"slots": 1}}, Config)
    one, _ = engine_run(InProcess, METHODS["fedavg"](), config, unequal)
    two, _ = engine_run(CudaGraphs, METHODS["fedavg"](), compiling(config), unequal)
    left = [node for node in graphs[0].graph.nodes if node.target is torch.ops.fedprism.product.default]
    weights = {tuple(node.args[1].meta["val"].shape) for node in left}
    assert weights == {(768, 128), (128, 512), (512, 128)}
    for name, tensor in one.server.items():
        assert torch.allclose(tensor, two.server[name], rtol=1e-3, atol=1e-4), name


# --- what a step is rewritten to -------------------------------------------------------------------------------------


def test_which_convolutions_become_products() -> None:
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3)
    product = rewrite._conv2d(x, weight, padding=1)
    assert product is not None
    assert torch.allclose(product, functional.conv2d(x, weight, padding=1), atol=1e-5)
    last = weight.contiguous(memory_format=torch.channels_last)
    wide = torch.randn(200, 4, 3, 3)  # more numbers than the unfolded input has
    for x_, weight_, more in (
        (x, last, {}),
        (x, wide, {}),
        (x, weight, {"stride": 2}),
        (x, weight, {"padding": "same"}),
    ):
        assert rewrite._conv2d(x_, weight_, **more) is None, more
    large = torch.empty(1, device="meta").expand(2000, 4, 100, 100)
    assert rewrite._conv2d(large, weight.to("meta")) is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("padding", [0, (2, 1)])
def test_convolutions_as_they_are_compiled(layout: torch.memory_format, padding: Any) -> None:
    draws = keys.generator("convolution")
    x, weight, bias = (
        torch.randn(*shape, generator=draws, dtype=torch.float64) for shape in ((3, 4, 9, 7), (5, 4, 3, 2), (5,))
    )
    inputs = [tensor.requires_grad_() for tensor in (x.to(memory_format=layout), weight, bias)]
    ours, theirs = rewrite._conv2d(*inputs, padding=padding), functional.conv2d(*inputs, padding=padding)
    assert ours is not None
    torch.testing.assert_close(ours, theirs)
    one, two = (torch.autograd.grad(scores.pow(3).sum(), inputs) for scores in (ours, theirs))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("sides", "kernel", "stride"),
    [((8, 8), 2, None), ((9, 11), 2, 2), ((9, 10), 3, 2), ((15, 13), 3, 2), ((7, 7), (3, 2), (1, 2)), ((9, 9), 2, 3)],
)
def test_pooling_as_it_is_compiled(
    sides: tuple[int, int], kernel: Any, stride: Any, layout: torch.memory_format
) -> None:
    """The first of several that are largest has the gradient, as in PyTorch; a number that is none stays so."""
    x = torch.randn(2, 3, *sides, generator=keys.generator("x"), dtype=torch.float64).relu()
    x = x.to(memory_format=layout).requires_grad_()
    ours, theirs = rewrite._max_pool2d(x, kernel, stride), functional.max_pool2d(x, kernel, stride)
    assert ours is not None
    assert torch.equal(ours, theirs)
    toward = torch.randn(theirs.shape, generator=keys.generator("toward"), dtype=torch.float64)
    one, two = (torch.autograd.grad(pooled, x, toward)[0] for pooled in (ours, theirs))
    torch.testing.assert_close(one, two)
    broken = x.detach().clone()
    broken[0, 0, 1, 1] = torch.nan
    pooled = rewrite._max_pool2d(broken, kernel, stride)
    assert torch.allclose(pooled, functional.max_pool2d(broken, kernel, stride), equal_nan=True)


def test_pooling_over_large_windows_is_left_as_it_is() -> None:
    assert rewrite._max_pool2d(torch.randn(1, 1, 32, 32), 16) is None
    assert rewrite._max_pool2d(torch.randn(1, 1, 32, 32), 5) is not None


def test_which_pooling_is_left_as_it_is() -> None:
    x = torch.rand(2, 3, 8, 8)
    for more in ({"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"return_indices": True}):
        assert rewrite._max_pool2d(x, 3, **more) is None, more
    assert rewrite._max_pool2d(x[0], 3) is None


def test_cross_entropy_as_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the batch's own labels alone: others may hold what PyTorch leaves out."""
    draws = keys.generator("scores")
    scores = torch.randn(6, 4, generator=draws, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(4, (6,), generator=draws)
    some = torch.where(labels == 1, -100, labels)
    written: list[Tensor] = []
    plain = rewrite._cross_entropy
    monkeypatch.setattr(rewrite, "_cross_entropy", lambda *args: written.append(plain(*args)) or written[-1])
    cases: list[tuple[Tensor, dict[str, Any], bool]] = [
        (labels, {}, True),
        (some, {}, False),
        (labels, {"label_smoothing": 0.1}, False),
        (labels, {"reduction": "sum"}, False),
        (labels, {"weight": torch.rand(4, generator=draws, dtype=torch.float64)}, False),
    ]
    for target, settings, rewritten in cases:
        written.clear()
        with rewrite.Rewritten(labels):
            ours = functional.cross_entropy(scores, target, **settings)
        assert bool(written) == rewritten, settings
        theirs = functional.cross_entropy(scores, target, **settings)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(loss, scores) for loss in (ours, theirs)))


@pytest.mark.parametrize("part", PARTS_OF_TENSORS.values(), ids=list(PARTS_OF_TENSORS))
def test_only_a_tensor_of_its_own_is_stored_whole(part: Any) -> None:
    """A compiler reads the others at wrong places."""
    x = part(torch.randn(4, 6, 9, 9))
    assert (rewrite._whole(x) is x) == (part is not PARTS_OF_TENSORS["whole"])
    assert rewrite._whole(torch.randn(4, 6, 9, 9).contiguous(memory_format=torch.channels_last)).stride(1) == 1


# --- the compiler ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "rounds", "resolved"), [("auto", 500, False), (False, 500, False)])
def test_nothing_is_compiled_on_a_cpu(asked: Any, rounds: int, resolved: bool) -> None:
    assert resolve_compile(asked, rounds, CPU) is resolved
    with pytest.raises(ConfigError, match="which is for a GPU"):
        resolve_compile(True, rounds, CPU)
    with pytest.raises(ConfigError, match="which is for cuda-graphs"):
        resolve_compile(True, rounds, torch.device("cuda"), "inprocess")
    assert resolve_compile("auto", rounds, torch.device("cuda"), "inprocess") is False


def test_a_compiler_is_quiet_and_other_threads_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    words = logging.getLogger("torch._inductor.select_algorithm")
    with tune.quiet():
        print("a table", file=sys.stderr)
        warnings.warn("a warning", stacklevel=1)
        words.error("an error that is none")
        other = threading.Thread(target=lambda: print("progress", file=sys.stderr))
        other.start()
        other.join()
    print("after", file=sys.stderr)
    assert capsys.readouterr().err == "progress\nafter\n"
    assert words.isEnabledFor(logging.ERROR)


def test_kernels_are_assembled_by_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what PyTorch's compiler compiles in other processes would be compiled again in this one."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(tune.os, "environ", found := dict[str, str]())
    tune._one_assembler()
    assert found == {}  # this PyTorch brings none
    program = tmp_path / "bin" / "ptxas"
    program.parent.mkdir()
    program.touch(0o755)
    tune._one_assembler()
    assert found == {"TRITON_PTXAS_PATH": str(program)}
    found["TRITON_PTXAS_PATH"] = "of the user"
    tune._one_assembler()
    assert found == {"TRITON_PTXAS_PATH": "of the user"}


@pytest.mark.slow
@pytest.mark.parametrize("large", [rewrite.LARGE, 1])
def test_the_compiler_itself_takes_a_step(
    large: int, unequal: Federation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PyTorch's compiler for the CPU, which needs a C++ compiler and a minute."""
    monkeypatch.setattr(rewrite, "LARGE", large)
    monkeypatch.setitem(tune.OPTIONS, "max_autotune_gemm_backends", "ATEN")  # a CPU has no Triton
    config = structure({**THREE_ROUNDS, "model": "cnn4", "train": {**TRAIN, "rounds": 1}}, Config)
    one, _ = engine_run(InProcess, METHODS["fedavg"](), config, unequal)
    two, _ = engine_run(CudaGraphs, METHODS["fedavg"](), compiling(config), unequal)
    for name, tensor in one.server.items():
        assert torch.allclose(tensor, two.server[name], rtol=1e-3, atol=1e-3), name
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS_OF_TENSORS.values(), ids=list(PARTS_OF_TENSORS))
def test_the_compiler_reads_parts_of_something_larger(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tune.OPTIONS, "max_autotune_gemm_backends", "ATEN")
    torch.testing.assert_close(*compiled_and_plain(part, CPU))


@pytest.mark.slow
def test_a_compiled_step_of_alexnet_has_the_gradients_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where rounding is next to none: windows that overlap, batch norm, layers that are left to cuBLAS.

    Not every side: of some, such as 96, PyTorch 2.13's compiler fails at the pooling; 2.11's does not.
    """
    monkeypatch.setitem(tune.OPTIONS, "max_autotune_gemm_backends", "ATEN")
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(AlexNetBN().blocks(10, (3, 64, 64))))
    model.double().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 64, 64, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    y, buffers = torch.randint(10, (8,)), dict(model.named_buffers())
    names, weights = zip(*model.named_parameters(), strict=True)

    def step(x: Tensor, y: Tensor, *given: Tensor, within: Any = None) -> list[Tensor]:
        own = [weight.detach().requires_grad_() for weight in given]
        state = {**dict(zip(names, own, strict=True)), **{name: buffer.clone() for name, buffer in buffers.items()}}
        with within or rewrite.Rewritten(y):
            loss = functional.cross_entropy(functional_call(model, state, (x,)), y)
        return [loss.detach(), *torch.autograd.grad(loss, own)]

    plain = step(x, y, *weights, within=nullcontext())
    given = [x, y, *(weight.detach() for weight in weights)]
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    rewrite.one_product_at_a_time(graph)
    rewrite.leave_large_products(graph)
    for found, expected in zip(tune.inductor(graph, given)(*given), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
