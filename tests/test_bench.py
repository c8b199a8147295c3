"""`fedprism bench`: real, tiny measurements through the command, and the serial loop against the engine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fedprism.bench import engines, growth, machine, point, roofline, workers
from fedprism.bench.engines import KINDS, Ask, measure_engines, wanted
from fedprism.bench.machine import Memory, children, cores, family, memory_in_use, proportional, slug
from fedprism.bench.progress import Rows
from fedprism.bench.race import ByHand, ContenderSpec, Engined, Pace, largest_difference, race
from fedprism.bench.results import SECTIONS, Results, place
from fedprism.bench.serial import SERIAL, RoundSeconds
from fedprism.bench.workloads import WORKLOADS, Workload, configure, make_clients, max_images
from fedprism.cli import app
from fedprism.errors import FedprismError
from fedprism.methods import METHODS

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FEW = ("--device", "cpu", "--samples", "4", "--rounds", "1")
TINY = (*FEW, "--engines", "serial,inprocess", "--quick")
POINT = {"clients": 6, "participation": 0.5, "rounds": 1, "samples": 10, "model": "mlp", "engine": "inprocess"}
SMALL = {  # a network with batch norm for methods that keep it local, one without, and clients of unequal size
    method: Workload({"name": model}, (3, 16, 16), 4, 4, (9, 6), (5, 3), (method,), 9, 9)
    for method, model in {
        **dict.fromkeys(SERIAL, "cnn4"),
        **dict.fromkeys(("fedbn", "fedpick", "fed-co2"), "lenet-bn"),
    }.items()
}


def call(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows of the first workload: one with a loop by hand, one without."""
    path = tmp_path_factory.mktemp("bench") / "tiny.json"
    result = call("cnn4-n20-b10", "--methods", "fedavg,fedprox", *TINY, "--out", path)
    assert result.exit_code == 0, result.output
    return path


# --- the serial loop does the same work ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", SERIAL)
def test_serial_loop_equals_the_engine(method: str) -> None:
    """After three rounds the server's weights, and what clients keep, differ by rounding alone; so do the tests."""
    workload = SMALL[method]
    federation, config = make_clients(workload, None), configure(workload, method, CPU, {"engine": "inprocess"})
    engine, hand = Engined(config, federation, CPU), ByHand(config, federation, CPU)
    first = hand.weights()
    for round in range(3):
        record, _ = engine.loop.one_round(round)
        hand.one_round(round)
    moved = largest_difference({"server": first["server"]}, hand.weights())
    assert moved > 1e-3
    assert largest_difference(hand.weights(), engine.weights()) < 1e-3 * moved
    scores = record.scores[METHODS[method].moment]["test"]
    assert hand.serial.accuracy == {client_id: score.correct / score.total for client_id, score in scores.items()}


def test_what_clients_keep_is_compared_too() -> None:
    for method in SERIAL.keys() - {"fedavg"}:
        workload = SMALL[method]
        federation, config = make_clients(workload, None), configure(workload, method, CPU, {"engine": "inprocess"})
        hand = ByHand(config, federation, CPU)
        hand.one_round(0)
        kept = hand.weights()
        assert kept.keys() == {"server", "c000", "c001"}
        assert kept["c000"]
        assert largest_difference({"server": {}, "c000": kept["c001"]}, {"server": {}, "c000": kept["c000"]}) > 0


def test_a_last_image_joins_the_batch_before_it() -> None:
    config = configure(SMALL["fedavg"], "fedavg", CPU, {"engine": "inprocess"})
    hand = ByHand(config, make_clients(SMALL["fedavg"], None), CPU).serial
    assert [len(rows) for rows in hand.batches(0, "c000", 9)] == [4, 5]
    assert [len(rows) for rows in hand.batches(0, "c000", 10)] == [4, 4, 2]
    assert [len(rows) for rows in hand.batches(0, "c000", 1)] == [1]
    assert sorted(torch.cat(list(hand.batches(0, "c000", 10))).tolist()) == list(range(10))


# --- taking turns ----------------------------------------------------------------------------------------------------


