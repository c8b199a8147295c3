"""The engine `cuda-graphs` without a GPU: captured steps and evaluations, slots, memory. What would be captured runs
again instead."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.config import Config, structure
from fedprism.engines.cuda import engine as cuda_engine
from fedprism.engines.cuda import steps
from fedprism.engines.cuda.buffers import PinnedPool
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.cuda.guard import CaptureGuard, NotCapturable
from fedprism.engines.cuda.rounds import finite_probe
from fedprism.engines.inprocess import InProcess
from fedprism.errors import ConfigError
from fedprism.federation import Federation, build_federation
from fedprism.methods import METHODS, make
from fedprism.methods.base import Client, Context, Method, Pass
from fedprism.methods.states import WeightedSum
from fedprism.round.client import make_info
from fedprism.round.events import RoundRecord
from fedprism.round.loop import make_loop
from tests.harness import CPU, THREE_ROUNDS, Collect, by_method, engine_run, same, same_clients, three_sizes

pytestmark = pytest.mark.full

DATA, TRAIN = THREE_ROUNDS["data"], THREE_ROUNDS["train"]


@pytest.fixture(scope="module")
def unequal() -> Federation:
    return three_sizes()


def records(seen: Collect) -> list[RoundRecord]:
    """What was recorded, without the time that it took."""
    return [replace(record, seconds={}) for record in seen.records]


def out_of_memory(*given: Any) -> Any:
    raise torch.OutOfMemoryError("no room")


# --- the bits of the reference ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", by_method(default=("fedavg", "fedcp", "fedfomo")))
def test_every_method_gives_the_bits_of_the_reference(method: str, unequal: Federation) -> None:
    config = structure({**THREE_ROUNDS, "train": {**TRAIN, "rounds": 2}}, Config)
    one, seen = engine_run(InProcess, METHODS[method](), config, unequal)
    for slots in (1, 2) if method in ("fedpick", "scaffold", "pfedvem") else (2,):
        chosen = replace(config, run=replace(config.run, slots=slots))
        two, replayed = engine_run(CudaGraphs, METHODS[method](), chosen, unequal)
        assert same(one.server, two.server)
        assert same_clients(one, two)
        assert records(seen) == records(replayed)
        assert two.engine.reasons == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        {"data": {**DATA, "augment": ["flip", {"name": "rotate"}, "crop"]}},
        {"train": {**TRAIN, "optimizer": {"name": "adam", "lr": 1e-3}, "schedule": "cosine", "clip": 1.0}},
        pytest.param(
            {"train": {**TRAIN, "optimizer": {"momentum": 0.9, "weight_decay": 1e-3}, "last_batch": "drop"}},
            marks=pytest.mark.slow,
        ),
        {"run": {"memory_format": "channels_last", "precision": "bf16"}},
        pytest.param({"model": {"per_client": ["lenet-bn", "mlp", "cnn4"]}, "method": "local"}, marks=pytest.mark.slow),
        pytest.param({"clients": {"participation": 0.6, "dropout": 0.3}}, marks=pytest.mark.slow),
    ],
    ids=["augment", "adam", "momentum", "bf16", "mixed", "partial"],
)
def test_whatever_is_set_the_bits_are_those_of_the_reference(change: dict[str, Any], unequal: Federation) -> None:
    config = structure({**THREE_ROUNDS, "method": "fedpick", **change}, Config)
    one, seen = engine_run(InProcess, make(config.method), config, unequal)
    two, replayed = engine_run(CudaGraphs, make(config.method), config, unequal)
    assert same_clients(one, two)
    assert records(seen) == records(replayed)


def test_a_probe_between_rounds_changes_nothing(unequal: Federation) -> None:
    """After the first round, captures are replayed to find out how many slots are fastest."""
    config = structure(THREE_ROUNDS, Config)
    one, seen = engine_run(InProcess, METHODS["fedpick"](), config, unequal)
    two, replayed = engine_run(CudaGraphs, METHODS["fedpick"](), config, unequal)
    assert config.run.slots == "auto"
    assert isinstance(two.engine, CudaGraphs)
    assert two.engine.replay_seconds is not None
    assert two.engine.replay_seconds > 0
    assert same(one.server, two.server)
    assert records(seen) == records(replayed)


def test_a_round_without_clients_measures_nothing(unequal: Federation) -> None:
    """Memory, slots and captures are measured in the first round in which a client trains."""
    config = structure(THREE_ROUNDS, Config)
    config = replace(config, train=replace(config.train, rounds=0))
    loop, _ = engine_run(CudaGraphs, METHODS["fedavg"](), config, unequal)
    assert isinstance(loop.engine, CudaGraphs)
    assert dict(loop.engine.train(1, {})) == {}
    assert loop.engine.trained == 0
    assert not loop.engine.probed


@dataclass(frozen=True)
class Diverges(Method):
    """A loss that is infinite at one client, or at all of them."""

    at: str = ""

    def start(self, client: Client, ctx: Context) -> None:
        client.keep("scale", float("inf") if self.at in ("all", ctx.client_id) else 1.0)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(client, x, y) * client["scale"]


@pytest.mark.parametrize("at", ["textured", "all"])
def test_clients_that_diverge_fail_as_in_the_reference(at: str, unequal: Federation) -> None:
    evaluate = {"moments": ["received", "trained"]}  # losses after an adaptation are not numbers
    config = structure({**THREE_ROUNDS, "train": {**TRAIN, "rounds": 2}, "evaluate": evaluate}, Config)
    one, seen = engine_run(InProcess, Diverges(at), config, unequal)
    two, replayed = engine_run(CudaGraphs, Diverges(at), config, unequal)
    assert seen.status == replayed.status == ("diverged" if at == "all" else "finished")
    failed = replayed.records[1].failed
    assert set(failed) == set(unequal.names if at == "all" else [at])
    assert all(reason.endswith("is not finite after local training") for reason in failed.values())
    assert same(one.server, two.server)
    assert records(seen) == records(replayed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found(bad: float) -> None:
    tensors = [torch.ones(3), torch.tensor([1.0, bad]), torch.tensor(-2.0, dtype=torch.float64)]
    assert finite_probe(tensors).isfinite().tolist() == [True, False, True]
    assert len(finite_probe([])) == 0


# --- memory ----------------------------------------------------------------------------------------------------------


def test_out_of_memory_halves_the_slots_and_goes_on(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    config = structure({**THREE_ROUNDS, "run": {"slots": 3}}, Config)
    one, _ = engine_run(InProcess, METHODS["fedbn"](), config, unequal)
    plain, calls = cuda_engine.round_steps, []

    def short_of_memory(*given: Any) -> Any:
        calls.append(given)
        return out_of_memory() if len(calls) == 2 else plain(*given)

    monkeypatch.setattr(cuda_engine, "round_steps", short_of_memory)
    with pytest.warns(UserWarning, match="out of GPU memory: going on with 1 slots"):
        two, _ = engine_run(CudaGraphs, METHODS["fedbn"](), config, unequal)
    assert same(one.server, two.server)
    assert same_clients(one, two)


@pytest.mark.slow
def test_the_engine_releases_memory_for_the_server(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of uploads needs memory that slots took: half of them go, and the bits stay the same."""
    config = structure({**THREE_ROUNDS, "run": {"slots": 3}}, Config)
    one, seen = engine_run(InProcess, METHODS["fedbn"](), config, unequal)
    plain, tried = WeightedSum.reserve, list[Any]()

    def reserve(*given: Any) -> Any:
        tried.append(given)
        return out_of_memory() if len(tried) == 1 else plain(*given)

    monkeypatch.setattr(WeightedSum, "reserve", reserve)
    with pytest.warns(UserWarning, match="out of GPU memory: going on with 1 slots"):
        two, replayed = engine_run(CudaGraphs, METHODS["fedbn"](), config, unequal)
    assert same(one.server, two.server)
    assert records(seen) == records(replayed)
    monkeypatch.setattr(WeightedSum, "reserve", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):  # an engine that has nothing to release
        engine_run(InProcess, METHODS["fedbn"](), config, unequal)
    with pytest.raises(ConfigError, match="does not hold one client"), pytest.warns(UserWarning, match="with 1 slots"):
        engine_run(CudaGraphs, METHODS["fedbn"](), config, unequal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "optimizer", "slots"), [("fedpick", {"momentum": 0.9}, "auto"), ("fed-co2", {"weight_decay": 0.01}, 1)]
)
@pytest.mark.filterwarnings("ignore:out of GPU memory")
def test_out_of_memory_at_any_capture_changes_no_bits(
    method: str, optimizer: dict[str, Any], slots: Any, unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out when a slot is opened, or during the first, the second, ... capture of steps or of a batch."""
    train = {**TRAIN, "rounds": 2, "optimizer": {"lr": 1e-3, **optimizer}}
    config = structure({**THREE_ROUNDS, "train": train, "run": {"slots": slots}}, Config)
    one, seen = engine_run(InProcess, METHODS[method](), config, unequal)
    plain = CudaGraphs._open
    for fails in (0, 1, 2, 3, 5):
        captures, opened = [0], [0]

        def no_capture(work: Any, fails: int = fails, captures: list[int] = captures) -> Any:
            captures[0] += 1
            if captures[0] == fails:
                work()  # half-way: what it did must not be seen
                out_of_memory()
            return work

        def opening(engine: CudaGraphs, fails: int = fails, opened: list[int] = opened) -> Any:
            opened[0] += 1
            return out_of_memory() if fails == 0 and opened[0] == 2 else plain(engine)

        monkeypatch.setattr(CudaGraphs, "_open", opening)
        for module in (cuda_engine, steps):
            monkeypatch.setattr(module, "no_capture", no_capture)
        two, replayed = engine_run(CudaGraphs, METHODS[method](), config, unequal)
        assert captures[0] > fails
        assert same(one.server, two.server), fails
        assert same_clients(one, two), fails
        assert records(seen) == records(replayed)


def test_one_client_that_does_not_fit_is_an_error(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "round_steps", out_of_memory)
    with pytest.raises(ConfigError, match="does not hold one client"):
        engine_run(CudaGraphs, METHODS["fedbn"](), structure({**THREE_ROUNDS, "run": {"slots": 1}}, Config), unequal)


@pytest.mark.slow
def test_states_that_do_not_fit_are_kept_on_the_host(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "SHARE", 0.0)
    config = structure({**THREE_ROUNDS, "clients": {"participation": 0.5}}, Config)
    one, _ = engine_run(InProcess, METHODS["ditto"](), config, unequal)
    two, _ = engine_run(CudaGraphs, METHODS["ditto"](), config, unequal)
    assert not two.engine.data.fits  # type: ignore[attr-defined]
    assert same_clients(one, two)


@pytest.mark.slow
def test_states_that_are_only_received_are_parked_too(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_engine, "SHARE", 0.0)
    config = structure({**THREE_ROUNDS, "clients": {"participation": 0.3}}, Config)
    one, _ = engine_run(InProcess, METHODS["fedios"](), config, unequal)
    two, _ = engine_run(CudaGraphs, METHODS["fedios"](), config, unequal)
    assert same_clients(one, two)


def test_pinned_memory_is_taken_in_chunks_and_used_again() -> None:
    pool = PinnedPool(CPU)
    first = pool.take(3)
    second = pool.take(PinnedPool.SIZE)  # does not fit beside the first
    third = pool.take(2 * PinnedPool.SIZE)  # larger than a chunk
    for numbers, value in ((first, 1), (second, 2), (third, 3)):
        numbers.fill_(value)
    assert [int(numbers.unique()) for numbers in (first, second, third)] == [1, 2, 3]
    pool.reset()
    assert pool.take(3).data_ptr() == first.data_ptr()
    assert len(pool.chunks) == 3


def test_a_closed_engine_refers_to_nothing(unequal: Federation) -> None:
    """Not even until Python next looks for cycles: on a GPU that memory is missing in the next run."""
    config = structure({**THREE_ROUNDS, "train": {"rounds": 1}, "run": {"slots": 2}}, Config)
    info = make_info(config, unequal.names, unequal.classes, unequal.shape)
    method = METHODS["fedpick"]()
    engine = CudaGraphs(method, config, info, unequal, CPU)
    loop = make_loop(method, config, info, unequal, engine)
    gc.collect()
    gc.disable()
    try:
        loop.one_round(0)
        models = [weakref.ref(captures.client.model) for slot in engine.slots for captures in slot.here.values()]
        assert len(models) == 2
        engine.close()
        assert [model() for model in models] == [None, None]
    finally:
        gc.enable()


# --- what is captured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waiting(Method):
    """A loss that asks for a value on the host."""

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(client, x, y)
        return loss * 2 if loss.item() > 1e9 else loss


@dataclass(frozen=True)
class Anew(Method):
    """A loss that is another one in every round."""

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        marks = [ctx.round]
        return [Pass(lambda client, x, y: Method.loss(self, client, x, y) * (1.0 if marks else 0.0))]


@pytest.mark.parametrize(
    ("method", "why"), [(Waiting(), "waits for the device: .item()"), (Anew(), "made anew in every round")]
)
def test_what_cannot_be_captured_runs_step_by_step_and_says_why(
    method: Method, why: str, unequal: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    config = structure(THREE_ROUNDS, Config)
    one, _ = engine_run(InProcess, method, config, unequal)
    two, _ = engine_run(CudaGraphs, method, config, unequal)
    assert same(one.server, two.server)
    assert why in two.engine.reasons["train"]  # type: ignore[attr-defined]
    assert [why in record.getMessage() for record in caplog.records] == [True]


def test_steps_that_change_something_on_the_host_are_not_captured_on_a_gpu() -> None:
    total, totals = torch.zeros(()), [torch.zeros(2), torch.zeros(3)]
    for device, refused in ((torch.device("cuda"), True), (CPU, False)):
        for change in (lambda: total.add_(1), lambda: torch._foreach_mul_(totals, 2)):
            with pytest.raises(NotCapturable, match="logged") if refused else nullcontext(), CaptureGuard(device):
                change()
    assert total == 1  # of the CPU, where it is no host of another device
    with CaptureGuard(torch.device("cuda")):
        torch.ones(2).sum().add(1)


@dataclass(frozen=True)
class Several(Method):
    """A pass over public images, one with a batch size of its own and one over validation images."""

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [
            Pass(self.loss, "public", data="public", epochs=1, steps=3),
            Pass(self.loss, "own", batch_size=5, stream="own", optimizer={"lr": 0.01}),
            Pass(self.loss, "checked", data="validation", min_batch=1),
        ]


@pytest.mark.slow
def test_a_pass_over_public_images_and_one_with_its_own_batch_size_are_captured() -> None:
    config = structure({**THREE_ROUNDS, "data": {**DATA, "public": 30}}, Config)
    federation = build_federation(config.data, 0)
    one, _ = engine_run(InProcess, Several(), config, federation)
    two, _ = engine_run(CudaGraphs, Several(), config, federation)
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    assert same(one.server, two.server)


def test_steps_that_are_too_rare_to_be_captured_are_single_steps(
    unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of several steps beyond the captures of a slot: each of its batches is a step of its own."""
    monkeypatch.setattr(steps, "MAX_CAPTURES", 1)
    monkeypatch.setattr(steps, "MIN_REPEATS", 1)
    config = structure({**THREE_ROUNDS, "run": {"slots": 1}}, Config)
    one, seen = engine_run(InProcess, METHODS["fedpick"](), config, unequal)
    two, replayed = engine_run(CudaGraphs, METHODS["fedpick"](), config, unequal)
    assert same(one.server, two.server)
    assert records(seen) == records(replayed)


@dataclass(frozen=True)
class Weighted(Method):
    """A loss whose weight is a default argument, and another one in every round."""

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(lambda client, x, y, weight=1.0 + ctx.round: Method.loss(self, client, x, y) * weight)]


