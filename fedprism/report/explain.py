"""What there is to know of a method before it is run: its settings, its size as code, and the bytes that it sends."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedprism import keys
from fedprism.config import Config, DataConfig, ModelConfig, Named, structure
from fedprism.data.progress import progress
from fedprism.engines.client import Failure, Job, Result, make_info, make_now, open_slot
from fedprism.engines.inprocess import InProcess, Request
from fedprism.engines.loop import make_loop
from fedprism.federation import ClientData, Federation, Split
from fedprism.federation.base import inputs_in_words
from fedprism.methods import METHODS
from fedprism.methods.base import Info, Me, Method, State
from fedprism.models import MODELS, Arch

REQUIRED = "(required)"  # instead of a default
TEXTS = (200, 98_635)  # tokens of a text and words, as FedCP has them on AG News: what models of texts are tried on


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client in one round."""

    down: int
    up: int


@dataclass(frozen=True)
class Counted:
    """Traffic of a client of one architecture, in the first and the last round."""

    arch: Arch
    clients: int  # that have it
    first: Traffic
    last: Traffic


_WORDS = {
    "bn": {
        "shared": "shared",
        "local": "stays local",
        "local-stats": "affine parameters shared, statistics local",
        "local-affine": "statistics shared, affine parameters local",
    },
    "weighting": {
        "samples": "by their training images",
        "uniform": "the same",
        "contribution": "by what the method finds that they contribute",
    },
    "broadcast": {"participants": "the clients that take part in the round", "all": "all clients"},
    "moment": {
        "received": "the model that a client has between rounds, before it trains (received)",
        "trained": "after local training (trained)",
        "adapted": "after a short adaptation (adapted)",
        "global": "the one global model (global)",
    },
}

_BYTES = {  # of a method that encodes what it sends: is it built in?
    True: "at most those below: what is sent is compressed, and how far depends on what was learnt",
    False: "those below are counted on noise: what is sent is encoded, and its size may depend on what was learnt",
}


def cited(paper: str) -> str:
    """A paper in short: who and when.

    >>> cited("Oh et al., FedBABU: Toward Enhanced Representation, ICLR 2022")
    'Oh et al., ICLR 2022'
    >>> cited("training alone; the papers call it Local, SOLO or SingleSet")
    'training alone'
    """
    parts = paper.split(", ")
    return f"{parts[0]}, {parts[-1]}" if parts[-1][-4:].isdigit() else paper.partition(";")[0]


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
        "architectures": _architectures(method),
        "one global model": "yes" if method.has_global else "no",
        "new clients": method.newcomers,
        **({"bytes": _BYTES[_built_in(method)]} if _encodes(method) else {}),
        **({"shows of itself": "; ".join(f"{n}: {says}" for n, says in method.shows.items())} if method.shows else {}),
    }


def _architectures(method: Method) -> str:
    needed = ", ".join(f"{name}: {value}" for name, value in method.mixed_with.items())
    if method.mixed:
        return "may differ between clients"
    return "the same for all clients" + (f"; with {needed} they may differ" if needed else "")


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
    if field.default_factory is dataclasses.MISSING:
        return REQUIRED
    made = field.default_factory()
    return made.name if isinstance(made, Named) and not made.settings else made


def traffic(method: Method, model: ModelConfig, classes: int, size: int, rounds: int) -> list[Counted]:
    """What a client of each architecture is sent and sends, counted in real rounds on noise.

    There are as many clients as `model.per_client` lists, else two. What a built-in method sends has the same size
    whatever was learnt, so there nothing is trained: a big model would take minutes. Where it is compressed by what was
    learnt, it is counted before that: at most so much is sent.
    """
    config = structure({"train": {"rounds": rounds}, "evaluate": {"moments": []}}, Config)
    config = replace(config, model=model)
    known = _built_in(method)
    if known and _encodes(method):
        method = _unencoded(method)
    names = [f"client {number}" for number in range(1, max(len(_listed(model)), 2) + 1)]
    federation = _noise(names, classes, inputs(model, size), count=2 if known else max(classes, 2))
    info = make_info(config, federation.names, classes, federation.shape)
    kind = Untrained if known else InProcess
    played = (0, rounds - 1, rounds - 1)  # the last one twice: what is sent once after a warm-up has then been sent
    with progress("counting bytes", 1 + len(played)) as step:
        engine = kind(method, config, info, federation, torch.device("cpu"))
        loop = make_loop(method, config, info, federation, engine, engine.device)
        step()
        records = []
        for round in played:
            records.append(loop.one_round(round)[0])
            step()
    counted = []
    for arch in dict.fromkeys(info.archs.values()):
        client = next(name for name in names if info.archs[name] == arch)
        first, *_, last = (Traffic(record.down.get(client, 0), record.up.get(client, 0)) for record in records)
        counted.append(Counted(arch, sum(info.archs[name] == arch for name in names), first, last))
    return counted


