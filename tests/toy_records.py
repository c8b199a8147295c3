"""A toy run for the tests of records: rounds whose scores depend on every bit of the states before them.

It stands in for the round loop, so that a directory can be written, killed and resumed in milliseconds. Half of the
clients take part in a round, the order of a state's names matters, and several kinds of tensors occur, shared ones too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedprism import keys
from fedprism.config import ClientsConfig, Config, RunConfig, TrainConfig
from fedprism.methods.base import State
from fedprism.records import RunDirectory, run_status
from fedprism.round.events import Callback, Plan, RoundRecord, Score, Snapshot, Status
from fedprism.store.clients import ClientStore, DiskStore, MemoryStore

CLIENTS = ("north", "east", "Süd", "far west")
CLASSES = ("a", "b", "c")
ROUNDS = 7


def toy_config(rounds: int = ROUNDS, seed: int = 0, state: str = "memory", **run: Any) -> Config:
    return Config(
        seed=seed,
        train=TrainConfig(rounds=rounds),
        clients=ClientsConfig(state=state),  # type: ignore[arg-type]
        run=RunConfig(**{"checkpoint_every": 3, **run}),
    )


def toy_plan(config: Config, first: int = 0) -> Plan:
    return Plan(
        config=config,
        method="toy",
        clients=CLIENTS,
        samples=dict.fromkeys(CLIENTS, (20, 10, 30)),
        class_names=CLASSES,
        parameters=dict.fromkeys(CLIENTS, 9),
        rounds=config.train.rounds,
        first_round=first,
        shape=(3, 16, 16),
    )


def toy_state(seed: int, name: str) -> State:
    draw = keys.generator(seed, "first", name)
    return {
        "weight": torch.rand(3, 4, generator=draw),
        "bias": torch.rand(5, generator=draw),
        "steps": torch.tensor(0),
        "flags": torch.tensor([True, False]),
        "alpha": torch.rand((), generator=draw),
    }


def moved(state: State, round: int, name: str) -> State:
    """A next state that depends on every bit of the last, and on the order of its names."""
    total = torch.zeros(())
    for tensor in state.values():  # single precision: another order is another sum
        total = total + tensor.float().sum() * 1.1
    draw = keys.generator(round, "move", name)
    weight = torch.rand(3, 4, generator=draw) + torch.sin(total)
    return {**state, "weight": weight, "bias": weight.view(-1)[:5], "steps": state["steps"] + 1}


def toy_score(state: State, split: str, name: str, round: int) -> Score:
    counts = torch.randint(0, 10, (3,), generator=keys.generator("score", split, str(state["weight"].tolist())))
    right = tuple(counts.tolist())
    return Score(sum(right), 30, float(state["weight"].sum()), right, (10, 10, 10), (10, 10, 10))


def toy_rounds(
    config: Config,
    callbacks: list[Callback],
    start: Snapshot | None,
    until: int | None = None,
    folder: Path | None = None,
) -> Status:
    """What the round loop does, in small. `until` ends as if somebody had interrupted it."""
    states: ClientStore = MemoryStore(dict.fromkeys(CLIENTS))
    if config.clients.state == "disk":
        states = DiskStore(CLIENTS, lambda state: state, at_once=2)
    states.open(folder)
    if start is None:
        server = toy_state(config.seed, "server")
    else:
        server = start.server
        states.restore(start.clients)
    first = 0 if start is None else start.round + 1
    for callback in callbacks:
        callback.begin(toy_plan(config, first))
    status: Status = "interrupted"
    for round in range(first, config.train.rounds + 1):
        if until is not None and round > until:
            break
        cohort = [name for i, name in enumerate(CLIENTS) if (i + round) % 2] if round else []
        for name in cohort:
            states[name] = moved(states[name] or toy_state(config.seed, name), round, name)
        server = moved(server, round, "server") if round else server
        known = {name: state or server for name, state in states.items()}
        scores = {
            "received": {s: {n: toy_score(known[n], s, n, round) for n in CLIENTS} for s in ("validation", "test")},
            "trained": {s: {n: toy_score(known[n], s, n, round) for n in cohort} for s in ("validation", "test")},
        }
        logs = {name: {"loss": float(known[name]["alpha"]), "nan": float("nan")} for name in reversed(cohort)}
        size = dict.fromkeys(reversed(cohort), 100 + round)
        record = RoundRecord(round, tuple(cohort), {}, size, size, logs, scores, {"train": 0.25, "total": 0.5})
        for callback in callbacks:
            callback.round(record, Snapshot(round, dict(server), states.snapshot()))
    else:
        status = "finished"
    for callback in callbacks:
        callback.end(status)
    states.close()
    return status


def toy_run(path: Path, config: Config | None = None, until: int | None = None) -> Path:
    """Begin a run, or go on with it."""
    begun = run_status(path) is not None
    opened = RunDirectory.open(path, write=True) if begun else RunDirectory.create(path, config or toy_config())
    with opened as directory:
        toy_rounds(directory.config, [directory.recorder()], directory.latest(), until, directory.states)
    return path


def results(path: Path) -> dict[str, bytes]:
    """What must be the same bits however often a run was killed."""
    return {name: (path / name).read_bytes() for name in ("metrics.jsonl", "classes.json", "config.yaml")}


def checkpoints(path: Path) -> list[int]:
    return sorted(int(p.stem[-6:]) for p in (path / "checkpoints").glob("manifest-*.json"))


def damage(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


# --- damage ----------------------------------------------------------------------------------------------------------


def named_files(path: Path, round: int) -> set[str]:
    """The files that the manifest of a round names."""
    manifest = json.loads((path / "checkpoints" / f"manifest-{round:06d}.json").read_text())
    entries = [manifest["server"], *manifest["clients"].values()]
    return {f"{checksum}.safetensors" for checksum in entries if checksum}


def identical(a: State, b: State) -> bool:
    """Equal in names, their order, types, shapes and bits (not-a-numbers included)."""
    return list(a) == list(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.numpy().tobytes() == y.numpy().tobytes()
        for x, y in zip(a.values(), b.values(), strict=True)
    )


def flip(data: bytes) -> bytes:
    """One bit in the middle is another."""
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def newest_file(path: Path) -> Path:
    """A file that only the newest checkpoint names."""
    last, before = checkpoints(path)[-1], checkpoints(path)[-2]
    return path / "checkpoints" / "files" / min(named_files(path, last) - named_files(path, before))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda p: damage(p, flip),
    "cut short": lambda p: damage(p, lambda data: data[:-9]),
    "empty": lambda p: damage(p, lambda data: b""),
    "longer": lambda p: damage(p, lambda data: data + b"x"),
    "zeros": lambda p: damage(p, lambda data: bytes(len(data))),
    "missing": Path.unlink,
    "a folder in its place": lambda p: [p.unlink(), p.mkdir()],
}
