"""What a figure was measured on, and how much memory a measurement took."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc")


def machine(device: torch.device) -> dict[str, Any]:
    """The device, the machine around it, and versions."""
    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": cores(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            "fedprism": metadata.version("fedprism"),
            "torch": torch.__version__,
            "cuda": torch.version.cuda if device.type == "cuda" else None,
            "python": platform.python_version(),
        },
    }


def moment() -> dict[str, Any]:
    """When, and how busy the machine was."""
    return {"date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "load": load()}


def load() -> list[float] | None:
    """The load average of 1, 5 and 15 minutes, where the system says so."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (AttributeError, OSError):  # Windows
        return None


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """The most memory that one contender took: what it holds between rounds, and what a round takes on top.

    So the others beside it do not count. On a GPU that is what PyTorch has allocated there; on a CPU the resident size
    of this process, and all of the worker processes that the contender started.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak, self.held = device, 0, 0
        self._workers: set[int] = set()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Around making and warming up."""
        others = set(children())
        gc.collect()
        _give_back()
        before = self._now()
        with self.round():
            yield
            self._workers = set(children()) - others
        gc.collect()
        _give_back()
        self.held = max(0, self._now() - before)

    @contextmanager
    def round(self) -> Iterator[None]:
        """Around a round."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _forget_peak()
        before = self._now()
        yield
        if self.device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self.device)
        else:
            most = peak_resident(os.getpid())
        workers = sum(map(peak_resident, self._workers))
        self.peak = max(self.peak, self.held + most - before + workers)

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else resident()


def resident() -> int:
    """Bytes of this process that are in memory now, where the system has a /proc; elsewhere the most there were."""
    try:
        return int((_PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_resident(os.getpid())


def _give_back() -> None:
    """What was freed goes back to the system, or the next to ask for memory would seem to take none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


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
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", (_PROC / str(pid) / "status").read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    if pid != os.getpid() or sys.platform == "win32":
        return 0
    import resource  # not there on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _forget_peak() -> None:
    """From here on the peak counts anew, where the system can do that."""
    try:
        (_PROC / "self" / "clear_refs").write_text("5")
    except OSError:
        return
