"""What becomes of worker processes, and of a run, when something around them fails: the real things, no mocks.

A child that is forked has fedprism imported already. It starts workers, and trains nothing itself.
"""

from __future__ import annotations

import mmap
import os
import pwd
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedprism as fp
from fedprism.config import Config, RunConfig, structure
from fedprism.engines.inprocess import InProcess
from fedprism.engines.numerics import numerics
from fedprism.engines.processes.engine import Processes
from fedprism.engines.processes.handle import Pool
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods.base import Client, Context
from fedprism.round.client import make_info
from tests.harness import CPU, Borrowed, loop_for
from tests.test_processes import alive, gone, hears_ctrl_c

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need Linux or macOS")

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent, or limits one")
CACHE = "TORCHINDUCTOR_CACHE_DIR"
LONG = 100  # seconds after which a child that should have ended counts as one that hangs


def an_engine(federation: Federation, method: fp.Method, workers: int = 1) -> Processes:
    config = structure({"train": {"rounds": 1}, "run": {"workers": workers}}, Config)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    return Processes(method, config, info, federation, CPU)


def ask(engine: Processes | InProcess, federation: Federation, method: fp.Method, kind: str = "train") -> list[Any]:
    """Let the first client train, or be tested, at the engine."""
    config = structure({"train": {"rounds": 1}}, Config)
    loop = loop_for(method, config, federation, engine)
    return list(getattr(engine, kind)(0, loop.requests(federation.names[:1], loop.context(0))))


def packages() -> str:
    """Where a program finds what is installed, and these tests, wherever it is started."""
    return os.pathsep.join(path for path in sys.path if Path(path).is_dir())


