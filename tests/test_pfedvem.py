"""pFedVEM: the Gaussian head, its prior and confidence by hand, what travels, and what it is without its spread."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fedprism.config import Config, structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Client, State, Upload, no_draw
from fedprism.methods.fedrep import FedRep
from fedprism.methods.pfedvem import PFedVEM, flat, normal
from fedprism.round.client import Job, client_model, make_context, make_info, open_slot
from fedprism.round.loop import Loop
from fedprism.round.noise import keyed_draw
from fedprism.round.training import model_inputs
from tests.harness import BESIDE, Collect, loop_for, models_of, same

pytestmark = pytest.mark.slow

TWO = {"name": "lenet-bn", "head_layers": 2}  # batch norm in the head, too


class Point(PFedVEM):
    """A head without spread."""

    def deviation(self, model: Any) -> Tensor:
        return torch.zeros_like(model.spread)


def config_of(**sections: Any) -> Config:
    train = {"rounds": 2, "batch_size": 16, **sections.pop("train", {})}
    return structure({"train": train, "evaluate": {"splits": ["test"]}, **sections}, Config)


def trained(method: Any, federation: Federation, **sections: Any) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return loop, seen


def job_of(method: PFedVEM, federation: Federation, **sections: Any) -> Job:
    config = config_of(**sections)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    return Job(method, config, info, federation.clients["plain"], 0)


def slot_of(method: PFedVEM, federation: Federation, sigma: float, far: float) -> tuple[Client, Tensor, Tensor]:
    """A client whose weights have this deviation, every second of them `far` above the common mean; its images."""
    job = job_of(method, federation)
    client = open_slot(job)
    client.draw = keyed_draw(BESIDE, "test")
    with torch.no_grad():
        client.model.spread.fill_(method.sigma * math.log(math.expm1(sigma / method.sigma)))
        client.model.common.copy_(flat(client.model.head))
        client.model.common[::2] -= far
        ctx = make_context(method, job.config, job.info, client.model, 0, "plain", data=job.data)
        method.start(client, ctx)
    return client, model_inputs(job.data.train.x, job.config), job.data.train.y


def part(state: State | None, prefix: str) -> State:
    return {name: tensor for name, tensor in (state or {}).items() if name.startswith(prefix)}


def head_of(state: State | None) -> Tensor:
    """The means of a head without norm layers, as one vector."""
    return torch.cat([tensor.flatten() for tensor in part(state, "head.").values()])


# --- at its edge -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.67])
def test_without_spread_and_prior_it_is_fedrep_of_full_batches(participation: float, tiny: Federation) -> None:
    """Bit by bit, heads too. In FedRep, too, all train then: it is pFedVEM's own rule that they do."""
    sections: dict[str, Any] = {"train": {"batch_size": 64}}
    sections["clients"] = {"participation": participation, "train": "all"}
    ours, seen = trained(Point(samples=1, kl=0.0), tiny, **sections)
    theirs, expected = trained(FedRep(head_epochs=10), tiny, **sections)
    for client_id, state in models_of(theirs).items():
        assert same(part(models_of(ours)[client_id], "body."), part(state, "body."))
        assert same(part(models_of(ours)[client_id], "head."), part(state, "head."))
    for ours_of, theirs_of in zip(seen.records, expected.records, strict=True):
        assert ours_of.scores["received"] == theirs_of.scores["received"]
    spread, _ = trained(PFedVEM(samples=1, kl=0.0), tiny, **sections)
    assert not same(part(models_of(spread)["plain"], "head."), part(models_of(theirs)["plain"], "head."))


def test_the_prior_holds_a_sure_head_at_the_common_one(tiny: Federation) -> None:
    """The pull is (mu - m) / rho^2, over the images: with a small deviation it keeps heads together."""

    def apart(method: PFedVEM) -> float:
        loop, _ = trained(method, tiny, train={"rounds": 1})
        return float(torch.stack([head_of(state) for state in models_of(loop).values()]).var(0).sum().sqrt())

    assert 0 < apart(PFedVEM(sigma=0.04)) < 0.5 * apart(PFedVEM(sigma=0.04, kl=0.0))


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_confidence_by_hand(tiny: Federation) -> None:
    """Deviation 2 everywhere, half of the 650 weights 3 from the common mean: rho^2 = 4 + 9 / 2."""
    client, _, _ = slot_of(PFedVEM(), tiny, sigma=2.0, far=3.0)
    assert len(client.model.common) == 650
    assert float(client.model.rho2) == pytest.approx(8.5, rel=1e-5)
    assert float(client.log_sums["rho"]) == pytest.approx(math.sqrt(8.5), rel=1e-5)


