"""Training steps and evaluations of one slot, captured once and replayed: what makes the engine fast.

A capture holds a chunk of steps of a pass (or one batch of an evaluation) with fixed addresses for the batches, the
noise and the counts. To run it, those are filled and the capture is replayed: one launch for up to `MAX_STEPS` steps
instead of hundreds. A pass that cannot be captured runs step by step, and says why once.

What captures is a `Capture`: CUDA graphs on a GPU. `no_capture` calls the function again, so that all else here is
tested on a CPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedprism.engines.cuda.buffers import DeviceBuffer, DeviceSplit, PinnedPool
from fedprism.engines.cuda.guard import CaptureGuard, NotCapturable
from fedprism.engines.cuda.identity import (
    Addresses,
    addresses,
    identity_key,
    pass_key,
    readable_tensors,
    unmoved,
)
from fedprism.engines.cuda.trace import CompiledStep, Compiler, Untraceable
from fedprism.federation import Split
from fedprism.methods.base import Client, Draw
from fedprism.round.evaluation import (
    Batch,
    Evaluation,
    Purpose,
    Samples,
    Tally,
    batches,
    count_batch,
    score_batch,
)
from fedprism.round.noise import Noise, keyed_draw
from fedprism.round.training import Epoch, PassRun, fit, model_inputs

COMPILED = " (compiled)"  # after the name of a pass, in a note about its compiled step
MAX_STEPS = 8  # of one capture; a divisor of BLOCK
MIN_REPEATS = 6  # launches of the longest capture of an epoch, at least, where models are small
MAX_BATCH_BYTES = 2**27  # of the images that one capture reads
LARGE_MODEL = 5_000_000  # parameters of a model whose steps are long enough to be launched a few at a time
MAX_CAPTURES = 24  # of one pass in one slot; other batch sizes run step by step
MAX_PASSES = 64  # passes that a slot captures, and how often one of them anew because what it reads has moved

T = TypeVar("T")
Steps = Generator[None, None, T]  # work in parts, between which the engine may turn to another slot; its value at last
NoiseBuffers = dict[tuple[str, tuple[int, ...]], Tensor]  # by name and shape
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def no_capture(work: Callable[[], None]) -> Callable[[], None]:
    """A capture that is none: it runs the function each time."""
    return work


@dataclass
class CapturedSteps:
    """A capture of some training steps, and the buffers of the noise that it reads."""

    noises: tuple[NoiseBuffers, NoiseBuffers]  # of the loss, and of the augmentation
    log_counts: dict[str, int] = field(default_factory=dict)  # values that one replay logs, per name
    replay: Callable[[], None] | None = None


@dataclass
class CapturedEval:
    """A capture of one batch of an evaluation."""

    where: Tensor  # int64 [2]: the first row in the buffer, and how many rows count
    noises: NoiseBuffers
    tally: Tally
    quantiles: Mapping[str, Tensor] = field(default_factory=dict)  # values [batch, ...] of which they are taken
    replay: Callable[[], None] | None = None


@dataclass
class Trainer:
    """What one pass trains with in a slot. It stays at its addresses from client to client."""

    name: str  # the pass's
    addresses: Addresses  # of all that its captures may read
    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    lr: float  # the optimiser's
    order: Tensor  # int64: how many rows of the epoch are done, then the rows of the epoch in the buffer
    captures: dict[tuple[int, int], CapturedSteps] = field(default_factory=dict)  # (steps, batch size)

    def optimizer_state(self) -> list[Tensor]:
        return [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]

    def forget(self) -> None:
        """Let go of the captures, each of which refers to itself."""
        for captured in self.captures.values():
            captured.replay = None
        self.captures.clear()

    def reset(self, lr: float) -> None:
        """As a fresh optimiser: its state at zero."""
        if lr != self.lr:
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            self.lr = lr
        state = self.optimizer_state()
        if state:
            torch._foreach_zero_(state)


class SlotCapture:
    """One client object of a slot, with its captures."""

    def __init__(
        self,
        client: Client,
        device: torch.device,
        capture: Capture,
        pool: PinnedPool,
        on_uncaptured: Callable[[str, str], None],
        compiler: Compiler | None = None,
    ) -> None:
        self.client, self.device, self.capture, self.on_uncaptured = client, device, capture, on_uncaptured
        self.pool, self.compiler = pool, compiler
        self.large = sum(p.numel() for p in client.model.parameters()) > LARGE_MODEL
        self.trainers: dict[Hashable, Trainer] = {}
        self.evals: dict[Hashable, tuple[Addresses, dict[int, CapturedEval]]] = {}  # by batch size
        self.uncaptured: dict[str, str] = {}  # passes that cannot be captured, and why
        self.moved: dict[Hashable, int] = {}  # how often passes had to be captured anew
        self.prepared: Trainer | None = None  # whose modes and gradients the model has

    def close(self) -> None:
        """Let go of all captures. They refer to this object and each other, so they would not go by themselves."""
        for trainer in self.trainers.values():
            trainer.forget()
        for captured in (captured for _, evals in self.evals.values() for captured in evals.values()):
            captured.replay = None
        self.trainers.clear()
        self.evals.clear()
        self.prepared = None

    def longest(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """The longest capture of each pass: its steps, and what replays it."""
        found: dict[str, tuple[int, Callable[[], None]]] = {}
        for trainer in self.trainers.values():
            for (count, _), captured in trainer.captures.items():
                if captured.replay is not None and count > found.get(trainer.name, (0,))[0]:
                    found[trainer.name] = (count, captured.replay)
        return found

    # --- training ----------------------------------------------------------------------------------------------------

    def fit(self, run: PassRun) -> Steps[int]:
        """`round.training.fit`, one capture at a time; the number of steps."""
        name = run.spec.name
        if run.spec.trains is not None and not len(run.spec.trains):
            return fit(run)
        if name in self.uncaptured:
            return self._step_by_step(run, self.uncaptured[name])
        if not self._hashable(run):
            return self._step_by_step(run, "its loss is made anew in every round, so it cannot be known again")
        split = run.split
        assert isinstance(split, DeviceSplit)
        trainer = self._trainer(run, split)
        if trainer is None:
            return self._step_by_step(run, "what it reads lies at another place for every client")
        trainer.reset(run.lr)
        if self.prepared is not trainer or not self.client.model.training:  # a replay does not, and hooks may look
            run.prepare()
            self.prepared = trainer
        steps, augment = 0, run.augment
        for number, epoch in enumerate(run.epochs()):
            noises, begin = run.noise(number), 0
            self._send(trainer.order, epoch.order, split.begin)
            for step, count, size in chunks(tuple(epoch.sizes), self._max_steps(run, epoch)):
                captured = trainer.captures.get((count, size))
                if captured is None and len(trainer.captures) < MAX_CAPTURES:
                    try:
                        captured = self._capture(run, trainer, augment, split.buffer, (count, size))
                    except NotCapturable as why:
                        return self._step_by_step(run, str(why))
                    except BaseException:
                        if not trainer.captures:  # its optimiser may be half-made
                            del self.trainers[pass_key(run)]
                        raise
                if captured is None:
                    for i in range(count):
                        rows = epoch.order[begin + i * size : begin + (i + 1) * size]
                        self._one_step(run, trainer, augment, rows, step + i, noises)
                else:
                    self._replay(captured, step, noises)
                    yield
                begin += count * size
                steps += count
        return steps

    def _send(self, place: Tensor, order: Tensor, begin: int) -> None:
        """The rows of an epoch in the buffer, and that none of them is done."""
        host = self.pool.take(1 + len(order))
        host[0] = 0
        torch.add(order, begin, out=host[1:])
        place[: len(host)].copy_(host, non_blocking=True)

    def _step_by_step(self, run: PassRun, why: str) -> int:
        """Step by step, from now on. Nothing was trained yet: the first chunk is captured before it runs."""
        self.uncaptured[run.spec.name], self.prepared = why, None
        self.on_uncaptured(run.spec.name, why)
        return fit(run)

    def _one_step(
        self, run: PassRun, trainer: Trainer, augment: Any, rows: Tensor, step: int, noises: tuple[Noise, Noise]
    ) -> None:
        """A batch whose size is rare; captures go on after it."""
        run.prepare()
        rows = rows.to(self.device)
        x = model_inputs(augment(run.split.batch(rows), noises[1].at(step)), run.config)
        run.step(trainer.trained, trainer.optimizer, x, run.split.y[rows], noises[0].at(step))
        trainer.order[0].add_(len(rows))

    def _replay(self, captured: CapturedSteps, step: int, noises: tuple[Noise, Noise]) -> None:
        for noise, buffers in zip(noises, captured.noises, strict=True):
            for (name, _), out in buffers.items():
                noise.fill(name, out, step)
        assert captured.replay is not None
        captured.replay()
        for name, values in captured.log_counts.items():
            self.client.log_counts[name] = self.client.log_counts.get(name, 0) + values

    def _trainer(self, run: PassRun, split: DeviceSplit) -> Trainer | None:
        """What this pass trains with, new or as it was; None where it would have to be made anew again and again."""
        key, here = pass_key(run), {**addresses(self.client), ("buffer", ""): split.buffer.x.data_ptr()}
        trainer = self.trainers.get(key)
        if trainer is None or not unmoved(trainer.addresses, here) or len(split) >= len(trainer.order):
            self.moved[key] = self.moved.get(key, 0) + 1
            if self.moved[key] > MAX_PASSES:
                return None
            if trainer is not None:
                trainer.forget()
            trained = run.prepare()
            optimizer = run.operations.make_optimizer(run.optimizer_settings, trained, run.lr)
            order = torch.zeros(1 + max(len(split), split.buffer.longest), dtype=torch.int64, device=self.device)
            trainer = self.trainers[key] = Trainer(run.spec.name, here, trained, optimizer, run.lr, order)
        return trainer

    def _capture(
        self, run: PassRun, trainer: Trainer, augment: Any, buffer: DeviceBuffer, shape: tuple[int, int]
    ) -> CapturedSteps:
        """Run one step to see that it can be captured, put everything back, and capture."""
        client, (count, size), order = self.client, shape, trainer.order
        run = replace(run, ctx=run.ctx.replace(download={}))  # a capture outlives the download
        captured = CapturedSteps(({}, {}))
        ahead = torch.arange(count * size, device=self.device)
        plain = run.config.data.augment == "none" or run.spec.data != "train"
        compiled: CompiledStep | None = None

        def some(steps: int) -> None:
            run.prepare()
            noise, augment_noise = (_BufferedNoise(buffers, count, self.device) for buffers in captured.noises)
            # Modulo the length: a replay without a client finds rows, too.
            rows = order.index_select(0, 1 + torch.remainder(ahead + order[0], len(order) - 1))
            x, y = buffer.x.index_select(0, rows), buffer.y.index_select(0, rows)
            order[0].add_(count * size)
            if plain:  # image by image, so it is the same for all batches at once
                x = model_inputs(x, run.config)
            with nullcontext() if compiled is None else compiled.chunk():
                for i in range(steps):
                    at = slice(i * size, (i + 1) * size)
                    images = x[at] if plain else model_inputs(augment(x[at], augment_noise.at(i)), run.config)
                    if compiled is not None:
                        compiled(images, y[at], noise.at(i))
                    else:
                        run.step(trainer.trained, trainer.optimizer, images, y[at], noise.at(i))

        with _PutBack(client, trainer), nullcontext() if trainer.captures else CaptureGuard(self.device):
            some(1)
        usual = size == (run.spec.batch_size or run.config.train.batch_size)
        if self.compiler is not None and usual and run.spec.step is None:
            compiled = self._compiled(run, trainer, captured, buffer, size)
            with _PutBack(client, trainer):
                some(1)
        before = dict(client.log_counts)
        captured.replay = self.capture(functools.partial(some, count))
        counts = {name: n - before.get(name, 0) for name, n in client.log_counts.items() if n != before.get(name, 0)}
        captured.log_counts = {} if self.capture is no_capture else counts  # which counts by itself
        client.log_counts.clear()
        client.log_counts.update(before)
        client.model.zero_grad(set_to_none=True)
        trainer.captures[shape] = captured
        return captured

    def _compiled(
        self, run: PassRun, trainer: Trainer, captured: CapturedSteps, buffer: DeviceBuffer, size: int
    ) -> CompiledStep | None:
        """The compiled step of this pass, or None where it cannot be compiled."""
        assert self.compiler is not None
        noises, rows = list(captured.noises[0]), trainer.order[1 : 1 + size]
        key, batch = (pass_key(run), size, tuple(noises)), (model_inputs(buffer.x[rows], run.config), buffer.y[rows])
        try:
            return self.compiler.step(key, run, trainer.trained, trainer.optimizer, noises, batch)
        except Untraceable as why:
            self.on_uncaptured(f"{run.spec.name}{COMPILED}", str(why))
            return None

    def _max_steps(self, run: PassRun, epoch: Epoch) -> int:
        """Steps of a chunk: a power of two, fewer where they are long or their images large.

        And fewer where there are few: the second launch of a capture takes far less time than its first.
        """
        size = epoch.sizes[0]
        repeats = max(1, epoch.sizes.count(size) // MIN_REPEATS)
        dtype, shape = run.split.kind
        fitting = MAX_BATCH_BYTES // (size * math.prod(shape) * dtype.itemsize * 5)  # as stored and as floats
        few = 4 if self.large else min(MAX_STEPS, 1 << (repeats.bit_length() - 1))
        return max(1, min(few, 1 << max(0, fitting.bit_length() - 1)))

    def _hashable(self, run: PassRun) -> bool:
        try:
            known_already = pass_key(run) in self.trainers
        except TypeError:
            return False
        return known_already or len(self.trainers) < MAX_PASSES

    # --- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def score_split(self, test: Evaluation, client: Client, split: Split) -> Tally:
        """`round.evaluation.score_split`, replayed."""
        assert isinstance(split, DeviceSplit)
        tally, samples, used = Tally(test.classes, len(split)), Samples(len(split)), list[CapturedEval]()
        key = (identity_key(test.forward), test.classes, split.kind)
        known, here = self.evals.get(key), {**addresses(client), ("buffer", ""): split.buffer.x.data_ptr()}
        evals = known[1] if known is not None and unmoved(known[0], here) else {}
        self.evals[key] = (here, evals)
        for step, batch in enumerate(batches(split, test.operations)):
            if batch.size not in evals:
                evals[batch.size] = self._capture_eval(test, split, batch)
            captured = evals[batch.size]
            if captured.replay is None:
                output = score_batch(test, client.model, split, step, batch, tally)
                samples.add(output.quantiles, batch.count)
                continue
            if all(captured is not other for other in used):
                if captured.tally.values is not None:
                    captured.tally.values.zero_()
                used.append(captured)
            self._fill(captured, split, batch, test.purpose, step)
            captured.replay()
            samples.add(captured.quantiles, batch.count)
        for captured in used:
            assert captured.tally.values is not None
            tally.join(captured.tally.values, captured.tally.names)
        tally.quantiles = samples.quantiles()
        return tally

    def _fill(self, captured: CapturedEval, split: DeviceSplit, batch: Batch, purpose: Purpose, step: int) -> None:
        host = self.pool.take(2)
        host[0], host[1] = split.begin + batch.begin, batch.count
        captured.where.copy_(host, non_blocking=True)
        draw = keyed_draw(captured.where, *purpose, step)
        for (name, shape), buffer in captured.noises.items():
            buffer.copy_(draw(name, *shape))

    def _capture_eval(self, test: Evaluation, split: DeviceSplit, batch: Batch) -> CapturedEval:
        captured = CapturedEval(torch.zeros(2, dtype=torch.int64, device=self.device), {}, Tally(test.classes))
        ahead, buffer, model = torch.arange(batch.size, device=self.device), split.buffer, self.client.model
        captured.where.copy_(torch.tensor([split.begin + batch.begin, batch.count]))

        def draw(name: str, *shape: int) -> Tensor:
            if (name, shape) not in captured.noises:
                captured.noises[name, shape] = torch.rand(shape, device=self.device)
            return captured.noises[name, shape]

        def once() -> None:
            model.eval()
            first, count = captured.where
            rows = first + torch.minimum(ahead, count - 1)
            x, y = buffer.x.index_select(0, rows), buffer.y.index_select(0, rows)
            output = count_batch(test, model, x, y, ahead < count, draw, captured.tally)
            captured.quantiles = output.quantiles

        try:
            with CaptureGuard(self.device):
                once()  # the sums are allocated here, before they are captured
        except NotCapturable as why:
            self.on_uncaptured("evaluation", str(why))
            return captured
        captured.replay = self.capture(once)
        return captured


class _PutBack:
    """Within: what a trial step changes is put back afterwards."""

    def __init__(self, client: Client, trainer: Trainer) -> None:
        self.client, self.trainer = client, trainer

    def __enter__(self) -> None:
        more = (*self.client.log_sums.values(), *self.trainer.optimizer_state(), self.trainer.order)
        self.tensors = [*readable_tensors(self.client).values(), *more]
        self.counts, self.copies = dict(self.client.log_counts), [tensor.clone() for tensor in self.tensors]

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        before = {id(tensor) for tensor in self.tensors}
        for tensor in (*self.client.log_sums.values(), *self.trainer.optimizer_state()):
            if id(tensor) not in before:
                tensor.zero_()
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.copy_(copy)
        self.client.log_counts.clear()
        self.client.log_counts.update(self.counts)


class _BufferedNoise:
    """Noise of a chunk of steps, in the buffers into which it is written before each replay."""

    def __init__(self, buffers: NoiseBuffers, count: int, device: torch.device) -> None:
        self.buffers, self.count, self.device = buffers, count, device

    def at(self, i: int) -> Draw:
        def draw(name: str, *shape: int) -> Tensor:
            if (name, shape) not in self.buffers:
                self.buffers[name, shape] = torch.rand(self.count, *shape, device=self.device)
            return self.buffers[name, shape][i]

        return draw


@functools.lru_cache(maxsize=64)
def chunks(sizes: tuple[int, ...], most: int) -> list[tuple[int, int, int]]:
    """The batches of an epoch in chunks of equal ones: first step, steps (a power of two), batch size.

    >>> chunks((4,) * 11 + (3,), 8)
    [(0, 8, 4), (8, 2, 4), (10, 1, 4), (11, 1, 3)]
    """
    step, found = 0, []
    for size, same in [(size, len(list(group))) for size, group in itertools.groupby(sizes)]:
        left = same
        while left:
            # A power of two that divides the first step: then the noise of a chunk lies in one block.
            count = min(most, 1 << (left.bit_length() - 1), step & -step or most)
            found.append((step, count, size))
            step, left = step + count, left - count
    return found
