"""Transforms: what they make of an upload, by hand; what is refused; the same bits wherever clients run."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from typer.testing import CliRunner

import fedprism as fp
from fedprism import api
from fedprism.aggregators import AGGREGATORS
from fedprism.cli import app
from fedprism.config import Config, ModelConfig, override, structure
from fedprism.conformance.spies import Reversed
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.inprocess import InProcess
from fedprism.engines.numerics import numerics
from fedprism.engines.processes.handle import Pool
from fedprism.errors import ConfigError, FedprismError
from fedprism.explain import Traffic, changes, traffic
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Context, Method, State, UploadKind
from fedprism.methods.fedkd import FedKD
from fedprism.records import RunDirectory, read_run
from fedprism.report.html import page
from fedprism.round.client import make_info, uploaded_kinds
from fedprism.round.engine import Engine, Failure, Result
from fedprism.round.events import Callback
from fedprism.round.loop import Loop
from fedprism.transforms import TRANSFORMS, make_transforms
from fedprism.transforms.base import Transform, UploadContext, from_wire, to_wire
from fedprism.transforms.clip_norm import ClipNorm
from fedprism.transforms.quantize import CODES, SCALES, SHAPE, Quantize
from tests.harness import CPU, MLP, Borrowed, Collect, by_method, config_of, loop_for, same

pytestmark = pytest.mark.full

VICTIM = "blurred-1"  # of six clients
LEAVES = (768 * 16, 16, 16 * 8, 8, 8 * 10, 10)  # numbers in each leaf of MLP
CLIPPED = {"name": "clip_norm", "max": 0.3, "kinds": ["weights", "factors", "prototype"]}
ALL = ["weights", "buffers", "factors"]
QUANTIZED = {"name": "quantize", "bits": 8, "kinds": ["weights", "factors", "prototype"]}


def context(
    kinds: Mapping[str, UploadKind], origin: State | None = None, round: int = 0, client: str = "plain", seed: int = 0
) -> UploadContext:
    """An upload of this client on its way."""
    info = make_info(structure({"model": MLP, "seed": seed}, Config), ("plain", "tinted"), 10, (3, 16, 16))
    ctx = Context(round, 9, info, Config().train, 0.1, "samples", client, download=origin or {})
    return UploadContext(ctx, kinds, origin or {})


def run(method: Method, settings: Config, federation: Federation, engine: Engine | None = None) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, settings, federation, engine), Collect()
    with numerics(settings.run, CPU):
        assert loop.run([seen]) == "finished"
    return loop, seen


def assert_same(one: tuple[Loop, Collect], other: tuple[Loop, Collect]) -> None:
    """The same records, timings aside, and the same states."""
    records = [[replace(record, seconds={}) for record in seen.records] for _, seen in (one, other)]
    assert records[0] == records[1]
    assert same(one[0].server, other[0].server)
    assert all(same(one[0].states[c], other[0].states[c]) for c in one[0].info.clients)
    assert one[0].usual_length == other[0].usual_length


# --- clip_norm -------------------------------------------------------------------------------------------------------


def test_the_length_is_of_all_leaves_together() -> None:
    """Updates of (1, 2) and 2 are 3 long together; to be 1.5 long, each is halved."""
    origin = {"a": torch.tensor([10.0, 20.0]), "b": torch.tensor([30.0])}
    upload = {"a": torch.tensor([11.0, 22.0]), "b": torch.tensor([32.0])}
    found = context({"a": "weights", "b": "weights"}, origin)
    clipped = ClipNorm(max=1.5).client(upload, found)
    assert clipped["a"].tolist() == [10.5, 21.0]
    assert clipped["b"].tolist() == [31.0]
    assert found.logs == {"clip_norm/length": pytest.approx(3.0), "clip_norm/clipped": 1.0}
    assert upload["a"].tolist() == [11.0, 22.0], "no input is changed in place"


@pytest.mark.parametrize("bound", [3.0, 1e6])
def test_an_update_that_is_not_longer_is_untouched(bound: float) -> None:
    """Not download plus (upload minus download), which has other bits: 0.1 + (0.3 - 0.1) is not 0.3."""
    origin = {"a": torch.tensor([0.1, 0.0, 0.0])}
    upload = {"a": torch.tensor([0.3, 2.0, 2.0])}
    found = context({"a": "weights"}, origin)
    assert ClipNorm(max=bound).client(upload, found) is upload
    assert found.logs["clip_norm/clipped"] == 0.0


def test_an_update_whose_squares_overflow_is_clipped_as_any_other() -> None:
    """(3, 4) 1e30 and 12e30 are 13e30 long: to be 13 long, it becomes (3, 4) and 12, and not nothing."""
    origin = {"a": torch.zeros(2), "b": torch.ones(1), "e": torch.empty(0)}
    upload = {"a": torch.tensor([3e30, -4e30]), "b": torch.tensor([12e30]), "e": torch.empty(0)}
    found = context(dict.fromkeys(origin, "weights"), origin)
    clipped = ClipNorm(max=13.0).client(upload, found)
    torch.testing.assert_close(
        clipped, {"a": torch.tensor([3.0, -4.0]), "b": torch.tensor([13.0]), "e": torch.empty(0)}
    )
    assert found.logs["clip_norm/length"] == pytest.approx(13e30)
    # What is not even finite as an update is not made finite: the server refuses it.
    opposite = {"a": torch.full((2,), -3e38)}
    spoilt = ClipNorm(max=1.0).client({"a": torch.full((2,), 3e38)}, context({"a": "weights"}, opposite))
    assert not spoilt["a"].isfinite().any()


def test_statistics_and_scalars_are_neither_measured_nor_changed() -> None:
    origin = {"w": torch.zeros(1), "mean": torch.zeros(1), "count": torch.tensor(1)}
    upload = {
        "w": torch.tensor([4.0]),
        "mean": torch.tensor([900.0]),
        "s": torch.tensor(70.0),
        "count": torch.tensor(9),
    }
    kinds: dict[str, UploadKind] = {"w": "weights", "mean": "buffers", "s": "scalar", "count": "buffers"}
    clipped = ClipNorm(max=1.0).client(upload, context(kinds, origin))
    assert {n: t.item() for n, t in clipped.items()} == {"w": 1.0, "mean": 900.0, "s": 70.0, "count": 9}
    chosen = ClipNorm(max=9.0, kinds=("buffers",)).client(upload, context(kinds, origin))
    assert {n: t.item() for n, t in chosen.items()} == {"w": 4.0, "mean": 9.0, "s": 70.0, "count": 9}


def test_a_leaf_of_another_shape_keeps_it_and_the_server_refuses_it(unequal: Federation) -> None:
    """What it was meant to be an update of cannot be added to it: broadcast, it would look like a sound upload."""
    origin = {"a": torch.ones(2, 2), "b": torch.zeros(1)}
    upload = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([4.0])}
    clipped = ClipNorm(max=1.0).client(upload, context({"a": "weights", "b": "weights"}, origin))
    assert clipped["a"].shape == (1, 2)
    torch.testing.assert_close(clipped["a"], torch.tensor([[0.6, 0.0]]))
    victim = unequal.names[0]
    for shape in ("one row", "another size"):
        for transforms in ([CLIPPED], [QUANTIZED], [CLIPPED, QUANTIZED]):
            _, seen = run(Misshapen(victim, shape), config_of(model=MLP, transforms=transforms), unequal)
            assert all(list(record.failed) == [victim] for record in seen.records[1:])
            assert "body.fc1.weight" in seen.records[1].failed[victim]


@dataclass(frozen=True)
class Misshapen(fp.FedAvg):
    """One client's first leaf has another shape."""

    who: str = ""
    shape: str = "one row"

    def upload(self, client: fp.Client, ctx: Context) -> State:
        state = super().upload(client, ctx)
        if ctx.client_id != self.who:
            return state
        name, tensor = next(iter(state.items()))
        return {**state, name: tensor[:1] + 9 if self.shape == "one row" else tensor[:3, :5] + 9}


