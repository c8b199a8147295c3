"""The round loop: who takes part, who fails, what is counted, when a run ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedprism.config import Config, structure
from fedprism.engines.inprocess import InProcess
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import ClientData, Federation, Split, base, make_federation
from fedprism.methods.base import Client, Context, Method, Net, Pass, State, UploadKind
from fedprism.methods.ditto import Ditto
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedbn import FedBN
from fedprism.methods.fedproto import FedProto
from fedprism.methods.fedprox import FedProx
from fedprism.methods.lg_fedavg import LGFedAvg
from fedprism.methods.local import Local
from fedprism.methods.states import not_finite, same_tensors
from fedprism.round.client import make_info
from fedprism.round.engine import Checked, Failure, Result
from fedprism.round.loop import draw_cohort, drop_outs
from fedprism.round.server import accept
from fedprism.schedules import learning_rate
from tests.harness import CPU, Collect, loop_for, models_of, same


@pytest.fixture(scope="module")
def three() -> Federation:
    return make_federation("digits-skew", clients=3, seed=0, samples=24)


def config(**sections: Any) -> Config:
    return structure({"train": {"rounds": 2}, "model": {"name": "mlp"}, **sections}, Config)


def run(method: Method, settings: Config, data: Federation) -> tuple[Any, Collect, str]:
    seen = Collect()
    loop = loop_for(method, settings, data)
    return loop, seen, loop.run([seen])


# --- who takes part --------------------------------------------------------------------------------------------------


def info_of(count: int) -> Any:
    names = [f"c{i:03d}" for i in range(count)]
    return make_info(config(), names, 10, (3, 16, 16))


@pytest.mark.parametrize(("share", "expected"), [(1.0, 50), (0.5, 25), (0.05, 3), (0.001, 1)])
def test_a_share_of_the_clients_takes_part_and_never_nobody(share: float, expected: int) -> None:
    clients = config(clients={"participation": share}).clients
    cohorts = [draw_cohort(clients, info_of(50), round) for round in range(8)]
    assert {len(cohort) for cohort in cohorts} == {expected}
    assert all(list(cohort) == sorted(cohort) and len(set(cohort)) == expected for cohort in cohorts)
    assert expected == 50 or len(set(cohorts)) > 1, "every round draws anew"


def test_a_range_draws_the_share_anew_each_round() -> None:
    clients = config(clients={"participation": [0.1, 1.0]}).clients
    sizes = [len(draw_cohort(clients, info_of(100), round)) for round in range(400)]
    assert min(sizes) >= 10
    assert max(sizes) <= 100
    assert abs(sum(sizes) / len(sizes) - 55) < 5
    assert min(sizes) < 20
    assert max(sizes) > 90


def test_drop_outs_follow_their_probability() -> None:
    clients, info = config(clients={"dropout": 0.3}).clients, info_of(1000)
    lost = drop_outs(clients, info, info.clients, 0)
    assert 240 < len(lost) < 360
    assert lost != drop_outs(clients, info, info.clients, 1)


def test_everybody_drops_out_and_the_old_state_is_kept(three: Federation) -> None:
    with pytest.warns(UserWarning, match="in round 1 every client failed .dropped out after training."):
        loop, seen, status = run(FedAvg(), config(clients={"dropout": 1.0}), three)
    assert status == "finished"
    assert all(state is None for state in loop.states.values())
    assert all(same(seen.snapshots[0].server, s.server) for s in seen.snapshots)
    assert seen.records[1].failed == dict.fromkeys(three.names, "dropped out after training")
    assert set(seen.records[1].down) == set(three.names), "what was sent was sent"
    assert seen.records[1].up == {}


def test_absent_clients_keep_their_very_state(three: Federation) -> None:
    _, seen, _ = run(FedBN(), config(train={"rounds": 4}, clients={"participation": 0.34}), three)
    for before, after, record in zip(seen.snapshots, seen.snapshots[1:], seen.records[1:], strict=False):
        assert len(record.cohort) == 1
        for client_id in three.names:
            assert (before.clients[client_id] is after.clients[client_id]) == (client_id not in record.cohort)


# --- who receives, who trains ----------------------------------------------------------------------------------------


def test_broadcast_to_all_reaches_those_who_do_not_train(three: Federation) -> None:
    settings = config(clients={"participation": 0.34, "broadcast": "all"})
    loop, seen, _ = run(FedAvg(), settings, three)
    assert set(seen.records[1].down) == set(three.names)
    assert set(seen.records[1].up) == set(seen.records[1].cohort)
    idle = next(c for c in three.names if c not in seen.records[2].cohort)
    # The last thing it was sent is the server's state after the first round.
    assert same(models_of(loop)[idle], seen.snapshots[1].server)
    assert loop.states[idle] == {}, "it keeps nothing of it"


def test_all_train_but_only_the_cohort_is_averaged(three: Federation) -> None:
    settings = config(train={"rounds": 1}, clients={"participation": 0.34, "train": "all"})
    loop, seen, _ = run(FedAvg(), settings, three)
    (alone,) = seen.records[1].cohort
    assert all(state is not None for state in loop.states.values())
    assert set(seen.records[1].up) == {alone}
    assert same(loop.server, models_of(loop)[alone])
    assert not any(same(loop.server, model) for c, model in models_of(loop).items() if c != alone)


# --- what is counted and recorded ------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_state_as_sent(three: Federation) -> None:
    _, seen, _ = run(FedAvg(), config(), three)
    # mlp: 768-128-64-10 with biases, four bytes per number.
    size = 4 * (768 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10)
    assert set(seen.records[1].up.values()) == set(seen.records[1].down.values()) == {size}
    assert seen.records[0].up == seen.records[0].down == {}
    _, quiet, _ = run(Local(), config(), three)
    assert set(quiet.records[1].up.values()) == {0}


def test_rounds_make_one_record_more_than_rounds(three: Federation) -> None:
    _, seen, _ = run(FedAvg(), config(train={"rounds": 5}, evaluate={"every": 2}), three)
    assert [record.round for record in seen.records] == [0, 1, 2, 3, 4, 5]
    assert [bool(record.scores) for record in seen.records] == [True, False, True, False, True, True]
    assert set(seen.records[0].scores) == {"received"}
    assert set(seen.records[2].scores) == {"received", "trained"}


def test_scores_are_counts_of_the_clients_own_images(three: Federation) -> None:
    _, seen, _ = run(FedAvg(), config(evaluate={"train_loss": True}), three)
    scores = seen.records[-1].scores["received"]
    assert set(scores) == {"train", "validation", "test"}
    for name, data in three.clients.items():
        value = scores["test"][name]
        assert value.total == len(data.test) == sum(value.actual) == sum(value.predicted)
        assert value.correct == sum(value.right)
        assert value.actual == tuple(torch.bincount(data.test.y, minlength=10).tolist())


def test_evaluating_participants_alone(three: Federation) -> None:
    settings = config(clients={"participation": 0.34}, evaluate={"clients": "participants"})
    _, seen, _ = run(FedAvg(), settings, three)
    for record in seen.records[1:]:
        assert set(record.scores["received"]["test"]) == set(record.cohort)


def test_global_moment_where_there_is_a_global_model(three: Federation) -> None:
    settings = config(evaluate={"moments": ["received", "global"]})
    _, seen, _ = run(FedAvg(), settings, three)
    assert seen.records[-1].scores["global"] == seen.records[-1].scores["received"]
    _, ditto, _ = run(Ditto(), settings, three)
    assert ditto.records[-1].scores["global"] == seen.records[-1].scores["global"], "Ditto's common model is FedAvg's"
    _, personal, _ = run(FedBN(), settings, three)
    assert "global" not in personal.records[-1].scores


@dataclass(frozen=True)
class Tuned(Method):
    """FedAvg that is fine-tuned before the test."""

    def adapt(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, "tune", epochs=3)]


def test_adapted_is_tested_on_a_copy_that_is_thrown_away(three: Federation) -> None:
    settings = config(evaluate={"moments": ["received", "adapted"]})
    loop, seen, _ = run(Tuned(), settings, three)
    plain, _, _ = run(FedAvg(), settings, three)
    scores = seen.records[-1].scores
    assert scores["adapted"] != scores["received"]
    assert same(loop.server, plain.server)
    assert all(same(models_of(loop)[c], models_of(plain)[c]) for c in three.names)


def test_server_learning_rate_goes_half_way(three: Federation) -> None:
    whole, _, _ = run(FedAvg(), config(train={"rounds": 1}), three)
    half, seen, _ = run(FedAvg(), config(train={"rounds": 1}, server={"lr": 0.5}), three)
    for name, first in seen.snapshots[0].server.items():
        torch.testing.assert_close(half.server[name], first + 0.5 * (whole.server[name] - first))


# --- what fails ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Poisoned(Method):
    """FedAvg in which the named clients send something else."""

    who: tuple[str, ...] = ()
    how: str = "nan"

    def upload(self, client: Client, ctx: Context) -> State:
        state = super().upload(client, ctx)
        if ctx.client_id not in self.who:
            return state
        name = next(iter(state))
        changed = {"nan": state[name] * float("nan"), "shape": state[name][:1], "inf": state[name] + float("inf")}
        if self.how == "missing":
            return {n: t for n, t in state.items() if n != name}
        return {**state, name: changed[self.how]}


@pytest.mark.parametrize(
    ("how", "words"),
    [("nan", "not finite"), ("inf", "not finite"), ("shape", "shape"), ("missing", "missing or unknown")],
)
def test_a_bad_upload_is_refused_and_the_others_go_on(three: Federation, how: str, words: str) -> None:
    loop, seen, status = run(Poisoned(who=("tinted",), how=how), config(), three)
    assert status == "finished"
    for record in seen.records[1:]:
        assert list(record.failed) == ["tinted"]
        assert words in record.failed["tinted"]
        assert "body.fc1.weight" in record.failed["tinted"]
        assert set(record.up) == {"plain", "textured"}
    assert loop.states["tinted"] is None, "its state stays as it was before the round"
    assert loop.states["plain"] is not None


def test_all_uploads_non_finite_is_diverged(three: Federation) -> None:
    loop, seen, status = run(Poisoned(who=three.names), config(train={"rounds": 9}), three)
    assert status == seen.status == "diverged"
    assert [record.round for record in seen.records] == [0, 1]
    assert same(loop.server, seen.snapshots[0].server)


def test_a_learning_rate_that_explodes_is_diverged(three: Federation) -> None:
    settings = config(train={"rounds": 9, "optimizer": {"lr": 1e30}})
    for method in (FedAvg(), Local()):
        loop, seen, status = run(method, settings, three)
        assert status == "diverged"
        reason = seen.records[-1].failed["plain"]
        assert "not finite after local training" in reason or "far from what is usual" in reason
        assert all(t.isfinite().all() for t in loop.server.values())


def test_uploads_are_accepted_or_refused_by_hand() -> None:
    server = {"w": torch.zeros(2)}
    good = {"w": torch.ones(2), "n": torch.tensor(3)}
    given: dict[str, State] = {
        "good": good,
        "infinite": {**good, "n": torch.tensor(float("inf"))},
        "wide": {**good, "n": torch.ones(3)},
        "short": {"w": torch.ones(2)},
        "double": {**good, "w": torch.ones(2, dtype=torch.float64)},
        "not a number": {"w": torch.tensor([1.0, float("nan")]), "n": torch.tensor(float("nan"))},
    }
    download = {"w": torch.tensor([0.5, 1.0])}
    ctx = Context(0, 1, info_of(1), config().train, 0.05, "samples", "c000", download=download)
    declared: dict[str, UploadKind] = {"w": "weights", "n": "scalar"}

    def accepted(upload: State, limit: float = 1.0, **more: Any) -> Checked | Failure:
        return accept(FedAvg(), (), Result({}, upload, {}, {}, **more), declared, server, ctx, limit)

    answers = {name: accepted(upload) for name, upload in given.items()}
    found = answers.pop("good")
    assert isinstance(found, Checked)
    assert same_tensors(found.upload, good)
    assert found.length == 0.5, "(1, 1) from (0.5, 1); the scalar is not measured"
    assert answers == {
        "infinite": Failure("n in its upload is not finite", non_finite=True),
        "wide": Failure("n in its upload is torch.float32 of shape (3,), expected torch.float32 of shape ()"),
        "double": Failure("w in its upload is torch.float64 of shape (2,), expected torch.float32 of shape (2,)"),
        "short": Failure("its upload is not what the method declares: n missing or unknown"),
        "not a number": Failure("w in its upload is not finite", non_finite=True),
    }
    # What the client's own check has seen is not looked through again, but must still be of the declared kinds.
    nan, short = given["not a number"], given["short"]
    assert accepted(nan, checked=Checked(nan, 0.1)) == Checked(nan, 0.1)
    copied = {name: tensor.clone() for name, tensor in nan.items()}
    assert accepted(nan, checked=Checked(copied, 0.1)) == answers["not a number"]
    assert accepted(short, checked=Checked(short, 0.1)) == answers["short"]
    # An update that is longer than the limit is refused, whoever has measured it.
    far = Failure("its update has length 0.5, far from what is usual: the limit is 0.49", non_finite=True)
    assert accepted(good, 0.5) == found
    assert accepted(good, 0.49) == far
    assert accepted(good, 0.49, checked=Checked(good, 0.5)) == far
    rest = Failure("its buffers and scalars have length 2e+12: the limit is 1e+12", non_finite=True)
    assert accepted({**good, "n": torch.tensor(2 * 10**12)}) == accepted(good, checked=Checked(good, 0.5, 2e12)) == rest


@dataclass(frozen=True)
class Halves(Method):
    """Sends uploads as numbers of 16 bits, which are too short for them: they become infinite."""

    how: Literal["new", "dict", "tensors", "decode"] = "new"

    def encode(self, state: State, ctx: Context) -> State:
        if not ctx.download:
            return state
        if self.how == "tensors":
            for tensor in state.values():
                tensor.mul_(1e5)
            return state
        sent = state if self.how == "dict" else dict(state)
        sent |= {n: (t * 1e7).half() for n, t in state.items() if t.is_floating_point()}
        return sent

    def decode(self, state: State, ctx: Context) -> State:
        if not ctx.download:
            return state
        found = state if self.how == "dict" else dict(state)
        if self.how == "decode":
            next(t for t in state.values() if t.is_floating_point()).zero_()
        found |= {n: t.float() / 1e7 for n, t in state.items() if t.dtype == torch.float16}
        return found


@pytest.mark.parametrize("how", ["new", "dict"])
def test_what_arrives_is_checked_and_not_what_was_sent(how: Any, three: Federation) -> None:
    """Also where encoding writes into the dict that it is given, so that the client's own check was of another."""
    loop, seen, status = run(Halves(how=how), config(), three)
    assert status == "diverged"
    assert all("in its upload is not finite" in reason for reason in seen.records[1].failed.values())
    assert all(tensor.isfinite().all() for tensor in loop.server.values())


