"""FedSCE: its subspace, both losses by hand, contribution weights, what is left without its parts, mixed clients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from fedprism import api
from fedprism.config import Config, Named, dump, read, structure
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods.base import Client, Context, Info, Method, Net, State, Upload, load, no_draw
from fedprism.methods.fedsce import FedSCE, contributions
from fedprism.methods.local import Local
from fedprism.methods.subspaces import Subspace, overlap
from fedprism.records import RunDirectory
from fedprism.round.client import Job, client_round, make_info, open_slot
from fedprism.round.engine import Failure
from fedprism.round.events import RoundRecord, Snapshot
from fedprism.round.loop import Loop
from fedprism.round.training import model_inputs
from fedprism.store.serialize import size
from tests.harness import RUN, Collect, killed, loop_for, models_of, same
from tests.reference.fedsce import updated

pytestmark = pytest.mark.full

MLP = {"name": "mlp", "hidden": [24, 16]}
SMALL = {"name": "mlp", "hidden": [8]}
NARROW = {"name": "resnet18", "width": 8}
KEEP = "keep-singular-values"
DELTAS = ("raw", "normalised", KEEP)
AUX = ("lsl", "ce")  # `without` of a run of which only the auxiliary model matters


def config_of(**sections: Any) -> Config:
    train = {"rounds": 3, "batch_size": 16, **sections.pop("train", {})}
    evaluate = {"splits": ["test"], "moments": ["received", "trained"], **sections.pop("evaluate", {})}
    return structure({"model": MLP, "train": train, "evaluate": evaluate, **sections}, Config)


@dataclass(frozen=True)
class Trained:
    loop: Loop
    records: list[RoundRecord]
    snapshots: list[Snapshot]

    @property
    def models(self) -> dict[str, State]:
        return models_of(self.loop)

    def scores(self) -> list[tuple[int, float]]:
        """Every client's right answers and loss at every evaluation."""
        moments = [moment for record in self.records for moment in record.scores.values()]
        return [(score.correct, score.loss) for splits in moments for score in splits["test"].values()]

    def before(self, round: int, client_id: str) -> State:
        """A client's model as it was at the start of a round (counted from 1), before it received anything."""
        model = models_of(self.loop, round - 1).get(client_id)
        return model or built(self.loop.method, client_id, self.loop.info).state_dict()

    def after(self, round: int, client_id: str) -> State:
        return models_of(self.loop, round)[client_id]

    def took_part(self) -> Iterator[tuple[int, str]]:
        for record in self.records[1:]:
            for client_id in record.cohort:
                yield record.round, client_id


def train(method: Method, federation: Federation, **sections: Any) -> Trained:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return Trained(loop, seen.records, seen.snapshots)


def built(method: Method, client_id: str | None, info: Info) -> Net:
    return method.build(info.arch if client_id is None else info.archs[client_id], client_id, info, info.seed)


def under(state: Mapping[str, Tensor], part: str) -> State:
    """What a part holds, by its own names."""
    return {name.removeprefix(f"{part}."): t for name, t in state.items() if name.startswith(f"{part}.")}


def weighted(states: list[State], weights: list[float]) -> State:
    return {n: sum(w * s[n].double() for w, s in zip(weights, states, strict=True)) for n in states[0]}


def assert_near(a: Mapping[str, Tensor], b: Mapping[str, Tensor], within: float = 1e-6) -> None:
    assert a.keys() == b.keys()
    for name in a:
        if a[name].is_floating_point():
            torch.testing.assert_close(a[name].double(), b[name].double(), atol=within, rtol=1e-5)


