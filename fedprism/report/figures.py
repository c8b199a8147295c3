"""Figures from records, drawn with matplotlib (extra `report`): accuracy over rounds, and each client's gain.

A figure for the page is an SVG whose colours are CSS variables, so that it follows the page into the dark; a figure for
a file has the colours of the light theme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedprism.errors import FedprismError
from fedprism.records import Protocol, RunRecord, atomic
from fedprism.records.standing import Standing, mean
from fedprism.report.table import LOCAL, Row, Table, grouped, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which stay apart for the colour-blind, and lighter ones of the same hues for a dark ground.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b0528c", "#b07d00", "#3a9bd5")
DARK = ("#5aaee8", "#f58a4b", "#35c79d", "#e69ac6", "#f0b93f", "#a5daf7")
INKS = {"ink": ("#1c2024", "#e8eaed"), "muted": ("#5f6871", "#a3acb5"), "grid": ("#dfe3e7", "#343b43")}
_DASHES = ((0, ()), (0, (5, 1.5)), (0, (1.5, 1.2)))  # beyond six methods, the same colours in another dash
_NAMED = 40  # more clients than this are drawn without names


def available() -> bool:
    """Is matplotlib installed?"""
    return find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Theme:
    """Colours by role: real ones, or stand-ins that become CSS variables."""

    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


_PLAIN = Theme(INKS["ink"][0], INKS["muted"][0], INKS["grid"][0], LIGHT)
_STAND_INS = Theme("#000001", "#000002", "#000003", tuple(f"#00001{i}" for i in range(len(LIGHT))))


@dataclass(frozen=True)
class Curve:
    """One method's test accuracy over rounds: mean over clients, then over seeds. Shares, 0 to 1."""

    rounds: tuple[int, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]  # over seeds; zeros where there is one


def curves(records: Sequence[RunRecord], protocol: Protocol) -> dict[str, Curve]:
    """A curve a row of the table, at the protocol's moment."""
    result = {}
    for label, group in grouped(records).items():
        runs = [_course(record, protocol) for record in group]
        rounds = sorted(set.intersection(*(set(run) for run in runs)))
        values = [[run[round] for run in runs] for round in rounds]
        if rounds:
            spread = tuple(stdev(v) if len(v) > 1 else 0.0 for v in values)
            result[label] = Curve(tuple(rounds), tuple(map(fmean, values)), spread)
    return result


def _course(record: RunRecord, protocol: Protocol) -> dict[int, float]:
    standing, course = Standing(protocol.moment or record.moment, "test"), {}
    for each in record.rounds:
        if standing.see(each) and (accuracy := standing.accuracy()):
            course[each.round] = mean(accuracy, standing.images() if protocol.mean == "samples" else None)
    return course


# --- figures for the page --------------------------------------------------------------------------------------------


def curves_svg(records: Sequence[RunRecord], protocol: Protocol, width: float = 9.2) -> str:
    """Accuracy over rounds as inline SVG."""
    with _figure(width, 4.3) as figure:
        _draw_curves(figure.add_axes((0.06, 0.12, 0.76, 0.85)), curves(records, protocol), _STAND_INS)
        return _inline(figure, "curves", "Test accuracy over rounds, a line a method; the table has the figures.")


