"""FedDyn at its edges, by hand, and what its linear term is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedprism.config import Config, structure
from fedprism.engines.cuda.engine import CudaGraphs
from fedprism.engines.inprocess import InProcess
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Arch, Info, Method, State, Tensors
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.feddyn import FedDyn
from fedprism.methods.fedprox import FedProx
from fedprism.round.client import Job, open_slot
from tests.harness import (
    MLP,
    Slope,
    Trained,
    config_of,
    engine_run,
    loop_for,
    models_of,
    pixels,
    same,
    same_clients,
    train,
)

pytestmark = pytest.mark.slow


def network(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(("body.", "head."))}


def gradients(state: State) -> State:
    """What a client keeps, by the names of the network."""
    kept = {name.removeprefix("gradient.").replace("/", "."): t for name, t in state.items()}
    return {name: tensor for name, tensor in kept.items() if f"gradient.{name.replace('.', '/')}" in state}


# --- next to FedProx -------------------------------------------------------------------------------------------------


def test_the_first_round_trains_as_fedprox(tiny: Federation) -> None:
    """The linear terms are zero, so mu = alpha gives the same gradients; from the second round on they are not."""
    dynamic, proximal = train(FedDyn(alpha=0.3), tiny), train(FedProx(mu=0.3), tiny)
    other = train(FedProx(mu=0.4), tiny)
    for client_id in tiny.names:
        first, second = (network(models_of(dynamic.loop, r)[client_id]) for r in (1, 2))
        assert same(first, models_of(proximal.loop, 1)[client_id])
        assert not same(first, models_of(other.loop, 1)[client_id])
        assert not same(second, models_of(proximal.loop, 2)[client_id])


def test_the_linear_term_shifts_the_gradient_of_fedprox(tiny: Federation) -> None:
    """d/d theta of -<g_k, theta> is -g_k, on every parameter."""
    data, config = tiny.clients["plain"], config_of(model=MLP)
    x, y = torch.rand(8, *tiny.shape, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    found = []
    for method in (FedDyn(alpha=0.7), FedProx(mu=0.7)):
        info = loop_for(method, config, tiny).info
        client = open_slot(Job(method, config, info, data, 0))
        draw = torch.Generator().manual_seed(1)
        own = client.parameters()
        for name in ("anchor", "received"):
            client.keep(name, {n: p + 0.1 for n, p in own.items()})
        if isinstance(method, FedDyn):
            for tensor in client.model.gradient.tensors().values():
                tensor.copy_(torch.randn(tensor.shape, generator=draw))
            g = list(client.model.gradient.tensors().values())
        found.append(torch.autograd.grad(method.loss(client, x, y), list(own.values())))
    assert len(g) == len(found[0])
    for dynamic, proximal, shift in zip(*found, g, strict=True):
        torch.testing.assert_close(dynamic, proximal - shift)


# --- by hand ---------------------------------------------------------------------------------------------------------


class Line(nn.Module):
    """One weight, in a head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Slope()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class SlopeDyn(FedDyn):
    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        model = Line()
        model.gradient = Tensors({"head.w": torch.zeros(1)})
        return model


@dataclass(frozen=True)
class SlopeAvg(FedAvg):
    def build(self, arch: Arch, client_id: str | None, info: Info, seed: int) -> nn.Module:
        return Line()


SITES = pixels(up=([1, -1], 4), down=([-1, -1], 2))  # gradients s sigmoid(s w) with s = 2 and s = -6


def slopes(method: Method, lr: float = 0.125, clients: dict[str, Any] | None = None, **settings: Any) -> Trained:
    given = {"rounds": 2, "optimizer": {"lr": lr, "momentum": 0.0}, **settings}
    return train(method, SITES, model={"name": "mlp"}, train=given, clients=clients or {})


def test_two_rounds_by_hand() -> None:
    run = slopes(SlopeDyn(alpha=2.0))
    one, two = run.seen.snapshots[1:]
    # Round 1 at w = 0, one step of 1/8: theta = -1/8 and 3/8. g_k = -2 theta_k, h = -2/2 (3/8 - 1/8) = -1/4, and
    # w = 1/8 + 1/8. Images do not count: uniform.
    assert one.server["h.head.w"].tolist() == [-0.25]
    assert one.server["head.w"].tolist() == [0.25]
    kept = [float((one.clients[client_id] or {})["gradient.head/w"]) for client_id in ("up", "down")]
    assert kept == [0.25, -0.75]
    # Round 2 at w = 1/4: steps along the gradient less g_k; the pull is zero in the first step.
    up = 0.25 - 0.125 * (2 * torch.sigmoid(torch.tensor(0.5)) - 0.25)
    down = 0.25 - 0.125 * (-6 * torch.sigmoid(torch.tensor(-1.5)) + 0.75)
    h = -0.25 - (up - 0.25) - (down - 0.25)
    torch.testing.assert_close(two.server["h.head.w"], h.reshape(1))
    torch.testing.assert_close(two.server["head.w"], ((up + down) / 2 - h / 2).reshape(1))


