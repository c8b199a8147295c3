"""Assign architectures to clients: one for all, a list in turn, or a mapping by client name.

If architectures differ, so may the widths of their features; `model.features` sets the common width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fedprism.config import ModelConfig
from fedprism.errors import ConfigError, unknown
from fedprism.models.base import MODELS, Arch

OWN = ("name", "head_layers", "features", "adapter")  # keys that are not settings of the named model


def architectures(config: ModelConfig, clients: Sequence[str], classes: int, shape: tuple[int, ...]) -> dict[str, Arch]:
    """Each client's architecture; with `per_client` as a list, client m gets entry m mod its length."""
    if config.per_client is None:
        _check_keys(config.name, config.settings, (*OWN, "per_client"), "model")
        entry = {**config.settings, "name": config.name}
        return dict.fromkeys(clients, _arch(_whole(entry, config, "model"), classes, shape))
    if config.settings:
        names = ", ".join(sorted(config.settings))
        raise ConfigError(
            f"model.{names} and model.per_client are both set; write it into the entries, as {{name: …, {names}: …}}."
        )
    dealt = {
        client: _whole(entry, config, f"model.per_client of {client!r}")
        for client, entry in _deal(config.per_client, clients).items()
    }
    made: dict[str, Arch] = {}

    def arch(entry: Mapping[str, Any]) -> Arch:  # cached: making one is slow
        if repr(entry) not in made:
            made[repr(entry)] = _arch(entry, classes, shape)
        return made[repr(entry)]

    fewest = min(arch(entry).width for entry in dealt.values())  # equal widths need no adapter
    return {
        client: arch({**entry, "features": fewest} if entry["features"] == "auto" else entry)
        for client, entry in dealt.items()
    }


def named_arch(entry: Any, where: str, classes: int, shape: tuple[int, ...]) -> Arch:
    """The architecture of a name or a mapping, such as a method's auxiliary model; errors name its key, `where`."""
    return _arch(_whole(entry, ModelConfig(), where), classes, shape)


def _check_keys(model: str, given: Mapping[str, Any], own: Sequence[str], where: str) -> None:
    """Refuse unknown keys: a key is one of `model` itself or a setting of the named model."""
    known = [*own, *(f.name for f in dataclasses.fields(MODELS[model]))]
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: {unknown('key', str(key), known)}")


def _deal(per_client: Any, clients: Sequence[str]) -> dict[str, Any]:
    if isinstance(per_client, Mapping):
        named: dict[str, Any] = {}
        for name, entry in per_client.items():
            if str(name) in named:  # YAML reads a site called 1 as a number, and '1' as a text
                raise ConfigError(f"model.per_client names a model for {str(name)!r} twice; keep one of them.")
            named[str(name)] = entry
        for name in named:
            if name not in clients:
                raise ConfigError(f"model.per_client: {unknown('client', name, clients)}")
        missing = [client for client in clients if client not in named]
        if missing:
            raise ConfigError(f"model.per_client names no model for {', '.join(missing)}; every client needs one.")
        return {client: named[client] for client in clients}
    if isinstance(per_client, list | tuple) and per_client:
        return {client: per_client[i % len(per_client)] for i, client in enumerate(clients)}
    raise ConfigError(
        f"model.per_client is {per_client!r}; expected a list of models, a map from client names to models, or folder."
    )


def _whole(entry: Any, config: ModelConfig, where: str) -> dict[str, Any]:
    """An entry with every key; keys that it does not set come from `model`."""
    raw = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        raise ConfigError(
            f"{where} is {entry!r}; expected a model's name, or a mapping with a `name` and its settings."
        )
    if raw["name"] not in MODELS:
        raise ConfigError(f"{where}: {unknown('model', raw['name'], list(MODELS))}")
    _check_keys(raw["name"], raw, OWN, where)
    if raw.get("features") == "auto":
        raise ConfigError(f"{where} has features: auto, which is for all clients together; set a number or own.")
    return {"head_layers": config.head_layers, "features": config.features, "adapter": config.adapter, **raw}


def _arch(entry: Mapping[str, Any], classes: int, shape: tuple[int, ...]) -> Arch:
    settings = tuple((key, value) for key, value in entry.items() if key not in OWN)
    features = None if entry["features"] in ("auto", "own") else entry["features"]
    return Arch(entry["name"], classes, shape, entry["head_layers"], settings, features, entry["adapter"])
