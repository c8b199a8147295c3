"""The Python interface: train, load, resume, compare, and the models that come out."""

from __future__ import annotations

import ast
import csv
import gc
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedprism as fp
from fedprism.config import Config, Normal, TrainConfig, read, structure
from fedprism.data.images import normalise
from fedprism.methods import METHODS
from fedprism.methods.base import Method, Pass
from fedprism.planning import directory_of, resolve
from fedprism.records import Protocol, RunDirectory, outcome, read_run
from fedprism.round.client import make_info
from fedprism.round.events import Snapshot

pytestmark = pytest.mark.full

SMALL = ["train.epochs=1", "run.checkpoint_every=2"]


@pytest.fixture(scope="module")
def three() -> fp.Federation:
    return fp.make_federation("digits-skew", clients=3, seed=0, samples=40)


@pytest.fixture(scope="module")
def run(three: fp.Federation, tmp_path_factory: pytest.TempPathFactory) -> fp.Run:
    out = tmp_path_factory.mktemp("runs") / "fedbn"
    return fp.train(three, method=fp.FedBN(), model="lenet-bn", rounds=6, out=out, settings=SMALL)


def test_the_models_predict_what_the_table_says(run: fp.Run, three: fp.Federation) -> None:
    """Accuracy of `run.models` on the test images is the table's, client by client: same round, same moment."""
    figures = outcome(run.record, Protocol())
    for name, data in three.clients.items():
        guess = run.models[name].predict(data.test.x)
        accuracy = float((torch.as_tensor(guess) == data.test.y).float().mean())
        assert accuracy == pytest.approx(figures.accuracy[name], abs=1e-6)


@pytest.mark.slow
def test_adapted_models_predict_what_the_table_says(three: fp.Federation, tmp_path: Path) -> None:
    """Of methods that are tested after an adaptation, too; with the federation at hand and with it made again."""
    adapting = [name for name, method in METHODS.items() if method.moment == "adapted"]
    assert set(adapting) == {"finetune", "fedbabu", "per-fedavg"}
    for method in adapting:
        settings = ["train.schedule=cosine"]  # which an adaptation does not follow
        run = fp.train(three, method, rounds=4, out=tmp_path / method, settings=settings)
        figures = outcome(run.record, Protocol())
        for models in (run.models, fp.load(run.path).models):
            for name, data in three.clients.items():
                guess = torch.as_tensor(models[name].predict(data.test.x))
                assert float((guess == data.test.y).float().mean()) == pytest.approx(figures.accuracy[name], abs=1e-6)
        adapted, received = run.models["plain"].module.state_dict(), run.models.snapshot.server
        assert any(not torch.equal(adapted[name], tensor) for name, tensor in received.items()), method


def test_adapted_models_need_the_images_of_the_run(three: fp.Federation, tmp_path: Path) -> None:
    arrays = {name: (data.train.x, data.train.y) for name, data in three.clients.items()}
    own = fp.Federation.from_arrays(arrays)
    path = fp.train(own, "finetune", rounds=1, out=tmp_path / "run").path
    with pytest.raises(fp.DataError, match=r"finetune adapts a model.*federation=\.\.\."):
        fp.load(path).models["plain"]
    with pytest.raises(fp.RecordError, match="'plain' are not the ones"):
        fp.load(path, federation=three).models["plain"]
    fewer = fp.Federation.from_arrays({"tinted": arrays["tinted"]})
    with pytest.raises(fp.RecordError, match="'plain' are not there"):
        fp.load(path, federation=fewer).models["plain"]
    assert fp.load(path, federation=own).models["plain"].predict(three.clients["plain"].test.x[:3]).shape == (3,)
    assert fp.load(path, method=fp.FedAvg()).models["plain"].predict(three.clients["plain"].test.x[:3]).shape == (3,)


