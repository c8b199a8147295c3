"""A full disk, for real: a tiny file system where one can be mounted, and a limit on the size of files elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedprism.errors import RecordError
from fedprism.records import RunDirectory, read_run
from fedprism.round.events import Callback, RoundRecord, Snapshot
from tests.toy_records import CLIENTS, checkpoints, results, toy_config, toy_plan, toy_rounds, toy_run

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent

# Runs with a limit on the size of files; what the user would read goes to stdout.
LIMITED = """
import resource, sys
from pathlib import Path
from fedprism.errors import RecordError
from tests.toy_records import toy_run
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    toy_run(Path(sys.argv[1]))
    print("done")
except RecordError as error:
    print(error)
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("needs mount")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def fill(disk: Path, leave: int) -> None:
    """Leave about this number of bytes free."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    ballast.write_bytes(bytes(max(shutil.disk_usage(disk).free - leave, 0)))


def record_many(recorder: Callback) -> None:
    for round in range(1, 1000):
        record = RoundRecord(round, failed={"north": "x" * 500})
        recorder.round(record, Snapshot(round, {}, dict.fromkeys(CLIENTS)))


def partial(path: Path) -> list[Path]:
    return [p for p in path.rglob("*") if p.name.endswith(".partial")]


def test_a_disk_that_fills_up_at_any_round(tmp_path: Path, small_disk: Path) -> None:
    straight = results(toy_run(tmp_path / "straight"))
    named = set()
    for number, leave in enumerate(range(0, 100_000, 4096)):
        path = small_disk / f"run-{number}"
        fill(small_disk, leave)
        try:
            toy_run(path)
        except RecordError as error:
            message = str(error)
            assert "No space left on device" in message
            assert not partial(small_disk)
            named.add(message.split(" in ")[0] if " in /" in message else "creation")
            if (path / "run.json").exists():
                safe = checkpoints(path)[-1] if checkpoints(path) else -1
                words = f"Everything up to round {safe} is safe" if safe >= 0 else "No round is recorded yet"
                assert f"{words}; make room there, then run `fedprism resume {path}`" in message
                assert len(read_run(path).rounds) >= safe
            else:
                assert "Nothing was begun" in message
        (small_disk / "ballast").unlink()
        toy_run(path)  # there is room again
        assert results(path) == straight, f"with {leave} bytes left"
        shutil.rmtree(path)
    assert "creation" in named
    assert any(what.startswith("the checkpoint of round") for what in named)


def test_the_end_of_a_run_does_not_hide_why_it_ended(small_disk: Path) -> None:
    """The loop calls `end` in a `finally`: it must not raise another error, nor write over what is there."""
    path = small_disk / "run"
    with RunDirectory.create(path, toy_config(rounds=2000, checkpoint_every=1000)) as directory:
        recorder = directory.recorder()
        recorder.begin(toy_plan(directory.config))
        recorder.round(RoundRecord(0), Snapshot(0, {}, dict.fromkeys(CLIENTS)))
        fill(small_disk, 0)
        with pytest.raises(RecordError, match=r"metrics.jsonl in .* could not be written: No space left on device"):
            record_many(recorder)
        size = (path / "metrics.jsonl").stat().st_size
        recorder.end("interrupted")
    assert (path / "metrics.jsonl").stat().st_size == size
    assert (path / "metrics.jsonl").read_bytes().endswith(b"}\n")  # the half of a line was taken back
    assert json.loads((path / "run.json").read_text())["status"] == "running"


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
@pytest.mark.parametrize("limit", [10, 700, 1_200, 3_000])
def test_files_that_may_not_grow(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "run"
    command = [sys.executable, "-c", LIMITED, str(path), str(limit)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "could not be written: File too large." in done.stdout
    assert "make room" in done.stdout
    assert not partial(path)
    toy_run(path)
    assert results(path) == results(toy_run(tmp_path / "straight"))


def test_a_directory_that_is_taken_away_under_a_run(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", toy_config(checkpoint_every=1)) as directory:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RecordError, match="does not exist"):
            toy_rounds(directory.config, [directory.recorder()], None)
    with RunDirectory.create(tmp_path / "run", toy_config()) as directory:
        recorder = directory.recorder()
        recorder.begin(toy_plan(directory.config))
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RecordError, match="was deleted or moved away while the run went on"):
            recorder.round(RoundRecord(0), Snapshot(0, {}, dict.fromkeys(CLIENTS)))
    assert not (tmp_path / "run").exists()  # it does not come back without its metrics
