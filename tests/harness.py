"""Helpers that several test files share.

`fingerprint` says whether two runs computed the same numbers. As a program it records the fingerprints of every
registered method and of a mixed federation, or compares with those recorded before a change:

    python -m tests.harness before.json
    python -m tests.harness after.json --against before.json [--set train.epochs=2 ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedprism import keys
from fedprism.config import Config, structure
from fedprism.conformance.spies import Spy
from fedprism.engines import EngineFactory
from fedprism.engines.processes.engine import Processes
from fedprism.engines.processes.handle import Pool
from fedprism.federation import Federation, Split, build_federation
from fedprism.methods import METHODS, make
from fedprism.methods.base import Method, State
from fedprism.methods.leaves import tensors
from fedprism.methods.server_optimizer import method_part
from fedprism.methods.states import copy_of
from fedprism.models.base import Block, Family
from fedprism.records import RunDirectory, RunRecord
from fedprism.records.metrics import read_rounds
from fedprism.round.client import Job, adapt, arrive, client_round, make_context, make_info, open_slot
from fedprism.round.client import train as run_passes
from fedprism.round.engine import Engine, Failure, Request, Result
from fedprism.round.events import Callback, Plan, RoundRecord, Score, Snapshot, Status
from fedprism.round.loop import Loop, draw_cohort, make_loop
from fedprism.round.noise import Noise, keyed_draw
from fedprism.round.training import batch_sizes, model_inputs
from tests.reference.common import Setup

EXAMPLES = Path(__file__).parent.parent / "examples"
MIXED = ("local", "fedproto", "fedsce")  # methods of the mixed federation, with the settings of its file
# Methods that differ in structure. What holds for these six breaks for another one only by its own arithmetic, which
# its reference and its own test file pin down.
SIX = {
    "fedavg": "every hook is the default",
    "fedbn": "leaves that stay local: a batch-norm policy of its own",
    "scaffold": "more state on the server and at each client, and a gradient that is corrected in every step",
    "fedcp": "several parts, one of them trained by nobody, frozen copies in scratch, an upload that is computed",
    "fedpick": "noise, masks, sweeps without gradients and several passes",
    "fedfomo": "the server keeps each client's upload, and every client is sent something else",
}


# Of these methods clients store nothing: all leaves are sent in every round, and nothing else is read.
NOTHING = {"fedavg", "fedprox", "finetune", "per-fedavg"}


def by_method(names: Iterable[str] = METHODS, default: Collection[str] = SIX) -> list[Any]:
    """Parameters of a test over methods: six (or those of `default`) in `make test`, the others in `make test-slow`."""
    return [pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in names]


CPU = torch.device("cpu")


class Collect(Callback):
    """A callback that keeps everything it hears."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.snapshots: list[Snapshot] = []
        self.plan: Plan | None = None
        self.status: Status | None = None

    def begin(self, plan: Plan) -> None:
        self.plan = plan

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        self.records.append(record)
        self.snapshots.append(snapshot)

    def end(self, status: Status) -> None:
        self.status = status


def loop_for(method: Method, config: Config, federation: Federation, engine: Engine | None = None) -> Loop:
    """A round loop at its first state, in memory: no run directory. Without another engine, that of `models_of`."""
    info = make_info(config, federation.names, federation.classes, federation.shape)
    engine = engine or Spy(method, config, info, federation, CPU)
    return make_loop(method, config, info, federation, engine)


def models_of(loop: Loop, after: int | None = None) -> dict[str, State]:
    """All leaves of the model of every client that has taken part, as it last left training (or received without
    training); `after`: as they were after this round. What a client stores of them is `loop.states`."""
    assert isinstance(loop.engine, Spy)
    rounds = sorted(round for round in loop.engine.models if after is None or round < after)
    found = {client_id: model for round in rounds for client_id, model in loop.engine.models[round].items()}
    return {client_id: found[client_id] for client_id in loop.info.clients if client_id in found}


def client_models(job: Job, state: State | None, download: State) -> tuple[Result | Failure, State]:
    """What a client answers in a round, and all leaves of its model when it has trained."""
    slot = open_slot(job)
    answer = client_round(job, state, download, slot)
    return answer, copy_of(tensors(slot.model))


def same(a: State | None, b: State | None) -> bool:
    """Are two states equal, bit by bit?"""
    if a is None or b is None:
        return a is b
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_result(a: Result | Failure, b: Result | Failure) -> bool:
    """Did two rounds of a client give the same, bit by bit? A failure is no result."""
    return (
        isinstance(a, Result)
        and isinstance(b, Result)
        and same(a.state, b.state)
        and same(a.upload, b.upload)
        and (a.logs, a.scores) == (b.logs, b.scores)
    )