def test_a_loaded_run_is_the_same_run(run: fp.Run, three: fp.Federation) -> None:
    again = fp.load(run.path)
    assert again.record == run.record
    images = three.clients["tinted"].test.x
    np.testing.assert_array_equal(
        again.models["tinted"].probabilities(images), run.models["tinted"].probabilities(images)
    )
    assert str(again.table()) == str(run.table())
    assert "tinted" in str(run.table())
    assert list(run.models) == ["plain", "tinted", "textured"]


def test_predict_takes_images_as_they_are_in_a_file(run: fp.Run, three: fp.Federation) -> None:
    model, x = run.models["plain"], three.clients["plain"].test.x[:7]
    expected = model.predict(x)
    assert expected.shape == (7,)
    np.testing.assert_array_equal(model.predict(x.permute(0, 2, 3, 1).numpy()), expected)
    np.testing.assert_allclose(model.probabilities(x).sum(1), 1, rtol=1e-5)
    assert model.probabilities(x[:0]).shape == (0, 10)
    with pytest.raises(fp.DataError, match="expected uint8"):
        model.predict(x.float())
    with pytest.raises(fp.DataError, match=r"expected \[n, 16, 16, 3\]"):
        model.predict(x[:, :, :8])
    with pytest.raises(KeyError, match="no client 'nobody'; there are plain"):
        run.models["nobody"]


def test_a_model_at_the_moment_trained_is_the_trained_one(three: fp.Federation) -> None:
    class Trained(fp.FedAvg):
        moment = "trained"

    method = Trained()
    info = make_info(Config(), three.names, three.classes, three.shape)
    module = method.build(info.arch, "plain", info, 0)
    state = {n: t + 1 if t.is_floating_point() else t for n, t in module.state_dict().items()}
    snapshot = Snapshot(1, module.state_dict(), {"plain": state, "tinted": None})
    x = three.clients["plain"].test.x
    model = fp.ClientModel.of(method, Config(), info, three.class_names, snapshot, "plain")
    method.build(info.arch, "plain", info, 0)
    assert all(torch.equal(t, state[n]) for n, t in model.module.state_dict().items())
    fresh = fp.ClientModel.of(method, Config(), info, three.class_names, snapshot, "tinted")
    assert torch.equal(torch.as_tensor(fresh.predict(x)), module.eval()(normalise(x, "half")).argmax(1))


