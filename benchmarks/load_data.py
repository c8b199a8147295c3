"""How long a federation of a published dataset takes to make, and how much memory, beside the plain way of doing it.

    FEDPRISM_DATA=... python benchmarks/load_data.py --data cifar100 --clients 100

Each way runs in a process of its own, after the first conversion: fedprism's (clients hold rows of a memory-mapped
file), and the plain one (every client gets a copy of its images), with the same partition. Then all images are read
once, as training does. Memory is the peak of the process beyond what it has after its imports and a small federation.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def measure(way: str, data: str, clients: int) -> None:
    import torch

    import fedprism as fp

    partition = {"name": "dirichlet", "alpha": 0.1, "form": "capped", "least": "fedcp"}
    torch.set_num_threads(1)
    for images in fp.make_federation("digits-skew", clients=1).clients["plain"].train.parts(256):
        images.sum()
    before, begun = peak(), time.perf_counter()
    made = fp.make_federation(data, clients=clients, partition=partition, split={"validation": 0.0, "test": 0.25})
    parts = [client.split(part) for client in made.clients.values() for part in ("train", "test")]
    if way == "copies":
        parts = [type(part)(part.x, part.y) for part in parts]
    seconds = time.perf_counter() - begun
    size = sum(part.batch(torch.tensor([0])).nbytes * len(part) for part in parts)
    for part in parts:
        for images in part.parts(256):
            images.sum()
    print(json.dumps({"seconds": seconds, "memory": (peak() - before) / size, "megabytes": size / 1e6}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--way", choices=("rows", "copies"))
    given = parser.parse_args()
    if given.way:
        measure(given.way, given.data, given.clients)
        return
    for way in ("rows", "rows", "copies"):  # the first makes the cache, where there is none yet
        command = [sys.executable, __file__, "--data", given.data, "--clients", str(given.clients), "--way", way]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        size = f"{found['memory']:.2f} times the {found['megabytes']:.0f} MB of images"
        print(f"{way:7} {found['seconds']:6.2f} s, memory {size}")


if __name__ == "__main__":
    main()
