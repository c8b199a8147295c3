"""Clients of different architectures: given as a list, a map or in their folders; trained, counted, resumed, shown."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import fedprism as fp
from fedprism import api, explain
from fedprism.cli import app
from fedprism.config import Config, ModelConfig, Named, structure
from fedprism.engines.processes.engine import Processes
from fedprism.errors import ConfigError, DataError, RecordError
from fedprism.explain import Traffic
from fedprism.methods import METHODS, make, named
from fedprism.methods.base import Client, Context, Method, Net, State, Upload, UploadKind
from fedprism.methods.mixed import allowing
from fedprism.models import Arch, architectures
from fedprism.records import Protocol, RunDirectory, RunRecord, outcome, read_run
from fedprism.records.sealed import seal, unseal
from fedprism.report.html import page
from fedprism.report.models import models
from fedprism.round.client import Job, client_evaluate, client_round, make_info
from fedprism.round.engine import Result
from fedprism.round.events import Callback, RoundRecord, Snapshot
from fedprism.store.serialize import size
from tests.harness import CPU, by_method, loop_for, same, same_result

pytestmark = pytest.mark.full

# 16, 64 and 32 features of their own; a multilayer perceptron without batch norm, and two networks with it.
MLP, LENET, RESNET = {"name": "mlp", "hidden": [16]}, "lenet-bn", {"name": "resnet18", "width": 4}
SMALL: list[Any] = [MLP, LENET, RESNET]
ONE_HEAD: list[Any] = [MLP, LENET, {"name": "mlp", "hidden": [24]}]  # all call their last layer fc2
LG = {"name": "lg-fedavg", "warmup": 0}
DOCS = Path(__file__).parent.parent / "docs"


def config_of(method: str | Mapping[str, Any], per_client: Any = SMALL, **sections: Any) -> Config:
    config = structure({"method": method, "model": {"per_client": per_client}, **sections}, Config)
    return replace(config, method=named(make(config.method)))


def call(*arguments: Any) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def said(result: Any) -> str:
    return " ".join(result.output.split())


# --- three ways to say it --------------------------------------------------------------------------------------------


def test_a_list_and_a_map_are_the_same_run(tiny: fp.Federation, tmp_path: Path) -> None:
    ways = {"list": SMALL, "map": {"textured": RESNET, "plain": MLP, "tinted": LENET}}
    runs = {
        way: fp.train(tiny, "fedproto", {"per_client": given}, rounds=2, out=tmp_path / way)
        for way, given in ways.items()
    }
    assert len({(run.path / "metrics.jsonl").read_bytes() for run in runs.values()}) == 1
    archs = make_info(runs["list"].record.config, tiny.names, 10, tiny.shape).archs
    assert [arch.label for arch in archs.values()] == [
        "mlp (hidden [16])",
        "lenet-bn (features 16)",
        "resnet18 (width 4, features 16)",
    ]
    for run in runs.values():
        assert run.record.parameters == {client_id: arch.parameters for client_id, arch in archs.items()}
        assert len(set(run.record.parameters.values())) == 3


def test_a_list_that_is_shorter_than_the_clients_is_dealt_again(tiny: fp.Federation) -> None:
    archs = make_info(config_of("local", SMALL[:2]), tiny.names, 10, tiny.shape).archs
    assert archs["plain"] == archs["textured"] != archs["tinted"]


def write_sites(root: Path, tiny: fp.Federation, own: Mapping[str, str]) -> Path:
    """The images of some clients as folders of files, each with a model.yaml."""
    for client_id, text in own.items():
        data = tiny.clients[client_id].train
        for number, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
            file = root / client_id / f"digit {int(y)}" / f"{number:02d}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.ascontiguousarray(x.permute(1, 2, 0).numpy())).save(file)
        (root / client_id / "model.yaml").write_text(text, encoding="utf-8")
    return root


OWN = {"plain": "mlp\n", "textured": "name: resnet18\nwidth: 4\n", "tinted": "{name: mlp, hidden: [16]}"}
OWN_MAP = {
    "plain": "mlp",
    "textured": {"name": "resnet18", "width": 4},
    "tinted": {"name": "mlp", "hidden": [16]},
}


@pytest.fixture
def sites(tmp_path: Path, tiny: fp.Federation) -> Path:
    return write_sites(tmp_path / "sites", tiny, OWN)


def folder_config(root: Path, **sections: Any) -> Config:
    raw = {
        "data": {"name": f"folder:{root}"},
        "model": {"per_client": "folder"},
        "train": {"rounds": 2},
        "run": {"device": "cpu"},
    }
    return structure({**raw, **sections}, Config)


def test_clients_name_their_own_models(sites: Path, tmp_path: Path) -> None:
    """From Python: the run keeps a map, and needs neither the files nor the images any more."""
    data = fp.make_federation(f"folder:{sites}")
    run = fp.train(data, "fedproto", {"per_client": "folder"}, rounds=1, out=tmp_path / "run")
    assert run.record.config.model.per_client == OWN_MAP
    assert yaml.safe_load((run.path / "config.yaml").read_text())["model"]["per_client"] == OWN_MAP
    shutil.rmtree(sites)
    again = fp.load(run.path)
    for client_id, own in data.clients.items():
        assert again.models[client_id].predict(own.test.x).shape == (len(own.test),)
        assert again.models[client_id].info.archs[client_id].name == Named(**_named(OWN_MAP[client_id])).name


def _named(entry: Any) -> dict[str, Any]:
    return {"name": entry} if isinstance(entry, str) else {"name": entry["name"]}


def test_from_the_command_line_with_a_root(sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    Path("sites.yaml").write_text(
        f"data: {{name: 'folder:sites', root: {tmp_path}}}\nmodel: {{per_client: folder}}\n"
        "train: {rounds: 1}\nrun: {device: cpu}\n"
    )
    shown = call("run", "sites.yaml", "--print-config", "--method", "local")
    assert yaml.safe_load(shown.output)["model"]["per_client"] == "folder"  # a file to be edited
    result = call("compare", "sites.yaml", "--methods", "local,fedproto", "--out", "runs")
    assert result.exit_code == 0, result.output
    assert {read_run(f"runs/{name}-0").config.model.per_client["plain"] for name in ("local", "fedproto")} == {"mlp"}
    text = said(call("show", "runs/fedproto-0"))
    assert re.search(r"models client model parameters features .*plain mlp \(features 16\) [\d,]+ 16 ", text)
    assert "models client" not in said(call("show", "runs")), "the table of a comparison stays as it is"


def test_an_edited_model_is_another_configuration(sites: Path, tmp_path: Path) -> None:
    config, out = folder_config(sites), tmp_path / "runs"

    class Stop(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            if record.round == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fp.compare(config, ["local"], [0], "x", out=out, callbacks=[Stop()])
    (sites / "tinted" / "model.yaml").write_text("lenet-bn")
    with pytest.raises(RecordError, match=r'model\.per_client\.tinted: "?absent.*"lenet-bn" in the one given'):
        fp.compare(config, ["local"], [0], "x", out=out)
    assert fp.resume(out / "local-0").record.config.model.per_client == OWN_MAP  # as it was begun


def test_a_begun_run_goes_on_with_its_sites(sites: Path, tmp_path: Path) -> None:
    class Stop(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            if record.round == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fp.compare(folder_config(sites), ["local"], [0], "x", out=tmp_path / "runs", callbacks=[Stop()])
    shutil.copytree(sites / "plain", sites / "new")
    with pytest.raises(
        RecordError, match=r"begun with the clients plain, .*, but now 'new' is new\. Go on with the same"
    ):
        fp.resume(tmp_path / "runs" / "local-0")
    shutil.rmtree(sites / "new")
    (sites / "tinted").rename(sites / "toned")
    with pytest.raises(RecordError, match=r"now 'toned' is new, 'tinted' is gone"):
        fp.resume(tmp_path / "runs" / "local-0")
    (sites / "toned").rename(sites / "tinted")
    assert fp.resume(tmp_path / "runs" / "local-0").status == "finished"


def test_models_of_some_sites_and_of_other_partitions(sites: Path) -> None:
    some = list(OWN_MAP)[1::-1]
    config = folder_config(sites, data={"name": f"folder:{sites}", "domains": some})
    assert list(api.resolve(config).model.per_client.items()) == [(site, OWN_MAP[site]) for site in some]
    (sites / some[0] / "model.yaml").unlink()
    dirichlet = folder_config(sites, data={"name": f"folder:{sites}", "partition": "dirichlet"})
    with pytest.raises(ConfigError, match=r"data\.partition is 'dirichlet'; take domain"):
        api.resolve(dirichlet)


def test_a_site_that_is_dealt_to_several_clients_gives_them_its_model(sites: Path) -> None:
    config = folder_config(sites, data={"name": f"folder:{sites}", "partition": {"name": "domain", "clients": 6}})
    given = api.resolve(config).model.per_client
    assert given == {f"{site}-{n}": entry for n in (1, 2) for site, entry in OWN_MAP.items()}
    assert tuple(given) == fp.make_federation(f"folder:{sites}", clients=6).names
    train_test = sites.parent / "parts"
    for client_id in OWN:
        for part in ("train", "test"):
            shutil.copytree(sites / client_id, train_test / client_id / part, ignore=shutil.ignore_patterns("*.yaml"))
        shutil.copy(sites / client_id / "model.yaml", train_test / client_id)
    assert api.resolve(folder_config(train_test)).model.per_client == OWN_MAP
    assert len(fp.make_federation(f"folder:{train_test}").names) == 3


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        ({"plain": None, "tinted": None}, DataError, r"no model.yaml in plain, tinted\. Write one .*`resnet18`, or"),
        ({"tinted": "{name: mlp"}, DataError, "sites/tinted/model.yaml cannot be read as YAML"),
        ({"tinted": "[mlp]"}, DataError, r"tinted/model.yaml holds \['mlp'\]; expected a model's name, such as"),
        ({"tinted": ""}, DataError, "tinted/model.yaml is empty; expected"),
        ({"tinted": "width: 3"}, DataError, r"tinted/model.yaml holds \{'width': 3\}; expected"),
        ({"tinted": "mpl"}, ConfigError, "tinted/model.yaml: .*unknown model 'mpl'. Did you mean 'mlp'"),
        ({"tinted": "{name: mlp, hiden: [3]}"}, ConfigError, "tinted/model.yaml: .*unknown key 'hiden'"),
        ({"tinted": "{name: mlp, hidden: three}"}, ConfigError, "tinted/model.yaml: "),
        ({"tinted": "{name: mlp, head_layers: 9}"}, ConfigError, "tinted/model.yaml: model.head_layers is 9"),
    ],
)
def test_mistakes_in_a_folder(sites: Path, own: dict[str, str | None], error: type[Exception], message: str) -> None:
    for client_id, text in own.items():
        (sites / client_id / "model.yaml").unlink()
        if text is not None:
            (sites / client_id / "model.yaml").write_text(text)
    with pytest.raises(error, match=message):
        api.resolve(folder_config(sites))


def test_only_folders_name_models(tiny: fp.Federation, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.name is 'digits-skew'; write a list of models, or a map"):
        fp.train(tiny, "local", {"per_client": "folder"}, out=tmp_path / "run")
    with pytest.raises(DataError, match="does not exist"):
        api.resolve(folder_config(tmp_path / "nowhere"))
    assert not (tmp_path / "run").exists()


# --- who may ---------------------------------------------------------------------------------------------------------


def test_the_methods_whose_papers_allow_it() -> None:
    able = ["local", "lg-fedavg (with warmup: 0)", "fedproto", "fml", "feddistill", "fedtgp", "fedkd", "fedsce"]
    assert sorted(allowing()) == sorted(able)


@pytest.mark.parametrize("name", [name for name, cls in METHODS.items() if not cls().mixed])
def test_a_method_that_does_not_allow_it_is_refused(name: str, tiny: fp.Federation, tmp_path: Path) -> None:
    able = re.escape(", ".join(allowing()))
    with pytest.raises(ConfigError, match=rf"^{name} needs one architecture .* gives 3: .* different ones: {able}\.$"):
        fp.train(tiny, name, {"per_client": SMALL}, rounds=1, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_what_is_recommended_is_allowed() -> None:
    for text in allowing():
        name, _, needed = text.removesuffix(")").partition(" (with ")
        assert make(Named(name, yaml.safe_load(f"{{{needed}}}"))).mixed
    assert len(allowing()) == sum(cls(**cls.mixed_with).mixed for _, cls in METHODS.items())


def test_a_comparison_is_refused_before_it_trains(tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(
        "data: {partition: {name: domain, clients: 2}, samples: 20}\nmodel: {per_client: [mlp, lenet-bn]}\n"
        "train: {rounds: 1}\nrun: {device: cpu}\n"
    )
    result = call("compare", file, "--methods", "local,fedavg,fedios,fedproto,ditto", "--out", tmp_path / "runs")
    assert result.exit_code == 2
    assert "error: fedavg, fedios and ditto need one architecture for all clients" in said(result)
    assert not (tmp_path / "runs").exists()
    assert call("compare", file, "--methods", "local,fedproto", "--out", tmp_path / "runs").exit_code == 0


# --- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "per_client"),
    [("local", SMALL), ("fedproto", SMALL), (LG, ONE_HEAD), ("fedsce", SMALL)],
    ids=["local", "fedproto", "lg-fedavg", "fedsce"],
)
def test_resumed_is_the_run_never_stopped(
    method: Any, per_client: list[Any], tiny: fp.Federation, tmp_path: Path
) -> None:
    """Stopped between checkpoints, with a third of the clients idle in every round."""
    made = make(structure(method, Named))
    settings = ["clients.participation=0.67", "run.checkpoint_every=2", "clients.dropout=0.1"]

    class Stop(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            if record.round == 3:
                raise KeyboardInterrupt

    def train(out: str, *callbacks: Callback) -> fp.Run:
        given = {"per_client": per_client}
        return fp.train(tiny, made, given, 5, out=tmp_path / out, settings=settings, callbacks=callbacks)

    straight = train("straight")
    with pytest.raises(KeyboardInterrupt):
        train("stopped", Stop())
    resumed = fp.resume(tmp_path / "stopped")
    assert resumed.status == straight.status == "finished"
    for name in ("metrics.jsonl", "classes.json"):
        assert (resumed.path / name).read_bytes() == (straight.path / name).read_bytes()
    with RunDirectory.open(resumed.path) as a, RunDirectory.open(straight.path) as b:
        one, other = a.latest(), b.latest()
    assert one is not None
    assert other is not None
    assert same(one.server, other.server)
    assert all(same(one.clients[client_id], other.clients[client_id]) for client_id in tiny.names)
    shapes = {client_id: {n: t.shape for n, t in (one.clients[client_id] or {}).items()} for client_id in tiny.names}
    assert shapes["plain"] != shapes["tinted"] != shapes["textured"]


@pytest.mark.parametrize("method", ["local", "fedproto", LG], ids=str)
def test_each_model_predicts_what_the_table_says(method: Any, tiny: fp.Federation, tmp_path: Path) -> None:
    made, per_client = make(structure(method, Named)), ONE_HEAD if method is LG else SMALL
    run = fp.train(tiny, made, {"per_client": per_client}, rounds=3, out=tmp_path / "run")
    figures = outcome(run.record, Protocol())
    for name, data in tiny.clients.items():
        guess = torch.as_tensor(run.models[name].predict(data.test.x))
        assert float((guess == data.test.y).float().mean()) == pytest.approx(figures.accuracy[name], abs=1e-6)
        shares = run.models[name].probabilities(data.test.x.permute(0, 2, 3, 1).numpy()[:4])
        np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
    counts = {sum(p.numel() for p in run.models[name].module.parameters()) for name in tiny.names}
    assert counts == set(run.record.parameters.values())
    assert len(counts) == 3


@dataclass(frozen=True)
class Whole(Method):
    """Every client sends its whole model, whatever it is, and the server counts them."""

    id = "whole"

    @property
    def mixed(self) -> bool:
        return True

    def shared(self, model: Net, ctx: Context) -> Sequence[str]:
        return ()

    def server(self, model: Net, ctx: Context) -> State:
        return {"seen": torch.zeros(len(ctx.info.clients))}

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        return {"hello": torch.zeros(ctx.info.arch_of(client_id or "").width)}

    def receive(self, client: Client, ctx: Context) -> None:
        assert len(ctx.download["hello"]) == ctx.info.archs[ctx.client_id or ""].width

    def uploads(self, model: Net, ctx: Context) -> Mapping[str, UploadKind]:
        return dict.fromkeys((name for name, _ in model.named_parameters()), "weights")

    def upload(self, client: Client, ctx: Context) -> State:
        return client.parameters()

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        return {"seen": server["seen"] + len(uploads)}


def test_bytes_are_those_of_each_client(tiny: fp.Federation) -> None:
    config = config_of("local", train={"rounds": 1})
    config = replace(config, model=replace(config.model, features="own"))
    loop = loop_for(Whole(), config, tiny)
    record, _ = loop.one_round(0)
    archs = loop.info.archs
    assert [arch.width for arch in archs.values()] == [16, 64, 32]
    assert record.down == {client_id: 4 * arch.width for client_id, arch in archs.items()}
    assert record.up == {client_id: 4 * arch.parameters for client_id, arch in archs.items()}
    counted = explain.traffic(Whole(), config.model, classes=10, size=16, rounds=30)
    assert [each.arch for each in counted] == list(archs.values())
    assert {each.first.up for each in counted} == set(record.up.values())


def test_bytes_by_hand(tiny: fp.Federation) -> None:
    def sent(method: Any, per_client: list[Any] = SMALL) -> set[tuple[int, int]]:
        config = config_of(method, per_client, train={"rounds": 2})
        record, _ = loop_for(make(config.method), config, tiny).one_round(1)
        return {(record.down[client_id], record.up[client_id]) for client_id in tiny.names}

    assert sent("local") == {(0, 0)}
    assert sent("fedproto") == {(4 * (10 * 16 + 10),) * 2}
    head = 4 * (10 * 16 + 10)
    body = 4 * (768 * 16 + 16)
    assert sent(LG, ONE_HEAD) == {(head, head)}
    assert sent("fedsce") == {(body + head, body + head + 8)}  # the smallest, and two distances


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedproto", "fedsce"])
def test_a_fresh_process_gives_the_same_bits(method: str, tiny: fp.Federation) -> None:
    """A client that has not the server's architecture, in a worker that has just started."""
    config = replace(config_of(method, train={"rounds": 3}), data=tiny.data)
    loop = loop_for(make(config.method), config, tiny)
    loop.one_round(0)
    assert loop.info.archs["textured"] != loop.info.arch
    requests = loop.requests(["textured"], loop.context(1))
    ((_, here),) = loop.engine.train(1, requests)
    processes = Processes(loop.method, config, loop.info, tiny, CPU)
    ((_, there),) = processes.train(1, requests)
    processes.close()
    assert same_result(here, there)


