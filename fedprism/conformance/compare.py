"""Are two runs the same, bit by bit? Where not: what differs first, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedprism.methods.base import State
from fedprism.round.engine import Result
from fedprism.round.events import RoundRecord, Score

if TYPE_CHECKING:
    from fedprism.conformance.case import Trained

Shapes = dict[str, tuple[torch.Size, torch.dtype]]


def same(a: State | None, b: State | None) -> bool:
    """Are two states equal, bit by bit?"""
    return difference(a, b) is None


def difference(found: State | None, expected: State | None) -> str | None:
    """What differs between two states; None: nothing."""
    if found is None or expected is None:
        wrong = "there is no state, expected one" if found is None else "there is a state, expected none"
        return None if found is expected else wrong
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        how = "missing" if odd[0] in expected else "unknown"
        return f"{odd[0]} is {how} ({_of(len(odd), 'such leaf', 'such leaves')})"
    other = [leaf for leaf, tensor in found.items() if not _equal(tensor, expected[leaf])]
    if not other:
        return None
    a, b = found[other[0]], expected[other[0]]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        how = f"is {kind(a)}, expected {kind(b)}"
    elif bool(a.isnan().any()) and not bool(b.isnan().any()):
        how = "is not a number, expected numbers"
    else:
        how = f"differs by up to {apart(a, b):.2g}"
    return f"{other[0]} {how} ({len(other)} of {_of(len(found), 'leaf', 'leaves')} differ)"


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit by bit; what is not a number in the same places is the same."""
    if torch.equal(a, b):
        return True
    alike = (a.shape, a.dtype) == (b.shape, b.dtype) and a.is_floating_point()
    return alike and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def first_difference(found: Trained, expected: Trained, states_only: bool = False) -> str | None:
    """Where a run first departs from another one, over the rounds that it has; None: nowhere.

    Compared are states, clients' models and uploads, as far as the engines of both runs remember them, and records.
    """
    of_round = {record.round: record for record in expected.records}
    if not found.records:
        return "in that no round was run"
    for record in found.records:
        round = record.round
        if round not in expected.snapshots:
            return f"there is a round {round}, but the other run ended after round {max(expected.snapshots)}"
        where = f"after round {round}" if round else "before the first round"
        failed = _failures(record, of_round[round])
        if failed is not None:
            return f"{where}: {failed}"
        differs = _states(found, expected, round)
        differs = differs or (None if states_only else _records(record, of_round[round]))
        if differs is not None:
            return f"{where}: {differs}"
    return None


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors."""
    return float((a.detach().double() - b.detach().double()).abs().max()) if a.numel() else 0.0


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The Euclidean distance of two states, counters aside."""
    floats = [name for name, tensor in a.items() if tensor.is_floating_point()]
    squares = [float((a[name] - b[name]).detach().square().sum()) for name in floats]
    return math.sqrt(sum(squares))


def shapes(state: Mapping[str, Tensor]) -> Shapes:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


def kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def copied(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _failures(found: RoundRecord, expected: RoundRecord) -> str | None:
    for client_id, reason in found.failed.items():
        if client_id not in expected.failed:
            return f"client {client_id} failed: {reason}"
    missing = [client_id for client_id in expected.failed if client_id not in found.failed]
    return f"client {missing[0]} did not fail" if missing else None


def _states(found: Trained, expected: Trained, round: int) -> str | None:
    a, b = found.snapshots[round], expected.snapshots[round]
    return (
        _of_clients(a.clients, b.clients)
        or _of_clients(found.models.get(round - 1, {}), expected.models.get(round - 1, {}))
        or _of_clients({"": a.server}, {"": b.server}, "the server")
        or _of_clients(_uploads(found, round - 1), _uploads(expected, round - 1), "the upload of client ")
    )


def _of_clients(
    found: Mapping[str, State | None], expected: Mapping[str, State | None], whose: str = "client "
) -> str | None:
    """The first difference, over the clients that are in both."""
    for client_id, state in found.items():
        differs = difference(state, expected[client_id]) if client_id in expected else None
        if differs is not None:
            return f"{whose}{client_id}: {differs}"
    return None


def _uploads(run: Trained, round: int) -> dict[str, State]:
    return {c: answer.upload for c, answer in run.answers.get(round, {}).items() if isinstance(answer, Result)}


def _records(found: RoundRecord, expected: RoundRecord) -> str | None:
    """States are the same, but what is recorded beside them is not."""
    for name in ("cohort", "down", "up", "logs", "scores"):
        differs = _values(getattr(found, name), getattr(expected, name), name)
        if differs is not None:
            return f"states are the same, but not what is recorded: {differs}"
    return None


def _values(a: Any, b: Any, where: str) -> str | None:
    """The first value that differs; two that are not a number are the same."""
    if isinstance(a, Score) and isinstance(b, Score):
        a, b = vars(a), vars(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = (_values(a.get(key), b.get(key), f"{where}/{key}") for key in {**a, **b})
        return next((each for each in found if each is not None), None)
    return None if a == b or (a != a and b != b) else f"{where} is {a!r}, expected {b!r}"


def _of(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
