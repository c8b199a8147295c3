"""What there is to know about a method before it is run: its facts, its settings, and the bytes that it sends."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedprism import keys, limits
from fedprism.config import Config, DataConfig, ModelConfig, Named, structure
from fedprism.data.progress import progress
from fedprism.engines.inprocess import InProcess
from fedprism.federation import ClientData, Federation, Split
from fedprism.federation.base import inputs_in_words
from fedprism.methods import METHODS
from fedprism.methods.base import Client, Info, Method, State
from fedprism.models import MODELS, Arch
from fedprism.round.client import Job, make_context, make_info, open_slot, transform_upload
from fedprism.round.engine import Failure, Request, Result
from fedprism.round.loop import make_loop
from fedprism.transforms import TRANSFORMS, make_transforms

REQUIRED = "(required)"  # instead of a default
TEXTS = (200, 98_635)  # tokens per text and words, as in FedCP's AG News: the inputs that text models are tried on


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


def facts_of(method: Method) -> dict[str, str]:
    """The facts of a method, in words."""
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
        **({"shows of itself": "; ".join(f"{n}: {text}" for n, text in method.shows.items())} if method.shows else {}),
    }


def _architectures(method: Method) -> str:
    needed = ", ".join(f"{name}: {value}" for name, value in method.mixed_with.items())
    if method.mixed:
        return "may differ between clients"
    return "the same for all clients" + (f"; with {needed} they may differ" if needed else "")


def settings_of(cls: type[Any]) -> list[tuple[str, Any, str, str]]:
    """Each setting of a method or a transform: name, default, values, meaning."""
    kinds = typing.get_type_hints(cls)
    return [
        (f.name, _default(f), f.metadata.get("expected") or _values(kinds[f.name]), str(f.metadata.get("doc", "")))
        for f in dataclasses.fields(cls)
    ]


def _values(kind: Any) -> str:
    """The choices that a type allows; "" where it does not list them."""
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


def changes(transforms: Sequence[Named]) -> dict[str, str]:
    """What transforms do to uploads, in words."""
    made = make_transforms(transforms)
    counted = {} if all(map(TRANSFORMS.built_in, made)) else {"bytes": _BYTES[False]}
    return {**{f"transform {each.id}": each.idea for each in made}, **counted}


def traffic(
    method: Method, model: ModelConfig, classes: int, size: int, rounds: int, transforms: Sequence[Named] = ()
) -> list[Counted]:
    """The download and upload of a client of each architecture, counted in real rounds on noise.

    There are as many clients as `model.per_client` lists, else two. What built-in methods and transforms send has the
    same size whatever was learnt, so nothing is trained: a big model would take minutes. Where a method compresses what
    it sends, the bytes are counted before compression, as an upper bound.
    """
    config = structure({"train": {"rounds": rounds}, "evaluate": {"moments": []}}, Config)
    config = replace(config, model=model, transforms=tuple(transforms))
    known = _built_in(method) and all(map(TRANSFORMS.built_in, make_transforms(transforms)))
    if known and _encodes(method):
        method = _unencoded(method)
    names = [f"client {number}" for number in range(1, max(len(_listed(model)), 2) + 1)]
    federation = _noise(names, classes, inputs(model, size), count=2 if known else max(classes, 2))
    info = make_info(config, federation.names, classes, federation.shape)
    numbers = sum(arch.parameters for arch in info.archs.values())
    limits.check_memory(
        f"the rounds in which bytes are counted, with {numbers:,} parameters at {len(names)} clients,",
        4 * 4 * numbers,  # weights, upload, sum and download
        "choose a smaller model, smaller images, or fewer classes",
    )
    kind = Untrained if known else InProcess
    played = (0, rounds - 1, rounds - 1)  # the last one twice: by then, what is sent once after a warm-up was sent
    with progress("counting bytes", 1 + len(played)) as step:
        engine = kind(method, config, info, federation, torch.device("cpu"))
        loop = make_loop(method, config, info, federation, engine)
        step()
        records = []
        for round in played:
            records.append(loop.one_round(round)[0])
            step()
    counted = []
    for arch in dict.fromkeys(info.archs.values()):
        client_id = next(name for name in names if info.archs[name] == arch)
        first, *_, last = (Traffic(record.down.get(client_id, 0), record.up.get(client_id, 0)) for record in records)
        counted.append(Counted(arch, sum(info.archs[name] == arch for name in names), first, last))
    return counted


def _built_in(method: Method) -> bool:
    return type(method) in [cls for _, cls in METHODS.items()]


def _encodes(method: Method) -> bool:
    return type(method).encode is not Method.encode


def _unencoded(method: Method) -> Method:
    """The same method, which sends everything as it is."""
    plain = {"id": method.id, "encode": Method.encode, "decode": Method.decode}
    kind: type[Method] = type(type(method).__name__, (type(method),), plain)
    return kind(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})


def decided(method: Method, counted: Sequence[Counted]) -> dict[str, str]:
    """What the method chooses by looking at clients of these architectures."""
    archs = {each.arch.label: each.arch for each in counted}
    return dict(method.facts(Info(tuple(archs), counted[0].arch.classes, archs, seed=0)))


class Untrained(InProcess):
    """An engine that calls every hook of a client but its losses: what is sent has its shape, and no value matters.

    A client's slot is its state, so that a big model is not copied in every round.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.own_slots: dict[str, Client] = {}

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id, request in requests.items():
            yield client_id, self._answer(client_id, round, request.download)

    @torch.no_grad()
    def _answer(self, client_id: str, round: int, download: State) -> Result:
        new = client_id not in self.own_slots
        job = Job(self.method, self.config, self.info, self.clients[client_id], round, self.public)
        if new:
            self.own_slots[client_id] = open_slot(job)
        client = self.own_slots[client_id]
        ctx = make_context(self.method, self.config, self.info, client.model, round, client_id)
        ctx = replace(ctx, data=job.data, public=job.public, is_new=new)
        ctx = replace(ctx, download=self.method.decode(download, ctx))
        self.method.receive(client, ctx)
        passes = self.method.passes(client, ctx)
        if passes:
            self.method.start(client, ctx)
        for each in passes:
            if each.start is not None:
                each.start(client, ctx)
            ctx = replace(ctx, steps={**ctx.steps, each.name: 1})  # SCAFFOLD divides by their number
            if each.end is not None:
                each.end(client, ctx)
        upload, kinds = self.method.upload(client, ctx), self.method.uploads(client.model, ctx)
        changed, _ = transform_upload(job, ctx, upload, kinds)
        return Result({}, self.method.encode(changed, ctx), {}, {})


def inputs(model: ModelConfig, size: int) -> tuple[int, ...]:
    """The shape of the inputs for these models: images of `size` pixels a side, or texts if a model takes them."""
    entries = _listed(model) or [model.name]
    names = [entry["name"] if isinstance(entry, Mapping) and "name" in entry else entry for entry in entries]
    texts = any(MODELS[name].takes == "texts" for name in names if isinstance(name, str) and name in MODELS)
    return TEXTS if texts else (3, size, size)


def data_in_words(model: ModelConfig, classes: int, size: int) -> str:
    """The data that bytes are counted for.

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
