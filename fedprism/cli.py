"""The command line: parse, call `fedprism.api`, print. PyTorch is imported inside the commands: --help is quick."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
import yaml
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedprism import config as configuration
from fedprism.config import Config, DataConfig, ModelConfig
from fedprism.errors import ConfigError, FedprismError, RecordError

if TYPE_CHECKING:
    from fedprism.api import Cell, Run
    from fedprism.records import RunRecord
    from fedprism.report.explain import Counted
    from fedprism.report.formats import Grid
    from fedprism.report.inspection import Holdings
    from fedprism.report.progress import Progress
    from fedprism.report.table import Table

Command = TypeVar("Command", bound=Callable[..., None])

DEMO_METHODS = ("local", "fedavg", "fedprox", "fedbn", "fedrep", "ditto")
DEMO_ROUNDS, QUICK_ROUNDS = 30, 5
_DEMO_NOTE = "README.txt"

_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="fedprism",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings=_HELP,
)
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", context_settings=_HELP)

_START, _RUN, _LEARN = "Start here", "Train", "Look things up"
app.add_typer(data_app, name="data", rich_help_panel=_LEARN, help="Datasets: which are there, fetch one, look at one.")

Protocols = Annotated[
    str | None,
    typer.Option(
        "--protocol",
        help="Which figure is printed: a moment ([b]received, trained, adapted, global[/b]), the rounds ([b]last, "
        "lastK, best-validation, best-test[/b]), a mean ([b]clients, samples[/b]) and a part of the model by itself "
        "([b]path=NAME[/b]), such as [b]trained,last5,samples[/b]. Left out: each method's own moment, the best round "
        "on validation images, the mean over clients, the whole model.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Laid over the file, such as [b]train.rounds=50[/b]. May be repeated.",
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(help="The folder of published data; left out: $FEDPRISM_DATA, or a folder of the cache."),
]


class Form(StrEnum):
    """How `show` writes a table."""

    terminal = "terminal"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    html = "html"


class Kind(StrEnum):
    """What `list` lists."""

    methods = "methods"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"
    engines = "engines"
    experiments = "experiments"


def main() -> None:
    """The entry point of the installed command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without some letter is no reason to lose a result
    app()


def _command(panel: str | None, name: str | None = None, to: typer.Typer = app) -> Callable[[Command], Command]:
    """Register a command. Its help is its docstring, a line a paragraph, but for paragraphs that begin with \\b."""

    def register(function: Command) -> Command:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        joined = [text if text.startswith("\b") else text.replace("\n", " ") for text in paragraphs]
        return to.command(name, help="\n\n".join(joined), rich_help_panel=panel)(function)

    return register


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedprism {_version()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and stop.")
    ] = False,
) -> None:
    """Personalised federated learning: what clients share, what stays their own, and what each one gains.

    Begin with [b]fedprism demo[/b]. Every command has a --help with an example.
    """


