"""Which engine a run gets, and whether its steps are compiled."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor, nn

from fedprism.config import Config
from fedprism.engines import ENGINES, inprocess  # noqa: F401 - registers itself
from fedprism.engines.cuda import engine as cuda
from fedprism.engines.processes import worker
from fedprism.engines.processes.engine import workers
from fedprism.engines.processes.imports import why_not
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation
from fedprism.methods.base import Info, Method
from fedprism.models import Arch
from fedprism.round.engine import Engine

DEVICES = {"processes": "cpu", cuda.NAME: "cuda"}  # what an engine is for, where it is not for all

# Measured on 2 cores of an AMD EPYC, one thread, PyTorch 2.13, 15 November 2026: between `mlp` at 16 x 16 pixels and
# `resnet18` at 32 x 32, with batches of 10 to 64, what follows from these is right within a factor of two.
STEP = 1e-3  # seconds
RATE = 40e9  # operations a second
START = 3.0  # seconds until workers have imported PyTorch and can begin
LONG = 50  # rounds from which on compiling, which takes half a minute or more, is chosen by `auto`
PAYS = 2.0  # times what it costs: what worker processes must save by the estimate before they are started


def choose_engine(config: Config, device: torch.device, info: Info, federation: Federation, method: Method) -> str:
    """The engine that is asked for; `auto`: the fastest of those that give the same bits."""
    asked = config.run.engine
    if asked != "auto":
        check_engine(asked, device)
        return asked
    if device.type == "cuda":
        return cuda.NAME
    return "processes" if why_not(method) is None and _pays(config, info, federation) else "inprocess"


def _pays(config: Config, info: Info, federation: Federation) -> bool:
    """Would worker processes save more than it takes to start them?"""
    share = _participation(config)
    count = min(workers(config), int(share * len(federation.clients)))
    return count > 1 and estimate(config, info, federation) * (1 - 1 / count) > PAYS * START


def estimate(config: Config, info: Info, federation: Federation) -> float:
    """Seconds, roughly, of all training and evaluation of a run in one process: the passes of FedAvg."""
    train, evaluate = config.train, config.evaluate
    share = _participation(config)
    tested = len(evaluate.moments) / evaluate.every * (1 if evaluate.clients == "all" else share)
    work = {arch: _operations(arch, info.seed) for arch in dict.fromkeys(info.archs.values())}
    total = 0.0
    for client_id, data in federation.clients.items():
        forward, images = work[info.archs[client_id]] / RATE, len(data.train)
        steps = images / train.batch_size
        total += share * train.epochs * (3 * images * forward + steps * STEP)  # backward is twice forward
        total += tested * forward * sum(len(data.split(part)) for part in evaluate.splits)
    return train.rounds * total


def _participation(config: Config) -> float:
    share = config.clients.participation
    return sum(share) / 2 if isinstance(share, tuple) else share


def _operations(arch: Arch, seed: int) -> int:
    """Floating-point operations of the layers for one input."""
    count = 0

    def add(module: nn.Module, _: object, output: object) -> None:
        nonlocal count
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1 and isinstance(output, Tensor):
            count += 2 * output.numel() * weight[0].numel()

    model = arch.model(seed).eval()
    for module in model.modules():
        module.register_forward_hook(add)
    with torch.no_grad():
        model(torch.zeros(1, *arch.shape) if len(arch.shape) == 3 else torch.zeros(1, arch.shape[0], dtype=torch.int64))
    return count


def resolve_compile(asked: bool | str, rounds: int, device: torch.device, engine: str = "auto") -> bool:
    """Is the step compiled? `auto`: on a GPU with Triton, in runs that are long enough to pay for it."""
    triton = importlib.util.find_spec("triton") is not None
    other = engine not in ("auto", cuda.NAME)
    if asked == "auto":
        return device.type == "cuda" and triton and rounds >= LONG and not other
    if asked and other:
        raise ConfigError(
            f"run.compile is true, which is for {cuda.NAME}, and run.engine is {engine}; drop one of them."
        )
    if asked and device.type != "cuda":
        raise ConfigError("run.compile is true, which is for a GPU, and this is a CPU; set it to false or auto.")
    if asked and not triton:
        raise ConfigError("run.compile is true, which needs Triton (`pip install triton`); set it to false or auto.")
    return bool(asked)


def check_engine(name: str, device: torch.device) -> None:
    """Refuse an engine that does not exist, or is for another kind of device."""
    ENGINES[name]
    kind = DEVICES.get(name, device.type)
    if kind != device.type:
        raise ConfigError(
            f"run.engine is {name}, which is for {kind}, and the device is {device}; set run.device: {kind}, or "
            "run.engine: auto."
        )


def make_engine(method: Method, config: Config, info: Info, federation: Federation, device: torch.device) -> Engine:
    """The engine of a run."""
    if worker.serving:
        raise FedprismError(
            "a worker process was about to train by itself: it has imported the program that started it, where its "
            'method is defined, and that begins to train at once. Put that below `if __name__ == "__main__":`, or the '
            "method into another file."
        )
    kind = ENGINES[choose_engine(config, device, info, federation, method)]
    return kind(method, config, info, federation, device)
