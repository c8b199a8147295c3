"""What a client stores between its rounds: which leaves, and that nobody can see from outside that it is no more."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedprism as fp
from fedprism import api
from fedprism.config import Config, structure
from fedprism.conformance.case import storing_everything
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods import METHODS, leaves
from fedprism.methods.base import Arch, Client, Context, Info, Method, Net, Pass, State, Upload, load
from fedprism.methods.fedbn import FedBN
from fedprism.methods.fedphp import FedPHP
from fedprism.records import RunDirectory
from fedprism.round.client import (
    Job,
    arrive,
    client_model,
    client_receive,
    client_round,
    make_info,
    open_slot,
    stored_bytes,
)
from fedprism.round.engine import Result
from fedprism.round.events import Callback, RoundRecord, Snapshot
from fedprism.store import clients as client_store
from fedprism.store.serialize import size
from tests.harness import NOTHING, Collect, by_method, config_of, loop_for, models_of, part, same

pytestmark = pytest.mark.full

BN = {"name": "lenet-bn"}


# --- which leaves ----------------------------------------------------------------------------------------------------


def after_a_round(method: Method, federation: Federation, **sections: Any) -> tuple[State, State]:
    """What the first client has stored after a round, and all leaves of its model."""
    train = {"rounds": 1, **sections.pop("train", {})}
    loop = loop_for(method, config_of(model=BN, train=train, **sections), federation)
    assert loop.run([]) == "finished"
    state = loop.states["plain"]
    assert state is not None
    return state, models_of(loop)["plain"]


@dataclass(frozen=True)
class Head(Method):
    """Bodies of one's own."""

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "head")


@dataclass(frozen=True)
class HeadLater(Method):
    """Everything in the first round, later the head alone."""

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "head") if ctx.round else leaves.everything(model)


@dataclass(frozen=True)
class Mixes(Head):
    def receive(self, client: Client, ctx: Context) -> None:
        own = leaves.tensors(client.model)
        load(client.model, {name: (own[name] + tensor) / 2 for name, tensor in ctx.download.items()})


@dataclass(frozen=True)
class SendsLess(Head):
    def send(self, server: State, client_id: str | None, ctx: Context) -> State:
        return dict(list(super().send(server, client_id, ctx).items())[:1])


@dataclass(frozen=True)
class AsTrained(Head):
    moment = "trained"


@pytest.mark.parametrize(
    ("method", "stays"),
    [
        (Method(), ()),
        (FedBN(), ("body.bn",)),
        (Head(), ("body.",)),
        (HeadLater(), ("body.", "head.")),
        (Mixes(), ("body.", "head.")),
        (SendsLess(), ("body.", "head.")),
        (AsTrained(), ("body.", "head.")),
    ],
    ids=lambda given: type(given).__name__,
)
def test_by_default_what_every_round_sends_is_not_stored(
    method: Method, stays: tuple[str, ...], tiny: Federation
) -> None:
    state, model = after_a_round(method, tiny)
    assert same(state, {name: tensor for name, tensor in model.items() if name.startswith(stays)})
    assert list(state) == [name for name in model if name in state]


def test_the_batch_norm_policy_decides_here_too(tiny: Federation) -> None:
    norms = [name for name in after_a_round(Method(), tiny)[1] if ".bn" in name]
    for policy, stays in (("local", 15), ("local-stats", 9), ("local-affine", 6)):
        state, _ = after_a_round(Method(), tiny, train={"bn": policy})
        assert set(state) <= set(norms)
        assert len(state) == stays, policy


def test_a_leaf_that_is_not_there_is_refused(tiny: Federation) -> None:
    @dataclass(frozen=True)
    class Odd(Method):
        def stored(self, model: Net, ctx: Context) -> Collection[str]:
            return ("tail.weight",)

    with pytest.raises(ConfigError, match=r"odd\.stored names tail\.weight, which the model does not have"):
        after_a_round(Odd(), tiny)


@pytest.mark.parametrize("name", list(METHODS))
def test_methods_that_store_nothing(name: str, tiny: Federation) -> None:
    config = config_of(model=BN, method=name)
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    method = METHODS[name]()
    kept = stored_bytes(method, config, info, "plain")
    whole = size(method.build(info.arch, "plain", info, 0).state_dict())
    assert (kept == 0) == (name in NOTHING)
    assert kept <= whole
    assert kept == whole or method.moment != "trained"


