"""The speed of two source trees side by side: one engine and workload, each tree in processes of its own, in turn.

    python benchmarks/two_trees.py BEFORE AFTER [--methods fedavg,fedcp] [--device cuda --engine cuda-graphs --compile]

BEFORE and AFTER are folders that hold a `fedprism` package. Prints images per second of training and of whole rounds
per process, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path


def measure(given: argparse.Namespace) -> None:
    """One process: measure the tree on the path and print a line of JSON."""
    import torch

    from fedprism.bench.race import Engined
    from fedprism.bench.workloads import WORKLOADS, configure, make_clients

    device, workload = torch.device(given.device), WORKLOADS[given.workload]
    federation = make_clients(workload, given.samples)
    run = {"engine": given.engine, **({"compile": True} if given.compile else {})}
    contender = Engined(configure(workload, given.methods, device, run), federation, device)
    rounds = [contender.one_round(round) for round in range(given.rounds + contender.cold + 1)][contender.cold + 1 :]
    contender.close()
    images = sum(len(data.train) for data in federation.clients.values())
    speeds = {part: images / statistics.median(getattr(r, part) for r in rounds) for part in ("train", "whole")}
    print(json.dumps(speeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE")
    parser.add_argument("--methods", default="fedavg,fedcp")
    parser.add_argument("--workload", default="cnn4-n20-b10")
    parser.add_argument("--engine", default="inprocess")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--samples", type=int, help="training images per client, at most; left out: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    if not given.trees:
        measure(given)
        return
    for method in given.methods.split(","):
        found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in given.trees}
        for _ in range(given.repeats):
            for tree in given.trees:
                command = [sys.executable, __file__, "--methods", method, "--workload", given.workload]
                command += ["--engine", given.engine, "--device", given.device, "--rounds", str(given.rounds)]
                command += ["--compile"] * given.compile
                command += [] if given.samples is None else ["--samples", str(given.samples)]
                path = os.pathsep.join([str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
                environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found[tree].append(json.loads(done.stdout.splitlines()[-1]))
                print(method, tree, {part: round(speed, 1) for part, speed in found[tree][-1].items()}, flush=True)
        before, after = (found[tree] for tree in given.trees)
        for part in ("train", "whole"):
            one, other = (statistics.median(speeds[part] for speeds in tree) for tree in (before, after))
            print(f"{method}, {part}: {other / one:.3f} of the speed before", flush=True)


if __name__ == "__main__":
    main()
