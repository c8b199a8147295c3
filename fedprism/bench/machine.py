"""What a figure was measured on, and how much memory a measurement took."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedprism.engines.processes import cores
from fedprism.records.runfile import versions

_PROC = Path("/proc")


def machine(device: torch.device) -> dict[str, Any]:
    """The device, the machine around it, and versions."""
    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {**versions(), "cuda": torch.version.cuda if device.type == "cuda" else None},
    }


def moment() -> dict[str, Any]:
    """When, of which source, and how busy the machine was."""
    return {"date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "commit": commit(), "load": load()}


def commit() -> str | None:
    """The commit of the checkout that this runs from, with a + where its files were changed; None elsewhere."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def load() -> list[float] | None:
    """The load average of 1, 5 and 15 minutes, where the system says so."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (AttributeError, OSError):  # Windows
        return None


def cpu_name() -> str:
    info = _PROC / "cpuinfo"
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), flags=re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def slug(device: torch.device) -> str:
    """The device as a part of a file's name.

    >>> slug(torch.device("cpu"))
    'cpu'
    """
    return "cpu" if device.type == "cpu" else re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")


def wait(device: torch.device) -> None:
    """Until the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """The most memory that one contender takes, without the others beside it and what stays after it.

    On a GPU that is what PyTorch has reserved there until its first round is through, recordings included. On a CPU it
    is the memory of this process and of the workers that it started in a round, each page counted once where the system
    can tell.
    """

    def __init__(self, device: torch.device) -> None:
        """Just before the contender is made."""
        self.device, self.before, self.own = device, held(device), 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def made(self) -> None:
        """It is made and warm."""
        if self.device.type == "cuda":
            self.own = torch.cuda.max_memory_reserved(self.device) - self.before

    def most(self, one_round: Callable[[], object], close: Callable[[], object]) -> int:
        """Bytes, on a CPU of one more round that nobody times; `close` must let go of the contender."""
        if self.device.type == "cuda":
            close()
            return self.own
        held(self.device)
        for pid in family():
            _forget_peak(pid)
        one_round()
        peak = sum(proportional(pid) + peak_resident(pid) - resident(pid) for pid in family())
        close()
        # Not what it had grown by when it was made: the first one would be charged for what PyTorch loads on first use.
        return max(0, peak - held(self.device))


def held(device: torch.device) -> int:
    """Bytes in use now, after all that was freed is given back, or whoever takes it next would seem to take none."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
    return sum(map(proportional, family()))


def family() -> list[int]:
    """The process ids of this process and of those that it started."""
    return [os.getpid(), *children()]


def proportional(pid: int) -> int:
    """Bytes of a process, of a page that n processes share the nth part; where the system does not say, all of it."""
    return _kilobytes(pid, "smaps_rollup", "Pss") or resident(pid)


def resident(pid: int) -> int:
    """Bytes of a process that are in memory now, where the system has a /proc; elsewhere the most there were."""
    return _kilobytes(pid, "status", "VmRSS") or peak_resident(pid)


def _kilobytes(pid: int, file: str, name: str) -> int:
    """A line of a process's file, in bytes; 0 where it is gone or the system has no such file."""
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB$", (_PROC / str(pid) / file).read_text(), flags=re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def children() -> list[int]:
    """The process ids of this process's children, where the system has a /proc."""
    listed = _PROC / "self" / "task"
    found = []
    for task in listed.glob("*/children"):
        try:
            found += [int(pid) for pid in task.read_text().split()]
        except OSError:  # a thread that has just ended
            continue
    return found


def peak_resident(pid: int) -> int:
    """The most memory of a process in bytes; 0 where it is gone."""
    found = _kilobytes(pid, "status", "VmHWM")
    if found or pid != os.getpid() or sys.platform == "win32":
        return found
    import resource  # not there on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _forget_peak(pid: int) -> None:
    """From here on the peak of a process counts anew, where the system can do that."""
    with suppress(OSError):
        (_PROC / str(pid) / "clear_refs").write_text("5")
