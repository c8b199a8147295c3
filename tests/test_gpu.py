"""On a GPU: the same bits from the same seed, after a resume too, for every method. Needs CUDA; skipped elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedprism import api, keys
from fedprism.bench.race import Engined, largest_difference
from fedprism.bench.workloads import WORKLOADS, configure, make_clients
from fedprism.config import Config, structure
from fedprism.engines.cuda import engine as cuda_engine
from fedprism.engines.cuda.rounds import finite_probe
from fedprism.methods import METHODS
from fedprism.methods.states import not_finite
from fedprism.methods.subspaces import Subspace, overlap
from fedprism.models.conv import Conv2d
from fedprism.records import RunDirectory
from fedprism.round.events import Callback, Snapshot
from tests.harness import PARTS_OF_TENSORS, SIX, compiled_and_plain, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RAW = {
    "data": {"partition": {"name": "domain", "clients": 3}, "samples": 40},
    "train": {"rounds": 3},
    "evaluate": {"moments": ["received", "trained", "adapted", "global"]},
    "run": {"device": "cuda", "checkpoint_every": 1},
}


class Stop(Callback):
    def round(self, record: object, snapshot: Snapshot) -> None:
        if snapshot.round == 2:
            raise KeyboardInterrupt


def same_bits_and_resumed_is_straight(raw: dict[str, Any], tmp_path: Path) -> None:
    config = structure(raw, Config)
    runs = [api.run_config(config, "x", out=tmp_path / name) for name in ("one", "two")]
    with pytest.raises(KeyboardInterrupt):
        api.run_config(config, "x", out=tmp_path / "stopped", callbacks=[Stop()])
    runs.append(api.resume(tmp_path / "stopped"))
    assert [run.status for run in runs] == ["finished"] * 3
    first, second, third = ((run.path / "metrics.jsonl").read_bytes() for run in runs)
    assert first == second == third


@pytest.mark.parametrize("method", list(METHODS))
def test_same_seed_same_bits_and_resumed_is_straight(method: str, tmp_path: Path) -> None:
    same_bits_and_resumed_is_straight({**RAW, "method": method}, tmp_path)


def metrics(raw: dict[str, Any], path: Path) -> bytes:
    run = api.run_config(structure(raw, Config), "x", out=path)
    assert run.status == "finished"
    return (run.path / "metrics.jsonl").read_bytes()


def losses(raw: dict[str, Any], path: Path) -> list[float]:
    """Every client's on its test images, in the end."""
    run = api.run_config(structure(raw, Config), "x", out=path)
    return [score.loss for score in run.record.rounds[-1].scores["received"]["test"].values()]


def with_run(raw: dict[str, Any], **run: Any) -> dict[str, Any]:
    return {**raw, "run": {**raw["run"], **run}}


FIVE = {"partition": {"name": "domain", "clients": 5}, "fraction": 0.3}  # 32 images each
TWO_EPOCHS = {"rounds": 3, "epochs": 2, "batch_size": 12}  # the last batch is a smaller one


@pytest.mark.parametrize("method", list(METHODS))
def test_captured_steps_give_the_bits_of_the_reference(method: str, tmp_path: Path) -> None:
    """Three rounds of two epochs, whatever the number of slots."""
    raw = {**RAW, "method": method, "train": TWO_EPOCHS, "data": FIVE}
    expected = metrics(with_run(raw, engine="inprocess"), tmp_path / "reference")
    for slots in (1, 2, 5):
        assert metrics(with_run(raw, engine="cuda-graphs", slots=slots), tmp_path / f"{slots}") == expected


@pytest.mark.parametrize(
    "change",
    [
        {"model": "cnn4", "data": {**FIVE, "image_size": 32}},
        {"model": "digit6", "data": {**FIVE, "image_size": 28}},
        {"model": "resnet18", "data": {**FIVE, "image_size": 32}},
        {"model": "vit-tiny", "data": {**FIVE, "image_size": 32}},
        {"data": {**FIVE, "augment": ["flip", {"name": "rotate"}, {"name": "crop", "padding": 2}]}},
        {"train": {**TWO_EPOCHS, "optimizer": {"name": "adam", "lr": 1e-3}, "schedule": "cosine", "clip": 1.0}},
        {"train": {**TWO_EPOCHS, "optimizer": {"momentum": 0.9, "weight_decay": 1e-3}}, "run": {"precision": "bf16"}},
        {"model": "resnet18", "data": {**FIVE, "image_size": 32}, "run": {"memory_format": "channels_last"}},
        {"clients": {"participation": 0.6, "dropout": 0.3, "state": "disk"}},
    ],
    ids=["cnn4", "digit6", "resnet18", "vit-tiny", "augment", "adam", "bf16", "channels-last", "disk"],
)
def test_whatever_is_set_the_bits_are_those_of_the_reference(change: dict[str, Any], tmp_path: Path) -> None:
    raw = {**RAW, "method": "fedpick", "train": TWO_EPOCHS, "data": FIVE, **change}
    raw["run"] = {**RAW["run"], **change.get("run", {})}
    expected = metrics(with_run(raw, engine="inprocess"), tmp_path / "reference")
    assert metrics(with_run(raw, engine="cuda-graphs"), tmp_path / "captured") == expected


