"""What methods are made of: the client, averages, leaves by type; what they may not do; and where they come from."""

from __future__ import annotations

import ast
import io
import math
import tokenize
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedprism.methods
from fedprism import keys
from fedprism.config import Config, Named, structure
from fedprism.engines.cuda.rounds import finite_probe
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import ClientData, Federation, Split
from fedprism.methods import METHODS, find, leaves, make, named
from fedprism.methods.base import (
    Client,
    Context,
    Info,
    Method,
    Net,
    Parts,
    Pass,
    State,
    Tensors,
    Upload,
    average,
    load,
    squared_distance,
)
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedprox import FedProx
from fedprism.methods.states import not_finite
from fedprism.models import Arch
from fedprism.round.client import Job, client_round, make_info, open_slot
from fedprism.round.engine import Result
from tests.harness import client_models, cut, loop_for, models_of, same, same_result

METHOD_FILES = Path(fedprism.methods.__file__).parent


@pytest.fixture
def client() -> Client:
    config = Config()
    return Client(nn.Linear(2, 1), config.train, make_info(config, ("a", "b"), 10, (3, 16, 16)))


# --- the client ------------------------------------------------------------------------------------------------------


def test_keep_copies_and_refills_in_place(client: Client) -> None:
    source = torch.ones(3, requires_grad=True)
    client.keep("t", source)
    kept = client["t"]
    assert kept is not source
    assert not kept.requires_grad
    client.keep("t", torch.full((3,), 2.0))
    assert client["t"] is kept
    assert kept.tolist() == [2.0, 2.0, 2.0]
    assert source.tolist() == [1.0, 1.0, 1.0]


def test_keep_makes_room_for_another_shape_or_type(client: Client) -> None:
    client.keep("t", torch.ones(3))
    client.keep("t", torch.ones(1))
    assert client["t"].shape == (1,)
    client.keep("t", torch.ones(1, dtype=torch.int64))
    assert client["t"].dtype == torch.int64
    client.keep("t", {"a": torch.ones(2)})
    assert set(client["t"]) == {"a"}
    client.keep("t", torch.ones(2))
    assert client["t"].shape == (2,)


def test_keep_of_a_dict_refills_in_place(client: Client) -> None:
    source = {"a": torch.ones(2, requires_grad=True), "b": torch.zeros(1)}
    client.keep("d", source)
    kept = dict(client["d"])
    client.keep("d", {"a": torch.full((2,), 5.0), "b": torch.ones(1)})
    assert all(client["d"][name] is kept[name] for name in kept)
    assert not client["d"]["a"].requires_grad
    assert [client["d"]["a"].tolist(), client["d"]["b"].tolist()] == [[5.0, 5.0], [1.0]]
    assert source["a"].tolist() == [1.0, 1.0]
    client.keep("d", {"a": torch.ones(2)})
    assert set(client["d"]) == {"a"}


def test_keep_of_a_dict_does_not_stretch_what_it_is_given(client: Client) -> None:
    """A leaf of another shape is kept as it is, not spread over the old one."""
    client.keep("d", {"a": torch.zeros(3)})
    client.keep("d", {"a": torch.ones(1)})
    assert client["d"]["a"].tolist() == [1.0]


def test_keep_of_a_number_refills_in_place(client: Client) -> None:
    client.keep("n", 0.5)
    kept = client["n"]
    assert (kept.shape, kept.dtype, kept.item()) == ((), torch.get_default_dtype(), 0.5)
    client.keep("n", 2)
    assert client["n"] is kept
    assert kept.item() == 2.0


def test_freeze_keeps_a_copy_that_does_not_train(client: Client) -> None:
    linear = nn.Linear(2, 2)
    module = nn.Sequential(linear, nn.BatchNorm1d(2))
    client.freeze("teacher", module)
    frozen = client["teacher"]
    assert isinstance(frozen, nn.Module)
    assert frozen is not module
    assert not frozen.training
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(p.requires_grad for p in module.parameters())
    with torch.no_grad():
        linear.weight.fill_(3.0)
    assert frozen.state_dict()["0.weight"].ne(3.0).all()
    client.freeze("teacher", module, training=True)
    assert client["teacher"] is frozen
    assert frozen.training
    assert frozen.state_dict()["0.weight"].eq(3.0).all()


