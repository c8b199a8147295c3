"""FedPHP: how the private model is inherited, what it teaches, what is tested, and who has none yet.

That training as a whole is the method's is in `test_reference_agreement.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.config import structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Client, State
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedphp import FedPHP, scaled_mmd
from fedprism.round.client import Job, client_evaluate, client_model, open_slot
from fedprism.round.training import model_inputs
from tests.harness import Trained, client_models, config_of, loop_for, models_of, part, same, train

pytestmark = pytest.mark.slow

TRANSFERS = ["mmd", "mmd-scaled", "soft-labels"]
FEW = {"participation": 0.67}  # two of three clients per round


def models(state: State | None) -> tuple[State, State]:
    """The common and the personal model in a client's state."""
    assert state is not None
    return part(state, "common."), part(state, "personal.")


# --- the moving average ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.9, 0.4])
def test_the_private_model_is_inherited_by_the_schedule(mu: float, tiny: Federation) -> None:
    """Round t of T takes mu t/T of the old one: nothing in the first, batch norm's statistics like the weights."""
    rounds = 3
    loop = train(FedPHP(mu=mu), tiny, train={"rounds": rounds}).loop
    for t in range(rounds):
        for client_id in tiny.names:
            new, personal = models(models_of(loop, t + 1)[client_id])
            if t == 0:
                assert same(personal, new)
                continue
            old, share = models(models_of(loop, t)[client_id])[1], mu * t / rounds
            for name, value in personal.items():
                mixed = share * old[name].double() + (1 - share) * new[name].double()
                counter = not value.is_floating_point()
                torch.testing.assert_close(value.double(), mixed.round() if counter else mixed, rtol=1e-5, atol=1e-6)
            assert not same(personal, new)
            assert (personal["body.bn1.running_mean"] - new["body.bn1.running_mean"]).abs().max() > 1e-4


def test_without_momentum_it_is_the_local_model(tiny: Federation) -> None:
    for state in train(FedPHP(mu=0.0), tiny).models.values():
        assert same(*models(state))


@pytest.mark.parametrize("clients", [{}, FEW], ids=["all", "few"])
def test_without_a_teacher_the_common_model_is_fedavgs(clients: dict[str, Any], tiny: Federation) -> None:
    sections: dict[str, Any] = {"clients": clients, "evaluate": {"moments": ["received", "trained", "global"]}}
    free, average = train(FedPHP(lam=0.0, mu=0.0), tiny, **sections), train(FedAvg(), tiny, **sections)
    assert same(part(free.server, "common."), average.server)
    for client_id, state in free.models.items():
        assert same(models(state)[0], average.models[client_id])
    assert free.correct("global") == average.correct("global")
    assert free.correct("trained") == average.correct("trained")  # then the private model is the local one
    assert free.correct("received") != average.correct("received")
    assert same(part(train(FedPHP(lam=0.0), tiny, clients=clients).server, "common."), average.server)
    assert not same(part(train(FedPHP(), tiny, clients=clients).server, "common."), average.server)


# --- what it teaches -------------------------------------------------------------------------------------------------


def slot_of(method: FedPHP, federation: Federation) -> tuple[Client, Tensor, Tensor]:
    """A client whose common and personal model differ, both in eval mode, and a batch of its images."""
    loop = loop_for(method, config_of(), federation)
    job = Job(method, loop.config, loop.info, federation.clients["plain"], 0)
    client, noise = open_slot(job), torch.Generator().manual_seed(1)
    for parameter in client.model.common.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=noise)
    client.model.eval()
    return client, model_inputs(job.data.train.x[:12], job.config), job.data.train.y[:12]


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_is_taught_has_a_gradient(transfer: Any, tiny: Federation) -> None:
    """Beside that of the labels: the gradient of the loss less that of (1 - lam) CE. The teacher learns nothing."""
    gradients = []
    for lam in (0.0, 0.5):
        method = FedPHP(transfer=transfer, lam=lam)
        client, x, y = slot_of(method, tiny)
        method.loss(client, x, y).backward()
        gradients.append({name: parameter.grad for name, parameter in client.model.named_parameters()})
    labels, both = gradients
    for name, gradient in both.items():
        if name.startswith("personal."):
            assert gradient is None, name
        elif name.startswith("common.head.") and transfer != "soft-labels":  # features say nothing of the head
            torch.testing.assert_close(gradient, 0.5 * labels[name])
        elif name.endswith("weight"):
            assert (gradient - 0.5 * labels[name]).abs().max() > 1e-6, name


