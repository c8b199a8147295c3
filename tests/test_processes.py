"""The engine `processes`: the bits of `inprocess` whatever happens to its workers, and nothing left when it ends.

Starting a worker takes seconds, so tests of what workers compute pass the same few processes from one to the next.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fedprism as fp
from fedprism.config import MOMENTS, Config, Named, structure
from fedprism.engines import ENGINES
from fedprism.engines.choose import check_engine, choose_engine
from fedprism.engines.numerics import numerics
from fedprism.engines.processes import engine as processes
from fedprism.engines.processes import handle as handles
from fedprism.engines.processes.buffer import SharedBuffer
from fedprism.engines.processes.engine import Processes
from fedprism.engines.processes.handle import Pool, WorkerHandle
from fedprism.engines.processes.imports import why_not
from fedprism.engines.processes.worker import pack
from fedprism.engines.queue import ClientQueue
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods import METHODS, make
from fedprism.methods.base import Client, Context, Method
from fedprism.models import MODELS
from fedprism.round.client import make_info
from fedprism.round.events import Callback
from fedprism.round.loop import Loop
from fedprism.store.serialize import size
from tests.harness import CPU, Borrowed, Collect, by_method, cut, left_by, loop_for, remembering, same

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="worker processes need Linux or macOS"), pytest.mark.full]

CUDA = torch.device("cuda")
EVERYTHING = {
    "data": {"augment": ["flip"]},
    "train": {"rounds": 2, "batch_size": 16},
    "clients": {"participation": 0.7, "dropout": 0.5, "broadcast": "all"},
    "evaluate": {"moments": list(MOMENTS)},
}


def run(
    method: Method, config: Config, federation: Federation, engine: Processes | None = None
) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config, federation, engine), Collect()
    remembering(loop.engine)
    with numerics(config.run, CPU):
        assert loop.run([seen]) == "finished"
    return loop, seen


def assert_same(one: tuple[Loop, Collect], other: tuple[Loop, Collect]) -> None:
    """The same records, timings aside, and the same states and uploads, in the same memory format."""
    records = [[replace(record, seconds={}) for record in seen.records] for _, seen in (one, other)]
    assert records[0] == records[1]
    pairs = [(one[0].server, other[0].server)]
    left = [left_by(loop) for loop, _ in (one, other)]
    pairs += [(left[0].get(client_id), left[1].get(client_id)) for client_id in one[0].info.clients]
    for a, b in pairs:
        assert same(a, b)
        assert a is None or [t.stride() for t in a.values()] == [t.stride() for t in (b or {}).values()]


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_method())
def test_the_bits_of_inprocess(name: str, unequal: Federation, spare: Pool) -> None:
    """Noise, augmentation, drop-outs, every moment; two workers, and of some methods one and three."""
    method = structure({}, METHODS[name], "method")
    config = structure(EVERYTHING, Config)
    reference = run(method, config, unequal)
    assert any(record.failed for record in reference[1].records)
    for count in (1, 2, 3) if name in ("fedpick", "scaffold", "fedkd") else (2,):
        engine = Borrowed.of(spare, count, method, config, unequal)
        assert_same(run(method, config, unequal, engine), reference)


@pytest.mark.slow
def test_the_bits_of_mixed_architectures(tiny: Federation, spare: Pool) -> None:
    raw = {"model": {"per_client": ["lenet-bn", "mlp", {"name": "lenet-bn", "head_layers": 2}]}}
    config = structure({**EVERYTHING, **raw, "run": {"memory_format": "channels_last"}}, Config)
    method = make(Named("fedproto"))
    reference = run(method, config, tiny)
    for count in (2, 3):
        engine = Borrowed.of(spare, count, method, config, tiny)
        assert_same(run(method, config, tiny, engine), reference)


def test_the_bits_of_channels_last_and_public_images(spare: Pool) -> None:
    few = fp.make_federation("digits-skew", clients=2, seed=1, samples=30, public=20, split={"test": 0.05})
    config = structure({**EVERYTHING, "run": {"memory_format": "channels_last"}}, Config)
    method = make(Named("fed-co2"))
    engine = Borrowed.of(spare, 2, method, config, few)
    assert_same(run(method, config, few, engine), run(method, config, few))


def test_data_that_workers_have_no_room_for(tiny: Federation, spare: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's data are sent once or, beyond the room that there is, every time."""
    config, method = structure({"train": {"rounds": 2}}, Config), fp.FedAvg()
    reference = run(method, config, tiny)
    first, kept = size(pack(tiny.clients[tiny.names[0]])), []
    for room in (processes.KEPT_BYTES, first, 0):
        monkeypatch.setattr(processes, "KEPT_BYTES", room)
        assert_same(run(method, config, tiny, Borrowed.of(spare, 1, method, config, tiny)), reference)
        kept.append(len(spare[-1].keeps))
    assert kept == [3, 1, 0]


