"""pFedMe: what its steps move and how far, what it starts from, what is tested, and who trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import State
from fedprism.methods.pfedme import PFedMe
from fedprism.methods.states import average
from fedprism.round.client import Job, client_evaluate, client_model, make_info, open_slot
from fedprism.round.training import model_inputs
from tests.harness import MLP, client_models, config_of, cut, loop_for, part, same, train

pytestmark = pytest.mark.slow

ONE_STEP: dict[str, Any] = {"rounds": 1, "batch_size": 64}  # each client of `tiny` has 40 images


def parameters(state: State) -> State:
    return {n: t for n, t in state.items() if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))}


def far(a: State, b: State) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in parameters(a))


def test_without_a_pull_the_global_parameters_stay(tiny: Federation) -> None:
    free, pulled = (train(PFedMe(lam=lam), tiny, train={"rounds": 2}) for lam in (0.0, 15.0))
    first = free.seen.snapshots[0].server
    assert far(free.server, first) <= 1e-6
    assert far(pulled.server, first) > 1e-2
    for state in free.models.values():  # each theta trains all the same
        assert far(part(state, "personal."), part(first, "common.")) > 1e-2


def test_without_a_pull_theta_makes_plain_steps_on_its_batch(tiny: Federation) -> None:
    run = train(PFedMe(lam=0.0, inner_steps=3, personal_lr=0.1), tiny, model=MLP, train=ONE_STEP)
    net = run.loop.info.arch.model(0)
    data = tiny.clients["plain"].train
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        cross_entropy(net(model_inputs(data.x, run.loop.config)), data.y).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    assert far(part(run.models["plain"], "personal."), net.state_dict()) < 1e-5


@pytest.mark.parametrize(("lr", "lam"), [(0.05, 15.0), (0.02, 5.0)])
def test_the_common_model_goes_a_share_of_the_way(lr: float, lam: float, tiny: Federation) -> None:
    """After one batch w_k = w + lr lam (theta - w)."""
    run = train(PFedMe(lam=lam), tiny, train={**ONE_STEP, "optimizer": {"lr": lr}})
    first = run.loop.info.arch.model(0).state_dict()
    for state in run.models.values():
        theta, own = part(state, "personal."), part(state, "common.")
        expected = {n: first[n] + lr * lam * (theta[n] - first[n]) for n in parameters(first)}
        assert far(expected, own) < 1e-6
        assert far(theta, own) > 1e-3


def test_the_pull_has_a_gradient(tiny: Federation) -> None:
    """lam (theta - w), for theta alone."""
    config = config_of(model=MLP)
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    data = tiny.clients["plain"]
    client = open_slot(Job(PFedMe(), config, info, data, 0))
    common, theta = (list(each.parameters()) for each in (client.model.common, client.model.personal))
    with torch.no_grad():
        for p in theta:
            p.add_(0.5)
    for p in common:
        p.requires_grad_(False)
    x, y = model_inputs(data.train.x, config), data.train.y
    slopes = [torch.autograd.grad(PFedMe(lam=lam).loss(client, x, y), theta) for lam in (4.0, 0.0)]
    for pulled, free in zip(*slopes, strict=True):
        torch.testing.assert_close(pulled - free, torch.full_like(free, 2.0), rtol=1e-4, atol=1e-4)


def test_a_round_of_theta_begins_at_the_received_model(tiny: Federation) -> None:
    """With one tiny step per round theta ends where w was, whatever it was before; running statistics go on."""
    config = config_of(train=ONE_STEP)
    method, data = PFedMe(inner_steps=1, personal_lr=1e-9), tiny.clients["plain"]
    loop = loop_for(method, config, tiny)
    job = Job(method, config, loop.info, data, 0)
    far_away = {n: t + 1.0 if t.is_floating_point() else t for n, t in open_slot(job).model.state_dict().items()}
    far_away["own.trained"] = torch.tensor(True)
    theta = part(client_models(job, far_away, loop.server)[1], "personal.")
    assert far(theta, part(loop.server, "common.")) < 1e-6
    statistic = next(n for n in theta if n.endswith("running_mean"))
    assert float(theta[statistic].mean()) > 0.5  # 0.9 of the 1.0 that it had, and 0.1 of the batch's


def test_what_is_tested_is_theta_of_the_last_training(tiny: Federation) -> None:
    """The new common model does not touch it before the next round."""
    moments = {"splits": ["test"], "moments": ["received", "trained", "global"]}
    run = train(PFedMe(), tiny, evaluate=moments)
    assert run.correct("received") == run.correct("trained")
    assert run.correct("received") != run.correct("global")


def test_who_comes_first_is_tested_with_the_common_model(tiny: Federation) -> None:
    run = train(PFedMe(), tiny)
    config = config_of(evaluate={"splits": ["test"], "moments": ["received", "global", "adapted"]})
    job = Job(run.loop.method, config, run.loop.info, tiny.clients["plain"], 3)
    scores = client_evaluate(job, None, run.server)
    assert scores["received"] == scores["global"]
    assert scores["received"] != scores["adapted"]


@pytest.mark.parametrize("broadcast", ["participants", "all"])
def test_who_has_not_trained_is_tested_with_the_newest_common_model(broadcast: str, tiny: Federation) -> None:
    """However often it received one; from its first training on it has a theta of its own."""
    clients = {"participation": 0.34, "broadcast": broadcast, "train": "participants"}
    run = train(PFedMe(), tiny, train={"rounds": 4}, clients=clients)
    cohorts, loop = [record.cohort for record in run.seen.records[1:]], run.loop
    late = next(client_id for client_id in tiny.names if client_id not in cohorts[0] + cohorts[1])
    for round in range(len(cohorts)):
        before, job = run.seen.snapshots[round], Job(loop.method, loop.config, loop.info, tiny.clients[late], round)
        state = client_model(job, before.clients[late], before.server)
        own = any(late in earlier for earlier in cohorts[:round])
        assert same(part(state, "personal."), part(state, "common.")) != own
        assert same(part(state, "common."), part(before.server, "common."))


def test_a_newcomer_adapts_at_the_full_rates(tiny: Federation) -> None:
    """Whatever a schedule has come to: theta's steps, and the share of its way that the common model goes."""
    adapted, method = [], PFedMe()
    for schedule in ("none", "cosine"):
        config = config_of(model=MLP, train={"schedule": schedule})
        loop = loop_for(method, config, tiny)
        job = Job(method, config, loop.info, tiny.clients["plain"], 3)
        adapted.append(client_model(job, None, loop.server, adapted=True))
    assert same(*adapted)
    assert far(part(adapted[0], "common."), part(loop.server, "common.")) > 1e-3


