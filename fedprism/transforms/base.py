"""What a transform is: a change to uploads on their way, of which neither methods nor engines know.

A transform has two halves. The client's half works on what the method uploads, before `Method.encode` and before it
leaves the client. The server's half undoes it where that is needed, after `Method.decode` and before aggregation:

    client: upload -> first.client -> second.client -> encode  ~~~>  decode -> second.server -> first.server: server

A transform is a frozen dataclass. Its fields are its settings; it remembers nothing from one upload to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedprism.config import setting
from fedprism.errors import ConfigError
from fedprism.methods.base import Context, State, UploadKind
from fedprism.methods.states import added_to, malformed, measurable, unchanged, update_of

MARK = ":"  # between the name of a leaf and that of a part of it, for transforms that send a leaf in parts


@dataclass(frozen=True)
class UploadContext:
    """One upload on its way: what both ends know of it."""

    ctx: Context  # round, client and seed
    kinds: Mapping[str, UploadKind]  # of everything that the method uploads
    origin: State  # what the upload is an update of, by name; a leaf that is not here is an update already
    place: int = 0  # of the transform in the list: part of the key of its noise
    suffix: str = ""  # of what it logs
    logs: dict[str, float] = field(default_factory=dict)

    def chosen(self, state: Mapping[str, Tensor], kinds: Sequence[str]) -> State:
        """The floating leaves of these kinds."""
        return {n: t for n, t in measurable(state, empty=True).items() if self.kinds.get(n) in kinds}

    def update(self, chosen: State) -> State:
        """The update that these leaves make: upload minus origin."""
        return update_of(chosen, self.origin)

    def add_origin(self, update: State) -> State:
        """The inverse of `update`."""
        return added_to(self.origin, update)

    def known(self, name: str, shape: Sequence[int]) -> bool:
        """Is a leaf of this shape an update of a leaf that both ends have?"""
        return name in self.origin and self.origin[name].shape == torch.Size(shape)

    def rng(self, purpose: str, like: Tensor) -> torch.Generator:
        """A generator keyed by seed, round, client, transform and purpose, on the device of `like`."""
        return self.ctx.rng("transform", self.place, purpose, like=like)

    def log(self, name: str, value: float | Tensor) -> None:
        """Record what the transform did to this upload, on the client."""
        self.logs[name + self.suffix] = float(value)


@dataclass(frozen=True)
class Transform:
    """No change at all. Override `client`, and `server` if what is sent must be undone."""

    id: ClassVar[str] = ""
    idea: ClassVar[str] = ""
    shows: ClassVar[Mapping[str, str]] = {}  # what the names mean that it logs
    packs: ClassVar[bool] = False  # does it send leaves in a form that only its own `server` can read?

    kinds: tuple[UploadKind, ...] = setting(("weights", "factors"), "kinds of uploaded leaves that it acts on")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "id" not in cls.__dict__:
            cls.id = cls.__name__.lower()

    def client(self, upload: State, context: UploadContext) -> State:
        """What is sent instead of the upload. Changes no tensor in place."""
        return upload

    def server(self, sent: State, context: UploadContext) -> State:
        """The upload again, with the names, types and shapes that the method declares. Changes no input in place."""
        return sent


def to_wire(transforms: Sequence[Transform], upload: State, context: UploadContext) -> State:
    """All client halves, in order; a new dict, if there are any. What they log is in `context.logs`."""
    for place, (transform, suffix) in enumerate(zip(transforms, suffixes(transforms), strict=True)):
        with unchanged(f"the transform {transform.id}", upload, context.origin):
            upload = transform.client(dict(upload), replace(context, place=place, suffix=suffix))
        wrong = malformed(upload)
        if wrong is not None:
            raise ConfigError(f"the transform {transform.id} makes a client's upload unusable: {wrong}.")
    return upload


def from_wire(transforms: Sequence[Transform], sent: State, context: UploadContext) -> State:
    """All server halves, the last one first."""
    for place, transform in reversed(list(enumerate(transforms))):
        with unchanged(f"the transform {transform.id}", sent, context.origin):
            sent = transform.server(dict(sent), replace(context, place=place))
    return sent


def suffixes(transforms: Sequence[Transform]) -> list[str]:
    """What tells apart the logs of transforms with the same id: nothing for the first, then #2, #3, ...

    >>> suffixes([Transform(), Transform(kinds=("buffers",))])
    ['', '#2']
    """
    ids = [each.id for each in transforms]
    counts = [ids[:place].count(each) for place, each in enumerate(ids)]
    return [f"#{count + 1}" if count else "" for count in counts]


def check_transforms(transforms: Sequence[Transform], method: str, uploads: Sequence[str]) -> None:
    """Refuse a transform that acts on what another one has packed, or on nothing that is uploaded.

    `uploads` are the kinds that the method uploads, over all clients and rounds.
    """
    packed: dict[str, str] = {}  # kind -> the transform that packs it
    for each in transforms:
        found = [kind for kind in each.kinds if kind in uploads]
        taken = next((kind for kind in found if kind in packed), None)
        if taken is not None:
            raise ConfigError(
                f"transforms: {each.id} acts on {taken}, but comes after {packed[taken]}, which packs these; put it "
                "before."
            )
        if not found:
            has = ", ".join(dict.fromkeys(uploads))
            advice = "Leave it out, or set its kinds." if has else "Leave it out."
            raise ConfigError(
                f"transforms: {each.id} acts on {', '.join(each.kinds) or 'nothing'}, but {method} uploads "
                f"{has or 'nothing'}. {advice}"
            )
        packed |= dict.fromkeys(found, each.id) if each.packs else {}
