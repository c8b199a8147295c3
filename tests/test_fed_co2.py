"""Fed-CO2: its ablations are what they should be, its teachers and the others' heads are frozen, its heads arrive.

"The same" means bit by bit, unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fedprism as fp
from fedprism.config import Config, structure
from fedprism.conformance import spies
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Client, Info, Method, State, Upload, load
from fedprism.methods.fed_co2 import FedCO2
from fedprism.methods.fedbn import FedBN
from fedprism.methods.fedper import FedPer
from fedprism.methods.leaves import tensors
from fedprism.methods.local import Local
from fedprism.models import Arch
from fedprism.round.client import Job, client_evaluate, client_model, client_round, open_slot
from fedprism.round.engine import Failure, Request, Result
from fedprism.round.loop import Loop
from fedprism.round.training import model_inputs
from tests.harness import CPU, Collect, loop_for, models_of, same

pytestmark = pytest.mark.full

PAIR = ("online", "offline")
WHO = ("none", *PAIR, "both")
ARCH = Arch("lenet-bn", 10, (3, 16, 16), 2)
NOBODY = Info((), 10, {}, 0)
ALONE = FedCO2(intra="none", inter="none")
HEAD = 4 * (64 * 10 + 10)  # bytes of lenet-bn's last layer
WIDE_HEAD = HEAD + 4 * (512 * 64 + 64 + 4 * 64) + 8  # and of the layer before it, with its batch norm and counter


class Spy(spies.Spy):
    """Keeps what every client was sent and what it sent."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.downloads: dict[tuple[int, str], State] = {}
        self.uploads: dict[tuple[int, str], State] = {}

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id, answer in super().train(round, requests):
            assert isinstance(answer, Result)
            self.downloads[round, client_id] = dict(requests[client_id].download)
            self.uploads[round, client_id] = dict(answer.upload)
            yield client_id, answer


@dataclass(frozen=True)
class Trained:
    loop: Loop
    seen: Collect
    spy: Spy

    def model(self, client_id: str) -> State:
        """All leaves of a client's model as it last left training."""
        return models_of(self.loop)[client_id]

    def right(self, branch: str = "") -> list[list[int]]:
        """Every client's right answers, round by round: of the prediction, or of one branch."""
        of_rounds = [record.scores["received"]["test"].values() for record in self.seen.records]
        return [[score.branches[branch] if branch else score.correct for score in scores] for scores in of_rounds]


def config_of(**sections: Any) -> Config:
    train = {"rounds": 2, "batch_size": 16, **sections.pop("train", {})}
    return structure({"train": train, "evaluate": {"moments": []}, **sections}, Config)


def train(method: Method, federation: Federation, **sections: Any) -> Trained:
    config, seen = config_of(**sections), Collect()
    loop = loop_for(method, config, federation)
    loop.engine = spy = Spy(method, config, loop.info, federation, CPU)
    assert loop.run([seen]) == "finished"
    return Trained(loop, seen, spy)


