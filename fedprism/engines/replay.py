"""Steps that are recorded once and replayed: what makes a slot of the `cuda-graphs` engine fast.

A recording is made of one stretch of steps of a pass (or of one batch of an evaluation) with fixed places for the
batches, the noise and the counts. To run it, those places are filled and the recording is replayed: one launch for up
to `STEPS` steps instead of hundreds. A pass that cannot be recorded runs step by step, and says why once.

What records is a `Recorder`: CUDA graphs on a GPU. On a CPU it calls the recorded function again, so that all else
here is tested without a GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedprism.config import Config
from fedprism.engines.compiled import Compiler, Step, Untraceable, everything, slots
from fedprism.engines.evaluate import Examine, Part, Purpose, Tally, Turns, eagerly, look, parts
from fedprism.engines.noise import Noise, keyed_draw
from fedprism.engines.passes import Epoch, Work, fit, inputs, make_optimizer
from fedprism.engines.shelf import Arena, Placed, Shelf
from fedprism.errors import FedprismError
from fedprism.federation import Split
from fedprism.methods.base import Draw, Me

COMPILED = " (compiled)"  # in the name of a pass of which something is told
STEPS = 8  # of one recording, at most; a divisor of BLOCK
REPEATS = 6  # launches of the longest recording of an epoch, at least, where models are small
ROOM = 2**27  # bytes of images that one recording reads, at most
LARGE = 5_000_000  # parameters of a model whose steps are long enough to be launched a few at a time
RARE = 24  # recordings of one pass in one slot; what comes after runs step by step
PASSES = 64  # kinds of passes that a slot records, and how often one of them anew because what it reads has moved

Places = dict[tuple[str, tuple[int, ...]], Tensor]  # of noise, by name and shape
Addresses = dict[tuple[str, str], Hashable]  # of tensors, by name: where they lie and of which kind they are
Recorder = Callable[[Callable[[], None]], Callable[[], None]]


def again(work: Callable[[], None]) -> Callable[[], None]:
    """A recording that is not one: it runs the function each time."""
    return work


class Waits(FedprismError):
    """A step asked for a value on the host, or copied one from there: it cannot be recorded."""


WAITING = {
    "_local_scalar_dense": ".item(), float(tensor) or `if tensor`",
    "nonzero": "boolean indexing or nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "repeat_interleave": "repeat_interleave",
    "equal": "torch.equal",
    "is_nonzero": "`if tensor`",
    "lift_fresh": "torch.tensor(...)",
    "_linalg_eigh": "eigh",
    "_linalg_svd": "svd",
}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what waits for the device, brings values from the host, or changes something there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.host = "cpu" if device.type != "cpu" else None  # what is done there is not recorded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name in WAITING:
            raise Waits(f"it waits for the device: {WAITING[name]}")
        if func._schema.is_mutable:
            written = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
            if any(isinstance(each, Tensor) and each.device.type == self.host for each in written):
                raise Waits("it changes a tensor on the host, such as the sum of a value there that is logged")
        made = func(*args, **(kwargs or {}))
        if name in ("copy_", "_to_copy"):
            source = args[1] if name == "copy_" else args[0]
            if source.device.type != made.device.type:
                raise Waits(f"it copies a tensor {'from' if source.device.type == 'cpu' else 'to'} the host")
        return made


@dataclass
class Stretch:
    """A recording of some training steps, and the places of the noise that it reads."""

    noises: tuple[Places, Places]  # of the loss, and of the changes to images
    logged: dict[str, int] = field(default_factory=dict)  # values that one replay logs, by name
    play: Callable[[], None] | None = None


@dataclass
class Trainer:
    """What one kind of pass trains with in a slot: it stays at its place from client to client."""

    name: str  # the pass's
    places: Addresses  # of all that its recordings may read
    trained: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    rate: float  # the optimiser's
    order: Tensor  # int64: how many rows of the epoch are through, then the epoch's rows on the shelf
    stretches: dict[tuple[int, int], Stretch] = field(default_factory=dict)  # (steps, batch)

    def state(self) -> list[Tensor]:
        """The optimiser's."""
        return [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]

    def forget(self) -> None:
        """Let go of the recordings, each of which knows its stretch."""
        for stretch in self.stretches.values():
            stretch.play = None
        self.stretches.clear()

    def reset(self, rate: float) -> None:
        """As a fresh optimiser: its state at zero."""
        if rate != self.rate:
            for group in self.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self.rate = rate
        held = self.state()
        if held:
            torch._foreach_zero_(held)


