"""FedRep (Collins et al., ICML 2021): first the personal head on a frozen body, then the shared body under a frozen
head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedprism.config import positive, setting
from fedprism.methods import register
from fedprism.methods.base import Client, Context, Method, Net, Pass, leaves


@register
@dataclass(frozen=True)
class FedRep(Method):
    id = "fedrep"
    paper = "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"
    idea = "Body shared, head personal; a round trains the head first, then the body."
    shares = "the body"
    stays = "the head"
    group = "split"
    weighting = "uniform"

    head_epochs: int = setting(4, "epochs on the head, the body frozen", positive, "1 or more")
    body_epochs: int = setting(1, "epochs on the body, the head frozen", positive, "1 or more")

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return leaves.part(model, "body")

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        body, head = leaves.part(client.model, "body"), leaves.part(client.model, "head")
        return [
            Pass(self.loss, "head", trains=head, epochs=self.head_epochs),
            Pass(self.loss, "body", trains=body, epochs=self.body_epochs),
        ]