def test_clients_go_in_order_within_a_window_and_each_answers_once(unequal: Federation, spare: Pool) -> None:
    """One worker has a window of two: the largest waits outside of it. A test has none, since nothing is added up."""
    config, method = structure({"train": {"rounds": 1}}, Config), fp.FedAvg()
    engine = Borrowed.of(spare, 1, method, config, unequal)
    loop = loop_for(method, config, unequal, engine)
    small, middle, large = reversed(unequal.names)
    requests = loop.requests((middle, small, large), loop.context(0))
    progress: list[tuple[int, int]] = []
    engine.on_progress = lambda done, total: progress.append((done, total))
    given: list[str] = []
    give = engine._give
    engine._give = lambda handle, *rest: (given.append(rest[2]), give(handle, *rest))[1]  # type: ignore[method-assign]
    assert [client_id for client_id, _ in engine.train(0, requests)] == [middle, small, large]
    assert given == [middle, small, large]
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert [client_id for client_id, _ in engine.evaluate(1, requests)] == [large, middle, small]
    assert list(engine.receive(0, {})) == []
    engine.close()


def test_the_window_is_wide_where_uploads_are_small(unequal: Federation, spare: Pool) -> None:
    """Two per worker, until it is known how large an answer is; then as many as give 64 MiB, at most 16 per worker."""
    config, method = structure({"train": {"rounds": 1}}, Config), fp.FedAvg()
    engine = Borrowed.of(spare, 2, method, config, unequal)
    assert engine._window() == 4
    for answer, window in ((1000, 32), (2**26 // 20, 20), (2**25, 4)):
        engine.answer_size = answer
        assert engine._window() == window
    engine.answer_size = 0
    loop = loop_for(method, config, unequal, engine)
    dict(engine.train(0, loop.requests(unequal.names, loop.context(0))))
    assert engine.answer_size == size(loop.server), "a client of FedAvg stores nothing"
    engine.close()


def test_a_queue_hands_out_the_largest_of_its_window() -> None:
    """Clients a to f, of whom c and e are the largest; a window of three."""
    cost = {"a": 2, "b": 1, "c": 5, "d": 3, "e": 9, "f": 4}
    queue = ClientQueue(list(cost), lambda name: float(cost[name]), 3)
    assert [queue.take() for _ in range(4)] == ["c", "a", "b", None], "d to f are beyond the window"
    queue.answered("c")
    assert queue.take() is None, "a has no answer yet"
    queue.answered("a")
    assert (queue.take(), queue.take()) == ("d", None)
    queue.put_back(["b"])
    assert (len(queue), queue.take(), queue.take()) == (3, "b", None)
    queue.answered("b")
    assert (queue.take(), queue.take()) == ("e", "f")
    assert (len(queue), queue.take()) == (0, None)
    free = ClientQueue(list(cost), lambda name: float(cost[name]), None)
    assert [free.take() for _ in range(6)] == ["e", "c", "f", "d", "a", "b"]


def test_records_keep_the_order_of_clients_whoever_answers_first(tiny: Federation, spare: Pool) -> None:
    """The last client is the largest, so it is the first to answer; a sum in another order has other bits."""
    config, method = structure({**EVERYTHING, "clients": {"broadcast": "all"}}, Config), fp.FedAvg()
    federation = cut(tiny, (10, 25, 40))
    one = run(method, config, federation, Borrowed.of(spare, 1, method, config, federation))
    other = run(method, config, federation)
    assert_same(one, other)
    for record in one[1].records[1:]:
        assert list(record.down) == list(record.up) == list(record.logs) == list(federation.names)
        assert all(list(found) == list(federation.names) for found in record.scores["received"].values())


def test_a_shared_buffer_gives_what_was_put_into_it() -> None:
    """Any kind of number, shape and memory format; a small message, then one that needs more room, then none."""
    writer = SharedBuffer()
    reader = SharedBuffer(writer.file)
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    state = {
        "double": torch.randn(3, dtype=torch.float64),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(7),
        "nothing": torch.empty(0, 4),
        "images": images,
        "turned": torch.randn(3, 4).T,
        "holes": torch.randn(4, 6)[:, ::2],
        "spread": torch.randn(3, 1).expand(3, 4),
        "trained": torch.nn.Parameter(torch.randn(2)),
    }
    for note, states in (("small", [{"x": torch.ones(2)}]), ({"all": 1}, [None, state, {}]), ("none", [])):
        got, found = reader.get(writer.put(note, states))
        assert got == note
        assert len(found) == len(states)
        for before, after in zip(states, found, strict=True):
            assert same(before, after)
            for name, tensor in (before or {}).items():
                assert after[name].dtype == tensor.dtype
                assert after[name].stride() == tensor.clone().stride()
    writer.close()


def test_a_shared_buffer_knows_what_is_there_already() -> None:
    """The same tensors are not written twice; one that was changed in place, or overwritten, is."""
    writer = SharedBuffer()
    reader = SharedBuffer(writer.file)
    sent = {"w": torch.arange(100.0)}
    (view,) = reader.get(writer.put("first", [sent]))[1]
    view["w"].fill_(7)  # so that it shows when it is written again
    assert reader.get(writer.put("again", [sent, {"more": torch.ones(3)}]))[1][0]["w"].eq(7).all()
    sent["w"].add_(1)
    assert same(reader.get(writer.put("changed", [sent]))[1][0], sent)
    writer.put("a note alone")
    assert same(reader.get(writer.put("overwritten", [sent]))[1][0], sent)
    with torch.inference_mode():
        sealed = {"w": torch.ones(100)}
    for _ in range(2):
        assert same(reader.get(writer.put("sealed", [sealed]))[1][0], sealed)
    writer.close()


# --- methods of one's own --------------------------------------------------------------------------------------------

OWN = """
from dataclasses import dataclass
import torch
import fedprism as fp
from fedprism.methods.base import Client, Context

@dataclass(frozen=True)
class Halved(fp.FedAvg):
    share: float = 0.5

    def receive(self, client: Client, ctx: Context) -> None:
        super().receive(client, ctx)
        with torch.no_grad():
            for parameter in client.model.parameters():
                parameter.mul_(self.share)
"""


def test_a_method_from_a_file(tmp_path: Path, tiny: Federation, spare: Pool) -> None:
    (tmp_path / "own.py").write_text(OWN)
    method = make(Named(f"{tmp_path}/own.py:Halved", {"share": 0.75}))
    config = structure({"train": {"rounds": 1}}, Config)
    engine = Borrowed.of(spare, 2, method, config, tiny)
    assert_same(run(method, config, tiny, engine), run(method, config, tiny))


class Undecorated(fp.FedAvg):
    """A class that is no dataclass of its own."""

    def start(self, client: Client, ctx: Context) -> None:
        client.model.eval()


def test_a_method_of_a_module(tiny: Federation, spare: Pool) -> None:
    config = structure({"train": {"rounds": 1}}, Config)
    engine = Borrowed.of(spare, 1, Undecorated(), config, tiny)
    assert_same(run(Undecorated(), config, tiny, engine), run(Undecorated(), config, tiny))


def test_a_method_that_cannot_be_imported(tiny: Federation) -> None:
    class Here(fp.FedAvg):
        pass

    said = why_not(Here())
    assert said is not None
    assert "made in a function" in said
    with pytest.raises(ConfigError, match=r"made in a function.*put it into a file, or set run.engine: inprocess"):
        fp.train(tiny, Here(), rounds=1, out=False, settings=["run.engine=processes", "run.device=cpu"])
    assert choose(tiny, Here(), rounds=10**6) == "inprocess"


def load(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module from a file that Python would not find by that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["elsewhere", "package.elsewhere", "json.elsewhere", "colorsys"])
def test_a_method_of_a_module_that_cannot_be_found(
    name: str, tmp_path: Path, tiny: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that nothing has, or that another module has."""
    (tmp_path / "elsewhere.py").write_text(OWN)
    method = load(name, tmp_path / "elsewhere.py", monkeypatch).Halved()
    with pytest.raises(ConfigError, match=rf"the method Halved is defined in the module '{name}', which a worker does"):
        fp.train(tiny, method, rounds=1, out=False, settings=["run.engine=processes", "run.device=cpu"])
    assert choose(tiny, method, rounds=10**6) == "inprocess"
    del sys.modules[name]
    assert choose(tiny, method, rounds=10**6) == "inprocess"
    if name == "elsewhere":
        monkeypatch.syspath_prepend(tmp_path)
        module = importlib.import_module(name)
        assert why_not(module.Halved()) is None


def test_a_model_of_a_module_that_cannot_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text("class Net: ...")
    net = load("elsewhere", tmp_path / "elsewhere.py", monkeypatch).Net
    monkeypatch.setitem(MODELS._items, "elsewhere", net)
    assert "a model or the like that the run may need is defined in the module 'elsewhere'" in (
        why_not(fp.FedAvg()) or ""
    )


# --- when something goes wrong ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dies(fp.FedAvg):
    """Ends its own process at one client, `times` times."""

    at: str = ""
    times: int = 1
    folder: str = ""

    def start(self, client: Client, ctx: Context) -> None:
        died = len(os.listdir(self.folder))
        if ctx.client_id == self.at and died < self.times:
            Path(self.folder, str(died)).touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_replaced(tiny: Federation, spare: Pool, tmp_path: Path) -> None:
    config = structure({"train": {"rounds": 2}}, Config)
    method = Dies(at=tiny.names[1], times=1, folder=str(tmp_path))
    engine = Borrowed.of(spare, 2, method, config, tiny)
    with pytest.warns(UserWarning, match=rf"worker process \d+ was ended by SIGKILL.* at client '{tiny.names[1]}'"):
        survived = run(method, config, tiny, engine)
    assert_same(survived, run(method, config, tiny))  # which has died once by now, and does not again


@pytest.mark.slow
def test_a_client_that_kills_its_workers_is_named(tiny: Federation, spare: Pool, tmp_path: Path) -> None:
    config = structure({"train": {"rounds": 1}}, Config)
    method = Dies(at=tiny.names[0], times=9, folder=str(tmp_path))
    engine = Borrowed.of(spare, 1, method, config, tiny)
    with (
        pytest.warns(UserWarning, match="another one does it again"),
        pytest.raises(FedprismError, match=rf"3 worker processes have died at client '{tiny.names[0]}'.*SIGKILL"),
    ):
        run(method, config, tiny, engine)
    assert len(list(tmp_path.iterdir())) == 3
    assert not engine.pool


class Odd(Exception):
    """One that cannot be made again from its arguments, as many are."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@dataclass(frozen=True)
class Mistaken(fp.FedAvg):
    odd: bool = False
    exits: bool = False

    def start(self, client: Client, ctx: Context) -> None:
        if self.exits:
            sys.exit("enough")
        if self.odd:
            raise Odd(1, 2)
        raise KeyError("no such thing")


def test_a_mistake_comes_back_as_it_is(tiny: Federation, spare: Pool) -> None:
    config, (client_id, *_) = structure({"train": {"rounds": 1}}, Config), tiny.names

    def train(method: Method) -> None:
        engine = Borrowed.of(spare, 1, method, config, tiny)
        loop = loop_for(method, config, tiny, engine)
        dict(engine.train(0, loop.requests([client_id], loop.context(0))))

    with pytest.raises(KeyError, match="no such thing") as caught:
        train(Mistaken())
    (note,) = caught.value.__notes__
    assert f"at client {client_id!r}" in note
    assert 'raise KeyError("no such thing")' in note
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        train(Mistaken(odd=True))
    with pytest.raises(SystemExit, match="enough"):
        train(Mistaken(exits=True))


# --- processes -------------------------------------------------------------------------------------------------------


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/dev/fd"))


@pytest.mark.slow
def test_a_run_leaves_nothing_behind(tiny: Federation, tmp_path: Path) -> None:
    """Through the front door: the same metrics, byte for byte, as many open files as before, and no process."""
    settings = ["train.batch_size=16", "run.device=cpu"]
    fp.train(tiny, "fedbn", rounds=2, out=tmp_path / "one", settings=[*settings, "run.engine=inprocess"])
    before, others, workers = open_files(), set(workers_of(os.getpid())), set()

    class Watch(Callback):
        def clients(self, done: int, total: int) -> None:
            workers.update(set(workers_of(os.getpid())) - others)

    fp.train(
        tiny,
        "fedbn",
        rounds=2,
        out=tmp_path / "two",
        settings=[*settings, "run.engine=processes", "run.workers=2"],
        callbacks=[Watch()],
    )
    assert len(workers) == 2
    assert not any(map(alive, workers))
    assert open_files() == before
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("one", "two")]
    assert metrics[0] == metrics[1]


def workers_of(pid: int) -> list[int]:
    """The worker processes that this process has started, and that still run."""
    listed = subprocess.run(
        ["ps", "-axww", "-o", "pid=", "-o", "ppid=", "-o", "stat=", "-o", "args="],
        capture_output=True,
        text=True,
        check=True,
    )
    found = [line.split(maxsplit=3) for line in listed.stdout.splitlines()]
    mine = [(int(one), state) for one, by, state, what in found if int(by) == pid and "processes.worker" in what]
    return [one for one, state in mine if state[0] != "Z"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone(pids: list[int]) -> bool:
    """Do all of them end within a minute?"""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


TRAINS = """
import fedprism as fp
from fedprism.round.events import Callback

class Prints(Callback):
    def round(self, record, snapshot):
        print("round", record.round, flush=True)

federation = fp.make_federation("digits-skew", clients=3, seed=0, samples=40, split={"validation": 0.02, "test": 0.1})
settings = ["run.engine=processes", "run.workers=WORKERS", "run.device=cpu"]
fp.train(federation, METHOD, rounds=ROUNDS, out=False, settings=settings, callbacks=[Prints()])
"""


def program(method: str = '"fedavg"', rounds: int = 1, workers: int = 1) -> str:
    return TRAINS.replace("METHOD", method).replace("ROUNDS", str(rounds)).replace("WORKERS", str(workers))


@contextmanager
def training(*command: str, stdin: str | None = None) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program that trains for ever, in a process group of its own, and its workers, when it has done a round."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, *command], **pipes, text=True, start_new_session=True, preexec_fn=hears_ctrl_c
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(stdin or "")
        process.stdin.close()
        for line in process.stdout:
            if line == "round 1\n":
                break
        workers = workers_of(process.pid)
        assert workers, process.stderr and process.stderr.read()
        yield process, workers
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def hears_ctrl_c() -> None:
    """A program that a shell script starts with `&` does not, nor does whatever it starts: tests run so, too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_a_script_and_its_workers(tmp_path: Path) -> None:
    """As a terminal does it: to the whole group. The script has no `if __name__ == "__main__"`."""
    (tmp_path / "script.py").write_text(program(rounds=10**6, workers=2))
    with training(str(tmp_path / "script.py")) as (process, workers):
        assert len(workers) == 2
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
        assert not any(map(alive, workers))
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.count("Traceback") == 1  # the script's own: workers say nothing
    assert said.endswith("KeyboardInterrupt\n")


def test_workers_end_when_their_parent_is_killed() -> None:
    """The program comes from stdin."""
    with training("-", stdin=program(rounds=10**6)) as (process, workers):
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        assert gone(workers)


@pytest.mark.parametrize("heard_by", ["the main thread", "another thread"])
def test_ctrl_c_at_any_moment_of_a_start(tiny: Federation, monkeypatch: pytest.MonkeyPatch, heard_by: str) -> None:
    """Also while a worker is being started: as long as the exception is kept, as a notebook does, none is left.

    The system gives Ctrl-C to any thread that does not block it, such as that of a progress bar.
    """
    second = ThreadPoolExecutor(1)
    second.submit(int).result()  # a thread that is there, with a mask of its own, before a worker is started
    config, method = structure({"run": {"workers": 2}}, Config), fp.FedAvg()
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    make_process, others = handles._process, set(workers_of(os.getpid()))

    def interrupted(*args: Any) -> subprocess.Popen[bytes]:
        made = make_process(*args)
        if heard_by == "the main thread":
            signal.raise_signal(signal.SIGINT)
        else:
            second.submit(signal.raise_signal, signal.SIGINT).result()
        return made

    class Second(Processes):
        """Ctrl-C when the second worker has just been started, and a process exists."""

        def _set_up(self, handle: WorkerHandle) -> None:
            super()._set_up(handle)
            monkeypatch.setattr(handles, "_process", interrupted)

    engine = Second(method, config, info, tiny, CPU)
    loop = loop_for(method, config, tiny, engine)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    files = open_files()
    try:
        with pytest.raises(KeyboardInterrupt) as kept:
            dict(engine.train(0, loop.requests(tiny.names, loop.context(0))))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, before)
        second.shutdown()
    assert set(workers_of(os.getpid())) <= others
    assert not engine.pool
    del kept
    assert open_files() == files


def test_a_second_ctrl_c_while_workers_end(tiny: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it leaves undone is done by whoever closes next: the loop, or the end of the process."""
    config, method = structure({"run": {"workers": 2}}, Config), fp.FedAvg()
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    others, files = set(workers_of(os.getpid())), open_files()
    engine = Processes(method, config, info, tiny, CPU)
    engine._start()
    engine._start()
    wait = subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    engine.close()
    assert not engine.pool
    assert set(workers_of(os.getpid())) <= others
    assert open_files() == files


@dataclass(frozen=True)
class Leaves(fp.FedAvg):
    """Leaves a thread that never ends, and something to be done when the process ends."""

    file: str = ""

    def start(self, client: Client, ctx: Context) -> None:
        threading.Thread(target=time.sleep, args=(10**6,)).start()
        atexit.register(Path(self.file).touch)
        print("a line", "of several", "words")
        print("and a part of one", end="")


@pytest.mark.slow
def test_what_a_method_leaves_does_not_keep_its_worker(
    tiny: Federation, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = structure({"train": {"rounds": 1}, "run": {"workers": 1}}, Config)
    method = Leaves(file=str(tmp_path / "done"))
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    engine = Processes(method, config, info, tiny, CPU)
    loop = loop_for(method, config, tiny, engine)
    files = open_files()
    dict(engine.train(0, loop.requests(tiny.names, loop.context(0))))
    assert open_files() - files == processes.FILES
    (handle,) = engine.pool
    engine.close()
    assert handle.process.returncode == 0
    assert capfd.readouterr().out == "a line of several words\nand a part of one" * 3
    assert (tmp_path / "done").exists()


def output(*command: str, **more: Any) -> str:
    """What a program says, on either channel."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **more)
    return done.stdout


@pytest.mark.slow
def test_a_method_of_the_script_itself(tmp_path: Path) -> None:
    """A worker would have to run the whole script: this is said before any is started."""
    (tmp_path / "open.py").write_text(OWN + program("Halved()"))
    said = output(sys.executable, str(tmp_path / "open.py"))
    assert "ConfigError: run.engine is processes, but the method Halved is defined in " in said
    assert 'put what is no definition below `if __name__ == "__main__":`' in said


@pytest.mark.slow
def test_a_method_of_a_guarded_script(tmp_path: Path) -> None:
    guarded = OWN + 'if __name__ == "__main__":' + program("Halved()").replace("\n", "\n    ")
    (tmp_path / "guarded.py").write_text(guarded)
    assert output(sys.executable, str(tmp_path / "guarded.py")) == "round 0\nround 1\n"


@pytest.mark.slow
def test_a_script_whose_guard_is_elsewhere(tmp_path: Path) -> None:
    """It trains when it is imported: its workers refuse to."""
    (tmp_path / "leaky.py").write_text(OWN + 'if __name__ == "__main__":\n    pass\n' + program("Halved()"))
    said = output(sys.executable, str(tmp_path / "leaky.py"))
    assert "FedprismError: a worker process was about to train by itself" in said
    assert "round" not in said.splitlines()


@pytest.mark.slow
def test_other_ways_to_start(tmp_path: Path) -> None:
    assert output(sys.executable, "-c", program()) == "round 0\nround 1\n"
    said = output(sys.executable, "-c", OWN + program("Halved()"))
    assert "the method Halved was written in a Python session" in said
    (tmp_path / "module.py").write_text(program())
    assert output(sys.executable, "-m", "module", cwd=tmp_path) == "round 0\nround 1\n"
    (tmp_path / "few.yaml").write_text(
        "{data: {samples: 20}, train: {rounds: 1}, run: {engine: processes, device: cpu}}"
    )
    output(sys.executable, "-m", "fedprism", "run", str(tmp_path / "few.yaml"), "--out", str(tmp_path / "run"))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


# --- which engine ----------------------------------------------------------------------------------------------------


def choose(federation: Federation, method: Method | None = None, device: torch.device = CPU, **train: Any) -> str:
    run = {"workers": 2, "engine": train.pop("engine", "auto")}
    config = structure({"train": train, "run": run}, Config)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    return choose_engine(config, device, info, federation, method or fp.FedAvg())


def test_processes_are_chosen_where_they_pay(tiny: Federation) -> None:
    assert choose(tiny, rounds=3) == "inprocess"
    assert choose(tiny, rounds=10**5) == "processes"
    assert choose(tiny, rounds=10**5, engine="inprocess") == "inprocess"
    assert choose(tiny, rounds=3, engine="processes") == "processes"
    assert choose(tiny, rounds=3, device=CUDA) == ("cuda-graphs" if "cuda-graphs" in ENGINES else "inprocess")


def test_one_client_has_no_use_for_workers(tiny: Federation) -> None:
    alone = replace(tiny, clients={tiny.names[0]: tiny.clients[tiny.names[0]]})
    assert choose(alone, rounds=10**5) == "inprocess"


def test_an_engine_on_the_wrong_device() -> None:
    with pytest.raises(ConfigError, match=r"processes, which is for cpu, and the device is cuda; set run.device: cpu"):
        check_engine("processes", CUDA)
    with pytest.raises(ConfigError, match=r"unknown engine 'proceses'. Did you mean 'processes'"):
        check_engine("proceses", CPU)


def test_one_worker_per_core_unless_set() -> None:
    cores = processes.cores()
    assert processes.workers(Config()) == cores >= 1
    assert processes.workers(structure({"run": {"threads": cores}}, Config)) == 1
    assert processes.workers(structure({"run": {"workers": 7}}, Config)) == 7


@pytest.mark.parametrize(
    ("quota", "granted"), [("max 100000", 64), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1)]
)
def test_a_container_is_granted_a_part_of_the_cores(
    quota: str, granted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of control groups v2; the machine that the tests run on may have none, or few cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr(processes, "QUOTA", tmp_path / "cpu.max")
    assert processes.cores() == 64
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert processes.cores() == granted
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    assert processes.cores() == 1


def test_workers_on_disk_have_a_client_each_and_one_that_waits(
    tiny: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedprism.store.clients.AT_ONCE", 1)
    config = structure({"clients": {"state": "disk"}, "run": {"workers": 20}}, Config)
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    for engine, count in ((Processes(fp.FedAvg(), config, info, tiny, CPU), 40), (None, 16)):
        loop = loop_for(fp.FedAvg(), config, tiny, engine)
        assert len(next(loop.states.parts([str(number) for number in range(100)]))) == count


LIMITED = """
import os, resource
from fedprism.config import Config
from fedprism.engines.processes import engine
from fedprism.engines.processes.engine import FILES, OTHERS

engine.cores = lambda: 64
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 10, OTHERS + 4 * FILES - 1))
print(engine.workers(Config()), "workers")
TRAINING
resource.setrlimit(resource.RLIMIT_NOFILE, (OTHERS + FILES, OTHERS + FILES))
print(engine.workers(Config()), "workers")
TRAINING
"""


@pytest.mark.slow
def test_few_open_files_are_enough_or_it_is_said() -> None:
    """Two workers need more than ten: the limit is raised as far as it goes, and `auto` takes no more than that."""
    said = output(sys.executable, "-c", LIMITED.replace("TRAINING", program(workers=2)))
    assert said.startswith("3 workers\nround 0\nround 1\n1 workers\nTraceback")
    assert "ConfigError: run.engine is processes, and 2 workers take up to 146 open files in all, of which" in said
    assert "this process may have 137 (`ulimit -Hn`); set fewer run.workers" in said