def last_layers(model: nn.Module, p: int) -> list[str]:
    """Names of the parameters of the last p layers, by a walk over the modules."""
    layers = [
        [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
        for prefix, module in model.named_modules()
    ]
    return [name for names in [own for own in layers if own][-p:] for name in names]


def moved(run: Trained, round: int, client_id: str) -> Tensor:
    """A round's update of the last p layers, in double precision."""
    method = run.loop.method
    assert isinstance(method, FedSCE)
    names = last_layers(built(method, client_id, run.loop.info).local, method.p)
    one, other = (under(s, "local") for s in (run.after(round, client_id), run.before(round, client_id)))
    return torch.cat([(one[name].double() - other[name].double()).flatten() for name in names])


@pytest.fixture(scope="module")
def plain(unequal: Federation) -> Trained:
    """Defaults but for a larger step; clients of unequal sizes, two of three a round, batch norm, batches dropped."""
    return train(
        FedSCE(delta="normalised"),
        unequal,
        model={"name": "lenet-bn"},
        clients={"participation": 0.67},
        train={"rounds": 4, "epochs": 2, "last_batch": "drop", "optimizer": {"lr": 0.05}},
    )


# --- what is left without its parts ----------------------------------------------------------------------------------


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"train": {"optimizer": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}}},
    "adam": {"train": {"optimizer": {"name": "adam", "lr": 0.003}}},
    "clip": {"train": {"clip": 0.1, "optimizer": {"lr": 0.1}}},
    "part": {"clients": {"participation": 0.67, "dropout": 0.3}, "seed": 1},
    "norm": {"model": {"name": "lenet-bn"}, "train": {"epochs": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [FedSCE(without=("lsl", "dml", "ce")), FedSCE(mu=0.0, without=("dml",)), FedSCE(without=("lsl", "dml"))],
    ids=["nothing", "mu 0 without dml", "without lsl and dml"],
)
@pytest.mark.parametrize("settings", SETTINGS)
def test_without_subspace_and_auxiliary_it_is_local(method: FedSCE, settings: str, unequal: Federation) -> None:
    run, local = (train(each, unequal, **SETTINGS[settings]) for each in (method, Local()))
    assert run.models.keys() == local.models.keys()
    for client_id, state in run.models.items():
        assert same(under(state, "local"), local.models[client_id])
    assert run.scores() == local.scores()
    for record, other in zip(run.records, local.records, strict=True):
        assert (record.cohort, record.failed) == (other.cohort, other.failed)
        for client_id, logs in other.logs.items():
            assert logs.items() <= record.logs[client_id].items()


@pytest.mark.parametrize("without", [("dml",), ("dml", "ce"), ("lsl", "dml"), ("lsl", "dml", "ce")])
def test_without_the_auxiliary_model_nothing_travels(without: Any, tiny: Federation) -> None:
    run = train(FedSCE(without=without), tiny, train={"rounds": 2})
    assert run.loop.server == {}
    for record in run.records[1:]:
        assert set(record.up.values()) == set(record.down.values()) == {0}
        for logs in record.logs.values():
            assert ("subspace/used" in logs) == ("lsl" not in without)
            assert not {"weight", "distance/parameters", "distance/features"} & logs.keys()
        assert all(not score.branches for score in record.scores["received"]["test"].values())


def test_mu_zero_is_without_lsl(tiny: Federation) -> None:
    """The subspace turns, but binds nobody."""
    one, other = (train(method, tiny) for method in (FedSCE(mu=0.0), FedSCE(without=("lsl",))))
    assert same(one.loop.server, other.loop.server)
    for client_id, state in other.models.items():
        assert not any(name.startswith("space.") for name in state)
        assert same({name: one.models[client_id][name] for name in state}, state)
    bound = train(FedSCE(), tiny)
    assert not same(bound.loop.server, other.loop.server)


def test_equal_models_have_nothing_to_teach_each_other(tiny: Federation) -> None:
    """Of one architecture, local and auxiliary model start equal and go the same way until others come in."""
    run, local = train(FedSCE(without=("lsl",)), tiny, train={"rounds": 1}), train(Local(), tiny, train={"rounds": 1})
    for client_id, state in run.models.items():
        assert same(under(state, "local"), under(state, "aux"))
        assert_near(under(state, "local"), local.models[client_id])
    later = train(FedSCE(without=("lsl",)), tiny, train={"rounds": 2})
    assert not any(same(under(state, "local"), under(state, "aux")) for state in later.models.values())


@pytest.mark.parametrize("weighting", ["method", "uniform", "samples"])
def test_without_contributions_the_average_is_the_configured_one(weighting: str, unequal: Federation) -> None:
    run = train(FedSCE(without=("ce",)), unequal, clients={"weighting": weighting}, train={"rounds": 1})
    shares = [40 / 75, 25 / 75, 10 / 75] if weighting == "samples" else [1 / 3] * 3
    assert_near(under(run.loop.server, "aux"), weighted([under(s, "aux") for s in run.models.values()], shares))
    assert not any({"weight", "distance/parameters"} & logs.keys() for logs in run.records[1].logs.values())
    expected = {size(run.loop.server)}
    assert set(run.records[1].up.values()) == set(run.records[1].down.values()) == expected


def test_an_aggregate_of_ones_own_is_given_all_uploads() -> None:
    class Own(FedSCE):
        def aggregate(self, server: State, uploads: Sequence[Upload], ctx: Context) -> State:
            return super().aggregate(server, uploads, ctx)

    assert Own(without=("ce",)).needs_all_uploads
    assert not FedSCE(without=("ce",)).needs_all_uploads
    assert FedSCE().needs_all_uploads


def test_contributions_do_not_mind_the_configured_weighting(unequal: Federation) -> None:
    one, other = (train(FedSCE(), unequal, clients={"weighting": weights}) for weights in ("method", "samples"))
    assert same(one.loop.server, other.loop.server)


def test_only_the_auxiliary_model_and_two_numbers_travel(plain: Trained) -> None:
    server = plain.loop.server
    assert server.keys() == {f"aux.{name}" for name in plain.loop.info.arch.model(0).state_dict()}
    for record in plain.records[1:]:
        assert set(record.down.values()) == {size(server)}
        assert set(record.up.values()) == {size(server) + 8}


@pytest.mark.parametrize("policy", ["shared", "local"])
def test_batch_norm_of_the_auxiliary_model(policy: str, tiny: Federation) -> None:
    run = train(FedSCE(), tiny, model={"name": "lenet-bn"}, train={"rounds": 2, "bn": policy})
    assert any("running_mean" in name for name in run.loop.server) == (policy == "shared")
    assert not any(name.startswith("local.") for name in run.loop.server)


# --- what both models learn from each other --------------------------------------------------------------------------


def logits(rows: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    own, aux = (torch.randn(rows, classes, generator=rng, dtype=torch.float64) * 2 for _ in range(2))
    return own.requires_grad_(), aux.requires_grad_(), torch.randint(classes, (rows,), generator=rng)


def test_two_classes_by_hand() -> None:
    """One image, scores (1, 0) and (0, 2), class 0: every number from the logistic function."""
    p, q = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(2))  # probabilities of class 0
    ce = -math.log(p) - math.log(q)
    kl_pq = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    kl_qp = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    own, aux, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]), torch.tensor([0])
    for method, classes in ((FedSCE(), 1), (FedSCE(kl_weight="sample"), 1), (FedSCE(reduction="mean"), 2)):
        expected = ce + (kl_pq + kl_qp) / ce / classes
        assert method.mutual(own, aux, y).item() == pytest.approx(expected, rel=1e-6)


