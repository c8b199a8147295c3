"""Every operation through every fault: what `docs/reliability.md` promises holds after it.

A test is one case in the default tier, a spread of cases elsewhere. `tests/faults/campaign.py` draws random ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if not hasattr(os, "fork"):  # what follows cannot even be imported
    pytest.skip("kills, signals and limits need a Unix system", allow_module_level=True)

from tests.faults.cases import BROKEN, NOT_HERE, Case, Driver, Verdict
from tests.faults.injection import FAULTS
from tests.faults.operations import OPERATIONS, SABOTAGE

SPREAD = {False: 24, True: 4}  # cases per fault and operation (a slow one) in the slow tier

# Operation, fault and where it strikes, from 0 to 1.
SAMPLE = [
    ("train", "killed", 0.5),
    ("train", "killed in a write", 0.04),
    ("train", "no space beside a user's file", 0.1),
    ("train", "Ctrl-C", 0.6),
    ("train", "a full disk", 0.4),
    ("train", "a limit on file sizes", 0.4),
    ("train", "a limit on memory", 0.0),
    ("train-on-disk", "killed", 0.7),
    ("resume", "killed", 0.4),
    ("resume", "no space in a write", 0.21),
    ("resume", "a flipped bit", 0.75),
    ("resume", "deleted", 0.5),
    ("resume", "a link in its place", 0.8),
    ("resume-on-disk", "an I/O error once", 0.5),
    ("compare", "read-only from then on", 0.55),
    ("compare-again", "no permission once", 0.5),
    ("overwrite", "killed", 0.25),
    ("load", "cut short", 0.9),
    ("show", "emptied", 0.99),
    ("report", "terminated", 0.5),
    ("inspect", "no space once", 0.5),
    ("inspect", "a nasty setting", 0.2),
]
# And one each of what these lack, so that a new operation or fault is in the default tier by its own line.
SAMPLE += [
    (name, "an I/O error at a read", 0.5)
    for name, operation in OPERATIONS.items()
    if not operation.slow and name not in {sampled for sampled, _, _ in SAMPLE}
]
SAMPLE += [("show", name, 0.5) for name in FAULTS if name not in {sampled for _, sampled, _ in SAMPLE}]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with Driver() as made:
        yield made


def told(case: Case, verdict: Verdict) -> str:
    broken = "".join(f"\n  - {promise}" for promise in verdict.broken)
    return f"{case.operation}, {case.fault} at {verdict.point}:{broken}\n{verdict.said}"


@pytest.mark.parametrize(("operation", "fault", "place"), SAMPLE)
def test_promises_hold(driver: Driver, operation: str, fault: str, place: float) -> None:
    case = Case(operation, fault, place)
    verdict = driver.run(case)
    if verdict.outcome == NOT_HERE:
        pytest.skip(verdict.point)
    assert not verdict.broken, told(case, verdict)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_promises_hold_wherever_it_strikes(driver: Driver, operation: str, fault: str) -> None:
    points = len(driver.points(operation, fault))
    if not points:
        pytest.skip("there is nothing that it could strike")
    count = min(points, SPREAD[OPERATIONS[operation].slow])
    cases = [Case(operation, fault, (n + 0.5) / count) for n in range(count)]
    verdicts = [driver.run(case) for case in cases]
    if all(verdict.outcome == NOT_HERE for verdict in verdicts):
        pytest.skip(verdicts[0].point)
    bad = [told(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict.broken]
    assert not bad, f"{len(bad)} of {count} cases\n" + "\n\n".join(bad[:3])


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_without_a_fault_it_does_the_same_again(driver: Driver, operation: str) -> None:
    case = Case(operation, "none")
    verdict = driver.run(case)
    assert not verdict.broken, told(case, verdict)


@pytest.mark.parametrize(
    "operation", [pytest.param(name, marks=pytest.mark.slow if i % 2 else ()) for i, name in enumerate(SABOTAGE)]
)
def test_what_breaks_a_promise_is_noticed(driver: Driver, operation: str) -> None:
    verdict = driver.run(Case(operation, "none"))
    assert verdict.outcome == BROKEN
    assert SABOTAGE[operation][1] in " ".join(verdict.broken), verdict.broken
