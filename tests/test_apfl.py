"""APFL: Local and FedAvg at the ends of alpha, the mixture's gradients by hand, batch norm, and who learns alpha."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedprism.federation import Federation
from fedprism.methods.apfl import APFL
from fedprism.methods.base import Client, Context, Pass, State, load, no_draw
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.local import Local
from fedprism.round.client import Job, client_model, make_info, open_slot
from fedprism.round.training import model_inputs
from tests.harness import MLP, TURNED, Trained, config_of, models_of, part, same, train

pytestmark = pytest.mark.slow


def alphas(run: Trained) -> list[float]:
    return [float(state["own.alpha"]) for state in run.models.values()]


# --- at the ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections", [{}, {"clients": {"participation": 0.67}}, {"data": TURNED, "model": MLP}], ids=["all", "some", "mlp"]
)
def test_with_its_own_model_alone_it_is_local(sections: dict[str, Any], tiny: Federation) -> None:
    both, alone = train(APFL(alpha=1.0, adaptive=False), tiny, **sections), train(Local(), tiny, **sections)
    assert both.models.keys() == alone.models.keys()
    for client_id, state in both.models.items():
        assert same(part(state, "personal."), alone.models[client_id])
    assert both.correct() == alone.correct()


@pytest.mark.parametrize("sections", [{}, {"clients": {"participation": 0.67}}], ids=["all", "some"])
def test_with_the_common_model_alone_it_is_fedavg(sections: dict[str, Any], tiny: Federation) -> None:
    both, average = train(APFL(alpha=0.0, adaptive=False), tiny, **sections), train(FedAvg(), tiny, **sections)
    assert same(part(both.server, "common."), average.server)
    assert both.correct() == average.correct()


def test_in_between_it_is_neither_and_shares_fedavgs_model(tiny: Federation) -> None:
    both, average, alone = (train(each, tiny) for each in (APFL(), FedAvg(), Local()))
    assert same(part(both.server, "common."), average.server)  # the mixture sends no gradient into it
    assert both.correct() != average.correct()
    for client_id, state in both.models.items():
        assert not same(part(state, "personal."), alone.models[client_id])


# --- one step by hand ------------------------------------------------------------------------------------------------


def slot(method: APFL, tiny: Federation, apart: float = 0.05, **sections: Any) -> tuple[Client, Tensor, Tensor]:
    """A client whose two models are apart, and a batch."""
    config = config_of(**sections)
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    client = open_slot(Job(method, config, info, tiny.clients["plain"], 0))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in client.model.personal.parameters():
            tensor.add_(apart * torch.randn(tensor.shape, generator=draw))
    client.keep("lr", torch.tensor(0.05))
    client.model.train()
    data = tiny.clients["plain"].train
    return client, model_inputs(data.x[:16], config), data.y[:16]


def bar(client: Client, a: float) -> State:
    v, w = dict(client.model.personal.named_parameters()), dict(client.model.common.named_parameters())
    return {n: (a * v[n] + (1 - a) * w[n]).detach().requires_grad_() for n in v}


def at(client: Client, weights: State, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(torch.func.functional_call(client.model.personal, weights, (x,)), y)


@pytest.mark.parametrize("adaptive", [False, True])
def test_gradients_by_hand(adaptive: bool, tiny: Federation) -> None:
    """v's is alpha times that at the mixture; the common model has its own, as if there were no mixture."""
    client, x, y = slot(APFL(alpha=0.3), tiny)
    v, w = list(client.model.personal.parameters()), list(client.model.common.parameters())
    mixture = bar(client, 0.3)
    slopes = torch.autograd.grad(at(client, mixture, x, y), list(mixture.values()))
    own = torch.autograd.grad(cross_entropy(client.model.common(x), y), w)
    loss = APFL(alpha=0.3, adaptive=adaptive).loss(client, x, y)
    expected = float(at(client, mixture, x, y).detach() + cross_entropy(client.model.common(x), y).detach())
    found = torch.autograd.grad(loss, [*v, *w])
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    for g, e in zip(found, [*(0.3 * s for s in slopes), *own], strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-6)
    assert max(float(g.abs().max()) for g in found[: len(v)]) > 1e-3


@pytest.mark.parametrize("start", [0.0, 0.5])
def test_alpha_goes_down_the_slope_of_the_loss(start: float, tiny: Federation) -> None:
    """Compared with the difference quotient; at alpha 0 as well, where v gets no gradient."""
    method = APFL(alpha=start)
    client, x, y = slot(method, tiny, model=MLP)
    client.model.double()
    x, e = x.double(), 1e-5
    ahead, behind = (at(client, bar(client, start + step), x, y) for step in (e, -e))
    slope = float((ahead - behind).detach()) / (2 * e)
    rate = -0.1 / slope  # so that alpha goes up by 0.1
    client.keep("lr", torch.tensor(rate, dtype=torch.float64))
    method.loss(client, x, y)
    assert float(client.model.own["alpha"]) == pytest.approx(start + 0.1, abs=1e-5)


def test_alpha_stays_within_its_bounds(tiny: Federation) -> None:
    ends = []
    for rate in (1e6, -1e6):
        client, x, y = slot(APFL(), tiny)
        client.keep("lr", torch.tensor(rate))
        APFL().loss(client, x, y)
        ends.append(float(client.model.own["alpha"]))
    assert sorted(ends) == [0.0, 1.0]


class Steps(APFL):
    """A round is cut after `most` steps."""

    most = 1

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [replace(spec, steps=self.most) for spec in super().passes(client, ctx)]


