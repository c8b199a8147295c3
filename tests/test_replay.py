"""Recorded steps without a GPU: everything of the `cuda-graphs` engine but the recording itself, which runs again."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
import weakref
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
from fedprism.engines import compiled, cuda_graphs, replay
from fedprism.engines.client import make_info
from fedprism.engines.cuda_graphs import CudaGraphs
from fedprism.engines.inprocess import InProcess
from fedprism.engines.loop import Loop, make_loop
from fedprism.engines.shelf import Arena
from fedprism.errors import ConfigError
from fedprism.federation import Federation, make_federation
from fedprism.methods import METHODS, base, make
from fedprism.methods.base import Me, Method, Now, Pass
from fedprism.models.alexnet_bn import AlexNetBN
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


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_gives_the_bits_of_the_reference(method: str, unequal: Federation) -> None:
    config = structure({**RAW, "train": {**RAW["train"], "rounds": 2}}, Config)
    one, seen = trained(InProcess, METHODS[method](), config, unequal)
    for slots in (1, 2) if method in ("fedpick", "scaffold", "pfedvem") else (2,):
        chosen = replace(config, run=replace(config.run, slots=slots))
        two, replayed = trained(CudaGraphs, METHODS[method](), chosen, unequal)
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
    train = {**RAW["train"], "rounds": 1, "epochs": 1}
    config = structure({"data": RAW["data"], "train": train, "model": "lenet-bn"}, Config)
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


def test_the_compiler_gets_no_sum_of_two_products(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """FediOS scores a batch three times with one head; of products over a small batch it could not make such a sum."""
    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(compiled, "inductor", lambda graph, examples: graphs.append(graph) or graph)
    config = structure({**RAW, "train": {**RAW["train"], "rounds": 1}, "run": {"slots": 1}}, Config)
    trained(CudaGraphs, METHODS["fedios"](), replace(config, run=replace(config.run, compile=True)), unequal)
    (graph,) = graphs
    from_products = [
        node
        for node in graph.graph.nodes
        if node.target is torch.ops.aten.addmm.default and node.args[0].target is torch.ops.aten.mm.default
    ]
    assert len(from_products) == 1
    assert from_products[0].meta["val"].shape == from_products[0].args[0].meta["val"].shape


def test_products_with_a_large_matrix_are_left_to_cublas(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: those with the weights, not the one that gives their gradient."""
    graphs: list[torch.fx.GraphModule] = []
    monkeypatch.setattr(compiled, "inductor", lambda graph, examples: graphs.append(graph) or graph)
    monkeypatch.setattr(compiled, "LARGE", 128 * 512)
    model = {"name": "mlp", "hidden": [128, 512]}
    config = structure({**RAW, "model": model, "train": {**RAW["train"], "rounds": 1}, "run": {"slots": 1}}, Config)
    one, _ = trained(InProcess, METHODS["fedavg"](), config, unequal)
    two, _ = trained(CudaGraphs, METHODS["fedavg"](), replace(config, run=replace(config.run, compile=True)), unequal)
    left = [node for node in graphs[0].graph.nodes if node.target is torch.ops.fedprism.product.default]
    weights = {tuple(node.args[1].meta["val"].shape) for node in left}
    assert weights == {(768, 128), (128, 512), (512, 128)}
    for name, tensor in one.server.items():
        assert torch.allclose(tensor, two.server[name], rtol=1e-3, atol=1e-4), name


def test_a_probe_between_rounds_changes_nothing(unequal: Federation) -> None:
    """Slots are counted after the first round by replaying their recordings."""
    config = structure(RAW, Config)
    one, seen = trained(InProcess, METHODS["fedpick"](), config, unequal)
    two, replayed = trained(CudaGraphs, METHODS["fedpick"](), config, unequal)
    assert config.run.slots == "auto"
    assert isinstance(two.engine, CudaGraphs)
    assert two.engine.takes is not None
    assert two.engine.takes > 0
    assert same(one.server, two.server)
    assert [replace(r, seconds={}) for r in seen.records] == [replace(r, seconds={}) for r in replayed.records]


