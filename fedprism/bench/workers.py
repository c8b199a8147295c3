"""What several cores give: the engine `processes` with one worker and with one a core, beside as many processes that
know nothing of each other. What those reach together in the same minute is all that the machine has to give."""

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
from fedprism.bench.race import ByHand, Entry, Weights, race
from fedprism.bench.results import Results
from fedprism.bench.serial import Taken
from fedprism.bench.workloads import FIRST, WORKLOADS, configure, make_clients, most_images
from fedprism.engines.inprocess import ENGINES
from fedprism.engines.processes import cores
from fedprism.errors import FedprismError

CPU = torch.device("cpu")
METHOD = "fedavg"


def measure_workers(ask: Ask, results: Results, rows: Rows) -> None:
    """One row, training alone: what `processes` has of what independent processes reach."""
    if ask.device.type != "cpu":
        rows.say("worker processes are measured on a CPU: add --device cpu.")
        return
    if "processes" not in ENGINES:
        rows.say(f"processes is left out: {MISSING}.")
        return
    count, workload = cores(), WORKLOADS[FIRST]
    if count < 2:
        rows.say("this process may use one core, so there is nothing to compare.")
        return
    names = ("processes, 1 worker", f"processes, {count} workers", f"{count} independent processes")
    there = not ask.force and results.has("workers", ask.key(FIRST), names)
    rows.expect(int(not there), int(there))
    if there:
        return
    rows.begin("worker processes", ask.pace.steps(len(names) + 1))
    most = most_images(workload, CPU, ask.quick, ask.samples)
    federation = make_clients(workload, most)
    config = configure(workload, METHOD, CPU, {"engine": "inprocess"})
    entries = [
        variant(name, workload, METHOD, federation, CPU, {"engine": "processes", "workers": workers})
        for name, workers in zip(names[:2], (1, count), strict=True)
    ]
    entries.append(Entry(names[2], lambda: Independent(most, count)))
    entries.append(Entry(f"serial, {count} threads", lambda: ByHand(config, federation, CPU, threads=count)))
    outcome = race(entries, trained(federation), CPU, ask.pace, rows.tell)
    reached = share(outcome.results, names)
    row = described(FIRST, workload, METHOD, federation, ask) | outcome_row(outcome, {})
    row |= {"workers": count, "share_of_independent": reached}
    results.add("workers", ask.key(FIRST), row, ask.command)
    rows.end("" if reached is None else f"{reached:.2f} of independent processes")


def share(results: Sequence[Mapping[str, Any]], names: tuple[str, ...]) -> float | None:
    """Of what independent processes reach, what the workers reach: the median over rounds that followed each other."""
    seconds = {each["name"]: each["seconds"]["train"] for each in results}
    if not set(names) <= seconds.keys():
        return None
    pairs = zip(seconds[names[1]], seconds[names[2]], strict=False)
    return round(float(statistics.median(alone / workers for workers, alone in pairs)), 3)


class Independent:
    """Processes that each train a share of the clients by the plain loop, on one thread, and exchange nothing."""

    cold = 1

    def __init__(self, most: int | None, count: int) -> None:
        self.threads = count
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        self.processes = []
        try:
            for place in range(count):
                here, there = context.Pipe()
                process = context.Process(target=_alone, args=(there, most, place, count), daemon=True)
                process.start()
                there.close()
                self.pipes.append(here)
                self.processes.append(process)
            for pipe in self.pipes:
                self._answer(pipe)  # it is ready
        except BaseException:
            self.close()
            raise

    def one_round(self, round: int) -> Taken:
        """The seconds that the slowest needs; nothing is averaged and nothing evaluated."""
        begun = time.perf_counter()
        for pipe in self.pipes:
            pipe.send(round)
        train = max(self._answer(pipe) for pipe in self.pipes)
        return Taken(train, 0.0, 0.0, time.perf_counter() - begun)

    def weights(self) -> Weights:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"processes": len(self.processes)}

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # each ends when nobody asks any more
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def _answer(self, pipe: Connection) -> float:
        try:
            return float(pipe.recv())
        except EOFError:
            raise FedprismError("a process that was to be measured ended; is there enough memory?") from None


def _alone(pipe: Connection, most: int | None, place: int, count: int) -> None:
    """What such a process does: trains every `count`-th client when it is told, and says how long it took."""
    workload = WORKLOADS[FIRST]
    federation = make_clients(workload, most)
    own = {name: federation.clients[name] for name in federation.names[place::count]}
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
