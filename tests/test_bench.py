"""`fedprism bench`: real, tiny measurements through the command, and the serial loop against the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fedprism.bench import engines, growth, point, roofline, workers
from fedprism.bench.engines import KINDS, Ask, measure_engines, wanted
from fedprism.bench.machine import Memory, children, cores, slug
from fedprism.bench.progress import Rows
from fedprism.bench.race import ByHand, Engined, Entry, Pace, largest_difference, race
from fedprism.bench.results import SECTIONS, Results
from fedprism.bench.serial import SERIAL, Taken
from fedprism.bench.workloads import WORKLOADS, Workload, configure, make_clients, most_images
from fedprism.cli import app
from fedprism.errors import FedprismError
from fedprism.methods import METHODS

CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--samples", "4", "--rounds", "1", "--engines", "serial,inprocess", "--quick")
POINT = {"clients": 6, "participation": 0.5, "rounds": 1, "samples": 10, "model": "mlp", "engine": "inprocess"}
SMALL = {  # a network with batch norm for FedBN, one without, and clients of unequal size
    "fedavg": Workload({"name": "cnn4"}, (3, 16, 16), 4, 4, (9, 6), (5, 3), ("fedavg",), 9, 9),
    "fedbn": Workload({"name": "lenet-bn"}, (3, 16, 16), 4, 4, (9, 6), (5, 3), ("fedbn",), 9, 9),
    "fedcp": Workload({"name": "cnn4"}, (3, 16, 16), 4, 4, (9, 6), (5, 3), ("fedcp",), 9, 9),
}


def call(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows of the first workload: one with a loop by hand, one without."""
    path = tmp_path_factory.mktemp("bench") / "tiny.json"
    result = call("cnn4-n20-b10", "--methods", "fedavg,ditto", *TINY, "--out", path)
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
    scores = record.scores["received"]["test"]
    assert hand.serial.accuracy == {client: score.correct / score.total for client, score in scores.items()}


def test_fedbn_and_fedcp_keep_something_to_compare() -> None:
    for method in ("fedbn", "fedcp"):
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
    """A contender that says what it was told, in a list that all of them share."""

    def __init__(self, name: str, said: list[str], seconds: float = 0.1, fails: int | None = None) -> None:
        self.name, self.said, self.seconds, self.fails = name, said, seconds, fails

    def one_round(self, round: int) -> Taken:
        if round == self.fails:
            raise FedprismError("it cannot.")
        self.said.append(f"{self.name}{round}")
        return Taken(self.seconds / 2, 0.0, 0.0, self.seconds)

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"server": {"w": torch.tensor([1.0 if self.name == "a" else 1.5])}}

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.said.append(f"{self.name} closed")


def test_contenders_take_turns_after_a_round_that_does_not_count() -> None:
    said: list[str] = []
    two = Counting("a", said, 0.1), Counting("b", said, 0.05)
    entries = [Entry(each.name, lambda each=each: each) for each in two]
    found = race(entries, 100, CPU, Pace(rounds=2), lambda text: None)
    assert said == ["a0", "b0", "a1", "b1", "a2", "b2", "a closed", "b closed"]
    a, b = found.results
    assert (a["train_per_second"], a["round_per_second"], a["round_ratio"]) == (2000, 1000, 1)
    assert (b["train_per_second"], b["round_per_second"], b["round_ratio"]) == (4000, 2000, 2)
    assert (a["largest_difference"], b["largest_difference"]) == (None, 0.5)


def test_a_slow_one_sits_out_and_one_that_fails_is_left_out_and_closed() -> None:
    said: list[str] = []
    slow, quick = Counting("a", said, seconds=9.0), Counting("b", said)
    broken, breaks = Counting("c", said, fails=0), Counting("d", said, fails=2)
    entries = [Entry(each.name, lambda each=each: each) for each in (broken, slow, quick, breaks)]
    found = race(entries, 100, CPU, Pace(rounds=4, least=2, seconds=10), lambda text: None)
    assert [len(each["seconds"]["round"]) for each in found.results] == [2, 4]
    assert found.left_out == dict.fromkeys("cd", "FedprismError: it cannot.")
    assert [each["round_ratio"] for each in found.results] == [1, 90]  # of the first that could be measured
    assert [said.count(f"{name} closed") for name in "abcd"] == [1] * 4


