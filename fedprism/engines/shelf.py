"""Clients' data on the device, at places that do not move: what is recorded reads it there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

import torch
from torch import Tensor

from fedprism.config import SPLITS
from fedprism.federation import ClientData, Federation, Split


class Placed(Split):
    """A part of a client's data that lies on a shelf, from row `begin` on."""

    def __init__(self, shelf: Shelf, begin: int, count: int) -> None:
        super().__init__(shelf.x[begin : begin + count], shelf.y[begin : begin + count])
        self.shelf, self.begin = shelf, begin


class Shelf:
    """Rows of images as they are stored, and their labels, one after the other; of a client at most `longest`."""

    def __init__(self, rows: int, longest: int, like: Split, device: torch.device) -> None:
        self.longest = longest
        dtype, shape = like.kind
        self.x = torch.zeros(rows, *shape, dtype=dtype, device=device)
        self.y = torch.zeros(rows, dtype=torch.int64, device=device)

    def place(self, split: Split, begin: int) -> Placed:
        placed = Placed(self, begin, len(split))
        if len(split):
            placed.x.copy_(split.x)
            placed.y.copy_(split.y)
        return placed

    def place_all(self, data: ClientData, begin: int) -> ClientData:
        """All parts of a client's data, from this row on."""
        found: dict[str, Split] = {}
        for part in SPLITS:
            found[part] = self.place(data.split(part), begin)
            begin += len(data.split(part))
        return ClientData(data.name, data.domain, found["train"], found["validation"], found["test"], data.classes)


class Data:
    """Everybody's data on the device where it fits, each client's brought when it is first needed; else none."""

    def __init__(self, federation: Federation, device: torch.device, room: int) -> None:
        self.clients, self.device = federation.clients, device
        self.like = next(iter(self.clients.values())).train
        sizes = {name: sum(len(data.split(part)) for part in SPLITS) for name, data in self.clients.items()}
        self.longest, rows = max(sizes.values()), sum(sizes.values())
        dtype, shape = self.like.kind
        self.fits = rows * (math.prod(shape) * dtype.itemsize + 8) <= room
        self.shelf = Shelf(rows, self.longest, self.like, device) if self.fits else None
        starts = itertools.accumulate(sizes.values(), initial=0)
        self.begin = dict(zip(sizes, starts, strict=False))  # there is one start more: the end
        self.held: dict[str, ClientData] = {}
        count = len(federation.public)
        self.public = Shelf(count, count, federation.public, device).place(federation.public, 0)

    def fetch(self, wanted: Collection[str]) -> None:
        """Before a round: what it needs and is not here yet."""
        if self.shelf is not None:
            for client in wanted:
                if client not in self.held:
                    self.held[client] = self.shelf.place_all(self.clients[client], self.begin[client])

    def own_shelf(self) -> Shelf | None:
        """For a slot, where not all data fit: its client's are brought there each time."""
        return None if self.fits else Shelf(self.longest, self.longest, self.like, self.device)

    def at(self, client: str, shelf: Shelf | None) -> ClientData:
        """A client's data on the device."""
        return self.held[client] if shelf is None else shelf.place_all(self.clients[client], 0)

    def clear(self) -> None:
        self.held.clear()
        self.shelf = None


class Arena:
    """Whole numbers on their way to the device: in pinned memory that is made once, since making it takes long."""

    SIZE = 2**18

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self.chunks: list[Tensor] = []
        self.reset()

    def reset(self) -> None:
        """All may be used anew: what was sent has arrived."""
        self.chunk, self.used = 0, 0

    def take(self, count: int) -> Tensor:
        """Room for so many numbers, until the next `reset`."""
        while self.chunk < len(self.chunks) and self.used + count > len(self.chunks[self.chunk]):
            self.chunk, self.used = self.chunk + 1, 0
        if self.chunk == len(self.chunks):
            self.chunks.append(torch.empty(max(self.SIZE, count), dtype=torch.int64, pin_memory=self.pinned))
        self.used += count
        return self.chunks[self.chunk][self.used - count : self.used]
