"""What methods become at the edge of their hyper-parameters, and numbers that can be worked out by hand.

"The same" means bit by bit: a term with weight 0 adds exact zeros to a gradient. Clients are of one size unless a test
says otherwise, so that averages by samples and plain averages are the same too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import Config, structure
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Arch, Client, Draw, Info, Method, Net, Parts, State, Tensors, Upload, no_draw
from fedprism.methods.ditto import Ditto
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedbn import FedBN
from fedprism.methods.fedper import FedPer
from fedprism.methods.fedproto import FedProto
from fedprism.methods.fedprox import FedProx
from fedprism.methods.fedrep import FedRep
from fedprism.methods.fedrod import FedRoD
from fedprism.methods.lg_fedavg import LGFedAvg
from fedprism.methods.local import Local
from fedprism.methods.scaffold import Scaffold
from fedprism.methods.silobn import SiloBN
from fedprism.round.client import Job, make_info, open_slot
from fedprism.round.events import Snapshot
from fedprism.round.loop import draw_cohort
from tests.harness import (
    MLP,
    TURNED,
    Collect,
    Slope,
    Trained,
    assert_differ,
    assert_same,
    config_of,
    cut,
    loop_for,
    part,
    pixels,
    same,
    train,
)

pytestmark = pytest.mark.slow

# --- one method at its edge is another -------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [{}, TURNED], ids=["plain", "augmented"])
def test_fedprox_without_a_pull_is_fedavg(data: dict[str, Any], tiny: Federation) -> None:
    average = train(FedAvg(), tiny, data=data)
    assert_same(train(FedProx(mu=0.0), tiny, data=data), average)
    assert_differ(train(FedProx(mu=0.1), tiny, data=data), average)


@pytest.mark.parametrize("method", [FedBN(), SiloBN()])
def test_without_norm_layers_nothing_stays_at_home(method: Method, tiny: Federation) -> None:
    assert_same(train(method, tiny, model=MLP), train(FedAvg(), tiny, model=MLP))
    assert_differ(train(method, tiny), train(FedAvg(), tiny))


@pytest.mark.parametrize(("method", "policy"), [(FedBN(), "local"), (SiloBN(), "local-stats")])
def test_batch_norm_policies_are_methods(method: Method, policy: str, tiny: Federation) -> None:
    """FedAvg that keeps batch norm local is FedBN; FedBN that shares it is FedAvg."""
    assert_same(train(FedAvg(), tiny, train={"bn": policy}), train(method, tiny))
    assert_same(train(method, tiny, train={"bn": "shared"}), train(FedAvg(), tiny))


@pytest.mark.parametrize(("participation", "data"), [(1.0, {}), (0.67, {}), (1.0, TURNED)])
def test_ditto_without_a_pull_is_local_beside_fedavg(
    participation: float, data: dict[str, Any], tiny: Federation
) -> None:
    sections: dict[str, Any] = {
        "data": data,
        "clients": {"participation": participation},
        "evaluate": {"splits": ["test"], "moments": ["received", "trained", "global"]},
    }
    loop = loop_for(Ditto(lam=0.0), structure({**sections, "train": {"rounds": 3, "batch_size": 16}}, Config), tiny)
    seen = Collect()
    loop.run([seen])
    both = Trained(loop, seen)
    alone = train(Local(), tiny, clients=sections["clients"], data=data)
    average = train(FedAvg(), tiny, clients=sections["clients"], data=data)
    assert same(part(both.server, "common."), average.server)
    assert both.models.keys() == alone.models.keys()
    for client_id, state in both.models.items():
        assert same(part(state, "personal."), alone.models[client_id])
        assert same(part(state, "common."), average.models[client_id])
    assert both.correct() == alone.correct()
    assert both.correct("global") == average.correct()


def test_ditto_with_a_pull_is_not_local(tiny: Federation) -> None:
    both, alone = train(Ditto(lam=0.1), tiny), train(Local(), tiny)
    assert not any(same(part(state, "personal."), alone.models[client_id]) for client_id, state in both.models.items())


def network(state: State) -> State:
    """A client's state without what LG-FedAvg remembers beside the network."""
    return {name: tensor for name, tensor in state.items() if name != "started"}


