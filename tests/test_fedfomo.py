"""FedFomo: whom a client is sent, what it makes of it, and what it becomes at its edge."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedprism.config import Config, TrainConfig, structure
from fedprism.federation import Federation, Split
from fedprism.methods.base import Client, Net, State, Tensors, leaves
from fedprism.methods.collecting import client_key, epsilon_greedy, owner
from fedprism.methods.fedfomo import FedFomo
from fedprism.methods.local import Local
from fedprism.round.client import Job, client_evaluate, client_round, make_context, make_info
from fedprism.round.engine import Result
from fedprism.round.training import model_inputs
from tests.harness import MLP, Trained, config_of, cut, loop_for, models_of, reference, same, scores_of, train
from tests.reference import fedfomo

pytestmark = pytest.mark.full


def network(state: State) -> State:
    """A client's model, without what it began its last training with and whom it likes."""
    return {n: t for n, t in state.items() if n.startswith(("body.", "head."))}


@pytest.fixture(scope="module")
def run(tiny: Federation) -> Trained:
    return train(FedFomo(), tiny, evaluate={"moments": ["received", "trained", "adapted"]})


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", ["validation", "train"])
def test_one_client_is_alone(images: Any, tiny: Federation) -> None:
    """Also in a round that made its validation loss worse."""
    one = replace(tiny, clients={"plain": tiny.clients["plain"]})
    sections: dict[str, Any] = {
        "train": {"rounds": 6, "optimizer": {"lr": 0.3}},
        "evaluate": {"splits": ["test", images]},
    }
    mixed, alone = train(FedFomo(images=images), one, **sections), train(Local(), one, **sections)
    assert same(network(mixed.models["plain"]), alone.models["plain"])
    assert mixed.correct() == alone.correct()
    assert [record.down for record in mixed.seen.records[1:]] == [{"plain": 0}] * 6
    losses = [record.scores["received"][images]["plain"].loss for record in mixed.seen.records]
    assert any(later > earlier for earlier, later in itertools.pairwise(losses[:-1]))


def test_the_first_round_is_alone_and_the_next_is_not(run: Trained, tiny: Federation) -> None:
    """From the second round on a client is sent models, and goes on alone only where none of them helps."""
    alone, helped = train(Local(), tiny), []
    for client_id in tiny.names:
        first, second = (network(models_of(run.loop, r)[client_id]) for r in (1, 2))
        logs = [record.logs[client_id] for record in run.seen.records[1:]]
        assert same(first, models_of(alone.loop, 1)[client_id])
        assert (logs[0]["own"], logs[0]["others"]) == (1.0, 0.0)
        assert same(second, models_of(alone.loop, 2)[client_id]) == (logs[1]["others"] == 0)
        helped.append(logs[1]["others"] > 0.01)
    assert any(helped)


