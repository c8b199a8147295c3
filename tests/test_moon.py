"""MOON: the contrastive term by hand, what stands for the previous model, what is frozen, and the projection.

That training as a whole is the paper's is in `test_reference_agreement.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fedprism.config import structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Client, load
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.moon import MOON, contrast
from fedprism.round.client import Job, make_info, open_slot
from fedprism.round.training import model_inputs
from tests.harness import Trained, client_models, config_of, part, same, train

pytestmark = pytest.mark.slow

FEW = {"participation": 0.67}  # two of three clients per round


def unit(degrees: float) -> Tensor:
    """A direction in the plane, as a batch of one."""
    return torch.tensor([[math.cos(math.radians(degrees)), math.sin(math.radians(degrees))]])


# --- the term --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.5, 0.05])
def test_the_term_by_hand(tau: float) -> None:
    """z at 0, received at 60, previous at 90 degrees: cosines 1/2 and 0. Lengths do not matter."""
    a = math.exp(0.5 / tau)
    term = contrast(3 * unit(0), unit(60), 7 * unit(90), tau)
    torch.testing.assert_close(term, torch.tensor(-math.log(a / (a + 1))), rtol=1e-5, atol=1e-7)


def test_the_term_is_the_mean_over_the_batch() -> None:
    z, received, previous = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    one_by_one = [contrast(*(t[i : i + 1] for t in (z, received, previous)), 0.5) for i in range(5)]
    torch.testing.assert_close(contrast(z, received, previous, 0.5), torch.stack(one_by_one).mean())


def test_the_term_pulls_to_the_received_and_away_from_the_previous_model() -> None:
    z = unit(30).requires_grad_()
    contrast(z, unit(60), unit(-20), 0.5).backward()
    assert z.grad is not None
    assert z.grad.norm() > 0.1
    after = (z - 0.1 * z.grad).detach()
    assert cosine_similarity(after, unit(60)) > cosine_similarity(z, unit(60))
    assert cosine_similarity(after, unit(-20)) < cosine_similarity(z, unit(-20))


def test_the_term_is_log_2_without_a_gradient_where_both_models_are_the_same() -> None:
    z = unit(30).requires_grad_()
    term = contrast(z, unit(60), unit(60), 0.5)
    term.backward()
    assert term.item() == pytest.approx(math.log(2))
    assert z.grad is not None
    assert z.grad.abs().max() < 1e-7


@pytest.mark.parametrize("tau", [0.5, 1e-3])
def test_the_term_is_finite_without_features_and_in_low_precision(tau: float) -> None:
    """A ReLU can leave an image without any feature; and a small difference of cosines survives bfloat16."""
    z = torch.zeros(2, 4, requires_grad=True)
    contrast(z.relu(), torch.ones(2, 4), -torch.ones(2, 4), tau).backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
    low = contrast(*(unit(angle).bfloat16() for angle in (0, 10, 12)), tau=0.01)
    assert low.dtype == torch.float32
    assert low.item() != pytest.approx(math.log(2), abs=0.01)


# --- in training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [{}, FEW], ids=["all", "few"])
def test_without_the_term_it_is_fedavg(clients: dict[str, Any], tiny: Federation) -> None:
    free, average, drawn = (train(method, tiny, clients=clients) for method in (MOON(mu=0.0), FedAvg(), MOON()))
    assert same(part(free.server, "net."), average.server)
    for client_id, state in free.models.items():
        assert same(part(state, "net."), average.models[client_id])
    assert free.correct() == average.correct()
    assert not same(part(drawn.server, "net."), average.server)


def test_the_first_round_is_fedavgs_and_the_second_is_not(tiny: Federation) -> None:
    drawn, average = train(MOON(mu=10.0), tiny), train(FedAvg(), tiny)

    def apart(round: int) -> float:
        own, other = part(drawn.seen.snapshots[round].server, "net."), average.seen.snapshots[round].server
        return max(float((own[n] - t).abs().max()) for n, t in other.items() if t.is_floating_point())

    assert apart(1) < 1e-4 < 1e-3 < apart(2)


def test_every_layer_of_the_body_feels_the_term(tiny: Federation) -> None:
    """The gradient with the term less that without it, once the models have come apart."""
    run, data = train(MOON(), tiny), tiny.clients["plain"]
    gradients = []
    for mu in (0.0, 1.0):
        job = Job(MOON(mu=mu), config_of(), run.loop.info, data, 2)
        client = open_slot(job)
        load(client.model, run.models["plain"])
        client.freeze("received", client.model.net.body, part(run.server, "net.body."))
        client.model.previous.eval()
        job.method.loss(client, model_inputs(data.train.x[:12], job.config), data.train.y[:12]).backward()
        gradients.append({name: parameter.grad for name, parameter in client.model.named_parameters()})
    without, drawn = gradients
    for name, gradient in drawn.items():
        if name.startswith("previous."):
            assert gradient is None, name
        elif name.startswith("net.head."):
            assert torch.equal(gradient, without[name]), name
        elif name.endswith("weight"):
            assert (gradient - without[name]).abs().max() > 1e-5, name


def test_the_previous_model_is_the_clients_own_last_one(tiny: Federation) -> None:
    """A client that takes part has its trained body there; one that does not keeps what it has."""
    run = train(MOON(), tiny, clients=FEW)
    trained = {client_id for record in run.seen.records for client_id in record.cohort}
    for client_id in trained:
        state = run.models[client_id]
        assert bool(state["own.trained"])
        assert same(part(state, "previous."), part(state, "net.body."))
        assert not same(part(state, "previous."), part(run.server, "net.body."))


@pytest.mark.parametrize("broadcast", ["participants", "all"])
def test_before_its_first_training_a_client_has_the_received_model_for_a_previous_one(
    broadcast: str, tiny: Federation
) -> None:
    """Then the term is log 2 in its first round, however late that is: to receive is not to train."""
    clients = {**FEW, "broadcast": broadcast, "train": "participants"}
    run = train(MOON(), tiny, train={"rounds": 4}, clients=clients)
    cohorts = [record.cohort for record in run.seen.records[1:]]
    assert set(cohorts[0]) != set().union(*cohorts)
    for number, record in enumerate(run.seen.records[1:]):
        for client_id in record.cohort:
            first = not any(client_id in before for before in cohorts[:number])
            assert (record.logs[client_id]["contrast"] == pytest.approx(math.log(2), abs=1e-6)) == first


def test_a_newcomer_trains_as_with_fedavg(tiny: Federation) -> None:
    run = train(MOON(mu=10.0), tiny)
    job = Job(MOON(mu=10.0), config_of(), run.loop.info, tiny.clients["plain"], 2)
    new = client_models(job, None, run.server)[1]
    plain = client_models(Job(FedAvg(), job.config, job.info, job.data, 2), None, part(run.server, "net."))[1]
    far = max(float((new[f"net.{n}"] - t).abs().max()) for n, t in plain.items() if t.is_floating_point())
    assert far < 1e-4


MODES: list[tuple[bool, ...]] = []


@dataclass(frozen=True)
class Watched(MOON):
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        bodies = (client.model.net.body, client["received"], client.model.previous)
        MODES.append(tuple(body.bn1.training for body in bodies))
        return super().loss(client, x, y)


def test_frozen_models_run_in_eval_mode(tiny: Federation) -> None:
    """As at inference, so their running statistics count batches of the client's training alone."""
    MODES.clear()
    run = train(Watched(), tiny)
    assert set(MODES) == {(True, False, False)}
    counter = "body.bn1.num_batches_tracked"
    average = train(FedAvg(), tiny)
    assert all(state[f"net.{counter}"] == average.models[client_id][counter] for client_id, state in run.models.items())


