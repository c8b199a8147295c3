"""The server's optimiser: FedAvgM, FedAdam and FedYogi by their formulas, what they leave alone, and resuming them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedprism import api
from fedprism.config import Config, dump, read, structure
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Context, Method, Net, State, UploadKind
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.lg_fedavg import LGFedAvg
from fedprism.methods.scaffold import Scaffold
from fedprism.methods.server_optimizer import PREFIX, first_optimizer_state, method_part, optimizer_step
from fedprism.models import MODELS
from fedprism.records import RunDirectory
from fedprism.round.loop import Loop, draw_cohort
from tests.harness import (
    CLOSE,
    FAR,
    RUN,
    Collect,
    Smooth,
    by_method,
    cut,
    killed,
    loop_for,
    models_of,
    module_of,
    reference,
    same,
    scores_of,
)
from tests.reference import common

pytestmark = pytest.mark.full

STEPS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "momentum", "lr": 0.7, "momentum": 0.8},
    "adam": {"optimizer": "adam", "lr": 0.02, "betas": [0.8, 0.95], "tau": 0.002},
    "yogi": {"optimizer": "yogi", "lr": 0.02, "betas": [0.8, 0.95], "tau": 0.002},
}

REFUSED = {  # what these share instead of weights that are averaged
    "local": "nothing",
    "fedproto": "the mean feature of each class",
    "fedtgp": "the mean feature of each class",
    "feddistill": "the mean output of each class",
    "fedfomo": "the model of each client, by itself",
    "fedamp": "the whole model; each client is sent a mixture of its own",
    "fedkd": "the student's updates, as factors of each matrix",
}


def config_of(server: dict[str, Any], **sections: Any) -> Config:
    raw = {
        "seed": 3,
        "model": "lenet-bn",
        "train": {"rounds": 3, "batch_size": 11},
        "clients": {"participation": 0.67},
        "evaluate": {"every": 9},
        **sections,
    }
    return structure({**raw, "server": server}, Config)


def ran(method: Method, config: Config, data: Federation) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config, data), Collect()
    assert loop.run([seen]) == "finished"
    return loop, seen


def bits(state: State) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


@pytest.fixture(scope="module")
def few(tiny: Federation) -> Federation:
    """8, 9 and 10 training images."""
    return cut(tiny, (8, 9, 10))


def parameters(loop: Loop) -> set[str]:
    return set(dict(loop.models[loop.info.arch].named_parameters()))


# --- the formulas ----------------------------------------------------------------------------------------------------


@dataclass
class ByHand:
    """A server in plain formulas, in the place of a reference's mean."""

    server: dict[str, Any]
    w: State
    trained: set[str]

    def __post_init__(self) -> None:
        adaptive = self.server.get("optimizer", "none") in ("adam", "yogi")
        self.m = {n: 0 * t for n, t in self.w.items()}
        self.v = {n: 0 * t + self.server["tau"] ** 2 for n, t in self.w.items()} if adaptive else {}

    def __call__(self, states: list[State], sizes: list[float]) -> State:
        for n, average in common.mean(states, sizes).items():
            self.w[n] = self.step(n, average - self.w[n]) if n in self.trained else average
        return dict(self.w)

    def step(self, n: str, delta: torch.Tensor) -> torch.Tensor:
        s = self.server
        if s["optimizer"] == "momentum":
            self.m[n] = s["momentum"] * self.m[n] + delta
            return self.w[n] + s["lr"] * self.m[n]
        b1, b2 = s["betas"]
        self.m[n] = b1 * self.m[n] + (1 - b1) * delta
        if s["optimizer"] == "adam":
            self.v[n] = b2 * self.v[n] + (1 - b2) * delta**2
        else:
            grows = self.v[n] < delta**2
            self.v[n] = torch.where(grows, self.v[n] + (1 - b2) * delta**2, self.v[n] - (1 - b2) * delta**2)
        return self.w[n] + s["lr"] * self.m[n] / (self.v[n] ** 0.5 + s["tau"])


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A network without a kink, in double precision: then training does not blow up what rounding makes different."""
    before = torch.get_default_dtype()
    monkeypatch.setitem(MODELS._items, "smooth", Smooth)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["fedavg", "fedbn"])
@pytest.mark.parametrize("server", STEPS.values(), ids=list(STEPS))
def test_a_step_is_its_formula(
    server: dict[str, Any],
    name: str,
    unequal: Federation,
    double: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(server, model="smooth", train={"rounds": 4, "batch_size": 11})
    loop, _ = ran(METHODS[name](), config, unequal)
    assert len({draw_cohort(config.clients, loop.info, round) for round in range(4)}) > 1, "not always the same clients"
    model = loop.info.arch.model(loop.info.seed)
    hand = ByHand(server, {n: model.state_dict()[n].clone() for n in common.leaves(model)}, parameters(loop))
    if name == "fedbn":
        hand.w = {n: t for n, t in hand.w.items() if n not in common.norm_leaves(model)}
    monkeypatch.setattr(module_of(name), "mean", hand)
    expected = reference(name, {}, loop)
    for n, tensor in hand.w.items():
        torch.testing.assert_close(loop.server[n], tensor, rtol=CLOSE, atol=CLOSE)
    for client_id, scores in zip(loop.info.clients, expected, strict=True):
        torch.testing.assert_close(scores_of(loop, client_id), scores, rtol=CLOSE, atol=CLOSE)
    assert name == "fedavg" or not common.norm_leaves(model) & loop.optimizer_state.keys()
    plain, _ = ran(METHODS[name](), replace(config, server=Config().server), unequal)
    assert max((loop.server[n] - plain.server[n]).abs().max() for n in hand.trained & hand.w.keys()) > FAR


def test_yogi_forgets_a_large_step_more_slowly_than_adam() -> None:
    """The numbers can be worked out on paper: delta is 1, then 0; tau is 0.1, so v starts at 0.01."""
    found = {}
    for optimizer in ("adam", "yogi"):
        config = config_of({"optimizer": optimizer, "lr": 0.5, "betas": [0.5, 0.9], "tau": 0.1}).server
        w = {"w": torch.tensor([2.0], dtype=torch.float64)}
        state = first_optimizer_state(config, w)
        first, state = optimizer_step(config, ["w"], w, {"w": w["w"] + 1}, state)
        _, state = optimizer_step(config, ["w"], first, first, state)
        found[optimizer] = float(first["w"]), float(state["m/w"]), float(state["v/w"])
    assert found["adam"] == pytest.approx((2 + 0.25 / (0.109**0.5 + 0.1), 0.25, 0.0981))
    assert found["yogi"] == pytest.approx((2 + 0.25 / (0.11**0.5 + 0.1), 0.25, 0.11))


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_no_momentum_is_none_bit_by_bit(method: str, unequal: Federation) -> None:
    none, without = config_of({}), config_of({"optimizer": "momentum", "momentum": 0.0})
    (plain, expected), (loop, seen) = (ran(METHODS[method](), each, unequal) for each in (none, without))
    assert bits(loop.server) == bits(plain.server)
    models, others = models_of(loop), models_of(plain)
    assert models.keys() == others.keys()
    assert all(bits(model) == bits(others[client_id]) for client_id, model in models.items())
    assert all(same(state, plain.states[client_id]) for client_id, state in loop.states.items())
    assert seen.records[-1].scores == expected.records[-1].scores
    assert plain.optimizer_state == {}, "without an optimiser nothing is kept"
    assert expected.snapshots[-1].server.keys() == plain.server.keys()


@pytest.mark.parametrize("optimizer", STEPS)
def test_nothing_waits_for_the_device(optimizer: str) -> None:
    """On the device `meta` there are no values to wait for."""
    config, w = config_of(STEPS[optimizer]).server, {"w": torch.zeros(3, device="meta")}
    moved, state = optimizer_step(config, ["w"], w, w, first_optimizer_state(config, w))
    assert {tensor.device.type for tensor in (*moved.values(), *state.values())} == {"meta"}


def test_momentum_goes_on_where_clients_have_nothing_to_say() -> None:
    config = config_of({"optimizer": "momentum", "momentum": 0.5}).server
    w = {"w": torch.tensor([0.0])}
    state = first_optimizer_state(config, w)
    for mean, expected in ((4.0, 4.0), (4.0, 6.0), (6.0, 7.0)):
        w, state = optimizer_step(config, ["w"], w, {"w": torch.tensor([mean])}, state)
        assert w["w"].item() == expected


# --- what it leaves alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", STEPS)
def test_buffers_are_the_average_and_weights_are_not(optimizer: str, unequal: Federation) -> None:
    one = {"train": {"rounds": 1}}
    plain, _ = ran(FedAvg(), config_of({}, **one), unequal)
    loop, _ = ran(FedAvg(), config_of(STEPS[optimizer], **one), unequal)
    trained = parameters(loop)
    assert any(name.endswith("running_var") for name in loop.server)
    for name, tensor in loop.server.items():
        if name not in trained:
            assert torch.equal(tensor, plain.server[name]), name
        elif tensor.ndim > 1:  # a bias before batch norm has no gradient
            assert not torch.equal(tensor, plain.server[name]), name
    assert {name.partition("/")[2] for name in loop.optimizer_state} == trained


def test_control_variates_are_left_alone(unequal: Federation) -> None:
    one = {"train": {"rounds": 1}}
    plain, _ = ran(Scaffold(), config_of({}, **one), unequal)
    loop, _ = ran(Scaffold(), config_of(STEPS["adam"], **one), unequal)
    control = {name for name in loop.server if name.startswith("c.")}
    assert control
    assert bits({n: loop.server[n] for n in control}) == bits({n: plain.server[n] for n in control})
    assert not same(loop.server, plain.server)
    assert not control & {name.partition("/")[2] for name in loop.optimizer_state}


@dataclass(frozen=True)
class LearntPrototypes(Method):
    """FedAvg that calls its head's weights prototypes."""

    def uploads(self, model: Net, ctx: Context) -> dict[str, UploadKind]:
        return {n: "prototype" if n.startswith("head") else kind for n, kind in super().uploads(model, ctx).items()}


