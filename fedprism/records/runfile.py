"""run.json: what was run, with which versions, on which machine, and how it ended."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy
import torch

from fedprism import atomic
from fedprism import config as configuration
from fedprism.config import Config, Named
from fedprism.data.digits import SIDE, STYLES
from fedprism.engines.events import Plan
from fedprism.errors import ConfigError, RecordError

FORMAT = 1
NAME = "run.json"
_FIVE = {"name": "domain", "clients": 5}


def first(config: Config) -> dict[str, Any]:
    """What `run.json` holds before the federation is known."""
    # `config.yaml` is for people; what was run is judged by this copy, so that an edit of the other can be named.
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
    """What the plan says of the federation: it must be the same when a run is resumed."""
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
    try:
        own = version("fedprism")
    except PackageNotFoundError:  # run from its folder
        own = getattr(sys.modules.get("fedprism"), "__version__", "unknown")
    return {
        "fedprism": own,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def machine(config: Config) -> dict[str, Any]:
    """Names only; CUDA is not touched by a run that does not use it."""
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


def exists(path: Path) -> bool:
    return (path / NAME).is_file()


def read(path: Path) -> dict[str, Any]:
    """The `run.json` of a run directory, or an error that says what there is instead."""
    if not exists(path):
        there = "is not a run directory (it has no run.json)" if path.exists() else "does not exist"
        raise RecordError(
            f"{path} {there}; expected a directory that `fedprism run` or `fedprism compare` has written."
        )
    try:
        info = json.loads((path / NAME).read_bytes())
        found = info["format"]
    except OSError as error:
        raise RecordError(f"{path / NAME} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError):
        raise RecordError(
            f"{path / NAME} is damaged; restore it from a copy, or delete {path} and run again."
        ) from None
    if found != FORMAT:
        wrote = info.get("versions", {}).get("fedprism", "unknown")
        raise RecordError(
            f"{path} has format {found}, written by fedprism {wrote}; fedprism {versions()['fedprism']} reads format "
            f"{FORMAT}. Use the version that wrote it, or another --out."
        )
    return dict(info)


def write(path: Path, info: Mapping[str, Any]) -> None:
    atomic.write_json(path / NAME, info)


def recorded_config(path: Path, info: Mapping[str, Any]) -> Config:
    """The configuration that was run."""
    try:
        return completed(configuration.structure(info["config"], Config), info["config"])
    except (ConfigError, KeyError) as error:
        raise RecordError(
            f"the configuration in {path / NAME} does not fit this version of fedprism: {error}"
        ) from None


def completed(config: Config, raw: Mapping[str, Any]) -> Config:
    """What a run from before a setting had its present meaning was begun with.

    Clients of different architectures had features of their own widths before `model.features`; and the partition's
    five clients, the default before `data.domains`, meant one a site.
    """
    old = raw.get("data", {})
    if "domains" not in old and str(old.get("name")).startswith("folder:") and old.get("partition") == _FIVE:
        config = replace(config, data=replace(config.data, partition=Named("domain")))
    if config.model.per_client is not None and "features" not in raw.get("model", {}):
        return replace(config, model=replace(config.model, features="own"))
    return config


def spelled(config: Config) -> Config:
    """With what is left to digits-skew and folder: written out: earlier runs recorded 16 pixels and five clients."""
    data = config.data
    kind = data.name.partition(":")[0]
    if kind in ("digits-skew", "folder") and data.image_size == "auto":
        data = replace(data, image_size=SIDE)
    settings = {key: value for key, value in data.partition.settings.items() if value is not None}
    data = replace(data, partition=Named(data.partition.name, settings))
    if kind == "digits-skew" and data.domains is None and data.partition == Named("domain"):
        data = replace(data, partition=Named("domain", {"clients": len(STYLES)}))
    return replace(config, data=data)


def check_config(path: Path, recorded: Config, given: Config, source: str) -> None:
    """Refuse to go on with another configuration, naming each key that differs. Where it is written does not matter."""
    old, new = (flat(configuration.plain(spelled(config))) for config in (recorded, given))
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
    """Nested settings by path, as after --set: `train.rounds` -> 30."""
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
    return "\n".join(lines[:20] + [f"  ... and {len(lines) - 20} more"] * (len(lines) > 20))