def in_child(folder: Path, work: Callable[[], None], then: Callable[[int], None] = lambda pid: None) -> tuple[int, str]:
    """Do something in a forked child; its exit code (negative: the signal that ended it) and what it has said.

    `then` is told the child's number while it works.
    """
    said = folder / "said"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            file = os.open(said, os.O_WRONLY | os.O_CREAT, 0o666)
            os.dup2(file, 1)
            os.dup2(file, 2)
            work()
            code = 0
        except BaseException as error:  # noqa: BLE001 - a forked child must not go on with its parent's work
            os.write(file, "".join(traceback.format_exception(error)).encode())
        finally:
            os._exit(code)
    try:
        then(pid)
        status = waited(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said.read_text() if said.exists() else ""


def waited(pid: int) -> int:
    """The status of a child that ends."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    pytest.fail(f"the child is still there after {LONG} seconds")


# --- no folder for temporary files -----------------------------------------------------------------------------------

WITHOUT_TEMPORARY_FILES = """
import sys, tempfile, fedprism as fp

try:
    tempfile.gettempdir()
    sys.exit("there is a temporary folder")
except FileNotFoundError:
    pass
federation = fp.make_federation("digits-skew", clients=2, seed=0, samples=40, split={"validation": 0.02, "test": 0.1})
for engine in ("processes", "inprocess"):
    settings = [f"run.engine={engine}", "run.workers=1", "run.device=cpu"]
    run = fp.train(federation, "fedavg", rounds=1, out=f"/run/{engine}", settings=settings)
    print(engine, run.record.status)
try:
    fp.train(federation, "fedavg", rounds=1, out=False, settings=settings)
except fp.FedprismError as error:
    print(error)
"""


@linux
@pytest.mark.slow
def test_plain_training_needs_no_temporary_folder(tmp_path: Path) -> None:
    """PyTorch's optimisers import its compiler, which makes a folder for what it compiles."""
    places = [each for each in ("/tmp", "/var/tmp", "/usr/tmp") if Path(each).is_dir()]
    mounts = [f"mount --bind {each} {each}; mount -o remount,ro,bind {each}" for each in places]
    script = "; ".join(["set -e", *mounts, "mount -t tmpfs none /run", "cd /proc", 'exec "$@"'])
    unshare = ["unshare", "-m" if os.getuid() == 0 else "-rm", "sh", "-c", script, "sh"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount file systems of their own")
    env = {**os.environ, "PYTHONPATH": packages()}
    env = {name: value for name, value in env.items() if name not in ("TMPDIR", "TEMP", "TMP", CACHE)}
    command = [*unshare, sys.executable, "-c", WITHOUT_TEMPORARY_FILES]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LONG)
    assert done.stdout.splitlines()[:2] == ["processes finished", "inprocess finished"], done.stderr
    assert done.stdout.splitlines()[2].startswith("a run without a directory needs a temporary folder, and none can be")


def test_compiling_without_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    said = r"run.compile is true, .* has no folder to write to: .*Set TORCHINDUCTOR_"
    with pytest.raises(ConfigError, match=said), numerics(RunConfig(compile=True), CPU):
        pass
    assert os.environ[CACHE] == str(tmp_path / "file" / "cache")


# --- no memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hungry(fp.FedAvg):
    """Takes more memory than there is, in one of the ways in which that can fail."""

    how: str = "torch"

    def start(self, client: Client, ctx: Context) -> None:
        much = 2**50
        if self.how == "torch":
            torch.empty(much, dtype=torch.uint8)
        elif self.how == "numpy":
            np.empty(much, dtype=np.uint8)
        elif self.how == "python":
            bytearray(much)
        elif self.how == "map":
            mmap.mmap(-1, much)
        else:
            torch.empty(2**30, dtype=torch.uint8).fill_(1)


ASKED = {"torch": ", where 1,125,899,907 MB were asked for at once", "numpy": ", where 1.00 PiB were asked for at once"}


@pytest.mark.parametrize("how", ["torch", pytest.param("numpy", marks=pytest.mark.slow), "python", "map"])
def test_a_client_without_memory(how: str, tiny: Federation, spare: Pool) -> None:
    """In this process and in a worker: which client, how much, and what to do."""
    method, config = Hungry(how=how), structure({"train": {"rounds": 1}}, Config)
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    for engine in (InProcess(method, config, info, tiny, CPU), Borrowed.of(spare, 1, method, config, tiny)):
        with pytest.raises(FedprismError) as caught:
            ask(engine, tiny, method)
        said = f"memory has run out at client '{tiny.names[0]}'{ASKED.get(how, '')}. Take a smaller model or"
        assert str(caught.value).startswith(said)


@linux
def test_a_worker_under_a_limit(tiny: Federation, spare: Pool) -> None:
    """A real limit of memory (`ulimit -d`), of the worker alone."""
    method = Hungry(how="a little")
    engine = Borrowed.of(spare, 1, method, structure({"train": {"rounds": 1}}, Config), tiny)
    if not engine.pool:
        engine._start()
    worker = engine.pool[0].process.pid
    limits = resource.prlimit(worker, resource.RLIMIT_DATA, (2**29, resource.RLIM_INFINITY))
    try:
        with pytest.raises(
            FedprismError, match=r"memory has run out at client .*, where 1,074 MB were asked for at once"
        ):
            ask(engine, tiny, method)
    finally:
        if alive(worker):
            resource.prlimit(worker, resource.RLIMIT_DATA, limits)


def test_memory_runs_out_beside_the_clients(tiny: Federation) -> None:
    """In the server's part of a round."""

    class Greedy(fp.FedAvg):
        def combine(self, server: Any, mean: Any, ctx: Context) -> Any:
            return {"weight": torch.empty(2**50)}

    loop = loop_for(Greedy(), structure({"train": {"rounds": 1}}, Config), tiny)
    with pytest.raises(FedprismError, match=r"^memory has run out, where 4,503,599,627 MB were asked for at once"):
        loop.run([])


def test_memory_runs_out_before_a_run_of_a_comparison(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(
        "from dataclasses import dataclass\nimport fedprism as fp, torch\n\n@dataclass(frozen=True)\n"
        "class Greedy(fp.FedAvg):\n    def facts(self, info):\n        return {'much': str(torch.empty(2**50))}\n"
    )
    config, said = structure({"data": {"name": "digits-skew", "samples": 20}}, Config), []
    methods = [f"{tmp_path / 'greedy.py'}:Greedy"]
    assert not fp.compare(config, methods, [0], "x", out=tmp_path, on_error=lambda cell, error: said.append(str(error)))
    assert said[0].startswith("memory has run out, where 4,503,599,627 MB were asked for at once")


# --- exceptions of a method ------------------------------------------------------------------------------------------


class Keyword(Exception):
    """Cannot be unpickled, since it is made with a keyword."""

    def __init__(self, *, code: int) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code} is wrong"


class Wraps(Exception):
    """Would be unpickled with other words."""

    def __init__(self, what: str) -> None:
        super().__init__(f"a bad {what}")


class Holds(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock, self.function, self.rest = threading.Lock(), lambda: 1, (i for i in ())


class Pretends(Exception):
    """Is unpickled as something that is no exception."""

    def __reduce__(self) -> Any:
        return str, ("something",)


class Leaves(Exception):
    """Ends the process when it is pickled."""

    def __reduce__(self) -> Any:
        raise SystemExit(3)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


RAISED: dict[str, tuple[Callable[[], BaseException], str]] = {
    "plain": (lambda: ValueError("a plain one"), "ValueError: a plain one"),
    "keyword": (lambda: Keyword(code=7), "RuntimeError: Keyword: code 7 is wrong"),
    "wraps": (lambda: Wraps("thing"), "RuntimeError: Wraps: a bad thing"),
    "holds": (lambda: Holds("a lock"), "RuntimeError: Holds: a lock"),
    "pretends": (lambda: Pretends("hello"), "RuntimeError: Pretends: hello"),
    "leaves": (lambda: Leaves("early"), "RuntimeError: Leaves: early"),
    "mute": (lambda: Mute(), f"{__name__}.Mute: <exception str() failed>"),
}


@dataclass(frozen=True)
class Raises(fp.FedAvg):
    what: str = "plain"

    def start(self, client: Client, ctx: Context) -> None:
        raise RAISED[self.what][0]()


@pytest.mark.parametrize("what", RAISED)
def test_class_words_and_traceback_of_any_exception(what: str, tiny: Federation, spare: Pool) -> None:
    method = Raises(what=what)
    engine = Borrowed.of(spare, 1, method, structure({"train": {"rounds": 1}}, Config), tiny)
    with pytest.raises(Exception) as caught:
        ask(engine, tiny, method)
    assert traceback.format_exception_only(caught.value)[0] == RAISED[what][1] + "\n"
    (note,) = caught.value.__notes__
    assert note.startswith(f"In a worker process, at client '{tiny.names[0]}':\nTraceback")
    assert "raise RAISED[self.what][0]()" in note


# --- ends ------------------------------------------------------------------------------------------------------------


@linux
@pytest.mark.full
def test_a_stopped_worker_ends_with_its_parent(tiny: Federation, tmp_path: Path) -> None:
    """It does not end with the thread that started it, but, stopped, with the process."""
    method, seen = fp.FedAvg(), tmp_path / "worker"

    def parent() -> None:
        engine = an_engine(tiny, method)
        short = threading.Thread(target=ask, args=(engine, tiny, method, "evaluate"))
        short.start()
        short.join()
        assert len(ask(engine, tiny, method, "evaluate")) == 1
        os.kill(engine.pool[0].process.pid, signal.SIGSTOP)
        (tmp_path / "new").write_text(f"{engine.pool[0].process.pid}")
        (tmp_path / "new").rename(seen)
        time.sleep(LONG)

    workers: list[int] = []

    def kill(pid: int) -> None:
        deadline = time.monotonic() + LONG
        while not seen.exists() and alive(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        workers.append(int(seen.read_text()))
        os.kill(pid, signal.SIGKILL)

    try:
        code, said = in_child(tmp_path, parent, kill)
        assert code == -signal.SIGKILL, said
        assert not said  # nothing has been said of a worker that was ended, and of another one in its place
        assert gone(workers)
    finally:
        for worker in filter(alive, workers):
            os.kill(worker, signal.SIGKILL)


def test_a_stopped_worker_without_work_ends_by_itself(tiny: Federation, spare: Pool) -> None:
    """It goes on, to end, instead of being ended when its time is up."""
    method = fp.FedAvg()
    engine = Borrowed.of(spare, 1, method, structure({"train": {"rounds": 1}}, Config), tiny)
    ask(engine, tiny, method, "evaluate")
    (handle,) = engine.pool
    os.kill(handle.process.pid, signal.SIGSTOP)
    Processes.close(engine)
    assert handle.process.returncode == 0


STOPPED = """
import os, signal, sys, fedprism as fp
from fedprism.round.events import Callback
from tests.test_processes import workers_of

class Stops(Callback):
    def round(self, record, snapshot):
        workers = workers_of(os.getpid())
        if record.round == 1:
            for each in workers:
                os.kill(each, signal.SIGSTOP)
            print("round 1", *workers, flush=True)

federation = fp.make_federation("digits-skew", clients=3, seed=0, samples=40, split={"validation": 0.02, "test": 0.1})
settings = ["run.engine=processes", "run.workers=2", "run.device=cpu", "clients.state=disk"]
fp.train(federation, "fedbn", rounds=10**6, out=OUT, settings=settings, callbacks=[Stops()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
@pytest.mark.parametrize("out", ["a temporary folder", "a run directory"])
def test_a_signal_ends_a_run_whose_workers_are_stopped(number: int, code: int, out: str, tmp_path: Path) -> None:
    """No process and no temporary file is left; a run directory says that it was interrupted."""
    program = STOPPED.replace("OUT", "False" if out == "a temporary folder" else repr(str(tmp_path / "run")))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), CACHE: str(tmp_path), "PYTHONPATH": packages()}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
        preexec_fn=hears_ctrl_c,
    )
    workers: list[int] = []
    try:
        assert process.stdout is not None
        workers = [int(each) for each in process.stdout.readline().split()[2:]]
        assert len(workers) == 2, process.stderr and process.stderr.read()
        process.send_signal(number)
        _, said = process.communicate(timeout=LONG)
        assert process.returncode == code, said
        assert not any(map(alive, workers))
        assert not list(temporary.iterdir())
        if out != "a temporary folder":
            assert not (tmp_path / "run" / "states").exists()
            assert fp.load(tmp_path / "run").record.status == "interrupted"
    finally:
        for pid in filter(alive, [process.pid, *workers]):
            os.kill(pid, signal.SIGKILL)
        process.wait()


# --- what the system refuses -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prints(fp.FedAvg):
    def predict(self, *args: Any, **more: Any) -> Any:
        print("a worker prints, and so does what it starts", flush=True)
        os.system("echo to both; echo to both >&2")
        return super().predict(*args, **more)


def test_a_program_whose_input_and_output_are_closed(tiny: Federation, tmp_path: Path) -> None:
    """What is opened in the place of the output is not what a worker prints into."""
    method, done = Prints(), tmp_path / "done"

    def work() -> None:
        for file in (0, 1, 2):
            os.close(file)
        engine = an_engine(tiny, method)
        answers = ask(engine, tiny, method, "evaluate")
        engine.close()
        done.write_text(f"{len(answers)} {engine.pool}")

    code, said = in_child(tmp_path, work)
    assert code == 0, said
    assert done.read_text() == "1 []"


def few_open_files() -> None:
    most = len(os.listdir("/dev/fd")) + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def few_processes() -> None:
    """No limit of processes holds for root."""
    if os.getuid() == 0:
        os.setuid(pwd.getpwnam("nobody").pw_uid)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))


LIMITS = {"Too many open files": few_open_files, "can't start new thread": few_processes}


@pytest.mark.parametrize("words", LIMITS)
def test_what_the_system_does_not_grant(words: str, tiny: Federation, tmp_path: Path) -> None:
    """One line that says what to do, and no worker is left."""

    def work() -> None:
        engine = an_engine(tiny, fp.FedAvg(), workers=2)
        LIMITS[words]()
        with pytest.raises(FedprismError) as caught:
            ask(engine, tiny, fp.FedAvg(), "evaluate")
        os.write(1, f"{caught.value} {engine.pool}".encode())

    code, said = in_child(tmp_path, work)
    assert code == 0, said
    assert said == (
        f"run.engine is processes, and the system does not grant what its workers need: {words}. Set fewer run.workers "
        "or run.engine: inprocess, or raise the limit that was met: of processes and threads (`ulimit -u`), or of open "
        "files (`ulimit -n`). []"
    )
