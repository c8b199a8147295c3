"""Figures from records, drawn with matplotlib (extra `report`): accuracy over rounds, each client's gain, and the
diagnostics that methods report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedprism.config import LOCAL
from fedprism.errors import FedprismError
from fedprism.records import Protocol, RunRecord
from fedprism.records.protocol import of_path
from fedprism.records.standing import Standing
from fedprism.report.canvas import (
    PLAIN,
    STAND_INS,
    Theme,
    checked_path,
    inline_svg,
    new_figure,
    plain_axes,
    shorten,
    write_figure,
)
from fedprism.report.diagnostics import WHOLE, Courses, diagnostics_of, families
from fedprism.report.table import MANY, Row, Table, grouped, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = ((0, ()), (0, (5, 1.5)), (0, (1.5, 1.2)))  # beyond six methods, the same colours with another dash
_NAMED = 40  # more clients than this are drawn without names
_BARS = 400  # in a panel, at most
_ACROSS, _TALL = 2, 3.05  # panels in a row, and their height in inches
_CROWD, _SMALL = 12, 1.6  # more methods than this have a small panel each; its height in inches


@dataclass(frozen=True)
class Curve:
    """One line: a value over rounds, mean over seeds. An accuracy is a share, 0 to 1."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]  # over seeds; zeros where there is one; empty: no band


def curves(records: Sequence[RunRecord], protocol: Protocol) -> dict[str, Curve]:
    """A curve per row of the table, at the protocol's moment: the mean test accuracy over clients."""
    found = {
        label: _over_seeds([_course(record, protocol) for record in group]) for label, group in grouped(records).items()
    }
    return {label: curve for label, curve in found.items() if curve.rounds}


def _over_seeds(runs: Sequence[Mapping[int, float]]) -> Curve:
    """The rounds that all runs have."""
    rounds = sorted(set[int]().union(*runs).intersection(*runs))
    values = [[run[round] for run in runs] for round in rounds]
    spread = tuple(stdev(v) if len(v) > 1 else 0.0 for v in values)
    return Curve(tuple(rounds), tuple(map(fmean, values)), spread)


def _course(record: RunRecord, protocol: Protocol) -> dict[int, float]:
    standing, course = Standing(protocol.moment or record.moment, "test"), {}
    for each in of_path(record, protocol).rounds:
        if standing.add(each) and standing.tested:
            course[each.round] = float(standing.exact_mean(protocol.mean))
    return course


@dataclass(frozen=True)
class Panel:
    """One value that a method reports: lines over rounds, or a box per client."""

    title: str
    lines: Mapping[str, Curve] = field(default_factory=dict)  # by branch or client
    boxes: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # client -> percent -> quantile
    percent: bool = False  # the lines are accuracies of branches


def panels(group: Sequence[RunRecord]) -> list[Panel]:
    """What one method reports: accuracy of its branches, then a panel per value, of the first clients."""
    reported, clients = [diagnostics_of(record) for record in group], group[0].clients[:MANY]

    def lines(courses: Sequence[Courses], name: str) -> dict[str, Curve]:
        of = [each.get(name, {}) for each in courses]
        found = {client: _over_seeds([run[client] for run in of if client in run]) for client in clients}
        return {client: replace(curve, deviation=()) for client, curve in found.items() if curve.rounds}

    branches: dict[str, Curve] = {}
    for branch in dict.fromkeys(name for each in reported for name in each.means):
        curve = _over_seeds([each.means[branch] for each in reported if branch in each.means])
        branches |= {branch: curve} if curve.rounds else {}
    plain, quantiles = families(dict.fromkeys(name for each in reported for name in each.values))
    logs = dict.fromkeys(name for each in reported for name in each.logs)
    result = [Panel("accuracy of each part by itself", branches, percent=True)]
    result += [Panel(name, lines([each.values for each in reported], name)) for name in plain]
    for family, names in quantiles.items():
        boxes: dict[str, dict[int, float]] = {client: {} for client in clients}
        for client, (percent, name) in product(clients, names.items()):
            ends = [each.values.get(name, {}).get(client, {}).get(each.last) for each in reported]
            if values := [end for end in ends if end is not None]:
                boxes[client][percent] = fmean(values)
        result.append(Panel(f"{family}, last round", boxes=boxes))
    result += [Panel(f"{name}, in training", lines([each.logs for each in reported], name)) for name in logs]
    return [panel for panel in result if panel.lines or panel.boxes]


