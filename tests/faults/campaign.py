"""Random cases: an operation, a fault, where it strikes, settings of the run, and whether going on is killed, too.

    python -m tests.faults.campaign --cases 2000 --seed 0 --out campaign.md
    python -m tests.faults.campaign --seed 0 --only 137

Case n of a seed is the same whatever the others are, so a broken promise is repeated by its number.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.cases import BROKEN, NOT_HERE, REFUSED, RESUMED, SAME, WARNED, Case, Driver, Verdict
from tests.faults.injection import FAULTS
from tests.faults.operations import OPERATIONS

OUTCOMES = (SAME, RESUMED, REFUSED, WARNED, BROKEN, NOT_HERE)
LISTED = 50  # broken promises that the table names one by one

# Each has its own start and its own reference; a pool of them keeps these few.
SETTINGS: Sequence[tuple[str, ...]] = (
    (),
    ("train.rounds=2", "run.checkpoint_every=1", "method.name=ditto"),
    ("train.rounds=4", "run.checkpoint_every=3", "method.name=fedavg"),
    ("train.rounds=4", "clients.participation=0.5", "data.partition.clients=3"),
    ("run.keep_rounds=[1]", "method.name=scaffold"),
    ("evaluate.every=2", "method.name=fedproto"),
    ("seed=7", "run.checkpoint_every=10", "method.name=fedrod"),
    ("train.rounds=3", "data.partition.clients=3", "method.name=local"),
    ("clients.participation=0.5", "method.name=apfl", "seed=3"),
    ("server.aggregator=median", "method.name=fedavg"),
    ("evaluate.clients=participants", "clients.participation=0.5", "run.checkpoint_every=1"),
    ("transforms=[clip_norm]", "method.name=fedprox"),
)
# How often an operation or a fault is drawn, where it is not once.
OFTEN = {"train": 4, "resume": 4, "train-on-disk": 2, "resume-on-disk": 2, "compare": 2, "overwrite": 2}
OFTEN |= {"train-in-workers": 0.3, "killed": 8, "no space once": 2, "a nasty setting": 2, "a flipped bit": 2}


def drawn(seed: int, number: int) -> Case:
    """Case `number` of a campaign."""
    draw = random.Random(f"{seed}/{number}")
    fault = draw.choices(list(FAULTS), [OFTEN.get(name, 1) for name in FAULTS])[0]
    fits = [
        operation
        for operation in OPERATIONS.values()
        if (not FAULTS[fault].damages or operation.start != "nothing")  # there is something to damage
        and (not FAULTS[fault].rewrites or operation.start == "nothing")  # the settings are read
        and (operation.changes or fault not in WRITES)
    ]
    operation = draw.choices(fits, [OFTEN.get(each.name, 1) for each in fits])[0]
    settings = () if operation.slow else draw.choice(SETTINGS)
    place, again = draw.random(), draw.random() if draw.random() < 0.3 else None
    return Case(operation.name, fault, place, settings, again)


WRITES = [name for name in FAULTS if not FAULTS[name].damages and "read" not in name.split() and "limit" not in name]


def in_words(case: Case) -> str:
    return f"{case.operation}, {case.fault}" + (f", {' '.join(case.settings)}" if case.settings else "")


class Campaign:
    """Cases that are dealt to processes, and what has become of them."""

    def __init__(self, seed: int, cases: int) -> None:
        self.seed, self.cases = seed, cases
        self.verdicts: dict[int, tuple[Case, Verdict]] = {}
        self._numbers: Iterator[int] = iter(range(cases))
        self._lock = threading.Lock()
        self._begun = time.monotonic()

    def work(self) -> None:
        """One process and one case after the other."""
        with Driver() as driver:
            while True:
                with self._lock:
                    number = next(self._numbers, None)
                if number is None:
                    return
                case = drawn(self.seed, number)
                verdict = driver.run(case)
                with self._lock:
                    self.verdicts[number] = case, verdict
                    self._report(number)

    def _report(self, number: int) -> None:
        case, verdict = self.verdicts[number]
        done, spent = len(self.verdicts), time.monotonic() - self._begun
        if verdict.broken:
            print(f"\ncase {number}: {in_words(case)} at {verdict.point}: {'; '.join(verdict.broken)}", flush=True)
        if done % 20 == 0 or done == self.cases:
            broken = sum(bool(verdict.broken) for _, verdict in self.verdicts.values())
            left = spent / done * (self.cases - done)
            print(f"{done} of {self.cases} cases, {broken} broken promises, {left / 60:.1f} min left", flush=True)

    def markdown(self) -> str:
        """A row per fault and one per operation, then every broken promise and how to repeat it."""
        minutes = (time.monotonic() - self._begun) / 60
        lines = [
            f"`python -m tests.faults.campaign --cases {self.cases} --seed {self.seed}`: {len(self.verdicts)} cases in "
            f"{minutes:.0f} minutes.",
            "",
            *_rows("fault", FAULTS, {n: (c.fault, v.outcome) for n, (c, v) in self.verdicts.items()}),
            "",
            *_rows("operation", OPERATIONS, {n: (c.operation, v.outcome) for n, (c, v) in self.verdicts.items()}),
        ]
        bad = {n: (c, v) for n, (c, v) in sorted(self.verdicts.items()) if v.broken}
        for number, (case, verdict) in list(bad.items())[:LISTED]:
            repeat = f"`python -m tests.faults.campaign --seed {self.seed} --only {number}`"
            lines += ["", f"- {in_words(case)}, at `{verdict.point}`: {'; '.join(verdict.broken)}. {repeat}"]
        return "\n".join(lines) + "\n"


def _rows(kind: str, names: Sequence[str] | dict[str, object], outcomes: dict[int, tuple[str, str]]) -> list[str]:
    counts = Counter(outcomes.values())
    total = Counter(outcome for _, outcome in outcomes.values())
    rows = [f"| {kind} | cases | {' | '.join(OUTCOMES)} |", f"|---|{'---:|' * (1 + len(OUTCOMES))}"]
    for name in names:
        row = [counts[name, outcome] for outcome in OUTCOMES]
        rows.append(f"| {name} | {sum(row)} | {' | '.join(map(str, row))} |")
    row = [total[outcome] for outcome in OUTCOMES]
    return [*rows, f"| all | {sum(row)} | {' | '.join(map(str, row))} |"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--out", type=Path, help="write the tables as Markdown")
    parser.add_argument("--only", type=int, metavar="N", help="repeat one case and print all that it said")
    given = parser.parse_args()
    if given.only is not None:
        case = drawn(given.seed, given.only)
        with Driver() as driver:
            verdict = driver.run(case)
        print(case, f"struck at {verdict.point}", verdict.said, verdict.outcome, *verdict.broken, sep="\n")
        return bool(verdict.broken)
    campaign = Campaign(given.seed, given.cases)
    workers = [threading.Thread(target=campaign.work, daemon=True) for _ in range(given.jobs)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except KeyboardInterrupt:
        print(f"stopped after {len(campaign.verdicts)} cases", flush=True)
    text = campaign.markdown()
    print(text)
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    return any(verdict.broken for _, verdict in campaign.verdicts.values())


if __name__ == "__main__":
    sys.exit(main())
