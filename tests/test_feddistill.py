"""FedDistill: what its limit cases are, and numbers that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedprism.federation import Federation, Split
from fedprism.methods.base import Client, Method, State, Upload
from fedprism.methods.feddistill import FedDistill
from fedprism.methods.fedproto import FedProto
from fedprism.methods.local import Local
from fedprism.round.client import Job, open_slot
from fedprism.round.loop import Loop
from tests.harness import MLP, config_of, loop_for, part, same, train

pytestmark = pytest.mark.slow

AVERAGES: list[Any] = ["probabilities", "logits"]


def slot(method: FedDistill, loop: Loop, federation: Federation) -> Client:
    client = open_slot(Job(method, loop.config, loop.info, federation.clients["plain"], 0))
    method.start(client, loop.context(0).replace(client_id="plain"))
    return client


def uploaded(*classes: dict[int, list[float]]) -> list[Upload]:
    """Clients' means of three classes; those that are not given, a client does not have."""
    found = []
    for client_id, given in zip(("plain", "tinted", "textured"), classes, strict=False):
        mean, count = torch.zeros(10, 10), torch.zeros(10)
        for c, row in given.items():
            mean[c, : len(row)], count[c] = torch.tensor(row), c + 1
        found.append(Upload(client_id, 40, {"prototypes.mean": mean, "prototypes.count": count}))
    return found


def sent(loop: Loop, server: State, client_id: str | None) -> tuple[Tensor, Tensor]:
    download = loop.method.send(server, client_id, loop.context(1).replace(client_id=client_id))
    return download["prototypes.mean"], download["prototypes.count"]


@pytest.mark.parametrize("average", AVERAGES)
def test_without_a_pull_it_is_local(average: Any, tiny: Federation) -> None:
    free, alone = train(FedDistill(lam=0.0, average=average), tiny), train(Local(), tiny)
    for client_id, state in free.models.items():
        assert same(part(state, "net."), alone.models[client_id])
    assert free.correct() == alone.correct()
    taught = train(FedDistill(average=average), tiny)
    assert not any(same(part(state, "net."), alone.models[client_id]) for client_id, state in taught.models.items())


def test_one_client_is_alone(tiny: Federation) -> None:
    """There is nobody else to learn from, so its own mean must not come back to it."""
    one = replace(tiny, clients={"plain": tiny.clients["plain"]})
    assert train(FedDistill(lam=5.0), one).correct() == train(Local(), one).correct()


@pytest.mark.parametrize("average", AVERAGES)
def test_only_known_classes_pull(average: Any, tiny: Federation) -> None:
    method = FedDistill(lam=1.0, average=average)
    loop = loop_for(method, config_of(model=MLP), tiny)
    client, x, y = slot(method, loop, tiny), torch.randn(4, *tiny.shape), torch.tensor([0, 1, 0, 1])
    client.model.prototypes["mean"][0] = torch.linspace(0, 1, 10).softmax(0)

    def grad() -> Tensor:
        loss = method.loss(client, x, y) - cross_entropy(client.model.net(x), y)
        (found,) = torch.autograd.grad(loss, [client.model.net.head.fc3.weight])
        return found

    assert grad().abs().max() < 1e-6
    client.model.prototypes["count"][0] = 2
    assert grad().abs().max() > 1e-3
    scores = client.model.net(x[[0, 2]])  # by hand: half of the batch is of class 0
    target = client.model.prototypes["mean"][0]
    target = target.softmax(0) if average == "logits" else target
    expected = 0.5 * cross_entropy(scores, target.expand(2, -1))
    torch.testing.assert_close(method.loss(client, x, y) - cross_entropy(client.model.net(x), y), expected)


