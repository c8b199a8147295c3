"""Clients and their data: partitions of a dataset and the resulting `Federation`."""

from fedprism.federation import feature_skew, label_skew  # noqa: F401  (they register their partitions)
from fedprism.federation.base import ClientData, Federation, Split
from fedprism.federation.build import build_federation, make_federation
from fedprism.federation.describe import Description, describe
from fedprism.federation.partitions import PARTITIONS, Partition, Share
from fedprism.federation.sheet import contact_sheet

__all__ = [
    "PARTITIONS",
    "ClientData",
    "Description",
    "Federation",
    "Partition",
    "Share",
    "Split",
    "build_federation",
    "contact_sheet",
    "describe",
    "make_federation",
]
