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
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedprism import keys
from fedprism.config import Config, structure
from fedprism.engines.client import Job, _adapt, _enter, finish, open_slot
from fedprism.engines.loop import Loop, draw_cohort
from fedprism.engines.noise import Noise, keyed_draw
from fedprism.engines.passes import batches, inputs
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.models import MODELS
from fedprism.models.base import Block, Family
from tests.helpers import CPU, Collect, cut, loop_for
from tests.reference.common import Setup

pytestmark = pytest.mark.no_cover  # recorded steps run every method, too, and there lines are counted
CLOSE = 1e-9  # absolute and relative
FAR = 1e-3
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {"name": "smooth", "norm": False},
    "norm": {"name": "smooth"},
    "norm-2": {"name": "smooth", "head_layers": 2},  # batch norm in the head too
}


@dataclass(frozen=True)
class Smooth(Family):
    """A convolution and two fully connected layers without a kink, with or without batch norm."""

    norm: bool = True

    def blocks(self, classes: int, shape: tuple[int, int, int]) -> list[Block]:
        width = 8 * (shape[1] // 4) * (shape[2] // 4)
        blocks: list[Block | None] = [
            ("conv", nn.Conv2d(shape[0], 8, 5, padding=2)),
            ("bn1", nn.BatchNorm2d(8)) if self.norm else None,
            ("tanh1", nn.Tanh()),
            ("pool", nn.AvgPool2d(4)),
            ("flatten", nn.Flatten()),
            ("fc1", nn.Linear(width, 16)),
            ("bn2", nn.BatchNorm1d(16)) if self.norm else None,
            ("tanh2", nn.Tanh()),
            ("fc2", nn.Linear(16, classes)),
        ]
        return [block for block in blocks if block is not None]


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
        "train": {"rounds": 3, "epochs": 2, "batch": 11, "optimizer": {"lr": 0.05, "momentum": 0.5}},
        "clients": {"participation": participation},
        "evaluate": {"every": 3},
    }
    return structure(raw, Config)


def module_of(name: str) -> ModuleType:
    return import_module(f"tests.reference.{name.replace('-', '_')}")


def hyper_of(name: str) -> dict[str, Any]:
    """The settings with which a method is compared to its reference."""
    return dict(getattr(module_of(name), "HYPER", {}))


def variants() -> Iterator[Any]:
    """The settings beside `HYPER` that a reference says it knows (`VARIANTS`): ablations and options."""
    for name in METHODS:
        for hyper in getattr(module_of(name), "VARIANTS", ()):
            yield pytest.param(name, hyper, id=f"{name}-" + ",".join(f"{k}={v}" for k, v in hyper.items()))


def trained(name: str, config: Config, federation: Federation, hyper: dict[str, Any] | None = None) -> Loop:
    """The package's run."""
    settings = hyper_of(name) if hyper is None else hyper
    loop = loop_for(structure(settings, METHODS[name], "method"), config, federation)
    assert loop.run([]) == "finished"
    return loop


def scores_of(loop: Loop, client: str) -> Tensor:
    """The client's scores `[images, classes]` on its test images after the last round, at the reference's moment."""
    method, info, config = loop.method, loop.info, loop.config
    rounds, data = config.train.rounds, loop.federation.clients[client]
    down = method.send(loop.server, client, replace(loop.now(rounds), client=client))
    job = Job(method, config, info, data, rounds)
    me = open_slot(job)
    now = _enter(me, job, loop.states[client], down)
    if getattr(module_of(method.id), "MOMENT", "received") == "adapted":
        finish(_adapt(me, job, now))
    me.model.eval()
    with torch.no_grad():
        return method.predict(me.model, inputs(data.test.x, config), keyed_draw(torch.device("cpu"), "test"))


