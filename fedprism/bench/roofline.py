"""What bounds a training step: its floating-point operations, memory traffic and kernel launches, each as a share of
the device's rate, measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedprism.bench.engines import Ask
from fedprism.bench.machine import wait
from fedprism.bench.progress import Rows
from fedprism.bench.results import Results
from fedprism.bench.workloads import WORKLOADS, Workload, chosen, configure
from fedprism.engines.cuda.capture import launches
from fedprism.engines.numerics import numerics
from fedprism.models import architectures

TINY_KERNELS, TINY_STREAMS = 200, 16  # of the graphs that measure launches per second
REPEATS = 5


class TrafficCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operations and the bytes that they read and write; views do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations += 1
            read, written = tree_leaves((args, kwargs or {})), tree_leaves(result)
            self.bytes += sum(t.numel() * t.element_size() for t in [*read, *written] if isinstance(t, Tensor))
        return result


def make_step(workload: Workload, device: torch.device, batch: int) -> Callable[[], None]:
    """A plain training step on `batch` images: normalise, forward, backward, update. The batch is on the device."""
    config = configure(workload, "fedavg", device, {"engine": "inprocess"})
    arch = architectures(config.model, ("one",), workload.classes, workload.shape)["one"]
    layout = torch.channels_last if config.run.memory_format == "channels_last" else torch.contiguous_format
    model = arch.model(0).to(device, memory_format=layout).train()  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.optimizer.lr)
    images = torch.zeros(batch, *workload.shape, dtype=torch.uint8, device=device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        x = (images.float() / 127.5 - 1).contiguous(memory_format=layout)
        cross_entropy(model(x), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def count(step: Callable[[], None], device: torch.device) -> dict[str, Any]:
    """FLOPs, bytes and operations of a step, and its kernels on a GPU."""
    step()  # the first step allocates
    flops, traffic = FlopCounterMode(display=False), TrafficCounter()
    with flops:
        step()
    with traffic:
        step()
    kernels = count_kernels(step) if device.type == "cuda" else None
    return {
        "flops": flops.get_total_flops(),
        "bytes": traffic.bytes,
        "operations": traffic.operations,
        "kernels": kernels,
    }


def count_kernels(step: Callable[[], None]) -> int | None:
    """Kernels and copies that one step launches."""
    stream: Any = torch.cuda.Stream
    torch.cuda.synchronize()
    with torch.cuda.stream(stream()):
        step()
        return launches(step)


# --- rates of the device ---------------------------------------------------------------------------------------------


def roofs(device: torch.device, threads: int) -> dict[str, float]:
    """Measure bytes and FLOPs per second, on a CPU with `threads` threads; on a GPU also kernels per second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return {what: float(f"{value:.4g}") for what, value in _roofs(device).items()}
    finally:
        torch.set_num_threads(before)


def _roofs(device: torch.device) -> dict[str, float]:
    cuda = device.type == "cuda"
    length = 2**28 if cuda else 2**24
    source = torch.zeros(length, device=device)
    target = torch.empty_like(source)
    found = {"bytes": 2 * 4 * length / _best(lambda: target.copy_(source), device)}
    side = 8192 if cuda else 1024
    a = torch.ones(side, side, device=device)
    found["flops"] = 2 * side**3 / _best(lambda: a @ a, device)
    if cuda:
        found["kernels"] = _launch_rate(device)
    return found


def _best(work: Callable[[], object], device: torch.device, inner: int = 3) -> float:
    """Seconds per call in the fastest of several repeats of `inner` calls."""
    best = float("inf")
    for _ in range(REPEATS + 1):
        wait(device)
        begun = time.perf_counter()
        for _ in range(inner):
            work()
        wait(device)
        best = min(best, (time.perf_counter() - begun) / inner)
    return best


