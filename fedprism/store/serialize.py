"""States as bytes: one format for checkpoints, for files between processes and for the network."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import safetensors.torch
import torch
from torch import Tensor

from fedprism.methods.base import State


def serialize(state: Mapping[str, Tensor]) -> bytes:
    """A state as a safetensors file. Views and tied tensors are written as copies: the format refuses shared memory."""
    # The format sorts its tensors. Sums over a state follow its order, so the order is part of what must come back.
    order = json.dumps(list(state))
    tensors = {n: t.detach().to("cpu").clone(memory_format=torch.contiguous_format) for n, t in state.items()}
    return safetensors.torch.save(tensors, metadata={"order": order})


def deserialize(data: bytes) -> State:
    """The inverse of `serialize`; the order of the names included."""
    (size,) = struct.unpack("<Q", data[:8])
    order = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["order"])
    tensors = safetensors.torch.load(data)
    return {name: tensors[name] for name in order}


def size(state: Mapping[str, Tensor]) -> int:
    """Bytes of a state as sent."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
