"""Speed-up on several cores: the engine `processes` with one worker and with one per core, compared with as many
independent processes. Their total speed, measured at the same time, is the limit of the machine."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedprism.bench.engines import MISSING, Ask, described, outcome_row, trained, variant
from fedprism.bench.progress import Rows
from fedprism.bench.race import ByHand, ContenderSpec, Weights, race
from fedprism.bench.results import Results
from fedprism.bench.serial import RoundSeconds
from fedprism.bench.workloads import FIRST, WORKLOADS, configure, make_clients, max_images
from fedprism.engines import ENGINES
from fedprism.engines.processes.engine import cores
from fedprism.errors import FedprismError

CPU = torch.device("cpu")
METHOD = "fedavg"


def measure_workers(ask: Ask, results: Results, rows: Rows) -> None:
    """Measure one row, training only: the speed of `processes` as a share of that of independent processes."""
    if ask.device.type != "cpu":
        rows.note("worker processes are measured on a CPU: add --device cpu.")
        return
    if "processes" not in ENGINES:
        rows.note(f"processes is left out: {MISSING}.")
        return
    count, workload = cores(), WORKLOADS[FIRST]
    if count < 2:
        rows.note("this process may use one core, so there is nothing to compare.")
        return
    names = ("processes, 1 worker", f"processes, {count} workers", f"{count} independent processes")
    there = not ask.force and results.has("workers", ask.key(FIRST), names)
    rows.expect(int(not there), int(there))
    if there:
        return
    rows.begin("worker processes", ask.pace.steps(len(names) + 1))
    limit = max_images(workload, CPU, ask.quick, ask.samples)
    federation = make_clients(workload, limit)
    config = configure(workload, METHOD, CPU, {"engine": "inprocess"})
    entries = [
        variant(name, workload, METHOD, federation, CPU, {"engine": "processes", "workers": workers})
        for name, workers in zip(names[:2], (1, count), strict=True)
    ]
    entries.append(ContenderSpec(names[2], lambda: Independent(limit, count)))
    entries.append(ContenderSpec(f"serial, {count} threads", lambda: ByHand(config, federation, CPU, threads=count)))
    outcome = race(entries, trained(federation), CPU, ask.pace, rows.step)
    reached = share(outcome.results, names)
    row = described(FIRST, workload, METHOD, federation, ask) | outcome_row(outcome, {})
    row |= {"workers": count, "share_of_independent": reached}
    results.add("workers", ask.key(FIRST), row, ask.command)
    rows.end("" if reached is None else f"{reached:.2f} of independent processes")


def share(results: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> float | None:
    """The workers' speed as a share of that of independent processes: the median over neighbouring rounds."""
    seconds = {each["name"]: each["seconds"]["train"] for each in results}
    if not set(names) <= seconds.keys():
        return None
    pairs = zip(seconds[names[1]], seconds[names[2]], strict=False)
    return round(float(statistics.median(alone / workers for workers, alone in pairs)), 3)


class Independent:
    """Processes that each train a share of the clients with the plain loop, on one thread, without communication."""

    cold = 1

    def __init__(self, limit: int | None, count: int) -> None:
        self.threads = count
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        try:
            for index in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_alone, args=(there, limit, index, count), daemon=True)
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
            for pipe in self.pipes:
                self._answer(pipe)  # it is ready
        except BaseException:
            self.close()
            raise

    def one_round(self, round: int) -> RoundSeconds:
        """The seconds of the slowest process; there is no aggregation and no evaluation."""
        begun = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(round)
        train = max(self._answer(pipe) for pipe in self.pipes)
        return RoundSeconds(train, 0.0, 0.0, time.perf_counter() - begun)

    def weights(self) -> Weights:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"processes": len(self.processes)}

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # each process ends when its pipe closes
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def _answer(self, pipe: Connection) -> float:
        try:
            return float(pipe.recv())
        except EOFError:
            raise FedprismError("a measured process ended unexpectedly; is there enough memory?") from None


def _alone(pipe: Connection, limit: int | None, index: int, count: int) -> None:
    """The main function of a process: train every `count`-th client on request and send the seconds."""
    workload = WORKLOADS[FIRST]
    federation = make_clients(workload, limit)
    own = {name: federation.clients[name] for name in federation.names[index::count]}
    config = configure(workload, METHOD, CPU, {"engine": "inprocess"})
    hand = ByHand(config, replace(federation, clients=own), CPU)
    pipe.send(0.0)
    while True:
        try:
            round = pipe.recv()
        except EOFError:
            return
        with hand.context():
            begun = time.perf_counter()
            for client in own:
                hand.serial.train_client(round, client)
            pipe.send(time.perf_counter() - begun)
