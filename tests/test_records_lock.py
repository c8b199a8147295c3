"""One writer at a time: between processes, within one, and after a writer was killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from fedprism.errors import RecordError
from fedprism.records import RunDirectory, read_run, run_status
from tests.toy_records import results, toy_config, toy_run

pytestmark = pytest.mark.full

ROOT = Path(__file__).parent.parent

# Keeps the lock until it is asked to go on, then writes the whole run.
HOLDER = """
import sys
from pathlib import Path
from fedprism.records import RunDirectory
from tests.toy_records import toy_config, toy_rounds
with RunDirectory.create(Path(sys.argv[1]), toy_config()) as directory:
    print("holding", flush=True)
    sys.stdin.readline()
    toy_rounds(directory.config, [directory.recorder()], None)
"""

# Writes a checkpoint every round.
WRITER = """
import sys
from pathlib import Path
from tests.toy_records import toy_config, toy_run
print("ready", flush=True)
toy_run(Path(sys.argv[1]), toy_config(rounds=60, checkpoint_every=1))
"""

# Begins a run as soon as it is asked to.
RACER = """
import sys
from pathlib import Path
from fedprism.errors import RecordError
from tests.toy_records import toy_run
print("ready", flush=True)
sys.stdin.readline()
try:
    toy_run(Path(sys.argv[1]))
    print("done")
except RecordError as error:
    print(error)
"""


def start(program: str, path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().strip() in ("holding", "ready")
    return process


def test_a_second_process_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holder = start(HOLDER, path)
    with pytest.raises(RecordError, match=rf"{path} is being written by another process; wait .* another --out"):
        RunDirectory.open(path, write=True)
    with pytest.raises(RecordError, match="not empty"):
        RunDirectory.create(path, toy_config())
    assert read_run(path).status == "running"
    holder.communicate("\n", timeout=60)
    assert holder.returncode == 0
    assert results(path) == results(toy_run(tmp_path / "straight"))


def test_readers_never_see_a_half_written_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = start(WRITER, path)
    reads = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is damaged, and nothing may look so
        while writer.poll() is None:
            if run_status(path) is None:
                continue
            with RunDirectory.open(path) as reader:
                latest, best = reader.latest(), reader.best()
                assert latest is None or best is not None
                rounds = [record.round for record in read_run(path).rounds]
            assert rounds == list(range(len(rounds)))
            reads += 1
    writer.communicate()
    assert writer.returncode == 0
    assert reads > 5
    assert read_run(path).status == "finished"


def test_the_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holder = start(HOLDER, path)
    holder.send_signal(signal.SIGKILL)
    assert holder.wait(timeout=60) == -signal.SIGKILL
    assert (path / ".lock").exists()
    toy_run(path)
    assert results(path) == results(toy_run(tmp_path / "straight"))
    holder.communicate()


def test_a_race_for_a_new_directory_has_one_winner(tmp_path: Path) -> None:
    path = tmp_path / "run"
    racers = [start(RACER, path) for _ in range(2)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    answers = [racer.communicate(timeout=60)[0].strip() for racer in racers]
    assert "done" in answers
    for answer in answers:
        assert answer == "done" or "being written by another process" in answer or "not empty" in answer
    assert results(path) == results(toy_run(tmp_path / "straight"))


def test_within_one_process_too(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", toy_config()) as directory:
        with pytest.raises(RecordError, match="being written by another process"):
            RunDirectory.open(tmp_path / "run", write=True)
        RunDirectory.open(tmp_path / "run").close()
        directory.close()
        directory.close()
        RunDirectory.open(tmp_path / "run", write=True).close()


def test_a_creation_that_lost_the_race_leaves_the_winner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes and finishes the run between our look at the directory and our lock on it."""
    from fedprism.records import rundir

    path = tmp_path / "run"
    locked = rundir.locked
    winners: list[dict[str, bytes]] = []

    def late(target: Path) -> object:
        if not winners:
            winners.append({})  # before the call, which comes here too
            winners[0] = results(toy_run(path))
        return locked(target)

    monkeypatch.setattr(rundir, "locked", late)
    with pytest.raises(RecordError, match="not empty"):
        RunDirectory.create(path, toy_config())
    assert results(path) == winners[0]
    assert read_run(path).status == "finished"
