"""What every method promises, as checks that anybody can run on a method of their own: `fedprism check`.

A promise is a function of a `Case`, which is a method with its tiny runs. All runs are real: three clients with 40
images each, four rounds, one thread, on the CPU. "The same" means bit by bit.

    from fedprism.conformance import Case, judge_all
    for verdict in judge_all(Case(MyMethod)):
        print(verdict)
"""

# They register their promises, which are judged in this order.
# isort: off
from fedprism.conformance import basics, reproducible, states, participation, failing, capturing, settings  # noqa: F401

# isort: on
from fedprism.conformance.case import Case, Trained, tiny
from fedprism.conformance.verdicts import (
    PROMISES,
    Broken,
    DoesNotApply,
    Note,
    Promise,
    Verdict,
    find,
    judge,
    judge_all,
)

__all__ = [
    "PROMISES",
    "Broken",
    "Case",
    "DoesNotApply",
    "Note",
    "Promise",
    "Trained",
    "Verdict",
    "find",
    "judge",
    "judge_all",
    "tiny",
]