@pytest.mark.parametrize(("how", "hook"), [("tensors", "encode"), ("decode", "decode")])
def test_tensors_are_not_encoded_in_place(how: Any, hook: str, three: Federation) -> None:
    """A client's state may lie in the same memory."""
    with pytest.raises(FedprismError, match=f"halves.{hook} changes tensors of an upload or of its download in place"):
        run(Halves(how=how), config(), three)


@dataclass(frozen=True)
class Logging(Method):
    """Its server logs something of everybody, and with `early` a client does, too."""

    early: bool = False

    def upload(self, client: Client, ctx: Context) -> State:
        if self.early:
            ctx.log("said", "plain", 1.0)
        return super().upload(client, ctx)

    def aggregate(self, server: State, uploads: Any, ctx: Context) -> State:
        for place, client_id in enumerate(ctx.info.clients):
            ctx.log("said", client_id, torch.tensor(10.0 * ctx.round + place))
        return super().aggregate(server, uploads, ctx)


def test_what_the_server_logs_of_a_client_stands_beside_its_own(three: Federation) -> None:
    _, seen, _ = run(Logging(), config(train={"rounds": 2}, clients={"participation": 0.67}), three)
    for record in seen.records[1:]:
        assert record.logs.keys() == set(record.cohort) != set(three.names)  # nothing of who was not there
        for client_id, values in record.logs.items():
            assert values["said"] == 10 * (record.round - 1) + three.names.index(client_id)
            assert "loss/train" in values
    with pytest.raises(FedprismError, match=r"ctx\.log\('said', \.\.\.\)` was called on a client"):
        run(Logging(early=True), config(), three)


