"""Memory that two processes share: states go from one to the other without being serialised.

It has no name, so that nothing stays behind when a process is killed. The socket between the two processes carries only
the place of a message in the buffer, so that neither process ever waits for the other to read.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import struct
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fedprism.methods.base import State

ALIGNED = 64  # bytes, as PyTorch aligns its own tensors


class Leaf(NamedTuple):
    """Where in a buffer a tensor is, and what it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int


class SharedBuffer:
    """Memory that two processes see, of which one writes and the other reads."""

    def __init__(self, file: int | None = None) -> None:
        self.file = _unnamed_file() if file is None else file
        self._made = None if file is not None else weakref.finalize(self, os.close, self.file)
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.there: list[tuple[torch.Tensor, int]] = []  # the first state in it, with its tensors' versions

    def put(self, note: object, states: Sequence[State | None] = ()) -> bytes:
        """Write a message, in place of the one before; gives what the reader needs to find it."""
        end, plans = 0, []
        for state in states:
            plan = []
            for name, tensor in (state or {}).items():
                # A view with holes becomes what `clone` makes of it; all else keeps its memory format.
                stride = torch.empty_like(tensor, device="meta").stride()
                plan.append(Leaf(name, tensor.dtype, tuple(tensor.shape), stride, end))
                end += -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
            plans.append(plan)
        head = pickle.dumps((note, [None if s is None else plan for s, plan in zip(states, plans, strict=True)]))
        self._reserve(end + len(head))
        known = self._is_there(states[0] or {} if states else {})
        for place, (state, plan) in enumerate(zip(states, plans, strict=True)):
            if place or not known:
                for leaf in plan:
                    self._view(leaf).copy_((state or {})[leaf.name].detach())
        self.memory[end : end + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        return struct.pack("<QQ", end, end + len(head))

    def get(self, ticket: bytes) -> tuple[Any, list[Any]]:
        """The note and the states that were written; tensors are views that hold until the next message comes."""
        begin, end = struct.unpack("<QQ", ticket)
        if len(self.memory) < end:
            self._map()
        head = self.memory[begin:end].numpy().data
        note, plans = pickle.loads(head)  # noqa: S301 - from a parent or a child of one's own
        return note, [None if plan is None else {leaf.name: self._view(leaf) for leaf in plan} for plan in plans]

    def close(self) -> None:
        """For who made it. The memory is given back when the other process has closed it, too."""
        if self._made is not None:
            self._made()  # once: the numbers of closed files are given to others

    def _is_there(self, state: State) -> bool:
        """Is this the state that was written last, tensor by tensor? What is sent often is the same for all clients."""
        before, self.there = self.there, []
        if not any(tensor.is_inference() for tensor in state.values()):  # those do not count their changes
            self.there = [(tensor, tensor._version) for tensor in state.values()]
        return len(before) == len(self.there) > 0 and all(
            one is other and then == now for (one, then), (other, now) in zip(before, self.there, strict=True)
        )

    def _view(self, leaf: Leaf) -> torch.Tensor:
        end = leaf.begin + math.prod(leaf.shape) * leaf.dtype.itemsize
        return self.memory[leaf.begin : end].view(leaf.dtype).as_strided(leaf.shape, leaf.stride)

    def _reserve(self, size: int) -> None:
        if len(self.memory) < size:
            os.ftruncate(self.file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._map()

    def _map(self) -> None:
        self.memory = torch.frombuffer(mmap.mmap(self.file, os.fstat(self.file).st_size), dtype=torch.uint8)


def _unnamed_file() -> int:
    """Memory without a name in Linux; elsewhere a file that is deleted while it is open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedprism", os.MFD_CLOEXEC)  # not in /dev/shm, which is small in many containers
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
