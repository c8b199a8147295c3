"""Local training: batches in keyed order, one optimiser step after the other, as a `Pass` describes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedprism import keys
from fedprism.config import Config, OptimizerConfig, TrainConfig, positive, setting, structure
from fedprism.data.images import augmentation, normalise
from fedprism.errors import ConfigError
from fedprism.methods.base import Draw, Me, Now, Pass, no_draw
from fedprism.registry import Registry

SWEEP_BATCH = 256  # images a step where nothing is trained


def run_pass(me: Me, each: Pass, now: Now, config: Config) -> Now:
    """Train one pass in the slot (with `trains=()`: sweep without gradient); `now` with the steps that were done."""
    with torch.no_grad():
        if each.start is not None:
            each.start(me, now)
    train = each.trains is None or len(each.trains) > 0
    steps = _fit(me, each, now, config) if train else _sweep(me, each, now, config)
    now = replace(now, steps={**now.steps, each.name: now.steps.get(each.name, 0) + steps})
    with torch.no_grad():
        if each.end is not None:
            each.end(me, now)
    return now


def _fit(me: Me, each: Pass, now: Now, config: Config) -> int:
    trained = _prepare(me.model, each)
    settings = replace(config.train.optimizer, **each.optimizer)
    optimizer = make_optimizer(settings, trained, learning_rate(config.train, now.round, settings.lr))
    split, step = now.split(each.data), 0
    augment = config.data.augment if each.data == "train" else "none"
    change = augmentation(augment, now.info.seed, each.stream, now.round, now.client or "")
    for rows in _order(each, now, config.train, len(split)):
        x, y = inputs(change(split.batch(rows), step), config), split.y[rows]
        me.draw = keyed_draw(now.device, now.info.seed, "noise", now.round, now.client or "", each.name, step)
        if each.step is not None:
            each.step(me, x, y, optimizer)
        else:
            optimizer.zero_grad(set_to_none=True)
            loss = each.loss(me, x, y)
            if loss is None:
                raise ConfigError(
                    f"the loss of pass {each.name!r} returned nothing; a pass that trains needs a scalar."
                )
            loss.backward()  # type: ignore[no-untyped-call]
            if config.train.clip is not None:
                nn.utils.clip_grad_norm_(trained, config.train.clip)
            optimizer.step()
            me.log(f"loss/{each.name}", loss)
        step += 1
    me.draw = no_draw
    me.model.zero_grad(set_to_none=True)
    return step


@torch.no_grad()
def _sweep(me: Me, each: Pass, now: Now, config: Config) -> int:
    me.model.eval()
    split, step = now.split(each.data), 0
    for step, rows in enumerate(torch.split(torch.arange(len(split), device=now.device), SWEEP_BATCH), start=1):
        me.draw = keyed_draw(now.device, now.info.seed, "noise", now.round, now.client or "", each.name, step - 1)
        each.loss(me, inputs(split.batch(rows), config), split.y[rows])
    me.draw = no_draw
    return step


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


def _order(each: Pass, now: Now, train: TrainConfig, count: int) -> Iterator[Tensor]:
    """The rows of each batch: the same order for every pass of a round, unless a pass names a stream of its own."""
    size, step = each.batch or train.batch, 0
    for epoch in range(train.epochs if each.epochs is None else each.epochs):
        order = keys.generator(now.info.seed, "batches", each.stream, now.round, now.client or "", epoch)
        for rows in batches(count, size, train.last_batch, each.least, order):
            if each.steps is not None and step >= each.steps:
                return
            step += 1
            yield rows.to(now.device)


def batches(count: int, size: int, last: str, least: int, order: torch.Generator) -> list[Tensor]:
    """`count` rows in random order, cut into batches; a last one below `least` joins the one before it.

    >>> [len(b) for b in batches(9, 4, "keep", 2, torch.Generator())]
    [4, 5]
    >>> [len(b) for b in batches(10, 4, "drop", 2, torch.Generator())]
    [4, 4]
    """
    cut = list(torch.split(torch.randperm(count, generator=order), size))
    if len(cut) > 1 and len(cut[-1]) < size:
        if last == "drop":
            cut.pop()
        elif len(cut[-1]) < least:
            tail = cut.pop()
            cut[-1] = torch.cat([cut[-1], tail])
    return cut


def inputs(images: Tensor, config: Config) -> Tensor:
    """A batch as the model takes it: images normalised and in the configured memory format, texts as they are."""
    x = normalise(images, config.data.normalize)
    last = config.run.memory_format == "channels_last" and x.ndim == 4
    return x.contiguous(memory_format=torch.channels_last) if last else x


def keyed_draw(device: torch.device, *purpose: int | str) -> Draw:
    """Uniform noise that depends on its purpose and name alone."""

    def draw(name: str, *shape: int) -> Tensor:
        return torch.rand(shape, generator=keys.generator(*purpose, name, device=device), device=device)

    return draw


def make_optimizer(settings: OptimizerConfig, parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """A fresh optimiser: its state starts at zero in every pass."""
    if settings.name == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(parameters, lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


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
    settings: Any = dict(train.schedule.settings)
    schedule = structure(settings, SCHEDULES[train.schedule.name], "train.schedule")
    # Past the last round (the state that is evaluated after it) the last round's rate holds.
    factor = schedule.factor(min(round, train.rounds - 1), train.rounds)
    return (train.optimizer.lr if base is None else base) * factor