def test_what_the_kl_is_divided_by_may_be_small() -> None:
    """Two sure models whose cross-entropies add up to 3e-5, far from the least of 1e-6."""
    own, aux, y = torch.tensor([[11.0, 0.0]]).double(), torch.tensor([[12.0, 0.0]]).double(), torch.tensor([0])
    p, q = (scores.softmax(1)[0] for scores in (own, aux))
    ce = float(-p[0].log() - q[0].log())
    assert 1e-5 < ce < 1e-4
    expected = ce + float(((p - q) * (p / q).log()).sum()) / ce
    assert FedSCE().mutual(own, aux, y).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kl_weight", ["batch", "sample"])
def test_loss_against_a_loop_over_images(kl_weight: Any) -> None:
    own, aux, y = logits(7, 4)
    p, q = own.softmax(1).tolist(), aux.softmax(1).tolist()
    ces = [-math.log(p[i][c]) - math.log(q[i][c]) for i, c in enumerate(y.tolist())]
    ce, kl = sum(ces) / 7, 0.0
    for i in range(7):
        both = sum((p[i][c] - q[i][c]) * math.log(p[i][c] / q[i][c]) for c in range(4))
        kl += both / (ces[i] if kl_weight == "sample" else ce) / 7
    assert FedSCE(kl_weight=kl_weight).mutual(own, aux, y).item() == pytest.approx(ce + kl, rel=1e-12)
    # PyTorch's own mean is over the classes too.
    mean = FedSCE(kl_weight=kl_weight, reduction="mean").mutual(own, aux, y).item()
    assert mean == pytest.approx(ce + kl / 4, rel=1e-12)


@pytest.mark.parametrize("detach_weight", [True, False])
@pytest.mark.parametrize("detach_target", [True, False])
def test_gradients_go_where_they_should(detach_weight: bool, detach_target: bool) -> None:
    """Closed forms. A student's is (its softmax - its teacher's) / s; a teacher's is p (log(p / q) - KL) / s."""
    own, aux, y = logits(5, 4)
    loss = FedSCE(detach_weight=detach_weight, detach_target=detach_target).mutual(own, aux, y)
    given = torch.autograd.grad(loss, (own, aux))
    with torch.no_grad():
        s = cross_entropy(own, y) + cross_entropy(aux, y)
        p, q = own.softmax(1), aux.softmax(1)
        kl = {"pq": (p * (p / q).log()).sum(1, keepdim=True), "qp": (q * (q / p).log()).sum(1, keepdim=True)}
        for gradient, mine, other, as_teacher in ((given[0], p, q, kl["pq"]), (given[1], q, p, kl["qp"])):
            label = mine - one_hot(y, 4)
            expected = label + (mine - other) / s
            if not detach_target:
                expected = expected + mine * ((mine / other).log() - as_teacher) / s
            if not detach_weight:
                expected = expected - label * (kl["pq"] + kl["qp"]).mean() / s.square()
            torch.testing.assert_close(gradient, expected / 5, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kl_weight", ["batch", "sample"])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("scores", ["sure", "sure and wrong", "of two minds", "far out"])
def test_extreme_scores_stay_finite(kl_weight: Any, attached: bool, scores: str) -> None:
    """Also where both cross-entropies are 0, which the KL terms are divided by."""
    sure = torch.tensor([[300.0, 0.0, 0.0]]).repeat(4, 1)
    own, aux = {
        "sure": (sure, sure.clone()),
        "sure and wrong": (sure.flip(1), sure.flip(1)),
        "of two minds": (sure, sure.flip(1)),
        "far out": (1e4 * sure, 1e4 * sure),
    }[scores]
    own, aux = own.requires_grad_(), aux.requires_grad_()
    method = FedSCE(kl_weight=kl_weight, detach_weight=not attached, detach_target=not attached)
    loss = method.mutual(own, aux, torch.zeros(4, dtype=torch.long))
    assert loss.isfinite()
    if scores in ("sure", "far out"):
        assert loss.item() == 0
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (own, aux)))


@dataclass(frozen=True)
class Slot:
    method: FedSCE
    client: Client
    x: Tensor
    y: Tensor

    def gradients(self) -> State:
        names, parameters = zip(*self.client.model.named_parameters(), strict=True)
        found = torch.autograd.grad(self.method.loss(self.client, self.x, self.y), parameters)
        return dict(zip(names, found, strict=True))


def slot_of(method: FedSCE, federation: Federation, model: Any = MLP, shift: float = 0.0) -> Slot:
    """A client at the start of a round; then everything is moved a little."""
    config = config_of(model=model)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    data = federation.clients["tinted"]
    job = Job(method, config, info, data, 0)
    client, ctx = open_slot(job), loop_for(method, config, federation).context(0).replace(data=data)
    method.start(client, ctx)
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in client.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=rng), alpha=shift)
    client.model.eval()
    return Slot(method, client, model_inputs(data.train.x[:12], config), data.train.y[:12])


