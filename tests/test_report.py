"""Tables, figures, the page and the progress line, on records whose figures can be worked out by hand."""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fedprism import api
from fedprism.cli.progress import Progress
from fedprism.config import Config, ModelConfig, structure
from fedprism.errors import FedprismError, RecordError
from fedprism.explain import Traffic, settings_of, traffic
from fedprism.federation import Federation, make_federation
from fedprism.inspection.pictures import pictures_of
from fedprism.methods import METHODS
from fedprism.methods.base import Method
from fedprism.records import Protocol, RunRecord
from fedprism.report import canvas
from fedprism.report.diagnostics import WHOLE, diagnostics_of, last_values
from fedprism.report.figures import Curve, curves, overview_figure, panels
from fedprism.report.html import Pictures, page, write_page
from fedprism.report.table import Table, grouped, table
from fedprism.report.transforms import transforms
from fedprism.round.events import Plan, RoundRecord, Score, Snapshot
from tests.harness import record

pytestmark = pytest.mark.full


@pytest.fixture
def runs() -> list[RunRecord]:
    return [
        record("local", 0, {"north": 80, "south": 60}),
        record("local", 1, {"north": 82, "south": 62}),
        record("fedavg", 0, {"north": 90, "south": 50}),
        record("fedavg", 1, {"north": 90, "south": 58}),
        record("fedbn", 0, {"north": 86, "south": 64}),
        record("fedbn", 1, {"north": 88, "south": 66}),
    ]


@pytest.fixture
def federation() -> Federation:
    """Two clients with a grey image of each class."""
    x = torch.arange(2 * 4 * 8 * 8, dtype=torch.int64).remainder(256).to(torch.uint8).view(8, 1, 8, 8)
    part = {
        "train": (x, torch.arange(8) % 2),
        "validation": (x[:2], torch.tensor([0, 1])),
        "test": (x[:2], torch.ones(2, dtype=torch.int64)),
    }
    return Federation.from_arrays({"north": part, "south": part}, name="made-up")


@pytest.fixture
def pictures(federation: Federation) -> Pictures:
    return pictures_of(record("local", 0, {"north": 80, "south": 60}), federation)


def cell(result: Table, method: str, column: str) -> tuple[float, float | None]:
    (row,) = [row for row in result.rows if row.label == method]
    figure = row.figures[column]
    return round(100 * figure.mean, 6), None if figure.deviation is None else round(100 * figure.deviation, 6)


# --- table: the maths ------------------------------------------------------------------------------------------------


def test_means_and_sample_deviations_by_hand(runs: list[RunRecord]) -> None:
    result = table(runs)
    assert [row.label for row in result.rows] == ["local", "fedavg", "fedbn"]
    assert cell(result, "local", "client:north") == (81.0, pytest.approx(2**0.5))  # of 80 and 82
    assert cell(result, "fedavg", "client:north") == (90.0, 0.0)
    assert cell(result, "fedavg", "mean") == (72.0, pytest.approx(8**0.5))  # of 70 and 74
    assert cell(result, "fedavg", "worst") == (54.0, pytest.approx(32**0.5))  # of 50 and 58


def test_gain_is_a_difference_seed_by_seed(runs: list[RunRecord]) -> None:
    result = table(runs)
    assert cell(result, "fedavg", "gain") == (1.0, pytest.approx(2**0.5))  # 70 - 70 and 74 - 72
    assert cell(result, "fedbn", "gain") == (5.0, 0.0)  # 75 - 70 and 77 - 72
    assert cell(result, "local", "gain") == (0.0, None)
    gains = {row.label: row.gains for row in result.rows}
    assert 100 * gains["fedavg"]["south"].mean == pytest.approx(-7)  # 50 - 60 and 58 - 62


def test_gain_uses_only_seeds_that_local_has(runs: list[RunRecord]) -> None:
    result = table([each for each in runs if (each.method, each.seed) != ("local", 1)])
    assert cell(result, "fedbn", "gain") == (5.0, None)
    assert any("the seeds of each method (local: 0; fedavg: 0, 1; fedbn: 0, 1)" in note for note in result.notes)


