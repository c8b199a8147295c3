"""Peak memory of FedAvg rounds beside the number of participants, on a CPU.

    python benchmarks/participants_memory.py [--before DIR] [--models cnn4,resnet18] [--engines inprocess,processes]

DIR holds a `fedprism` package to compare with, such as that of an older commit: `git archive COMMIT | tar -x -C DIR`.

Each point is a run in a process of its own: two rounds with four tiny images per client. Memory is the peak of what is
resident (Linux's VmHWM), checkpoint included. With `processes` it is that of the parent plus those of its two workers,
as if they came at the same moment; pages that they share count in each. No process gets more than `LIMIT`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT = 12 * 10**9  # bytes of private memory
POINTS = ((20, 20), (500, 20), (100, 100), (500, 500))  # clients and participants
NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "MemoryError")
MOST_BEFORE = {"resnet18": 100}  # clients in the tree before; it would need far more than `LIMIT` for 500


def measure(model: str, engine: str, clients: int, participants: int) -> None:
    """One process: run and print a line of JSON."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    import fedprism as fp
    from fedprism.bench.machine import family, peak_resident

    class Peak(fp.Callback):
        """Called after each round, when its records and checkpoint are written and workers still live."""

        def begin(self, plan: Any) -> None:
            self.parameters = next(iter(plan.parameters.values()))

        def round(self, record: Any, snapshot: Any) -> None:
            self.peaks, self.failed = [peak_resident(pid) for pid in family()], record.failed

    peak, federation = Peak(), fp.make_federation(f"synthetic?clients={clients},samples=4")
    settings = [
        f"clients.participation={participants / clients}",
        "evaluate.every=1000",  # the first state and the last round are always tested
        "evaluate.clients=participants",
        "evaluate.moments=[received]",
        "evaluate.splits=[test]",
        f"run.engine={engine}",
        "run.device=cpu",
        "run.workers=2",
    ]
    with tempfile.TemporaryDirectory() as folder:
        fp.train(federation, "fedavg", model, rounds=2, out=f"{folder}/run", settings=settings, callbacks=[peak])
    if peak.failed:
        raise SystemExit(f"clients failed: {peak.failed}")
    parts = [part for data in federation.clients.values() for part in (data.train, data.validation, data.test)]
    data = sum(tensor.numel() * tensor.element_size() for part in parts for tensor in (part.x, part.y))
    print(json.dumps({"peaks": peak.peaks, "data": data, "parameters": peak.parameters}))


def point(tree: Path | None, given: list[str]) -> dict[str, Any]:
    """The figures of one point, of this tree or of another; none where `LIMIT` was not enough."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if tree is not None:
        paths = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, __file__, "--point", *given]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode and any(words in done.stderr for words in NO_MEMORY):
        return {}
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def megabytes(found: dict[str, Any] | None) -> str:
    """The peak, and what it is the sum of: the parent and its workers."""
    if found is None:
        return "not run"
    if not found:
        return f"more than {LIMIT / 1e6:,.0f}"
    parts = [f"{peak / 1e6:,.0f}" for peak in found["peaks"]]
    return parts[0] if len(parts) == 1 else f"{sum(found['peaks']) / 1e6:,.0f} ({' + '.join(parts)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="DIR")
    parser.add_argument("--models", default="cnn4,resnet18")
    parser.add_argument("--engines", default="inprocess,processes")
    parser.add_argument(
        "--point", nargs=4, metavar=("MODEL", "ENGINE", "CLIENTS", "PARTICIPANTS"), help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.point:
        measure(given.point[0], given.point[1], int(given.point[2]), int(given.point[3]))
        return
    print("| model | MB of a model | engine | clients | participants | MB of data | MB before | MB after |")
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    for model in given.models.split(","):
        for engine in given.engines.split(","):
            for clients, participants in POINTS:
                print(f"{model}, {engine}, {participants} of {clients}", file=sys.stderr, flush=True)
                arguments = [model, engine, str(clients), str(participants)]
                compared = given.before and clients <= MOST_BEFORE.get(model, clients)
                before = point(given.before, arguments) if compared else None
                after = point(None, arguments)
                sizes = f"{4 * after['parameters'] / 1e6:.1f} | {engine} | {clients} | {participants}"
                row = f"{sizes} | {after['data'] / 1e6:.2f} | {megabytes(before)} | {megabytes(after)}"
                print(f"| {model} | {row} |", flush=True)


if __name__ == "__main__":
    main()
