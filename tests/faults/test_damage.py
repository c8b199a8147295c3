"""Damaged, missing and foreign files in a run directory: what is lost, what is said, and what repairs it."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedprism as fp
from fedprism.cli import app
from fedprism.errors import FedprismError, RecordError
from fedprism.records import RecordWarning, RoundRecord, RunDirectory, outcome, read_run
from fedprism.records.fsck import fsck as check
from fedprism.round.events import Snapshot
from tests.faults.cases import in_child
from tests.faults.injection import as_any_user
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
    toy_run,
)

STATES = ["memory", "disk"]


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def fsck(path: Path, *options: str) -> tuple[int, str]:
    found = call("fsck", path, *options)
    return found.exit_code, found.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Toy runs, made once: a fresh copy of the one that is asked for."""
    runs: dict[tuple[str, int | None], Path] = {}
    copies = tmp_path_factory.mktemp("copies")

    def copy(until: int | None = None, state: str = "memory") -> Path:
        if (state, until) not in runs:
            path = tmp_path_factory.mktemp("made") / "run"
            runs[state, until] = toy_run(path, toy_config(state=state, checkpoint_every=1), until=until)
        path = copies / f"{len(list(copies.iterdir()))}" / "run"
        return Path(shutil.copytree(runs[state, until], path))

    return copy


def shared_file(path: Path) -> Path:
    """A file that all kept checkpoints name: of a client that did not train in between."""
    names = set.intersection(*(named_files(path, round) for round in checkpoints(path)[-2:]))
    return path / "checkpoints" / "files" / min(names)


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings about what was damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordWarning)
        yield


def states_of(path: Path) -> dict[str, Any]:
    with RunDirectory.open(path) as directory:
        snapshot = directory.latest()
    assert snapshot is not None
    return {name: state and {leaf: t.clone() for leaf, t in state.items()} for name, state in snapshot.clients.items()}


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_that_checkpoints_share_costs_nothing(made: Callable[..., Path], how: str, state: str) -> None:
    straight, path = results(made(None, state)), made(5, state)
    before, hurt = states_of(path), shared_file(path)
    whole = hurt.read_bytes()
    DAMAGE[how](hurt)
    with pytest.warns(RecordWarning, match=f"{hurt.name}.*: its copy is used"):
        after = states_of(path)
    assert all(identical(after[name] or {}, before[name] or {}) for name in CLIENTS)
    if how != "a folder in its place":
        with pytest.warns(RecordWarning, match="its copy is used"), RunDirectory.open(path, write=True) as directory:
            directory.latest()
        assert hurt.read_bytes() == whole, "a run that goes on replaces it"
        toy_run(path)
        assert results(path) == straight


@pytest.mark.parametrize("state", STATES)
def test_copies_take_no_more_room_than_checkpoints_without_sharing(tmp_path: Path, state: str) -> None:
    path = toy_run(tmp_path / "run", toy_config(state=state, checkpoint_every=1, keep_rounds=(2, 4)))
    files, copies = (path / "checkpoints" / name for name in ("files", "copies"))
    size = {file.name: file.stat().st_size for file in files.iterdir()}
    apart = sum(size[name] for round in checkpoints(path) for name in named_files(path, round))
    assert sum(size.values()) + sum(file.stat().st_size for file in copies.iterdir()) <= apart
    named = [named_files(path, round) for round in checkpoints(path)]
    assert {file.name for file in copies.iterdir()} == {n for n in size if sum(n in each for each in named) > 1}
    for copy in copies.iterdir():
        assert not copy.samefile(files / copy.name), "a second name would be damaged with the first"


