"""The workloads of the benchmark, with the federation and configuration of each.

Sizes are those of the papers. Images are keyed random bytes: speed does not depend on their content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedprism import keys
from fedprism.config import Config, structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods import find
from fedprism.planning import resolve
from fedprism.registry import Registry

ROUNDS = 1_000_000  # of the configuration: a measured run never reaches its last round
OPTIMIZER = {"name": "sgd", "lr": 0.005, "momentum": 0.0}  # FedCP's


@dataclass(frozen=True)
class Workload:
    """A model, the numbers of training and test images per client, and the methods to measure."""

    model: Mapping[str, Any]
    shape: tuple[int, int, int]
    classes: int
    batch: int
    train: tuple[int, ...]  # images per client
    test: tuple[int, ...]
    methods: tuple[str, ...]
    cpu: int  # maximum number of training images per client on a CPU, which is much slower
    quick: int  # the same with --quick; 20 times as many on a GPU
    run: Mapping[str, Any] = field(default_factory=dict)  # `run` settings of the configuration
    first: tuple[str, ...] = ()  # methods of --quick; empty: all

    def sizes(self, limit: int | None) -> list[tuple[int, int]]:
        """Training and test images per client, both reduced so that at most `limit` are for training."""
        pairs = []
        for train, test in zip(self.train, self.test, strict=True):
            kept = train if limit is None else min(train, limit)
            pairs.append((kept, max(1, round(test * kept / train))))
        return pairs


WORKLOADS: Registry[Workload] = Registry("workload")
EIGHT = ("fedavg", "fedbn", "fedcp", "fedpick", "fedios", "fed-co2", "ditto", "scaffold")


def _cnn4(clients: int, batch: int, methods: tuple[str, ...], first: tuple[str, ...] = ()) -> Workload:
    """CIFAR-100 as in FedCP: 60,000 images, of which each client keeps a quarter for the test."""
    each = 60_000 // clients
    train, test = (each * 3 // 4,) * clients, (each // 4,) * clients
    cpu = 3 * batch if clients > 20 else 100
    return Workload({"name": "cnn4"}, (3, 32, 32), 100, batch, train, test, methods, cpu, cpu // 5, first=first)


WORKLOADS.register("cnn4-n20-b10")(_cnn4(20, 10, EIGHT, ("fedavg", "fedcp")))
WORKLOADS.register("cnn4-n20-b64")(_cnn4(20, 64, ("fedavg",)))
WORKLOADS.register("cnn4-n100-b10")(_cnn4(100, 10, ("fedavg",)))
WORKLOADS.register("digit6-n5-b32")(  # FedBN's digits
    Workload({"name": "digit6"}, (3, 28, 28), 10, 32, (743,) * 5, (186,) * 5, ("fedbn",), cpu=96, quick=32)
)
WORKLOADS.register("alexnet-bn-n4-b32")(  # Office-Caltech-10: Amazon, Caltech, DSLR, WebCam
    Workload(
        {"name": "alexnet-bn"},
        (3, 256, 256),
        10,
        32,
        (766, 898, 125, 236),
        (192, 225, 32, 59),
        ("fedbn",),
        cpu=32,
        quick=8,
        run={"memory_format": "channels_last"},
    )
)
WORKLOADS.register("resnet18-n20-b10")(  # torchvision's stem: 7x7 and pooling
    Workload(
        {"name": "resnet18"},
        (3, 32, 32),
        100,
        10,
        (2_250,) * 20,
        (750,) * 20,
        ("fedbn",),
        cpu=20,
        quick=10,
        run={"memory_format": "channels_last"},
    )
)
FIRST = "cnn4-n20-b10"


def max_images(workload: Workload, device: torch.device, quick: bool, samples: int | None) -> int | None:
    """The maximum number of training images per client; None: the paper's number."""
    if samples is not None:
        return samples
    if device.type == "cuda":
        return 20 * workload.quick if quick else None
    return workload.quick if quick else workload.cpu


def make_clients(workload: Workload, limit: int | None) -> Federation:
    """Make the workload's clients with random images and labels."""
    clients = {}
    for index, (train, test) in enumerate(workload.sizes(limit)):
        draw = keys.generator("bench", index)
        x = torch.randint(0, 256, (train + test, *workload.shape), dtype=torch.uint8, generator=draw)
        y = torch.randint(0, workload.classes, (train + test,), generator=draw)
        nothing = (x[:0], y[:0])
        clients[f"c{index:03d}"] = {
            "train": (x[:train], y[:train]),
            "validation": nothing,
            "test": (x[train:], y[train:]),
        }
    names = tuple(map(str, range(workload.classes)))
    return Federation.from_arrays(clients, name="bench", class_names=names)


def configure(workload: Workload, method: str, device: torch.device, run: Mapping[str, Any]) -> Config:
    """The configuration of one engine: evaluation in every round on the test split, at the method's own moment."""
    raw = {
        "model": dict(workload.model),
        "method": method,
        "train": {"rounds": ROUNDS, "batch_size": workload.batch, "optimizer": OPTIMIZER},
        "evaluate": {"moments": [find(method).moment], "splits": ["test"]},
        "run": {"device": str(device), **workload.run, **run},
    }
    return resolve(structure(raw, Config))


def chosen(names: Sequence[str]) -> dict[str, Workload]:
    """Workloads by name; all if none is named."""
    return {name: WORKLOADS[name] for name in names} if names else dict(WORKLOADS.items())


def chosen_methods(workload: Workload, quick: bool, asked: Sequence[str] | None) -> tuple[str, ...]:
    """The requested methods, or those of the workload."""
    for name in asked or ():
        if "/" in name or ":" in name or name.endswith(".py"):
            raise ConfigError(f"--methods has {name!r}; `bench` measures registered methods: {', '.join(EIGHT)}, ...")
        find(name)
    return tuple(asked) if asked else (workload.first or workload.methods) if quick else workload.methods