def test_lg_fedavg_that_never_ends_its_warm_up_is_uniform_fedavg(tiny: Federation) -> None:
    sites = cut(tiny, (40, 25, 10))
    uniform = train(FedAvg(), sites, clients={"weighting": "uniform"})
    for warmup in (3, 10):
        warm = train(LGFedAvg(warmup=warmup), sites)
        assert same({n: t for n, t in warm.server.items() if n != "started"}, uniform.server)
        assert all(same(network(state), uniform.models[client_id]) for client_id, state in warm.models.items())
        assert warm.correct() == uniform.correct()
    assert warm.correct() != train(FedAvg(), sites).correct()
    assert warm.correct() != train(LGFedAvg(warmup=2), sites).correct()


def test_a_cut_that_leaves_the_body_empty(tiny: Federation) -> None:
    """With every layer in the head, FedPer and FedRep share nothing and LG-FedAvg everything."""
    model = {**MLP, "head_layers": "all"}
    assert_same(train(FedPer(), tiny, model=model), train(Local(), tiny, model=model))
    longer = train(Local(), tiny, model=model, train={"epochs": 2})
    assert_same(train(FedRep(head_epochs=2), tiny, model=model), longer)
    shared = train(LGFedAvg(warmup=0), tiny, model=model)
    uniform = train(FedAvg(), tiny, model=model, clients={"weighting": "uniform"})
    assert same({n: t for n, t in shared.server.items() if n != "started"}, uniform.server)
    assert shared.correct() == uniform.correct()


def test_lg_fedavg_without_warm_up_averages_heads_alone(tiny: Federation) -> None:
    run = train(LGFedAvg(warmup=0), tiny, model=MLP)
    assert set(run.server) == {"head.fc3.weight", "head.fc3.bias", "started"}


def test_fedrep_trains_one_part_at_a_time(tiny: Federation) -> None:
    """The head is trained on the received body, whatever that becomes afterwards; batch norm's counters show it."""
    some = train(FedRep(body_epochs=1), tiny, train={"rounds": 1})
    more = train(FedRep(body_epochs=3), tiny, train={"rounds": 1})
    steps = 3  # 40 images in batches of 16
    for client_id, state in some.models.items():
        assert same(part(state, "head."), part(more.models[client_id], "head."))
        assert not same(part(state, "body."), part(more.models[client_id], "body."))
        assert int(state["body.bn1.num_batches_tracked"]) == steps
        assert int(more.models[client_id]["body.bn1.num_batches_tracked"]) == 3 * steps


def test_scaffold_starts_as_uniform_fedavg_with_plain_sgd(tiny: Federation) -> None:
    """All control variates are zero in the first round; in the second they are not."""
    sites, plain = cut(tiny, (40, 25, 10)), {"optimizer": {"momentum": 0.0}}
    corrected = train(Scaffold(), sites, train={"rounds": 2})
    average = train(FedAvg(), sites, train={"rounds": 2, **plain}, clients={"weighting": "uniform"})
    first, other = corrected.seen.snapshots[1], average.seen.snapshots[1]
    assert same(part(first.server, "net."), other.server)
    assert corrected.correct()[0] == average.correct()[0]
    assert corrected.correct()[1] != average.correct()[1]


