"""The command line, on real runs of two clients and a few rounds."""

from __future__ import annotations

import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fedprism.cli import app
from fedprism.cli.train import DEMO_METHODS
from fedprism.config import Config, structure
from fedprism.methods import METHODS
from fedprism.records import RunDirectory, read_run
from fedprism.records.sealed import seal, unseal

pytestmark = pytest.mark.full

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits-skew.yaml"
COMMANDS = ("demo", "run", "compare", "resume", "show", "list", "explain", "check", "bench")
IDEAS = ["global", "fine-tuning", "split", "two models", "regularised", "prototypes", "distillation", "mixture"]
TINY = """
data: {name: digits-skew, partition: {name: domain, clients: 2}, samples: 20}
method: {name: fedprox, mu: 0.5}
train: {rounds: 2}
run: {device: cpu}
"""

FAILING = '''
"""A method that fails, and one that is interrupted once."""
from dataclasses import dataclass
from pathlib import Path
from fedprism.errors import ConfigError
from fedprism.methods.base import Method

@dataclass(frozen=True)
class Fails(Method):
    id = "fails"
    def passes(self, client, ctx):
        raise ConfigError("it cannot work like this.")

@dataclass(frozen=True)
class Stops(Method):
    id = "stops"
    def passes(self, client, ctx):
        flag = Path(__file__).with_name("stopped")
        if ctx.round == 1 and not flag.exists():
            flag.touch()
            raise KeyboardInterrupt
        return super().passes(client, ctx)
'''

