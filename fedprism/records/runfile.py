"""run.json: what was run, with which versions, on which machine, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from fedprism import atomic
from fedprism import config as configuration
from fedprism.config import Config, Named
from fedprism.errors import ConfigError, RecordError
from fedprism.records.metrics import METRICS
from fedprism.records.sealed import seal, unseal
from fedprism.round.events import Plan

FORMAT = 2
NAME = "run.json"
ENDED = ("finished", "diverged")  # statuses of runs with nothing left to run
_LISTED = 20  # differences that an error message lists


class RecordWarning(UserWarning):
    """Something in a run directory was damaged or differs, and the run goes on without it."""


# --- what it holds ---------------------------------------------------------------------------------------------------


def first(config: Config) -> dict[str, Any]:
    """What `run.json` holds before the federation is known."""
    # `config.yaml` is for people. This copy is what was run, so an edit of the other file can be named.
    return {
        "format": FORMAT,
        "status": "running",
        "started": now(),
        "ended": None,
        "versions": versions(),
        "machine": machine(config),
        "config": json.loads(json.dumps(configuration.plain(config), default=str)),
    }


def facts(plan: Plan) -> dict[str, Any]:
    """What the plan says about the federation: it must be the same when a run is resumed."""
    return {
        "method": plan.method,
        "moment": plan.moment,
        "clients": list(plan.clients),
        "samples": {name: list(counts) for name, counts in plan.samples.items()},
        "classes": list(plan.class_names),
        "shape": list(plan.shape),
        "parameters": dict(plan.parameters),
        "images": dict(plan.images),
    }


def versions() -> dict[str, str]:
    """The versions of the packages that figures depend on, without importing them."""
    return {**{name: _version(name) for name in ("fedprism", "torch", "numpy")}, "python": platform.python_version()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from its source folder
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


def machine(config: Config) -> dict[str, Any]:
    """The machine's CPU, GPU and platform. A run that does not use CUDA does not touch it."""
    import torch

    gpu = None
    if config.run.device != "cpu" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    return {
        "cpu": _cpu(),
        "gpu": gpu,
        "cores": os.cpu_count(),
        "threads": config.run.threads,
        "platform": platform.platform(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# --- the file --------------------------------------------------------------------------------------------------------


def exists(path: Path) -> bool:
    return (path / NAME).is_file()


def read(path: Path) -> dict[str, Any]:
    """The `run.json` of a run directory, or an error that says what there is instead."""
    if not exists(path) and (path / METRICS).is_file():
        raise RecordError(
            f"{path / NAME} is missing. Restore it from a copy; `fedprism fsck {path}` says what can be done without "
            "one."
        )
    if not exists(path):
        there = "is not a run directory (it has no run.json)" if path.exists() else "does not exist"
        raise RecordError(
            f"{path} {there}; expected a directory that `fedprism run` or `fedprism compare` has written."
        )
    try:
        data = atomic.read(path / NAME)
    except OSError as error:
        raise RecordError(f"{path / NAME} cannot be read: {error.strerror}.") from error
    try:
        info = unpacked(data)
    except ValueError as error:
        raise RecordError(
            f"{path / NAME} is damaged ({error}). Restore it from a copy; `fedprism fsck {path}` says what can be done "
            "without one."
        ) from None
    if info.get("format") != FORMAT:
        wrote = info.get("versions", {}).get("fedprism", "unknown")
        raise RecordError(
            f"{path} has format {info.get('format')}, written by fedprism {wrote}; fedprism {_version('fedprism')} "
            f"reads format {FORMAT}. Use the version that wrote it, or another --out."
        )
    return info


def write(path: Path, info: Mapping[str, Any]) -> None:
    atomic.write(path / NAME, packed(info))


def packed(info: Mapping[str, Any]) -> bytes:
    """The file as it is written."""
    return seal(info, indent=1)


def unpacked(data: bytes) -> dict[str, Any]:
    """The inverse of `packed`; a `ValueError` where the data is not what was written. Format 1 had no checksum."""
    try:
        return unseal(data)
    except ValueError:
        with suppress(ValueError, RecursionError):
            info = json.loads(data)
            if isinstance(info, dict) and info.get("format") == 1 and "checksum" not in info:
                return info
        raise


def recorded_config(path: Path, info: Mapping[str, Any]) -> Config:
    """The configuration that was run."""
    try:
        return configuration.structure(info["config"], Config)
    except (ConfigError, KeyError) as error:
        raise RecordError(
            f"the configuration in {path / NAME} does not fit this version of fedprism: {error}"
        ) from None


# --- comparing -------------------------------------------------------------------------------------------------------


def comparable(config: Config) -> Config:
    """The configuration without the partition's null settings, which mean the same as settings left out."""
    named = config.data.partition
    settings = {key: value for key, value in named.settings.items() if value is not None}
    return replace(config, data=replace(config.data, partition=Named(named.name, settings)))


def check_config(path: Path, recorded: Config, given: Config, source: str) -> None:
    """Refuse to go on with another configuration and name each key that differs. `run.out` may differ."""
    old, new = (flat(configuration.plain(comparable(config))) for config in (recorded, given))
    lines = _differing({**old, "run.out": ""}, {**new, "run.out": ""}, f"in {source}")
    if lines:
        raise RecordError(
            f"{path} was begun with another configuration:\n{lines}\n"
            "A run can only be resumed as it was begun: undo the change, or start a new run with another --out."
        )


def check_facts(path: Path, info: Mapping[str, Any], plan: Plan) -> None:
    """Refuse to go on with other data or another model than the run was begun with."""
    given = facts(plan)
    known = {key: info[key] for key in given if key in info}
    lines = _differing(flat(known), flat(given), "now") if known else ""
    if lines:
        raise RecordError(
            f"{path} cannot be resumed, because the data, the model or the method is not what it was:\n{lines}\n"
            "Restore what it was begun with, or start a new run with another --out."
        )


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by path, as --set takes them: `train.rounds` -> 30."""
    if isinstance(value, Mapping) and value:
        paths: dict[str, Any] = {}
        for key, inner in value.items():
            paths |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
        return paths
    return {prefix: json.loads(json.dumps(value, default=str))}


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], place: str) -> str:
    """A line for each key whose values differ, the first twenty."""
    shown = [{key: json.dumps(value) for key, value in each.items()} for each in (old, new)]
    lines = [
        f"  {key}: {shown[0].get(key, 'absent')} recorded, {shown[1].get(key, 'absent')} {place}"
        for key in {**old, **new}
        if (key in old, old.get(key)) != (key in new, new.get(key))
    ]
    more = [f"  ... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n".join(lines[:_LISTED] + more)
