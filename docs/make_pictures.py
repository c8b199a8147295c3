"""Make the pictures of the documentation: `fedprism demo`, then `python docs/make_pictures.py`.

The result is committed, so that building the documentation needs neither training nor data.
"""

from __future__ import annotations

from pathlib import Path

import fedprism as fp
from fedprism.federation import contact_sheet
from fedprism.records import read_run
from fedprism.report.figures import figure

ASSETS = Path(__file__).parent / "assets"


def digits_skew() -> None:
    """A row of images for each of the five styles, as the clients get them."""
    federation = fp.federation("digits-skew", clients=5, seed=0, image_size=32)
    contact_sheet(federation, per_client=10).save(ASSETS / "digits-skew.png", optimize=True)


def demo(runs: Path = Path("demo/runs")) -> None:
    """Curves and gains of the runs that `fedprism demo` has left."""
    methods = ("local", "fedavg", "fedprox", "fedbn", "fedrep", "ditto")
    figure([read_run(runs / f"{method}-0") for method in methods], ASSETS / "demo.png")


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    digits_skew()
    demo()
