"""Fine-tuned FedAvg: it trains as FedAvg does, and what is fine-tuned before a test is thrown away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from fedprism.config import Config, structure
from fedprism.engines.client import Job, client_evaluate, make_info, make_now, open_slot, take
from fedprism.engines.loop import Loop
from fedprism.engines.passes import learning_rate, run_pass
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Method, State
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.finetune import FineTune
from tests.helpers import Collect, loop_for, same

ROUNDS = 2
BOTH = ("received", "adapted")


def config_of(**sections: Any) -> Config:
    train = {"rounds": ROUNDS, "batch": 16, **sections.pop("train", {})}
    return structure({"train": train, "evaluate": {"splits": ["test"], "moments": BOTH}, **sections}, Config)


def trained(method: Method, federation: Federation, **sections: Any) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return loop, seen


def tuned(method: Method, federation: Federation, **sections: Any) -> tuple[State, State]:
    """The first model of a client before and after its adaptation, as if all rounds were over."""
    config, client = config_of(**sections), "tinted"
    info = make_info(config, federation.names, federation.classes, federation.shape)
    job = Job(method, config, info, federation.clients[client], config.train.rounds)
    me = open_slot(job)
    now, before = make_now(method, config, info, me.model, job.round, client, data=job.data), take(me.model)
    for each in method.adapt(me, now):
        for _ in run_pass(me, each, now, config):
            pass
    return before, take(me.model)


def changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def near(a: State, b: State) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-7) for name in a)


def test_it_trains_as_fedavg_however_it_is_tuned(tiny: Federation) -> None:
    """What is fine-tuned is thrown away; without epochs there is nothing to throw away."""
    average, plain = trained(FedAvg(), tiny)
    for method in (FineTune(epochs=0), FineTune(lr=0.1)):
        loop, seen = trained(method, tiny)
        assert same(loop.server, average.server)
        assert all(same(state, average.states[client]) for client, state in loop.states.items())
        for record, other in zip(seen.records, plain.records, strict=True):
            assert record.scores["received"] == other.scores["received"]
            assert (record.scores["adapted"] == record.scores["received"]) == (method.epochs == 0)
            assert record.logs == other.logs


@pytest.mark.parametrize("tunes", ["all", "head", "body"])
def test_only_what_is_tuned_moves(tunes: str, tiny: Federation) -> None:
    """Batch norm's statistics, too: in a part that is not tuned they stay."""
    model = {"name": "lenet-bn", "head_layers": 2}  # batch norm in both parts
    before, after = tuned(FineTune(tunes=tunes), tiny, model=model)  # type: ignore[arg-type]
    moved = changed(before, after)
    part = {name for name in before if tunes == "all" or name.startswith(f"{tunes}.")}
    assert moved <= part
    assert {name for name in part if not name.endswith(".bias")} <= moved
    assert any("running_mean" in name for name in moved)


def test_it_is_printed_as_adapted() -> None:
    assert METHODS["finetune"].moment == "adapted"


def test_the_schedule_does_not_slow_it_down(tiny: Federation) -> None:
    """After the last round a cosine is all but over."""
    cosine = {"rounds": 40, "schedule": "cosine"}
    full = config_of().train.optimizer.lr
    assert learning_rate(config_of(train=cosine).train, 40) < 0.01 * full
    _, slowed = tuned(FineTune(), tiny, train=cosine)
    before, after = tuned(FineTune(), tiny, train={"rounds": 40})
    assert same(slowed, after)
    assert changed(before, after)


def test_the_rate_is_a_tenth_unless_it_is_said(tiny: Federation) -> None:
    _, tenth = tuned(FineTune(), tiny)
    assert near(tenth, tuned(FineTune(lr=0.005), tiny)[1])
    assert not near(tenth, tuned(FineTune(lr=0.05), tiny)[1])
    assert near(tuned(FineTune(), tiny, train={"optimizer": {"lr": 0.5}})[1], tuned(FineTune(lr=0.05), tiny)[1])


def test_a_stranger_is_tuned_as_everybody_is(tiny: Federation) -> None:
    """What it has kept does not matter, because all of the model is received."""
    loop, _ = trained(FineTune(), tiny)
    job = Job(loop.method, loop.config, loop.info, tiny.clients["tinted"], ROUNDS)
    down = loop.method.send(loop.server, None, loop.now(ROUNDS))
    scores = client_evaluate(job, None, down)
    assert scores["adapted"]["test"].loss < scores["received"]["test"].loss
    assert scores == client_evaluate(job, loop.states["tinted"], down)
