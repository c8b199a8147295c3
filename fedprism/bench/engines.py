"""The engines side by side with a plain serial loop, workload by workload; and the options of an engine likewise."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedprism.bench.machine import cores
from fedprism.bench.progress import Rows
from fedprism.bench.race import ByHand, Engined, Entry, Outcome, Pace, race
from fedprism.bench.results import Results
from fedprism.bench.serial import SERIAL
from fedprism.bench.workloads import (
    FIRST,
    WORKLOADS,
    Workload,
    chosen,
    chosen_methods,
    configure,
    engines_asked,
    make_clients,
    most_images,
)
from fedprism.engines.inprocess import ENGINES
from fedprism.engines.numerics import choose_precision
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods import find
from fedprism.models import architectures

BY_HAND, REFERENCE = "serial", "inprocess"
MISSING = "this engine is not part of the installed version"
KINDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {  # device -> name in the table -> `run` of the configuration
    "cpu": {REFERENCE: {"engine": REFERENCE}, "processes": {"engine": "processes"}},
    "cuda": {
        REFERENCE: {"engine": REFERENCE},
        "cuda-graphs": {"engine": "cuda-graphs"},
        "cuda-graphs-compiled": {"engine": "cuda-graphs", "compile": True},
    },
}
SLOTS = (1, 2, 4, 8, 16, 20, 24)


@dataclass(frozen=True)
class Ask:
    """What the command was asked for."""

    device: torch.device
    quick: bool = False
    workloads: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    engines: tuple[str, ...] | None = None
    samples: int | None = None  # training images a client
    rounds: int | None = None  # measured, at most
    force: bool = False
    command: str = "fedprism bench"

    @property
    def pace(self) -> Pace:
        pace = Pace(rounds=2, seconds=3.0) if self.quick else Pace()
        return pace if self.rounds is None else replace(pace, rounds=self.rounds, least=min(pace.least, self.rounds))


def check(ask: Ask) -> None:
    """Whatever is mistaken is told before anything is measured."""
    for workload in chosen(ask.workloads).values():
        chosen_methods(workload, ask.quick, ask.methods)
    engines_asked(ask.engines, (BY_HAND, *KINDS[ask.device.type]))


def wanted(ask: Ask, method: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The contenders of a method, the one that others are compared to first; and why some are not there."""
    by_hand = find(method).id in SERIAL
    known = (BY_HAND, *KINDS[ask.device.type])
    names = list(engines_asked(ask.engines, known))
    base = BY_HAND if by_hand else REFERENCE
    names = [base, *(name for name in names if name not in (base, BY_HAND))]
    there = {n: n == BY_HAND or KINDS[ask.device.type][n]["engine"] in ENGINES for n in names}
    return tuple(n for n in names if there[n]), {n: MISSING for n in names if not there[n]}


def measure_engines(ask: Ask, results: Results, rows: Rows) -> None:
    """A row a workload and method."""
    plan: list[tuple[str, Workload, str, str]] = []
    for name, workload in chosen(ask.workloads).items():
        for method in chosen_methods(workload, ask.quick, ask.methods):
            key = f"{name}/{find(method).id}" + ("" if ask.samples is None else f"/{ask.samples}")
            if ask.force or not results.has("engines", key, wanted(ask, method)[0]):
                plan.append((name, workload, method, key))
    rows.expect(len(plan))
    held: tuple[str, Federation] | None = None
    for name, workload, method, key in plan:
        names, missing = wanted(ask, method)
        rows.begin(f"{name} {find(method).id}", len(names) * (ask.pace.rounds + 1))
        if held is None or held[0] != name:
            held = None  # frees the images of the last one first
            held = name, make_clients(workload, most_images(workload, ask.device, ask.quick, ask.samples))
        outcome = race(
            [entry(each, workload, method, held[1], ask.device) for each in names],
            trained(held[1]),
            ask.device,
            ask.pace,
            rows.tell,
        )
        _free(ask.device)
        row = {**described(name, workload, method, held[1], ask.device), "asked": list(names)}
        row |= outcome_row(outcome, missing)
        results.add("engines", key, row, ask.command)
        rows.end(in_words(outcome))


def entry(name: str, workload: Workload, method: str, federation: Federation, device: torch.device) -> Entry:
    """One contender of the table."""
    if name == BY_HAND:
        config = configure(workload, method, device, {"engine": REFERENCE})
        return Entry(name, lambda: ByHand(config, federation, device))
    return variant(name, workload, method, federation, device, KINDS[device.type][name])


def variant(
    name: str,
    workload: Workload,
    method: str,
    federation: Federation,
    device: torch.device,
    run: Mapping[str, Any],
) -> Entry:
    """An engine with settings of its own; those that this machine cannot do are told when it is made."""
    return Entry(name, lambda: Engined(configure(workload, method, device, run), federation, device))