@_command(_START)
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and report.html are written.")] = Path("demo"),
    rounds: Annotated[int | None, typer.Option(min=1, help=f"Rounds; {DEMO_ROUNDS} unless given.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"A first look: {QUICK_ROUNDS} rounds.")] = False,
    protocol: Protocols = None,
) -> None:
    """Train six methods on five clients whose images look different, in about a minute.

    Each client has handwritten digits in a style of its own. Local trains alone, FedAvg and FedProx share everything,
    FedBN, FedRep and Ditto keep something at home. Prints a table and writes a page with curves, demo/report.html.
    Running it again replaces its earlier runs.

    \b
    Example:
      fedprism demo
      fedprism demo --quick --out /tmp/demo
    """
    again = f"`fedprism demo --out {out}` starts it anew."
    with _told(again), _loading():
        from fedprism import api

        _check(protocol)
        # On the CPU wherever it runs: the models are tiny, and the figures are then nearly the same everywhere.
        given = {"train": {"rounds": rounds or (QUICK_ROUNDS if quick else DEMO_ROUNDS)}, "run": {"device": "cpu"}}
        config = configuration.structure(given, Config)
        folder = out / "runs"
        cells = api.cells(config, DEMO_METHODS, [config.seed], "demo", folder)
        _own_demo(folder, cells)
    with _told(again):
        with _progress([cell.config for cell in cells]) as progress:
            runs = api.compare(config, DEMO_METHODS, [config.seed], "demo", out=folder, callbacks=[progress])
        page = _report(out, runs, protocol)
        _print_table(_table(runs, protocol))
        _next(
            ("curves, images and settings", str(page)),
            ("what a method does", "fedprism explain fedbn"),
            ("all there is to set", "fedprism run --print-config"),
        )


@_command(_RUN)
def run(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="What to run; see --print-config.")
    ] = None,
    settings: Settings = None,
    method: Annotated[
        str | None,
        typer.Option(help="Instead of the file's: a name of [b]fedprism list methods[/b], or path/to/file.py:Class."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; left out: run.out of the configuration.")] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the whole configuration, every default with a comment, and stop."),
    ] = False,
    protocol: Protocols = None,
) -> None:
    """Train one method, as a configuration file says.

    The file holds only what differs from the defaults. The run directory holds the resolved configuration, metrics of
    every client and round, and checkpoints; [b]fedprism resume[/b] goes on from them.

    \b
    Example:
      fedprism run --print-config > mine.yaml
      fedprism run mine.yaml --set train.rounds=50
      fedprism run mine.yaml --method fedprox --set method.mu=0.01 --out runs/weak
      fedprism run mine.yaml --method my_method.py:MyMethod --out runs/mine
    """
    with _told(), _loading():
        from fedprism import api
        from fedprism.methods import find
        from fedprism.report.explain import settings_of

        _check(protocol)
        asked = _read(config, settings or [], method)
        resolved = api.resolve(asked)
        if print_config:
            if asked.model.per_client == "folder":  # a file to be edited: each client's folder goes on naming its own
                resolved = dataclasses.replace(resolved, model=asked.model)
            meanings = {name: doc for name, _, _, doc in settings_of(find(resolved.method.name))}
            typer.echo(configuration.commented(resolved, meanings), nl=False)
            return
        if config is None:
            raise ConfigError("there is no configuration to run; `fedprism run --print-config > mine.yaml` writes one.")
        directory = api.directory_of(resolved, config.stem, out)
    with _told(f"`fedprism resume {directory}` goes on.", directory):
        with _progress([resolved]) as progress:
            done = api.run_config(resolved, config.stem, out=out, callbacks=[progress])
        _after(done, protocol)


@_command(_RUN)
def compare(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="What all runs have in common.")],
    methods: Annotated[
        str, typer.Option(metavar="A,B,...", help="Methods, separated by commas; include [b]local[/b] to see gains.")
    ],
    seeds: Annotated[
        str | None,
        typer.Option(metavar="0,1,...", help="Seeds, separated by commas; left out: the configuration's."),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the runs; left out: as run.out says.")] = None,
    protocol: Protocols = None,
) -> None:
    """Train several methods with several seeds and print them in one table, mean ± deviation.

    A run directory each: finished ones are skipped and begun ones resumed, so the same command again goes on where it
    was stopped. Beside the runs it writes comparison.csv, comparison.md and report.html. The settings of the file's own
    method are kept; the others have their papers' defaults.

    \b
    Example:
      fedprism compare examples/digits-skew.yaml \\
          --methods local,fedavg,fedbn,ditto --seeds 0,1,2
      fedprism compare mine.yaml --methods local,fedavg,my_method.py:MyMethod
    """
    again = "The same command goes on: finished runs are skipped, the one that was stopped is resumed."
    with _told(again), _loading():
        from fedprism import api
        from fedprism.methods import find
        from fedprism.records import run_status
        from fedprism.report.table import TOO_MANY

        _check(protocol)
        base = _read(config, settings or [], None)
        names, numbers = _names(methods), _numbers(seeds, base.seed)
        asked = [text for text in settings or [] if text.startswith("method.")]
        if asked and base.method.name not in names:
            raise ConfigError(
                f"--set {asked[0]} is for {base.method.name}, which is not among --methods {methods}; "
                "name the method that it is meant for with --set method.name=METHOD."
            )
        cells = api.cells(base, names, numbers, config.stem, out)
        folder = _common([cell.path for cell in cells])
        left = [cell.config for cell in cells if run_status(cell.path) not in ("finished", "diverged")]
    failed: list[str] = []

    def tell(cell: Cell, error: Exception) -> None:
        failed.append(f"{find(cell.config.method.name).id} with seed {cell.config.seed}")
        kind = "" if isinstance(error, FedprismError) else f"{type(error).__name__}: "
        _say(f"{failed[-1]} failed: {kind}{error}", "red")

    with _told(again):
        with _progress(left) as progress:
            runs = api.compare(base, names, numbers, config.stem, out=out, callbacks=[progress], on_error=tell)
        if runs:
            result = _table(runs, protocol)
            _write(folder / "comparison.csv", result.csv())
            _write(folder / "comparison.md", result.markdown(clients=len(result.clients) <= TOO_MANY or None))
            page = _report(folder, runs, protocol)
            _print_table(result)
            _next(("figures", str(folder / "comparison.csv")), ("curves, images and settings", str(page)))
        if failed:
            _say(f"{len(failed)} of {len(cells)} runs failed: {'; '.join(failed)}.", "red")
            raise typer.Exit(1)


