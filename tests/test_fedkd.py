"""FedKD: what its limit cases are, updates as factors, and that clients and server go on from the same student."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedprism.engines.inprocess import InProcess
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods import factors, leaves
from fedprism.methods.base import Arch, Client, Context, Draw, Info, Net, Parts, State
from fedprism.methods.factors import Updates, factored, multiplied, room
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedkd import FedKD
from fedprism.methods.local import Local
from fedprism.round.client import Job, client_model, open_slot
from fedprism.round.engine import Failure, Request, Result
from fedprism.round.events import Snapshot
from fedprism.store.serialize import size
from tests.harness import CPU, MLP, Trained, config_of, cut, loop_for, part, same, train

pytestmark = pytest.mark.slow

HALF: dict[str, Any] = {"T_start": 0.5, "T_end": 0.6}


# --- the two models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.67])
def test_a_teacher_that_learns_nothing_from_the_student_is_local(participation: float, tiny: Federation) -> None:
    run, alone = (train(method, tiny, clients={"participation": participation}) for method in (FedKD(lam=0.0), Local()))
    for client_id, state in run.models.items():
        assert same(part(state, "teacher."), alone.models[client_id])
    assert run.correct() == alone.correct()
    taught = train(FedKD(), tiny, clients={"participation": participation})
    assert not any(same(part(state, "teacher."), alone.models[c]) for c, state in taught.models.items())


def test_each_model_steps_by_its_own_loss(tiny: Federation) -> None:
    """CE + (KL + MSE) / (CE_t + CE_s) with gradients of its own parameters, the divisor a number."""
    method = FedKD(student="mlp")  # type: ignore[arg-type]
    loop = loop_for(method, config_of(), tiny)
    client = open_slot(Job(method, loop.config, loop.info, tiny.clients["plain"], 0))
    teacher, student, link = client.model.teacher, client.model.student, client.model.map
    x, y = torch.rand(8, *tiny.shape), torch.arange(8)

    def losses() -> tuple[Tensor, Tensor]:
        h_t, h_s = teacher.body(x), student.body(x)
        t, s = teacher.head(h_t), student.head(h_s)
        ce_t, ce_s = cross_entropy(t, y), cross_entropy(s, y)
        both, hidden = (ce_t + ce_s).detach(), mse_loss(h_t, link(h_s))
        kl_t = (s.softmax(1) * (s.log_softmax(1) - t.log_softmax(1))).sum(1).mean()
        kl_s = (t.softmax(1) * (t.log_softmax(1) - s.log_softmax(1))).sum(1).mean()
        return ce_t + (kl_t + hidden) / both, ce_s + (kl_s + hidden) / both

    method.loss(client, x, y).backward()  # type: ignore[no-untyped-call]
    for model, loss in zip((teacher, student), losses(), strict=True):
        expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, atol=1e-5, rtol=1e-4)
    assert link.weight.grad.abs().max() > 1e-5


@pytest.mark.parametrize("which", ["teacher", "student", "map"])
def test_what_they_teach_has_a_gradient(which: str, tiny: Federation) -> None:
    grads = []
    for lam in (0.0, 1.0):
        method = FedKD(lam=lam, student="mlp")  # type: ignore[arg-type]
        loop = loop_for(method, config_of(), tiny)
        client = open_slot(Job(method, loop.config, loop.info, tiny.clients["plain"], 0))
        method.loss(client, torch.ones(4, *tiny.shape), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
        grads.append(torch.cat([p.grad.flatten() for p in getattr(client.model, which).parameters()]))
    assert (grads[1] - grads[0]).abs().max() > 1e-4
    assert which != "map" or not grads[0].any()


def test_three_architectures_and_a_student_of_a_fourth(tiny: Federation) -> None:
    own: dict[str, Any] = {"name": "mlp", "hidden": [24]}
    models = {"features": "own", "per_client": ["lenet-bn", {"name": "mlp", "hidden": [32]}, own]}
    alone = train(Local(), tiny, model=models)
    for student, words in (("smallest", "mlp (hidden [24])"), ({"name": "mlp", "hidden": [12]}, "mlp (hidden [12])")):
        method = FedKD(student=student)  # type: ignore[arg-type]
        run = train(method, tiny, model=models)
        assert method.facts(run.loop.info)["student"].startswith(words)
        assert not any(same(part(s, "teacher."), alone.models[client_id]) for client_id, s in run.models.items())
        assert len({s["map.weight"].shape for s in run.models.values()}) == 3
        students = [part(state, "received.") for state in run.models.values()]
        assert all(same(students[0], other) for other in students)
    with pytest.raises(ConfigError, match="unknown model 'mpl'"):
        train(FedKD(student="mpl"), tiny)  # type: ignore[arg-type]


# --- factors ---------------------------------------------------------------------------------------------------------


def matrix(rows: int, columns: int, values: list[float], seed: int = 0) -> Tensor:
    """With these singular values."""
    rng = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64, generator=rng))
    v, _ = torch.linalg.qr(torch.randn(columns, len(values), dtype=torch.float64, generator=rng))
    product: Tensor = (u * torch.tensor(values)) @ v.T
    return product.float()


@pytest.mark.parametrize(("energy", "rank"), [(0.0, 1), (0.5, 1), (0.63, 1), (0.65, 2), (0.999, 2), (0.9999, 3)])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_smallest_rank_that_keeps_the_energy(energy: float, rank: int, shape: tuple[int, int]) -> None:
    """Of 4, 3 and 0.1 the first has 16 / 25.01 = 64 % of the energy, the first two have 99.96 %."""
    given = matrix(*shape, [4.0, 3.0, 0.1])
    sent = factored({"w": given}, energy)
    assert {name: tuple(t.shape) for name, t in sent.items()} == {
        "w|U": (shape[0], rank),
        "w|S": (rank,),
        "w|V": (rank, shape[1]),
    }
    torch.testing.assert_close(sent["w|S"], torch.tensor([4.0, 3.0, 0.1])[:rank])
    eye = torch.eye(rank)
    torch.testing.assert_close(sent["w|U"].T @ sent["w|U"], eye)
    torch.testing.assert_close(sent["w|V"] @ sent["w|V"].T, eye)
    u, s, v = torch.linalg.svd(given, full_matrices=False)
    torch.testing.assert_close(multiplied(sent, {})["w"], (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-5, rtol=1e-5)


def test_all_of_the_energy_is_the_matrix_itself() -> None:
    given = {"w": matrix(16, 40, [5.0, 1.0, 1e-3]), "conv": matrix(8, 27, [1.0, 0.5]).reshape(8, 3, 3, 3)}
    sent = factored(given, 1.0)
    assert size(sent) < size(given)
    for name, tensor in multiplied(sent, {}).items():
        assert tensor.shape == given[name].shape
        assert (tensor - given[name]).abs().max() < 1e-5


def test_factors_are_sent_only_where_they_are_smaller() -> None:
    full, low = torch.randn(9, 30, generator=torch.Generator().manual_seed(0)), matrix(9, 30, [1.0, 0.9])
    state = {"low": low, "full": full, "bias": torch.ones(9), "steps": torch.tensor(3), "nothing": torch.zeros(9, 30)}
    sent = factored(state, 0.95)
    assert {name.partition("|")[0] for name in sent if "|" in name} == {"low", "nothing"}
    assert sent["full"] is full
    assert list(sent)[:3] == ["full", "bias", "steps"]  # what is whole comes first
    back = multiplied(dict(sorted(sent.items())), {})
    assert back.keys() == state.keys()
    assert not back["nothing"].any()
    rank = 7  # 7 (9 + 30 + 1) is more than 270, 6 (9 + 30 + 1) is less
    for kept in (rank - 1, rank):
        values = [1.0] * kept + [0.0] * (9 - kept)
        assert ("w|S" in factored({"w": matrix(9, 30, values)}, 0.9999)) == (kept < rank)


def test_factors_of_something_larger_are_not_multiplied(tiny: Federation) -> None:
    """They would make 8 TB of an upload of 8 MB."""
    loop = loop_for(FedKD(), config_of(), tiny)
    name = next(name for name, tensor in loop.server.items() if name.startswith("update.") and tensor.ndim == 2)
    download = {name.removeprefix("update."): loop.server[name]}
    ctx = loop.context(1).replace(client_id="plain", download=download)
    long = torch.ones(10**6, 1)
    sent = {f"{name}|U": long, f"{name}|S": torch.ones(1), f"{name}|V": long.T}
    with pytest.raises(FedprismError, match=rf"the factors of '{name}' make \(1000000, 1000000\), expected \("):
        loop.method.decode(sent, ctx)
    unknown = {key.replace(name, "more"): tensor for key, tensor in sent.items()}
    with pytest.raises(FedprismError, match=r"the factors of 'more' make \(1000000, 1000000\), expected no such leaf"):
        loop.method.decode(unknown, ctx)


def test_what_goes_to_many_is_factored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given, made = matrix(12, 20, [4.0, 3.0, 0.1]), []
    plain = factors._decomposed

    def counted(tensor: Tensor, energy: float) -> Any:
        made.append(energy)
        return plain(tensor, energy)

    monkeypatch.setattr(factors, "_decomposed", counted)
    first, second = factored({"w": given}, 0.5), factored({"w": given}, 0.5)
    assert len(made) == 1
    assert all(second[name] is tensor for name, tensor in first.items())
    assert len(factored({"w": given}, 0.9)["w|S"]) == 2
    assert len(factored({"w": given.clone()}, 0.5)["w|S"]) == 1
    assert len(made) == 3


# --- the traffic -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole(FedKD):
    """Nothing is compressed."""

    def encode(self, state: State, ctx: Context) -> State:
        return state


def test_with_all_of_the_energy_nothing_is_lost(tiny: Federation) -> None:
    one, other = train(FedKD(T_start=1.0, T_end=1.0), tiny, model=MLP), train(Whole(), tiny, model=MLP)
    for client_id, state in one.models.items():
        for name, tensor in state.items():
            assert (tensor.double() - other.models[client_id][name].double()).abs().max() < 1e-5, name
    less = train(FedKD(**HALF), tiny, model=MLP)
    assert any((less.server[name] - t).abs().max() > 1e-3 for name, t in one.server.items() if name.startswith("old"))


def test_energy_grows_from_start_to_end(tiny: Federation) -> None:
    loop = loop_for(FedKD(), config_of(train={"rounds": 30}), tiny)
    method = loop.method
    assert isinstance(method, FedKD)
    energies = [method.energy(loop.context(round)) for round in (0, 14, 29, 30)]
    assert energies == pytest.approx([0.951, 0.965, 0.98, 0.98])


def test_the_student_comes_whole_once_and_then_as_updates(tiny: Federation) -> None:
    run = train(FedKD(), tiny, train={"rounds": 3})
    whole = size({name: t for name, t in run.server.items() if name.startswith("old.")})
    first, *later = run.seen.records[1:]
    assert set(first.down.values()) == {whole}
    assert all(0 < sent < whole for record in later for sent in record.down.values())
    assert all(0 < sent < whole for record in run.seen.records[1:] for sent in record.up.values())
    more = train(FedKD(T_start=0.5, T_end=0.5), tiny, train={"rounds": 3}).seen.records
    assert all(b.up[c] < a.up[c] for a, b in zip(run.seen.records[1:], more[1:], strict=True) for c in tiny.names)


def received(
    run: Trained, federation: Federation, at: Snapshot, client_id: str, state: State | None, to: str | None
) -> State:
    """A client's model when it has been sent what is meant for `to` after a round."""
    loop = run.loop
    ctx = loop.context(at.round).replace(client_id=client_id)
    download = loop.method.encode(loop.method.send(at.server, to, ctx), ctx)
    job = Job(loop.method, loop.config, loop.info, federation.clients[client_id], ctx.round)
    return client_model(job, state, download)


