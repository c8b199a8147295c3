"""Commands to look things up: list and explain."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as RichTable
from rich.text import Text

from fedprism import config as configuration
from fedprism import index, limits
from fedprism.cli.app import LEARN, command
from fedprism.cli.output import loading, stdout, user_errors
from fedprism.config import Config, ModelConfig
from fedprism.errors import ConfigError, shown
from fedprism.files import read_text
from fedprism.yamlfile import parse_yaml

if TYPE_CHECKING:
    from fedprism.explain import Counted


class Listing(StrEnum):
    """What `list` lists."""

    methods = "methods"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"
    transforms = "transforms"
    aggregators = "aggregators"
    engines = "engines"
    experiments = "experiments"


# --- list ------------------------------------------------------------------------------------------------------------


@command(LEARN, "list")
def list_(
    what: Annotated[Listing, typer.Argument(help="What to list.")],
) -> None:
    """What there is to choose from, with a line about each.

    \b
    Example:
      fedprism list methods
    """
    with user_errors():
        header, rows = _LISTS[what]()
    if not rows:
        typer.echo("There is no folder experiments/ with configurations here; it comes with the source of fedprism.")
        return
    listing = RichTable(box=None, pad_edge=False, header_style="bold")
    for name in header:
        listing.add_column(
            name,
            justify="right" if name == "lines" else "left",
            no_wrap=name in header[: 2 if what is Listing.methods else 1],
        )
    for row in rows:
        listing.add_row(*map(Text, row))
    stdout().print(listing)
    if what is Listing.methods:
        count = sum(bool(row[header.index("lines")]) for row in rows)
        note = f"{count} methods. lines: of code in its file, imports aside. `fedprism explain METHOD` says more."
        stdout().print(Text(note, style="dim"))


Listed = tuple[list[str], list[list[str]]]  # header, rows


def _methods() -> Listed:
    """Methods by idea, then the server's optimisers, which are settings of any method that averages weights."""
    groups: dict[str, list[list[str]]] = {group: [] for group in index.constant("fedprism.methods", "GROUPS")}
    for name, entry in index.entries("methods").items():
        row = [name, entry.facts["stays"], str(index.code_lines(entry.path)), _cited(entry.facts["paper"])]
        groups.setdefault(entry.facts["group"], []).append(row)
    for group, row in _installed_methods():
        groups.setdefault(group, []).append(row)
    for name, paper in index.constant("fedprism.methods.server_optimizer", "OPTIMIZERS").items():
        known_as, _, source = paper.partition(": ")
        groups["server-side"].append([f"({known_as})", f"a setting: server.optimizer: {name}", "", _cited(source)])
    rows = [[group if place == 0 else "", *row] for group, found in groups.items() for place, row in enumerate(found)]
    return ["idea", "method", "stays with the client", "lines", "paper"], rows


def _installed_methods() -> list[tuple[str, list[str]]]:
    """The methods of installed packages, each with its idea. These are imported."""
    names = {entry.name for entry in entry_points(group="fedprism.methods")} - set(index.entries("methods"))
    if not names:
        return []
    with loading():
        from fedprism.methods import available
    rows = []
    for name, cls in available().items():
        if name in names:
            lines = index.code_lines(Path(inspect.getsourcefile(cls) or ""))
            rows.append((cls.group, [name, cls.stays, str(lines), _cited(cls.paper)]))
    return rows


def _cited(paper: str) -> str:
    """A paper in short: authors, venue and year.

    >>> _cited("Oh et al., FedBABU: Toward Enhanced Representation, ICLR 2022")
    'Oh et al., ICLR 2022'
    >>> _cited("training alone; the papers call it Local, SOLO or SingleSet")
    'training alone'
    """
    parts = paper.split(", ")
    return f"{parts[0]}, {parts[-1]}" if parts[-1][-4:].isdigit() else paper.partition(";")[0]


def _models() -> Listed:
    return ["model", ""], [[name, entry.facts["description"]] for name, entry in index.entries("models").items()]


def _named(kind: str) -> Listed:
    """What is built in, then what installed packages offer. Nothing is imported."""
    known = index.entries(kind)
    offered = {
        entry.name: f"of an installed package: {entry.value}" for entry in entry_points(group=f"fedprism.{kind}")
    }
    lines = {name: entry.line for name, entry in known.items()}
    lines |= {name: line for name, line in sorted(offered.items()) if name not in known}
    return [kind.removesuffix("s"), ""], [[name, line] for name, line in lines.items()]


def _experiments() -> Listed:
    return ["experiment", ""], [[str(file), _about(file)] for file in sorted(Path("experiments").rglob("*.yaml"))]


def _about(file: Path) -> str:
    """What a configuration says about itself: its second line, up to the first colon."""
    lines = read_text(file).splitlines()[1:2]
    return lines[0].removeprefix("# ").partition(":")[0] if lines and lines[0].startswith("# ") else ""


_LISTS: dict[Listing, Callable[[], Listed]] = {
    Listing.methods: _methods,
    Listing.datasets: partial(_named, "datasets"),
    Listing.models: _models,
    Listing.partitions: partial(_named, "partitions"),
    Listing.transforms: partial(_named, "transforms"),
    Listing.aggregators: partial(_named, "aggregators"),
    Listing.engines: partial(_named, "engines"),
    Listing.experiments: _experiments,
}


# --- explain ---------------------------------------------------------------------------------------------------------


