"""FediOS: its projections, its loss by hand, what is left of it when parts are left out, and who may join late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedprism as fp
from fedprism import keys
from fedprism.config import Config, structure
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods.base import Client, Info, Method, Net, State, load, no_draw
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedios import FediOS
from fedprism.round.client import Job, client_round, make_info, open_slot
from fedprism.round.engine import Result
from fedprism.round.events import RoundRecord
from fedprism.round.loop import Loop, draw_cohort
from fedprism.round.training import model_inputs
from tests.harness import Collect, cut, loop_for, models_of, same

pytestmark = pytest.mark.full

MLP = {"name": "mlp", "hidden": [32, 24]}
NAMES = ("north", "east", "south")
WIDTH, CLASSES, SHAPE = 24, 10, (3, 16, 16)
TIGHT = 1e-6  # of products of orthogonal matrices in float32


# --- running, and the projections written out ------------------------------------------------------------------------


def config_of(**sections: Any) -> Config:
    train = {"rounds": 3, "batch_size": 16, **sections.pop("train", {})}
    evaluate = {"splits": ["test"], "moments": ["received", "trained", "global"]}
    return structure({"model": MLP, "train": train, "evaluate": evaluate, **sections}, Config)


def info_of(clients: Sequence[str] = NAMES, seed: int = 0, later: tuple[str, ...] = ()) -> Info:
    return replace(make_info(config_of(seed=seed), clients, CLASSES, SHAPE), later=later)


@dataclass(frozen=True)
class Trained:
    loop: Loop
    records: list[RoundRecord]

    @property
    def models(self) -> dict[str, State]:
        return models_of(self.loop)

    def scores(self, moment: str) -> list[tuple[int, float]]:
        """Every client's right answers and loss after every round."""
        return [(s.correct, s.loss) for record in self.records[1:] for s in record.scores[moment]["test"].values()]


def train(method: Method, federation: Federation, **sections: Any) -> Trained:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return Trained(loop, seen.records)


def built(method: FediOS, client_id: str | None, info: Info) -> Net:
    return method.build(info.arch, client_id, info, info.seed)


def matrix(method: FediOS, model: Net, which: str) -> Tensor:
    """P itself `[out, width]`: where the method sends each unit vector, in float64."""
    return method.project(model, torch.eye(WIDTH), which).T.double()


def projections(method: FediOS, info: Info) -> list[Tensor]:
    """The generic projection and every client's."""
    names = (*info.clients, *info.later)
    generic = matrix(method, built(method, None, info), "generic")
    return [generic, *(matrix(method, built(method, name, info), "personal") for name in names)]


def assert_close(a: Tensor, b: Tensor, within: float = TIGHT) -> None:
    torch.testing.assert_close(a, b, atol=within, rtol=0, check_dtype=False)


def assert_zero(a: Tensor, within: float = TIGHT) -> None:
    assert float(a.abs().max()) <= within


@pytest.fixture(scope="module")
def plain(tiny: Federation) -> Trained:
    """A run with the defaults and clients of unequal sizes; two of three take part in a round."""
    return train(FediOS(), cut(tiny, (40, 25, 10)), clients={"participation": 0.67})


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(12, *SHAPE, generator=rng), torch.randint(CLASSES, (12,), generator=rng)


# --- the projections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "clients", "rank"),
    [
        (FediOS(), 1, 12),
        (FediOS(), 3, 6),
        (FediOS(), 4, 4),  # 24 / 5, rounded down: four dimensions are nobody's
        (FediOS(), 23, 1),
        (FediOS(max_clients=6), 3, 3),
        (FediOS(max_clients=3), 3, 6),
        (FediOS(rank=2), 3, 2),
        (FediOS(rank=6), 3, 6),
        (FediOS(rank=3, max_clients=7), 2, 3),
    ],
)
def test_projections_are_orthogonal_projectors(method: FediOS, clients: int, rank: int) -> None:
    info = info_of([f"c{i}" for i in range(clients)])
    made = projections(method, info)
    assert len(made) == clients + 1
    for p in made:
        assert p.shape == (WIDTH, WIDTH)
        assert_close(p, p.T)
        assert_close(p @ p, p)
        assert int(torch.linalg.matrix_rank(p, atol=1e-3)) == rank
        assert float(p.trace()) == pytest.approx(rank, abs=1e-5)
    for p, q in combinations(made, 2):
        assert_zero(p @ q)


