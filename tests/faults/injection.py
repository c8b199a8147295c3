"""Faults, real ones: they strike a process that runs an operation, or the files that it starts with.

Where a fault can strike are its points: the n-th operation on a file, a file of the run, so many KiB of space. A case
names one by its place from 0 to 1 in the list of points.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedprism import config as configuration
from fedprism.config import Config
from fedprism.records import runfile


@dataclass
class Scene:
    """Where a case takes place."""

    work: Path  # the working directory of the operation
    beside: Path  # somebody else's files
    put: Path  # lists files that a fault has put into a run directory
    steps: dict[str, list[str]] = field(default_factory=dict)  # what the operation does without a fault

    def files(self) -> list[str]:
        """The files of the run directories, but not what the user has put there."""
        found = (path.relative_to(self.work).as_posix() for path in sorted(self.work.glob("stud*/**/*")))
        return [name for name in found if not (self.work / name).is_dir() and not name.endswith(".txt")]


def nothing(scene: Scene, point: str) -> None:
    """No fault, or none here."""


@dataclass(frozen=True)
class Fault:
    """A fault: `before` prepares it, `inside` makes it ready in the process of the operation, `after` takes it away."""

    name: str
    points: Callable[[Scene], Sequence[str]]
    before: Callable[[Scene, str], None] = nothing
    inside: Callable[[Scene, str], None] = nothing
    after: Callable[[Scene, str], None] = nothing
    ends: tuple[int, ...] = ()  # signals that may end the process without a word
    damages: bool = False  # files that were there: an operation may refuse them
    lasting: bool = False  # from where it strikes to the end
    rewrites: bool = False  # the configuration: another run is made, if any


# --- operations on files ---------------------------------------------------------------------------------------------

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink"}
_CALLS = ("write", "fsync", "ftruncate")  # Python has no audit event for these

Step = Callable[[str, str, str], None]  # reads, writes or tears; what is about to happen; the file


def watch(folder: Path, step: Step) -> None:
    """Call `step` before every operation on files below a folder. For good: only in a process that ends after it."""
    root = str(folder)

    def inside(path: object) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and os.path.abspath(os.fsdecode(path)).startswith(root)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and inside(args[0]):
            step("writes" if (args[2] or 0) & _WRITING else "reads", event, os.fsdecode(args[0]))
        elif event in _EVENTS and inside(args[0]):
            step("writes", event, os.fsdecode(args[0]))

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(descriptor: int, *rest: Any) -> Any:
            path = _path(descriptor)
            if not inside(path):
                return real(descriptor, *rest)
            step("writes", f"os.{name}", path)
            if name != "write":
                return real(descriptor, *rest)
            data = memoryview(rest[0])
            done = real(descriptor, data[: len(data) // 2])
            step("tears", f"half of os.{name}", path)
            return done + real(descriptor, data[done:])

        return call

    for name in _CALLS:
        setattr(os, name, watched(name))
    sys.addaudithook(hook)


def _path(descriptor: int) -> str:
    """The file that is open; "": the system does not say."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def at_step(kind: str, strike: Callable[[Scene, str], None], lasting: bool = False) -> dict[str, Any]:
    """The points of a fault that strikes at the n-th operation on a file, and how it gets there."""

    def points(scene: Scene) -> list[str]:
        return [f"{n} {what}" for n, what in enumerate(scene.steps[kind], 1)]

    def inside(scene: Scene, point: str) -> None:
        wanted, count = int(point.split()[0]), 0

        def step(which: str, what: str, path: str) -> None:
            nonlocal count
            if which == kind:
                count += 1
                if count == wanted or (lasting and count > wanted):
                    strike(scene, path)

        watch(scene.work, step)

    return {"points": points, "inside": inside, "lasting": lasting}


def send(number: int) -> Callable[[Scene, str], None]:
    return lambda scene, path: os.kill(os.getpid(), number)


