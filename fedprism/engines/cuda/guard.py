"""Finds out why a step cannot be captured: what reads a value on the host, copies one from there, or changes one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedprism.errors import FedprismError

READS = {
    "_local_scalar_dense": ".item(), float(tensor) or `if tensor`",
    "nonzero": "boolean indexing or nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "repeat_interleave": "repeat_interleave",
    "equal": "torch.equal",
    "is_nonzero": "`if tensor`",
    "lift_fresh": "torch.tensor(...)",
    "_linalg_eigh": "eigh",
    "_linalg_svd": "svd",
}


class NotCapturable(FedprismError):
    """A step that cannot be captured; the message says why."""


class CaptureGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within: an operation that a CUDA graph cannot hold raises `NotCapturable`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.host = "cpu" if device.type != "cpu" else None  # what happens there is not captured

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name in READS:
            raise NotCapturable(f"it waits for the device: {READS[name]}")
        if func._schema.is_mutable:
            written = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
            if any(isinstance(tensor, Tensor) and tensor.device.type == self.host for tensor in written):
                raise NotCapturable("it changes a tensor on the host, such as the sum of a value there that is logged")
        made = func(*args, **(kwargs or {}))
        if name in ("copy_", "_to_copy"):
            source = args[1] if name == "copy_" else args[0]
            if source.device.type != made.device.type:
                raise NotCapturable(f"it copies a tensor {'from' if source.device.type == 'cpu' else 'to'} the host")
        return made