def test_fedrod_with_balanced_classes_needs_no_balancing(tiny: Federation) -> None:
    """Adding the same log n to every score changes no softmax."""
    classes, loop = tiny.classes, loop_for(FedRoD(), config_of(), tiny)
    data = next(iter(tiny.clients.values()))
    client = open_slot(Job(FedRoD(), loop.config, loop.info, data, 0))
    x = torch.randn(2 * classes, *tiny.shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(2 * classes) % classes
    z = client.model.generic.body(x)
    generic, personal = client.model.generic.head(z), client.model.personal(z)
    plain = cross_entropy(generic, y) + cross_entropy(generic + personal, y)
    for counts, balanced in ((torch.full((classes,), 7), True), (torch.arange(1, classes + 1), False)):
        client.keep("prior", counts.float().log())
        assert torch.allclose(FedRoD().loss(client, x, y), plain, atol=1e-5) == balanced


def test_fedrod_without_balancing_shares_fedavgs_model(tiny: Federation) -> None:
    """The personal head sends no gradient back, so body and generic head are FedAvg's."""
    both, average = train(FedRoD(gamma=0.0), tiny), train(FedAvg(), tiny)
    assert same(part(both.server, "generic."), average.server)
    for client_id, state in both.models.items():
        assert same(part(state, "generic."), average.models[client_id])
    heads = [part(state, "personal.") for state in both.models.values()]
    assert not same(heads[0], heads[1])


@pytest.mark.parametrize("inference", ["prototype", "head"])
def test_fedproto_without_a_pull_trains_as_local(inference: Any, tiny: Federation) -> None:
    free, alone = train(FedProto(lam=0.0, inference=inference), tiny), train(Local(), tiny)
    for client_id, state in free.models.items():
        assert same(part(state, "net."), alone.models[client_id])
    assert (free.correct() == alone.correct()) == (inference == "head")
    pulled = train(FedProto(lam=1.0), tiny)
    assert not any(same(part(state, "net."), alone.models[client_id]) for client_id, state in pulled.models.items())


@pytest.mark.parametrize("method", [FedAvg(), FedBN(), SiloBN(), FedPer(), LGFedAvg(warmup=1)])
def test_one_client_is_alone(method: Method, tiny: Federation) -> None:
    one = replace(tiny, clients={"plain": tiny.clients["plain"]})
    together, alone = train(method, one), train(Local(), one)
    assert same(network(together.models["plain"]), alone.models["plain"])
    assert together.correct() == alone.correct()


def test_scaffold_of_one_client_is_alone(tiny: Federation) -> None:
    """Its control variate is the server's, so the correction is zero."""
    one = replace(tiny, clients={"plain": tiny.clients["plain"]})
    alone = train(Local(), one, train={"optimizer": {"momentum": 0.0}})
    assert same(part(train(Scaffold(), one).models["plain"], "net."), alone.models["plain"])


@pytest.mark.parametrize("name", list(METHODS))
def test_all_start_from_the_same_weights(name: str, tiny: Federation) -> None:
    """Whatever else a method owns, the models that it begins with are Local's."""
    config = config_of()
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    own = METHODS[name]().build(info.arch, "plain", info, 0).state_dict()
    first = info.arch.model(0).state_dict()
    prefixes = {n.removesuffix("head.fc2.weight") for n in own if n.endswith("head.fc2.weight")}
    assert prefixes
    for prefix in prefixes:
        assert same({n: own[prefix + n] for n in first}, first)


# --- by hand ---------------------------------------------------------------------------------------------------------


class Weights(nn.Module):
    """Three weights and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))


@dataclass(frozen=True)
class Linear(Method):
    """FedAvg of a loss whose gradient is the mean pixel vector, so that a step is w - lr x."""

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return Weights()

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return torch.mv(x.flatten(1), client.model.w).mean()

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        return x.flatten(1) @ torch.stack([model.w, -model.w], dim=1)


PLAIN_SGD = {"lr": 1.0, "momentum": 0.0}


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        # One step each from w = 0 at lr 1: north goes to -(1, 1, -1), south to -(1, -1, -1). Of 8 images north has 6.
        ("samples", [-1.0, -0.5, 1.0]),
        ("uniform", [-1.0, 0.0, 1.0]),
    ],
)
def test_weighted_average_by_hand(weighting: str, expected: list[float]) -> None:
    sites = pixels(north=([1, 1, -1], 6), south=([1, -1, -1], 2))
    settings: dict[str, Any] = {"train": {"rounds": 2, "optimizer": PLAIN_SGD}, "clients": {"weighting": weighting}}
    run = train(Linear(), sites, model={"name": "mlp"}, **settings)
    one, two = (snapshot.server["w"] for snapshot in run.seen.snapshots[1:])
    assert one.tolist() == expected
    assert two.tolist() == [2 * w for w in expected]
    half = train(Linear(), sites, model={"name": "mlp"}, server={"lr": 0.5}, **settings)
    assert half.seen.snapshots[1].server["w"].tolist() == [0.5 * w for w in expected]


@pytest.mark.parametrize(("momentum", "steps"), [(0.0, [1] * 6), (0.5, [1, 1.5, 1.75, 1.875, 1.9375, 1.96875])])
def test_steps_by_hand(momentum: float, steps: list[float]) -> None:
    """Batches of 2 from 6 images, two epochs: six steps per round; momentum starts at zero in every round."""
    settings = {"rounds": 2, "epochs": 2, "batch_size": 2, "optimizer": {"lr": 1.0, "momentum": momentum}}
    run = train(Linear(), pixels(north=([1, 1, -1], 6)), model={"name": "mlp"}, train=settings)
    assert run.server["w"].tolist() == [-2 * sum(steps), -2 * sum(steps), 2 * sum(steps)]


@dataclass(frozen=True)
class SlopeScaffold(Scaffold):
    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return Parts(net=Slope(), control=Tensors({"w": torch.zeros(1)}))


def test_scaffold_by_hand() -> None:
    """Two clients with s = 2 and s = -6, one step of 0.125 per round; then two steps per round."""
    sites = pixels(up=([1, -1], 4), down=([-1, -1], 2))
    one_step = {"rounds": 2, "optimizer": {"lr": 0.125, "momentum": 0.9}}
    run = train(SlopeScaffold(), sites, model={"name": "mlp"}, train=one_step)
    one, two = run.seen.snapshots[1:]
    # Round 1 at w = 0: gradients 2/2 = 1 and -6/2 = -3, all control variates 0: y = -1/8 and 3/8, so w = 1/8. After one
    # step c_k = (w - y_k) / lr = g_k: 1 and -3, and c = (1 - 3) / 2 = -1.
    assert one.server["net.w"].tolist() == [0.125]
    assert one.server["c.w"].tolist() == [-1.0]
    assert [control(one, client_id) for client_id in ("up", "down")] == [1.0, -3.0]
    # Round 2 at w = 1/8: steps along g - c_k + c, whose mean is the mean of the g: the corrections cancel.
    up, down = 2 * torch.sigmoid(torch.tensor(0.25)), -6 * torch.sigmoid(torch.tensor(-0.75))
    torch.testing.assert_close(two.server["net.w"], (0.125 - 0.125 * (up + down) / 2).reshape(1))
    states = run.models
    torch.testing.assert_close(states["up"]["net.w"], (0.125 - 0.125 * (up - 1 - 1)).reshape(1))
    torch.testing.assert_close(states["down"]["net.w"], (0.125 - 0.125 * (down + 3 - 1)).reshape(1))
    torch.testing.assert_close(states["up"]["control.w"], up.reshape(1))
    torch.testing.assert_close(two.server["c.w"], ((up + down) / 2).reshape(1))
    # Two steps: c_k is the mean of the two gradients along the client's path.
    run = train(SlopeScaffold(), sites, model={"name": "mlp"}, train={**one_step, "rounds": 1, "epochs": 2})
    second = 2 * torch.sigmoid(torch.tensor(2 * -0.125))
    assert control(run.seen.snapshots[1], "up") == pytest.approx(float((1 + second) / 2), rel=1e-6)


def control(snapshot: Snapshot, client_id: str) -> float:
    state = snapshot.clients[client_id]
    assert state is not None
    return float(state["control.w"])


def test_scaffold_counts_absent_clients_in_its_control_variate() -> None:
    """c += sum / N over all N clients, but w is the mean of those who took part."""
    sites = pixels(up=([1, -1], 4), down=([-1, -1], 2))
    settings = {"rounds": 1, "optimizer": {"lr": 0.125, "momentum": 0.0}}
    run = train(SlopeScaffold(), sites, model={"name": "mlp"}, train=settings, clients={"participation": 0.5})
    (client_id,) = run.seen.records[1].cohort
    gradient = {"up": 1.0, "down": -3.0}[client_id]
    assert run.server["net.w"].tolist() == [-0.125 * gradient]
    assert run.server["c.w"].tolist() == [gradient / 2]


def test_fedproto_averages_by_the_samples_of_a_class() -> None:
    """Two classes, two features; the second client has three of class 0 and none of class 1."""

    def upload(name: str, mean: list[list[float]], count: list[float]) -> Upload:
        return Upload(name, 9, {"prototypes.mean": torch.tensor(mean), "prototypes.count": torch.tensor(count)})

    uploads = [upload("a", [[4.0, 0.0], [2.0, 2.0]], [1, 5]), upload("b", [[0.0, 8.0], [0.0, 0.0]], [3, 0])]
    server = {"prototypes.mean": torch.zeros(2, 2), "prototypes.count": torch.zeros(2)}
    ctx = loop_for(FedAvg(), config_of(model=MLP), pixels(a=([1, 1, 1], 2))).context(0)
    after = FedProto().aggregate(server, uploads, ctx)
    assert after["prototypes.mean"].tolist() == [[1.0, 6.0], [2.0, 2.0]]
    assert after["prototypes.count"].tolist() == [4.0, 5.0]
    plain = FedProto().aggregate(server, uploads, ctx.replace(weighting="uniform"))
    assert plain["prototypes.mean"].tolist() == [[2.0, 4.0], [2.0, 2.0]]
    # A class that nobody shows keeps its prototype.
    later = FedProto().aggregate(after, uploads[1:], ctx)
    assert later["prototypes.mean"].tolist() == [[0.0, 8.0], [2.0, 2.0]]
    assert later["prototypes.count"].tolist() == [3.0, 5.0]


# --- who takes part --------------------------------------------------------------------------------------------------


def test_lg_fedavg_gives_the_averaged_body_to_a_client_that_comes_late(tiny: Federation) -> None:
    """It is sent the whole model when it comes, and only the head from then on."""
    rounds, warmup, late = 6, 2, "textured"
    few = structure({"participation": 0.34}, type(Config().clients))

    def when(seed: int) -> list[int]:
        info = make_info(config_of(seed=seed), tiny.names, tiny.classes, tiny.shape)
        return [r for r in range(rounds) if late in draw_cohort(few, info, r)]

    # It misses the warm-up and the round after it, and comes twice later on.
    seed = next(seed for seed in range(1000) if len(when(seed)) >= 2 and when(seed)[0] > warmup)
    settings: dict[str, Any] = {"train": {"rounds": rounds}, "clients": {"participation": 0.34}}
    run = train(LGFedAvg(warmup=warmup), tiny, model=MLP, seed=seed, **settings)
    snapshots, records = run.seen.snapshots, run.seen.records
    averaged = part(snapshots[warmup].server, "body.")
    first, second = when(seed)[:2]
    whole, head = (4 * (768 * 16 + 16 + 16 * 8 + 8 + 8 * 10 + 10), 4 * (8 * 10 + 10))
    assert records[first + 1].down == {late: whole}
    assert records[second + 1].down == {late: head}
    assert records[first + 1].up == {late: head}
    for snapshot in snapshots[warmup:]:
        assert same(part(snapshot.server, "body."), averaged)
    # Never sampled before: at the moment `received` it has the average's body and the newest head.
    scores = [record.scores["received"]["test"][late] for record in records]
    assert scores[warmup] != scores[0]
    assert scores[first + 1] != scores[first]


@pytest.mark.parametrize(
    ("participation", "sizes"),
    [(1.0, {10}), (0.5, {5}), (0.01, {1}), ([0.2, 0.4], {2, 3, 4}), ([0.0, 0.1], {1}), ([0.1, 1.0], set(range(1, 11)))],
)
def test_sampling_ranges(participation: Any, sizes: Collection[int]) -> None:
    config = config_of(clients={"participation": participation})
    names = tuple(f"c{i}" for i in range(10))
    info = make_info(config, names, 10, (3, 16, 16))
    cohorts = [draw_cohort(config.clients, info, round) for round in range(300)]
    assert {len(cohort) for cohort in cohorts} == set(sizes)
    assert all(list(cohort) == sorted(set(cohort)) for cohort in cohorts)
    # Nobody is favoured: everyone's share of the rounds is the mean size of a cohort over ten, within four deviations.
    share = sum(len(cohort) for cohort in cohorts) / 3000
    for name in names:
        seen = sum(name in cohort for cohort in cohorts) / 300
        assert abs(seen - share) <= 4 * (share * (1 - share) / 300) ** 0.5


def test_fedproto_never_predicts_a_class_that_nobody_has_shown(tiny: Federation) -> None:
    """However far the features lie from every prototype."""
    loop = loop_for(FedProto(), structure({"model": MLP}, Config), tiny)
    model = FedProto().build(loop.info.arch, "plain", loop.info, 0).eval()
    model.prototypes["mean"][:2] = torch.tensor([[2e3], [1e3]])
    model.prototypes["count"][:2] = 1
    scores = FedProto().predict(model, torch.zeros(4, *tiny.shape), no_draw)
    assert scores.argmax(1).tolist() == [1] * 4
    assert scores.isfinite().all()