@pytest.mark.parametrize("subspaces", ["orthogonal", "random", "tall"])
def test_projections_follow_the_seed_alone(subspaces: Any) -> None:
    method = FediOS(subspaces=subspaces)
    one, again, other = (projections(method, info_of(seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(p, q) for p, q in zip(one, again, strict=True))
    assert not any(torch.allclose(p, q, atol=0.1) for p, q in zip(one, other, strict=True))
    for client_id in NAMES:  # everybody has the same generic one
        assert torch.equal(matrix(method, built(method, client_id, info_of()), "generic"), one[0])
    assert not any(torch.allclose(p, q, atol=0.1) for p, q in combinations(one, 2))


def test_a_draw_elsewhere_does_not_change_the_projections() -> None:
    before = projections(FediOS(), info_of())
    torch.manual_seed(5)
    built(FediOS(), "east", info_of(seed=3))
    torch.rand(3)
    assert all(torch.equal(p, q) for p, q in zip(before, projections(FediOS(), info_of()), strict=True))


def test_projections_do_not_prefer_an_axis_or_a_sign() -> None:
    """Q of a Gaussian with R's diagonal positive is uniform: over seeds, the mean of P is rank / width times I."""
    arch = info_of().arch
    made = [FediOS().basis(0, 4, arch, seed).double() for seed in range(400)]
    assert_close(sum(o @ o.T for o in made) / 400, torch.eye(WIDTH) * 6 / WIDTH, within=0.04)
    assert float(torch.stack(made).sign().mean(0).abs().max()) < 0.25  # five deviations of 1 / sqrt(400)


def test_projections_neither_travel_nor_train(plain: Trained) -> None:
    loop = plain.loop
    shared = set(loop.server)
    assert shared
    assert all(name.startswith(("net.body.", "net.head.")) for name in shared)
    for client_id, state in plain.models.items():
        first = built(FediOS(), client_id, loop.info)
        assert not any(name.startswith("basis.") for name, _ in first.named_parameters())
        for name in ("basis.generic", "basis.personal"):
            assert torch.equal(state[name], first.state_dict()[name])
        down = loop.method.send(loop.server, client_id, loop.context(3).replace(client_id=client_id))
        assert down.keys() == shared
        job = Job(loop.method, loop.config, loop.info, loop.federation.clients[client_id], 0)
        result = client_round(job, state, down)
        assert isinstance(result, Result)
        assert result.upload.keys() == shared
        assert torch.equal(result.state["basis.personal"], state["basis.personal"])


def test_bytes_are_those_of_fedavg(plain: Trained, tiny: Federation) -> None:
    average = train(FedAvg(), tiny, train={"rounds": 1}).records[-1]
    everyone = set(plain.loop.info.clients)
    for record in plain.records[1:]:
        assert set(record.down) == everyone  # what is averaged goes to all of them
        assert set(record.up) == set(record.cohort)
        assert {*record.down.values(), *record.up.values()} == set(average.down.values())


def test_only_participants_train_but_everybody_receives(tiny: Federation) -> None:
    """After a round, who took no part has its first personal body."""
    run = train(FediOS(), tiny, clients={"participation": 0.67}, train={"rounds": 1})
    cohort = draw_cohort(run.loop.config.clients, run.loop.info, 0)
    (absent,) = set(run.loop.info.clients) - set(cohort)
    first = built(FediOS(), absent, run.loop.info).state_dict()
    personal = [name for name in first if name.startswith("personal.")]
    scores = run.records[-1].scores["received"]["test"]
    assert scores.keys() == set(run.loop.info.clients)
    for client_id in cohort:
        assert not any(torch.equal(run.models[client_id][name], first[name]) for name in personal)
    kept = run.loop.states[absent]
    assert kept is None or all(torch.equal(kept[name], first[name]) for name in personal)


@pytest.mark.parametrize("subspaces", ["orthogonal", "random", "tall"])
def test_projections_survive_a_checkpoint(subspaces: Any, tiny: Federation, tmp_path: Path) -> None:
    """Models that are read from disk have the projections that they were trained with."""
    method = FediOS(subspaces=subspaces)
    run = fp.train(tiny, method=method, rounds=1, out=tmp_path / "run")
    info = make_info(run.record.config, tiny.names, tiny.classes, tiny.shape)
    for client_id, model in fp.load(tmp_path / "run").models.items():
        read, first = model.module.state_dict(), built(method, client_id, info).state_dict()
        names = [name for name in first if name.startswith("basis.")]
        assert {"basis.generic", "basis.personal"} <= set(names)
        assert all(torch.equal(read[name], first[name]) for name in names)


def test_projections_are_state_and_not_drawn_again(plain: Trained) -> None:
    """What a client kept is what it goes on with, even if another version of the code would draw others."""
    loop, client_id = plain.loop, "plain"
    state = {name: t.clone() for name, t in plain.models[client_id].items()}
    state["basis.personal"] = state["basis.personal"].flip(0)
    job = Job(loop.method, loop.config, loop.info, loop.federation.clients[client_id], 0)
    down = {name: state[name] for name in loop.server}
    one, other = client_round(job, state, down), client_round(job, plain.models[client_id], down)
    assert isinstance(one, Result)
    assert isinstance(other, Result)
    assert torch.equal(one.state["basis.personal"], state["basis.personal"])
    assert not torch.equal(one.state["personal.fc1.weight"], other.state["personal.fc1.weight"])


# --- the parts -------------------------------------------------------------------------------------------------------


def test_parts_and_their_sizes() -> None:
    info = info_of()
    body, head = (768 * 32 + 32) + (32 * 24 + 24), 24 * 10 + 10
    model = built(FediOS(), "north", info)
    assert sum(p.numel() for p in model.parameters()) == 2 * body + head
    assert model.basis["generic"].shape == model.basis["personal"].shape == (24, 6)
    assert sum(p.numel() for p in built(FediOS(without=("personal",)), "north", info).parameters()) == body + head
    bare = built(FediOS(without=("projections", "personal")), "north", info)
    assert [name for name, _ in bare.named_children()] == ["net"]


def test_personal_bodies_start_equal_to_each_other_but_not_to_the_generic_one() -> None:
    first = [built(FediOS(), name, info_of()) for name in NAMES]
    for model in first[1:]:
        assert same(model.personal.state_dict(), first[0].personal.state_dict())
        assert same(model.net.state_dict(), info_of().arch.model(0).state_dict())
    weights = first[0].net.body.fc1.weight, first[0].personal.fc1.weight
    assert not torch.allclose(*weights, atol=1e-3)


def test_batch_norm_of_the_personal_body_stays_at_home(tiny: Federation) -> None:
    run = train(FediOS(), tiny, model={"name": "lenet-bn"}, train={"rounds": 2})
    assert "net.body.bn1.running_mean" in run.loop.server
    states = list(run.models.values())
    for one, other in combinations(states, 2):
        assert not torch.allclose(one["personal.bn1.running_mean"], other["personal.bn1.running_mean"], atol=1e-4)
        assert not torch.equal(one["personal.bn1.weight"], other["personal.bn1.weight"])


def test_what_the_paper_says_where_the_configuration_does_not() -> None:
    assert (FediOS.moment, FediOS.broadcast, FediOS.trainers) == ("trained", "all", "participants")
    assert (FediOS.bn, FediOS.weighting, FediOS.has_global) == ("shared", "samples", True)
    assert (FediOS().alpha, FediOS().lam, FediOS().re_on, FediOS().without) == (0.5, 0.1, "projected", ())


def test_a_subspace_of_the_head_is_trained_by_its_client_alone(tiny: Federation) -> None:
    """The others leave it as it was, so the average takes a share of the client's step."""
    sites = cut(tiny, (40, 25, 10))
    run = train(FediOS(), sites, train={"rounds": 1})
    first = built(FediOS(), None, run.loop.info).state_dict()["net.head.fc3.weight"]
    average = run.loop.server["net.head.fc3.weight"] - first
    for client_id, share in zip(sites.names, (40 / 75, 25 / 75, 10 / 75), strict=True):
        o = run.models[client_id]["basis.personal"]
        steps = {name: (state["net.head.fc3.weight"] - first) @ o for name, state in run.models.items()}
        own = steps.pop(client_id)
        assert float(own.abs().max()) > 1e-3
        assert all(float(step.abs().max()) < TIGHT for step in steps.values())
        assert_close(average @ o, share * own)


# --- the loss --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A client's slot, and what the paper's equations say about a batch."""

    method: FediOS
    client: Client
    x: Tensor
    y: Tensor

    @property
    def raw(self) -> tuple[Tensor, Tensor]:
        return self.client.model.net.body(self.x), self.client.model.personal(self.x)

    @property
    def projected(self) -> tuple[Tensor, Tensor]:
        """Eq. 8, with the matrices P = O O^T."""
        basis = self.client.model.basis
        return tuple(
            z @ (basis[which] @ basis[which].T).T for z, which in zip(self.raw, ("generic", "personal"), strict=True)
        )

    def three(self, a: Tensor, b: Tensor) -> Tensor:
        """Eq. 10 of features a and b, fused by Eq. 9."""
        head, alpha = self.client.model.net.head, self.method.alpha
        fused = alpha * a + (1 - alpha) * b
        return cross_entropy(head(fused), self.y) + cross_entropy(head(a), self.y) + cross_entropy(head(b), self.y)

    def loss(self) -> Tensor:
        return self.method.loss(self.client, self.x, self.y)

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        names, parameters = zip(*self.client.model.named_parameters(), strict=True)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def slot_of(method: FediOS, federation: Federation, batch: tuple[Tensor, Tensor]) -> Slot:
    info = make_info(config_of(), federation.names, federation.classes, federation.shape)
    job = Job(method, config_of(), info, federation.clients["tinted"], 0)
    return Slot(method, open_slot(job), *batch)


def under(gradients: Mapping[str, Tensor], part: str) -> float:
    """The largest entry of the gradient of a part."""
    return max(float(g.abs().max()) for name, g in gradients.items() if name.startswith(f"{part}."))


def assert_same_loss(slot: Slot, expected: Tensor) -> None:
    loss = slot.loss()
    assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
    gradients, wanted = slot.gradients(loss), slot.gradients(expected)
    for name, gradient in gradients.items():
        assert_close(gradient, wanted[name], 2e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_three_cross_entropies(alpha: float, tiny: Federation, batch: tuple[Tensor, Tensor]) -> None:
    slot = slot_of(FediOS(alpha=alpha, lam=0.0), tiny, batch)
    assert_same_loss(slot, slot.three(*slot.projected))


def test_each_cross_entropy_trains_what_it_should(tiny: Federation, batch: tuple[Tensor, Tensor]) -> None:
    """At alpha 1 a fused feature is a generic one: the personal body learns from the third term alone, and from it."""
    slot = slot_of(FediOS(alpha=1.0, lam=0.0), tiny, batch)
    gradients, third = slot.gradients(slot.loss()), slot.gradients(slot.three(*slot.projected))
    assert under(gradients, "personal") > 1e-4
    own = slot.gradients(cross_entropy(slot.client.model.net.head(slot.projected[1]), slot.y))
    assert under(own, "net.body") == 0
    assert_close(gradients["personal.fc1.weight"], own["personal.fc1.weight"])
    assert under(third, "net.head") > 1e-3


def test_orthogonality_loss_on_projected_features_is_nothing(tiny: Federation, batch: tuple[Tensor, Tensor]) -> None:
    slot = slot_of(FediOS(lam=1.0), tiny, batch)
    a, b = slot.projected
    sizes = a.norm(dim=1) * b.norm(dim=1)
    assert sizes.min().item() > 1e-2  # the features are not
    term = (a * b).sum(1).abs()
    assert (term / sizes).max().item() < TIGHT
    gradients = slot.gradients(term.mean())
    assert all(under(gradients, part) < TIGHT for part in ("net.body", "personal"))
    assert under(gradients, "net.head") == 0
    # However much it weighs.
    heavy, none = (slot_of(FediOS(lam=lam), tiny, batch) for lam in (10.0, 0.0))
    found, wanted = heavy.gradients(heavy.loss()), none.gradients(none.loss())
    assert heavy.loss().item() == pytest.approx(none.loss().item(), abs=1e-5)
    for name, gradient in found.items():
        assert_close(gradient, wanted[name], 1e-5)


def test_orthogonality_loss_on_raw_features(tiny: Federation, batch: tuple[Tensor, Tensor]) -> None:
    slot = slot_of(FediOS(lam=0.7, re_on="raw"), tiny, batch)
    z, own = slot.raw
    term = torch.stack([torch.dot(p, q).abs() for p, q in zip(z, own, strict=True)]).mean()  # Eq. 11
    assert term.item() > 1e-2
    gradients = slot.gradients(term)
    assert under(gradients, "net.body") > 1e-3
    assert under(gradients, "personal") > 1e-3
    assert under(gradients, "net.head") == 0
    term = torch.stack([torch.dot(p, q).abs() for p, q in zip(*slot.raw, strict=True)]).mean()
    assert_same_loss(slot, slot.three(*slot.projected) + 0.7 * term)


def test_orthogonality_loss_takes_each_images_size_without_its_sign(
    tiny: Federation, batch: tuple[Tensor, Tensor]
) -> None:
    """Signs must not cancel: half of the images have a negative product here."""
    slot = slot_of(FediOS(lam=1.0, re_on="raw"), tiny, batch)
    with torch.no_grad():
        for body in (slot.client.model.net.body, slot.client.model.personal):  # undo the last ReLU
            body[-1] = torch.nn.Identity()
        inner = (slot.raw[0] * slot.raw[1]).sum(1)
        assert 0 < int((inner < 0).sum()) < len(inner)
        extra = slot.loss() - slot.three(*slot.projected)
    assert float(extra) == pytest.approx(float(inner.abs().mean()), abs=1e-5)
    assert abs(float(inner.mean())) < 0.9 * float(inner.abs().mean())


def test_logs_hold_both_inner_products(tiny: Federation, batch: tuple[Tensor, Tensor]) -> None:
    slot = slot_of(FediOS(), tiny, batch)
    slot.loss()
    z, own = slot.raw
    assert slot.client.log_counts == {"inner/raw": 1, "inner/projected": 1}
    raw, projected = slot.client.log_sums["inner/raw"], slot.client.log_sums["inner/projected"]
    assert float(raw) == pytest.approx((z * own).sum(1).abs().mean().item(), rel=1e-5)
    assert float(projected) < TIGHT < float(raw)


# --- parts left out --------------------------------------------------------------------------------------------------


def test_without_projections(tiny: Federation, batch: tuple[Tensor, Tensor]) -> None:
    """Two bodies and their features as they are; the orthogonality loss is then on raw features, whatever `re_on`."""
    slot = slot_of(FediOS(without=("projections",), alpha=0.3, lam=0.7), tiny, batch)
    z, own = slot.raw
    assert_same_loss(slot, slot.three(z, own) + 0.7 * (z * own).sum(1).abs().mean())
    other = slot_of(FediOS(without=("projections",), alpha=0.3, lam=0.7, re_on="raw"), tiny, batch)
    assert torch.equal(slot.loss(), other.loss())
    both = slot_of(FediOS(without=("projections", "re"), alpha=0.3, lam=0.7), tiny, batch)
    assert_same_loss(both, both.three(*both.raw))
    with torch.no_grad():
        model = slot.client.model
        assert_close(slot.method.predict(model, slot.x, no_draw), model.net.head(0.3 * z + 0.7 * own))


@pytest.mark.parametrize("without", [("personal",), ("personal", "re")])
def test_without_personal_bodies(without: Any, tiny: Federation, batch: tuple[Tensor, Tensor]) -> None:
    """u = a, so the loss is twice the cross-entropy of the generic path; there is nothing to be orthogonal to."""
    slot = slot_of(FediOS(without=without, lam=3.0, re_on="raw", alpha=0.1), tiny, batch)
    model = slot.client.model
    o = model.basis["generic"]
    scores = model.net.head(model.net.body(slot.x) @ (o @ o.T))
    assert_same_loss(slot, 2 * cross_entropy(scores, slot.y))
    assert not slot.client.log_counts
    output = slot.method.forward_details(model, slot.x, no_draw)
    assert_close(output.scores, scores.detach())
    assert torch.equal(output.scores, slot.method.predict_global(model, slot.x, no_draw))
    assert (set(output.branches), set(output.means)) == ({"generic"}, set())


def test_without_the_orthogonality_loss_its_weight_is_zero(tiny: Federation) -> None:
    off = train(FediOS(without=("re",), lam=5.0, re_on="raw"), tiny)
    zero, on = train(FediOS(lam=0.0), tiny), train(FediOS(lam=0.5, re_on="raw"), tiny)
    assert same(off.loop.server, zero.loop.server)
    assert all(same(state, zero.models[client_id]) for client_id, state in off.models.items())
    assert not any(same(state, on.models[client_id]) for client_id, state in off.models.items())


@pytest.mark.parametrize("without", [("projections", "personal"), ("projections", "personal", "re")])
def test_without_projections_and_personal_bodies_it_is_fedavg_at_twice_the_rate(without: Any, tiny: Federation) -> None:
    """Bit by bit, since twice a float is exact. Sizes differ, so the weights of the average count too."""
    sites, model = cut(tiny, (40, 25, 10)), {"name": "lenet-bn"}
    optimizer = {"momentum": 0.9}
    bare = train(FediOS(without=without), sites, model=model, train={"optimizer": {"lr": 0.01, **optimizer}})
    average = train(FedAvg(), sites, model=model, train={"optimizer": {"lr": 0.02, **optimizer}})
    assert same({name.removeprefix("net."): t for name, t in bare.loop.server.items()}, average.loop.server)
    for client_id, state in bare.models.items():
        assert same({name.removeprefix("net."): t for name, t in state.items()}, average.models[client_id])
    for moment in ("received", "trained", "global"):
        assert bare.scores(moment) == average.scores(moment)
    slower = train(FedAvg(), sites, model=model, train={"optimizer": {"lr": 0.01, **optimizer}})
    assert bare.scores("trained") != slower.scores("trained")
    uniform = train(
        FedAvg(), sites, model=model, train={"optimizer": {"lr": 0.02, **optimizer}}, clients={"weighting": "uniform"}
    )
    assert not same(uniform.loop.server, average.loop.server)


def test_every_part_matters(tiny: Federation) -> None:
    """What can be left out, changes the end of a run."""
    choices: list[tuple[Any, ...]] = [(), ("projections",), ("personal",), ("re",), ("projections", "re")]
    choices += [("personal", "projections")]
    ends = [train(FediOS(without=w, re_on="raw"), tiny, train={"rounds": 1}).scores("trained") for w in choices]
    assert all(one != other for one, other in combinations(ends, 2))


# --- other subspaces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [None, 5])
def test_tall_projections_keep_equation_six_to_the_letter(places: int | None, batch: tuple[Tensor, Tensor]) -> None:
    method, info = FediOS(subspaces="tall", max_clients=places), info_of()
    blocks = (places or len(NAMES)) + 1
    made = projections(method, info)
    for p in made:
        assert p.shape == (blocks * WIDTH, WIDTH)
        assert_close(p.T @ p, torch.eye(WIDTH))
    for p, q in combinations(made, 2):
        assert float((p.T @ q).abs().max()) == 0
    model = built(method, "east", info)
    assert model.net.head[0].weight.shape == (CLASSES, blocks * WIDTH)
    x, _ = batch
    with torch.no_grad():
        a, b = made[0].float() @ model.net.body(x).T, made[2].float() @ model.personal(x).T
        assert_close(method.predict(model, x, no_draw), model.net.head(0.5 * a.T + 0.5 * b.T))
        assert_close(method.predict_global(model, x, no_draw), model.net.head(a.T))
        inner = method.forward_details(model, x, no_draw).means
    assert float(inner["inner/projected"].max()) == 0 < float(inner["inner/raw"].min())


def test_tall_heads_are_averaged_and_start_equal(tiny: Federation) -> None:
    info = info_of()
    heads = [built(FediOS(subspaces="tall"), name, info).net.head.state_dict() for name in (None, *NAMES)]
    assert all(same(head, heads[0]) for head in heads)
    run = train(FediOS(subspaces="tall"), tiny)
    assert run.loop.server["net.head.fc3.weight"].shape == (CLASSES, 4 * WIDTH)
    for state in run.models.values():
        assert not any(name.startswith("basis") for name in run.loop.server)
        assert state["basis.personal_block"].sum() == 1


def test_tall_head_learns_in_its_own_blocks_alone(tiny: Federation, batch: tuple[Tensor, Tensor]) -> None:
    slot = slot_of(FediOS(subspaces="tall"), tiny, batch)  # of `tinted`, the second client
    gradient = slot.gradients(slot.loss())["net.head.fc3.weight"].unflatten(1, (4, WIDTH)).abs().amax((0, 2))
    assert [bool(g > 0) for g in gradient] == [True, False, True, False]


def test_random_subspaces_are_projectors_but_not_orthogonal() -> None:
    made = projections(FediOS(subspaces="random", rank=6), info_of())
    for p in made:
        assert_close(p, p.T)
        assert_close(p @ p, p)
        assert float(p.trace()) == pytest.approx(6, abs=1e-5)
    for p, q in combinations(made, 2):
        # |P Q|^2 of independent subspaces of 6 among 24 dimensions is 6 * 6 / 24 on average.
        assert 0.5 < float((p @ q).square().sum()) < 3


def test_random_subspaces_have_no_limit_of_clients(batch: tuple[Tensor, Tensor]) -> None:
    info = info_of([f"c{i}" for i in range(40)], later=("new",))
    method = FediOS(subspaces="random")
    model = built(method, "new", info)
    assert model.basis["personal"].shape == (WIDTH, WIDTH // 4)
    assert method.predict(model, batch[0], no_draw).shape == (12, CLASSES)
    assert not torch.allclose(model.basis["personal"], built(method, "c39", info).basis["personal"], atol=0.1)


# --- those who come later --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subspaces", ["orthogonal", "tall"])
def test_a_spare_subspace_is_for_who_comes_later(subspaces: Any, tiny: Federation) -> None:
    method = FediOS(subspaces=subspaces, max_clients=4)
    known = make_info(config_of(), tiny.names, tiny.classes, tiny.shape)
    info = replace(known, later=("new",))
    before, after = projections(method, known), projections(method, info)
    assert len(after) == len(before) + 1
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=False))  # those who were there keep theirs
    for p, q in combinations(after, 2):
        assert_zero(p.T @ q)
    assert float(after[-1].square().sum()) > 1
    # It trains, from what the server has.
    run = train(method, tiny, train={"rounds": 1})
    data = replace(tiny.clients["plain"], name="new")
    down = method.send(run.loop.server, "new", run.loop.context(1).replace(client_id="new"))
    result = client_round(Job(method, run.loop.config, info, data, 1), None, down)
    assert isinstance(result, Result)
    first = built(method, "new", info).state_dict()
    assert torch.equal(result.state["basis.personal"], first["basis.personal"])
    assert not torch.equal(result.state["personal.fc1.weight"], first["personal.fc1.weight"])
    assert result.upload.keys() == down.keys()
    assert not any(torch.equal(result.upload[name], down[name]) for name in down)


@pytest.mark.parametrize(
    ("method", "later"),
    [
        (FediOS(), ("new",)),
        (FediOS(max_clients=4), ("first", "new")),
        (FediOS(subspaces="tall"), ("new",)),
        (FediOS(rank=1), ("new",)),  # dimensions are left, but no subspace was promised
    ],
)
def test_without_a_spare_subspace_nobody_can_join(method: FediOS, later: tuple[str, ...], tiny: Federation) -> None:
    known = make_info(config_of(), tiny.names, tiny.classes, tiny.shape)
    info, data = replace(known, later=later), replace(tiny.clients["plain"], name="new")
    wanted = len(tiny.names) + len(later)
    with pytest.raises(
        ConfigError, match=rf"'new' cannot join.*all {wanted - 1} are taken.*max_clients of {wanted} or"
    ):
        client_round(Job(method, config_of(), info, data, 1), None, {})
    for client_id in tiny.names:  # nothing changes for those who are there
        assert same(built(method, client_id, info).state_dict(), built(method, client_id, known).state_dict())


def test_without_projections_anybody_can_join() -> None:
    info = info_of(later=("a", "b"))
    assert same(
        built(FediOS(without=("projections",)), "b", info).state_dict(),
        built(FediOS(without=("projections",)), "north", info).state_dict(),
    )


def test_more_clients_than_features() -> None:
    crowd = info_of([f"c{i}" for i in range(WIDTH)])
    with pytest.raises(ConfigError) as caught:
        built(FediOS(), "c0", crowd)
    said = str(caught.value)
    assert "25 orthogonal subspaces" in said
    assert "24 features" in said
    for way_out in ("wider model", "fewer clients", "method.subspaces to random", "tall"):
        assert way_out in said
    for method in (FediOS(subspaces="random"), FediOS(subspaces="tall"), FediOS(without=("projections",))):
        assert built(method, "c23", crowd)
    assert built(FediOS(), "c0", info_of([f"c{i}" for i in range(WIDTH - 1)]))


def test_a_run_with_too_many_clients_ends_before_it_begins(tiny: Federation) -> None:
    with pytest.raises(ConfigError, match="and mlp has 3 features"):
        train(FediOS(), tiny, model={"name": "mlp", "hidden": [3]})


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            FediOS(rank=7),
            "4 orthogonal subspaces .* 7 dimensions each that is 28, and mlp has 24 features.*smaller",
        ),
        (FediOS(rank=24, subspaces="random"), "rank is 24, but mlp has 24 features; a subspace has fewer"),
        (FediOS(max_clients=30), "31 orthogonal subspaces"),
        (FediOS(max_clients=2), "cannot join: .* all 2 are taken. Train with method.max_clients of 3 or more"),
        (FediOS(max_clients=2, subspaces="tall"), "cannot join: .* all 2 are taken"),
    ],
)
def test_impossible_sizes_are_refused(method: FediOS, said: str) -> None:
    with pytest.raises(ConfigError, match=said):  # by the server, that is before anybody trains
        built(method, None, info_of())


