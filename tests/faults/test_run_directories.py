"""The life of a run directory: made, replaced, moved, resumed, removed. Nothing that is not the run's own is lost."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedprism as fp
from fedprism.cli import app
from fedprism.methods.base import Method
from fedprism.records import RecordWarning, run_status
from fedprism.records.sealed import seal, unseal
from fedprism.round.events import RoundRecord, Snapshot
from fedprism.store.clients import DiskStore
from tests.faults.injection import as_any_user

SMALL = ["run.device=cpu", "run.checkpoint_every=2", "run.engine=inprocess"]
ROUNDS = 3

OWN = '''
"""A method that leaves a trace when its file is executed."""
from dataclasses import dataclass
from pathlib import Path
import fedprism as fp
from fedprism.methods.base import Method

Path(__file__).with_name("executed").touch()

@dataclass(frozen=True)
class Own(Method):
    id = "own"
'''


@dataclass(frozen=True)
class Own(Method):
    """The same method."""

    id = "own"


@pytest.fixture(scope="module")
def two() -> fp.Federation:
    return fp.make_federation("digits-skew", clients=2, seed=0, samples=20)


@pytest.fixture(scope="module")
def straight(two: fp.Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs; do not change it."""
    return train(two, tmp_path_factory.mktemp("straight") / "run")


@pytest.fixture
def old(straight: Path, tmp_path: Path) -> Path:
    """A finished run, with one round less than the others."""
    shutil.copytree(straight, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    disk, mount = tmp_path / "disk", shutil.which("mount")
    disk.mkdir()
    command = [mount or "", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system, on Linux")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(disk: Path) -> Path:
    """Leave no byte free; deleting the file that is returned makes room again."""
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(disk).free))
    return ballast


class At(fp.Callback):
    """Does something at one moment of a run: at its beginning (None), or when a round is over."""

    def __init__(self, when: int | None, act: Callable[[], object]) -> None:
        self.when, self.act = when, act

    def begin(self, plan: object) -> None:
        if self.when is None:
            self.act()

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        if record.round == self.when:
            self.act()


class Interrupted(fp.Callback):
    """Ctrl-C after the run has begun, and before round 0 is recorded: while the first models are tested."""

    def clients(self, done: int, total: int) -> None:
        raise KeyboardInterrupt


def train(two: fp.Federation, out: Path, *callbacks: fp.Callback, settings: tuple[str, ...] = (), **more: Any) -> Path:
    settings = (*SMALL, *settings)
    fp.train(two, more.pop("method", "ditto"), "mlp", ROUNDS, out=out, settings=settings, callbacks=callbacks, **more)
    return out


def stop() -> None:
    raise KeyboardInterrupt


def fail(words: str) -> None:
    raise RuntimeError(words)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content, but for locks, which are empty and come and go."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.name != ".lock"}
    return {name: path.read_bytes() if path.is_file() else None for name, path in found.items()}


def results(path: Path) -> list[bytes]:
    return [(path / name).read_bytes() for name in ("metrics.jsonl", "classes.json")]