@pytest.mark.parametrize(
    "clients",
    [
        {},
        {"participation": 0.67},
        {"participation": 0.67, "broadcast": "all"},
        {"participation": 0.34, "train": "all"},
        {"dropout": 0.4},
        {"participation": 0.34, "train": "all", "dropout": 0.5},
    ],
    ids=["all", "some", "broadcast", "trained", "dropped", "trained and dropped"],
)
@pytest.mark.filterwarnings("ignore:in round . every client failed")
def test_all_have_one_student_whatever_was_lost_or_missed(clients: dict[str, Any], tiny: Federation) -> None:
    run = train(FedKD(T_start=1.0, T_end=0.2), tiny, seed=3, clients=clients, model=MLP, train={"rounds": 5})
    method = run.loop.method
    assert isinstance(method, FedKD)
    for at in run.seen.snapshots:
        student = method.moved(at.server, run.loop.context(at.round))
        # Where nobody is averaged, the same update is sent in a later round, too.
        assert all(same(method.moved(at.server, run.loop.context(round)), student) for round in (0, 4))
        for client_id in tiny.names:
            once = received(run, tiny, at, client_id, at.clients[client_id], to=client_id)
            assert same({name: once[name] for name in student}, student)
            assert same(received(run, tiny, at, client_id, once, to=client_id), once)  # sent again, it changes nothing
        stranger = received(run, tiny, at, "plain", None, to=None)
        assert same({name: stranger[name] for name in student}, student)
    if clients.keys() >= {"train", "dropout"}:  # twice in a row nobody is averaged, and one trains who has the update
        *_, before, last = run.seen.records
        assert not {*before.up, *last.up}
        assert any(has and c in before.logs for c, has in zip(tiny.names, run.server["has"], strict=True))


