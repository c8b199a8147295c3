"""FedPer (Arivazhagan et al., 2019): the body is shared, the head stays; both are trained together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedprism.methods import register
from fedprism.methods.base import Context, Method, Net, leaves


@register
@dataclass(frozen=True)
class FedPer(Method):
    id = "fedper"
    paper = "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818, 2019"
    idea = "Body shared, head personal, trained jointly."
    shares = "the body"
    stays = "the head (model.head_layers says how many layers)"
    group = "split"

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "body")