def call(*arguments: Any) -> tuple[int, str]:
    """A command: its exit code, and what it prints as one line."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])
    assert "Traceback" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


def in_child(work: Callable[[], object]) -> int:
    """Do it in a forked child; its exit status, as a shell counts it."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            signal.alarm(120)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the child's life
            work()
            code = 0
        except KeyboardInterrupt:
            code = 130
        except BaseException:  # noqa: BLE001 - a forked child must not go on with its parent's work
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_operation(number: int, act: Callable[[], object]) -> Callable[[], int]:
    """Do something before the n-th operation on a file; returns how to count them. Only for a forked child."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event == "open" or (event.startswith(("os.", "shutil.", "fcntl.")) and event != "os.kill"):
            count += 1
            if count == number:
                act()

    sys.addaudithook(hook)
    return lambda: count


# --- a run that fails before anything is recorded --------------------------------------------------------------------


def test_a_failed_run_removes_only_what_it_has_made(two: fp.Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def act() -> None:
        (out / "notes.txt").write_text("mine")
        (out / "checkpoints" / "mine").mkdir()
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        train(two, out, At(None, act))
    assert tree(out) == {"notes.txt": b"mine", "checkpoints": None, "checkpoints/mine": None}
    for last in (At(None, stop), Interrupted()):
        with pytest.raises(KeyboardInterrupt):
            train(two, tmp_path / "other", last)
        assert not (tmp_path / "other").exists()


def test_a_file_that_has_taken_the_place_of_the_runs_own_stays(two: fp.Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def act() -> None:
        (tmp_path / "mine").write_text("seed: 7\n")
        (tmp_path / "mine").replace(out / "config.yaml")
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        train(two, out, At(None, act))
    assert tree(out) == {"config.yaml": b"seed: 7\n"}


def test_a_folder_that_has_taken_the_runs_place_stays(two: fp.Federation, tmp_path: Path) -> None:
    out = tmp_path / "run"

    def act() -> None:
        out.rename(tmp_path / "moved")
        out.mkdir()
        (out / "thesis.txt").write_text("years of work")
        (out / "run.json").write_text("{}")
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        train(two, out, At(None, act))
    assert tree(out) == {"thesis.txt": b"years of work", "run.json": b"{}"}


def test_an_empty_folder_that_was_there_before_stays(two: fp.Federation, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(two, tmp_path, At(None, stop))
    assert list(tmp_path.iterdir()) == []
    train(two, tmp_path)


# --- replacing a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_run_comes_back_when_its_successor_fails(two: fp.Federation, old: Path, error: type[BaseException]) -> None:
    before = tree(old)

    def act() -> None:
        assert run_status(old) == "running"
        raise error

    with pytest.raises(error):
        train(two, old, At(None, act), overwrite=True)
    assert tree(old) == before
    assert [path.name for path in old.parent.iterdir()] == ["run"]


def test_a_run_goes_when_its_successor_is_on_disk_and_other_files_stay(two: fp.Federation, old: Path) -> None:
    (old / "plot.png").write_bytes(b"mine")
    started = json.loads((old / "run.json").read_text())["started"]
    with pytest.raises(KeyboardInterrupt):
        train(two, old, At(0, stop), overwrite=True, settings=("seed=0", "train.epochs=2"))
    assert run_status(old) == "interrupted"
    assert json.loads((old / "run.json").read_text())["config"]["train"]["epochs"] == 2, started
    assert (old / "plot.png").read_bytes() == b"mine"
    assert [path.name for path in old.parent.iterdir()] == ["run"]


def test_a_users_files_are_not_left_behind_by_an_interruption(two: fp.Federation, old: Path) -> None:
    """They move to the successor one by one, after the old run's files have been deleted."""
    for name in ("a.txt", "b.txt"):
        (old / name).write_text("mine")

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

        once = [lambda: os.kill(os.getpid(), signal.SIGINT)]

        def at_the_first(event: str, args: tuple[Any, ...]) -> None:
            if once and event == "os.rename" and str(args[0]).endswith("a.txt"):
                once.pop()()

        sys.addaudithook(at_the_first)
        train(two, old, overwrite=True)

    assert in_child(work) == 130
    assert [path.name for path in old.parent.iterdir()] == ["run"]
    assert [(old / name).read_text() for name in ("a.txt", "b.txt")] == ["mine", "mine"]


@pytest.mark.filterwarnings("error")
def test_a_users_files_among_the_checkpoints_move_to_the_successor(two: fp.Federation, old: Path) -> None:
    (old / "checkpoints" / "files" / "notes.txt").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        train(two, old, At(1, stop), overwrite=True)
    assert [path.name for path in old.parent.iterdir()] == ["run"]
    assert (old / "checkpoints" / "files" / "notes.txt").read_text() == "mine"