@dataclass(frozen=True)
class InUpdates(Updates):
    """FedAvg whose traffic is updates."""

    weighting = "uniform"

    def energy(self, ctx: Context) -> float:
        return 1.0

    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = arch.model(seed)
        return Parts(net=model, received=room(net=model))

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "net")

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(client.model.net(x), y)

    def predict(self, model: Net, x: Tensor, draw: Draw) -> Tensor:
        scores: Tensor = model.net(x)
        return scores


@pytest.mark.parametrize("participation", [1.0, 0.67])
def test_the_mean_of_updates_is_the_update_of_the_mean(participation: float, tiny: Federation) -> None:
    sites = cut(tiny, (40, 25, 10))
    clients = {"participation": participation, "weighting": "uniform"}
    one, other = train(InUpdates(), sites, clients=clients), train(FedAvg(), sites, clients=clients)
    student = one.loop.method.moved(one.server, one.loop.context(3))  # type: ignore[attr-defined]
    for name, tensor in other.server.items():
        torch.testing.assert_close(student[f"net.{name}"], tensor, atol=1e-5, rtol=1e-4)


def test_a_server_that_steps_is_refused(tiny: Federation) -> None:
    """Clients add the update that they were sent; a step of the server's own would never reach them."""
    with pytest.raises(ConfigError, match=r"server.lr is 0.5, but fedkd .* what it shares is the student's updates"):
        loop_for(FedKD(), config_of(server={"lr": 0.5}), tiny)


def test_an_upload_that_cannot_be_decoded_is_refused_by_name(tiny: Federation) -> None:
    """Factors that do not fit together: that client is left out, and the round goes on."""

    class Spoilt(InProcess):
        def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
            for client_id, answer in super().train(round, requests):
                assert isinstance(answer, Result)
                cut = {name: tensor.flatten()[:1] for name, tensor in answer.upload.items()}
                yield client_id, replace(answer, upload=cut) if client_id == "tinted" else answer

    loop = loop_for(FedKD(), config_of(train={"rounds": 2}), tiny)
    loop.engine = Spoilt(loop.method, loop.config, loop.info, tiny, CPU)
    record, diverged = loop.one_round(0)
    assert not diverged
    assert list(record.failed) == ["tinted"]
    assert set(record.up) == set(tiny.names) - {"tinted"}
