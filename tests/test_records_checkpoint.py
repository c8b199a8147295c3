"""Checkpoints: every bit comes back, nothing is rewritten without need, and damage is found."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedprism.errors import RecordError
from fedprism.methods.base import State
from fedprism.records import RecordWarning, RunDirectory, manifest
from fedprism.records.checkpoint import Checkpoints
from fedprism.records.manifest import Damaged
from fedprism.round.events import Snapshot
from fedprism.store.serialize import deserialize, serialize
from tests.toy_records import (
    CLIENTS,
    DAMAGE,
    checkpoints,
    damage,
    flip,
    identical,
    named_files,
    newest_file,
    results,
    toy_config,
    toy_rounds,
    toy_run,
)


def files(path: Path) -> set[str]:
    return {p.name for p in (path / "checkpoints" / "files").iterdir()}


def test_every_kind_of_tensor_comes_back_bit_by_bit() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "z-last-but-first": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "scalar": torch.tensor(3),
        "truth": torch.tensor(True),
        "transposed": base.t(),
        "view": base[1:],
        "the-same-again": base,
        "expanded": torch.ones(1).expand(5),
        "channels-last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "nothing": torch.empty(0, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "double": torch.rand(2, dtype=torch.float64),
        "parameter": torch.nn.Parameter(torch.rand(2)).detach(),
        "a name with spaces / and ümlauts": torch.rand(1),
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    assert identical(deserialize(serialize(state)), state)
    assert identical(state, before)
    half = {"half": torch.rand(3).half(), "brain": torch.rand(3).bfloat16()}
    assert all(torch.equal(half[name], tensor) for name, tensor in deserialize(serialize(half)).items())


def test_parameters_that_need_gradients_are_written_as_plain_values() -> None:
    weight = torch.nn.Parameter(torch.rand(3))
    assert torch.equal(deserialize(serialize({"weight": weight}))["weight"], weight.detach())


def test_an_empty_server_and_clients_that_never_trained(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(Snapshot(4, {}, {"a": None, "b": {"w": torch.ones(2)}, "c": {}}), keep=())
    back = Checkpoints(tmp_path).load(4)
    assert back.round == 4
    assert back.server == {}
    assert list(back.clients) == ["a", "b", "c"]
    assert back.clients["a"] is None
    assert back.clients["c"] == {}
    assert torch.equal(back.clients["b"]["w"], torch.ones(2))  # type: ignore[index]


def test_what_comes_back_may_be_changed_in_place(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(Snapshot(0, {"w": torch.zeros(2)}, {"a": {"w": torch.zeros(2)}}), keep=())
    back = store.load(0)
    back.server["w"].add_(1)
    assert torch.equal(back.clients["a"]["w"], torch.zeros(2))  # type: ignore[index]
    assert torch.equal(Checkpoints(tmp_path).load(0).server["w"], torch.zeros(2))


def test_an_unchanged_state_is_named_again_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serialised: list[State] = []

    def counted(state: State) -> bytes:
        serialised.append(state)
        return serialize(state)

    monkeypatch.setattr("fedprism.records.checkpoint.serialize", counted)
    store = Checkpoints(tmp_path)
    kept, gone, server = {"w": torch.rand(3)}, {"w": torch.rand(3)}, {"w": torch.rand(3)}
    store.save(Snapshot(0, server, {"a": kept, "b": gone}), keep=())
    before = {p.name: p.stat().st_mtime_ns for p in store.files.iterdir()}
    assert len(serialised) == 3
    new = {"w": torch.rand(3)}
    second = Snapshot(1, dict(server), {"a": kept, "b": new})  # a new dict of the same tensors is the same state
    store.forget(second)
    store.save(second, keep=())
    assert len(serialised) == 4
    assert serialised[-1] is new
    after = {p.name: p.stat().st_mtime_ns for p in store.files.iterdir()}
    assert before.items() <= after.items()
    assert len(after) == 4


def test_equal_states_share_one_file(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(Snapshot(0, {"w": torch.ones(3)}, {n: {"w": torch.ones(3)} for n in CLIENTS}), keep=())
    assert len(list(store.files.iterdir())) == 1


def test_a_resumed_run_writes_no_file_again(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=6)
    with RunDirectory.open(path, write=True) as directory:
        start = directory.latest()
        assert start is not None
        before = {p: p.stat().st_mtime_ns for p in (path / "checkpoints" / "files").iterdir()}
        toy_rounds(toy_config(), [directory.recorder()], start)
    shared = named_files(path, 6) & named_files(path, 7)
    assert shared  # half of the clients rested in round 7
    assert all(p.stat().st_mtime_ns == time for p, time in before.items() if p.name in shared)


def test_kept_are_the_last_two_the_best_and_those_asked_for(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", toy_config(rounds=12, checkpoint_every=1, keep_rounds=(2, 5, 99)))
    best = json.loads((path / "classes.json").read_text())["best"]["round"]
    assert checkpoints(path) == sorted({2, 5, 11, 12, best})
    assert files(path) == set().union(*(named_files(path, round) for round in checkpoints(path)))


def test_written_at_every_kth_round_at_a_new_best_and_at_the_end(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", toy_config(rounds=11, checkpoint_every=4, keep_rounds=tuple(range(12))))
    rounds = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert checkpoints(path) == list(range(12))  # keep_rounds are written too
    path = toy_run(tmp_path / "plain", toy_config(rounds=11, checkpoint_every=4))
    means = [sum(c for c, _, _ in line["scores"]["received"]["validation"].values()) for line in rounds]
    new_best = [r for r, value in enumerate(means) if value > max(means[:r], default=-1)]
    written = sorted({0, 4, 8, 11, *new_best})
    assert set(new_best) - {0, 4, 8, 11}  # otherwise this test shows nothing
    assert checkpoints(path) == sorted({*written[-2:], new_best[-1]})


def test_a_file_goes_only_after_the_next_manifest_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Checkpoints(tmp_path)
    for round in range(3):
        store.save(Snapshot(round, {"w": torch.full((2,), round)}, {}), keep=())
    events: list[str] = []
    replace_file, unlink = os.replace, Path.unlink

    def replaced(source: Path, target: Path) -> None:
        events.append(f"write {Path(target).suffix}")
        replace_file(source, target)

    def unlinked(self: Path, missing_ok: bool = False) -> None:
        events.append(f"delete {self.suffix}")
        unlink(self, missing_ok)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(Path, "unlink", unlinked)
    store.save(Snapshot(3, {"w": torch.full((2,), 3)}, {}), keep=())
    kept = [event for event in events if event != "delete .partial"]
    assert kept == ["write .safetensors", "write .json", "delete .json", "delete .safetensors"]


# --- damage ----------------------------------------------------------------------------------------------------------


def newest_manifest(path: Path) -> Path:
    return path / "checkpoints" / f"manifest-{checkpoints(path)[-1]:06d}.json"


@pytest.mark.parametrize("what", [newest_manifest, newest_file])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(
    tmp_path: Path, what: Callable[[Path], Path], how: str
) -> None:
    straight = results(toy_run(tmp_path / "straight"))
    path = toy_run(tmp_path / "run", until=6)
    rounds = checkpoints(path)
    hurt = what(path)
    DAMAGE[how](hurt)
    if how == "missing" and what is newest_manifest:
        return  # then it never was a checkpoint
    if how == "a folder in its place":
        with RunDirectory.open(path) as directory, pytest.warns(RecordWarning, match=hurt.name):
            assert directory.latest().round == rounds[-2]  # type: ignore[union-attr]
        return
    with pytest.warns(RecordWarning, match=hurt.name) as caught:
        toy_run(path)
    assert len(caught) == 1
    assert results(path) == straight
    with RunDirectory.open(path) as directory, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert directory.latest().round == 7  # type: ignore[union-attr]
        for round in checkpoints(path):
            directory.at(round)


def test_every_flipped_byte_of_a_manifest_is_found_or_harmless(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(Snapshot(5, {"w": torch.ones(2)}, {"a": {"w": torch.zeros(2)}, "b": None}), keep=())
    path = store.manifest(5)
    sound = path.read_bytes()
    for place in range(len(sound)):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        try:
            back = Checkpoints(tmp_path).load(5)
        except Damaged:
            continue
        assert list(back.clients) == ["a", "b"], f"byte {place}"
        assert torch.equal(back.server["w"], torch.ones(2)), f"byte {place}"


def test_a_damaged_file_is_written_again_when_its_content_comes_again(tmp_path: Path) -> None:
    """After a fall-back the same states are computed again: their files exist by name, but must not be trusted."""
    path = toy_run(tmp_path / "run", toy_config(checkpoint_every=1), until=6)
    damage(newest_file(path), flip)
    with pytest.warns(RecordWarning):
        toy_run(path)
    with RunDirectory.open(path) as directory:
        assert checkpoints(path)[-2:] == [6, 7]
        directory.at(6)


def test_none_left_is_an_error_and_not_a_new_start(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=5)
    before = (path / "metrics.jsonl").read_bytes()
    for each in (path / "checkpoints").glob("*.json"):
        damage(each, flip)
    with (
        RunDirectory.open(path, write=True) as directory,
        pytest.warns(RecordWarning),
        pytest.raises(RecordError, match=r"none of them can be used.*from a copy"),
    ):
        directory.latest()
    shutil.rmtree(path / "checkpoints")
    with (
        RunDirectory.open(path, write=True) as directory,
        pytest.raises(RecordError, match=r"has recorded 6 rounds, but .*checkpoints is missing"),
    ):
        directory.latest()
    assert (path / "metrics.jsonl").read_bytes() == before


def test_the_best_is_by_validation_and_falls_back_to_the_newest(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", toy_config(rounds=20))
    best = json.loads((path / "classes.json").read_text())["best"]["round"]
    assert best < 18  # otherwise this test shows nothing
    with RunDirectory.open(path) as directory:
        assert directory.best().round == best  # type: ignore[union-attr]
        damage(path / "checkpoints" / f"manifest-{best:06d}.json", flip)
        with pytest.warns(RecordWarning, match="newest checkpoint is used instead"):
            assert directory.best().round == 20  # type: ignore[union-attr]
        with pytest.raises(RecordError, match="no checkpoint of round 1; it has"):
            directory.at(1)


def test_a_damaged_manifest_is_not_counted_among_the_last_two(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    for round in range(3):
        store.save(Snapshot(round, {"w": torch.full((2,), round)}, {}), keep=(0, 1))
    damage(store.manifest(1), flip)
    with pytest.warns(RecordWarning, match="the checkpoint of round 1, which was to be kept, is lost"):
        store.save(Snapshot(3, {"w": torch.full((2,), 3)}, {}), keep=(0, 1))
    assert store.rounds() == [0, 2, 3]
    for round in store.rounds():
        assert torch.equal(Checkpoints(tmp_path).load(round).server["w"], torch.full((2,), round))


def test_a_run_of_another_version_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 3)
    store = Checkpoints(tmp_path)
    store.save(Snapshot(1, {}, {}), keep=())
    monkeypatch.undo()
    with pytest.raises(RecordError, match=r"manifest-000001.json has format 3, .* reads format 4. Nothing is damaged"):
        store.load(1)


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    store = Checkpoints(tmp_path)
    store.save(Snapshot(1, {}, {}), keep=())
    store.manifest(1).rename(store.manifest(2))
    with pytest.raises(Damaged, match=r"manifest-000002.json is not the manifest of round 2"):
        store.load(2)


def test_a_checkpoint_ahead_of_the_metrics_is_passed_over(tmp_path: Path) -> None:
    straight = results(toy_run(tmp_path / "straight"))
    path = toy_run(tmp_path / "run", until=6)
    damage(path / "metrics.jsonl", lambda data: b"".join(data.splitlines(keepends=True)[:6]))
    with pytest.warns(RecordWarning, match=r"manifest-000006.json is ahead of metrics.jsonl"):
        toy_run(path)
    assert results(path) == straight


def test_states_on_a_snapshot_are_not_changed_by_saving(tmp_path: Path) -> None:
    weight = torch.rand(4)
    snapshot = Snapshot(0, {"w": weight, "tied": weight}, {})
    Checkpoints(tmp_path).save(snapshot, keep=())
    assert snapshot.server["w"] is snapshot.server["tied"]
    Checkpoints(tmp_path).save(replace(snapshot, round=1), keep=())
    assert len(list((tmp_path / "files").iterdir())) == 1
