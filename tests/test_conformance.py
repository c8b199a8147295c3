"""What every registered method promises; a new one gets these tests by being registered.

All runs are real and tiny: three clients, 40 images each, four rounds. "The same" means bit by bit.
"""

from __future__ import annotations

import dataclasses
import random
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedprism.config import MOMENTS, Config, structure
from fedprism.engines.client import (
    Failure,
    Job,
    Result,
    Scores,
    client_evaluate,
    client_receive,
    client_round,
    make_now,
)
from fedprism.engines.events import RoundRecord, Snapshot, Status
from fedprism.engines.inprocess import InProcess, Request
from fedprism.engines.loop import Loop
from fedprism.engines.noise import keyed_draw
from fedprism.engines.numerics import numerics
from fedprism.engines.passes import inputs
from fedprism.errors import ConfigError
from fedprism.federation import Federation, Split
from fedprism.methods import METHODS
from fedprism.methods.base import Kind, Me, Method, Now, Pass, State, Upload, load
from fedprism.records.checkpoint import deserialise, serialise
from tests.helpers import CPU, Collect, cut, loop_for, same

pytestmark = pytest.mark.no_cover  # recorded steps run every method, too, and there lines are counted
EVERY = list(METHODS)
ROUNDS = 4
ALL_MOMENTS = list(MOMENTS)

every_method = pytest.mark.parametrize("name", EVERY)


# --- running ---------------------------------------------------------------------------------------------------------


def method_of(name: str) -> Method:
    reference = import_module(f"tests.reference.{name.replace('-', '_')}")
    return structure(getattr(reference, "QUICK", {}), METHODS[name], "method")


def config_of(**sections: Any) -> Config:
    """Four rounds on batches of 16, unless a section says otherwise."""
    train = {"rounds": ROUNDS, "batch": 16, **sections.pop("train", {})}
    evaluate = {"splits": ["test"], **sections.pop("evaluate", {})}
    return structure({"train": train, "evaluate": evaluate, **sections}, Config)


class Spy(InProcess):
    """The reference engine, which remembers what clients were handed and what they answered, round by round."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.requests: dict[int, dict[str, Request]] = {}
        self.answers: dict[int, dict[str, Result | Failure]] = {}

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        self.requests[round] = dict(requests)
        self.answers[round] = super().train(round, requests)
        return self.answers[round]

    def result(self, round: int, client: str) -> Result:
        answer = self.answers[round][client]
        assert isinstance(answer, Result)
        return answer


@dataclass(frozen=True)
class Trained:
    """A run that is over: its loop, what callbacks were told, and the engine's traffic."""

    loop: Loop
    records: list[RoundRecord]
    snapshots: list[Snapshot]
    status: Status
    engine: Spy


def train(
    method: Method, config: Config, federation: Federation, kind: type[Spy] = Spy, start: Snapshot | None = None
) -> Trained:
    loop = loop_for(method, config, federation)
    engine = loop.engine = kind(method, config, loop.info, federation, CPU)
    seen = Collect()
    with numerics(config.run, CPU):
        status = loop.run([seen], start)
    return Trained(loop, seen.records, seen.snapshots, status, engine)


Straight = Callable[[str], Trained]


@pytest.fixture(scope="session")
def straight(tiny: Federation) -> Straight:
    """Each method's plain run of four rounds, computed once."""
    return cache(lambda name: train(method_of(name), config_of(), tiny))


def assert_same_run(a: Trained, b: Trained) -> None:
    """The same records (timings aside) and the same states."""
    assert [replace(record, seconds={}) for record in a.records] == [replace(r, seconds={}) for r in b.records]
    assert_same_end(a, b)


def assert_same_end(a: Trained, b: Trained) -> None:
    assert same(a.loop.server, b.loop.server)
    assert a.loop.states.keys() == b.loop.states.keys()
    for client, state in a.loop.states.items():
        assert same(state, b.loop.states[client]), client


def assert_sound(run: Trained) -> None:
    """It ended well, nobody failed, and every number is finite."""
    assert run.status == "finished"
    assert all(not record.failed for record in run.records)
    for state in (run.loop.server, *run.loop.states.values()):
        assert state is None or all_finite(state)


def all_finite(state: State) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in state.values())


def built(run: Trained, client: str) -> nn.Module:
    """The client's model before it has ever trained."""
    loop = run.loop
    return loop.method.build(loop.info.archs[client], client, loop.info, loop.info.seed)


