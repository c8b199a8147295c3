"""Local training: batches in keyed order, one optimiser step after the other, as a `Pass` describes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedprism import keys
from fedprism.config import Config, OptimizerConfig, TrainConfig, positive, setting, structure
from fedprism.data.images import augmentation, normalise
from fedprism.engines.noise import Noise
from fedprism.errors import ConfigError
from fedprism.federation import Split
from fedprism.methods.base import Draw, Me, Now, Pass, no_draw
from fedprism.registry import Registry


def sweep_batch(device: torch.device, kind: tuple[torch.dtype, tuple[int, ...]]) -> int:
    """Images a step where nothing is trained: what fills a GPU, and what fits into a CPU's cache."""
    return 1024 if device.type == "cuda" and math.prod(kind[1]) <= 4096 else 256


def run_pass(me: Me, each: Pass, now: Now, config: Config) -> Generator[None, None, Now]:
    """Train one pass in the slot (with `trains=()`: sweep without gradient); `now` with the steps that were done.

    It is done in turns: after each recording that is replayed, an engine may turn to another slot.
    """
    with torch.no_grad():
        if each.start is not None:
            each.start(me, now)
    train = each.trains is None or len(each.trains) > 0
    steps = (yield from _fit(me, each, now, config)) if train else _sweep(me, each, now, config)
    now = now.but(steps={**now.steps, each.name: now.steps.get(each.name, 0) + steps})
    with torch.no_grad():
        if each.end is not None:
            each.end(me, now)
    return now


@dataclass(frozen=True)
class Work:
    """A pass at one client: what a step needs beside its batch and its noise."""

    me: Me
    each: Pass
    now: Now
    config: Config
    split: Split
    rate: float  # the learning rate of this round

    @property
    def settings(self) -> OptimizerConfig:
        return replace(self.config.train.optimizer, **self.each.optimizer)

    @property
    def change(self) -> Callable[[Tensor, Draw], Tensor]:
        return augmentation(self.config.data.augment if self.each.data == "train" else "none")

    def noises(self, epoch: int) -> tuple[Noise, Noise]:
        """The noise of an epoch: of the loss, and of the changes to images, which are the same for every pass."""
        seed, where = self.now.info.seed, (self.now.round, self.now.client or "")
        noise = Noise(self.now.device, seed, "noise", *where, self.each.name, epoch)
        return noise, Noise(self.now.device, seed, "augment", self.each.stream, *where, epoch)

    def prepare(self) -> list[nn.Parameter]:
        """Switch gradients and modes of the model; the parameters that are trained."""
        return _prepare(self.me.model, self.each)

    def step(
        self,
        trained: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        x: Tensor,
        y: Tensor,
        draw: Draw,
    ) -> None:
        """One batch, as the model takes it, to changed weights. Nothing here waits for the device."""
        me, each = self.me, self.each
        me.draw = draw
        if each.step is not None:
            with precision(self.config, x.device):
                each.step(me, x, y, optimizer)
            return
        optimizer.zero_grad(set_to_none=True)
        with precision(self.config, x.device):
            loss = each.loss(me, x, y)
        if loss is None:
            raise ConfigError(f"the loss of pass {each.name!r} returned nothing; a pass that trains needs a scalar.")
        me.backward(loss)
        if self.config.train.clip is not None:
            nn.utils.clip_grad_norm_(trained, self.config.train.clip)
        optimizer.step()
        me.log(f"loss/{each.name}", loss)


def _fit(me: Me, each: Pass, now: Now, config: Config) -> Generator[None, None, int]:
    full = each.optimizer.get("lr", config.train.optimizer.lr)
    rate = learning_rate(config.train, now.round, full) if each.scheduled else full
    work = Work(me, each, now, config, now.split(each.data), rate)
    epochs = _epochs(each, now, config.train, len(work.split))
    steps: int = fit(work, epochs) if me.replay is None else (yield from me.replay.fit(work, epochs))
    me.draw = no_draw
    return steps


def fit(work: Work, epochs: list[Epoch]) -> int:
    """Train on these rows, batch after batch; the number of steps."""
    trained, split, steps = work.prepare(), work.split, 0
    optimizer, change = make_optimizer(work.settings, trained, work.rate), work.change
    for number, epoch in enumerate(epochs):
        noise, changes = work.noises(number)
        for step, rows in enumerate(torch.split(epoch.order.to(work.now.device), epoch.sizes)):
            x = inputs(change(split.batch(rows), changes.at(step)), work.config)
            work.step(trained, optimizer, x, split.y[rows], noise.at(step))
            steps += 1
    work.me.model.zero_grad(set_to_none=True)
    return steps


@torch.no_grad()
def _sweep(me: Me, each: Pass, now: Now, config: Config) -> int:
    me.model.eval()
    split, step = now.split(each.data), 0
    noise = Noise(now.device, now.info.seed, "noise", now.round, now.client or "", each.name, 0)
    rows = torch.arange(len(split), device=now.device)
    for step, some in enumerate(torch.split(rows, sweep_batch(now.device, split.kind)), start=1):
        me.draw = noise.at(step - 1)
        with precision(config, now.device):
            each.loss(me, inputs(split.batch(some), config), split.y[some])
    me.draw = no_draw
    return step


