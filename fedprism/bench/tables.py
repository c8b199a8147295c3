"""Results as tables, on a terminal and as a Markdown page beside the JSON file."""

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
MEMORY = (
    "Memory: on a GPU what PyTorch reserves up to the end of the first round; on a CPU the peak of one more round, "
    "including all worker processes, without what stays after the contender is closed. A page shared by several "
    "processes counts once."
)


def grids(results: Results) -> dict[str, Grid]:
    """The tables of all sections with rows or notes, in their widest form."""
    made = {
        "engines": engines(results["engines"]),
        "options": options(results["options"]),
        "workers": workers(results["workers"]),
        "growth": growth(results["growth"]),
        "roofline": roofline(results["roofline"]),
    }
    return {TITLES[name]: grid for name, grid in made.items() if grid.rows or grid.notes}


def fitting(title: str, grid: Grid) -> Fitting:
    """A table for a terminal, without the last columns if it is narrow."""
    keep = 7 if title == TITLES["engines"] else len(grid.header)
    narrow = Grid(grid.header[:keep], tuple(row[:keep] for row in grid.rows), grid.notes)
    return Fitting((grid, narrow))


def page(results: Results) -> str:
    """The Markdown page."""
    machine = results.head["machine"]
    gpu = "" if machine["device"] == machine["cpu"] else f"{machine['device']}, "
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items() if value)
    all_rows = [row for section in results.sections.values() for row in section]
    dates = sorted(row["date"] for row in all_rows)
    loads = sorted(row["load"][0] for row in all_rows if row["load"])
    commits = list(dict.fromkeys(row["commit"] for row in all_rows if row.get("commit")))
    at = f" at commit {', '.join(commits)}" if commits else ""
    busy = f"; load average {loads[0]:g} to {loads[-1]:g} when rows were written" if loads else ""
    parts = [
        f"# Benchmarks on {machine['device']}",
        f"{gpu}{machine['cores']} cores of {machine['cpu']}, {machine['system']}; {versions}.",
        f"Measured from {dates[0]} to {dates[-1]}{at}{busy}.",
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
        "kernels per step",
        "memory, MB",
        "difference",
        "rounds",
    )
    lines = []
    for row in rows:
        for each in row["contenders"]:
            kernels = _kernels(each["facts"].get("kernels_per_step"))
            texts = [_named(row["workload"], row), row["method"], each["name"], *_speeds(each)]
            texts += [_times(each, "train"), _times(each, "round"), kernels]
            lines.append([*texts, _memory(each), _difference(each["largest_difference"]), _rounds(each)])
    return _grid(header, lines, _engine_notes(rows))


def _engine_notes(rows: list[Row]) -> Iterable[str]:
    if not rows:
        return
    yield (
        "Images per second: training images of all clients divided by the median time. Training: download, training "
        "and upload; the whole round also averages and evaluates every client's test images. x: times the first engine "
        "of the row, a plain serial loop, or inprocess for methods without one. Difference: the largest difference of "
        "the weights after one round from those of the first engine; a weight moved by up to "
        f"{min(row['largest_change_of_a_weight'] for row in rows):.1g} to "
        f"{max(row['largest_change_of_a_weight'] for row in rows):.1g} in that round."
    )
    precisions = ", ".join(sorted({row["precision"] for row in rows}))
    yield MEMORY
    yield f"Precision {precisions}; {rows[0]['threads']} thread per process; evaluated at each method's own moment."
    for name, row in {_named(row["workload"], row): row for row in rows}.items():
        less = "" if row["all_images"] else " (fewer than the paper's)"
        yield (
            f"{name}: {row['model']}, {row['parameters']:,} parameters, {row['clients']} clients, batch "
            f"{row['batch']} (mean {row['mean_batch']:g}), {row['train_images']:,} training images{less} and "
            f"{row['test_images']:,} test images of {'x'.join(map(str, row['image']))}, {row['memory_format']}."
        )
    yield from _left_out(rows)


def _left_out(rows: list[Row]) -> Iterable[str]:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for name, reason in row["left_out"].items():
            reasons.setdefault(f"{name}: {reason}", []).append(row["key"])
    for what, where in reasons.items():
        yield f"Left out, {what} ({', '.join(where)})."


def options(rows: list[Row]) -> Grid:
    header = (
        "option",
        "value",
        "engine",
        "training, images/s",
        "whole round, images/s",
        "x whole round",
        "memory, MB",
        "rounds",
    )
    lines = []
    for row in rows:
        for each in row["contenders"]:
            texts = [_named(row["option"], row), each["name"], row["engine"], *_speeds(each)]
            lines.append([*texts, _times(each, "round"), _memory(each), _rounds(each)])
    notes = []
    if rows:
        sizes = " or ".join(dict.fromkeys(f"{row['train_images']:,}" for row in rows))
        note = f"FedAvg on {rows[0]['workload']}, {sizes} training images; x: times the first value of the option."
        notes += [note, MEMORY]
    return _grid(header, lines, [*notes, *_left_out(rows)])


