"""FedBABU (Oh et al., ICLR 2022): the body is trained and averaged under a head that stays as it was drawn."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedprism.methods import register
from fedprism.methods.base import Me, Net, Now, Pass
from fedprism.methods.finetune import FineTune, trainable


@register
@dataclass(frozen=True)
class FedBABU(FineTune):
    id = "fedbabu"
    paper = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    idea = "Only the body is trained and averaged, under one random head; each client fine-tunes both before a test."
    shares = "the body"
    stays = "the head, with its first random weights"

    def shared(self, model: Net, now: Now) -> Collection[str]:
        return trainable(model, "body")

    def passes(self, me: Me, now: Now) -> list[Pass]:
        return [Pass(self.loss, trains=trainable(me.model, "body"))]