def _launch_rate(device: torch.device) -> float:
    """Tiny kernels per second, from captured graphs on separate streams."""
    streams = [torch.cuda.Stream(device) for _ in range(TINY_STREAMS)]  # type: ignore[no-untyped-call]
    graphs, kept = [], []
    for stream in streams:
        x = torch.zeros(32, device=device)
        kept.append(x)
        with torch.cuda.stream(stream):
            x.add_(1)
        wait(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(TINY_KERNELS):
                x.add_(1)
        graphs.append(graph)

    def replay() -> None:
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()

    return TINY_KERNELS * TINY_STREAMS / _best(replay, device, inner=20)


# --- the rows --------------------------------------------------------------------------------------------------------


def measure_roofline(ask: Ask, results: Results, rows: Rows) -> None:
    """One row per workload with a measured FedAvg or FedBN: counts of a step, and each engine's share of the roofs."""
    measured = {
        row["key"].replace(f"/{row['method']}", ""): row
        for row in sorted(results["engines"], key=lambda row: str(row["method"]), reverse=True)  # fedavg wins
        if row["method"] in ("fedavg", "fedbn") and row["workload"] in chosen(ask.workloads) and row["contenders"]
    }
    stale = {
        key: row
        for key, row in measured.items()
        if ask.force or not results.has("roofline", key, [f"{row['key']} {row['date']}"])
    }
    rows.expect(len(stale))
    if not stale:
        return
    limits: dict[int, dict[str, float]] = {}  # by threads: an engine is compared with the same number of threads
    for key, row in stale.items():
        rows.begin(f"roofline of {key}", 2)
        workload = WORKLOADS[row["workload"]]
        config = configure(workload, "fedavg", ask.device, {"engine": "inprocess"})
        with numerics(config.run, ask.device):
            rows.step("rates of the device")
            for threads in {each["threads"] for each in row["contenders"]} - limits.keys():
                limits[threads] = roofs(ask.device, threads)
            rows.step("counting a step")
            counts = count(make_step(workload, ask.device, round(row["mean_batch"])), ask.device)
        shares = {each["name"]: engine_shares(each, row, counts, limits[each["threads"]]) for each in row["contenders"]}
        best = max(row["contenders"], key=lambda each: float(each["train_per_second"]))["name"]
        found = {
            "done": [f"{row['key']} {row['date']}"],  # counted again for new measurements
            "workload": row["workload"],
            "method": row["method"],
            "samples": row["samples"],
            "mean_batch": row["mean_batch"],
            "step": counts,
            "engines": shares,
            "fastest": best,
            "bound": bound(shares[best]),
        }
        results.add("roofline", key, found, ask.command)
        rows.end()


def engine_shares(
    each: Mapping[str, Any], row: Mapping[str, Any], counts: Mapping[str, Any], limits: Mapping[str, float]
) -> dict[str, Any]:
    """An engine's share of each roof in training; 1 is the full rate of the device."""
    steps = row["steps"] / statistics.median(each["seconds"]["train"])
    reported = each["facts"].get("kernels_per_step")
    if isinstance(reported, Mapping):  # one number per pass; every pass goes over the same batches
        reported = sum(reported.values()) or None
    kernels = counts["kernels"] if reported is None else reported
    shares = {
        "flops": steps * counts["flops"] / limits["flops"],
        "bytes": steps * counts["bytes"] / limits["bytes"],
    }
    if kernels is not None and "kernels" in limits:
        shares["kernels"] = steps * kernels / limits["kernels"]
    rounded = {what: float(f"{share:.3g}") for what, share in shares.items()}
    return {
        "threads": each["threads"],
        "roofs": dict(limits),
        "steps_per_second": float(f"{steps:.4g}"),
        "kernels_per_step": kernels,
        "shares": rounded,
    }


def bound(found: Mapping[str, Any]) -> str:
    """What bounds a step, by its largest share."""
    shares = found["shares"]
    what = max(shares, key=lambda name: float(shares[name]))
    name, rate = {
        "flops": ("arithmetic", "a large matrix product"),
        "bytes": ("memory", "a large copy"),
        "kernels": ("kernel launches", "launches of tiny kernels"),
    }[what]
    reached = f"{100 * shares[what]:.0f} % of the rate of {rate}"
    if shares[what] >= 0.5:
        return f"bound by {name}: {reached}"
    return f"bound by none of these: the largest share is {reached}; the rest is waiting and small operations"
