"""COPA: what the heads of others do and do not change, how they predict together, and who comes later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedprism.config import Config, structure
from fedprism.federation import Federation
from fedprism.methods.base import Client, Method, Net, State, leaves, load, no_draw
from fedprism.methods.collecting import client_key, owner
from fedprism.methods.copa import COPA, under
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedper import FedPer
from fedprism.methods.local import Local
from fedprism.round.client import Job, client_evaluate, client_model, client_receive, open_slot
from fedprism.round.engine import Result
from fedprism.round.training import model_inputs
from tests.harness import Trained, assert_differ, client_models, config_of, loop_for, part, same, train

pytestmark = pytest.mark.slow

DEEP = {"name": "lenet-bn", "head_layers": 2}  # with batch norm in the head


@pytest.fixture(scope="module")
def run(tiny: Federation) -> Trained:
    return train(COPA(), tiny, model=DEEP)


@pytest.fixture
def client(run: Trained, tiny: Federation) -> Client:
    """A member as it is when the fourth round begins to train."""
    client = open_slot(Job(run.loop.method, run.loop.config, run.loop.info, tiny.clients["tinted"], 3))
    load(client.model, received(run, "tinted", tiny))
    with torch.no_grad():
        run.loop.method.start(client, run.loop.context(3))
    return client


def received(run: Trained, client_id: str, federation: Federation) -> State:
    """A client's model once it has received the server's newest."""
    loop = run.loop
    download = loop.method.send(loop.server, client_id, loop.context(3).replace(client_id=client_id))
    job = Job(loop.method, loop.config, loop.info, federation.clients[client_id], 3)
    return client_model(job, run.states[client_id], download)


def images(run: Trained, federation: Federation, client_id: str = "tinted") -> tuple[Tensor, Tensor]:
    data = federation.clients[client_id].test
    return model_inputs(data.x, run.loop.config), data.y


def heads_of(model: Net) -> list[State]:
    """The heads of all clients, one by one."""
    states = model.heads.tensors()
    return [{leaf: tensor[j] for leaf, tensor in states.items()} for j in range(len(model.votes) - 1)]


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Local(), FedAvg()])
def test_one_client_is_alone(method: Method, tiny: Federation) -> None:
    one = replace(tiny, clients={"plain": tiny.clients["plain"]})
    together, alone = train(COPA(), one), train(method, one)
    assert same(part(together.models["plain"], "net."), alone.models["plain"])
    for scores, others in zip(together.correct(), alone.correct(), strict=True):
        assert scores == pytest.approx(others, rel=1e-5)


def test_without_the_others_heads_it_trains_as_fedper(tiny: Federation) -> None:
    uniform: dict[str, Any] = {"clients": {"weighting": "uniform"}}
    free, own, joint = train(COPA(weight=0.0), tiny), train(FedPer(), tiny, **uniform), train(COPA(), tiny)
    for client_id, state in free.models.items():
        assert same(part(state, "net."), own.models[client_id])
    assert_differ(joint, free)
    own_head = [record.scores["received"]["test"]["plain"].branches["own"] for record in free.seen.records[1:]]
    assert own_head == [record.scores["received"]["test"]["plain"].correct for record in own.seen.records[1:]]


# --- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_sum_over_all_heads(client: Client, run: Trained, tiny: Federation) -> None:
    (x, y), expected = images(run, tiny), torch.zeros(())
    client.model.train()
    z = client.model.net.body(x)
    foreign = [head for c, head in zip(tiny.names, heads_of(client.model), strict=True) if c != "tinted"]
    assert len(foreign) == 2
    for state in foreign:
        expected = expected + cross_entropy(functional_call(client["head"], state, (z,)), y)
    torch.testing.assert_close(COPA().loss(client, x, y), cross_entropy(client.model.net.head(z), y) + expected)


def test_gradients_reach_the_body_alone(client: Client, run: Trained, tiny: Federation) -> None:
    """Of the term that the heads of others add: own head and other heads have none of it."""
    x, y = images(run, tiny)
    client.model.train()
    grads = []
    for weight in (1.0, 0.0):
        client.model.zero_grad()
        COPA(weight=weight).loss(client, x, y).backward()
        grads.append({n: p.grad.clone() for n, p in client.model.named_parameters() if p.grad is not None})
    joint, alone = grads
    assert joint.keys() == alone.keys() == dict(client.model.named_parameters()).keys()
    for name in joint:
        assert torch.equal(joint[name], alone[name]) == name.startswith("net.head."), name
    assert all(p.grad is None and not p.requires_grad for p in client["head"].parameters())
    assert not any(t.requires_grad for t in client.model.heads.tensors().values())


def test_other_heads_do_not_move(run: Trained, tiny: Federation) -> None:
    before, loop = received(run, "tinted", tiny), run.loop
    download = loop.method.send(loop.server, "tinted", loop.context(3).replace(client_id="tinted"))
    assert {owner(n) for n in download} == {None, "plain", "textured"}
    job = Job(loop.method, loop.config, loop.info, tiny.clients["tinted"], 3)
    after, model = client_models(job, run.states["tinted"], download)
    assert isinstance(after, Result)
    assert same(part(model, "heads."), part(before, "heads."))
    assert not same(part(model, "net.head."), part(before, "net.head."))
    assert {owner(n) for n in after.upload} == {None, "tinted"}


def test_everybody_has_the_heads_that_others_sent(run: Trained, tiny: Federation) -> None:
    for client_id in tiny.names:
        model = open_slot(Job(COPA(), run.loop.config, run.loop.info, tiny.clients[client_id], 3)).model
        load(model, received(run, client_id, tiny))
        for other, head in zip(tiny.names, heads_of(model), strict=True):
            assert same(head, part(run.models[other], "net.head."))


# --- the prediction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ensemble", ["probabilities", "logits"])
def test_the_prediction_is_the_mean_over_all_heads(ensemble: Any, run: Trained, tiny: Federation) -> None:
    """The same at every client, and of its three heads each counts once."""
    x, _ = images(run, tiny)
    found = []
    for client_id in tiny.names:
        model: Net = open_slot(Job(COPA(), run.loop.config, run.loop.info, tiny.clients[client_id], 3)).model
        load(model, received(run, client_id, tiny))
        model.eval()
        with torch.no_grad():
            z = model.net.body(x)
            each = torch.stack([functional_call(model.net.head, head, (z,)) for head in heads_of(model)])
            torch.testing.assert_close(under(model.net.head, model.heads, z), each)
            scores = COPA(ensemble=ensemble).predict(model, x, no_draw)
        if ensemble == "logits":
            torch.testing.assert_close(scores, each.mean(0))
        else:
            torch.testing.assert_close(scores.softmax(1), each.softmax(2).mean(0))
        found.append(scores)
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    assert (each[0] - each[1]).abs().max() > 0.01


@pytest.mark.parametrize("ensemble", ["probabilities", "logits"])
def test_equal_heads_are_one_head(ensemble: Any, tiny: Federation) -> None:
    """As at the start of every run; and heads that are sure give no log of 0."""
    loop = loop_for(COPA(), config_of(), tiny)
    model: Net = COPA().build(loop.info.arch, "plain", loop.info, 0).eval()
    x = torch.randn(6, *tiny.shape, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 1e4):
        with torch.no_grad():
            for tensor in (*model.net.head.parameters(), *model.heads.buffers()):
                tensor.mul_(scale)
            scores, own = COPA(ensemble=ensemble).predict(model, x, no_draw), model.net.head(model.net.body(x))
        assert scores.isfinite().all()
        torch.testing.assert_close(scores.log_softmax(1), own.log_softmax(1), rtol=1e-4, atol=1e-5)


def test_the_global_model_is_what_everybody_receives(tiny: Federation) -> None:
    joint = train(COPA(), tiny, evaluate={"moments": ["received", "global"]})
    for record in joint.seen.records:
        for client_id in tiny.names:
            a, b = (record.scores[moment]["test"][client_id] for moment in ("received", "global"))
            assert (a.correct, a.loss) == (b.correct, b.loss)


# --- the server, and who comes later ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bn", ["shared", "local"])
def test_heads_travel_whole_and_are_not_averaged(bn: str, tiny: Federation) -> None:
    joint = train(COPA(), tiny, model=DEEP, train={"bn": bn})
    head = leaves.tensors(joint.loop.info.arch.hollow().head)
    assert any("running_mean" in leaf for leaf in head)
    for client_id in tiny.names:
        sent = {leaf: joint.server[client_key(client_id, f"net.head.{leaf}")] for leaf in head}
        assert same(sent, part(joint.models[client_id], "net.head."))
    averaged = [name for name in joint.server if owner(name) is None]
    assert any(".bn" in name for name in averaged) == (bn == "shared")
    assert all(name.startswith("net.body.") for name in averaged)


@pytest.mark.parametrize("name", ["new", None])
def test_who_comes_later_predicts_with_the_heads_it_was_sent(name: str | None, run: Trained, tiny: Federation) -> None:
    """Its own head counts from its first training on."""
    loop, method = run.loop, run.loop.method
    info, data = replace(loop.info, later=("new",)), replace(tiny.clients["textured"], name="new")
    download = method.send(loop.server, name, loop.context(3).replace(info=info, client_id=name))
    assert {owner(n) for n in download} == {None, *tiny.names}
    raw = {"model": DEEP, "train": {"rounds": 3, "batch_size": 16}, "evaluate": {"moments": ["received", "adapted"]}}
    job = Job(method, structure(raw, Config), info, data, 3)
    scores = client_evaluate(job, None, download)
    of_member = method.send(loop.server, "textured", loop.context(3).replace(client_id="textured"))
    member_job = replace(job, data=tiny.clients["textured"], info=loop.info)
    member = client_evaluate(member_job, run.states["textured"], of_member)
    assert scores["received"]["test"].loss == pytest.approx(member["received"]["test"].loss, rel=1e-5)
    assert scores["adapted"]["test"].loss < scores["received"]["test"].loss
    first, first_model = client_models(job, None, download)
    assert isinstance(first, Result)
    assert first.state["votes"].tolist() == [1.0] * 4
    assert client_receive(job, None, download)["votes"].tolist() == [1.0, 1.0, 1.0, 0.0]
    second, second_model = client_models(replace(job, round=4), first.state, download)
    assert isinstance(second, Result)
    assert not same(part(second_model, "net.head."), part(first_model, "net.head."))