def test_statistics_that_travel_are_thetas(tiny: Federation) -> None:
    run = train(PFedMe(), tiny)
    names = [n for n in run.server if n.endswith("running_mean")]
    assert names
    for state in run.models.values():
        assert all(torch.equal(state[n], state[n.replace("common.", "personal.")]) for n in names)
    thetas = [{n: state[n.replace("common.", "personal.")] for n in names} for state in run.models.values()]
    assert same(average(thetas, [1 / 3] * 3), {n: run.server[n] for n in names})


def test_all_train_and_few_are_averaged_plainly(tiny: Federation) -> None:
    run = train(PFedMe(), cut(tiny, (40, 25, 10)), train={"rounds": 1}, clients={"participation": 0.67})
    cohort = run.seen.records[1].cohort
    assert len(cohort) == 2
    assert set(run.models) == set(tiny.names)
    uploads = [{n: run.models[client_id][n] for n in run.server} for client_id in cohort]
    assert same(average(uploads, [0.5, 0.5]), run.server)


def test_the_optimizer_gives_its_learning_rate_and_weight_decay_alone(tiny: Federation) -> None:
    plain, heavy, adam, decayed = (
        train(PFedMe(), tiny, train={"rounds": 1, "optimizer": optimizer}).server
        for optimizer in ({"momentum": 0.0}, {"momentum": 0.9}, {"name": "adam"}, {"weight_decay": 0.1})
    )
    assert same(plain, heavy)
    assert same(plain, adam)
    assert not same(plain, decayed)


def test_a_step_beyond_the_personal_model_is_refused(tiny: Federation) -> None:
    with pytest.raises(ConfigError, match=r"set lr below 0\.0667, or lam below 10\."):
        loop_for(PFedMe(), config_of(train={"optimizer": {"lr": 0.1}}), tiny)
    for method, lr in ((PFedMe(), 0.066), (PFedMe(lam=9.9), 0.1), (PFedMe(lam=0.0), 5.0)):
        loop_for(method, config_of(train={"optimizer": {"lr": lr}}), tiny)


def test_a_schedule_slows_both_models(tiny: Federation) -> None:
    """In the second of two rounds a cosine halves both rates: theta's steps, and the common model's share."""
    config = config_of(model=MLP, train={**ONE_STEP, "rounds": 2, "schedule": "cosine"})
    method, data = PFedMe(inner_steps=1), tiny.clients["plain"]
    loop = loop_for(method, config, tiny)
    moved = []
    for round in (0, 1):
        model = client_models(Job(method, config, loop.info, data, round), None, loop.server)[1]
        moved.append([part(model, "personal."), part(model, "common.")])
    name, first = "head.fc3.bias", part(loop.server, "common.")["head.fc3.bias"]
    (theta, own), (slow, little) = ([each[name] - first for each in pair] for pair in moved)
    torch.testing.assert_close(slow, theta / 2, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(little, own / 4, rtol=1e-3, atol=1e-7)
