"""`fedprism bench`: how fast the engines are here."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fedprism.cli.app import LEARN, command
from fedprism.cli.options import parse_names
from fedprism.cli.output import loading, print_next_steps, print_text, stderr, stdout, user_errors


@command(LEARN)
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            help="[b]cnn4-n20-b10, cnn4-n20-b64, cnn4-n100-b10, digit6-n5-b32, alexnet-bn-n4-b32, resnet18-n20-b10[/b] "
            "(model, clients, batch); left out: all.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first look: few images, rounds and methods.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1; auto: a GPU where there is one.")] = "auto",
    methods: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Methods; left out: those of the workload.")
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="[b]serial, inprocess, processes[/b] on a CPU, [b]serial, inprocess, cuda-graphs, "
            "cuda-graphs-compiled[/b] on a GPU; left out: all. The one that others are compared to is always there.",
        ),
    ] = None,
    options: Annotated[
        bool, typer.Option("--options", help="Instead: what precision, memory format, slots and so on change.")
    ] = False,
    workers: Annotated[
        bool, typer.Option("--workers", help="Instead: worker processes beside independent processes, on a CPU.")
    ] = False,
    growth: Annotated[
        bool, typer.Option("--growth", help="Instead: time and memory against clients, model and participation.")
    ] = False,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Training images per client, at most; left out: see the table's notes.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Measured rounds, at most.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A .json file, or a folder; left out: benchmarks/results. In a folder it goes on with the newest "
            "file of this machine and these versions; else DATE-DEVICE.json is made."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure rows again that are already there.")] = False,
) -> None:
    """How fast is it here? Engines side by side with a plain serial loop that does the same work.

    The engines of a row take turns round by round (on a GPU, one after the other) once they are warm. Figures are
    medians of the whole round (download, train, upload, average, evaluate) and of the training part alone. Rows that
    are already there are skipped, so the same command goes on where it was stopped. Writes a JSON file and a Markdown
    page beside it, with date, versions, device and load.

    \b
    Example:
      fedprism bench --quick
      fedprism bench cnn4-n20-b10 --methods fedavg,fedcp --device cuda
      fedprism bench --options
      fedprism bench --growth --out measured
    """
    again = "The same command goes on: rows that are there are skipped."
    with user_errors(), loading():
        from fedprism.bench.engines import Ask, check, find_device, measure_engines, measure_options
        from fedprism.bench.growth import measure_growth
        from fedprism.bench.progress import Rows
        from fedprism.bench.results import Results, place
        from fedprism.bench.roofline import measure_roofline
        from fedprism.bench.tables import fitting, grids
        from fedprism.bench.workers import measure_workers

        asked = Ask(
            device=find_device(device),
            quick=quick,
            workloads=tuple(workloads or ()),
            methods=None if methods is None else tuple(parse_names(methods)),
            engines=None if engines is None else tuple(parse_names(engines, "--engines", "serial,inprocess")),
            samples=samples,
            rounds=rounds,
            force=force,
            command=shlex.join(["fedprism", *sys.argv[1:]]),
        )
        parts = {"--options": (options, measure_options), "--workers": (workers, measure_workers)}
        parts["--growth"] = (growth, measure_growth)
        instead = {name: measure for name, (wanted, measure) in parts.items() if wanted}
        check(asked, tuple(instead))
        path = place(out, asked.device, quick)
        results = Results(path, asked.device, quick)
        results.check_place()
    with user_errors(again), Rows(stderr()) as rows:
        rows.note(f"{'Goes on with' if path.exists() else 'Writes'} {path}.")
        for measure in instead.values() or (measure_engines, measure_roofline):
            measure(asked, results, rows)
    shown = stdout()
    for title, grid in grids(results).items():
        shown.print(Text(f"\n{title}", style="bold"))
        if shown.is_terminal:
            shown.print(fitting(title, grid))
        else:
            print_text(str(grid))
    print_next_steps(("figures", str(results.path)), ("the tables", str(results.path.with_suffix(".md"))))
