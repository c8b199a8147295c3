"""Compare the engines with a plain serial loop on each workload, and the options of an engine with each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fedprism.bench.progress import Rows
from fedprism.bench.race import ByHand, Comparison, ContenderSpec, Engined, Pace, race
from fedprism.bench.results import Results
from fedprism.bench.serial import SERIAL
from fedprism.bench.workloads import (
    FIRST,
    WORKLOADS,
    Workload,
    chosen,
    chosen_methods,
    configure,
    make_clients,
    max_images,
)
from fedprism.engines import ENGINES
from fedprism.engines.numerics import choose_device, choose_precision
from fedprism.engines.processes.engine import cores
from fedprism.errors import ConfigError, shown, unknown
from fedprism.federation import Federation
from fedprism.methods import find
from fedprism.methods.base import Pass
from fedprism.models import architectures
from fedprism.round.training import batch_sizes

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
EFFECT: Mapping[str, Collection[str]] = {  # measured instead of the engines -> the other options that it supports
    "--options": ("--samples", "--rounds"),
    "--workers": ("--samples", "--rounds"),
    "--growth": (),
}


@dataclass(frozen=True)
class Ask:
    """The options of the command."""

    device: torch.device
    quick: bool = False
    workloads: tuple[str, ...] = ()
    methods: tuple[str, ...] | None = None
    engines: tuple[str, ...] | None = None
    samples: int | None = None  # training images per client
    rounds: int | None = None  # maximum number of measured rounds
    force: bool = False
    command: str = "fedprism bench"

    @property
    def pace(self) -> Pace:
        pace = Pace(rounds=2, seconds=3.0) if self.quick else Pace()
        if self.rounds is None:
            return pace
        return replace(pace, rounds=self.rounds, min_rounds=min(pace.min_rounds, self.rounds))

    def key(self, name: str) -> str:
        """The key of a row; another number of images is another row."""
        return name if self.samples is None else f"{name}/{self.samples}"


def find_device(name: str) -> torch.device:
    """The device of --device."""
    try:
        return choose_device(name)
    except ConfigError:
        raise ConfigError(
            f"--device is {shown(name)}; expected auto, cpu, cuda or cuda:INDEX, and PyTorch sees "
            f"{torch.cuda.device_count()} GPUs here. Give --device cpu, or leave it out."
        ) from None


def check(ask: Ask, instead: Sequence[str] = ()) -> None:
    """Refuse wrong options, and options without effect on what is measured `instead`, before anything runs."""
    for workload in chosen(ask.workloads).values():
        chosen_methods(workload, ask.quick, ask.methods)
    here = KINDS[ask.device.type]
    for name in ask.engines or ():
        if name not in (BY_HAND, *here):
            other = next((device for device, kinds in KINDS.items() if name in kinds), None)
            if other is None:
                raise ConfigError(unknown("engine of a benchmark", name, (BY_HAND, *here)))
            raise ConfigError(
                f"--engines has {name}, which does not run on {ask.device.type}; give --device {other} on a machine "
                f"that has it, or choose among {', '.join((BY_HAND, *here))}."
            )
    given = {"--methods": ask.methods, "--engines": ask.engines, "--samples": ask.samples, "--rounds": ask.rounds}
    for part in instead:
        idle = [name for name, value in given.items() if value is not None and name not in EFFECT[part]]
        idle += [name for name in ask.workloads if part == "--growth" or name != FIRST]
        if idle:
            where = "on clients of its own" if part == "--growth" else f"on {FIRST} with fedavg"
            raise ConfigError(f"{part} is measured {where}, so {', '.join(idle)} would change nothing; leave it out.")


def wanted(ask: Ask, method: str, before: Mapping[str, Any] | None = None) -> tuple[tuple[str, ...], dict[str, str]]:
    """The contenders of a method, the baseline first, and why others are missing.

    The contenders of an existing row stay in it.
    """
    stay = () if before is None else (*before["done"], *before["left_out"])
    base = BY_HAND if find(method).id in SERIAL else REFERENCE
    others = [name for name in KINDS[ask.device.type] if name != base]
    names = [base, *(name for name in others if ask.engines is None or name in (*ask.engines, *stay))]
    there = {n: n == BY_HAND or KINDS[ask.device.type][n]["engine"] in ENGINES for n in names}
    return tuple(n for n in names if there[n]), {n: MISSING for n in names if not there[n]}


def measure_engines(ask: Ask, results: Results, rows: Rows) -> None:
    """Measure one row per workload and method."""
    every = [
        (name, workload, method, ask.key(f"{name}/{find(method).id}"))
        for name, workload in chosen(ask.workloads).items()
        for method in chosen_methods(workload, ask.quick, ask.methods)
    ]
    plan = [each for each in every if ask.force or not results.has("engines", each[3], wanted(ask, each[2])[0])]
    plan.sort(key=lambda each: results.find("engines", each[3]) is not None)  # retries come last
    rows.expect(len(plan), len(every) - len(plan))
    loaded: tuple[str, Federation] | None = None
    for name, workload, method, key in plan:
        names, missing = wanted(ask, method, results.find("engines", key))
        rows.begin(f"{name} {find(method).id}", ask.pace.steps(len(names)))
        if loaded is None or loaded[0] != name:
            loaded = None  # frees the images of the last workload first
            loaded = name, make_clients(workload, max_images(workload, ask.device, ask.quick, ask.samples))
        outcome = race(
            [entry(each, workload, method, loaded[1], ask.device) for each in names],
            trained(loaded[1]),
            ask.device,
            ask.pace,
            rows.step,
        )
        row = described(name, workload, method, loaded[1], ask) | outcome_row(outcome, missing)
        results.add("engines", key, row, ask.command)
        rows.end(in_words(outcome))


def entry(name: str, workload: Workload, method: str, federation: Federation, device: torch.device) -> ContenderSpec:
    """One contender of the engines' table."""
    if name == BY_HAND:
        config = configure(workload, method, device, {"engine": REFERENCE})
        return ContenderSpec(name, lambda: ByHand(config, federation, device))
    return variant(name, workload, method, federation, device, KINDS[device.type][name])


