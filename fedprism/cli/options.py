"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedprism import config as configuration
from fedprism.config import Config
from fedprism.errors import ConfigError, shown

ProtocolOption = Annotated[
    str | None,
    typer.Option(
        "--protocol",
        help="Which figure is printed: a moment ([b]received, trained, adapted, global[/b]), the rounds ([b]last, "
        "lastK, best-validation, best-test[/b]), a mean ([b]clients, samples[/b]) and a part of the model by itself "
        "([b]path=NAME[/b]), such as [b]trained,last5,samples[/b]. Left out: each method's own moment, the best round "
        "on validation images, the mean over clients, the whole model.",
    ),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Laid over the file, such as [b]train.rounds=50[/b]. May be repeated.",
    ),
]
RootOption = Annotated[
    Path | None,
    typer.Option(help="The folder of published data; left out: $FEDPRISM_DATA, or a folder of the cache."),
]


def read_config(path: Path | None, settings: Sequence[str], method: str | None) -> Config:
    """The configuration of a command. Another method than the file's does not inherit its settings."""
    inherits = method is None or (path is not None and configuration.read(path).method.name == method)
    overrides = [*([] if inherits else [f"method={json.dumps({'name': method})}"]), *settings]
    if path is None:
        return configuration.structure(configuration.override(configuration.plain(Config()), overrides), Config)
    return configuration.read(path, overrides)


def check_protocol(protocol: str | None) -> None:
    """Refuse a mistaken protocol before anything is trained."""
    from fedprism.records import Protocol

    if protocol is not None:
        Protocol.parse(protocol)


def parse_names(text: str, option: str = "--methods", example: str = "local,fedavg,fedbn") -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ConfigError(f"{option} is {shown(text)}; expected names separated by commas, such as {example}.")
    return names


def parse_seeds(text: str | None, default: int) -> list[int]:
    try:
        return [default] if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        expected = "whole numbers separated by commas, such as 0,1,2"
        raise ConfigError(f"--seeds is {shown(text)}; expected {expected}.") from None
