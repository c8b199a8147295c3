"""SiloBN (Andreux et al., DCL 2020): batch-norm affine parameters are shared, running statistics stay."""

from __future__ import annotations

from dataclasses import dataclass

from fedprism.methods import register
from fedprism.methods.base import Method


@register
@dataclass(frozen=True)
class SiloBN(Method):
    id = "silobn"
    paper = "Andreux et al., Siloed Federated Learning for Multi-Centric Histopathology Datasets, DCL 2020"
    idea = "FedAvg of all parameters; the running statistics of batch norm stay local."
    shares = "all parameters, batch norm's included"
    stays = "batch-norm statistics"
    group = "split"
    bn = "local-stats"
