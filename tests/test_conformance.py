"""What every registered method promises: the suite of `fedprism check`, and what is asked of built-in ones beside it.

A new method gets these tests by being registered. Six methods are tested by default, all others by `make test-slow`.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from fedprism.config import structure
from fedprism.conformance import PROMISES, Case, judge
from fedprism.conformance.case import ROUNDS
from fedprism.methods import METHODS
from fedprism.methods.base import Method, State
from fedprism.round.client import bn_policy
from tests.harness import SIX, by_method

pytestmark = pytest.mark.no_cover  # captured steps run every method, too, and there lines are counted

SPARE: dict[str, dict[str, Any]] = {"fedios": {"max_clients": 4}}  # settings with which somebody can join
MOVES = 1e-3  # what training moves at least; the default asks for more than nothing

every_method = pytest.mark.parametrize("name", by_method())


@cache
def case_of(name: str) -> Case:
    """A method with the settings of its reference, and its runs."""
    quick = getattr(import_module(f"tests.reference.{name.replace('-', '_')}"), "QUICK", {})
    return Case(lambda: structure(quick, METHODS[name], "method"), least=MOVES)


def promises(group: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("key", [key for key, each in PROMISES.items() if each.group == group])


# --- promises --------------------------------------------------------------------------------------------------------


@promises("structure")
@every_method
def test_structure(name: str, key: str) -> None:
    """A built-in method keeps every promise, and there is nothing to note."""
    case = case_of(name)
    if key == "newcomer" and name in SPARE:
        case = Case(lambda: METHODS[name](**SPARE[name]), least=MOVES)
    verdict = judge(case, PROMISES[key])
    assert verdict.outcome == "ok", str(verdict)


@promises("settings")
@every_method
def test_settings(name: str, key: str) -> None:
    case = case_of(name)
    verdict = judge(case, PROMISES[key])
    if key == "mixed" and not case.method.mixed:
        assert verdict.outcome == "does not apply"
        assert verdict.reason.startswith(f"{name} needs one architecture for all clients")
    else:
        assert verdict.outcome == "ok", str(verdict)


def test_the_six_are_there() -> None:
    assert set(SIX) < set(METHODS)


# --- what the plain run shows beside promises ------------------------------------------------------------------------


@every_method
def test_traffic_is_counted(name: str) -> None:
    run = case_of(name).straight
    for round, requests in run.requests.items():
        record = run.records[round + 1]
        for client_id, request in requests.items():
            assert record.up[client_id] == bytes_of(run.result(round, client_id).upload)
            assert record.down[client_id] == bytes_of(request.download)


def bytes_of(state: State) -> int:
    return sum(len(tensor.contiguous().numpy().tobytes()) for tensor in state.values())


@every_method
def test_everybody_trains(name: str) -> None:
    run = case_of(name).straight
    assert run.status == "finished"
    assert list(run.snapshots) == list(range(ROUNDS + 1))
    for snapshot in run.snapshots.values():
        assert all((state is None) == (snapshot.round == 0) for state in snapshot.clients.values())
    assert all(run.moved(client_id) > 1e-2 for client_id in run.loop.info.clients)


@every_method
def test_every_moment_is_evaluated(name: str) -> None:
    run = case_of(name).often
    has_global = METHODS[name].has_global and bn_policy(run.loop.method, run.loop.config) == "shared"
    expected = {"received", "adapted", *({"global"} if has_global else ())}
    assert [set(record.scores) for record in run.records] == [expected] + [{*expected, "trained"}] * 3


@every_method
def test_a_round_without_answers_changes_no_score(name: str) -> None:
    case = case_of(name)
    run = case.run(case.config(clients={"dropout": 1.0}), until=2)
    assert all(set(record.failed) == set(run.loop.info.clients) for record in run.records[1:])
    assert all(state is None for state in run.last.clients.values())
    assert len({str(record.scores["received"]) for record in run.records}) == 1


# --- what a user reads -----------------------------------------------------------------------------------------------

registered = pytest.mark.parametrize("name", list(METHODS))


@registered
def test_a_method_says_what_it_is(name: str) -> None:
    cls = METHODS[name]
    assert cls.id == name == name.lower()
    for text in (cls.paper, cls.idea, cls.shares, cls.stays, cls.reveals, cls.newcomers, cls.group):
        assert text.strip()
    assert cls.moment != "global" or cls.has_global
    assert judge(Case(cls), PROMISES["says"]).outcome == "ok"


@registered
def test_hyper_parameters_have_defaults_and_docs(name: str) -> None:
    cls = METHODS[name]
    assert "__dataclass_fields__" in vars(cls)
    for f in dataclasses.fields(cls):
        assert f.metadata.get("doc"), f.name
        assert f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING, f.name
    made: Method = cls()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.anything = 1  # type: ignore[attr-defined]
