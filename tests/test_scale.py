"""Many clients: a round costs what its participants cost, and nothing that is shown grows with the clients."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from fedprism import api, atomic
from fedprism.config import Config, read
from fedprism.engines.inprocess import InProcess
from fedprism.federation import build_federation
from fedprism.methods import make
from fedprism.methods.base import State
from fedprism.records import RunDirectory
from fedprism.records.checkpoint import Checkpoints
from fedprism.records.metrics import ordered
from fedprism.records.standing import Standing
from fedprism.report.html import page
from fedprism.report.table import table
from fedprism.round.engine import ClientScores, Failure, Request, Result
from fedprism.round.events import Callback, RoundRecord, Score, Snapshot
from fedprism.store.clients import ClientStore, DiskStore, MemoryStore
from tests.harness import CPU, loop_for, record

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "ten-thousand-clients.yaml"
PARTICIPANTS = 10


STORING = {"fedbn": True, "ditto": True, "fedavg": False}  # has a client a file?


def example(clients: int, *settings: str) -> Config:
    """The example with fewer clients, of whom as many take part."""
    share = f"clients.participation={PARTICIPANTS / clients}"
    data = f"data.name=synthetic?clients={clients},samples=20,label_skew=0.3,feature_skew=0.3"
    return api.resolve(read(EXAMPLE, [data, share, "run.engine=inprocess", "run.device=cpu", *settings]))


# --- a round ---------------------------------------------------------------------------------------------------------


class Counted(InProcess):
    """The reference engine; it counts the requests, and those that come with a state."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: Counter[str] = Counter()

    def train(self, round: int, requests: Any) -> Iterator[tuple[str, Result | Failure]]:
        return super().train(round, self.counted("trained", requests))

    def evaluate(self, round: int, requests: Any) -> Iterator[tuple[str, ClientScores | Failure]]:
        return super().evaluate(round, self.counted("tested", requests))

    def receive(self, round: int, requests: Any) -> Iterator[tuple[str, State | Failure]]:
        return super().receive(round, self.counted("received", requests))

    def counted(self, what: str, requests: dict[str, Request]) -> dict[str, Request]:
        self.asked[what] += len(requests)
        self.asked["states"] += sum(request.state is not None for request in requests.values())
        return requests