def test_who_comes_later_has_the_servers_architecture(tiny: fp.Federation) -> None:
    config = config_of("fedproto", train={"rounds": 2}, evaluate={"moments": ["adapted"]})
    loop = loop_for(make(config.method), config, tiny)
    loop.one_round(0)
    info, data = replace(loop.info, later=("new",)), replace(tiny.clients["textured"], name="new")
    assert info.arch_of("new") == info.archs["plain"] != info.archs["textured"]
    down = loop.method.send(loop.server, None, loop.context(1))
    job = Job(loop.method, config, info, data, 1)
    result = client_round(job, None, down)
    assert isinstance(result, Result)
    assert result.state.keys() == (loop.states["plain"] or {}).keys()
    assert client_evaluate(job, None, down)["adapted"]["test"].total == len(data.test)
    chosen = replace(info, archs={**info.archs, "new": info.archs["tinted"]})  # or one of its own
    result = client_round(replace(job, info=chosen), None, down)
    assert isinstance(result, Result)
    assert result.state.keys() == (loop.states["tinted"] or {}).keys()


@pytest.mark.parametrize("method", ["local", "fedproto", "fedsce"])
def test_who_comes_later_with_a_model_of_its_own(method: str, tiny: fp.Federation) -> None:
    """It changes nothing for the others: FedSCE's auxiliary model is that of the set-up."""
    config = replace(config_of(method, train={"rounds": 2}), data=tiny.data)
    loop = loop_for(make(config.method), config, tiny)
    loop.one_round(0)
    own = Arch("mlp", tiny.classes, tiny.shape, settings=(("hidden", (4,)),), features=loop.info.arch.width)
    info = replace(loop.info, later=("new",), archs={**loop.info.archs, "new": own})
    for client_id, state in (("new", None), ("plain", loop.states["plain"])):
        data = replace(tiny.clients["plain"], name=client_id)
        job = Job(loop.method, config, info, data, 1)
        down = loop.method.send(loop.server, client_id if state else None, loop.context(1))
        result = client_round(job, state, down)
        assert isinstance(result, Result)
        assert any(tensor.shape[:1] == (4,) for tensor in result.state.values()) == (client_id == "new")
        if client_id != "new":
            assert same_result(result, client_round(replace(job, info=loop.info), state, down))