def test_absent_clients_count_in_h() -> None:
    """h moves by alpha/N over all N clients; the mean is of those who took part."""
    run = slopes(SlopeDyn(alpha=2.0), clients={"participation": 0.5}, rounds=1)
    (client_id,) = run.seen.records[1].cohort
    theta = {"up": -0.125, "down": 0.375}[client_id]
    assert run.server["h.head.w"].tolist() == [-theta]
    assert run.server["head.w"].tolist() == [theta + theta / 2]


def test_alpha_by_samples_by_hand() -> None:
    """Of 4 and 2 images, 3 in the mean: alpha_k = alpha 3/4 and alpha 3/2, at the clients alone."""
    one = slopes(SlopeDyn(alpha=2.0, mean_samples=3.0)).seen.snapshots[1]
    assert one.server["h.head.w"].tolist() == [-0.25]  # as above
    assert one.server["head.w"].tolist() == [0.25]
    kept = [float((one.clients[client_id] or {})["gradient.head/w"]) for client_id in ("up", "down")]
    assert kept == [1.5 * 0.125, -3 * 0.375]


def test_alpha_by_samples_finds_the_minimum_of_the_loss_over_all_images() -> None:
    w = slopes(SlopeDyn(mean_samples=3.0), rounds=60, epochs=10).server["head.w"]
    pulls = 2 * torch.sigmoid(2 * w), -6 * torch.sigmoid(-6 * w)
    assert abs(float(4 * pulls[0] + 2 * pulls[1])) < 1e-3
    assert abs(float(pulls[0] + pulls[1])) > 0.1


def test_one_capture_serves_clients_of_different_alphas(unequal: Federation) -> None:
    config = structure({"train": {"rounds": 2, "batch_size": 8}}, Config)
    (one, _), (two, _) = (
        engine_run(kind, FedDyn(mean_samples=25), config, unequal) for kind in (InProcess, CudaGraphs)
    )
    assert two.engine.reasons == {}  # type: ignore[attr-defined]
    assert same(one.server, two.server)
    assert same_clients(one, two)


def test_finds_the_minimum_of_the_mean_loss_where_fedavg_does_not() -> None:
    """Many local steps draw FedAvg to a point between the clients' own; here the mean gradient vanishes."""

    def slope(run: Trained) -> float:
        w = run.server["head.w"]
        return abs(float(2 * torch.sigmoid(2 * w) - 6 * torch.sigmoid(-6 * w)) / 2)

    much: dict[str, Any] = {"rounds": 40, "epochs": 10, "lr": 0.25}
    assert slope(slopes(SlopeDyn(alpha=1.0), **much)) < 1e-4
    assert slope(slopes(SlopeAvg(), clients={"weighting": "uniform"}, **much)) > 0.02


# --- the server's state ----------------------------------------------------------------------------------------------


def test_h_is_the_mean_of_what_clients_keep(tiny: Federation) -> None:
    """Whoever takes part; zero for a client that never did."""
    run = train(FedDyn(alpha=0.5), tiny, clients={"participation": 0.34})
    seen = [gradients(state) for state in run.models.values()]
    assert len({record.cohort for record in run.seen.records[1:]}) > 1
    for name in seen[0]:
        total = torch.stack([state[name] for state in seen]).sum(0) / 3
        torch.testing.assert_close(run.server[f"h.{name}"], total, rtol=1e-4, atol=1e-6)
        assert total.abs().max() > 0


def test_running_statistics_are_averaged_and_nothing_else(tiny: Federation) -> None:
    run = train(FedDyn(), tiny, train={"rounds": 2})
    states = list(run.models.values())
    for name in ("body.bn1.running_mean", "body.bn1.running_var"):
        mean = torch.stack([state[name] for state in states]).mean(0)
        torch.testing.assert_close(run.server[name], mean)
        assert f"h.{name}" not in run.server
    weights = torch.stack([state["body.bn1.weight"] for state in states]).mean(0)
    assert not torch.allclose(run.server["body.bn1.weight"], weights)


def test_what_stays_at_home_has_no_dynamic_term(tiny: Federation) -> None:
    run = train(FedDyn(), tiny, train={"bn": "local"})
    assert not any(".bn" in name for name in run.server)
    for state in run.models.values():
        kept = gradients(state)
        assert all(bool(kept[n].any()) == (".bn" not in n) for n in kept if n.endswith("weight"))


def test_the_server_does_not_send_h(tiny: Federation) -> None:
    whole, plain = train(FedDyn(), tiny), train(FedAvg(), tiny)
    assert whole.seen.records[-1].down == plain.seen.records[-1].down
    assert whole.seen.records[-1].up == plain.seen.records[-1].up


def test_no_alpha_no_feddyn() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        structure({"alpha": 0.0}, FedDyn, "method")
