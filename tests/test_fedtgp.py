"""FedTGP: what its limit cases are, and the server's training by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedprism.federation import Federation, Split
from fedprism.methods.base import State, Upload
from fedprism.methods.fedproto import FedProto
from fedprism.methods.fedtgp import FedTGP
from fedprism.methods.local import Local
from fedprism.round.client import Job, open_slot
from fedprism.round.loop import Loop
from tests.harness import MLP, config_of, loop_for, models_of, part, same, train

pytestmark = pytest.mark.slow

WIDTH = 8  # features of MLP
QUICK: dict[str, Any] = {"server_epochs": 5}


def loop_of(method: FedTGP, federation: Federation, **sections: Any) -> Loop:
    return loop_for(method, config_of(model=MLP, **sections), federation)


def uploads(classes: int, clients: int = 3, apart: float = 3.0, have: int = 10) -> list[Upload]:
    """Clients' prototypes: class c lies at `apart` on axis c of the features, each client a little beside it."""
    found = []
    for place, client_id in enumerate(("plain", "tinted", "textured")[:clients]):
        rng = torch.Generator().manual_seed(place)
        mean = apart * torch.eye(10, WIDTH) + 0.1 * torch.rand(10, WIDTH, generator=rng)
        count = (torch.arange(10) < min(have, classes)).float()
        found.append(Upload(client_id, 40, {"prototypes.mean": mean * count.unsqueeze(1), "prototypes.count": count}))
    return found


@pytest.mark.parametrize("inference", ["prototype", "head"])
def test_without_a_pull_it_trains_as_local(inference: Any, tiny: Federation) -> None:
    free, alone = train(FedTGP(lam=0.0, inference=inference, **QUICK), tiny), train(Local(), tiny)
    for client_id, state in free.models.items():
        assert same(part(state, "net."), alone.models[client_id])
    assert (free.correct() == alone.correct()) == (inference == "head")


def test_only_the_server_differs_from_fedproto(tiny: Federation) -> None:
    """Until the first prototypes arrive the two are one; and what is sent is the same at any time."""
    one, other = train(FedTGP(**QUICK), tiny, train={"rounds": 2}), train(FedProto(lam=1.0), tiny, train={"rounds": 2})
    for place, equal in ((1, True), (2, False)):
        ours, theirs = models_of(one.loop, place), models_of(other.loop, place)
        assert all(same(part(ours[c], "net."), part(theirs[c], "net.")) == equal for c in tiny.names)
    assert [record.up for record in one.seen.records] == [record.up for record in other.seen.records]


def test_the_pull_has_a_gradient_where_there_is_a_prototype(tiny: Federation) -> None:
    method = FedTGP()
    loop = loop_of(method, tiny)
    client = open_slot(Job(method, loop.config, loop.info, tiny.clients["plain"], 0))
    x, y = torch.rand(4, *tiny.shape), torch.zeros(4, dtype=torch.int64)
    server = method.aggregate(loop.server, uploads(10), loop.context(0))
    for known in (False, True):
        client.model.prototypes["mean"].copy_(server["prototypes.mean"])
        client.model.prototypes["count"].copy_(server["prototypes.count"] * known)
        weight = client.model.net.body.fc2.weight
        pull = method.loss(client, x, y) - cross_entropy(client.model.net(x), y)
        (grad,) = torch.autograd.grad(pull, [weight])
        assert (grad.abs().max() > 1e-3).item() == known


