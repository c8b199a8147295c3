"""On a GPU: the same bits from the same seed, after a resume too, for every method. Needs CUDA; skipped elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedprism import api, keys
from fedprism.config import Config, structure
from fedprism.methods import METHODS
from fedprism.methods.subspaces import Subspace, overlap

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RAW = {
    "data": {"partition": {"name": "domain", "clients": 3}, "samples": 40},
    "train": {"rounds": 3},
    "evaluate": {"moments": ["received", "trained", "adapted", "global"]},
    "run": {"device": "cuda", "checkpoint_every": 1},
}


class Stop(api.Callback):
    def round(self, record: object, snapshot: api.Snapshot) -> None:
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


SIZES = [40, 23, 17]  # whole batches, a last one that is smaller, and one that is merged


def metrics(raw: dict[str, Any], path: Path) -> bytes:
    run = api.run_config(structure(raw, Config), "x", out=path)
    assert run.status == "finished"
    return (run.path / "metrics.jsonl").read_bytes()


def with_engine(raw: dict[str, Any], engine: str, **run: Any) -> dict[str, Any]:
    return {**raw, "run": {**raw["run"], "engine": engine, **run}}


@pytest.mark.parametrize("method", list(METHODS))
def test_captured_steps_give_the_bits_of_the_reference(method: str, tmp_path: Path) -> None:
    """Three rounds of two epochs, whatever the number of slots; states and logs are in the metrics by their losses."""
    raw = {**RAW, "method": method, "train": {"rounds": 3, "epochs": 2, "batch": 8}}
    raw["data"] = {"partition": {"name": "domain", "clients": 5}, "fraction": 0.3}
    expected = metrics(with_engine(raw, "inprocess"), tmp_path / "reference")
    for slots in (1, 2, 5):
        assert metrics(with_engine(raw, "cuda-graphs", slots=slots), tmp_path / f"{slots}") == expected


@pytest.mark.parametrize("adapter", ["pool", "linear"])
@pytest.mark.parametrize("method", ["local", "fedproto", "fedsce"])
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
        "train": {"rounds": 3, "batch": batch, "optimizer": {"lr": 0.5}},
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
