"""`fedprism data`: list datasets, fetch one, look at one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table as RichTable
from rich.text import Text

from fedprism import config as configuration
from fedprism.cli.app import command, data_app
from fedprism.cli.options import RootOption
from fedprism.cli.output import loading, print_message, print_next_steps, print_table, stderr, stdout, user_errors
from fedprism.config import Config, DataConfig
from fedprism.errors import ConfigError


@command(None, "list", data_app)
def list_data(root: RootOption = None) -> None:
    """Every dataset: whether its files are here, its classes and domains, and the licence that it is published under.

    \b
    Example:
      fedprism data list
      FEDPRISM_DATA=/srv/data fedprism data list
    """
    with user_errors(), loading():
        from fedprism.data.places import root_of
        from fedprism.inspection.datasets import COMPACT, READY, datasets

        place = root_of(_data_config(root))
        listing = RichTable(box=None, pad_edge=False, header_style="bold")
        for column in ("dataset", "files", "classes", "domains", "licence"):
            number = column in ("classes", "domains")
            listing.add_column(column, no_wrap=column != "licence", justify="right" if number else "left")
        rows = datasets(place)
        for row in rows:
            listing.add_row(*map(Text, row), style="green" if row.state in (READY, COMPACT) else "")
    stdout().print(listing)
    part = ("compact", "re-packed files, which may hold a part of a dataset only; inspect says how much")
    print_next_steps(
        *([part] if any(row.state == COMPACT for row in rows) else []),
        ("looked for files in", f"{place} (--root, data.root and $FEDPRISM_DATA name another folder)"),
        ("fetch one", "fedprism data prepare NAME"),
        ("look at one", "fedprism data inspect NAME"),
    )


@command(None, "prepare", data_app)
def prepare_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name of [b]fedprism data list[/b].")],
    root: RootOption = None,
) -> None:
    """Download a dataset as it was published, check it, and convert it once.

    The licence is shown first. A download that was cut off goes on where it stopped. Files that are already there
    are not fetched again.

    \b
    Example:
      fedprism data prepare cifar100
      fedprism data prepare office-caltech-10 --root /srv/data
    """
    with user_errors("The same command goes on."), loading():
        from fedprism.data import DATASETS, load
        from fedprism.data.places import root_of
        from fedprism.data.sources import NAMES, prepare
        from fedprism.inspection.datasets import shortfall

        if name.partition(":")[0] == "folder":
            raise ConfigError(
                f"{name!r} has nothing to download: folder:PATH reads images of your own where they lie. "
                "`fedprism data inspect folder:PATH` looks at them."
            )
        if name in DATASETS and name not in NAMES:
            raise ConfigError(f"{name!r} is made here and has nothing to download; it is ready.")
        config = dataclasses.replace(_data_config(root), name=name)
        place = root_of(config)
    with user_errors("The same command goes on where it was stopped."):
        prepare(name, place, stderr())
        if name in DATASETS:  # mnist-m, svhn, usps and synth-digits are parts of digits-five only
            made = load(config, 0)
            size = f"{len(made):,} {'texts' if made.words else 'images'}"
            print_message(f"{name} is ready: {shortfall(made, name) or size}.", "green")
    look = f"fedprism data inspect {name if name in DATASETS else 'digits-five'}"
    print_next_steps(("files", str(place)), ("look at it", look if root is None else f"{look} --root {root}"))


@command(None, "inspect", data_app)
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
    root: RootOption = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for clients.csv, bubbles.png and contact-sheet.png.")
    ] = None,
) -> None:
    """Samples per client and class, and how different the clients are.

    With --out, the whole table as CSV, a plot with a circle per client and class, and images of every client are
    written.

    \b
    Example:
      fedprism data inspect digits-skew
      fedprism data inspect cifar100 --partition dirichlet --clients 20 \\
          --set data.partition.alpha=0.1 --out look
      fedprism data inspect folder:hospitals
      fedprism data inspect mine.yaml --seed 1
    """
    with user_errors(), loading():
        from fedprism.federation import build_federation, describe
        from fedprism.federation.base import inputs_in_words
        from fedprism.inspection.clients import ClientTable, check_folder, inspect_federation, left_over, write_files

        config = _inspected_config(what, partition, clients, seed, settings or [], root)
        if out is not None:
            check_folder(out)
    with user_errors():
        federation = build_federation(config.data, config.seed)
        inspection, described = inspect_federation(federation), describe(federation)
        written = {} if out is None else write_files(inspection, out)  # before printing: the reader may close the pipe
        number = f"{len(federation.clients)} client{'s' if len(federation.clients) > 1 else ''}"
        size = f"{number}, {federation.classes} classes, {inputs_in_words(federation.shape)}"
        console = stdout()
        console.print(Text(f"{federation.name}: {size}", style="bold"))
        if inspection.short:
            console.print(Text(f"This copy is not all of it: {inspection.short}.", style="yellow"), soft_wrap=True)
        console.print(Text(f"partition {inspection.partition}; seed {config.seed}", style="dim"), soft_wrap=True)
        console.print(Text(inspection.preparation, style="dim"), soft_wrap=True)
        print_table(ClientTable(inspection))
        console.print(Text(left_over(federation)))
        console.print()
        console.print(Text(str(described)), soft_wrap=True)
        figures = RichTable(box=None, show_header=False, pad_edge=False)
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column(justify="right")
        for name, value in described.numbers().items():
            figures.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.3f}")
        console.print(figures)
        if out is None:
            print_next_steps(("all counts, a plot and a contact sheet", "the same command with --out FOLDER"))
        else:
            print_next_steps(*((f"{out / name}", words) for name, words in written.items()))


def _data_config(root: Path | None) -> DataConfig:
    return DataConfig(root=None if root is None else str(root))


def _inspected_config(
    what: str,
    partition: str | None,
    clients: int | None,
    seed: int | None,
    settings: Sequence[str],
    root: Path | None,
) -> Config:
    """The configuration that `inspect` is asked about. --set overrides the other options."""
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