def test_one_step_of_the_server_by_hand(tiny: Federation) -> None:
    method = FedTGP(server_epochs=1, server_lr=0.5, server_batch=1000)
    loop, sent = loop_of(method, tiny), uploads(10)
    after = method.aggregate(loop.server, sent, loop.context(0))
    first = part(loop.server, "generator.")
    weights = [tensor.clone().requires_grad_() for tensor in first.values()]

    def made() -> Tensor:
        e, w1, b1, w2, b2 = weights
        return (e @ w1.T + b1).relu() @ w2.T + b2

    means = torch.stack([u.state["prototypes.mean"] for u in sent])
    centres = list(means.mean(0))
    margin = max(min((a - b).norm() for b in centres if b is not a) for a in centres)
    points, y = means.flatten(0, 1), torch.arange(10).repeat(3)
    far = (points.unsqueeze(1) - made()).square().sum(2).sqrt()
    far = far + margin * (y.unsqueeze(1) == torch.arange(10))
    cross_entropy(-far, y).backward()  # type: ignore[no-untyped-call]
    for name, weight in zip(first, weights, strict=True):
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0
        weight.data -= 0.5 * weight.grad
        torch.testing.assert_close(after[f"generator.{name}"], weight.detach())
    torch.testing.assert_close(after["prototypes.mean"], made().detach())


@pytest.mark.parametrize(("cap", "expected"), [(100.0, 3 * 2**0.5), (2.0, 2.0), (0.0, 0.0)])
def test_margin(cap: float, expected: float, tiny: Federation) -> None:
    """Of classes at 3 on axes of their own all are 3 sqrt 2 apart; the margin is logged."""
    method = FedTGP(margin=cap, server_epochs=1)
    loop, sent = loop_of(method, tiny), uploads(8, clients=1)
    sent[0].state["prototypes.mean"].copy_(3 * torch.eye(10, WIDTH))
    ctx = loop.context(0)
    method.aggregate(loop.server, sent, ctx)
    assert ctx.logs["plain"]["margin"] == pytest.approx(expected, rel=1e-5)


def test_margin_of_one_class_is_the_largest(tiny: Federation) -> None:
    method = FedTGP(margin=7.0, server_epochs=1)
    loop, ctx = loop_of(method, tiny), loop_of(method, tiny).context(0)
    after = method.aggregate(loop.server, uploads(1), ctx)
    assert ctx.logs["tinted"]["margin"] == 7.0
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())


def test_the_margin_drives_classes_apart(tiny: Federation) -> None:
    """By how much a client's prototype is nearer to the made one of its class than to any other, at least."""
    lead, sent = {}, uploads(8)
    for margin in (0.0, 100.0):
        method = FedTGP(margin=margin, server_lr=0.1)
        loop = loop_of(method, tiny)
        server = method.aggregate(loop.server, sent, loop.context(0))
        far = torch.cdist(sent[0].state["prototypes.mean"][:8], server["prototypes.mean"][:8])
        own = far.diagonal().clone()
        lead[margin] = float((far.fill_diagonal_(torch.inf).amin(1) - own).min())
    assert lead[100.0] > lead[0.0] + 0.5


def test_the_generator_goes_on_from_round_to_round(tiny: Federation) -> None:
    method = FedTGP(server_epochs=20, server_batch=1000)
    loop, sent = loop_of(method, tiny), uploads(10)
    once = method.aggregate(loop.server, sent, loop.context(0))
    twice = method.aggregate(once, sent, loop.context(1))
    longer = replace(method, server_epochs=40).aggregate(loop.server, sent, loop.context(0))
    torch.testing.assert_close(part(twice, "generator."), part(longer, "generator."))
    assert not torch.allclose(once["prototypes.mean"], twice["prototypes.mean"])


def test_batches_are_drawn_by_key(tiny: Federation) -> None:
    """The same round has the same batches, another round others; all in one batch, there is no order."""

    def after(method: FedTGP, round: int) -> State:
        loop = loop_of(method, tiny)
        return method.aggregate(loop.server, uploads(10), loop.context(round))

    assert same(after(FedTGP(server_batch=4, **QUICK), 0), after(FedTGP(server_batch=4, **QUICK), 0))
    for batch, equal in ((4, False), (None, False), (1000, True)):  # None: train.batch_size, 16 here
        method = FedTGP(server_batch=batch, **QUICK)
        one, other = after(method, 0)["prototypes.mean"], after(method, 1)["prototypes.mean"]
        assert torch.allclose(one, other, atol=1e-6) == equal