def test_confident_clients_count_more(tiny: Federation) -> None:
    """m = (1 / 0.5 + 4 / 2) / (1 / 0.5 + 1 / 2) = 1.6, whatever the images; the body is the mean by images."""
    loop = loop_for(PFedVEM(), config_of(), tiny)
    server = {"body.w": torch.zeros(1), "common": torch.zeros(2)}

    def upload(name: str, images: int, head: float, rho2: float, body: float) -> Upload:
        state = {"common": torch.full((2,), head), "rho2": torch.tensor(rho2), "body.w": torch.tensor([body])}
        return Upload(name, images, state)

    both = [upload("plain", 10, 1.0, 0.5, 8.0), upload("tinted", 30, 4.0, 2.0, 0.0)]
    after = loop.method.aggregate(server, both, loop.context(0))
    assert after.keys() == server.keys()
    torch.testing.assert_close(after["common"], torch.full((2,), 1.6))
    torch.testing.assert_close(after["body.w"], torch.tensor([2.0]))
    alone = loop.method.aggregate(server, both[1:], loop.context(0))
    torch.testing.assert_close(alone["common"], torch.full((2,), 4.0))


def test_a_variance_that_is_none_makes_nobody_sure(tiny: Federation) -> None:
    """Whoever sends one does not count in the common head; if all do, it stays."""
    loop, _ = trained(PFedVEM(), tiny, train={"rounds": 1})
    body = {name: loop.server[name] for name in loop.server if name != "common"}

    def after(*rho2: float) -> Tensor:
        heads = [torch.full_like(loop.server["common"], float(k)) for k in range(len(rho2))]
        states = [{**body, "common": m, "rho2": torch.tensor(r)} for m, r in zip(heads, rho2, strict=True)]
        uploads = [Upload(c, 40, state) for c, state in zip(tiny.names, states, strict=False)]
        return loop.method.aggregate(loop.server, uploads, loop.context(1))["common"]

    assert after(-1.0, 0.25, 0.0).eq(1).all()
    assert after(1.0, 0.25, 0.0).sub(0.8).abs().max() < 1e-6
    assert torch.equal(after(0.0, -2.0), loop.server["common"])


def test_divergence_by_hand_and_its_pull(tiny: Federation) -> None:
    """What the prior adds to the loss is KL / images; its gradient draws mu to m, and sigma to rho."""
    client, x, y = slot_of(PFedVEM(sigma=0.4), tiny, sigma=0.5, far=0.3)
    free = PFedVEM(sigma=0.4, kl=0.0).e_step(client, x, y)
    bound = PFedVEM(sigma=0.4, kl=2.0).e_step(client, x, y)
    q = Normal(flat(client.model.head), torch.full((650,), 0.5))
    kl = kl_divergence(q, Normal(client.model.common, client.model.rho2.sqrt())).sum()
    assert kl > 1
    torch.testing.assert_close((bound - free) * len(y) / 2, kl, rtol=1e-3, atol=1e-3)
    (bound - free).backward()
    head, rho2 = client.model.head[-1], float(client.model.rho2)
    to_mu = torch.cat([head.weight.grad.flatten(), head.bias.grad])
    to_mu, to_s = to_mu * len(y) / 2, client.model.spread.grad * len(y) / 2
    expected = torch.zeros(650)
    expected[::2] = 0.3 / rho2
    torch.testing.assert_close(to_mu, expected, rtol=1e-3, atol=1e-4)
    slope = 1 - math.exp(-0.5 / 0.4)  # of sigma softplus(s / sigma), where it is 0.5
    torch.testing.assert_close(to_s, torch.full((650,), (0.5 / rho2 - 2) * slope), rtol=1e-3, atol=1e-4)
    assert float(to_s[0]) < 0  # rho is above 0.5, so sigma grows


