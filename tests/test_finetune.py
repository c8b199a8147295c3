"""Fine-tuned FedAvg: it trains as FedAvg does, and what is fine-tuned before a test is thrown away."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedprism.config import Config, structure
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Method, State
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.finetune import FineTune
from fedprism.round.client import Job, client_evaluate
from fedprism.round.loop import Loop
from fedprism.schedules import learning_rate
from tests.harness import Collect, changed, loop_for, models_of, same, tuned

pytestmark = pytest.mark.slow

ROUNDS = 2
BOTH = ("received", "adapted")


def config_of(**sections: Any) -> Config:
    train = {"rounds": ROUNDS, "batch_size": 16, **sections.pop("train", {})}
    return structure({"train": train, "evaluate": {"splits": ["test"], "moments": BOTH}, **sections}, Config)


def trained(method: Method, federation: Federation, **sections: Any) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return loop, seen


def near(a: State, b: State) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-7) for name in a)


def test_it_trains_as_fedavg_however_it_is_tuned(tiny: Federation) -> None:
    """What is fine-tuned is thrown away; without epochs there is nothing to throw away."""
    average, plain = trained(FedAvg(), tiny)
    for method in (FineTune(epochs=0), FineTune(lr=0.1)):
        loop, seen = trained(method, tiny)
        assert same(loop.server, average.server)
        assert all(same(state, models_of(average)[client_id]) for client_id, state in models_of(loop).items())
        for record, other in zip(seen.records, plain.records, strict=True):
            assert record.scores["received"] == other.scores["received"]
            assert (record.scores["adapted"] == record.scores["received"]) == (method.epochs == 0)
            assert record.logs == other.logs


@pytest.mark.parametrize("tunes", ["all", "head", "body"])
def test_only_what_is_tuned_moves(tunes: str, tiny: Federation) -> None:
    """Batch norm's statistics, too: in a part that is not tuned they stay."""
    model = {"name": "lenet-bn", "head_layers": 2}  # batch norm in both parts
    before, after = tuned(FineTune(tunes=tunes), tiny, config_of(model=model))  # type: ignore[arg-type]
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
    _, slowed = tuned(FineTune(), tiny, config_of(train=cosine))
    before, after = tuned(FineTune(), tiny, config_of(train={"rounds": 40}))
    assert same(slowed, after)
    assert changed(before, after)


def test_the_rate_is_a_tenth_unless_it_is_said(tiny: Federation) -> None:
    large = {"optimizer": {"lr": 0.5}}
    _, tenth = tuned(FineTune(), tiny, config_of())
    assert near(tenth, tuned(FineTune(lr=0.005), tiny, config_of())[1])
    assert not near(tenth, tuned(FineTune(lr=0.05), tiny, config_of())[1])
    _, tenth_of_large = tuned(FineTune(), tiny, config_of(train=large))
    assert near(tenth_of_large, tuned(FineTune(lr=0.05), tiny, config_of())[1])


def test_a_stranger_is_tuned_as_everybody_is(tiny: Federation) -> None:
    """What it has kept does not matter, because all of the model is received."""
    loop, _ = trained(FineTune(), tiny)
    job = Job(loop.method, loop.config, loop.info, tiny.clients["tinted"], ROUNDS)
    download = loop.method.send(loop.server, None, loop.context(ROUNDS))
    scores = client_evaluate(job, None, download)
    assert scores["adapted"]["test"].loss < scores["received"]["test"].loss
    assert scores == client_evaluate(job, models_of(loop)["tinted"], download)
