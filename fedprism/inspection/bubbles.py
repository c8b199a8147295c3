"""The bubble plot: a circle per client and class whose area is the number of samples, as in FedCP's figures 7 to 11.

Matplotlib draws it (extra `report`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedprism.config import SPLITS
from fedprism.federation import Federation
from fedprism.report.canvas import PLAIN, checked_path, new_figure, plain_axes, shorten, write_figure

_WIDE, _TALL = 13.0, 13.0  # inches that many clients or classes are squeezed into
_NARROW = 3.2  # inches that few clients are spread over, so that the head has room
_PITCH = (0.44, 0.3)  # inches from client to client and from class to class, where there is room
_LINE = 0.155  # inches that a line of tick labels needs
_LETTER = 0.072  # inches
_LONGEST = 30  # letters of a name; longer names are cut
_ALPHA = 0.72  # circles may overlap
_SMALLEST = 1.1  # points across: one sample is seen, too


def counts(federation: Federation, part: str | None = None) -> NDArray[np.int64]:
    """Samples of each client and class, [clients, classes]: of train, validation and test, or of one part."""
    parts = SPLITS if part is None else (part,)
    each = [sum(client.class_counts(one) for one in parts) for client in federation.clients.values()]
    return np.stack([np.asarray(row) for row in each])


def bubbles(
    federation: Federation,
    path: str | Path,
    title: str | None = None,
    part: str | None = None,
    rows: str = "classes",
) -> Path:
    """The clients and classes of a federation as a PNG or SVG file; `part`: of train, validation or test alone.

    Where several clients share each of a few domains, domains have colours. `rows` is what classes are called.
    """
    path = checked_path(path)
    samples, inputs = counts(federation, part), "texts" if len(federation.shape) == 2 else "images"
    clients, classes = samples.shape
    across, up = min(max(_PITCH[0], _NARROW / clients), _WIDE / clients), min(_PITCH[1], _TALL / classes)
    domains = [client.domain for client in federation.clients.values()]
    colours = _colours(domains)

    names, labels = ([shorten(name, _LONGEST) for name in each] for each in (federation.names, federation.class_names))
    flat = max(map(len, names)) * _LETTER < across * 0.95
    every = 1 if flat else _every(clients, across)
    left = 0.5 + _LETTER * max(map(len, labels))
    bottom = 0.45 + (0.15 if flat else _LETTER * max(map(len, names[::every])))
    head = title or f"{federation.name}{'' if part is None else f', {part}'}: {samples.sum():,} {inputs}"
    largest = 72 * _diameter(across, up, samples)
    legend = _legend(largest, int(samples.max()), inputs, colours)
    widest = max(clients * across, _LETTER * 1.3 * len(head), sum(mark.width for mark in legend))
    width, height = left + widest + 0.2, bottom + classes * up + 0.95

    with new_figure(width, height) as canvas:
        axes = canvas.add_axes((left / width, bottom / height, clients * across / width, classes * up / height))
        plain_axes(axes, PLAIN)
        axes.grid(axis="both", color=PLAIN.grid, linewidth=0.6 if min(across, up) > 0.12 else 0.4)
        axes.set_xlim(-0.5, clients - 0.5)
        axes.set_ylim(-0.5, classes - 0.5)
        axes.set_xticks(range(0, clients, every), names[::every], rotation=0 if flat else 90, fontsize=8.5)
        line = _every(classes, up)
        axes.set_yticks(range(0, classes, line), labels[::line], fontsize=8.5)
        axes.set_xlabel(f"{clients} clients" if clients > 1 else "client", color=PLAIN.muted, fontsize=9.5)
        axes.set_ylabel(f"{classes} {rows}", color=PLAIN.muted, fontsize=9.5)

        client, label = samples.nonzero()
        area = np.maximum(largest**2 * samples[client, label] / samples.max(), _SMALLEST**2)
        shades = [colours.get(domains[one], PLAIN.series[0]) for one in client]
        axes.scatter(client, label, s=area, c=shades, alpha=_ALPHA, linewidths=0, clip_on=False, zorder=3)

        canvas.text(left / width, 1 - 0.24 / height, head, color=PLAIN.ink, fontsize=11, va="center")
        _draw_legend(canvas, legend, left, height - 0.6)
        return write_figure(canvas, path)


def _every(number: int, pitch: float) -> int:
    """The step between tick labels that leaves room for each: 1, 2, 5, 10, ...

    >>> _every(10, 0.3), _every(100, 0.1), _every(500, 0.026)
    (1, 2, 10)
    """
    steps = (base * 10**power for power in range(6) for base in (1, 2, 5))
    return int(next(step for step in steps if step * pitch >= _LINE or step >= number))


def _diameter(across: float, up: float, samples: NDArray[np.int64]) -> float:
    """Inches of the largest circle: as wide as its place, or wider where few places are taken. Rows never merge.

    >>> full, sparse = np.full((100, 10), 60), 60 * np.eye(100, dtype=int)
    >>> round(_diameter(0.13, 0.3, full), 2), round(_diameter(0.1, 0.3, sparse), 2), _diameter(0.44, 0.05, sparse)
    (0.12, 0.14, 0.05)
    """
    narrow = min(across, up)
    taken = float((samples / samples.max()).mean())  # in largest circles a place
    inked = (across * up / taken / np.pi) ** 0.5  # circles cover a quarter of the plot
    most = max(min((across * up) ** 0.5, 1.1 * narrow), min(0.14, 4 * narrow))
    return float(max(0.94 * narrow, min(inked, most, up)))


def _colours(domains: Sequence[str]) -> dict[str, str]:
    """A colour per domain, where each has several clients and there are no more domains than colours."""
    known = list(dict.fromkeys(domains))
    if not 1 < len(known) <= len(PLAIN.series) or len(known) == len(domains):
        return {}
    return dict(zip(known, PLAIN.series, strict=False))


def _round(value: float) -> int:
    """The largest of 1, 2, 5, 10, 20, ... that is not above the value.

    >>> [_round(value) for value in (1, 3.5, 99, 512)]
    [1, 2, 50, 500]
    """
    power = 10 ** int(np.floor(np.log10(value)))
    return int(max(base for base in (1, 2, 5) if base * power <= value) * power)


class _Mark(NamedTuple):
    """A circle of the legend, with its meaning beside it."""

    colour: str
    size: float  # points across
    text: str
    gap: float = 0.12  # inches behind it

    @property
    def width(self) -> float:
        return self.size / 72 + 0.06 + _LETTER * len(self.text) + self.gap


def _legend(largest: float, most: int, inputs: str, colours: Mapping[str, str]) -> list[_Mark]:
    """The circles of the legend: sizes, then colours."""
    shown = sorted({_round(max(most * share, 1)) for share in (1, 0.25, 0.0625)})
    sizes = [_Mark(PLAIN.muted, max(largest * (n / most) ** 0.5, _SMALLEST), f"{n:,}") for n in shown]
    unit = inputs if shown[-1] > 1 else inputs[:-1]
    sizes[-1] = sizes[-1]._replace(text=f"{sizes[-1].text} {unit}", gap=0.26)
    return sizes + [_Mark(colour, 6.0, shorten(domain, _LONGEST)) for domain, colour in colours.items()]


def _draw_legend(canvas: Any, marks: Sequence[_Mark], left: float, top: float) -> None:
    """The legend in a line under the title; positions are in inches."""
    from matplotlib.lines import Line2D

    width, height = canvas.get_size_inches()
    for mark in marks:
        look: dict[str, Any] = {"markersize": mark.size, "color": mark.colour, "alpha": _ALPHA, "markeredgewidth": 0}
        canvas.add_artist(Line2D([(left + mark.size / 144) / width], [top / height], marker="o", **look))
        place = (left + mark.size / 72 + 0.06) / width
        canvas.text(place, top / height, mark.text, color=PLAIN.muted, fontsize=8.5, va="center")
        left += mark.width