def test_a_client_that_agrees_with_its_prior_pays_nothing(tiny: Federation) -> None:
    client, x, y = slot_of(PFedVEM(), tiny, sigma=0.5, far=0.0)
    client.clear_logs()
    PFedVEM().e_step(client, x, y)
    assert float(client.log_sums["kl"]) == pytest.approx(0, abs=1e-3)


def test_the_head_learns_mean_and_deviation_from_the_images(tiny: Federation) -> None:
    client, x, y = slot_of(PFedVEM(), tiny, sigma=0.5, far=0.0)
    PFedVEM(kl=0.0).e_step(client, x, y).backward()
    assert float(client.model.head[-1].weight.grad.abs().max()) > 1e-3
    assert float(client.model.spread.grad.abs().max()) > 1e-3


def test_normal_noise(tiny: Federation) -> None:
    ends = torch.tensor([0.0, 0.5, 0.975, 1 - 2**-24])
    low, middle, some, high = normal(ends).tolist()
    assert -6 < low < -5 < 5 < high < 6
    assert middle == 0
    assert some == pytest.approx(1.959964, abs=1e-4)
    many = normal(torch.rand(100_000, generator=torch.Generator().manual_seed(0)))
    assert float(many.mean()) == pytest.approx(0, abs=0.01)
    assert float(many.std()) == pytest.approx(1, abs=0.01)


# --- a run -----------------------------------------------------------------------------------------------------------


def test_confidence_is_of_the_head_before_it_is_fitted(unequal: Federation) -> None:
    """In the first round all heads are the common one, so all are as sure; in the second they are not."""
    loop, seen = trained(PFedVEM(sigma=0.3), unequal)
    first, second = ([logs["rho"] for logs in record.logs.values()] for record in seen.records[1:])
    assert first == pytest.approx([0.3] * 3, rel=1e-5)
    assert len({round(rho, 6) for rho in second}) == 3
    heads = torch.stack([head_of(state) for state in models_of(loop, 1).values()])
    torch.testing.assert_close(seen.snapshots[1].server["common"], heads.mean(0))


@pytest.mark.slow
def test_confidence_differs_with_the_defaults(unequal: Federation) -> None:
    """By how much the most confident client counts more than the least, which is the one with the fewest images."""
    method = PFedVEM()
    loop, seen = trained(method, unequal, train={"rounds": 15}, evaluate={"every": 15, "splits": ["test"]})
    rho = {client_id: logs["rho"] for client_id, logs in seen.records[-1].logs.items()}
    assert max(rho, key=lambda client_id: rho[client_id]) == "textured"
    assert (max(rho.values()) / min(rho.values())) ** 2 - 1 > 0.03
    model = open_slot(job_of(method, unequal)).model
    model.load_state_dict(models_of(loop)["plain"], strict=False)
    assert float(method.deviation(model).detach().min()) < 0.95 * method.sigma


@pytest.mark.parametrize("sigma", [0.01, 0.1, 1.0])
def test_deviations_begin_at_sigma_and_train_as_fast_whatever_it_is(sigma: float, tiny: Federation) -> None:
    method = PFedVEM(sigma=sigma)
    model = open_slot(job_of(method, tiny)).model
    method.deviation(model).sum().backward()
    torch.testing.assert_close(method.deviation(model), torch.full((650,), sigma))
    torch.testing.assert_close(model.spread.grad, torch.full((650,), 1 - math.exp(-1)))


@pytest.mark.parametrize("far", [14, 16, 2000])
def test_a_deviation_next_to_none_comes_back(far: float, tiny: Federation) -> None:
    """One large step can make it too small for a float. The KL goes on as its logarithm does, and draws it up."""
    method = PFedVEM(samples=1)
    client, x, y = slot_of(method, tiny, sigma=0.1, far=0.0)
    with torch.no_grad():
        client.model.spread[0] = -far * method.sigma
    method.e_step(client, x, y).backward()
    expected = -far if far > 100 else math.log(math.log1p(math.exp(-far)))
    assert float(method.log_deviation(client.model).detach()[0]) == pytest.approx(math.log(0.1) + expected, rel=1e-5)
    assert float(client.model.spread.grad[0]) == pytest.approx(-1 / (method.sigma * len(y)), rel=0.01)
    assert client.model.spread.grad.isfinite().all()


