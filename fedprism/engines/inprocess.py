"""The reference engine: one client after the other, in this process, on a CPU or a GPU. What it computes defines
right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from fedprism.config import Config
from fedprism.engines.client import (
    Failure,
    Job,
    Result,
    Scores,
    client_evaluate,
    client_receive,
    client_round,
    open_slot,
)
from fedprism.federation import ClientData, Federation
from fedprism.methods.base import Info, Me, Method, State
from fedprism.models import Arch
from fedprism.registry import Registry

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What one client is handed: its state (None: its first time) and what was sent to it."""

    state: State | None
    down: State


class Engine(Protocol):
    """Where clients run. Answers an entry a request; what can go wrong with one client alone is a `Failure`.

    A mistake in a method is an exception: it would be the same for every client.
    """

    tell: Callable[[int, int], None]  # told after each client: how many of how many are done; the loop sets it
    say: Callable[[str], None]  # told what takes long beside clients, such as compiling

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]: ...
    def evaluate(self, round: int, requests: Mapping[str, Request]) -> dict[str, Scores | Failure]: ...
    def receive(self, round: int, requests: Mapping[str, Request]) -> dict[str, State | Failure]: ...
    def close(self) -> None: ...


class Kind(Protocol):
    """What makes an engine: its class."""

    def __call__(
        self, method: Method, config: Config, info: Info, federation: Federation, device: torch.device
    ) -> Engine: ...


ENGINES: Registry[Kind] = Registry("engine")


@ENGINES.register("inprocess")
class InProcess:
    """one client after the other in this process, on a CPU or a GPU: the reference"""

    def __init__(
        self, method: Method, config: Config, info: Info, federation: Federation, device: torch.device
    ) -> None:
        self.method, self.config, self.info, self.device = method, config, info, device
        self.clients, self.public = federation.clients, federation.public.to(device)
        self.slots: dict[Arch, Me] = {}
        self.on_device: dict[str, ClientData] = {}
        self.tell: Callable[[int, int], None] = lambda done, of: None
        self.say: Callable[[str], None] = lambda text: None

    def train(self, round: int, requests: Mapping[str, Request]) -> dict[str, Result | Failure]:
        return self._each(client_round, round, requests)

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> dict[str, Scores | Failure]:
        return dict(self._each(client_evaluate, round, requests))

    def receive(self, round: int, requests: Mapping[str, Request]) -> dict[str, State | Failure]:
        return dict(self._each(client_receive, round, requests))

    def close(self) -> None:
        """Nothing is left running."""

    def _each(
        self, work: Callable[[Job, State | None, State, Me], T], round: int, requests: Mapping[str, Request]
    ) -> dict[str, T]:
        answers = {}
        for client, request in requests.items():
            if client not in self.on_device:
                self.on_device[client] = self.clients[client].to(self.device)
            data = self.on_device[client]
            job = Job(self.method, self.config, self.info, data, round, self.device, self.public)
            arch = self.info.archs[client]
            if arch not in self.slots:
                self.slots[arch] = open_slot(job)
            answers[client] = work(job, request.state, request.down, self.slots[arch])
            self.tell(len(answers), len(requests))
        return answers