def test_what_travels_as_something_else_than_weights_is_the_average(unequal: Federation) -> None:
    one = {"train": {"rounds": 1}}
    plain, _ = ran(FedAvg(), config_of({}, **one), unequal)
    loop, _ = ran(LearntPrototypes(), config_of(STEPS["yogi"], **one), unequal)
    for name in (name for name, tensor in loop.server.items() if tensor.ndim > 1):
        assert torch.equal(loop.server[name], plain.server[name]) == name.startswith("head"), name


@pytest.mark.parametrize("optimizer", STEPS)
def test_what_is_not_sent_stands_still(optimizer: str, unequal: Federation) -> None:
    """After its warm-up LG-FedAvg sends heads alone: no momentum may carry the body on."""
    _, seen = ran(LGFedAvg(warmup=1), config_of(STEPS[optimizer]), unequal)
    first, warm, *_, last = (snapshot.server for snapshot in seen.snapshots)
    prefixes = ("body.", f"{PREFIX}m/body.", f"{PREFIX}v/body.")
    body = {name for name in warm if name.startswith(prefixes)}
    assert bits({n: last[n] for n in body}) == bits({n: warm[n] for n in body})
    assert not torch.equal(first["body.conv1.weight"], warm["body.conv1.weight"])
    assert not torch.equal(last["head.fc2.weight"], warm["head.fc2.weight"])