@dataclass(frozen=True)
class Growing(Method):
    def aggregate(self, server: State, uploads: Any, ctx: Context) -> State:
        return {**super().aggregate(server, uploads, ctx), f"extra{ctx.round}": torch.zeros(1)}


def test_a_server_whose_keys_change_is_a_mistake_of_the_method(three: Federation) -> None:
    with pytest.raises(FedprismError, match="changed the server's keys"):
        run(Growing(), config(), three)


def test_different_architectures_need_a_method_that_allows_them(three: Federation) -> None:
    mixed = config(model={"per_client": ["mlp", "lenet-bn"]})
    with pytest.raises(ConfigError, match=r"2: mlp, lenet-bn\. Set one model for all .*, or choose .*: local, "):
        run(FedAvg(), mixed, three)
    for method in (Local(), FedProto()):
        loop, _, status = run(method, mixed, three)
        assert status == "finished"
        assert loop.states["plain"].keys() != loop.states["tinted"].keys()


def test_callbacks_hear_of_every_client(three: Federation) -> None:
    class Counting(Collect):
        heard: list[tuple[int, int]] = []

        def clients(self, done: int, total: int) -> None:
            self.heard.append((done, total))

        def round(self, record: Any, snapshot: Any) -> None:
            self.heard.append((0, 0))

    seen = Counting()
    settings = config(train={"rounds": 1}, clients={"participation": 0.67}, evaluate={"moments": ["received"]})
    loop_for(FedAvg(), settings, three).run([seen])
    tested = [(1, 3), (2, 3), (3, 3), (0, 0)]
    assert seen.heard == [*tested, (1, 2), (2, 2), *tested]


