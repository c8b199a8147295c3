"""Every method against its independent reference in `tests/reference/`, which was written from the paper's equations.

Both are given the same first weights, batches in the same order, noise and participants; what is compared is every
client's scores on images that nobody trained on. Both run in double precision: they sum in different orders (a mean as
a sum of shares or of scaled parts, SCAFFOLD's correction as a term of the loss or of the gradient), and training turns
the rounding of float32 into 1e-5 of a score, but that of float64 into less than 1e-9. The network is smooth, because at
a kink (ReLU, maximum pooling) a rounding error can turn a gradient. `test_tolerances_tell_methods_apart` shows that the
mistakes one could make are a million times larger.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedprism.config import Config, structure
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.models import MODELS
from fedprism.round.loop import Loop, draw_cohort
from tests.harness import CLOSE, FAR, SIX, Collect, Smooth, by_method, cut, loop_for, module_of, reference, scores_of

pytestmark = [
    pytest.mark.no_cover,
    pytest.mark.full,
]  # captured steps run every method, too, and there lines are counted
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {"name": "smooth", "norm": False},
    "norm": {"name": "smooth"},
    "norm-2": {"name": "smooth", "head_layers": 2},  # batch norm in the head too
}


@pytest.fixture(scope="module", autouse=True)
def _smooth_networks_in_double(tiny: Federation) -> Iterator[None]:
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS._items, "smooth", Smooth)
        torch.set_default_dtype(torch.float64)
        yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def unequal(tiny: Federation) -> Federation:
    """Clients of 40, 23 and 9 training images; the last lacks some of the ten classes."""
    federation = cut(tiny, (40, 23, 9))
    assert (federation.clients["textured"].class_counts() == 0).any()
    return federation


def config_of(model: str, participation: float) -> Config:
    raw = {
        "seed": 3,
        "model": NETWORKS[model],
        "train": {"rounds": 3, "epochs": 2, "batch_size": 11, "optimizer": {"lr": 0.05, "momentum": 0.5}},
        "clients": {"participation": participation},
        "evaluate": {"every": 3},
    }
    return structure(raw, Config)


def hyper_of(name: str) -> dict[str, Any]:
    """The settings with which a method is compared to its reference."""
    return dict(getattr(module_of(name), "HYPER", {}))


def variants() -> Iterator[Any]:
    """The settings beside `HYPER` that a reference says it knows (`VARIANTS`): ablations and options."""
    for name in METHODS:
        for hyper in getattr(module_of(name), "VARIANTS", ()):
            words = ",".join(f"{k}={v}" for k, v in hyper.items())
            yield pytest.param(name, hyper, id=f"{name}-{words}", marks=() if name == "fedcp" else pytest.mark.slow)


def agreements() -> Iterator[Any]:
    """Every method with one network; six methods with all of them, the others in `make test-slow`."""
    for name in METHODS:
        for model, participation in (*((model, 0.67) for model in NETWORKS), ("norm", 1.0)):
            usual = name in SIX or (model, participation) == ("norm", 0.67)
            yield pytest.param(name, model, participation, marks=() if usual else pytest.mark.slow)


def trained(name: str, config: Config, federation: Federation, hyper: dict[str, Any] | None = None) -> Loop:
    """The package's run."""
    settings = hyper_of(name) if hyper is None else hyper
    loop = loop_for(structure(settings, METHODS[name], "method"), config, federation)
    assert loop.run([]) == "finished"
    return loop


def test_some_rounds_miss_some_clients(unequal: Federation) -> None:
    """Of the partial participation below: all cohorts are of two, and not the same two."""
    loop = loop_for(METHODS["fedavg"](), config_of("plain", 0.67), unequal)
    cohorts = {draw_cohort(loop.config.clients, loop.info, round) for round in range(3)}
    assert {len(cohort) for cohort in cohorts} == {2}
    assert len(cohorts) > 1


@pytest.mark.parametrize(("name", "model", "participation"), agreements())
def test_method_agrees_with_its_reference(name: str, model: str, participation: float, unequal: Federation) -> None:
    loop = trained(name, config_of(model, participation), unequal)
    expected = reference(name, hyper_of(name), loop)
    for client_id, scores in zip(loop.info.clients, expected, strict=True):
        torch.testing.assert_close(scores_of(loop, client_id), scores, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("name", "hyper"), variants())
def test_options_agree_with_the_reference(name: str, hyper: dict[str, Any], unequal: Federation) -> None:
    loop = trained(name, config_of("norm", 0.67), unequal, hyper)
    for client_id, scores in zip(loop.info.clients, reference(name, hyper, loop), strict=True):
        torch.testing.assert_close(scores_of(loop, client_id), scores, rtol=CLOSE, atol=CLOSE)


def test_some_updates_enter_a_raw_subspace(unequal: Federation) -> None:
    """Of FedSCE's options above: `raw` takes an update in when it is longer than 1, and that client trains again."""
    method = structure({"p": 20, "mu": 33.0}, METHODS["fedsce"], "method")
    loop, seen = loop_for(method, config_of("norm", 0.67), unequal), Collect()
    assert loop.run([seen]) == "finished"
    first, last = seen.records[1].logs["tinted"], seen.records[3].logs["tinted"]
    assert first["update"] > 1
    assert first["subspace/used"] < 0.1 < 0.9 < first["subspace/next"]
    assert last["subspace/used"] > 10 * first["subspace/used"]


@pytest.mark.parametrize("name", by_method())
def test_tolerances_tell_methods_apart(name: str, unequal: Federation) -> None:
    """A relative, or a hyper-parameter that is a little off, is far away."""
    loop = trained(name, config_of("norm-2", 0.67), unequal)
    other, hyper = module_of(name).RELATIVE
    pairs = zip(loop.info.clients, reference(other, hyper, loop), strict=True)
    assert max(float((scores_of(loop, client_id) - scores).abs().max()) for client_id, scores in pairs) > FAR
