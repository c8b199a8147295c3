"""The reference engine: one client after the other, in this process, on a CPU or a GPU. It defines what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from fedprism.config import Config
from fedprism.engines import ENGINES
from fedprism.engines.cuda.operations import CudaOperations
from fedprism.federation import ClientData, Federation
from fedprism.methods.base import Client, Info, Method, State
from fedprism.models import Arch
from fedprism.round.client import Job, client_evaluate, client_receive, client_round, open_slot
from fedprism.round.engine import ClientScores, Engine, Failure, Request, Result
from fedprism.round.memory import enough_memory
from fedprism.round.training import Operations

T = TypeVar("T")


@ENGINES.register("inprocess")
class InProcess(Engine):
    """one client after the other in this process, on a CPU or a GPU: the reference"""

    name = "inprocess"

    def __init__(
        self, method: Method, config: Config, info: Info, federation: Federation, device: torch.device
    ) -> None:
        self.method, self.config, self.info = method, config, info
        self.where, self.device = device, str(device)
        self.clients, self.public = federation.clients, federation.public.to(device)
        self.operations = CudaOperations() if device.type == "cuda" else Operations()
        self.slots: dict[Arch, Client] = {}
        self.data: dict[str, ClientData] = {}  # on the device

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        return self._each(client_round, round, requests)

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, ClientScores | Failure]]:
        return self._each(client_evaluate, round, requests)

    def receive(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, State | Failure]]:
        return self._each(client_receive, round, requests)

    def place(self, state: State) -> State:
        return {name: tensor.to(self.where) for name, tensor in state.items()}

    def _each(
        self,
        work: Callable[[Job, State | None, State, Client], T],
        round: int,
        requests: Mapping[str, Request],
    ) -> Iterator[tuple[str, T]]:
        for done, (client_id, request) in enumerate(requests.items(), start=1):
            yield client_id, self._run(work, round, client_id, request)
            self.on_progress(done, len(requests))

    def _run(
        self, work: Callable[[Job, State | None, State, Client], T], round: int, client_id: str, request: Request
    ) -> T:
        with enough_memory(client_id):
            if client_id not in self.data:
                self.data[client_id] = self.clients[client_id].to(self.where)
            data, arch = self.data[client_id], self.info.archs[client_id]
            job = Job(self.method, self.config, self.info, data, round, self.public, self.operations)
            if arch not in self.slots:
                self.slots[arch] = open_slot(job)
            return work(job, request.state, self.place(request.download), self.slots[arch])
