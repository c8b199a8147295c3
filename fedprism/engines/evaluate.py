"""Scores of a model on one part of a client's data: counts that any protocol can be computed from afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedprism.config import Config
from fedprism.engines.events import Score
from fedprism.engines.noise import keyed_draw
from fedprism.engines.passes import inputs, precision, sweep_batch
from fedprism.federation import Split
from fedprism.methods.base import Draw, Me, Net, Seen

QUANTILES = (0, 5, 25, 50, 75, 95, 100)  # percent
MOST_VALUES = 2**22  # that quantiles are taken of; of more, every k-th image counts
LEAST_ROWS = 16  # of a padded batch on a GPU

T = TypeVar("T")
Examine = Callable[[Net, Tensor, Draw], Seen]
Purpose = tuple[int | str, ...]
Turns = Generator[None, None, T]  # work in parts, between which an engine may do something else; its value at the end


def finish(turns: Turns[T]) -> T:
    """All parts, one after the other."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            value: T = end.value
            return value


class Figures:
    """Numbers on the device that are to be read together, so that whoever wants them waits once."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.count = 0

    def add(self, values: Tensor) -> slice:
        """Note some values, which nobody changes any more; where they will be found among all of them."""
        self.parts.append(values.detach().flatten())
        self.count += values.numel()
        return slice(self.count - values.numel(), self.count)

    def tensor(self) -> Tensor:
        """All of them."""
        if len(self.parts) == 1:
            return self.parts[0].double()
        return torch.cat(self.parts).double() if self.parts else torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class Launched(Generic[T]):
    """An answer whose numbers are still on their way: `read` makes it of them."""

    figures: Tensor  # float64 [numbers]
    read: Callable[[Sequence[float], Sequence[float]], T]  # of the numbers, and of an end of each of `floats`
    floats: Sequence[Tensor] = ()

    def result(self) -> T:
        return self.read(self.figures.tolist(), ends(self.floats).tolist())


@torch.no_grad()
def ends(floats: Sequence[Tensor]) -> Tensor:
    """A number of each tensor (none of them empty) that is not finite if one of its values is not."""
    if not floats:
        return torch.empty(0, dtype=torch.float64)
    if floats[0].device.type == "cuda":  # all of them in a few kernels
        return torch.stack(torch._foreach_norm([each.detach() for each in floats], math.inf)).double()
    # The smallest and the largest value in one pass: both are NaN if any value is.
    pairs = (torch.aminmax(each.detach()) for each in floats)
    return torch.stack([low.double() / 2 + high.double() / 2 for low, high in pairs])


class Tally:
    """What is added up over the batches of one part of the data, without waiting for the device."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.names: list[str] = []  # of what is summed beside the counts
        self.values: Tensor | None = None  # float64: right, predicted, actual images of each class; then the sums

    def add(self, seen: Seen, y: Tensor, valid: Tensor) -> None:
        """Count a batch; rows that are not valid only fill it up."""
        labels = torch.arange(self.classes, device=y.device)
        actual = (y.unsqueeze(1) == labels) & valid.unsqueeze(1)
        guess = (seen.scores.argmax(dim=1).unsqueeze(1) == labels) & valid.unsqueeze(1)
        scores = seen.scores if seen.scores.dtype != torch.bfloat16 else seen.scores.float()
        found = {"loss": cross_entropy(scores, y, reduction="none")}
        found |= {f"path {name}": each.argmax(dim=1) == y for name, each in seen.paths.items()}
        found |= {f"mean {name}": v.reshape(len(v), -1).double().mean(dim=1) for name, v in seen.means.items()}
        counts = torch.stack([actual & guess, guess, actual]).sum(1).flatten()
        sums = torch.where(valid, torch.stack([values.double() for values in found.values()]), 0).sum(1)
        self.join(torch.cat([counts, sums]), list(found))

    def join(self, values: Tensor, names: list[str]) -> None:
        """Add what was counted elsewhere."""
        if self.values is None:
            self.names, self.values = names, values.to(torch.float64, copy=True)
        else:
            self.values.add_(values)

    def clear(self) -> None:
        if self.values is not None:
            self.values.zero_()