def moved(run: Trained, client: str) -> float:
    """How far the client's parameters are from their first values, at most."""
    state = run.loop.states[client]
    assert state is not None
    return max(float((state[name] - p.detach()).abs().max()) for name, p in built(run, client).named_parameters())


def far(a: State | None, b: State | None) -> float:
    """The Euclidean distance of two states, counters aside."""
    assert a is not None
    assert b is not None
    floats = [name for name, tensor in a.items() if tensor.is_floating_point()]
    return sum(float((a[name] - b[name]).square().sum()) for name in floats) ** 0.5


def shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


def bytes_of(state: State) -> int:
    return sum(len(tensor.contiguous().numpy().tobytes()) for tensor in state.values())


def with_passes(method: Method, change: Callable[[Pass], Pass]) -> Method:
    """The same method, each of its passes changed."""

    class Changed(type(method)):  # type: ignore[misc]
        id = method.id

        def passes(self, me: Me, now: Now) -> list[Pass]:
            return [change(each) for each in super().passes(me, now)]

    return typing.cast(Method, Changed(**{f.name: getattr(method, f.name) for f in dataclasses.fields(method)}))


# --- the same bits ---------------------------------------------------------------------------------------------------


@every_method
def test_same_seed_same_bits(name: str, straight: Straight, tiny: Federation) -> None:
    assert_sound(straight(name))
    assert_same_run(train(method_of(name), config_of(), tiny), straight(name))


@every_method
def test_another_seed_other_bits(name: str, straight: Straight, tiny: Federation) -> None:
    other = train(method_of(name), config_of(seed=1), tiny)
    for client, state in other.loop.states.items():
        assert not same(state, straight(name).loop.states[client])


@every_method
def test_resumed_is_the_straight_run(name: str, straight: Straight, tiny: Federation) -> None:
    """From what a checkpoint of round 2 would hold, as bytes and back."""
    whole = straight(name)
    kept = whole.snapshots[2]
    clients = {c: None if state is None else deserialise(serialise(state)) for c, state in kept.clients.items()}
    start = Snapshot(2, deserialise(serialise(kept.server)), clients)
    resumed = train(method_of(name), config_of(), tiny, start=start)
    assert [record.round for record in resumed.records] == [3, 4]
    assert_same_run(resumed, replace(whole, records=whole.records[3:]))


class Reversed(Spy):
    """Clients run last to first, and their answers come back in that order."""

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        return super().train(round, {client: requests[client] for client in reversed(list(requests))})

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> dict[str, Scores | Failure]:
        return super().evaluate(round, {client: requests[client] for client in reversed(list(requests))})


@every_method
def test_order_of_clients_does_not_matter(name: str, straight: Straight, tiny: Federation) -> None:
    turned = train(method_of(name), config_of(), tiny, Reversed)
    assert list(turned.engine.answers[0]) == list(reversed(tiny.names))
    assert_same_run(turned, straight(name))


class Wire(Spy):
    """Whatever crosses is bytes on the way; the format sorts its tensors by name."""

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        answers = super().train(round, {c: Request(r.state, over_the_wire(r.down)) for c, r in requests.items()})
        return {c: replace(a, upload=over_the_wire(a.upload)) for c, a in answers.items() if isinstance(a, Result)}

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> dict[str, Scores | Failure]:
        return super().evaluate(round, {c: Request(r.state, over_the_wire(r.down)) for c, r in requests.items()})


def over_the_wire(state: State) -> State:
    return safetensors.torch.load(safetensors.torch.save({n: t.contiguous().clone() for n, t in state.items()}))


@every_method
def test_the_wire_changes_nothing(name: str, straight: Straight, tiny: Federation) -> None:
    assert_same_run(train(method_of(name), config_of(), tiny, Wire), straight(name))


class PoisonedSlots(Spy):
    """One slot serves all, and what the last client left in it is not a number: who reads must have written."""

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        answers: dict[str, Result | Failure] = {}
        for client, request in requests.items():
            self.before_a_client()
            answers |= super().train(round, {client: request})
        return answers

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> dict[str, Scores | Failure]:
        answers: dict[str, Scores | Failure] = {}
        for client, request in requests.items():
            self.before_a_client()
            answers |= super().evaluate(round, {client: request})
        return answers

    def before_a_client(self) -> None:
        for me in self.slots.values():
            poison(me.model.state_dict(keep_vars=True))
            for kept in me.scratch.values():
                if isinstance(kept, nn.Module):
                    poison(kept.state_dict(keep_vars=True))
                else:
                    poison(kept if isinstance(kept, dict) else {"": kept})


class FreshSlots(PoisonedSlots):
    def before_a_client(self) -> None:
        self.slots.clear()