# --- snapshots and resuming ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Jealous(Method):
    """FedAvg that refuses to be shown what is not its own."""

    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        assert not any(name.startswith(PREFIX) for name in server)
        return server

    def aggregate(self, server: State, uploads: Any, ctx: Context) -> State:
        assert not any(name.startswith(PREFIX) for name in server)
        return super().aggregate(server, uploads, ctx)


@pytest.mark.parametrize("optimizer", STEPS)
def test_resumed_from_any_round_it_is_the_straight_run(optimizer: str, unequal: Federation) -> None:
    config = config_of(STEPS[optimizer])
    straight, seen = ran(Jealous(), config, unequal)
    for start in seen.snapshots[:-1]:
        resumed = loop_for(Jealous(), config, unequal)
        assert resumed.run([again := Collect()], start) == "finished"
        assert bits(again.snapshots[-1].server) == bits(seen.snapshots[-1].server)
        assert again.records[-1].scores == seen.records[-1].scores
    assert same(method_part(seen.snapshots[-1].server), straight.server)
    assert len({bits(snapshot.server)[f"{PREFIX}m/head.fc2.bias"] for snapshot in seen.snapshots}) == 4


@pytest.mark.parametrize("name", by_method(name for name in METHODS if name not in REFUSED))
@pytest.mark.parametrize("optimizer", ["momentum", "yogi"])
def test_every_method_that_averages_weights_steps_and_resumes(optimizer: str, name: str, few: Federation) -> None:
    tested = {"every": 2, "moments": ["received"], "splits": ["test"]}
    config = config_of(STEPS[optimizer], train={"rounds": 2, "batch_size": 8}, evaluate=tested)
    straight, seen = ran(METHODS[name](), config, few)
    assert not any(record.failed for record in seen.records)
    assert len({record.cohort for record in seen.records[1:]}) == 2, "not twice the same clients"
    resumed = loop_for(METHODS[name](), config, few)
    assert resumed.run([again := Collect()], seen.snapshots[1]) == "finished"
    assert bits(again.snapshots[-1].server) == bits(seen.snapshots[-1].server)
    assert all(same(state, straight.states[client_id]) for client_id, state in resumed.states.items())
    assert all(same(model, models_of(straight)[client_id]) for client_id, model in models_of(resumed).items())
    assert again.records[-1].scores == seen.records[-1].scores
    stepped = {n.removeprefix("m/") for n, m in straight.optimizer_state.items() if n.startswith("m/") and m.any()}
    assert stepped, "there was something to move"
    assert all(straight.server[n].isfinite().all() for n in stepped)


