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
from fedprism.engines.client import Job, Result, client_evaluate, client_receive, client_round, open_slot
from fedprism.engines.passes import inputs
from fedprism.federation import Federation
from fedprism.methods.base import Me, Method, Net, State, leaves, load, no_draw
from fedprism.methods.collecting import of, owner
from fedprism.methods.copa import COPA, under
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedper import FedPer
from fedprism.methods.local import Local
from tests.helpers import loop_for, same
from tests.test_limit_cases import Trained, assert_differ, config_of, part, train

DEEP = {"name": "lenet-bn", "head_layers": 2}  # with batch norm in the head


@pytest.fixture(scope="module")
def run(tiny: Federation) -> Trained:
    return train(COPA(), tiny, model=DEEP)


@pytest.fixture
def slot(run: Trained, tiny: Federation) -> Me:
    """A member's slot as it is when the fourth round begins to train."""
    me = open_slot(Job(run.loop.method, run.loop.config, run.loop.info, tiny.clients["tinted"], 3))
    load(me.model, received(run, "tinted", tiny))
    with torch.no_grad():
        run.loop.method.start(me, run.loop.now(3))
    return me


def received(run: Trained, client: str, federation: Federation) -> State:
    """A client's state with the server's newest."""
    loop = run.loop
    down = loop.method.send(loop.server, client, replace(loop.now(3), client=client))
    return client_receive(
        Job(loop.method, loop.config, loop.info, federation.clients[client], 3), run.states[client], down
    )


def images(run: Trained, federation: Federation, client: str = "tinted") -> tuple[Tensor, Tensor]:
    data = federation.clients[client].test
    return inputs(data.x, run.loop.config), data.y


def heads_of(model: Net) -> list[State]:
    """The heads of all clients, one by one."""
    states = model.heads.tensors()
    return [{leaf: tensor[j] for leaf, tensor in states.items()} for j in range(len(model.votes) - 1)]


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Local(), FedAvg()])
def test_one_client_is_alone(method: Method, tiny: Federation) -> None:
    one = replace(tiny, clients={"plain": tiny.clients["plain"]})
    together, alone = train(COPA(), one), train(method, one)
    assert same(part(together.states["plain"], "net."), alone.states["plain"])
    for scores, others in zip(together.correct(), alone.correct(), strict=True):
        assert scores == pytest.approx(others, rel=1e-5)


def test_without_the_others_heads_it_trains_as_fedper(tiny: Federation) -> None:
    uniform: dict[str, Any] = {"clients": {"weighting": "uniform"}}
    free, own, joint = train(COPA(weight=0.0), tiny), train(FedPer(), tiny, **uniform), train(COPA(), tiny)
    for client, state in free.states.items():
        assert same(part(state, "net."), own.states[client])
    assert_differ(joint, free)
    own_head = [record.scores["received"]["test"]["plain"].paths["own"] for record in free.seen.records[1:]]
    assert own_head == [record.scores["received"]["test"]["plain"].correct for record in own.seen.records[1:]]


# --- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_sum_over_all_heads(slot: Me, run: Trained, tiny: Federation) -> None:
    (x, y), z, expected = images(run, tiny), None, torch.zeros(())
    slot.model.train()
    z = slot.model.net.body(x)
    foreign = [head for client, head in zip(tiny.names, heads_of(slot.model), strict=True) if client != "tinted"]
    assert len(foreign) == 2
    for state in foreign:
        expected = expected + cross_entropy(functional_call(slot["head"], state, (z,)), y)
    torch.testing.assert_close(COPA().loss(slot, x, y), cross_entropy(slot.model.net.head(z), y) + expected)


def test_gradients_reach_the_body_alone(slot: Me, run: Trained, tiny: Federation) -> None:
    """Of the term that the heads of others add: own head and other heads have none of it."""
    x, y = images(run, tiny)
    slot.model.train()
    grads = []
    for weight in (1.0, 0.0):
        slot.model.zero_grad()
        COPA(weight=weight).loss(slot, x, y).backward()
        grads.append({n: p.grad.clone() for n, p in slot.model.named_parameters() if p.grad is not None})
    joint, alone = grads
    assert joint.keys() == alone.keys() == dict(slot.model.named_parameters()).keys()
    for name in joint:
        assert torch.equal(joint[name], alone[name]) == name.startswith("net.head."), name
    assert all(p.grad is None and not p.requires_grad for p in slot["head"].parameters())
    assert not any(t.requires_grad for t in slot.model.heads.tensors().values())