def test_callbacks_hear_of_an_interrupt(three: Federation) -> None:
    class Stop(Collect):
        def round(self, record: Any, snapshot: Any) -> None:
            super().round(record, snapshot)
            if record.round == 1:
                raise KeyboardInterrupt

    seen = Stop()
    with pytest.raises(KeyboardInterrupt):
        loop_for(FedAvg(), config(train={"rounds": 5}), three).run([seen])
    assert seen.status == "interrupted"


# --- training --------------------------------------------------------------------------------------------------------


def test_the_learning_rate_follows_its_schedule(three: Federation) -> None:
    """With a rate that falls to a tiny value after the first round, the second round hardly moves."""
    schedule = {"name": "step", "every": 1, "gamma": 1e-6}
    _, seen, _ = run(FedAvg(), config(train={"rounds": 2, "schedule": schedule}), three)
    moves = [
        sum(float((b.server[n] - a.server[n]).abs().sum()) for n in a.server)
        for a, b in zip(seen.snapshots, seen.snapshots[1:], strict=False)
    ]
    assert moves[1] < 1e-4 * moves[0]


def test_clipping_bounds_the_step(three: Federation) -> None:
    """One step of plain SGD with a gradient of norm at most c moves the weights by at most lr c."""
    one = {"rounds": 1, "batch_size": 1000, "clip": 0.01, "optimizer": {"lr": 1.0, "momentum": 0.0}}
    loop, _, _ = run(Local(), config(train=one), three)
    first = loop_for(FedAvg(), config(), three).server
    moved = sum(float((loop.states["plain"][n] - first[n]).square().sum()) for n in first) ** 0.5
    assert moved == pytest.approx(0.01, rel=1e-3)