def test_without_local_there_is_no_gain(runs: list[RunRecord]) -> None:
    result = table(runs[2:])
    assert all("gain" not in row.figures for row in result.rows)
    assert [row[-1].text for row in result.grid().rows] == ["–", "–"]
    assert "Gain:" not in str(result)


def test_local_needs_no_transforms_and_no_aggregator_to_give_a_gain() -> None:
    """It sends nothing, so it does not depend on them."""
    other = {"transforms": [{"name": "clip_norm"}], "server": {"aggregator": "median"}}
    runs = [record("local", 0, {"north": 70}), record("fedavg", 0, {"north": 75}, config=other)]
    result = table(runs)
    assert cell(result, "fedavg", "gain") == (5.0, None)
    assert "differ in more than their method" not in str(result)
    text = str(table([*runs, record("fedbn", 0, {"north": 75})]))
    assert "These runs differ in more than their method: server.aggregator.name, transforms." in text


def test_local_on_other_data_gives_no_gain() -> None:
    other = {"data": {"samples": 30}}
    result = table([record("local", 0, {"a": 50}, config=other), record("fedavg", 0, {"a": 60})])
    assert "gain" not in result.rows[1].figures


def test_of_two_locals_the_one_with_the_same_training_counts() -> None:
    epochs = {"train": {"rounds": 1, "epochs": 2}}
    result = table(
        [
            record("local", 0, {"a": 50}),
            record("local", 0, {"a": 55}, config=epochs),
            record("fedavg", 0, {"a": 60}, config=epochs),
        ]
    )
    assert [row.label for row in result.rows] == ["local (train.epochs=1)", "local (train.epochs=2)", "fedavg"]
    assert cell(result, "fedavg", "gain") == (5.0, None)


def test_best_is_bold_and_ties_share_it(runs: list[RunRecord]) -> None:
    result = table(runs)
    assert result.best("client:north") == {"fedavg"}
    assert result.best("client:south") == {"fedbn"}
    assert result.best("mean") == result.best("gain") == {"fedbn"}
    tie = table([record("fedavg", 0, {"a": 70}), record("fedbn", 0, {"a": 70})])
    assert tie.best("mean") == {"fedavg", "fedbn"}
    assert not table(runs[:1]).best("mean")  # a single row competes with nobody


def test_diverged_and_unfinished_runs_are_flagged_and_never_best(runs: list[RunRecord]) -> None:
    broken = record("fedprox", 0, {"north": 99, "south": 99}, status="diverged")
    cut = record("ditto", 0, {"north": 98, "south": 98}, status="interrupted", config={"train": {"rounds": 30}})
    result = table([*runs, broken, cut])
    text = str(result)
    assert result.best("mean") == {"fedbn"}
    assert "fedprox†" in text
    assert "†fedprox, seed 0: diverged." in text
    assert "‡ditto, seed 0: interrupted after round 1 of 30." in text
    states = {row["method"]: row["state"] for row in csv.DictReader(StringIO(result.csv()))}
    assert states["fedprox"] == "diverged"
    assert states["ditto"] == "unfinished"


def test_same_method_with_other_settings_is_another_row() -> None:
    result = table([record("fedprox", 0, {"a": 70}, mu=0.1), record("fedprox", 0, {"a": 75}, mu=1.0)])
    assert [row.label for row in result.rows] == ["fedprox (mu=0.1)", "fedprox (mu=1.0)"]
    assert list(grouped([record("fedprox", s, {"a": 70}, mu=0.1) for s in (0, 1)])) == ["fedprox"]


def test_runs_with_other_transforms_are_told_apart_by_what_differs() -> None:
    """Settings that all transforms of a name have in common are left out."""
    clip = {"name": "clip_norm", "max": 1.0}
    four, eight = ({"name": "quantize", "kinds": ["weights"], "bits": bits} for bits in (4, 8))
    lists = ([], [clip], [clip, four], [eight])
    result = table([record("fedavg", 0, {"a": 70}, config={"transforms": each}) for each in lists])
    assert [row.label.removeprefix("fedavg ") for row in result.rows] == [
        "(transforms=[])",
        "(transforms=[clip_norm])",
        "(transforms=[clip_norm, {name: quantize, bits: 4}])",
        "(transforms=[{name: quantize, bits: 8}])",
    ]