def test_other_heads_do_not_move(run: Trained, tiny: Federation) -> None:
    before, loop = received(run, "tinted", tiny), run.loop
    down = loop.method.send(loop.server, "tinted", replace(loop.now(3), client="tinted"))
    assert {owner(n) for n in down} == {None, "plain", "textured"}
    job = Job(loop.method, loop.config, loop.info, tiny.clients["tinted"], 3)
    after = client_round(job, run.states["tinted"], down)
    assert isinstance(after, Result)
    assert same(part(after.state, "heads."), part(before, "heads."))
    assert not same(part(after.state, "net.head."), part(before, "net.head."))
    assert {owner(n) for n in after.upload} == {None, "tinted"}


def test_everybody_has_the_heads_that_others_sent(run: Trained, tiny: Federation) -> None:
    for client in tiny.names:
        model = open_slot(Job(COPA(), run.loop.config, run.loop.info, tiny.clients[client], 3)).model
        load(model, received(run, client, tiny))
        for other, head in zip(tiny.names, heads_of(model), strict=True):
            assert same(head, part(run.states[other], "net.head."))


# --- the prediction --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ensemble", ["probabilities", "logits"])
def test_the_prediction_is_the_mean_over_all_heads(ensemble: Any, run: Trained, tiny: Federation) -> None:
    """The same at every client, and of its three heads each counts once."""
    x, _ = images(run, tiny)
    found = []
    for client in tiny.names:
        model: Net = open_slot(Job(COPA(), run.loop.config, run.loop.info, tiny.clients[client], 3)).model
        load(model, received(run, client, tiny))
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
        for client in tiny.names:
            a, b = (record.scores[moment]["test"][client] for moment in ("received", "global"))
            assert (a.correct, a.loss) == (b.correct, b.loss)


# --- the server, and who comes later ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bn", ["shared", "local"])
def test_heads_travel_whole_and_are_not_averaged(bn: str, tiny: Federation) -> None:
    joint = train(COPA(), tiny, model=DEEP, train={"bn": bn})
    head = leaves.tensors(joint.loop.info.arch.hollow().head)
    assert any("running_mean" in leaf for leaf in head)
    for client in tiny.names:
        sent = {leaf: joint.server[of(client, f"net.head.{leaf}")] for leaf in head}
        assert same(sent, part(joint.states[client], "net.head."))
    averaged = [name for name in joint.server if owner(name) is None]
    assert any(".bn" in name for name in averaged) == (bn == "shared")
    assert all(name.startswith("net.body.") for name in averaged)


@pytest.mark.parametrize("name", ["new", None])
def test_who_comes_later_predicts_with_the_heads_it_was_sent(name: str | None, run: Trained, tiny: Federation) -> None:
    """Its own head counts from its first training on."""
    loop, method = run.loop, run.loop.method
    info, data = replace(loop.info, later=("new",)), replace(tiny.clients["textured"], name="new")
    down = method.send(loop.server, name, replace(loop.now(3), info=info, client=name))
    assert {owner(n) for n in down} == {None, *tiny.names}
    raw = {"model": DEEP, "train": {"rounds": 3, "batch": 16}, "evaluate": {"moments": ["received", "adapted"]}}
    job = Job(method, structure(raw, Config), info, data, 3)
    scores = client_evaluate(job, None, down)
    member = client_evaluate(
        replace(job, data=tiny.clients["textured"], info=loop.info),
        run.states["textured"],
        method.send(loop.server, "textured", replace(loop.now(3), client="textured")),
    )
    assert scores["received"]["test"].loss == pytest.approx(member["received"]["test"].loss, rel=1e-5)
    assert scores["adapted"]["test"].loss < scores["received"]["test"].loss
    first = client_round(job, None, down)
    assert isinstance(first, Result)
    assert first.state["votes"].tolist() == [1.0] * 4
    assert client_receive(job, None, down)["votes"].tolist() == [1.0, 1.0, 1.0, 0.0]
    second = client_round(replace(job, round=4), first.state, down)
    assert isinstance(second, Result)
    assert not same(part(second.state, "net.head."), part(first.state, "net.head."))