def workers(rows: list[Row]) -> Grid:
    header = ("how", "training, images/s", "x training", "memory, MB", "rounds")
    lines, notes = [], [MEMORY] if rows else []
    for row in rows:
        for each in row["contenders"]:
            how = _named(each["name"], row)
            lines.append([how, _speeds(each)[0], _times(each, "train"), _memory(each), _rounds(each)])
        if row["share_of_independent"] is not None:
            notes.append(
                f"FedAvg on {_named(row['workload'], row)}, {row['train_images']:,} training images, training alone: "
                f"{row['workers']} workers reach {row['share_of_independent']:.2f} of the speed of {row['workers']} "
                "independent processes (median over neighbouring rounds)."
            )
        notes += _left_out([row])
    return _grid(header, lines, notes)


def growth(rows: list[Row]) -> Grid:
    header = (
        "curve",
        "series",
        "engine",
        "clients",
        "take part",
        "parameters",
        "set-up, s",
        "per round, s",
        "memory, MB",
    )
    measured = [row for row in rows if "failed" not in row]
    lines = []
    for row in measured:
        texts = [row["curve"], row["series"], row["settings"]["engine"]]
        texts += [f"{row[number]:,}" for number in ("clients", "participants", "parameters")]
        memory = (row["device_memory_bytes"] or row["peak_memory_bytes"]) / 1e6
        lines.append([*texts, f"{row['set_up_seconds']:.2f}", f"{row['round_seconds']:.3g}", _number(memory)])
    notes = []
    if measured:
        loaded = max(row["memory_when_loaded_bytes"] for row in measured) / 1e6
        notes.append(
            "Each point runs in its own process; memory is what PyTorch allocates on a GPU, else the peak resident "
            f"size, of which {loaded:,.0f} MB are Python and PyTorch themselves. Only participants are evaluated."
        )
    notes += [f"Growth with {row['curve']}: {row['failed']}" for row in rows if "failed" in row]
    return _grid(header, lines, notes)


def roofline(rows: list[Row]) -> Grid:
    header = (
        "workload",
        "engine",
        "threads",
        "MFLOP per step",
        "MB per step",
        "kernels per step",
        "steps/s",
        "of arithmetic",
        "of memory",
        "of launches",
    )
    lines, limits, notes = [], {}, []
    for row in rows:
        step, name = row["step"], _named(row["workload"], row)
        for engine, each in row["engines"].items():
            shares = each["shares"]
            limits[each["threads"]] = each["roofs"]
            texts = [name, engine, str(each["threads"]), _number(step["flops"] / 1e6), _number(step["bytes"] / 1e6)]
            texts += [_kernels(each["kernels_per_step"]), _number(each["steps_per_second"])]
            lines.append([*texts, *(_share(shares.get(what)) for what in ("flops", "bytes", "kernels"))])
        notes.append(f"{name}: {row['fastest']} is {row['bound']}.")
    measured = [
        f"Measured in the same run: {limit['bytes'] / 1e9:,.1f} GB/s of a large copy (read and written), "
        f"{limit['flops'] / 1e12:,.3g} TFLOP/s of a large matrix product, "
        + (
            f"{limit['kernels'] / 1e6:.2f} million tiny kernels/s."
            if "kernels" in limit
            else f"with {threads} thread{'s' * (threads > 1)}."
        )
        for threads, limit in sorted(limits.items())
    ]
    if rows:
        measured.append(
            "On a CPU an engine's shares are relative to the rates of as many threads as it uses. FLOPs and bytes are "
            "those of the plain step with the mean batch: what each operation reads and writes, without caches, so "
            "fused kernels move less."
        )
    return _grid(header, lines, [*measured, *notes])


def _grid(header: tuple[str, ...], lines: Iterable[Iterable[str]], notes: Iterable[str]) -> Grid:
    return Grid(header, tuple(tuple(map(Entry, line)) for line in lines), tuple(notes))


def _named(name: str, row: Row) -> str:
    """The name, with the number of images per client if it was given."""
    return name if row["samples"] is None else f"{name} ({row['samples']} images per client)"


def _speeds(each: Row) -> list[str]:
    return [_number(each["train_per_second"]), _number(each["round_per_second"])]


def _times(each: Row, part: str) -> str:
    return f"{each[f'{part}_ratio']:.2f}"


def _memory(each: Row) -> str:
    return _number(each["peak_memory_bytes"] / 1e6)


def _rounds(each: Row) -> str:
    return str(len(each["seconds"]["round"]))


def _number(value: float) -> str:
    """Format with about three significant digits.

    >>> _number(12345.6), _number(45.67), _number(0.5)
    ('12,346', '45.7', '0.500')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _difference(value: float | None) -> str:
    return "" if value is None else f"{value:.1g}"


def _kernels(count: Mapping[str, Any] | float | None) -> str:
    """One number, or one per pass."""
    if isinstance(count, Mapping):
        return ", ".join(f"{name} {value:g}" for name, value in count.items())
    return "" if count is None else f"{count:g}"