@_command(_RUN)
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run that was stopped.")],
    protocol: Protocols = None,
) -> None:
    """Go on with a run that was stopped, from its newest checkpoint: the figures are the same as if it never had been.

    \b
    Example:
      fedprism resume runs/digits-skew/fedbn-0
    """
    with _told(), _loading():
        from fedprism import api
        from fedprism.engines.events import Callback, Plan
        from fedprism.records import read_run

        class GoesOn(Callback):
            """Says where it goes on, once a checkpoint has been loaded."""

            def begin(self, plan: Plan) -> None:
                kept, recorded = max(plan.first_round - 1, 0), len(record.rounds) - 1
                again = f"; rounds {kept + 1} to {recorded} are computed again" if recorded > kept else ""
                _say(f"{path} goes on after round {kept} of {plan.rounds}{again}.", "dim")

        _check(protocol)
        record = read_run(path)
    with _told(f"`fedprism resume {path}` goes on."):
        if record.status in ("finished", "diverged"):
            _say(f"{path} has already {record.status}; nothing is left to run.", "yellow")
        with _progress([record.config]) as progress:
            done = api.resume(path, callbacks=[GoesOn(), progress])
        _after(done, protocol)


@_command(_LEARN)
def show(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Runs, or folders that hold some.")],
    protocol: Protocols = None,
    form: Annotated[Form, typer.Option("--format", help="How the table is written.")] = Form.terminal,
    report: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the page with curves, too.")] = None,
) -> None:
    """Print the table of runs again, from their records; another protocol needs no new training.

    Runs that are named go into one table. A folder is searched: the runs of each folder in it make a table. Below the
    table of a single run stand the models of clients that have different ones, and what its method shows of its inside.

    \b
    Example:
      fedprism show runs/digits-skew
      fedprism show runs/digits-skew --protocol trained,last5,samples --format latex
    """
    with _told(), _loading():
        from fedprism.records import read_run
        from fedprism.report.html import write_page
        from fedprism.report.inside import last_values
        from fedprism.report.models import decided, models
        from fedprism.report.table import table

        _check(protocol)
        groups = _found(paths)
        if report is not None and len(groups) > 1:
            raise ConfigError(f"--report makes one page, but the runs lie in {len(groups)} folders; name one of them.")
    failed = 0
    for group in groups:
        try:
            with _told():
                records = sorted(map(read_run, group), key=_in_order)
                result = table(records, protocol)
                if report is not None:
                    write_page(report, records, protocol)
        except typer.Exit:  # has been told; the next folder may be sound
            failed = 2
            continue
        if form is Form.terminal:
            if len(groups) > 1:
                _out().print(Text(str(_common(group)), style="bold"))
            _print_table(result)
            if len(records) == 1 and (different := models(records[0])) is not None:
                _out().print(Text("\nmodels", style="bold"))
                _print_table(different)
            if len(records) == 1:
                for name, value in decided(records[0]).items():
                    typer.echo(f"\n{name}: {value}")
            if len(records) == 1 and (inside := last_values(records[0], protocol)) is not None:
                _out().print(Text("\ninside the method", style="bold"))
                _print_table(inside)
        else:
            texts = {"markdown": result.markdown, "latex": result.latex, "csv": result.csv, "html": result.html}
            typer.echo(texts[form](), nl=form is Form.html)
    if report is not None and not failed:
        _say(f"wrote {report}", "")
    if failed:
        raise typer.Exit(failed)