@pytest.mark.parametrize("model", [MLP, {"name": "lenet-bn"}], ids=lambda m: m["name"])
@pytest.mark.parametrize("p", [1, 2, 4, 5, 50])
def test_subspace_term_pulls_the_last_layers_alone(p: int, model: Any, tiny: Federation) -> None:
    """Its gradient is 2 mu (d - P P^T d) on the last p layers, norm layers counted, and nothing elsewhere."""
    bound, free = (slot_of(FedSCE(p=p, mu=mu), tiny, model, shift=0.05) for mu in (3.0, 0.0))
    with_it, without_it = bound.gradients(), free.gradients()
    first = built(bound.method, "tinted", bound.client.info)
    names = last_layers(first.local, p)
    assert len(names) == len(set(names)) == min(2 * p, len(list(first.local.parameters())))
    d = torch.cat(
        [(bound.client.model.local.get_parameter(n) - first.local.get_parameter(n)).flatten() for n in names]
    ).detach()
    basis = first.space["basis"]
    assert basis.shape == (len(d), 3)
    expected = dict(
        zip(
            [f"local.{n}" for n in names],
            (6 * (d - basis @ (basis.T @ d))).split([first.local.get_parameter(n).numel() for n in names]),
            strict=True,
        )
    )
    for name, gradient in with_it.items():
        pull = (gradient - without_it[name]).flatten()
        if name in expected:
            torch.testing.assert_close(pull, expected[name], atol=2e-5, rtol=1e-4)
        else:
            assert not pull.any()
    assert all(pull.abs().max() > 0.01 for pull in expected.values())


def test_layers_are_counted_from_the_output(tiny: Federation) -> None:
    local = built(FedSCE(), "plain", loop_for(FedSCE(), config_of(model={"name": "lenet-bn"}), tiny).info).local
    kinds = [type(local.get_submodule(n.rsplit(".", 1)[0])).__name__ for n in last_layers(local, 4)[::2]]
    assert kinds == ["BatchNorm2d", "Linear", "BatchNorm1d", "Linear"]


@pytest.mark.parametrize("attached", [False, True])
def test_who_learns_from_whom(attached: bool, tiny: Federation) -> None:
    """The gradient of each model against that of its own loss of Eq. 10, the other model fixed."""
    slot = slot_of(FedSCE(detach_target=not attached, without=AUX), tiny, shift=0.05)
    model, gradients = slot.client.model, slot.gradients()
    for mine, other in (("local", "aux"), ("aux", "local")):
        student, teacher = model.get_submodule(mine), model.get_submodule(other)
        with torch.no_grad():
            fixed = teacher(slot.x)
            s = cross_entropy(student(slot.x), slot.y) + cross_entropy(fixed, slot.y)
        q = student(slot.x).log_softmax(1)
        kl = (fixed.softmax(1) * (fixed.log_softmax(1) - q)).sum(1).mean()
        own = torch.autograd.grad(cross_entropy(q, slot.y) + kl / s, list(student.parameters()))
        pairs = zip(own, under(gradients, mine).values(), strict=True)
        apart = max(float((a - b).abs().max()) for a, b in pairs)
        assert apart > 1e-4 if attached else apart < 1e-6


# --- the subspace ----------------------------------------------------------------------------------------------------


@pytest.fixture
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def random(numbers: int, seed: int, length: float | None = None) -> Tensor:
    d = torch.randn(numbers, generator=torch.Generator().manual_seed(seed), dtype=torch.get_default_dtype())
    return d if length is None else d * (length / d.norm())


def values_of(space: Subspace) -> Tensor:
    return space["values"] if "values" in space.tensors() else torch.ones(space["basis"].shape[1])


def assert_orthonormal(basis: Tensor, within: float = 1e-6) -> None:
    basis = basis.double()
    assert float((basis.T @ basis - torch.eye(basis.shape[1], dtype=torch.float64)).abs().max()) < within


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_columns_stay_orthonormal(delta: str, rank: int) -> None:
    space = Subspace(400, rank, delta, 0, "test")
    assert space["basis"].dtype == torch.float32
    for k in range(50):
        space.turn(random(400, k, length=10.0 ** (k % 5 - 3)))
        assert_orthonormal(space["basis"])
    assert overlap(space["basis"], Subspace(400, rank, delta, 0, "test")["basis"]) < rank - 0.5  # it did turn


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("lengths", [(0.2, 0.5), (0.95, 1.05), (3.0, 8.0)], ids=["short", "near 1", "long"])
@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_span_is_that_of_a_plain_svd(delta: str, rank: int, lengths: tuple[float, float]) -> None:
    """Through |P^T Q|_F^2 = R: signs and rotations of a basis mean nothing."""
    space = Subspace(60, rank, delta, 1, "test")
    basis, values = space["basis"].clone(), values_of(space).clone()
    assert not (delta == KEEP and values.any())
    for k in range(8):
        d = random(60, k, lengths[k % 2])
        space.turn(d)
        basis, values = updated(basis, values, d, delta)
        assert overlap(space["basis"], basis).item() == pytest.approx(rank, abs=1e-9)
        torch.testing.assert_close(values_of(space), values, atol=1e-9, rtol=1e-9)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("delta", DELTAS)
def test_any_basis_of_a_subspace_turns_into_the_same_one(delta: str) -> None:
    """Also at the start, when all singular values that are kept are 0 and the SVD alone could choose freely."""
    spaces = [Subspace(60, 4, delta, 1, "test") for _ in range(2)]
    rotation = torch.linalg.qr(random(16, 0).view(4, 4))[0]
    spaces[1]["basis"].copy_(spaces[1]["basis"] @ rotation)
    for k in range(6):
        for space in spaces:
            space.turn(random(60, k, 0.7))
        assert overlap(spaces[0]["basis"], spaces[1]["basis"]).item() == pytest.approx(4, abs=1e-8)


@pytest.mark.parametrize("length", [0.1, 0.9, 1.1, 10.0])
@pytest.mark.parametrize("delta", DELTAS)
def test_how_much_of_an_update_enters(delta: str, length: float) -> None:
    """An update at a right angle to a random basis: raw wants it longer than 1, normalised takes half, kept all."""
    space, d = Subspace(3000, 3, delta, 0, "test"), random(3000, 7, length)
    assert space.share(d).item() < 0.01
    space.turn(d)
    share = space.share(d).item()
    assert share == pytest.approx(((space["basis"].T @ d).norm() / d.norm()).item() ** 2, rel=1e-4)
    if delta == "raw":
        assert share < 0.1 if length < 1 else share > 0.97
    elif delta == "normalised":
        assert 0.4 < share < 0.6
    else:
        assert share > 1 - 1e-6
        assert space["values"].tolist() == pytest.approx([length, 0, 0], abs=1e-6)