class Counting:
    """A contender that writes its rounds into a list that all of them share."""

    threads = cold = 1

    def __init__(self, name: str, said: list[str], seconds: float = 0.1, fails: int | None = None) -> None:
        self.name, self.said, self.seconds, self.fails = name, said, seconds, fails

    def one_round(self, round: int) -> RoundSeconds:
        if round == self.fails:
            raise FedprismError("it cannot.")
        self.said.append(f"{self.name}{round}")
        return RoundSeconds(self.seconds / 2, 0.0, 0.0, self.seconds)

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"server": {"w": torch.tensor([1.0 if self.name == "a" else 1.5])}}

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.said.append(f"{self.name} closed")


@pytest.mark.slow
def test_contenders_take_turns_after_a_round_that_does_not_count() -> None:
    said: list[str] = []
    two = Counting("a", said, 0.1), Counting("b", said, 0.05)
    entries = [ContenderSpec(each.name, lambda each=each: each) for each in two]
    found = race(entries, 100, CPU, Pace(rounds=2), lambda text: None)
    assert said == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a closed", "b3", "b closed"]  # 3: for memory alone
    a, b = found.results
    assert (a["train_per_second"], a["round_per_second"], a["round_ratio"]) == (2000, 1000, 1)
    assert (b["train_per_second"], b["round_per_second"], b["round_ratio"]) == (4000, 2000, 2)
    assert (a["largest_difference"], b["largest_difference"]) == (None, 0.5)


def test_on_a_gpu_each_has_finished_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedprism.bench.race.Memory", lambda device: Memory(CPU))  # the part that would ask the GPU
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    said: list[str] = []
    two = Counting("a", said), Counting("b", said)
    two[1].cold = 2
    entries = [ContenderSpec(each.name, lambda each=each: each) for each in two]
    found = race(entries, 100, torch.device("cuda"), Pace(rounds=2), lambda text: None)
    assert said == ["a0", "a1", "a2", "a3", "a closed", "b0", "b1", "b2", "b3", "b4", "b closed"]
    assert [len(each["seconds"]["round"]) for each in found.results] == [2, 2]
    assert found.results[1]["largest_difference"] == 0.5


@pytest.mark.slow
def test_a_slow_one_sits_out_and_one_that_fails_is_left_out_and_closed() -> None:
    said: list[str] = []
    slow, quick = Counting("a", said, seconds=9.0), Counting("b", said)
    broken, breaks = Counting("c", said, fails=0), Counting("d", said, fails=2)
    entries = [ContenderSpec(each.name, lambda each=each: each) for each in (broken, slow, quick, breaks)]
    found = race(entries, 100, CPU, Pace(rounds=4, min_rounds=2, seconds=10), lambda text: None)
    assert [len(each["seconds"]["round"]) for each in found.results] == [2, 4]
    assert found.left_out == dict.fromkeys("cd", "FedprismError: it cannot.")
    assert [each["round_ratio"] for each in found.results] == [1, 90]  # of the first that could be measured
    assert [said.count(f"{name} closed") for name in "abcd"] == [1] * 4


def test_other_weights_cannot_be_compared() -> None:
    for other in ({"server": {"b": torch.ones(1)}}, {}):
        with pytest.raises(FedprismError, match="other weights"):
            largest_difference({"server": {"a": torch.ones(1)}}, other)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_difference_that_is_not_finite_is_infinite(odd: float) -> None:
    good, bad = ({"server": {"a": torch.ones(2), "b": torch.tensor([b])}} for b in (1.0, odd))
    assert largest_difference(good, bad) == largest_difference(bad, good) == largest_difference(bad, bad) == math.inf


def test_the_gap_between_peers_is_infinite_for_what_is_not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks" / "peers"))
    from run import gap

    good, bad = ({"a": np.ones(2), "b": np.array([b])} for b in (1.0, math.nan))
    assert (gap(good, good), gap(good, bad), gap(bad, bad)) == (0, math.inf, math.inf)


class Odd(Counting):
    """Other weights on the server, none at all, or some that are not numbers."""

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        odd = {"c": {"server": {"v": torch.ones(1)}}, "d": {}, "e": {"server": {"w": torch.tensor([math.nan])}}}
        return odd[self.name]


