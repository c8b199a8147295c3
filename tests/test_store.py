"""Clients' states in memory and on disk: the same bits, nothing written without need, nothing left behind."""

from __future__ import annotations

import copy
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import fedprism as fp
from fedprism import api, atomic
from fedprism.config import Config, dump, structure
from fedprism.engines.inprocess import InProcess
from fedprism.errors import FedprismError, RecordError
from fedprism.federation import Federation
from fedprism.methods.base import State
from fedprism.records import RecordWarning, RunDirectory
from fedprism.records.checkpoint import Checkpoints
from fedprism.records.manifest import Manifest, write_manifest
from fedprism.round.client import make_info
from fedprism.round.events import Callback, RoundRecord, Snapshot
from fedprism.store import clients as client_store
from fedprism.store.clients import ClientStore, DiskStore, Files, MemoryStore, clients_at_once
from tests.harness import CPU, NOTHING, RUN, by_method, killed, loop_for
from tests.toy_records import CLIENTS, DAMAGE, checkpoints, identical, newest_file, results, toy_config, toy_run

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent


def on_disk(folder: Path | None, at_once: int = 2) -> DiskStore:
    states = DiskStore(CLIENTS, lambda state: state, at_once)
    states.open(folder)
    return states


def state(value: float = 1.0) -> State:
    return {"w": torch.full((3, 2), value), "count": torch.tensor(3), "none": torch.empty(0, 2)}


def listed(folder: Path) -> list[str]:
    gc.collect()
    return sorted(path.name for path in folder.iterdir())


# --- one client's state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: MemoryStore(dict.fromkeys(CLIENTS)), lambda: on_disk(None)])
def test_what_is_set_is_what_is_there(make: Any) -> None:
    states: ClientStore = make()
    assert dict(states) == dict.fromkeys(CLIENTS)
    states["Süd"] = state(1.0)
    before = states.snapshot()
    states["Süd"] = state(2.0)
    states["north"] = state(3.0)
    assert list(states) == list(before) == list(CLIENTS)
    assert [client_id for client_id, found in states.items() if found is None] == ["east", "far west"]
    assert before["north"] is None
    for found, value in ((before["Süd"], 1.0), (states["Süd"], 2.0), (states["north"], 3.0)):
        assert found is not None
        assert identical(found, state(value))
    states.restore(before)
    assert identical(states["Süd"] or {}, state(1.0))
    assert states["north"] is None
    states.close()