def test_kept_values_remember_the_longest_updates() -> None:
    space = Subspace(3000, 2, KEEP, 0, "test")
    updates = [random(3000, k, length) for k, length in enumerate((1.0, 2.0, 0.5, 3.0))]
    shares = []
    for d in updates:
        space.turn(d)
        shares.append([space.share(each).item() for each in updates])
    assert shares[1][0] > 0.99  # two updates, two dimensions
    assert shares[1][1] > 0.99
    assert shares[2][2] < 0.1  # shorter than both: it does not enter
    assert shares[3][1] > 0.9  # the longest two
    assert shares[3][3] > 0.99
    assert shares[3][0] < 0.2
    assert space["values"].tolist() == pytest.approx([3, 2], rel=0.05)


@pytest.mark.parametrize("delta", DELTAS)
def test_updates_that_say_nothing_new(delta: str) -> None:
    space = Subspace(200, 3, delta, 0, "test")
    for k in range(3):
        space.turn(random(200, k, 2.0))
    before = space["basis"].clone()
    space.turn(torch.zeros(200))
    assert torch.equal(space["basis"], before)
    assert space.share(torch.zeros(200)).item() == 0
    within = before @ torch.tensor([0.3, -2.0, 0.1])
    space.turn(within)  # already in the span
    assert overlap(space["basis"], before).item() == pytest.approx(3, abs=1e-5)
    assert_orthonormal(space["basis"])
    assert space.share(within).item() == pytest.approx(1, abs=1e-6)
    kept = {name: tensor.clone() for name, tensor in space.tensors().items()}
    for bad in (math.nan, math.inf):
        space.turn(torch.full((200,), bad))
        assert same(space.tensors(), kept)


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("length", [0.5, 20.0])
def test_updates_that_are_almost_inside(delta: str, length: float) -> None:
    """Where the new direction is lost in rounding, the columns are still orthonormal and d is still inside."""
    for power in range(1, 13):
        space = Subspace(300, 3, delta, 0, "test")
        for k in range(3):
            space.turn(random(300, k, 2.0))
        d = space["basis"] @ torch.tensor([0.6, 0.0, 0.8]) + 10.0**-power * random(300, 9, 1.0)
        space.turn(length * d)
        assert_orthonormal(space["basis"])
        assert space.share(d).item() > 1 - 10.0 ** (1 - 2 * power) - 1e-6


@pytest.mark.parametrize("delta", DELTAS)
def test_what_is_outside_is_at_a_right_angle(delta: str) -> None:
    space, d = Subspace(100, 4, delta, 0, "test"), random(100, 1)
    out = space.outside(d)
    assert float((space["basis"].T @ out).abs().max()) < 1e-5
    assert space.share(out).item() < 1e-10
    assert (out.square().sum() / d.square().sum()).item() == pytest.approx(1 - space.share(d).item(), rel=1e-5)


def test_as_many_dimensions_as_numbers() -> None:
    space = Subspace(3, 3, "raw", 0, "test")
    space.turn(torch.tensor([3.0, 1.0, 2.0]))
    assert_orthonormal(space["basis"])
    assert float(space.outside(torch.ones(3)).abs().max()) < 1e-6


@pytest.mark.parametrize("delta", DELTAS)
def test_a_large_subspace(delta: str) -> None:
    """400,000 numbers; a matrix of L x L would hold 640 GB."""
    space = Subspace(400_000, 3, delta, 0, "test")
    d = random(400_000, 3, 4.0)
    space.turn(d)
    assert_orthonormal(space["basis"])
    assert space.share(d).item() > (0.49 if delta == "normalised" else 0.999)


def test_more_dimensions_than_numbers_are_refused(tiny: Federation) -> None:
    method = FedSCE(p=1, R=171)  # the last layer holds 16 * 10 + 10
    with pytest.raises(ConfigError, match=r"171.*170"):
        loop_for(method, config_of(), tiny)
    assert loop_for(replace(method, R=170), config_of(), tiny)
    assert loop_for(replace(method, without=("lsl",)), config_of(), tiny)


def test_every_client_has_a_random_subspace_of_its_own(tiny: Federation) -> None:
    info = loop_for(FedSCE(), config_of(), tiny).info
    for method in (FedSCE(), FedSCE(delta=KEEP)):
        bases = [built(method, client_id, info).space["basis"] for client_id in info.clients]
        again = [built(method, client_id, info).space["basis"] for client_id in info.clients]
        other = [built(method, client_id, replace(info, seed=1)).space["basis"] for client_id in info.clients]
        assert all(torch.equal(a, b) for a, b in zip(bases, again, strict=True))
        for basis in bases:
            assert_orthonormal(basis)
        assert all(overlap(a, b) < 0.2 for a, b in combinations([*bases, *other], 2))


@pytest.mark.parametrize("s", [1, 3])
def test_subspaces_turn_every_s_rounds(s: int, tiny: Federation) -> None:
    run = train(FedSCE(s=s, delta="normalised"), tiny, train={"rounds": 5}, evaluate={"every": 5})
    for client_id in tiny.names:
        turned = [
            not torch.equal(run.before(r, client_id)["space.basis"], run.after(r, client_id)["space.basis"])
            for r in range(1, 6)
        ]
        assert turned == [r % s == 0 for r in range(5)]