def gains_svg(result: Table, width: float = 9.2) -> str:
    """Every client's gain over training alone as inline SVG; empty where training alone was not run."""
    rows = _gaining(result)
    if not rows:
        return ""
    across = _across(rows)
    down = -(-len(rows) // across)
    names = len(result.clients) <= _NAMED
    each = 0.62 + (0.25 * len(result.clients) if names else 2.2)
    with _figure(width, each * down) as figure:
        _draw_gains(figure, rows, result.clients, _STAND_INS, (0.1 if names else 0.02, 0.0, 0.99, 1.0), across)
        return _inline(figure, "gains", "Points of each client above training alone, a panel a method.")


def figure(records: Sequence[RunRecord], path: str | Path, protocol: Protocol | str | None = None) -> Path:
    """Curves and gains side by side as a PNG or SVG file, for a README or a slide."""
    if not available():
        raise FedprismError("figures need matplotlib: pip install 'fedprism[report]'.")
    result, path = table(records, protocol), Path(path)
    if path.suffix not in (".png", ".svg"):
        raise FedprismError(f"{path} ends in {path.suffix!r}; a figure is written as .png or .svg.")
    rows = _gaining(result)
    with _figure(13.0, 4.4) as canvas:
        axes = canvas.add_axes((0.04, 0.12, 0.36 if rows else 0.84, 0.77))
        _draw_curves(axes, curves(records, result.protocol), _PLAIN)
        axes.set_title("Test accuracy, mean over clients", loc="left", color=_PLAIN.ink, fontsize=11, pad=12)
        if rows:
            canvas.text(0.505, 0.945, "Gain over training alone, by client", color=_PLAIN.ink, fontsize=11, va="center")
            _draw_gains(canvas, rows, result.clients, _PLAIN, (0.56, 0.0, 0.995, 0.9), _across(rows))
        out = BytesIO()
        canvas.savefig(out, format=path.suffix[1:], dpi=160, facecolor="white", metadata=_undated(path.suffix))
    atomic.write(path, out.getvalue())
    return path


# --- drawing ---------------------------------------------------------------------------------------------------------


def _draw_curves(axes: Axes, lines: Mapping[str, Curve], theme: Theme) -> None:
    """A line a method with its name and last value at its right end."""
    from matplotlib.ticker import MaxNLocator

    styles, faint = _styles(list(lines), theme), 0.14 if len(lines) <= 7 else 0.06
    for label, curve in lines.items():
        colour, dash, width = styles[label]
        points = [100 * value for value in curve.mean]
        axes.plot(curve.rounds, points, color=colour, linestyle=dash, linewidth=width, solid_capstyle="round", zorder=3)
        if any(curve.deviation):
            low = [100 * (m - d) for m, d in zip(curve.mean, curve.deviation, strict=True)]
            high = [100 * (m + d) for m, d in zip(curve.mean, curve.deviation, strict=True)]
            axes.fill_between(curve.rounds, low, high, color=colour, alpha=faint, linewidth=0, zorder=2)
    last = max((curve.rounds[-1] for curve in lines.values()), default=1)
    top = 100 * max((max(curve.mean) for curve in lines.values()), default=1.0)
    axes.set_xlim(0, max(last, 1))
    axes.set_ylim(0, min(100.0, 5 * (top // 5 + 2)))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    _plain_axes(axes, theme)
    axes.set_xlabel("round", color=theme.muted, fontsize=9.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True))
    axes.yaxis.set_major_formatter("{x:.0f} %")
    inches = axes.get_window_extent().height / axes.figure.dpi
    gap = (axes.get_ylim()[1] - axes.get_ylim()[0]) * 0.17 / inches  # a line of text, in units of the axis
    ends = {label: 100 * curve.mean[-1] for label, curve in lines.items()}
    for label, place in _apart(ends, gap, axes.get_ylim()).items():
        at, colour = lines[label].rounds[-1], styles[label][0]
        axes.annotate(
            f"{label}  {ends[label]:.1f}",
            xy=(at, ends[label]),
            xytext=(last * 1.025 + 0.01, place),
            color=colour,
            fontsize=9.5,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "alpha": 0.6, "relpos": (0, 0.5)},
        )


def _draw_gains(
    figure: Any, rows: Sequence[Row], clients: Sequence[str], theme: Theme, box: tuple[float, ...], across: int
) -> None:
    """A panel a method, a bar a client, its length the points above (or below) training alone."""
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


def _room(values: Sequence[float], text: float) -> tuple[float, float]:
    """The limits of an axis that leave room for a number beside the bars; `text` is its share of the width.

    >>> _room([6.0, 2.0], 0.25)
    (0.0, 8.0)
    """
    low, high = min(0.0, *values), max(0.0, *values)
    sides = (low < 0) + (high > 0)
    beside = text * ((high - low) or 1.0) / (1 - min(sides * text, 0.8))
    return low - beside * (low < 0), high + beside * (high > 0 or low == 0)


def _plain_axes(axes: Axes, theme: Theme) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)
    axes.set_facecolor("none")
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9.5, colors=theme.muted)


def _styles(labels: Sequence[str], theme: Theme) -> dict[str, tuple[str, Any, float]]:
    """Colour, dash and width of each method; training alone is the dashed base line in the colour of the text."""
    styles: dict[str, tuple[str, Any, float]] = {}
    for label in labels:
        if label == LOCAL:
            styles[label] = (theme.ink, (0, (4, 2)), 1.6)
        else:
            turn, place = divmod(len(styles) - (LOCAL in styles), len(theme.series))
            styles[label] = (theme.series[place], _DASHES[turn % len(_DASHES)], 2.0)
    return styles


def _apart(ends: Mapping[str, float], gap: float, limits: tuple[float, float]) -> dict[str, float]:
    """Heights of labels at least `gap` apart, as near as that allows to where the lines end.

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


@contextmanager
def _figure(width: float, height: float) -> Iterator[Any]:
    """A figure of its own, without pyplot's global state."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedprism", "font.family": "DejaVu Sans"}):
        yield Figure(figsize=(width, height))


def _undated(suffix: str) -> dict[str, Any]:
    """The same records make the same file."""
    return {"Date": None} if suffix == ".svg" else {"Software": None}


def _inline(figure: Any, name: str, says: str) -> str:
    """The figure as SVG that can stand in a page: no prologue, no outside names, ids of its own, the page's colours."""
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=_undated(".svg"))
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r"font:\s*([\d.]+)px[^;\"]*", r"font-size: \1px", svg)  # the page's own letters
    for role, colour in zip(("ink", "muted", "grid"), (_STAND_INS.ink, _STAND_INS.muted, _STAND_INS.grid), strict=True):
        svg = svg.replace(colour, f"var(--{role})")
    for place, colour in enumerate(_STAND_INS.series):
        svg = svg.replace(colour, f"var(--series-{place})")
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    start = f'<svg role="img" aria-label="{says}" viewBox="{box[1]}">'
    return start + svg[svg.index(">") + 1 :]