def described(
    name: str, workload: Workload, method: str, federation: Federation, device: torch.device
) -> dict[str, Any]:
    """What a row was measured on."""
    config = configure(workload, method, device, {"engine": REFERENCE})
    arch = architectures(config.model, federation.names, federation.classes, federation.shape)[federation.names[0]]
    sizes = [(len(data.train), len(data.test)) for data in federation.clients.values()]
    return {
        "workload": name,
        "method": find(method).id,
        "model": arch.label,
        "parameters": arch.parameters,
        "image": list(workload.shape),
        "clients": len(sizes),
        "batch": workload.batch,
        "train_images": sum(train for train, _ in sizes),
        "test_images": sum(test for _, test in sizes),
        "all_images": sum(train for train, _ in sizes) == sum(workload.train),
        "moment": find(method).moment,
        "memory_format": config.run.memory_format,
        "precision": choose_precision(config.run.precision, device),
        "threads": config.run.threads,
    }


def outcome_row(outcome: Outcome, missing: Mapping[str, str]) -> dict[str, Any]:
    return {
        "baseline": outcome.results[0]["name"] if outcome.results else None,
        "contenders": outcome.results,
        "left_out": {**missing, **outcome.left_out},
        "largest_change_of_a_weight": outcome.moved,
    }


def trained(federation: Federation) -> int:
    """Training images of all clients."""
    return sum(len(data.train) for data in federation.clients.values())


def in_words(outcome: Outcome) -> str:
    """The fastest, for a line of progress."""
    if not outcome.results:
        return "nothing could be measured"
    best = max(outcome.results, key=lambda each: float(each["round_per_second"]))
    return f"{best['name']} {best['round_per_second']:,.0f} images/s, {best['round_ratio']:.2f} of the first"


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- options ---------------------------------------------------------------------------------------------------------


def option_groups(device: torch.device) -> dict[str, dict[str, dict[str, Any]]]:
    """Option -> value -> `run` of the configuration, the default first in each."""
    if device.type == "cuda":
        base: dict[str, Any] = {"engine": "cuda-graphs" if "cuda-graphs" in ENGINES else REFERENCE}
        groups: dict[str, dict[str, dict[str, Any]]] = {
            "precision": {p: {**base, "precision": p} for p in ("tf32", "fp32", "bf16")},
            "memory_format": {m: {**base, "memory_format": m} for m in ("contiguous", "channels_last")},
            "deterministic": {str(d).lower(): {**base, "deterministic": d} for d in (True, False)},
        }
        if "cuda-graphs" in ENGINES:
            groups["compile"] = {str(c).lower(): {**base, "compile": c} for c in (False, True)}
            groups["slots"] = {str(s): {**base, "slots": s} for s in ("auto", *SLOTS)}
        return groups
    base = {"engine": REFERENCE}
    groups = {
        "precision": {p: {**base, "precision": p} for p in ("fp32", "bf16")},
        "memory_format": {m: {**base, "memory_format": m} for m in ("contiguous", "channels_last")},
        "threads": {str(t): {**base, "threads": t} for t in dict.fromkeys((1, cores()))},
    }
    if "processes" in ENGINES:
        workers = dict.fromkeys((1, cores()))
        groups["workers"] = {str(w): {"engine": "processes", "workers": w} for w in workers}
    return groups


def measure_options(ask: Ask, results: Results, rows: Rows) -> None:
    """A row an option, on the first workload: its values side by side, the default first."""
    workload, method = WORKLOADS[FIRST], "fedavg"
    if ask.workloads not in ((), (FIRST,)):
        raise ConfigError(f"--options is measured on {FIRST}; leave out {', '.join(ask.workloads)}.")
    groups = option_groups(ask.device)
    plan = {o: values for o, values in groups.items() if ask.force or not results.has("options", o, values)}
    rows.expect(len(plan))
    if not plan:
        return
    federation = make_clients(workload, most_images(workload, ask.device, ask.quick, ask.samples))
    for option, values in plan.items():
        rows.begin(f"option {option}", len(values) * (ask.pace.rounds + 1))
        entries = [variant(value, workload, method, federation, ask.device, run) for value, run in values.items()]
        outcome = race(entries, trained(federation), ask.device, ask.pace, rows.tell)
        _free(ask.device)
        row = {**described(FIRST, workload, method, federation, ask.device), "asked": list(values)}
        engine = next(iter(values.values()))["engine"]
        results.add(
            "options", option, {**row, "option": option, "engine": engine, **outcome_row(outcome, {})}, ask.command
        )
        rows.end(in_words(outcome))