def test_alpha_is_learned_once_per_round(tiny: Federation) -> None:
    """By the first batch, where the common model is as received; in the first round both models are the same."""
    many = train(APFL(), tiny, train={"rounds": 2})
    first, second = (
        [float((snapshot.clients[c] or {})["own.alpha"]) for c in tiny.names] for snapshot in many.seen.snapshots[1:]
    )
    assert first == [0.5] * 3
    assert all(a != 0.5 for a in second)
    # A second round of one step alone learns the same share.
    start = many.seen.snapshots[1]
    again = train(APFL(), tiny, train={"rounds": 1})
    cut = again.loop
    cut.method = Steps()
    cut.engine.method = cut.method  # type: ignore[attr-defined]
    cut.states.restore(start.clients)
    cut.server = dict(start.server)
    cut.one_round(1)
    assert [float((cut.states[c] or {})["own.alpha"]) for c in tiny.names] == second
    assert not same(models_of(cut)["plain"], many.models["plain"])


def test_alpha_is_each_clients_own_and_stays_at_home(tiny: Federation) -> None:
    run = train(APFL(), tiny)
    assert len(set(alphas(run))) == 3
    assert not any("alpha" in name or "personal" in name for name in run.server)
    logged = [logs["alpha"] for logs in run.seen.records[-1].logs.values()]
    assert logged == pytest.approx(alphas(run))
    assert alphas(train(APFL(alpha=0.7, adaptive=False), tiny)) == pytest.approx([0.7] * 3)


# --- batch norm, and who comes later ---------------------------------------------------------------------------------


def test_statistics_are_mixed_as_weights_are(tiny: Federation) -> None:
    """What is tested is one network whose every number is mixed."""
    run = train(APFL(alpha=0.3, adaptive=False), tiny)
    state, arch = run.models["plain"], run.loop.info.arch
    model = APFL().build(arch, "plain", run.loop.info, 0)
    load(model, state)
    v, w = part(state, "personal."), part(state, "common.")
    net = arch.model(0)
    load(net, {n: 0.3 * t + 0.7 * w[n] if t.is_floating_point() else t for n, t in v.items()})
    x = model_inputs(tiny.clients["plain"].test.x, run.loop.config)
    with torch.no_grad():
        torch.testing.assert_close(APFL().predict(model.eval(), x, no_draw), net.eval()(x))
        load(net, {n: t for n, t in v.items() if "running" in n})  # with v's statistics alone it would be another one
        assert not torch.allclose(APFL().predict(model, x, no_draw), net(x), atol=1e-2)


def test_training_moves_each_models_own_statistics(tiny: Federation) -> None:
    """The personal model's are of the mixture's pass, the common model's of its own."""
    client, x, y = slot(APFL(alpha=0.3), tiny, apart=0.5)
    mixture = {n: t.detach() for n, t in bar(client, 0.3).items()}
    nets = [open_slot(job_of(tiny)).model.common.train() for _ in range(2)]
    load(nets[0], mixture)
    for net in nets:
        net(x)
    APFL(alpha=0.3).loss(client, x, y)
    names = [n for n, _ in nets[0].named_buffers() if "running" in n]
    for net, own in zip(nets, (client.model.personal, client.model.common), strict=True):
        for n in names:
            torch.testing.assert_close(own.state_dict()[n], net.state_dict()[n])
    assert not torch.allclose(nets[0].state_dict()[names[0]], nets[1].state_dict()[names[0]])


def job_of(tiny: Federation) -> Job:
    config = config_of()
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    return Job(APFL(), config, info, tiny.clients["plain"], 0)


@pytest.mark.parametrize("later", [(), ("plain",)], ids=["member", "later"])
@pytest.mark.parametrize("alone", [False, True])
def test_who_is_new_begins_with_the_common_model(later: tuple[str, ...], alone: bool, tiny: Federation) -> None:
    """But for a member whom the common model does not concern, who begins as Local does."""
    method = APFL(alpha=1.0, adaptive=False) if alone else APFL()
    run = train(method, tiny)
    job = replace(job_of(tiny), method=method, info=replace(run.loop.info, later=later), round=3)
    state = client_model(job, None, run.server)
    assert same(part(state, "personal."), part(run.server, "common.")) == (not alone or bool(later))


@pytest.mark.parametrize("broadcast", ["participants", "all"])
def test_a_member_that_was_never_sampled_is_tested_with_the_common_model(broadcast: str, tiny: Federation) -> None:
    """Not with a mixture of it and of weights that nobody has trained, which has hardly learned anything."""
    clients = {"participation": 0.34, "broadcast": broadcast}  # one client per round
    run, average = (train(each, tiny, clients=clients, train={"rounds": 3}) for each in (APFL(), FedAvg()))
    assert "plain" not in {client_id for record in run.seen.records for client_id in record.cohort}
    mixed, common = (each.seen.records[-1].scores["received"]["test"] for each in (run, average))
    assert mixed["plain"] == common["plain"]
    assert mixed["textured"] != common["textured"]


def test_alpha_follows_the_schedule(tiny: Federation) -> None:
    """Its rate is the round's: with one that has come to next to nothing it stands still."""
    schedule = {"name": "step", "every": 1, "gamma": 1e-9}
    assert all(a == pytest.approx(0.5, abs=1e-7) for a in alphas(train(APFL(), tiny, train={"schedule": schedule})))
    assert all(abs(a - 0.5) > 1e-5 for a in alphas(train(APFL(), tiny)))