def cut(federation: Federation, sizes: Sequence[int]) -> Federation:
    """The same clients with `sizes` training images."""
    clients = {}
    for (name, data), size in zip(federation.clients.items(), sizes, strict=True):
        clients[name] = replace(data, train=Split(data.train.x[:size], data.train.y[:size]))
    return replace(federation, clients=clients)


# --- training in memory ----------------------------------------------------------------------------------------------

MLP = {"name": "mlp", "hidden": [16, 8]}
TURNED = {"augment": ["flip", {"name": "rotate", "degrees": 30}]}  # training images, at random


def config_of(**sections: Any) -> Config:
    """Three rounds in batches of 16, tested on test images; `sections` are of the configuration."""
    train = {"rounds": 3, "batch_size": 16, **sections.pop("train", {})}
    return structure({"train": train, "evaluate": {"splits": ["test"]}, **sections}, Config)


@dataclass(frozen=True)
class Trained:
    """A run in memory that has finished, and what its callback saw."""

    loop: Loop
    seen: Collect

    @property
    def server(self) -> State:
        return self.loop.server

    @property
    def states(self) -> dict[str, State]:
        """What clients store, of those that have taken part."""
        return {client_id: state for client_id, state in self.loop.states.items() if state is not None}

    @property
    def models(self) -> dict[str, State]:
        """All leaves of clients' models, of those that have taken part."""
        return models_of(self.loop)

    def correct(self, moment: str = "received") -> list[list[float]]:
        """Every client's right answers and loss, round by round."""
        return [
            [value for score in record.scores[moment]["test"].values() for value in (score.correct, score.loss)]
            for record in self.seen.records[1:]
        ]


def train(method: Method, federation: Federation, **sections: Any) -> Trained:
    """Train from the first to the last round with the reference engine."""
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return Trained(loop, seen)


def engine_run(kind: EngineFactory, method: Method, config: Config, federation: Federation) -> tuple[Loop, Collect]:
    """All rounds on a CPU with an engine of this kind. There `CudaGraphs` captures nothing: it runs steps again."""
    info = make_info(config, federation.names, federation.classes, federation.shape)
    engine = remembering(kind(method, config, info, federation, CPU))
    loop, seen = loop_for(method, config, federation, engine), Collect()
    loop.run([seen])
    return loop, seen