def test_bytes_are_those_of_the_round_that_stores_most(tiny: Federation) -> None:
    @dataclass(frozen=True)
    class Grows(Method):
        def stored(self, model: Net, ctx: Context) -> Collection[str]:
            return leaves.part(model, "head") if ctx.round else ()

    config = config_of(model=BN)
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    assert stored_bytes(Grows(), config, info, "plain") == size(part(info.arch.model(0).state_dict(), "head."))


# --- what is not stored ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted(Method):
    """A number, a counter and a mark that nobody stores or sends."""

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        for name, value in (("number", 1.0), ("counter", 3), ("mark", False)):
            model.register_buffer(name, torch.tensor(value))
        return model

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "body", "head")

    def stored(self, model: Net, ctx: Context) -> Collection[str]:
        return ()


def test_what_is_not_stored_holds_no_number_on_arrival(tiny: Federation) -> None:
    """Also in a slot that another client has used; in its first round a client has its first values."""
    config = config_of(model=BN)
    loop = loop_for(Counted(), config, tiny)
    job = Job(Counted(), config, loop.info, tiny.clients["plain"], 1)
    slot, other = open_slot(job), tiny.clients["tinted"]
    for state, number, counter, mark in ((None, 1.0, 3, False), ({}, None, torch.iinfo(torch.int64).min, True)):
        client_round(Job(Counted(), config, loop.info, other, 1), None, loop.server, slot)
        arrive(slot, job, state, loop.server)
        assert slot.model.number.isnan() if number is None else slot.model.number == number
        assert (int(slot.model.counter), bool(slot.model.mark)) == (counter, mark)
        assert same(part(slot.model.state_dict(), "body."), part(loop.server, "body."))
        assert client_receive(job, state, loop.server, slot) == {}


def test_a_model_is_all_leaves_as_received_and_changes_nothing(tiny: Federation) -> None:
    loop = loop_for(FedBN(), config_of(model=BN), tiny)
    assert loop.run([]) == "finished"
    job = Job(FedBN(), loop.config, loop.info, tiny.clients["plain"], 3)
    state = loop.states["plain"]
    assert state is not None
    before = {name: tensor.clone() for name, tensor in state.items()}
    model = client_model(job, state, loop.server)
    assert same(model, {name: {**loop.server, **state}[name] for name in model})
    assert same(state, before)
    adapted = client_model(Job(METHODS["finetune"](), loop.config, loop.info, job.data, 3), {}, model, adapted=True)
    assert not same(adapted, model)


def test_an_upload_shares_no_memory_with_the_slot(tiny: Federation) -> None:
    """Leaves that are sent and not stored are copied by themselves."""
    loop = loop_for(Method(), config_of(model=BN), tiny)
    job = Job(Method(), loop.config, loop.info, tiny.clients["plain"], 0)
    slot = open_slot(job)
    result = client_round(job, None, loop.server, slot)
    assert isinstance(result, Result)
    assert result.state == {}
    own = {tensor.data_ptr() for tensor in leaves.tensors(slot.model).values()}
    assert not own & {tensor.data_ptr() for tensor in result.upload.values()}


# --- what is seen from outside ---------------------------------------------------------------------------------------


def assert_served_alike(method: Method, tiny: Federation, **sections: Any) -> None:
    """Records and models are those of a run whose clients store everything; one client has missed the last round."""
    settings = ["train.batch_size=16", "clients.participation=0.67", "run.device=cpu", "run.engine=inprocess"]
    runs = [
        fp.train(tiny, method=each, rounds=3, out=False, settings=settings, **sections)
        for each in (method, storing_everything(method))
    ]
    one, other = runs
    assert (one.path / "metrics.jsonl").read_bytes() == (other.path / "metrics.jsonl").read_bytes()
    for client_id, data in tiny.clients.items():
        images = data.test.x.numpy()
        few, all_of_it = one.models[client_id], other.models[client_id]
        assert same(leaves.tensors(few.module), leaves.tensors(all_of_it.module))
        assert (few.predict(images) == all_of_it.predict(images)).all()
        assert (few.probabilities(images) == all_of_it.probabilities(images)).all()