def part(state: Mapping[str, Tensor], prefix: str) -> State:
    """What is under a part, without its name."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def heads(state: Mapping[str, Tensor]) -> set[str]:
    """The names under which heads cross."""
    return {name for name in state if name.startswith("of.")}


def is_online(run: Trained, other: Trained) -> bool:
    """Are the online models those of another run, on the server and on every client?"""
    clients = [same(part(run.model(c), "online."), other.model(c)) for c in run.loop.info.clients]
    return same(part(run.loop.server, "online."), other.loop.server) and all(clients)


def is_offline(run: Trained, other: Trained) -> bool:
    return all(same(part(run.model(c), "offline."), other.model(c)) for c in run.loop.info.clients)


@pytest.fixture(scope="module")
def alone(tiny: Federation) -> dict[str, Trained]:
    """What the two models are compared with."""
    return {"online": train(FedBN(), tiny), "offline": train(Local(), tiny)}


# --- the ablations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"epochs": 2, "optimizer": {"lr": 0.05, "momentum": 0.9}}},
        {"train": {"optimizer": {"name": "adam", "lr": 0.003}}},
        {"train": {"clip": 0.5}},
        {"clients": {"participation": 0.67}, "train": {"rounds": 3}},
        {"clients": {"weighting": "samples"}},
        {"model": {"head_layers": "all"}},
        {"train": {"bn": "local-affine"}},
    ],
    ids=["momentum", "adam", "clip", "partial", "samples", "head", "label-skew-bn"],
)
def test_without_transfers_it_is_fedbn_beside_local(sections: dict[str, Any], unequal: Federation) -> None:
    """Algorithm 2; with `train.bn=local-affine` it is FedBN under the same policy."""
    sections = {"evaluate": {"moments": ["received"], "splits": ["test"]}, **sections}
    both, online, offline = (train(method, unequal, **deepcopy(sections)) for method in (ALONE, FedBN(), Local()))
    assert same(part(both.loop.server, "online."), online.loop.server)
    assert not heads(both.loop.server)
    assert both.loop.states.keys() == online.loop.states.keys()
    trained = [client_id for client_id, state in both.loop.states.items() if state is not None]
    assert len(trained) > 1
    for client_id in trained:
        assert same(part(both.model(client_id), "online."), online.model(client_id))
        assert same(part(both.model(client_id), "offline."), offline.model(client_id))
    assert both.right("online") == online.right()
    assert both.right("offline") == offline.right()
    for record, of_fedbn in zip(both.seen.records, online.seen.records, strict=True):
        assert (record.down, record.up) == (of_fedbn.down, of_fedbn.up)  # no head crosses
    assert not any(heads(state) for state in [*both.spy.downloads.values(), *both.spy.uploads.values()])


@pytest.mark.slow
@pytest.mark.parametrize(("intra", "inter"), product(WHO, WHO))
def test_each_transfer_changes_the_model_that_it_names(
    intra: Any, inter: Any, alone: dict[str, Trained], tiny: Federation
) -> None:
    """Tables 11 and 12 and all else: a model that no transfer names is FedBN's or Local's, and any other is not."""
    run = train(FedCO2(intra=intra, inter=inter), tiny)
    assert is_online(run, alone["online"]) is (not {"online", "both"} & {intra, inter})
    assert is_offline(run, alone["offline"]) is (not {"offline", "both"} & {intra, inter})
    assert bool(heads(run.loop.server)) is (inter != "none")
    logged = {name for logs in run.seen.records[-1].logs.values() for name in logs}
    mutual = {f"loss/mutual {which}" for which in PAIR if intra in (which, "both")}
    assert logged == {"loss/online", "loss/offline", *mutual}


def test_without_weight_the_heads_cross_in_vain(tiny: Federation) -> None:
    idle, off = train(FedCO2(mu=0.0), tiny), train(FedCO2(inter="none"), tiny)
    assert all(same(idle.model(client_id), off.model(client_id)) for client_id in tiny.names)
    assert heads(idle.loop.server)
    some = train(FedCO2(mu=0.1), tiny)
    assert not any(same(some.model(client_id), off.model(client_id)) for client_id in tiny.names)


def test_skip_first_leaves_out_the_first_round_alone(tiny: Federation) -> None:
    """The authors' code: after one round as without the mutual phase, after two not."""
    skipped, without = train(FedCO2(skip_first=True), tiny), train(FedCO2(intra="none"), tiny)
    for after in (1, 2):
        ours, theirs = (models_of(run.loop, after) for run in (skipped, without))
        assert [same(ours[client_id], theirs[client_id]) for client_id in tiny.names] == [after == 1] * 3
    logged = [{name for logs in record.logs.values() for name in logs} for record in skipped.seen.records[1:]]
    assert ["loss/mutual online" in names for names in logged] == [False, True]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("head_layers", [1, 2])
def test_a_personal_head_is_fedper(weighting: str, head_layers: int, unequal: Federation) -> None:
    """Fig. 7: without transfers the online model is FedPer's, and with batch norm at home FedPer's with local norms."""
    sections = {"clients": {"weighting": weighting}, "model": {"name": "lenet-bn", "head_layers": head_layers}}
    for personal, bn in (("head", "method"), ("both", "local")):
        run = train(replace(ALONE, personal=personal), unequal, **deepcopy(sections))
        assert is_online(run, train(FedPer(), unequal, **deepcopy(sections), train={"bn": bn}))


def names_sent(method: FedCO2, **sections: Any) -> set[str]:
    """What of the online model is averaged."""
    config = config_of(**sections)
    info_of = loop_for(method, config, fp.make_federation("digits-skew", clients=2, seed=0, samples=20))
    return {name for name in info_of.server if name.startswith("online.")}