def test_all_train_and_participants_are_averaged(tiny: Federation) -> None:
    loop, seen = trained(PFedVEM(), tiny, clients={"participation": 0.34})
    for record, before, after in zip(seen.records[1:], seen.snapshots, seen.snapshots[1:], strict=False):
        assert set(record.logs) == set(record.down) == set(tiny.names)
        (client_id,) = record.cohort
        torch.testing.assert_close(after.server["common"], head_of(after.clients[client_id]))
        for each in tiny.names:
            assert not same(part(before.clients[each], "head."), part(after.clients[each], "head."))
    assert set(loop.server) == {*part(models_of(loop)["plain"], "body."), "common"}


def test_the_body_is_trained_after_the_head_and_does_not_move_it(tiny: Federation) -> None:
    some, _ = trained(PFedVEM(), tiny, train={"rounds": 1})
    more, _ = trained(PFedVEM(), tiny, train={"rounds": 1, "epochs": 3})
    for client_id, state in models_of(some).items():
        for kept in ("head.", "spread", "rho2"):
            assert same(part(state, kept), part(models_of(more)[client_id], kept))
        assert not same(part(state, "body."), part(models_of(more)[client_id], "body."))
        assert int(state["body.bn1.num_batches_tracked"]) == 3  # 40 images by 16: not in the steps on the head


def test_norm_layers_in_the_head_are_shared_and_not_drawn(tiny: Federation) -> None:
    loop, _ = trained(PFedVEM(samples=2), tiny, model=TWO)
    model = open_slot(job_of(PFedVEM(), tiny, model=TWO)).model
    linear = sum(p.numel() for name, p in model.head.named_parameters() if ".bn" not in f".{name}")
    assert len(model.spread) == len(model.common) == linear
    norms = {name for name in model.state_dict() if name.startswith("head.bn")}
    assert norms
    assert set(loop.server) == {*part(model.state_dict(), "body."), *norms, "common"}
    assert int(loop.server["head.bn3.num_batches_tracked"]) == 2 * 3 * 2  # rounds, batches, drawn heads


def test_who_has_not_trained_has_the_common_head(tiny: Federation) -> None:
    """A newcomer, and a client that receives in every round but is never sampled; who has trained keeps its own."""
    clients = {"participation": 0.34, "train": "participants"}
    loop, seen = trained(PFedVEM(sigma=0.3), tiny, clients=clients, train={"rounds": 3})
    method, ctx = loop.method, loop.context(3)
    there = {client_id for record in seen.records for client_id in record.cohort}
    assert len(there) == 2
    for client_id in set(tiny.names) - set(seen.records[-1].cohort):  # of one client alone, the mean is its head
        job = Job(method, loop.config, loop.info, tiny.clients[client_id], 3)
        download = method.send(loop.server, None, ctx)
        for state in (None, loop.states[client_id]):
            after = client_model(job, state, download)
            own = state is not None and client_id in there
            assert torch.equal(head_of(after), loop.server["common"]) is not own
            assert (float(after["rho2"]) > 0) is own
            if not own:
                assert after["spread"].unique().tolist() == [pytest.approx(0.3 * math.log(math.expm1(1)))]


def test_tested_with_the_mean_and_globally_with_the_common_one(tiny: Federation) -> None:
    client, x, _ = slot_of(PFedVEM(), tiny, sigma=2.0, far=0.5)
    client.model.eval()
    with torch.no_grad():
        z, last = client.model.body(x), client.model.head[-1]
        assert torch.equal(PFedVEM().predict(client.model, x, no_draw), last(z))
        weight, bias = client.model.common[:640].view(10, 64), client.model.common[640:]
        torch.testing.assert_close(PFedVEM().predict_global(client.model, x, no_draw), z @ weight.T + bias)
        assert not torch.allclose(last(z), z @ weight.T + bias, atol=0.1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"samples": 0}, "samples.*1 or more"),
        ({"sigma": 0.0}, "sigma.*above 0"),
        ({"sigma": 100.0}, "sigma.*below 100"),
        ({"head_steps": 0}, "head_steps.*1 or more"),
        ({"head_lr": 0.0}, "head_lr.*above 0"),
        ({"kl": -1.0}, "kl.*0 or more"),
    ],
)
def test_bad_settings_are_refused(settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        structure(settings, PFedVEM, "method")