def test_a_snapshot_of_another_optimiser_is_refused(unequal: Federation) -> None:
    _, seen = ran(FedAvg(), config_of({}), unequal)
    with pytest.raises(FedprismError, match=r"another server\.optimizer"):
        loop_for(FedAvg(), config_of(STEPS["adam"]), unequal).run([], seen.snapshots[1])
    _, kept = ran(FedAvg(), config_of(STEPS["momentum"]), unequal)
    for other in ({}, STEPS["yogi"]):
        with pytest.raises(FedprismError, match=r"another server\.optimizer"):
            loop_for(FedAvg(), config_of(other), unequal).run([], kept.snapshots[1])


@pytest.mark.slow
def test_killed_and_resumed_is_the_straight_run(tmp_path: Path) -> None:
    data = {"partition": {"name": "domain", "clients": 3}, "samples": 40}
    run_as = {"engine": "inprocess", "checkpoint_every": 3, "keep_rounds": [4]}
    sections = {"data": data, "train": {"rounds": 10}, "evaluate": {}, "run": run_as}
    config = tmp_path / "config.yaml"
    config.write_text(dump(config_of(STEPS["adam"], **sections)), encoding="utf-8")
    straight = api.run_config(read(config), "x", out=tmp_path / "straight")
    run = tmp_path / "killed"
    assert killed([RUN, str(config), str(run)], run, after=6, delay=0.01), "it ended before it could be killed"
    assert api.resume(run).status == straight.status == "finished"
    assert (run / "metrics.jsonl").read_bytes() == (straight.path / "metrics.jsonl").read_bytes()
    with RunDirectory.open(run) as a, RunDirectory.open(straight.path) as b:
        for one, other in ((a.latest(), b.latest()), (a.at(4), b.at(4))):
            assert one is not None
            assert other is not None
            assert f"{PREFIX}v/head.fc2.weight" in one.server
            assert bits(one.server) == bits(other.server)


def test_models_of_a_run_are_made_without_it(tmp_path: Path) -> None:
    """LG-FedAvg loads all that it is sent: what the optimiser keeps must not be part of it."""
    sections = {"method": {"name": "lg-fedavg", "warmup": 2}, "train": {"rounds": 2}, "run": {"engine": "inprocess"}}
    data = {"partition": {"name": "domain", "clients": 3}, "samples": 40}
    run = api.run_config(config_of(STEPS["momentum"], data=data, **sections), "x", out=tmp_path / "run")
    assert any(name.startswith(PREFIX) for name in run.models.snapshot.server)
    body = [model.module.state_dict()["body.conv1.weight"] for model in run.models.values()]
    assert len(body) == 3
    assert all(torch.equal(w, run.models.snapshot.server["body.conv1.weight"]) for w in body)


