"""What there is to know of a method before it is run: its settings, its size as code, and the bytes that it sends."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedprism import keys
from fedprism.config import Config, ModelConfig, structure
from fedprism.engines.client import make_info
from fedprism.engines.inprocess import InProcess
from fedprism.engines.loop import make_loop
from fedprism.federation import Federation
from fedprism.methods.base import Method

_CLIENTS = ("one", "two")
REQUIRED = "(required)"  # instead of a default


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client in one round."""

    down: int
    up: int


_WORDS = {
    "bn": {
        "shared": "shared",
        "local": "stays local",
        "local-stats": "affine parameters shared, statistics local",
        "local-affine": "statistics shared, affine parameters local",
    },
    "weighting": {"samples": "by their training images", "uniform": "the same"},
    "broadcast": {"participants": "the clients that take part in the round", "all": "all clients"},
    "moment": {
        "received": "what a client receives, before it trains (received)",
        "trained": "after local training (trained)",
        "adapted": "after a short adaptation (adapted)",
        "global": "the one global model (global)",
    },
}


def facts_of(method: Method) -> dict[str, str]:
    """What a method says of itself, in words."""
    of_server = {
        "clients count": _WORDS["weighting"][method.weighting],
        "new state goes to": _WORDS["broadcast"][method.broadcast],
    }
    return {
        "paper": method.paper or "none",
        "is shared": method.shares,
        "stays with the client": method.stays,
        "others learn": method.reveals,
        "batch norm": _WORDS["bn"][method.bn],
        **(of_server if method.shares != "nothing" else {}),
        "its paper tests": _WORDS["moment"][method.moment],
        "architectures": "may differ between clients" if method.mixed else "the same for all clients",
        "one global model": "yes" if method.has_global else "no",
        **({"shows of itself": "; ".join(f"{n}: {says}" for n, says in method.shows.items())} if method.shows else {}),
    }


def settings_of(cls: type[Method]) -> list[tuple[str, Any, str, str]]:
    """Each hyper-parameter of a method: name, default, values, meaning."""
    kinds = typing.get_type_hints(cls)
    return [
        (f.name, _default(f), f.metadata.get("expected") or _values(kinds[f.name]), str(f.metadata.get("doc", "")))
        for f in dataclasses.fields(cls)
    ]


def _values(kind: Any) -> str:
    """The choices that a type leaves; "" where it leaves them open."""
    if kind is bool:
        return "true, false"
    choices = [choice for each in (kind, *typing.get_args(kind)) for choice in _choices(each)]
    some = "some of " if typing.get_origin(kind) is tuple and choices else ""
    return some + ", ".join(dict.fromkeys(choices))


def _choices(kind: Any) -> list[str]:
    return [str(choice) for choice in typing.get_args(kind)] if typing.get_origin(kind) is typing.Literal else []


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else REQUIRED


def traffic(method: Method, model: ModelConfig, classes: int, size: int, rounds: int) -> tuple[Traffic, Traffic]:
    """What a client is sent and sends in the first and the last of `rounds` rounds, counted in real rounds on noise."""
    config = structure({"train": {"rounds": rounds}, "evaluate": {"moments": []}}, Config)
    config = dataclasses.replace(config, model=model)
    federation = _noise(classes, size)
    info = make_info(config, federation.names, classes, federation.shape)
    device = torch.device("cpu")
    loop = make_loop(method, config, info, federation, InProcess(method, config, info, federation, device), device)
    # The last round twice: what is sent only once after a warm-up has then been sent.
    records = [loop.one_round(round)[0] for round in (0, rounds - 1, rounds - 1)]
    sizes = [Traffic(record.down.get(_CLIENTS[0], 0), record.up.get(_CLIENTS[0], 0)) for record in records]
    return sizes[0], sizes[-1]


def _noise(classes: int, size: int) -> Federation:
    """Two clients with one image a class."""
    n = max(classes, 2)
    x = torch.randint(0, 256, (n, 3, size, size), generator=keys.generator("explain"), dtype=torch.uint8)
    y = torch.arange(n) % classes
    names = tuple(str(label) for label in range(classes))
    part = {"train": (x, y), "validation": (x[:1], y[:1]), "test": (x[:1], y[:1])}
    return Federation.from_arrays(dict.fromkeys(_CLIENTS, part), name="noise", class_names=names)


def code_lines(cls: type) -> int:
    """Lines of the file that a class is in, without blank lines, comments, docstrings and imports."""
    text = Path(inspect.getsourcefile(cls) or "").read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or node.body[0].lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(1 for number, line in lines if number not in prose and line.strip() and not line.strip().startswith("#"))
