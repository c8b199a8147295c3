"""Kernels per training step of each method on a GPU, captured and compiled: the table of docs/engines-inside.md.

    python benchmarks/kernels.py [METHOD ...] [--workload cnn4-n20-b10]

One client trains a round in one slot, and the kernels, copies and fills of its longest capture are counted. Nothing is
timed, so methods may be counted by several processes at once. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from fedprism.bench.machine import machine, moment
from fedprism.bench.race import Engined
from fedprism.bench.workloads import WORKLOADS, configure, make_clients
from fedprism.federation import Federation
from fedprism.methods import METHODS

BATCHES = 48  # of each client: enough for captures of eight steps


def facts(workload: str, method: str, compiled: bool, federation: Federation, device: torch.device) -> dict[str, Any]:
    """How the engine ran, after a round."""
    run = {"engine": "cuda-graphs", "slots": 1, "compile": compiled}
    contender = Engined(configure(WORKLOADS[workload], method, device, run), federation, device)
    try:
        contender.one_round(0)
        return contender.facts()
    finally:
        contender.close()


def cell(found: dict[str, Any]) -> str:
    """Kernels of each pass, and why something is not captured or compiled."""
    counts = [f"{name} {count:.1f}" for name, count in found["kernels_per_step"].items()]
    return "; ".join(counts + [f"{name}: {why}" for name, why in found["captured"].items() if why is not True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="all of them, if none is named")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="cnn4-n20-b10")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels.py needs an NVIDIA GPU, and PyTorch sees none here.")
    device = torch.device("cuda", torch.cuda.current_device())
    federation = make_clients(WORKLOADS[options.workload], BATCHES * WORKLOADS[options.workload].batch)
    here = machine(device)
    print(f"{options.workload}, {here['device']}, torch {torch.__version__}, {moment()['date']}\n")
    print("| method | captured | compiled | seconds of compiling |\n|---|---|---|---:|")
    for method in options.methods or list(METHODS):
        captured, compiled = (facts(options.workload, method, each, federation, device) for each in (False, True))
        print(f"| `{method}` | {cell(captured)} | {cell(compiled)} | {compiled['compile_seconds']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
