"""FedAMP: what it mixes, for whom, and at the edge of its settings."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median_low
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedprism.config import structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation, Split, make_federation
from fedprism.methods.base import State, Upload, squared_distance
from fedprism.methods.fedamp import FedAMP, typical
from fedprism.methods.fedprox import FedProx
from fedprism.methods.local import Local
from fedprism.round.client import Job, open_slot
from tests.harness import MLP, Trained, client_models, config_of, cut, loop_for, same, train

pytestmark = pytest.mark.slow

HUGE = 1e300


@pytest.fixture(scope="module")
def five() -> Federation:
    return make_federation("digits-skew", clients=5, seed=0, samples=40, split={"validation": 0.02, "test": 0.1})


def mix_of(run: Trained) -> Tensor:
    """xi, `[clients, clients]`, after the last round."""
    return run.server["mix"][:-1]


def sent(run: Trained, client_id: str | None, server: State | None = None) -> State:
    """What a client would be sent after the last round."""
    loop = run.loop
    ctx = loop.context(loop.config.train.rounds)
    return loop.method.send(server or loop.server, client_id, ctx.replace(client_id=client_id))


def mean_of(states: list[State]) -> State:
    return {n: torch.stack([state[n].double() for state in states]).mean(0) for n in states[0]}


def assert_close(a: State, b: State) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        expected = b[name].to(tensor.dtype) if tensor.is_floating_point() else b[name].round().to(tensor.dtype)
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-6)


# --- the weights -----------------------------------------------------------------------------------------------------


def test_a_real_run_mixes(tiny: Federation) -> None:
    """With the default settings the others weigh something, and a client's own model weighs most."""
    run = train(FedAMP(), tiny)
    xi, clients = mix_of(run), len(tiny.names)
    others = xi[~torch.eye(clients, dtype=torch.bool)]
    assert others.mean() > 1 / (4 * clients)
    assert (others > 0).all()
    assert (xi.argmax(1) == torch.arange(clients)).all()
    torch.testing.assert_close(xi.sum(1), torch.ones(clients, dtype=torch.float64))
    logged = [run.seen.records[-1].logs[client_id]["weight/own"] for client_id in tiny.names]
    assert logged == xi.diagonal().tolist()


def test_a_real_run_of_few_participants_mixes(five: Federation) -> None:
    """Five clients, two of them per round: every model that was ever sent counts."""
    run = train(FedAMP(), five, model=MLP, clients={"participation": 0.4}, train={"rounds": 6})
    known = run.server["sent"]
    others = mix_of(run)[known][:, known][~torch.eye(int(known.sum()), dtype=torch.bool)]
    assert int(known.sum()) >= 4
    assert others.mean() > 1 / (4 * len(five.names))


def test_sigma_is_the_median_of_the_rounds_uploads(five: Federation) -> None:
    """Not of the models of those who took no part, though these are mixed too; one upload alone has no distance."""
    run = train(FedAMP(), five, model=MLP, train={"rounds": 1})
    loop, index = run.loop, run.loop.info.index
    weights = [n for n, _ in loop.models[loop.info.arch].named_parameters()]
    models = {c: {n: state[n] for n in weights} for c, state in run.models.items()}
    far = {(a, b): float(squared_distance(models[a], models[b])) for a in models for b in models if a != b}
    for there in (five.names[:3], five.names[1:3], five.names[4:]):
        uploads = [Upload(c, 40, {f"model/{n}": t for n, t in run.models[c].items()}) for c in there]
        xi = loop.method.aggregate(loop.server, uploads, loop.context(1))["mix"]
        pairs = [d for pair, d in far.items() if len(there) == 1 or set(pair) <= set(there)]
        for (a, b), d in far.items():
            expected = math.exp(-d / median_low(pairs)) / 5
            assert float(xi[index[a], index[b]]) == pytest.approx(expected, rel=1e-4)


def test_attention_by_hand() -> None:
    """Squared distances of 1, 4 and 9 between three clients."""
    far = torch.tensor([[0, 1, 9], [1, 0, 4], [9, 4, 0]], dtype=torch.float64)
    e = math.exp
    xi = FedAMP(alpha=0.5).attention(far, 2.0, 3)
    expected = [
        [1 - (e(-0.5) + e(-4.5)) / 4, e(-0.5) / 4, e(-4.5) / 4],
        [e(-0.5) / 4, 1 - (e(-0.5) + e(-2)) / 4, e(-2) / 4],
    ]
    torch.testing.assert_close(xi[:2], torch.tensor(expected, dtype=torch.float64))
    # By default sigma is the median, 4, and alpha/sigma = 1/3.
    xi = FedAMP().attention(far, typical(far), 3)
    torch.testing.assert_close(xi[2], torch.tensor([e(-9 / 4), e(-1), 3 - e(-9 / 4) - e(-1)], dtype=torch.float64) / 3)
    # Uploads that are all the same have no median distance, and one upload has no distance at all.
    torch.testing.assert_close(
        FedAMP().attention(0 * far, typical(0 * far), 3), torch.full((3, 3), 1 / 3, dtype=torch.float64)
    )
    assert FedAMP().attention(far[:1, :1], typical(far[:1, :1]), 3).tolist() == [[1.0]]


