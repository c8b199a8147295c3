"""What `forward_details` reports beside the scores: counted, averaged, and kept in the records of every evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedprism as fp
from fedprism.config import Config, structure
from fedprism.federation import Federation, Split
from fedprism.methods.base import Client, Draw, Method, Net, Output
from fedprism.round import evaluation
from fedprism.round.client import make_info
from fedprism.round.evaluation import QUANTILES, Evaluation, Samples, score_split
from fedprism.round.events import Score
from fedprism.round.training import Operations
from tests.harness import Collect, loop_for

PIXELS = torch.arange(600, dtype=torch.uint8).reshape(600, 1, 1, 1)  # 0 to 255, twice, and some of a third time
LABELS = (PIXELS.flatten() > 99).long()


def details(model: nn.Module, x: Tensor, draw: Draw) -> Output:
    """Everything is of class 1; the branch `dark` says class 0 of the darker half."""
    pixel = (x.flatten() + 1) * 255 / 2
    ones = torch.stack([torch.zeros_like(pixel), torch.ones_like(pixel)], 1)
    dark = torch.stack([pixel < 128, pixel >= 128], 1).float()
    values = torch.stack([pixel, pixel + 1000], 1)
    return Output(ones, {"dark": dark}, {"pixel": pixel, "pair": values}, {"pair": values})


def scored() -> Score:
    """All pixels."""
    config = Config()
    client = Client(nn.Identity(), config.train, make_info(config, ("a",), 2, (1, 16, 16)))
    return score_split(Evaluation(details, config, 2, (0,), Operations()), client, Split(PIXELS, LABELS)).score()


def test_counts_means_and_quantiles_over_batches() -> None:
    found = scored()
    pixels = PIXELS.flatten().double()
    assert found.correct == int((LABELS == 1).sum())
    assert (found.right, found.predicted) == ((0, found.correct), (0, 600))
    assert found.actual == (int((LABELS == 0).sum()), int((LABELS == 1).sum()))
    assert found.loss == pytest.approx(float((math.log1p(math.e) - LABELS.double()).sum()), rel=1e-6)
    assert found.branches == {"dark": int(((pixels >= 128) == (LABELS == 1)).sum())}
    assert found.diagnostics["pixel"] == pytest.approx(float(pixels.mean()), abs=1e-4)
    assert found.diagnostics["pair"] == pytest.approx(float(pixels.mean()) + 500, abs=1e-4)
    values = np.concatenate([pixels.numpy(), pixels.numpy() + 1000])
    for q in QUANTILES:
        expected = np.quantile(values, q / 100, method="nearest")
        assert found.diagnostics[f"pair/q{q:02d}"] == pytest.approx(expected, abs=1.01)  # ties of rounding: a neighbour
    assert found.diagnostics["pair/q00"] == pytest.approx(0, abs=1e-4)
    assert found.diagnostics["pair/q100"] == pytest.approx(1255, abs=1e-3)


def test_of_very_many_values_every_kth_image_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, quantiles = [], Samples.quantiles

    def counted(samples: Samples) -> dict[str, Tensor]:
        sizes.extend(sum(len(part) for part in parts) for parts in samples.values.values())
        return quantiles(samples)

    monkeypatch.setattr(evaluation, "MOST_VALUES", 300)
    monkeypatch.setattr(Samples, "quantiles", counted)
    found = scored()
    assert len(sizes) == 1
    assert 290 <= sizes[0] <= 304  # a remainder per batch
    assert found.diagnostics["pair/q50"] == pytest.approx(625, abs=400)


@dataclass(frozen=True)
class Reports(Method):
    """FedAvg that reports its features."""

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        z = model.body(x)
        return Output(model.head(z), {"shifted": model.head(z) + 1}, {"size": z.norm(dim=1)}, {"z": z})


def test_every_evaluation_records_it(tiny: Federation) -> None:
    config = structure({"train": {"rounds": 2}, "evaluate": {"moments": ["received", "trained"]}}, Config)
    seen = Collect()
    loop_for(Reports(), config, tiny).run([seen])
    for record in seen.records:
        for moment in ("received", *(["trained"] if record.round else [])):
            for value in record.scores[moment]["test"].values():
                assert value.branches == {"shifted": value.correct}
                assert value.diagnostics["size"] > 0
                assert value.diagnostics["z/q00"] <= value.diagnostics["z/q50"] <= value.diagnostics["z/q100"]


def test_it_is_in_the_run_and_on_demand(tiny: Federation, tmp_path: Path) -> None:
    run = fp.train(tiny, method=Reports(), rounds=1, out=tmp_path / "run")
    kept = run.record.rounds[-1].scores["received"]["test"]["plain"]
    images = tiny.clients["plain"].test.x
    found = run.models["plain"].diagnostics(images)
    assert found["z"].shape == (len(images), 64)
    assert found["size"].mean() == pytest.approx(kept.diagnostics["size"], rel=1e-5)
    assert found["scores/shifted"].shape == (len(images), 10)
    assert run.models["plain"].diagnostics(images[:0]) == {}


def test_a_method_that_reports_nothing(tiny: Federation, tmp_path: Path) -> None:
    run = fp.train(tiny, method=fp.FedAvg(), rounds=1, out=tmp_path / "run")
    assert run.models["plain"].diagnostics(tiny.clients["plain"].test.x) == {}
    line = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert "{}" not in line.partition('"scores"')[2]


@dataclass(frozen=True)
class Adds(Method):
    """What the base reports, and something more."""

    def forward_details(self, model: Net, x: Tensor, draw: Draw) -> Output:
        output = super().forward_details(model, x, draw)
        return replace(output, means={"best": output.scores.max(1).values})


def test_what_is_reported_can_build_on_the_base(tiny: Federation, tmp_path: Path) -> None:
    run = fp.train(tiny, method=Adds(), rounds=1, out=tmp_path / "run")
    plain = fp.train(tiny, method=fp.FedAvg(), rounds=1, out=tmp_path / "plain")
    images = tiny.clients["plain"].test.x
    assert run.models["plain"].diagnostics(images)["best"].shape == (len(images),)
    assert (run.models["plain"].probabilities(images) == plain.models["plain"].probabilities(images)).all()
