"""FedBABU: its head keeps its first weights until it is fine-tuned for a test, and never travels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.config import Config, structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Client, Context, Method, Net, State, leaves
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedbabu import FedBABU
from fedprism.methods.fedper import FedPer
from fedprism.methods.finetune import FineTune
from fedprism.round.client import Job, client_evaluate, client_round, open_slot
from fedprism.round.loop import Loop
from tests.harness import Collect, changed, loop_for, models_of, same, tuned

pytestmark = pytest.mark.slow

ROUNDS = 2
TWO = {"name": "lenet-bn", "head_layers": 2}  # batch norm in the head too


def config_of(**sections: Any) -> Config:
    evaluate = {"splits": ["test"], "moments": ["received", "adapted", "global"]}
    return structure({"train": {"rounds": ROUNDS, "batch_size": 16}, "evaluate": evaluate, **sections}, Config)


def trained(method: Method, federation: Federation, **sections: Any) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return loop, seen


def of(state: State | None, part: str) -> State:
    assert state is not None
    return {name: tensor for name, tensor in state.items() if name.startswith(f"{part}.")}


def job_of(loop: Loop, federation: Federation, client_id: str) -> Job:
    return Job(loop.method, loop.config, loop.info, federation.clients[client_id], ROUNDS)


@pytest.mark.parametrize("model", ["lenet-bn", TWO], ids=["one layer", "two layers"])
def test_every_head_stays_as_it_was_drawn(model: Any, tiny: Federation) -> None:
    loop, seen = trained(FedBABU(), tiny, model=model)
    first = loop.info.arch.model(loop.info.seed).state_dict()
    for client_id, state in models_of(loop).items():
        assert same(of(state, "head"), of(first, "head")), client_id
        assert not same(of(state, "body"), of(first, "body"))
    assert all(record.scores["adapted"] != record.scores["received"] for record in seen.records)


def test_the_head_has_a_gradient_in_the_adaptation_alone(tiny: Federation) -> None:
    asked: list[bool] = []

    @dataclass(frozen=True)
    class Watched(FedBABU):
        def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
            asked.extend(parameter.requires_grad for parameter in client.model.head.parameters())
            return super().loss(client, x, y)

    trained(Watched(epochs=0), tiny)
    assert set(asked) == {False}
    asked.clear()
    moved = changed(*tuned(Watched(), tiny, config_of()))
    assert set(asked) == {True}
    assert {"head.fc2.weight", "head.fc2.bias"} <= moved


def test_it_is_printed_as_adapted() -> None:
    assert METHODS["fedbabu"].moment == "adapted"


def test_without_epochs_it_is_tested_as_received(tiny: Federation) -> None:
    """And what is kept is the same as with them."""
    (still, seen), (loop, _) = trained(FedBABU(epochs=0), tiny), trained(FedBABU(lr=0.1), tiny)
    for record in seen.records:
        assert record.scores["adapted"] == record.scores["received"] == record.scores["global"]
    assert same(still.server, loop.server)
    assert all(same(state, models_of(still)[client_id]) for client_id, state in models_of(loop).items())


def test_to_send_the_head_too_would_change_nothing(tiny: Federation) -> None:
    @dataclass(frozen=True)
    class Whole(FedBABU):
        def shared(self, model: Net, ctx: Context) -> Collection[str]:
            return leaves.everything(model)

    (less, _), (more, _) = trained(FedBABU(epochs=0), tiny), trained(Whole(epochs=0), tiny)
    assert set(less.server) == set(of(more.server, "body"))
    for name, tensor in less.server.items():
        torch.testing.assert_close(tensor, more.server[name])
    result = client_round(job_of(less, tiny, "tinted"), None, less.server)
    assert set(result.upload) == set(less.server)  # type: ignore[union-attr]


@pytest.mark.parametrize("other", [FedAvg(), FedPer()], ids=lambda method: method.id)
def test_a_head_that_learns_makes_another_body(other: Method, tiny: Federation) -> None:
    (loop, _), (relative, _) = trained(FedBABU(epochs=0), tiny), trained(other, tiny)
    assert not any(torch.equal(loop.server[n], relative.server[n]) for n in loop.server if n.endswith(".weight"))


def test_a_stranger_has_the_same_head(tiny: Federation) -> None:
    """It is sent the body alone; the head comes from the seed, so it is tested as somebody who was there."""
    loop, _ = trained(FedBABU(), tiny)
    download = loop.method.send(loop.server, None, loop.context(ROUNDS))
    assert set(download) == set(of(models_of(loop)["tinted"], "body"))
    job = job_of(loop, tiny, "tinted")
    assert same(of(open_slot(job).model.state_dict(), "head"), of(models_of(loop)["plain"], "head"))
    assert client_evaluate(job, None, download) == client_evaluate(job, loop.states["tinted"], download)


def test_a_model_without_a_body_is_refused(tiny: Federation) -> None:
    """It would train nothing, without a word."""
    flat = {"name": "mlp", "head_layers": "all"}
    with pytest.raises(ConfigError, match="the body is to be trained, but this model's has no weights"):
        loop_for(FedBABU(), config_of(model=flat), tiny)
    with pytest.raises(ConfigError, match="the body is to be trained"):
        trained(FineTune(tunes="body"), tiny, model=flat)
    assert trained(FineTune(), tiny, model=flat)