def test_what_is_personal_stays() -> None:
    everything = {f"online.{name}" for name in fp.FedAvg().build(ARCH, None, NOBODY, 0).state_dict()}
    norms = {name for name in everything if ".bn" in name}
    head = {name for name in everything if name.startswith("online.head.")}
    assert norms & head == {name for name in head if ".bn3." in name} != set()
    wide = {"model": {"name": "lenet-bn", "head_layers": 2}}
    assert names_sent(FedCO2(), **deepcopy(wide)) == everything - norms
    assert names_sent(FedCO2(personal="head"), **deepcopy(wide)) == everything - head
    assert names_sent(FedCO2(personal="both"), **deepcopy(wide)) == everything - norms - head
    # A policy that the user names goes before the method's own.
    assert names_sent(FedCO2(), train={"bn": "shared"}, **deepcopy(wide)) == everything
    assert names_sent(FedCO2(personal="head"), train={"bn": "local"}, **deepcopy(wide)) == everything - norms - head
    averaged = {name for name in norms if "running" in name or name.endswith("tracked")}
    affine = names_sent(FedCO2(), train={"bn": "local-affine"}, **deepcopy(wide))
    assert affine == (everything - norms) | averaged


def test_the_choice_survives_the_configuration() -> None:
    """`personal: head` shares batch norm also where the method is read from a file, copied, or sent to a process."""
    method = structure({"personal": "head"}, FedCO2, "method")
    assert (method.bn, replace(method, mu=0.5).bn, deepcopy(method).bn) == ("shared", "shared", "shared")
    assert (FedCO2().bn, replace(method, personal="bn").bn, FedCO2(personal="both").bn) == ("local", "local", "local")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mu": -0.1}, "0 or more"),
        ({"intra": "all"}, "intra"),
        ({"inter": True}, "inter"),
        ({"personal": "none"}, "personal"),
        ({"offline_start": "random"}, "offline_start"),
        ({"epochs": 1}, "epochs"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        structure(settings, FedCO2, "method")


# --- first weights ---------------------------------------------------------------------------------------------------


def test_all_start_from_the_same_weights_by_default(tiny: Federation) -> None:
    loop = loop_for(FedCO2(), config_of(), tiny)
    for client_id in tiny.names:
        state = loop.method.build(loop.info.arch, client_id, loop.info, 0).state_dict()
        assert same(part(state, "online."), part(state, "offline."))


def test_own_first_weights_of_the_offline_models(tiny: Federation) -> None:
    """Different for every client and seed, beside one online model; the server's first heads are theirs."""
    loop = loop_for(FedCO2(offline_start="own"), config_of(), tiny)
    info = loop.info
    built = {c: loop.method.build(info.arch, c, info, info.seed).state_dict() for c in info.clients}
    again = {c: loop.method.build(info.arch, c, info, info.seed).state_dict() for c in reversed(info.clients)}
    plain = FedCO2().build(info.arch, None, info, info.seed).state_dict()
    for client_id in info.clients:
        assert same(part(built[client_id], "online."), part(plain, "online."))
        assert same(built[client_id], again[client_id])
        assert same(part(built[client_id], "offline.head."), part(loop.server, f"of.{client_id}/"))
    firsts = [*(part(state, "offline.") for state in built.values()), part(plain, "offline.")]
    weights = [name for name, p in FedCO2().build(info.arch, None, info, 0).offline.named_parameters() if p.dim() > 1]
    assert len(weights) == 4
    for name in weights:  # of convolutions and fully connected layers: all drawn anew
        assert len({tuple(first[name].flatten().tolist()) for first in firsts}) == len(firsts)
    other = loop.method.build(info.arch, "plain", info, 1).state_dict()
    assert not torch.equal(other["offline.body.fc1.weight"], built["plain"]["offline.body.fc1.weight"])


# --- the heads -------------------------------------------------------------------------------------------------------


def test_heads_of_absent_clients_are_the_last_known(tiny: Federation) -> None:
    """Partial participation: what a client is sent of another is what that one sent last, or its first head."""
    run = train(FedCO2(), tiny, clients={"participation": 0.34}, train={"rounds": 5})
    first = FedCO2().build(run.loop.info.arch, None, run.loop.info, 0).offline.head.state_dict()
    known: dict[str, State] = dict.fromkeys(tiny.names, first)
    absent = 0
    for record in run.seen.records[1:]:
        for client_id in record.cohort:
            down = run.spy.downloads[record.round - 1, client_id]
            assert heads(down) == {f"of.{c}/{leaf}" for c in tiny.names if c != client_id for leaf in first}
            for other in set(tiny.names) - {client_id}:
                assert same(part(down, f"of.{other}/"), known[other])
                absent += not same(known[other], first)
        for client_id in record.cohort:
            up = run.spy.uploads[record.round - 1, client_id]
            known[client_id] = part(up, f"of.{client_id}/")
            assert heads(up) == {f"of.{client_id}/{leaf}" for leaf in first}
            state = run.seen.snapshots[record.round].clients[client_id]
            assert state is not None
            assert same(known[client_id], part(state, "offline.head."))
        server = run.seen.snapshots[record.round].server
        assert all(same(part(server, f"of.{client_id}/"), known[client_id]) for client_id in tiny.names)
    assert absent > 2  # the test has seen trained heads of clients that were not there


def test_a_server_step_moves_the_online_model_and_not_the_heads(tiny: Federation) -> None:
    run = train(FedCO2(), tiny, server={"lr": 0.5}, train={"rounds": 1})
    first, last = run.seen.snapshots[0].server, run.seen.snapshots[1].server
    for client_id in tiny.names:
        assert same(part(last, f"of.{client_id}/"), part(run.model(client_id), "offline.head."))
    name = "online.body.fc1.weight"
    mean = torch.stack([run.model(client_id)[name] for client_id in tiny.names]).mean(0)
    torch.testing.assert_close(last[name], (first[name] + mean) / 2)


NAMES = [("site.1", "site.1.a", "site"), ("of.x", "x", "of.of.x"), ("site.1", "site.1.a", "a/b"), ("a", "a/b", "a/b/c")]


@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_names_with_dots_and_slashes(names: tuple[str, ...], tiny: Federation) -> None:
    """Each client is sent every other's head and not its own, and what it sends replaces its own alone."""
    method, first = FedCO2(), loop_for(FedCO2(), config_of(), tiny)
    info = replace(first.info, clients=names, archs=dict.fromkeys(names, first.info.arch))
    ctx = first.context(0).replace(info=info)
    model = method.build(info.arch, None, info, 0)
    server, leaves = method.server(model, ctx), model.offline.head.state_dict().keys()
    assert heads(server) == {f"of.{client_id}/{leaf}" for client_id in names for leaf in leaves}
    for client_id in names:
        here = ctx.replace(client_id=client_id)
        others = {f"of.{other}/{leaf}" for other in names if other != client_id for leaf in leaves}
        down = method.send(server, client_id, here)
        assert heads(down) == others
        client = Client(deepcopy(model), first.config.train, info)
        with torch.no_grad():
            for place, parameter in enumerate(client.model.offline.head.parameters()):
                parameter.fill_(names.index(client_id) + place)
        up = method.upload(client, here)
        assert up.keys() == method.uploads(model, here).keys()
        assert heads(up) == {f"of.{client_id}/{leaf}" for leaf in leaves}
        after = method.aggregate(server, [Upload(client_id, 1, up)], ctx)
        assert after.keys() == server.keys()
        assert {name for name in server if not torch.equal(server[name], after[name])} == heads(up)
        marked = {name: torch.full_like(t, float(list(down).index(name))) for name, t in down.items()}
        method.start(client, here.replace(download=marked))
        for place, other in enumerate(other for other in names if other != client_id):
            assert same(client[f"head {place}"].state_dict(), {leaf: marked[f"of.{other}/{leaf}"] for leaf in leaves})


def test_a_run_of_clients_with_dots(tiny: Federation, tmp_path: Path) -> None:
    """Through a run directory too; a federation itself refuses slashes."""
    names = ("site.1", "site.1.a", "of.site")
    odd = replace(tiny, clients={n: replace(d, name=n) for n, d in zip(names, tiny.clients.values(), strict=True)})
    run = fp.train(odd, method="fed-co2", rounds=2, out=tmp_path / "run")
    assert run.status == "finished"
    again = train(FedCO2(), odd)
    for client_id in names:
        for other in set(names) - {client_id}:
            down, up = again.spy.downloads[1, client_id], again.spy.uploads[0, other]
            assert same(part(down, f"of.{other}/"), part(up, f"of.{other}/"))


def test_a_client_that_comes_later_is_sent_all_heads(tiny: Federation) -> None:
    """It trains under them from its first time on; a stranger without a name is sent all heads too."""
    clients = dict(tiny.clients)
    late = clients.pop("textured")
    early = replace(tiny, clients=clients)
    run = train(FedCO2(), early)
    loop, method = run.loop, run.loop.method
    info = replace(loop.info, later=("textured",))
    down = method.send(loop.server, "textured", loop.context(2).replace(info=info, client_id="textured"))
    assert down.keys() == loop.server.keys()
    assert down.keys() == method.send(loop.server, None, loop.context(2)).keys()
    for who in clients:
        assert same(part(down, f"of.{who}/"), part(run.model(who), "offline.head."))
    job = Job(method, config_of(evaluate={"moments": ["received", "adapted"], "splits": ["test"]}), info, late, 2)
    client = open_slot(job)
    scores = client_evaluate(job, None, down, client)
    assert [name for name in client.scratch if name.startswith("head ")] == ["head 0", "head 1"]
    for place, who in enumerate(clients):
        assert same(client[f"head {place}"].state_dict(), part(run.model(who), "offline.head."))
    assert scores["adapted"]["test"].loss < scores["received"]["test"].loss


def test_one_client_has_nobody_to_learn_from(tiny: Federation) -> None:
    one = replace(tiny, clients={"plain": tiny.clients["plain"]})
    assert same(train(FedCO2(), one).model("plain"), train(FedCO2(inter="none"), one).model("plain"))


# --- one round of one client -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """A client's turn after some rounds: the slot before training, and what it works with."""

    job: Job
    state: State
    download: State
    client: Client

    def run(self) -> Result:
        result = client_round(self.job, self.state, self.download, self.client)
        assert isinstance(result, Result)
        return result


@pytest.fixture(scope="module")
def turns(tiny: Federation) -> Callable[..., Turn]:
    """A new slot for the second client after two rounds with everybody's heads of `head_layers` layers."""
    runs: dict[int | str, Trained] = {}

    def make(head_layers: int | str = 1) -> Turn:
        config = config_of(model={"name": "lenet-bn", "head_layers": head_layers})
        if head_layers not in runs:
            runs[head_layers] = train(FedCO2(), tiny, model={"name": "lenet-bn", "head_layers": head_layers})
        run = runs[head_layers]
        method, ctx = run.loop.method, run.loop.context(2).replace(client_id="tinted")
        job = Job(method, config, run.loop.info, tiny.clients["tinted"], 2)
        state = run.loop.states["tinted"]
        assert state is not None
        return Turn(job, state, method.send(run.loop.server, "tinted", ctx), open_slot(job))

    return make


@pytest.fixture(params=[1, 2, "all"], ids=lambda n: f"head_layers={n}")
def turn(request: pytest.FixtureRequest, turns: Callable[..., Turn]) -> Turn:
    return turns(request.param)


def arrived(turn: Turn) -> nn.Module:
    """The client's models at the start of the round, by themselves."""
    model = turn.job.method.build(turn.job.info.arch, "tinted", turn.job.info, 0)
    load(model, client_model(turn.job, turn.state, turn.download))
    return model


def test_teachers_and_heads_are_as_they_came_when_the_round_ends(turn: Turn) -> None:
    start, client = arrived(turn), turn.client
    result, trained = turn.run(), tensors(client.model)
    others = [client_id for client_id in turn.job.info.clients if client_id != "tinted"]
    for place, other in enumerate(others):
        frozen = client[f"head {place}"]
        assert same(frozen.state_dict(), part(turn.download, f"of.{other}/"))  # batch norm's statistics included
        assert not frozen.training
        assert not any(p.requires_grad or p.grad is not None for p in frozen.parameters())
    for which in PAIR:
        assert same(client[which].state_dict(), getattr(start, which).state_dict())
        assert not client[which].training
        assert not same(part(trained, f"{which}."), getattr(start, which).state_dict())
    assert same(part(start.state_dict(), "offline."), part(turn.state, "offline."))  # nothing of it was received
    assert not any(name.startswith("offline.") for name in turn.download)
    assert same(part(result.upload, "of.tinted/"), part(trained, "offline.head."))


def losses(turn: Turn, which: str, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the adaptation on the client's first images; the slot is filled as for a round."""
    method, client = replace(turn.job.method, **changes), turn.client
    x, y = batch(turn)
    model = client.model.train().requires_grad_(True)
    load(model, arrived(turn).state_dict())
    model.zero_grad(set_to_none=True)
    loss = method.adaptation(which, 2, client, x, y)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def batch(turn: Turn) -> tuple[Tensor, Tensor]:
    split = turn.job.data.train
    return model_inputs(split.x[:16], turn.job.config), split.y[:16]


@pytest.mark.parametrize("which", PAIR)
def test_gradients_reach_the_body_through_the_heads_of_others(which: str, turn: Turn) -> None:
    """Eqs. 6 and 7 by hand: a sum over the others, heads in eval mode; the own head learns from its own loss alone."""
    turn.run()
    loss, gradients = losses(turn, which, mu=0.7)
    model = arrived(turn)
    net = getattr(model, which).train()
    x, y = batch(turn)
    z = net.body(x)
    expected = cross_entropy(net.head(z), y)
    for other in ("plain", "textured"):
        foreign = deepcopy(net.head).eval()
        foreign.load_state_dict(part(turn.download, f"of.{other}/"))
        expected = expected + 0.7 * cross_entropy(foreign(z), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert gradients.keys() == {f"{which}.{name}" for name, _ in net.named_parameters()}  # none to the partner
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradients[f"{which}.{name}"], parameter.grad)
    _, without = losses(turn, which, mu=0.0)
    for name, gradient in gradients.items():
        if name.startswith(f"{which}.head."):
            assert torch.equal(gradient, without[name])
        elif name.endswith("conv1.weight"):
            assert not torch.allclose(gradient, without[name])


def test_heads_of_others_use_the_statistics_of_their_owners(turns: Callable[..., Turn]) -> None:
    """With batch norm in the classifier, its running statistics travel and are what it normalises by."""
    turn = turns(2)
    statistics = [name for name in turn.download if name.startswith("of.") and "running" in name]
    assert len(statistics) == 4  # of two other clients
    for name in statistics:
        owner, leaf = name.removeprefix("of.").split("/")
        assert not torch.equal(turn.download[name], turn.state[f"offline.head.{leaf}"]), owner
    turn.run()
    loss, _ = losses(turn, "online")
    shifted = {name: t + 1 if name in statistics else t for name, t in turn.download.items()}
    other = replace(turn, download=shifted, client=open_slot(turn.job))
    other.run()
    assert losses(other, "online")[0] != loss


def mutual(turn: Turn, which: str, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model = turn.client.model.requires_grad_(True)
    model.zero_grad(set_to_none=True)
    loss = turn.job.method.mutual(which, turn.client, x, y)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("which", PAIR)
def test_mutual_learning_by_hand(which: str, turns: Callable[..., Turn]) -> None:
    """Eqs. 4 and 5: KL(partner's copy || student), mean over images; labels play no part, the partner gets nothing."""
    turn = turns()
    turn.run()
    start = arrived(turn)
    load(turn.client.model, start.state_dict())
    turn.client.model.train()
    partner = getattr(start, "offline" if which == "online" else "online").eval()
    x, y = batch(turn)
    loss, gradients = mutual(turn, which, x, y)
    net = getattr(start, which).train()
    with torch.no_grad():
        p = partner(x).double().softmax(1)
    q = net(x).double().softmax(1)
    expected = (p * (p / q).log()).sum() / len(x)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-4, atol=1e-6)
    assert not torch.isclose(expected.detach(), (q * (q / p).log()).sum().detach() / len(x), rtol=1e-3)
    expected.backward()
    assert gradients.keys() == {f"{which}.{name}" for name, _ in net.named_parameters()}
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(gradients[f"{which}.{name}"], parameter.grad, rtol=1e-3, atol=1e-6)
    load(turn.client.model, arrived(turn).state_dict())
    turn.client.model.train()
    assert torch.equal(mutual(turn, which, x, (y + 1) % 10)[0], loss)


def test_nobody_learns_from_a_partner_that_says_the_same(tiny: Federation) -> None:
    """Teachers are in eval mode: at the first weights a student in eval mode has nothing to learn."""
    job = Job(FedCO2(), config_of(), loop_for(FedCO2(), config_of(), tiny).info, tiny.clients["plain"], 0)
    client = open_slot(job)
    client.model.eval()
    for which in PAIR:
        client.freeze(which, getattr(client.model, which))
    turn = Turn(job, {}, {}, client)
    x, y = batch(turn)
    for which in PAIR:
        loss, gradients = mutual(turn, which, x, y)
        assert abs(float(loss)) < 1e-6
        assert max(float(g.abs().max()) for g in gradients.values()) < 1e-6
    client.model.train()
    assert float(mutual(turn, "online", x, y)[0]) > 1e-4


def test_the_passes_of_a_round(turns: Callable[..., Turn]) -> None:
    """One epoch of mutual learning each, whatever `train.epochs`, and then E epochs each."""
    turn = turns()
    config = config_of(train={"epochs": 3})
    job = replace(turn.job, config=config)
    batches: list[tuple[str, int]] = []

    class Counting(FedCO2):
        def mutual(self, which: str, client: Client, x: Tensor, y: Tensor) -> Tensor:
            batches.append((f"mutual {which}", len(y)))
            return super().mutual(which, client, x, y)

        def adaptation(self, which: str, heads: int, client: Client, x: Tensor, y: Tensor) -> Tensor:
            assert heads == 2
            batches.append((which, len(y)))
            return super().adaptation(which, heads, client, x, y)

    client_round(replace(job, method=Counting()), turn.state, turn.download)
    epoch = [16, 16, 8]
    counts = [("mutual online", 1), ("mutual offline", 1), ("online", 3), ("offline", 3)]
    assert batches == [(name, size) for name, epochs in counts for size in epoch * epochs]


# --- records and cost ------------------------------------------------------------------------------------------------


def test_records_hold_the_accuracy_of_both_models_and_of_their_sum(tiny: Federation, tmp_path: Path) -> None:
    run = fp.train(tiny, method="fed-co2", rounds=2, out=tmp_path / "run")
    differ = 0
    for client_id, data in tiny.clients.items():
        score = run.record.rounds[-1].scores["received"]["test"][client_id]
        details = run.models[client_id].diagnostics(data.test.x)
        online, offline = (torch.as_tensor(details[f"scores/{which}"]) for which in PAIR)
        assert score.branches == {
            "online": int((online.argmax(1) == data.test.y).sum()),
            "offline": int((offline.argmax(1) == data.test.y).sum()),
        }
        assert score.correct == int(((online + offline).argmax(1) == data.test.y).sum())  # Eq. 3: logits are added
        assert score.diagnostics == {}
        differ += len({*score.branches.values(), score.correct}) > 1
    assert differ


@pytest.mark.parametrize("clients", [2, 4])
@pytest.mark.parametrize(("head_layers", "head"), [(1, HEAD), (2, WIDE_HEAD)])
def test_bytes_of_a_round(clients: int, head_layers: int, head: int) -> None:
    """What FedBN sends, and heads: all others' down, the own one up."""
    data = fp.make_federation("digits-skew", clients=clients, seed=0, samples=20)
    sections = {"model": {"name": "lenet-bn", "head_layers": head_layers}, "train": {"rounds": 1}}
    (record,) = train(FedCO2(), data, **deepcopy(sections)).seen.records[1:]
    (fedbn,) = train(FedBN(), data, **deepcopy(sections)).seen.records[1:]
    for client_id in data.names:
        assert record.down[client_id] == fedbn.down[client_id] + (clients - 1) * head
        assert record.up[client_id] == fedbn.up[client_id] + head


def test_a_client_owns_two_models() -> None:
    two = FedCO2().build(ARCH, "plain", NOBODY, 0)
    assert sum(p.numel() for p in two.parameters()) == 2 * sum(p.numel() for p in ARCH.model(0).parameters())


@pytest.mark.parametrize("method", [FedCO2(skip_first=True), FedCO2(personal="head", offline_start="own")])
def test_options_survive_a_resume(method: FedCO2, tiny: Federation) -> None:
    """Killed after a round and taken up again: the same bits, heads of absent clients and `skip_first` included."""
    sections = {"clients": {"participation": 0.67}, "train": {"rounds": 3}}
    straight = train(method, tiny, **deepcopy(sections))
    for after in (0, 1):
        loop = loop_for(method, config_of(**deepcopy(sections)), tiny)
        assert loop.run([], start=straight.seen.snapshots[after]) == "finished"
        assert same(loop.server, straight.loop.server)
        assert all(same(loop.states[client_id], straight.loop.states[client_id]) for client_id in tiny.names)
        assert all(same(model, straight.model(client_id)) for client_id, model in models_of(loop).items())
