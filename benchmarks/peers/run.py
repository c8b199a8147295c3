"""FedAvg rounds of Flower's simulation and Apple's pfl beside fedprism's engines and a plain loop, on the CPU.

    python benchmarks/peers/run.py --flower ENVIRONMENT --pfl ENVIRONMENT [--out benchmarks/results/peers-cpu]

Runs in fedprism's environment; README.md says how the other two are made. Every contender gets the same file of first
weights, images and batch orders, runs in a process of its own, and they take turns, several times over. Writes OUT.json
and OUT.md. Ends with status 1 if the contenders' averaged weights do not agree.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from with_fedprism import configuration, names
from with_serial import one_round
from workload import Workload, first_model

from fedprism import keys
from fedprism.round.client import make_info

HERE = Path(__file__).resolve().parent
LR, SEED = 0.005, 0
AGREE = 0.05  # largest difference of weights after a round, as a share of what another order of batches makes
REFERENCE = "serial"
PATIENCE = 900  # seconds that one process may take


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    id: str
    name: str
    python: tuple[str, ...]  # the interpreter, and what stands before the script
    script: str
    options: tuple[str, ...] = ()
    threads: int | None = None  # None: as the framework decides


def contenders(options: argparse.Namespace) -> list[Contender]:
    """With the settings that each framework's own documents name for so many cores; README.md says which and why."""
    cores, own = options.cores, (sys.executable,)
    fedprism, several = "with_fedprism.py", ("--engine", "processes", "--workers", f"{cores}")
    rows = [
        Contender(REFERENCE, "plain loop, 1 thread", own, "with_serial.py", ("--threads", "1")),
        Contender("serial-threads", f"plain loop, {cores} threads", own, "with_serial.py", ("--threads", f"{cores}")),
        Contender("inprocess", "fedprism `inprocess`", own, fedprism, ("--engine", "inprocess")),
        Contender("processes", f"fedprism `processes`, {cores} workers", own, fedprism, several),
    ]
    if options.flower:
        python = (str(options.flower / "bin" / "python"),)
        for cpus in dict.fromkeys((1, min(2, cores))):
            at_once = cores // cpus
            name = f"Flower, {cpus} CPU{'s' * (cpus > 1)} a client, {at_once} at once"
            each = ("--cpus", f"{cpus}", "--cores", f"{cores}")
            rows.append(Contender(f"flower-{cpus}cpu", name, python, "with_flower.py", each))
    if options.pfl:
        python = (str(options.pfl / "bin" / "python"),)
        rows.append(Contender("pfl", "pfl, 1 process, 1 thread", python, "with_pfl.py", threads=1))
        rows.append(Contender("pfl-threads", "pfl, 1 process, threads as PyTorch chooses", python, "with_pfl.py"))
        around = (*python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cores}")
        rows.append(Contender("pfl-processes", f"pfl, {cores} processes", around, "with_pfl.py"))
    unknown = set(options.only or ()) - {row.id for row in rows}
    if unknown:
        raise SystemExit(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(row.id for row in rows)}.")
    return [row for row in rows if not options.only or row.id in (REFERENCE, *options.only)]


def make_workload(options: argparse.Namespace) -> Workload:
    """First weights and batch orders are those that fedprism draws for this seed by itself."""
    clients, samples, rounds = options.clients, options.samples, options.warm_up + options.rounds
    draw = keys.generator("peers")
    images = torch.randint(0, 256, (clients, samples, 3, 32, 32), dtype=torch.uint8, generator=draw)
    labels = torch.randint(0, options.classes, (clients, samples), generator=draw)
    order = torch.empty(rounds, clients, samples, dtype=torch.int64)
    for round in range(rounds):
        for i, name in enumerate(names(clients)):
            each = keys.generator(SEED, "batches", "", round, name, 0)
            order[round, i] = torch.randperm(samples, generator=each)
    config = configuration(options.batch, LR, rounds)
    arch = make_info(config, names(clients), options.classes, (3, 32, 32)).arch
    return Workload(images, labels, order, arch.model(SEED).state_dict(), options.batch, LR)