def test_a_client_that_is_away_does_not_turn(plain: Trained) -> None:
    for record in plain.records[1:]:
        for client_id in set(plain.loop.info.clients) - set(record.cohort):
            before, after = (plain.snapshots[r].clients[client_id] for r in (record.round - 1, record.round))
            assert same(before, after)


@pytest.mark.parametrize("delta", DELTAS)
def test_a_diverged_client_fails_and_does_not_raise(delta: Any, tiny: Federation) -> None:
    method, config = FedSCE(delta=delta), config_of(train={"optimizer": {"lr": 1e25}})
    loop = loop_for(method, config, tiny)
    request = loop.requests(["plain"], loop.context(0))["plain"]
    answer = client_round(Job(method, config, loop.info, tiny.clients["plain"], 0), request.state, request.download)
    assert isinstance(answer, Failure)
    assert answer.non_finite
    assert "not finite" in answer.reason


# --- contributions ---------------------------------------------------------------------------------------------------


def test_weights_of_three_clients_by_hand() -> None:
    """F1 of 1, 2, 1 are shares of 1/4, 1/2, 1/4; F2 of 6, 2, 2 of 0.6, 0.2, 0.2; half of the sums."""
    assert contributions(torch.tensor([[1.0, 6.0], [2.0, 2.0], [1.0, 2.0]])) == pytest.approx([0.425, 0.35, 0.225])
    # Neither scale matters.
    assert contributions(torch.tensor([[1e-3, 6e5], [2e-3, 2e5], [1e-3, 2e5]])) == pytest.approx([0.425, 0.35, 0.225])


@pytest.mark.parametrize(
    ("distances", "expected"),
    [
        ([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [0.25] * 4),
        ([[0.0, 3.0], [0.0, 1.0]], [0.625, 0.375]),  # nothing is known of F1: halves
        ([[3.0, 0.0], [1.0, 0.0]], [0.625, 0.375]),
        ([[2.0, 5.0], [0.0, 0.0]], [1.0, 0.0]),
        ([[0.3, 7.0]], [1.0]),
        ([[0.0, 0.0]], [1.0]),
        ([[1e-30, 1e30], [3e-30, 1e30]], [0.375, 0.625]),
    ],
)
def test_weights_at_the_edges(distances: list[list[float]], expected: list[float]) -> None:
    assert contributions(torch.tensor(distances)) == pytest.approx(expected)


def test_aggregate_takes_any_subset(plain: Trained) -> None:
    loop = plain.loop
    uploads = []
    for place, client_id in enumerate(loop.info.clients):
        aux = {name: torch.full_like(t, place + 1.0) for name, t in loop.server.items()}
        far = {"distance/parameters": torch.tensor(place + 1.0), "distance/features": torch.tensor(2.0 - place)}
        uploads.append(Upload(client_id, 10, {**aux, **far}))
    for count in (1, 2, 3):
        for some in combinations(range(3), count):
            f1, f2 = sum(i + 1 for i in some), sum(2 - i for i in some)
            shares = [((i + 1) / f1 + (2 - i) / f2) / 2 if f2 else ((i + 1) / f1 + 1 / count) / 2 for i in some]
            before, ctx = {n: t.clone() for n, t in loop.server.items()}, loop.context(1)
            mean = loop.method.aggregate(loop.server, [uploads[i] for i in some], ctx)
            assert same(before, loop.server)
            assert mean.keys() == loop.server.keys()
            value = sum(share * (i + 1) for share, i in zip(shares, some, strict=True))
            assert mean["aux.head.fc2.weight"].mean().item() == pytest.approx(value, rel=1e-5)
            logged = {client_id: values["weight"] for client_id, values in ctx.logs.items()}
            assert logged == pytest.approx({loop.info.clients[i]: s for i, s in zip(some, shares, strict=True)})


def test_logged_weights_are_those_of_the_average(plain: Trained) -> None:
    for record in plain.records[1:]:
        weights = {client_id: logs["weight"] for client_id, logs in record.logs.items()}
        assert set(weights) == set(record.cohort)
        assert sum(weights.values()) == pytest.approx(1, abs=1e-9)
        far = [[record.logs[c][f"distance/{of}"] for of in ("parameters", "features")] for c in record.cohort]
        shares = [sum(f / sum(column) for f, column in zip(row, zip(*far, strict=True), strict=True)) for row in far]
        assert list(weights.values()) == pytest.approx([share / 2 for share in shares], rel=1e-5)
        auxiliaries = [under(plain.after(record.round, client_id), "aux") for client_id in record.cohort]
        expected = weighted(auxiliaries, list(weights.values()))
        assert_near(under(plain.snapshots[record.round].server, "aux"), expected)
        assert len(set(weights.values())) == 2


@torch.no_grad()
def test_distances_by_hand(plain: Trained) -> None:
    """From what was sent and what came back; F2 over all training images, also of batches that were dropped."""
    info, config = plain.loop.info, plain.loop.config
    for round, client_id in plain.took_part():
        one, other = info.arch.model(0), info.arch.model(0)
        load(one, under(plain.snapshots[round - 1].server, "aux"))
        load(other, under(plain.after(round, client_id), "aux"))
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        f1 = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
        x = model_inputs(plain.loop.federation.clients[client_id].train.x, config)
        f2 = sum(float((one.eval().body(i[None]) - other.eval().body(i[None])).square().sum()) for i in x)
        logs = plain.records[round].logs[client_id]
        assert logs["distance/parameters"] == pytest.approx(math.sqrt(f1), rel=1e-4)
        assert logs["distance/features"] == pytest.approx(math.sqrt(f2), rel=1e-3)


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"delta": "normalised", "s": 2}, {"delta": KEEP, "p": 2, "mu": 0.1}])
def test_shares_of_the_update_by_hand(settings: dict[str, Any], tiny: Federation) -> None:
    run = train(structure(settings, FedSCE, "method"), tiny, train={"optimizer": {"lr": 0.1}})
    for round, client_id in run.took_part():
        d = moved(run, round, client_id)
        logs = run.records[round].logs[client_id]
        assert logs["update"] == pytest.approx(d.norm().item(), rel=1e-4)
        for name, state in (("used", run.before(round, client_id)), ("next", run.after(round, client_id))):
            share = (state["space.basis"].double().T @ d).norm() / d.norm()
            assert logs[f"subspace/{name}"] == pytest.approx(share.item() ** 2, rel=2e-3, abs=1e-7)
        if settings.get("s") == 2 and round == 2:
            assert logs["subspace/next"] == logs["subspace/used"]
        else:
            assert logs["subspace/next"] > logs["subspace/used"]


