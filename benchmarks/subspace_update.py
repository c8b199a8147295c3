"""FedSCE's subspace update on the last p layers of a ResNet-50, beside the plain SVD of the same matrix.

    python benchmarks/subspace_update.py [--p 5] [--rank 3] [--classes 10] [--times 5]

The two alternate, so that whatever else the machine does meets both; seconds are medians, on one thread. Memory is how
far each raises the peak of a process of its own, in multiples of the basis (on Linux). Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from fedprism import keys
from fedprism.methods import leaves
from fedprism.methods.subspaces import Subspace, overlap
from fedprism.models import Arch


def thin(space: Subspace, d: Tensor) -> Tensor:
    space.turn(d)
    return space["basis"]


def plain(space: Subspace, d: Tensor) -> Tensor:
    """What Eq. 8 says, word by word."""
    tall = torch.cat([space["basis"], d.unsqueeze(1)], 1).double()
    return torch.linalg.svd(tall, full_matrices=False)[0][:, :-1].float()


WAYS = {"thin": thin, "plain": plain}


def numbers(p: int, classes: int) -> int:
    """How many weights the last p layers of a ResNet-50 hold."""
    model = Arch("resnet50", classes, (3, 32, 32)).model(0)
    held = set(leaves.last(model, p))
    return sum(weight.numel() for name, weight in model.named_parameters() if name in held)


def update_of(size: int) -> Tensor:
    """An update of length 2, so that it does enter the subspace."""
    d = torch.randn(size, generator=keys.generator("benchmark"))
    return 2 * d / d.norm()


def seconds(way: str, size: int, rank: int) -> float:
    space, d = Subspace(size, rank, "raw", "benchmark"), update_of(size)
    begun = time.perf_counter()
    WAYS[way](space, d)
    return time.perf_counter() - begun


def _peak(sent: Connection, way: str, size: int, rank: int) -> None:
    torch.set_num_threads(1)
    small = Subspace(2 * rank, rank, "raw", "benchmark")
    WAYS[way](small, update_of(2 * rank))  # what torch loads on first use is no part of the update
    space, d = Subspace(size, rank, "raw", "benchmark"), update_of(size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew here
    before = _held("VmRSS")
    WAYS[way](space, d)
    sent.send((_held("VmHWM") - before) / (size * rank * 4))


def _held(name: str) -> int:
    """Bytes of this process, as Linux tells them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def memory(way: str, size: int, rank: int) -> float:
    """By how many times its basis an update raises the peak of a fresh process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_peak, args=(there, way, size, rank))
    child.start()
    there.close()
    grown: float = here.recv()
    child.join()
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("p", 5), ("rank", 3), ("classes", 10), ("times", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = numbers(args.p, args.classes)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.times):
        for way in WAYS:
            taken[way].append(seconds(way, size, args.rank))
    space, d = Subspace(size, args.rank, "raw", "benchmark"), update_of(size)
    expected = plain(space, d)
    median = {way: statistics.median(times) for way, times in taken.items()}
    result = {
        "weights": size,
        "p": args.p,
        "rank": args.rank,
        "seconds": median,
        "plain / thin": median["plain"] / median["thin"],
        "dimensions in common": float(overlap(expected.double(), thin(space, d).double())),
        "memory in bases": {way: memory(way, size, args.rank) for way in WAYS},
        "basis_bytes": size * args.rank * 4,
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