def test_what_a_replaced_run_has_left_does_not_stop_its_successor(two: fp.Federation, old: Path) -> None:
    """A link in place of a folder, whose name the successor has taken."""
    shutil.rmtree(old / "checkpoints")
    (old / "checkpoints").symlink_to(old.parent)
    aside = old.parent / f".{old.name}.replaced"
    said = pytest.warns(RecordWarning, match=f"something of the old one is left in {aside}")
    with said, pytest.raises(KeyboardInterrupt):
        train(two, old, At(1, stop), overwrite=True)
    with pytest.warns(RecordWarning, match=f"something of the old one is left in {aside}"):
        assert fp.resume(old).status == "finished"
    assert [path.name for path in aside.iterdir()] == ["checkpoints"]


def test_where_a_run_cannot_come_back_it_is_said_where_it_lies(two: fp.Federation, old: Path) -> None:
    before = tree(old)

    def act() -> None:
        (old / "notes.txt").write_text("mine")
        raise RuntimeError("a bug")

    with pytest.warns(RecordWarning) as said, pytest.raises(RuntimeError, match="a bug"):
        train(two, old, At(None, act), overwrite=True)
    assert tree(old) == {"notes.txt": b"mine"}
    aside = next(path for path in old.parent.iterdir() if path != old)
    assert str(aside) in str(said[0].message)
    assert tree(aside) == before


def test_a_full_disk_leaves_the_old_run_in_its_place(two: fp.Federation, straight: Path, small_disk: Path) -> None:
    path = small_disk / "run"
    shutil.copytree(straight, path)
    before, ballast = tree(path), fill(small_disk)
    with pytest.raises(fp.RecordError) as full:
        train(two, path, overwrite=True)
    assert "No space left on device" in str(full.value)
    assert tree(path) == before
    assert sorted(found.name for found in small_disk.iterdir()) == ["ballast", "run"]
    with ballast.open("r+b") as file:  # room to begin, but not for a checkpoint
        file.truncate(ballast.stat().st_size - 60_000)
    with pytest.raises(fp.RecordError, match=r"No space left on device.*the run that was there is back in its place"):
        train(two, path, overwrite=True)
    assert tree(path) == before


def test_a_killed_replacement_is_undone_by_the_next_attempt(two: fp.Federation, old: Path) -> None:
    before = tree(old)

    def killed() -> int:
        kill = At(None, lambda: os.kill(os.getpid(), signal.SIGKILL))
        return in_child(lambda: train(two, old, kill, overwrite=True))

    assert killed() == -signal.SIGKILL
    with pytest.warns(RecordWarning, match="the earlier run is back in its place"):
        assert fp.resume(old).status == "finished"
    assert tree(old) == before
    assert killed() == -signal.SIGKILL
    (old / "run.json").unlink()  # as if it had been killed a moment earlier
    with pytest.raises(fp.RecordError, match=r"was set aside to be replaced, and lies in .*replaced"):
        fp.load(old)
    code, printed = call("resume", old)
    assert code == 0
    assert "the earlier run is back in its place" in printed
    assert tree(old) == before


@pytest.mark.filterwarnings("always::fedprism.records.RecordWarning")
def test_a_run_that_is_set_aside_is_named_by_each_command_and_put_back_by_a_comparison(
    two: fp.Federation, old: Path, tmp_path: Path
) -> None:
    path = old.rename(tmp_path / "ditto-0")
    before = tree(path)
    config = shutil.copy(path / "config.yaml", tmp_path / "same.yaml")
    for begun in (False, True):
        kill = At(None, lambda: os.kill(os.getpid(), signal.SIGKILL))
        settings = ("train.epochs=2",)
        assert in_child(lambda: train(two, path, kill, overwrite=True, settings=settings)) == -signal.SIGKILL  # noqa: B023
        if not begun:  # as if it had been killed a moment earlier
            (path / "run.json").unlink()
            (path / "metrics.jsonl").unlink()
            for command in ("show", "fsck"):
                code, printed = call(command, path)
                assert (code, f"lies in {tmp_path / '.ditto-0.replaced'}" in printed) == (2, True)
        code, printed = call("compare", config, "--methods", "ditto", "--out", tmp_path)
        assert (code, "the earlier run is back in its place" in printed) == (0, True), printed
        assert tree(path) == before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("points", [3, pytest.param(0, marks=pytest.mark.slow)])
