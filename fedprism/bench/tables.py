"""Results as tables: on a terminal, and as a Markdown page beside the JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedprism.report import formats
from fedprism.report.formats import Entry, Fitting, Grid

if TYPE_CHECKING:
    from fedprism.bench.results import Results, Row

TITLES = {
    "engines": "Engines",
    "options": "Options",
    "workers": "Worker processes",
    "growth": "Growth",
    "roofline": "What bounds a training step",
}


def grids(results: Results) -> dict[str, Grid]:
    """The tables of the sections that have rows, widest form."""
    made = {
        "engines": engines(results["engines"]),
        "options": options(results["options"]),
        "workers": workers(results["workers"]),
        "growth": growth(results["growth"]),
        "roofline": roofline(results["roofline"]),
    }
    return {TITLES[name]: grid for name, grid in made.items() if grid.rows}


def fitting(title: str, grid: Grid) -> Fitting:
    """For a terminal: without the last columns where it is narrow."""
    keep = 7 if title == TITLES["engines"] else len(grid.header)
    narrow = Grid(grid.header[:keep], tuple(row[:keep] for row in grid.rows), grid.notes)
    return Fitting((grid, narrow))


def page(results: Results) -> str:
    """The Markdown page."""
    machine = results.head["machine"]
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if value)
    all_rows = [row for section in results.sections.values() for row in section]
    dates = sorted(row["date"] for row in all_rows)
    loads = sorted(row["load"][0] for row in all_rows if row["load"])
    parts = [
        f"# Benchmarks on {machine['device']}",
        f"{machine['device']}, {machine['cores']} cores of {machine['cpu']}, {machine['system']}; {versions}.",
        f"Measured from {dates[0]} to {dates[-1]}; load average {loads[0]:g} to {loads[-1]:g} when rows were written."
        if loads
        else f"Measured from {dates[0]} to {dates[-1]}.",
        "Commands:\n\n```\n" + "\n".join(dict.fromkeys(row["command"] for row in all_rows)) + "\n```",
    ]
    if results.head["quick"]:
        parts.append("A quick look (`--quick`): few images and rounds. These figures are not for citing.")
    for title, grid in grids(results).items():
        parts += [f"## {title}", formats.markdown(grid).strip()]
        if title == TITLES["growth"]:
            pictures = sorted(results.path.parent.glob(f"{results.path.stem}-growth-*.svg"))
            parts += [f"![{picture.stem.rpartition('-')[2]}]({picture.name})" for picture in pictures]
    return "\n\n".join(parts) + "\n"


def engines(rows: list[Row]) -> Grid:
    header = (
        "workload",
        "method",
        "engine",
        "training, images/s",
        "whole round, images/s",
        "x training",
        "x whole round",
        "kernels a step",
        "memory, MB",
        "difference",
        "rounds",
    )
    lines = []
    for row in rows:
        for each in row["contenders"]:
            lines.append(
                (
                    Entry(row["workload"]),
                    Entry(row["method"]),
                    Entry(each["name"]),
                    Entry(_number(each["train_per_second"])),
                    Entry(_number(each["round_per_second"])),
                    Entry(f"{each['train_ratio']:.2f}"),
                    Entry(f"{each['round_ratio']:.2f}"),
                    Entry(_kernels(each["facts"].get("kernels_per_step"))),
                    Entry(_number(each["peak_memory_bytes"] / 1e6)),
                    Entry(_difference(each["largest_difference"])),
                    Entry(str(len(each["seconds"]["round"]))),
                )
            )
    return Grid(header, tuple(lines), tuple(_engine_notes(rows)))


def _engine_notes(rows: list[Row]) -> Iterable[str]:
    if not rows:
        return
    yield (
        "Images a second: training images of all clients over the median time. Training: download, training and "
        "upload; the whole round also averages and evaluates every client's test images. x: times the first engine of "
        "the row, which is a plain serial loop, or inprocess where none was written by hand. Difference: of the "
        "weights after one round, from the first engine's, at most; a weight moved by up to "
        f"{min(row['largest_change_of_a_weight'] for row in rows):.1g} to "
        f"{max(row['largest_change_of_a_weight'] for row in rows):.1g} in that round."
    )
    precisions = ", ".join(sorted({row["precision"] for row in rows}))
    yield f"Precision {precisions}; {rows[0]['threads']} thread a process; evaluated at each method's own moment."
    for name in dict.fromkeys(row["workload"] for row in rows):
        row = next(row for row in rows if row["workload"] == name)
        less = "" if row["all_images"] else " (fewer than the paper's)"
        yield (
            f"{name}: {row['model']}, {row['parameters']:,} parameters, {row['clients']} clients, batch "
            f"{row['batch']}, {row['train_images']:,} training images{less} and {row['test_images']:,} test images of "
            f"{'x'.join(map(str, row['image']))}, {row['memory_format']}."
        )
    yield from _left_out(rows)


def _left_out(rows: list[Row]) -> Iterable[str]:
    said: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row["left_out"].items():
            said.setdefault(f"{name}: {reason}", []).append(row["key"])
    for what, where in said.items():
        yield f"Left out, {what} ({', '.join(where)})."


def options(rows: list[Row]) -> Grid:
    header = ("option", "value", "engine", "training, images/s", "whole round, images/s", "x whole round", "memory, MB")
    lines = []
    for row in rows:
        for each in row["contenders"]:
            numbers = (each["train_per_second"], each["round_per_second"])
            texts = [row["option"], each["name"], row["engine"], *map(_number, numbers), f"{each['round_ratio']:.2f}"]
            lines.append(tuple(map(Entry, [*texts, _number(each["peak_memory_bytes"] / 1e6)])))
    note = "FedAvg on {workload}, {train_images:,} training images; x: times the first value of the option."
    notes = [note.format(**rows[0])] if rows else []
    return Grid(header, tuple(lines), (*notes, *_left_out(rows)))


def workers(rows: list[Row]) -> Grid:
    header = ("how", "training, images/s", "x training", "memory, MB")
    lines, notes = [], []
    for row in rows:
        for each in row["contenders"]:
            texts = (each["name"], _number(each["train_per_second"]), f"{each['train_ratio']:.2f}")
            lines.append(tuple(map(Entry, (*texts, _number(each["peak_memory_bytes"] / 1e6)))))
        if row["share_of_independent"] is not None:
            notes.append(
                f"FedAvg on {row['workload']}, {row['train_images']:,} training images, training alone: "
                f"{row['workers']} workers reach {row['share_of_independent']:.2f} of what {row['workers']} processes "
                "that know nothing of each other reach together (median over neighbouring rounds)."
            )
        notes += _left_out([row])
    return Grid(header, tuple(lines), tuple(notes))


def growth(rows: list[Row]) -> Grid:
    header = (
        "curve",
        "series",
        "engine",
        "clients",
        "take part",
        "parameters",
        "set-up, s",
        "a round, s",
        "memory, MB",
    )
    lines = []
    for row in rows:
        texts = [row["curve"], row["series"], row["settings"]["engine"]]
        texts += [f"{row[number]:,}" for number in ("clients", "participants", "parameters")]
        texts += [
            f"{row['set_up_seconds']:.2f}",
            f"{row['round_seconds']:.3g}",
            _number((row["device_memory_bytes"] or row["peak_memory_bytes"]) / 1e6),
        ]
        lines.append(tuple(map(Entry, texts)))
    notes = []
    if rows:
        loaded = max(row["memory_when_loaded_bytes"] for row in rows) / 1e6
        notes.append(
            "Each point in a process of its own; memory is what PyTorch allocates on a GPU, else the largest resident "
            f"size, of which {loaded:,.0f} MB are Python and PyTorch before anything is made. Those who take part are "
            "evaluated."
        )
    return Grid(header, tuple(lines), tuple(notes))


def roofline(rows: list[Row]) -> Grid:
    header = (
        "workload",
        "engine",
        "MFLOP a step",
        "MB a step",
        "kernels a step",
        "steps/s",
        "of arithmetic",
        "of memory",
        "of starts",
    )
    lines, notes = [], []
    for row in rows:
        step = row["step"]
        for name, each in row["engines"].items():
            shares = each["shares"]
            texts = [row["workload"], name, _number(step["flops"] / 1e6), _number(step["bytes"] / 1e6)]
            texts += [_kernels(each["kernels_per_step"]), _number(each["steps_per_second"])]
            texts += [_share(shares.get(what)) for what in ("flops", "bytes", "kernels")]
            lines.append(tuple(map(Entry, texts)))
        notes.append(f"{row['workload']}: {row['fastest']} is {row['bound']}.")
    if rows:
        limits = rows[-1]["roofs"]
        starts = f", {limits['kernels'] / 1e6:.2f} million tiny kernels/s" if "kernels" in limits else ""
        notes.insert(
            0,
            f"Measured in the same run: {limits['bytes'] / 1e9:,.1f} GB/s of a large copy (read and written), "
            f"{limits['flops'] / 1e12:,.3g} TFLOP/s of a large matrix product{starts}. FLOPs and bytes are those of "
            "the plain step: what each operation reads and writes, caches aside, so fused kernels move less.",
        )
    return Grid(header, tuple(lines), tuple(notes))


def _number(value: float) -> str:
    """
    >>> _number(12345.6), _number(45.67), _number(0.5)
    ('12,346', '45.7', '0.500')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _difference(value: float | None) -> str:
    return "" if value is None else f"{value:.1g}"


def _kernels(told: Mapping[str, Any] | float | None) -> str:
    """A number, or one a pass."""
    if isinstance(told, Mapping):
        return ", ".join(f"{name} {value:g}" for name, value in told.items())
    return "" if told is None else f"{told:g}"