def test_other_weights_cannot_be_compared() -> None:
    with pytest.raises(FedprismError, match="other weights"):
        largest_difference({"server": {"a": torch.ones(1)}}, {"server": {"b": torch.ones(1)}})


def test_memory_of_one_contender() -> None:
    memory = Memory(CPU)
    with memory.first():
        held = torch.ones(30_000_000)  # 120 MB
    with memory.round():
        assert torch.ones(60_000_000).sum() > 0  # 240 MB on top, and gone again
    assert memory.held == pytest.approx(120e6, rel=0.2)
    assert memory.peak == pytest.approx(360e6, rel=0.2)
    del held


# --- the command -----------------------------------------------------------------------------------------------------


def test_results_have_their_schema(measured: Path) -> None:
    held = json.loads(measured.read_text())
    assert held["format"] == 1
    assert held["quick"] is True
    assert {"device", "cpu", "cores", "system", "versions"} <= held["machine"].keys()
    assert set(SECTIONS) <= held.keys()
    fedavg, ditto = held["engines"]
    assert (fedavg["key"], fedavg["baseline"]) == ("cnn4-n20-b10/fedavg/4", "serial")
    assert (ditto["key"], ditto["baseline"]) == ("cnn4-n20-b10/ditto/4", "inprocess")
    for row in (fedavg, ditto):
        assert {"date", "load", "command", "versions", "precision", "threads", "left_out", "baseline"} <= row.keys()
        assert (row["clients"], row["batch"], row["train_images"], row["test_images"]) == (20, 10, 80, 20)
        assert not row["all_images"]
    for each in fedavg["contenders"]:
        assert each["train_per_second"] > each["round_per_second"] > 0
        assert len(each["seconds"]["round"]) == 1
        assert each["peak_memory_bytes"] > 0
    serial, engine = fedavg["contenders"]
    assert (serial["name"], engine["name"]) == ("serial", "inprocess")
    assert 0 <= engine["largest_difference"] < 1e-2 * fedavg["largest_change_of_a_weight"]
    (roof,) = held["roofline"]
    assert roof["step"]["flops"] > roof["step"]["operations"] > 0
    assert 0 < roof["engines"]["serial"]["shares"]["flops"] < 1.5


def test_page_shows_what_the_file_holds(measured: Path) -> None:
    page = measured.with_suffix(".md").read_text()
    row = json.loads(measured.read_text())["engines"][0]
    for each in row["contenders"]:
        assert f"| cnn4-n20-b10 | fedavg | {each['name']} |" in page
    assert "fewer than the paper's" in page
    assert "not for citing" in page
    assert row["date"] in page