def test_constraint_draws_updates_into_the_subspace(tiny: Federation) -> None:
    """What the method is for: from the same start, the larger mu, the less of an update is outside."""
    runs = [train(FedSCE(mu=mu, without=("dml",)), tiny, train={"rounds": 1, "epochs": 3}) for mu in (0.0, 1.0, 5.0)]
    for client_id in tiny.names:
        logs = [run.records[1].logs[client_id] for run in runs]
        assert logs[0]["subspace/used"] < logs[1]["subspace/used"] < logs[2]["subspace/used"]
        outside = [each["update"] * math.sqrt(1 - each["subspace/used"]) for each in logs]
        assert outside[0] > 1.3 * outside[1] > 1.7 * outside[2]


@torch.no_grad()
def test_accuracy_of_the_auxiliary_model_by_hand(plain: Trained) -> None:
    seen = 0
    for record in plain.records:
        for moment, splits in record.scores.items():
            for client_id, score in splits["test"].items():
                data = plain.loop.federation.clients[client_id]
                x, y = model_inputs(data.test.x, plain.loop.config), data.test.y
                trained = moment == "trained"
                holder = plain.after(record.round, client_id) if trained else plain.snapshots[record.round].server
                own = plain.snapshots[record.round].clients[client_id]
                for part, state, right in (("aux", holder, score.branches["auxiliary"]), ("local", own, score.correct)):
                    if state is None:  # has never trained
                        continue
                    model = plain.loop.info.arch.model(0)
                    load(model, under(state, part))
                    assert right == int((model.eval()(x).argmax(1) == y).sum())
                assert set(score.branches) == {"auxiliary"}
                seen += score.branches["auxiliary"] != score.correct
    assert seen  # they are not the same thing


def test_prediction_is_the_local_model_alone(tiny: Federation) -> None:
    slot = slot_of(FedSCE(), tiny, shift=0.1)
    model = slot.client.model
    with torch.no_grad():
        scores = slot.method.predict(model, slot.x, no_draw)
        assert torch.equal(scores, model.local(slot.x))
        for parameter in model.aux.parameters():
            parameter.zero_()
        assert torch.equal(slot.method.predict(model, slot.x, no_draw), scores)


# --- clients of different architectures ------------------------------------------------------------------------------


MIXED = {"per_client": [MLP, "lenet-bn", NARROW]}


@pytest.fixture(scope="module")
def mixed(unequal: Federation) -> Trained:
    return train(FedSCE(delta=KEEP), unequal, model=MIXED, clients={"participation": 0.67}, train={"rounds": 4})


def test_mixed_clients_share_the_smallest_architecture(mixed: Trained) -> None:
    info = mixed.loop.info
    counts = {c: sum(p.numel() for p in arch.model(0).parameters()) for c, arch in info.archs.items()}
    assert len(set(counts.values())) == 3
    smallest = info.archs[min(counts, key=lambda c: counts[c])]
    names = smallest.model(0).state_dict()
    assert {n: t.shape for n, t in under(mixed.loop.server, "aux").items()} == {n: t.shape for n, t in names.items()}
    assert len(mixed.models) == 3
    for client_id, state in mixed.models.items():
        own = info.archs[client_id].model(0).state_dict()
        assert {n: t.shape for n, t in under(state, "local").items()} == {n: t.shape for n, t in own.items()}
        assert under(state, "aux").keys() == names.keys()
        first = next(r for r, c in mixed.took_part() if c == client_id)
        assert len(moved(mixed, first, client_id)) == len(state["space.basis"])
    assert len({len(state["space.basis"]) for state in mixed.models.values()}) == 3
    for record in mixed.records[1:]:
        assert set(record.down.values()) == {size(mixed.loop.server)}
        assert sum(logs["weight"] for logs in record.logs.values()) == pytest.approx(1, abs=1e-9)


def test_mixed_clients_learn_from_each_other(mixed: Trained, unequal: Federation) -> None:
    """Whoever trains a second time has met what others did to the auxiliary model; a server that keeps it as it was."""
    alone = train(
        FedSCE(delta=KEEP),
        unequal,
        model=MIXED,
        clients={"participation": 0.67},
        train={"rounds": 4},
        server={"lr": 1e-9},
    )
    again = {client_id for client_id in mixed.models if [c for _, c in mixed.took_part()].count(client_id) > 1}
    assert again
    for client_id in again:
        ours, theirs = under(mixed.models[client_id], "local"), under(alone.models[client_id], "local")
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) > 1e-3


