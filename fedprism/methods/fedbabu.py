"""FedBABU (Oh et al., ICLR 2022): the body is trained and averaged under a head with fixed random weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedprism.methods import register
from fedprism.methods.base import Client, Context, Net, Pass
from fedprism.methods.finetune import FineTune, trainable


@register
@dataclass(frozen=True)
class FedBABU(FineTune):
    id = "fedbabu"
    paper = "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    idea = "Only the body is trained and averaged, under one random head; each client fine-tunes both before a test."
    shares = "the body"
    stays = "the head, with its first random weights"

    def shared(self, model: Net, ctx: Context) -> Collection[str]:
        return trainable(model, "body")

    def passes(self, client: Client, ctx: Context) -> list[Pass]:
        return [Pass(self.loss, trains=trainable(client.model, "body"))]