def test_clients_that_failed_are_named_with_the_most_frequent_reason() -> None:
    made = record("fedavg", 0, *[{"a": 70, "b": 70}] * 3)
    failed: list[dict[str, str]] = [{}, {"b": "length 7"}, {"a": "late", "b": "length inf"}, {"b": "length 8.5e+30"}]
    rounds = tuple(replace(each, failed=some) for each, some in zip(made.rounds, failed, strict=True))
    notes = table([replace(made, rounds=rounds)]).notes
    said = "fedavg, seed 0: 4 of 6 times a client failed in a round"
    assert f"{said} (3 of them b: for example, length 7)." in notes


def test_uploads_alone_are_counted() -> None:
    """Clients that train without taking part log what transforms did, too; nothing of it was sent."""
    made = record("fedavg", 0, {"a": 70})
    info = {**made.info, "transforms": [{"name": "t", "shows": {"t/x": "something"}}]}
    logs = {"a": {"t/x": 1.0}, "b": {"t/x": 3.0}}
    rounds = tuple(replace(each, up={"a": 10}, logs=logs) for each in made.rounds[1:])
    grid = transforms([replace(made, info=info, rounds=rounds)])
    assert grid is not None
    assert [[cell.text for cell in row] for row in grid.rows] == [
        ["t/x: something", "1"],
        ["bytes of an upload, as it is sent", "10"],
    ]


def test_the_same_run_twice_is_refused() -> None:
    with pytest.raises(RecordError, match="the same run twice: fedavg with seed 0"):
        table([record("fedavg", 0, {"a": 70}), record("fedavg", 0, {"a": 71})])


def test_a_run_without_figures_keeps_its_row_and_says_why(runs: list[RunRecord]) -> None:
    bare = RunRecord(structure({"method": "ditto"}, Config), {"status": "running", "clients": ["north", "south"]}, ())
    result = table([*runs, bare])
    assert [entry.text for entry in result.grid().rows[-1]][:3] == ["ditto‡", "–", "–"]
    assert "no tested round yet" in result.notes[-1]
    with pytest.raises(RecordError, match="no tested round yet"):
        table([bare])
    with pytest.raises(RecordError, match="no runs"):
        table([])


def test_protocol_is_stated_and_changes_the_figures() -> None:
    run = record("fedavg", 0, {"a": 90, "b": 10}, {"a": 40, "b": 50})
    best, last = table([run], "best-test"), table([run], "last")
    assert cell(best, "fedavg", "mean") == (50.0, None)
    assert "optimistic" in str(best)
    assert cell(last, "fedavg", "mean") == (45.0, None)
    assert Protocol.parse("last").describe(()).split(",")[1] in str(last)
    assert "fedavg, seed 0: " in table([run], "last5").notes[-1]  # there are only two rounds


# --- table: the ways to write it -------------------------------------------------------------------------------------


def test_text(runs: list[RunRecord]) -> None:
    lines = str(table(runs)).splitlines()
    assert lines[0].split() == ["method", "north", "south", "mean", "worst", "gain"]
    assert "65.0 ± 1.4*" in next(line for line in lines if "fedbn" in line)
    assert any(line.startswith("Test accuracy at each method's own moment (received)") for line in lines)
    assert "Mean ± sample standard deviation over seeds 0, 1." in lines
    assert repr(table(runs)) == str(table(runs))


def test_markdown_and_latex(runs: list[RunRecord]) -> None:
    markdown = table(runs).markdown()
    assert "| fedbn | 87.0 ± 1.4 | **65.0 ± 1.4** | **76.0 ± 1.4** | **65.0 ± 1.4** | **+5.0 ± 0.0** |" in markdown
    assert "\n\nTest accuracy" in markdown
    latex = table(runs).latex()
    assert r"fedavg & \textbf{90.0 $\pm$ 0.0} & 54.0 $\pm$ 5.7 &" in latex
    assert r"\toprule" in latex
    assert r"\caption{Test accuracy" in latex


