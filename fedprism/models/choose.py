"""Which client gets which architecture: one for all, a list dealt in turn, or a map by client name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedprism.config import ModelConfig
from fedprism.errors import ConfigError, unknown
from fedprism.models.base import MODELS, Arch


def architectures(
    config: ModelConfig, clients: Sequence[str], classes: int, shape: tuple[int, int, int]
) -> dict[str, Arch]:
    """Every client's architecture; `per_client` as a list gives client m its m mod len-th entry."""
    if config.per_client is None:
        _check_keys(config.name, config.settings, ("name", "head_layers", "per_client"), "model")
        arch = Arch(config.name, classes, shape, config.head_layers, tuple(config.settings.items()))
        return dict.fromkeys(clients, arch)
    if config.settings:
        names = ", ".join(sorted(config.settings))
        raise ConfigError(
            f"model.{names} stands beside model.per_client; write it into the entries, as {{name: …, {names}: …}}."
        )
    return {
        client: _arch(entry, config, f"model.per_client of {client!r}", classes, shape)
        for client, entry in _deal(config.per_client, clients).items()
    }


def _check_keys(model: str, given: Mapping[str, Any], own: Sequence[str], where: str) -> None:
    """Name the nearest right key: one of `model` itself, or a setting of the named model."""
    known = [*own, *(f.name for f in dataclasses.fields(MODELS[model]))]
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: {unknown('key', str(key), known)}")


def _deal(per_client: Any, clients: Sequence[str]) -> dict[str, Any]:
    if isinstance(per_client, Mapping):
        for name in per_client:
            if name not in clients:
                raise ConfigError(f"model.per_client: {unknown('client', str(name), clients)}")
        missing = [client for client in clients if client not in per_client]
        if missing:
            raise ConfigError(f"model.per_client names no model for {', '.join(missing)}; every client needs one.")
        return {client: per_client[client] for client in clients}
    if isinstance(per_client, list | tuple) and per_client:
        return {client: per_client[place % len(per_client)] for place, client in enumerate(clients)}
    raise ConfigError(
        f"model.per_client is {per_client!r}; expected a list of models, or a map from client names to models."
    )


def _arch(entry: Any, config: ModelConfig, where: str, classes: int, shape: tuple[int, int, int]) -> Arch:
    raw = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        raise ConfigError(
            f"{where} is {entry!r}; expected a model's name, or a mapping with a `name` and its settings."
        )
    _check_keys(raw["name"], raw, ("name", "head_layers"), where)
    settings = tuple((key, value) for key, value in raw.items() if key not in ("name", "head_layers"))
    return Arch(raw["name"], classes, shape, raw.get("head_layers", config.head_layers), settings)