OTHER = '''
"""A method of another package."""

from dataclasses import dataclass
from fedprism.methods.base import Method

@dataclass(frozen=True)
class Other(Method):
    id = "other"
    group = "split"
    stays = "the tail"
    paper = "Somebody et al., Another Method, 2026"
    lam: float = 1.0
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a small configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


COMPARE = ("compare", "--methods", "local,fedavg,fedprox", "--seeds", "0,1")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one comparison, for tests that only look at it."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "tiny.yaml").write_text(TINY)
    result = call(*COMPARE, folder / "tiny.yaml", "--out", folder / "runs")
    assert result.exit_code == 0, result.output
    return folder / "runs"


def call(*arguments: Any) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def output_of(result: Any) -> str:
    """What was printed, as one line."""
    return " ".join(result.output.split())


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- help, version, lists --------------------------------------------------------------------------------------------


def test_help_names_every_command() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_by_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert "Example:" in result.output
    assert f"fedprism {command}" in result.output


def test_version() -> None:
    result = call("--version")
    assert result.exit_code == 0
    assert result.output.startswith("fedprism ")


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("methods", list(METHODS)),
        ("datasets", ["digits-skew", "folder"]),
        ("models", ["cnn4", "lenet-bn", "resnet18"]),
        ("partitions", ["domain"]),
        ("engines", ["inprocess"]),
        ("experiments", ["experiments/setups/fedcp-cifar100-practical.yaml", "FedCP's practical setting"]),
    ],
)
def test_list(what: str, names: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parent.parent)
    monkeypatch.setenv("COLUMNS", "200")
    result = call("list", what)
    assert result.exit_code == 0
    assert all(name in result.output for name in names)


def test_list_of_methods_is_by_idea_and_counts_lines() -> None:
    """A row has an idea where a new one begins, a name, what stays with the client, lines of code and the paper."""
    printed = call("list", "methods").output
    found = re.findall(r"^(\S+(?: \S+)*)? {2,}(\S+) {2,}\S.*? {2,}(\d+) {2,}\S", printed, re.MULTILINE)
    assert sorted(name for _, name, _ in found) == sorted(METHODS)
    assert len(found) >= 33
    assert all(0 < int(lines) <= 120 for *_, lines in found)
    assert [idea for idea, *_ in found if idea] == ["alone", *IDEAS]
    assert re.search(
        r"^server-side +\(FedAvgM\) +a setting: server\.optimizer: momentum +Hsu et al\., 2019", printed, re.MULTILINE
    )
    assert f"{len(found)} methods" in printed


def test_list_of_methods_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eighty columns: nothing is cut, and a method takes fewer than three lines on average."""
    monkeypatch.setenv("COLUMNS", "80")
    printed = call("list", "methods").output
    assert "…" not in printed
    assert len(printed.splitlines()) < 3 * len(list(METHODS))


def test_list_of_experiments_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no folder experiments/" in call("list", "experiments").output


def test_list_of_something_else() -> None:
    result = call("list", "colours")
    assert result.exit_code == 2
    assert "methods" in result.output


def test_explain() -> None:
    result = call("explain", "ditto", "--model", "mlp", "--image-size", "8")
    assert result.exit_code == 0
    assert "Fair and Robust" in output_of(result)
    assert "method.lam 0.1 0 or more weight of the pull" in output_of(result)
    assert "bytes) down" in output_of(result)
    assert "In the last of 30 rounds" in output_of(call("explain", "lg-fedavg"))


@pytest.mark.parametrize("name", ["fedavg", "fedfomo", "fedproto", "fedamp", "fedbabu"])
def test_explain_says_what_others_learn_and_how_new_clients_begin(name: str) -> None:
    printed = output_of(call("explain", name, "--model", "mlp", "--image-size", "8"))
    assert f"others learn {METHODS[name].reveals}" in printed
    assert f"new clients {METHODS[name].newcomers}" in printed


def test_explain_unknown_method() -> None:
    result = call("explain", "fedavgg")
    assert result.exit_code == 2
    assert "Did you mean 'fedavg'?" in output_of(result)
    assert "Traceback" not in result.output


# --- run -------------------------------------------------------------------------------------------------------------


def test_print_config_is_complete_and_can_be_run_again() -> None:
    result = call("run", "--print-config", "--method", "fedprox", "--set", "data.partition.clients=3")
    assert result.exit_code == 0
    assert "# communication rounds" in result.output
    config = structure(yaml.safe_load(result.output), Config)
    assert config.method.settings == {"mu": 0.1}
    assert config.data.partition.settings == {"clients": 3}
    assert config.train == Config().train


def test_print_config_of_a_file(here: Path) -> None:
    printed = yaml.safe_load(call("run", "tiny.yaml", "--print-config", "--set", "method.mu=0.2").output)
    assert printed["method"] == {"name": "fedprox", "mu": 0.2}
    assert printed["data"]["samples"] == 20
    same = yaml.safe_load(call("run", "tiny.yaml", "--print-config", "--method", "fedprox").output)
    assert same["method"]["mu"] == 0.5  # the file's own method keeps its settings
    other = yaml.safe_load(call("run", "tiny.yaml", "--print-config", "--method", "fedavg").output)
    assert other["method"] == {"name": "fedavg"}
    assert not (here / "runs").exists()


def test_run_writes_where_the_configuration_says(here: Path) -> None:
    result = call("run", "tiny.yaml", "--set", "train.rounds=1")
    assert result.exit_code == 0, result.output
    path = here / "runs" / "tiny" / "fedprox-0"
    assert read_run(path).config.train.rounds == 1
    assert "fedprox: 1 rounds, " in result.output
    assert "Test accuracy at each method's own moment (received)" in output_of(result)
    assert "fedprism show runs/tiny/fedprox-0" in result.output
    again = call("run", "tiny.yaml", "--set", "train.rounds=1")
    assert again.exit_code == 2
    assert "fedprism resume" in output_of(again)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "fedprism run --print-config"),
        (("run", "absent.yaml"), "there is no configuration at absent.yaml"),
        (("run", "tiny.yaml", "--set", "train.round=3"), "Did you mean 'rounds'?"),
        (("run", "tiny.yaml", "--set", "train.rounds"), "key.path=value"),
        (("run", "tiny.yaml", "--method", "nothing.py:Mine"), "there is no file"),
        (("run", "tiny.yaml", "--protocol", "yesterday"), "unknown part of a protocol"),
        (("run", "tiny.yaml", "--set", "data.partition.clients=500"), "At most"),
        (("compare", "tiny.yaml", "--methods", "local,,fedavg"), "separated by commas"),
        (("compare", "tiny.yaml", "--methods", "local", "--seeds", "one"), "whole numbers"),
        (("compare", "tiny.yaml", "--methods", "local", "--protocol", "trained,global"), "twice"),
        (("resume", "absent"), "absent does not exist"),
        (("show", "absent"), "absent does not exist"),
        (("show", "."), "there is no run in"),
        (("demo", "--protocol", "yesterday"), "unknown part of a protocol"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(here: Path, arguments: Sequence[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in output_of(result)
    assert "Traceback" not in result.output
    assert result.output.startswith("error: ")


def test_a_run_that_diverges_says_so(here: Path) -> None:
    result = call("run", "tiny.yaml", "--set", "train.optimizer.lr=1e30", "--out", "broken")
    assert result.exit_code == 1
    assert "fedprox diverged in round" in result.output
    assert "fedprox†" in result.output
    assert read_run(here / "broken").status == "diverged"


def test_interrupted_and_resumed(here: Path) -> None:
    (here / "own.py").write_text(FAILING)
    result = call("run", "tiny.yaml", "--method", "own.py:Stops", "--out", "mine")
    assert result.exit_code == 130
    assert "stopped. `fedprism resume mine` goes on." in result.output
    assert read_run(here / "mine").status == "interrupted"
    assert "stops‡" in call("show", "mine").output
    recorded = len(read_run(here / "mine").rounds) - 1
    result = call("resume", "mine")
    assert result.exit_code == 0, result.output
    assert f"mine goes on after round {recorded} of 2." in output_of(result)
    assert len(read_run(here / "mine").rounds) == 3
    again = call("resume", "mine")
    assert again.exit_code == 0
    assert "mine has already finished" in output_of(again)


def test_a_locked_run_is_left_alone(here: Path, compared: Path) -> None:
    with RunDirectory.open(compared / "fedavg-0", write=True):
        result = call("resume", compared / "fedavg-0")
    assert result.exit_code == 2
    assert "another process" in output_of(result)
    assert "goes on after" not in output_of(result)


# --- compare and show ------------------------------------------------------------------------------------------------


def test_compare_writes_table_and_page(compared: Path) -> None:
    table = rows(compared / "comparison.csv")
    assert [row["method"] for row in table] == ["local", "fedavg", "fedprox"]
    assert {row["seeds"] for row in table} == {"0 1"}
    assert "| fedprox |" in (compared / "comparison.md").read_text()
    assert (compared / "report.html").read_text().startswith("<!DOCTYPE html>")
    # The file's own method keeps its setting, and figures are those of the records.
    assert read_run(compared / "fedprox-1").config.method.settings == {"mu": 0.5}
    alone = (compared / "local-0", compared / "local-1")
    tests = [read_run(path).rounds[-1].scores["received"]["test"] for path in alone]
    by_hand = [100 * sum(s.correct / s.total for s in scores.values()) / 2 for scores in tests]
    (last,) = csv.DictReader(call("show", *alone, "--protocol", "last", "--format", "csv").output.splitlines())
    assert float(last["mean"]) == pytest.approx(sum(by_hand) / 2, abs=1e-4)


def test_compare_again_runs_nothing_and_prints_the_same(compared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in compared.rglob("metrics.jsonl")}
    table = (compared / "comparison.csv").read_bytes()
    result = call(*COMPARE, compared.parent / "tiny.yaml", "--out", compared)
    assert result.exit_code == 0
    assert "rounds," not in result.output  # no run was finished
    assert {path: path.stat().st_mtime_ns for path in compared.rglob("metrics.jsonl")} == before
    assert (compared / "comparison.csv").read_bytes() == table


def test_compare_goes_on_after_a_failure(here: Path) -> None:
    (here / "own.py").write_text(FAILING)
    result = call("compare", "tiny.yaml", "--methods", "own.py:Fails,local", "--set", "train.rounds=1")
    assert result.exit_code == 1
    assert "fails with seed 0 failed: it cannot work like this." in output_of(result)
    assert "1 of 2 runs failed" in output_of(result)
    assert [row["method"] for row in rows(here / "runs" / "tiny" / "comparison.csv")] == ["local"]


def test_compare_resumes_after_an_interrupt(here: Path) -> None:
    (here / "own.py").write_text(FAILING)
    command = ("compare", "tiny.yaml", "--methods", "local,own.py:Stops")
    result = call(*command)
    assert result.exit_code == 130
    assert "The same command goes on" in output_of(result)
    result = call(*command)
    assert result.exit_code == 0, result.output
    assert "local:" not in result.output  # was finished before
    assert [row["method"] for row in rows(here / "runs" / "tiny" / "comparison.csv")] == ["local", "stops"]


def test_show_searches_folders_and_orders_methods(compared: Path) -> None:
    result = call("show", compared.parent)
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()[2:5]] == ["local", "fedavg", "fedprox"]
    assert "Mean ± sample standard deviation over seeds 0, 1." in result.output


def test_show_formats_and_protocols(compared: Path) -> None:
    assert r"\toprule" in call("show", compared, "--format", "latex").output
    assert "| fedavg |" in call("show", compared, "--format", "markdown").output
    assert "<table>" in call("show", compared, "--format", "html").output
    assert "after local training, last round" in output_of(call("show", compared, "--protocol", "trained,last"))
    assert "optimistic" in output_of(call("show", compared, "--protocol", "best-test"))


def test_show_names_a_bad_folder_and_shows_the_others(compared: Path, tmp_path: Path) -> None:
    shutil.copytree(compared / "local-0", tmp_path / "good" / "local-0")
    shutil.copytree(compared / "local-0", tmp_path / "bad" / "local-0")
    bad = tmp_path / "bad" / "local-0" / "run.json"
    bad.write_bytes(seal({**unseal(bad.read_bytes()), "format": 99}))
    result = call("show", tmp_path)
    assert result.exit_code == 2
    assert "format 99" in output_of(result)
    assert "Test accuracy" in output_of(result)


def test_show_prints_the_diagnostics_of_a_single_run(here: Path, compared: Path) -> None:
    assert call("run", "tiny.yaml", "--method", "fed-co2", "--out", "two/fed-co2-0").exit_code == 0
    result = call("show", "two")
    table, heading, inside = result.output.partition("inside the method")
    assert heading
    assert "Test accuracy" in table
    tests = read_run(here / "two" / "fed-co2-0").rounds[-1].scores["received"]["test"]
    for client_id, score in tests.items():
        percents = [f"{100 * right / score.total:.1f}" for right in (*score.branches.values(), score.correct)]
        assert [client_id, *percents] in [line.split() for line in inside.splitlines()]
    alone = call("show", "two", "--protocol", "received,last,path=offline")
    shares = [f"{100 * score.branches['offline'] / score.total:.1f}" for score in tests.values()]
    assert ["fed-co2", *shares] in [line.split()[:3] for line in alone.output.splitlines()]
    assert "of the path offline by itself, as received from the server, last round" in output_of(alone)
    wrong = call("show", "two", "--protocol", "path=ofline")
    assert wrong.exit_code == 2
    assert "Did you mean 'offline'? Known: offline, online." in output_of(wrong)
    assert "inside" not in call("show", "two", "--format", "markdown").output
    assert "inside" not in call("show", compared / "fedavg-0").output  # shows nothing
    again = ("run", "tiny.yaml", "--method", "fed-co2", "--set", "seed=1", "--out", "two/fed-co2-1")
    assert call(*again).exit_code == 0
    assert "inside" not in call("show", "two").output  # of two runs


def test_show_writes_a_page(compared: Path, tmp_path: Path) -> None:
    result = call("show", compared, "--report", tmp_path / "page.html")
    assert result.exit_code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    shutil.copytree(compared / "local-0", tmp_path / "other" / "local-0")
    two = call("show", compared, tmp_path / "other", "--report", tmp_path / "page.html")
    assert two.exit_code == 2
    assert "2 folders" in output_of(two)


# --- demo and example ------------------------------------------------------------------------------------------------


def test_demo_twice(here: Path) -> None:
    result = call("demo", "--rounds", "1")
    assert result.exit_code == 0, result.output
    assert all(f"{method}: 1 rounds" in result.output for method in DEMO_METHODS)
    assert "demo/report.html" in result.output
    page = (here / "demo" / "report.html").read_text()
    assert all(method in page for method in DEMO_METHODS)
    (here / "demo" / "runs" / "mine").mkdir()
    with RunDirectory.open(here / "demo" / "runs" / "local-0", write=True):
        assert "is being written by another process" in output_of(call("demo", "--rounds", "1"))
    result = call("demo", "--rounds", "2")  # another configuration: the demo's own runs are replaced
    assert result.exit_code == 0, result.output
    assert read_run(here / "demo" / "runs" / "ditto-0").config.train.rounds == 2
    assert (here / "demo" / "runs" / "mine").is_dir()


def test_demo_leaves_other_peoples_folders_alone(here: Path) -> None:
    (here / "demo" / "runs").mkdir(parents=True)
    (here / "demo" / "runs" / "thesis.txt").write_text("years of work")
    result = call("demo", "--quick")
    assert result.exit_code == 2
    assert "choose another --out" in output_of(result)
    assert (here / "demo" / "runs" / "thesis.txt").read_text() == "years of work"


def test_example_begins_with_the_command_that_runs_it() -> None:
    first = EXAMPLE.read_text().splitlines()[0]
    assert first.startswith("# fedprism compare examples/digits-skew.yaml --methods local,")
    methods = first.partition("--methods ")[2].split()[0].split(",")
    assert set(methods) == set(METHODS)
    assert call("run", EXAMPLE, "--print-config").exit_code == 0


def test_compare_does_not_ignore_a_setting_of_a_method(here: Path) -> None:
    base = ("compare", "tiny.yaml", "--methods", "local,fedprox", "--set", "train.rounds=1")
    refused = call(*base, "--set", "method.lam=5")
    assert refused.exit_code == 2
    weak = call(*base, "--set", "method.name=fedprox", "--set", "method.mu=0.5", "--out", "weak")
    assert weak.exit_code == 0
    assert "mu: 0.5" in (here / "weak" / "fedprox-0" / "config.yaml").read_text()


def test_compare_refuses_another_configuration_before_anything_trains(here: Path) -> None:
    assert (
        call("run", "tiny.yaml", "--method", "fedavg", "--set", "train.rounds=2", "--out", "a/fedavg-0").exit_code == 0
    )
    result = call("compare", "tiny.yaml", "--methods", "local,fedavg", "--set", "train.rounds=1", "--out", "a")
    assert result.exit_code == 2
    assert not (here / "a" / "local-0").exists()


def test_a_bug_in_one_method_does_not_end_a_comparison(here: Path) -> None:
    buggy = FAILING.replace('raise ConfigError("it cannot work like this.")', 'raise ValueError("oh")')
    (here / "own.py").write_text(buggy)
    result = call("compare", "tiny.yaml", "--methods", "own.py:Fails,local", "--set", "train.rounds=1")
    assert result.exit_code == 1
    assert "ValueError: oh" in result.output
    assert "local" in result.output


@pytest.mark.filterwarnings("default::UserWarning")
def test_failures_and_other_settings_are_noted_under_the_table(here: Path) -> None:
    short = ("--set", "train.rounds=1")
    assert call("run", "tiny.yaml", "--method", "local", *short, "--out", "g/local-0").exit_code == 0
    lost = ("--set", "clients.dropout=1.0")
    assert call("run", "tiny.yaml", "--method", "fedavg", *short, *lost, "--out", "g/fedavg-0").exit_code == 0
    shown = " ".join(call("show", "g").output.split())
    assert "times a client failed in a round (" in shown
    assert ": dropped out after training)" in shown
    assert "These runs differ in more than their method: clients.dropout." in shown
    assert "Gain" not in shown


@pytest.mark.slow
def test_the_examples_of_explain_work() -> None:
    text = call("explain", "--help").output
    examples = re.findall(r"^\s*fedprism (explain .*?)\s*$", text, flags=re.MULTILINE)
    assert len(examples) == 6
    for example in examples:
        result = call(*shlex.split(example), "--image-size", "16")
        assert result.exit_code == 0, (example, result.output)


def test_list_names_the_methods_of_installed_packages(tmp_path: Path) -> None:
    """A real package: one method that can be loaded, and one that cannot."""
    (tmp_path / "other.py").write_text(OTHER)
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedprism.methods]\nother = other:Other\ngone = other:Gone\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "fedprism", "list", "methods"],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    (row,) = [line for line in rows if "other" in line]
    assert row.split() == ["other", "the", "tail", "7", "Somebody", "et", "al.,", "2026"]
    begin = {idea: next(i for i, line in enumerate(rows) if line.startswith(idea)) for idea in ("split", "two models")}
    assert begin["split"] < rows.index(row) < begin["two models"]
    assert f"{len(list(METHODS)) + 1} methods" in done.stdout
    assert "warning: the installed method 'gone' cannot be loaded" in " ".join(done.stderr.split())