@torch.no_grad()
def poison(state: Mapping[str, Tensor]) -> None:
    for tensor in state.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


@every_method
def test_nothing_passes_from_client_to_client(name: str, straight: Straight, tiny: Federation) -> None:
    assert_same_run(train(method_of(name), config_of(), tiny, PoisonedSlots), straight(name))


@pytest.mark.parametrize("name", ["fedpick", "fedsce", "fedfomo"])
def test_a_slot_of_its_own_changes_nothing(name: str, straight: Straight, tiny: Federation) -> None:
    assert_same_run(train(method_of(name), config_of(), tiny, FreshSlots), straight(name))


@every_method
def test_bfloat16_follows_single_precision(name: str, straight: Straight, tiny: Federation) -> None:
    """Layers compute in it; weights stay what they are, and a round ends near that in single precision."""
    half: dict[str, Any] = {"train": {"rounds": 1}, "run": {"precision": "bf16"}}
    normed, full = train(method_of(name), config_of(**half, evaluate={"moments": ALL_MOMENTS}), tiny), straight(name)
    assert_sound(normed)
    for client, state in normed.loop.states.items():
        assert state is not None
        assert shapes(state) == shapes(full.snapshots[1].clients[client] or {})
        here, there = (run.records[1].scores["received"]["test"][client].loss for run in (normed, full))
        assert 0 < abs(here - there) < 0.02 * there
    # How far weights are apart: without batch norm, which makes much of rounding errors.
    plain = [config_of(**sections, model={"name": "mlp"}) for sections in (half, {"train": {"rounds": 1}})]
    one, other = (train(method_of(name), config, tiny) for config in plain)
    for client in tiny.names:
        first = {n: p.detach() for n, p in built(one, client).named_parameters()}
        apart = far(*({n: (run.loop.states[client] or {})[n] for n in first} for run in (one, other)))
        assert 0 < apart < 0.25 * far(first, other.loop.states[client]), client


@every_method
def test_evaluation_does_not_touch_training(name: str, straight: Straight, tiny: Federation) -> None:
    """All moments, or none until the end: the same states."""
    often = train(method_of(name), config_of(evaluate={"moments": ALL_MOMENTS}), tiny)
    assert_same_end(often, straight(name))
    assert_same_end(train(method_of(name), config_of(evaluate={"moments": ["received"], "every": 99}), tiny), often)
    expected = {"received", "adapted", *({"global"} if METHODS[name].has_global else ())}
    assert [set(record.scores) for record in often.records] == [expected] + [{*expected, "trained"}] * ROUNDS


@every_method
def test_what_is_examined_is_what_is_predicted(name: str, straight: Straight, tiny: Federation) -> None:
    run = straight(name)
    loop, client = run.loop, "plain"
    model, state = built(run, client), run.loop.states[client]
    assert state is not None
    load(model, state)
    model.eval()
    x, draw = inputs(tiny.clients[client].test.x, loop.config), keyed_draw(CPU, "test")
    with torch.no_grad():
        seen = loop.method.examine(model, x, draw)
        assert torch.equal(seen.scores, loop.method.predict(model, x, draw))
    assert all(scores.shape == seen.scores.shape for scores in seen.paths.values())
    assert all(len(values) == len(x) for values in {**seen.means, **seen.spreads}.values())


@every_method
def test_global_generators_are_left_alone(name: str, tiny: Federation) -> None:
    before = global_generators()
    train(method_of(name), config_of(train={"rounds": 1}, evaluate={"moments": ALL_MOMENTS}), tiny)
    assert global_generators() == before


def global_generators() -> tuple[bytes, str, object]:
    return torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state(legacy=False)), random.getstate()


# --- states, traffic, inputs -----------------------------------------------------------------------------------------


@every_method
def test_states_keep_their_shape(name: str, straight: Straight) -> None:
    run = straight(name)
    for snapshot in run.snapshots:
        assert shapes(snapshot.server) == shapes(run.snapshots[0].server)
        for client, state in snapshot.clients.items():
            assert (state is None) == (snapshot.round == 0)
            assert state is None or shapes(state) == shapes(built(run, client).state_dict())


@every_method
def test_any_subset_of_uploads_aggregates(name: str, straight: Straight, tiny: Federation) -> None:
    run, last = straight(name), ROUNDS - 1
    server, now = run.snapshots[last].server, run.loop.now(last)
    sent = {c: run.loop.method.decode(run.engine.result(last, c).upload, now) for c in tiny.names}
    uploads = [Upload(c, len(d.train), sent[c]) for c, d in tiny.clients.items()]
    for count in range(1, len(uploads) + 1):
        for some in combinations(uploads, count):
            after = run.loop.method.aggregate(server, list(some), now)
            assert shapes(after) == shapes(server)
            assert all_finite(after)