def test_batch_norm_refuses_batches_of_one(three: Federation) -> None:
    with pytest.raises(ConfigError, match=r"set train\.batch_size to 2 or more"):
        run(FedAvg(), config(model={"name": "lenet-bn"}, train={"rounds": 1, "batch_size": 1}), three)
    assert run(FedAvg(), config(train={"rounds": 1, "batch_size": 1}), three)[2] == "finished"


def test_unknown_schedule_and_its_settings() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cosine'"):
        learning_rate(config(train={"schedule": "cosin"}).train, 0)
    with pytest.raises(ConfigError, match="gama"):
        learning_rate(config(train={"schedule": {"name": "step", "gama": 1}}).train, 0)
    train = config(train={"rounds": 4, "schedule": "cosine", "optimizer": {"lr": 2.0}}).train
    assert [round(learning_rate(train, r), 4) for r in range(4)] == [2.0, 1.7071, 1.0, 0.2929]
    schedule = {"name": "exponential", "gamma": 0.5}
    halved = config(train={"rounds": 4, "schedule": schedule, "optimizer": {"lr": 1.0}}).train
    assert [learning_rate(halved, r) for r in range(5)] == [1.0, 0.5, 0.25, 0.125, 0.125]


@dataclass(frozen=True)
class Noisy(Method):
    """FedAvg with input noise in training and in prediction."""

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        noise = client.draw("input", *x.shape)
        client.log("noise", noise)
        return cross_entropy(client.model(x + 0.1 * noise), y)

    def predict(self, model: Net, x: Tensor, draw: Any) -> Tensor:
        return model(x + draw("input", *x.shape))