@dataclass(frozen=True)
class Growing(Method):
    """Scratch that has more leaves in every round."""

    def start(self, client: Client, ctx: Context) -> None:
        names = sorted(client.parameters())[: 1 + ctx.round]
        client.keep("anchor", client.parameters(names))

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        anchor = client["anchor"]
        own = client.parameters(anchor)
        return super().loss(client, x, y) + sum((own[n] - a).square().sum() + a.sum() for n, a in anchor.items())


@dataclass(frozen=True)
class Looks(Method):
    """An end of a pass that runs the model as training left it."""

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, end=self.look)]

    def look(self, client: Client, ctx: Context) -> None:
        client.log("seen", client.model(ctx.local.train.x[:8].float() / 255))


@pytest.mark.slow
@pytest.mark.parametrize("method", [Weighted(), Growing(), Looks()])
def test_what_a_capture_depends_on(method: Method, unequal: Federation) -> None:
    config = structure({**THREE_ROUNDS, "model": "lenet-bn"}, Config)
    one, seen = engine_run(InProcess, method, config, unequal)
    two, replayed = engine_run(CudaGraphs, method, config, unequal)
    assert same(one.server, two.server)
    assert records(seen) == records(replayed)
    assert two.engine.reasons == {}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Moves(Method):
    """Scratch that lies at another address for every client."""

    def start(self, client: Client, ctx: Context) -> None:
        client.scratch["weight"] = torch.ones(len(ctx.local.train)).mean()

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(client, x, y) * client["weight"]


def test_a_pass_that_reads_something_elsewhere_for_every_client_runs_step_by_step(
    unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_PASSES", 2)
    config = structure({**THREE_ROUNDS, "run": {"slots": 1}}, Config)
    one, _ = engine_run(InProcess, Moves(), config, unequal)
    two, _ = engine_run(CudaGraphs, Moves(), config, unequal)
    assert "another place" in two.engine.reasons["train"]  # type: ignore[attr-defined]
    assert same(one.server, two.server)