def test_freeze_takes_another_state(client: Client) -> None:
    module = nn.Linear(2, 1)
    client.freeze("other", module, {"weight": torch.full((1, 2), 7.0), "bias": torch.zeros(1)})
    x = torch.ones(1, 2)
    assert client["other"](x).item() == 14.0
    assert module(x).item() != 14.0
    client.freeze("other", module)
    assert torch.equal(client["other"](x), module(x))


def test_log_detaches_and_takes_means(client: Client) -> None:
    client.log("loss", torch.tensor([1.0, 3.0], requires_grad=True))
    assert float(client.log_sums["loss"]) == 2.0
    client.log("loss", torch.tensor(6.0, requires_grad=True))
    client.log("hits", torch.tensor([True, False, True, True]))
    assert (float(client.log_sums["loss"]), client.log_counts["loss"]) == (2.0 + 6.0, 2)
    assert (float(client.log_sums["hits"]), client.log_counts["hits"]) == (0.75, 1)
    assert not any(total.requires_grad for total in client.log_sums.values())


def test_a_log_of_many_values_does_not_round(client: Client) -> None:
    """float32 holds no odd number above 2**24."""
    for value in (2.0**24, 1.0, 1.0, 1.0):
        client.log("large", torch.tensor(value))
    assert float(client.log_sums["large"]) == 2**24 + 3


def test_cleared_logs_begin_anew_at_the_same_address(client: Client) -> None:
    client.log("loss", torch.tensor(6.0))
    total = client.log_sums["loss"]
    client.clear_logs()
    assert client.log_counts == {}
    client.log("loss", torch.tensor(5.0))
    assert client.log_sums["loss"] is total  # a captured step adds to it
    assert (float(total), client.log_counts["loss"]) == (5.0, 1)


def test_a_client_does_not_report_what_another_in_its_slot_has_logged(tiny: Federation) -> None:
    @dataclass(frozen=True)
    class Own(Method):
        def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
            client.log("of all", x.mean())
            client.log(f"of {len(y)}", x.mean())
            return super().loss(client, x, y)

    config = structure({"model": {"name": "mlp"}, "train": {"rounds": 1, "batch_size": 64}}, Config)
    loop = loop_for(Own(), config, cut(tiny, (40, 25, 10)))
    jobs = [Job(Own(), config, loop.info, data, 0) for data in loop.federation.clients.values()]
    slot = open_slot(jobs[0])
    for job, count in zip(jobs, (40, 25, 10), strict=True):
        one, alone = (client_round(job, None, loop.server, place) for place in (slot, None))
        assert isinstance(one, Result)
        assert same_result(one, alone)
        assert set(one.logs) == {"loss/train", "of all", f"of {count}"}
        assert one.logs["of all"] == one.logs[f"of {count}"]


def test_parameters_by_name(client: Client) -> None:
    assert set(client.parameters()) == {"weight", "bias"}
    assert set(client.parameters(["bias", "unknown"])) == {"bias"}


def test_noise_outside_of_a_pass_is_a_mistake(client: Client, tiny: Federation) -> None:
    with pytest.raises(FedprismError, match="'mask' was asked for outside of a pass"):
        client.draw("mask", 3)

    @dataclass(frozen=True)
    class Early(Method):
        """Draws before its pass: after the first client there is that one's noise in the slot."""

        def start(self, client: Client, ctx: Context) -> None:
            if ctx.client_id == "tinted":
                client.draw("mask", 3)

    config = structure({"model": {"name": "mlp"}, "train": {"rounds": 1}}, Config)
    loop = loop_for(Early(), config, tiny)
    slot = open_slot(Job(Early(), config, loop.info, tiny.clients["plain"], 0))
    client_round(Job(Early(), config, loop.info, tiny.clients["plain"], 0), None, loop.server, slot)
    with pytest.raises(FedprismError, match="'mask' was asked for outside of a pass"):
        client_round(Job(Early(), config, loop.info, tiny.clients["tinted"], 0), None, loop.server, slot)