@dataclass(frozen=True)
class Full(Method):
    """FedAvg; counts how often its average is asked for."""

    asked: list[int]

    def aggregate(self, server: State, uploads: Any, ctx: Context) -> State:
        self.asked.append(ctx.round)
        return super().aggregate(server, uploads, ctx)


def test_a_step_that_had_no_memory_is_made_once(unequal: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, _ = ran(FedAvg(), config_of(STEPS["momentum"]), unequal)
    loop, real, failed = loop_for(Full([]), config_of(STEPS["momentum"]), unequal), torch._foreach_mul, []

    def short(*given: Any) -> Any:
        if not failed and loop.method.asked[-1] == 1:
            failed.append(1)
            raise torch.OutOfMemoryError("no memory")
        return real(*given)

    monkeypatch.setattr(torch, "_foreach_mul", short)
    loop.engine.can_release_memory = True
    assert loop.run([]) == "finished"
    assert loop.method.asked == [0, 1, 1, 2]
    assert bits(loop.server) == bits(straight.server)
    assert bits(loop.optimizer_state) == bits(straight.optimizer_state)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("optimizer", STEPS)
def test_a_method_without_an_average_of_weights_refuses(optimizer: str, name: str, unequal: Federation) -> None:
    with pytest.raises(ConfigError) as error:
        loop_for(METHODS[name](), config_of(STEPS[optimizer]), unequal)
    assert str(error.value) == (
        f"server.optimizer is {optimizer}, but {name} averages no weights: what it shares is {REFUSED[name]}. "
        "Leave it at none."
    )


@dataclass(frozen=True)
class SendsUpdates(Method):
    """A server that holds weights but is sent something else: the step would have nothing to move."""

    def uploads(self, model: Net, ctx: Context) -> dict[str, UploadKind]:
        return {f"update/{name}": kind for name, kind in super().uploads(model, ctx).items()}


def test_a_method_whose_weights_are_not_sent_refuses(unequal: Federation) -> None:
    with pytest.raises(ConfigError, match=r"is adam, but sendsupdates averages no weights\. Leave it at none\."):
        loop_for(SendsUpdates(), config_of(STEPS["adam"]), unequal)
    assert loop_for(SendsUpdates(), config_of({}), unequal).optimizer_state == {}


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"optimizer": "adma", "lr": 0.1}, "Did you mean 'adam'?"),
        ({"optimizer": "adam"}, "server.lr is 1.0, but adam moves a weight by up to about server.lr per round"),
        (
            {"optimizer": "yogi", "lr": 1},
            "set server.lr to a value below 1, such as 0.01, or server.tau to 0.01 or more",
        ),
        ({"lr": 0}, "server.lr is 0.0; expected above 0"),
        ({"optimizer": "momentum", "lr": -1}, "server.lr is -1.0; expected above 0"),
        ({"lr": float("inf")}, "inf is not a finite number @ server.lr"),
        ({"momentum": 1}, "server.momentum is 1.0; expected 0 to below 1"),
        ({"betas": [0.9, 1]}, "server.betas is (0.9, 1.0); expected two numbers of 0 to below 1"),
        ({"betas": [-0.1, 0.9]}, "server.betas is (-0.1, 0.9)"),
        ({"betas": 0.9}, "0.9 is not a list"),
        ({"betas": [0.9]}, "[0.9] is not a list of 2"),
        ({"tau": 0}, "server.tau is 0.0; expected above 0"),
        ({"tua": 0.1}, "unknown key 'tua'. Did you mean 'tau'?"),
    ],
)
def test_bad_settings_are_refused(server: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        structure({"server": server}, Config)
    assert words in str(error.value)
    assert "server" in str(error.value)


def test_large_steps_are_fine_where_they_are_steps_towards_the_average() -> None:
    assert structure({"server": {"optimizer": "momentum", "lr": 1.5}}, Config).server.lr == 1.5
    assert structure({"server": {"lr": 2}}, Config).server.optimizer == "none"
    for optimizer in ("adam", "yogi"):  # the authors' best on CIFAR-100
        assert structure({"server": {"optimizer": optimizer, "lr": 1, "tau": 0.1}}, Config).server.lr == 1
