"""Where a round of the engine `cuda-graphs` spends its time: a page for a row of `fedprism bench`.

    python benchmarks/profile_step.py WORKLOAD METHOD [--compile] [--rounds 5] [--out FILE.md]

Four views: the parts of a whole round; the captures alone, replayed by more and more slots without any work between
them, which is the most that training can reach; what the host does in a round; and the kernels of a step, one slot
alone. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fedprism.bench.machine import machine, moment
from fedprism.bench.race import Engined
from fedprism.bench.workloads import WORKLOADS, configure, make_clients
from fedprism.engines.cuda.engine import CudaGraphs, Slot

Replay = tuple[Slot, int, Callable[[], None]]  # a slot, the steps of its longest capture, and what replays it

SLOTS = (1, 2, 4, 8, 12, 16, 20, 24)
TURNS, KERNELS, CALLS = 12, 40, 20  # replays of each capture, and rows of the tables of kernels and of the host


def rounds(contender: Engined, images: int, count: int) -> list[str]:
    """Medians of whole rounds, the first two of which do not count."""
    for turn in range(contender.cold):
        contender.one_round(turn)
    taken = [contender.one_round(contender.cold + turn) for turn in range(count)]
    found = {part: statistics.median(getattr(t, part) for t in taken) for part in ("train", "aggregate", "evaluate")}
    whole = statistics.median(each.whole for each in taken)
    lines = [f"{part} {1000 * seconds:.1f} ms" for part, seconds in found.items()]
    return [
        f"{', '.join(lines)}, whole round {1000 * whole:.1f} ms: {images / found['train']:,.0f} images/s training, "
        f"{images / whole:,.0f} whole."
    ]


def alone(replays: list[Replay], batch: int) -> list[str]:
    """Captures in turn, by more and more slots."""
    lines = ["| slots | images/s | launching, of the time |", "|---:|---:|---:|"]
    for count in sorted({len(replays), *(n for n in SLOTS if n <= len(replays))}):
        for _ in range(2):  # the first to warm up
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(TURNS):
                for slot, _, replay in replays[:count]:
                    with torch.cuda.stream(slot.stream):
                        replay()
            launched = time.perf_counter() - begun
            torch.cuda.synchronize()
            taken = time.perf_counter() - begun
        images = TURNS * batch * sum(steps for _, steps, _ in replays[:count])
        lines.append(f"| {count} | {images / taken:,.0f} | {launched / taken:.0%} |")
    return lines


def host(contender: Engined, turn: int) -> list[str]:
    """The functions that take most of the host's time in a round; profiling makes all of them slower."""
    seen = cProfile.Profile()
    seen.enable()
    contender.one_round(turn)
    seen.disable()
    rows = sorted(pstats.Stats(seen).stats.items(), key=lambda row: -row[1][2])[:CALLS]  # type: ignore[attr-defined]
    lines = ["| function | calls | ms |", "|---|---:|---:|"]
    for (file, _, name), (_, calls, own, _, _) in rows:
        lines.append(f"| `{Path(file).stem}: {name.replace('|', '/')}` | {calls} | {1000 * own:.2f} |")
    return lines


def kernels(slot: Slot, steps: int, replay: Callable[[], None]) -> list[str]:
    """The kernels of a step, longest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        with torch.cuda.stream(slot.stream):
            replay()
        torch.cuda.synchronize()
    rows = [(row.self_device_time_total, row.count, row.key) for row in seen.key_averages()]
    rows = sorted((row for row in rows if not row[2].startswith(("cuda", "Activity"))), reverse=True)
    total, count = (sum(row[i] for row in rows) / steps for i in (0, 1))
    lines = [f"{count:.1f} kernels per step, {total:.0f} us of them one after the other.", ""]
    lines += ["| us per step | kernels | name |", "|---:|---:|---|"]
    for time_, number, name in rows[:KERNELS]:
        lines.append(f"| {time_ / steps:.2f} | {number / steps:.2f} | `{name[:110].replace('|', '/')}` |")
    return lines


def page(workload: str, method: str, compiled: bool, count: int) -> str:
    device = torch.device("cuda", torch.cuda.current_device())
    federation = make_clients(WORKLOADS[workload], None)
    images = sum(len(data.train) for data in federation.clients.values())
    run = {"engine": "cuda-graphs", "compile": compiled}
    contender = Engined(configure(WORKLOADS[workload], method, device, run), federation, device)
    engine = contender.engine
    assert isinstance(engine, CudaGraphs)
    try:
        parts = rounds(contender, images, count)
        replays = engine.longest()
        slots = f"{len(engine.slots)} slots, captures of {replays[0][1]} steps."
        speeds = alone(replays, WORKLOADS[workload].batch)
        calls = host(contender, contender.cold + count)
        step = kernels(*replays[0])
    finally:
        contender.close()
    here, when = machine(device), moment()
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    command = " ".join(["python benchmarks/profile_step.py", workload, method, *(["--compile"] if compiled else [])])
    where = f"{here['device']}; {versions}; {when['date']}; `{command}`"
    title = f"# {workload}, {method}, {'compiled' if compiled else 'captured'}"
    views = {
        "Rounds": [*parts, "", slots],
        "Captures alone": speeds,
        "The host in a round": calls,
        "Kernels of a step": step,
    }
    text = [title, "", where, ""]
    for name, lines in views.items():
        text += [f"## {name}", "", *lines, ""]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("method")
    parser.add_argument("--compile", action="store_true", help="with run.compile")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured (5)")
    parser.add_argument("--out", type=Path, help="a Markdown file; left out: it is printed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("profile_step.py needs an NVIDIA GPU, and PyTorch sees none here.")
    text = page(options.workload, options.method, options.compile, options.rounds)
    print(text) if options.out is None else options.out.write_text(text)


if __name__ == "__main__":
    main()