def test_noise_is_keyed_and_so_the_same_in_any_order(three: Federation) -> None:
    class Backwards(InProcess):
        def _each(self, work: Any, round: int, requests: Any) -> Any:
            return super()._each(work, round, dict(reversed(list(requests.items()))))

    settings = config()
    info = make_info(settings, three.names, three.classes, three.shape)
    loop, seen, _ = run(Noisy(), settings, three)
    other = loop_for(Noisy(), settings, three, Backwards(Noisy(), settings, info, three, CPU))
    seen_other = Collect()
    other.run([seen_other])
    assert same(loop.server, other.server)
    assert [replace(r, seconds={}) for r in seen.records] == [replace(r, seconds={}) for r in seen_other.records]
    assert 0.49 < seen.records[1].logs["plain"]["noise"] < 0.51
    assert seen.records[1].logs["plain"]["noise"] != seen.records[2].logs["plain"]["noise"]


def test_logs_hold_the_mean_loss_and_what_a_method_logs(three: Federation) -> None:
    _, seen, _ = run(FedProx(mu=1.0), config(train={"rounds": 8}), three)
    losses = [record.logs["plain"]["loss/train"] for record in seen.records[1:]]
    assert losses[-1] < losses[0]
    assert all(record.logs["plain"]["pull"] >= 0 for record in seen.records[1:])


def test_result_holds_the_number_of_training_samples(three: Federation) -> None:
    settings = config()
    info = make_info(settings, three.names, three.classes, three.shape)
    loop = loop_for(FedAvg(), settings, three)
    engine = InProcess(FedAvg(), settings, info, three, CPU)
    answers = dict(engine.train(0, loop.requests(three.names, loop.context(0))))
    assert answers.keys() == set(three.names)
    assert all(isinstance(a, Result) for a in answers.values())


def test_what_is_not_finite_is_found_by_name() -> None:
    sound = {"a": torch.ones(3), "b": torch.tensor(4), "c": torch.empty(0), "d": torch.tensor([1e38, 3e38])}
    assert not_finite(sound) is None
    assert not_finite({}) is None
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not_finite({**sound, "e": torch.tensor([1.0, value, 2.0]), "f": torch.tensor(value)}) == "e"


