"""FedCP: the policy and its inputs, the alignment, what is frozen, what travels, the ablations, and what is recorded.

That training as a whole is the paper's is in `test_reference_agreement.py`; here each piece is worked out by hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import Config, structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation, Split
from fedprism.methods.base import Client, State, load, no_draw
from fedprism.methods.fedcp import FedCP, mmd
from fedprism.methods.fedper import FedPer
from fedprism.models import Arch
from fedprism.round.client import Job, client_model, client_receive, client_round, make_info, open_slot
from fedprism.round.engine import Result
from fedprism.round.loop import Loop
from fedprism.round.training import model_inputs
from tests.harness import Collect, client_models, loop_for, models_of, same

pytestmark = pytest.mark.full

TABLE_1 = [
    (),
    ("cs",),
    ("ss",),
    ("cs", "ss"),
    ("gfm",),
    ("cpn",),
    ("cpn", "gfm"),
    ("cpn", "gh"),
    ("cpn", "gfm", "gh"),
]
TWO = {"name": "lenet-bn", "head_layers": 2}  # batch norm in the head, too


def config_of(**sections: Any) -> Config:
    train = {"rounds": 2, "batch_size": 16, **sections.pop("train", {})}
    return structure({"train": train, "evaluate": {"splits": ["test"]}, **sections}, Config)


def train(method: Any, federation: Federation, **sections: Any) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return loop, seen


def part(state: State, prefix: str) -> State:
    """What is under a part, without its name."""
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def job_of(method: Any, federation: Federation, **sections: Any) -> Job:
    config = config_of(**sections)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    return Job(method, config, info, federation.clients[federation.names[0]], 0)


def batch(job: Job, rows: slice = slice(0, 12)) -> tuple[Tensor, Tensor]:
    return model_inputs(job.data.train.x[rows], job.config), job.data.train.y[rows]


def stirred(job: Job) -> State:
    """A first state with every float leaf moved a little, so that no two parts are the same any more."""
    model, noise = open_slot(job).model, torch.Generator().manual_seed(1)
    state = model.state_dict()
    return {
        name: value + 0.1 * torch.rand(value.shape, generator=noise) if value.is_floating_point() else value
        for name, value in state.items()
    }


def slot_of(job: Job) -> Client:
    client = open_slot(job)
    load(client.model, stirred(job))
    return client


def split_by_hand(a: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 4, written out: r and s of the policy's two logits a feature `[batch, 2K]`."""
    first, second = a[:, : a.shape[1] // 2].exp(), a[:, a.shape[1] // 2 :].exp()
    return first / (first + second), second / (first + second)


# --- the policy network ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "count"), [(1, 527_360), (2, 790_016), (3, 1_052_672), (4, 1_315_328)])
@pytest.mark.parametrize("norm", ["layer", "batch", "group"])
def test_parameters_of_the_policy(layers: int, count: int, norm: Any) -> None:
    arch = Arch("cnn4", 10, (3, 32, 32))
    assert arch.width == 512
    policy = FedCP(cpn_layers=layers, cpn_norm=norm).policy(arch.width)
    assert sum(p.numel() for p in policy.parameters()) == count


def test_the_policy_is_in_the_model_with_the_papers_cnn(tiny: Federation) -> None:
    arch = Arch("cnn4", 200, (3, 64, 64))
    job = job_of(FedCP(), tiny)
    model = FedCP().build(arch, "plain", job.info, 0)
    count = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    assert count == {"net": 5_694_600, "common": 512 * 200 + 200, "policy": 527_360, "client": 0}


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("norm", ["layer", "batch", "group"])
def test_norm_and_activation_of_the_policy(norm: Any, activation: Any) -> None:
    """Linear, norm, activation, in this order; group norm has one group for each logit of the pair."""
    torch.manual_seed(0)
    width, c = 6, torch.randn(5, 6)
    policy = FedCP(cpn_norm=norm, cpn_activation=activation).policy(width)
    linear = policy[0]
    a = c @ linear.weight.T + linear.bias
    groups = {"layer": a[:, None], "group": a.reshape(5, 2, 6), "batch": a.T[:, None]}[norm]
    centred = (groups - groups.mean(-1, keepdim=True)) / (groups.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    normed = centred[:, 0].T if norm == "batch" else centred.reshape(5, 12)
    expected = {"relu": normed.clamp(min=0), "tanh": normed.tanh(), "sigmoid": 1 / (1 + (-normed).exp())}[activation]
    torch.testing.assert_close(policy(c), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [2, 4])
def test_layers_in_front_of_the_policy(layers: int) -> None:
    """They keep the width and are followed by a ReLU each, with no norm between."""
    torch.manual_seed(0)
    policy = FedCP(cpn_layers=layers, cpn_activation="tanh").policy(6)
    linear = [child for child in policy if isinstance(child, nn.Linear)]
    assert [(child.in_features, child.out_features) for child in linear] == [(6, 6)] * (layers - 1) + [(6, 12)]
    c = x = torch.randn(5, 6)
    for child in linear[:-1]:
        c = child(c).clamp(min=0)
    torch.testing.assert_close(policy(x), nn.LayerNorm(12)(linear[-1](c)).tanh())


@pytest.mark.parametrize("without", TABLE_1)
def test_scores_by_hand(without: Sequence[Any], tiny: Federation) -> None:
    """Section 3.2 and Fig. 4: what the policy is given, how it splits, and which heads see what."""
    job = job_of(FedCP(without=tuple(without)), tiny)
    model = slot_of(job).model.eval()
    x, _ = batch(job)
    z = model.net.body(x).detach()
    if "gh" in without:
        expected = model.net.head(z)
    elif "cpn" in without:
        expected = model.common(z) + model.net.head(z)
    else:
        v = model.client["v"]
        c = {(): v * z, ("cs",): z}.get(tuple(w for w in without if w != "gfm"), v.expand_as(z))
        r, s = split_by_hand(model.policy(c))
        assert ((r > 0) & (r < 1) & (s > 0) & (s < 1)).all()
        expected = model.common(r * z) + model.net.head(s * z)
        swapped = model.common(s * z) + model.net.head(r * z)
        assert not torch.allclose(swapped, expected, atol=0.01)  # the two heads are not the same
    torch.testing.assert_close(job.method.predict(model, x, no_draw), expected)


def test_which_parts_there_are(tiny: Federation) -> None:
    for without in TABLE_1:
        parts = set(dict(open_slot(job_of(FedCP(without=without), tiny)).model.named_children()))  # type: ignore[arg-type]
        gone = ({"common"} if "gh" in without else set()) | ({"policy", "client"} if "cpn" in without else set())
        assert parts == {"net", "common", "policy", "client"} - gone


def test_without_the_sample_all_images_are_split_alike(tiny: Federation) -> None:
    for without, alike in (((), False), (("cs",), False), (("ss",), True), (("cs", "ss"), True)):
        job = job_of(FedCP(without=without), tiny)  # type: ignore[arg-type]
        model = slot_of(job).model.eval()
        s = job.method.forward_details(model, batch(job)[0], no_draw).quantiles["s"]
        assert torch.allclose(s, s[:1].expand_as(s)) is alike


# --- the client vector -----------------------------------------------------------------------------------------------


def vector(state: State) -> Tensor:
    """v_i by hand: the rows of the personal head, added up and divided by their length."""
    rows = part(state, "net.head.")["fc2.weight"]
    total = torch.stack(list(rows)).sum(0)
    return total / math.sqrt(float(total.square().sum()))


ADAM = {"optimizer": {"name": "adam", "lr": 0.01}}


def test_the_vector_is_of_the_head_as_received_and_constant_in_training(tiny: Federation) -> None:
    job = job_of(FedCP(), tiny, train=ADAM)
    down = loop_for(FedCP(), job.config, tiny).server
    first = open_slot(job).model.state_dict()
    result = client_round(job, None, down)
    assert isinstance(result, Result)
    torch.testing.assert_close(result.state["client.v"], vector(first))  # before training, not after
    assert float((vector(result.state) - vector(first)).abs().max()) > 1e-3
    later = client_receive(replace(job, round=1), result.state, down)
    torch.testing.assert_close(later["client.v"], vector(result.state))
    assert float(later["client.v"].norm()) == pytest.approx(1.0)


def test_the_vector_does_not_travel(tiny: Federation) -> None:
    loop, _ = train(FedCP(), tiny, train=ADAM)
    assert not any(name.startswith("client") for name in loop.server)
    vectors = [state["client.v"] for state in models_of(loop).values()]
    assert not torch.allclose(vectors[0], vectors[1], atol=1e-3)


def test_sgd_never_turns_the_vector_of_a_linear_head(tiny: Federation) -> None:
    """The gradients of cross-entropy add up to zero over the classes, and so do the steps of the rows: all clients keep
    the vector of the first head. The page says so; with Adam, or two layers in the head, it is not so."""
    decay = {"optimizer": {"momentum": 0.9, "weight_decay": 0.01}}
    for sections, turned in ({}, False), ({"train": decay}, False), ({"train": ADAM}, True), ({"model": TWO}, True):
        job = job_of(FedCP(), tiny, **sections)
        weight = "net.head.fc1.weight" if "model" in sections else "net.head.fc2.weight"
        first = open_slot(job).model.state_dict()[weight]
        for state in models_of(train(FedCP(), tiny, **sections)[0]).values():
            old, new = first.sum(0) / first.sum(0).norm(), state[weight].sum(0) / state[weight].sum(0).norm()
            assert not torch.allclose(state[weight], first, atol=1e-3)
            assert (float((old - new).abs().max()) > 1e-3) is turned
            assert turned or float((old - new).abs().max()) < 1e-6


def test_no_gradient_through_the_vector(tiny: Federation) -> None:
    """The personal head learns from its own scores alone, although the vector was made of it."""
    job = job_of(FedCP(lam=0.0), tiny)
    client = slot_of(job)
    assert not client.model.client["v"].requires_grad
    x, y = batch(job)
    job.method.start(client, None)  # type: ignore[arg-type]
    job.method.loss(client, x, y).backward()
    z = client.model.net.body(x).detach()
    r, s = (share.detach() for share in split_by_hand(client.model.policy(client.model.client["v"] * z)))
    head = client.model.net.head
    found = head.fc2.weight.grad.clone()
    (expected,) = torch.autograd.grad(cross_entropy(client.model.common(r * z) + head(s * z), y), [head.fc2.weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_random_first_vector(tiny: Federation) -> None:
    """As in the authors' code: random, positive and of length 1 in a client's first round, of its head from then on."""
    loop = train(FedCP(first_vector="random"), tiny)[0]
    one, two = (models_of(loop, after) for after in (1, 2))
    assert one.keys() == two.keys() == tiny.clients.keys()
    for client_id, state in one.items():
        v = state["client.v"]
        assert (v > 0).all()
        assert float(v.norm()) == pytest.approx(1.0)
        assert float(v.std()) > 0.01
        assert not any(torch.equal(v, other["client.v"]) for name, other in one.items() if name != client_id)
        torch.testing.assert_close(two[client_id]["client.v"], vector(state))
    plain = train(FedCP(), tiny, train={"rounds": 1})[0]
    assert not any(same(part(state, "net."), part(models_of(plain)[c], "net.")) for c, state in one.items())


def test_without_cs_and_ss_one_random_vector_is_never_changed(tiny: Federation) -> None:
    loop = train(FedCP(without=("cs", "ss")), tiny)[0]
    first = open_slot(job_of(FedCP(without=("cs", "ss")), tiny)).model.client["v"]
    assert len(first.unique()) > len(first) // 2
    assert len(models_of(loop)) == 3
    assert all(torch.equal(state["client.v"], first) for state in models_of(loop).values())


# --- the alignment ---------------------------------------------------------------------------------------------------


def test_mmd_by_hand() -> None:
    """Two points 5 apart against two at the first: 2 - S/2, S the kernel at a squared distance of 25."""
    a, b = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.zeros(2, 2)
    s = sum(math.exp(-25 / (2 * q)) for q in (10, 15, 20, 50))
    assert float(mmd(a, b)) == pytest.approx(2 - s / 2, abs=1e-6)
    assert float(mmd(b, a)) == pytest.approx(2 - s / 2, abs=1e-6)
    assert float(mmd(a, a)) == pytest.approx(0.0, abs=1e-6)
    assert float(mmd(a[:1], b[:1] + 100)) == pytest.approx(8.0)  # four kernels, all pairs far


def test_mmd_compares_sets_not_pairs() -> None:
    a = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    assert float(mmd(a, a.flip(0))) == pytest.approx(0.0, abs=1e-6)
    assert float(mmd(a, a + 1)) > 0.01


def test_the_frozen_body_is_the_received_one_in_train_mode(tiny: Federation) -> None:
    """Then both bodies agree to the bit at the first step, so the alignment starts at zero; later it does not."""
    one_step = train(FedCP(), tiny, train={"rounds": 1, "batch_size": 64})[1].records[-1].logs
    more = train(FedCP(), tiny, train={"rounds": 1, "batch_size": 16})[1].records[-1].logs
    assert all(abs(logs["mmd"]) < 1e-5 for logs in one_step.values())
    assert all(logs["mmd"] > 1e-4 for logs in more.values())


def test_the_frozen_body_has_statistics_of_its_own(tiny: Federation) -> None:
    job = job_of(FedCP(), tiny)
    client = slot_of(job)
    received = {name: value.clone() for name, value in client.model.net.body.state_dict().items()}
    job.method.start(client, None)  # type: ignore[arg-type]
    client.model.train()
    x, y = batch(job)
    job.method.loss(client, x, y).backward()
    torch.optim.SGD([p for p in client.model.net.parameters() if p.grad is not None], lr=0.1).step()
    parameters = dict(client["body"].named_parameters())
    assert all(torch.equal(parameters[name], received[name]) for name in parameters)
    assert not any(p.requires_grad or p.grad is not None for p in parameters.values())
    job.method.loss(client, x, y)
    statistic, other = client["body"].bn2.running_mean, client.model.net.body.bn2.running_mean
    assert not torch.equal(statistic, received["bn2.running_mean"])
    assert not torch.equal(statistic, other)


def test_the_alignment_pulls_at_the_body_alone(tiny: Federation) -> None:
    """Eq. 8: lam times MMD is added to the cross-entropy, and only the body can make it smaller."""
    job = job_of(FedCP(), tiny)
    losses, grads = [], []
    for lam in (0.0, 3.0):
        client = slot_of(job)
        method = FedCP(lam=lam)
        method.start(client, None)  # type: ignore[arg-type]
        with torch.no_grad():
            for p in client["body"].parameters():
                p.add_(0.05)  # so that the two differ
        client.model.train()
        x, y = batch(job)
        loss = method.loss(client, x, y)
        loss.backward()
        losses.append(loss.detach())
        grads.append({name: p.grad for name, p in client.model.named_parameters()})
    apart = mmd(client.model.net.body(x), client["body"](x)).detach()
    assert apart > 0.01
    torch.testing.assert_close(losses[1] - losses[0], 3 * apart, rtol=1e-4, atol=1e-5)
    for name, plain in grads[0].items():
        if name.startswith("common"):
            continue
        moved = float((grads[1][name] - plain).abs().max()) > 1e-5
        # A bias in front of batch norm cannot be seen behind it.
        unseen = name.endswith(("conv1.bias", "conv2.bias", "fc1.bias"))
        assert moved is (name.startswith("net.body") and not unseen), name


# --- what learns and what is frozen ----------------------------------------------------------------------------------


def test_everything_learns_but_the_global_head(tiny: Federation) -> None:
    job = job_of(FedCP(), tiny)
    down = loop_for(FedCP(), job.config, tiny).server
    model = client_models(job, None, down)[1]
    assert same(part(model, "common."), part(down, "common."))
    for prefix in ("net.body.", "policy."):
        moved = [not torch.equal(model[n], down[n]) for n in down if n.startswith(prefix)]
        assert moved
        assert all(moved)
    assert not same(part(model, "net.head."), part(down, "common."))


def test_gradients_pass_through_the_frozen_head(tiny: Federation) -> None:
    """With a personal head that says nothing, policy and body still learn from the global one."""
    job = job_of(FedCP(without=("gfm",)), tiny)
    client = slot_of(job)
    with torch.no_grad():
        for p in client.model.net.head.parameters():
            p.zero_()
    client.model.common.requires_grad_(False)
    x, y = batch(job)
    job.method.loss(client, x, y).backward()
    for learner in (client.model.policy, client.model.net.body):
        assert any(float(p.grad.abs().max()) > 1e-5 for p in learner.parameters() if p.grad is not None)


def test_the_mean_of_both_heads_is_uploaded(tiny: Federation) -> None:
    """Eq. 6; body and policy as they are."""
    job = job_of(FedCP(), tiny)
    down = {name: stirred(job)[name] for name in loop_for(FedCP(), job.config, tiny).server}
    result, model = client_models(job, None, down)
    assert isinstance(result, Result)
    assert set(result.upload) == set(down)
    for name, value in result.upload.items():
        if name.startswith("common."):
            own = model[name.replace("common.", "net.head.")]
            torch.testing.assert_close(value, (down[name] + own) / 2)
            assert not torch.allclose(down[name], own, atol=1e-3)
        else:
            assert torch.equal(value, model[name])


def test_the_server_weights_uploads_by_samples(tiny: Federation) -> None:
    clients = dict(tiny.clients)
    small = clients["tinted"].train
    clients["tinted"] = replace(clients["tinted"], train=Split(small.x[:10], small.y[:10]))
    sites = replace(tiny, clients=clients)
    loop, seen = train(FedCP(), sites, train={"rounds": 1})
    first = seen.snapshots[0].server
    shares = {"plain": 40 / 90, "tinted": 10 / 90, "textured": 40 / 90}
    for name, value in loop.server.items():
        own = name.replace("common.", "net.head.")
        halves = {c: (first[name] + s[own]) / 2 if own != name else s[name] for c, s in models_of(loop).items()}
        torch.testing.assert_close(value, sum(shares[c] * half for c, half in halves.items()))


def test_who_is_absent_keeps_its_head_and_is_tested_with_the_new_rest(tiny: Federation) -> None:
    loop, _ = train(FedCP(), tiny, clients={"participation": 0.34}, train={"rounds": 1})
    absent = next(client_id for client_id, state in loop.states.items() if state is None)
    job = Job(loop.method, loop.config, loop.info, tiny.clients[absent], 1)
    first = open_slot(job).model.state_dict()
    state = client_model(job, None, loop.server)
    assert same(part(state, "net.head."), part(first, "net.head."))
    assert all(torch.equal(state[name], value) for name, value in loop.server.items())
    assert not same(part(state, "common."), part(first, "common."))


# --- ablations and limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.67])
@pytest.mark.parametrize("bn", ["local-stats", "shared", "local"])
def test_without_everything_it_is_fedper(bn: str, participation: float, tiny: Federation) -> None:
    sections: dict[str, Any] = {"clients": {"participation": participation}}
    bare, seen = train(FedCP(without=("cpn", "gfm", "gh")), tiny, train={"bn": bn}, **sections)
    fedper, other = train(FedPer(), tiny, train={"bn": bn}, **sections)
    assert same(part(bare.server, "net."), fedper.server)
    assert len(bare.server) == len(fedper.server)
    assert models_of(bare).keys() == models_of(fedper).keys()
    assert all(same(part(state, "net."), models_of(fedper)[client_id]) for client_id, state in models_of(bare).items())
    for mine, theirs in zip(seen.records, other.records, strict=True):
        assert mine.scores == theirs.scores
        assert (mine.up, mine.down) == (theirs.up, theirs.down)


def test_without_a_global_head_only_the_alignment_is_left(tiny: Federation) -> None:
    """`cpn, gh` is FedPer with the MMD loss: FedPer itself at lam 0, and not at another."""
    fedper = train(FedPer(), tiny, train={"bn": "local-stats"})[0]
    for lam, equal in ((0.0, True), (5.0, False)):
        aligned = train(FedCP(without=("cpn", "gh"), lam=lam), tiny)[0]
        assert set(part(aligned.server, "net.")) == set(fedper.server)
        assert all(same(part(state, "net."), models_of(fedper)[c]) is equal for c, state in models_of(aligned).items())


@pytest.mark.parametrize("rest", [(), ("cs",), ("cpn",), ("cpn", "gh")])
def test_without_the_alignment_it_is_lam_zero(rest: tuple[Any, ...], tiny: Federation) -> None:
    once = {"rounds": 1}
    gone = train(FedCP(without=(*rest, "gfm")), tiny, train=once)[0]
    zero = train(FedCP(without=rest, lam=0.0), tiny, train=once)[0]
    full = train(FedCP(without=rest), tiny, train=once)[0]
    assert same(gone.server, zero.server)
    assert all(same(state, models_of(zero)[client_id]) for client_id, state in models_of(gone).items())
    assert not same(gone.server, full.server)


def test_without_the_alignment_there_is_no_frozen_body(tiny: Federation) -> None:
    for without, there in (((), True), (("gfm",), False), (("cpn",), True), (("cpn", "gfm", "gh"), False)):
        job = job_of(FedCP(without=without), tiny)  # type: ignore[arg-type]
        client = slot_of(job)
        job.method.start(client, None)  # type: ignore[arg-type]
        assert ("body" in client.scratch) is there


def test_ablations_are_not_the_same(tiny: Federation) -> None:
    once = {"rounds": 1}
    servers = [part(train(FedCP(without=without), tiny, train=once)[0].server, "net.") for without in TABLE_1]  # type: ignore[arg-type]
    for i, one in enumerate(servers):
        assert not any(same(one, other) for other in servers[:i]), TABLE_1[i]


@pytest.mark.parametrize(
    ("without", "sent"),
    [
        ((), {"net", "common", "policy"}),
        (("cs", "ss"), {"net", "common", "policy"}),
        (("cpn",), {"net", "common"}),
        (("cpn", "gh"), {"net"}),
    ],
)
def test_what_travels(without: tuple[Any, ...], sent: set[str], tiny: Federation) -> None:
    server = loop_for(FedCP(without=without), config_of(), tiny).server
    assert {name.partition(".")[0] for name in server} == sent
    assert all(name.startswith("net.body.") for name in server if name.startswith("net."))
    assert not any("running" in name for name in server)


# --- a head of two layers, with batch norm in it ---------------------------------------------------------------------


def test_statistics_in_the_global_head_are_the_clients_own(tiny: Federation) -> None:
    """They do not travel, so the frozen head has those of the personal head as it was on arrival, and keeps them."""
    job = job_of(FedCP(), tiny, model=TWO)
    loop = loop_for(FedCP(), job.config, tiny)
    state = stirred(job)
    got = client_model(job, state, loop.server)
    result, model = client_models(job, state, loop.server)
    assert isinstance(result, Result)
    for name in ("bn3.running_mean", "bn3.running_var"):
        assert f"common.{name}" not in loop.server
        assert torch.equal(got[f"common.{name}"], state[f"net.head.{name}"])
        assert torch.equal(model[f"common.{name}"], state[f"net.head.{name}"])
        assert not torch.equal(model[f"net.head.{name}"], state[f"net.head.{name}"])
    for name in ("bn3.weight", "bn3.bias", "fc2.weight"):
        assert torch.equal(model[f"common.{name}"], loop.server[f"common.{name}"])
        half = (loop.server[f"common.{name}"] + model[f"net.head.{name}"]) / 2
        torch.testing.assert_close(result.upload[f"common.{name}"], half)


def test_shared_statistics_in_the_head_are_averaged_too(tiny: Federation) -> None:
    loop, _ = train(FedCP(), tiny, model=TWO, train={"rounds": 1, "bn": "shared"})
    assert "common.bn3.running_mean" in loop.server
    own = torch.stack([state["net.head.bn3.running_mean"] for state in models_of(loop).values()])
    torch.testing.assert_close(loop.server["common.bn3.running_mean"], own.mean(0) / 2)  # the first were zero


def test_batch_norm_that_stays_is_the_personal_heads(tiny: Federation) -> None:
    job = job_of(FedCP(), tiny, model=TWO, train={"bn": "local"})
    loop, state = loop_for(FedCP(), job.config, tiny), stirred(job)
    assert not any("bn" in name for name in loop.server)
    got = client_model(job, state, loop.server)
    assert all(
        torch.equal(got[f"common.bn3.{leaf}"], state[f"net.head.bn3.{leaf}"])
        for leaf in ("weight", "bias", "running_mean", "running_var")
    )


# --- noise -----------------------------------------------------------------------------------------------------------


class Drawn:
    """A source of noise that remembers what it was asked for."""

    def __init__(self) -> None:
        self.noise: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        self.noise[name] = torch.rand(shape, generator=torch.Generator().manual_seed(5))
        return self.noise[name]


@pytest.mark.parametrize(("gumbel", "training", "test"), [("never", 0, 0), ("training", 1, 0), ("always", 1, 1)])
def test_noise_only_where_it_belongs(gumbel: Any, training: int, test: int, tiny: Federation) -> None:
    job = job_of(FedCP(gumbel=gumbel, without=("gfm",)), tiny)
    client = slot_of(job)
    x, y = batch(job)
    client.draw = learning = Drawn()
    client.model.train()
    loss = job.method.loss(client, x, y)
    assert len(learning.noise) == training
    z = client.model.net.body(x)
    a = client.model.policy(client.model.client["v"] * z)
    if training:
        u = learning.noise["policy"].reshape(len(x), -1)  # a draw for each logit of each image
        a = a - (-u.log()).log()
    r, s = split_by_hand(a)
    torch.testing.assert_close(loss, cross_entropy(client.model.common(r * z) + client.model.net.head(s * z), y))
    looking = Drawn()
    client.model.eval()
    scores = job.method.predict(client.model, x, looking)
    assert len(looking.noise) == test
    quiet = replace(job.method, gumbel="never").predict(client.model, x, no_draw)
    assert torch.equal(scores, quiet) is not bool(test)


def test_noise_at_the_test_does_not_change_training(tiny: Federation) -> None:
    runs = {gumbel: train(FedCP(gumbel=gumbel), tiny) for gumbel in ("never", "training", "always")}  # type: ignore[arg-type]
    assert same(runs["training"][0].server, runs["always"][0].server)
    assert not same(runs["never"][0].server, runs["always"][0].server)
    quiet, noisy = (runs[g][1].records[-1].scores["received"]["test"] for g in ("training", "always"))
    assert all(quiet[client_id].loss != noisy[client_id].loss for client_id in quiet)
    again = train(FedCP(gumbel="always"), tiny)[1]
    assert again.records[-1].scores["received"]["test"] == noisy  # keyed: the same at every run


# --- records ---------------------------------------------------------------------------------------------------------


def test_records_hold_the_ratio_and_the_quantiles(tiny: Federation) -> None:
    """PIR is the mean of s over images and features (section 8), worked out here from the model."""
    loop, seen = train(FedCP(), tiny)
    for client_id, data in tiny.clients.items():
        job = Job(loop.method, loop.config, loop.info, data, 2)
        model = open_slot(job).model.eval()
        load(model, client_model(job, loop.states[client_id], loop.server))
        with torch.no_grad():
            z = model.net.body(model_inputs(data.test.x, loop.config))
            _, s = split_by_hand(model.policy(model.client["v"] * z))
        kept = seen.records[-1].scores["received"]["test"][client_id].diagnostics
        assert kept["pir"] == pytest.approx(float(s.mean()), abs=1e-6)
        ordered = s.flatten().sort().values
        for q in (0, 5, 25, 50, 75, 95, 100):
            place = round(q / 100 * (len(ordered) - 1))
            assert kept[f"s/q{q:02d}"] == pytest.approx(float(ordered[place]), abs=1e-6)
        assert 0 < kept["s/q00"] < kept["s/q50"] < kept["s/q100"] < 1


def test_the_ratio_is_logged_for_training_images_too(tiny: Federation) -> None:
    logs = train(FedCP(), tiny)[1].records[-1].logs
    for values in logs.values():
        assert set(values) == {"loss/train", "mmd", "pir"}
        assert 0.3 < values["pir"] < 0.7


@pytest.mark.parametrize(
    ("without", "logged", "diagnostics"),
    [
        (("gfm",), {"loss/train", "pir"}, True),
        (("cpn",), {"loss/train", "mmd"}, False),
        (("cpn", "gfm", "gh"), {"loss/train"}, False),
    ],
)
def test_what_is_left_out_is_not_recorded(
    without: tuple[Any, ...], logged: set[str], diagnostics: bool, tiny: Federation
) -> None:
    record = train(FedCP(without=without), tiny, train={"rounds": 1})[1].records[-1]
    assert all(set(values) == logged for values in record.logs.values())
    assert all(bool(score.diagnostics) is diagnostics for score in record.scores["received"]["test"].values())


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"without": ["gh"]}, r"write \[cpn, gh\]"),
        ({"without": ["gfm", "gh"]}, r"can only be left out together"),
        ({"without": ["cpn", "cs"]}, "inputs of the policy network"),
        ({"without": ["cpn", "gh", "ss"]}, "inputs of the policy network"),
        ({"without": ["mmd"]}, "without"),
        ({"lam": -1.0}, "lam"),
        ({"gumbel": "test"}, "gumbel"),
        ({"first_vector": "zero"}, "first_vector"),
        ({"cpn_layers": 0}, "cpn_layers"),
        ({"cpn_norm": "instance"}, "cpn_norm"),
        ({"cpn_activation": "gelu"}, "cpn_activation"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        structure(settings, FedCP, "method")
