"""What methods are made of: the slot, averages, leaves by type; and where a method can come from."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedprism.methods
from fedprism.config import Config, Named, structure
from fedprism.engines.client import Job, client_round, make_info, open_slot
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods import METHODS, find, leaves, make, named
from fedprism.methods.base import (
    Info,
    Me,
    Method,
    Now,
    Parts,
    State,
    Tensors,
    Upload,
    average,
    load,
    squared_distance,
)
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedprox import FedProx
from fedprism.models import Arch
from tests.helpers import loop_for

METHOD_FILES = Path(fedprism.methods.__file__).parent


@pytest.fixture
def me() -> Me:
    config = Config()
    return Me(nn.Linear(2, 1), config.train, make_info(config, ("a", "b"), 10, (3, 16, 16)))


# --- the slot --------------------------------------------------------------------------------------------------------


def test_keep_copies_and_refills_in_place(me: Me) -> None:
    source = torch.ones(3, requires_grad=True)
    me.keep("t", source)
    kept = me["t"]
    assert kept is not source
    assert not kept.requires_grad
    me.keep("t", torch.full((3,), 2.0))
    assert me["t"] is kept
    assert kept.tolist() == [2.0, 2.0, 2.0]
    assert source.tolist() == [1.0, 1.0, 1.0]


def test_keep_makes_room_for_another_shape_or_type(me: Me) -> None:
    me.keep("t", torch.ones(3))
    me.keep("t", torch.ones(1))
    assert me["t"].shape == (1,)
    me.keep("t", torch.ones(1, dtype=torch.int64))
    assert me["t"].dtype == torch.int64
    me.keep("t", {"a": torch.ones(2)})
    assert set(me["t"]) == {"a"}
    me.keep("t", torch.ones(2))
    assert me["t"].shape == (2,)


def test_keep_of_a_dict_refills_in_place(me: Me) -> None:
    source = {"a": torch.ones(2, requires_grad=True), "b": torch.zeros(1)}
    me.keep("d", source)
    kept = dict(me["d"])
    me.keep("d", {"a": torch.full((2,), 5.0), "b": torch.ones(1)})
    assert all(me["d"][name] is kept[name] for name in kept)
    assert not me["d"]["a"].requires_grad
    assert [me["d"]["a"].tolist(), me["d"]["b"].tolist()] == [[5.0, 5.0], [1.0]]
    assert source["a"].tolist() == [1.0, 1.0]
    me.keep("d", {"a": torch.ones(2)})
    assert set(me["d"]) == {"a"}


def test_keep_of_a_dict_does_not_stretch_what_it_is_given(me: Me) -> None:
    """A leaf of another shape is kept as it is, not spread over the old one."""
    me.keep("d", {"a": torch.zeros(3)})
    me.keep("d", {"a": torch.ones(1)})
    assert me["d"]["a"].tolist() == [1.0]


def test_freeze_keeps_a_copy_that_does_not_train(me: Me) -> None:
    linear = nn.Linear(2, 2)
    module = nn.Sequential(linear, nn.BatchNorm1d(2))
    me.freeze("teacher", module)
    frozen = me["teacher"]
    assert isinstance(frozen, nn.Module)
    assert frozen is not module
    assert not frozen.training
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(p.requires_grad for p in module.parameters())
    with torch.no_grad():
        linear.weight.fill_(3.0)
    assert frozen.state_dict()["0.weight"].ne(3.0).all()
    me.freeze("teacher", module, training=True)
    assert me["teacher"] is frozen
    assert frozen.training
    assert frozen.state_dict()["0.weight"].eq(3.0).all()


def test_freeze_takes_another_state(me: Me) -> None:
    module = nn.Linear(2, 1)
    me.freeze("other", module, {"weight": torch.full((1, 2), 7.0), "bias": torch.zeros(1)})
    x = torch.ones(1, 2)
    assert me["other"](x).item() == 14.0
    assert module(x).item() != 14.0
    me.freeze("other", module)
    assert torch.equal(me["other"](x), module(x))


def test_log_detaches_and_takes_means(me: Me) -> None:
    me.log("loss", torch.tensor([1.0, 3.0], requires_grad=True))
    me.log("loss", torch.tensor(6.0))
    assert [float(value) for value in me.logs["loss"]] == [2.0, 6.0]
    assert not any(value.requires_grad for value in me.logs["loss"])


def test_parameters_by_name(me: Me) -> None:
    assert set(me.parameters()) == {"weight", "bias"}
    assert set(me.parameters(["bias", "unknown"])) == {"bias"}


def test_noise_outside_of_a_pass_is_a_mistake(me: Me, tiny: Federation) -> None:
    with pytest.raises(FedprismError, match="'mask' was asked for outside of a pass"):
        me.draw("mask", 3)

    @dataclass(frozen=True)
    class Early(Method):
        """Draws before its pass: after the first client there is that one's noise in the slot."""

        def start(self, me: Me, now: Now) -> None:
            if now.client == "tinted":
                me.draw("mask", 3)

    config = structure({"model": {"name": "mlp"}, "train": {"rounds": 1}}, Config)
    loop = loop_for(Early(), config, tiny)
    slot = open_slot(Job(Early(), config, loop.info, tiny.clients["plain"], 0))
    client_round(Job(Early(), config, loop.info, tiny.clients["plain"], 0), None, loop.server, slot)
    with pytest.raises(FedprismError, match="'mask' was asked for outside of a pass"):
        client_round(Job(Early(), config, loop.info, tiny.clients["tinted"], 0), None, loop.server, slot)