class Stop(fp.Callback):
    """Interrupts a run after a round."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        if record.round == self.after:
            raise KeyboardInterrupt


def ditto(out: Path, state: str = "memory", callbacks: Sequence[fp.Callback] = ()) -> fp.Run:
    """A small run whose clients store models, and whose best round is not the first state."""
    federation = fp.make_federation("digits-skew", clients=3, seed=0, samples=40)
    settings = [f"clients.state={state}", "run.engine=inprocess", "train.optimizer.lr=0.2", "train.epochs=3"]
    return fp.train(federation, "ditto", "mlp", rounds=4, out=out, settings=settings, callbacks=callbacks)


def lose(path: Path, client_id: str) -> None:
    """Damage every file, and every copy, of one client."""
    for manifest in (path / "checkpoints").glob("manifest-*.json"):
        checksum = json.loads(manifest.read_text())["clients"][client_id]
        for file in (path / "checkpoints").glob(f"*/{checksum}.safetensors") if checksum else ():
            damage(file, flip)


@pytest.mark.parametrize("state", STATES)
def test_a_lost_client_costs_no_other(tmp_path: Path, state: str) -> None:
    """On request it begins anew; the records and every table say so."""
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        ditto(path, state, [Stop(after=3)])
    before = states_of(path)
    lose(path, "plain")
    with quietly(), pytest.raises(RecordError, match=r"lacks only the state of plain.*--reset-damaged"):
        fp.resume(path)
    code, text = fsck(path)
    assert (code, "--reset-damaged" in text, "the state of plain (" in text) == (1, True, True)
    with RunDirectory.open(path) as directory:
        snapshot = directory.latest(lost := [])
    assert lost == ["plain"]
    assert snapshot is not None
    assert snapshot.clients["plain"] is None
    assert all(identical(snapshot.clients[n] or {}, before[n] or {}) for n in before if n not in lost)
    done = fp.resume(path, reset_damaged=True)
    assert done.status == "finished"
    assert done.record.info["resumed"][-1]["reset"] == lost
    note = "after round 3, plain began anew, the state being lost"
    assert note in str(done.table())
    entry = done.record.info["resumed"][-1]
    for later, count in ((3, 1), (2, 0)):  # it was killed and resumed again: with the same loss, or before it
        resumed = [entry, {**entry, "round": later, "reset": lost if later == 3 else []}]
        record = replace(done.record, info={**done.record.info, "resumed": resumed})
        assert sum(note in each for each in outcome(record).notes) == count


@pytest.mark.parametrize("state", STATES)
def test_no_client_begins_anew_while_a_checkpoint_is_whole(made: Callable[..., Path], state: str) -> None:
    path = made(5, state)
    server = json.loads(newest_manifest(path).read_text())["server"]
    file = min(named_files(path, 5) - named_files(path, 4) - {f"{server}.safetensors"})
    damage(path / "checkpoints" / "files" / file, flip)
    said = pytest.warns(RecordWarning, match=r"manifest-000005.* the checkpoint of round 4 is used")
    with said, RunDirectory.open(path) as directory:
        snapshot = directory.latest(lost := [])
    assert snapshot is not None
    assert (snapshot.round, lost) == (4, [])


def test_a_kept_checkpoint_is_not_lost_without_a_word(tmp_path: Path) -> None:
    """A run that goes on deletes what it can never use again; before, somebody may have a copy of its manifest."""
    path = toy_run(tmp_path / "run", toy_config(checkpoint_every=1, keep_rounds=(2,)), until=5)
    manifest = path / "checkpoints" / "manifest-000002.json"
    damage(manifest, flip)
    assert f"{manifest} does not match its checksum: it is moved aside; the checkpoint of round 5" in fsck(path)[1]
    with pytest.warns(RecordWarning, match=f"{manifest} does not match its checksum: the checkpoint of round 2"):
        toy_run(path)


def test_models_of_the_other_clients_can_be_had(tmp_path: Path) -> None:
    done = ditto(tmp_path / "run")
    x = fp.make_federation("digits-skew", clients=3, seed=0, samples=40).clients["tinted"].test.x
    expected = done.models["tinted"].predict(x)
    lose(done.path, "plain")
    again = fp.load(done.path)
    assert (again.models["tinted"].predict(x) == expected).all()
    with pytest.raises(RecordError, match=r"the state of client 'plain' in .* is damaged"):
        again.models["plain"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are of Unix")
@pytest.mark.parametrize("how", ["a flipped bit", "a pipe in its place"])
def test_a_run_that_goes_on_replaces_damaged_copies(tmp_path: Path, how: str) -> None:
    """Until then a copy protects nothing; a run that trusted its name would never notice."""
    path = toy_run(tmp_path / "run", toy_config(checkpoint_every=1, keep_rounds=(4, 5)), until=5)
    copy = path / "checkpoints" / "copies" / shared_file(path).name
    if how == "a flipped bit":
        DAMAGE[how](copy)
    else:
        copy.unlink()
        os.mkfifo(copy)
    toy_run(path)
    assert copy.exists()
    assert fsck(path)[0] == 0


def best_round(path: Path) -> int:
    """The round that has a checkpoint for being the best, and for nothing else."""
    (round,) = checkpoints(path)[:-2]
    return round


def test_a_manifest_that_cannot_be_read_for_once_stays(made: Callable[..., Path]) -> None:
    path = made(6)
    best = best_round(path)
    failed: list[str] = []

    def fail_once(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).endswith(f"manifest-{best:06d}.json") and not failed:
            failed.append(event)
            raise OSError(errno.EIO, os.strerror(errno.EIO), arguments[0])

    ended = in_child(lambda: print(toy_run(path), failed), path, 60, lambda: sys.addaudithook(fail_once))
    assert (ended.code, ended.out) == (0, f"{path} ['open']\n"), ended.err
    whole = made()
    assert results(path) == results(whole)
    assert named_files(path, best) == named_files(whole, best_round(whole))
    assert fsck(path)[0] == 0


@pytest.mark.parametrize("what", ["manifest", "copies"])
def test_folders_in_the_place_of_files_that_can_be_done_without_stay(made: Callable[..., Path], what: str) -> None:
    path, copies = made(6), made() / "checkpoints" / "copies"  # those that it will have
    places = [path / "checkpoints" / "copies" / copy.name for copy in copies.iterdir()]
    if what == "manifest":
        places = [path / "checkpoints" / f"manifest-{best_round(path):06d}.json"]
    for place in places:
        place.unlink(missing_ok=True)
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        toy_run(path)
    words = " ".join(str(each.message) for each in said)
    assert what == "manifest" or all(f"{place} is a folder" in words for place in places)
    assert all((place / "mine.txt").read_text() == "mine" for place in places)
    assert results(path) == results(made())


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", [None, 5])
def test_rounds_that_are_missing_from_the_metrics_are_missed(made: Callable[..., Path], until: int | None) -> None:
    """A finished run with fewer rounds on file would be shown, and compared, with other figures."""
    path = made(until)
    done = 7 if until is None else until
    damage(path / "metrics.jsonl", lambda data: b"".join(data.splitlines(keepends=True)[:3]))
    with pytest.raises(RecordError, match=f"metrics.jsonl ends at round 2, but the run has got to round {done}"):
        read_run(path)
    assert call("show", path).exit_code == 2


def test_the_metrics_of_a_longer_run_are_not_those_of_one_that_has_ended(tmp_path: Path) -> None:
    """Restored from the wrong copy, they would be shown, and compared, with figures of rounds that never were."""
    path, other = toy_run(tmp_path / "run"), toy_run(tmp_path / "other", toy_config(rounds=9, seed=1))
    shutil.copy(other / "metrics.jsonl", path)
    with pytest.raises(RecordError, match=r"metrics\.jsonl ends at round 9, but the run has got to round 7"):
        read_run(path)
    for options in ((), ("--repair",)):
        code, text = fsck(path, *options)
        assert (code, "it is that of another run" in text) == (1, True)


def test_a_changed_bit_never_changes_a_table(made: Callable[..., Path]) -> None:
    path, chance = made(), random.Random(0)
    before = outcome(read_run(path))
    for name in ("metrics.jsonl", "run.json", "classes.json"):
        whole = (path / name).read_bytes()
        for place in [*range(3), *(chance.randrange(len(whole)) for _ in range(40)), len(whole) - 2, len(whole) - 1]:
            changed = bytearray(whole)
            changed[place] ^= 1 << chance.randrange(8)
            (path / name).write_bytes(changed)
            with pytest.warns(RecordWarning) if name == "classes.json" else pytest.raises(RecordError):
                found = outcome(read_run(path))
                assert found.accuracy == before.accuracy
                assert found.balanced == {}
        (path / name).write_bytes(whole)
    assert outcome(read_run(path)) == before


def test_a_run_does_not_go_on_from_a_damaged_line(made: Callable[..., Path]) -> None:
    path = made(5)
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    changed = lines[1].replace(b'"north":101', b'"north":102')
    assert changed != lines[1]
    (path / "metrics.jsonl").write_bytes(b"".join([lines[0], changed, *lines[2:]]))
    with pytest.raises(RecordError, match="is damaged in line 2"):
        toy_run(path)


def test_a_damaged_configuration_is_named(made: Callable[..., Path]) -> None:
    path = made(5)
    damage(path / "config.yaml", lambda data: data.replace(b"server:", b"sdrver:"))
    with pytest.raises(RecordError, match=r"config.yaml cannot be used; .*fsck .* --repair.*: unknown key 'sdrver'"):
        toy_run(path)
    assert fsck(path, "--repair")[0] == 0
    assert results(toy_run(path)) == results(made())


# --- links -----------------------------------------------------------------------------------------------------------


def outside(tmp_path: Path) -> Path:
    """Somebody's folder, with files of the names that a run deletes."""
    folder = tmp_path / "precious"
    folder.mkdir()
    for name in (f"{'0' * 64}.safetensors", ".x.partial", "timings.jsonl", "manifest-000001.json"):
        (folder / name).write_text("mine\n")
    return folder