@every_method
def test_traffic_is_what_is_declared_and_counted(name: str, straight: Straight) -> None:
    run = straight(name)
    loop = run.loop
    for round in range(ROUNDS):
        record = run.records[round + 1]
        for client, request in run.engine.requests[round].items():
            upload = run.engine.result(round, client).upload
            model = built(run, client)
            declared = loop.method.uploads(model, make_now(loop.method, loop.config, loop.info, model, round, client))
            assert loop.method.decode(upload, loop.now(round)).keys() == declared.keys()
            assert set(declared.values()) <= set(typing.get_args(Kind))
            assert record.up[client] == bytes_of(upload)
            assert record.down[client] == bytes_of(request.down)


@every_method
def test_inputs_are_not_changed(name: str, straight: Straight, tiny: Federation) -> None:
    run = straight(name)
    method, info, config = run.loop.method, run.loop.info, config_of(evaluate={"moments": ALL_MOMENTS})
    snapshot = run.snapshots[2]
    client, server, state = "tinted", snapshot.server, snapshot.clients["tinted"]
    assert state is not None
    now = run.loop.now(2)
    job = Job(method, config, info, tiny.clients[client], 2)
    with unchanged(server, state, {"x": job.data.train.x, "y": job.data.train.y}):
        down = method.send(server, client, replace(now, client=client))
        method.send(server, None, now)
        with unchanged(down):
            result = client_round(job, state, down)
            client_evaluate(job, state, down)
            client_receive(job, state, down)
            client_round(job, None, down)
        assert isinstance(result, Result)
        assert not same(result.state, state)
        uploads = [Upload(client, result.samples, result.upload), Upload("plain", 2, result.upload)]
        with unchanged(result.upload):
            method.aggregate(server, uploads, now)


@contextmanager
def unchanged(*states: State) -> Iterator[None]:
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    yield
    for state, copy in zip(states, before, strict=True):
        assert same(state, copy)


# --- losses do not wait for the device -------------------------------------------------------------------------------

WAITING = {
    "aten::_local_scalar_dense",  # .item(), float(), bool(), if tensor, .tolist() of one number
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::unique_dim_consecutive",
    "aten::_unique",
    "aten::_unique2",
    "aten::equal",
    "aten::bincount",
    "aten::repeat_interleave",
    "aten::lift_fresh",  # torch.tensor(...): a copy from the host
}


FETCHING = {Tensor.tolist, Tensor.numpy, Tensor.cpu}  # on a CPU these are no operation that could be seen


class Waited(Exception):
    """A loss did what a captured graph cannot."""


class NoFetching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FETCHING:
            raise Waited(func.__name__)
        return func(*args, **(kwargs or {}))


class NoWaiting(TorchDispatchMode):
    """Within it an operation that has to wait for the device, or whose shape depends on values, is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.name().split(".")[0]
        masks = operation in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if operation in WAITING or masks:
            raise Waited(operation)
        return func(*args, **(kwargs or {}))


def train_watched(method: Method, federation: Federation) -> Trained:
    """Three rounds with every step (forward, backward, update) under watch; the passes' `start` and `end` are free."""
    with ExitStack() as watch:

        def watched(each: Pass) -> Pass:
            def start(me: Me, now: Now) -> None:
                if each.start is not None:
                    each.start(me, now)
                watch.enter_context(NoFetching())
                watch.enter_context(NoWaiting())

            def end(me: Me, now: Now) -> None:
                watch.close()
                if each.end is not None:
                    each.end(me, now)

            return replace(each, start=start, end=end)

        return train(with_passes(method, watched), config_of(), federation)


@every_method
def test_no_step_waits_for_the_device(name: str, straight: Straight, tiny: Federation) -> None:
    run = train_watched(method_of(name), tiny)
    assert same(run.loop.server, straight(name).snapshots[-1].server)
    assert all(same(state, straight(name).snapshots[-1].clients[client]) for client, state in run.loop.states.items())


