"""A promise, the verdict on it, and how one is reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from fedprism.config import RunConfig
from fedprism.conformance.frames import in_own_words
from fedprism.engines.numerics import numerics
from fedprism.errors import ConfigError, unknown

if TYPE_CHECKING:
    from fedprism.conformance.case import Case

Outcome = Literal["ok", "broken", "note", "does not apply"]
Group = Literal["structure", "settings"]
Check = Callable[["Case"], None]
CPU = torch.device("cpu")


class Broken(Exception):
    """A promise is not kept: what was expected and what was found, and what to do about it."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


class DoesNotApply(Exception):
    """A promise means nothing for this method; the message says why."""


class Note(Exception):
    """A promise is kept, but its author should know something."""


@dataclass(frozen=True)
class Promise:
    """One thing that a method promises. `needs` are promises without which a check would only repeat their reason."""

    key: str
    text: str
    group: Group
    needs: tuple[str, ...]
    check: Check


@dataclass(frozen=True)
class Verdict:
    """What a check found."""

    promise: Promise
    outcome: Outcome
    reason: str = ""
    hint: str = ""
    seconds: float = 0.0
    because: str = ""  # the key of the broken promise without which this one means nothing

    def __str__(self) -> str:
        lines = [f"{self.promise.text}: {self.outcome}", self.reason, f"Hint: {self.hint}" if self.hint else ""]
        return "\n".join(filter(None, lines))


PROMISES: dict[str, Promise] = {}


def promise(text: str, group: Group = "structure", needs: tuple[str, ...] = ("runs",)) -> Callable[[Check], Check]:
    """File a check as a promise; its key is the name of the function."""

    def file(check: Check) -> Check:
        key = check.__name__.replace("_", "-")
        PROMISES[key] = Promise(key, text, group, needs, check)
        return check

    return file


def find(keys: Collection[str] = (), groups: Collection[str] = ("structure",)) -> list[Promise]:
    """The promises that have these keys, or all of these groups where there are no keys."""
    odd = [key for key in keys if key not in PROMISES]
    if odd:
        raise ConfigError(unknown("promise", odd[0], PROMISES))
    return [each for key, each in PROMISES.items() if (key in keys if keys else each.group in groups)]


def judge(case: Case, wanted: Promise) -> Verdict:
    """The verdict on one promise; it is reached once per case."""
    if wanted.key not in case.verdicts:
        case.verdicts[wanted.key] = _after_what_it_needs(case, wanted)
    return case.verdicts[wanted.key]


def judge_all(case: Case, promises: Collection[Promise] | None = None) -> Iterator[Verdict]:
    """One verdict after the other; left out: on every promise of structure."""
    for each in find() if promises is None else promises:
        yield judge(case, each)


def _after_what_it_needs(case: Case, wanted: Promise) -> Verdict:
    for key in wanted.needs:
        before = judge(case, PROMISES[key])
        root = key if before.outcome == "broken" else before.because
        if root:
            reason = f"it needs {PROMISES[root].text!r} ({root}), which is broken"
            return Verdict(wanted, "does not apply", reason, because=root)
    begun = time.perf_counter()
    outcome, reason, hint = _try(case, wanted)
    return Verdict(wanted, outcome, reason, hint, time.perf_counter() - begun)


def _try(case: Case, wanted: Promise) -> tuple[Outcome, str, str]:
    try:
        with numerics(RunConfig(), CPU):  # one thread, whoever calls
            wanted.check(case)
    except Broken as broken:
        words = "" if broken.__cause__ is None else "\n" + in_own_words(broken.__cause__, type(case.method))
        return "broken", f"{broken}{words}", broken.hint
    except DoesNotApply as why:
        return "does not apply", str(why), ""
    except Note as note:
        return "note", str(note), ""
    except Exception as error:  # noqa: BLE001 - whatever a hook raises is what its author wants to see
        return "broken", in_own_words(error, type(case.method)), ""
    return "ok", "", ""