def test_names_cannot_break_the_markup() -> None:
    result = table([record("fedavg", 0, {"a|b_<i>&": 70, "[red]x[/red]": 60})])
    assert r"a\|b\_\<i\>&" in result.markdown()
    assert r"a|b\_<i>\&" in result.latex()
    assert "a|b_&lt;i&gt;&amp;" in result.html()
    assert "<i>" not in result.html()
    assert "[red]x[/red]" in str(result)


def test_csv_has_every_client_and_the_protocol() -> None:
    many = {f"c{i}": 50 + i for i in range(20)}
    rows = list(csv.DictReader(StringIO(table([record("fedavg", 0, many), record("fedavg", 1, many)]).csv())))
    assert rows[0]["client:c19"] == "69.0000"
    assert rows[0]["client:c19 deviation"] == "0.0000"
    assert rows[0]["seeds"] == "0 1"
    assert rows[0]["protocol"] == "own,best-validation,clients"


def test_many_clients_have_no_columns_and_a_line_says_so() -> None:
    result = table([record("fedavg", 0, {f"c{i}": 50 + i for i in range(13)})])
    text = str(result)
    assert text.splitlines()[0].split() == ["method", "mean", "worst", "gain"]
    assert "Columns of 13 clients are left out" in text
    assert "c12" in result.markdown(clients=True)
    few = table([record("fedavg", 0, {f"c{i}": 50 + i for i in range(12)})])
    assert "c11" in str(few)


@pytest.mark.parametrize(("width", "shown", "hidden"), [(120, "90.0 ± 0.0", "narrow"), (46, "narrow", "north")])
def test_a_narrow_terminal_gets_fewer_columns(runs: list[RunRecord], width: int, shown: str, hidden: str) -> None:
    console = Console(file=StringIO(), width=width, force_terminal=True, legacy_windows=False)
    with console.capture() as captured:
        console.print(table(runs))
    assert shown in captured.get()
    assert hidden not in captured.get()
    assert "\x1b[1;32m+5.0" in captured.get()  # the best in bold
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in captured.get().splitlines()) <= width


# --- figures ---------------------------------------------------------------------------------------------------------


def test_curves_by_hand() -> None:
    runs = [record("fedavg", 0, {"a": 40, "b": 60}), record("fedavg", 1, {"a": 60, "b": 80})]
    (curve,) = curves(runs, Protocol()).values()
    assert curve.rounds == (0, 1)
    assert curve.mean == pytest.approx((0.1, 0.6))
    assert curve.deviation == pytest.approx((0.0, 0.02**0.5))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_figure_files(runs: list[RunRecord], tmp_path: Path, suffix: str) -> None:
    path = overview_figure(runs, tmp_path / f"demo{suffix}")
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert overview_figure(runs, path).read_bytes() == first  # the same records, the same file
    with pytest.raises(FedprismError, match=r"\.png or \.svg"):
        overview_figure(runs, tmp_path / "demo.gif")


@pytest.mark.slow
def test_many_methods_have_a_panel_each(pictures: Pictures, tmp_path: Path) -> None:
    """In one panel their names would run out of the figure."""
    names = ["local", *(name for name in METHODS if name != "local")]
    crowd = [record(name, seed, {"north": 60 + i, "south": 50}) for i, name in enumerate(names) for seed in (0, 1)]
    html = page(crowd, pictures=pictures)
    assert "Dashed: training alone; grey: the method that ends best." in html
    for i, name in enumerate(names):
        assert f">{name}  {55 + i / 2:.1f}<" in html.replace("\xa0", " "), name
    few = page(crowd[:24], pictures=pictures)
    assert "Dashed: training alone" not in few
    many, some = overview_figure(crowd, tmp_path / "crowd.png"), overview_figure(crowd[:24], tmp_path / "few.png")
    assert many.stat().st_size > some.stat().st_size


# --- the page --------------------------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Tags that do not close, ids that occur twice, and everything that would be loaded from elsewhere."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.look(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.look(tag, attrs)

    def look(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(("data:", "#")):
                self.problems.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}>")