def test_a_replacement_that_is_ended_anywhere_loses_neither_run(
    two: fp.Federation, straight: Path, tmp_path: Path, points: int, number: signal.Signals
) -> None:
    def replace(path: Path) -> Path:
        return train(two, path, overwrite=True, settings=("train.epochs=2",))

    def count() -> None:
        shutil.copytree(straight, tmp_path / "counted")
        operations = at_operation(0, stop)
        replace(tmp_path / "counted")
        (tmp_path / "count").write_text(str(operations()))

    assert in_child(count) == 0
    total, new = int((tmp_path / "count").read_text()), results(tmp_path / "counted")
    for moment in range(1, total + 1) if points == 0 else [1 + i * (total // 2) // points for i in range(points)]:
        path = tmp_path / "here" / "run"
        shutil.copytree(straight, path)

        def work(path: Path = path, moment: int = moment) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            at_operation(moment, lambda: os.kill(os.getpid(), number))
            replace(path)

        assert in_child(work) == (130 if number == signal.SIGINT else -number), moment
        if number == signal.SIGINT:
            assert run_status(path) in ("finished", "interrupted"), moment
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RecordWarning)  # that the earlier run is back
            fp.resume(path)
        assert results(path) in (results(straight), new), moment
        assert [found.name for found in path.parent.iterdir()] == ["run"], moment
        shutil.rmtree(path.parent)


# --- paths that are no plain directories -----------------------------------------------------------------------------


def test_links_that_lead_nowhere_are_named(two: fp.Federation, tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "unmounted")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "file").write_text("mine")
    for name, words in {
        "gone": "gone is a symbolic link to .*unmounted, which leads nowhere",
        "self": "self is a symbolic link to .*self, which leads nowhere",
        "gone/runs/x": "gone is a symbolic link to .*unmounted, which leads nowhere",
        "file": "file is a file",
        "file/runs/x": "file is a file",
    }.items():
        for overwrite in (False, True):
            with pytest.raises(fp.RecordError, match=words):
                train(two, tmp_path / name, overwrite=overwrite)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "gone", "self"]


