"""Local training: one pass at one client, batch after batch in keyed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedprism import keys
from fedprism.config import Config, OptimizerConfig
from fedprism.data.images import augmentation, normalise
from fedprism.errors import ConfigError
from fedprism.federation import Split
from fedprism.methods.base import Client, Context, Draw, Pass, no_draw
from fedprism.round.noise import Noise
from fedprism.schedules import learning_rate


class Operations:
    """The few operations that an engine may replace by its own: the plain ones."""

    def make_optimizer(self, settings: OptimizerConfig, parameters: list[nn.Parameter], lr: float) -> Any:
        """A fresh optimiser: its state starts at zero in every pass."""
        if settings.name == "adam":
            return torch.optim.Adam(parameters, lr=lr, weight_decay=settings.weight_decay)
        return torch.optim.SGD(parameters, lr=lr, weight_decay=settings.weight_decay, momentum=settings.momentum)

    def backward(self, loss: Tensor) -> None:
        """Gradients of a loss."""
        loss.backward()  # type: ignore[no-untyped-call]

    def rows_at_once(self, split: Split) -> int:
        """The batch size where nothing is trained."""
        return 256

    def padded(self, count: int) -> int:
        """The number of rows to which a batch of an evaluation is filled up."""
        return count


@dataclass(frozen=True)
class Epoch:
    """The rows of one epoch in the order of training, and the size of each batch."""

    order: Tensor
    sizes: list[int]


@dataclass(frozen=True)
class PassRun:
    """One pass at one client: what its steps need."""

    client: Client
    spec: Pass
    ctx: Context
    config: Config
    operations: Operations

    @cached_property
    def split(self) -> Split:
        return self.ctx.split(self.spec.data)

    @cached_property
    def lr(self) -> float:
        """The learning rate of this round."""
        full: float = self.spec.optimizer.get("lr", self.config.train.optimizer.lr)
        return learning_rate(self.config.train, self.ctx.round, full) if self.spec.scheduled else full

    @property
    def optimizer_settings(self) -> OptimizerConfig:
        return replace(self.config.train.optimizer, **self.spec.optimizer)

    @property
    def augment(self) -> Callable[[Tensor, Draw], Tensor]:
        return augmentation(self.config.data.augment if self.spec.data == "train" else "none")

    def epochs(self) -> Iterator[Epoch]:
        """The batches of each epoch, in the same order for every pass of a round unless the pass names a stream.

        One epoch at a time: memory must not grow with their number.
        """
        spec, train, ctx, count = self.spec, self.config.train, self.ctx, len(self.split)
        size, left = spec.batch_size or train.batch_size, spec.steps
        for epoch in range(train.epochs if spec.epochs is None else spec.epochs):
            order = keys.generator(ctx.info.seed, "batches", spec.stream, ctx.round, ctx.client_id or "", epoch)
            sizes = batch_sizes(count, size, train.last_batch, spec.min_batch)[:left]
            left = None if left is None else left - len(sizes)
            if not sizes:
                return  # nor do later epochs have any
            yield Epoch(torch.randperm(count, generator=order)[: sum(sizes)], sizes)

    def noise(self, epoch: int) -> tuple[Noise, Noise]:
        """The noise of an epoch: of the loss, and of the augmentation, which is the same for every pass."""
        seed, where, like = self.ctx.info.seed, (self.ctx.round, self.ctx.client_id or ""), self.split.y
        loss = Noise(like, seed, "noise", *where, self.spec.name, epoch)
        return loss, Noise(like, seed, "augment", self.spec.stream, *where, epoch)

    def prepare(self) -> list[nn.Parameter]:
        """Set gradients and modes for this pass, and return what it trains. A norm layer of which nothing is trained
        runs in eval mode."""
        model, names = self.client.model, None if self.spec.trains is None else set(self.spec.trains)
        trained = []
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(names is None or name in names)
            if parameter.requires_grad:
                trained.append(parameter)
        if not trained:
            raise ConfigError(
                f"pass {self.spec.name!r} trains none of the model's parameters: {sorted(names or ())[:3]}."
            )
        model.train()
        for prefix, module in model.named_modules():
            if isinstance(module, _NormBase) and names is not None:
                module.train(any(f"{prefix}.{leaf}" in names for leaf in module.state_dict()))
        return trained

    def step(self, trained: list[nn.Parameter], optimizer: Any, x: Tensor, y: Tensor, draw: Draw) -> None:
        """One batch, as the model takes it, to changed weights. Nothing here reads a value off a tensor."""
        client, spec = self.client, self.spec
        client.draw = draw
        if spec.step is not None:
            with precision(self.config, x):
                spec.step(client, x, y, optimizer)
            return
        optimizer.zero_grad(set_to_none=True)
        with precision(self.config, x):
            loss = spec.loss(client, x, y)
        if loss is None or loss.ndim:
            found = "nothing" if loss is None else f"a tensor of shape {tuple(loss.shape)}"
            raise ConfigError(f"the loss of pass {spec.name!r} returned {found}; a pass that trains needs a scalar.")
        self.operations.backward(loss)
        if self.config.train.clip is not None:
            nn.utils.clip_grad_norm_(trained, self.config.train.clip)
        optimizer.step()
        client.log(f"loss/{spec.name}", loss)


def start_pass(client: Client, spec: Pass, ctx: Context, config: Config, operations: Operations) -> PassRun:
    """Before the first step of a pass."""
    with torch.no_grad():
        if spec.start is not None:
            spec.start(client, ctx)
    return PassRun(client, spec, ctx, config, operations)


def fit(run: PassRun) -> int:
    """Train on all batches of a pass; the number of steps."""
    if run.spec.trains is not None and not len(run.spec.trains):
        return _sweep(run)
    trained, split, steps = run.prepare(), run.split, 0
    optimizer, augment = run.operations.make_optimizer(run.optimizer_settings, trained, run.lr), run.augment
    for number, epoch in enumerate(run.epochs()):
        noise, augment_noise = run.noise(number)
        for step, rows in enumerate(torch.split(split.placed(epoch.order), epoch.sizes)):
            x = model_inputs(augment(split.batch(rows), augment_noise.at(step)), run.config)
            run.step(trained, optimizer, x, split.y[rows], noise.at(step))
            steps += 1
    run.client.model.zero_grad(set_to_none=True)
    return steps


@torch.no_grad()
def _sweep(run: PassRun) -> int:
    """Call the loss for all batches in eval mode: it fills scratch."""
    client, split, step = run.client, run.split, 0
    client.model.eval()
    noise = run.noise(0)[0]
    rows = split.numbers(0, len(split))
    for step, some in enumerate(torch.split(rows, run.operations.rows_at_once(split)), start=1):
        client.draw = noise.at(step - 1)
        x = model_inputs(split.batch(some), run.config)
        with precision(run.config, x):
            run.spec.loss(client, x, split.y[some])
    return step


def finish_pass(run: PassRun, steps: int) -> Context:
    """After the last step of a pass: the context, with the steps that were done."""
    run.client.draw = no_draw
    done = {**run.ctx.steps, run.spec.name: run.ctx.steps.get(run.spec.name, 0) + steps}
    ctx = run.ctx.replace(steps=done)
    with torch.no_grad():
        if run.spec.end is not None:
            run.spec.end(run.client, ctx)
    return ctx


def batch_sizes(count: int, size: int, last: str, min_batch: int) -> list[int]:
    """The size of each batch; a last one below `min_batch` joins the one before it.

    >>> batch_sizes(9, 4, "keep", 2), batch_sizes(10, 4, "drop", 2)
    ([4, 5], [4, 4])
    """
    whole, rest = divmod(count, size)
    sizes = [size] * whole
    if rest and not (sizes and last == "drop"):
        if sizes and rest < min_batch:
            sizes[-1] += rest
        else:
            sizes.append(rest)
    return sizes


def model_inputs(images: Tensor, config: Config) -> Tensor:
    """A batch as the model takes it: images normalised and in the configured memory format, texts as they are."""
    x = normalise(images, config.data.normalize)
    channels_last = config.run.memory_format == "channels_last" and x.ndim == 4
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def precision(config: Config, x: Tensor) -> AbstractContextManager[Any]:
    """Within: layers compute in bfloat16 where the configuration says so."""
    if config.run.precision != "bf16":
        return nullcontext()
    # Without a cache: it would hold casts of weights that have changed since.
    return torch.autocast(x.device.type, dtype=torch.bfloat16, cache_enabled=False)