def test_sites_whose_names_are_numbers() -> None:
    """YAML reads them as numbers."""
    model = structure({"per_client": {1: "mlp", 2: "lenet-bn"}}, ModelConfig)
    archs = architectures(model, ("1", "2"), 10, (3, 16, 16))
    assert [arch.name for arch in archs.values()] == ["mlp", "lenet-bn"]


def test_a_changed_architecture_is_refused(tiny: fp.Federation, tmp_path: Path) -> None:
    class Stop(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            if record.round == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fp.train(tiny, "local", {"per_client": SMALL}, rounds=3, out=tmp_path / "run", callbacks=[Stop()])
    file = tmp_path / "run" / "config.yaml"
    begun = file.read_text()
    file.write_text(begun.replace("width: 4", "width: 8"))
    with pytest.raises(RecordError, match=r'model\.per_client: .*"width": 4.* recorded, .*"width": 8'):
        fp.resume(tmp_path / "run")
    file.write_text(begun)
    assert fp.resume(tmp_path / "run").status == "finished"


# --- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_method())
def test_nothing_needs_to_be_trained_to_count_bytes(name: str, tiny: fp.Federation) -> None:
    """The rounds of `explain` against real ones: trained, on other images, and twice in the last round."""
    two = replace(tiny, clients={client_id: tiny.clients[client_id] for client_id in ("plain", "tinted")})
    method = METHODS[name]() if name != "lg-fedavg" else fp.LGFedAvg(warmup=1)
    (counted,) = explain.traffic(method, ModelConfig("lenet-bn"), classes=10, size=16, rounds=3)
    config = structure({"train": {"rounds": 3}, "evaluate": {"moments": []}}, Config)
    loop = loop_for(method, config, two)
    first, _, last = (loop.one_round(round)[0] for round in (0, 2, 2))
    if type(method).encode is not Method.encode:  # what is sent of an update depends on what was learnt
        student = size(loop.info.arch.model(0).state_dict())
        assert (counted.first, counted.last) == (Traffic(student, student), Traffic(student + 8, student))
        assert first.down["plain"] == student
        assert student / 10 < min(first.up["plain"], last.down["plain"], last.up["plain"])
        assert max(first.up["plain"], last.down["plain"], last.up["plain"]) < student
        return
    assert (first.down["plain"], first.up["plain"]) == (counted.first.down, counted.first.up)
    assert (last.down["plain"], last.up["plain"]) == (counted.last.down, counted.last.up)


def test_a_method_of_ones_own_is_trained_to_count_bytes() -> None:
    """What it sends may depend on what was learnt."""
    batches: list[int] = []

    @dataclass(frozen=True)
    class Own(Method):
        def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
            batches.append(len(x))
            return super().loss(client, x, y)

    (counted,) = explain.traffic(Own(), ModelConfig("mlp"), classes=10, size=8, rounds=5)
    assert batches == [10] * 6  # two clients, three rounds
    assert counted.first.up == counted.last.down == 4 * counted.arch.parameters


@pytest.mark.parametrize("models", ["mlp", "mlp,lenet-bn"])
def test_explain_says_where_bytes_are_a_bound(models: str) -> None:
    """Nothing was learnt, so nothing is known of what compression will leave."""
    text, plain = (said(call("explain", name, "--model", models, "--image-size", "16")) for name in ("fedkd", "fml"))
    assert "bytes at most those below: what is sent is compressed, and how far depends on what was learnt" in text
    assert "at most" not in plain
    model = structure({"per_client": models.split(",")}, ModelConfig)
    archs = architectures(model, ("a", "b")[: len(model.per_client)], 10, (3, 16, 16))
    sent = min(size(arch.model(0).state_dict()) for arch in archs.values())
    assert f"{sent:,}" in text
    assert f"{sent + 8:,}" in text  # an update, and the round since which it counts


def test_a_method_of_ones_own_is_counted_as_compressed() -> None:
    @dataclass(frozen=True)
    class Half(Method):
        def encode(self, state: State, ctx: Context) -> State:
            return {name: tensor.half() for name, tensor in state.items()}

        def decode(self, state: State, ctx: Context) -> State:
            return {name: tensor.float() for name, tensor in state.items()}

    (counted,) = explain.traffic(Half(), ModelConfig("mlp"), classes=10, size=8, rounds=5)
    assert counted.first == counted.last == Traffic(*[2 * counted.arch.parameters] * 2)
    assert "counted on noise" in explain.facts_of(Half())["bytes"]


def test_explain_of_several_models() -> None:
    models = "[mlp, {name: resnet18, width: 4}, {name: mlp, hidden: [16]}, mlp]"
    text = said(call("explain", "fedproto", "--model", models, "--image-size", "16"))
    assert "Per client and round, 10 classes, images 3x16x16, 4 clients:" in text
    header, *rows = re.findall(r"model parameters features bytes down bytes up|\S+ \([^)]*\) [\d, ]+", text)
    assert header.startswith("model")
    archs = make_info(config_of("fedproto", yaml.safe_load(models)), "abcd", 10, (3, 16, 16)).archs
    assert [row.strip() for row in rows] == [
        f"{arch.label} {arch.parameters:,} 16 680 680" for arch in dict.fromkeys(archs.values())
    ]
    assert len(rows) == 3
    assert said(call("explain", "fedproto", "--model", "mlp,lenet-bn")).endswith("64 2,600 2,600")


def test_explain_takes_settings_of_the_method() -> None:
    models = "[{name: mlp, hidden: [16]}, {name: mlp, hidden: [24]}]"
    refused = call("explain", "lg-fedavg", "--model", models)
    assert refused.exit_code == 2
    assert "lg-fedavg needs one architecture for all clients" in said(refused)
    assert "with warmup: 0 they may differ" in said(call("explain", "lg-fedavg"))
    allowed = call("explain", "lg-fedavg", "--model", models, "--set", "method.warmup=0", "--image-size", "16")
    assert allowed.exit_code == 0, allowed.output
    assert re.search(r"mlp \(hidden \[24\], features 16\) [\d,]+ 16 680 680$", said(allowed))
    for wrong in ("train.rounds=3", "method.warmpu=0"):
        assert call("explain", "lg-fedavg", "--set", wrong).exit_code == 2


@pytest.mark.parametrize(
    "given", ["", "3", "[", "{name: mlp}, lenet-bn", "{per_client: {a: mlp}}", "{width: 3}", "mpl"]
)
def test_explain_of_no_model(given: str) -> None:
    result = call("explain", "local", "--model", given)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output


# --- what people see -------------------------------------------------------------------------------------------------


def test_the_page_names_every_clients_model(tiny: fp.Federation, tmp_path: Path) -> None:
    mixed = fp.train(tiny, "local", {"per_client": SMALL}, rounds=1, out=tmp_path / "mixed").record
    other = fp.train(tiny, "fedbn", "lenet-bn", rounds=1, out=tmp_path / "fedbn").record
    text = page([mixed])
    archs = make_info(mixed.config, tiny.names, 10, tiny.shape).archs
    for client_id, arch in archs.items():
        row = f'<tr><th scope="row">{client_id}</th><td>{arch.label}</td><td>{arch.parameters:,}</td><td>16</td></tr>'
        assert row in text
    assert f"<dt>model</dt><dd>{'; '.join(arch.label for arch in archs.values())}</dd>" in text
    assert "What each client trains" not in page([other])
    assert "<dt>model</dt><dd>lenet-bn</dd>" in page([other])
    both = page([mixed, other])
    assert "<h3>local</h3>" in both
    assert "lenet-bn for all clients: 47,754 parameters, 64 features." in both


def test_many_clients_have_a_row_per_architecture() -> None:
    config, clients = config_of("local"), [f"c{n}" for n in range(20)]
    info = {"status": "finished", "clients": clients, "classes": ["a", "b"], "shape": [3, 16, 16]}
    archs = make_info(config, clients, 2, (3, 16, 16)).archs
    info["architectures"] = [
        {
            "label": arch.label,
            "parameters": arch.parameters,
            "features": arch.width,
            "clients": [client_id for client_id in clients if archs[client_id] == arch],
        }
        for arch in dict.fromkeys(archs.values())
    ]
    record = RunRecord(config, info, rounds=())
    grid = models(record)
    assert grid is not None
    assert grid.header == ("model", "clients", "parameters", "features")
    assert [(row[0].text, row[1].text) for row in grid.rows] == [
        ("mlp (hidden [16])", "7"),
        ("lenet-bn (features 16)", "7"),
        ("resnet18 (width 4, features 16)", "6"),
    ]
    assert models(replace(record, info={"status": "running"})) is None  # before the first round
    gone = replace(config, model=ModelConfig(per_client=["mlp", "of-another-version"]))
    assert models(replace(record, config=gone)) == grid  # it is recorded, whatever this version knows


def test_the_page_of_the_documentation_lists_who_may() -> None:
    text = (DOCS / "architectures.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`([\w-]+)`\]\(methods/[\w-]+\.md\) \| ([^|]+) \|", text, flags=re.MULTILINE))
    wanted = {
        name: "yes"
        if cls().mixed
        else "with " + ", ".join(f"`{key}: {value}`" for key, value in cls.mixed_with.items())
        if cls.mixed_with
        else "no"
        for name, cls in METHODS.items()
    }
    assert rows == wanted


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is written, and what it says that `explain` and a refused comparison print is printed."""
    text = (DOCS / "architectures.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    program = next(code for kind, code in blocks if kind == "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "architectures.md", "exec"), {})
    Path("sites.yaml").write_text(next(c for kind, c in blocks if kind == "yaml" and "rounds: 20" in c))
    shown = {code: after for (_, code), (_, after) in pairwise(blocks) if code.startswith("fedprism ")}
    explained, refused = (next(code for code in shown if word in code) for word in ("explain", "fedavg"))
    assert said(call(*shlex.split(explained)[1:])).endswith(" ".join(shown[explained].split()))
    assert said(call(*shlex.split(refused)[1:])) == " ".join(shown[refused].split())
    assert not Path("runs").exists()


def test_the_auxiliary_model_is_named(tiny: fp.Federation, tmp_path: Path) -> None:
    """What `smallest` chose, by the command, in the run and on its page."""
    smallest = "lenet-bn, 47,754 parameters"
    assert f"auxiliary model {smallest}" in said(
        call("explain", "fedsce", "--model", "mlp,lenet-bn", "--image-size", "16")
    )
    assert "auxiliary model lenet" not in said(call("explain", "fedsce", "--set", "method.without=[dml]"))
    run = fp.train(tiny, "fedsce", ["mlp", "lenet-bn"], rounds=1, out=tmp_path / "run")
    assert f"auxiliary model: {smallest}" in said(call("show", str(run.path)))
    assert f"<dt>fedsce: auxiliary model</dt><dd>{smallest}</dd>" in page([run.record])
    chosen = fp.train(tiny, {"name": "fedsce", "auxiliary": "cnn4"}, "mlp", rounds=1, out=tmp_path / "cnn4")
    assert "auxiliary model: cnn4, 92,106 parameters" in said(call("show", str(chosen.path)))


def test_a_run_of_another_version_is_shown_with_what_its_method_decided(tiny: fp.Federation, tmp_path: Path) -> None:
    """Reports read records: a setting that this version does not know does not matter to them."""
    run = fp.train(tiny, "fedsce", ["mlp", "lenet-bn"], rounds=1, out=tmp_path / "run")
    file = run.path / "run.json"
    info = unseal(file.read_bytes())
    info["config"]["method"]["gone"] = 1
    file.write_bytes(seal(info))
    shown = call("show", str(run.path), "--report", str(tmp_path / "page.html"))
    assert shown.exit_code == 0, shown.output
    assert "auxiliary model: lenet-bn, 47,754 parameters" in said(shown)
    assert (tmp_path / "page.html").exists()