def remembering(engine: Engine) -> Engine:
    """The same engine, for `left_by`: it remembers the last upload of every client."""
    train, uploads = engine.train, dict[str, State]()

    def remember(round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id, answer in train(round, requests):
            if isinstance(answer, Result):
                uploads[client_id] = answer.upload
            yield client_id, answer

    engine.train, engine.uploads = remember, uploads  # type: ignore[attr-defined, method-assign]
    return engine


def left_by(loop: Loop) -> dict[str, State]:
    """What every client that has taken part has stored, and what it sent last (`upload/NAME`)."""
    sent: dict[str, State] = loop.engine.uploads  # type: ignore[attr-defined]
    stored = {client_id: state for client_id, state in loop.states.items() if state is not None}
    return {c: {**state, **{f"upload/{n}": t for n, t in sent.get(c, {}).items()}} for c, state in stored.items()}


def same_clients(one: Loop, two: Loop) -> bool:
    """Have the clients of two runs stored and sent the same, bit by bit?"""
    a, b = left_by(one), left_by(two)
    return a.keys() == b.keys() and all(same(left, b[client_id]) for client_id, left in a.items())


def part(state: Mapping[str, Tensor], prefix: str) -> State:
    """The leaves whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """The names of the leaves that differ."""
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def assert_same(a: Trained, b: Trained) -> None:
    """Two runs gave the same states and scores, bit by bit."""
    assert same(a.server, b.server)
    assert a.states.keys() == b.states.keys() == a.models.keys() == b.models.keys()
    assert all(same(state, b.states[client_id]) for client_id, state in a.states.items())
    assert all(same(model, b.models[client_id]) for client_id, model in a.models.items())
    assert a.correct() == b.correct()


def assert_differ(a: Trained, b: Trained) -> None:
    """Every client's model differs between two runs."""
    assert not any(same(model, b.models[client_id]) for client_id, model in a.models.items())


def tuned(method: Method, federation: Federation, config: Config) -> tuple[State, State]:
    """A client's first model before and after its adaptation, as if all rounds were over."""
    info, client_id = make_info(config, federation.names, federation.classes, federation.shape), "tinted"
    job = Job(method, config, info, federation.clients[client_id], config.train.rounds)
    client = open_slot(job)
    before = copy_of(tensors(client.model))
    ctx = make_context(method, config, info, client.model, job.round, client_id, data=job.data)
    run_passes(client, job, ctx, method.adapt(client, ctx))
    return before, copy_of(tensors(client.model))


def pixels(**clients: tuple[list[float], int]) -> Federation:
    """Clients with n copies of one picture each: a row of pixels of -1 or 1, as a model sees them."""
    made = {}
    for name, (row, count) in clients.items():
        picture = ((np.array(row) + 1) * 127.5).astype(np.uint8).reshape(1, 1, 1, -1)
        x, y = np.repeat(picture, count, axis=0), np.zeros(count, dtype=np.int64)
        made[name] = {"train": (x, y), "validation": (x[:1], y[:1]), "test": (x[:1], y[:1])}
    return Federation.from_arrays(made, class_names=("a", "b"))


class Slope(nn.Module):
    """One weight and a loss of log(1 + e^(s w)) for label 0, with s = 4 x_1 + 2 x_2: its gradient is s sigmoid(s w)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        s = x.flatten(1) @ torch.tensor([4.0, 2.0])
        return torch.stack([torch.zeros_like(s), s * self.w], dim=1)


# --- worker processes that go from one test to the next ---------------------------------------------------------------


class Borrowed(Processes):
    """The engine, with workers of the engine before it, which it leaves to the next one."""

    spare: Pool

    @classmethod
    def of(cls, spare: Pool, count: int, method: Method, config: Config, federation: Federation) -> Borrowed:
        config = replace(config, run=replace(config.run, workers=count))
        info = make_info(config, federation.names, federation.classes, federation.shape)
        engine = cls(method, config, info, federation, CPU)
        engine.spare = spare
        while spare and len(engine.pool) < count:
            engine.pool.append(spare.pop())
            engine._set_up(engine.pool[-1])
        return engine

    def close(self) -> None:
        for handle in self.pool:
            if handle.process.poll() is None and not handle.under_way:
                self.spare.append(handle)
            else:
                handle.end()
        self.pool.clear()


# --- batches and killed runs (methods' own tests, resuming) ----------------------------------------------------------

BESIDE = torch.empty(0)  # a tensor on the CPU, beside which noise is drawn
RUN = "import sys, fedprism as fp, fedprism.config as c; fp.run_config(c.read(sys.argv[1]), 'x', out=sys.argv[2])"


def batches(count: int, size: int, last: str, min_batch: int, order: torch.Generator) -> list[Tensor]:
    """`count` rows in random order, cut into batches as a pass cuts them."""
    sizes = batch_sizes(count, size, last, min_batch)
    return list(torch.split(torch.randperm(count, generator=order)[: sum(sizes)], sizes))


def killed(command: list[str], run: Path, after: int, delay: float) -> bool:
    """Start a process and kill it `delay` seconds after `after` rounds were recorded; False if it ended before."""
    process = subprocess.Popen([sys.executable, "-c", *command], start_new_session=True)
    deadline = time.monotonic() + 120
    while process.poll() is None and _lines(run / "metrics.jsonl") < after and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    alive = process.poll() is None
    if alive:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    return alive


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# --- agreement with the references in tests/reference/ ---------------------------------------------------------------

CLOSE = 1e-9  # absolute and relative
FAR = 1e-3


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


def module_of(name: str) -> ModuleType:
    """The module of a method's reference."""
    return import_module(f"tests.reference.{name.replace('-', '_')}")


def scores_of(loop: Loop, client_id: str) -> Tensor:
    """The client's scores `[images, classes]` on its test images after the last round, at the reference's moment."""
    method, info, config = loop.method, loop.info, loop.config
    rounds, data = config.train.rounds, loop.federation.clients[client_id]
    down = method.send(loop.server, client_id, loop.context(rounds).replace(client_id=client_id))
    job = Job(method, config, info, data, rounds)
    client = open_slot(job)
    ctx = arrive(client, job, loop.states[client_id], down)
    if getattr(module_of(method.id), "MOMENT", "received") == "adapted":
        adapt(client, job, ctx)
    client.model.eval()
    with torch.no_grad():
        return method.predict(client.model, model_inputs(data.test.x, config), keyed_draw(None, "test"))


def reference(name: str, hyper: dict[str, Any], loop: Loop) -> list[Tensor]:
    """The reference's scores of every client, for the same federation and configuration."""
    config, info = loop.config, loop.info
    parts = list(loop.federation.clients.values())
    train = [(model_inputs(data.train.x, config), data.train.y) for data in parts]

    def in_order(round: int, client: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
        order = keys.generator(info.seed, "batches", "", round, info.clients[client], epoch)
        x, y = train[client]
        return [(x[rows], y[rows]) for rows in batches(len(y), config.train.batch_size, "keep", 2, order)]

    def noise(round: int, client: int, of: str, step: int, what: str, shape: tuple[int, ...]) -> Tensor:
        epoch, step = divmod(step, len(in_order(round, client, 0)))  # a reference counts on over its epochs
        return Noise(BESIDE, info.seed, "noise", round, info.clients[client], of, epoch).at(step)(what, *shape)

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
        built=[loop.method.build(info.arch, client_id, info, info.seed) for client_id in info.clients],
        noise=noise,
        server=loop.method.server(loop.models[info.arch], loop.context(0)),
    )
    scorers = module_of(name).run(setup, **hyper)
    return [score(model_inputs(data.test.x, config)) for score, data in zip(scorers, parts, strict=True)]


# --- captured and compiled steps (the engine cuda-graphs) ------------------------------------------------------------

THREE_ROUNDS: dict[str, Any] = {
    "data": {"partition": {"name": "domain", "clients": 3}, "samples": 40},
    "train": {"rounds": 3, "epochs": 2, "batch_size": 8},
    "evaluate": {"moments": ["received", "trained", "adapted", "global"]},
}
PARTS_OF_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {  # they share the memory of something larger, but for whole
    "chunk": lambda x: (x * 2).chunk(2, 1)[1],
    "shuffle": lambda x: (x + 1).view(4, 2, 3, 9, 9).transpose(1, 2).flatten(1, 2).chunk(2, 1)[0],
    "rows": lambda x: x[1:, :3],
    "crop": lambda x: (x - 1)[:, :3, 1:-1, 2:],
    "expand": lambda x: x[:, :3].mean((2, 3), keepdim=True).expand(-1, -1, 9, 9),
    "whole": lambda x: x[:, :3] * 1,
}


def three_sizes() -> Federation:
    """Three clients of 40, 21 and 17 images: whole batches, a last one that is smaller, and one that is merged."""
    return cut(build_federation(structure(THREE_ROUNDS, Config).data, 0), [40, 21, 17])


def compiled_and_plain(part: Callable[[Tensor], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """A convolution of a part of a tensor: compiled as steps are, and as PyTorch computes it."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

    from fedprism.engines.cuda.rewrite import Rewritten
    from fedprism.engines.cuda.tune import inductor

    def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with Rewritten(torch.empty(0)):
            return nn.functional.conv2d(part(x), weight, bias)

    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=draw).to(device) for shape in ((4, 6, 9, 9), (5, 3, 3, 3), (5,))]
    found = inductor(make_fx(convolved, tracing_mode="fake")(*given), given)(*given)
    plain = nn.functional.conv2d(part(given[0]), *given[1:])
    return found[0] if isinstance(found, list | tuple) else found, plain


# --- records that were made by hand (tables, reports) ----------------------------------------------------------------

Percent = dict[str, int]  # client -> right of 100


def record(
    method: str,
    seed: int,
    *rounds: Percent,
    status: str = "finished",
    config: dict[str, Any] | None = None,
    **settings: Any,
) -> RunRecord:
    """A run that was tested on 100 images per client after each round; the scores of validation are those of the
    test."""
    given = {"seed": seed, "method": {"name": method, **settings}, "train": {"rounds": len(rounds)}, **(config or {})}
    clients = list(rounds[0])
    entries = []
    for number, percent in enumerate((dict.fromkeys(clients, 10), *rounds)):
        scores = {client_id: Score(right, 100, 1.0) for client_id, right in percent.items()}
        down = dict.fromkeys(clients, 0 if method == "local" else 2000)
        up = dict.fromkeys(clients, 0 if method == "local" else 1000)
        entries.append(
            RoundRecord(
                number,
                tuple(clients),
                down=down if number else {},
                up=up if number else {},
                scores={"received": {"validation": scores, "test": scores}},
                seconds={"total": 0.5},
            )
        )
    info = {
        "status": status,
        "method": method,
        "moment": "received",
        "clients": clients,
        "samples": {client_id: [50, 10, 100] for client_id in clients},
        "classes": ["0", "1"],
        "parameters": dict.fromkeys(clients, 1234),
        "versions": {"fedprism": "0.1.0"},
        "machine": {"cpu": "abacus"},
        "reveals": METHODS[method].reveals,
    }
    return RunRecord(structure(given, Config), info, tuple(entries), path=Path(f"{method}-{seed}"))


# --- layers of the package (imports, the page on architecture) --------------------------------------------------------

# A part of the package imports what stands to its left.
ORDER = [
    "errors",
    "limits",
    "files",
    "atomic",
    "keys",
    "registry",
    "yamlfile",
    "config",
    "plugins",
    "data",
    "federation",
    "models",
    "schedules",
    "methods",
    "store",
    "aggregators",
    "transforms",
    "round",
    "engines",
    "records",
    "conformance",
    "planning",
    "predict",
    "explain",
    "index",
    "report",
    "inspection",
    "summary",
    "api",
    "bench",
    "cli",
]


# --- fingerprints ----------------------------------------------------------------------------------------------------


def fingerprint(run: Any, rename: Callable[[str], str] = lambda leaf: leaf) -> str:
    """A hash of a run's decoded records, its last server state, and every client's model as it is before training.

    That model does not depend on which leaves a client stores. `run` is a `fedprism.Run` or the path of a run
    directory. `rename` maps the name of a leaf to the name that it is compared by, for a change that renames leaves.
    Timings are left out.
    """
    path = Path(getattr(run, "path", run))
    digest = hashlib.sha256()
    for entry in read_rounds(path / "metrics.jsonl"):
        digest.update(json.dumps(entry, sort_keys=True).encode())
    with RunDirectory.open(path) as directory:
        snapshot, config = directory.latest(), directory.config
    assert snapshot is not None, f"{path} has no checkpoint"
    digest.update(f"round {snapshot.round}".encode())
    models = {f"client {client_id}": model for client_id, model in received_models(config, snapshot).items()}
    for owner, state in {"server": snapshot.server, **models}.items():
        digest.update(owner.encode())
        for leaf, tensor in sorted((rename(name), tensor) for name, tensor in state.items()):
            digest.update(repr((leaf, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def received_models(config: Config, snapshot: Snapshot) -> dict[str, State]:
    """Every client's model after it has received what the server would send next; where the method is tested after
    training, also what the client has trained (`trained/LEAF`)."""
    method, federation, found = make(config.method), build_federation(config.data, config.seed), {}
    info = make_info(config, federation.names, federation.classes, federation.shape)
    for client_id, state in snapshot.clients.items():
        job = Job(method, config, info, federation.clients[client_id], snapshot.round, federation.public)
        client = open_slot(job)
        ctx = make_context(method, config, info, client.model, snapshot.round, client_id)
        server = method_part(snapshot.server)
        arrive(client, job, state, method.encode(method.send(server, client_id, ctx), ctx))
        trained = {f"trained/{name}": tensor for name, tensor in (state or {}).items()}
        found[client_id] = copy_of(tensors(client.model)) | (trained if method.moment == "trained" else {})
    return found


def fingerprints(more: Sequence[str] = ()) -> dict[str, str]:
    """Two rounds of every registered method on `examples/digits-skew.yaml`, and of a mixed federation, on a CPU with
    one thread; `more` are further settings."""
    from fedprism import api
    from fedprism import config as configuration
    from fedprism.methods import METHODS

    settings = ["train.rounds=2", "run.device=cpu", "run.engine=inprocess", "run.threads=1", *more]
    wanted = {name: ("digits-skew.yaml", name) for name in METHODS}
    wanted |= {f"mixed {name}": ("digits-skew-mixed.yaml", name) for name in MIXED}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for label, (file, method) in wanted.items():
            config = configuration.read(EXAMPLES / file)
            named = [] if config.method.name == method else [f"method={json.dumps({'name': method})}"]
            config = configuration.read(EXAMPLES / file, [*named, *settings])
            found[label] = fingerprint(api.run_config(config, label, out=Path(folder) / label.replace(" ", "-")))
            print(f"{label}: {found[label][:16]}", flush=True)
    return found


def _main() -> int:
    parser = argparse.ArgumentParser(description="Record fingerprints, or compare them with recorded ones.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    found = fingerprints(given.set)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.against is None:
        return 0
    before = json.loads(given.against.read_text(encoding="utf-8"))
    other = [label for label in {**before, **found} if before.get(label) != found.get(label)]
    print(f"{len(found) - len(other)} of {len(found)} are equal" + (f"; not: {', '.join(other)}" if other else ""))
    return bool(other)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(_main())