@pytest.mark.slow
def test_weights_that_cannot_be_compared_leave_one_out_and_closed() -> None:
    """With nothing to compare it is measured all the same, even as the first one."""
    said: list[str] = []
    entries = [ContenderSpec(name, lambda name=name: Odd(name, said)) for name in "dce"]
    entries.insert(1, ContenderSpec("a", lambda: Counting("a", said)))
    found = race(entries, 100, CPU, Pace(rounds=1), lambda text: None)
    assert [each["name"] for each in found.results] == ["d", "a"]
    assert "other weights" in found.left_out["c"]
    assert "finite" in found.left_out["e"]
    assert [said.count(f"{name} closed") for name in "acde"] == [1] * 4


def test_interrupted_while_they_are_compared_all_are_closed() -> None:
    said: list[str] = []

    class Stopped(Counting):
        def weights(self) -> dict[str, dict[str, torch.Tensor]]:
            raise KeyboardInterrupt

    entries = [ContenderSpec("a", lambda: Counting("a", said)), ContenderSpec("b", lambda: Stopped("b", said))]
    with pytest.raises(KeyboardInterrupt):
        race(entries, 100, CPU, Pace(rounds=1), lambda text: None)
    assert said[-2:] == ["a closed", "b closed"]


def test_a_file_that_is_missing_leaves_one_out() -> None:
    said: list[str] = []
    entries = [ContenderSpec("a", lambda: Counting("a", said)), ContenderSpec("b", lambda: open("/no/such/file"))]  # noqa: SIM115
    found = race(entries, 100, CPU, Pace(rounds=1), lambda text: None)
    assert list(found.left_out) == ["b"]
    assert len(found.results) == 1


class Large(Counting):
    """Keeps 120 MB and takes 240 MB more in a round."""

    def __init__(self, name: str, said: list[str]) -> None:
        super().__init__(name, said)
        self.kept = torch.ones(30_000_000)

    def one_round(self, round: int) -> RoundSeconds:
        assert torch.ones(60_000_000).sum() > 0
        return super().one_round(round)


@pytest.mark.slow
def test_memory_does_not_depend_on_who_was_first() -> None:
    said: list[str] = []
    entries = [ContenderSpec(name, lambda name=name: Large(name, said)) for name in "abc"]
    found = race(entries, 100, CPU, Pace(rounds=1), lambda text: None)
    assert [each["peak_memory_bytes"] for each in found.results] == [pytest.approx(360e6, rel=0.15)] * 3


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_pages_that_processes_share_count_once() -> None:
    """100 MB that a child sees, too, are 100 MB of both together."""
    shared = torch.ones(25_000_000)
    before = memory_in_use(CPU)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b".")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert child in family()
        assert sum(map(proportional, family())) - before < 50e6
    finally:
        os.write(go[1], b".")
        os.waitpid(child, 0)
    assert shared.sum() > 0


