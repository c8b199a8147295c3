"""What a method shows of its inside: counted, averaged, and kept in the records of every evaluation."""

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
from fedprism.engines import evaluate
from fedprism.engines.client import make_info
from fedprism.engines.evaluate import QUANTILES, Figures, score
from fedprism.engines.events import Score
from fedprism.federation import Federation, Split
from fedprism.methods.base import Draw, Me, Method, Net, Seen
from tests.helpers import Collect, loop_for

PIXELS = torch.arange(600, dtype=torch.uint8).reshape(600, 1, 1, 1)  # 0 to 255, twice, and some of a third time
LABELS = (PIXELS.flatten() > 99).long()


def look(model: nn.Module, x: Tensor, draw: Draw) -> Seen:
    """Everything is of class 1; the path `dark` says class 0 of the darkest half."""
    pixel = (x.flatten() + 1) * 255 / 2
    ones = torch.stack([torch.zeros_like(pixel), torch.ones_like(pixel)], 1)
    dark = torch.stack([pixel < 128, pixel >= 128], 1).float()
    values = torch.stack([pixel, pixel + 1000], 1)
    return Seen(ones, {"dark": dark}, {"pixel": pixel, "pair": values}, {"pair": values})


def scored() -> Score:
    """All pixels, after something else whose numbers are read with these."""
    config, figures = Config(), Figures()
    me = Me(nn.Identity(), config.train, make_info(config, ("a",), 2, (1, 16, 16)))
    figures.add(torch.full((3,), 7.0))
    read = score(look, me, Split(PIXELS, LABELS), config, 2, (0,), figures)
    return read(figures.tensor().tolist())


def test_counts_means_and_quantiles_over_batches() -> None:
    found = scored()
    pixels = PIXELS.flatten().double()
    assert found.correct == int((LABELS == 1).sum())
    assert (found.right, found.predicted) == ((0, found.correct), (0, 600))
    assert found.actual == (int((LABELS == 0).sum()), int((LABELS == 1).sum()))
    assert found.loss == pytest.approx(float((math.log1p(math.e) - LABELS.double()).sum()), rel=1e-6)
    assert found.paths == {"dark": int(((pixels >= 128) == (LABELS == 1)).sum())}
    assert found.inside["pixel"] == pytest.approx(float(pixels.mean()), abs=1e-4)
    assert found.inside["pair"] == pytest.approx(float(pixels.mean()) + 500, abs=1e-4)
    values = np.concatenate([pixels.numpy(), pixels.numpy() + 1000])
    for q in QUANTILES:
        expected = np.quantile(values, q / 100, method="nearest")
        assert found.inside[f"pair/q{q:02d}"] == pytest.approx(expected, abs=1.01)  # ties of rounding: a neighbour
    assert found.inside["pair/q00"] == pytest.approx(0, abs=1e-4)
    assert found.inside["pair/q100"] == pytest.approx(1255, abs=1e-3)


def test_of_very_many_values_every_kth_image_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "MOST_VALUES", 300)
    sizes = []
    quantiles = evaluate._quantiles
    monkeypatch.setattr(
        evaluate, "_quantiles", lambda parts: sizes.append(sum(len(p) for p in parts)) or quantiles(parts)
    )
    found = scored()
    assert len(sizes) == 1
    assert 290 <= sizes[0] <= 304  # a remainder a batch
    assert found.inside["pair/q50"] == pytest.approx(625, abs=400)


@dataclass(frozen=True)
class Shows(Method):
    """FedAvg that shows its features."""

    def examine(self, model: Net, x: Tensor, draw: Draw) -> Seen:
        z = model.body(x)
        return Seen(model.head(z), {"shifted": model.head(z) + 1}, {"size": z.norm(dim=1)}, {"z": z})


def test_every_evaluation_records_it(tiny: Federation) -> None:
    config = structure({"train": {"rounds": 2}, "evaluate": {"moments": ["received", "trained"]}}, Config)
    seen = Collect()
    loop_for(Shows(), config, tiny).run([seen])
    for record in seen.records:
        for moment in ("received", *(["trained"] if record.round else [])):
            for value in record.scores[moment]["test"].values():
                assert value.paths == {"shifted": value.correct}
                assert value.inside["size"] > 0
                assert value.inside["z/q00"] <= value.inside["z/q50"] <= value.inside["z/q100"]


def test_it_is_in_the_run_and_on_demand(tiny: Federation, tmp_path: Path) -> None:
    run = fp.train(tiny, method=Shows(), rounds=1, out=tmp_path / "run")
    kept = run.record.rounds[-1].scores["received"]["test"]["plain"]
    images = tiny.clients["plain"].test.x
    inside = run.models["plain"].examine(images)
    assert inside["z"].shape == (len(images), 64)
    assert inside["size"].mean() == pytest.approx(kept.inside["size"], rel=1e-5)
    assert inside["scores/shifted"].shape == (len(images), 10)
    assert run.models["plain"].examine(images[:0]) == {}


def test_a_method_that_shows_nothing(tiny: Federation, tmp_path: Path) -> None:
    run = fp.train(tiny, method=fp.FedAvg(), rounds=1, out=tmp_path / "run")
    assert run.models["plain"].examine(tiny.clients["plain"].test.x) == {}
    line = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert "{}" not in line.partition('"scores"')[2]


@dataclass(frozen=True)
class Adds(Method):
    """What the base shows, and something more."""

    def examine(self, model: Net, x: Tensor, draw: Draw) -> Seen:
        seen = super().examine(model, x, draw)
        return replace(seen, means={"best": seen.scores.max(1).values})


def test_what_is_shown_can_build_on_the_base(tiny: Federation, tmp_path: Path) -> None:
    run = fp.train(tiny, method=Adds(), rounds=1, out=tmp_path / "run")
    plain = fp.train(tiny, method=fp.FedAvg(), rounds=1, out=tmp_path / "plain")
    images = tiny.clients["plain"].test.x
    assert run.models["plain"].examine(images)["best"].shape == (len(images),)
    assert (run.models["plain"].probabilities(images) == plain.models["plain"].probabilities(images)).all()
