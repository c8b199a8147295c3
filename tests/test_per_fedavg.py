"""Per-FedAvg: its meta-gradients against exact ones, the smallest clients, and the step before a test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import Config, TrainConfig, structure
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.inprocess import InProcess
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Client, Context, Method, Pass
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.per_fedavg import PerFedAvg, cut
from fedprism.methods.states import steered
from fedprism.round.client import Job, make_context, make_info, open_slot
from fedprism.round.client import train as run_passes
from fedprism.round.training import model_inputs
from tests.harness import MLP, assert_differ, assert_same, config_of, engine_run, same, train
from tests.harness import cut as cut_clients

pytestmark = pytest.mark.slow

HF: dict[str, Any] = {"variant": "hessian-free"}


@dataclass(frozen=True)
class SecondBatches(FedAvg):
    """FedAvg on the second of every two batches."""

    weighting = "uniform"

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, batch_size=2 * ctx.train.batch_size, min_batch=4)]

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        return super().loss(client, x[half:], y[half:])


@dataclass(frozen=True)
class OneOfTwo(SecondBatches):
    """The same for batches of one image."""

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, batch_size=2)]


# --- the meta-gradient -----------------------------------------------------------------------------------------------


def test_without_an_inner_step_it_is_fedavg_on_second_batches(tiny: Federation) -> None:
    sites = cut_clients(tiny, (40, 25, 10))
    assert_same(train(PerFedAvg(alpha=0.0), sites, model=MLP), train(SecondBatches(), sites, model=MLP))
    assert_differ(train(PerFedAvg(), sites, model=MLP), train(SecondBatches(), sites, model=MLP))


def test_batch_norm_counts_first_batches_too(tiny: Federation) -> None:
    """So statistics are of all images; the weights are those of second batches alone."""
    both, half = train(PerFedAvg(alpha=0.0), tiny), train(SecondBatches(), tiny)
    weights = [n for n, _ in both.loop.info.arch.model(0).named_parameters()]
    assert same({n: both.server[n] for n in weights}, {n: half.server[n] for n in weights})
    (counter, *_) = (n for n in both.server if n.endswith("num_batches_tracked"))
    assert int(both.server[counter]) == 2 * int(half.server[counter]) > 0


@pytest.fixture
def smooth() -> Iterator[Client]:
    """A network without a kink, in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    yield Client(net, TrainConfig(), None)  # type: ignore[arg-type]
    torch.set_default_dtype(before)


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1)), torch.arange(rows) % 3


def exact(client: Client, x: Tensor, y: Tensor, alpha: float, hessian: bool) -> list[Tensor]:
    """g' - alpha H(w; B3) g' by a second backward pass, on thirds of the batch (or halves)."""
    w = list(client.model.parameters())
    xs, ys = (each.chunk(3 if hessian else 2) for each in (x, y))
    inner = torch.autograd.grad(cross_entropy(client.model(xs[0]), ys[0]), w)
    before = [p.detach().clone() for p in w]
    with torch.no_grad():
        for p, g in zip(w, inner, strict=True):
            p.sub_(alpha * g)
    outer = torch.autograd.grad(cross_entropy(client.model(xs[1]), ys[1]), w)
    with torch.no_grad():
        for p, value in zip(w, before, strict=True):
            p.copy_(value)
    if not hessian:
        return list(outer)
    slopes = torch.autograd.grad(cross_entropy(client.model(xs[2]), ys[2]), w, create_graph=True)
    along = torch.stack([(s * g).sum() for s, g in zip(slopes, outer, strict=True)]).sum()
    return [g - alpha * h for g, h in zip(outer, torch.autograd.grad(along, w), strict=True)]


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_gradients_are_the_exact_ones(variant: Any, smooth: Client) -> None:
    x, y = batch(12)
    hessian = variant == "hessian-free"
    loss = PerFedAvg(variant=variant, alpha=0.5, delta=1e-4).loss(smooth, x, y)
    found = torch.autograd.grad(loss, list(smooth.model.parameters()))
    expected = exact(smooth, x, y, 0.5, hessian)
    for g, e in zip(found, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-8)
    # The curvature is no rounding error, nor is the inner step.
    other = exact(smooth, x, y, 0.0 if not hessian else 0.4, hessian)
    assert max(float((g - o).abs().max()) for g, o in zip(found, other, strict=True)) > 1e-3
    assert float(loss.detach()) == pytest.approx(after_a_step(smooth, x, y, 0.5, 3 if hessian else 2))


def after_a_step(client: Client, x: Tensor, y: Tensor, alpha: float, parts: int) -> float:
    """The loss on the second batch after a step on the first."""
    xs, ys = x.chunk(parts), y.chunk(parts)
    names = [n for n, _ in client.model.named_parameters()]
    found = torch.autograd.grad(cross_entropy(client.model(xs[0]), ys[0]), list(client.model.parameters()))
    moved = {n: p - alpha * g for n, p, g in zip(names, client.model.parameters(), found, strict=True)}
    return float(cross_entropy(torch.func.functional_call(client.model, moved, (xs[1],)), ys[1]).detach())


