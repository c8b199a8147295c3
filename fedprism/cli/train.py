"""Commands that train: demo, run, compare and resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedprism import config as configuration
from fedprism.cli.app import START, TRAIN, command
from fedprism.cli.options import (
    ProtocolOption,
    SettingsOption,
    check_protocol,
    parse_names,
    parse_seeds,
    read_config,
)
from fedprism.cli.output import loading, print_message, print_next_steps, print_table, stderr, user_errors
from fedprism.config import Config
from fedprism.errors import ConfigError, FedprismError, RecordError

if TYPE_CHECKING:
    from fedprism.api import Run
    from fedprism.cli.progress import Progress
    from fedprism.planning import Cell

DEMO_METHODS = ("local", "fedavg", "fedprox", "fedbn", "fedrep", "ditto")
DEMO_ROUNDS, QUICK_ROUNDS = 30, 5
DEMO_MARK = ".fedprism-demo"  # in each directory that the demo makes
DEMO_TEXT = b"Made by `fedprism demo`, which replaces this directory when it is run again.\n"


@command(START)
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and report.html are written.")] = Path("demo"),
    rounds: Annotated[int | None, typer.Option(min=1, help=f"Rounds; {DEMO_ROUNDS} unless given.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"A first look: {QUICK_ROUNDS} rounds.")] = False,
    protocol: ProtocolOption = None,
) -> None:
    """Train six methods on five clients whose images look different, in about a minute.

    Each client has handwritten digits in a style of its own. Local trains alone, FedAvg and FedProx share everything,
    FedBN, FedRep and Ditto keep a part local. Prints a table and writes a page with curves, demo/report.html. Running
    it again replaces its earlier runs.

    \b
    Example:
      fedprism demo
      fedprism demo --quick --out /tmp/demo
    """
    again = f"`fedprism demo --out {out}` starts it anew."
    with user_errors(again), loading():
        from fedprism import api, planning, summary
        from fedprism.round.events import Callback, Plan

        check_protocol(protocol)
        # On the CPU everywhere: the models are tiny, and the figures are then nearly the same on every machine.
        given = {"train": {"rounds": rounds or (QUICK_ROUNDS if quick else DEMO_ROUNDS)}, "run": {"device": "cpu"}}
        config = configuration.structure(given, Config)
        folder = out / "runs"
        cells = planning.cells(config, DEMO_METHODS, [config.seed], "demo", folder)
        _clear_demo(out, cells)

        class Mark(Callback):
            """Marks each run directory once there is something in it."""

            def begin(self, plan: Plan) -> None:
                _mark(next(cell.path for cell in cells if cell.config == plan.config))

    with user_errors(again):
        with _progress([cell.config for cell in cells]) as progress:
            runs = api.compare(
                config,
                DEMO_METHODS,
                [config.seed],
                "demo",
                out=folder,
                summary=out,
                protocol=protocol,
                callbacks=[Mark(), progress],
            )
        print_table(api.table(runs, protocol))
        print_next_steps(
            ("curves, images and settings", str(out / summary.PAGE)),
            ("what a method does", "fedprism explain fedbn"),
            ("all there is to set", "fedprism run --print-config"),
        )


@command(TRAIN)
def run(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.yaml", help="What to run; see --print-config.")
    ] = None,
    settings: SettingsOption = None,
    method: Annotated[
        str | None,
        typer.Option(help="Instead of the file's: a name of [b]fedprism list methods[/b], or path/to/file.py:Class."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory; left out: run.out of the configuration.")] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the whole configuration, every default with a comment, and stop."),
    ] = False,
    protocol: ProtocolOption = None,
) -> None:
    """Train one method, as a configuration file says.

    The file has only what differs from the defaults. The run directory has the resolved configuration, metrics per
    client and round, and checkpoints; [b]fedprism resume[/b] goes on from them.

    \b
    Example:
      fedprism run --print-config > mine.yaml
      fedprism run mine.yaml --set train.rounds=50
      fedprism run mine.yaml --method fedprox --set method.mu=0.01 --out runs/weak
      fedprism run mine.yaml --method my_method.py:MyMethod --out runs/mine
    """
    with user_errors(), loading():
        from fedprism import api, planning
        from fedprism.explain import settings_of
        from fedprism.methods import find
        from fedprism.records import runfile

        check_protocol(protocol)
        asked = read_config(config, settings or [], method)
        resolved = planning.resolve(asked)
        if print_config:
            if asked.model.per_client == "folder":  # a file to be edited: each folder goes on naming its own model
                resolved = dataclasses.replace(resolved, model=asked.model)
            meanings = {name: doc for name, _, _, doc in settings_of(find(resolved.method.name))}
            typer.echo(configuration.commented(resolved, meanings), nl=False)
            return
        if config is None:
            raise ConfigError("there is no configuration to run; `fedprism run --print-config > mine.yaml` writes one.")
        directory = planning.directory_of(resolved, config.stem, out)
    with user_errors(f"`fedprism resume {directory}` goes on.", directory / runfile.NAME):
        with _progress([resolved]) as progress:
            done = api.run_config(resolved, config.stem, out=out, callbacks=[progress])
        _print_run(done, protocol)


@command(TRAIN)
def compare(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="What all runs have in common.")],
    methods: Annotated[
        str, typer.Option(metavar="A,B,...", help="Methods, separated by commas; include [b]local[/b] to see gains.")
    ],
    seeds: Annotated[
        str | None,
        typer.Option(metavar="0,1,...", help="Seeds, separated by commas; left out: the configuration's."),
    ] = None,
    settings: SettingsOption = None,
    out: Annotated[Path | None, typer.Option(help="The folder of the runs; left out: as run.out says.")] = None,
    protocol: ProtocolOption = None,
) -> None:
    """Train several methods with several seeds and print them in one table, mean ± deviation.

    Each run has its own directory. Finished runs are skipped and begun ones resumed, so the same command goes on where
    it was stopped. Beside the runs it writes comparison.csv, comparison.md and report.html. The settings of the file's
    own method are kept; the others have their papers' defaults.

    \b
    Example:
      fedprism compare examples/digits-skew.yaml \\
          --methods local,fedavg,fedbn,ditto --seeds 0,1,2
      fedprism compare mine.yaml --methods local,fedavg,my_method.py:MyMethod
    """
    again = "The same command goes on: finished runs are skipped, the one that was stopped is resumed."
    with user_errors(again), loading():
        from fedprism import api, planning, summary
        from fedprism.methods import find
        from fedprism.records import run_status
        from fedprism.records.read import common_folder

        check_protocol(protocol)
        base = read_config(config, settings or [], None)
        names, numbers = parse_names(methods), parse_seeds(seeds, base.seed)
        asked = [text for text in settings or [] if text.startswith("method.")]
        if asked and base.method.name not in names:
            raise ConfigError(
                f"--set {asked[0]} is for {base.method.name}, which is not among --methods {methods}; "
                "name the method that it is meant for with --set method.name=METHOD."
            )
        cells = planning.cells(base, names, numbers, config.stem, out)
        left = [cell.config for cell in cells if run_status(cell.path) not in api.ENDED]
    failed: list[str] = []

    def report(cell: Cell, error: Exception) -> None:
        failed.append(f"{find(cell.config.method.name).id} with seed {cell.config.seed}")
        kind = "" if isinstance(error, FedprismError) else f"{type(error).__name__}: "
        print_message(f"{failed[-1]} failed: {kind}{error}", "red")

    with user_errors(again):
        with _progress(left) as progress:
            runs = api.compare(
                base,
                names,
                numbers,
                config.stem,
                out=out,
                protocol=protocol,
                callbacks=[progress],
                on_error=report,
            )
        if runs:
            folder = common_folder(cell.path for cell in cells)
            print_table(api.table(runs, protocol))
            print_next_steps(
                ("figures", str(folder / summary.CSV)), ("curves, images and settings", str(folder / summary.PAGE))
            )
        if failed:
            print_message(f"{len(failed)} of {len(cells)} runs failed: {'; '.join(failed)}.", "red")
            raise typer.Exit(1)


@command(TRAIN)
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run that was stopped.")],
    protocol: ProtocolOption = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Execute Python files and modules that the run names; without it such a run is refused."
        ),
    ] = False,
    reset_damaged: Annotated[
        bool,
        typer.Option("--reset-damaged", help="Let clients whose state on disk is damaged begin anew; it is recorded."),
    ] = False,
) -> None:
    """Go on with a run that was stopped, from its newest checkpoint. The figures are those of a run without a stop.

    \b
    Example:
      fedprism resume runs/digits-skew/fedbn-0
    """
    with user_errors(), loading():
        from fedprism import api
        from fedprism.cli.progress import Progress
        from fedprism.records import read_run
        from fedprism.records.folder import recover
        from fedprism.round.events import Callback, Plan

        class PrintStart(Callback):
            """Prints where the run goes on, once a checkpoint has been loaded."""

            def begin(self, plan: Plan) -> None:
                kept, recorded = max(plan.first_round - 1, 0), len(record.rounds) - 1
                again = f"; rounds {kept + 1} to {recorded} are computed again" if recorded > kept else ""
                print_message(f"{path} goes on after round {kept} of {plan.rounds}{again}.", "dim")

        check_protocol(protocol)
        recover(path)
        record = read_run(path)
    with user_errors(f"`fedprism resume {path}` goes on."):
        if record.status in api.ENDED:
            print_message(f"{path} has already {record.status}; nothing is left to run.", "yellow")
        with Progress(stderr(), [record.method], record.config.train.rounds) as progress:
            again = [PrintStart(), progress]
            done = api.resume(path, callbacks=again, trust=trust, reset_damaged=reset_damaged)
        _print_run(done, protocol)


def _progress(configs: Sequence[Config]) -> Progress:
    """The progress line of the runs that are left."""
    from fedprism.cli.progress import Progress
    from fedprism.methods import find

    rounds = configs[0].train.rounds if configs else 0
    methods = [find(config.method.name).id for config in configs]
    return Progress(stderr(), methods, rounds, seeds=len({config.seed for config in configs}))


def _print_run(done: Run, protocol: str | None) -> None:
    """Print the table of a single run that has ended."""
    print_table(done.table(protocol))
    print_next_steps(("the run", str(done.path)), ("the table again", f"fedprism show {done.path}"))
    if done.status == "diverged":
        raise typer.Exit(1)


def _clear_demo(out: Path, cells: Sequence[Cell]) -> None:
    """Remove the runs of an earlier demo. What no demo has made is refused, and nothing of it is touched."""
    from fedprism import atomic, summary
    from fedprism.records import folder

    runs = out / "runs"
    with atomic.reporting(str(runs), "Choose another --out."):
        folder.refuse_dead_ends(runs)
        if not _is_marked(runs):
            made = [out / name for name in (summary.CSV, summary.MARKDOWN, summary.PAGE)]
            there = [path for path in made if path.exists()] + ([runs] if runs.exists() and any(runs.iterdir()) else [])
            if there:
                raise RecordError(
                    f"{there[0]} is not marked as made by `fedprism demo`, which would replace it; choose another "
                    "--out."
                )
        for path in (cell.path for cell in cells):
            if not path.exists() or (path.is_dir() and folder.unused(path)):
                continue
            if not _is_marked(path):
                raise RecordError(f"{path} is not marked as made by `fedprism demo`; choose another --out.")
            folder.refuse_links(path)
            ours = {path / name for name in (DEMO_MARK, *folder.FOLDERS)}.union(folder.own_files(path))
            if others := sorted(set(path.rglob("*")) - ours):
                raise RecordError(f"{others[0]} was not made by `fedprism demo`; move it away or choose another --out.")
        for path in (cell.path for cell in cells if _is_marked(cell.path)):
            lock = folder.locked(path)
            try:
                folder.remove(path)
                (path / DEMO_MARK).unlink()
                with suppress(OSError):  # something else lies there, and stays
                    path.rmdir()
            finally:
                lock.release()
        runs.mkdir(parents=True, exist_ok=True)
        _mark(runs)


def _mark(path: Path) -> None:
    """Mark a directory as the demo's own."""
    from fedprism import atomic

    with atomic.reporting(str(path), "Choose another --out."):
        atomic.write(path / DEMO_MARK, _mark_text(path))


def _mark_text(path: Path) -> bytes:
    """A run's mark is for that run: one that replaces it gets the other files of its directory, and so the mark."""
    from fedprism.records import runfile

    begun = f"Run of {runfile.read(path)['started']}.\n" if runfile.exists(path) else ""
    return DEMO_TEXT + begun.encode()


def _is_marked(path: Path) -> bool:
    """Whether the demo has made this directory: a link to one, or a file of that name with other text, is no mark."""
    from fedprism.records import runfile

    mark = path / DEMO_MARK
    if path.is_symlink() or mark.is_symlink() or not mark.is_file() or mark.stat().st_size > 2 * len(DEMO_TEXT):
        return False
    text = mark.read_bytes()
    return text == _mark_text(path) if runfile.exists(path) else text.startswith(DEMO_TEXT)