def check(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.problems
    assert not checker.open
    assert len(checker.ids) == len(set(checker.ids))
    assert not re.search(r"https?:|//\w|@import|<script|url\((?!#)", html)
    return checker


def test_page_is_whole_and_needs_nothing_else(runs: list[RunRecord], pictures: Pictures, tmp_path: Path) -> None:
    path = write_page(tmp_path / "new" / "report.html", runs, pictures=pictures)
    html = path.read_text(encoding="utf-8")
    checker = check(html)
    assert checker.tags.count("svg") == 2
    assert checker.tags.count("img") == 2
    assert "fedbn has the best mean: 76.0 %, 5.0 points above training alone; 2 of 2 clients gain." in html
    assert "2.0 kB" in html  # sent to a client of FedAvg per round
    assert "prefers-color-scheme: dark" in html
    assert "#00000" not in html  # every stand-in colour has become a variable
    assert "Test accuracy at each method" in html
    assert list(tmp_path.rglob("*.partial")) == []


def test_page_says_what_others_learn_of_each_method(runs: list[RunRecord], pictures: Pictures) -> None:
    html = page([*runs, record("fedproto", 0, {"north": 80, "south": 60})], pictures=pictures)
    for name in ("local", "fedavg", "fedbn", "fedproto"):
        assert f"<dt>{name}: others learn</dt><dd>{METHODS[name].reveals}</dd>" in html
    assert len({METHODS[name].reveals for name in ("local", "fedavg", "fedproto")}) == 3


def test_page_says_what_others_learn_of_a_method_of_ones_own(tmp_path: Path) -> None:
    class Mine(Method):
        reveals = "a secret"

    sites = make_federation("digits-skew", clients=2, samples=20)
    run = api.train(sites, Mine(), "mlp", rounds=1, out=tmp_path / "run")
    assert "mine" not in METHODS
    assert "<dt>mine: others learn</dt><dd>a secret</dd>" in page([run.record])


def test_page_escapes_what_it_is_given(pictures: Pictures) -> None:
    evil = "<script>alert(1)</script>"
    check(page([record("local", 0, {evil: 50}), record("fedavg", 0, {evil: 60})], pictures=pictures))


def test_page_without_matplotlib(runs: list[RunRecord], pictures: Pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not canvas.available()
    html = page(runs, pictures=pictures)
    assert "svg" not in check(html).tags
    assert 'pip install "fedprism[report]"' in html
    assert "<strong>76.0" in html
    with pytest.raises(FedprismError, match="matplotlib"):
        overview_figure(runs, "demo.png")


def test_page_of_one_run_with_data_that_is_gone_and_many_clients() -> None:
    clients = {f"c{i}": 50 + i for i in range(50)}
    alone = record("fedavg", 0, clients, config={"data": {"name": "arrays:gone"}})
    html = page([alone], pictures=pictures_of(alone))
    check(html)
    assert "The images cannot be shown" in html
    assert "One method, every client." in html
    both = [alone, record("local", 0, dict.fromkeys(clients, 60), config={"data": {"name": "arrays:gone"}})]
    assert "c49" not in page(both).split("What was run")[0]  # fifty bars without names


def test_page_says_so_when_nothing_beats_training_alone(pictures: Pictures) -> None:
    html = page([record("local", 0, {"a": 70}), record("fedavg", 0, {"a": 60})], pictures=pictures)
    assert "Nothing gained over training alone here." in html


# --- what is inside --------------------------------------------------------------------------------------------------


def showing(run: RunRecord, *rounds: dict[str, dict[str, float]]) -> RunRecord:
    """The run with what its method shows: for each round, client -> name -> value.

    `path:` begins the name of a path (images of 100), `log:` that of a value of training; the rest are of the test.
    """

    def kind(values: dict[str, float], prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}

    entries = []
    for entry, clients in zip(run.rounds, rounds, strict=True):
        of = entry.scores["received"]["test"]
        scores = {
            client: replace(
                of[client],
                branches=kind(values, "path:"),
                diagnostics={name: value for name, value in values.items() if ":" not in name},
            )
            for client, values in clients.items()
        }
        logs = {client: kind(values, "log:") for client, values in clients.items() if entry.round}
        splits = {"received": {"validation": scores, "test": scores}} if scores else {}
        entries.append(replace(entry, scores=splits, logs=logs))
    return replace(run, rounds=tuple(entries))


QUANTILES = (0, 5, 25, 50, 75, 95, 100)


def shown(up: int, share: float, shift: float) -> dict[str, float]:
    spread = {f"s/q{q:02d}": q / 100 + shift for q in QUANTILES}
    return {"path:up": up, "share": share, **spread, "log:share": 9.0, "log:apart": 10 * share, "log:loss/train": 1.0}


@pytest.fixture
def insides() -> list[RunRecord]:
    """Two seeds; `south` is tested in the first round alone."""
    first = record("fedavg", 0, {"north": 50, "south": 70}, {"north": 60, "south": 70})
    second = record("fedavg", 1, {"north": 60, "south": 80}, {"north": 80, "south": 80})
    return [
        showing(
            first,
            {"north": shown(10, 0.1, 0), "south": shown(30, 0.2, 0)},
            {"north": shown(20, 0.3, 1), "south": shown(40, 0.4, 2)},
            {"north": shown(40, 0.5, 3)},
        ),
        showing(
            second,
            {"north": shown(10, 0.1, 0), "south": shown(30, 0.2, 0)},
            {"north": shown(20, 0.5, 1), "south": shown(40, 0.8, 3)},
            {"north": shown(60, 0.7, 5)},
        ),
    ]


def test_what_a_run_shows_by_hand(insides: list[RunRecord]) -> None:
    seen = diagnostics_of(insides[0])
    assert list(seen.branches) == ["up", WHOLE]
    assert seen.branches["up"]["south"] == {0: 0.3, 1: 0.4, 2: 0.4}  # it stands where round 1 put it
    assert seen.branches[WHOLE]["north"] == {0: 0.1, 1: 0.5, 2: 0.6}
    assert seen.values["share"]["north"] == {0: 0.1, 1: 0.3, 2: 0.5}
    assert seen.logs.keys() == {"share", "apart"}  # no loss; a value of the same name is of the training images
    assert seen.logs["apart"] == {"north": {1: 3.0, 2: 5.0}, "south": {1: 4.0, 2: 4.0}}
    assert seen.last == 2
    assert diagnostics_of(record("fedavg", 0, {"a": 50})) == type(seen)()


def test_panels_by_hand(insides: list[RunRecord]) -> None:
    accuracy, share, boxes, trained, apart = panels(insides)
    assert [each.title for each in (share, boxes)] == ["share", "s, last round"]
    assert [each.title for each in (trained, apart)] == ["share, in training", "apart, in training"]
    assert accuracy.percent
    assert list(accuracy.lines) == ["up", WHOLE]
    up = accuracy.lines["up"]
    assert up.rounds == (0, 1, 2)
    assert up.mean == pytest.approx((0.2, 0.3, 0.45))  # the last of 40 and 40, 60 and 40
    assert up.deviation == pytest.approx((0, 0, 0.05 * 2**0.5))
    assert share.lines["north"] == Curve((0, 1, 2), pytest.approx((0.1, 0.4, 0.6)), ())  # no band of a client
    assert share.lines["south"].mean == pytest.approx((0.2, 0.6, 0.6))
    assert boxes.boxes["north"] == pytest.approx({q: q / 100 + 4 for q in QUANTILES})
    assert boxes.boxes["south"] == pytest.approx({q: q / 100 + 2.5 for q in QUANTILES})
    assert apart.lines["north"].rounds == (1, 2)


def test_what_is_not_finite_or_never_together_is_left_out(pictures: Pictures) -> None:
    broken = showing(record("fedavg", 0, {"a": 50}), {"a": {"share": 0.5, "odd": nan}}, {"a": {"share": nan}})
    (panel,) = panels([broken])
    assert panel.lines["a"].rounds == (0,)
    early = showing(record("fedavg", 1, {"a": 50}), {}, {"a": {"share": 0.5}})
    assert panels([broken, early]) == []  # no round in which both seeds have a value
    assert "Inside each method" not in page([broken, early], pictures=pictures)


def test_page_shows_what_is_inside(
    insides: list[RunRecord], pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = {"north": 40, "south": 40}
    html = page([record("local", 0, alone, alone), *insides], pictures=pictures)
    section = html.partition("Inside each method")[2].partition("</section>")[0]
    assert check(html).tags.count("svg") == 3  # curves, gains and this
    assert section.count("<h3>") == section.count("<svg") == 1  # training alone shows nothing
    for text in ("fedavg <small>received", ">share<", ">s, last round<", ">apart, in training<", "means over seeds"):
        assert text in section
    assert ">up  45.0<" in section
    assert ">whole model  72.5<" in section
    assert "#00000" not in html
    assert "Inside each method" not in page([record("fedavg", 0, {"north": 40})], pictures=pictures)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "Inside each method" not in page(insides, pictures=pictures)


def test_page_shows_the_inside_of_the_first_clients_whatever_their_names() -> None:
    names = [f"<b>$client number {i:02d}$" for i in range(13)]
    values = {name: {"a $value$ <i>": i / 10, "s/q50": 1.0} for i, name in enumerate(names)}
    gone = {"data": {"name": "arrays:gone"}}
    run = showing(record("fedavg", 0, dict.fromkeys(names, 50), config=gone), values, values)
    html = page([run])
    check(html)
    section = html.partition("Inside each method")[2].partition("</section>")[0]
    assert "Of 13 clients, the first 12 have a line or a box." in section
    assert section.count("er 11$<") == 2  # at its line and beside its box
    assert "er 12$<" not in section
    assert "a $value$ &lt;i&gt;" in section
    assert "The first 12 of 13 clients" in str(last_values(run))


def test_the_short_table_of_one_run(insides: list[RunRecord]) -> None:
    grid = last_values(insides[0])
    assert grid is not None
    assert grid.header == ("client", "up", WHOLE, "share", "s")
    assert [[entry.text for entry in row] for row in grid.rows] == [
        ["north", "40.0", "60.0", "0.500", "3.50 (3.05 to 3.95)"],
        ["south", "40.0", "70.0", "0.400", "2.50 (2.05 to 2.95)"],
    ]
    assert "moment received, round 2." in str(grid)
    assert "s: median (5th to 95th percentile)." in str(grid)
    assert last_values(record("fedavg", 0, {"a": 50})) is None


def test_the_table_and_the_curves_of_a_path(insides: list[RunRecord]) -> None:
    other = record("local", 0, {"north": 90, "south": 90}, {"north": 90, "south": 90})
    result = table([other, *insides], "last,path=up")
    assert cell(result, "fedavg", "mean") == (45.0, pytest.approx(50**0.5))  # of 40 and 50
    assert result.rows[0].figures == {}
    assert "gain" not in result.rows[1].figures
    assert "local, seed 0: no figure, because local has no path 'up'" in str(result)
    assert "Test accuracy of the path up by itself" in str(result)
    assert next(csv.DictReader(StringIO(result.csv())))["protocol"] == "own,last,clients,path=up"
    lead = page([other, *insides], "path=up").partition("</header>")[0]
    assert "The path up by itself, every client." in lead
    lines = curves([other, *insides], result.protocol)
    assert list(lines) == ["fedavg"]
    assert lines["fedavg"].mean == pytest.approx((0.2, 0.3, 0.45))
    with pytest.raises(RecordError, match=r"unknown path 'upp'\. Did you mean 'up'\? Known: up\."):
        table([other, *insides], "last,path=upp")
    with pytest.raises(RecordError, match=r"Its paths: none"):
        table([other], "path=up")


# --- progress --------------------------------------------------------------------------------------------------------


def plan(method: str, rounds: int) -> Plan:
    return Plan(
        config=structure({"train": {"rounds": rounds}}, Config),
        method=method,
        clients=("a",),
        samples={"a": (1, 1, 1)},
        class_names=("0", "1"),
        shape=(3, 8, 8),
        parameters={"a": 1},
        rounds=rounds,
    )


def follow(progress: Progress, method: str, rounds: int, status: str = "finished", validation: bool = True) -> None:
    splits = ("validation", "test") if validation else ("test",)
    progress.begin(plan(method, rounds))
    for number in range(rounds + 1):
        scores = {"received": {split: {"a": Score(number, 4, 1.0)} for split in splits}}
        progress.round(RoundRecord(number, scores=scores), Snapshot(number, {}, {}))
    progress.end(status)  # type: ignore[arg-type]


def test_progress_in_a_file_is_one_line_a_run() -> None:
    out = StringIO()
    with Progress(Console(file=out, width=40)) as progress:
        follow(progress, "fedavg", 3)
        follow(progress, "fedbn", 2, validation=False)
        follow(progress, "fedprox", 1, status="diverged")
        follow(progress, "ditto", 1, status="interrupted")
    assert out.getvalue().splitlines() == [
        "fedavg: 3 rounds, 75.0 % validation (received), 0 s",
        "fedbn: 2 rounds, 50.0 % test (received), 0 s",
        "fedprox diverged in round 1.",
    ]


def test_progress_on_a_terminal_is_a_line_that_vanishes() -> None:
    out = StringIO()
    with Progress(Console(file=out, width=120, force_terminal=True, legacy_windows=False), ["fedavg"], 3) as progress:
        follow(progress, "fedavg", 3)
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert "round 3/3 75.0 % validation (received) 0:00 left" in text
    assert text.endswith("\x1b[2K")


def test_clients_are_counted_in_a_round_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("fedprism.cli.progress.time.monotonic", lambda: clock[0])
    out = StringIO()
    with Progress(Console(file=out, width=120, force_terminal=True, legacy_windows=False), ["fedavg"], 3) as progress:
        progress.begin(plan("fedavg", 3))
        for done in (1, 2, 3):
            clock[0] += 1.5
            progress.clients(done, 20)
            progress._bar.refresh()
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert "client 1/20" not in text
    assert "round 0/3, client 2/20" in text
    assert "round 0/3, client 3/20" in text


def test_time_left_counts_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("fedprism.cli.progress.time.monotonic", lambda: clock[0])
    progress = Progress(Console(file=StringIO()), ["fast", "slow", "fast", "new"], rounds=10)

    def run(method: str, seconds: float, rounds: int) -> None:
        progress.begin(plan(method, 10))
        for number in range(rounds + 1):
            clock[0] += seconds if number else 0.0
            progress.round(RoundRecord(number), Snapshot(number, {}, {}))

    progress.begin(plan("fast", 10))
    assert progress.seconds_left() is None
    progress = Progress(Console(file=StringIO()), ["fast", "slow", "fast", "new"], rounds=10)
    run("fast", 1.0, 10)
    assert progress.seconds_left() == pytest.approx(30)  # three runs of ten rounds, a second each as far as is known
    run("slow", 5.0, 5)
    # Five rounds of slow at 5 s, ten of fast at 1 s, ten of the new one at the mean of 35 s over 15 rounds.
    assert progress.seconds_left() == pytest.approx(25 + 10 + 10 * 35 / 15)
    clock[0] += 2.0
    assert progress.seconds_left() == pytest.approx(25 + 10 + 10 * 35 / 15 - 2)


# --- explain ---------------------------------------------------------------------------------------------------------


def test_traffic_by_hand() -> None:
    cnn4 = 4 * (3 * 32 * 25 + 32 + 32 * 64 * 25 + 64 + 64 * 25 * 512 + 512 + 512 * 10 + 10)
    head = 4 * (512 * 10 + 10)
    prototypes = 4 * (10 * 512 + 10)

    def of(name: str) -> tuple[Traffic, Traffic]:
        (counted,) = traffic(METHODS[name](), ModelConfig("cnn4"), classes=10, size=32, rounds=30)
        return counted.first, counted.last

    assert of("fedavg") == (Traffic(cnn4, cnn4), Traffic(cnn4, cnn4))
    assert of("local") == (Traffic(0, 0), Traffic(0, 0))
    assert of("fedper")[1] == Traffic(cnn4 - head, cnn4 - head)
    assert of("lg-fedavg") == (Traffic(cnn4, cnn4), Traffic(head, head))  # the warm-up, and after it
    assert of("fedproto")[0] == Traffic(prototypes, prototypes)


def test_settings() -> None:
    names = [name for name, default, values, doc in settings_of(METHODS["ditto"]) if doc]
    assert names == ["lam", "personal_epochs"]
