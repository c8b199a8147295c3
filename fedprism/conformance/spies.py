"""Engines that run clients as the reference does, and watch or disturb what passes between them and the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from fedprism.conformance.compare import copied
from fedprism.engines.inprocess import InProcess
from fedprism.methods.base import State
from fedprism.methods.leaves import tensors
from fedprism.round.engine import ClientScores, Failure, Request, Result

T = TypeVar("T")


class Spy(InProcess):
    """The reference engine, which remembers what clients were given, what they answered and their models, per round."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.requests: dict[int, dict[str, Request]] = {}
        self.answers: dict[int, dict[str, Result | Failure]] = {}
        self.models: dict[int, dict[str, State]] = {}  # all leaves of who has trained, or received without training

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        self.requests.setdefault(round, {}).update(requests)
        for client_id, answer in super().train(round, requests):
            self.answers.setdefault(round, {})[client_id] = answer
            if isinstance(answer, Result):
                self.remember_model(round, client_id)
            yield client_id, answer

    def receive(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, State | Failure]]:
        for client_id, state in super().receive(round, requests):
            self.remember_model(round, client_id)
            yield client_id, state

    def remember_model(self, round: int, client_id: str) -> None:
        """Copy it while this client is the last one that its slot has served."""
        slot = self.slots[self.info.archs[client_id]]
        self.models.setdefault(round, {})[client_id] = copied(tensors(slot.model))


class Reversed(Spy):
    """Clients run last to first, and their answers come back in that order."""

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        return super().train(round, _reversed(requests))

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, ClientScores | Failure]]:
        return super().evaluate(round, _reversed(requests))


class Wire(Spy):
    """Whatever crosses is bytes on the way, and arrives in alphabetical order."""

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id, answer in super().train(round, _sent(requests)):
            arrived = answer if isinstance(answer, Failure) else replace(answer, upload=over_the_wire(answer.upload))
            yield client_id, arrived

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, ClientScores | Failure]]:
        return super().evaluate(round, _sent(requests))


class FreshSlots(Spy):
    """Every client has a slot of its own."""

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id, request in requests.items():
            self.before_a_client()
            yield from super().train(round, {client_id: request})

    def evaluate(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, ClientScores | Failure]]:
        for client_id, request in requests.items():
            self.before_a_client()
            yield from super().evaluate(round, {client_id: request})

    def receive(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, State | Failure]]:
        for client_id, request in requests.items():
            self.before_a_client()
            yield from super().receive(round, {client_id: request})

    def before_a_client(self) -> None:
        self.slots.clear()


class PoisonedSlots(FreshSlots):
    """One slot serves all, and what the last client left in it is not a number: who reads must have written."""

    def before_a_client(self) -> None:
        for client in self.slots.values():
            poison(client.model.state_dict(keep_vars=True))
            for kept in client.scratch.values():
                if isinstance(kept, nn.Module):
                    poison(kept.state_dict(keep_vars=True))
                else:
                    poison(kept if isinstance(kept, dict) else {"": kept})


class BlankSlots(FreshSlots):
    """One slot serves all, and its model holds no number before each client: what is read is stored, or has come."""

    def before_a_client(self) -> None:
        for client in self.slots.values():
            poison(client.model.state_dict(keep_vars=True))


class Without(Spy):
    """One client never answers."""

    def __init__(self, victim: str, *given: Any) -> None:
        super().__init__(*given)
        self.victim = victim

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        yield from super().train(round, {c: request for c, request in requests.items() if c != self.victim})
        yield self.victim, Failure("gone")


class Replayed(Spy):
    """Nobody trains: clients answer what they answered in another run, but for one of them."""

    def __init__(
        self,
        answers: Mapping[int, Mapping[str, Result | Failure]],
        victim: str,
        change: Callable[[Result], Result | Failure],
        *given: Any,
    ) -> None:
        super().__init__(*given)
        self.recorded, self.victim, self.change = answers, victim, change

    def train(self, round: int, requests: Mapping[str, Request]) -> Iterator[tuple[str, Result | Failure]]:
        for client_id in requests:
            answer = self.recorded[round][client_id]
            tampered = client_id == self.victim and isinstance(answer, Result)
            yield client_id, self.change(answer) if tampered and isinstance(answer, Result) else answer


@torch.no_grad()
def poison(state: Mapping[str, Tensor]) -> None:
    for tensor in state.values():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


def over_the_wire(state: State) -> State:
    """A state as bytes and back, in alphabetical order: the format has an order of its own."""
    carried = safetensors.torch.load(safetensors.torch.save({n: t.contiguous().clone() for n, t in state.items()}))
    return {name: carried[name] for name in sorted(carried)}


def _reversed(requests: Mapping[str, T]) -> dict[str, T]:
    return {client_id: requests[client_id] for client_id in reversed(list(requests))}


def _sent(requests: Mapping[str, Request]) -> dict[str, Request]:
    return {c: Request(r.state, over_the_wire(r.download)) for c, r in requests.items()}