# --- the projection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_layers", [1, 2])
def test_the_projection_lies_between_body_and_head(head_layers: int, tiny: Federation) -> None:
    config = config_of(model={"name": "lenet-bn", "head_layers": head_layers})
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    net = MOON(projection=9).build(info.arch, "plain", info, 0).net.eval()
    plain, width = info.arch.model(0).eval(), info.arch.width
    first, _, second = net.body.projection
    assert (first.in_features, first.out_features, second.in_features, second.out_features) == (width, width, width, 9)
    assert next(layer for layer in net.head.modules() if isinstance(layer, nn.Linear)).in_features == 9
    x = torch.rand(4, *tiny.shape)
    z = second(first(plain.body(x)).relu())  # the encoder has the first weights of everybody's body
    torch.testing.assert_close(net.body(x), z)
    torch.testing.assert_close(net(x), net.head(z))
    assert net(x).shape == (4, 10)


def test_the_projection_travels_and_learns(tiny: Federation) -> None:
    run = train(MOON(projection=9), tiny)
    names = [f"net.body.projection.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    first = run.seen.snapshots[0].server
    assert all(not torch.equal(run.server[name], first[name]) for name in names)
    other = train(MOON(projection=9, mu=0.0), tiny)
    assert not same(run.server, other.server)
    assert_projected(run, 9)


def assert_projected(run: Trained, width: int) -> None:
    """The previous body has the projection too, and the head takes its width."""
    for state in run.models.values():
        assert state["previous.projection.2.weight"].shape[0] == width
        assert state["net.head.fc2.weight"].shape == (10, width)


@pytest.mark.parametrize("wrong", [{"mu": -1.0}, {"tau": 0.0}, {"projection": 0}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        structure(wrong, MOON, "method")
