"""Scores of a model on one part of a client's data: counts that any protocol can be computed from afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism.config import Config
from fedprism.engines.events import Score
from fedprism.engines.passes import SWEEP_BATCH, inputs, keyed_draw
from fedprism.federation import Split
from fedprism.methods.base import Draw, Seen

QUANTILES = (0, 5, 25, 50, 75, 95, 100)  # percent
MOST_VALUES = 2**22  # that quantiles are taken of; of more, every k-th image counts


@torch.no_grad()
def score(
    examine: Callable[[nn.Module, Tensor, Draw], Seen],
    model: nn.Module,
    split: Split,
    config: Config,
    classes: int,
    purpose: tuple[int | str, ...],
) -> Score:
    """Right, predicted and actual counts a class, the summed loss, and what the method shows of its inside."""
    model.eval()
    device, count = split.y.device, len(split)
    counts = torch.zeros(3, classes, dtype=torch.int64, device=device)
    sums: dict[str, Tensor] = {"loss": torch.zeros((), dtype=torch.float64, device=device)}
    spreads: dict[str, list[Tensor]] = {}
    for step, rows in enumerate(torch.split(torch.arange(count, device=device), SWEEP_BATCH)):
        y = split.y[rows]
        seen = examine(model, inputs(split.batch(rows), config), keyed_draw(device, *purpose, step))
        guess = seen.scores.argmax(dim=1)
        for row, labels in enumerate((y[guess == y], guess, y)):
            counts[row] += torch.bincount(labels, minlength=classes)
        sums["loss"] += cross_entropy(seen.scores, y, reduction="sum")
        for name, value in _sums(seen, y).items():
            sums[name] = sums[name] + value if name in sums else value
        for name, values in seen.spreads.items():
            every = -(-count * values[0].numel() // MOST_VALUES)
            spreads.setdefault(name, []).append(values[::every].flatten())
    right, predicted, actual = (tuple(row) for row in counts.tolist())
    totals = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))  # waits for the device once
    paths = {name.removeprefix("path "): int(total) for name, total in totals.items() if name.startswith("path ")}
    means = {name.removeprefix("mean "): total / count for name, total in totals.items() if name.startswith("mean ")}
    return Score(sum(right), count, totals["loss"], right, predicted, actual, paths, {**means, **_quantiles(spreads)})


def _sums(seen: Seen, y: Tensor) -> dict[str, Tensor]:
    """What is added up over batches: images that each path recognises, and each image's mean of each value."""
    paths = {f"path {name}": (scores.argmax(dim=1) == y).sum().double() for name, scores in seen.paths.items()}
    means = {f"mean {name}": v.reshape(len(v), -1).double().mean(dim=1).sum() for name, v in seen.means.items()}
    return {**paths, **means}


def _quantiles(spreads: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """`name/q05` and so on: the value that has so many percent of all values below it."""
    found: dict[str, float] = {}
    for name, parts in spreads.items():
        values = torch.cat(parts).sort().values
        places = torch.tensor([round(q / 100 * (len(values) - 1)) for q in QUANTILES], device=values.device)
        names = [f"{name}/q{q:02d}" for q in QUANTILES]
        found |= dict(zip(names, values[places].tolist(), strict=True))
    return found