def test_agrees_with_its_reference_on_validation_images(tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's comparison is on training images, since a reference's setup has no others."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        config = config_of(model=MLP, clients={"participation": 0.67}, train={"rounds": 4})
        loop = loop_for(FedFomo(), config, cut(tiny, (40, 23, 9)))
        loop.run([])
        images = [(model_inputs(d.validation.x, config), d.validation.y) for d in tiny.clients.values()]
        plain = fedfomo.run
        monkeypatch.setattr(fedfomo, "run", lambda setup, **hyper: plain(replace(setup, train=images), **hyper))
        for client_id, scores in zip(tiny.names, reference("fedfomo", fedfomo.HYPER, loop), strict=True):
            torch.testing.assert_close(scores_of(loop, client_id), scores, rtol=1e-9, atol=1e-9)
    finally:
        torch.set_default_dtype(before)


# --- the mixture by hand ---------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([3.0, 4.0]))
        self.previous = Tensors({"w": torch.zeros(2)})
        self.register_buffer("liked", torch.zeros(4))


@pytest.mark.parametrize(
    ("losses", "mixed", "liked"),
    [
        # Distances 5, 1, 2 from (0, 0): gains 2/5, 1/1, -1/2, so weights 2/7 and 5/7.
        ([4.0, 2.0, 3.0, 5.0], [6 / 7, 13 / 7], [0.0, 1.0, -0.5, 1.0]),
        ([4.0, 6.0, 4.0, 3.0], [0.0, -2.0], [0.0, 0.0, 0.5, 1.0]),  # one model alone helps, and takes all
        ([1.0, 6.0, 2.0, 3.0], [3.0, 4.0], [0.0, -1.0, -1.0, 1.0]),  # none helps: its own stays
    ],
)
def test_weights_by_hand(losses: list[float], mixed: list[float], liked: list[float], tiny: Federation) -> None:
    loop = loop_for(FedFomo(), config_of(model=MLP), tiny)
    download = {client_key(c, "w"): torch.tensor(w) for c, w in (("tinted", [0.0, 1.0]), ("textured", [0.0, -2.0]))}
    ctx = loop.context(1).replace(client_id="plain", shared=("w",), download=download)
    model: Net = Two()
    client = Client(model, TrainConfig(), loop.info)
    with torch.no_grad():
        FedFomo().start(client, ctx)
        client["losses"].copy_(torch.tensor(losses))
        FedFomo().mix(client, ctx)
    torch.testing.assert_close(model.w.data, torch.tensor(mixed))
    assert torch.equal(model.previous["w"], model.w)
    assert model.liked.tolist() == liked


def test_what_is_compared_is_never_a_test_image(run: Trained, tiny: Federation) -> None:
    def changed(part: str) -> Federation:
        clients = {}
        for name, data in tiny.clients.items():
            split = data.split(part)
            clients[name] = replace(data, **{part: Split(255 - split.x, split.y.flip(0))})
        return replace(tiny, clients=clients)

    for part, reads in (("test", False), ("validation", True)):
        states = train(FedFomo(), changed(part)).models
        assert [same(states[c], run.models[c]) for c in tiny.names] == [not reads] * 3


def test_a_client_without_validation_images_compares_on_training_images(tiny: Federation) -> None:
    bare = {n: replace(d, validation=Split(d.train.x[:0], d.train.y[:0])) for n, d in tiny.clients.items()}
    without, train_images = train(FedFomo(), replace(tiny, clients=bare)), train(FedFomo(images="train"), tiny)
    assert all(same(without.models[c], train_images.models[c]) for c in tiny.names)


# --- the server ------------------------------------------------------------------------------------------------------


def test_epsilon_greedy() -> None:
    scores = {c: float(i) for i, c in enumerate("abcdef")}
    assert epsilon_greedy(scores, 3, 0.0, 1) == ["f", "e", "d"]
    assert sorted(epsilon_greedy(scores, 9, 0.5, 1)) == list("abcdef")
    assert epsilon_greedy({}, 3, 0.5, 1) == []
    any_one = [epsilon_greedy(scores, 1, 1.0, seed)[0] for seed in range(600)]
    some = [epsilon_greedy(scores, 1, 0.3, seed)[0] for seed in range(600)]
    tied = [epsilon_greedy(dict.fromkeys(scores, 0.0), 1, 0.0, seed)[0] for seed in range(600)]
    for c in "abcdef":
        assert 70 < any_one.count(c) < 130  # 100 and four deviations of 9
        assert 70 < tied.count(c) < 130
        assert 10 < some.count(c) < 50 or c == "f"  # 30
    assert 400 < some.count("f") < 500  # 450


def test_the_server_sends_the_best_of_those_it_has_heard_of() -> None:
    names = tuple("abcdef")
    method, config = FedFomo(models=2), config_of(model=MLP)
    info = make_info(config, names, 10, (3, 16, 16))
    ctx = make_context(method, config, info, method.build(info.arch, None, info, 0), 0, "a").replace(shared=("w",))
    server = {client_key(c, "liked"): torch.zeros(7) for c in names}
    server |= {client_key(c, "w"): torch.ones(1) for c in names}
    assert method.send(server, "a", ctx) == {}
    for c in "abcd":
        server[client_key(c, "liked")] = torch.tensor([0.0] * 6 + [1.0])
    server[client_key("a", "liked")] = torch.tensor([9.0, 1.0, -1.0, 2.0, 7.0, 8.0, 3.0])
    late = ctx.replace(round=6)  # epsilon has fallen to 0
    assert {owner(n) for n in method.send(server, "a", late)} == {"b", "d"}
    early = [tuple(method.send(server, "a", ctx.replace(info=replace(info, seed=s)))) for s in range(50)]
    assert len({*early}) > 1
    assert {owner(n) for names in early for n in names} == {"b", "c", "d"}
    assert method.send(server, "a", ctx) == method.send(server, "a", ctx)


def test_a_client_is_sent_what_others_last_sent(run: Trained, tiny: Federation) -> None:
    loop = run.loop
    download = loop.method.send(loop.server, "plain", loop.context(3).replace(client_id="plain"))
    assert {owner(n) for n in download} == {"tinted", "textured"}
    for client_id in ("tinted", "textured"):
        sent = {n.rpartition("/")[2]: t for n, t in download.items() if owner(n) == client_id}
        assert same(sent, network(run.models[client_id]))
    assert {len(run.models[c]["liked"]) for c in tiny.names} == {4}
    assert all(same({"": loop.server[client_key(c, "liked")]}, {"": run.models[c]["liked"]}) for c in tiny.names)


# --- moments, batch norm, newcomers ----------------------------------------------------------------------------------


def test_received_is_the_trained_model_and_adapted_the_mixture(run: Trained) -> None:
    for record in run.seen.records[1:]:
        assert record.scores["received"] == record.scores["trained"]
    two, three = run.seen.records[2], run.seen.snapshots[3]
    adapted, received = two.scores["adapted"]["test"]["plain"], two.scores["received"]["test"]["plain"]
    assert adapted.loss != received.loss
    # The mixture that the third round began with is what the moment `adapted` tested after the second.
    previous = {n.removeprefix("previous.").replace("/", "."): t for n, t in (three.clients["plain"] or {}).items()}
    state = {**models_of(run.loop, 2)["plain"], **network(previous)}
    job = Job(run.loop.method, config_of(), run.loop.info, run.loop.federation.clients["plain"], 2)
    assert client_evaluate(job, state, {})["received"]["test"].loss == adapted.loss


def test_batch_norm_can_stay_at_home(tiny: Federation) -> None:
    shared, local = train(FedFomo(), tiny), train(FedFomo(), tiny, train={"bn": "local"})
    model = local.loop.method.build(local.loop.info.arch, "plain", local.loop.info, 0)
    norms = set(leaves.norms(model))
    assert norms <= {n.rpartition("/")[2] for n in shared.server}
    assert not norms & {n.rpartition("/")[2] for n in local.server}


def test_who_comes_later_gets_the_mean_and_then_models(run: Trained, tiny: Federation) -> None:
    loop, method = run.loop, run.loop.method
    info, data = replace(loop.info, later=("new",)), replace(tiny.clients["plain"], name="new")
    mean = method.send(loop.server, None, loop.context(3).replace(info=info))
    expected = sum(run.models[c]["head.fc2.weight"] for c in tiny.names) / 3
    torch.testing.assert_close(mean["head.fc2.weight"], expected)
    raw = {"train": {"rounds": 3, "batch_size": 16}, "evaluate": {"moments": ["received", "adapted"]}}
    config = structure(raw, Config)
    job = Job(method, config, info, data, 3)
    scores = client_evaluate(job, None, mean)
    assert scores["adapted"]["test"].loss < scores["received"]["test"].loss
    first = client_round(job, None, mean)
    assert isinstance(first, Result)
    assert {owner(n) for n in first.upload} == {"new"}
    models = method.send(loop.server, "new", loop.context(4).replace(info=info, client_id="new"))
    assert {owner(n) for n in models} == set(tiny.names)
    second = client_round(replace(job, round=4), first.state, models)
    assert isinstance(second, Result)
    assert second.logs["own"] + second.logs["others"] == pytest.approx(1.0)
    again = client_evaluate(job, first.state, mean)["received"]  # a mean that comes again does not replace its model
    assert again == client_evaluate(job, first.state, {})["received"] != scores["received"]


def test_before_anybody_has_sent_a_model_a_stranger_gets_the_first(tiny: Federation) -> None:
    loop = loop_for(FedFomo(), config_of(), tiny)
    first, sent = loop.info.arch.model(0).state_dict(), loop.method.send(loop.server, None, loop.context(0))
    assert sent.keys() == first.keys()
    torch.testing.assert_close(sent, dict(first))