def test_a_link_to_a_directory_is_that_directory(two: fp.Federation, straight: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RuntimeError, match="a bug"):
        train(two, tmp_path / "link", At(None, lambda: fail("a bug")))
    assert list((tmp_path / "real").iterdir()) == []
    train(two, tmp_path / "link")
    before = tree(tmp_path / "real")
    with pytest.raises(RuntimeError, match="a bug"):
        train(two, tmp_path / "link", At(None, lambda: fail("a bug")), overwrite=True)
    assert tree(tmp_path / "real") == before
    train(two, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert results(tmp_path / "real") == results(straight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_full_file_system_that_is_the_run_directory_itself(two: fp.Federation, small_disk: Path) -> None:
    """It cannot be removed, and that must not hide why the run has failed."""
    ballast = fill(small_disk)
    with ballast.open("r+b") as file:
        ballast.unlink()  # it takes its room as long as it is open
        for pages in range(20):
            file.truncate(file.seek(0, os.SEEK_END) - 4096 * bool(pages))
            with pytest.raises(fp.RecordError, match="No space left on device") as full:
                train(two, small_disk)
            if os.listdir(small_disk):
                break  # a round was recorded, and the run can go on
            assert "Nothing was begun; make room" in str(full.value)
        assert pages > 2
    fp.resume(small_disk)
    before = tree(small_disk)
    with pytest.raises(fp.RecordError, match=r"resource busy\. That run stays as it is; choose another --out"):
        train(two, small_disk, overwrite=True)
    assert tree(small_disk) == before


# --- a directory that is moved or deleted while the run goes on ------------------------------------------------------


@pytest.mark.parametrize("state", ["memory", "disk"])
def test_a_moved_run_stops_and_goes_on_in_its_new_place(
    two: fp.Federation, straight: Path, tmp_path: Path, state: str
) -> None:
    out, there = tmp_path / "run", tmp_path / "moved"
    with pytest.raises(fp.RecordError, match=rf"run was moved to {there} while .*`fedprism resume {there}` goes on"):
        train(two, out, At(1, lambda: out.rename(there)), settings=(f"clients.state={state}",))
    assert not out.exists()
    assert run_status(there) == "interrupted"
    fp.resume(there)
    assert results(there) == results(straight)


def test_a_directory_in_the_place_of_a_moved_run_is_left_alone(
    two: fp.Federation, straight: Path, tmp_path: Path
) -> None:
    out, there = tmp_path / "run", tmp_path / "moved"

    def act() -> None:
        out.rename(there)
        shutil.copytree(straight, out)

    for state in ("memory", "disk"):
        with pytest.raises(fp.RecordError, match="was moved to"):
            train(two, out, At(1, act), settings=(f"clients.state={state}",))
        assert tree(out) == tree(straight)
        shutil.rmtree(out)
        shutil.rmtree(there)


def test_a_run_whose_metrics_are_deleted_while_it_goes_on_keeps_the_rest(
    two: fp.Federation, straight: Path, tmp_path: Path
) -> None:
    """They may come back from a copy, and then it goes on."""
    out, kept = tmp_path / "run", tmp_path / "metrics.jsonl"

    def act() -> None:
        (out / "metrics.jsonl").rename(kept)
        stop()

    with pytest.raises(KeyboardInterrupt):
        train(two, out, At(2, act))
    assert run_status(out) == "interrupted"
    kept.rename(out / "metrics.jsonl")
    fp.resume(out)
    assert results(out) == results(straight)


@pytest.mark.parametrize("state", ["memory", "disk"])
def test_a_deleted_run_does_not_come_back_in_part(two: fp.Federation, tmp_path: Path, state: str) -> None:
    out = tmp_path / "run"
    with pytest.raises(fp.RecordError, match="run was deleted or moved away while the run went on"):
        train(two, out, At(1, lambda: shutil.rmtree(out)), settings=(f"clients.state={state}",))
    assert not out.exists()


# --- what a found run may execute ------------------------------------------------------------------------------------


@pytest.fixture
def found(two: fp.Federation, tmp_path: Path) -> Path:
    """An interrupted run of a method in a file that this process has not executed."""
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(KeyboardInterrupt):
        train(two, tmp_path / "run", At(1, stop), method=f"{tmp_path / 'own.py'}:Own")
    (tmp_path / "executed").unlink()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "own.py").rename(tmp_path / "theirs" / "found_own.py")
    name(tmp_path / "run", "method", f"{tmp_path / 'theirs' / 'found_own.py'}:Own")
    return tmp_path / "run"


def name(path: Path, key: str, value: str) -> None:
    """Let a run name something else, as if it had been begun so."""
    info = unseal((path / "run.json").read_bytes())
    if key == "transforms":
        info["config"]["transforms"] = [{"name": value}]
    elif key == "server.aggregator":
        info["config"]["server"]["aggregator"] = {"name": value}
    else:
        info["config"][key]["name"] = value
    (path / "run.json").write_bytes(seal(info))
    (path / "config.yaml").write_text(json.dumps(info["config"]))


def executed(path: Path) -> bool:
    return (path.parent / "theirs" / "executed").exists()


def test_a_found_run_executes_nothing_unasked(found: Path) -> None:
    file = found.parent / "theirs" / "found_own.py"
    before = tree(found)
    with pytest.raises(fp.FedprismError) as refused:
        fp.resume(found)
    assert str(file) in str(refused.value)
    assert f"`fedprism resume {found} --trust`" in str(refused.value)
    code, printed = call("resume", found)
    assert (code, str(file) in printed, "--trust" in printed) == (2, True, True)
    with pytest.raises(fp.FedprismError, match=r"found_own\.py.*fp\.load\(.*, trust=True\)"):
        len(fp.load(found).models)
    assert call("show", found)[0] == 0
    assert call("show", found, "--report", found.parent / "page.html")[0] == 0
    assert not executed(found)
    assert tree(found) == before


def test_a_found_run_goes_on_if_it_is_trusted(found: Path, two: fp.Federation, tmp_path: Path) -> None:
    expected = train(two, tmp_path / "expected", method="fedavg")
    shutil.copytree(found, tmp_path / "copy")
    assert call("resume", found, "--trust")[0] == 0
    assert executed(found)
    assert (found / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    assert len(fp.load(found, trust=True).models) == 2
    assert fp.resume(tmp_path / "copy", method=Own()).status == "finished"  # given, so there is nothing to trust


def test_a_finished_run_executes_nothing(found: Path) -> None:
    info = unseal((found / "run.json").read_bytes())
    (found / "run.json").write_bytes(seal({**info, "status": "finished"}))
    assert fp.resume(found).status == "finished"
    code, printed = call("resume", found)
    assert code == 0
    assert "has already finished" in printed
    assert not executed(found)


@pytest.mark.parametrize("key", ["method", "transforms", "server.aggregator"])
def test_modules_are_asked_for_like_files(found: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(found.parent / "theirs")
    name(found, "method", "fedavg")
    for given in ("found_own:Own", f"{found.parent / 'theirs' / 'found_own.py'}:Own"):
        name(found, key, given)
        with pytest.raises(fp.FedprismError, match=rf"found_own.*\({key}.*--trust"):
            fp.resume(found)
        assert not executed(found)
        assert "found_own" not in sys.modules


@pytest.mark.parametrize("key", ["transforms", "server.aggregator"])
def test_what_was_written_in_a_session_is_not_looked_for_in_a_module(
    found: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is asked about `session:Own`, so it may not execute a `session.py` or a file in a folder `session:`."""
    theirs = found.parent / "theirs"
    monkeypatch.chdir(theirs)
    monkeypatch.syspath_prepend(theirs)
    (theirs / "session:").mkdir()
    for copy in (theirs / "session.py", theirs / "session:" / "own.py"):
        shutil.copy(theirs / "found_own.py", copy)
    name(found, "method", "fedavg")
    for given in ("session:Own", "session:/own.py:Own"):
        name(found, key, given)
        with pytest.raises(fp.FedprismError, match="written in a Python session"):
            fp.resume(found)
    assert not executed(found)
    assert not (theirs / "session:" / "executed").exists()


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [3, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_at_any_moment_is_recorded(
    two: fp.Federation, straight: Path, tmp_path: Path, points: int, number: signal.Signals
) -> None:
    """Real signals, before an operation on a file: the run is never left at `running`, and goes on to the same bits."""
    config = {
        "data": {"name": "digits-skew", "partition": {"name": "domain", "clients": 2}, "samples": 20},
        "method": "ditto",
        "model": "mlp",
        "train": {"rounds": ROUNDS},
        "run": {"device": "cpu", "checkpoint_every": 2, "engine": "inprocess"},
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(config))

    def run(path: Path, moment: int) -> int:
        """What `fedprism run` does, from the first operation in the run directory on."""

        def work() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            operations = at_operation(moment, lambda: os.kill(os.getpid(), number))
            code = app(["run", str(tmp_path / "tiny.yaml"), "--out", str(path)], standalone_mode=False)
            (tmp_path / "count").write_text(str(operations()))
            os._exit(code or 0)

        return in_child(work)

    assert run(tmp_path / "counted", 0) == 0
    total = int((tmp_path / "count").read_text())
    every, reached = (2 * total // 3) // points if points else 1, set()
    for moment in range(1 + total // 3 if points else 1, total + 1, every):
        path = tmp_path / str(moment)
        code = run(path, moment)
        status = run_status(path)
        reached.add(status)
        assert status != "running", f"at operation {moment} of {total}"
        ends = {"finished": (0, 128 + number), None: (128 + number, -number)}.get(status, (128 + number,))
        assert code in ends, f"at operation {moment} of {total}"  # -number: before anything is trained
        if status is not None:
            fp.resume(path)
            assert results(path) == results(straight), f"at operation {moment} of {total}"
    assert "interrupted" in reached


def test_an_interruption_is_heard_while_a_state_is_deleted(tmp_path: Path) -> None:
    """Python drops what is raised when an object is taken apart, so nothing may be deleted then."""

    def interrupt(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.remove" and str(arguments[0]).endswith(".safetensors"):
            os.kill(os.getpid(), signal.SIGINT)

    def work() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        states = DiskStore(("north",), lambda state: state, at_once=1)
        states.open(tmp_path / "states")
        states["north"] = {"w": torch.zeros(2)}
        sys.addaudithook(interrupt)
        states["north"] = {"w": torch.ones(2)}

    assert in_child(work) == 130


# --- what messages advise --------------------------------------------------------------------------------------------


def test_a_state_that_cannot_be_written_says_what_is_safe(two: fp.Federation, straight: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the small files of the records can still be written."""
    path, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    settings = ("clients.state=disk", "run.checkpoint_every=1")
    try:
        with pytest.raises(fp.RecordError) as full:
            train(two, path, At(2, lambda: limit(50_000)), settings=settings)
    finally:
        limit(limits[0])
    assert "the state of 'plain' in" in str(full.value)
    assert "File too large. Make room there." in str(full.value)
    assert f"Everything up to round 2 is safe: `fedprism resume {path}` goes on" in str(full.value)
    fp.resume(path)
    assert results(path) == results(straight)


def test_missing_metrics_are_not_blamed_on_checkpoints(two: fp.Federation, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(two, path, At(2, stop))
    lines = (path / "metrics.jsonl").read_bytes()
    (path / "metrics.jsonl").unlink()
    for command in ("resume", "show"):
        code, printed = call(command, path)
        assert code == 2
        assert "metrics.jsonl is missing" in printed
        assert "Restore" in printed
        assert "delete" not in printed
        assert ("go on with it by `fedprism resume`" not in printed) or command == "resume"
    (path / "metrics.jsonl").write_bytes(lines)
    assert call("resume", path)[0] == 0


def test_metrics_that_end_before_every_checkpoint_are_named(two: fp.Federation, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(two, path, At(3, stop), settings=("run.checkpoint_every=3",))
    (path / "checkpoints" / "manifest-000000.json").unlink()
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (path / "metrics.jsonl").write_bytes(lines[0])
    for manifest in (path / "checkpoints").glob("manifest-00000[12].json"):
        manifest.unlink()
    with pytest.raises(fp.RecordError, match=r"metrics\.jsonl ends with round 0, and the checkpoints are of rounds 3"):
        fp.resume(path)


def test_a_folder_of_checkpoints_that_cannot_be_read_is_not_taken_for_lost(two: fp.Federation, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(two, path, At(2, stop))
    (path / "checkpoints").rename(tmp_path / "kept")
    with pytest.raises(fp.RecordError, match=r"has recorded 3 rounds, but .*checkpoints is missing. Restore .* a copy"):
        fp.resume(path)
    (path / "checkpoints").write_text("")
    with pytest.raises(fp.RecordError, match=r"checkpoints cannot be read: .*Nothing is known to be lost"):
        fp.resume(path)
    (path / "checkpoints").unlink()
    (tmp_path / "kept").rename(path / "checkpoints")
    (path / "checkpoints").chmod(0)
    with as_any_user(), pytest.raises(fp.RecordError, match=r"checkpoints cannot be read: Permission denied"):
        fp.resume(path)
    (path / "checkpoints").chmod(0o755)
    fp.resume(path)


# --- the demo --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["README.txt", ".fedprism-demo", "report.html", "a run in a folder of the demo"])
def test_the_demo_replaces_only_what_it_has_made(there: str, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    (out / "runs").mkdir(parents=True)
    if there == "report.html":
        (out / there).write_text("mine")
    else:
        shutil.copytree(straight, out / "runs" / "local-0")
    if there.startswith("a run"):
        mark = "Made by `fedprism demo`, which replaces this directory when it is run again.\n"
        (out / "runs" / ".fedprism-demo").write_text(mark)
    elif there != "report.html":
        (out / "runs" / there).write_text("My runs.\n")
    before = tree(out)
    code, printed = call("demo", "--rounds", "1", "--out", out)
    assert (code, tree(out) == before) == (2, True), printed
    assert "is not marked as made by `fedprism demo`" in printed


@pytest.mark.slow
def test_the_demo_does_not_replace_a_run_that_has_taken_the_place_of_its_own(
    two: fp.Federation, straight: Path, tmp_path: Path
) -> None:
    """The other files of a run's directory stay with its successor, and the demo's mark is one of them."""
    out = tmp_path / "demo"
    assert call("demo", "--rounds", "1", "--out", out)[0] == 0
    mine = train(two, out / "runs" / "local-0", overwrite=True)
    code, printed = call("demo", "--rounds", "1", "--out", out)
    assert (code, f"{mine} is not marked as made by `fedprism demo`" in printed) == (2, True)
    assert results(mine) == results(straight)
    shutil.rmtree(mine)
    notes = out / "runs" / "ditto-0" / "checkpoints" / "notes.txt"
    notes.write_text("mine")
    before = tree(out)
    code, printed = call("demo", "--rounds", "1", "--out", out)
    assert (code, f"{notes} was not made by `fedprism demo`; move it away" in printed) == (2, True)
    assert tree(out) == before
    notes.unlink()
    assert call("demo", "--rounds", "1", "--out", out)[0] == 0


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) for n in ("checkpoints", ".lock")] + ["checkpoints/files"]
)
def test_the_demo_does_not_begin_to_replace_a_run_of_which_a_part_is_a_link(name: str, tmp_path: Path) -> None:
    out, precious = tmp_path / "demo", tmp_path / "precious"
    assert call("demo", "--rounds", "1", "--out", out)[0] == 0
    precious.mkdir()
    (precious / "manifest-000001.json").write_text("mine")
    link = out / "runs" / "ditto-0" / name
    if link.is_dir():
        shutil.rmtree(link)
    else:
        link.unlink()
    link.symlink_to(precious if link.name != ".lock" else precious / "manifest-000001.json")
    before = tree(tmp_path)
    code, printed = call("demo", "--rounds", "1", "--out", out)
    assert (code, f"{link} is a link" in printed, tree(tmp_path) == before) == (2, True, True)


def test_a_lock_that_is_a_link_is_refused_where_a_run_is_made_or_replaced(
    two: fp.Federation, old: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "new").mkdir()
    (old / ".lock").unlink()
    for path in (old, tmp_path / "new"):
        (path / ".lock").symlink_to(tmp_path / "mine")
        before = tree(tmp_path)
        with pytest.raises(fp.RecordError, match=r"\.lock is a link, and nothing is written through a link: remove it"):
            train(two, path, overwrite=True)
        assert tree(tmp_path) == before