def test_the_finite_difference_gets_better_with_delta(smooth: Client) -> None:
    """By the square of it, as a central one does; one-sided it would be ten times as good, not a hundred times."""
    x, y = batch(12)
    errors = []
    for delta in (1e-1, 1e-2):
        loss = PerFedAvg(variant="hessian-free", alpha=0.5, delta=delta).loss(smooth, x, y)
        found = torch.autograd.grad(loss, list(smooth.model.parameters()))
        pairs = zip(found, exact(smooth, x, y, 0.5, True), strict=True)
        errors.append(max(float((g - e).abs().max()) for g, e in pairs))
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.1)


def test_a_loss_can_be_given_its_gradients() -> None:
    w, g = torch.randn(3, requires_grad=True), torch.tensor([1.0, 0.0, -2.0])
    loss = steered(torch.tensor(7.0), {"w": w}, {"w": g})
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 7
    assert torch.equal(w.grad if w.grad is not None else w, g)


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("least", [1, 2])
def test_parts_of_a_batch(parts: int, least: int) -> None:
    """All images are used; parts have as many as they need; they overlap only where there are too few."""
    for rows in range(2, 40):
        cuts = [list(range(rows))[part] for part in cut(rows, parts, least)]
        assert len(cuts) == parts
        assert sorted({row for some in cuts for row in some}) == list(range(rows))
        assert all(len(some) >= least for some in cuts)
        if rows >= least * parts:
            assert sum(len(some) for some in cuts) == rows
            assert max(len(some) for some in cuts) - min(len(some) for some in cuts) <= 1


@pytest.mark.parametrize("settings", [{}, HF], ids=["first-order", "hessian-free"])
@pytest.mark.parametrize("last", ["keep", "drop"])
def test_the_smallest_clients_train(settings: dict[str, Any], last: str, tiny: Federation) -> None:
    """Two, three and five images, in a network with batch norm."""
    run = train(PerFedAvg(**settings), cut_clients(tiny, (2, 3, 5)), train={"rounds": 1, "last_batch": last})
    first = run.loop.info.arch.model(0).state_dict()
    for state in run.models.values():
        assert float((state["head.fc2.weight"] - first["head.fc2.weight"]).abs().max()) > 1e-3


def test_batches_of_one_image_stay_apart_without_batch_norm(tiny: Federation) -> None:
    sites, one = cut_clients(tiny, (4, 6, 8)), {"rounds": 1, "batch_size": 1}
    apart, half = (train(each, sites, model=MLP, train=one) for each in (PerFedAvg(alpha=0.0), OneOfTwo()))
    assert same(apart.server, half.server)


def test_a_rest_that_is_too_small_joins_the_batch_before(tiny: Federation) -> None:
    """In batches of 2 x 10 images: one or three more join it, since parts of two need four; four are a second step."""
    sites = cut_clients(tiny, (21, 23, 24))
    run = train(PerFedAvg(), sites, train={"rounds": 1, "batch_size": 10})
    (counter, *_) = (n for n in run.server if n.endswith("num_batches_tracked"))
    assert [int(run.models[client_id][counter]) for client_id in sites.names] == [2, 2, 4]


# --- the step before a test ------------------------------------------------------------------------------------------


def slot(method: Method, tiny: Federation, round: int, **sections: Any) -> tuple[Client, Context, Job]:
    config = config_of(model=MLP, **sections)
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    job = Job(method, config, info, tiny.clients["plain"], round)
    client = open_slot(job)
    return client, make_context(method, config, info, client.model, round, "plain", data=job.data), job


ADAM = {"name": "adam", "weight_decay": 0.1}


@pytest.mark.parametrize("training", [{}, {"schedule": "cosine", "optimizer": ADAM}, {"clip": 0.01}], ids=str)
def test_adaptation_is_plain_steps_of_rate_alpha(training: dict[str, Any], tiny: Federation) -> None:
    """Whatever the optimiser, the schedule and the clipping are: they are of the outer steps."""
    assert METHODS["per-fedavg"].moment == "adapted"
    one_batch = {**training, "batch_size": 64}
    client, ctx, job = slot(PerFedAvg(alpha=0.2, adapt_steps=3), tiny, 2, train=one_batch)
    net = job.info.arch.model(0)
    for _ in range(3):
        loss = cross_entropy(net(model_inputs(job.data.train.x, job.config)), job.data.train.y)
        slopes = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), slopes, strict=True):
                p.sub_(0.2 * g)
    run_passes(client, job, ctx, job.method.adapt(client, ctx))
    for p, q in zip(client.model.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert client.log_counts == {"loss/adapt": 3}


def test_steps_without_clipping_are_captured(unequal: Federation) -> None:
    train, evaluate = {"rounds": 1, "batch_size": 8, "clip": 0.1}, {"moments": ["received", "adapted"]}
    config = structure({"train": train, "evaluate": evaluate}, Config)
    (_, seen), (loop, replayed) = (
        engine_run(kind, PerFedAvg(adapt_steps=3), config, unequal) for kind in (InProcess, CudaGraphs)
    )
    assert loop.engine.reasons == {}  # type: ignore[attr-defined]
    assert [record.scores for record in seen.records] == [record.scores for record in replayed.records]


def test_every_client_adapts_to_its_own_images(tiny: Federation) -> None:
    moments = {"splits": ["train"], "moments": ["received", "adapted", "global"]}
    run = train(PerFedAvg(alpha=0.2), tiny, model=MLP, evaluate=moments)
    record = run.seen.records[-1]
    for client_id in tiny.names:
        received, adapted, common = (
            record.scores[moment]["train"][client_id].loss for moment in ("received", "adapted", "global")
        )
        assert adapted < received == common