@pytest.mark.parametrize(
    "name",
    ["checkpoints", "checkpoints/files", "checkpoints/copies", "states", "timings.jsonl", "metrics.jsonl", ".lock"],
)
def test_nothing_is_read_written_or_deleted_through_a_link(
    tmp_path: Path, made: Callable[..., Path], name: str
) -> None:
    precious, path = outside(tmp_path), made(5)
    there = path / name
    if there.exists():
        there.rename(tmp_path / "moved")
    there.symlink_to(precious if "." not in name else precious / "timings.jsonl")
    before = {file.name: file.read_bytes() for file in precious.iterdir()}
    with pytest.raises(RecordError, match=f"{there} is a link"):
        toy_run(path)
    assert fsck(path)[0] == 1
    assert fsck(path, "--repair")[0] in (0, 1)
    assert not there.is_symlink()
    assert {file.name: file.read_bytes() for file in precious.iterdir()} == before


def test_a_file_with_a_second_name_elsewhere_is_not_appended_to(tmp_path: Path, made: Callable[..., Path]) -> None:
    """As in a copy of a run that was made with hard links."""
    path = made(5)
    shutil.copytree(path, tmp_path / "copy", copy_function=os.link, ignore=shutil.ignore_patterns(".lock"))
    before = {name: (tmp_path / "copy" / name).read_bytes() for name in ("metrics.jsonl", "timings.jsonl")}
    toy_run(path)
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in before} == before


