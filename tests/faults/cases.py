"""One case: an operation, a fault, and whether every promise holds afterwards.

A case runs in children that are forked from one warm process, which has imported everything and has one thread: so a
case takes tenths of a second, and kills, signals and limits are real. `Driver` is that process as seen from outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import typer
import yaml

from fedprism import config as configuration
from fedprism.files import NotAFile, read_bytes
from tests.faults import injection
from tests.faults.injection import FAULTS, NEEDS_MOUNT, NONE, Fault, Scene
from tests.faults.operations import CONFIG, NOTES, OPERATIONS, SABOTAGE, STARTS, Operation, go_on

ROOT = Path(__file__).parent.parent.parent
PATIENCE = {False: 20.0, True: 120.0}  # seconds until an operation (a slow one) counts as hanging
GONE = 15.0  # seconds in which worker processes notice that their parent has gone
ROOM = 2**31  # bytes that an operation may take, so that a nasty setting cannot take the machine
THEIRS = {"theirs.txt": b"theirs\n", "folder/data.bin": bytes(range(256))}

LOST_COUNTS = ": going on without counts per class."  # nothing makes them again

SAME, WARNED = "same bits", "less, with a warning"
RESUMED, REFUSED, BROKEN = "resumed to the same bits", "refused in one line", "BROKEN PROMISE"
NOT_HERE = "not possible here"


@dataclass(frozen=True)
class Case:
    """`place` says where the fault strikes, from 0 to 1 in the list of its points. `again`: going on is killed, too."""

    operation: str
    fault: str
    place: float = 0.0
    settings: tuple[str, ...] = ()
    again: float | None = None


@dataclass
class Verdict:
    outcome: str
    point: str = ""
    broken: list[str] = field(default_factory=list)
    said: str = ""


@dataclass(frozen=True)
class Ended:
    """How a child ended: `code` is negative for a signal and None if it had to be stopped."""

    code: int | None
    out: str
    err: str
    left: bool = False  # a process of it went on

    @property
    def fine(self) -> bool:
        return self.code == 0


@dataclass(frozen=True)
class Reference:
    """What the operation does without a fault."""

    tree: dict[str, str]
    out: str
    steps: dict[str, list[str]]


# --- a child ---------------------------------------------------------------------------------------------------------


def in_child(act: Callable[[], None], work: Path, patience: float, inside: Callable[[], None] | None = None) -> Ended:
    """Run `act` in a forked process, in the folder `work`."""
    pipes = [os.pipe() for _ in range(2)]
    for _, write in pipes:  # read when it has ended: a limit on sizes of files must not reach what it prints
        fcntl.fcntl(write, getattr(fcntl, "F_SETPIPE_SZ", fcntl.F_GETFD), 2**20)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _be_child(act, work, [write for _, write in pipes], inside)
    for _, write in pipes:
        os.close(write)
    code = _code(pid, patience)
    left = code is not None and not _all_gone(pid, GONE if code < 0 else GONE / 10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    out, err = (_drained(read) for read, _ in pipes)
    return Ended(code, out, err, left)


def _be_child(act: Callable[[], None], work: Path, outputs: list[int], inside: Callable[[], None] | None) -> None:
    code = 1
    try:
        injection.end_with_parent()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        # Those of the parent remember what kind of file they were opened on.
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        temporary = work.parent / "temporary"
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        os.chdir(work)
        _limit(ROOM)
        if inside is not None:
            inside()
        try:
            act()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except typer.Exit as error:
            code = error.exit_code
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - a forked child must not go on with its parent's work
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _limit(room: int) -> None:
    if sys.platform == "linux":
        used = int(Path("/proc/self/status").read_text(encoding="utf-8").partition("VmData:")[2].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + room, resource.RLIM_INFINITY))


def _code(pid: int, patience: float) -> int | None:
    deadline, pause = time.monotonic() + patience, 0.001
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.01, pause * 1.5)
    return None


def _all_gone(group: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while True:
        try:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)  # orphans come to this process
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)


def _drained(read: int) -> str:
    """What is in a pipe; a process that was left behind may hold its other end."""
    data = b""
    while select.select([read], [], [], 0)[0] and (piece := os.read(read, 2**20)):
        data += piece
    os.close(read)
    return data.decode(errors="replace")


# --- files as they are -----------------------------------------------------------------------------------------------

_VOLATILE = {"started", "ended", "versions", "machine", "resumed", "checksum"}  # of run.json
_PRESENT = {"timings.jsonl", "report.html", "page.html"}  # they hold times


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder and what is read from it, but for times and locks."""
    return {name: _content(folder / name, times=False) for name in _names(folder)}


