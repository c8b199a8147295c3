"""Local: each client trains alone. The baseline of every federated method."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedprism.methods import register
from fedprism.methods.base import Context, Method, Net


@register
@dataclass(frozen=True)
class Local(Method):
    id = "local"
    paper = "training alone; the papers call it Local, SOLO or SingleSet"
    idea = "Each client minimises its own loss; nothing is sent."
    shares = "nothing"
    stays = "everything"
    group = "alone"
    bn = "local"
    reveals = "nothing"

    @property
    def mixed(self) -> bool:
        return True

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return ()