def reference(name: str, hyper: dict[str, Any], loop: Loop) -> list[Tensor]:
    """The reference's scores of every client, for the same federation and configuration."""
    config, info = loop.config, loop.info
    parts = list(loop.federation.clients.values())
    train = [(inputs(data.train.x, config), data.train.y) for data in parts]

    def in_order(round: int, client: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
        order = keys.generator(info.seed, "batches", "", round, info.clients[client], epoch)
        x, y = train[client]
        return [(x[rows], y[rows]) for rows in batches(len(y), config.train.batch, "keep", 2, order)]

    def noise(round: int, client: int, of: str, step: int, what: str, shape: tuple[int, ...]) -> Tensor:
        epoch, step = divmod(step, len(in_order(round, client, 0)))  # a reference counts on over its epochs
        return Noise(CPU, info.seed, "noise", round, info.clients[client], of, epoch).at(step)(what, *shape)

    setup = Setup(
        models=[info.arch.model(info.seed) for _ in parts],
        batches=in_order,
        train=train,
        rounds=config.train.rounds,
        epochs=config.train.epochs,
        lr=config.train.optimizer.lr,
        momentum=config.train.optimizer.momentum,
        samples=[len(y) for _, y in train],
        participants=lambda round: [info.clients.index(c) for c in draw_cohort(config.clients, info, round)],
        built=[loop.method.build(info.arch, client, info, info.seed) for client in info.clients],
        noise=noise,
        server=loop.method.server(loop.models[info.arch], loop.now(0)),
    )
    scorers = module_of(name).run(setup, **hyper)
    return [score(inputs(data.test.x, config)) for score, data in zip(scorers, parts, strict=True)]


def test_some_rounds_miss_some_clients(unequal: Federation) -> None:
    """Of the partial participation below: all cohorts are of two, and not the same two."""
    loop = loop_for(METHODS["fedavg"](), config_of("plain", 0.67), unequal)
    cohorts = {draw_cohort(loop.config.clients, loop.info, round) for round in range(3)}
    assert {len(cohort) for cohort in cohorts} == {2}
    assert len(cohorts) > 1


@pytest.mark.parametrize(("model", "participation"), [*((model, 0.67) for model in NETWORKS), ("norm", 1.0)])
@pytest.mark.parametrize("name", list(METHODS))
def test_method_agrees_with_its_reference(name: str, model: str, participation: float, unequal: Federation) -> None:
    loop = trained(name, config_of(model, participation), unequal)
    expected = reference(name, hyper_of(name), loop)
    for client, scores in zip(loop.info.clients, expected, strict=True):
        torch.testing.assert_close(scores_of(loop, client), scores, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(("name", "hyper"), variants())
def test_options_agree_with_the_reference(name: str, hyper: dict[str, Any], unequal: Federation) -> None:
    loop = trained(name, config_of("norm", 0.67), unequal, hyper)
    for client, scores in zip(loop.info.clients, reference(name, hyper, loop), strict=True):
        torch.testing.assert_close(scores_of(loop, client), scores, rtol=CLOSE, atol=CLOSE)


def test_some_updates_enter_a_raw_subspace(unequal: Federation) -> None:
    """Of FedSCE's options above: `raw` takes an update in when it is longer than 1, and that client trains again."""
    method = structure({"p": 20, "mu": 33.0}, METHODS["fedsce"], "method")
    loop, seen = loop_for(method, config_of("norm", 0.67), unequal), Collect()
    assert loop.run([seen]) == "finished"
    first, last = seen.records[1].logs["tinted"], seen.records[3].logs["tinted"]
    assert first["update"] > 1
    assert first["subspace/used"] < 0.1 < 0.9 < first["subspace/next"]
    assert last["subspace/used"] > 10 * first["subspace/used"]


@pytest.mark.parametrize("name", list(METHODS))
def test_tolerances_tell_methods_apart(name: str, unequal: Federation) -> None:
    """A relative, or a hyper-parameter that is a little off, is far away."""
    loop = trained(name, config_of("norm-2", 0.67), unequal)
    other, hyper = module_of(name).RELATIVE
    pairs = zip(loop.info.clients, reference(other, hyper, loop), strict=True)
    assert max(float((scores_of(loop, client) - scores).abs().max()) for client, scores in pairs) > FAR