# --- now and info ----------------------------------------------------------------------------------------------------


def now_of(**changes: Any) -> Now:
    config = Config()
    info = make_info(config, ("a", "b"), 10, (3, 16, 16))
    return replace(Now(0, 3, info, config.train, 0.05, "samples"), **changes)


def test_weights_of_an_average() -> None:
    uploads = [Upload("a", 1, {}), Upload("b", 3, {})]
    assert now_of().weights(uploads) == [0.25, 0.75]
    assert now_of(weighting="uniform").weights(uploads) == [0.5, 0.5]


def test_generators_are_keyed_by_round_client_and_purpose() -> None:
    def draw(now: Now, *purpose: str) -> float:
        return float(torch.rand(1, generator=now.rng(*purpose)))

    same = draw(now_of(client="a"), "mask")
    assert draw(now_of(client="a"), "mask") == same
    others = [
        draw(now_of(client="a"), "other"),
        draw(now_of(client="b"), "mask"),
        draw(now_of(), "mask"),
        draw(now_of(client="a", round=1), "mask"),
    ]
    assert len({same, *others}) == 5


def test_the_server_has_no_data() -> None:
    with pytest.raises(FedprismError, match="on the server, which has no data"):
        _ = now_of().local


def test_info_knows_whether_architectures_differ() -> None:
    archs = {"a": Arch("mlp", 10, (3, 16, 16)), "b": Arch("lenet-bn", 10, (3, 16, 16))}
    info = Info(("a", "b"), 10, archs, 0)
    assert info.mixed
    assert info.arch is archs["a"]
    assert not replace(info, archs=dict.fromkeys("ab", archs["b"])).mixed


# --- averages and states ---------------------------------------------------------------------------------------------


def test_average_by_hand() -> None:
    states: list[State] = [
        {"w": torch.tensor([4.0, 0.0, 8.0]), "seen": torch.tensor(3), "flag": torch.tensor([True, False])},
        {"w": torch.tensor([0.0, 8.0, 4.0]), "seen": torch.tensor(6), "flag": torch.tensor([False, False])},
    ]
    mean = average(states, [0.75, 0.25])
    assert mean["w"].tolist() == [3.0, 2.0, 7.0]
    assert mean["seen"].dtype == torch.int64
    assert mean["seen"].item() == 4  # 3.75 rounded
    assert mean["flag"].tolist() == [True, False]
    assert mean["flag"].dtype == torch.bool
    assert states[0]["w"].tolist() == [4.0, 0.0, 8.0]
    assert average([], []) == {}


def test_average_of_large_counters_is_exact() -> None:
    """float32 holds no odd number above 2**24."""
    count = torch.tensor(2**30 + 1)
    assert average([{"n": count}, {"n": count}], [0.5, 0.5])["n"].item() == 2**30 + 1


def test_average_sums_in_the_order_given() -> None:
    """1e8 + 1 is 1e8 in float32, so the order shows: only the caller may choose it, and it is the order of clients."""
    big, small, minus = ({"w": torch.tensor([w])} for w in (1e8, 1.0, -1e8))
    assert average([big, small, minus], [1.0, 1.0, 1.0])["w"].item() == 0.0
    assert average([big, minus, small], [1.0, 1.0, 1.0])["w"].item() == 1.0


def test_average_needs_a_weight_for_each() -> None:
    with pytest.raises(ValueError):
        average([{"w": torch.ones(1)}, {"w": torch.ones(1)}], [1.0])


def test_squared_distance_over_the_leaves_of_the_anchor() -> None:
    a = {"x": torch.tensor([1.0, 2.0]), "y": torch.tensor([3.0]), "z": torch.tensor([9.0])}
    assert squared_distance(a, {"x": torch.zeros(2), "y": torch.ones(1)}).item() == 1 + 4 + 4