def test_distances_are_of_parameters_alone(tiny: Federation) -> None:
    """Running statistics, which can be of any size, change no weight; but they are mixed by the same weights."""
    run = train(FedAMP(), tiny, train={"rounds": 2})
    loop, name = run.loop, "body.bn1.running_mean"
    models = {client_id: dict(state) for client_id, state in run.models.items()}
    weights = [n for n, _ in loop.models[loop.info.arch].named_parameters()]
    pairs = [("plain", "tinted"), ("plain", "textured"), ("tinted", "textured")]
    far = [squared_distance(models[a], {n: models[b][n] for n in weights}) for a, b in pairs]
    sigma = sorted(map(float, far))[1]
    expected = torch.tensor([math.exp(-float(d) / sigma) / 3 for d in far], dtype=torch.float64)
    torch.testing.assert_close(mix_of(run)[[0, 0, 1], [1, 2, 2]], expected, rtol=1e-4, atol=0)
    models["tinted"][name] = models["tinted"][name] + 1e3
    uploads = [Upload(c, 40, {f"model/{n}": t for n, t in state.items()}) for c, state in models.items()]
    after = loop.method.aggregate(loop.server, uploads, loop.context(1))
    assert torch.equal(after["mix"], run.server["mix"])
    shift = sent(run, "plain", after)[name] - sent(run, "plain")[name]
    torch.testing.assert_close(shift, torch.full_like(shift, 1e3 * float(expected[0])), rtol=1e-3, atol=1e-3)


# --- at the edge -----------------------------------------------------------------------------------------------------


def test_a_wide_attention_at_a_fixed_step_does_not_mix(tiny: Federation) -> None:
    """xi_kj = alpha/sigma goes to zero: without a pull every client is alone, bit by bit."""
    apart, alone = train(FedAMP(mu=0.0, sigma=HUGE, alpha=1.0), tiny), train(Local(), tiny)
    for client_id, state in apart.models.items():
        assert same(state, alone.models[client_id])
    assert apart.correct("trained") == alone.correct("trained")
    mixing = train(FedAMP(mu=0.0), tiny)
    assert not any(same(state, alone.models[client_id]) for client_id, state in mixing.models.items())


def test_a_wide_attention_with_its_own_step_is_a_plain_mean(tiny: Federation) -> None:
    """xi_kj = 1/N for all: FedProx with uniform weights, which has one model."""
    sites = cut(tiny, (40, 25, 10))
    settings: dict[str, Any] = {"model": MLP, "train": {"rounds": 2}}
    run = train(FedAMP(mu=0.5, sigma=HUGE), sites, **settings)
    torch.testing.assert_close(mix_of(run), torch.full((3, 3), 1 / 3, dtype=torch.float64))
    one = train(FedProx(mu=0.5), sites, clients={"weighting": "uniform"}, **settings)
    for client_id in sites.names:
        assert_close(sent(run, client_id), one.server)
    by_samples = train(FedProx(mu=0.5), sites, **settings)
    assert not torch.allclose(sent(run, "plain")["head.fc3.weight"], by_samples.server["head.fc3.weight"], atol=1e-4)


def test_one_client_is_alone(tiny: Federation) -> None:
    one = replace(tiny, clients={"plain": tiny.clients["plain"]})
    assert same(train(FedAMP(mu=0.0), one).models["plain"], train(Local(), one).models["plain"])


@pytest.mark.parametrize("given", [{"alpha": 1.1, "sigma": 2.0}, {"alpha": 1.0}])
def test_a_step_that_is_too_long_is_refused(given: dict[str, float], tiny: Federation) -> None:
    method = structure(given, FedAMP, "method")
    with pytest.raises(ConfigError, match=r"method.alpha is 1\.\d.* with 3 clients alpha may be at most sigma / 2"):
        loop_for(method, config_of(), tiny)
    assert loop_for(FedAMP(alpha=1.0, sigma=2.0), config_of(), tiny)


def test_the_longest_step_is_not_refused_by_rounding(tiny: Federation) -> None:
    """0.1 x 3 is a little more than 0.3. Equal models then leave a client's own none of the weight, not less."""
    method = FedAMP(alpha=0.1, sigma=0.3)
    four = replace(tiny, clients={**tiny.clients, "more": replace(tiny.clients["plain"], name="more")})
    assert loop_for(method, config_of(), four)
    own = method.attention(torch.zeros(4, 4, dtype=torch.float64), 0.3, 4).diagonal()
    assert own.tolist() == pytest.approx([0.0] * 4, abs=1e-9)
    assert (own >= 0).all()
    for alpha, sigma in ((0.1, 0.3), (0.7, 2.1), (1.1, 3.3), (1.3, 3.9)):
        assert (FedAMP(alpha=alpha).attention(torch.zeros(4, 4, dtype=torch.float64), sigma, 4) >= 0).all()
    with pytest.raises(ConfigError, match="alpha may be at most sigma / 3"):
        loop_for(FedAMP(alpha=0.1 + 1e-8, sigma=0.3), config_of(), four)