def test_memory_where_the_system_tells_no_shares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a /proc it is the largest resident size: too much rather than nothing."""
    monkeypatch.setattr(machine, "_PROC", tmp_path)
    assert Memory(CPU).peak(lambda: None, lambda: None) == 0
    assert proportional(os.getpid()) > 50e6


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_have_their_schema(measured: Path) -> None:
    stored = json.loads(measured.read_text())
    assert stored["format"] == 2
    assert stored["quick"] is True
    assert {"device", "cpu", "cores", "system", "versions"} <= stored["machine"].keys()
    assert set(SECTIONS) <= stored.keys()
    fedavg, fedprox = stored["engines"]
    assert (fedavg["key"], fedavg["baseline"]) == ("cnn4-n20-b10/fedavg/4", "serial")
    assert (fedprox["key"], fedprox["baseline"]) == ("cnn4-n20-b10/fedprox/4", "inprocess")
    for row in (fedavg, fedprox):
        names = {"date", "commit", "load", "command", "versions", "precision", "threads", "left_out", "baseline"}
        assert names <= row.keys()
        assert (row["clients"], row["batch"], row["train_images"], row["test_images"]) == (20, 10, 80, 20)
        assert (row["steps"], row["mean_batch"], row["samples"]) == (20, 4, 4)  # 4 images are one batch
        assert not row["all_images"]
    for each in fedavg["contenders"]:
        assert each["train_per_second"] > each["round_per_second"] > 0
        assert len(each["seconds"]["round"]) == 1
        assert each["peak_memory_bytes"] > 0
    serial, engine = fedavg["contenders"]
    assert (serial["name"], engine["name"]) == ("serial", "inprocess")
    assert 0 <= engine["largest_difference"] < 1e-2 * fedavg["largest_change_of_a_weight"]
    (roof,) = stored["roofline"]
    assert roof["step"]["flops"] > roof["step"]["operations"] > 0
    assert 0 < roof["engines"]["serial"]["shares"]["flops"] < 1.5
    assert (roof["key"], roof["engines"]["serial"]["threads"], roof["mean_batch"]) == ("cnn4-n20-b10/4", 1, 4)
    seconds = serial["seconds"]["train"][0]
    assert roof["engines"]["serial"]["steps_per_second"] == pytest.approx(20 / seconds, rel=1e-2)


def test_page_shows_what_the_file_holds(measured: Path) -> None:
    page = measured.with_suffix(".md").read_text()
    row = json.loads(measured.read_text())["engines"][0]
    for each in row["contenders"]:
        assert f"| cnn4-n20-b10 (4 images per client) | fedavg | {each['name']} |" in page
    assert "fewer than the paper's" in page
    assert "not for citing" in page
    assert row["date"] in page


@pytest.mark.slow
def test_goes_on_with_what_is_missing(measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "more.json"
    path.write_bytes(measured.read_bytes())
    before = json.loads(path.read_text())
    asked = ("cnn4-n20-b10", *TINY, "--out", path)
    result = call(*asked, "--methods", "fedavg,fedprox")
    assert result.exit_code == 0
    assert json.loads(path.read_text())["engines"] == before["engines"]
    said = result.output
    assert f"Goes on with {path}." in said
    assert "2 rows are there already; --force measures them again." in said
    assert call(*asked, "--methods", "fedavg,fedbn").exit_code == 0
    after = json.loads(path.read_text())
    assert [row["method"] for row in after["engines"]] == ["fedavg", "fedprox", "fedbn"]
    assert after["engines"][:2] == before["engines"]
    assert call(*asked, "--methods", "fedavg", "--force").exit_code == 0
    forced = json.loads(path.read_text())
    assert [row["method"] for row in forced["engines"]] == ["fedavg", "fedprox", "fedbn"]
    assert forced["engines"][0]["contenders"] != before["engines"][0]["contenders"]
    assert forced["engines"][1:] == after["engines"][1:]


@pytest.mark.slow
def test_engines_of_a_row_stay_and_one_that_was_left_out_is_tried_again(measured: Path, tmp_path: Path) -> None:
    """A row of `serial`, in which `inprocess` failed; now `processes` is asked for."""
    path, key = tmp_path / "engines.json", "cnn4-n20-b10/fedavg/4"
    stored = json.loads(measured.read_text())
    row = stored["engines"][0]
    row |= {
        "contenders": row["contenders"][:1],
        "done": ["serial"],
        "left_out": {"inprocess": "RuntimeError: no memory"},
    }
    path.write_text(json.dumps(stored))
    results = Results(path, CPU, quick=True)
    assert results.has("engines", key, ["serial"])
    assert not results.has("engines", key, ["serial", "inprocess"])
    result = call("cnn4-n20-b10", "--methods", "fedavg", *TINY, "--engines", "processes", "--out", path)
    assert result.exit_code == 0, result.output
    results = Results(path, CPU, quick=True)
    again = results.find("engines", key)
    assert again is not None
    assert (again["done"], again["left_out"]) == (["serial", "inprocess", "processes"], {})
    assert [each["threads"] for each in again["contenders"]] == [1, 1, cores()]
    (roof,) = results["roofline"]
    assert [each["threads"] for each in roof["engines"].values()] == [1, 1, cores()]
    assert len({json.dumps(each["roofs"]) for each in roof["engines"].values()}) == min(cores(), 2)


def test_a_folder_goes_on_with_the_newest_file_of_this_machine(measured: Path, tmp_path: Path) -> None:
    stored, today = json.loads(measured.read_text()), place(tmp_path, CPU, quick=True)
    assert today.name.endswith("-cpu-quick.json")
    mine, older = tmp_path / "2026-01-02-cpu-quick.json", tmp_path / "2026-01-01-cpu-quick.json"
    for path in (mine, older):
        path.write_text(json.dumps(stored))
    other = {**stored["machine"], "cores": 1024}
    (tmp_path / "2026-01-03-cpu-quick.json").write_text(json.dumps({**stored, "machine": other}))
    other = {**stored["machine"], "versions": {}}
    (tmp_path / "2026-01-04-cpu-quick.json").write_text(json.dumps({**stored, "machine": other}))
    (tmp_path / "2026-01-05-cpu-quick.json").write_text("{}")
    (tmp_path / "notes-cpu-quick.json").write_text(json.dumps(stored))
    assert place(tmp_path, CPU, quick=True) == mine
    assert place(tmp_path, CPU, quick=False).name == today.name.replace("-quick", "")
    mine.unlink()
    assert place(tmp_path, CPU, quick=True) == older
    assert place(tmp_path / "one.json", CPU, quick=True) == tmp_path / "one.json"


@pytest.mark.slow
def test_a_row_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    """Killed in the second row: the first one stays, and is not measured again."""
    path = tmp_path / "killed.json"
    program = (
        "import os, sys\n"
        "from fedprism.bench.progress import Rows\n"
        "end = Rows.end\n"
        "def ended(self, words=''):\n"
        "    end(self, words)\n"
        "    os.kill(os.getpid(), 9)\n"
        "Rows.end = ended\n"
        "from fedprism.cli import main\n"
        "main()\n"
    )
    words = ["bench", "cnn4-n20-b10", "--methods", "fedavg,fedbn", *TINY, "--out", str(path)]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, check=False)
    assert done.returncode == -9
    (row,) = json.loads(path.read_text())["engines"]
    assert row["method"] == "fedavg"
    results = Results(path, CPU, quick=True)
    ask = Ask(CPU, True, ("cnn4-n20-b10",), ("fedavg", "fedbn"), ("serial", "inprocess"), samples=4, rounds=1)
    with Rows(Console(file=StringIO())) as rows:
        measure_engines(ask, results, rows)
    assert results["engines"][0] == row
    assert [each["method"] for each in results["engines"]] == ["fedavg", "fedbn"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cnn5"], "unknown workload 'cnn5'"),
        (["cnn4-n20-b10", "--methods", "fedavgg"], "Did you mean 'fedavg'"),
        (["--methods", "fedavg,,fedbn"], "separated by commas"),
        (["--methods", "mine.py:Mine"], "registered methods"),
        (["--engines", "graphs"], "unknown engine of a benchmark 'graphs'"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--device", "cuda:99"], "Give --device cpu, or leave it out."),
        (["--engines", "serial,cuda-graphs"], "cuda-graphs, which does not run on cpu; give --device cuda"),
        (["digit6-n5-b32", "--options"], "--options is measured on cnn4-n20-b10 with fedavg, so digit6-n5-b32"),
        (["--options", "--methods", "fedbn"], "so --methods would change nothing"),
        (["--workers", "--engines", "serial"], "so --engines would change nothing"),
        (["cnn4-n20-b10", "--growth", "--samples", "4", "--rounds", "2"], "so --samples, --rounds, cnn4-n20-b10 would"),
    ],
)
def test_mistakes_are_errors_before_anything_is_measured(arguments: list[str], says: str, tmp_path: Path) -> None:
    result = call("--device", "cpu", "--out", tmp_path / "none.json", *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_results_of_another_machine_or_kind_are_not_mixed(measured: Path, tmp_path: Path) -> None:
    stored = json.loads(measured.read_text())
    other = tmp_path / "other.json"
    for path, words, change in (
        (other, TINY, {"device": "another"}),
        (other, TINY, {"cores": 1024}),
        (measured, TINY[:-1], {}),
    ):
        other.write_text(json.dumps({**stored, "machine": {**stored["machine"], **change}}))
        result = call("cnn4-n20-b10", *words, "--out", path)
        assert result.exit_code == 2
        assert "results of another kind" in result.output
    other.write_text("{}")
    result = call(*TINY, "--out", other)
    assert result.exit_code == 2
    assert "not a file of `fedprism bench`" in result.output


def test_help_names_every_workload_and_engine() -> None:
    output = " ".join(call("--help").output.replace("│", " ").split())
    assert all(name in output for name in WORKLOADS)
    assert all(name in output for kinds in KINDS.values() for name in kinds)


# --- the table of workloads ------------------------------------------------------------------------------------------


def test_workloads_have_the_papers_sizes() -> None:
    for name, clients in (("cnn4-n20-b10", 20), ("cnn4-n20-b64", 20), ("cnn4-n100-b10", 100)):
        workload = WORKLOADS[name]
        assert (len(workload.train), sum(workload.train), sum(workload.test)) == (clients, 45_000, 15_000)
    assert all(name in METHODS for workload in WORKLOADS.items() for name in workload[1].methods)
    alexnet = WORKLOADS["alexnet-bn-n4-b32"]
    assert alexnet.sizes(32) == [(32, 8), (32, 8), (32, 8), (32, 8)]
    assert alexnet.sizes(None)[2] == (125, 32)
    assert max_images(alexnet, torch.device("cuda"), quick=False, samples=None) is None


def test_clients_are_the_same_every_time() -> None:
    one, two = (make_clients(SMALL["fedavg"], 6).clients["c001"] for _ in range(2))
    assert torch.equal(one.train.x, two.train.x)
    assert torch.equal(one.test.y, two.test.y)
    assert (len(one.train), len(one.validation), len(one.test)) == (6, 0, 3)


def test_engines_that_are_not_there_are_named() -> None:
    names, missing = wanted(Ask(CPU), "fedprox")
    assert names[0] == "inprocess"
    assert "serial" not in {*names, *missing}
    assert {*names, *missing} == {"inprocess", "processes"}
    assert wanted(Ask(CPU, engines=("processes",)), "fedavg")[0][0] == "serial"


# --- the other tables ------------------------------------------------------------------------------------------------


def test_traffic_of_a_step_that_can_be_counted_by_hand() -> None:
    """y = a @ b and y += 1 on [8, 8] floats: a, b and y are read, y is written, read and written again."""
    a = torch.ones(8, 8)
    with roofline.TrafficCounter() as seen:
        y = a @ a.T
        y += 1
        y.view(64)
    assert (seen.operations, seen.bytes) == (2, (3 + 2) * 8 * 8 * 4)


def test_roofline_counts_the_plain_step() -> None:
    counts = roofline.count(roofline.make_step(SMALL["fedavg"], CPU, 4), CPU)
    double = roofline.count(roofline.make_step(SMALL["fedavg"], CPU, 8), CPU)
    assert double["flops"] == 2 * counts["flops"]
    assert counts["bytes"] < double["bytes"] < 2 * counts["bytes"]  # weights are moved once per step
    convs = 2 * 4 * (12 * 12 * 32 * 75 + 2 * 2 * 64 * 800)  # forward, of two convolutions on 16 x 16 images
    linears = 2 * 4 * (64 * 512 + 512 * 4)
    assert convs + linears < counts["flops"] <= 3 * (convs + linears)
    assert counts["kernels"] is None


@pytest.mark.slow
def test_growth_is_measured_once_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "points", lambda quick: iter([("clients", "half take part", dict(POINT))]))
    path = tmp_path / "grown.json"
    for _ in range(2):  # the second time it is there already
        result = call("--growth", "--device", "cpu", "--out", path)
        assert result.exit_code == 0, result.output
    assert "1 row is there already; --force measures it again." in result.output
    (row,) = json.loads(path.read_text())["growth"]
    assert (row["clients"], row["participants"], row["settings"]["engine"]) == (6, 3, "inprocess")
    assert row["peak_memory_bytes"] >= row["memory_when_loaded_bytes"] > 0
    assert row["round_seconds"] > 0
    assert (tmp_path / "grown-growth-clients.svg").read_text().startswith("<?xml")
    assert "(grown-growth-clients.svg)" in path.with_suffix(".md").read_text()
    monkeypatch.setattr(growth, "available", lambda: False)
    assert "pip install 'fedprism[report]'" in call("--growth", "--device", "cpu", "--out", path).output


@pytest.mark.slow
def test_a_point_that_fails_is_noted_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that dies without a word, one that says why, and one that is all right."""
    path, python = tmp_path / "grown.json", tmp_path / "python"
    made = [("model", "mlp", dict(POINT)), ("model", "other", {**POINT, "model": "no-such"})]
    monkeypatch.setattr(growth, "points", lambda quick: iter(made))
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    with monkeypatch.context() as killed:
        killed.setattr(sys, "executable", str(python))
        result = call("--growth", "--device", "cpu", "--out", path)
        assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["growth"]
    assert [row["failed"].partition(";")[2] for row in rows] == [" the process ended with -9"] * 2
    assert path.with_suffix(".md").read_text().count("the process ended with -9") == 2
    result = call("--growth", "--device", "cpu", "--out", path)
    assert result.exit_code == 0, result.output
    good, bad = json.loads(path.read_text())["growth"]
    assert good["round_seconds"] > 0
    assert "failed" not in good
    reason = "6 clients, participation 0.5, no-such could not be measured; the process ended with 1: "
    assert bad["failed"].startswith(reason)
    assert "unknown model" in bad["failed"]
    assert reason in path.with_suffix(".md").read_text()