def test_load_overwrites_what_it_is_given_in_place() -> None:
    model = nn.Linear(2, 1)
    weight, bias = model.weight.data_ptr(), model.bias.clone()
    load(model, {"weight": torch.full((1, 2), 5.0)})
    assert model.weight.tolist() == [[5.0, 5.0]]
    assert model.weight.data_ptr() == weight
    assert torch.equal(model.bias, bias)
    assert model.weight.requires_grad


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weigth": torch.ones(1, 2)}, r"'weigth' of shape \(1, 2\): it is not in this model"),
        ({"weight": torch.ones(2)}, r"'weight' of shape \(2,\): it is \(1, 2\) here"),
    ],
)
def test_load_names_what_does_not_fit(state: State, words: str) -> None:
    with pytest.raises(FedprismError, match=words):
        load(nn.Linear(2, 1), state)


def test_tensors_are_kept_but_not_trained() -> None:
    tensors = Tensors({"body.fc.weight": torch.ones(2), "n": torch.tensor(3)})
    assert list(tensors.parameters()) == []
    assert set(tensors.state_dict()) == {"body/fc/weight", "n"}
    assert set(tensors.tensors()) == {"body.fc.weight", "n"}
    assert tensors["body.fc.weight"] is tensors.tensors()["body.fc.weight"]


def test_an_empty_slot_of_a_user_method_has_its_class_name() -> None:
    class OfMyOwn(Method):
        pass

    assert OfMyOwn.id == "ofmyown"
    assert METHODS["fedavg"].id == "fedavg"
    assert OfMyOwn.id not in METHODS


# --- leaves ----------------------------------------------------------------------------------------------------------


def test_norm_layers_are_found_by_type() -> None:
    """A ResNet's `downsample.1` is a batch norm though nothing in its name says so."""
    model = Arch("resnet18", 10, (3, 32, 32)).model(0)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    hidden = [name for name in norms if "bn" not in name.rsplit(".", 1)[-1]]
    assert len(norms) == 20
    assert len(hidden) >= 3
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert set(leaves.norms(model)) == {f"{name}.{kind}" for name in norms for kind in kinds}
    assert set(leaves.statistics(model)) == {f"{name}.{kind}" for name in norms for kind in kinds[2:]}


def test_which_layers_count_as_norms() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(2), nn.InstanceNorm2d(2, affine=True), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.Linear(2, 2)
    )
    assert {name.split(".")[0] for name in leaves.norms(model)} == {"0", "1"}
    assert leaves.statistics(nn.BatchNorm1d(2)) == ("running_mean", "running_var", "num_batches_tracked")
    assert leaves.statistics(nn.BatchNorm1d(2, track_running_stats=False)) == ()


def test_parts_are_whole_names() -> None:
    model = Parts(body=nn.Linear(1, 1), body2=nn.Linear(1, 1), head=nn.Linear(1, 1))
    assert leaves.part(model, "body") == ("body.weight", "body.bias")
    assert leaves.part(model, "body", "head") == ("body.weight", "body.bias", "head.weight", "head.bias")
    assert leaves.part(model, "nothing") == ()
    assert leaves.everything(model) == tuple(model.state_dict())


def test_what_travels_under_each_policy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    names = leaves.everything(model)
    assert leaves.travelling(model, names, "shared") == names
    assert leaves.travelling(model, names, "local") == ("0.weight", "0.bias")
    assert leaves.travelling(model, names, "local-stats") == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert leaves.travelling(model, ("1.weight", "0.bias"), "local") == ("0.bias",)


# --- where a method comes from ---------------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass

from fedprism.config import setting
from fedprism.methods.base import Method


@dataclass(frozen=True)
class Pulled(Method):
    strength: float = setting(0.5, "how much", lambda v: v >= 0, "0 or more")