def test_what_fedkd_sends_is_an_update_already(unequal: Federation) -> None:
    """So its length is that of the upload, and the download plays no part in it."""
    ctx = context({}, {"update.w": torch.tensor([100.0])}).ctx
    method = FedKD()
    found = UploadContext(ctx, {"update.w": "factors"}, method.origin(ctx))
    assert ClipNorm(max=1.0).client({"update.w": torch.tensor([4.0])}, found)["update.w"].tolist() == [1.0]
    # A bound of nearly nothing: the student stands still, whatever its clients learn.
    still, _ = run(method, config_of(model=MLP, transforms=[{"name": "clip_norm", "max": 1e-9}]), unequal)
    moved, _ = run(method, config_of(model=MLP), unequal)
    updates = [name for name in still.server if name.startswith("update.")]
    assert max(still.server[name].abs().max() for name in updates) < 1e-8
    assert max(moved.server[name].abs().max() for name in updates) > 1e-4


def test_no_client_moves_further_than_the_bound(unequal: Federation) -> None:
    """Nor does their mean: in three rounds, the server by at most three bounds."""
    loop, seen = run(fp.FedAvg(), config_of(model=MLP, transforms=[{"name": "clip_norm", "max": 0.01}]), unequal)
    first = seen.snapshots[0].server
    moved = math.sqrt(sum(float((loop.server[n] - t).double().square().sum()) for n, t in first.items()))
    assert 0.001 < moved <= 0.03 * 1.001
    logs = [logs for record in seen.records[1:] for logs in record.logs.values()]
    assert all(each["clip_norm/clipped"] == 1 and each["clip_norm/length"] > 0.01 for each in logs)


# --- quantize --------------------------------------------------------------------------------------------------------


def test_codes_and_scales_by_hand() -> None:
    """Two buckets of three: scales 254 / 127 and 12.7 / 127. What lies between two steps is one of them."""
    u = torch.tensor([254.0, -127.0, 2.0, -12.7, 0.25, 0.0])
    codes, scales = Quantize(bucket=3).rounded(u, torch.Generator().manual_seed(0))
    torch.testing.assert_close(scales, torch.tensor([2.0, 0.1]))
    assert codes.dtype == torch.int8
    first, second, third, fourth, fifth, sixth = codes.tolist()
    assert (first, third, fourth, sixth) == (127, 1, -127, 0)
    assert second in (-64, -63)
    assert fifth in (2, 3)
    assert Quantize(bucket=3).values(codes, scales).tolist() == pytest.approx(
        [254.0, 2.0 * second, 2.0, -12.7, 0.1 * fifth, 0.0]
    )


def test_four_bits_have_seven_steps_and_two_numbers_a_byte() -> None:
    """-7 to 7 plus 8, the first of a pair in the upper half."""
    four = Quantize(bits=4, bucket=9)
    codes, scales = four.rounded(torch.tensor([7.0, -7.0, 0.0, 3.0, 1.0]), torch.Generator().manual_seed(0))
    assert scales.tolist() == [1.0]
    assert codes.tolist() == [7, -7, 0, 3, 1]
    packed = four.packed(codes)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [15 * 16 + 1, 8 * 16 + 11, 9 * 16]
    assert four.unpacked(packed, 5).tolist() == codes.tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 7, 512, 513])
@pytest.mark.parametrize("bits", [8, 4])
def test_every_code_survives_being_packed(bits: Any, count: int) -> None:
    quantize = Quantize(bits=bits)
    codes = (torch.arange(count) % (2 * quantize.levels + 1) - quantize.levels).to(torch.int8)
    assert quantize.unpacked(quantize.packed(codes), count).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_right_on_average_and_never_more_than_one_step_wrong(bits: Any) -> None:
    """A draw's standard deviation is at most half a step; 4,000 draws have a mean within five of theirs."""
    quantize, draw = Quantize(bits=bits, bucket=16), torch.Generator().manual_seed(1)
    u = torch.randn(50, generator=draw, dtype=torch.float64) * torch.logspace(-3, 3, 50, dtype=torch.float64)
    found = torch.zeros(50, dtype=torch.float64)
    for _ in range(4000):
        codes, scales = quantize.rounded(u, draw)
        step, values = scales.repeat_interleave(16)[:50], quantize.values(codes, scales)
        assert ((values - u).abs() <= step * (1 + 1e-9)).all()
        found += values / 4000
    assert ((found - u).abs() <= 5 * 0.5 * step / math.sqrt(4000)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_right_on_average_for_short_numbers_too(dtype: torch.dtype) -> None:
    """Numbers near the top, where noise below 1 is less than 16 bits can add to them."""
    u = torch.cat([torch.tensor([127.0]), torch.linspace(90, 126, 511)]).to(dtype)
    quantize, draw = Quantize(), torch.Generator().manual_seed(0)
    drawn = [quantize.rounded(u, draw) for _ in range(200)]
    found = torch.stack([codes.double() * scales.double() for codes, scales in drawn]).mean(0)
    assert abs(float((found - u.double()).mean())) < 5 * 0.5 / math.sqrt(200 * 512)
    assert abs(float(found[0]) - 127) < 5 * 0.5 / math.sqrt(200), "the largest number, too"


@pytest.mark.parametrize("size", [6e-8, 1e-5, 65504.0])
def test_the_smallest_and_the_largest_numbers_of_16_bits_come_back(size: float) -> None:
    """A scale of 16 bits is the next one above, not the nearest: 6e-8 / 127 would be nothing."""
    u = torch.full((512,), size, dtype=torch.float16)
    quantize, draw = Quantize(), torch.Generator().manual_seed(0)
    found = torch.stack([quantize.values(*quantize.rounded(u, draw)) for _ in range(50)])
    assert found.dtype == torch.float16
    assert found.isfinite().all()
    assert float(found.double().mean()) == pytest.approx(float(u[0]), rel=0.02)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 5), (600,)])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("known", [True, False])