@_command(_LEARN, "list")
def list_(
    what: Annotated[Kind, typer.Argument(help="Of what kind.")],
) -> None:
    """What there is to choose from, with a line about each.

    \b
    Example:
      fedprism list methods
    """
    with _told(), _loading():
        header, rows = _listed(what)
    if not rows:
        typer.echo("There is no folder experiments/ with configurations here; it comes with the source of fedprism.")
        return
    listing = RichTable(box=None, pad_edge=False, header_style="bold")
    for name in header:
        listing.add_column(
            name,
            justify="right" if name == "lines" else "left",
            no_wrap=name in header[: 2 if what is Kind.methods else 1],
        )
    for row in rows:
        listing.add_row(*map(Text, row))
    _out().print(listing)
    if what is Kind.methods:
        count = sum(bool(row[header.index("lines")]) for row in rows)
        told = f"{count} methods. lines: of code in its file, imports aside. `fedprism explain METHOD` says more."
        _out().print(Text(told, style="dim"))


@_command(_LEARN)
def explain(
    method: Annotated[str, typer.Argument(help="A name of [b]fedprism list methods[/b], or path/to/file.py:Class.")],
    model: Annotated[
        str,
        typer.Option(
            help="Count bytes for this model: a name, [b]{name: resnet18, width: 16}[/b], or a list of them for "
            "clients of different architectures."
        ),
    ] = "lenet-bn",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="method.KEY=VALUE", help="A setting of the method. May be repeated."),
    ] = None,
    classes: Annotated[int, typer.Option(min=2, help="Classes of the data.")] = 10,
    image_size: Annotated[int, typer.Option(min=1, help="Pixels a side; three channels.")] = 32,
) -> None:
    """What a method does: its paper, what stays at home, its settings, and the bytes that it sends.

    \b
    Example:
      fedprism explain ditto
      fedprism explain fedproto --model resnet18 --classes 100
      fedprism explain fedsce --model lenet-bn,resnet18,vit-tiny
      fedprism explain fedsce --model "\\[lenet-bn, {name: resnet18, width: 16}]"
      fedprism explain lg-fedavg --set method.warmup=0 --model resnet18,resnet34
    """
    with _told(), _loading():
        from fedprism.methods import find, make
        from fedprism.report.explain import REQUIRED, data_in_words, decided, facts_of, settings_of, traffic

        cls = find(method)
        known = settings_of(cls)
        odd = [text for text in settings or [] if not text.startswith("method.")]
        if odd:
            raise ConfigError(f"--set {odd[0]!r}: `explain` takes settings of the method only, such as method.mu=0.1.")
        base = {"method": {"name": method}}
        given = configuration.structure(configuration.override(base, settings or []), Config).method
        required = [name for name, default, _, _ in known if default == REQUIRED and name not in given.settings]
        if required:
            raise ConfigError(
                f"{method} has no default for {', '.join(required)}, so it cannot be tried; give it one, or write "
                f"--set method.{required[0]}=VALUE."
            )
        made, models = make(given), _model(model)
        rounds = Config().train.rounds
    with _told():
        counted = traffic(made, models, classes, image_size, rounds)
    out = _out()
    out.print(Text(cls.id or method, style="bold"), Text(cls.idea), sep="\n")
    facts = RichTable(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, value in {**facts_of(made), **decided(made, counted)}.items():
        facts.add_row(name, Text(value))
    out.print(facts)
    out.print()
    if known:
        table = RichTable(box=None, pad_edge=False, header_style="bold")
        table.add_column("setting", no_wrap=True)
        for column in ("default", "values", "meaning"):
            table.add_column(column)
        for name, default, values, doc in known:
            table.add_row(f"method.{name}", Text(json.dumps(default, default=str)), Text(values), Text(doc))
        out.print(table)
    else:
        out.print("It has no settings of its own.")
    out.print()
    data = data_in_words(models, classes, image_size)
    if len(counted) > 1:
        _print_counted(counted, data, rounds)
        return
    (one,) = counted
    where, first, last = f"{one.arch.label}, {data}, {one.clients} clients", one.first, one.last
    out.print(Text(f"A client and round, {where}: {_bytes(first.down)} down, {_bytes(first.up)} up."))
    if last != first:
        out.print(Text(f"In the last of {rounds} rounds: {_bytes(last.down)} down, {_bytes(last.up)} up."))


@_command(_LEARN)
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
        int | None, typer.Option(min=2, help="Training images a client, at most; left out: see the table's notes.")
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

    All contenders of a row take turns, round by round (on a GPU one comes after the other), when they are warm; figures
    are medians of the whole round (download, train, upload, average, evaluate) and of the training part alone. A row
    that is there already is skipped, so that the same command goes on where it was stopped. Writes a JSON file and a
    Markdown page beside it, with date, versions, device and load.

    \b
    Example:
      fedprism bench --quick
      fedprism bench cnn4-n20-b10 --methods fedavg,fedcp --device cuda
      fedprism bench --options
      fedprism bench --growth --out measured
    """
    again = "The same command goes on: rows that are there are skipped."
    with _told(), _loading():
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
            methods=None if methods is None else tuple(_names(methods)),
            engines=None if engines is None else tuple(_names(engines, "--engines", "serial,inprocess")),
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
    with _told(again), Rows(_err()) as rows:
        rows.say(f"{'Goes on with' if path.exists() else 'Writes'} {path}.")
        for measure in instead.values() or (measure_engines, measure_roofline):
            measure(asked, results, rows)
    shown = _out()
    for title, grid in grids(results).items():
        shown.print(Text(f"\n{title}", style="bold"))
        if shown.is_terminal:
            shown.print(fitting(title, grid))
        else:
            typer.echo(str(grid))
    _next(("figures", str(results.path)), ("the tables", str(results.path.with_suffix(".md"))))


# --- data ------------------------------------------------------------------------------------------------------------


@_command(None, "list", data_app)
def list_data(root: Root = None) -> None:
    """Every dataset: whether it is there, how many classes and domains it has, and under which licence it is published.

    \b
    Example:
      fedprism data list
      FEDPRISM_DATA=/srv/data fedprism data list
    """
    with _told(), _loading():
        from fedprism.data.places import root_of
        from fedprism.report.datasets import COMPACT, READY, datasets

        place = root_of(_placed(root))
        listing = RichTable(box=None, pad_edge=False, header_style="bold")
        for column in ("dataset", "files", "classes", "domains", "licence"):
            number = column in ("classes", "domains")
            listing.add_column(column, no_wrap=column != "licence", justify="right" if number else "left")
        rows = datasets(place)
        for row in rows:
            listing.add_row(*map(Text, row), style="green" if row.state in (READY, COMPACT) else "")
    _out().print(listing)
    part = ("compact", "re-packed files, which may hold a part of a dataset only; inspect says how much")
    _next(
        *([part] if any(row.state == COMPACT for row in rows) else []),
        ("looked for files in", f"{place} (--root, data.root and $FEDPRISM_DATA name another folder)"),
        ("fetch one", "fedprism data prepare NAME"),
        ("look at one", "fedprism data inspect NAME"),
    )


@_command(None, "prepare", data_app)
def prepare_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of [b]fedprism data list[/b].")],
    root: Root = None,
) -> None:
    """Download a dataset as it was published, check it, and convert it once.

    The licence is shown first. A download that was cut off goes on where it stopped; what is there already is not
    fetched again.

    \b
    Example:
      fedprism data prepare cifar100
      fedprism data prepare office-caltech-10 --root /srv/data
    """
    with _told("The same command goes on."), _loading():
        from fedprism.data import DATASETS, load
        from fedprism.data.places import root_of
        from fedprism.data.sources import NAMES, prepare
        from fedprism.report.datasets import shortfall

        if name.partition(":")[0] == "folder":
            raise ConfigError(
                f"{name!r} has nothing to download: folder:PATH reads images of your own where they lie. "
                "`fedprism data inspect folder:PATH` looks at them."
            )
        if name in DATASETS and name not in NAMES:
            raise ConfigError(f"{name!r} is made here and has nothing to download; it is ready.")
        config = dataclasses.replace(_placed(root), name=name)
        place = root_of(config)
    with _told("The same command goes on where it was stopped."):
        prepare(name, place, _err())
        if name in DATASETS:  # mnist-m, svhn, usps and synth-digits are parts of digits-five only
            made = load(config, 0)
            held = f"{len(made):,} {'texts' if made.words else 'images'}"
            _say(f"{name} is ready: {shortfall(made, name) or held}.", "green")
    look = f"fedprism data inspect {name if name in DATASETS else 'digits-five'}"
    _next(("files", str(place)), ("look at it", look if root is None else f"{look} --root {root}"))


@_command(None, "inspect", data_app)
def inspect_data(
    what: Annotated[
        str, typer.Argument(metavar="NAME|CONFIG.yaml", help="A dataset, folder:PATH, or the data of a configuration.")
    ],
    partition: Annotated[
        str | None, typer.Option(help="How images are dealt: a name of [b]fedprism list partitions[/b].")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="How many clients; left out: as the partition says.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the dealing; left out: 0, or the configuration's.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Such as [b]data.partition.alpha=0.1[/b]. May be repeated."),
    ] = None,
    root: Root = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for clients.csv, bubbles.png and contact-sheet.png.")
    ] = None,
) -> None:
    """Who has how much of what: counts of every client and class, and how different the clients are.

    With --out, the whole table as CSV, a circle for each client and class, and images of every client are written.

    \b
    Example:
      fedprism data inspect digits-skew
      fedprism data inspect cifar100 --partition dirichlet --clients 20 \\
          --set data.partition.alpha=0.1 --out look
      fedprism data inspect folder:hospitals
      fedprism data inspect mine.yaml --seed 1
    """
    with _told(), _loading():
        from fedprism.federation import describe, make_federation
        from fedprism.federation.base import inputs_in_words
        from fedprism.report import inspection

        config = _inspected(what, partition, clients, seed, settings or [], root)
        if out is not None:
            inspection.check_folder(out)
    with _told():
        federation = make_federation(config.data, config.seed)
        seen, described = inspection.inspected(federation), describe(federation)
        said = None if out is None else inspection.write(seen, out)  # before printing: whoever reads may stop early
        number = f"{len(federation.clients)} client{'s' if len(federation.clients) > 1 else ''}"
        held = f"{number}, {federation.classes} classes, {inputs_in_words(federation.shape)}"
        shown = _out()
        shown.print(Text(f"{federation.name}: {held}", style="bold"))
        if seen.short:
            shown.print(Text(f"This copy is not all of it: {seen.short}.", style="yellow"), soft_wrap=True)
        shown.print(Text(f"partition {seen.partition}; seed {config.seed}", style="dim"), soft_wrap=True)
        shown.print(Text(seen.preparation, style="dim"), soft_wrap=True)
        _print_table(inspection.Holdings(seen))
        shown.print(Text(inspection.rest(federation)))
        shown.print()
        shown.print(Text(str(described)), soft_wrap=True)
        figures = RichTable(box=None, show_header=False, pad_edge=False)
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column(justify="right")
        for name, value in described.numbers().items():
            figures.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.3f}")
        shown.print(figures)
        if out is None or said is None:
            _next(("all counts, a plot and a contact sheet", "the same command with --out FOLDER"))
        else:
            _next(*((f"{out / name}", words) for name, words in said.items()))


def _placed(root: Path | None) -> DataConfig:
    return DataConfig(root=None if root is None else str(root))


def _inspected(
    what: str,
    partition: str | None,
    clients: int | None,
    seed: int | None,
    settings: Sequence[str],
    root: Path | None,
) -> Config:
    """The configuration that `inspect` is asked about; --set has the last word."""
    from fedprism.data import DATASETS

    given = {"data.partition.name": partition, "data.partition.clients": clients, "seed": seed}
    given["data.root"] = None if root is None else str(root)
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    if not what.startswith("folder:") and (what.endswith((".yaml", ".yml")) or Path(what).is_file()):
        return configuration.read(what, [*overrides, *settings])
    if what not in DATASETS and Path(what).is_dir():
        raise ConfigError(f"{what} is a folder; for images of your own write folder:{what}.")
    raw = configuration.override({"data": {"name": what, "partition": "domain"}}, [*overrides, *settings])
    return configuration.structure(raw, Config)


# --- what commands are made of ---------------------------------------------------------------------------------------


def _read(path: Path | None, settings: Sequence[str], method: str | None) -> Config:
    """The configuration of a command; another method than the file's does not inherit its settings."""
    inherits = method is None or (path is not None and configuration.read(path).method.name == method)
    overrides = [*([] if inherits else [f"method={json.dumps({'name': method})}"]), *settings]
    if path is None:
        return configuration.structure(configuration.override(configuration.plain(Config()), overrides), Config)
    return configuration.read(path, overrides)


def _model(text: str) -> ModelConfig:
    """The models of `explain`: a name, a mapping with a name, or several of them in a list or separated by commas."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError:
        raw = None
    if isinstance(raw, str) and "," in raw:
        raw = [name.strip() for name in raw.split(",")]
    if isinstance(raw, list):
        raw = {"per_client": raw}
    listed = raw.get("per_client", []) if isinstance(raw, dict) else []
    if not isinstance(raw, str | dict) or not isinstance(listed, list):
        raise ConfigError(
            f"--model is {text!r}; expected a model's name, a mapping such as {{name: resnet18, width: 16}}, or a "
            "list of them such as [lenet-bn, mlp]."
        )
    return configuration.structure(raw, ModelConfig, "model")


def _print_counted(counted: Sequence[Counted], data: str, rounds: int) -> None:
    """A row an architecture, with the bytes of a client that has it."""
    out, last = _out(), any(each.last != each.first for each in counted)
    out.print(Text(f"A client and round, {data}, {sum(each.clients for each in counted)} clients:"))
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    more = (f"down, round {rounds}", f"up, round {rounds}") if last else ()
    for column in ("parameters", "features", "bytes down", "bytes up", *more):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    for each in counted:
        sizes = (each.first.down, each.first.up, *((each.last.down, each.last.up) if last else ()))
        numbers = (each.arch.parameters, each.arch.width, *sizes)
        table.add_row(Text(each.arch.label), *(f"{number:,}" for number in numbers))
    out.print(table)


def _names(text: str, option: str = "--methods", such: str = "local,fedavg,fedbn") -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option} is {text!r}; expected names separated by commas, such as {such}.")
    return names


def _numbers(text: str | None, default: int) -> list[int]:
    try:
        return [default] if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seeds is {text!r}; expected whole numbers separated by commas, such as 0,1,2.") from None


def _check(protocol: str | None) -> None:
    """Tell of a mistaken protocol before anything is trained."""
    from fedprism.records import Protocol

    if protocol is not None:
        Protocol.parse(protocol)


def _progress(configs: Sequence[Config]) -> Progress:
    """A progress line for the runs that are still to be done."""
    from fedprism.methods import find
    from fedprism.report.progress import Progress

    rounds = configs[0].train.rounds if configs else 0
    methods = [find(config.method.name).id for config in configs]
    return Progress(_err(), methods, rounds, seeds=len({config.seed for config in configs}))


def _table(runs: Sequence[Run], protocol: str | None) -> Table:
    from fedprism.report.table import table

    return table([run.record for run in runs], protocol)


def _print_table(result: Table | Grid | Holdings) -> None:
    """As wide as the terminal allows; in a file or a pipe as wide as it is."""
    out = _out()
    if out.is_terminal:
        out.print(result)
    else:
        typer.echo(str(result))


def _report(folder: Path, runs: Sequence[Run], protocol: str | None) -> Path:
    from fedprism.report.html import write_page

    return write_page(folder / "report.html", [run.record for run in runs], protocol)


def _write(path: Path, text: str) -> None:
    from fedprism import atomic

    with atomic.reporting(str(path), "The runs are safe; make room and use `fedprism show` on them."):
        atomic.write(path, text.encode())


def _after(done: Run, protocol: str | None) -> None:
    """The end of a single run."""
    _print_table(done.table(protocol))
    _next(("the run", str(done.path)), ("the table again", f"fedprism show {done.path}"))
    if done.status == "diverged":
        raise typer.Exit(1)


def _own_demo(folder: Path, cells: Sequence[Cell]) -> None:
    """Clear away the runs of an earlier demo; anything else that is there is somebody's work, and stays."""
    from filelock import FileLock, Timeout

    from fedprism import atomic
    from fedprism.records import runfile
    from fedprism.records.rundir import LOCK

    note = folder / _DEMO_NOTE
    if folder.exists() and not note.exists() and any(folder.iterdir()):
        raise RecordError(f"{folder} holds something that `fedprism demo` has not written; choose another --out.")
    with atomic.reporting(str(folder), "Choose another --out."):
        for path in (cell.path for cell in cells if runfile.exists(cell.path)):
            try:
                FileLock(path / LOCK, timeout=0).acquire().lock.release()
            except Timeout:
                raise RecordError(f"another demo is writing {path}; wait for it, or choose another --out.") from None
            shutil.rmtree(path)
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(note, b"The runs of `fedprism demo`. The next demo replaces them.\n")


def _found(paths: Sequence[Path]) -> list[list[Path]]:
    """Run directories by table: those that are named together, those that are found by their folder."""
    from fedprism.records import runfile

    named = [path for path in paths if runfile.exists(path)]
    groups: dict[Path, list[Path]] = {}
    for path in paths:
        if path in named:
            continue
        if not path.is_dir():
            runfile.read(path)  # says what is wrong
        below = sorted(file.parent for file in path.rglob(runfile.NAME))
        if not below:
            raise RecordError(f"there is no run in {path} or below it; `fedprism run` makes one.")
        for directory in below:
            groups.setdefault(directory.parent, []).append(directory)
    return [*([named] if named else []), *groups.values()]


def _in_order(record: RunRecord) -> tuple[int, str, int]:
    from fedprism.methods import METHODS

    known = list(METHODS)
    return (known.index(record.method) if record.method in known else len(known), record.method, record.seed)


def _common(paths: Sequence[Path]) -> Path:
    """The folder that all of these directories lie in."""
    return Path(os.path.commonpath([path.parent for path in paths]))


def _listed(what: Kind) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of `fedprism list`."""
    import fedprism.engines.choose  # noqa: F401 - registers every engine
    from fedprism.data import DATASETS
    from fedprism.engines.inprocess import ENGINES
    from fedprism.engines.serverside import OPTIMIZERS
    from fedprism.federation import PARTITIONS
    from fedprism.methods import by_idea
    from fedprism.models import MODELS
    from fedprism.report.explain import cited, code_lines

    if what is Kind.methods:
        rows = []
        for group, found in by_idea().items():
            of_group = [[name, cls.stays, str(code_lines(cls)), cited(cls.paper)] for name, cls in found.items()]
            if group == "server-side":  # settings, for any method that averages weights
                for name, paper in OPTIMIZERS.items():
                    known_as, _, source = paper.partition(": ")
                    of_group.append([f"({known_as})", f"a setting: server.optimizer: {name}", "", cited(source)])
            rows += [[group if place == 0 else "", *row] for place, row in enumerate(of_group)]
        return ["idea", "method", "stays with the client", "lines", "paper"], rows
    if what is Kind.models:
        return ["model", ""], [[name, family.description] for name, family in MODELS.items()]
    if what is Kind.experiments:
        return ["experiment", ""], [[str(file), _told_by(file)] for file in sorted(Path("experiments").rglob("*.yaml"))]
    kinds: dict[Kind, Any] = {Kind.datasets: DATASETS, Kind.partitions: PARTITIONS, Kind.engines: ENGINES}
    return [what.removesuffix("s"), ""], [[name, _first_line(item)] for name, item in kinds[what].items()]


def _told_by(file: Path) -> str:
    """What a configuration says of itself after its command: up to the first colon."""
    lines = file.read_text(encoding="utf-8").splitlines()[1:2]
    return lines[0].removeprefix("# ").partition(":")[0] if lines and lines[0].startswith("# ") else ""


def _first_line(item: Any) -> str:
    return (item.__doc__ or "").strip().partition("\n")[0]


def _bytes(size: int) -> str:
    from fedprism.report.html import amount

    return f"{amount(size)} ({size:,} bytes)" if size >= 1000 else f"{size} bytes"


def _version() -> str:
    try:
        return metadata.version("fedprism")
    except metadata.PackageNotFoundError:
        return "(not installed)"


# --- what a user is told ---------------------------------------------------------------------------------------------


def _out() -> Console:
    return Console()


def _err() -> Console:
    return Console(stderr=True)


def _say(message: str, style: str) -> None:
    _err().print(Text(message, style=style), soft_wrap=True)


def _next(*hints: tuple[str, str]) -> None:
    """Where to look now."""
    out = _out()
    out.print()
    for what, where in hints:
        out.print(Text.assemble((f"{what}: ", "dim"), where), soft_wrap=True)


@contextmanager
def _told(interrupted: str = "", begun: Path | None = None) -> Iterator[None]:
    """Mistakes and interruptions as one message each, without a traceback; warnings as one line each.

    `interrupted` says how to go on; where nothing lies at `begun` yet, there is nothing to go on with.
    """

    def warn(message: Warning | str, *_: Any, **__: Any) -> None:
        _say(f"warning: {message}", "yellow")

    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn
            yield
    except FedprismError as error:
        _say(f"error: {error}", "red")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        nothing = begun is not None and not begun.exists()
        _say("stopped. Nothing was begun." if nothing else f"stopped. {interrupted}".strip(), "yellow")
        raise typer.Exit(130) from None


@contextmanager
def _loading() -> Iterator[None]:
    """PyTorch takes a while to load: say so on a terminal."""
    console = _err()
    if console.is_terminal and "torch" not in sys.modules:
        with console.status("loading PyTorch …"):
            yield
    else:
        yield