def test_public_images_reach_a_pass_that_asks_for_them() -> None:
    @dataclass(frozen=True)
    class Public(Method):
        def passes(self, client: Client, ctx: Context) -> list[Pass]:
            return [Pass(self.loss, "public", data="public")]

    data = make_federation("digits-skew", clients=3, seed=0, samples=24, public=50)
    one = config(train={"rounds": 1, "batch_size": 1000})
    loop, seen, _ = run(Public(), one, data)
    # A single batch of everything: the clients' own images play no part, so all end with the same weights.
    for name, tensor in models_of(loop)["plain"].items():
        torch.testing.assert_close(models_of(loop)["tinted"][name], tensor, rtol=1e-4, atol=1e-6)
    assert not same(models_of(loop)["plain"], models_of(run(FedAvg(), one, data)[0])["plain"])
    assert set(seen.records[1].logs["plain"]) == {"loss/public"}
    with pytest.raises(ConfigError, match=r"set data\.public"):
        run(Public(), config(), make_federation("digits-skew", clients=3, seed=0, samples=24))


def test_global_needs_batch_norm_to_be_shared(three: Federation) -> None:
    moments = {"moments": ["received", "global"]}
    sections = {"model": {"name": "lenet-bn"}, "evaluate": moments}
    shared = run(FedAvg(), config(**sections), three)[1]
    own = run(FedAvg(), config(**sections, train={"rounds": 2, "bn": "local"}), three)[1]
    assert "global" in shared.records[-1].scores
    assert "global" not in own.records[-1].scores


def test_server_learning_rate_without_weights_is_refused(three: Federation) -> None:
    with pytest.raises(ConfigError, match="fedproto averages no weights"):
        run(FedProto(), config(server={"lr": 0.5}), three)


@dataclass(frozen=True)
class Masked(Method):
    """FedAvg over a wire on which every client's traffic is masked with noise of its own."""

    def encode(self, state: State, ctx: Context) -> State:
        return {n: t + self.mask(n, t, ctx) if t.is_floating_point() else t for n, t in state.items()}

    def decode(self, state: State, ctx: Context) -> State:
        return {n: t - self.mask(n, t, ctx) if t.is_floating_point() else t for n, t in state.items()}

    def mask(self, name: str, tensor: Tensor, ctx: Context) -> Tensor:
        assert ctx.client_id is not None
        return torch.rand(tensor.shape, generator=ctx.rng("mask", name))


def test_both_ends_of_the_wire_know_whose_it_is(three: Federation) -> None:
    masked, plain = run(Masked(), config(), three)[0], run(FedAvg(), config(), three)[0]
    for name, tensor in plain.server.items():
        torch.testing.assert_close(masked.server[name], tensor, rtol=1e-4, atol=1e-5)


def test_lg_fedavg_keeps_the_bodies_of_those_who_train_outside_the_cohort(three: Federation) -> None:
    settings = config(train={"rounds": 3}, clients={"train": "all", "participation": 0.34})
    _, seen, _ = run(LGFedAvg(warmup=1), settings, three)
    first, second = seen.snapshots[2], seen.snapshots[3]
    outside = next(c for c in three.names if c not in seen.records[2].cohort)
    before, after, averaged = first.clients[outside], second.clients[outside], seen.snapshots[1].server
    assert before is not None
    assert after is not None
    leaf = "body.fc1.weight"
    own, reset = (after[leaf] - before[leaf]).norm(), (after[leaf] - averaged[leaf]).norm()
    assert own < reset, "its second round went on from its own body, not from the warm-up's"


def test_the_fingerprint_of_a_client_is_of_every_image_and_label(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(**changed: Split) -> str:
        parts = {name: Split(x, y) for name in ("train", "validation", "test")}
        return ClientData("a", "a", **{**parts, **changed}, classes=2).digest()

    x, y = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1), torch.arange(10) % 2
    plain = digest()
    monkeypatch.setattr(base, "DIGESTED_AT_ONCE", 4)  # ten images: two whole blocks, and a rest
    assert digest() == plain
    seen = {plain}
    for part in ("train", "validation", "test"):
        for place in range(10):
            for image, label in ((99, int(y[place])), (place, 1 - int(y[place]))):
                other_x, other_y = x.clone(), y.clone()
                other_x[place], other_y[place] = image, label
                seen.add(digest(**{part: Split(other_x, other_y)}))
    assert len(seen) == 61