def test_states_and_data_that_do_not_fit_are_fetched_from_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {**RAW, "method": "fedbn", "train": TWO_EPOCHS, "data": FIVE, "clients": {"participation": 0.5}}
    expected = metrics(with_run(raw, engine="cuda-graphs"), tmp_path / "fits")
    monkeypatch.setattr(cuda_engine, "SHARE", 0.0)
    assert metrics(with_run(raw, engine="cuda-graphs"), tmp_path / "does not fit") == expected


CHANGED = {  # the bound is short enough that many updates are clipped
    "transforms": [{"name": "clip_norm", "max": 0.5}, {"name": "quantize", "bits": 8}],
    "clients": {"dropout": 0.5},
}


def ended(raw: dict[str, Any], path: Path) -> tuple[bytes, dict[str, torch.Tensor], float | None]:
    """The records, the server's last state, and the usual length of an update."""
    found = metrics(raw, path)
    with RunDirectory.open(path) as directory:
        snapshot = directory.latest()
    assert snapshot is not None
    return found, snapshot.server, snapshot.usual_length


def assert_ended_alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert one[0] == other[0]
    assert same(one[1], other[1])
    assert one[2] == other[2]


@pytest.mark.parametrize("method", SIX)
def test_transforms_give_the_bits_of_the_reference(method: str, tmp_path: Path) -> None:
    """Clipped, quantised with keyed noise on the device, and some clients drop out."""
    raw = {**RAW, "method": method, "train": TWO_EPOCHS, "data": FIVE, **CHANGED}
    expected = ended(with_run(raw, engine="inprocess"), tmp_path / "reference")
    for slots in (1, 5):
        found = ended(with_run(raw, engine="cuda-graphs", slots=slots), tmp_path / f"{slots}")
        assert_ended_alike(found, expected)