@pytest.mark.parametrize("name", by_method())
def test_models_are_those_of_clients_that_store_everything(name: str, tiny: Federation) -> None:
    assert_served_alike(METHODS[name](), tiny)


@pytest.mark.parametrize(
    "method", [FedPHP(inference="local"), METHODS["fedios"](), METHODS["finetune"]()], ids=["fedphp", "fedios", "tuned"]
)
def test_models_of_other_moments_are_those_of_clients_that_store_everything(method: Method, tiny: Federation) -> None:
    assert method.moment == ("adapted" if method.id == "finetune" else "trained")
    assert_served_alike(method, tiny)


# --- on disk ---------------------------------------------------------------------------------------------------------

MANY = 200


def many(where: str, method: str = "fedavg", **run: Any) -> Config:
    return structure(
        {
            "method": method,
            "model": {"name": "lenet-bn"},
            "data": {"name": f"synthetic?clients={MANY},samples=4", "partition": {"name": "domain"}},
            "train": {"rounds": 4},
            "clients": {"participation": 0.1, "state": where},
            "evaluate": {"clients": "participants"},
            "run": {"engine": "inprocess", "device": "cpu", "checkpoint_every": 1, **run},
        },
        Config,
    )


class Look(Callback):
    """Counts the files of clients after every round."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.states: list[int] = []

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        self.states.append(len(list((self.path / "states").iterdir())))


def manifest(path: Path, round: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "checkpoints" / f"manifest-{round:06d}.json").read_text())
    return found


def test_two_hundred_clients_that_store_nothing_need_no_file(tmp_path: Path) -> None:
    straight, look = tmp_path / "straight", Look(tmp_path / "straight")
    run = api.run_config(many("disk"), "x", out=straight, callbacks=[look])
    assert look.states == [0] * 5
    named = {manifest(straight, round)["server"] for round in (3, 4)}
    files = {path.stem for path in (straight / "checkpoints" / "files").iterdir()}
    assert named <= files
    assert len(files) <= 3  # the server's, of the last two checkpoints and of the best
    trained = {client_id for record in run.record.rounds for client_id in record.cohort}
    clients = manifest(straight, 4)["clients"]
    assert 20 < len(trained) < MANY == len(clients)
    assert {client_id for client_id, checksum in clients.items() if checksum == ""} == trained
    assert {checksum for checksum in clients.values() if checksum != ""} == {None}


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_run_without_files_of_clients_is_resumed_bit_by_bit(tmp_path: Path, where: str) -> None:
    straight = api.run_config(many(where), "x", out=tmp_path / "straight")
    path = tmp_path / "run"

    class Stop(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            if record.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.run_config(many(where), "x", out=path, callbacks=[Stop()])
    with RunDirectory.open(path) as directory:
        snapshot = directory.latest()
        assert snapshot is not None
        assert {client_id for client_id, state in snapshot.clients.items() if state == {}}
        assert not any(snapshot.clients.values())
    resumed = api.resume(path)
    assert resumed.status == "finished"
    for name in ("metrics.jsonl", "classes.json"):
        assert (path / name).read_bytes() == (straight.path / name).read_bytes()
    with RunDirectory.open(path) as one, RunDirectory.open(straight.path) as other:
        a, b = one.latest(), other.latest()
        assert a is not None
        assert b is not None
        assert same(a.server, b.server)
        assert dict(a.clients) == dict(b.clients)
    assert not (path / "states").exists()


def test_clients_that_store_a_little_have_small_files(tmp_path: Path) -> None:
    """Of FedBN, the norm layers."""
    look = Look(tmp_path / "run")
    run = api.run_config(many("disk", "fedbn"), "x", out=tmp_path / "run", callbacks=[look])
    trained = {client_id for record in run.record.rounds for client_id in record.cohort}
    assert look.states[-1] == len(trained) > 20
    clients = manifest(run.path, 4)["clients"]
    named = {checksum for checksum in clients.values() if checksum is not None}
    assert "" not in named
    sizes = [(run.path / "checkpoints" / "files" / f"{checksum}.safetensors").stat().st_size for checksum in named]
    assert max(sizes) < 5000  # of a model of 192 kB


def test_how_many_clients_run_at_a_time_follows_from_what_they_store(
    tiny: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("fedprism.round.loop.clients_at_once", lambda largest, workers: asked.append(largest) or 7)
    for method in (Method(), FedBN(), METHODS["local"]()):
        loop_for(method, config_of(model=BN, clients={"state": "disk"}), tiny)
    nothing, norms, whole = asked
    assert nothing == 0 < norms < 5000 < whole
    assert client_store.clients_at_once(nothing) == client_store.AT_ONCE


# --- in a run --------------------------------------------------------------------------------------------------------


def test_a_snapshot_holds_what_is_stored(tiny: Federation) -> None:
    seen, loop = Collect(), loop_for(Head(), config_of(model=BN), tiny)
    assert loop.run([seen]) == "finished"
    for snapshot in seen.snapshots[1:]:
        for state in snapshot.clients.values():
            assert state is not None
            assert state.keys() == {name for name in leaves.everything(loop.models[loop.info.arch]) if "body" in name}


def test_a_pass_may_read_what_start_has_written(tiny: Federation) -> None:
    """What is not stored may still be used within a round: `start` fills it before anything reads it."""

    @dataclass(frozen=True)
    class Fills(Counted):
        def receive(self, client: Client, ctx: Context) -> None:
            super().receive(client, ctx)
            client.model.number.fill_(2.0)
            client.model.counter.fill_(0)
            client.model.mark.fill_(False)

        stored = Counted.stored  # which would store everything otherwise, since `receive` is its own

        def passes(self, client: Client, ctx: Context) -> list[Pass]:
            return [Pass(self.scaled)]

        def scaled(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(client, x, y) * client.model.number

    method = Fills()
    one, other = (loop_for(each, config_of(model=BN), tiny) for each in (method, storing_everything(method)))
    assert one.run([]) == other.run([]) == "finished"
    assert same(one.server, other.server)
    assert all(same(model, models_of(other)[client_id]) for client_id, model in models_of(one).items())
    assert not any(one.states.values())


# --- methods that derive from one that stores little -----------------------------------------------------------------


def keeping_the_larger(name: str) -> type[Method]:
    """A method that reads what it had before it receives."""
    parent: Any = METHODS[name]

    @dataclass(frozen=True)
    class Keeps(parent):  # type: ignore[misc]
        def receive(self, client: Client, ctx: Context) -> None:
            names = leaves.parameters(client.model)
            before = {name: leaves.tensors(client.model)[name].clone() for name in names}
            super().receive(client, ctx)
            load(client.model, {n: torch.maximum(t, leaves.tensors(client.model)[n]) for n, t in before.items()})

    return Keeps


@pytest.mark.parametrize("name", by_method([name for name in METHODS if name != "local"]))
def test_a_receive_of_ones_own_finds_what_it_reads(name: str, tiny: Federation) -> None:
    """Whatever the method that it derives from stores for its own `receive`."""
    assert_served_alike(keeping_the_larger(name)(), tiny)


def test_a_moment_of_ones_own_keeps_the_trained_model() -> None:
    class Trained(METHODS["apfl"]):  # type: ignore[misc, name-defined]
        moment = "trained"

    class Settings(METHODS["apfl"]):  # type: ignore[misc, name-defined]
        paper = "none"

    class Shares(METHODS["apfl"]):  # type: ignore[misc, name-defined]
        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            return leaves.part(model, "common.head") if ctx.round % 2 else super().shared(model, ctx)

    assert Trained.stored is Shares.stored is Method.stored
    assert Settings.stored is METHODS["apfl"].stored


def test_what_a_parent_stores_is_not_enough_where_less_is_shared(tiny: Federation) -> None:
    """A client finds its own layer in a round in which it is not sent one, where its parent relies on that."""

    class Alternates(METHODS["lg-fedavg"]):  # type: ignore[misc, name-defined]
        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            return leaves.part(model, "head") + (() if ctx.round % 2 else leaves.part(model, "body.fc1"))

    settings = {"train": {"rounds": 5}, "clients": {"participation": 0.6}}

    class SendsFew(METHODS["pfedme"]):  # type: ignore[misc, name-defined]
        def send(self, server: State, client_id: str | None, ctx: Context) -> State:
            sent = super().send(server, client_id, ctx)
            return dict(list(sent.items())[:2]) if ctx.round else sent

    for method in (Alternates(warmup=0), SendsFew()):
        loop, seen = loop_for(method, config_of(**settings), tiny), Collect()
        assert loop.run([seen]) == "finished"
        assert not any(record.failed for record in seen.records)


def test_a_trained_model_that_is_not_stored_is_not_served(tmp_path: Path) -> None:
    """Instead of its leaves those of the first model would answer."""

    @dataclass(frozen=True)
    class Tested(Method):
        moment = "trained"

        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            return leaves.part(model, "body")

        def stored(self, model: Net, ctx: Context) -> Collection[str]:
            return leaves.others(model, ctx.shared)

    federation = fp.make_federation("digits-skew", clients=2, seed=0, samples=20)
    run = fp.train(federation, Tested(), "mlp", rounds=1, out=tmp_path / "run")
    with pytest.raises(FedprismError, match=r"tested is tested as clients leave .* has not stored body\.fc1\.bias"):
        run.models["plain-1" if "plain-1" in federation.names else federation.names[0]]


@pytest.mark.parametrize("state", ["memory", "disk"])
def test_what_is_stored_does_not_depend_on_data(state: str, tiny: Federation) -> None:
    class ByData(Method):
        def stored(self, model: Net, ctx: Context) -> Collection[str]:
            return leaves.everything(model) if len(ctx.local.train) > 20 else ()

    with pytest.raises(FedprismError, match="where there is no data: on the server, or in `stored`"):
        loop_for(ByData(), config_of(clients={"state": state}), tiny).run([])


class LateHead(Method):
    """What travels depends on the client: one takes the head alone, after the first round."""

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        late = ctx.client_id == "textured" and ctx.round > 0
        return leaves.part(model, "head") if late else leaves.everything(model)

    def decode(self, state: State, ctx: Context) -> State:
        return state if ctx.data is None else {name: state[name] for name in ctx.shared}

    def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
        return {**server, **uploads[0].state}


def test_clients_may_share_other_leaves_than_others(tiny: Federation) -> None:
    """No client goes on with what another one has left in its slot."""
    few, everything = (loop_for(each, config_of(), tiny) for each in (LateHead(), storing_everything(LateHead())))
    assert few.run([]) == everything.run([]) == "finished"
    assert same(few.server, everything.server)
    assert few.states["textured"] is not None
    assert few.states["textured"].keys() == set(leaves.everything(few.models[few.info.arch]))


@pytest.mark.parametrize("attribute", ["round", "lr", "is_new", "download", "steps"])
def test_what_is_shared_is_not_constant_if_it_looks_at_the_round(attribute: str, tiny: Federation) -> None:
    class Looks(Method):
        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            getattr(ctx, attribute)
            return super().shared(model, ctx)

    class LooksBehind(Method):
        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            return super().shared(model, ctx.replace(client_id=str(getattr(ctx, attribute))))

    class LooksAtACopy(Method):
        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            getattr(ctx.replace(client_id=None), attribute)
            return super().shared(model, ctx)

    class LooksInside(Method):
        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            assert attribute in vars(ctx)
            return super().shared(model, ctx)

    class LooksElsewhere(Method):
        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            assert ctx.client_id in (None, *ctx.info.clients)
            assert ctx.rounds
            assert ctx.data is None or len(ctx.local.train)
            return super().shared(model, ctx)

    for method in (Looks(), LooksBehind(), LooksAtACopy(), LooksInside()):
        assert after_a_round(method, tiny)[0], "everything is stored"
    assert not after_a_round(LooksElsewhere(), tiny)[0]


def test_what_is_stored_does_not_take_longer_with_more_rounds(tiny: Federation) -> None:
    """A question that is asked for each round would take hours here."""
    loop = loop_for(METHODS["fedcp"](), config_of(train={"rounds": 10**9}), tiny)
    record, _ = loop.one_round(0)
    assert not record.failed


@pytest.mark.parametrize("what", [None, "body.fc1.weight"])
def test_names_of_what_is_stored_are_a_collection(what: Any, tiny: Federation) -> None:
    class Says(Method):
        def stored(self, model: Net, ctx: Context) -> Collection[str]:
            return what  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match=f"says.stored returned {what!r}; expected a collection of names of leaves"):
        loop_for(Says(), config_of(), tiny).run([])