def fail(number: int) -> Callable[[Scene, str], None]:
    def strike(scene: Scene, path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    return strike


def fail_beside_a_users_file(scene: Scene, path: str) -> None:
    """The user has put something into the run directory when its disk is full."""
    for folder in ("study", "studies/fedavg-0"):
        theirs = scene.work / folder / "meanwhile.txt"
        if theirs.parent.is_dir() and not theirs.exists() and not scene.put.exists():
            scene.put.write_text(str(theirs), encoding="utf-8")
            theirs.write_bytes(b"mine\n")  # this is counted, too, but the fault strikes once
    fail(errno.ENOSPC)(scene, path)


def take_away(scene: Scene, point: str) -> None:
    if scene.put.exists():
        Path(scene.put.read_text(encoding="utf-8")).unlink(missing_ok=True)
        scene.put.unlink()


# --- space, sizes of files, memory, processes ------------------------------------------------------------------------

_MS_REMOUNT, _MS_PRIVATE, _MNT_DETACH, _CLONE_NEWNS = 32, 1 << 14 | 1 << 18, 2, 0x20000


def own_mounts() -> bool:
    """Let what this process mounts be seen by itself and its children alone; False where it may not mount."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(_CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, _MS_PRIVATE, None) == 0


def adopt_orphans() -> None:
    """Children of a child that has ended become children of this process, which can then wait for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_with_parent() -> None:
    """A process that hangs must not go on when the one that waits for it was ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _mount(folder: Path, size: int, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), "mount failed", str(folder))


def unmount(folder: Path) -> None:
    """If something is mounted there."""
    if os.path.ismount(folder):
        ctypes.CDLL(None).umount2(os.fsencode(folder), _MNT_DETACH)


def fill_disk(scene: Scene, point: str) -> None:
    """The working directory becomes a disk with so many KiB left."""
    aside = scene.work.with_name("aside")
    shutil.copytree(scene.work, aside, symlinks=True)
    _mount(scene.work, 1 << 24)
    shutil.copytree(aside, scene.work, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(aside)
    space = os.statvfs(scene.work)
    used = (space.f_blocks - space.f_bfree) * space.f_bsize
    _mount(scene.work, used + 1024 * int(point.split()[0]), _MS_REMOUNT)


def empty_disk(scene: Scene, point: str) -> None:
    _mount(scene.work, 1 << 26, _MS_REMOUNT)


def limit_files(scene: Scene, point: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024 * int(point.split()[0]), resource.RLIM_INFINITY))


def memory_points(scene: Scene) -> list[str]:
    return [f"{n} MiB" for n in (0, 1, 2, 4, 6, 8, 12, 16, 24, 32)] if sys.platform == "linux" else []


def limit_memory(scene: Scene, point: str) -> None:
    ctypes.CDLL(None).malloc_trim(0)  # what earlier cases have used and given back is no room
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    used = int(status.partition("VmData:")[2].split()[0]) * 1024
    most = used + 2**20 * int(point.split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


# --- permissions -----------------------------------------------------------------------------------------------------

_ALL_RIGHTS = ctypes.c_uint32 * 6  # effective, permitted and inheritable capabilities, twice 32 of them


@contextmanager
def as_any_user() -> Iterator[None]:
    """Within: root may not read what its permissions forbid, like everybody else."""
    if not hasattr(os, "geteuid") or (os.geteuid() == 0 and sys.platform != "linux"):
        pytest.skip("nothing is forbidden to this user")
    libc, version, rights = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), _ALL_RIGHTS()
    libc.capget(version, rights)
    libc.capset(version, _ALL_RIGHTS(0, *rights[1:3], 0, *rights[4:]))
    try:
        yield
    finally:
        libc.capset(version, rights)


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path, beside: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path, beside: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def empty(path: Path, beside: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path, beside: Path) -> None:
    path.unlink()


def to_folder(path: Path, beside: Path) -> None:
    path.unlink()
    path.mkdir()


def to_pipe(path: Path, beside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_link(path: Path, beside: Path) -> None:
    """The same content, but it lies in somebody else's folder."""
    path.replace(beside / "linked")
    path.symlink_to(os.path.relpath(beside / "linked", path.parent))


def damage(how: Callable[[Path, Path], None], size: int = 0) -> dict[str, Any]:
    """A fault at each file of the run directories that is larger than `size`; the file is put back after it."""

    def points(scene: Scene) -> list[str]:
        return [name for name in scene.files() if (scene.work / name).stat().st_size >= size]

    def kept(scene: Scene) -> Path:
        return scene.work.with_name("kept")

    def before(scene: Scene, point: str) -> None:
        shutil.copyfile(scene.work / point, kept(scene))
        how(scene.work / point, scene.beside)

    def after(scene: Scene, point: str) -> None:
        path = scene.work / point
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        shutil.copyfile(kept(scene), path)

    return {"points": points, "before": before, "after": after, "damages": True}


# --- settings that are no settings -----------------------------------------------------------------------------------

NASTY = (
    *("null", "''", "' '", "-1", "0", "1e300", ".inf", ".nan", "true", "[]", "{}", "[[1]]", "{a: 1}", "x", "../x"),
    *("2026-02-31", "1000000000000000000000000000000", "9" * 5000, "[" * 2000 + "]" * 2000, '"\\0"', '"\\e]0;x"'),
    *("x" * 5000, "'{seed:>1000000000}'", "&a [*a]", "{a: 1, a: 2}", "1000000"),
)


_LONG = {"train.rounds", "train.epochs", "model.features"}  # many of them are allowed, and take long


def nasty_points(scene: Scene) -> list[str]:
    keys = runfile.flat(configuration.plain(Config()))
    return [f"{key}: {value}" for key in keys if key not in _LONG for value in NASTY]


def set_nasty(scene: Scene, point: str) -> None:
    key, _, value = point.partition(": ")
    given = yaml.safe_load((scene.work / "mine.yaml").read_text(encoding="utf-8"))
    inner = given
    *parents, last = key.split(".")
    for parent in parents:
        inner[parent] = inner.get(parent) or {}
        inner = inner[parent]
    inner[last] = "PLACE"
    (scene.work / "mine.yaml").write_text(yaml.safe_dump(given).replace("PLACE", value), encoding="utf-8")


# --- all of them -----------------------------------------------------------------------------------------------------

_ALL: Sequence[Fault] = (
    Fault("killed", **at_step("writes", send(signal.SIGKILL)), ends=(signal.SIGKILL,)),
    Fault("Ctrl-C", **at_step("writes", send(signal.SIGINT))),
    Fault("terminated", **at_step("writes", send(signal.SIGTERM)), ends=(signal.SIGTERM,)),
    Fault("no space once", **at_step("writes", fail(errno.ENOSPC))),
    Fault("an I/O error once", **at_step("writes", fail(errno.EIO))),
    Fault("no permission once", **at_step("writes", fail(errno.EACCES))),
    Fault("read-only from then on", **at_step("writes", fail(errno.EROFS), lasting=True)),
    Fault("no space beside a user's file", **at_step("writes", fail_beside_a_users_file), after=take_away),
    Fault("killed in a write", **at_step("tears", send(signal.SIGKILL)), ends=(signal.SIGKILL,)),
    Fault("no space in a write", **at_step("tears", fail(errno.ENOSPC))),
    Fault("killed at a read", **at_step("reads", send(signal.SIGKILL)), ends=(signal.SIGKILL,)),
    Fault("Ctrl-C at a read", **at_step("reads", send(signal.SIGINT))),
    Fault("an I/O error at a read", **at_step("reads", fail(errno.EIO))),
    Fault("no permission at a read", **at_step("reads", fail(errno.EACCES))),
    Fault("a full disk", lambda s: [f"{4 * n} KiB" for n in range(32)], fill_disk, after=empty_disk),
    Fault("a limit on file sizes", lambda s: [f"{n} KiB" for n in (0, 1, 2, 3, 4, 8, 16, 32)], inside=limit_files),
    Fault("a limit on memory", memory_points, inside=limit_memory),
    Fault("a flipped bit", **damage(flip, size=1)),
    Fault("cut short", **damage(cut, size=1)),
    Fault("emptied", **damage(empty, size=1)),
    Fault("deleted", **damage(delete)),
    Fault("a folder in its place", **damage(to_folder)),
    Fault("a pipe in its place", **damage(to_pipe)),
    Fault("a link in its place", **damage(to_link)),
    Fault("a nasty setting", nasty_points, set_nasty, rewrites=True),
)
FAULTS = {fault.name: fault for fault in _ALL}
NEEDS_MOUNT = {"a full disk"}
NONE = Fault("none", lambda scene: ["nowhere"])
