"""FedBN (Li et al., ICLR 2021): FedAvg whose batch-norm layers never leave the client."""

from __future__ import annotations

from dataclasses import dataclass

from fedprism.methods import register
from fedprism.methods.base import Method


@register
@dataclass(frozen=True)
class FedBN(Method):
    id = "fedbn"
    paper = "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"
    idea = "FedAvg of everything but batch norm, which stays local: affine parameters and statistics."
    shares = "everything but batch norm"
    stays = "batch-norm layers"
    group = "split"
    bn = "local"
    weighting = "uniform"