def test_an_epoch_goes_over_all_batches_in_their_drawn_order(tiny: Federation) -> None:
    """An epoch over 30 prototypes in batches of 8 is four epochs of one batch each, one after the other."""
    method, sent = FedTGP(server_epochs=1, server_batch=8), uploads(10)
    loop = loop_of(method, tiny)
    after = method.aggregate(loop.server, sent, loop.context(0))
    means = torch.stack([u.state["prototypes.mean"] for u in sent])
    centres = list(means.mean(0))
    margin = max(min((a - b).norm() for b in centres if b is not a) for a in centres)
    points, labels = means.flatten(0, 1), torch.arange(10).repeat(3)
    order = torch.randperm(30, generator=loop.context(0).rng("prototypes", 0))
    weights = [tensor.clone() for tensor in part(loop.server, "generator.").values()]
    for begin in (0, 8, 16, 24):
        rows = order[begin : begin + 8]
        e, w1, b1, w2, b2 = leaves = [tensor.requires_grad_() for tensor in weights]
        far = (points[rows].unsqueeze(1) - ((e @ w1.T + b1).relu() @ w2.T + b2)).square().sum(2).sqrt()
        loss = cross_entropy(-(far + margin * (labels[rows].unsqueeze(1) == torch.arange(10))), labels[rows])
        weights = [w.detach() - 0.01 * g for w, g in zip(leaves, torch.autograd.grad(loss, leaves), strict=True)]
    for made, weight in zip(part(after, "generator.").values(), weights, strict=True):
        torch.testing.assert_close(made, weight)


def test_a_prototype_that_lies_on_another_has_a_gradient(tiny: Federation) -> None:
    """The distance of a client's prototype from the made one is then 0, whose root has no slope."""
    method = FedTGP(server_epochs=2, server_batch=1000)
    loop = loop_of(method, tiny)
    server = method.aggregate(loop.server, uploads(10), loop.context(0))
    sent = uploads(10)
    for upload in sent:
        upload.state["prototypes.mean"].copy_(server["prototypes.mean"])
    after = method.aggregate(server, sent, loop.context(1))
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert not torch.equal(after["prototypes.mean"], server["prototypes.mean"])


def test_a_class_that_nobody_has_is_never_predicted(tiny: Federation) -> None:
    """The server makes a prototype of it all the same; it neither pulls nor is chosen."""
    lacking = {}
    for name, data in tiny.clients.items():
        rows = data.train.y < 7
        lacking[name] = replace(data, train=Split(data.train.x[rows], data.train.y[rows]))
    run = train(FedTGP(**QUICK), replace(tiny, clients=lacking))
    assert run.server["prototypes.count"].tolist()[7:] == [0, 0, 0]
    assert run.server["prototypes.mean"][7:].abs().max() > 0
    last = run.seen.records[-1].scores["received"]["test"]
    assert all(sum(score.predicted[7:]) == 0 for score in last.values())


def test_a_class_that_nobody_shows_this_round_stays_known(tiny: Federation) -> None:
    method = FedTGP(**QUICK)
    loop = loop_of(method, tiny)
    server = method.aggregate(loop.server, uploads(10), loop.context(0))
    server = method.aggregate(server, uploads(4), loop.context(1))
    assert (server["prototypes.count"] > 0).all()


def test_three_architectures(tiny: Federation) -> None:
    models = {"per_client": ["lenet-bn", "mlp", {"name": "mlp", "hidden": [24]}]}
    run, alone = train(FedTGP(**QUICK), tiny, model=models), train(Local(), tiny, model=models)
    assert len({len(state) for state in run.models.values()}) == 3
    assert not any(same(part(state, "net."), alone.models[client_id]) for client_id, state in run.models.items())