@dataclass(frozen=True)
class Part:
    """Some rows of the data: where they begin, how many there are, and to how many they are filled up."""

    begin: int
    count: int
    size: int


def parts(split: Split) -> Iterator[Part]:
    """The batches of an evaluation; on a GPU of few different sizes, so that a captured one serves many clients."""
    most, padded = sweep_batch(split.y.device, split.kind), split.y.device.type == "cuda"
    for begin in range(0, len(split), most):
        count = min(most, len(split) - begin)
        yield Part(begin, count, _padded(count) if padded else count)


def _padded(count: int) -> int:
    """At least so many rows: one of four sizes between a power of two and the next.

    >>> [_padded(count) for count in (3, 65, 150, 750, 1024)]
    [16, 80, 160, 768, 1024]
    """
    step = max(LEAST_ROWS, (1 << math.ceil(math.log2(count))) // 8)
    return -(-count // step) * step


def look(
    examine: Examine, model: Net, config: Config, batch: tuple[Tensor, Tensor, Tensor], draw: Draw, tally: Tally
) -> Seen:
    """One batch of images, labels and which of them count: seen and counted."""
    with precision(config, batch[0].device):
        seen = examine(model, inputs(batch[0], config), draw)
    tally.add(seen, batch[1], batch[2])
    return seen


@torch.no_grad()
def score(
    examine: Examine, me: Me, split: Split, config: Config, classes: int, purpose: Purpose, into: Figures
) -> Callable[[Sequence[float]], Score]:
    """Right, predicted and actual counts a class, the summed loss, and what the method shows of its inside.

    What is found is noted in `into`; the function makes a `Score` of all its numbers.
    """
    count = len(split)
    tally = Tally(classes)
    spreads: dict[str, list[Tensor]] = {}
    looked = (
        me.replay.look(examine, split, config, purpose, tally)
        if me.replay is not None
        else (
            eagerly(examine, me.model, split, config, purpose, tally, step, part)
            for step, part in enumerate(parts(split))
        )
    )
    for seen, rows in looked:
        for name, values in seen.items():
            every = -(-count * values[0].numel() // MOST_VALUES)
            spreads.setdefault(name, []).append(values[:rows:every].flatten().clone())
    assert tally.values is not None
    counted, names = into.add(tally.values), tally.names
    spread = {name: into.add(_quantiles(values)) for name, values in spreads.items()}

    def read(values: Sequence[float]) -> Score:
        found = values[counted]
        right, predicted, actual = (tuple(map(int, found[i * classes : (i + 1) * classes])) for i in range(3))
        totals = dict(zip(names, found[3 * classes :], strict=True))
        paths = {name.removeprefix("path "): int(total) for name, total in totals.items() if name.startswith("path ")}
        inside = {n.removeprefix("mean "): total / count for n, total in totals.items() if n.startswith("mean ")}
        for name, place in spread.items():
            inside |= dict(zip((f"{name}/q{q:02d}" for q in QUANTILES), values[place], strict=True))
        return Score(sum(right), count, totals["loss"], right, predicted, actual, paths, inside)

    return read


def eagerly(
    examine: Examine,
    model: Net,
    split: Split,
    config: Config,
    purpose: Purpose,
    tally: Tally,
    step: int,
    part: Part,
) -> tuple[Mapping[str, Tensor], int]:
    """One batch, filled up with its last row; what is spread over images, and how many rows of it count."""
    model.eval()
    device = split.y.device
    rows = torch.arange(part.begin, part.begin + part.size, device=device)
    valid = rows < part.begin + part.count
    rows = rows.clamp(max=part.begin + part.count - 1)
    batch = (split.batch(rows), split.y[rows], valid)
    return look(examine, model, config, batch, keyed_draw(device, *purpose, step), tally).spreads, part.count


def _quantiles(parts: list[Tensor]) -> Tensor:
    """The values that have so many percent of all values below them."""
    values = torch.cat(parts).sort().values
    return torch.stack([values[round(q / 100 * (len(values) - 1))] for q in QUANTILES])