# --- context and info ------------------------------------------------------------------------------------------------


def context_of(**changes: Any) -> Context:
    config = Config()
    info = make_info(config, ("a", "b"), 10, (3, 16, 16))
    return Context(0, 3, info, config.train, 0.05, "samples").replace(**changes)


def test_weights_of_an_average() -> None:
    uploads = [Upload("a", 1, {}), Upload("b", 3, {})]
    assert context_of().weights(uploads) == [0.25, 0.75]
    assert context_of(weighting="uniform").weights(uploads) == [0.5, 0.5]


def test_generators_are_keyed_by_round_client_and_purpose() -> None:
    def draw(ctx: Context, *purpose: str) -> float:
        return float(torch.rand(1, generator=ctx.rng(*purpose)))

    same = draw(context_of(client_id="a"), "mask")
    assert draw(context_of(client_id="a"), "mask") == same
    others = [
        draw(context_of(client_id="a"), "other"),
        draw(context_of(client_id="b"), "mask"),
        draw(context_of(), "mask"),
        draw(context_of(client_id="a", round=1), "mask"),
    ]
    assert len({same, *others}) == 5


def test_the_server_has_no_data() -> None:
    with pytest.raises(FedprismError, match="on the server, or in `stored`"):
        _ = context_of().local


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


@pytest.mark.parametrize("leaf", [torch.ones(1), torch.tensor(3)], ids=["float", "counter"])
def test_average_needs_a_weight_and_every_leaf_of_each(leaf: Tensor) -> None:
    with pytest.raises(ValueError):
        average([{"w": leaf}, {"w": leaf}], [1.0])
    with pytest.raises(KeyError, match="w"):
        average([{"w": leaf}, {}], [0.5, 0.5])


