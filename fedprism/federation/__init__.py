"""Clients and their data: partitions of a dataset, and the `Federation` that they make."""

import sys
from types import ModuleType
from typing import Any

from fedprism.federation import feature_skew, label_skew  # noqa: F401  (they register their partitions)
from fedprism.federation.base import ClientData, Federation, Split
from fedprism.federation.build import federation, make_federation
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
    "contact_sheet",
    "describe",
    "federation",
    "make_federation",
]


class _CallableModule(ModuleType):
    """`fp.federation("digits-skew")` means the function, though the package of that name lies in its place."""

    def __call__(self, *args: Any, **settings: Any) -> Federation:
        return federation(*args, **settings)


sys.modules[__name__].__class__ = _CallableModule