@pytest.mark.parametrize("changed", [{}, CHANGED], ids=["plain", "transforms"])
@pytest.mark.parametrize("method", SIX)
def test_groups_of_clients_give_the_bits_of_the_reference(
    method: str, changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that holds the answers of two clients: five go as two, two and one."""
    raw = {**RAW, "method": method, "train": TWO_EPOCHS, "data": FIVE, **changed}
    expected = ended(with_run(raw, engine="inprocess"), tmp_path / "reference")
    monkeypatch.setattr(cuda_engine, "MAX_SLOTS", 1)
    monkeypatch.setattr(cuda_engine, "SHARE", 0.0)
    groups, all_of_them = list[int](), cuda_engine.CudaGraphs._all

    def counted(engine: Any, work: Any, read: Any, round: int, requests: Any, *place: Any) -> Any:
        groups.extend([len(requests)] if place else [])
        return all_of_them(engine, work, read, round, requests, *place)

    monkeypatch.setattr(cuda_engine.CudaGraphs, "_all", counted)
    assert_ended_alike(ended(with_run(raw, engine="cuda-graphs"), tmp_path / "groups"), expected)
    assert max(groups) == 2
    assert changed or groups == [2, 2, 1] * 3


def test_out_of_memory_lowers_the_number_of_slots(tmp_path: Path) -> None:
    data = {**FIVE, "image_size": 64}
    raw = {**RAW, "model": "alexnet-bn", "method": "fedbn", "train": {"rounds": 1, "batch_size": 64}, "data": data}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    expected = losses(with_run(raw, engine="cuda-graphs", slots=1), tmp_path / "one")
    torch.cuda.empty_cache()
    most, total = 1.3 * torch.cuda.max_memory_reserved(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(most / total)
    try:
        with pytest.warns(UserWarning, match="out of GPU memory"):
            found = losses(with_run(raw, engine="cuda-graphs", slots=5), tmp_path / "five")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    # Not bit by bit: where cuDNN finds no room for its scratch memory, it takes another algorithm.
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "fedavg"},
        {"method": "fedcp"},
        {"method": "fedpick"},
        {"method": "fedavg", "run": {"precision": "bf16"}},
        {"method": "local", "model": {"per_client": ["lenet-bn", "mlp", "cnn4", "mlp", "mlp"]}},
        {"method": "fedavg", "model": {"name": "mlp", "hidden": [4096, 1024]}},  # a product that is left to cuBLAS
    ],
    ids=["fedavg", "fedcp", "fedpick", "bf16", "mixed", "wide"],
)
def test_compiled_steps_follow_the_captured_ones(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = {**RAW, "data": FIVE, "train": {"rounds": 2, "batch_size": 16}, **change}
    raw["run"] = {**RAW["run"], **change.get("run", {})}
    captured, compiled = (losses(with_run(raw, compile=each), tmp_path / str(each)) for each in (False, True))
    assert "(compiled)" not in caplog.text  # with the reason, if it could not be compiled
    assert captured == pytest.approx(compiled, rel=0.05)


def test_compiled_steps_with_windows_that_overlap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The losses of training, in one round and without TF32: rounding grows fast in AlexNet with so few images.

    On a CPU, two memory formats take them 6e-4 apart at most; after two rounds at the default rate it is a tenth.
    """
    train = {"rounds": 1, "batch_size": 16, "optimizer": {"lr": 0.02}}
    data, model = {**FIVE, "image_size": 64}, "alexnet-bn"
    raw = with_run({**RAW, "method": "fedbn", "model": model, "data": data, "train": train}, precision="fp32")
    captured, compiled = (
        api.run_config(structure(with_run(raw, compile=each), Config), "x", out=tmp_path / str(each)).record.rounds[-1]
        for each in (False, True)
    )
    assert "(compiled)" not in caplog.text
    for client_id, logs in captured.logs.items():
        assert logs["loss/train"] == pytest.approx(compiled.logs[client_id]["loss/train"], rel=0.01)


@pytest.mark.parametrize("part", PARTS_OF_TENSORS.values(), ids=list(PARTS_OF_TENSORS))
def test_the_compiler_reads_parts_of_something_larger(part: Any) -> None:
    torch.testing.assert_close(*compiled_and_plain(part, torch.device("cuda")), rtol=1e-2, atol=1e-2)  # TF32


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found(bad: float) -> None:
    state = {"a": torch.ones(3, device="cuda"), "b": torch.ones(70_000, device="cuda")}
    state["b"][69_999] = bad
    assert not_finite(state) == "b"
    assert not_finite({"a": state["a"]}) is None
    assert finite_probe(list(state.values())).isfinite().tolist() == [True, False]


@pytest.mark.parametrize("adapter", ["pool", "linear"])
@pytest.mark.parametrize("method", ["local", "fedproto", "fedsce", "fml", "fedkd", "feddistill", "fedtgp"])
def test_different_architectures(method: str, adapter: str, tmp_path: Path) -> None:
    """Three shapes with features of 64, 128 and 512, which an adapter brings to 64."""
    models = ["vit-tiny", {"name": "resnet18", "width": 16}, "cnn4"]
    raw = {**RAW, "model": {"per_client": models, "adapter": adapter}, "method": method}
    same_bits_and_resumed_is_straight(raw, tmp_path)


NETWORKS = ["cnn4", "digit6", "convnet-bn", "alexnet-bn", "resnet18", "resnet50", "vit-tiny", "vit-b-16"]


@pytest.mark.parametrize("model", NETWORKS)
def test_every_network_gives_the_same_bits_twice(model: str, tmp_path: Path) -> None:
    side = 64 if model == "alexnet-bn" else 32
    raw = {**RAW, "model": model, "data": {**RAW["data"], "image_size": side}, "method": "fedbn"}
    runs = [api.run_config(structure(raw, Config), "x", out=tmp_path / name) for name in ("one", "two")]
    first, second = ((run.path / "metrics.jsonl").read_bytes() for run in runs)
    assert first == second


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi"])
def test_the_server_steps(optimizer: str, tmp_path: Path) -> None:
    same_bits_and_resumed_is_straight({**RAW, "server": {"optimizer": optimizer, "lr": 0.01}}, tmp_path)


def test_changed_images(tmp_path: Path) -> None:
    data = {**RAW["data"], "augment": ["flip", {"name": "rotate", "degrees": 30}, {"name": "crop", "padding": 2}]}
    same_bits_and_resumed_is_straight({**RAW, "data": data, "method": "fedbn"}, tmp_path)


@pytest.mark.parametrize("batch", [10, 64])
@pytest.mark.parametrize("method", ["fedavg", "fedcp"])
def test_texts(method: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 200 tokens that repeat a few words, so that many positions add to one row of the embedding."""
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "agnews").mkdir()
    for part, count in (("train", 600), ("test", 120)):
        rows = (f'"{i % 4 + 1}","word{i % 4}","{" ".join(f"w{i * j % 37}" for j in range(220))}"' for i in range(count))
        (tmp_path / "agnews" / f"{part}.csv").write_text("\n".join(rows) + "\n")
    raw = {
        **RAW,
        "data": {
            "name": "agnews",
            "root": str(tmp_path),
            "partition": {"name": "dirichlet", "clients": 3, "alpha": 1.0},
        },
        "model": "fasttext",
        "train": {"rounds": 3, "batch_size": batch, "optimizer": {"lr": 0.5}},
        "method": method,
    }
    same_bits_and_resumed_is_straight(raw, tmp_path)


def test_the_gpu_follows_the_cpu(tmp_path: Path) -> None:
    """Two rounds of a network without batch norm, in full precision: other hardware, the same method."""
    losses = []
    for device in ("cpu", "cuda"):
        raw = {**RAW, "model": "mlp", "train": {"rounds": 2}, "run": {"device": device, "precision": "fp32"}}
        run = api.run_config(structure(raw, Config), "x", out=tmp_path / device)
        losses.append([score.loss for score in run.record.rounds[-1].scores["received"]["test"].values()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize("delta", ["raw", "normalised", "keep-singular-values"])
def test_subspaces_of_cpu_and_gpu_are_the_same(delta: str) -> None:
    """Signs and rotations of a basis are free, so they are compared by how many dimensions they have in common."""
    here, there = (Subspace(200_000, 3, delta, "test").to(device) for device in ("cpu", "cuda"))
    draws = keys.generator("updates")
    for _ in range(5):
        d = 2 * torch.nn.functional.normalize(torch.randn(200_000, generator=draws), dim=0)
        here.turn(d)
        there.turn(d.cuda())
    assert overlap(here["basis"].double(), there["basis"].cpu().double()).item() == pytest.approx(3, abs=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("autocast", [False, True])
def test_our_convolution_is_pytorchs(layout: torch.memory_format, autocast: bool) -> None:
    """To rounding, which is coarse in bfloat16; and its bias's gradient is another sum."""
    with keys.keyed(0, "init", "conv"):
        ours = Conv2d(8, 6, 3, padding=1)
    theirs = torch.nn.Conv2d(8, 6, 3, padding=1)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(40, 8, 20, 20, generator=keys.generator("x"))
    found = []
    for conv in (ours, theirs):
        conv.to("cuda", memory_format=layout)
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y = conv(x.cuda().to(memory_format=layout))
        assert y.dtype == (torch.bfloat16 if autocast else torch.float32)
        found.append((y, *torch.autograd.grad(y.float().square().mean(), (conv.weight, conv.bias))))
        assert type(y.grad_fn).__name__ == ("BiasedBackward" if conv is ours else "ConvolutionBackward0")
    torch.testing.assert_close(*found, rtol=0.02 if autocast else 1e-3, atol=1e-2 if autocast else 1e-5)


def test_kernels_are_counted_as_a_profiler_sees_them() -> None:
    """And what is trained after the count is what is trained without one."""
    device, workload = torch.device("cuda", 0), WORKLOADS["cnn4-n20-b10"]
    federation = make_clients(workload, 80)
    pair = [
        Engined(configure(workload, "fedcp", device, {"engine": "cuda-graphs", "slots": 2}), federation, device)
        for _ in range(2)
    ]
    try:
        for engined in pair:
            engined.one_round(0)
        counted = pair[0].facts()["kernels_per_step"]
        for engined in pair:
            engined.one_round(1)
        assert largest_difference(pair[0].weights(), pair[1].weights()) == 0
        slot = pair[0].engine.slots[0]  # type: ignore[attr-defined]
        (captures,) = slot.here.values()
        steps, replay = captures.longest()["train"]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            with torch.cuda.stream(slot.stream):
                replay()
            torch.cuda.synchronize()
        rows = [event for event in seen.key_averages() if not event.key.startswith(("cuda", "Activity"))]
        found = sum(event.count for event in rows)
        assert counted == {"train": found / steps}
    finally:
        for engined in pair:
            engined.close()