# --- figures for the page --------------------------------------------------------------------------------------------


def curves_svg(records: Sequence[RunRecord], protocol: Protocol, width: float = 9.2) -> str:
    """Accuracy over rounds as inline SVG."""
    lines = curves(records, protocol)
    with new_figure(width, _height(lines, 4, 4.3)) as figure:
        if crowded(lines):
            _draw_crowd(figure, lines, STAND_INS, (0.05, 0.0, 1.0, 1.0), 4)
        else:
            _draw_curves(figure.add_axes((0.06, 0.12, 0.76, 0.85)), lines, STAND_INS)
        return inline_svg(figure, "curves", "Test accuracy over rounds, a line per method; the table has the figures.")


def gains_svg(result: Table, width: float = 9.2) -> str:
    """Every client's gain over training alone as inline SVG; empty where training alone was not run."""
    rows = _gaining(result)
    if not rows:
        return ""
    across = _across(rows)
    down = -(-len(rows) // across)
    names = len(result.clients) <= _NAMED
    each = 0.62 + (0.25 * len(result.clients) if names else 2.2)
    with new_figure(width, each * down) as figure:
        _draw_gains(figure, rows, result.clients, STAND_INS, (0.1 if names else 0.02, 0.0, 0.99, 1.0), across)
        return inline_svg(figure, "gains", "Points of each client above training alone, a panel per method.")


def diagnostics_svg(group: Sequence[RunRecord], name: str, label: str, width: float = 9.2) -> str:
    """What one method reports of its inside as inline SVG, a panel per value; empty where it reports nothing."""
    shown = panels(group)
    if not shown:
        return ""
    with new_figure(width, _TALL * _rows(shown)) as canvas:
        _draw_panels(canvas, shown, STAND_INS, width)
        return inline_svg(canvas, name, escape(label))


def diagnostics_figure(shown: Sequence[Panel], path: str | Path, width: float = 9.2) -> Path:
    """Chosen panels, as `panels` gives them, as a PNG or SVG file."""
    path = checked_path(path)
    if not shown:
        raise FedprismError(f"there is nothing to draw in {path}: no panel was given.")
    with new_figure(width, _TALL * _rows(shown)) as canvas:
        _draw_panels(canvas, shown, PLAIN, width)
        return write_figure(canvas, path)


def overview_figure(records: Sequence[RunRecord], path: str | Path, protocol: Protocol | str | None = None) -> Path:
    """Curves and gains side by side as a PNG or SVG file, for a README or a slide."""
    path = checked_path(path)
    result = table(records, protocol)
    rows, lines = _gaining(result), curves(records, result.protocol)
    across = 3 if rows else 6  # small panels
    high = _height(lines, across, 4.4)
    top = 1 - 0.44 / high
    with new_figure(13.0, high) as canvas:
        if crowded(lines):
            _draw_crowd(canvas, lines, PLAIN, (0.04, 0.0, 0.47 if rows else 1.0, top), across)
        else:
            _draw_curves(canvas.add_axes((0.04, 0.12, 0.36 if rows else 0.84, 0.77)), lines, PLAIN)
        words: dict[str, Any] = {"color": PLAIN.ink, "fontsize": 11, "va": "center"}
        canvas.text(0.04, 1 - 0.24 / high, "Test accuracy, mean over clients", **words)
        if rows:
            canvas.text(0.505, 1 - 0.24 / high, "Gain over training alone, by client", **words)
            _draw_gains(canvas, rows, result.clients, PLAIN, (0.56, 0.0, 0.995, top), _across(rows))
        return write_figure(canvas, path)


# --- drawing ---------------------------------------------------------------------------------------------------------


def _rows(shown: Sequence[Panel]) -> int:
    return -(-len(shown) // _ACROSS)


def _draw_panels(canvas: Any, shown: Sequence[Panel], theme: Theme, width: float) -> None:
    left, right, down, wide = 0.6, 1.42, _rows(shown), width / _ACROSS  # a panel's margins and width in inches
    for place, panel in enumerate(shown):
        x, y = place % _ACROSS * wide, (down - 1 - place // _ACROSS) * _TALL
        start, end = (x + right, x + wide - 0.2) if panel.boxes else (x + left, x + wide - right)
        box = (start / width, (y + 0.5) / _TALL / down, (end - start) / width, 2.1 / _TALL / down)
        axes, top = canvas.add_axes(box), (y + _TALL - 0.1) / _TALL / down
        canvas.text((x + 0.02) / width, top, panel.title, color=theme.ink, fontsize=9.5, va="center")
        if panel.boxes:
            _draw_boxes(axes, panel.boxes, theme)
        else:
            _draw_curves(axes, panel.lines, theme, panel.percent, 11 if panel.percent else 15)


def _draw_curves(axes: Axes, lines: Mapping[str, Curve], theme: Theme, percent: bool = True, letters: int = 99) -> None:
    """A line per method (or branch, or client) with its name, and an accuracy's last value, at its right end."""
    from matplotlib.ticker import MaxNLocator

    styles, faint = _styles(list(lines), theme), 0.14 if len(lines) <= 7 else 0.06
    scale = 100 if percent else 1
    for label, curve in lines.items():
        colour, dash, width = styles[label]
        points, dot = [scale * value for value in curve.mean], "o" if len(curve.rounds) == 1 else ""
        line: dict[str, Any] = {"color": colour, "linestyle": dash, "linewidth": width, "solid_capstyle": "round"}
        axes.plot(curve.rounds, points, zorder=3, marker=dot, markersize=4, clip_on=not dot, **line)
        if any(curve.deviation):
            low = [scale * (m - d) for m, d in zip(curve.mean, curve.deviation, strict=True)]
            high = [scale * (m + d) for m, d in zip(curve.mean, curve.deviation, strict=True)]
            axes.fill_between(curve.rounds, low, high, color=colour, alpha=faint, linewidth=0, zorder=2)
    last = max((curve.rounds[-1] for curve in lines.values()), default=1)
    axes.set_xlim(0, max(last, 1))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    plain_axes(axes, theme)
    axes.set_xlabel("round", color=theme.muted, fontsize=9.5)
    if percent:
        top = 100 * max((max(curve.mean) for curve in lines.values()), default=1.0)
        axes.set_ylim(0, min(100.0, 5 * (top // 5 + 2)))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
        axes.yaxis.set_major_formatter("{x:.0f} %")
    else:
        axes.margins(y=0.08)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.get_offset_text().set(color=theme.muted, fontsize=8.5)  # 1e−7 above the axis
    inches = axes.get_window_extent().height / axes.figure.dpi
    gap = (axes.get_ylim()[1] - axes.get_ylim()[0]) * 0.17 / inches  # a line of text, in units of the axis
    ends = {label: scale * curve.mean[-1] for label, curve in lines.items()}
    for label, place in _apart(ends, gap, axes.get_ylim()).items():
        at, colour = lines[label].rounds[-1], styles[label][0]
        axes.annotate(
            shorten(label, letters) + (f"  {ends[label]:.1f}" if percent else ""),
            xy=(at, ends[label]),
            xytext=(last * 1.025 + 0.01, place),
            color=colour,
            fontsize=9.5,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "relpos": (0, 0.5)},
        )


def crowded(lines: Mapping[str, Curve]) -> bool:
    """Whether there are too many lines for one panel."""
    return len(lines) > _CROWD


def _height(lines: Mapping[str, Curve], across: int, one: float) -> float:
    """The height of a figure of curves in inches: `one` as long as they share a panel."""
    return _SMALL * -(-len(lines) // across) if crowded(lines) else one


def _draw_crowd(
    figure: Any, lines: Mapping[str, Curve], theme: Theme, box: tuple[float, float, float, float], across: int
) -> None:
    """A small panel per method: its line, training alone (dashed), and the one that ends best (grey)."""
    from matplotlib.ticker import MaxNLocator

    best = max(lines, key=lambda label: lines[label].mean[-1])
    last = max(curve.rounds[-1] for curve in lines.values())
    left, bottom, right, top = box
    down = -(-len(lines) // across)
    wide, tall = (right - left) / across, (top - bottom) / down
    for place, (label, curve) in enumerate(lines.items()):
        row, column = divmod(place, across)
        inside = (left + column * wide, top - (row + 0.86) * tall, 0.92 * wide, 0.68 * tall)
        axes = figure.add_axes(inside)
        for other, colour, dash in ((best, theme.muted, "-"), (LOCAL, theme.ink, (0, (4, 2)))):
            if other in lines and other != label:
                points = [100 * value for value in lines[other].mean]
                axes.plot(lines[other].rounds, points, color=colour, linestyle=dash, linewidth=0.9, zorder=3)
        mine = theme.ink if label == LOCAL else theme.series[0]
        points = [100 * value for value in curve.mean]
        axes.plot(curve.rounds, points, color=mine, linewidth=1.8, zorder=4)
        low, high = ([p + 100 * sign * d for p, d in zip(points, curve.deviation, strict=True)] for sign in (-1, 1))
        axes.fill_between(curve.rounds, low, high, color=mine, alpha=0.14, linewidth=0, zorder=2)
        axes.set_xlim(0, max(last, 1))
        axes.set_ylim(0, 100)
        plain_axes(axes, theme)
        axes.tick_params(labelsize=8.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        axes.set_yticks([0, 50, 100], ["0", "50", "100 %"] if column == 0 else [])
        axes.set_title(f"{shorten(label, 26)}  {points[-1]:.1f}", loc="left", color=mine, fontsize=9.5, pad=4)


def _draw_boxes(axes: Axes, boxes: Mapping[str, Mapping[int, float]], theme: Theme) -> None:
    """A row per client: a box of the middle half with the median, a line from 5 to 95 percent, a thin one for all."""
    styles = _styles(list(boxes), theme)
    for height, (client, at) in enumerate(boxes.items()):
        colour = styles[client][0]
        for low, high, width in ((0, 100, 0.8), (5, 95, 1.8)):
            if low in at and high in at:
                axes.hlines(height, at[low], at[high], color=colour, linewidth=width, zorder=2)
        if 25 in at and 75 in at:
            axes.barh(
                height, at[75] - at[25], left=at[25], height=0.56, color=colour, alpha=0.55, linewidth=0, zorder=3
            )
        if 50 in at:
            axes.vlines(at[50], height - 0.34, height + 0.34, color=theme.ink, linewidth=1.6, zorder=4)
    plain_axes(axes, theme)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=theme.grid, linewidth=0.8)
    axes.set_ylim(max(len(boxes), 3) - 0.4, -0.6)
    axes.set_yticks(range(len(boxes)), [shorten(client) for client in boxes])
    axes.tick_params(axis="y", labelcolor=theme.ink)


def _draw_gains(
    figure: Any, rows: Sequence[Row], clients: Sequence[str], theme: Theme, box: tuple[float, ...], across: int
) -> None:
    """A panel per method, a bar per client. Its length is the points above (or below) training alone."""
    names = len(clients) <= _NAMED
    values = [100 * gain.mean for row in rows for gain in row.gains.values()]
    left, bottom, right, top = box
    down = -(-len(rows) // across)
    wide, tall = (right - left) / across, (top - bottom) / down
    inches = figure.get_size_inches()[1] * tall
    low, high = _room(values, 0.48 / (figure.get_size_inches()[0] * wide * 0.95))
    for place, row in enumerate(rows):
        line, column = divmod(place, across)
        head = 0.36 / inches
        axes = figure.add_axes(
            (left + column * wide, top - (line + 1) * tall + 0.08 * tall, wide * 0.95, tall * (0.92 - head))
        )
        shown = list(clients) if names else sorted(row.gains, key=lambda c: row.gains[c].mean, reverse=True)
        shown = shown[:: every_bar(len(shown))]
        for height, client in enumerate(shown):
            gain = row.gains.get(client)
            if gain is None:
                continue
            points = 100 * gain.mean
            colour = theme.series[0] if points >= 0 else theme.series[1]
            axes.barh(height, points, height=0.62 if names else 1.0, color=colour, linewidth=0)
            if names:
                text = f"{points:+.1f}".replace("-", "−") if round(points, 1) else "0.0"
                side = 1 if points >= 0 else -1
                axes.annotate(
                    text,
                    (points, height),
                    xytext=(3 * side, 0),
                    textcoords="offset points",
                    va="center",
                    ha="left" if side > 0 else "right",
                    fontsize=8.5,
                    color=theme.muted,
                )
        axes.axvline(0, color=theme.muted, linewidth=0.9)
        axes.set_xlim(low, high)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center", "fontsize": 9.5, "color": theme.ink}
        axes.annotate(row.label, (0, 1), xycoords=("data", "axes fraction"), **above)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.set_facecolor("none")
        axes.set_xticks([])
        first = column == 0 and names
        axes.set_yticks(range(len(shown)) if first else [], list(shown) if first else [])
        axes.tick_params(length=0, labelsize=9.5, colors=theme.ink)


def every_bar(clients: int) -> int:
    """The step between the clients that have a bar, so that a panel does not have too many.

    >>> every_bar(400), every_bar(401), every_bar(10_000)
    (1, 2, 25)
    """
    return max(1, -(-clients // _BARS))


def _room(values: Sequence[float], text: float) -> tuple[float, float]:
    """Limits of an axis with room for a number beside the bars; `text` is the share of the width that it needs.

    >>> _room([6.0, 2.0], 0.25)
    (0.0, 8.0)
    """
    low, high = min(0.0, *values), max(0.0, *values)
    sides = (low < 0) + (high > 0)
    beside = text * ((high - low) or 1.0) / (1 - min(sides * text, 0.8))
    return low - beside * (low < 0), high + beside * (high > 0 or low == 0)


def _styles(labels: Sequence[str], theme: Theme) -> dict[str, tuple[str, Any, float]]:
    """Colour, dash and width of each line. Training alone (dashed) and a whole model have the colour of the text."""
    inked = {LOCAL: (theme.ink, (0, (4, 2)), 1.6), WHOLE: (theme.ink, _DASHES[0], 2.0)}
    styles: dict[str, tuple[str, Any, float]] = {}
    for label in labels:
        if label in inked:
            styles[label] = inked[label]
        else:
            turn, place = divmod(len(styles.keys() - inked.keys()), len(theme.series))
            styles[label] = (theme.series[place], _DASHES[turn % len(_DASHES)], 2.0)
    return styles


def _apart(ends: Mapping[str, float], gap: float, limits: tuple[float, float]) -> dict[str, float]:
    """Heights of labels, at least `gap` apart and as near as possible to where the lines end.

    >>> _apart({"a": 10.0, "b": 10.5, "c": 50.0}, 2.0, (0, 100))
    {'a': 9.25, 'b': 11.25, 'c': 50.0}
    """
    blocks: list[tuple[float, list[str]]] = []  # centre, labels from below
    for label in sorted(ends, key=lambda name: ends[name]):
        blocks.append((ends[label], [label]))
        while len(blocks) > 1 and _bottom(blocks[-1], gap) < _top(blocks[-2], gap):
            _, upper = blocks.pop()
            _, lower = blocks.pop()
            joined = [*lower, *upper]
            blocks.append((fmean(ends[name] for name in joined), joined))
    places: dict[str, float] = {}
    for centre, labels in blocks:
        half = gap * (len(labels) - 1) / 2
        centre = min(max(centre, limits[0] + half), max(limits[1] - half, limits[0] + half))
        places |= {label: centre - half + gap * i for i, label in enumerate(labels)}
    return {label: places[label] for label in ends}


def _bottom(block: tuple[float, list[str]], gap: float) -> float:
    return block[0] - gap * len(block[1]) / 2


def _top(block: tuple[float, list[str]], gap: float) -> float:
    return block[0] + gap * len(block[1]) / 2


def _across(rows: Sequence[Row]) -> int:
    """Panels side by side."""
    return min(len(rows), 3 if len(rows) in (5, 6, 9) else 4)


def _gaining(result: Table) -> list[Row]:
    return [row for row in result.rows if row.gains and row.method != LOCAL]
