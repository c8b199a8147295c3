"""Make the pictures of the documentation: `fedprism demo`, then `python docs/make_pictures.py`.

FedSCE's need the runs of docs/results.md: `python docs/make_pictures.py runs/pictures`. The result is
committed, so that building the documentation needs neither training nor data.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import fedprism as fp
from fedprism.federation import contact_sheet
from fedprism.records import read_run
from fedprism.report.figures import Panel, figure, inside_figure, panels

ASSETS = Path(__file__).parent / "assets"


def digits_skew() -> None:
    """A row of images for each of the five styles, as the clients get them."""
    federation = fp.federation("digits-skew", clients=5, seed=0, image_size=32)
    contact_sheet(federation, per_client=10).save(ASSETS / "digits-skew.png", optimize=True)


def demo(runs: Path = Path("demo/runs")) -> None:
    """Curves and gains of the runs that `fedprism demo` has left."""
    methods = ("local", "fedavg", "fedprox", "fedbn", "fedrep", "ditto")
    figure([read_run(runs / f"{method}-0") for method in methods], ASSETS / "demo.png")


def fedsce(runs: Path) -> None:
    """Contribution weights, and how much of each update lies in the subspace, for the three ways to take it in."""

    def of(run: str) -> dict[str, Panel]:
        group = [read_run(runs / f"fedsce-{run}-{seed}") for seed in (0, 1, 2)]
        return {panel.title.removesuffix(", in training"): panel for panel in panels(group)}

    ways = {way: of(way) for way in ("raw", "normalised", "keep")}
    shown = [
        replace(ways["raw"]["weight"], title="weight of a client's auxiliary model"),
        replace(ways["raw"]["update"], title="raw: length of the update"),
    ]
    for way, found in ways.items():
        shown.append(replace(found["subspace/used"], title=f"{way}: share inside the subspace that held it"))
        shown.append(replace(found["subspace/next"], title=f"{way}: share inside the next subspace"))
    inside_figure(shown, ASSETS / "fedsce-rounds.svg")


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    if len(sys.argv) > 1:
        fedsce(Path(sys.argv[1]))
    else:
        digits_skew()
        demo()