def variant(
    name: str,
    workload: Workload,
    method: str,
    federation: Federation,
    device: torch.device,
    run: Mapping[str, Any],
) -> ContenderSpec:
    """An engine with its own settings; settings that this machine does not support fail when it is made."""
    return ContenderSpec(name, lambda: Engined(configure(workload, method, device, run), federation, device))


def described(name: str, workload: Workload, method: str, federation: Federation, ask: Ask) -> dict[str, Any]:
    """A description of the workload of a row."""
    config = configure(workload, method, ask.device, {"engine": REFERENCE})
    arch = architectures(config.model, federation.names, federation.classes, federation.shape)[federation.names[0]]
    sizes = [(len(data.train), len(data.test)) for data in federation.clients.values()]
    steps = sum(len(batch_sizes(train, workload.batch, config.train.last_batch, Pass.min_batch)) for train, _ in sizes)
    return {
        "workload": name,
        "method": find(method).id,
        "model": arch.label,
        "parameters": arch.parameters,
        "image": list(workload.shape),
        "clients": len(sizes),
        "batch": workload.batch,
        "steps": steps,  # of all clients in one epoch
        "mean_batch": round(trained(federation) / steps, 2),
        "samples": ask.samples,
        "train_images": sum(train for train, _ in sizes),
        "test_images": sum(test for _, test in sizes),
        "all_images": sum(train for train, _ in sizes) == sum(workload.train),
        "moment": find(method).moment,
        "memory_format": config.run.memory_format,
        "precision": choose_precision(config.run.precision, ask.device),
        "threads": config.run.threads,
    }


def outcome_row(outcome: Comparison, missing: Mapping[str, str]) -> dict[str, Any]:
    return {
        "baseline": outcome.results[0]["name"] if outcome.results else None,
        "contenders": outcome.results,
        "done": [each["name"] for each in outcome.results],
        "left_out": {**missing, **outcome.left_out},
        "largest_change_of_a_weight": outcome.moved,
    }


def trained(federation: Federation) -> int:
    """Training images of all clients."""
    return sum(len(data.train) for data in federation.clients.values())


def in_words(outcome: Comparison) -> str:
    """The fastest contender, for a line of progress."""
    if not outcome.results:
        return "nothing could be measured"
    best = max(outcome.results, key=lambda each: float(each["round_per_second"]))
    return f"{best['name']} {best['round_per_second']:,.0f} images/s, {best['round_ratio']:.2f} of the first"


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
    """Measure one row per option on the first workload: its values side by side, the default first."""
    workload, method = WORKLOADS[FIRST], "fedavg"
    groups = option_groups(ask.device)
    plan = [each for each in groups if ask.force or not results.has("options", ask.key(each), groups[each])]
    plan.sort(key=lambda option: results.find("options", ask.key(option)) is not None)  # retries come last
    rows.expect(len(plan), len(groups) - len(plan))
    if not plan:
        return
    federation = make_clients(workload, max_images(workload, ask.device, ask.quick, ask.samples))
    for option in plan:
        values = groups[option]
        rows.begin(f"option {option}", ask.pace.steps(len(values)))
        entries = [variant(value, workload, method, federation, ask.device, run) for value, run in values.items()]
        outcome = race(entries, trained(federation), ask.device, ask.pace, rows.step)
        row = {"option": option, "engine": next(iter(values.values()))["engine"]}
        row |= described(FIRST, workload, method, federation, ask) | outcome_row(outcome, {})
        results.add("options", ask.key(option), row, ask.command)
        rows.end(in_words(outcome))