def test_every_point_of_growth_has_its_own_label() -> None:
    for quick in (True, False):
        for curve in growth.CURVES:
            points = [(series, settings) for each, series, settings in growth.points(quick) if each == curve]
            labels = [f"{series}: {growth._describe(settings)}" for series, settings in points]
            assert len(labels) == len(set(labels)) > 1


@pytest.mark.parametrize("state", ["memory", "disk"])
def test_a_point_of_growth_here(state: str) -> None:
    found = point.measure({**POINT, "participation": 1.0, "state": state})
    assert found["parameters"] > 0
    assert found["participants"] == 6


def test_growth_is_drawn(tmp_path: Path) -> None:
    rows = [
        {
            "series": series,
            "clients": n,
            "round_seconds": 0.1 * n,
            "peak_memory_bytes": 10**8,
            "device_memory_bytes": None,
        }
        for series in ("10 take part", "10 % take part")
        for n in (10, 100)
    ]
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        growth.draw("clients", rows, picture)
    text = pictures[0].read_text()
    assert text == pictures[1].read_text()
    assert text.startswith("<?xml")


@pytest.mark.slow
def test_independent_processes_train_and_end() -> None:
    before = set(children())
    several = workers.Independent(4, 1)
    try:
        assert several.one_round(0).train > 0
        assert {process.pid for process in several.processes} <= set(children()) - before
        pids = [process.pid for process in several.processes]
    finally:
        several.close()
    assert not set(pids) & set(children())