def test_a_round_without_anybody_measures_nothing(unequal: Federation) -> None:
    """Memory, slots and recordings are measured in the first round in which somebody trains."""
    config = structure(RAW, Config)
    setup = trained(CudaGraphs, METHODS["fedavg"](), replace(config, train=replace(config.train, rounds=0)), unequal)[0]
    assert isinstance(setup.engine, CudaGraphs)
    assert setup.engine.train(1, {}) == {}
    assert setup.engine.trained == 0
    assert not setup.engine.probed


def test_out_of_memory_halves_the_slots_and_goes_on(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    config = structure({**RAW, "run": {"slots": 3}}, Config)
    one, _ = trained(InProcess, METHODS["fedbn"](), config, unequal)
    launch, calls = cuda_graphs.launch_round, []

    def short_of_memory(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room")
        return launch(*given)

    monkeypatch.setattr(cuda_graphs, "launch_round", short_of_memory)
    with pytest.warns(UserWarning, match="out of GPU memory: going on with 1 slots"):
        two, _ = trained(CudaGraphs, METHODS["fedbn"](), config, unequal)
    assert same(one.server, two.server)
    assert all(same(one.states[client], two.states[client]) for client in unequal.names)


def test_the_engine_makes_room_for_the_server(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that slots took and that the average needs: half of them go, and nothing is computed otherwise."""
    config = structure({**RAW, "run": {"slots": 3}}, Config)
    one, seen = trained(InProcess, METHODS["fedbn"](), config, unequal)
    plain, tried = base.average, list[Any]()

    def average(*given: Any) -> Any:
        tried.append(given)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("no room")
        return plain(*given)

    def never(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(base, "average", average)
    with pytest.warns(UserWarning, match="out of GPU memory: going on with 1 slots"):
        two, replayed = trained(CudaGraphs, METHODS["fedbn"](), config, unequal)
    assert same(one.server, two.server)
    assert [replace(r, seconds={}) for r in seen.records] == [replace(r, seconds={}) for r in replayed.records]
    monkeypatch.setattr(base, "average", never)
    with pytest.raises(torch.OutOfMemoryError):  # an engine that has nothing to give
        trained(InProcess, METHODS["fedbn"](), config, unequal)
    with pytest.raises(ConfigError, match="does not hold one client"), pytest.warns(UserWarning, match="with 1 slots"):
        trained(CudaGraphs, METHODS["fedbn"](), config, unequal)


@pytest.mark.parametrize(
    ("method", "optimizer", "slots"), [("fedpick", {"momentum": 0.9}, "auto"), ("fed-co2", {"weight_decay": 0.01}, 1)]
)
@pytest.mark.filterwarnings("ignore:out of GPU memory")
def test_out_of_memory_at_any_recording_changes_no_bits(
    method: str, optimizer: dict[str, Any], slots: Any, unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out when a slot is opened, or while the first, the second, ... stretch or batch is recorded."""
    train = {**RAW["train"], "rounds": 2, "optimizer": {"lr": 1e-3, **optimizer}}
    config = structure({**RAW, "train": train, "run": {"slots": slots}}, Config)
    one, seen = trained(InProcess, METHODS[method](), config, unequal)
    plain = CudaGraphs._open
    for fails in (0, 1, 2, 3, 5):
        made, opened = [0], [0]

        def recorder(work: Any, fails: int = fails, made: list[int] = made) -> Any:
            made[0] += 1
            if made[0] == fails:
                work()  # half-way: what it did is not to be seen
                raise torch.OutOfMemoryError("no room")
            return work

        def opening(engine: CudaGraphs, fails: int = fails, opened: list[int] = opened) -> Any:
            opened[0] += 1
            if fails == 0 and opened[0] == 2:
                raise torch.OutOfMemoryError("no room")
            return plain(engine)

        monkeypatch.setattr(CudaGraphs, "_open", opening)
        for module in (cuda_graphs, replay):
            monkeypatch.setattr(module, "again", recorder)
        two, replayed = trained(CudaGraphs, METHODS[method](), config, unequal)
        assert made[0] > fails
        assert same(one.server, two.server), fails
        assert all(same(one.states[client], two.states[client]) for client in unequal.names), fails
        assert [replace(r, seconds={}) for r in seen.records] == [replace(r, seconds={}) for r in replayed.records]


def test_one_client_that_does_not_fit_is_told(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(cuda_graphs, "launch_round", never)
    with pytest.raises(ConfigError, match="does not hold one client"):
        trained(CudaGraphs, METHODS["fedbn"](), structure({**RAW, "run": {"slots": 1}}, Config), unequal)


def test_states_that_do_not_fit_are_kept_on_the_host(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "SHARE", 0.0)
    config = structure({**RAW, "clients": {"participation": 0.5}}, Config)
    one, _ = trained(InProcess, METHODS["ditto"](), config, unequal)
    two, _ = trained(CudaGraphs, METHODS["ditto"](), config, unequal)
    assert not two.engine.data.fits  # type: ignore[attr-defined]
    assert all(same(one.states[client], two.states[client]) for client in unequal.names)


@dataclass(frozen=True)
class Waiting(Method):
    """A loss that asks for a value on the host."""

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(me, x, y)
        return loss * 2 if loss.item() > 1e9 else loss


@dataclass(frozen=True)
class Anew(Method):
    """A loss that is another one in every round."""

    def passes(self, me: Me, now: Now) -> list[Pass]:
        marks = [now.round]
        return [Pass(lambda me, x, y: Method.loss(self, me, x, y) * (1.0 if marks else 0.0))]


@pytest.mark.parametrize(
    ("method", "why"), [(Waiting(), "waits for the device: .item()"), (Anew(), "made anew in every round")]
)
def test_what_cannot_be_recorded_runs_step_by_step_and_says_why(
    method: Method, why: str, unequal: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    config = structure(RAW, Config)
    one, _ = trained(InProcess, method, config, unequal)
    two, _ = trained(CudaGraphs, method, config, unequal)
    assert same(one.server, two.server)
    assert why in two.engine.reasons["train"]  # type: ignore[attr-defined]
    assert [why in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    "change",
    [
        {"data": {**RAW["data"], "augment": ["flip", {"name": "rotate"}, "crop"]}},
        {"train": {**RAW["train"], "optimizer": {"name": "adam", "lr": 1e-3}, "schedule": "cosine", "clip": 1.0}},
        {"train": {**RAW["train"], "optimizer": {"momentum": 0.9, "weight_decay": 1e-3}, "last_batch": "drop"}},
        {"run": {"memory_format": "channels_last", "precision": "bf16"}},
        {"model": {"per_client": ["lenet-bn", "mlp", "cnn4"]}, "method": "local"},
        {"clients": {"participation": 0.6, "dropout": 0.3}},
    ],
    ids=["augment", "adam", "momentum", "bf16", "mixed", "partial"],
)
def test_whatever_is_set_the_bits_are_those_of_the_reference(change: dict[str, Any], unequal: Federation) -> None:
    config = structure({**RAW, "method": "fedpick", **change}, Config)
    one, seen = trained(InProcess, make(config.method), config, unequal)
    two, replayed = trained(CudaGraphs, make(config.method), config, unequal)
    assert all(same(one.states[client], two.states[client]) for client in unequal.names)
    assert [replace(r, seconds={}) for r in seen.records] == [replace(r, seconds={}) for r in replayed.records]


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "weight_decay": 1e-3}, {"name": "adam", "lr": 1e-3}])
def test_the_traced_update_is_the_optimisers(
    settings: dict[str, Any], unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On batches of one size, with a limit to gradients: Adam and SGD as PyTorch has them."""
    monkeypatch.setattr(compiled, "inductor", as_traced)
    torch.set_default_dtype(torch.float64)
    try:
        raw = {**RAW, "train": {**RAW["train"], "rounds": 2, "optimizer": settings, "clip": 0.5}}
        config = structure(raw, Config)
        one, _ = trained(InProcess, METHODS["fedavg"](), config, unequal)
        two, _ = trained(
            CudaGraphs, METHODS["fedavg"](), replace(config, run=replace(config.run, compile=True)), unequal
        )
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in one.server.items():
        assert torch.allclose(tensor, two.server[name], rtol=1e-8, atol=1e-8), name


@pytest.mark.parametrize(("asked", "rounds", "settled"), [("auto", 500, False), (False, 500, False)])
def test_nothing_is_compiled_on_a_cpu(asked: Any, rounds: int, settled: bool) -> None:
    assert compiled.settle(asked, rounds, CPU) is settled
    with pytest.raises(ConfigError, match="which is for a GPU"):
        compiled.settle(True, rounds, CPU)
    with pytest.raises(ConfigError, match="which is for cuda-graphs"):
        compiled.settle(True, rounds, torch.device("cuda"), "inprocess")
    assert compiled.settle("auto", rounds, torch.device("cuda"), "inprocess") is False


@pytest.mark.slow
@pytest.mark.parametrize("large", [compiled.LARGE, 1])
def test_the_compiler_itself_takes_a_step(
    large: int, unequal: Federation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With PyTorch's compiler for the CPU, which needs a C++ compiler and a minute."""
    monkeypatch.setattr(compiled, "LARGE", large)
    monkeypatch.setitem(compiled.OPTIONS, "max_autotune_gemm_backends", "ATEN")  # a CPU has no Triton
    config = structure({**RAW, "model": "cnn4", "train": {**RAW["train"], "rounds": 1}}, Config)
    one, _ = trained(InProcess, METHODS["fedavg"](), config, unequal)
    two, _ = trained(CudaGraphs, METHODS["fedavg"](), replace(config, run=replace(config.run, compile=True)), unequal)
    for name, tensor in one.server.items():
        assert torch.allclose(tensor, two.server[name], rtol=1e-3, atol=1e-3), name
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    assert capsys.readouterr().err == ""


PARTS: dict[str, Any] = {  # of something larger, which are not as they seem
    "chunk": lambda x: (x * 2).chunk(2, 1)[1],
    "shuffle": lambda x: (x + 1).view(4, 2, 3, 9, 9).transpose(1, 2).flatten(1, 2).chunk(2, 1)[0],
    "rows": lambda x: x[1:, :3],
    "crop": lambda x: (x - 1)[:, :3, 1:-1, 2:],
    "expand": lambda x: x[:, :3].mean((2, 3), keepdim=True).expand(-1, -1, 9, 9),
    "whole": lambda x: x[:, :3] * 1,
}


def convolved(x: Tensor, weight: Tensor, bias: Tensor, part: Any) -> Tensor:
    with compiled.Rewritten(torch.empty(0)):
        return functional.conv2d(part(x), weight, bias)


def compiled_and_plain(part: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=draw).to(device) for shape in ((4, 6, 9, 9), (5, 3, 3, 3), (5,))]
    graph = make_fx(lambda *args: convolved(*args, part), tracing_mode="fake")(*given)
    found = compiled.inductor(graph, given)(*given)
    return found[0] if isinstance(found, list | tuple) else found, functional.conv2d(part(given[0]), *given[1:])


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_the_compiler_reads_parts_of_something_larger(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled.OPTIONS, "max_autotune_gemm_backends", "ATEN")
    torch.testing.assert_close(*compiled_and_plain(part, CPU))


@pytest.mark.slow
def test_a_compiled_step_of_alexnet_has_the_gradients_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where rounding is next to none: windows that overlap, batch norm, layers that are left to cuBLAS.

    Not every side: of some, such as 96, PyTorch 2.13's compiler fails at the pooling; 2.11's does not.
    """
    monkeypatch.setitem(compiled.OPTIONS, "max_autotune_gemm_backends", "ATEN")
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(AlexNetBN().blocks(10, (3, 64, 64))))
    model.double().to(memory_format=torch.channels_last)
    x = torch.randn(8, 3, 64, 64, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    y, buffers = torch.randint(10, (8,)), dict(model.named_buffers())
    names, weights = zip(*model.named_parameters(), strict=True)

    def step(x: Tensor, y: Tensor, *given: Tensor, within: Any = None) -> list[Tensor]:
        own = [weight.detach().requires_grad_() for weight in given]
        state = {**dict(zip(names, own, strict=True)), **{name: buffer.clone() for name, buffer in buffers.items()}}
        with within or compiled.Rewritten(y):
            loss = functional.cross_entropy(functional_call(model, state, (x,)), y)
        return [loss.detach(), *torch.autograd.grad(loss, own)]

    plain = step(x, y, *weights, within=nullcontext())
    given = [x, y, *(weight.detach() for weight in weights)]
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    compiled._one_product_at_a_time(graph)
    compiled._leave_large_products(graph)
    for found, expected in zip(compiled.inductor(graph, given)(*given), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))
def test_only_a_tensor_of_its_own_is_stored_whole(part: Any) -> None:
    """A compiler reads the others at wrong places."""
    x = part(torch.randn(4, 6, 9, 9))
    assert (compiled._whole(x) is x) == (part is not PARTS["whole"])
    assert compiled._whole(torch.randn(4, 6, 9, 9).contiguous(memory_format=torch.channels_last)).stride(1) == 1


def test_steps_that_change_something_on_the_host_are_not_recorded_on_a_gpu() -> None:
    total, totals = torch.zeros(()), [torch.zeros(2), torch.zeros(3)]
    for device, refused in ((torch.device("cuda"), True), (CPU, False)):
        for change in (lambda: total.add_(1), lambda: torch._foreach_mul_(totals, 2)):
            with pytest.raises(replay.Waits, match="logged") if refused else nullcontext(), replay.Watch(device):
                change()
    assert total == 1  # of the CPU, where it is no host of another device
    with replay.Watch(torch.device("cuda")):
        torch.ones(2).sum().add(1)


def test_a_compiler_is_quiet_and_other_threads_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    words = logging.getLogger("torch._inductor.select_algorithm")
    with compiled.quiet():
        print("a table", file=sys.stderr)
        warnings.warn("a warning", stacklevel=1)
        words.error("an error that is none")
        other = threading.Thread(target=lambda: print("progress", file=sys.stderr))
        other.start()
        other.join()
    print("after", file=sys.stderr)
    assert capsys.readouterr().err == "progress\nafter\n"
    assert words.isEnabledFor(logging.ERROR)


def test_which_convolutions_become_products() -> None:
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3)
    product = compiled._conv2d(x, weight, padding=1)
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
        assert compiled._conv2d(x_, weight_, **more) is None, more
    large = torch.empty(1, device="meta").expand(2000, 4, 100, 100)
    assert compiled._conv2d(large, weight.to("meta")) is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("padding", [0, (2, 1)])
def test_convolutions_as_they_are_compiled(layout: torch.memory_format, padding: Any) -> None:
    draws = keys.generator("convolution")
    x, weight, bias = (
        torch.randn(*shape, generator=draws, dtype=torch.float64) for shape in ((3, 4, 9, 7), (5, 4, 3, 2), (5,))
    )
    inputs = [each.requires_grad_() for each in (x.to(memory_format=layout), weight, bias)]
    ours, theirs = compiled._conv2d(*inputs, padding=padding), functional.conv2d(*inputs, padding=padding)
    assert ours is not None
    torch.testing.assert_close(ours, theirs)
    one, two = (torch.autograd.grad(each.pow(3).sum(), inputs) for each in (ours, theirs))
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
    ours, theirs = compiled._max_pool2d(x, kernel, stride), functional.max_pool2d(x, kernel, stride)
    assert ours is not None
    assert torch.equal(ours, theirs)
    toward = torch.randn(theirs.shape, generator=keys.generator("toward"), dtype=torch.float64)
    one, two = (torch.autograd.grad(pooled, x, toward)[0] for pooled in (ours, theirs))
    torch.testing.assert_close(one, two)
    broken = x.detach().clone()
    broken[0, 0, 1, 1] = torch.nan
    pooled = compiled._max_pool2d(broken, kernel, stride)
    assert torch.allclose(pooled, functional.max_pool2d(broken, kernel, stride), equal_nan=True)


def test_pooling_over_large_windows_is_left_as_it_is() -> None:
    assert compiled._max_pool2d(torch.randn(1, 1, 32, 32), 16) is None
    assert compiled._max_pool2d(torch.randn(1, 1, 32, 32), 5) is not None


def test_cross_entropy_as_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the batch's own labels alone: others may hold what PyTorch leaves out."""
    draws = keys.generator("scores")
    scores = torch.randn(6, 4, generator=draws, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(4, (6,), generator=draws)
    some = torch.where(labels == 1, -100, labels)
    written: list[Tensor] = []
    plain = compiled._cross_entropy
    monkeypatch.setattr(compiled, "_cross_entropy", lambda *args: written.append(plain(*args)) or written[-1])
    cases: list[tuple[Tensor, dict[str, Any], bool]] = [
        (labels, {}, True),
        (some, {}, False),
        (labels, {"label_smoothing": 0.1}, False),
        (labels, {"reduction": "sum"}, False),
        (labels, {"weight": torch.rand(4, generator=draws, dtype=torch.float64)}, False),
    ]
    for target, settings, rewritten in cases:
        written.clear()
        with compiled.Rewritten(labels):
            ours = functional.cross_entropy(scores, target, **settings)
        assert bool(written) == rewritten, settings
        theirs = functional.cross_entropy(scores, target, **settings)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(each, scores) for each in (ours, theirs)))


def test_which_pooling_is_left_as_it_is() -> None:
    x = torch.rand(2, 3, 8, 8)
    for more in ({"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"return_indices": True}):
        assert compiled._max_pool2d(x, 3, **more) is None, more
    assert compiled._max_pool2d(x[0], 3) is None


def test_kernels_are_assembled_by_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what PyTorch's compiler compiles in other processes would be compiled again in this one."""
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(compiled.os, "environ", found := dict[str, str]())
    compiled._one_assembler()
    assert found == {}  # this PyTorch brings none
    program = tmp_path / "bin" / "ptxas"
    program.parent.mkdir()
    program.touch(0o755)
    compiled._one_assembler()
    assert found == {"TRITON_PTXAS_PATH": str(program)}
    found["TRITON_PTXAS_PATH"] = "of the user"
    compiled._one_assembler()
    assert found == {"TRITON_PTXAS_PATH": "of the user"}


def test_pinned_memory_is_taken_in_chunks_and_used_again() -> None:
    arena = Arena(CPU)
    first = arena.take(3)
    second = arena.take(Arena.SIZE)  # does not fit beside the first
    third = arena.take(2 * Arena.SIZE)  # larger than a chunk
    for numbers, value in ((first, 1), (second, 2), (third, 3)):
        numbers.fill_(value)
    assert [int(numbers.unique()) for numbers in (first, second, third)] == [1, 2, 3]
    arena.reset()
    assert arena.take(3).data_ptr() == first.data_ptr()
    assert len(arena.chunks) == 3


def test_a_pass_over_public_images_and_one_with_its_own_batch_are_recorded(unequal: Federation) -> None:
    @dataclass(frozen=True)
    class Several(Method):
        def passes(self, me: Me, now: Now) -> list[Pass]:
            return [
                Pass(self.loss, "public", data="public", epochs=1, steps=3),
                Pass(self.loss, "own", batch=5, stream="own", optimizer={"lr": 0.01}),
                Pass(self.loss, "checked", data="validation", least=1),
            ]

    data = {**RAW["data"], "public": 30}
    config = structure({**RAW, "data": data}, Config)
    federation = make_federation(config.data, 0)
    one, _ = trained(InProcess, Several(), config, federation)
    two, _ = trained(CudaGraphs, Several(), config, federation)
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    assert same(one.server, two.server)


def test_steps_that_are_too_rare_to_be_recorded_are_single_steps(
    unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stretch of several steps beyond the recordings of a slot: each of its batches is a step of its own."""
    monkeypatch.setattr(replay, "RARE", 1)
    monkeypatch.setattr(replay, "REPEATS", 1)
    config = structure({**RAW, "run": {"slots": 1}}, Config)
    one, seen = trained(InProcess, METHODS["fedpick"](), config, unequal)
    two, replayed = trained(CudaGraphs, METHODS["fedpick"](), config, unequal)
    assert same(one.server, two.server)
    assert [replace(r, seconds={}) for r in seen.records] == [replace(r, seconds={}) for r in replayed.records]


def test_a_step_is_compiled_for_each_architecture(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "inductor", as_traced)
    models = ["lenet-bn", {"name": "mlp", "hidden": [16]}, {"name": "mlp", "hidden": [24]}]
    config = structure({**RAW, "model": {"per_client": models}, "method": "local", "run": {"slots": 1}}, Config)
    one, _ = trained(InProcess, METHODS["local"](), config, unequal)
    two, _ = trained(CudaGraphs, METHODS["local"](), replace(config, run=replace(config.run, compile=True)), unequal)
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    for client in unequal.names:
        state, other = one.states[client], two.states[client]
        assert all(torch.allclose(state[name], other[name], rtol=1e-3, atol=1e-4) for name in state)


@dataclass(frozen=True)
class LogsTwice(Method):
    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, "first", epochs=1), Pass(self.second, "second")]

    def second(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(me, x, y)
        me.log("value", loss)
        me.log("value", 3 * loss)
        return loss


def test_what_compiled_steps_log_is_counted_for_each_pass(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "inductor", as_traced)
    config = structure({**RAW, "train": {**RAW["train"], "rounds": 2}}, Config)
    _, seen = trained(InProcess, LogsTwice(), config, unequal)
    _, replayed = trained(CudaGraphs, LogsTwice(), replace(config, run=replace(config.run, compile=True)), unequal)
    for record, other in zip(seen.records, replayed.records, strict=True):
        for client, logs in record.logs.items():
            assert other.logs[client] == pytest.approx(dict(logs), rel=1e-3)


@dataclass(frozen=True)
class Weighted(Method):
    """A loss whose weight is a default argument, and another one in every round."""

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(lambda me, x, y, weight=1.0 + now.round: Method.loss(self, me, x, y) * weight)]


@dataclass(frozen=True)
class Growing(Method):
    """Scratch that holds more leaves in every round."""

    def start(self, me: Me, now: Now) -> None:
        names = sorted(me.parameters())[: 1 + now.round]
        me.keep("anchor", me.parameters(names))

    def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
        own = me.parameters(me["anchor"])
        return super().loss(me, x, y) + sum((own[n] - a).square().sum() + a.sum() for n, a in me["anchor"].items())


@dataclass(frozen=True)
class Looks(Method):
    """An end of a pass that runs the model as training left it."""

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, end=self.look)]

    def look(self, me: Me, now: Now) -> None:
        me.log("seen", me.model(now.data.train.x[:8].float() / 255))


@pytest.mark.parametrize("method", [Weighted(), Growing(), Looks()])
def test_what_a_recording_depends_on(method: Method, unequal: Federation) -> None:
    config = structure({**RAW, "model": "lenet-bn"}, Config)
    one, seen = trained(InProcess, method, config, unequal)
    two, replayed = trained(CudaGraphs, method, config, unequal)
    assert same(one.server, two.server)
    assert [replace(r, seconds={}) for r in seen.records] == [replace(r, seconds={}) for r in replayed.records]
    assert two.engine.reasons == {}  # type: ignore[attr-defined]


def test_a_pass_that_reads_something_elsewhere_for_every_client_runs_step_by_step(
    unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Moves(Method):
        def start(self, me: Me, now: Now) -> None:
            me.scratch["weight"] = torch.ones(len(now.data.train)).mean()

        def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(me, x, y) * me["weight"]

    monkeypatch.setattr(replay, "PASSES", 2)
    config = structure({**RAW, "run": {"slots": 1}}, Config)
    one, _ = trained(InProcess, Moves(), config, unequal)
    two, _ = trained(CudaGraphs, Moves(), config, unequal)
    assert "another place" in two.engine.reasons["train"]  # type: ignore[attr-defined]
    assert same(one.server, two.server)


def test_a_closed_engine_holds_nothing(unequal: Federation) -> None:
    """Not even until Python next looks for cycles: on a GPU that memory is missing in the next run."""
    config = structure({**RAW, "train": {"rounds": 1}, "run": {"slots": 2}}, Config)
    info = make_info(config, unequal.names, unequal.classes, unequal.shape)
    method = METHODS["fedpick"]()
    engine = CudaGraphs(method, config, info, unequal, CPU)
    loop = make_loop(method, config, info, unequal, engine, CPU)
    gc.collect()
    gc.disable()
    try:
        loop.one_round(0)
        models = [weakref.ref(me.model) for slot in engine.slots for me in slot.here.values()]
        assert len(models) == 2
        engine.close()
        assert [model() for model in models] == [None, None]
    finally:
        gc.enable()


def test_states_that_are_only_received_are_parked_too(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "SHARE", 0.0)
    config = structure({**RAW, "clients": {"participation": 0.3}}, Config)
    one, _ = trained(InProcess, METHODS["fedios"](), config, unequal)
    two, _ = trained(CudaGraphs, METHODS["fedios"](), config, unequal)
    assert all(same(one.states[client], two.states[client]) for client in unequal.names)