def test_average_keeps_types_the_order_of_leaves_and_what_it_is_given() -> None:
    """Counters stand between floats of several types; a state may also be all counters."""
    first: State = {
        "seen": torch.tensor([2, 3]),
        "w": torch.tensor([1.0, 2.0]),
        "steps": torch.tensor(1, dtype=torch.int32),
        "half": torch.tensor([[1.0]], dtype=torch.bfloat16),
        "double": torch.tensor(1e-12, dtype=torch.float64),
        "empty": torch.empty(0),
    }
    states = [first, {name: tensor * 3 for name, tensor in first.items()}]
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    mean = average(states, [0.5, 0.5])
    assert list(mean) == list(first)
    for name, tensor in mean.items():
        assert (tensor.dtype, tensor.shape) == (first[name].dtype, first[name].shape)
        assert torch.equal(tensor, first[name] * 2)
    assert all(same(state, copy) for state, copy in zip(states, before, strict=True))
    assert average([{"n": torch.tensor(4)}, {"n": torch.tensor(9)}], [0.5, 0.5])["n"].item() == 6  # 6.5, to even


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
    model = nn.Linear(2, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(FedprismError, match=words):
        load(model, {"bias": torch.full((1,), 9.0), **state})
    assert same(dict(model.state_dict()), before)  # nothing of it is loaded


def test_load_takes_other_types_and_layouts() -> None:
    """What is loaded gets the type that the model has; counters stay whole numbers."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    weight = torch.arange(6, dtype=torch.float64).view(2, 3).t()
    counter = torch.tensor(2**30 + 1)
    load(model, {"0.weight": weight, "1.running_mean": torch.ones(3).bfloat16(), "1.num_batches_tracked": counter})
    state = model.state_dict()
    assert state["0.weight"].dtype == torch.float32
    assert torch.equal(state["0.weight"], weight.float())
    assert state["1.running_mean"].tolist() == [1.0, 1.0, 1.0]
    assert state["1.num_batches_tracked"].item() == 2**30 + 1
    load(model, {})
    assert same(dict(model.state_dict()), dict(state))


# --- what is not finite, and counts of classes -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_found_in_any_leaf_and_type(value: float, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    sound: State = {
        "matrix": torch.tensor([[most, -most, 0.0], [1.0, -2.0, 3.0]], dtype=dtype),
        "count": torch.tensor(2**40),
        "empty": torch.empty(0, dtype=dtype),
        "number": torch.tensor(-most, dtype=dtype),
        "other": torch.full((300,), -1.0),
        "flags": torch.tensor([True, False]),
    }
    floats = ["matrix", "number", "other"]
    assert not_finite(sound) is None
    assert finite_probe([sound[name] for name in floats]).isfinite().all()
    for name in floats:
        for place in {0, sound[name].numel() // 2, sound[name].numel() - 1}:
            broken = sound[name].clone()
            broken.view(-1)[place] = value
            state = {**sound, name: broken}
            found = finite_probe([state[leaf] for leaf in floats]).isfinite().tolist()
            assert [leaf for leaf, fine in zip(floats, found, strict=True) if not fine] == [name]
            assert not_finite(state) == name
    assert finite_probe([]).tolist() == []
    assert not_finite({"count": torch.tensor(1)}) is None


@pytest.mark.parametrize("count", [0, 1, 500])
def test_class_counts_are_those_of_bincount(count: int) -> None:
    """Also of a part without images; the last class has none."""
    y = torch.randint(0, 6, (count,), generator=keys.generator("labels"))
    full, other = Split(torch.zeros(count, 1, 2, 2), y), Split(torch.zeros(3, 1, 2, 2), torch.tensor([6, 0, 6]))
    data = ClientData("a", "a", full, other, other, 7)
    for part, labels in (("train", y), ("test", other.y)):
        counts = data.class_counts(part)
        assert counts.dtype == torch.int64
        assert torch.equal(counts, torch.bincount(labels, minlength=7))


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


# --- what authors of methods trip over -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asking(Method):
    """FedAvg of a part that its `build` asks for before it adds it."""

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = super().build(arch, client_id, info, seed)
        assert leaves.part(model, "extra") == ()
        assert not any(name.startswith("extra.") for name in (*leaves.parameters(model), *leaves.norms(model)))
        model.extra = nn.Sequential(nn.Linear(info.classes, info.classes), nn.BatchNorm1d(info.classes))
        return model

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "extra")

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(client.model.extra(client.model(x)), y)

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, trains=leaves.part(client.model, "extra"))]


@pytest.mark.parametrize(("bn", "travels"), [("shared", 7), ("local", 2)])
def test_a_part_that_was_asked_for_before_it_was_there_is_found(bn: str, travels: int, tiny: Federation) -> None:
    """It is sent, trained, kept and averaged, and its batch norm follows the policy."""
    loop = loop_for(Asking(), structure({"train": {"rounds": 1, "bn": bn}}, Config), tiny)
    first = dict(loop.server)
    assert len(first) == travels
    assert all(name.startswith("extra.") for name in first)
    assert loop.run([]) == "finished"
    assert loop.server.keys() == first.keys()
    assert not any(torch.equal(loop.server[name], first[name]) for name in first)
    assert len(models_of(loop)) == 3
    for state in models_of(loop).values():
        assert len([name for name in state if name.startswith("extra.")]) == 7
        assert not torch.equal(state["extra.0.weight"], first["extra.0.weight"])
        assert int(state["extra.1.num_batches_tracked"]) > 0


def test_a_sealed_model_gets_no_more_parts() -> None:
    """The promise of `seal`: leaves are looked up once, until the model is sealed anew."""
    model = Parts(body=nn.Linear(1, 1))
    assert leaves.part(leaves.seal(model), "head") == ()
    model.head = nn.BatchNorm1d(1)
    assert leaves.part(model, "head") == ()
    assert len(leaves.part(leaves.seal(model), "head")) == len(leaves.norms(model)) == 5


@pytest.mark.parametrize(
    ("name", "helper", "expected"),
    [
        ("mixed", lambda self, one, other: one, ".*mixed is "),
        ("stays", lambda self: "nothing", ".*stays is "),
        ("shared", lambda self, model: (), r"def shared\(self, model: "),
        ("shared", lambda self, model, ctx, part: (), r"def shared\(self, model: "),
        ("loss", property(lambda self: 0.0), r"def loss\(self, client: "),
        ("encode", "gzip", r"def encode\(self, state: "),
    ],
    ids=["mixed", "stays", "shared-of-one", "shared-of-three", "loss", "encode"],
)
def test_a_helper_that_has_a_hooks_name_is_refused(name: str, helper: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Own\.{name} has the name of a hook.*; expected {expected}.*another name"):
        type("Own", (Method,), {name: helper})


def test_a_hook_may_name_its_parameters_as_it_likes(tiny: Federation) -> None:
    @dataclass(frozen=True)
    class Own(Method):
        stays = "the head"

        @property
        def mixed(self) -> bool:
            return True

        def shared(self, network: Net, where: Context) -> Collection[str]:
            return self._body(network)

        def loss(self, site: Client, images: Tensor, labels: Tensor, smoothing: float = 0.1) -> Tensor:
            return cross_entropy(site.model(images), labels, label_smoothing=smoothing)

        def _body(self, network: Net) -> Collection[str]:
            return leaves.part(network, "body")

    assert loop_for(Own(), structure({"train": {"rounds": 1}}, Config), tiny).run([]) == "finished"


@dataclass(frozen=True)
class Stepping(Method):
    """FedAvg by a step of its own, which trains one part."""

    part: str | None = "head"

    def one_step(self, client: Client, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.loss(client, x, y).backward()
        optimizer.step()

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        trains = leaves.everything(client.model) if self.part is None else leaves.part(client.model, self.part)
        return [Pass(self.loss, "part", trains=trains, step=self.one_step)]


def test_a_step_of_its_own_must_say_what_it_trains(client: Client) -> None:
    method = Stepping()
    with pytest.raises(ConfigError, match=r"pass 'mine' has a step of its own, so say what it trains: trains=leaves\."):
        Pass(method.loss, "mine", step=method.one_step)
    assert Pass(method.loss, "mine", trains=leaves.everything(client.model), step=method.one_step).step is not None
    assert Pass(method.loss, "mine").trains is None


@pytest.mark.parametrize("part", ["head", None])
def test_norm_layers_outside_of_what_a_step_trains_stay_as_they_were(part: str | None, tiny: Federation) -> None:
    method, config = Stepping(part), structure({"model": {"name": "lenet-bn"}, "train": {"rounds": 1}}, Config)
    loop = loop_for(method, config, tiny)
    trained = client_models(Job(method, config, loop.info, tiny.clients["plain"], 0), None, loop.server)[1]
    moved = {name for name, tensor in trained.items() if not torch.equal(tensor, loop.server[name])}
    model = loop.models[loop.info.arch]
    assert set(leaves.parameters(model)) & set(leaves.part(model, "head")) <= moved
    if part == "head":
        assert leaves.norms(model)
        assert moved <= set(leaves.part(model, "head"))
    else:
        assert set(leaves.norms(model)) <= moved


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
    with pytest.raises(ConfigError, match=r"holds no method: none of its classes derives from fedprism\.Method\."):
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
    """One file per method, of at most 120 lines of code beside its imports."""
    file = METHOD_FILES / f"{name.replace('-', '_')}.py"
    assert METHODS[name].__module__ == f"fedprism.methods.{file.stem}"
    assert code_lines(file.read_text(encoding="utf-8"), imports=False) <= 120


def test_baselines_are_short_on_average() -> None:
    """All but the five papers' own methods: their files have fewer than 60 lines of code on average, imports aside."""
    names = set(METHODS) - {"fedcp", "fed-co2", "fedpick", "fedios", "fedsce"}
    files = [METHOD_FILES / f"{name.replace('-', '_')}.py" for name in names]
    assert len(files) == len(list(METHODS)) - 5
    assert mean(code_lines(file.read_text(encoding="utf-8"), imports=False) for file in files) < 60
