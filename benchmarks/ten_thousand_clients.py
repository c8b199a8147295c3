"""What ten thousand clients cost: set-up, a round, a checkpoint, memory; beside a thousand with as many participants.

    python benchmarks/ten_thousand_clients.py [--rounds 10] [--engine auto] [--state disk] [--method fedbn]

Every run is `examples/ten-thousand-clients.yaml` in a process of its own. Memory is the sum of the resident memory of
that process and all that it starts, looked at every 50 ms: pages that two of them share count twice. JSON is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

EXAMPLE = Path(__file__).parent.parent / "examples" / "ten-thousand-clients.yaml"
PARTICIPANTS = 100
LOOK = 0.05  # seconds


def run(clients: int, arguments: argparse.Namespace, out: Path) -> None:
    """In a process of its own: run the example and print what happened when."""
    from fedprism import api, config
    from fedprism.round.events import Callback, Plan, RoundRecord, Snapshot

    class Times(Callback):
        def begin(self, plan: Plan) -> None:
            self.write(what="begin", engine=plan.engine, clients=len(plan.clients))

        def round(self, record: RoundRecord, snapshot: Snapshot) -> None:  # after the records, checkpoint included
            self.write(what="round", participants=len(record.cohort), seconds=dict(record.seconds))

        def write(self, **values: Any) -> None:
            print(json.dumps({"at": time.time(), **values}), flush=True)

    overrides = [
        f"data.name=synthetic?clients={clients},samples=20,label_skew=0.3,feature_skew=0.3",
        f"clients.participation={PARTICIPANTS / clients}",
        f"train.rounds={arguments.rounds}",
        f"run.engine={arguments.engine}",
        f"clients.state={arguments.state}",
        f"method.name={arguments.method}",
        "run.device=cpu",
    ]
    api.run_config(config.read(EXAMPLE, overrides), EXAMPLE.stem, out=out, callbacks=[Times()])


def measured(clients: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "run", Path(folder) / "said"  # a file: a pipe would be full before it is read
        given = ["--rounds", str(arguments.rounds), "--engine", arguments.engine, "--state", arguments.state]
        command = [sys.executable, __file__, *given, "--method", arguments.method, "--child", str(clients), str(out)]
        begun, peak = time.time(), 0
        with said.open("wb") as stream, subprocess.Popen(command, stdout=stream) as process:
            while process.poll() is None:
                peak = max(peak, resident(process.pid))
                time.sleep(LOOK)
        if process.returncode:
            raise SystemExit(f"the run of {clients} clients ended with code {process.returncode}.")
        events = [json.loads(line) for line in said.read_text().splitlines()]
        first, *rounds = [event for event in events if event["what"] == "round"]
        times = [after["at"] - before["at"] for before, after in zip([first, *rounds], rounds, strict=False)]
        records = [spent - event["seconds"]["total"] for spent, event in zip(times, rounds, strict=True)]
        return {
            "clients": clients,
            "participants": rounds[0]["participants"],
            "engine": events[0]["engine"],
            "seconds to set up": round(events[0]["at"] - begun, 2),
            "seconds to the first training round": round(first["at"] - begun, 2),
            "seconds a round, median": round(median(times), 3),
            "of which records and checkpoint": round(median(records), 3),
            "peak memory, MB": round(peak / 1e6),
            "run directory, MB": round(sum(p.stat().st_size for p in out.rglob("*") if p.is_file()) / 1e6, 1),
        }


def resident(root: int) -> int:
    """Bytes of a process and of all that it has started."""
    parents, sizes = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                sizes[int(entry.name)] = int((entry / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                parents[int(entry.name)] = int(fields[1])
            except (OSError, IndexError):  # it has just ended
                continue
    family = {root}
    for _ in range(3):
        family |= {process for process, parent in parents.items() if parent in family}
    return sum(sizes.get(process, 0) for process in family)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--state", default="disk")
    parser.add_argument("--method", default="fedbn")
    parser.add_argument("--child", nargs=2, metavar=("CLIENTS", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run(int(arguments.child[0]), arguments, Path(arguments.child[1]))
        return
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the start",
        "torch": str(torch.__version__),
        "rounds": arguments.rounds,
        "state": arguments.state,
        "method": arguments.method,
        "runs": [measured(clients, arguments) for clients in (1000, 10_000)],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