class Calls(Callback):
    """How many Python functions are called in each round, all that writes records included."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.calls = 0

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        sys.setprofile(None)
        self.rounds.append(self.calls)
        self.calls = 0
        sys.setprofile(self.count)

    def end(self, status: str) -> None:
        sys.setprofile(None)

    def count(self, frame: FrameType, event: str, _: object) -> None:
        self.calls += event == "call"


def work(clients: int, rounds: int, where: str, out: Path, name: str = "fedbn") -> tuple[Counter[str], list[int]]:
    """What a run asks of its engine, and the calls of every training round."""
    config = example(clients, f"train.rounds={rounds}", f"clients.state={where}", f"method.name={name}")
    federation = build_federation(config.data, config.seed)
    method = make(config.method)
    info = loop_for(method, config, federation).info
    engine, calls = Counted(method, config, info, federation, CPU), Calls()
    loop = loop_for(method, config, federation, engine)
    with RunDirectory.create(out, config) as directory:
        assert loop.run([directory.recorder(), calls], folder=directory.states) == "finished"
    files = len(list((out / "checkpoints" / "files").iterdir()))
    if STORING[name]:
        assert PARTICIPANTS < files <= 3 + rounds * PARTICIPANTS  # the server's of three checkpoints
    else:
        assert files <= 3
    return engine.asked, calls.rounds[1:]


def compare(few: int, many: int, rounds: int, where: str, path: Path, name: str = "fedbn") -> None:
    small, large = (work(clients, rounds, where, path / f"{name}-{where}-{clients}", name) for clients in (few, many))
    for asked, _ in (small, large):
        assert asked["trained"] == rounds * PARTICIPANTS
        assert asked["tested"] == (rounds + 1) * PARTICIPANTS  # and once before the first round
        assert asked["received"] == 0
        # A client has a state from its first training on: what is read is at most what was trained before.
        assert asked["states"] <= 2 * rounds * PARTICIPANTS
    # Returning clients are a little less work than new ones, and there are fewer of those among many.
    assert sum(large[1]) < 1.25 * sum(small[1])


@pytest.mark.parametrize("name", STORING)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_the_work_of_a_round_does_not_depend_on_the_number_of_clients(tmp_path: Path, where: str, name: str) -> None:
    compare(60, 600, 3, where, tmp_path, name)


@pytest.mark.slow
def test_the_count_of_calls_would_show_work_on_every_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: MemoryStore) -> dict[str, State | None]:
        return {client_id: untouched(state) for client_id, state in self.items()}

    def untouched(state: State | None) -> State | None:
        return state

    few, many = (work(clients, 1, "memory", tmp_path / str(clients))[1] for clients in (60, 3000))
    assert sum(many) < 1.25 * sum(few)
    monkeypatch.setattr(MemoryStore, "snapshot", careless)
    assert sum(work(3000, 1, "memory", tmp_path / "careless")[1]) >= sum(many) + 3000


@pytest.mark.slow
def test_ten_thousand_clients_fit_into_two_gigabytes(tmp_path: Path) -> None:
    """All processes together; set-up time and the time of a round are the benchmark's business."""
    command = [sys.executable, str(ROOT / "benchmarks" / "ten_thousand_clients.py"), "--rounds", "3"]
    for engine in ("inprocess", "processes"):
        done = subprocess.run([*command, "--engine", engine], capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        few, many = json.loads(done.stdout)["runs"]
        assert (few["clients"], many["clients"]) == (1000, 10_000)
        assert few["participants"] == many["participants"] == 100
        assert many["engine"] == engine
        assert many["peak memory, MB"] < 2000
    for name in ("fedbn", "fedavg"):
        compare(1000, 10_000, 3, "disk", tmp_path, name)


def test_the_example_is_that_of_the_issue() -> None:
    config = read(EXAMPLE)
    assert config.data.name.startswith("synthetic?clients=10000,samples=20")
    assert (config.clients.participation, config.clients.state) == (0.01, "disk")
    assert config.evaluate.clients == "participants"
    assert EXAMPLE.read_text().startswith("# fedprism run examples/ten-thousand-clients.yaml\n")


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_checkpoint_writes_what_changed_and_reads_what_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    names = [f"client-{i:04d}" for i in range(500)]
    states: ClientStore = MemoryStore(dict.fromkeys(names))
    if where == "disk":
        states = DiskStore(names, lambda state: state, 100)
    states.open(tmp_path / "states")
    for place, name in enumerate(names):
        states[name] = {"w": torch.tensor([float(place)])}
    store, reads = Checkpoints(tmp_path), Counter[str]()

    def counted(real: Callable[[Path], Any]) -> Callable[[Path], Any]:
        def call(path: Path) -> Any:
            reads[path.parent.name] += path.exists()
            return real(path)

        return call

    for name in ("read", "sha256"):
        monkeypatch.setattr(atomic, name, counted(getattr(atomic, name)))
    server = {"w": torch.tensor([-1.0])}
    store.save(Snapshot(0, server, states.snapshot()), keep=())
    before = {path.name for path in store.files.iterdir()}
    assert len(before) == 501
    for round in (1, 2, 3):
        for place in (7, 11):
            states[names[place]] = {"w": torch.tensor([round + place / 100])}
        store.save(Snapshot(round, server, states.snapshot()), keep=())
        after = {path.name for path in store.files.iterdir()}
        assert len(after - before) == 2
        assert len(after) <= 501 + 2  # the last two checkpoints
        before = after
        assert reads == Counter(files=2 * 499)  # once, for the copies of what checkpoints share: verified, and read
    states.close()


def test_running_means_are_those_of_all_latest_scores() -> None:
    rng = random.Random(0)
    standing = Standing("received", "test")
    for round in range(60):
        tested = rng.sample(range(12), rng.randint(0, 5))
        scores = {}
        for client in tested:
            total = rng.choice([0, 3, 7, 10])
            scores[f"c{client}"] = Score(rng.randint(0, total), total, 0.0)
        assert standing.add(RoundRecord(round, scores={"received": {"test": scores}})) == bool(scores)
        last = [score for score in standing.latest.values() if score.total]
        assert standing.tested == len(last) == len(standing.accuracy()) == len(standing.images())
        if last:
            assert standing.exact_mean("clients") == sum(Fraction(s.correct, s.total) for s in last) / len(last)
            assert standing.exact_mean("samples") == Fraction(sum(s.correct for s in last), sum(s.total for s in last))


def test_names_are_put_in_order() -> None:
    order = ("b", "a", "c")
    assert list(ordered({"x": 0, "c": 1, "b": 2, "m": 3}, order)) == ["b", "c", "m", "x"]
    assert ordered({}, order) == {}


def test_the_engine_is_recorded_and_shown(tmp_path: Path) -> None:
    run = api.run_config(example(20, "train.rounds=1", "clients.state=memory"), "x", out=tmp_path / "run")
    assert json.loads((run.path / "run.json").read_text())["engine"] == "inprocess"
    assert "<dt>engine</dt><dd>inprocess on cpu</dd>" in page([run.record])


# --- tables and pages ------------------------------------------------------------------------------------------------


def test_thousands_of_clients_make_a_short_table_and_a_small_page() -> None:
    names = [f"client-{i:04d}" for i in range(3000)]
    rng = random.Random(0)
    runs = [
        record(method, 0, {name: rng.randint(low, 90) for name in names}, config={"evaluate": {"clients": "all"}})
        for method, low in (("local", 10), ("fedbn", 30))
    ]
    result = table(runs)
    for text in (str(result), result.markdown(), result.latex(), result.html(), result.csv()):
        assert len(text) < 3000
        assert "client-0007" not in text
    assert "Columns of 3000 clients are left out here; the run's metrics.jsonl has them." in str(result)
    rows = list(csv.DictReader(result.csv().splitlines()))
    for row, run in zip(rows, runs, strict=True):
        ranked = sorted(100 * s.correct / s.total for s in run.rounds[1].scores["received"]["test"].values())
        assert float(row["50 % of clients below"]) == pytest.approx(ranked[1500], abs=1)
        assert float(row["5 % of clients below"]) == pytest.approx(ranked[150], abs=1)
    shown = page(runs)
    assert len(shown) < 500_000
    assert "Of 3,000 clients in the order of their gain, about every 8th is drawn." in shown


def test_of_many_who_were_never_tested_a_few_are_named() -> None:
    names = [f"client-{i:04d}" for i in range(300)]
    whole = record("fedavg", 0, dict.fromkeys(names, 50))
    scores = {"received": {"test": {name: Score(50, 100, 1.0) for name in names[:40]}}}
    rounds = tuple(RoundRecord(each.round, scores=scores) for each in whole.rounds)
    text = str(table([type(whole)(whole.config, whole.info, rounds)])).replace("\n", " ")
    assert "client-0051 and 248 more of 300 clients, never tested" in text
    assert len(text) < 1500