def test_scaled_kernels_by_hand() -> None:
    """Features 0 and 2 against 1 and 3: of the six pairs, squares 4, 1, 9, 1, 1 and 4 have the mean 10/3."""
    a, b = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])

    def k(square: float) -> float:
        return sum(math.exp(-square / (10 / 3 * scale)) for scale in (0.25, 0.5, 1, 2, 4))

    within, between = (2 * k(0) + 2 * k(4)) / 4, (3 * k(1) + k(9)) / 4
    torch.testing.assert_close(scaled_mmd(a, b), torch.tensor(2 * within - 2 * between), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scaled_mmd(100 * a, 100 * b), scaled_mmd(a, b), rtol=1e-4, atol=1e-5)
    assert scaled_mmd(a, a).abs() < 1e-5
    assert scaled_mmd(a[:1], a[:1]).isfinite()  # all distances are zero


def test_soft_labels_by_hand(tiny: Federation) -> None:
    """-sum q log p: q of the teacher's scores over 4, p of the student's as they are."""
    method = FedPHP(transfer="soft-labels", lam=0.25)
    client, x, y = slot_of(method, tiny)
    q, p = (client.model.personal(x) / 4).softmax(1), client.model.common(x).softmax(1)
    expected = 0.75 * -p.log()[range(12), y].mean() + 0.25 * -(q * p.log()).sum(1).mean()
    torch.testing.assert_close(method.loss(client, x, y), expected)


MODES: list[tuple[bool, bool]] = []


@dataclass(frozen=True)
class Watched(FedPHP):
    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        MODES.append((client.model.common.body.bn1.training, client.model.personal.body.bn1.training))
        return super().loss(client, x, y)


def test_the_teacher_is_in_eval_mode_and_stays_as_it_is(tiny: Federation) -> None:
    MODES.clear()
    run = train(Watched(mu=1.0), tiny, train={"rounds": 3})
    assert set(MODES) == {(True, False)}
    # Batch norm's counter: 3 steps per round from 3 clients' rounded mean; the private one lags behind.
    common, personal = models(run.models["plain"])
    name = "body.bn1.num_batches_tracked"
    assert 0 < int(personal[name]) < int(common[name]) == 9


# --- who is tested, and who has no private model yet -----------------------------------------------------------------


def test_the_private_model_is_tested_and_does_not_change_on_arrival(tiny: Federation) -> None:
    assert FedPHP().moment == "received"
    moments = {"moments": ["received", "trained", "global"]}
    run = train(FedPHP(), tiny, evaluate=moments)
    assert run.correct("received") == run.correct("trained")
    assert run.correct("received") != run.correct("global")
    local = train(FedPHP(inference="local"), tiny, evaluate=moments)
    assert local.loop.method.moment == "trained"
    assert same(local.server, run.server)
    assert local.correct("received") == run.correct("global")
    assert local.correct("trained") not in (run.correct("trained"), run.correct("global"))


@pytest.mark.parametrize("broadcast", ["participants", "all"])
def test_who_has_not_trained_has_the_received_model(broadcast: str, tiny: Federation) -> None:
    """However often it received one; its first training then leaves it its own model alone, however late that is."""
    clients = {**FEW, "broadcast": broadcast, "train": "participants"}
    run = train(FedPHP(mu=1.0), tiny, train={"rounds": 4}, clients=clients)
    cohorts = [record.cohort for record in run.seen.records[1:]]
    (late,) = set(tiny.names) - set(cohorts[0])
    first = next(number for number, cohort in enumerate(cohorts) if late in cohort)
    before, after = run.seen.snapshots[first], models_of(run.loop, first + 1)
    assert same(*models(after[late]))
    assert not bool((before.clients[late] or {"own.trained": torch.tensor(False)})["own.trained"])
    assert same(*models(received(run, before.server, late, before.clients[late], first)))
    others = [client_id for client_id in cohorts[first] if client_id != late]
    assert not any(same(*models(after[client_id])) for client_id in others)


def received(run: Trained, server: State, client_id: str, state: State | None, round: int) -> State:
    loop = run.loop
    job = Job(loop.method, loop.config, loop.info, loop.federation.clients[client_id], round)
    return client_model(job, state, server)


def test_a_newcomer_is_tested_with_what_it_receives_and_adapts_it(tiny: Federation) -> None:
    run = train(FedPHP(), tiny, evaluate={"moments": ["global"]})
    rounds, data = 3, tiny.clients["plain"]
    config = config_of(evaluate={"moments": ["received", "global", "adapted"], "splits": ["train"]})
    job = Job(FedPHP(), config, run.loop.info, data, rounds)
    scores = client_evaluate(job, None, run.server)
    assert scores["received"] == scores["global"]
    assert scores["adapted"]["train"].loss != scores["received"]["train"].loss
    assert same(*models(client_models(job, None, run.server)[1]))


@pytest.mark.parametrize("wrong", [{"mu": 1.1}, {"mu": -0.1}, {"lam": 1.0}, {"lam": -0.1}, {"transfer": "kl"}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        structure(wrong, FedPHP, "method")