def exact(folder: Path) -> dict[str, str]:
    """Every file below a folder and its content, every bit of it."""
    return {name: _content(folder / name, times=True) for name in _names(folder)}


def _names(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.name != ".lock"]


def _content(path: Path, times: bool) -> str:
    if times and path.is_symlink():
        return f"link to {os.readlink(path)}"
    if path.is_dir():
        return "folder"
    if not path.is_file():
        return "neither a file nor a folder"
    if not times and path.name in _PRESENT:
        return "file"
    data = path.read_bytes()
    if not times and path.name == "run.json":
        with contextlib.suppress(ValueError, AttributeError):
            return json.dumps({key: value for key, value in json.loads(data).items() if key not in _VOLATILE})
    return sha256(data).hexdigest()


def below(name: str, folders: Sequence[str]) -> bool:
    """Is this one of the files or folders, or in one of them?"""
    return any(name == each or name.startswith(f"{each}/") for each in folders)


def differing(before: dict[str, str], after: dict[str, str]) -> str:
    """The first few names that are gone, new or changed."""
    words = [f"{name} is gone" for name in before if name not in after]
    words += [f"{name} is new" for name in after if name not in before]
    words += [f"{name} is changed" for name in before if name in after and before[name] != after[name]]
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")


# --- the lab ---------------------------------------------------------------------------------------------------------


