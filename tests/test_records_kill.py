"""`kill -9` at any moment: whatever is on disk then, a resume gives the same bits as the run that was never killed.

The driver below imports once and forks: each child writes a run and sends itself SIGKILL at its n-th step, a step being
a line of `fedprism/records` or `keeping.py`, or an operation on a file. What it leaves is resumed; some of the resumes
are killed too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fedprism.records
import fedprism.store.clients
from fedprism.records import read_run
from tests.toy_records import checkpoints, results, toy_config, toy_run

pytestmark = pytest.mark.full

WATCHED = (str(Path(fedprism.records.__file__).parent), fedprism.store.clients.__file__)
ROOT = Path(__file__).parent.parent


def steps(run: Callable[[], Any], kill_at: int | None) -> int:
    """Count the steps of a run, or die at one of them."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        if event == "line":
            step()
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


def operations(run: Callable[[], Any], kill_at: int | None) -> int:
    """The same, a step being an operation that touches the file system, before it happens."""
    count, counting = 0, True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if counting and (event.startswith(("os.", "shutil.", "fcntl.")) or event == "open"):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)  # for good: only for a process that ends after it
    run()
    counting = False
    return count


def in_child(work: Callable[[], int]) -> int | None:
    """What `work` returns in a forked child; None if it was killed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        failed = 1
        try:
            os.write(write, str(work()).encode())
            failed = 0
        except (Exception, KeyboardInterrupt):  # noqa: BLE001 - a forked child must not go on with its parent's work
            traceback.print_exc()
        finally:
            os._exit(failed)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert os.WEXITSTATUS(status) == 0, "the child failed"
    return int(answer)


def drive(work: Path, how: str, state: str, points: int, twice: int) -> None:
    """Kill at `points` moments spread over a run (0: at every one), then resume; kill every `twice`-th resume too."""
    counter = {"steps": steps, "operations": operations}[how]
    config = toy_config(state=state, keep_rounds=(2,))
    straight = results(toy_run(work / "straight", config))
    total = in_child(lambda: counter(lambda: toy_run(work / "counted", config), None))
    assert total is not None
    moments = range(1, total + 1) if points == 0 else [1 + i * (total - 1) // (points - 1) for i in range(points)]
    kills, left = 0, set()
    for number, moment in enumerate(moments):
        path = work / str(moment)
        kills += in_child(lambda at=moment, path=path: counter(lambda: toy_run(path, config), at)) is None
        left.add(len(read_run(path).rounds) if (path / "run.json").exists() else -1)
        if twice and number % twice == 0:
            again = 1 + moment * 7 % 400
            kills += in_child(lambda at=again, path=path: counter(lambda: toy_run(path, config), at)) is None
        toy_run(path, config)
        assert results(path) == straight, f"killed at {how[:-1]} {moment}"
        assert checkpoints(path) == checkpoints(work / "straight"), f"killed at {how[:-1]} {moment}"
        stray = [p.name for p in path.rglob("*") if p.name.endswith(".partial")]
        assert not stray, f"killed at {how[:-1]} {moment}: {stray}"
        assert not (path / "states").exists(), f"killed at {how[:-1]} {moment}"
        files, expected = (
            path / "checkpoints" / "files",
            {p.name for p in (work / "straight").glob("checkpoints/files/*")},
        )
        assert {p.name for p in files.iterdir()} == expected, f"killed at {how[:-1]} {moment}"
    print(json.dumps({"kills": kills, "moments": len(moments), "left": sorted(left)}))


def run_driver(work: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.test_records_kill", str(work), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("how", "state", "points", "twice"),
    [
        pytest.param("steps", "memory", 32, 3, marks=pytest.mark.slow),
        ("operations", "memory", 32, 3),
        pytest.param("operations", "disk", 32, 3, marks=pytest.mark.slow),
        pytest.param("steps", "memory", 1500, 2, marks=pytest.mark.slow),
        pytest.param("operations", "memory", 0, 2, marks=pytest.mark.slow),
        pytest.param("steps", "disk", 1500, 2, marks=pytest.mark.slow),
        pytest.param("operations", "disk", 0, 2, marks=pytest.mark.slow),
    ],
)
def test_killed_anywhere_and_resumed_is_the_run_never_killed(
    tmp_path: Path, how: str, state: str, points: int, twice: int
) -> None:
    done = run_driver(tmp_path, how, state, str(points), str(twice))
    assert done["kills"] >= done["moments"] >= 32
    assert set(done["left"]) >= {-1, 0, 1, 4, 8}  # from before there was a run to after its last round


@pytest.mark.slow
def test_killed_from_outside(tmp_path: Path) -> None:
    """No help from inside: a run in a process of its own is killed whenever it happens to have written some rounds."""
    rounds = 400
    config = toy_config(rounds=rounds, checkpoint_every=7)
    straight = results(toy_run(tmp_path / "straight", config))
    program = (
        "from pathlib import Path; from tests.toy_records import *;"
        f"toy_run(Path({str(tmp_path / 'killed')!r}), toy_config(rounds={rounds}, checkpoint_every=7))"
    )
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for goal in (3, 60, 150):
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= goal:
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert goal - 7 <= len(read_run(tmp_path / "killed").rounds) <= rounds
    toy_run(tmp_path / "killed", config)
    assert results(tmp_path / "killed") == straight


if __name__ == "__main__":
    drive(Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:6]))