def precision(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """Within: layers compute in bfloat16 where the configuration says so."""
    if config.run.precision != "bf16":
        return nullcontext()
    # Without a cache: a captured graph would read casts of weights that have changed since.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def _prepare(model: nn.Module, each: Pass) -> list[nn.Parameter]:
    """Switch gradients and modes for this pass; norm layers of which nothing is trained run in eval mode."""
    names = None if each.trains is None else set(each.trains)
    trained = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(names is None or name in names)
        if parameter.requires_grad:
            trained.append(parameter)
    if not trained:
        raise ConfigError(f"pass {each.name!r} trains none of the model's parameters: {sorted(names or ())[:3]}.")
    model.train()
    for prefix, module in model.named_modules():
        if isinstance(module, _NormBase) and names is not None:
            module.train(any(f"{prefix}.{leaf}" in names for leaf in module.state_dict()))
    return trained


@dataclass(frozen=True)
class Epoch:
    """Rows in the order in which they are trained on, and how many each batch has."""

    order: Tensor
    sizes: list[int]


def _epochs(each: Pass, now: Now, train: TrainConfig, count: int) -> list[Epoch]:
    """The batches of each epoch: in the same order for every pass of a round, unless it names a stream."""
    size, left = each.batch or train.batch, each.steps
    epochs = []
    for epoch in range(train.epochs if each.epochs is None else each.epochs):
        order = keys.generator(now.info.seed, "batches", each.stream, now.round, now.client or "", epoch)
        sizes = batch_sizes(count, size, train.last_batch, each.least)[:left]
        left = None if left is None else left - len(sizes)
        if sizes:
            epochs.append(Epoch(torch.randperm(count, generator=order)[: sum(sizes)], sizes))
    return epochs


def batch_sizes(count: int, size: int, last: str, least: int) -> list[int]:
    """How many rows each batch has; a last one below `least` joins the one before it.

    >>> batch_sizes(9, 4, "keep", 2), batch_sizes(10, 4, "drop", 2)
    ([4, 5], [4, 4])
    """
    whole, rest = divmod(count, size)
    sizes = [size] * whole
    if rest and not (sizes and last == "drop"):
        if sizes and rest < least:
            sizes[-1] += rest
        else:
            sizes.append(rest)
    return sizes


def batches(count: int, size: int, last: str, least: int, order: torch.Generator) -> list[Tensor]:
    """`count` rows in random order, cut into batches.

    >>> [len(b) for b in batches(9, 4, "keep", 2, torch.Generator())]
    [4, 5]
    """
    sizes = batch_sizes(count, size, last, least)
    return list(torch.split(torch.randperm(count, generator=order)[: sum(sizes)], sizes))


def inputs(images: Tensor, config: Config) -> Tensor:
    """A batch as the model takes it: images normalised and in the configured memory format, texts as they are."""
    x = normalise(images, config.data.normalize)
    last = config.run.memory_format == "channels_last" and x.ndim == 4
    return x.contiguous(memory_format=torch.channels_last) if last else x


def make_optimizer(settings: OptimizerConfig, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """A fresh optimiser: its state starts at zero in every pass.

    On a GPU it is one kernel a step that finds the learning rate on the device, so that a step can be captured.
    """
    fused = parameters[0].device.type == "cuda"
    common: dict[str, Any] = {"lr": lr, "weight_decay": settings.weight_decay, "fused": fused}
    if settings.name == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters, **common, capturable=fused)
    else:
        optimizer = torch.optim.SGD(parameters, **common, momentum=settings.momentum)
    if fused:
        optimizer.param_groups[0]["lr"] = torch.full((), lr, dtype=torch.float32, device=parameters[0].device)
        if settings.name == "sgd" and settings.momentum:
            for parameter in parameters:  # at zero, not missing: the first step is then like every other
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


# --- learning-rate schedules: a factor a round -----------------------------------------------------------------------

SCHEDULES: Registry[type[Constant]] = Registry("schedule")


@SCHEDULES.register("none")
@dataclass(frozen=True)
class Constant:
    """The same learning rate in every round."""

    def factor(self, round: int, rounds: int) -> float:
        return 1.0


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(Constant):
    """From the full rate down to zero along half a cosine."""

    def factor(self, round: int, rounds: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * round / rounds))


@SCHEDULES.register("step")
@dataclass(frozen=True)
class Step(Constant):
    """Times `gamma` after every `every` rounds."""

    every: int = setting(10, "rounds between two steps", positive, "1 or more")
    gamma: float = setting(0.5, "factor of a step", positive, "above 0")

    def factor(self, round: int, rounds: int) -> float:
        return float(self.gamma ** (round // self.every))


@SCHEDULES.register("exponential")
@dataclass(frozen=True)
class Exponential(Constant):
    """Times `gamma` after every round."""

    gamma: float = setting(0.99, "factor of a round", positive, "above 0")

    def factor(self, round: int, rounds: int) -> float:
        return float(self.gamma**round)


def learning_rate(train: TrainConfig, round: int, base: float | None = None) -> float:
    """The learning rate of a round (counted from 0)."""
    schedule = _schedule(train.schedule.name, tuple(train.schedule.settings.items()))
    # Past the last round (the state that is evaluated after it) the last round's rate holds.
    factor = schedule.factor(min(round, train.rounds - 1), train.rounds)
    return (train.optimizer.lr if base is None else base) * factor


@lru_cache(maxsize=16)
def _schedule(name: str, settings: tuple[tuple[str, Any], ...]) -> Constant:
    return structure(dict(settings), SCHEDULES[name], "train.schedule")