class Lab:
    """The warm process: it keeps what operations start with, and what they do without a fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounts = injection.own_mounts()
        injection.adopt_orphans()
        self._starts: dict[tuple[str, tuple[str, ...]], Path] = {}
        self._references: dict[tuple[str, tuple[str, ...]], Reference] = {}
        self._warm()

    def _warm(self) -> None:
        """Import all that operations use: they then do the same in every child."""
        work = self.folder / "warm"
        work.mkdir()
        _write_config(work, ())
        before = os.getcwd()
        os.chdir(work)
        quiet = io.StringIO()
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            for name in ("train", "overwrite", "load", "report", "compare", "inspect"):
                with contextlib.suppress(SystemExit):
                    OPERATIONS[name].act()
        os.chdir(before)
        shutil.rmtree(work)
        assert (threads := len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1) == 1, threads

    def start(self, name: str, settings: tuple[str, ...]) -> Path:
        """A folder to copy: what operations start with."""
        if (name, settings) not in self._starts:
            path = Path(tempfile.mkdtemp(prefix="start-", dir=self.folder))
            _write_config(path, settings)
            act = STARTS[name]
            if act is not None:
                ended = in_child(act, path, PATIENCE[True])
                assert ended.code in (0, -signal.SIGKILL), ended.err
            for note, content in NOTES.items():
                if (path / note).parent.is_dir() or (path / "study").is_dir():
                    (path / note).parent.mkdir(exist_ok=True)
                    (path / note).write_bytes(content)
            self._starts[name, settings] = path
        return self._starts[name, settings]

    @contextmanager
    def scene(self, operation: Operation, settings: tuple[str, ...]) -> Iterator[Scene]:
        place = Path(tempfile.mkdtemp(prefix="case-", dir=self.folder))
        scene = Scene(place / "work", place / "beside", place / "put")
        shutil.copytree(self.start(operation.start, settings), scene.work, symlinks=True)
        for name, content in THEIRS.items():
            (scene.beside / name).parent.mkdir(parents=True, exist_ok=True)
            (scene.beside / name).write_bytes(content)
        try:
            yield scene
        finally:
            injection.unmount(scene.work)
            shutil.rmtree(place, ignore_errors=True)

    def reference(self, operation: Operation, settings: tuple[str, ...]) -> Reference:
        """The operation without a fault; its steps are written to a file that is not counted."""
        if (operation.name, settings) not in self._references:
            with self.scene(operation, settings) as scene:
                log = scene.work.with_name("steps")

                def count() -> None:
                    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                    write = os.write

                    def step(kind: str, what: str, path: str) -> None:
                        write(descriptor, f"{kind}\t{what} {os.path.relpath(path, scene.work)!a}\n".encode())

                    injection.watch(scene.work, step)

                ended = in_child(operation.act, scene.work, PATIENCE[True], count)
                assert ended.code == 0, (operation.name, settings, ended)
                steps: dict[str, list[str]] = {"reads": [], "writes": [], "tears": []}
                for line in log.read_text(encoding="utf-8").splitlines():
                    kind, _, what = line.partition("\t")
                    steps[kind].append(what)
                self._references[operation.name, settings] = Reference(tree(scene.work), ended.out, steps)
        return self._references[operation.name, settings]

    def points(self, operation: Operation, fault: Fault, settings: tuple[str, ...] = ()) -> list[str]:
        steps = self.reference(operation, settings).steps
        start = self.start(operation.start, settings)
        return list(fault.points(Scene(start, start, start, steps)))

    def run(self, case: Case) -> Verdict:
        """Play a case and say what became of it."""
        if case.operation in SABOTAGE:
            operation = Operation(case.operation, SABOTAGE[case.operation][0], changes=("study",))
            reference = self.reference(OPERATIONS["train"], case.settings)
        else:
            operation = OPERATIONS[case.operation]
            reference = self.reference(operation, case.settings)
        fault = FAULTS.get(case.fault, NONE)
        if fault.name in NEEDS_MOUNT and not self.mounts:
            return Verdict(NOT_HERE, "no right to mount a small disk")
        with self.scene(operation, case.settings) as scene:
            scene.steps = reference.steps
            points = fault.points(scene)
            if not points:
                return Verdict(NOT_HERE, "there is nothing that it could strike")
            point = points[min(len(points) - 1, int(case.place * len(points)))]
            fault.before(scene, point)
            return _Trial(operation, fault, reference, scene, point).verdict(case.again)


class _Trial:
    """One case under way: it collects the promises that are broken."""

    def __init__(self, operation: Operation, fault: Fault, reference: Reference, scene: Scene, point: str) -> None:
        self.operation, self.fault, self.reference, self.scene, self.point = operation, fault, reference, scene, point
        self.broken: list[str] = []
        self.said: list[str] = []
        self.stuck = False  # the last child could not tidy up
        self.before, self.beside = exact(scene.work), exact(scene.beside)
        self.patience = PATIENCE[operation.slow]

    def verdict(self, again: float | None) -> Verdict:
        ended = self.child(self.operation.act, lambda: self.fault.inside(self.scene, self.point))
        self.check_end(ended, self.fault.ends)
        self.check_files()
        self.check_finished()
        if self.fault.rewrites:
            return self.result(SAME if ended.fine else REFUSED)
        if ended.fine:
            return self.result(self.check_success(ended))
        if ended.code is None:
            return self.result(BROKEN)
        self.fault.after(self.scene, self.point)
        if self.fault.damages:  # the file is back
            self.before, self.beside = exact(self.scene.work), exact(self.scene.beside)
        if again is not None:
            killing = FAULTS["killed"]
            point = f"{1 + int(again * len(self.reference.steps['writes']))}"
            ended = self.child(go_on(self.operation), lambda: killing.inside(self.scene, point))
            self.check_end(ended, killing.ends)
            self.check_files()
        ended = self.child(go_on(self.operation))
        if ended.fine:
            self.check_end(ended, ())
            self.check_files()
            self.compare("afterwards")
        else:
            self.broken.append(f"could not go on after the fault: exit code {ended.code}")
        return self.result(REFUSED if self.fault.damages else RESUMED)

    def child(self, act: Callable[[], None], inside: Callable[[], None] | None = None) -> Ended:
        ended = in_child(act, self.scene.work, self.patience, inside)
        killed = ended.code is not None and ended.code < 0
        self.stuck = killed or (inside is not None and (self.fault.lasting or "os.remove" in self.point))
        self.said.append(f"[exit code {ended.code}]\n{ended.err.strip()}")
        return ended

    def result(self, outcome: str) -> Verdict:
        said = "\n".join(self.said).replace(str(self.scene.work.parent), "...")
        return Verdict(BROKEN if self.broken else outcome, self.point[:160], self.broken, said[-6000:])

    # --- the promises ---

    def check_end(self, ended: Ended, ends: tuple[int, ...]) -> None:
        """It ended in time: well, with one line that says why not, or by the signal that it was sent."""
        printed = ended.out + ended.err
        if ended.code is None:
            self.broken.append(f"hung: it had not ended after {self.patience:.0f} s")
        elif ended.code < 0 and -ended.code not in ends:
            self.broken.append(f"ended by {signal.Signals(-ended.code).name}")
        errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        for word in ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error"):
            if word in printed:
                self.broken.append(f"printed {word!r}: {_last_line(printed)}")
        if raw := re.search(r"failed: (?!FedprismError)\w*(Error|Exception|Interrupt): .*", ended.err):
            self.broken.append(f"a raw exception for a message: {raw[0][:200]}")
        if ended.code == 0 and errors:
            self.broken.append(f"exit code 0 with an error: {errors[0]}")
        if ended.code is not None and ended.code > 0:
            if not printed.strip():
                self.broken.append(f"exit code {ended.code} without a word")
            if ended.code == 2 and len(errors) != 1:
                self.broken.append(f"exit code 2 with {len(errors)} lines that begin with 'error:'")
            if ended.code not in (1, 2, 130, 143):
                self.broken.append(f"exit code {ended.code}")
            if self.fault.damages and ended.code == 2 and errors and not _names_a_file(errors[0], ended.err):
                self.broken.append(f"the message names no file: {errors[0][:200]}")
        if ended.left:
            self.broken.append("a process of it went on")
        temporary = self.scene.work.parent / "temporary"
        stray = [path.name for path in temporary.iterdir()] if temporary.is_dir() else []
        if stray and ended.code is not None and ended.code >= 0:
            self.broken.append(f"left in the temporary folder: {', '.join(stray)}")
        shutil.rmtree(temporary, ignore_errors=True)
        run = exact(self.scene.work / "study").get("run.json")
        begun = self.operation.changes == ("study",) and run != self.before.get("study/run.json")
        if ended.code == 130 and begun and _status(self.scene.work / "study") == "running":
            self.broken.append("stopped in good order, but run.json says that the run goes on")

    def check_files(self) -> None:
        """What is not the operation's own is as it was."""
        if words := differing(self.beside, exact(self.scene.beside)):
            self.broken.append(f"beside its folder: {words}")
        after = exact(self.scene.work)
        changes = self.operation.changes
        if self.fault.rewrites:
            changes = (*changes, "mine.yaml")
        kept = {name: text for name, text in self.before.items() if not below(name, changes)}
        others = {name: text for name, text in after.items() if not below(name, changes)}
        if self.scene.put.exists():
            others.pop(os.path.relpath(self.scene.put.read_text(encoding="utf-8"), self.scene.work), None)
        others = {name: text for name, text in others.items() if not self.excused(name, changes)}
        if words := differing(kept, others):
            self.broken.append(f"what it should not touch: {words}")
        if not self.operation.replaces:
            mine = {name: text for name, text in self.before.items() if name in NOTES}
            if words := differing(mine, {name: after[name] for name in mine if name in after}):
                self.broken.append(f"a user's files: {words}")
        if self.scene.put.exists():
            theirs = Path(self.scene.put.read_text(encoding="utf-8"))
            if not theirs.exists():
                self.broken.append(f"a user's file is gone: {theirs.relative_to(self.scene.work)}")
                self.scene.put.unlink()

    def excused(self, name: str, changes: Sequence[str]) -> bool:
        """Is it a temporary file that it could not delete, or an old run that it could not put back and names?"""
        return _is_temporary(name, changes) and (self.stuck or Path(name).parts[0] in self.said[-1])

    def check_finished(self) -> None:
        """A run that was finished is there, or what replaces it can go on."""
        old = self.before.get("study/metrics.jsonl")
        if not self.operation.replaces or old is None:
            return
        after = exact(self.scene.work)
        there = [name for name, text in after.items() if name.endswith("metrics.jsonl") and text == old]
        begun = any(name.startswith("study/checkpoints/manifest-") for name in after)
        found = any(name == "study/metrics.jsonl" or self.excused(name, self.operation.changes) for name in there)
        if not found and not begun:
            where = f"lies in {there[0]}, without a word" if there else "is lost"
            self.broken.append(f"the run that was to be replaced {where}, and there is no other in its place")

    def check_success(self, ended: Ended) -> str:
        """It ended well in spite of the fault: it has done what it does without one, or says what is different."""
        if not self.fault.damages:  # damage that it could do without is left to it
            self.fault.after(self.scene, self.point)
        if self.operation.changes == ("study",) or not self.fault.damages:
            self.compare("in spite of the fault")
        if ended.out == self.reference.out and LOST_COUNTS not in ended.err:
            return SAME
        if "warning: " not in ended.err:
            self.broken.append("printed something else than without the fault, without a word about it")
        return WARNED

    def compare(self, when: str) -> None:
        after = tree(self.scene.work)
        named = {name for name in after if name.startswith(".") and Path(name).parts[0] in self.said[-1]}
        left_out = {path for note in NOTES if named for path in (note, str(Path(note).parent))}  # they lie there, too
        if LOST_COUNTS in self.said[-1]:
            left_out.add("study/classes.json")
        new = {name for name in after if name not in self.reference.tree and "/checkpoints/" in name}
        if any("/manifest-" in name for name in new):  # it had stopped in good order, with one more checkpoint
            left_out |= new
        stays = re.findall(r"warning: (\S+) (?:could not be removed|is a folder)", self.said[-1])
        left_out |= {name for name in after if below(name, stays)}
        expected = {name: text for name, text in self.reference.tree.items() if name not in left_out}
        if words := differing(expected, {n: text for n, text in after.items() if n not in named | left_out}):
            self.broken.append(f"{when}: {words}")