def test_any_shape_and_precision_comes_back(known: bool, dtype: torch.dtype, bits: Any, shape: tuple[int, ...]) -> None:
    """As an update of a download that the server knows, or of nothing: then its shape is sent, too."""
    quantize, origin = Quantize(bits=bits), {"w": torch.full(shape, 5.0, dtype=dtype)} if known else {}
    upload = {"w": torch.randn(shape, dtype=dtype), "n": torch.tensor(3)}
    way = context({"w": "weights", "n": "buffers"}, origin)
    sent = quantize.client(upload, way)
    count = math.prod(shape)
    assert sent.keys() == {"n", "w" + CODES, "w" + SCALES} | (set() if known else {"w" + SHAPE})
    assert len(sent["w" + CODES]) == (count if bits == 8 else (count + 1) // 2)
    assert len(sent["w" + SCALES]) == math.ceil(count / 512)
    back = quantize.server(sent, way)
    assert (back["w"].dtype, back["w"].shape) == (dtype, shape)
    assert back["n"] is upload["n"]
    step = float(sent["w" + SCALES].max()) if count else 0.0
    torch.testing.assert_close(back["w"], upload["w"], rtol=0, atol=step * 1.001 + 1e-6)


def test_a_bucket_of_zeros_stays_zero() -> None:
    codes, scales = Quantize(bucket=2).rounded(torch.tensor([0.0, 0.0, 1.0]), torch.Generator().manual_seed(0))
    assert (codes.tolist(), scales[0].item()) == ([0, 0, 127], 0.0)
    assert Quantize(bucket=2).values(codes, scales).tolist()[:2] == [0.0, 0.0]


def test_an_update_of_nothing_has_no_error() -> None:
    """The share of nothing is no division by zero."""
    way = context({"w": "weights"}, {"w": torch.ones(3)})
    assert Quantize().server(Quantize().client({"w": torch.ones(3)}, way), way)["w"].tolist() == [1, 1, 1]
    assert way.logs["quantize/error"] == 0
    assert all(map(math.isfinite, way.logs.values()))


@pytest.mark.parametrize(("bits", "bucket"), [(8, 512), (8, 7), (4, 512), (4, 100_000)])
def test_the_bytes_that_are_recorded_are_those_that_are_sent(bits: int, bucket: int, unequal: Federation) -> None:
    """A byte, or half of one, per number and four bytes per bucket; nothing else, as the shapes are known."""
    settings = config_of(model=MLP, transforms=[{"name": "quantize", "bits": bits, "bucket": bucket}])
    _, seen = run(fp.FedAvg(), settings, unequal)
    expected = sum((n if bits == 8 else (n + 1) // 2) + 4 * math.ceil(n / bucket) for n in LEAVES)
    for record in seen.records[1:]:
        assert set(record.up.values()) == {expected}
        assert set(record.down.values()) == {4 * sum(LEAVES)}
        assert all(logs["quantize/bytes"] == expected / (4 * sum(LEAVES)) for logs in record.logs.values())
        assert all(0 < logs["quantize/error"] < (0.05 if bits == 8 else 1) for logs in record.logs.values())


HOSTILE = {
    "codes of another type": (CODES, lambda t: t.int(), "expected torch.int8"),
    "too few codes": (CODES, lambda t: t[:-1], "expected torch.int8"),
    "codes in two dimensions": (CODES, lambda t: t.view(1, -1), "expected torch.int8"),
    "scales that are no numbers": (SCALES, lambda t: t * math.nan, "in its upload is not finite"),
    "infinite scales": (SCALES, lambda t: t + math.inf, "in its upload is not finite"),
    "whole scales": (SCALES, lambda t: t.long(), "with floating scales"),
    "too many scales": (SCALES, lambda t: torch.cat([t, t]), "with floating scales"),
    "precise scales": (SCALES, lambda t: t.double(), "is torch.float64 of shape"),
    "no scales": (SCALES, None, "cannot be decoded: KeyError"),
    "no codes": (CODES, None, "missing or unknown"),
    "a huge shape": (SHAPE, lambda t: torch.full_like(t, 2**40), "expected torch.int8"),
    "a negative shape": (SHAPE, lambda t: -t, "cannot be decoded"),
    "a shape of no number": (SHAPE, lambda t: t * math.nan, "cannot be decoded"),
    "a shape that is none": (SHAPE, lambda t: torch.tensor(7), "cannot be decoded"),
    "no shape": (SHAPE, None, "cannot be decoded: KeyError"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_codes_are_refused_and_the_others_are_aggregated(
    what: str, unequal: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedFOMO's clients send models that were not sent to them, so the server reads their shapes from the upload."""
    part, change, reason = HOSTILE[what]
    victim, method = unequal.names[1], METHODS["fedfomo" if part == SHAPE else "fedavg"]()
    settings = config_of(model=MLP, train={"rounds": 1}, transforms=[{"name": "quantize"}])

    def tampered(answer: Result) -> Result | Failure:
        name = next(n for n in answer.upload if n.endswith("weight" + part))
        changed = {name: change(answer.upload[name])} if change else {}
        return replace(answer, upload={n: t for n, t in answer.upload.items() if n != name} | changed)

    class Changes(InProcess):
        answer = staticmethod(tampered)

        def train(self, round: int, requests: Any) -> Iterator[tuple[str, Result | Failure]]:
            for client_id, found in super().train(round, requests):
                assert isinstance(found, Result)
                yield client_id, self.answer(found) if client_id == victim else found

    class Gone(Changes):
        answer = staticmethod(lambda found: Failure("gone"))

    info = make_info(settings, unequal.names, unequal.classes, unequal.shape)
    repeat = Tensor.repeat_interleave
    longest = [0]

    def counting(tensor: Tensor, repeats: int) -> Tensor:
        longest[0] = max(longest[0], len(tensor) * repeats)
        return repeat(tensor, repeats)

    monkeypatch.setattr(Tensor, "repeat_interleave", counting)
    loop, seen = run(method, settings, unequal, Changes(method, settings, info, unequal, CPU))
    without, _ = run(method, settings, unequal, Gone(method, settings, info, unequal, CPU))
    (failed,) = seen.records[1].failed.items()
    assert failed[0] == victim
    assert reason in failed[1]
    assert loop.states[victim] is None
    assert same(loop.server, without.server), "as if it had never answered"
    assert longest[0] < 2 * max(LEAVES), "nothing of the size that was claimed is made"


# --- noise -----------------------------------------------------------------------------------------------------------


def codes_of(place: int = 0, **key: Any) -> list[int]:
    way = replace(context({"w": "weights"}, {"w": torch.zeros(400)}, **key), place=place)
    return Quantize().client({"w": torch.linspace(-1, 1, 400)}, way)["w" + CODES].tolist()


def test_noise_is_keyed_by_seed_round_client_and_place() -> None:
    assert codes_of() == codes_of()
    others = [codes_of(round=1), codes_of(client="tinted"), codes_of(seed=1), codes_of(place=1)]
    assert all(other != codes_of() for other in others)
    assert len({tuple(other) for other in others}) == 4


def test_noise_of_leaves_differs() -> None:
    way = context({"a": "weights", "b": "weights"}, {})
    values = torch.linspace(-1, 1, 400)
    sent = Quantize().client({"a": values, "b": values}, way)
    assert sent["a" + CODES].tolist() != sent["b" + CODES].tolist()


def test_the_order_of_answers_changes_nothing(unequal: Federation) -> None:
    settings = config_of(model=MLP, transforms=[CLIPPED, QUANTIZED])
    info = make_info(settings, unequal.names, unequal.classes, unequal.shape)
    backwards = Reversed(fp.FedAvg(), settings, info, unequal, CPU)
    assert_same(run(fp.FedAvg(), settings, unequal, backwards), run(fp.FedAvg(), settings, unequal))


class Stop(Callback):
    def round(self, record: Any, snapshot: Any) -> None:
        if snapshot.round == 1:
            raise KeyboardInterrupt


def raw(**sections: Any) -> dict[str, Any]:
    """A run of three rounds that can be written to a file."""
    return {
        "data": {"name": "digits-skew", "partition": {"name": "domain", "clients": 3}, "samples": 30},
        "model": MLP,
        "train": {"rounds": 3, "batch_size": 16},
        "evaluate": {"splits": ["test"], "moments": ["received"]},
        "run": {"device": "cpu", "engine": "inprocess", "checkpoint_every": 1},
        **sections,
    }


def stopped_and_resumed(given: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """The folders of a straight run, and of one that was stopped after its first round and resumed."""
    settings = structure(given, Config)
    straight = api.run_config(settings, "x", out=folder / "straight")
    with pytest.raises(KeyboardInterrupt):
        api.run_config(settings, "x", out=folder / "stopped", callbacks=[Stop()])
    assert api.resume(folder / "stopped").status == straight.status == "finished"
    return folder / "straight", folder / "stopped"


def assert_recorded_alike(one: Path, other: Path) -> None:
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    with RunDirectory.open(one) as a, RunDirectory.open(other) as b:
        first, second = a.latest(), b.latest()
    assert first is not None
    assert second is not None
    assert same(first.server, second.server)
    assert all(same(first.clients[c], second.clients[c]) for c in first.clients)
    assert first.usual_length == second.usual_length is not None


def test_resumed_is_straight(tmp_path: Path) -> None:
    """The bound is short enough that many updates of the first round are clipped."""
    given = raw(transforms=[{"name": "clip_norm", "max": 0.2}, {"name": "quantize", "bits": 4}])
    assert_recorded_alike(*stopped_and_resumed(given, tmp_path))


# --- several transforms, and what is refused --------------------------------------------------------------------------


def test_clip_then_quantize_composes(unequal: Federation) -> None:
    """The server gets the clipped update, to within a step of each scale."""
    origin = {"w": torch.tensor([1.0, 1.0])}
    upload = {"w": torch.tensor([4.0, 5.0])}  # an update of (3, 4), which is 5 long
    transforms = make_transforms(
        structure({"transforms": [{"name": "clip_norm", "max": 2.5}, "quantize"]}, Config).transforms
    )
    way = context({"w": "weights"}, origin)
    sent = to_wire(transforms, upload, way)
    assert sent["w" + SCALES].tolist() == pytest.approx([2.0 / 127])
    assert from_wire(transforms, sent, way)["w"].tolist() == pytest.approx([2.5, 3.0], abs=2.0 / 127)
    assert way.logs.keys() == {"clip_norm/length", "clip_norm/clipped", "quantize/bytes", "quantize/error"}


def test_server_halves_run_last_to_first() -> None:
    """(w + 1) 2 goes out; halved and less one, it is w again, and not w + 1/2."""
    way, upload = context({"w": "weights"}), {"w": torch.tensor([3.0])}
    chain = (Adds(), Doubles())
    assert to_wire(chain, upload, way)["w"].tolist() == [8.0]
    assert from_wire(chain, to_wire(chain, upload, way), way)["w"].tolist() == [3.0]


@dataclass(frozen=True)
class Adds(Transform):
    def client(self, upload: State, context: UploadContext) -> State:
        return {n: t + 1 for n, t in upload.items()}

    def server(self, sent: State, context: UploadContext) -> State:
        return {n: t - 1 for n, t in sent.items()}


@dataclass(frozen=True)
class Doubles(Transform):
    def client(self, upload: State, context: UploadContext) -> State:
        return {n: t * 2 for n, t in upload.items()}

    def server(self, sent: State, context: UploadContext) -> State:
        return {n: t / 2 for n, t in sent.items()}


REFUSED: list[tuple[str, list[Any], str]] = [
    (
        "fedavg",
        ["quantize", "clip_norm"],
        "transforms: clip_norm acts on weights, but comes after quantize, which packs these; put it before",
    ),
    (
        "fedavg",
        ["quantize", "quantize"],
        "transforms: quantize acts on weights, but comes after quantize, which packs these; put it before",
    ),
    ("local", ["clip_norm"], "acts on weights, factors, but local uploads nothing. Leave it out."),
    ("fedproto", ["quantize"], "transforms: quantize acts on weights, factors, but fedproto uploads prototype"),
    ("fedavg", [{"name": "quantize", "kinds": []}], "transforms: quantize acts on nothing, but fedavg uploads weights"),
    ("fedavg", ["quantise"], "unknown transform 'quantise'. Did you mean 'quantize'?"),
    ("fedavg", [{"name": "clip_norm", "max": 0}], "transforms[0].max is 0.0; expected above 0"),
    ("fedavg", ["clip_norm", {"name": "quantize", "bits": 3}], "transforms[1].bits"),
    ("fedavg", [{"name": "quantize", "bucket": 0}], "transforms[0].bucket is 0; expected 1 or more"),
    ("fedavg", [{"name": "clip_norm", "kinds": ["weight"]}], "transforms[0].kinds"),
    ("fedavg", [{"name": "clip_norm", "mx": 1}], "unknown key 'mx'. Did you mean 'max'?"),
]


@pytest.mark.parametrize(("method", "transforms", "words"), REFUSED)
def test_what_would_do_nothing_is_refused(method: str, transforms: list[Any], words: str, unequal: Federation) -> None:
    with pytest.raises(ConfigError) as error:
        loop_for(METHODS[method](), config_of(model=MLP, transforms=transforms), unequal)
    assert words in str(error.value)


def test_a_later_transform_may_take_other_kinds(unequal: Federation) -> None:
    """Statistics are not packed by the first, so the second has something to act on."""
    transforms = ["quantize", {"name": "clip_norm", "max": 1e-3, "kinds": ["buffers"]}]
    loop, seen = run(fp.FedAvg(), config_of(transforms=transforms), unequal)
    assert {"quantize/error", "clip_norm/length"} <= seen.records[1].logs["plain"].keys()
    for name in (name for name in loop.server if name.endswith("running_mean")):
        assert loop.server[name].norm() < 3 * 1.01e-3, "three rounds of nearly nothing"


def test_two_of_one_kind_stand_beside_each_other(unequal: Federation) -> None:
    """Weights with 4 bits and statistics with 8: each half unpacks its own, and what both log is told apart."""
    both = [{"name": "quantize", "bits": 4}, {"name": "quantize", "bits": 8, "kinds": ["buffers"]}]
    _, seen = run(fp.FedAvg(), config_of(transforms=both), unequal)
    assert not any(record.failed for record in seen.records)
    logs = seen.records[1].logs["plain"]
    assert logs["quantize/bytes"] < 0.2 < 0.25 < logs["quantize/bytes#2"]
    with pytest.raises(ConfigError, match="clip_norm acts on weights, but comes after quantize, which packs these"):
        loop_for(fp.FedAvg(), config_of(transforms=["quantize", {"name": "clip_norm", "kinds": ALL}]), unequal)


def test_statistics_of_fedkd_are_not_quantized(unequal: Federation) -> None:
    """Its updates of weights are factors; a rounded variance could fall below zero."""
    loop = loop_for(METHODS["fedkd"](), config_of(), unequal)
    kinds = loop.declared("plain", 0)
    assert {kind for name, kind in kinds.items() if "running" in name or "tracked" in name} == {"buffers"}
    assert {kind for name, kind in kinds.items() if name.endswith(".weight")} == {"factors"}


def test_a_bucket_is_no_longer_than_its_leaf() -> None:
    codes, scales = Quantize(bucket=10**9).rounded(torch.ones(10), torch.Generator().manual_seed(0))
    assert (codes.tolist(), scales.shape) == ([127] * 10, (1,))


@dataclass(frozen=True)
class Picky(Transform):
    """Its server's half divides by zero; its client's half logs a tensor or, with `gives`, returns none."""

    gives: bool = True

    def client(self, upload: State, context: UploadContext) -> State:
        context.log("picky/sum", torch.stack([t.double().sum() for t in upload.values()]).sum())
        return upload if self.gives else None  # type: ignore[return-value]

    def server(self, sent: State, context: UploadContext) -> State:
        if context.ctx.client_id == "tinted":
            raise ZeroDivisionError("not from you\nat all")
        return sent


def test_what_a_servers_half_raises_is_that_clients_failure(unequal: Federation) -> None:
    _, seen = run(fp.FedAvg(), config_of(model=MLP, transforms=[f"{__name__}:Picky"]), unequal)
    for record in seen.records[1:]:
        assert record.failed == {"tinted": "its upload cannot be decoded: ZeroDivisionError: not from you"}
        assert isinstance(record.logs["plain"]["picky/sum"], float)
    silent = config_of(model=MLP, transforms=[{"name": f"{__name__}:Picky", "gives": False}])
    with pytest.raises(ConfigError, match="the transform picky makes a client's upload unusable: its upload is None"):
        loop_for(fp.FedAvg(), silent, unequal).run([])


@dataclass(frozen=True)
class InPlace(Transform):
    """Changes the dict that it is given or, with `tensors`, what is in it."""

    tensors: bool = False

    def client(self, upload: State, context: UploadContext) -> State:
        name = next(iter(upload))
        if self.tensors:
            upload[name].mul_(2.0)
        upload[name] = upload[name] * 1e30
        return upload


def test_what_a_transform_writes_into_its_input_is_checked_too(unequal: Federation) -> None:
    """The client has checked its upload before; nobody has checked what the transform has made of it."""
    loop = loop_for(fp.FedAvg(), config_of(model=MLP, transforms=[f"{__name__}:InPlace"]), unequal)
    first = {name: tensor.clone() for name, tensor in loop.server.items()}
    assert loop.run([seen := Collect()]) == "diverged"
    assert all("far from what is usual" in reason for reason in seen.records[1].failed.values())
    assert same(loop.server, first)
    spoils = config_of(model=MLP, transforms=[{"name": f"{__name__}:InPlace", "tensors": True}])
    with pytest.raises(FedprismError, match="inplace changes tensors of an upload or of its download in place"):
        loop_for(fp.FedAvg(), spoils, unequal).run([])


@dataclass(frozen=True)
class WritesInto(Transform):
    """Changes tensors that somebody else holds."""

    where: Literal["client", "server"] = "client"
    what: Literal["upload", "origin"] = "upload"

    def spoil(self, state: State, context: UploadContext) -> State:
        held = context.origin if self.what == "origin" else state
        next(t for t in held.values() if t.is_floating_point()).mul_(2)
        return state

    def client(self, upload: State, context: UploadContext) -> State:
        return self.spoil(upload, context) if self.where == "client" else upload

    def server(self, sent: State, context: UploadContext) -> State:
        return self.spoil(sent, context) if self.where == "server" else sent


@pytest.mark.parametrize("what", ["upload", "origin"])
@pytest.mark.parametrize("where", ["client", "server"])
def test_no_half_may_change_what_somebody_else_holds(where: str, what: str, unequal: Federation) -> None:
    """An upload shares memory with the client's state in one process, and with nothing where it has come from far."""
    spoils = {"name": f"{__name__}:WritesInto", "where": where, "what": what}
    with pytest.raises(FedprismError, match="writesinto changes tensors of an upload or of its download in place"):
        loop_for(fp.FedAvg(), config_of(model=MLP, transforms=[spoils]), unequal).run([])


@dataclass(frozen=True)
class Inferred(Transform):
    """Makes tensors that do not count their changes."""

    def client(self, upload: State, context: UploadContext) -> State:
        with torch.inference_mode():
            return {n: t * 1 for n, t in upload.items()}


def test_tensors_of_inference_may_be_sent(unequal: Federation) -> None:
    transforms = [f"{__name__}:Inferred", "clip_norm", f"{__name__}:Inferred"]
    loop, seen = run(fp.FedAvg(), config_of(model=MLP, transforms=transforms), unequal)
    same_without, _ = run(fp.FedAvg(), config_of(model=MLP, transforms=["clip_norm"]), unequal)
    assert not any(record.failed for record in seen.records)
    assert same(loop.server, same_without.server)


@dataclass(frozen=True)
class Narrow(Transform):
    """Floats of 8 bits on the way, which hardly anything can be computed with."""

    def client(self, upload: State, context: UploadContext) -> State:
        return {**upload, **{n: t.to(torch.float8_e5m2) for n, t in context.chosen(upload, self.kinds).items()}}

    def server(self, sent: State, context: UploadContext) -> State:
        return {n: t.float() if t.dtype == torch.float8_e5m2 else t for n, t in sent.items()}


def test_any_type_of_floats_may_be_sent(unequal: Federation) -> None:
    _, seen = run(fp.FedAvg(), config_of(model=MLP, transforms=[f"{__name__}:Narrow"]), unequal)
    _, plain = run(fp.FedAvg(), config_of(model=MLP), unequal)
    assert not any(record.failed for record in seen.records)
    assert seen.records[1].up["plain"] < plain.records[1].up["plain"] / 3


def test_prototypes_are_quantized_where_this_is_asked_for(unequal: Federation) -> None:
    _, seen = run(METHODS["fedproto"](), config_of(transforms=[QUANTIZED]), unequal)
    _, plain = run(METHODS["fedproto"](), config_of(), unequal)
    assert max(seen.records[-1].up.values()) < max(plain.records[-1].up.values()) / 2


def some_classes(classes: list[int]) -> tuple[Any, Any]:
    """60 images of these classes alone."""
    draw = np.random.default_rng(classes)
    return draw.integers(0, 255, (60, 1, 6, 6)).astype(np.uint8), draw.choice(classes, 60)


@pytest.mark.parametrize("method", ["fedproto", "feddistill"])
def test_prototypes_of_clients_with_other_classes_are_right_within_rounding(method: str) -> None:
    """A client without images of a class has no say in it: its count stays zero, whatever transforms round."""
    federation = fp.Federation.from_arrays({c: some_classes(k) for c, k in zip("ab", ([0, 1, 2], [2, 3]), strict=True)})
    settings = {"model": MLP, "train": {"rounds": 2}, "clients": {"weighting": "uniform"}}
    clip = {"name": "clip_norm", "max": 1e6, "kinds": ["prototype"]}
    plain, _ = run(METHODS[method](), config_of(**settings), federation)
    coded, seen = run(METHODS[method](), config_of(**settings, transforms=[clip, QUANTIZED]), federation)
    for name, expected in plain.server.items():
        torch.testing.assert_close(coded.server[name], expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    for client_id in federation.names:
        first, second = (record.logs[client_id]["clip_norm/length"] for record in seen.records[1:])
        assert second < first < 5, "no count and no class without images is in the length"


# --- what an upload is an update of ----------------------------------------------------------------------------------

WAYS: dict[tuple[int, str | None], dict[str, State]] = {}


@dataclass(frozen=True)
class Remembers(Transform):
    """What leaves a client, what it was sent, and what arrives."""

    def client(self, upload: State, context: UploadContext) -> State:
        WAYS[context.ctx.round, context.ctx.client_id] = {"upload": upload, "download": context.ctx.download}
        return upload

    def server(self, sent: State, context: UploadContext) -> State:
        WAYS[context.ctx.round, context.ctx.client_id]["arrived"] = sent
        return sent


def update_by_hand(method: str, upload: State, download: State) -> State:
    """What a client has added to what it was sent; control variates and FedKD's updates are sent as such."""
    if method == "fedkd":
        return upload
    return {n: t if n.startswith("c.") else t - download[n.removeprefix("model/")] for n, t in upload.items()}


def length_by_hand(updates: State) -> float:
    """Without control variates, which are buffers."""
    return math.sqrt(sum(float(u.double().square().sum()) for n, u in updates.items() if not n.startswith("c.")))


@pytest.mark.parametrize("method", ["scaffold", "fedamp", "fedkd"])
def test_updates_are_what_a_method_says_they_are_of(method: str, unequal: Federation) -> None:
    """Rounded by less than the largest number of each update, over 127; measured likewise, by client and server."""
    kinds = ["weights", "factors", "buffers"]
    changes = [{"name": f"{__name__}:Remembers"}, {"name": "quantize", "kinds": kinds, "bucket": 10**6}]
    loop, _ = run(METHODS[method](), config_of(model=MLP, transforms=changes), unequal)
    lengths = []
    for (round, _), way in WAYS.items():
        updates = update_by_hand(method, way["upload"], way["download"])
        for name, update in updates.items() if round else ():
            wrong = (way["arrived"][name] - way["upload"][name]).abs().max()
            assert wrong <= float(update.abs().max()) / 127 * 1.01 + 1e-7, name
        arrived = update_by_hand(method, way["arrived"], way["download"])
        lengths += [length_by_hand(arrived)] if round == 2 else []
    WAYS.clear()
    assert loop.usual_length == pytest.approx(sorted(lengths)[1], rel=1e-5)  # of three clients


@pytest.mark.parametrize("method", ["scaffold", "fedamp"])
def test_a_client_measures_the_update_that_its_method_says(method: str, unequal: Federation) -> None:
    loop, spy = loop_for(METHODS[method](), config_of(model=MLP), unequal), dict[Any, tuple[float, State]]()

    class Measured(InProcess):
        def train(self, round: int, requests: Mapping[str, Any]) -> Iterator[tuple[str, Result | Failure]]:
            for client_id, answer in super().train(round, requests):
                assert isinstance(answer, Result)
                assert answer.checked is not None
                updates = update_by_hand(method, answer.upload, requests[client_id].download)
                spy[round, client_id] = answer.checked.length, updates
                yield client_id, answer

    loop.engine.__class__ = Measured
    assert loop.run([]) == "finished"
    assert len(spy) == 9
    for length, updates in spy.values():
        assert length == pytest.approx(length_by_hand(updates))


@dataclass(frozen=True)
class LateUploads(Method):
    """Nothing travels before the last round."""

    def shared(self, model: Any, ctx: Context) -> Any:
        return super().shared(model, ctx) if ctx.round >= ctx.rounds - 1 else ()


def test_what_only_the_last_round_uploads_can_be_transformed(unequal: Federation) -> None:
    loop = loop_for(LateUploads(), config_of(model=MLP, transforms=["clip_norm"]), unequal)
    assert uploaded_kinds(loop.method, loop.config, loop.info) == ["weights"]


# --- the same bits on every engine ------------------------------------------------------------------------------------


@TRANSFORMS.register("tests-spoils")
@dataclass(frozen=True)
class Spoils(Transform):
    """One client's upload is not a number."""

    id = "tests-spoils"
    who: str = ""

    def client(self, upload: State, context: UploadContext) -> State:
        if context.ctx.client_id != self.who:
            return upload
        return {n: t * math.nan if t.is_floating_point() else t for n, t in upload.items()}


@pytest.fixture(scope="module")
def six() -> Federation:
    return fp.make_federation("digits-skew", clients=6, seed=0, samples=24, split={"validation": 0.02, "test": 0.05})


def spoilt(method: Method, **sections: Any) -> Config:
    """Two rounds in which clients are absent or drop out, and in which one sends what is not a number."""
    transforms = sections.pop("transforms", [])
    spoils = [{"name": "tests-spoils", "who": VICTIM, "kinds": ["weights", "factors", "prototype"]}]
    return structure(
        {
            "seed": 5,  # in the first round five of six take part, one of whom drops out; in the second most do
            "train": {"rounds": 2, "batch_size": 12},
            "clients": {"participation": 0.8, "dropout": 0.5},
            "evaluate": {"splits": ["test"]},
            "transforms": [] if method.id == "local" else [*spoils, *transforms],
            **sections,
        },
        Config,
    )


def assert_every_engine_agrees(
    method: Method, settings: Config, federation: Federation, spare: Pool, workers: tuple[int, ...]
) -> None:
    reference = run(method, settings, federation)
    failed = [reason for record in reference[1].records for reason in record.failed.values()]
    assert any("dropped out" in reason for reason in failed)
    assert method.id == "local" or any("not finite" in reason for reason in failed)
    assert any(record.up for record in reference[1].records)
    info = make_info(settings, federation.names, federation.classes, federation.shape)
    assert_same(run(method, settings, federation, CudaGraphs(method, settings, info, federation, CPU)), reference)
    for count in workers if os.name == "posix" else ():
        engine = Borrowed.of(spare, count, method, settings, federation)
        assert_same(run(method, settings, federation, engine), reference)


@pytest.mark.parametrize("name", by_method())
def test_every_engine_agrees_on_transforms(name: str, six: Federation, spare: Pool) -> None:
    """Clipped, quantized; records, server and states bit by bit."""
    method = METHODS[name]()
    settings = spoilt(method, transforms=[{**CLIPPED, "max": 0.7}, QUANTIZED])
    assert_every_engine_agrees(method, settings, six, spare, (2,))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_number_of_workers_agrees_on_transforms(name: str, six: Federation, spare: Pool) -> None:
    method = METHODS[name]()
    settings = spoilt(method, transforms=[{**CLIPPED, "max": 0.7}, {**QUANTIZED, "bits": 4}])
    assert_every_engine_agrees(method, settings, six, spare, (1, 2, 5))


SUMMING = [name for name, cls in METHODS.items() if not cls().needs_all_uploads and name != "local"]


@pytest.mark.parametrize("name", by_method(SUMMING, default=("scaffold",)))
@pytest.mark.parametrize("aggregator", list(AGGREGATORS))
def test_every_engine_agrees_on_aggregators(aggregator: str, name: str, six: Federation, spare: Pool) -> None:
    method = METHODS[name]()
    assert_every_engine_agrees(method, spoilt(method, server={"aggregator": aggregator}), six, spare, (2,))


@pytest.mark.parametrize("name", ["fedavg", "fedkd"])
def test_a_transform_that_spoils_one_upload_is_that_clients_failure(name: str, six: Federation) -> None:
    """Before it is encoded: FedKD cannot factorise what is not a number."""
    _, seen = run(METHODS[name](), spoilt(METHODS[name]()), six)
    reason = seen.records[1].failed[VICTIM]
    assert reason.endswith("is not finite after the transforms")
    assert len(seen.records[1].up) == 3


def test_some_updates_are_clipped_and_some_are_not(six: Federation) -> None:
    """Else the tests above would say less than they seem to."""
    settings = spoilt(fp.FedAvg(), transforms=[{**CLIPPED, "max": 0.7}, QUANTIZED])
    _, seen = run(fp.FedAvg(), settings, six)
    logs = [each["clip_norm/clipped"] for record in seen.records for each in record.logs.values()]
    assert set(logs) == {0.0, 1.0}


# --- a transform of one's own -----------------------------------------------------------------------------------------

OWN = '''
"""A transform of one's own."""
from dataclasses import dataclass
from fedprism import Transform
from fedprism.config import setting

@dataclass(frozen=True)
class Halves(Transform):
    """send a share of the update"""

    shows = {"halves/share": "the share that is sent"}
    share: float = setting(0.5, "how much")

    def client(self, upload, context):
        update = context.update(context.chosen(upload, self.kinds))
        context.log("halves/share", self.share)
        return {**upload, **context.add_origin({n: self.share * t for n, t in update.items()})}

class Undecorated(Transform):
    share = 0.5

class Unrelated:
    pass
'''


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_transform_from_a_file_moves_half_as_far(own: Path, unequal: Federation, spare: Pool) -> None:
    one = {"model": MLP, "train": {"rounds": 1}}
    settings = config_of(**one, transforms=[{"name": f"{own}:Halves", "share": 0.25}])
    loop, seen = run(fp.FedAvg(), settings, unequal)
    plain, _ = run(fp.FedAvg(), config_of(**one), unequal)
    for name, first in seen.snapshots[0].server.items():
        torch.testing.assert_close(loop.server[name], first + 0.25 * (plain.server[name] - first), atol=1e-6, rtol=1e-5)
    if os.name == "posix":
        engine = Borrowed.of(spare, 2, fp.FedAvg(), settings, unequal)
        assert_same(run(fp.FedAvg(), settings, unequal, engine), (loop, seen))


def test_a_transform_from_a_file_is_recorded_resumed_and_shown(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its absolute path and all settings, so that a resumed run finds it from another folder."""
    monkeypatch.chdir(tmp_path)
    given = raw(transforms=[{"name": "own.py:Halves"}, {"name": "quantize", "bits": 4}])
    settings = structure(given, Config)
    with pytest.raises(KeyboardInterrupt):
        api.run_config(settings, "x", out=tmp_path / "stopped", callbacks=[Stop()])
    straight = api.run_config(settings, "x", out=tmp_path / "straight")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert api.resume(tmp_path / "stopped").status == "finished"
    assert_recorded_alike(straight.path, tmp_path / "stopped")

    written = yaml.safe_load((straight.path / "config.yaml").read_text())["transforms"]
    first, second = ({**each} for each in written)
    assert first.pop("name") == f"{own.resolve()}:Halves"
    assert first == {"kinds": ["weights", "factors"], "share": 0.5}
    assert second == {"name": "quantize", "kinds": ["weights", "factors"], "bits": 4, "bucket": 512}
    about = json.loads((straight.path / "run.json").read_text())["transforms"]
    assert [each["name"] for each in about] == ["halves", "quantize"]
    assert about[0]["shows"] == {"halves/share": "the share that is sent"}
    record = read_run(straight.path)
    logs = [each for entry in record.rounds[1:] for each in entry.logs.values()]
    assert len(logs) == 9
    assert all(each["halves/share"] == 0.5 and 0 < each["quantize/error"] < 1 for each in logs)

    shown = " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, ["show", str(straight.path)]).output.split())
    assert "transforms of uploads" in shown
    assert "halves/share: the share that is sent 0.5" in shown
    assert "Means over 9 uploads." in shown
    sent = next(iter(record.rounds[1].up.values()))
    assert f"bytes of an upload, as it is sent {sent:,}" in shown
    before, _, section = page([record]).partition("What transforms did to uploads")
    assert "halves/share" not in before  # not taken for something inside the method
    assert "halves/share: the share that is sent" in section
    assert f"{sent:,}" in section


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{own}:Halved", "holds the transforms ['Halves', 'Undecorated'], not 'Halved'; write "),
        ("{own}", "holds the transforms ['Halves', 'Undecorated']; write "),
        ("{own}:Unrelated", "holds the transforms ['Halves', 'Undecorated'], not 'Unrelated'"),
        ("{own}:Undecorated", "expected a frozen dataclass that derives from fedprism.Transform"),
        ("{own}x.py:Halves", "there is no file"),
        ("nowhere.to_be_found:Halves", "the transform 'nowhere.to_be_found:Halves' cannot be imported"),
        ("json:JSONDecoder", "expected a frozen dataclass that derives from fedprism.Transform"),
        ("json:Nothing", "cannot be imported"),
    ],
)
def test_a_wrong_file_or_class_is_named(name: str, words: str, own: Path, unequal: Federation) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        loop_for(fp.FedAvg(), config_of(model=MLP, transforms=[name.format(own=own)]), unequal)


def test_a_file_that_is_no_python_is_named(tmp_path: Path, unequal: Federation) -> None:
    (tmp_path / "broken.py").write_text("class Broken(:\n")
    with pytest.raises(ConfigError, match=r"broken\.py:Broken|broken\.py cannot be loaded: SyntaxError"):
        loop_for(fp.FedAvg(), config_of(transforms=[f"{tmp_path}/broken.py:Broken"]), unequal)


def test_a_wrong_setting_of_ones_own_transform_is_named(own: Path, unequal: Federation) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'shar'. Did you mean 'share'.*@ transforms\[0\]"):
        loop_for(fp.FedAvg(), config_of(transforms=[{"name": f"{own}:Halves", "shar": 1}]), unequal)


def test_a_name_of_a_transform_finds_it_again() -> None:
    """A built-in one by its id, one of a module by that module's name."""
    for made in (Quantize(bits=4), ClipNorm(max=2.0), Adds()):
        assert TRANSFORMS.make(TRANSFORMS.named(made), "transforms[0]") == made
    assert TRANSFORMS.named(Quantize()).name == "quantize"
    assert TRANSFORMS.named(Adds()).name == f"{__name__}:Adds"

    @dataclass(frozen=True)
    class Here(Transform):
        pass

    assert TRANSFORMS.named(Here()).name.startswith("session:"), "no name finds it"


# --- before a run ----------------------------------------------------------------------------------------------------


def test_explain_counts_the_bytes_of_a_real_round(unequal: Federation) -> None:
    transforms = structure({"transforms": [{"name": "quantize", "bits": 8}]}, Config).transforms
    model = structure(MLP, ModelConfig, "model")
    (counted,) = traffic(fp.FedAvg(), model, unequal.classes, unequal.shape[1], 2, transforms)
    (plain,) = traffic(fp.FedAvg(), model, unequal.classes, unequal.shape[1], 2)
    _, seen = run(fp.FedAvg(), config_of(model=MLP, transforms=transforms), unequal)
    record = seen.records[1]
    assert counted.first == counted.last == Traffic(record.down["plain"], record.up["plain"])
    assert plain.first.down == counted.first.down
    assert 3.8 < plain.first.up / counted.first.up < 4


@dataclass(frozen=True)
class Moved(Transform):
    """Only the numbers that have moved: how many depends on what was learnt."""

    packs = True

    def client(self, upload: State, context: UploadContext) -> State:
        update = context.update(context.chosen(upload, self.kinds))
        rest = {n: t for n, t in upload.items() if n not in update}
        return {**rest, **{f"{n}:moved": u[u != 0] for n, u in update.items()}}

    def server(self, sent: State, context: UploadContext) -> State:
        return {**context.origin, **{n: t for n, t in sent.items() if ":moved" not in n}}


def test_explain_trains_where_ones_own_transform_counts() -> None:
    """Without training no number moves, and nothing would be sent."""
    transforms = structure({"transforms": [f"{__name__}:Moved"]}, Config).transforms
    model = structure(MLP, ModelConfig, "model")
    (counted,) = traffic(fp.FedAvg(), model, 3, 16, 2, transforms)
    assert counted.first.up > 0.5 * counted.first.down
    assert "its size may depend on what was learnt" in changes(transforms)["bytes"]
    assert "bytes" not in changes(structure({"transforms": ["quantize"]}, Config).transforms)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("clip_norm", "'clip_norm' is not a list; write [clip_norm] @ transforms"),
        (None, "None is not a list; write [] @ transforms"),
        ({"name": "clip_norm", "max": 2}, "is not a list; write [{name: clip_norm, max: 2}] @ transforms"),
        ([{"clip_norm": {"max": 2}}], "a mapping with a `name`; write {name: clip_norm, max: 2} @ transforms"),
        (["clip"], "@ transforms[0]"),
        ([{"name": "clip_norm", "max": math.inf}], "inf is not a finite number @ transforms[0].max"),
        ([{"name": "clip_norm", "max": date(2026, 1, 1)}], "'2026-01-01' is not a number @ transforms[0].max"),
    ],
)
def test_what_is_written_wrongly_is_explained(given: Any, words: str, unequal: Federation) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        loop_for(fp.FedAvg(), structure({"transforms": given}, Config), unequal)


def test_a_list_is_set_as_a_whole() -> None:
    with pytest.raises(ConfigError, match=r"transforms is \['clip_norm'\], a list; set all of it"):
        override({"transforms": ["clip_norm"]}, ["transforms.0.max=2"])


def test_the_command_line_explains_and_lists_them() -> None:
    def said(*words: str) -> str:
        return " ".join(CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words)).output.split())

    explained = said("explain", "fedavg", "--set", "transforms=[{name: quantize, bits: 8}]")
    assert "(585,152 bytes) down, 148.2 kB (148,162 bytes) up." in explained
    assert f"transform quantize {' '.join(Quantize.idea.split())}" in explained
    assert "comes after quantize" in said("explain", "fedavg", "--set", "transforms=[quantize, clip_norm]")
    listed = said("list", "transforms")
    assert all(f"{name} {cls.__doc__}" in listed for name, cls in (("clip_norm", ClipNorm), ("quantize", Quantize)))
    listed = said("list", "aggregators")
    assert all(f"{name} {cls.__doc__}" in listed for name, cls in AGGREGATORS.items())
