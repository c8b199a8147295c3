"""Clients and their data: partitions of a dataset, and the `Federation` that they make."""

from fedprism.federation.base import ClientData, Federation, Split
from fedprism.federation.build import federation, make_federation
from fedprism.federation.partitions import PARTITIONS, Partition, Share
from fedprism.federation.sheet import contact_sheet

__all__ = [
    "PARTITIONS",
    "ClientData",
    "Federation",
    "Partition",
    "Share",
    "Split",
    "contact_sheet",
    "federation",
    "make_federation",
]
