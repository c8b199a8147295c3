"""The run directory: what it holds, how it is read, and every way in which it refuses to lose anything."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedprism import config as configuration
from fedprism.config import Config, EvaluateConfig, ModelConfig, Named, structure
from fedprism.errors import RecordError
from fedprism.records import RecordWarning, RunDirectory, read_run, run_status, runfile
from fedprism.records.fsck import fsck
from fedprism.records.read import Architecture
from fedprism.records.runfile import machine
from fedprism.records.sealed import seal, unseal
from fedprism.round.events import Callback, RoundRecord, Score, Snapshot
from tests.faults.injection import as_any_user
from tests.toy_records import CLASSES, CLIENTS, checkpoints, results, toy_config, toy_plan, toy_rounds, toy_run


def edit_info(path: Path, **changes: Any) -> None:
    (path / "run.json").write_bytes(seal({**unseal((path / "run.json").read_bytes()), **changes}))


# --- what is in it ---------------------------------------------------------------------------------------------------


def test_everything_is_there_after_a_run(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "deep" / "er" / "run")
    names = {p.name for p in path.iterdir()} - {".lock"}
    assert names == {"config.yaml", "run.json", "metrics.jsonl", "timings.jsonl", "classes.json", "checkpoints"}
    assert configuration.read(path / "config.yaml") == toy_config()
    info = json.loads((path / "run.json").read_text())
    assert info["format"] == 2
    assert info["status"] == "finished"
    assert info["started"] <= info["ended"]
    assert set(info["versions"]) == {"fedprism", "torch", "numpy", "python"}
    assert set(info["machine"]) == {"cpu", "gpu", "cores", "threads", "platform"}
    assert (info["method"], info["moment"], info["clients"]) == ("toy", "received", list(CLIENTS))
    assert info["samples"]["north"] == [20, 10, 30]
    assert "resumed" not in info


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = read_run(str(toy_run(tmp_path / "run")))
    assert (run.status, run.method, run.seed, run.moment, run.diverged) == ("finished", "toy", 0, "received", False)
    assert (run.clients, run.class_names, run.shape) == (CLIENTS, CLASSES, (3, 16, 16))
    assert run.samples == dict.fromkeys(CLIENTS, (20, 10, 30))
    assert run.parameters == dict.fromkeys(CLIENTS, 9)
    assert run.config == toy_config()
    assert [record.round for record in run.rounds] == list(range(8))
    assert run.rounds[1].down == {"north": 101, "Süd": 101}
    assert run.rounds[1].seconds == {"train": 0.25, "total": 0.5}
    assert run.path == tmp_path / "run"


def test_counts_per_class_of_the_best_and_the_last_round(tmp_path: Path) -> None:
    run = read_run(toy_run(tmp_path / "run"))
    means = [sum(s.correct for s in r.scores["received"]["validation"].values()) for r in run.rounds]
    assert run.classes["best"]["round"] == means.index(max(means))
    assert run.classes["last"]["round"] == 7
    for counts in run.classes.values():
        score = run.rounds[counts["round"]].scores["received"]["test"]["Süd"]
        of_class = counts["scores"]["received"]["test"]["Süd"]
        assert sum(of_class["right"]) == score.correct
        assert of_class["actual"] == [10, 10, 10]
        assert of_class["predicted"] == [10, 10, 10]


def test_the_earliest_of_equal_rounds_is_the_best_however_floats_round(tmp_path: Path) -> None:
    """7/30 + 13/30 and 10/30 + 10/30 differ as floats, in both directions; they are the same mean."""
    pairs = [(10, 10), (7, 13), (11, 9), (4, 16), (1, 19), (3, 17)]
    config = toy_config(rounds=len(pairs) - 1)
    with RunDirectory.create(tmp_path / "run", config) as directory:
        recorder = directory.recorder()
        recorder.begin(replace(toy_plan(config), clients=("a", "b"), samples={}, parameters={}))
        for round, (a, b) in enumerate(pairs):
            scores = {"received": {"validation": {"a": Score(a, 30, 0.0), "b": Score(b, 30, 0.0)}}}
            recorder.round(RoundRecord(round, scores=scores), Snapshot(round, {}, {"a": None, "b": None}))
        recorder.end("finished")
        assert directory.best().round == 0  # type: ignore[union-attr]
    assert read_run(tmp_path / "run").classes["best"]["round"] == 0


def test_without_validation_images_the_last_round_stands_for_the_best(tmp_path: Path) -> None:
    config = toy_config(rounds=4, checkpoint_every=3)
    scores = {"received": {"validation": {"a": Score(0, 0, 0.0)}, "test": {"a": Score(1, 2, 0.0, (1,), (1,), (2,))}}}
    with RunDirectory.create(tmp_path / "run", config) as directory:
        recorder = directory.recorder()
        recorder.begin(replace(toy_plan(config), clients=("a",), samples={}, parameters={}))
        for round in range(5):
            recorder.round(RoundRecord(round, scores=scores), Snapshot(round, {}, {"a": None}))
        recorder.end("finished")
        assert checkpoints(directory.path) == [3, 4]  # and not one every round
        assert directory.best().round == 4  # type: ignore[union-attr]
    classes = read_run(tmp_path / "run").classes
    assert classes["best"] == classes["last"]
    assert classes["last"]["round"] == 4


def test_a_method_judged_after_training_has_its_best_by_that_moment(tmp_path: Path) -> None:
    config = toy_config(rounds=3)
    with RunDirectory.create(tmp_path / "run", config) as directory:
        recorder = directory.recorder()
        recorder.begin(replace(toy_plan(config), clients=("a",), samples={}, parameters={}, moment="trained"))
        for round, (received, trained) in enumerate([(9, None), (1, 5), (2, 8), (3, 7)]):
            scores = {"received": {"validation": {"a": Score(received, 10, 0.0)}}}
            if trained is not None:
                scores["trained"] = {"validation": {"a": Score(trained, 10, 0.0)}}
            recorder.round(RoundRecord(round, scores=scores), Snapshot(round, {}, {"a": None}))
        recorder.end("finished")
        assert directory.best().round == 2  # type: ignore[union-attr]


def test_reading_takes_no_lock_and_works_while_the_run_goes_on(tmp_path: Path) -> None:
    class Reader(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            run = read_run(tmp_path / "run")
            assert len(run.rounds) == record.round + 1
            assert run.status == "running"
            with RunDirectory.open(tmp_path / "run") as reader:
                latest, best = reader.latest(), reader.best()
            assert latest is not None
            assert best is not None
            assert best.round <= latest.round <= record.round

    with RunDirectory.create(tmp_path / "run", toy_config(checkpoint_every=2)) as directory:
        assert toy_rounds(directory.config, [directory.recorder(), Reader()], None) == "finished"


def test_a_run_that_has_only_begun_can_be_read(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", toy_config()).close()
    run = read_run(tmp_path / "run")
    assert (run.status, run.rounds, run.classes, run.clients) == ("running", (), {}, ())
    assert run.method == "fedavg"
    with RunDirectory.open(tmp_path / "run") as directory:
        assert directory.latest() is None
        assert directory.best() is None
        assert directory.status == "running"


def test_status_of_what_is_no_run(tmp_path: Path) -> None:
    assert run_status(tmp_path / "nowhere") is None
    assert run_status(tmp_path) is None
    (tmp_path / ".lock").touch()
    assert run_status(tmp_path) is None
    assert run_status(toy_run(tmp_path / "run", until=2)) == "interrupted"


def test_a_diverged_run_is_recorded_as_such(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", toy_config()) as directory:
        recorder = directory.recorder()
        recorder.begin(toy_plan(toy_config()))
        for round in range(3):
            record = RoundRecord(round, failed=dict.fromkeys(CLIENTS, "not finite") if round == 2 else {})
            recorder.round(record, Snapshot(round, {}, dict.fromkeys(CLIENTS)))
        recorder.end("diverged")
    run = read_run(tmp_path / "run")
    assert run.diverged
    assert run.rounds[2].failed == dict.fromkeys(CLIENTS, "not finite")
    assert checkpoints(tmp_path / "run")[-1] == 2


# --- going on --------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_after_its_last_round(tmp_path: Path) -> None:
    straight = results(toy_run(tmp_path / "straight"))
    path = toy_run(tmp_path / "run", until=4)
    assert run_status(path) == "interrupted"
    assert checkpoints(path)[-1] == 4  # though no checkpoint was due
    toy_run(path)
    assert results(path) == straight
    info = json.loads((path / "run.json").read_text())
    assert info["status"] == "finished"
    assert [entry["round"] for entry in info["resumed"]] == [4]


def test_interrupted_after_every_round(tmp_path: Path) -> None:
    straight = results(toy_run(tmp_path / "straight"))
    for until in range(8):
        toy_run(tmp_path / "run", until=until)
    assert results(tmp_path / "run") == straight


@pytest.mark.parametrize("left", [(), ("metrics.jsonl",), ("metrics.jsonl", "timings.jsonl")])
def test_killed_before_the_first_checkpoint_starts_anew(tmp_path: Path, left: tuple[str, ...]) -> None:
    straight = toy_run(tmp_path / "straight")
    path = tmp_path / "run"
    RunDirectory.create(path, toy_config()).close()
    for name in left:
        (path / name).write_bytes((straight / name).read_bytes().splitlines(keepends=True)[0])
    toy_run(path)
    assert results(path) == results(straight)


def test_killed_while_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunDirectory.create(path, toy_config()).close()
    (path / "config.yaml").unlink()  # run.json is written first
    toy_run(path)
    assert results(path) == results(toy_run(tmp_path / "straight"))
    other = tmp_path / "other"
    other.mkdir()
    (other / ".lock").touch()
    (other / ".run.json.partial").write_text("{")
    RunDirectory.create(other, toy_config()).close()
    assert not (other / ".run.json.partial").exists()


def test_another_version_of_torch_is_a_warning(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=4)
    versions = json.loads((path / "run.json").read_text())["versions"]
    edit_info(path, versions={**versions, "torch": "1.0"})
    with pytest.warns(RecordWarning, match=r"begun with torch 1.0 then, .* now"):
        toy_run(path)


def test_a_moved_run_goes_on(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=4)
    shutil.move(path, tmp_path / "moved")
    elsewhere = replace(toy_config(), run=replace(toy_config().run, out="elsewhere/{seed}"))
    RunDirectory.open(tmp_path / "moved", write=True, expect=elsewhere).close()
    toy_run(tmp_path / "moved")
    assert results(tmp_path / "moved") == results(toy_run(tmp_path / "straight"))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_directory_that_holds_anything_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    ways = {tmp_path: "", toy_run(tmp_path / "run"): rf", or go on with the run in it by `fedprism resume {tmp_path}"}
    for path, way in ways.items():
        before = {p: p.stat().st_mtime_ns for p in path.rglob("*")}
        with pytest.raises(RecordError, match=rf"not empty. Choose another --out{way}"):
            RunDirectory.create(path, toy_config())
        assert {p: p.stat().st_mtime_ns for p in path.rglob("*")} == before
    with pytest.raises(RecordError, match="is a file"):
        RunDirectory.create(tmp_path / "notes.txt", toy_config())


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, toy_config()).close()
    assert run_status(tmp_path) == "running"


def test_what_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RecordError, match=r"no run.json"):
        RunDirectory.open(tmp_path, write=True)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(RecordError, match=r"run.json is damaged"):
        read_run(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(RecordError, match=r"run.json is damaged"):
        read_run(tmp_path)


@pytest.mark.parametrize("other", [0, 1, "2", None])
def test_another_format_is_refused(tmp_path: Path, other: object) -> None:
    path = toy_run(tmp_path / "run", until=2)
    edit_info(path, format=other, versions={"fedprism": "9.9"})
    for act in (read_run, RunDirectory.open):
        with pytest.raises(RecordError, match=rf"format {other}, written by fedprism 9.9.*reads format 2"):
            act(path)


def test_a_run_of_a_version_without_checksums_is_not_called_damaged(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=2)
    info = {**unseal((path / "run.json").read_bytes()), "format": 1}
    (path / "run.json").write_text(json.dumps(info, indent=1))
    for act in (read_run, RunDirectory.open, fsck):
        with pytest.raises(RecordError, match=r"has format 1, written by fedprism .*Use the version that wrote it"):
            act(path)
    for odd in ({**info, "checksum": "0"}, {**info, "format": 2}, [info]):
        (path / "run.json").write_text(json.dumps(odd))
        with pytest.raises(RecordError, match=r"run.json is damaged"):
            read_run(path)


def test_a_configuration_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=2)
    edit_info(path, config={"train": {"rounds": 3, "warp": 9}})
    with pytest.raises(RecordError, match=r"does not fit this version of fedprism.*warp"):
        read_run(path)


def test_a_configuration_of_an_earlier_version_gets_new_keys_by_default(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=2)
    raw = yaml.safe_load((path / "config.yaml").read_text())
    del raw["evaluate"]["train_loss"]
    (path / "config.yaml").write_text(yaml.safe_dump(raw))
    edit_info(path, config=raw)
    with RunDirectory.open(path, write=True) as directory:
        assert directory.config == toy_config()


def test_an_edited_configuration_is_refused_by_key_with_both_values(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=3)
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text("# a comment changes nothing\n" + text)
    RunDirectory.open(path, write=True).close()
    (path / "config.yaml").write_text(
        text.replace("rounds: 7", "rounds: 9").replace("name: fedavg", "name: fedprox\n  mu: 0.1")
    )
    with pytest.raises(RecordError) as error:
        RunDirectory.open(path, write=True)
    for line in (
        "train.rounds: 7 recorded, 9 in config.yaml",
        'method.name: "fedavg" recorded, "fedprox" in config.yaml',
        "method.mu: absent recorded, 0.1 in config.yaml",
    ):
        assert line in str(error.value)
    assert "data.name" not in str(error.value)
    assert "another --out" in str(error.value)
    (path / "config.yaml").write_text("train: [")
    with pytest.raises(RecordError, match=r"fsck .* --repair.*config.yaml cannot be read as YAML"):
        RunDirectory.open(path, write=True)
    (path / "config.yaml").write_text(text)
    toy_run(path)  # the lock was let go each time


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=3)
    other = toy_config(rounds=9, seed=4)
    for write in (False, True):
        with pytest.raises(RecordError, match=r"seed: 0 recorded, 4 in the one given\n.*train.rounds: 7 recorded, 9"):
            RunDirectory.open(path, write=write, expect=other)
    assert RunDirectory.open(path, expect=toy_config()).status == "interrupted"
    with RunDirectory.open(path, write=True) as directory, pytest.raises(RecordError, match="seed: 0 recorded, 4"):
        directory.recorder().begin(toy_plan(other, 4))


def test_any_configuration_is_itself_after_a_round_trip(tmp_path: Path) -> None:
    config = structure(
        {
            "model": {"per_client": ["mlp", {"name": "resnet18", "width": 16}]},
            "method": {"name": "fedprox", "mu": 1e-05, "list": [1, 2.5, None]},
            "train": {"schedule": {"name": "step", "every": 10, "gamma": 0.5}, "clip": 3},
            "clients": {"participation": [0.1, 1]},
            "run": {"keep_rounds": [3, 1]},
        },
        Config,
    )
    RunDirectory.create(tmp_path / "run", config).close()
    with RunDirectory.open(tmp_path / "run", write=True, expect=config) as directory:
        assert directory.config == config
    python = Config(
        method=Named("x", {"steps": (1, 2)}), evaluate=EvaluateConfig(moments=("global",)), model=ModelConfig()
    )
    RunDirectory.create(tmp_path / "python", python).close()
    RunDirectory.open(tmp_path / "python", write=True, expect=python).close()


def test_other_data_is_refused_before_anything_is_cut_off(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=4)
    before = results(path)
    plan = toy_plan(toy_config(), 5)
    others = {
        "samples.east: [20, 10, 30] recorded, [21, 10, 30] now": {"samples": {**plan.samples, "east": (21, 10, 30)}},
        'clients: ["north", "east"': {"clients": ("north",)},
        "parameters.north: 9 recorded, 10 now": {"parameters": {**plan.parameters, "north": 10}},
        "shape: [3, 16, 16] recorded, [3, 32, 32] now": {"shape": (3, 32, 32)},
    }
    for words, change in others.items():
        with RunDirectory.open(path, write=True) as directory, pytest.raises(RecordError, match=re.escape(words)):
            directory.recorder().begin(replace(plan, **change))
    assert results(path) == before


def test_a_long_list_of_differences_is_cut(tmp_path: Path) -> None:
    config = toy_config()
    many = replace(toy_plan(config), samples={f"client {i}": (1, 1, 1) for i in range(50)})
    with RunDirectory.create(tmp_path / "run", config) as directory:
        directory.recorder().begin(many)
        other = replace(many, samples={f"client {i}": (2, 1, 1) for i in range(50)})
        with pytest.raises(RecordError, match=r"and 30 more"):
            directory.recorder().begin(other)


def test_rounds_are_not_thrown_away_by_a_plan_that_starts_elsewhere(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=4)
    before = results(path)
    with RunDirectory.open(path, write=True) as directory:
        for first in (0, 3, 6):
            with pytest.raises(RecordError, match=rf"cannot go on after round {first - 1}: it has checkpoints of"):
                directory.recorder().begin(toy_plan(toy_config(), first))
    assert results(path) == before
    with RunDirectory.open(path) as reader, pytest.raises(RecordError, match="opened for reading"):
        reader.recorder()


def test_damaged_or_missing_counts_per_class_are_left_out_with_a_warning(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=4)
    for wrong in ("{", "[]", '{"best": {}}'):
        (path / "classes.json").write_text(wrong)
        with pytest.warns(RecordWarning, match=r"classes.json is damaged: going on without counts per class"):
            assert read_run(path).classes == {}
    (path / "classes.json").unlink()
    with pytest.warns(RecordWarning, match=r"classes.json is missing: going on without counts per class"):
        assert read_run(path).classes == {}
    with pytest.warns(RecordWarning, match=r"classes.json is missing: going on without counts per class"):
        toy_run(path)


def test_a_checkpoint_that_may_not_be_read_is_not_taken_for_damaged(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=4)
    (path / "checkpoints" / "manifest-000004.json").chmod(0)
    with as_any_user(), RunDirectory.open(path) as directory, pytest.raises(RecordError, match="may not be read"):
        directory.latest()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_machine_has_a_name() -> None:
    here = machine(toy_config(device="cpu"))
    assert here["cpu"]
    assert here["gpu"] is None
    assert here["threads"] == 1


def test_a_null_setting_of_a_partition_is_a_setting_left_out() -> None:
    path, recorded = Path("run"), structure({}, Config)
    for partition in ("domain", {"name": "domain", "clients": None}):
        given = structure({"data": {"name": "digits-skew", "partition": partition}}, Config)
        runfile.check_config(path, recorded, given, "the one given")
    given = structure({"data": {"name": "digits-skew", "partition": {"name": "domain", "clients": 4}}}, Config)
    with pytest.raises(RecordError, match="clients: absent recorded, 4"):
        runfile.check_config(path, recorded, given, "the one given")
    with pytest.raises(RecordError, match='image_size: "auto" recorded, 32'):
        runfile.check_config(path, recorded, structure({"data": {"image_size": 32}}, Config), "this")


def test_what_a_run_says_about_itself_stays_as_it_was_begun(tmp_path: Path) -> None:
    arch = {"label": "mlp", "parameters": 9, "features": 4, "clients": list(CLIENTS)}
    about = {"architectures": [arch], "shows": {"kl": "how far apart"}, "decided": {"student": "mlp"}}
    path = tmp_path / "run"
    with RunDirectory.create(path, toy_config()) as directory:
        toy_rounds(toy_config(), [directory.recorder(about)], None, until=3)
    with RunDirectory.open(path, write=True) as directory:
        toy_rounds(toy_config(), [directory.recorder({"decided": {"student": "cnn4"}})], directory.latest())
    run = read_run(path)
    assert run.architectures == (Architecture("mlp", 9, 4, CLIENTS),)
    assert (run.shows, run.decided) == ({"kl": "how far apart"}, {"student": "mlp"})
    assert run.status == "finished"
    bare = read_run(toy_run(tmp_path / "bare", until=1))
    assert (bare.architectures, bare.shows, bare.decided) == ((), {}, {})
