"""Clients' data on the device, at addresses that do not change: captured steps read it there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import torch
from torch import Tensor

from fedprism.config import SPLITS
from fedprism.federation import ClientData, Federation, Split


class DeviceSplit(Split):
    """A part of a client's data that lies in a buffer, from row `begin` on."""

    def __init__(self, buffer: DeviceBuffer, begin: int, count: int) -> None:
        super().__init__(buffer.x[begin : begin + count], buffer.y[begin : begin + count])
        self.buffer, self.begin = buffer, begin


class DeviceBuffer:
    """Rows of images as they are stored, and their labels. One client has at most `longest` rows."""

    def __init__(self, rows: int, longest: int, like: Split, device: torch.device) -> None:
        self.longest = longest
        dtype, shape = like.kind
        self.x = torch.zeros(rows, *shape, dtype=dtype, device=device)
        self.y = torch.zeros(rows, dtype=torch.int64, device=device)

    def put(self, split: Split, begin: int) -> DeviceSplit:
        """Copy a part of a client's data to the rows from `begin` on."""
        placed = DeviceSplit(self, begin, len(split))
        if len(split):
            placed.x.copy_(split.x)
            placed.y.copy_(split.y)
        return placed

    def put_all(self, data: ClientData, begin: int) -> ClientData:
        """Copy all parts of a client's data to the rows from `begin` on."""
        found: dict[str, Split] = {}
        for part in SPLITS:
            found[part] = self.put(data.split(part), begin)
            begin += len(data.split(part))
        return ClientData(data.name, data.domain, found["train"], found["validation"], found["test"], data.classes)


class ClientBuffers:
    """The data of all clients on the device, where it fits; each client's is copied when it is first needed."""

    def __init__(self, federation: Federation, device: torch.device, limit: int) -> None:
        self.clients, self.device = federation.clients, device
        self.like = next(iter(self.clients.values())).train
        sizes = {name: sum(len(data.split(part)) for part in SPLITS) for name, data in self.clients.items()}
        self.longest, rows = max(sizes.values()), sum(sizes.values())
        dtype, shape = self.like.kind
        self.fits = rows * (math.prod(shape) * dtype.itemsize + 8) <= limit
        self.buffer = DeviceBuffer(rows, self.longest, self.like, device) if self.fits else None
        starts = itertools.accumulate(sizes.values(), initial=0)
        self.begin = dict(zip(sizes, starts, strict=False))  # there is one start more: the end
        self.copied: dict[str, ClientData] = {}
        count = len(federation.public)
        self.public = DeviceBuffer(count, count, federation.public, device).put(federation.public, 0)

    def fetch(self, wanted: Collection[str]) -> None:
        """Before a round: copy what it needs and is not here yet."""
        if self.buffer is not None:
            for client_id in wanted:
                if client_id not in self.copied:
                    self.copied[client_id] = self.buffer.put_all(self.clients[client_id], self.begin[client_id])

    def slot_buffer(self) -> DeviceBuffer | None:
        """A buffer for one slot, where not all data fit: its client's data are copied there each time."""
        return None if self.fits else DeviceBuffer(self.longest, self.longest, self.like, self.device)

    def at(self, client_id: str, buffer: DeviceBuffer | None) -> ClientData:
        """A client's data on the device."""
        return self.copied[client_id] if buffer is None else buffer.put_all(self.clients[client_id], 0)

    def clear(self) -> None:
        self.copied.clear()
        self.buffer = None


class PinnedPool:
    """Integers on their way to the device, in pinned memory that is allocated once: allocating it is slow."""

    SIZE = 2**18

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.chunks: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """All of it may be used again: what was sent has arrived."""
        self.chunk, self.used = 0, 0

    def take(self, count: int) -> Tensor:
        """Room for `count` integers, until the next `reset`."""
        while self.chunk < len(self.chunks) and self.used + count > len(self.chunks[self.chunk]):
            self.chunk, self.used = self.chunk + 1, 0
        if self.chunk == len(self.chunks):
            self.chunks.append(torch.empty(max(self.SIZE, count), dtype=torch.int64, pin_memory=self.pinned))
        self.used += count
        return self.chunks[self.chunk][self.used - count : self.used]
