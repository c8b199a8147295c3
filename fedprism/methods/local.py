"""Local: every client trains alone. What any federation has to beat."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedprism.methods import register
from fedprism.methods.base import Method, Net, Now


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

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return ()