def _is_temporary(name: str, changes: Sequence[str]) -> bool:
    """What a killed process leaves beside the file or folder that it was about to make."""
    return any(name.startswith(str(Path(each).with_name(f".{Path(each).name}"))) for each in changes)


def _names_a_file(error: str, err: str) -> bool:
    return re.search(r"\b(study|studies|page\.html|mine\.yaml|look)\b", error + err) is not None


def _status(run: Path) -> str | None:
    try:
        return str(json.loads(read_bytes(run / "run.json"))["status"])  # a pipe may lie there
    except (OSError, ValueError, KeyError, TypeError, NotAFile):
        return None


def _last_line(printed: str) -> str:
    """The exception that a traceback ends with."""
    lines = [line for line in printed.splitlines() if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line)]
    return lines[-1][:200] if lines else ""


def _write_config(folder: Path, settings: Sequence[str]) -> None:
    given = configuration.override(CONFIG, list(settings))
    (folder / "mine.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")


# --- the warm process, from outside ----------------------------------------------------------------------------------


class Driver:
    """A warm process that runs one case after the other."""

    def __init__(self) -> None:
        few = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.cases"],
            cwd=ROOT,
            env={**os.environ, **few, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "200"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that runs the cases has ended with {self._process.wait()}"
        return json.loads(answer)

    def run(self, case: Case) -> Verdict:
        return Verdict(**self.ask({"run": asdict(case)}))

    def points(self, operation: str, fault: str) -> list[str]:
        return list(self.ask({"points": [operation, fault]}))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve() -> None:
    """Answer questions from standard input, one line each, until it is closed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the folder gone
    with contextlib.suppress(KeyboardInterrupt), tempfile.TemporaryDirectory(prefix="fedprism-faults-") as folder:
        os.environ["FEDPRISM_CACHE"] = f"{folder}/cache"
        lab = Lab(Path(folder).resolve())
        for line in sys.stdin:
            question = json.loads(line)
            answer: Any
            if "run" in question:
                given = question["run"]
                try:
                    answer = asdict(lab.run(Case(**{**given, "settings": tuple(given["settings"])})))
                except Exception as error:  # noqa: BLE001 - the other cases can still be run
                    words = f"the case itself has failed: {error!r}"[:600]
                    answer = asdict(Verdict(BROKEN, "", [words], traceback.format_exc()))
            else:
                operation, fault = question["points"]
                answer = lab.points(OPERATIONS[operation], FAULTS[fault])
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