BAD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "item": lambda z, y: z.sum().item(),
    "float": lambda z, y: float(y.sum()),
    "if": lambda z, y: 1 if z.sum() > 0 else 2,
    "tolist": lambda z, y: sum(y.tolist()),
    "cpu": lambda z, y: z.cpu().sum(),
    "mask": lambda z, y: z[y == 1].sum(),
    "mask-put": lambda z, y: y.index_put((y > 0,), y[:1]).sum(),
    "masked-select": lambda z, y: z.masked_select(z > 0).sum(),
    "unique": lambda z, y: y.unique().sum(),
    "nonzero": lambda z, y: torch.nonzero(y).sum(),
    "where": lambda z, y: torch.where(y > 1)[0].sum(),
    "bincount": lambda z, y: torch.bincount(y).sum(),
    "tensor": lambda z, y: torch.tensor(2.0),
}


@pytest.mark.parametrize("bad", BAD)
def test_the_watch_sees_what_waits(bad: str, tiny: Federation) -> None:
    class Bad(Method):
        def loss(self, me: Me, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(me, x, y) + 0 * BAD[bad](me.model(x), y)

    with pytest.raises(Waited):
        train_watched(Bad(), tiny)


# --- what goes wrong at one client stays there -----------------------------------------------------------------------


class Tampered(Spy):
    """One client's upload is changed on its way in round 2 (counted from 0)."""

    victim = "tinted"

    def change(self, upload: State) -> State:
        raise NotImplementedError

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        answers = super().train(round, requests)
        answer = answers[self.victim]
        if round == 2 and isinstance(answer, Result):
            copy = {name: tensor.clone() for name, tensor in answer.upload.items()}
            answers[self.victim] = replace(answer, upload=self.change(copy))
        return answers


class NaNUpload(Tampered):
    def change(self, upload: State) -> State:
        first_float(upload)[1].view(-1)[-1] = torch.nan
        return upload


class WrongShape(Tampered):
    def change(self, upload: State) -> State:
        name, tensor = first_float(upload)
        return {**upload, name: tensor[:-1]}


class WrongType(Tampered):
    def change(self, upload: State) -> State:
        name, tensor = first_float(upload)
        return {**upload, name: tensor.double()}


class Missing(Tampered):
    def change(self, upload: State) -> State:
        upload.pop(first_float(upload)[0])
        return upload


class Unknown(Tampered):
    def change(self, upload: State) -> State:
        return {**upload, "of my own": torch.ones(2)}


class Dead(Spy):
    """The same client does not answer in that round."""

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        return super().train(round, requests) | ({"tinted": Failure("gone")} if round == 2 else {})


def first_float(state: State) -> tuple[str, Tensor]:
    return next((name, tensor) for name, tensor in state.items() if tensor.is_floating_point())


@pytest.fixture(scope="session")
def without(tiny: Federation) -> Straight:
    """Each method's run in which that client does not answer."""
    return cache(lambda name: train(method_of(name), config_of(train={"rounds": 3}), tiny, Dead))


KINDS = [WrongShape, WrongType, Missing, Unknown]  # every method sends what is not a number, and one of these in turn
UPLOADS = [(name, kind) for i, name in enumerate(EVERY) for kind in (NaNUpload, KINDS[i % len(KINDS)])]


@pytest.mark.parametrize(("name", "kind"), UPLOADS)
def test_a_bad_upload_is_refused_by_name(
    name: str, kind: type[Tampered], straight: Straight, without: Straight, tiny: Federation
) -> None:
    upload = straight(name).engine.result(2, "tinted").upload
    if not upload and kind is not Unknown:
        pytest.skip("sends nothing that could be bad")
    run = train(method_of(name), config_of(train={"rounds": 3}), tiny, kind)
    assert run.status == "finished"
    failed = run.records[3].failed
    assert set(failed) == {"tinted"}
    assert ("of my own" if kind is Unknown else first_float(upload)[0]) in failed["tinted"]
    assert run.snapshots[3].clients["tinted"] is run.snapshots[2].clients["tinted"]
    assert "tinted" not in run.records[3].up
    # The others are aggregated, as if this one had not answered at all.
    assert_same_end(run, without(name))
    if upload:
        assert not same(run.snapshots[3].server, run.snapshots[2].server)


def marked(federation: Federation, *names: str) -> Federation:
    """These clients' first training image is white all over."""
    clients = dict(federation.clients)
    for name in names:
        x = clients[name].train.x.clone()
        x[0] = 255
        clients[name] = replace(clients[name], train=Split(x, clients[name].train.y))
    return replace(federation, clients=clients)


def allergic(method: Method) -> Method:
    """The same method, whose loss is not a number on a batch with a white image."""

    def change(each: Pass) -> Pass:
        def loss(me: Me, x: Tensor, y: Tensor) -> Tensor | None:
            value = each.loss(me, x, y)
            bad = (x == 1).flatten(1).all(1).any()
            return None if value is None else value * torch.where(bad, torch.nan, 1.0)

        def step(me: Me, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
            assert each.step is not None
            bad = (x == 1).flatten(1).all(1).any()
            each.step(me, x * torch.where(bad, torch.nan, 1.0), y, optimizer)

        return replace(each, loss=loss, step=None if each.step is None else step)

    return with_passes(method, change)


@every_method
def test_a_client_that_diverges_stays_alone(name: str, tiny: Federation) -> None:
    config = config_of(train={"rounds": 2})
    run = train(allergic(method_of(name)), config, marked(tiny, "tinted"))
    assert run.status == "finished"
    for record in run.records[1:]:
        assert set(record.failed) == {"tinted"}
        assert "not finite" in record.failed["tinted"]
    assert run.loop.states["tinted"] is None
    assert all_finite(run.loop.server)
    for client in ("plain", "textured"):
        state = run.loop.states[client]
        assert state is not None
        assert all_finite(state)
        assert moved(run, client) > 0


@every_method
def test_a_run_whose_clients_all_diverge_ends(name: str, tiny: Federation) -> None:
    run = train(allergic(method_of(name)), config_of(), marked(tiny, *tiny.names))
    assert run.status == "diverged"
    assert [record.round for record in run.records] == [0, 1]
    assert set(run.records[1].failed) == set(tiny.names)
    assert same(run.snapshots[1].server, run.snapshots[0].server)
    assert all(state is None for state in run.loop.states.values())


# --- who takes part --------------------------------------------------------------------------------------------------


@every_method
def test_few_take_part(name: str, tiny: Federation) -> None:
    method = method_of(name)
    run = train(method, config_of(clients={"participation": 0.34}), tiny)
    assert_sound(run)
    for record, before, after in zip(run.records[1:], run.snapshots, run.snapshots[1:], strict=False):
        assert len(record.cohort) == 1
        assert set(record.up) == set(record.cohort)
        if (method.broadcast, method.trainers) == ("participants", "participants"):
            changed = {client for client in tiny.names if after.clients[client] is not before.clients[client]}
            assert changed == set(record.cohort) == set(record.down)


@every_method
def test_all_train_but_few_are_averaged(name: str, tiny: Federation) -> None:
    config = config_of(train={"rounds": 2}, clients={"participation": 0.34, "train": "all"})
    run = train(method_of(name), config, tiny)
    assert_sound(run)
    for record, before, after in zip(run.records[1:], run.snapshots, run.snapshots[1:], strict=False):
        assert set(record.up) == set(record.cohort)
        assert set(record.down) == set(record.logs) == set(tiny.names)
        assert all(after.clients[client] is not before.clients[client] for client in tiny.names)


@every_method
def test_all_are_told_but_few_train(name: str, tiny: Federation) -> None:
    """Who is told and does not train has then received, and nothing else."""
    config = config_of(
        train={"rounds": 2}, clients={"participation": 0.34, "broadcast": "all", "train": "participants"}
    )
    run = train(method_of(name), config, tiny)
    assert_sound(run)
    loop, before = run.loop, run.snapshots[1]
    for client in set(tiny.names) - set(run.records[2].cohort):
        job = Job(loop.method, config, loop.info, tiny.clients[client], 1)
        now = replace(loop.now(1), client=client)
        down = loop.method.encode(loop.method.send(before.server, client, now), now)
        assert same(client_receive(job, before.clients[client], down), run.loop.states[client])


@every_method
def test_drop_outs_leave_no_trace(name: str, straight: Straight, tiny: Federation) -> None:
    run = train(method_of(name), config_of(clients={"dropout": 0.5}), tiny)
    assert run.status == "finished"
    assert any(record.failed for record in run.records)
    assert any(record.up for record in run.records)
    for record, before, after in zip(run.records[1:], run.snapshots, run.snapshots[1:], strict=False):
        assert set(record.up) == set(tiny.names) - set(record.failed)
        for client, reason in record.failed.items():
            assert "dropped out" in reason
            assert after.clients[client] is before.clients[client]
        if not record.up:
            assert same(before.server, after.server)


@every_method
def test_nobody_is_left(name: str, tiny: Federation) -> None:
    with pytest.warns(UserWarning, match="every client failed"):
        run = train(method_of(name), config_of(clients={"dropout": 1.0}), tiny)
    assert run.status == "finished"
    assert all(set(record.failed) == set(tiny.names) for record in run.records[1:])
    assert same(run.loop.server, run.snapshots[0].server)
    assert all(state is None for state in run.loop.states.values())
    assert len({str(record.scores["received"]) for record in run.records}) == 1


SPARE: dict[str, dict[str, Any]] = {"fedios": {"max_clients": 4}}  # what a method needs so that somebody can join


@every_method
def test_a_client_that_was_not_in_training_gets_a_model(name: str, tiny: Federation) -> None:
    """It is sent what a stranger is, adapts it on its own data, and can take part from then on."""
    method, new = replace(method_of(name), **SPARE.get(name, {})), "textured"
    others = replace(tiny, clients={client: data for client, data in tiny.clients.items() if client != new})
    loop = train(method, config_of(train={"rounds": 2}), others).loop
    config = config_of(train={"rounds": 4}, evaluate={"moments": ["received", "adapted"], "splits": ["train"]})
    job = Job(method, config, replace(loop.info, later=(new,)), tiny.clients[new], 2)
    down = method.encode(method.send(loop.server, None, loop.now(2)), loop.now(2))
    with numerics(config.run, CPU):
        scores, result = client_evaluate(job, None, down), client_round(job, None, down)
    received, adapted = scores["received"]["train"], scores["adapted"]["train"]
    assert np.isfinite([received.loss, adapted.loss]).all()
    assert adapted.loss < received.loss
    assert isinstance(result, Result)
    now = make_now(method, config, job.info, loop.models[loop.info.arch], 2, new)
    assert method.decode(result.upload, now).keys() == method.uploads(loop.models[loop.info.arch], now).keys()


# --- data and models -------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("last", ["keep", "drop"])
def test_a_client_smaller_than_a_batch_trains(name: str, last: str, tiny: Federation) -> None:
    run = train(method_of(name), config_of(train={"rounds": 1, "batch": 32, "last_batch": last}), cut(tiny, [2, 7, 33]))
    assert_sound(run)
    for client in tiny.names:
        assert moved(run, client) > 1e-3


@every_method
def test_without_norm_layers(name: str, tiny: Federation) -> None:
    config = config_of(model={"name": "mlp", "hidden": [16, 8], "head_layers": 2}, train={"rounds": 3})
    run = train(method_of(name), config, tiny)
    assert_sound(run)
    assert_same_run(train(method_of(name), config, tiny, PoisonedSlots), run)
    assert all(moved(run, client) > 1e-3 for client in tiny.names)


@every_method
def test_a_constant_of_a_network_is_neither_kept_nor_sent(name: str, tiny: Federation) -> None:
    """It is a buffer that is not in the state: here the matrix that brings features to one width."""
    model = {"name": "mlp", "hidden": [16, 12], "features": 8, "adapter": "pool"}
    run = train(method_of(name), config_of(model=model, train={"rounds": 1}), tiny)
    assert_sound(run)
    kept = set(dict(built(run, "plain").named_buffers())) - set(built(run, "plain").state_dict())
    assert kept
    assert all(not kept & set(state or ()) for state in run.loop.states.values())


@every_method
def test_batch_norm_policy(name: str, tiny: Federation) -> None:
    """What travels under `local` is what travels under `shared` less all of batch norm, both ways; and so on."""
    crossing = {}
    for policy in ("shared", "local", "local-stats", "local-affine"):
        config = config_of(
            train={"bn": policy, "rounds": 2},
            model={"name": "lenet-bn", "head_layers": 2},
            clients={"participation": 0.67},
        )
        run = train(method_of(name), config, tiny)
        assert_sound(run)
        sent = [(r, c, "down", n) for r, of in run.engine.requests.items() for c in of for n in of[c].down]
        sent += [
            (r, c, "up", n) for r, of in run.engine.answers.items() for c in of for n in run.engine.result(r, c).upload
        ]
        # What is sent of one client alone (`of.<client>/...`, the heads of Fed-CO2) is not averaged and goes whole.
        crossing[policy] = {each for each in sent if not each[-1].startswith("of.")}
    # In this model every norm layer is called bn1, bn2 or bn3, and nothing else is.
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert crossing["local"] == {each for each in crossing["shared"] if ".bn" not in each[-1]}
    assert crossing["local-stats"] == {each for each in crossing["shared"] if not each[-1].endswith(statistics)}
    assert crossing["local-affine"] == crossing["local"] | (crossing["shared"] - crossing["local-stats"])


@every_method
def test_different_architectures(name: str, tiny: Federation) -> None:
    models = [{"name": "mlp", "hidden": [24, 16]}, {"name": "mlp", "hidden": [16]}]
    config, method = config_of(train={"rounds": 2}, model={"per_client": models}), method_of(name)
    if not method.mixed:
        with pytest.raises(ConfigError, match=f"{name} needs one architecture for all clients"):
            train(method, config, tiny)
        return
    run = train(method, config, tiny)
    assert_sound(run)
    keys = [set(state) for state in run.loop.states.values() if state is not None]
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]


# --- the training configuration --------------------------------------------------------------------------------------


@every_method
def test_adam(name: str, tiny: Federation) -> None:
    optimizer = {"name": "adam", "lr": 0.003}
    run = train(method_of(name), config_of(train={"rounds": 2, "optimizer": optimizer}), tiny)
    assert_sound(run)
    assert all(moved(run, client) > 1e-3 for client in tiny.names)


@every_method
def test_channels_last(name: str, straight: Straight, tiny: Federation) -> None:
    """Another memory format sums in another order: close to the plain run, and its own bits after a resume."""
    config = config_of(train={"rounds": 2}, run={"memory_format": "channels_last"})
    run = train(method_of(name), config, tiny)
    assert_sound(run)
    kept, plain = run.snapshots[1], straight(name).snapshots[1]
    for client, state in kept.clients.items():
        first = built(run, client).state_dict()
        assert far(state, plain.clients[client]) < 0.01 * far(state, first)
    clients = {c: None if state is None else deserialise(serialise(state)) for c, state in kept.clients.items()}
    again = train(method_of(name), config, tiny, start=Snapshot(1, deserialise(serialise(kept.server)), clients))
    assert_same_end(again, run)


@every_method
def test_clipped_gradients_move_little(name: str, straight: Straight, tiny: Federation) -> None:
    """A step moves by at most lr * clip / (1 - momentum) = 1e-5; no method makes a hundred of them in a round here."""
    run = train(method_of(name), config_of(train={"rounds": 1, "clip": 1e-4}), tiny)
    assert_sound(run)
    assert all(0 < moved(run, client) < 1e-3 for client in tiny.names)
    assert all(moved(straight(name), client) > 1e-2 for client in tiny.names)


@every_method
def test_cosine_schedule(name: str, straight: Straight, tiny: Federation) -> None:
    """The first round has the full learning rate; the later ones have less."""
    run = train(method_of(name), config_of(train={"schedule": "cosine"}), tiny)
    assert_sound(run)
    for client, state in straight(name).snapshots[1].clients.items():
        assert same(run.snapshots[1].clients[client], state)
        assert not same(run.snapshots[2].clients[client], straight(name).snapshots[2].clients[client])


# --- what a user is told, and what a method is for -------------------------------------------------------------------


@every_method
def test_a_method_says_what_it_is(name: str) -> None:
    cls = METHODS[name]
    assert cls.id == name == name.lower()
    for text in (cls.paper, cls.idea, cls.shares, cls.stays, cls.reveals, cls.newcomers, cls.group):
        assert text.strip()
    assert cls.bn in ("shared", "local", "local-stats", "local-affine")
    assert cls.weighting in ("samples", "uniform", "contribution")
    assert cls.broadcast in ("participants", "all")
    assert cls.trainers in ("participants", "all")
    assert cls.moment in MOMENTS
    assert cls.moment != "global" or cls.has_global


@every_method
def test_what_a_method_shows_has_words(name: str, straight: Straight) -> None:
    """Every name that it logs, losses aside, or shows at an evaluation; quantiles by what they are of."""
    record = straight(name).records[-1]
    shown = {log for logs in record.logs.values() for log in logs if not log.startswith("loss/")}
    for score in record.scores["received"]["test"].values():
        shown |= {*score.paths, *(value.partition("/q")[0] for value in score.inside)}
    assert shown == set(METHODS[name].shows)


@every_method
def test_hyper_parameters_have_defaults_and_docs(name: str) -> None:
    cls = METHODS[name]
    assert "__dataclass_fields__" in vars(cls)
    for f in dataclasses.fields(cls):
        assert f.metadata.get("doc"), f.name
        assert f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING, f.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().anything = 1  # type: ignore[attr-defined]


@every_method
def test_learns(name: str, tiny: Federation) -> None:
    """Ten classes: chance is 10 %."""
    method = method_of(name)
    config = config_of(train={"rounds": 9, "batch": 10, "epochs": 2}, evaluate={"every": 9, "moments": ALL_MOMENTS})
    run = train(method, config, tiny)
    assert_sound(run)
    scores = run.records[-1].scores[method.moment]["test"].values()
    assert sum(score.correct for score in scores) / sum(score.total for score in scores) > 0.4
