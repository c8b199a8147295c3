"""Clients of different architectures: which methods allow them, and the error for those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedprism.config import plain
from fedprism.errors import ConfigError
from fedprism.methods import METHODS
from fedprism.methods.base import Arch, Info, Method
from fedprism.models import named_arch


def allowing() -> list[str]:
    """The built-in methods that allow different architectures, with the settings that they need for it."""
    found = []
    for name, cls in METHODS.items():
        if cls().mixed:
            found.append(name)
        elif cls.mixed_with:
            needed = ", ".join(f"{key}: {value}" for key, value in cls.mixed_with.items())
            found.append(f"{name} (with {needed})")
    return found


def check_mixed(methods: Sequence[Method], info: Info) -> None:
    """Refuse clients of different architectures; the error names the methods that need a single one."""
    unable = [method.id for method in methods if not method.mixed]
    if not info.mixed or not unable:
        return
    names = " and ".join(part for part in (", ".join(unable[:-1]), unable[-1]) if part)
    archs = [arch.label for arch in dict.fromkeys(info.archs.values())]
    raise ConfigError(
        f"{names} {'need' if len(unable) > 1 else 'needs'} one architecture for all clients, but model.per_client "
        f"gives {len(archs)}: {_some(archs)}. Set one model for all (--set model.name=NAME), or choose a method that "
        f"allows different ones: {', '.join(allowing())}."
    )


def one_for_all(given: Any, where: str, info: Info) -> Arch:
    """The architecture of a model that all clients share besides their own: the smallest of theirs, or a named one."""
    named = plain(given)  # in Python it may be a string or a dict
    if named in ("smallest", {"name": "smallest"}):
        return min((info.archs[client_id] for client_id in info.clients), key=lambda arch: arch.parameters)
    return named_arch(named, f"{where} (or smallest)", info.classes, info.arch.shape)


def _some(labels: Sequence[str]) -> str:
    return ", ".join(labels[:5]) + (f" and {len(labels) - 5} more" if len(labels) > 5 else "")