def _built_in(method: Method) -> bool:
    return type(method) in [cls for _, cls in METHODS.items()]


def _encodes(method: Method) -> bool:
    return type(method).encode is not Method.encode


def _unencoded(method: Method) -> Method:
    """The same method with a wire that changes nothing."""
    plain = {"id": method.id, "encode": Method.encode, "decode": Method.decode}
    kind: type[Method] = type(type(method).__name__, (type(method),), plain)
    return kind(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})


def decided(method: Method, counted: Sequence[Counted]) -> dict[str, str]:
    """What it decides by looking at clients of these architectures."""
    archs = {each.arch.label: each.arch for each in counted}
    return dict(method.facts(Info(tuple(archs), counted[0].arch.classes, archs, seed=0)))


class Untrained(InProcess):
    """Every hook of a client but its losses: what it is sent and sends has its shape, and no value means anything.

    A client's slot is its state, so that a big model is not copied in every round.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.own: dict[str, Me] = {}

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        return {client: self._answer(client, round, request.down) for client, request in requests.items()}

    @torch.no_grad()
    def _answer(self, client: str, round: int, down: State) -> Result:
        new = client not in self.own
        job = Job(self.method, self.config, self.info, self.clients[client], round, self.device, self.public)
        if new:
            self.own[client] = open_slot(job)
        me = self.own[client]
        now = make_now(self.method, self.config, self.info, me.model, round, client)
        now = replace(now, data=job.data, public=job.public, new=new)
        now = replace(now, down=self.method.decode(down, now))
        self.method.receive(me, now)
        passes = self.method.passes(me, now)
        if passes:
            self.method.start(me, now)
        for each in passes:
            if each.start is not None:
                each.start(me, now)
            now = replace(now, steps={**now.steps, each.name: 1})  # SCAFFOLD divides by their number
            if each.end is not None:
                each.end(me, now)
        return Result({}, self.method.encode(self.method.upload(me, now), now), len(job.data.train), {}, {})


def inputs(model: ModelConfig, size: int) -> tuple[int, ...]:
    """The shape of what these models are tried on: images of so many pixels a side, or texts where one takes those."""
    entries = _listed(model) or [model.name]
    names = [entry["name"] if isinstance(entry, Mapping) and "name" in entry else entry for entry in entries]
    texts = any(MODELS[name].takes == "texts" for name in names if isinstance(name, str) and name in MODELS)
    return TEXTS if texts else (3, size, size)


def data_in_words(model: ModelConfig, classes: int, size: int) -> str:
    """What bytes are counted for.

    >>> data_in_words(ModelConfig("fasttext"), 4, 32)
    '4 classes, texts of 200 tokens, 98,635 words (as FedCP has AG News)'
    """
    shape = inputs(model, size)
    return f"{classes} classes, {inputs_in_words(shape)}{' (as FedCP has AG News)' if shape == TEXTS else ''}"


def _listed(model: ModelConfig) -> Sequence[Any]:
    return model.per_client if isinstance(model.per_client, list | tuple) else ()


def _noise(names: Sequence[str], classes: int, shape: tuple[int, ...], count: int) -> Federation:
    """The same `count` random inputs for every client."""
    draw = keys.generator("explain")
    if len(shape) == 2:
        x = torch.randint(1, shape[1], (count, shape[0]), generator=draw, dtype=torch.int32)
    else:
        x = torch.randint(0, 256, (count, *shape), generator=draw, dtype=torch.uint8)
    y = torch.arange(count) % classes
    train, one, none = Split(x, y), Split(x[:1], y[:1]), Split(x[:0], y[:0])
    clients = {name: ClientData(name, name, train, one, one, classes) for name in names}
    labels = tuple(str(label) for label in range(classes))
    return Federation("noise", clients, labels, shape, 0, DataConfig("arrays:noise"), none)


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