def test_out_names_the_directory_and_is_not_overwritten(
    three: fp.Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = fp.train(three, "fedavg", "mlp", rounds=1)
    assert run.path == Path("runs/digits-skew/fedavg-0")
    with pytest.raises(fp.RecordError, match="exists and is not empty"):
        fp.train(three, "fedavg", "mlp", rounds=1)
    replaced = fp.train(three, "fedavg", "mlp", rounds=2, overwrite=True)
    assert len(replaced.record.rounds) == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("three years of work")
    with pytest.raises(fp.RecordError, match="not a run directory"):
        fp.train(three, "fedavg", "mlp", rounds=1, out="mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    kept_nowhere = fp.train(three, "fedavg", "mlp", rounds=1, out=False)
    assert tmp_path not in kept_nowhere.path.parents


def test_settings_are_checked(three: fp.Federation) -> None:
    with pytest.raises(fp.ConfigError, match="Did you mean 'rounds'"):
        fp.train(three, settings=["train.round=3"], out=False)
    with pytest.raises(fp.ConfigError, match="seed or the data"):
        fp.train(three, settings=["seed=3"], out=False)
    with pytest.raises(fp.ConfigError, match="Did you mean 'fedprox'"):
        fp.train(three, "fedproxx", out=False)
    with pytest.raises(fp.ConfigError, match="mew"):
        resolve(structure({"method": {"name": "fedprox", "mew": 1}}, Config))
    with pytest.raises(fp.ConfigError, match="engine"):
        resolve(structure({"run": {"engine": "warp"}}, Config))
    with pytest.raises(fp.ConfigError, match=r"run\.device is"):
        resolve(structure({"run": {"device": "abacus"}}, Config))
    with pytest.raises(fp.ConfigError, match="tf32"):
        resolve(structure({"run": {"device": "cpu", "precision": "tf32"}}, Config))
    with pytest.raises(fp.ConfigError, match="nothing else in braces"):
        directory_of(structure({"run": {"out": "runs/{day}"}}, Config), "x", None)


def test_resolved_configuration_holds_every_hyper_parameter_and_runs_again(tmp_path: Path) -> None:
    raw = {
        "method": "fedrep",
        "model": "mlp",
        "train": {"rounds": 1},
        "data": {"partition": {"name": "domain", "clients": 2}},
    }
    first = fp.run_config(structure(raw, Config), "x", out=tmp_path / "a")
    assert first.record.config.method.settings == {"head_epochs": 4, "body_epochs": 1}
    again = fp.run_config(read(tmp_path / "a" / "config.yaml"), "x", out=tmp_path / "b")
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == (tmp_path / "b" / "metrics.jsonl").read_bytes()
    assert again.record.config == first.record.config


def test_arrays_of_ones_own_train_and_resume_with_the_arrays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    site = lambda: (rng.integers(0, 256, (40, 1, 12, 12), dtype=np.uint8), rng.integers(0, 3, 40))  # noqa: E731
    mine = fp.Federation.from_arrays({"north": site(), "south": site()}, name="mine", class_names=("a", "b", "c"))
    run = fp.train(mine, fp.FedAvg(), "mlp", rounds=2, out=tmp_path / "run")
    assert run.models["north"].class_names == ("a", "b", "c")
    assert run.models["north"].predict(mine.clients["north"].test.x).shape == (8,)
    assert fp.resume(run.path, federation=mine).status == "finished"


class Interrupt(fp.Callback):
    def round(self, record: object, snapshot: Snapshot) -> None:
        if snapshot.round == 3:
            raise KeyboardInterrupt


def test_an_interrupted_run_resumes_in_python(three: fp.Federation, tmp_path: Path) -> None:
    straight = fp.train(three, fp.Ditto(), "mlp", rounds=5, out=tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        fp.train(three, fp.Ditto(), "mlp", rounds=5, out=tmp_path / "stopped", callbacks=[Interrupt()])
    assert fp.load(tmp_path / "stopped").status == "interrupted"
    assert fp.resume(tmp_path / "stopped").status == "finished"
    assert (tmp_path / "stopped" / "metrics.jsonl").read_bytes() == (straight.path / "metrics.jsonl").read_bytes()


def test_compare_skips_finished_cells_and_resumes_begun_ones(tmp_path: Path) -> None:
    raw = {"model": "mlp", "train": {"rounds": 4}, "data": {"partition": {"name": "domain", "clients": 2}}}
    config = structure(raw, Config)
    runs = fp.compare(config, ["local", "fedavg"], [0, 1], "x", out=tmp_path / "a")
    assert [(run.method, run.seed) for run in runs] == [("local", 0), ("local", 1), ("fedavg", 0), ("fedavg", 1)]
    with pytest.raises(KeyboardInterrupt):
        fp.compare(config, ["local", "fedavg"], [0, 1], "x", out=tmp_path / "b", callbacks=[Interrupt()])
    fp.compare(config, ["local", "fedavg"], [0, 1], "x", out=tmp_path / "b")
    for run in runs:
        assert (tmp_path / "b" / run.path.name / "metrics.jsonl").read_bytes() == (
            run.path / "metrics.jsonl"
        ).read_bytes()
    started = {run.path: fp.load(run.path).record.info["started"] for run in runs}
    again = fp.compare(config, ["local", "fedavg"], [0, 1], "x", out=tmp_path / "a")
    assert {run.path: run.record.info["started"] for run in again} == started
    longer = structure({**raw, "train": {"rounds": 5}}, Config)
    with pytest.raises(fp.RecordError, match=r"train\.rounds"):
        fp.compare(longer, ["local"], [0], "x", out=tmp_path / "a")


def test_a_comparison_writes_its_table_and_its_page(tmp_path: Path) -> None:
    raw = {"model": "mlp", "train": {"rounds": 1}, "data": {"partition": {"name": "domain", "clients": 2}}}
    config = structure(raw, Config)
    written = {"comparison.csv", "comparison.md", "report.html"}

    def files(folder: Path) -> set[str]:
        return {path.name for path in folder.iterdir() if path.is_file()}

    runs = fp.compare(config, ["local", "fedavg"], [0], "x", out=tmp_path / "a", summary=False)
    assert files(tmp_path / "a") == set()
    fp.compare(config, ["local", "fedavg"], [0], "x", out=tmp_path / "a", summary=tmp_path / "elsewhere")
    assert (files(tmp_path / "a"), files(tmp_path / "elsewhere")) == (set(), written)
    fp.compare(config, ["local", "fedavg"], [0], "x", out=tmp_path / "a", protocol="last,samples")
    assert files(tmp_path / "a") == written
    with (tmp_path / "a" / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["protocol"]) for row in rows] == [
        ("local", "own,last,samples"),
        ("fedavg", "own,last,samples"),
    ]
    assert (tmp_path / "a" / "comparison.md").read_text() == fp.table(runs, "last,samples").markdown()
    assert "images of plain" in (tmp_path / "a" / "report.html").read_text()


def test_a_comparison_trains_local_without_transforms(tmp_path: Path) -> None:
    """It uploads nothing that they could act on, and by itself is refused with them; a table with them has gains."""
    raw = {"model": "mlp", "train": {"rounds": 1}, "data": {"partition": {"name": "domain", "clients": 2}}}
    config = structure({**raw, "transforms": ["clip_norm"]}, Config)
    with pytest.raises(fp.ConfigError, match="clip_norm acts on weights, factors, but fedproto uploads prototype"):
        fp.compare(config, ["local", "fedproto"], [0], "x", out=tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    local, fedavg = fp.compare(config, ["local", "fedavg"], [0], "x", out=tmp_path / "a")
    assert (local.record.config.transforms, len(fedavg.record.config.transforms)) == ((), 1)
    assert "gain" in fp.table([local, fedavg]).rows[1].figures


def test_a_run_records_what_reports_need(three: fp.Federation, tmp_path: Path) -> None:
    models = ["mlp", {"name": "lenet-bn"}]
    run = fp.train(three, fp.FedSCE(), models, rounds=1, out=tmp_path / "run")
    record, archs = read_run(run.path), make_info(run.record.config, three.names, 10, three.shape).archs
    assert [(each.label, each.clients) for each in record.architectures] == [
        ("mlp", ("plain", "textured")),
        ("lenet-bn", ("tinted",)),
    ]
    for each in record.architectures:
        arch = archs[each.clients[0]]
        assert (each.label, each.parameters, each.features) == (arch.label, arch.parameters, arch.width)
    assert record.shows == dict(fp.FedSCE.shows)
    assert record.decided == {"auxiliary model": archs["tinted"].words}
    noise = fp.train(
        fp.make_federation("digits-skew", partition={"name": "noise", "clients": 2, "sigma": 5.0}, samples=20),
        rounds=1,
        out=tmp_path / "noise",
    )
    given = {"name": "noise", "clients": 2, "of": None, "sigma": 5.0}
    assert given.items() <= noise.record.info["partition"].items()


def test_a_comparison_goes_on_after_a_diverged_and_after_a_failed_cell(tmp_path: Path) -> None:
    raw = {
        "model": "mlp",
        "train": {"rounds": 2},
        "data": {"partition": {"name": "domain", "clients": 2}},
    }
    failed: list[str] = []
    config = structure({**raw, "server": {"lr": 0.5}}, Config)
    runs = fp.compare(
        config, ["local", "fedavg"], [0], "x", out=tmp_path / "a", on_error=lambda cell, e: failed.append(str(e))
    )
    assert [run.method for run in runs] == ["fedavg"]
    assert len(failed) == 1
    assert "local averages no weights" in failed[0]
    wild = structure({**raw, "train": {"rounds": 3, "optimizer": {"lr": 1e30}}}, Config)
    runs = fp.compare(wild, ["fedavg", "local"], [0], "x", out=tmp_path / "b")
    assert [run.status for run in runs] == ["diverged", "diverged"]
    with pytest.raises(fp.ConfigError, match="twice"):
        fp.compare(config, ["local", "local"], [0], "x", out=tmp_path / "c")


def test_a_method_of_a_session_trains_and_says_how_to_find_it_again(three: fp.Federation, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Mine(Method):
        strength: float = 0.5

    run = fp.train(three, Mine(strength=0.7), "mlp", rounds=2, out=tmp_path / "run")
    assert run.method == "mine"
    assert run.record.config.method.settings == {"strength": 0.7}
    x = three.clients["plain"].test.x
    expected = run.models["plain"].predict(x)
    np.testing.assert_array_equal(fp.load(run.path, method=Mine(0.7)).models["plain"].predict(x), expected)
    with pytest.raises(fp.ConfigError, match="Python session"):
        len(fp.load(run.path).models)
    with pytest.raises(fp.ConfigError, match="already made"):
        fp.train(three, fp.FedProx(), settings=["method.mu=3"], out=False)


@pytest.mark.parametrize(
    "method",
    [
        fp.FedSCE(auxiliary="mlp"),  # type: ignore[arg-type]
        fp.FedSCE(auxiliary={"name": "mlp"}),  # type: ignore[arg-type]
        {"name": "fedsce", "auxiliary": "mlp"},
    ],
)
def test_methods_and_models_as_a_configuration_has_them(method: Any, three: fp.Federation) -> None:
    run = fp.train(three, method, ["lenet-bn", "cnn4"], rounds=1, out=False)
    assert run.record.config.method.settings["auxiliary"] in ("mlp", {"name": "mlp"})
    assert fp.load(run.path).record.config == run.record.config
    names = [frozenset(run.models[name].module.state_dict()) for name in three.names]
    assert names[0] == names[2] != names[1]
    with pytest.raises(fp.ConfigError, match="neither"):
        fp.train(three, "local", 3, rounds=1, out=False)  # type: ignore[arg-type]


def test_a_run_is_replaced_only_when_its_successor_can_begin(three: fp.Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = fp.train(three, "fedavg", "mlp", rounds=1, out=out)
    with pytest.raises(fp.ConfigError, match="one architecture"):
        fp.train(three, "fedavg", {"per_client": ["mlp", "lenet-bn"]}, rounds=1, out=out, overwrite=True)
    with RunDirectory.open(out, write=True), pytest.raises(fp.RecordError, match="being written by another process"):
        fp.train(three, "fedavg", "mlp", rounds=1, out=out, overwrite=True)
    assert fp.load(out).record == first.record
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    fp.train(three, "fedavg", "mlp", rounds=2, out=out, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_mistake_leaves_no_directory_in_the_way(three: fp.Federation, tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Broken(Method):
        def predict(self, model: object, x: torch.Tensor, draw: object) -> torch.Tensor:
            raise RuntimeError("a bug")

    out = tmp_path / "run"
    with pytest.raises(fp.ConfigError, match="lenet-bn"):
        fp.train(three, "fedavg", "lenet", rounds=1, out=out)
    with pytest.raises(fp.ConfigError, match="batch norm"):
        fp.train(three, "fedavg", rounds=1, out=out, settings=["train.batch_size=1"])
    with pytest.raises(RuntimeError, match="a bug"):
        fp.train(three, Broken(), "mlp", rounds=1, out=out)
    assert not out.exists()
    assert fp.train(three, "fedavg", "mlp", rounds=1, out=out).status == "finished"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (fp.FedProx(mu=-1), "mu is -1"),
        (fp.FedProx(mu=float("nan")), "nan is not a finite number @ .*mu"),
        (fp.FedProx(mu="a"), "'a' is not a number"),  # type: ignore[arg-type]
        (fp.FedRep(head_epochs=0), "head_epochs is 0"),
        (fp.FedProto(inference="protoype"), "Did you mean 'prototype'"),  # type: ignore[arg-type]
    ],
)
def test_hyper_parameters_given_in_python_are_checked(three: fp.Federation, method: Method, words: str) -> None:
    with pytest.raises(fp.ConfigError, match=words):
        fp.train(three, method, "mlp", rounds=1, out=False)


def test_a_configuration_made_in_python_is_checked(tmp_path: Path) -> None:
    with pytest.raises(fp.ConfigError, match=r"train\.rounds is -1"):
        fp.run_config(Config(train=TrainConfig(rounds=-1)), "x", out=tmp_path / "run")
    with pytest.raises(fp.ConfigError, match="the test part must be in it"):
        resolve(structure({"evaluate": {"splits": ["validation"]}}, Config))
    assert resolve(structure({"evaluate": {"moments": []}}, Config)).evaluate.moments == ("received",)


def test_the_methods_own_moment_is_always_evaluated(three: fp.Federation) -> None:
    @dataclass(frozen=True)
    class Tuned(Method):
        moment = "adapted"

        def adapt(self, client: object, ctx: object) -> list[Pass]:
            return [Pass(self.loss, "tune")]

    run = fp.train(three, Tuned(), "mlp", rounds=1, out=False)
    assert outcome(run.record, Protocol()).moment == "adapted"


def test_other_images_are_not_resumed_on(three: fp.Federation, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    site = lambda: (rng.integers(0, 256, (40, 1, 12, 12), dtype=np.uint8), np.arange(40) % 3)  # noqa: E731
    mine = fp.Federation.from_arrays({"north": site(), "south": site()}, name="mine")
    other = fp.Federation.from_arrays({"north": site(), "south": site()}, name="mine")
    with pytest.raises(KeyboardInterrupt):
        fp.train(mine, "fedavg", "mlp", rounds=5, out=tmp_path / "run", callbacks=[Interrupt()])
    with pytest.raises(fp.RecordError, match=r"images\.north"):
        fp.resume(tmp_path / "run", federation=other)
    assert fp.resume(tmp_path / "run", federation=mine).status == "finished"


def test_two_cells_never_share_a_directory(tmp_path: Path) -> None:
    config = structure({"model": "mlp", "run": {"out": str(tmp_path / "same")}}, Config)
    with pytest.raises(fp.ConfigError, match="two runs of this comparison would be written to"):
        fp.compare(config, ["local", "fedavg"], [0], "x")


def test_a_run_that_is_kept_nowhere_is_gone_with_its_object(three: fp.Federation) -> None:
    run = fp.train(three, "fedavg", "mlp", rounds=1, out=False)
    path = run.path
    assert path.exists()
    del run
    gc.collect()
    assert not path.exists()


def test_one_table_of_several_runs(run: fp.Run, tmp_path: Path) -> None:
    text = fp.table([run]).csv()
    assert text.splitlines()[1].startswith("fedbn,0,finished,")
    assert "macro F1" in text.splitlines()[0]


def test_files_are_read_as_a_folder_of_images_is(run: fp.Run, three: fp.Federation, tmp_path: Path) -> None:
    x = three.clients["plain"].test.x[:3]
    for i, image in enumerate(x):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{i}.png")
    model = run.models["plain"]
    np.testing.assert_array_equal(model.predict_files(sorted(tmp_path.glob("*.png"))), model.predict(x))
    assert model.predict_files([]).shape == (0,)
    with pytest.raises(fp.DataError, match="cannot be read"):
        model.predict_files([tmp_path / "none.png"])


def test_what_is_no_federation_and_no_method(three: fp.Federation) -> None:
    with pytest.raises(fp.ConfigError, match=r"fp\.FedAvg\(\)"):
        fp.train(three, fp.FedAvg, out=False)  # type: ignore[arg-type]
    with pytest.raises(fp.ConfigError, match="needs a federation"):
        fp.train("digits-skew", out=False)  # type: ignore[arg-type]


def test_mistakes_in_a_method_are_named(three: fp.Federation) -> None:
    @dataclass(frozen=True)
    class Odd(Method):
        def shared(self, model: object, ctx: object) -> list[str]:
            return ["nope"]

    @dataclass(frozen=True)
    class Policy(Method):
        bn = "locl"

    with pytest.raises(fp.ConfigError, match=r"odd\.shared names nope"):
        fp.train(three, Odd(), "mlp", rounds=1, out=False)
    with pytest.raises(fp.ConfigError, match="Did you mean 'local'"):
        fp.train(three, Policy(), "mlp", rounds=1, out=False)


def test_everything_public_is_there() -> None:
    assert all(hasattr(fp, name) for name in fp.__all__)
    assert dir(fp) == fp.__all__
    assert callable(fp.make_federation)
    assert issubclass(fp.FedBN, Method)
    for name in ("Callback", "Client", "Context", "Pass", "Output", "Upload", "leaves"):
        assert name in fp.__all__
    for name in ("Nothing", "nothing", "fedbn"):
        with pytest.raises(AttributeError, match=name):
            getattr(fp, name)


def test_every_method_is_public() -> None:
    built_in = [cls for _, cls in METHODS.items() if cls.__module__.startswith("fedprism.")]
    assert len(built_in) >= 33
    for cls in built_in:
        assert getattr(fp, cls.__name__) is cls
        assert cls.__name__ in fp.__all__


def test_type_checkers_see_what_there_is() -> None:
    """The block for them names exactly the public names, each from the module that defines it."""
    (block,) = [node for node in ast.parse(Path(fp.__file__).read_text()).body if isinstance(node, ast.If)]
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name  # so that it counts as exported
            seen[alias.name] = getattr(import_module(node.module or ""), alias.name)
    assert sorted([*seen, "__version__"]) == fp.__all__
    assert all(getattr(fp, name) is value for name, value in seen.items())


def test_what_does_not_fit_is_refused_before_the_old_run_is_touched(three: fp.Federation, tmp_path: Path) -> None:
    old = fp.train(three, rounds=1, out=tmp_path / "keep")
    before = (old.path / "metrics.jsonl").read_bytes()
    grey = replace(three, data=replace(three.data, normalize=Normal((0.5,), (0.5,))))
    with pytest.raises(fp.ConfigError, match="has 1 channels, and these images have 3"):
        fp.train(grey, rounds=1, out=old.path, overwrite=True)
    assert (old.path / "metrics.jsonl").read_bytes() == before


def test_one_number_is_no_image(run: fp.Run) -> None:
    with pytest.raises(fp.DataError, match="expected"):
        next(iter(run.models.values())).predict(np.uint8(3))
    with pytest.raises(fp.DataError, match="For files use `predict_files`"):
        next(iter(run.models.values())).predict("photo.png")


def test_tokens_that_are_no_words_of_the_vocabulary_are_refused() -> None:
    length, words = 4, 9
    config = structure({"model": "fasttext"}, Config)
    info = make_info(config, ["a"], 2, (length, words))
    method = fp.FedAvg()
    first = method.build(info.arch, "a", info, 0).state_dict()
    model = fp.ClientModel.of(method, config, info, ("no", "yes"), Snapshot(0, first, {"a": None}), "a")
    text = np.array([[8, 1, 0, 0], [3, 2, 8, 0]])
    assert model.predict(text).shape == (2,)
    for wrong, reach in ((9, "0 to 9"), (-1, "-1 to 8")):
        with pytest.raises(fp.DataError, match=f"tokens reach from {reach}; expected 0 to 8"):
            model.predict(np.where(text == 1, wrong, text))
    with pytest.raises(fp.DataError, match=r"expected whole numbers \[n, 4\]"):
        model.predict(text[:, :3])
