"""FedAvg (McMahan et al., AISTATS 2017): the defaults of `Method`, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from fedprism.methods import register
from fedprism.methods.base import Method


@register
@dataclass(frozen=True)
class FedAvg(Method):
    id = "fedavg"
    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
    idea = "Clients train the received model on their own data; the server averages what comes back."
    has_global = True
