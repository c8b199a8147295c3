"""Client-samples a second of a FedAvg round (`cnn4`, 20 clients, batch 10), beside a plain serial loop in the same run.

    python benchmarks/round_speed.py [--rounds 5] [--samples 100] [--device cpu]

The two alternate, round by round, so that whatever else the machine does meets both; the figures are medians. Both
train on the same batches, average by samples and evaluate nothing, so they do the same work. The serial loop is what
one would write by hand. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

import fedprism as fp
from fedprism import keys
from fedprism.config import Config, structure
from fedprism.data.images import normalise
from fedprism.engines.client import make_info
from fedprism.engines.inprocess import InProcess
from fedprism.engines.loop import Loop, make_loop
from fedprism.engines.numerics import choose_device, choose_precision, numerics
from fedprism.engines.passes import batches

CLIENTS, BATCH, CLASSES = 20, 10, 10


def make_federation(samples: int) -> fp.Federation:
    """Random images of CIFAR's size: speed does not depend on what they show."""
    clients = {}
    for i in range(CLIENTS):
        draw = keys.generator("benchmark", i)
        x = torch.randint(0, 256, (samples + 4, 3, 32, 32), dtype=torch.uint8, generator=draw)
        y = torch.randint(0, CLASSES, (samples + 4,), generator=draw)
        parts = {"train": (x[4:], y[4:]), "validation": (x[:2], y[:2]), "test": (x[2:4], y[2:4])}
        clients[f"c{i:02d}"] = parts
    return fp.Federation.from_arrays(clients, class_names=tuple(map(str, range(CLASSES))))


def make_engine_loop(federation: fp.Federation, config: Config, device: torch.device) -> Loop:
    info = make_info(config, federation.names, federation.classes, federation.shape)
    engine = InProcess(fp.FedAvg(), config, info, federation, device)
    return make_loop(fp.FedAvg(), config, info, federation, engine, device)


class Serial:
    """FedAvg as a plain loop: copy the global model, train it, add it to the mean."""

    def __init__(self, loop: Loop, device: torch.device) -> None:
        self.config, self.info = loop.config, loop.info
        self.data = {name: data.to(device) for name, data in loop.federation.clients.items()}
        self.model = loop.info.arch.model(loop.info.seed).to(device)

    def one_round(self, round: int) -> None:
        settings = self.config.train.optimizer
        total, mean = sum(len(d.train) for d in self.data.values()), {}
        for name, data in self.data.items():
            model = copy.deepcopy(self.model).train()
            optimiser = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
            order = keys.generator(self.info.seed, "batches", "", round, name, 0)
            for rows in batches(len(data.train), BATCH, "keep", 2, order):
                optimiser.zero_grad(set_to_none=True)
                x = normalise(data.train.x[rows], self.config.data.normalize)
                cross_entropy(model(x), data.train.y[rows]).backward()
                optimiser.step()
            for leaf, tensor in model.state_dict().items():
                mean[leaf] = mean.get(leaf, 0) + len(data.train) / total * tensor
        self.model.load_state_dict(mean)


def timed(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up")
    parser.add_argument("--samples", type=int, default=100, help="training images a client")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = choose_device(options.device)
    raw = {
        "model": "cnn4",
        "train": {"batch": BATCH, "rounds": options.rounds + 1, "optimizer": {"lr": 0.005, "momentum": 0.0}},
    }
    config = structure({**raw, "evaluate": {"moments": []}, "run": {"device": options.device}}, Config)
    seconds: dict[str, list[float]] = {"fedprism": [], "serial": []}
    with numerics(config.run, device):
        loop = make_engine_loop(make_federation(options.samples), config, device)
        serial = Serial(loop, device)
        for turn in range(options.rounds + 1):
            taken = {
                "fedprism": timed(lambda turn=turn: loop.one_round(turn), device),
                "serial": timed(lambda turn=turn: serial.one_round(turn), device),
            }
            if turn:
                for name, value in taken.items():
                    seconds[name].append(value)
        gap = max(float((loop.server[n] - t).abs().max()) for n, t in serial.model.state_dict().items())
    images = CLIENTS * options.samples
    speed = {name: images / statistics.median(values) for name, values in seconds.items()}
    report = {
        "workload": {
            "model": "cnn4",
            "clients": CLIENTS,
            "batch": BATCH,
            "samples": options.samples,
            "method": "fedavg",
        },
        "samples_per_second": {name: round(value, 1) for name, value in speed.items()},
        "ratio": round(speed["fedprism"] / speed["serial"], 3),
        "rounds": options.rounds,
        "largest_difference_of_weights": gap,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "precision": choose_precision(config.run.precision, device),
        "threads": config.run.threads,
        "versions": {"fedprism": fp.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