def test_every_kind_of_tensor_comes_back_from_disk_bit_by_bit(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    odd = {
        "z-last-but-first": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "transposed": base.t(),
        "view": base[1:],
        "the-same-again": base,
        "truth": torch.tensor([True, False]),
        "double": torch.rand(2, dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "channels-last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "nothing": torch.empty(0, 3),
    }
    states = on_disk(tmp_path / "states")
    states["north"] = odd
    states["east"] = {}
    assert identical(states["north"] or {}, odd)
    assert states["east"] == {}


def test_a_mapped_state_may_be_changed_and_its_file_is_not(tmp_path: Path) -> None:
    states = on_disk(tmp_path / "states")
    states["north"] = state(1.0)
    (path,) = (tmp_path / "states").iterdir()
    before, mapped = path.read_bytes(), states["north"]
    assert mapped is not None
    mapped["w"].add_(1)
    assert path.read_bytes() == before
    assert identical(states["north"] or {}, state(1.0))


def test_a_mapped_state_is_read_when_it_is_used(tmp_path: Path) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    states, size = on_disk(tmp_path / "states"), 64 * 2**20
    states["north"] = {"w": torch.zeros(size // 4)}
    gc.collect()
    before = resident()
    mapped = states["north"]
    assert mapped is not None
    unread = resident()
    assert unread - before < size / 4
    assert float(mapped["w"].sum()) == 0
    assert resident() - unread > size / 2  # now its pages are there, as the system's own copy of the file


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    states = on_disk(tmp_path / "states")
    states["north"] = state(1.0)
    (path,) = (tmp_path / "states").iterdir()
    before = path.stat()
    states["north"] = states["north"] or {}  # the very state
    states["north"] = state(1.0)  # and another of the same bits
    assert listed(tmp_path / "states") == [path.name]
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    states["north"] = dict(reversed(state(1.0).items()))  # the order of names is part of a state
    assert listed(tmp_path / "states") != [path.name]
    assert list(states["north"] or {}) == ["none", "count", "w"]


@pytest.mark.slow
def test_one_file_per_client_and_more_only_while_a_snapshot_has_them(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    states = on_disk(folder)
    for value in (0.0, 1.0, 2.0, 3.0, 4.0):
        states["north"], states["east"] = state(value), state(value)  # equal states have a file each, too
        assert len(listed(folder)) == 2
    snapshot = states.snapshot()
    states["north"] = state(9.0)
    assert len(listed(folder)) == 3
    assert identical(snapshot["north"] or {}, state(4.0))
    del snapshot
    assert list(states.parts(["north"]))  # the next stage of a round
    assert len(listed(folder)) == 2
    assert identical(states["north"] or {}, state(9.0))


def test_nothing_is_left_behind_and_what_is_gone_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    states = on_disk(None)
    states["north"] = state()
    assert len(list(tmp_path.iterdir())) == 1
    snapshot = states.snapshot()
    states.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(FedprismError, match=r"safetensors is gone: with clients\.state: disk"):
        snapshot["north"]
    forgotten = on_disk(None)
    forgotten["north"] = state()
    del forgotten
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_over_does_not_touch_its_successors_files(tmp_path: Path) -> None:
    old = on_disk(tmp_path / "states")
    old["north"] = state(1.0)
    snapshot = old.snapshot()
    old.close()
    new = on_disk(tmp_path / "states")
    new["north"] = state(2.0)
    names = listed(tmp_path / "states")
    del snapshot, old
    assert listed(tmp_path / "states") == names
    assert identical(new["north"] or {}, state(2.0))


def test_leftovers_of_a_killed_run_go(tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    (tmp_path / "states" / "00000007.safetensors").write_bytes(b"half of a")
    assert listed_after(on_disk(tmp_path / "states"), tmp_path) == []


def listed_after(states: DiskStore, path: Path) -> list[str]:
    assert all(found is None for found in states.values())
    return listed(path / "states")


def test_a_state_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    states = on_disk(tmp_path / "states")
    states["north"] = state(1.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(RecordError, match=r"the state of 'north' in .* could not be written: .*Make room"):
            states["north"] = {"w": torch.rand(10_000)}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert identical(states["north"] or {}, state(1.0))
    assert len(listed(tmp_path / "states")) == 1


def test_a_folder_that_somebody_deletes_is_named(tmp_path: Path) -> None:
    states = on_disk(tmp_path / "states")
    states["north"] = state(1.0)
    shutil.rmtree(tmp_path / "states")
    with pytest.raises(RecordError, match=r"states is gone: something has moved or deleted it"):
        states["east"] = state(2.0)
    with pytest.raises(FedprismError, match=r"safetensors is gone.*something has deleted"):
        states["north"]


def test_leftovers_that_cannot_be_removed_are_named(tmp_path: Path) -> None:
    (tmp_path / "states").write_bytes(b"no folder")
    with pytest.raises(RecordError, match=r"states, which an earlier run has left, cannot be removed .*Delete it"):
        on_disk(tmp_path / "states")
    assert (tmp_path / "states").read_bytes() == b"no folder"


SPOILT: dict[str, Any] = {
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut shorter": lambda path: path.write_bytes(path.read_bytes()[:4]),
    "empty": lambda path: path.write_bytes(b""),
    "overwritten": lambda path: path.write_text("something else"),
    "no state": lambda path: path.write_bytes(safetensors.torch.save({"w": torch.zeros(1)})),
    "another order": lambda path: path.write_bytes(safetensors.torch.save({}, metadata={"order": "w"})),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("how", list(SPOILT))
def test_a_state_that_something_has_changed_is_named(tmp_path: Path, how: str) -> None:
    states = on_disk(tmp_path / "states")
    states["north"] = state(1.0)
    (path,) = (tmp_path / "states").iterdir()
    SPOILT[how](path)
    with pytest.raises(RecordError, match=rf"{path}, a client's state, cannot be read .*something may have changed it"):
        states["north"]


def test_clients_run_in_parts_so_that_memory_stays_bounded() -> None:
    states = on_disk(None, at_once=3)
    assert [list(part) for part in states.parts("abcdefg")] == [list("abc"), list("def"), ["g"]]
    assert [list(part) for part in states.parts("")] == [[]]
    assert [list(part) for part in MemoryStore({}).parts("abcdefg")] == [list("abcdefg")]
    fewest = client_store.FEWEST
    assert clients_at_once(1) == client_store.AT_ONCE
    assert clients_at_once(10**12) == fewest
    assert clients_at_once(10**12, workers=fewest) == 2 * fewest


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_a_file_a_second_name(tmp_path: Path) -> None:
    states, store = on_disk(tmp_path / "states"), Checkpoints(tmp_path)
    states["north"], states["east"] = state(1.0), state(2.0)
    store.save(Snapshot(0, {}, states.snapshot()), keep=())
    inodes = {path.stat().st_ino for path in (tmp_path / "states").iterdir()}
    assert inodes < {path.stat().st_ino for path in store.files.iterdir()}
    states["north"] = state(3.0)  # a new file: the old one is the checkpoint's alone now
    back = Checkpoints(tmp_path, mapped=True).load(0)
    assert list(back.clients) == list(CLIENTS)
    assert identical(back.clients["north"] or {}, state(1.0))
    assert back.clients["Süd"] is None
    assert not list(tmp_path.rglob(".*.partial"))


def test_a_copy_where_files_cannot_have_two_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    states, store = on_disk(tmp_path / "states"), Checkpoints(tmp_path)
    states["north"] = state(1.0)
    store.save(Snapshot(0, {}, states.snapshot()), keep=())
    states.close()
    assert identical(Checkpoints(tmp_path).load(0).clients["north"] or {}, state(1.0))


def test_a_link_onto_itself_leaves_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    atomic.link(tmp_path / "a", tmp_path / "b")
    atomic.link(tmp_path / "a", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert (tmp_path / "b").read_bytes() == b"content"


def test_a_checkpoint_of_states_on_disk_can_be_read_into_memory_and_back(tmp_path: Path) -> None:
    """What was begun in one way has the same files as what was begun in the other."""
    one, other = toy_run(tmp_path / "memory"), toy_run(tmp_path / "disk", toy_config(state="disk"))
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    files = [{path.name for path in run.glob("checkpoints/files/*")} for run in (one, other)]
    assert files[0] == files[1]
    assert checkpoints(one) == checkpoints(other)
    with RunDirectory.open(other) as directory:
        newest = directory.latest()
    assert newest is not None
    assert isinstance(newest.clients, Files)
    loaded = Checkpoints(one / "checkpoints").load(newest.round)
    for client_id, found in loaded.clients.items():
        assert identical(found or {}, newest.clients[client_id] or {})


@pytest.mark.parametrize("how", ["a flipped bit", "cut short", "empty", "missing"])
def test_damage_is_found_before_a_run_goes_on(tmp_path: Path, how: str) -> None:
    config = toy_config(state="disk")
    straight = results(toy_run(tmp_path / "straight", config))
    path = toy_run(tmp_path / "run", config, until=6)
    hurt = newest_file(path)
    DAMAGE[how](hurt)
    with pytest.warns(RecordWarning, match=hurt.name):
        toy_run(path)
    assert results(path) == straight
    assert not (path / "states").exists()


def test_a_manifest_that_names_no_checksum_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    precious = tmp_path / "precious.safetensors"
    precious.write_bytes(b"not ours")
    store = Checkpoints(tmp_path / "run")
    store.save(Snapshot(0, state(), {}), keep=())
    write_manifest(tmp_path / "run", Manifest(0, "../../precious", {}))
    for round in (1, 2, 3):
        store.save(Snapshot(round, state(round), {}), keep=())
    assert store.rounds() == [2, 3]
    assert precious.exists()


# --- whole runs ------------------------------------------------------------------------------------------------------


def settings(method: str, where: str, **more: Any) -> Config:
    raw = {
        "method": method,
        "model": {"name": "lenet-bn"},
        "data": {"partition": {"name": "domain", "clients": 3}, "samples": 24},
        "train": {"rounds": 3},
        "clients": {"participation": 0.67, "dropout": 0.1, "state": where},
        "run": {"engine": "inprocess", "device": "cpu"},
        **more,
    }
    return structure(raw, Config)


def contents(path: Path) -> tuple[bytes, bytes, set[str]]:
    """What a run has computed; its states by their checksums."""
    files = {file.name for file in path.glob("checkpoints/files/*")}
    return (path / "metrics.jsonl").read_bytes(), (path / "classes.json").read_bytes(), files


@pytest.mark.parametrize("method", by_method())
def test_every_method_computes_the_same_bits_on_disk(tmp_path: Path, method: str) -> None:
    made = {where: api.run_config(settings(method, where), "x", out=tmp_path / where) for where in ("memory", "disk")}
    memory, disk = (contents(run.path) for run in made.values())
    assert memory == disk
    (newest, *_) = sorted(made["disk"].path.glob("checkpoints/manifest-*.json"), reverse=True)
    named = [checksum for checksum in json.loads(newest.read_text())["clients"].values() if checksum is not None]
    assert named
    assert all(bool(checksum) == (method not in NOTHING) for checksum in named)
    assert not (made["disk"].path / "states").exists()


def test_the_bits_do_not_depend_on_how_many_are_used_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients receive the new state, train and are tested, one at a time; progress counts all of them."""

    class Counted(Callback):
        progress: list[tuple[int, int]] = []

        def clients(self, done: int, total: int) -> None:
            self.progress.append((done, total))

    everybody = {"participation": 0.67, "broadcast": "all"}
    straight = api.run_config(
        settings("ditto", "memory", clients={**everybody, "state": "memory"}), "x", out=tmp_path / "straight"
    )
    monkeypatch.setattr(client_store, "AT_ONCE", 1)
    monkeypatch.setattr(client_store, "FEWEST", 1)
    seen = Counted()
    parts = api.run_config(
        settings("ditto", "disk", clients={**everybody, "state": "disk"}),
        "x",
        out=tmp_path / "parts",
        callbacks=[seen],
    )
    assert contents(parts.path) == contents(straight.path)
    assert seen.progress[:3] == [(1, 3), (2, 3), (3, 3)]
    assert {done <= total for done, total in seen.progress} == {True}


def test_models_and_predictions_are_those_of_a_run_in_memory(tmp_path: Path) -> None:
    memory, disk = (
        api.run_config(settings("ditto", w, run={"device": "cpu"}), "x", out=tmp_path / w) for w in ("memory", "disk")
    )
    images = fp.make_federation("digits-skew", clients=3, samples=24).clients["plain"].test.x.numpy()
    for client_id, model in memory.models.items():
        assert (model.probabilities(images) == disk.models[client_id].probabilities(images)).all()


def test_an_interrupted_round_changes_nothing_of_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when some clients of a round have new states: the last whole round is saved, and goes on."""
    monkeypatch.setattr(client_store, "FEWEST", 1)
    monkeypatch.setattr(client_store, "AT_ONCE", 1)
    config = settings(
        "ditto",
        "disk",
        clients={"state": "disk"},
        train={"rounds": 5},
        run={"engine": "inprocess", "device": "cpu", "checkpoint_every": 100},
    )
    straight = api.run_config(config, "x", out=tmp_path / "straight")

    class Stop(Callback):
        done = 0

        def clients(self, done: int, total: int) -> None:
            self.done += 1
            if self.done == 3 + 3 * 6 + 2:  # the second client of the fourth round has trained
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.run_config(config, "x", out=tmp_path / "run", callbacks=[Stop()])
    with RunDirectory.open(tmp_path / "run") as directory:
        assert directory.status == "interrupted"
        assert directory.latest().round == 3  # type: ignore[union-attr]
    assert not (tmp_path / "run" / "states").exists()
    resumed = api.resume(tmp_path / "run")
    assert resumed.status == "finished"
    assert (resumed.path / "metrics.jsonl").read_bytes() == (straight.path / "metrics.jsonl").read_bytes()
    with RunDirectory.open(resumed.path) as one, RunDirectory.open(straight.path) as other:
        for a, b in ((one.latest(), other.latest()), (one.best(), other.best())):
            assert a is not None
            assert b is not None
            assert all(identical(a.clients[c] or {}, b.clients[c] or {}) for c in a.clients)


@pytest.mark.slow
def test_killed_and_resumed_on_disk_is_the_straight_run(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    raw = settings(
        "fedbn", "disk", train={"rounds": 12}, run={"engine": "inprocess", "device": "cpu", "checkpoint_every": 3}
    )
    config.write_text(dump(raw), encoding="utf-8")
    straight = api.run_config(raw, "x", out=tmp_path / "straight")
    run = tmp_path / "killed"
    assert killed([RUN, str(config), str(run)], run, after=5, delay=0)
    assert api.resume(run).status == "finished"
    assert contents(run)[:2] == contents(straight.path)[:2]
    assert not (run / "states").exists()


def test_states_lie_in_the_run_directory(tmp_path: Path) -> None:
    seen: list[int] = []

    class Look(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            seen.append(len(listed(tmp_path / "run" / "states")))

    config = settings("fedbn", "disk", clients={"state": "disk"}, train={"rounds": 6})
    api.run_config(config, "x", out=tmp_path / "run", callbacks=[Look()])
    assert seen[:2] == [0, 3]
    assert set(seen[2:]) <= {3, 6}  # those of the checkpoint before, too, until this one is written


def test_a_copy_of_a_snapshot_can_be_read(tmp_path: Path) -> None:
    """Also of clients that store nothing, which have no file."""
    seen: list[dict[str, State | None]] = []

    class Keep(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            seen.append(dict(copy.deepcopy(snapshot).clients))

    config = settings("fedavg", "disk", clients={"state": "disk"})
    api.run_config(config, "x", out=tmp_path / "run", callbacks=[Keep()])
    assert list(seen[-1].values()) == [{}, {}, {}]


def test_a_run_whose_states_are_changed_can_be_resumed(tmp_path: Path) -> None:
    """By another program, which writes them anew, so that the checkpoint keeps its own."""
    config = settings("ditto", "disk", model={"name": "mlp"})
    straight = api.run_config(config, "x", out=tmp_path / "straight")

    class Spoil(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            for path in (tmp_path / "run" / "states").iterdir():
                atomic.write(path, b"something else")

    with pytest.raises(RecordError, match=r"run/states/.*safetensors, a client's state, cannot be read"):
        api.run_config(config, "x", out=tmp_path / "run", callbacks=[Spoil()])
    assert not (tmp_path / "run" / "states").exists()
    with pytest.warns(RecordWarning, match="does not match its checksum"):
        resumed = api.resume(tmp_path / "run")
    assert contents(resumed.path) == contents(straight.path)


def test_an_engine_that_fails_to_close_leaves_no_states(tmp_path: Path) -> None:
    class Stuck(InProcess):
        def close(self) -> None:
            raise OSError("stuck")

    config, federation = settings("fedbn", "disk"), fp.make_federation("digits-skew", clients=2, samples=24)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    loop = loop_for(fp.FedBN(), config, federation, Stuck(fp.FedBN(), config, info, federation, CPU))
    with pytest.raises(OSError, match="stuck"):
        loop.run([], folder=tmp_path / "states")
    assert not list(tmp_path.iterdir())


# --- memory ----------------------------------------------------------------------------------------------------------

PEAKS = f"""
import os
import torch
torch.set_num_threads(1)
from fedprism.bench.machine import peak_resident
from {__name__} import FEW, MANY, large_models
for clients, where in ((FEW, "disk"), (MANY, "disk"), (MANY, "memory")):
    large_models(clients, where)
    print(peak_resident(os.getpid()))
"""
FEW, MANY = 32, 80  # clients; whole parts of those that run at a time
MEGABYTES = 4.0  # of a client's model


@dataclass(frozen=True)
class Own(fp.Method):
    """Bodies of one's own, and a small head in common: what is sent takes next to no memory."""

    def shared(self, model: Any, ctx: Any) -> list[str]:
        return [name for name in model.state_dict() if name.startswith("head.")]


def large_models(clients: int, where: str) -> None:
    """Two rounds in which every client trains a model of some megabytes of its own, and is tested."""
    import numpy as np

    images = np.zeros((6, 3, 32, 32), dtype=np.uint8)
    site = {"train": (images, np.arange(6) % 2), "test": (images[:1], np.zeros(1, dtype=int))}
    federation = Federation.from_arrays({f"c{i:03d}": site for i in range(clients)}, validation=0.0)
    config = structure(
        {
            "model": {"name": "mlp", "hidden": [340, 64]},
            "train": {"rounds": 2},
            "clients": {"state": where},
            "evaluate": {"moments": ["received"], "splits": ["test"], "every": 2},
        },
        Config,
    )

    class Tested(Callback):
        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
            assert len(record.up) == (clients if record.round else 0)
            assert len(record.scores["received"]["test"] if record.round != 1 else record.up) == clients

    info = make_info(config, federation.names, federation.classes, federation.shape)
    loop = loop_for(Own(), config, federation, InProcess(Own(), config, info, federation, CPU))
    size = sum(p.numel() * 4 for p in loop.models[loop.info.arch].parameters()) / 2**20
    assert MEGABYTES <= size < MEGABYTES + 0.5
    assert loop.run([Tested()]) == "finished"


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_clients_on_disk() -> None:
    """In a process of its own; a peak never falls, so the one in memory comes last."""
    done = subprocess.run([sys.executable, "-c", PEAKS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    few, many, in_memory = (int(line) / 2**20 for line in done.stdout.split())
    more = (MANY - FEW) * MEGABYTES
    assert many - few < 0.25 * more
    assert in_memory - many > 0.9 * more