def test_goes_on_with_what_is_missing(measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "more.json"
    path.write_bytes(measured.read_bytes())
    before = json.loads(path.read_text())
    asked = ("cnn4-n20-b10", *TINY, "--out", path)
    result = call(*asked, "--methods", "fedavg,ditto")
    assert result.exit_code == 0
    assert json.loads(path.read_text())["engines"] == before["engines"]
    assert call(*asked, "--methods", "fedavg,fedbn").exit_code == 0
    after = json.loads(path.read_text())
    assert [row["method"] for row in after["engines"]] == ["fedavg", "ditto", "fedbn"]
    assert after["engines"][:2] == before["engines"]
    assert call(*asked, "--methods", "fedavg", "--force").exit_code == 0
    forced = json.loads(path.read_text())
    assert [row["method"] for row in forced["engines"]] == ["fedavg", "ditto", "fedbn"]
    assert forced["engines"][0]["contenders"] != before["engines"][0]["contenders"]
    assert forced["engines"][1:] == after["engines"][1:]


def test_a_row_with_fewer_engines_is_measured_again(measured: Path) -> None:
    results = Results(measured, CPU, quick=True)
    assert results.has("engines", "cnn4-n20-b10/fedavg/4", ["serial", "inprocess"])
    assert not results.has("engines", "cnn4-n20-b10/fedavg/4", ["serial", "processes"])


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
        (["--device", "tpu"], "run.device is 'tpu'"),
        (["digit6-n5-b32", "--options"], "--options is measured on cnn4-n20-b10"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(arguments: list[str], says: str, tmp_path: Path) -> None:
    result = call("--device", "cpu", "--out", tmp_path / "none.json", *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_results_of_another_machine_or_kind_are_not_mixed(measured: Path, tmp_path: Path) -> None:
    held = json.loads(measured.read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**held, "machine": {**held["machine"], "device": "another"}}))
    for path, words in ((other, TINY), (measured, TINY[:-1])):
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
    assert most_images(alexnet, torch.device("cuda"), quick=False, samples=None) is None


def test_clients_are_the_same_every_time() -> None:
    one, two = (make_clients(SMALL["fedavg"], 6).clients["c001"] for _ in range(2))
    assert torch.equal(one.train.x, two.train.x)
    assert torch.equal(one.test.y, two.test.y)
    assert (len(one.train), len(one.validation), len(one.test)) == (6, 0, 3)


def test_engines_that_are_not_there_are_named() -> None:
    names, missing = wanted(Ask(CPU), "ditto")
    assert names[0] == "inprocess"
    assert "serial" not in {*names, *missing}
    assert {*names, *missing} == {"inprocess", "processes"}
    assert wanted(Ask(CPU, engines=("processes",)), "fedavg")[0][0] == "serial"


# --- the other tables ------------------------------------------------------------------------------------------------


def test_traffic_of_a_step_that_can_be_counted_by_hand() -> None:
    """y = a @ b and y += 1 on [8, 8] floats: a, b and y are read, y is written, read and written again."""
    a = torch.ones(8, 8)
    with roofline.Traffic() as seen:
        y = a @ a.T
        y += 1
        y.view(64)
    assert (seen.operations, seen.bytes) == (2, (3 + 2) * 8 * 8 * 4)


def test_roofline_counts_the_plain_step() -> None:
    counts = roofline.count(roofline.make_step(SMALL["fedavg"], CPU), CPU)
    convs = 2 * 4 * (12 * 12 * 32 * 75 + 2 * 2 * 64 * 800)  # forward, of two convolutions on 16 x 16 images
    linears = 2 * 4 * (64 * 512 + 512 * 4)
    assert convs + linears < counts["flops"] <= 3 * (convs + linears)
    assert counts["kernels"] is None


def test_growth_is_measured_once_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "points", lambda quick: iter([("clients", "half take part", dict(POINT))]))
    path = tmp_path / "grown.json"
    for _ in range(2):  # the second time it is there already
        result = call("--growth", "--device", "cpu", "--out", path)
        assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["growth"]
    assert (row["clients"], row["participants"], row["settings"]["engine"]) == (6, 3, "inprocess")
    assert row["peak_memory_bytes"] >= row["memory_when_loaded_bytes"] > 0
    assert row["round_seconds"] > 0
    assert (tmp_path / "grown-growth-clients.svg").read_text().startswith("<?xml")
    assert "(grown-growth-clients.svg)" in path.with_suffix(".md").read_text()
    monkeypatch.setattr(growth, "available", lambda: False)
    assert "pip install 'fedprism[report]'" in call("--growth", "--device", "cpu", "--out", path).output


def test_a_point_that_cannot_be_measured() -> None:
    with pytest.raises(FedprismError, match=r"6 clients, no-such could not be measured: .*unknown model"):
        growth.in_own_process({**POINT, "model": "no-such"})


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


def test_options_stand_beside_their_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = {name: {"engine": "inprocess", "memory_format": name} for name in ("contiguous", "channels_last")}
    assert engines.option_groups(CPU)["memory_format"] == formats
    wrong = {"tf32": {"engine": "inprocess", "precision": "tf32"}}  # which a CPU does not have
    monkeypatch.setattr(engines, "option_groups", lambda device: {"layout": {**formats, **wrong}})
    path = tmp_path / "options.json"
    result = call("--options", *TINY, "--out", path)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(path.read_text())["options"]
    assert [each["name"] for each in row["contenders"]] == ["contiguous", "channels_last"]
    assert "does not have" in row["left_out"]["tf32"]
    assert "Left out, tf32: ConfigError" in " ".join(path.with_suffix(".md").read_text().split())


@pytest.mark.slow
def test_workers_beside_independent_processes(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    result = call("--workers", *TINY, "--out", path)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["workers"] if path.exists() else []
    assert [row["share_of_independent"] > 0 for row in rows] == [True] * (cores() > 1)


def test_slug() -> None:
    assert slug(CPU) == "cpu"