def test_a_step_of_the_server_is_refused(tiny: Federation) -> None:
    with pytest.raises(ConfigError, match=r"server.lr is 0.5, but fedamp averages no weights"):
        loop_for(FedAMP(), config_of(server={"lr": 0.5}), tiny)


# --- who is in the mixture -------------------------------------------------------------------------------------------


def test_who_is_absent_keeps_its_last_upload_in_the_mixture(tiny: Federation) -> None:
    run = train(FedAMP(), tiny, model=MLP, clients={"participation": 0.67}, train={"rounds": 4})
    index, name = run.loop.info.index, "head.fc3.weight"
    before, after, record = run.seen.snapshots[3], run.seen.snapshots[4], run.seen.records[4]
    assert after.server["sent"].all()
    (absent,) = set(tiny.names) - set(record.cohort)
    kept = after.server[f"{name}/all"]
    assert torch.equal(kept[index[absent]], before.server[f"{name}/all"][index[absent]])
    assert torch.equal(kept[index[absent]], run.models[absent][name])
    for client_id in record.cohort:
        assert not torch.equal(kept[index[client_id]], before.server[f"{name}/all"][index[client_id]])
        changed = {**after.server, f"{name}/all": kept.clone()}
        changed[f"{name}/all"][index[absent]] += 1
        shift = sent(run, client_id, changed)[name] - sent(run, client_id)[name]
        weight = mix_of(run)[index[client_id], index[absent]]
        torch.testing.assert_close(shift, weight.float().expand_as(shift), rtol=1e-3, atol=1e-5)
        assert weight > 0.01


def test_a_stranger_gets_the_plain_mean_of_what_is_kept(tiny: Federation) -> None:
    """So does a client that has never sent anything; before anyone has, all get the first weights."""
    run = train(FedAMP(), tiny, clients={"participation": 0.67}, train={"rounds": 1})
    (absent,) = set(tiny.names) - set(run.models)
    plain = mean_of(list(run.models.values()))
    assert_close(sent(run, None), plain)
    assert same(sent(run, absent), sent(run, None))
    here = next(iter(run.models))
    assert not torch.allclose(sent(run, here)["head.fc2.weight"], sent(run, None)["head.fc2.weight"], atol=1e-4)
    first = run.loop.models[run.loop.info.arch].state_dict()
    for client_id in (*tiny.names, None):
        assert same(sent(run, client_id, run.seen.snapshots[0].server), first)


# --- the client ------------------------------------------------------------------------------------------------------


def test_the_pull_towards_the_cloud_model_has_a_gradient(tiny: Federation) -> None:
    """mu (w - u), on every parameter; in some libraries it is computed on detached weights."""
    method, config = FedAMP(mu=0.7), config_of(model=MLP)
    client = open_slot(Job(method, config, loop_for(method, config, tiny).info, tiny.clients["plain"], 0))
    x, y = torch.rand(8, *tiny.shape, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    own = client.parameters()
    client.keep("anchor", {n: p - 0.25 for n, p in own.items()})
    pulled = torch.autograd.grad(method.loss(client, x, y), list(own.values()))
    free = torch.autograd.grad(cross_entropy(client.model(x), y), list(own.values()))
    for a, b in zip(pulled, free, strict=True):
        torch.testing.assert_close(a - b, torch.full_like(a, 0.7 * 0.25))


def test_training_starts_from_the_cloud_model_and_stays_near(tiny: Federation) -> None:
    """A strong pull holds the trained model by the one that was sent, not by the client's own last one."""
    run = train(FedAMP(), tiny, model=MLP, train={"rounds": 1, "epochs": 5})
    last, cloud = run.models["plain"], {n: t + 0.01 for n, t in sent(run, "plain").items()}
    far = []
    for mu in (0.0, 5.0):
        job = Job(FedAMP(mu=mu), run.loop.config, run.loop.info, tiny.clients["plain"], 1)
        model = client_models(job, run.states["plain"], cloud)[1]
        far.append(float(squared_distance(model, cloud)))
        assert far[-1] < 0.5 * squared_distance(model, last)
    assert 0 < far[1] < 0.5 * far[0]


def test_near_clients_mix_more_than_far_ones(tiny: Federation) -> None:
    """Two clients with the same images and one with other labels: the two find each other."""
    data = tiny.clients
    twin = replace(data["plain"], name="tinted")
    other = replace(data["textured"], train=Split(data["textured"].train.x, 9 - data["textured"].train.y))
    sites = replace(tiny, clients={"plain": data["plain"], "tinted": twin, "textured": other})
    xi = mix_of(train(FedAMP(), sites, model=MLP, train={"rounds": 4}))
    assert xi[0, 1] > 1.3 * xi[0, 2]
    assert xi[1, 0] > 1.3 * xi[1, 2]
