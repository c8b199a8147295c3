"""The machine of a measurement, and the memory that a contender uses."""

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

from fedprism.engines.processes.engine import cores
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
    """Date, commit and load average."""
    return {"date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "commit": commit(), "load": load()}


def commit() -> str | None:
    """The commit of the checkout, with a + if its files were changed; None if this is not a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", str(root), "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def load() -> list[float] | None:
    """The load average of 1, 5 and 15 minutes; None if unknown."""
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
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- memory ----------------------------------------------------------------------------------------------------------


class Memory:
    """The peak memory of one contender, without that of the others and without what stays after it.

    On a GPU it is the memory that PyTorch reserves up to the end of the first round, captured graphs included. On a CPU
    it is the memory of this process and its workers in one round; shared pages count once, if the system reports them.
    """

    def __init__(self, device: torch.device) -> None:
        """Call it just before the contender is made."""
        self.device, self.before, self.own = device, memory_in_use(device), 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def made(self) -> None:
        """Call it when the contender is made and warm."""
        if self.device.type == "cuda":
            self.own = torch.cuda.max_memory_reserved(self.device) - self.before

    def peak(self, one_round: Callable[[], object], close: Callable[[], object]) -> int:
        """Peak memory in bytes; on a CPU of one more, untimed round. `close` must release the contender."""
        if self.device.type == "cuda":
            close()
            return self.own
        memory_in_use(self.device)
        for pid in family():
            _reset_peak(pid)
        one_round()
        peak = sum(proportional(pid) + peak_resident(pid) - resident(pid) for pid in family())
        close()
        # Subtract what stays, not what was there before: PyTorch's lazy loading would count for the first contender.
        return max(0, peak - memory_in_use(self.device))


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now. Freed memory is returned first: a contender that reused it would seem to need none."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
    return sum(map(proportional, family()))


def family() -> list[int]:
    """The process ids of this process and its children."""
    return [os.getpid(), *children()]


def proportional(pid: int) -> int:
    """Proportional set size of a process in bytes; its resident size if the system does not report it."""
    return _kilobytes(pid, "smaps_rollup", "Pss") or resident(pid)


def resident(pid: int) -> int:
    """Resident set size of a process in bytes; its peak on systems without /proc."""
    return _kilobytes(pid, "status", "VmRSS") or peak_resident(pid)


def _kilobytes(pid: int, file: str, name: str) -> int:
    """A line of a process's file, in bytes; 0 if the process or the file does not exist."""
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB$", (_PROC / str(pid) / file).read_text(), flags=re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def children() -> list[int]:
    """The process ids of this process's children; empty on systems without /proc."""
    listed = _PROC / "self" / "task"
    found = []
    for task in listed.glob("*/children"):
        try:
            found += [int(pid) for pid in task.read_text().split()]
        except OSError:  # a thread that has just ended
            continue
    return found


def peak_resident(pid: int) -> int:
    """Peak resident set size of a process in bytes; 0 if it has ended."""
    found = _kilobytes(pid, "status", "VmHWM")
    if found or pid != os.getpid() or sys.platform == "win32":
        return found
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak(pid: int) -> None:
    """Reset the peak of a process, if the system supports it."""
    with suppress(OSError):
        (_PROC / str(pid) / "clear_refs").write_text("5")
