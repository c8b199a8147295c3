"""One of ten clients sends something bad: what each of the server's aggregators makes of it.

    python benchmarks/attacks.py [--methods fedavg,fedbn] [--seeds 0,1,2] [--rounds 40]

The set-up is `examples/digits-skew.yaml` with ten clients, two per style. Prints the mean test accuracy of the nine
honest clients, at the round with the best validation accuracy (of all ten) and at the last one, and what was refused.

`Attack` is also an example of a transform of one's own. In a configuration:

    transforms: [{name: "benchmarks/attacks.py:Attack", client_id: plain-1, how: flip, scale: 10}]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Literal

import torch

import fedprism as fp
from fedprism.methods.base import State
from fedprism.records import Protocol, outcome
from fedprism.transforms.base import Transform, UploadContext

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits-skew.yaml"
ATTACKER = "plain-1"
AGGREGATORS = ("mean", "trimmed_mean", "median", "norm_bounded")
ATTACKS = {
    "none": None,
    "noise": "how: noise",
    "flipped": "how: flip",
    "flipped, 10 times": "how: flip, scale: 10",
    "3e38": "how: constant, scale: 3.0e+38",
}
PROTOCOLS = {"best validation accuracy": Protocol(), "last round": Protocol(when="last")}


@dataclass(frozen=True)
class Attack(Transform):
    """one client sends something else than what it has learned"""

    client_id: str = fp.setting("", "the client that attacks")
    how: Literal["noise", "flip", "constant"] = fp.setting(
        "flip", "noise: download + scale x N(0, 1); flip: download - scale x update; constant: scale everywhere"
    )
    scale: float = fp.setting(1.0, "strength of the attack")

    def client(self, upload: State, context: UploadContext) -> State:
        if self.client_id not in context.ctx.info.clients:
            raise fp.ConfigError(f"there is no client {self.client_id!r} that could attack.")
        if context.ctx.client_id != self.client_id:
            return upload
        chosen = context.chosen(upload, self.kinds)
        if self.how == "constant":
            return {**upload, **{name: torch.full_like(tensor, self.scale) for name, tensor in chosen.items()}}
        update = context.update(chosen)
        if self.how == "flip":
            bad = {name: -self.scale * u for name, u in update.items()}
        else:
            noise = {n: u.new_empty(u.shape).normal_(generator=context.rng(n, u)) for n, u in update.items()}
            bad = {name: self.scale * n for name, n in noise.items()}
        return {**upload, **context.add_origin(bad)}


def run(method: str, aggregator: str, attack: str | None, seed: int, rounds: int | None, out: Path) -> fp.Run:
    """One run."""
    listed = f"[{{name: '{Path(__file__).resolve()}:Attack', client_id: {ATTACKER}, {attack}}}]" if attack else "[]"
    settings = [
        "data.partition.clients=10",
        "data.samples=50",  # a client has 54
        f"method.name={method}",
        f"server.aggregator={aggregator}",
        f"transforms={listed}",
        f"seed={seed}",
        "evaluate.moments=[received]",
        "run.engine=inprocess",
        "run.device=cpu",
        *([] if rounds is None else [f"train.rounds={rounds}"]),
    ]
    return fp.run_config(fp.read_config(EXAMPLE, settings), EXAMPLE.stem, out=out)


def honest_accuracy(run: fp.Run, protocol: Protocol) -> float:
    """The mean test accuracy of all clients but the attacker, in percent."""
    found = outcome(run.record, protocol).accuracy
    return 100 * mean(value for client, value in found.items() if client != ATTACKER)


def spread(values: list[float]) -> str:
    """Mean and sample deviation."""
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def refusals(runs: list[fp.Run]) -> str:
    """Whose uploads were refused, in how many of the rounds."""
    rounds = sum(len(run.record.rounds) - 1 for run in runs)
    refused = Counter(client for run in runs for record in run.record.rounds for client in record.failed)
    return ", ".join(f"{client} in {count} of {rounds} rounds" for client, count in refused.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedavg,fedbn")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, help="left out: as in the example")
    given = parser.parse_args()
    cells = [(m, a, n) for m in given.methods.split(",") for a in AGGREGATORS for n in ATTACKS]
    found: dict[tuple[str, str, str], list[fp.Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for place, (method, aggregator, name) in enumerate(cells, start=1):
            print(f"{place} of {len(cells)}: {method}, {aggregator}, {name}", file=sys.stderr, flush=True)
            found[method, aggregator, name] = [
                run(method, aggregator, ATTACKS[name], int(seed), given.rounds, Path(folder) / f"{place}-{seed}")
                for seed in given.seeds.split(",")
            ]
    for title, protocol in PROTOCOLS.items():
        print(f"Test accuracy of the honest clients, {title}:\n")
        print(f"| method | aggregator | {' | '.join(ATTACKS)} |")
        print(f"|---|---|{'---:|' * len(ATTACKS)}")
        for method, aggregator in dict.fromkeys(cell[:2] for cell in cells):
            runs = [found[method, aggregator, name] for name in ATTACKS]
            figures = [spread([honest_accuracy(each, protocol) for each in cell]) for cell in runs]
            print(f"| {method} | {aggregator} | {' | '.join(figures)} |")
        print()
    print("| method | aggregator | attack | status | refused uploads | first reason |\n|---|---|---|---|---|---|")
    for (method, aggregator, name), runs in found.items():
        reasons = [reason for each in runs for record in each.record.rounds for reason in record.failed.values()]
        if reasons:
            status = ", ".join(dict.fromkeys(each.status for each in runs))
            print(f"| {method} | {aggregator} | {name} | {status} | {refusals(runs)} | {reasons[0]} |")


if __name__ == "__main__":
    main()