@command(LEARN)
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
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the method, or [b]transforms[/b]. May be repeated."
        ),
    ] = None,
    classes: Annotated[int, typer.Option(min=2, max=limits.CLASSES, help="Classes of the data.")] = 10,
    image_size: Annotated[int, typer.Option(min=1, max=limits.SIDE, help="Pixels a side; three channels.")] = 32,
) -> None:
    """What a method does: its paper, what stays with the client, its settings, and the bytes that it sends.

    \b
    Example:
      fedprism explain ditto
      fedprism explain fedproto --model resnet18 --classes 100
      fedprism explain fedsce --model lenet-bn,resnet18,vit-tiny
      fedprism explain fedsce --model "\\[lenet-bn, {name: resnet18, width: 16}]"
      fedprism explain lg-fedavg --set method.warmup=0 --model resnet18,resnet34
      fedprism explain fedavg --set "transforms=\\[{name: quantize, bits: 8}]"
    """
    with user_errors(), loading():
        from fedprism.explain import REQUIRED, changes, data_in_words, decided, facts_of, settings_of, traffic
        from fedprism.methods import find, make
        from fedprism.transforms import make_transforms

        cls = find(method)
        known = settings_of(cls)
        odd = [text for text in settings or [] if not text.startswith(("method.", "transforms="))]
        if odd:
            raise ConfigError(
                f"--set {odd[0]!r}: `explain` takes transforms=[...] and settings of the method, such as method.mu=0.1."
            )
        base = {"method": {"name": method}}
        config = configuration.structure(configuration.override(base, settings or []), Config)
        given = config.method
        required = [name for name, default, _, _ in known if default == REQUIRED and name not in given.settings]
        if required:
            raise ConfigError(
                f"{method} has no default for {', '.join(required)}, so it cannot be tried; give it one, or write "
                f"--set method.{required[0]}=VALUE."
            )
        made, models = make(given), _parse_models(model)
        rounds = Config().train.rounds
    with user_errors():
        counted = traffic(made, models, classes, image_size, rounds, config.transforms)
    out = stdout()
    out.print(Text(cls.id or method, style="bold"), Text(cls.idea), sep="\n")
    facts = RichTable(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    facts_of_all = {**facts_of(made), **decided(made, counted), **changes(config.transforms)}
    for name, value in facts_of_all.items():
        facts.add_row(name, Text(value))
    out.print(facts)
    out.print()
    if not known:
        out.print(f"{cls.id or method} has no settings of its own.")
    rows = [("method", *setting) for setting in known]
    for place, transform in enumerate(make_transforms(config.transforms)):
        rows += [(f"transforms[{place}]", *setting) for setting in settings_of(type(transform))]
    if rows:
        table = RichTable(box=None, pad_edge=False, header_style="bold")
        table.add_column("setting", no_wrap=True)
        for column in ("default", "values", "meaning"):
            table.add_column(column)
        for of, name, default, values, doc in rows:
            table.add_row(Text(f"{of}.{name}"), Text(json.dumps(default, default=str)), Text(values), Text(doc))
        out.print(table)
    out.print()
    _print_traffic(counted, data_in_words(models, classes, image_size), rounds)


def _parse_models(text: str) -> ModelConfig:
    """The models of `explain`: a name, a mapping with a name, or several of them in a list or separated by commas."""
    raw = parse_yaml(text, f"--model {shown(text)}")
    if isinstance(raw, str) and "," in raw:
        raw = [name.strip() for name in raw.split(",")]
    if isinstance(raw, list):
        raw = {"per_client": raw}
    listed = raw.get("per_client", []) if isinstance(raw, dict) else []
    if not isinstance(raw, str | dict) or not isinstance(listed, list):
        raise ConfigError(
            f"--model is {shown(text)}; expected a model's name, a mapping such as {{name: resnet18, width: 16}}, or a "
            "list of them such as [lenet-bn, mlp]."
        )
    return configuration.structure(raw, ModelConfig, "model")


def _print_traffic(counted: Sequence[Counted], data: str, rounds: int) -> None:
    """The bytes per client and round: in words for one architecture, a row each for several."""
    out = stdout()
    if len(counted) == 1:
        one, first, last = counted[0], counted[0].first, counted[0].last
        where = f"{one.arch.label}, {data}, {one.clients} clients"
        out.print(Text(f"Per client and round, {where}: {_bytes(first.down)} down, {_bytes(first.up)} up."))
        if last != first:
            out.print(Text(f"In the last of {rounds} rounds: {_bytes(last.down)} down, {_bytes(last.up)} up."))
        return
    changes = any(each.last != each.first for each in counted)
    out.print(Text(f"Per client and round, {data}, {sum(each.clients for each in counted)} clients:"))
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    table.add_column("model")
    more = (f"down, round {rounds}", f"up, round {rounds}") if changes else ()
    for column in ("parameters", "features", "bytes down", "bytes up", *more):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    for each in counted:
        sizes = (each.first.down, each.first.up, *((each.last.down, each.last.up) if changes else ()))
        numbers = (each.arch.parameters, each.arch.width, *sizes)
        table.add_row(Text(each.arch.label), *(f"{number:,}" for number in numbers))
    out.print(table)


def _bytes(size: int) -> str:
    from fedprism.report.html import amount

    return f"{amount(size)} ({size:,} bytes)" if size >= 1000 else f"{size} bytes"