@dataclass
class Glance:
    """A recording of one batch of an evaluation."""

    where: Tensor  # int64 [2]: the first row on the shelf, and how many rows count
    noises: Places
    tally: Tally
    spreads: Mapping[str, Tensor] = field(default_factory=dict)
    play: Callable[[], None] | None = None


class Replay:
    """The recordings of one slot; set as `me.replay`."""

    def __init__(
        self,
        me: Me,
        device: torch.device,
        recorder: Recorder,
        arena: Arena,
        tell: Callable[[str, str], None],
        compiler: Compiler | None = None,
    ) -> None:
        self.me, self.device, self.record, self.tell = me, device, recorder, tell
        self.arena, self.compiler = arena, compiler
        self.large = sum(p.numel() for p in me.model.parameters()) > LARGE
        self.trainers: dict[Hashable, Trainer] = {}
        self.glances: dict[Hashable, tuple[Addresses, dict[int, Glance]]] = {}  # by batch
        self.failed: dict[str, str] = {}  # what cannot be recorded, and why
        self.moved: dict[Hashable, int] = {}  # how often passes had to be recorded anew
        self.prepared: Trainer | None = None  # whose modes and gradients the model has

    def close(self) -> None:
        """Let go of all recordings. They know this object and each other, so they would not go by themselves."""
        for trainer in self.trainers.values():
            trainer.forget()
        for glance in (glance for _, glances in self.glances.values() for glance in glances.values()):
            glance.play = None
        self.trainers.clear()
        self.glances.clear()
        self.prepared = None

    # --- training ----------------------------------------------------------------------------------------------------

    def fit(self, work: Work, epochs: list[Epoch]) -> Turns[int]:
        """Train on these rows, a recording at a turn; the number of steps."""
        name = work.each.name
        if name in self.failed:
            return self._eagerly(work, epochs, self.failed[name])
        if not self._hashable(work):
            return self._eagerly(work, epochs, "its loss is made anew in every round, so it cannot be known again")
        split = work.split
        assert isinstance(split, Placed)
        trainer = self._trainer(work, split)
        if trainer is None:
            return self._eagerly(work, epochs, "what it reads lies at another place for every client")
        trainer.reset(work.rate)
        if self.prepared is not trainer or not self.me.model.training:  # a replay does not, and hooks may look at it
            work.prepare()
            self.prepared = trainer
        steps, change = 0, work.change
        for number, epoch in enumerate(epochs):
            noises, begin = work.noises(number), 0
            self._send(trainer.order, epoch.order, split.begin)
            for step, count, size in stretches(tuple(epoch.sizes), self._most(work, epoch.sizes)):
                stretch = trainer.stretches.get((count, size))
                if stretch is None and len(trainer.stretches) < RARE:
                    try:
                        stretch = self._record(work, trainer, change, split.shelf, (count, size))
                    except Waits as why:
                        return self._eagerly(work, epochs, str(why))
                    except BaseException:
                        if not trainer.stretches:  # its optimiser may be half-made
                            del self.trainers[_of_pass(work)]
                        raise
                if stretch is None:
                    for i in range(count):
                        rows = epoch.order[begin + i * size : begin + (i + 1) * size]
                        self._step_by_step(work, trainer, change, rows, step + i, noises)
                else:
                    self._play(stretch, step, noises)
                    yield
                begin += count * size
                steps += count
        return steps

    def _send(self, place: Tensor, order: Tensor, begin: int) -> None:
        """The rows of an epoch on the shelf, and that none of them is through."""
        host = self.arena.take(1 + len(order))
        host[0] = 0
        torch.add(order, begin, out=host[1:])
        place[: len(host)].copy_(host, non_blocking=True)

    def _eagerly(self, work: Work, epochs: list[Epoch], why: str) -> int:
        """Step by step, from now on: nothing was trained yet, since the first stretch is recorded before it runs."""
        self.failed[work.each.name], self.prepared = why, None
        self.tell(work.each.name, why)  # who tells it once
        return fit(work, epochs)

    def _step_by_step(
        self, work: Work, trainer: Trainer, change: Any, rows: Tensor, step: int, noises: tuple[Noise, Noise]
    ) -> None:
        """A batch whose size is rare; what is recorded goes on after it."""
        work.prepare()
        rows = rows.to(self.device)
        x = inputs(change(work.split.batch(rows), noises[1].at(step)), work.config)
        work.step(trainer.trained, trainer.optimizer, x, work.split.y[rows], noises[0].at(step))
        trainer.order[0].add_(len(rows))

    def _play(self, stretch: Stretch, step: int, noises: tuple[Noise, Noise]) -> None:
        for noise, places in zip(noises, stretch.noises, strict=True):
            for (name, _), out in places.items():
                noise.fill(name, out, step)
        assert stretch.play is not None
        stretch.play()
        for name, values in stretch.logged.items():
            self.me.counts[name] = self.me.counts.get(name, 0) + values

    def _trainer(self, work: Work, split: Placed) -> Trainer | None:
        """What this pass trains with, new or as it was; None where it would have to be made anew again and again."""
        key, places = _of_pass(work), {**self._places(), ("shelf", ""): split.shelf.x.data_ptr()}
        trainer = self.trainers.get(key)
        if trainer is None or not _there(trainer.places, places) or len(split) >= len(trainer.order):
            self.moved[key] = self.moved.get(key, 0) + 1
            if self.moved[key] > PASSES:
                return None
            if trainer is not None:
                trainer.forget()
            trained = work.prepare()
            optimizer = make_optimizer(work.settings, trained, work.rate)
            order = torch.zeros(1 + max(len(split), split.shelf.longest), dtype=torch.int64, device=self.device)
            trainer = self.trainers[key] = Trainer(work.each.name, places, trained, optimizer, work.rate, order)
        return trainer

    def _record(self, work: Work, trainer: Trainer, change: Any, shelf: Shelf, shape: tuple[int, int]) -> Stretch:
        """Run one step to see that it can be recorded, put everything back, and record."""
        me, (count, size), order = self.me, shape, trainer.order
        work = replace(work, now=replace(work.now, down={}))  # a recording outlives what was sent
        stretch = Stretch(({}, {}))
        ahead = torch.arange(count * size, device=self.device)
        plain = work.config.data.augment == "none" or work.each.data != "train"
        step: Any = None

        def some(steps: int) -> None:
            work.prepare()
            noise, changes = (_Placed(places, count, self.device) for places in stretch.noises)
            # Modulo the length: whoever replays it without a client finds rows, too.
            rows = order.index_select(0, 1 + torch.remainder(ahead + order[0], len(order) - 1))
            x, y = shelf.x.index_select(0, rows), shelf.y.index_select(0, rows)
            order[0].add_(count * size)
            if plain:  # image by image, so it is the same for all batches at once
                x = inputs(x, work.config)
            with nullcontext() if step is None else step.stretch():
                for i in range(steps):
                    batch = slice(i * size, (i + 1) * size)
                    images = x[batch] if plain else inputs(change(x[batch], changes.at(i)), work.config)
                    if step is not None:
                        step(images, y[batch], noise.at(i))
                    else:
                        work.step(trainer.trained, trainer.optimizer, images, y[batch], noise.at(i))

        with _PutBack(me, trainer), nullcontext() if trainer.stretches else Watch(self.device):
            some(1)
        if (
            self.compiler is not None
            and size == (work.each.batch or work.config.train.batch)
            and work.each.step is None
        ):
            step = self._compiled(work, trainer, stretch, shelf, size)
            with _PutBack(me, trainer):
                some(1)
        counts = dict(me.counts)
        stretch.play = self.record(functools.partial(some, count))
        stretch.logged = {name: n - counts.get(name, 0) for name, n in me.counts.items() if n != counts.get(name, 0)}
        if self.record is again:
            stretch.logged = {}
        me.counts.clear()
        me.counts.update(counts)
        me.model.zero_grad(set_to_none=True)
        trainer.stretches[shape] = stretch
        return stretch

    def _compiled(self, work: Work, trainer: Trainer, stretch: Stretch, shelf: Shelf, size: int) -> Step | None:
        """The compiled step of this pass, or None where it cannot be compiled."""
        assert self.compiler is not None
        noises, rows = list(stretch.noises[0]), trainer.order[1 : 1 + size]
        key = (_of_pass(work), size, tuple(noises))
        try:
            return self.compiler.step(key, work, trainer, noises, (inputs(shelf.x[rows], work.config), shelf.y[rows]))
        except Untraceable as why:
            self.tell(f"{work.each.name}{COMPILED}", str(why))
            return None

    def _most(self, work: Work, sizes: list[int]) -> int:
        """Steps of a stretch: a power of two, fewer where they are long or their images large.

        And fewer where there are few: the second launch of a recording takes far less time than its first.
        """
        size, repeats = sizes[0], max(1, sizes.count(sizes[0]) // REPEATS)
        dtype, shape = work.split.kind
        room = ROOM // (size * math.prod(shape) * dtype.itemsize * 5)  # as stored and as floats
        few = 4 if self.large else min(STEPS, 1 << (repeats.bit_length() - 1))
        return max(1, min(few, 1 << max(0, room.bit_length() - 1)))

    def _places(self) -> Addresses:
        """Where everything lies that a loss may read: a recording is of these addresses."""
        found = ((name, held[leaf]) for name, (_, held, leaf) in slots(self.me).items())
        return {name: (t.data_ptr(), t.shape, t.dtype) for name, t in found}

    def _hashable(self, work: Work) -> bool:
        try:
            known_already = _of_pass(work) in self.trainers
        except TypeError:
            return False
        return known_already or len(self.trainers) < PASSES

    def longest(self) -> dict[str, tuple[int, Callable[[], None]]]:
        """Of each pass its longest recording: its steps, and what replays it."""
        found: dict[str, tuple[int, Callable[[], None]]] = {}
        for trainer in self.trainers.values():
            for (count, _), stretch in trainer.stretches.items():
                if stretch.play is not None and count > found.get(trainer.name, (0,))[0]:
                    found[trainer.name] = (count, stretch.play)
        return found

    # --- evaluation --------------------------------------------------------------------------------------------------

    def look(
        self, examine: Examine, split: Split, config: Config, purpose: Purpose, tally: Tally
    ) -> Iterator[tuple[Mapping[str, Tensor], int]]:
        """Every batch of an evaluation, counted in `tally`; what is spread over images, and how many rows of it."""
        used: list[Glance] = []
        assert isinstance(split, Placed)
        key = (known(examine), tally.classes, split.kind)
        held, places = self.glances.get(key), {**self._places(), ("shelf", ""): split.shelf.x.data_ptr()}
        glances = held[1] if held is not None and _there(held[0], places) else {}
        self.glances[key] = (places, glances)
        for step, part in enumerate(parts(split)):
            if part.size not in glances:
                glances[part.size] = self._glance(examine, config, split, part, tally.classes)
            glance = glances[part.size]
            if glance.play is None:
                yield eagerly(examine, self.me.model, split, config, purpose, tally, step, part)
                continue
            if all(glance is not other for other in used):
                glance.tally.clear()
                used.append(glance)
            self._fill(glance, split, part, purpose, step)
            glance.play()
            yield glance.spreads, part.count
        for glance in used:
            assert glance.tally.values is not None
            tally.join(glance.tally.values, glance.tally.names)

    def _fill(self, glance: Glance, split: Placed, part: Part, purpose: Purpose, step: int) -> None:
        host = self.arena.take(2)
        host[0], host[1] = split.begin + part.begin, part.count
        glance.where.copy_(host, non_blocking=True)
        draw = keyed_draw(self.device, *purpose, step)
        for (name, shape), place in glance.noises.items():
            place.copy_(draw(name, *shape))

    def _glance(self, examine: Examine, config: Config, split: Placed, part: Part, classes: int) -> Glance:
        glance = Glance(torch.zeros(2, dtype=torch.int64, device=self.device), {}, Tally(classes))
        ahead, shelf = torch.arange(part.size, device=self.device), split.shelf
        glance.where.copy_(torch.tensor([split.begin + part.begin, part.count]))

        def draw(name: str, *shape: int) -> Tensor:
            if (name, shape) not in glance.noises:
                glance.noises[name, shape] = torch.rand(shape, device=self.device)
            return glance.noises[name, shape]

        def once() -> None:
            self.me.model.eval()
            first, count = glance.where
            rows = first + torch.minimum(ahead, count - 1)
            batch = (shelf.x.index_select(0, rows), shelf.y.index_select(0, rows), ahead < count)
            glance.spreads = look(examine, self.me.model, config, batch, draw, glance.tally).spreads

        try:
            with Watch(self.device):
                once()  # the counts' places are made here, before they are recorded
        except Waits as why:
            self.tell("evaluation", str(why))
            return glance
        glance.play = self.record(once)
        return glance


class _PutBack:
    """Within: what a trial step changes is put back afterwards."""

    def __init__(self, me: Me, trainer: Trainer) -> None:
        self.me, self.trainer = me, trainer

    def __enter__(self) -> None:
        held = (*self.me.sums.values(), *self.trainer.state(), self.trainer.order)
        self.tensors = [*everything(self.me).values(), *held]
        self.counts, self.copies = dict(self.me.counts), [tensor.clone() for tensor in self.tensors]

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        before = {id(tensor) for tensor in self.tensors}
        for tensor in (*self.me.sums.values(), *self.trainer.state()):
            if id(tensor) not in before:
                tensor.zero_()
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.copy_(copy)
        self.me.counts.clear()
        self.me.counts.update(self.counts)


def _there(recorded: Addresses, now: Addresses) -> bool:
    """Does all that was there when something was recorded lie where it lay? What came later it does not read.

    But a dict in scratch must hold what it held: a loss goes over all of it.
    """
    if recorded == now:
        return True
    groups = {group for group, _ in recorded if group not in ("model", "scratch", "shelf")}
    same = all(now.get(name) == address for name, address in recorded.items())
    return same and all(name in recorded for name in now if name[0] in groups)


class _Placed:
    """Noise of a stretch, at the places where it is written before each replay."""

    def __init__(self, places: Places, count: int, device: torch.device) -> None:
        self.places, self.count, self.device = places, count, device

    def at(self, i: int) -> Draw:
        def draw(name: str, *shape: int) -> Tensor:
            if (name, shape) not in self.places:
                self.places[name, shape] = torch.rand(self.count, *shape, device=self.device)
            return self.places[name, shape][i]

        return draw


@functools.lru_cache(maxsize=64)
def stretches(sizes: tuple[int, ...], most: int) -> list[tuple[int, int, int]]:
    """Batches of an epoch in stretches of equal ones: first step, steps (a power of two), batch.

    >>> stretches((4,) * 11 + (3,), 8)
    [(0, 8, 4), (8, 2, 4), (10, 1, 4), (11, 1, 3)]
    """
    step, found = 0, []
    for size, same in [(size, len(list(group))) for size, group in itertools.groupby(sizes)]:
        left = same
        while left:
            # A power of two that divides the first step: then the noise of a stretch lies in one block.
            count = min(most, 1 << (left.bit_length() - 1), step & -step or most)
            found.append((step, count, size))
            step, left = step + count, left - count
    return found


def _of_pass(work: Work) -> Hashable:
    """What a recording of a pass depends on, beside addresses: two passes with equal ones do the same."""
    each = work.each
    trains = None if each.trains is None else frozenset(each.trains)
    rules = tuple(sorted((k, v) for k, v in each.optimizer.items() if k != "lr"))
    loss, step = known(each.loss), None if each.step is None else known(each.step)
    return (each.name, loss, step, trains, rules, each.data, work.split.kind)


def known(function: Any) -> Hashable:
    """A function by what it is: a method by its object, a partial one by its arguments, a closure by what it holds."""
    if isinstance(function, functools.partial):
        settings = tuple(sorted(function.keywords.items()))
        return ("partial", known(function.func), tuple(known(a) for a in function.args), settings)
    if isinstance(function, types.MethodType):
        return ("method", id(function.__self__), function.__func__)
    if isinstance(function, types.FunctionType):
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        if held:
            return ("closure", function.__code__, tuple(known(each) for each in held))
    if isinstance(function, Tensor | nn.Module):
        return id(function)
    hash(function)
    return function  # type: ignore[no-any-return]