def test_share_of_independent_processes() -> None:
    times = {"one": [4.0, 4.0], "two": [2.0, 4.0], "alone": [1.8, 1.0]}
    results = [{"name": name, "seconds": {"train": values}} for name, values in times.items()]
    assert workers.share(results, ("one", "two", "alone")) == pytest.approx((0.9 + 0.25) / 2)
    assert workers.share(results[:2], ("one", "two", "alone")) is None


@pytest.mark.slow
def test_options_stand_beside_their_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = {name: {"engine": "inprocess", "memory_format": name} for name in ("contiguous", "channels_last")}
    assert engines.option_groups(CPU)["memory_format"] == formats
    wrong = {"tf32": {"engine": "inprocess", "precision": "tf32"}}  # which a CPU does not have
    monkeypatch.setattr(engines, "option_groups", lambda device: {"layout": {**formats, **wrong}})
    path = tmp_path / "options.json"
    result = call("--options", *FEW, "--out", path)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["options"]
    assert (row["key"], row["samples"]) == ("layout/4", 4)
    assert [each["name"] for each in row["contenders"]] == ["contiguous", "channels_last"]
    assert "does not have" in row["left_out"]["tf32"]
    assert "Left out, tf32: ConfigError" in " ".join(path.with_suffix(".md").read_text().split())


@pytest.mark.slow
def test_workers_beside_independent_processes(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    result = call("--workers", *FEW, "--out", path)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["workers"] if path.exists() else []
    assert [row["share_of_independent"] > 0 for row in rows] == [True] * (cores() > 1)


def test_slug() -> None:
    assert slug(CPU) == "cpu"
