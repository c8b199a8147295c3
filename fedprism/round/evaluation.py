"""Testing a model on one part of a client's data: counts and sums, from which any protocol can be computed later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedprism.config import Config
from fedprism.federation import Split
from fedprism.methods.base import Client, Draw, Net, Output
from fedprism.round.events import Score
from fedprism.round.noise import keyed_draw
from fedprism.round.training import Operations, model_inputs, precision

QUANTILES = (0, 5, 25, 50, 75, 95, 100)  # percent
MOST_VALUES = 2**22  # that quantiles are taken of; of more, every k-th image counts

Forward = Callable[[Net, Tensor, Draw], Output]
Purpose = tuple[int | str, ...]


@dataclass(frozen=True)
class Evaluation:
    """How a model is tested."""

    forward: Forward
    config: Config
    classes: int
    purpose: Purpose  # key of the noise of its predictions
    operations: Operations


@dataclass
class Tally:
    """What is added up over the batches of one part of the data. Nothing is read before `score`."""

    classes: int
    images: int = 0
    names: list[str] = field(default_factory=list)  # of the sums
    values: Tensor | None = None  # float64: right, predicted and actual images of each class; then the sums
    quantiles: dict[str, Tensor] = field(default_factory=dict)  # name -> float64 [QUANTILES]

    def add(self, output: Output, y: Tensor, valid: Tensor) -> None:
        """Count a batch. Rows that are not valid only fill it up."""
        labels = torch.arange(self.classes, device=y.device)
        actual = (y.unsqueeze(1) == labels) & valid.unsqueeze(1)
        guess = (output.scores.argmax(dim=1).unsqueeze(1) == labels) & valid.unsqueeze(1)
        scores = output.scores if output.scores.dtype != torch.bfloat16 else output.scores.float()
        found = {"loss": cross_entropy(scores, y, reduction="none")}
        found |= {f"branch {name}": branch.argmax(dim=1) == y for name, branch in output.branches.items()}
        found |= {f"mean {name}": v.reshape(len(v), -1).double().mean(dim=1) for name, v in output.means.items()}
        counts = torch.stack([actual & guess, guess, actual]).sum(1).flatten()
        sums = torch.where(valid, torch.stack([values.double() for values in found.values()]), 0).sum(1)
        self.join(torch.cat([counts, sums]), list(found))

    def join(self, values: Tensor, names: list[str]) -> None:
        """Add what was counted elsewhere."""
        if self.values is None:
            self.names, self.values = names, values.to(torch.float64, copy=True)
        else:
            self.values.add_(values)

    def score(self) -> Score:
        """The numbers, read."""
        assert self.values is not None
        found, classes = self.values.tolist(), self.classes
        right, predicted, actual = (tuple(map(int, found[i * classes : (i + 1) * classes])) for i in range(3))
        sums = dict(zip(self.names, found[3 * classes :], strict=True))
        branches = {n.removeprefix("branch "): int(v) for n, v in sums.items() if n.startswith("branch ")}
        diagnostics = {n.removeprefix("mean "): v / self.images for n, v in sums.items() if n.startswith("mean ")}
        for name, values in self.quantiles.items():
            diagnostics |= dict(zip((f"{name}/q{q:02d}" for q in QUANTILES), values.tolist(), strict=True))
        return Score(sum(right), self.images, sums["loss"], right, predicted, actual, branches, diagnostics)


@dataclass(frozen=True)
class Batch:
    """Rows of an evaluation: the first, how many there are, and to how many they are filled up."""

    begin: int
    count: int
    size: int


def batches(split: Split, operations: Operations) -> Iterator[Batch]:
    """All rows, in batches."""
    most = operations.rows_at_once(split)
    for begin in range(0, len(split), most):
        count = min(most, len(split) - begin)
        yield Batch(begin, count, operations.padded(count))


@torch.no_grad()
def score_split(test: Evaluation, client: Client, split: Split) -> Tally:
    """Test the client's model on a part of its data."""
    tally, samples = Tally(test.classes, len(split)), Samples(len(split))
    for step, batch in enumerate(batches(split, test.operations)):
        output = score_batch(test, client.model, split, step, batch, tally)
        samples.add(output.quantiles, batch.count)
    tally.quantiles = samples.quantiles()
    return tally


def score_batch(test: Evaluation, model: Net, split: Split, step: int, batch: Batch, tally: Tally) -> Output:
    """Test one batch, filled up with its last row, and count it."""
    model.eval()
    rows = split.numbers(batch.begin, batch.begin + batch.size)
    valid = rows < batch.begin + batch.count
    rows = rows.clamp(max=batch.begin + batch.count - 1)
    x, y = split.batch(rows), split.y[rows]
    return count_batch(test, model, x, y, valid, keyed_draw(y, *test.purpose, step), tally)


def count_batch(test: Evaluation, model: Net, x: Tensor, y: Tensor, valid: Tensor, draw: Draw, tally: Tally) -> Output:
    """One batch of images through the model, and into the tally."""
    with precision(test.config, x):
        output = test.forward(model, model_inputs(x, test.config), draw)
    tally.add(output, y, valid)
    return output


class Samples:
    """Values of which quantiles are recorded, collected over the batches of `count` images."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.values: dict[str, list[Tensor]] = {}

    def add(self, batch: Mapping[str, Tensor], rows: int) -> None:
        """The first `rows` of a batch; of many values, every k-th image."""
        for name, values in batch.items():
            every = -(-self.count * values[0].numel() // MOST_VALUES)
            self.values.setdefault(name, []).append(values[:rows:every].flatten().clone())

    def quantiles(self) -> dict[str, Tensor]:
        """Of each name, the values that this many percent of all values lie below."""
        found = {}
        for name, parts in self.values.items():
            values = torch.cat(parts).sort().values
            places = [round(q / 100 * (len(values) - 1)) for q in QUANTILES]
            found[name] = torch.stack([values[place] for place in places]).double()
        return found
