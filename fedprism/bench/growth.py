"""How time and memory grow with the number of clients, the model size and participation, with a plot of each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from fedprism import atomic
from fedprism.bench.engines import Ask
from fedprism.bench.progress import Rows
from fedprism.bench.results import Results, Row
from fedprism.engines import ENGINES
from fedprism.errors import FedprismError
from fedprism.report.canvas import INKS, LIGHT, available

FIXED = 10  # participants in series with a fixed number of them
SHARE = 0.1  # participation in series where their number grows with the clients


@dataclass(frozen=True)
class GrowthCurve:
    """One plot: its title, the field of a point's result along the x axis, and the label of that axis."""

    title: str
    along: str
    label: str


CURVES: Mapping[str, GrowthCurve] = {
    "clients": GrowthCurve("clients", "clients", "clients"),
    "model": GrowthCurve("model size", "parameters", "parameters of the model"),
    "participation": GrowthCurve("participation", "participants", "clients that take part in a round"),
}


def points(quick: bool) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Curve, series and settings of each point."""
    counts = (10, 100, 1000) if quick else (10, 100, 1000, 10_000)
    rounds = 2 if quick else 3
    for count in counts:
        yield "clients", f"{FIXED} take part", {"clients": count, "participation": FIXED / count, "rounds": rounds}
    for state in ("memory", "disk"):
        words = f"{SHARE:.0%} take part" + (", state on disk" if state == "disk" else "")
        for count in counts:
            settings = {"clients": count, "participation": SHARE, "rounds": rounds, "state": state}
            yield "clients", words.replace("%", " %"), settings
    widths = (8, 16) if quick else (8, 16, 32, 64)
    for name, model in [
        ("mlp", "mlp"),
        ("cnn4", "cnn4"),
        *(("resnet18", {"name": "resnet18", "width": w}) for w in widths),
    ]:
        yield "model", name, {"clients": FIXED, "model": model, "rounds": rounds, "side": 32}
    of = 100 if quick else 1000
    for share in (0.01, 0.1, 0.5, 1.0):
        yield "participation", f"of {of:,} clients", {"clients": of, "participation": share, "rounds": rounds}


def measure_growth(ask: Ask, results: Results, rows: Rows) -> None:
    """Measure one row per point, each in its own process."""
    # One engine for all points: `auto` would switch engines along the curve.
    engine = "cuda-graphs" if ask.device.type == "cuda" and "cuda-graphs" in ENGINES else "inprocess"
    every = []
    for curve, series, settings in points(ask.quick):
        settings |= {"device": str(ask.device), "engine": engine}
        every.append((curve, series, settings, f"{curve}: {json.dumps(settings, sort_keys=True)}"))
    plan = [each for each in every if ask.force or not results.has("growth", each[3])]
    plan.sort(key=lambda each: results.find("growth", each[3]) is not None)  # retries come last
    rows.expect(len(plan), len(every) - len(plan))
    for curve, series, settings, key in plan:
        rows.begin(f"growth with {CURVES[curve].title}, {series}: {_describe(settings)}", 1)
        row: Row = {"curve": curve, "series": series, "settings": settings}
        try:
            row |= in_own_process(settings)
        except FedprismError as error:  # continue with the other points
            row["failed"] = str(error)
        results.add("growth", key, row, ask.command)
        rows.end(row.get("failed") or f"{row['round_seconds']:.3g} s per round")
    for curve in CURVES:
        if not available():
            rows.note("matplotlib is not installed, so there are no pictures: pip install 'fedprism[report]'.")
            break
        of = [row for row in results["growth"] if row["curve"] == curve and "failed" not in row]
        draw(curve, of, picture_of(results.path, curve))
    else:
        results.write()  # the page shows the plots


def picture_of(path: Path, curve: str) -> Path:
    """The path of a curve's plot, beside the results."""
    return path.with_name(f"{path.stem}-growth-{curve}.svg")


def in_own_process(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one point in a new process, so that nothing else uses its memory."""
    command = [sys.executable, "-m", "fedprism.bench.point", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
        raise FedprismError(
            f"{_describe(settings)} could not be measured; the process ended with {done.returncode}{reason}"
        )
    return dict(json.loads(done.stdout))


def _describe(settings: Mapping[str, Any]) -> str:
    model = settings.get("model", "cnn4")
    name = model if isinstance(model, str) else f"{model['name']} of width {model['width']}"
    words = f"{settings['clients']:,} clients, participation {settings.get('participation', 1.0):g}, {name}"
    return words + (", state on disk" if settings.get("state") == "disk" else "")


def _megabytes(row: Row) -> float:
    """Memory on the GPU if there is one, else of the process and its workers."""
    return float(row["device_memory_bytes"] or row["peak_memory_bytes"]) / 1e6


def _seconds(row: Row) -> float:
    return float(row["round_seconds"])


def draw(curve: str, rows: list[Row], path: Path) -> None:
    """Plot seconds per round and memory along the curve's axis, one line per series."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    if not rows:
        return
    shown, series = CURVES[curve], list(dict.fromkeys(row["series"] for row in rows))
    with rc_context({"svg.hashsalt": curve, "font.size": 9, "text.color": INKS["ink"][0]}):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        for axes, (value, words) in zip(
            figure.subplots(1, 2),
            ((_seconds, "seconds per round"), (_megabytes, "memory, MB")),
            strict=True,
        ):
            for i, name in enumerate(series):
                of = sorted((row for row in rows if row["series"] == name), key=lambda row: float(row[shown.along]))
                x, y = [row[shown.along] for row in of], [value(row) for row in of]
                axes.plot(x, y, "o-", ms=4, label=name, color=LIGHT[i % len(LIGHT)])
            axes.set_xscale("log")
            axes.set_yscale("log" if value is _seconds else "linear")
            if value is _megabytes:
                axes.set_ylim(0, 1.1 * max(map(value, rows)))  # room for the highest marker
            axes.set_xlabel(shown.label)
            axes.set_ylabel(words)
            axes.grid(color=INKS["grid"][0])
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].legend(frameon=False)
        out = BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    atomic.write(path, out.getvalue())
