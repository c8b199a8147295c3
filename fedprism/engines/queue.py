"""The order in which an engine hands clients to its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile


class ClientQueue:
    """Clients that wait for a worker. The largest comes first: of all or, with a window, of those within it.

    The window is so many clients in client order, from the first one without an answer on. So at most so many uploads
    wait to be added up in this order.
    """

    def __init__(self, clients: Sequence[str], cost: Callable[[str], float], window: int | None) -> None:
        self.clients, self.cost, self.window = clients, cost, window
        self.place = {client_id: place for place, client_id in enumerate(clients)}
        self.done = [False] * len(clients)
        self.first = 0  # place of the first client without an answer
        self.waiting = self._ordered(clients)

    def _ordered(self, clients: Iterable[str]) -> dict[str, None]:
        in_order = sorted(clients, key=self.place.__getitem__)
        return dict.fromkeys(in_order if self.window else sorted(in_order, key=self.cost, reverse=True))

    def __len__(self) -> int:
        return len(self.waiting)

    def take(self) -> str | None:
        """The next client; None: all of them lie beyond the window."""
        client_id = next(iter(self.waiting), None)
        if self.window:
            end = self.first + self.window
            within = takewhile(lambda each: self.place[each] < end, self.waiting)
            client_id = max(within, key=self.cost, default=None)
        if client_id is not None:
            del self.waiting[client_id]
        return client_id

    def put_back(self, clients: Iterable[str]) -> None:
        """Their worker has died."""
        self.waiting = self._ordered([*clients, *self.waiting])

    def answered(self, client_id: str) -> None:
        """The window moves on."""
        self.done[self.place[client_id]] = True
        while self.first < len(self.done) and self.done[self.first]:
            self.first += 1
