"""The workload on an engine of fedprism with its defaults: one thread per client, deterministic, checked uploads."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from workload import Clock, Workload, read

import fedprism as fp
from fedprism.config import Config, structure
from fedprism.engines.choose import make_engine
from fedprism.engines.numerics import choose_device, numerics
from fedprism.round.client import make_info
from fedprism.round.loop import make_loop


def names(clients: int) -> tuple[str, ...]:
    return tuple(f"c{i:02d}" for i in range(clients))


def configuration(batch: int, lr: float, rounds: int, **run: object) -> Config:
    raw = {
        "model": "cnn4",
        "train": {"batch_size": batch, "rounds": rounds, "optimizer": {"lr": lr, "momentum": 0.0}},
        "evaluate": {"moments": []},
        "run": {"device": "cpu", **run},
    }
    return structure(raw, Config)


def federation(work: Workload) -> fp.Federation:
    """The training images, and of each client one to test on, which nobody does here."""
    clients = {}
    for name, x, y in zip(names(work.clients), work.images, work.labels, strict=True):
        clients[name] = {"train": (x, y), "validation": (x[:1], y[:1]), "test": (x[:1], y[:1])}
    classes = len(work.weights["head.fc2.bias"])
    return fp.Federation.from_arrays(clients, class_names=tuple(map(str, range(classes))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    work = read(options.workload)
    config = configuration(work.batch, work.lr, work.rounds, engine=options.engine, workers=options.workers)
    data, device, clock = federation(work), choose_device("cpu"), Clock(options.folder, work.rounds)
    info = make_info(config, data.names, data.classes, data.shape)
    with numerics(config.run, device):
        engine = make_engine(fp.FedAvg(), config, info, data, device)
        try:
            loop = make_loop(fp.FedAvg(), config, info, data, engine)
            loop.server = {name: work.weights[name].clone() for name in loop.server}
            clock.start()
            for round in range(work.rounds):
                loop.one_round(round)
                clock.lap(loop.server)
        finally:
            engine.close()
        clock.write(workers=options.workers, threads=torch.get_num_threads(), training=None, packages=("fedprism",))


if __name__ == "__main__":
    main()
