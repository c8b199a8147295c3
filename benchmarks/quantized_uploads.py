"""What sending fewer bits costs: accuracy and bytes per upload of FedAvg and FedBN with and without transforms.

    python benchmarks/quantized_uploads.py [--methods fedavg,fedbn] [--seeds 0,1,2] [--rounds 40]

The set-up is `examples/digits-skew.yaml`. Accuracy is what `fedprism compare` prints: the mean over clients of the test
accuracy at the method's own moment, at the round with the best validation accuracy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

import fedprism as fp
from fedprism.records import outcome

EXAMPLE = Path(__file__).parent.parent / "examples" / "digits-skew.yaml"
TRANSFORMS = {
    "none": "[]",
    "quantize, 8 bits": "[{name: quantize, bits: 8}]",
    "quantize, 4 bits": "[{name: quantize, bits: 4}]",
    "clip_norm 1.0, quantize, 8 bits": "[{name: clip_norm, max: 1.0}, {name: quantize, bits: 8}]",
}


def run(method: str, transforms: str, seed: int, rounds: int | None, out: Path) -> fp.Run:
    """One run."""
    settings = [f"method.name={method}", f"transforms={transforms}", f"seed={seed}"]
    settings += ["evaluate.moments=[received]", "run.engine=inprocess", "run.device=cpu"]
    settings += [] if rounds is None else [f"train.rounds={rounds}"]
    return fp.run_config(fp.read_config(EXAMPLE, settings), EXAMPLE.stem, out=out)


def bytes_sent(run: fp.Run) -> float:
    """Of one upload, on average over clients and rounds."""
    return mean(sent for record in run.record.rounds for sent in record.up.values())


def clipped(runs: list[fp.Run]) -> str:
    """The share of uploads that were clipped, where clip_norm is used."""
    logs = [values for run in runs for record in run.record.rounds for values in record.logs.values()]
    found = [values["clip_norm/clipped"] for values in logs if "clip_norm/clipped" in values]
    return f"{mean(found):.0%}" if found else "–"


def spread(values: list[float]) -> str:
    """Mean and sample deviation."""
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else f"{values[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="fedavg,fedbn")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, help="left out: as in the example")
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")]
    print("| method | transforms | test accuracy | minus none | bytes per upload | share | clipped |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for method in given.methods.split(","):
        plain: dict[int, tuple[float, float]] = {}  # seed -> accuracy and bytes without transforms
        for name, transforms in TRANSFORMS.items():
            print(f"{method}, {name}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                runs = [run(method, transforms, seed, given.rounds, Path(folder) / str(seed)) for seed in seeds]
                figures = {each.seed: (100 * outcome(each.record).mean, bytes_sent(each)) for each in runs}
                shortened = clipped(runs)
            plain = plain or figures
            accuracy = [figures[seed][0] for seed in seeds]
            loss = [figures[seed][0] - plain[seed][0] for seed in seeds]
            sent, whole = (mean(each[seed][1] for seed in seeds) for each in (figures, plain))
            row = f"{spread(accuracy)} | {spread(loss)} | {sent:,.0f} | {sent / whole:.1%} | {shortened}"
            print(f"| {method} | {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
