"""The work that every contender does, read from one file: first weights, images, labels and the order of batches.

Needs PyTorch and NumPy alone, so that it runs in every environment. What is timed is FedAvg on fedprism's `cnn4`; that
the network written out here is the same one is not taken on trust: all start from the same weights and are compared.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Workload:
    images: Tensor  # uint8 [clients, samples, channels, height, width]
    labels: Tensor  # int64 [clients, samples]
    order: Tensor  # int64 [rounds, clients, samples]: batches are cut from it
    weights: State
    batch: int
    lr: float

    @property
    def rounds(self) -> int:
        return len(self.order)

    @property
    def clients(self) -> int:
        return len(self.images)

    @property
    def samples(self) -> int:
        return self.labels.shape[1]

    def save(self, path: Path) -> None:
        weights = {f"weights/{name}": tensor.numpy() for name, tensor in self.weights.items()}
        data = {"images": self.images.numpy(), "labels": self.labels.numpy(), "order": self.order.numpy()}
        np.savez(path, batch=self.batch, lr=self.lr, **data, **weights)


def read(path: str | Path) -> Workload:
    with np.load(path, allow_pickle=False) as file:
        held = {name: torch.from_numpy(file[name]) for name in file.files}
    weights = {name.removeprefix("weights/"): held[name] for name in held if name.startswith("weights/")}
    return Workload(
        held["images"], held["labels"], held["order"], weights, int(held["batch"]), float(held["lr"].double())
    )


def network(classes: int) -> nn.Sequential:
    """`cnn4` for 3 x 32 x 32, with fedprism's names."""
    body: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(3, 32, 5)),
        ("pool1", nn.MaxPool2d(2)),
        ("relu1", nn.ReLU()),
        ("conv2", nn.Conv2d(32, 64, 5)),
        ("pool2", nn.MaxPool2d(2)),
        ("relu2", nn.ReLU()),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(1600, 512)),
        ("relu3", nn.ReLU()),
    ]
    head = [("fc2", nn.Linear(512, classes))]
    parts = [("body", nn.Sequential(OrderedDict(body))), ("head", nn.Sequential(OrderedDict(head)))]
    return nn.Sequential(OrderedDict(parts))


def first_model(work: Workload) -> nn.Sequential:
    model = network(len(work.weights["head.fc2.bias"]))
    model.load_state_dict(dict(work.weights))
    return model


def inputs(images: Tensor) -> Tensor:
    """Pixels of 0 to 255 as floats from -1 to 1."""
    return images.float() / 127.5 - 1


def train(model: nn.Module, work: Workload, round: int, client: int) -> float:
    """One local epoch of SGD as a plain loop; the seconds it took."""
    begun = time.perf_counter()
    images, labels = work.images[client], work.labels[client]
    optimiser = torch.optim.SGD(model.parameters(), lr=work.lr)
    model.train()
    for rows in work.order[round, client].split(work.batch):
        optimiser.zero_grad(set_to_none=True)
        cross_entropy(model(inputs(images[rows])), labels[rows]).backward()
        optimiser.step()
    return time.perf_counter() - begun


@dataclass
class Clock:
    """What a contender hands back: seconds of every round, and the weights after the first and the last."""

    folder: Path
    rounds: int

    def __post_init__(self) -> None:
        self.seconds: list[float] = []
        self.last = time.perf_counter()

    def start(self) -> None:
        self.last = time.perf_counter()

    def lap(self, weights: State) -> None:
        """A round is over; what is done in here is not counted."""
        self.seconds.append(time.perf_counter() - self.last)
        if len(self.seconds) in (1, self.rounds):
            name = "first" if len(self.seconds) == 1 else "last"
            np.savez(self.folder / f"{name}.npz", **{leaf: t.detach().numpy() for leaf, t in weights.items()})
        self.last = time.perf_counter()

    def write(self, *, workers: int, threads: int, training: list[float] | None, packages: tuple[str, ...]) -> None:
        """`training`: seconds of every round that clients spent in their training loops, summed over clients."""
        versions = {name: version(name) for name in ("torch", "numpy", *packages)}
        result = {"seconds": self.seconds, "training": training, "workers": workers, "threads": threads}
        (self.folder / "result.json").write_text(json.dumps({**result, "versions": versions}))
