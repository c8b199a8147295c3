"""How much of two cores the engine `processes` uses: client-samples per second of training alone (`cnn4`, 20 clients,
batch 10, FedAvg), beside what two independent one-thread processes reach together in the same minute.

    python benchmarks/two_processes.py [--pairs 7] [--samples 100] [--memory-format contiguous]

Three things take turns, each training all clients for one round: the engine with two workers, two independent
processes at the same time (each with the engine `inprocess` and all clients to itself: their speeds are added), and the
engine with one worker. So whatever else the machine does meets all of them; figures are medians over the turns, and the
ratio is the median of the turns' ratios. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch

import fedprism as fp
from fedprism.config import Config, structure
from fedprism.engines.choose import make_engine
from fedprism.engines.numerics import numerics
from fedprism.round.client import make_info
from fedprism.round.loop import Loop, make_loop

CLIENTS, BATCH, CLASSES = 20, 10, 100
CPU = torch.device("cpu")


def loop_with(engine: str, workers: int, options: argparse.Namespace) -> Loop:
    """A round loop at its first state."""
    named = f"synthetic?clients={CLIENTS},samples={2 * options.samples},classes={CLASSES}"
    federation = fp.make_federation(named, seed=0, image_size=32, samples=options.samples)
    raw = {
        "model": "cnn4",
        "train": {"batch_size": BATCH, "optimizer": {"lr": 0.005, "momentum": 0.0}},
        "evaluate": {"moments": []},
        "run": {"engine": engine, "device": "cpu", "workers": workers, "memory_format": options.memory_format},
    }
    config = replace(structure(raw, Config), data=federation.data)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    made = make_engine(fp.FedAvg(), config, info, federation, CPU)
    return make_loop(fp.FedAvg(), config, info, federation, made)


def seconds_of(loop: Loop, round: int) -> float:
    """One round's training of all clients."""
    requests = loop.requests(loop.info.clients, loop.context(round))
    start = time.perf_counter()
    with numerics(loop.config.run, CPU):
        list(loop.engine.train(round, requests))
    return time.perf_counter() - start


def alone(options: argparse.Namespace) -> None:
    """One of the independent processes: a round whenever a line comes, its seconds as the answer."""
    loop = loop_with("inprocess", 1, options)
    for round, _ in enumerate(sys.stdin):
        print(seconds_of(loop, round), flush=True)


def start_alone(options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--alone", "--samples", str(options.samples)]
    command += ["--memory-format", options.memory_format]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def together(processes: list[subprocess.Popen[str]]) -> list[float]:
    """Seconds of each, begun at the same moment."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [float(process.stdout.readline()) for process in processes if process.stdout is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine `processes` beside two independent processes.")
    parser.add_argument("--pairs", type=int, default=7, help="measured turns, after one to warm up")
    parser.add_argument("--samples", type=int, default=100, help="training images per client")
    parser.add_argument("--memory-format", default="contiguous", choices=("contiguous", "channels_last"))
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        alone(options)
        return
    load = os.getloadavg()
    independent = [start_alone(options) for _ in range(2)]
    two, one = loop_with("processes", 2, options), loop_with("processes", 1, options)
    images = CLIENTS * options.samples
    speeds: dict[str, list[float]] = {"two workers": [], "two independent processes": [], "one worker": []}
    for turn in range(options.pairs + 1):
        taken = {
            "two workers": images / seconds_of(two, turn),
            "two independent processes": sum(images / seconds for seconds in together(independent)),
            "one worker": images / seconds_of(one, turn),
        }
        if turn:
            for name, value in taken.items():
                speeds[name].append(value)
    two.engine.close()
    one.engine.close()
    for process in independent:
        process.communicate()
    pairs = list(zip(*speeds.values(), strict=True))
    report = {
        "workload": {
            "model": "cnn4",
            "clients": CLIENTS,
            "batch": BATCH,
            "samples": options.samples,
            "method": "fedavg",
        },
        "samples_per_second": {name: round(statistics.median(values), 1) for name, values in speeds.items()},
        "two workers / two independent processes": round(statistics.median(a / b for a, b, _ in pairs), 3),
        "two workers / one worker": round(statistics.median(a / c for a, _, c in pairs), 3),
        "pairs": [[round(value, 1) for value in pair] for pair in pairs],
        "memory_format": options.memory_format,
        "threads": two.config.run.threads,
        "load_before_and_after": [round(load[0], 2), round(os.getloadavg()[0], 2)],
        "cores": os.cpu_count(),
        "device": platform.processor() or platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"fedprism": fp.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