@dataclass(frozen=True)
class Other(Method):
    pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_registered_method_by_name() -> None:
    assert make(Named("fedprox", {"mu": 0.7})) == FedProx(mu=0.7)
    assert make(Named("fedavg")) == FedAvg()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Named("fedproxx"), "unknown method 'fedproxx'. Did you mean 'fedprox'"),
        (Named("FedAvg"), "Did you mean 'fedavg'"),
        (Named("fedrep", {"head_epoch": 3}), "'head_epoch'.* Did you mean 'head_epochs'"),
        (Named("fedprox", {"mu": -1.0}), r"method\.mu is -1\.0; expected 0 or more"),
        (Named("fedprox", {"mu": "much"}), "'much' is not a number"),
        (Named("fedrep", {"head_epochs": 1.5}), "1.5 is not a whole number"),
        (Named("fedproto", {"inference": "nearest"}), "'nearest'.*Known: head, prototype"),
    ],
)
def test_a_mistaken_name_or_hyper_parameter_is_named(given: Named, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(given)


def test_a_method_from_a_file(file: Path, tiny: Federation) -> None:
    method = make(Named(f"{file}:Pulled", {"strength": 2}))
    assert type(method).__name__ == "Pulled"
    assert vars(method) == {"strength": 2.0}
    assert method.id == "pulled"
    assert find(f"{file}:Pulled") is type(method), "a file is loaded once"
    config = structure({"model": {"name": "mlp"}, "train": {"rounds": 1}}, Config)
    assert loop_for(method, config, tiny).run([]) == "finished"


def test_a_method_from_a_file_is_checked_like_any_other(file: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'strength'"):
        make(Named(f"{file}:Pulled", {"strenght": 2}))
    with pytest.raises(ConfigError, match=r"strength is -1\.0; expected 0 or more"):
        make(Named(f"{file}:Pulled", {"strength": -1}))


def test_the_only_method_of_a_file_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text(OWN.split("@dataclass(frozen=True)\nclass Other")[0])
    assert type(make(Named(str(path)))).__name__ == "Pulled"


def test_a_file_that_does_not_serve(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file '.*nowhere\.py'"):
        make(Named(f"{tmp_path}/nowhere.py:Pulled"))
    with pytest.raises(ConfigError, match=r"holds the methods \['Other', 'Pulled'\], not 'Puled'"):
        make(Named(f"{file}:Puled"))
    with pytest.raises(ConfigError, match=r"write .*own\.py:CLASS"):
        make(Named(str(file)))
    with pytest.raises(ConfigError, match="not 'dataclass'"):
        make(Named(f"{file}:dataclass"))
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="holds the methods none"):
        make(Named(f"{tmp_path}/none.py:X"))


def test_an_error_in_a_file_is_its_own_and_can_be_repaired(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('half written')\n")
    with pytest.raises(RuntimeError, match="half written"):
        make(Named(f"{path}:Pulled"))
    path.write_text(OWN)
    assert type(make(Named(f"{path}:Pulled"))).__name__ == "Pulled"


@pytest.mark.parametrize("name", ["undecorated.py", "undecorated.py:Forgotten"])
def test_a_class_that_is_no_dataclass_is_refused(name: str, tmp_path: Path) -> None:
    """Its fields would silently be no hyper-parameters."""
    (tmp_path / "undecorated.py").write_text(
        "from fedprism.methods.base import Method\nclass Forgotten(Method):\n    mu: float = 0.5\n"
    )
    with pytest.raises(ConfigError, match="expected a frozen dataclass that derives from"):
        make(Named(f"{tmp_path}/{name}"))


def test_a_method_from_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed package would bring it."""
    (tmp_path / "tiny_plugin.py").write_text(OWN)
    info = tmp_path / "tiny_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[fedprism.methods]\npulled = tiny_plugin:Pulled\nwrong = tiny_plugin:setting\nfedavg = tiny_plugin:Other\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    method = make(Named("pulled", {"strength": 3.0}))
    assert (type(method).__module__, vars(method)) == ("tiny_plugin", {"strength": 3.0})
    with pytest.raises(ConfigError, match=r"entry point 'wrong' is .*expected a frozen dataclass"):
        make(Named("wrong"))
    assert make(Named("fedavg")) == FedAvg(), "a plug-in does not replace what is built in"
    with pytest.raises(ConfigError, match="unknown method 'puled'"):
        make(Named("puled"))


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_goes_into_a_configuration_and_back(name: str) -> None:
    method = METHODS[name]()
    assert named(method).name == name
    assert make(structure(named(method).plain(), Named)) == method


def test_a_method_of_a_file_goes_into_a_configuration_and_back(file: Path) -> None:
    method = make(Named(f"{file}:Pulled", {"strength": 2.5}))
    assert named(method) == Named(f"{file}:Pulled", {"strength": 2.5})
    assert make(named(method)) == method


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigError, match="method 'fedavg' is registered twice"):
        fedprism.methods.register(FedAvg)


# --- files stay short ------------------------------------------------------------------------------------------------


def code_lines(source: str, imports: bool = True) -> int:
    """Lines that are not blank, comment or docstring; nor of an import, if those do not count."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) and not imports:
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            skipped |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped)


def test_counting_lines_by_hand() -> None:
    source = '"""What\n\nfor."""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Short."""\n    return x\n'
    assert code_lines(source) == 5


@pytest.mark.parametrize(("file_name", "most"), [("fedavg.py", 25), ("fedbn.py", 25), ("fedrep.py", 40)])
def test_methods_are_short(file_name: str, most: int) -> None:
    assert code_lines((METHOD_FILES / file_name).read_text(encoding="utf-8")) <= most


@pytest.mark.parametrize("name", list(METHODS))
def test_no_method_is_longer_than_a_page_or_two(name: str) -> None:
    """One file a method, of at most 120 lines of code beside its imports."""
    file = METHOD_FILES / f"{name.replace('-', '_')}.py"
    assert METHODS[name].__module__ == f"fedprism.methods.{file.stem}"
    assert code_lines(file.read_text(encoding="utf-8"), imports=False) <= 120