def test_mixed_run_goes_on_bit_by_bit(mixed: Trained, unequal: Federation) -> None:
    """From a snapshot, with subspaces and kept singular values."""
    for round in (1, 3):
        loop, seen = loop_for(mixed.loop.method, mixed.loop.config, unequal), Collect()
        assert loop.run([seen], mixed.snapshots[round]) == "finished"
        assert same(loop.server, mixed.loop.server)
        for client_id, state in mixed.loop.states.items():
            assert same(loop.states[client_id], state)
            assert state is None or {"space.basis", "space.values"} <= state.keys()
        assert all(same(model, mixed.models[client_id]) for client_id, model in models_of(loop).items())
        assert [record.logs for record in seen.records] == [record.logs for record in mixed.records[round + 1 :]]


@pytest.mark.slow
def test_mixed_run_killed_and_resumed_is_the_straight_run(tmp_path: Path) -> None:
    raw = {
        "method": {"name": "fedsce", "delta": KEEP},
        "model": MIXED,
        "data": {"partition": {"name": "domain", "clients": 3}, "samples": 40},
        "train": {"rounds": 8},
        "clients": {"participation": 0.67},
        "run": {"checkpoint_every": 2},
    }
    path, run = tmp_path / "config.yaml", tmp_path / "killed"
    path.write_text(dump(structure(raw, Config)), encoding="utf-8")
    straight = api.run_config(read(path), "x", out=tmp_path / "straight")
    assert killed([RUN, str(path), str(run)], run, after=4, delay=0.02), "it ended before it could be killed"
    resumed = api.resume(run)
    assert resumed.status == straight.status == "finished"
    assert (run / "metrics.jsonl").read_bytes() == (straight.path / "metrics.jsonl").read_bytes()
    with RunDirectory.open(run) as a, RunDirectory.open(straight.path) as b:
        one, other = a.latest(), b.latest()
        assert one is not None
        assert other is not None
        assert same(one.server, other.server)
        for client_id, state in one.clients.items():
            assert state is not None
            assert state["space.values"].any()
            assert same(state, other.clients[client_id])


def aux_of(auxiliary: Any, federation: Federation, model: Any = None) -> Net:
    method = structure({} if auxiliary is None else {"auxiliary": auxiliary}, FedSCE, "method")
    return built(method, None, loop_for(method, config_of(model=model or MLP), federation).info).aux


@pytest.mark.parametrize("auxiliary", ["lenet-bn", SMALL, {"name": "mlp"}])
def test_a_named_auxiliary_model(auxiliary: Any, tiny: Federation) -> None:
    run = train(structure({"auxiliary": auxiliary}, FedSCE, "method"), tiny, train={"rounds": 1})
    expected = aux_of(None, tiny, {"name": auxiliary} if isinstance(auxiliary, str) else auxiliary).state_dict()
    assert {n: t.shape for n, t in under(run.loop.server, "aux").items()} == {n: t.shape for n, t in expected.items()}
    assert all(not same(under(state, "aux"), expected) for state in run.models.values())  # it trains


def test_smallest_is_by_parameters_and_the_first_of_equals(tiny: Federation) -> None:
    wide = {"name": "mlp", "hidden": [64]}
    for order in ([wide, SMALL, MLP], [SMALL, MLP, wide], [MLP, wide, SMALL]):
        aux = aux_of(None, tiny, {"per_client": order})
        assert sum(p.numel() for p in aux.parameters()) == 768 * 8 + 8 + 8 * 10 + 10
    method = FedSCE()
    info = loop_for(method, config_of(model={"per_client": [wide, SMALL, dict(SMALL)]}), tiny).info
    assert method.aux_arch(info) == info.archs[info.clients[1]]


@pytest.mark.parametrize(
    ("auxiliary", "said"),
    [("lenet-nb", "lenet-bn"), ("nope", "nope"), ({"name": "mlp", "hiden": [8]}, "hid"), ({"hidden": [8]}, "name")],
)
def test_an_auxiliary_model_that_does_not_exist_is_refused(auxiliary: Any, said: str, tiny: Federation) -> None:
    with pytest.raises(FedprismError, match=said):
        aux_of(auxiliary, tiny)


def test_defaults_are_those_of_the_paper() -> None:
    method = FedSCE()
    assert (method.mu, method.p, method.R, method.s, method.delta) == (5.0, 5, 3, 1, "raw")
    assert method.auxiliary == Named("smallest")
    assert method.mixed
    assert (method.bn, method.weighting, method.moment) == ("shared", "contribution", "received")


def test_an_update_that_lies_almost_inside_is_still_taken_in() -> None:
    """A ten-thousandth of it is outside: with values of 0 the update itself is the first direction."""
    space = Subspace(2000, 3, KEEP, "test").double()
    rest = space.outside(torch.randn(2000, generator=torch.Generator().manual_seed(0)).double())
    d = space["basis"][:, 0] + 1e-4 * rest / rest.norm()
    assert 0.9e-4 < float(space.outside(d).norm()) < 1.1e-4
    space.turn(d)
    assert float(space.outside(d).norm()) < 1e-9
    assert_orthonormal(space["basis"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mu": -1}, "0 or more"),
        ({"p": 0}, "1 or more"),
        ({"R": 0}, "1 or more"),
        ({"s": 0}, "1 or more"),
        ({"delta": "scaled"}, "normalised"),
        ({"without": ["aux"]}, "dml"),
        ({"kl_weight": "image"}, "sample"),
        ({"reduction": "sum"}, "batchmean"),
        ({"r": 3}, "R"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FedprismError, match=said):
        structure(settings, FedSCE, "method")