def test_a_temporary_file_that_is_a_link_is_not_followed(tmp_path: Path, made: Callable[..., Path]) -> None:
    path, victim = made(5), tmp_path / "victim"
    victim.write_text("mine")
    (path / ".run.json.partial").symlink_to(victim)
    toy_run(path)
    assert victim.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names are of Unix")
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "timings.jsonl", "classes.json", "config.yaml"])
def test_a_pipe_in_place_of_a_record_does_not_hang(made: Callable[..., Path], name: str) -> None:
    path = made(5)
    (path / name).unlink()
    os.mkfifo(path / name)
    for act in (toy_run, read_run):
        with pytest.raises(FedprismError, match=r"regular file|is not empty"):
            act(path)
    code, text = fsck(path)
    assert (code, f"{name} is no regular file" in text) == (1, True)


# --- fsck ------------------------------------------------------------------------------------------------------------


def newest_manifest(path: Path) -> Path:
    return path / "checkpoints" / f"manifest-{checkpoints(path)[-1]:06d}.json"


QUICK = {("a flipped bit", 5), ("missing", None)}  # the others take a minute
PLACES = {
    "run.json": lambda path: path / "run.json",
    "config.yaml": lambda path: path / "config.yaml",
    "metrics": lambda path: path / "metrics.jsonl",
    "timings": lambda path: path / "timings.jsonl",
    "classes": lambda path: path / "classes.json",
    "manifest": newest_manifest,
    "file": newest_file,
    "shared file": shared_file,
    "copy": lambda path: path / "checkpoints" / "copies" / shared_file(path).name,
}