def test_projections_do_not_depend_on_the_number_of_threads() -> None:
    """QR of 512 columns has other last bits on two threads; a run and a site must still draw the same."""
    before, drawn = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            keys.orthogonal.cache_clear()
            drawn.append(keys.orthogonal(512, 512, 0, "projections"))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*drawn)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alpha": 1.5}, "from 0 to 1"),
        ({"alpha": -0.1}, "from 0 to 1"),
        ({"lam": -1}, "0 or more"),
        ({"rank": 0}, "1 or more"),
        ({"max_clients": 0}, "1 or more"),
        ({"without": ["head"]}, "projections"),
        ({"re_on": "both"}, "raw"),
        ({"subspaces": "flat"}, "tall"),
        ({"lambda": 1}, "lam"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(FedprismError, match=said):
        structure(settings, FediOS, "method")


# --- inference and records -------------------------------------------------------------------------------------------


def trained_model(run: Trained, client_id: str) -> Net:
    model = built(FediOS(), client_id, run.loop.info)
    load(model, run.models[client_id])
    return model.eval()


@torch.no_grad()
def test_prediction_is_fused_and_the_global_one_is_the_generic_path(plain: Trained) -> None:
    client_id = plain.records[-1].cohort[0]
    model = trained_model(plain, client_id)
    x = model_inputs(plain.loop.federation.clients[client_id].test.x, plain.loop.config)
    g, p = (model.basis[which] @ model.basis[which].T for which in ("generic", "personal"))
    a, b = model.net.body(x) @ g.T, model.personal(x) @ p.T
    for alpha in (0.0, 0.3, 1.0):
        fused = FediOS(alpha=alpha).predict(model, x, no_draw)
        assert_close(fused, model.net.head(alpha * a + (1 - alpha) * b), 1e-5)
    alone = FediOS().predict_global(model, x, no_draw)
    assert_close(alone, model.net.head(a), 1e-5)
    # It reads nothing that is a client's own.
    other = built(FediOS(), next(c for c in plain.loop.info.clients if c != client_id), plain.loop.info).eval()
    load(other, {name: t for name, t in plain.models[client_id].items() if name.startswith("net.")})
    assert torch.equal(FediOS().predict_global(other, x, no_draw), alone)
    assert not torch.allclose(FediOS().predict(other, x, no_draw), FediOS().predict(model, x, no_draw), atol=1e-2)


@torch.no_grad()
def test_records_hold_branches_and_inner_products(plain: Trained) -> None:
    """The last round's, worked out again from the clients' states."""
    record = plain.records[-1]
    for client_id in record.cohort:
        data, kept = plain.loop.federation.clients[client_id], record.scores["trained"]["test"][client_id]
        x, y = model_inputs(data.test.x, plain.loop.config), data.test.y
        model = trained_model(plain, client_id)
        z, own = model.net.body(x), model.personal(x)
        a, b = (v @ (model.basis[w] @ model.basis[w].T) for v, w in ((z, "generic"), (own, "personal")))

        def right(features: Tensor, model: Net = model, y: Tensor = y) -> int:
            return int((model.net.head(features).argmax(1) == y).sum())

        assert kept.correct == right(0.5 * a + 0.5 * b)
        assert kept.branches == {"generic": right(a), "personal": right(b)}
        assert kept.diagnostics.keys() == {"inner/raw", "inner/projected"}
        assert kept.diagnostics["inner/raw"] == pytest.approx(float((z * own).sum(1).abs().mean()), rel=1e-5)
        assert kept.diagnostics["inner/projected"] < 1e-5 * kept.diagnostics["inner/raw"]


def test_every_evaluation_has_them_but_the_global_one(plain: Trained) -> None:
    for record in plain.records:
        for moment, splits in record.scores.items():
            for kept in splits["test"].values():
                assert set(kept.branches) == ({"generic", "personal"} if moment != "global" else set())
                assert bool(kept.diagnostics) == (moment != "global")
    assert [set(record.scores) for record in plain.records[1:]] == [{"received", "trained", "global"}] * 3
    for record in plain.records[1:]:
        for logs in record.logs.values():
            assert {"inner/raw", "inner/projected"} <= logs.keys()


def test_the_global_moment_is_the_generic_path_of_what_was_received(plain: Trained) -> None:
    for record in plain.records[1:]:
        for client_id, alone in record.scores["global"]["test"].items():
            assert alone.correct == record.scores["received"]["test"][client_id].branches["generic"]