def measure(row: Contender, workload: Path) -> dict[str, Any]:
    """One process of one contender: its rounds in seconds and its weights, or why there are none."""
    # Whoever sets these decides how many threads the frameworks take; here each is to decide by itself.
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
    if row.threads is not None:
        environment["OMP_NUM_THREADS"] = str(row.threads)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
        folder, log = Path(name), Path(name) / "log"
        command = [*row.python, str(HERE / row.script), str(workload), name, *row.options]
        with log.open("w") as stream:
            try:
                process = subprocess.Popen(
                    command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            except OSError as error:
                return {"load": load, "error": str(error)}
            try:
                status = process.wait(PATIENCE)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return {"load": load, "error": f"not done after {PATIENCE} s"}
        written = folder / "rank0" if (folder / "rank0").exists() else folder
        if status != 0 or not (written / "result.json").exists():
            lines = log.read_text(errors="replace").strip().splitlines()
            named = [line for line in lines if "Error: " in line]
            return {"load": load, "error": "\n".join([f"status {status}", *lines[-12:], *named[-1:]])}
        weights = {}
        for moment in ("first", "last"):
            with np.load(written / f"{moment}.npz", allow_pickle=False) as file:
                weights[moment] = {leaf: file[leaf] for leaf in file.files}
        return {"load": load, "weights": weights, **json.loads((written / "result.json").read_text())}


def gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two states' numbers; infinite where one of them is not finite."""
    if one.keys() != other.keys():
        raise SystemExit(f"a contender has other weights: {', '.join(sorted(one.keys() ^ other.keys())[:4])}.")
    found = [float(np.abs(one[leaf] - other[leaf]).max()) for leaf in one]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def other_order(work: Workload) -> dict[str, Any]:
    """What a round of the plain loop gives with the same batches the other way round: no noise, but other work."""
    model = first_model(work)
    with keys.one_thread():
        one_round(model, replace(work, order=work.order.flip(2)), 0)
    return {leaf: tensor.numpy() for leaf, tensor in model.state_dict().items()}


def summary(row: Contender, runs: list[dict[str, Any]], reference: dict[str, Any], options: Any) -> dict[str, Any]:
    """All processes of one contender."""
    result: dict[str, Any] = {"id": row.id, "name": row.name, "load_before": [round(r["load"], 2) for r in runs]}
    failed = [run["error"] for run in runs if "error" in run]
    if failed:
        return result | {"error": failed[0], "failed": len(failed), "of": len(runs)}
    images, skip = options.clients * options.samples, options.warm_up
    rounds = [[images / seconds for seconds in run["seconds"][skip:]] for run in runs]
    every = [speed for run in rounds for speed in run]
    result |= {
        "samples_per_second": statistics.median(every),
        "of_each_process": [statistics.median(run) for run in rounds],
        "slowest_round": min(every),
        "fastest_round": max(every),
        "seconds_of_rounds": [run["seconds"] for run in runs],
        "workers": runs[0]["workers"],
        "threads": runs[0]["threads"],
        "versions": runs[0]["versions"],
    }
    if runs[0]["training"] is not None:
        pairs = [pair for run in runs for pair in zip(run["seconds"][skip:], run["training"][skip:], strict=True)]
        result["share_in_training_loops"] = statistics.median(t / (s * runs[0]["workers"]) for s, t in pairs)
    for moment in ("first", "last"):
        result[f"gap_after_{moment}_round"] = max(gap(run["weights"][moment], reference[moment]) for run in runs)
    return result


def table(report: dict[str, Any]) -> str:
    work, machine = report["workload"], report["machine"]
    versions = {k: v for row in report["rows"] for k, v in row.get("versions", {}).items()}
    loads = [load for row in report["rows"] for load in row["load_before"]]
    lines = [
        f"# FedAvg on the CPU: fedprism beside its peers, {report['date']}",
        "",
        f"`cnn4` (3x32x32, {work['classes']} classes), {work['clients']} clients of {work['samples']} images, batch "
        f"{work['batch']}, SGD {work['lr']} without momentum, one local epoch, everybody every round, no evaluation. "
        f"Each ran in {report['repeats']} process(es), taking turns, with {report['rounds']} measured round(s) a "
        f"process after {report['warm_up']} to warm up.",
        "",
        f"- command: `{report['command']}`",
        f"- machine: {machine['processor']}, {machine['cores']} cores used; {machine['system']}",
        f"- load average (1 minute) before each process: {min(loads):.2f} to {max(loads):.2f}",
        "- versions: " + ", ".join(f"{name} {number}" for name, number in sorted(versions.items())),
        "",
        "| contender | samples/s (median round) | medians of the processes | slowest to fastest round | "
        "times the plain loop | processes x threads | in training loops | gap, 1 round | gap, all |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = next(row["samples_per_second"] for row in report["rows"] if row["id"] == REFERENCE)
    for row in report["rows"]:
        if "error" in row:
            words = row["error"].splitlines()[-1].replace("|", "/")
            lines.append(f"| {row['name']} | did not run: {words} | | | | | | | |")
            continue
        own = ", ".join(f"{speed:,.0f}" for speed in row["of_each_process"])
        share = f"{row['share_in_training_loops']:.0%}" if "share_in_training_loops" in row else ""
        cells = [
            row["name"],
            f"{row['samples_per_second']:,.0f}",
            own,
            f"{row['slowest_round']:,.0f} to {row['fastest_round']:,.0f}",
            f"{row['samples_per_second'] / base:.2f}",
            f"{row['workers']} x {row['threads']}",
            share,
            f"{row['gap_after_first_round']:.1e}",
            f"{row['gap_after_last_round']:.1e}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "A gap is the largest difference of any averaged weight from the plain loop's (1 thread), after one round and "
        f"after all {report['rounds'] + report['warm_up']}; one round moved a weight by up to {report['moved']:.1e}, "
        f"and the same batches in reverse order give a gap of {report['gap_of_another_order']:.1e}. "
        "In training loops: the share of workers' time that clients spent in their loops over batches.",
        "",
    ]
    return "\n".join(lines)


def processor() -> str:
    """The CPU's own name where the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return found[0] if found else platform.processor() or platform.machine()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flower", type=Path, help="the virtual environment that has flwr")
    parser.add_argument("--pfl", type=Path, help="the virtual environment that has pfl")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results" / "peers-cpu", help="without ending")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each contender")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of a process")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before them")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=100, help="training images per client")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="these contenders, and the plain loop")
    options = parser.parse_args()
    if options.warm_up < 1 or options.rounds < 1 or options.repeats < 1:
        parser.error("--warm-up, --rounds and --repeats are 1 or more.")
    if options.samples < 2 * options.batch:
        parser.error("--samples is two batches or more: that all take them in the same order is part of the check.")
    return options


def main() -> None:
    options = read_options()
    rows, runs = contenders(options), {}
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        work, path = make_workload(options), Path(folder) / "workload.npz"
        work.save(path)
        for turn in range(options.repeats):
            for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:  # each time another one is first
                run = measure(row, path)
                runs.setdefault(row.id, []).append(run)
                images = options.clients * options.samples
                words = run.get("error") or [round(images / s) for s in run["seconds"]]
                print(f"{turn + 1}/{options.repeats} {row.name}: {words}", file=sys.stderr, flush=True)
    failed = [run["error"] for run in runs[REFERENCE] if "error" in run]
    if failed:
        raise SystemExit(f"the plain loop did not run: {failed[0]}")
    reference = runs[REFERENCE][0]["weights"]
    first = {name: tensor.numpy() for name, tensor in work.weights.items()}
    moved = gap(reference["first"], first)
    settings = {name: getattr(options, name) for name in ("clients", "samples", "batch", "classes")}
    given = [f"--{name} {value}" for name, value in (("flower", "FLOWER"), ("pfl", "PFL")) if getattr(options, name)]
    given += [f"--{name.replace('_', '-')} {getattr(options, name)}" for name in ("repeats", "rounds", "warm_up")]
    given += [f"--{name} {value}" for name, value in {**settings, "cores": options.cores}.items()]
    given += [f"--only {' '.join(options.only)}"] if options.only else []
    report = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python benchmarks/peers/run.py", *given]),
        "machine": {"processor": processor(), "cores": options.cores, "system": platform.platform()},
        "workload": {"model": "cnn4", "method": "fedavg", "lr": LR, **settings},
        "repeats": options.repeats,
        "rounds": options.rounds,
        "warm_up": options.warm_up,
        "moved": moved,
        "gap_of_another_order": gap(reference["first"], other_order(work)),
        "rows": [summary(row, runs[row.id], reference, options) for row in rows],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_name(options.out.name + ".json").write_text(json.dumps(report, indent=2) + "\n")
    text = table(report)
    options.out.with_name(options.out.name + ".md").write_text(text)
    print(text)
    if math.isinf(report["gap_of_another_order"]):
        raise SystemExit("the plain loop's weights are not finite, so nothing can be compared to them.")
    most = AGREE * report["gap_of_another_order"]
    apart = [row["name"] for row in report["rows"] if row.get("gap_after_first_round", 0.0) > most]
    if apart:
        raise SystemExit(f"not the same work: after one round the weights of {', '.join(apart)} differ.")


if __name__ == "__main__":
    main()