def test_fsck_misses_a_manifest(made: Callable[..., Path]) -> None:
    """Its files are there, and nothing names them."""
    path = made()
    newest_manifest(path).unlink()
    code, text = fsck(path)
    assert (code, "is named by no checkpoint" in text) == (1, True)
    fsck(path, "--repair")
    assert fsck(path)[0] == 0


@pytest.mark.parametrize(
    ("how", "until"),
    [
        pytest.param(how, until, marks=() if (how, until) in QUICK else pytest.mark.slow)
        for how in DAMAGE
        for until in (None, 5)
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_fsck_finds_damage_and_repairs_it(made: Callable[..., Path], place: str, how: str, until: int | None) -> None:
    """What was whole is kept, and what was replaced; a run that goes on ends with the bits of one without damage."""
    straight, path = results(made()), made(until)
    assert fsck(path)[0] == 0
    hurt = PLACES[place](path)
    before = hurt.read_bytes()
    DAMAGE[how](hurt)
    after = hurt.read_bytes() if hurt.is_file() else None
    code, text = fsck(path)
    unseen = (how, place) in {("cut short", "config.yaml"), ("longer", "metrics")}  # a default, and a torn line
    unseen |= place == "timings" and how != "missing"
    if code == 0:
        assert unseen
    else:
        assert (str(hurt.relative_to(path)) if hurt.exists() or place != "manifest" else "named by no") in text
    fsck(path, "--repair")
    code, text = fsck(path)
    assert code == 0 or place == "file", text
    kept = [each.read_bytes() for each in path.glob("replaced-*/**/*") if each.is_file()]
    if after is not None and (not hurt.is_file() or hurt.read_bytes() != after):
        assert after in kept
    assert before not in kept or place == "metrics" or after == before
    if until is None and read_run(path).status == "finished":
        return
    with quietly():
        toy_run(path)
    ended = results(path)
    assert ended["metrics.jsonl"] == straight["metrics.jsonl"]
    assert ended["classes.json"] == straight["classes.json"] or place == "classes"
    assert ended["config.yaml"] == straight["config.yaml"] or unseen


def test_fsck_misses_checkpoints_and_says_what_is_left_without(made: Callable[..., Path]) -> None:
    for until in (None, 5):
        path = made(until)
        last = checkpoints(path)[-1]
        for round in checkpoints(path):
            damage(path / "checkpoints" / f"manifest-{round:06d}.json", flip)
        code, text = fsck(path)
        assert (code, "there is none before it" in text) == (1, True)
        assert f"the checkpoint of round {last}" not in text
        for _ in range(2):
            code, text = fsck(path, "--repair")
            assert (code, "the run cannot go on" in text) == (1, True)
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
        assert call("show", path).exit_code == 0


def test_clients_can_begin_anew_only_where_the_server_is_known(made: Callable[..., Path]) -> None:
    path = made(5)
    shutil.rmtree(path / "checkpoints" / "files")
    shutil.rmtree(path / "checkpoints" / "copies")
    code, text = fsck(path)
    assert (code, "the server's state" in text, "the state of north" in text) == (1, True, True)
    assert "--reset-damaged" not in text
    with quietly(), pytest.raises(RecordError, match="none of them can be used"):
        RunDirectory.open(path).latest()


def test_what_lies_behind_a_link_is_said_to_be_needed(tmp_path: Path, made: Callable[..., Path]) -> None:
    path = made(5)
    (path / "checkpoints" / "files").rename(tmp_path / "files")
    (path / "checkpoints" / "files").symlink_to(tmp_path / "files")
    code, text = fsck(path)
    assert (code, "put a copy of it here" in text, "The rest was not checked" in text) == (1, True, True)
    assert "round" not in text


def test_what_fsck_has_replaced_is_no_run_of_its_own(made: Callable[..., Path]) -> None:
    path = made()
    damage(path / "metrics.jsonl", lambda data: b"".join(data.splitlines(keepends=True)[:3]))
    assert fsck(path, "--repair")[0] == 0
    assert (path / "replaced-1" / "run.json").exists()
    toy_run(path)
    shutil.copytree(path, path.with_name(".other.replaced"))  # as while a run is replaced
    found = call("show", path.parent)
    assert (found.exit_code, found.output.count("toy")) == (0, 1), found.output


def test_a_run_without_its_first_file_is_sent_to_fsck(made: Callable[..., Path]) -> None:
    path = made()
    (path / "run.json").unlink()
    for command in ("show", "resume"):
        found = call(command, path)
        assert (found.exit_code, "run.json is missing" in found.output, "fsck" in found.output) == (2, True, True)


def test_each_damaged_checkpoint_is_warned_about_once(made: Callable[..., Path]) -> None:
    path = made(5)
    for round in checkpoints(path):
        damage(path / "checkpoints" / f"manifest-{round:06d}.json", flip)
    with pytest.warns(RecordWarning) as said, pytest.raises(RecordError, match="none of them can be used"):
        RunDirectory.open(path).latest()
    assert len(said) == len(checkpoints(path))


@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/files", "metrics.jsonl", "run.json", "config.yaml", "file"]
)
def test_what_may_not_be_read_is_not_taken_for_damaged(made: Callable[..., Path], name: str) -> None:
    path = made(5)
    there = path / name if name != "file" else newest_file(path)
    mode = there.stat().st_mode
    there.chmod(0)
    try:
        with as_any_user():
            for options in ((), ("--repair",)):
                code, text = fsck(path, *options)
                assert (code, f"{there} may not be read" in text, "damaged:" in text) == (2, True, False)
            with pytest.raises(RecordError, match="Permission denied"):
                toy_run(path)
    finally:
        there.chmod(mode)
    assert fsck(path)[0] == 0
    assert not list(path.glob("replaced-*"))


@pytest.mark.parametrize("until", [None, 5])
def test_fsck_misses_checkpoints_that_are_gone(made: Callable[..., Path], until: int | None) -> None:
    path = made(until)
    newest_manifest(path).unlink()
    code, text = fsck(path)
    assert (code, "is missing" in text, "--repair" in text) == (1, True, True)
    assert fsck(path, "--repair")[0] == 0
    assert read_run(path).status == "interrupted"
    toy_run(path)
    assert results(path) == results(made())
    shutil.rmtree(path / "checkpoints")
    code, text = fsck(path, "--repair")
    assert (code, "what it has recorded can be read" in text) == (1, True)


def test_a_state_of_the_last_checkpoint_that_is_lost_can_be_computed_again(made: Callable[..., Path]) -> None:
    """Also of a run that has finished, which `resume` alone would leave alone."""
    path = made()
    newest_file(path).unlink()
    assert "--repair" in fsck(path)[1]
    assert fsck(path, "--repair")[0] == 1
    with quietly():
        toy_run(path)
    assert fsck(path)[0] == 0
    assert results(path) == results(made())


def test_nothing_is_moved_through_a_link_by_a_repair(tmp_path: Path, made: Callable[..., Path]) -> None:
    """Neither through one that came with the run, nor through one that an earlier repair has moved aside."""
    precious, path = outside(tmp_path), made()
    before = sorted(precious.iterdir())
    (path / "replaced-1").symlink_to(precious)
    (path / "replaced-2").write_text("mine")
    newest_manifest(path).rename(tmp_path / "manifest-000007.json")
    (path / "checkpoints").rename(tmp_path / "elsewhere")
    (path / "checkpoints").symlink_to(precious)
    fsck(path, "--repair")
    shutil.copytree(tmp_path / "elsewhere", path / "checkpoints")
    for hurt in (path / "classes.json", newest_manifest(path)):
        damage(hurt, flip)
    assert fsck(path, "--repair")[0] == 0
    assert sorted(precious.iterdir()) == before
    assert (path / "replaced-3" / "checkpoints").is_symlink()
    assert (path / "replaced-4" / "checkpoints").is_dir()
    assert (path / "replaced-2").read_text() == "mine"


def test_a_run_that_is_being_written_is_not_taken_for_damaged(made: Callable[..., Path]) -> None:
    path = made(5)
    with RunDirectory.open(path, write=True):
        newest_manifest(path).unlink()  # as when it is pruned in between
        with pytest.raises(RecordError, match="being written"):
            check(path)
    assert check(path).findings


def test_what_a_repair_has_replaced_is_no_run(tmp_path: Path, made: Callable[..., Path]) -> None:
    path = made()
    damage(path / "run.json", flip)
    fsck(path, "--repair")
    assert (path / "replaced-1" / "run.json").exists()
    assert call("show", path.parent).exit_code == 0


def test_a_run_without_run_json_is_not_left_out(made: Callable[..., Path]) -> None:
    path = made()
    (path / "run.json").unlink()
    shown = call("show", path.parent)
    assert (shown.exit_code, "run.json is missing" in shown.output, "fedprism fsck" in shown.output) == (2, True, True)


def test_timings_that_are_nested_too_deeply_are_left_out(made: Callable[..., Path]) -> None:
    path = made()
    (path / "timings.jsonl").write_text("[" * 100_000 + "]" * 100_000 + "\n")
    assert all(not entry.seconds for entry in read_run(path).rounds)
    assert fsck(path, "--repair")[0] == 0


def test_a_configuration_that_was_cut_short_does_not_become_another_one(made: Callable[..., Path]) -> None:
    """Each key that is missing at its end has a default."""
    path = made(5)
    lines = (path / "config.yaml").read_text().splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if line.startswith("run:"))
    (path / "config.yaml").write_text("".join(lines[:end]))
    (path / "run.json").unlink()
    code, text = fsck(path, "--repair")
    assert (code, "config.yaml is not as it was written, either" in text) == (1, True)
    assert not (path / "run.json").exists()


def test_a_page_does_not_replace_a_record(made: Callable[..., Path]) -> None:
    path = made()
    before = (path / "run.json").read_bytes()
    assert call("show", path, "--report", path / "run.json").exit_code == 2
    assert (path / "run.json").read_bytes() == before


def test_the_root_is_no_run() -> None:
    with pytest.raises(RecordError, match="is not a run directory"):
        RunDirectory.open("/", write=True)


def test_a_run_that_lost_its_run_json_does_not_go_on_with_other_clients(made: Callable[..., Path]) -> None:
    path = made(5)
    (path / "run.json").unlink()
    fsck(path, "--repair")
    with quietly(), pytest.raises(RecordError, match="was begun with the clients north"):
        fp.resume(path, federation=fp.make_federation("digits-skew", clients=3, samples=40))