def test_means_of_the_outputs_that_training_gave(tiny: Federation) -> None:
    method = FedDistill()
    loop = loop_for(method, config_of(model=MLP), tiny)
    client, x, y = slot(method, loop, tiny), torch.randn(6, *tiny.shape), torch.tensor([3, 3, 5, 3, 5, 3])
    for rows in (slice(0, 3), slice(3, 6)):
        method.loss(client, x[rows], y[rows])
    upload = method.upload(client, loop.context(0))
    with torch.no_grad():
        outputs = client.model.net(x).softmax(1)
    torch.testing.assert_close(upload["prototypes.mean"][3], outputs[y == 3].mean(0))
    torch.testing.assert_close(upload["prototypes.mean"][5], outputs[y == 5].mean(0))
    assert upload["prototypes.count"].tolist() == [0, 0, 0, 4, 0, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_each_is_sent_the_mean_of_the_others(weighting: str, tiny: Federation) -> None:
    loop = loop_for(FedDistill(), config_of(clients={"weighting": weighting}), tiny)
    uploads = uploaded({0: [1.0], 1: [3.0]}, {0: [2.0]}, {0: [6.0]})
    server = loop.method.aggregate(loop.server, uploads, loop.context(0))
    expected: dict[str | None, float] = {"plain": 4.0, "tinted": 3.5, "textured": 1.5, None: 3.0}
    for client_id, value in expected.items():
        mean, count = sent(loop, server, client_id)
        assert mean[0, 0].item() == pytest.approx(value, abs=1e-6)
        assert (count[1] > 0).item() == (client_id != "plain")  # class 1 is its own alone
        assert not count[2:].any()


def test_samples_weight_where_asked_for(tiny: Federation) -> None:
    loop = loop_for(FedDistill(), config_of(clients={"weighting": "samples"}), tiny)
    uploads = uploaded({0: [9.0]}, {0: [1.0]}, {0: [4.0]})
    uploads[1].state["prototypes.count"][0] = 3
    server = loop.method.aggregate(loop.server, uploads, loop.context(0))
    assert sent(loop, server, "plain")[0][0, 0].item() == pytest.approx((3 * 1 + 4) / 4, abs=1e-6)


def test_a_client_of_very_many_images_does_not_drown_the_others(tiny: Federation) -> None:
    """Its own part is taken out of everybody's sum, of which a small one must be left as it is."""
    loop = loop_for(FedDistill(), config_of(clients={"weighting": "samples"}), tiny)
    uploads = uploaded({0: [0.9]}, {0: [0.3]})
    uploads[0].state["prototypes.count"][0] = 1e7
    server = loop.method.aggregate(loop.server, uploads, loop.context(0))
    assert sent(loop, server, "plain")[0][0, 0].item() == pytest.approx(0.3, abs=1e-7)


@pytest.mark.parametrize("method", [FedDistill(), FedProto()], ids=["feddistill", "fedproto"])
def test_less_than_no_images_are_none(method: Method, tiny: Federation) -> None:
    """A count that cannot be does not take others' out of the mean, nor out of the world."""
    loop = loop_for(method, config_of(model={"name": "mlp", "hidden": [10]}, clients={"weighting": "samples"}), tiny)
    uploads = uploaded({0: [9.0]}, {0: [1.0]}, {0: [4.0]})
    for upload, count in zip(uploads, (-4.0, 3.0, 1.0), strict=True):
        upload.state["prototypes.count"][0] = count
    server = loop.method.aggregate(loop.server, uploads, loop.context(0))
    assert server["prototypes.mean"][0, 0].item() == pytest.approx(7 / 4)
    assert server["prototypes.count"][0].item() == 4
    if isinstance(method, FedDistill):
        assert sent(loop, server, "tinted")[0][0, 0].item() == pytest.approx(4.0)


def test_who_is_absent_counts_with_what_it_sent_last(tiny: Federation) -> None:
    loop = loop_for(FedDistill(), config_of(), tiny)
    server = loop.method.aggregate(loop.server, uploaded({0: [1.0]}, {0: [2.0]}), loop.context(0))
    server = loop.method.aggregate(server, uploaded({1: [5.0]}), loop.context(1))  # the first has class 1 alone by now
    assert sent(loop, server, "textured")[0][:2, 0].tolist() == pytest.approx([2.0, 5.0], abs=1e-6)
    mean, count = sent(loop, server, "tinted")
    assert mean[1, 0].item() == pytest.approx(5.0, abs=1e-6)
    assert count[:2].tolist() == [0, 1]


def test_a_class_that_one_client_has(tiny: Federation) -> None:
    """With classes dealt to one client each nobody learns from anybody."""
    apart = {}
    for place, (name, data) in enumerate(tiny.clients.items()):
        rows = data.train.y % 3 == place
        apart[name] = replace(data, train=Split(data.train.x[rows], data.train.y[rows]))
    sites = replace(tiny, clients=apart)
    assert train(FedDistill(lam=5.0), sites).correct() == train(Local(), sites).correct()


def test_three_architectures_of_different_widths(tiny: Federation) -> None:
    models = {"features": "own", "per_client": ["lenet-bn", "mlp", {"name": "mlp", "hidden": [24]}]}
    mixed, alone = train(FedDistill(), tiny, model=models), train(Local(), tiny, model=models)
    assert len({len(state) for state in mixed.models.values()}) == 3
    for record in mixed.seen.records[1:]:
        assert set(record.up.values()) == set(record.down.values()) == {4 * 10 * 11}
    assert not any(same(part(state, "net."), alone.models[client_id]) for client_id, state in mixed.models.items())
