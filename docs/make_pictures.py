"""Make the pictures of the documentation: `fedprism demo`, then `python docs/make_pictures.py`.

Those of data and partitions alone need nothing: `python docs/make_pictures.py data`. FedSCE's need the runs of
docs/results.md: `python docs/make_pictures.py runs/pictures`. The result is committed, so that building the
documentation needs neither training nor data.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

import fedprism as fp
from fedprism.config import DataConfig, structure
from fedprism.data import Dataset, load
from fedprism.data.base import Level
from fedprism.federation import PARTITIONS, ClientData, Federation, Split, contact_sheet
from fedprism.inspection.bubbles import bubbles
from fedprism.records import read_run
from fedprism.report.figures import Panel, diagnostics_figure, overview_figure, panels

ASSETS = Path(__file__).parent / "assets"


def digits_skew() -> None:
    """A row of images for each of the five styles, as the clients get them."""
    federation = fp.make_federation("digits-skew", clients=5, seed=0, image_size=32)
    contact_sheet(federation, per_client=10).save(ASSETS / "digits-skew.png", optimize=True)


def synth_digits() -> None:
    """Some digits of the generator, in four rows."""
    federation = fp.make_federation("synth-digits-like?train=400,test=40", partition={"name": "iid", "clients": 4})
    contact_sheet(federation, per_client=10).save(ASSETS / "synth-digits-like.png", optimize=True)


def demo(runs: Path = Path("demo/runs")) -> None:
    """Curves and gains of the runs that `fedprism demo` has left."""
    methods = ("local", "fedavg", "fedprox", "fedbn", "fedrep", "ditto")
    overview_figure([read_run(runs / f"{method}-0") for method in methods], ASSETS / "demo.png")


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
    diagnostics_figure(shown, ASSETS / "fedsce-rounds.svg")


# --- partitions ------------------------------------------------------------------------------------------------------


class Dealt(NamedTuple):
    """A picture: what is dealt, how, and in which words."""

    data: Dataset
    settings: dict[str, Any]
    words: str
    subclasses: bool = False  # rows are the level below the labels


def _labels(classes: int, each: int, superclasses: int = 0) -> Dataset:
    """Labels without images, of which some have a superclass: a partition looks at nothing else."""
    labels = torch.arange(classes).repeat_interleave(each)
    coarse = None
    if superclasses:
        inside = classes // superclasses
        names = tuple(f"{'ABCDEFGHIJ'[i // inside]}{i % inside + 1}" for i in range(classes))
        coarse = Level(labels // inside, tuple("ABCDEFGHIJ"[:superclasses]))
    else:
        names = tuple(str(label) for label in range(classes))
    images = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(len(labels), 1, 1, 1)
    return Dataset("labels", images, labels, torch.zeros_like(labels), ("all",), names, None, 0.2, coarse=coarse)


def _raised(data: Dataset) -> Dataset:
    """The same with superclasses as labels, and classes as the level below."""
    assert data.coarse is not None
    fine = Level(data.labels, data.class_names)
    return replace(data, labels=data.coarse.labels, class_names=data.coarse.names, coarse=None, fine=fine)


def _federation(dealt: Dealt) -> Federation:
    """Who is dealt what; all of it counts as training images, but for one to test on."""
    data, settings = dealt.data, dict(dealt.settings)
    partition = structure(settings, PARTITIONS[settings.pop("name")], "partition").settled(data)
    level = data.fine if dealt.subclasses else Level(data.labels, data.class_names)
    assert level is not None
    clients = {}
    for share in partition.deal(data, np.arange(len(data)), seed=0):
        rows = torch.from_numpy(share.indices)
        train, test = (Split.of(data.images, part, level.labels[part]) for part in (rows[:-1], rows[-1:]))
        none = Split.of(data.images, rows[:0], level.labels[rows[:0]])
        clients[share.client] = ClientData(share.client, share.domain, train, none, test, len(level.names))
    empty = Split(data.images[:0], data.labels[:0])
    return Federation(data.name, clients, level.names, data.shape, 0, DataConfig(), empty)


def partitions() -> None:
    """Every partition as circles, and what noise looks like."""
    folder = ASSETS / "partitions"
    folder.mkdir(parents=True, exist_ok=True)
    plain, styles, deep = _labels(10, 500), load(DataConfig("digits-skew"), 0), _labels(20, 150, superclasses=5)
    pictures = {
        "domain": Dealt(styles, {"name": "domain", "clients": 10}, "domain: 10 clients of 5 domains"),
        "iid": Dealt(plain, {"name": "iid", "clients": 10}, "iid"),
        "pathological": Dealt(plain, {"name": "pathological"}, "pathological: 2 classes a client, by groups"),
        "pathological-slots": Dealt(
            plain, {"name": "pathological", "rule": "slots"}, "pathological: 2 classes a client, by slots"
        ),
        "dirichlet": Dealt(plain, {"name": "dirichlet", "alpha": 0.1}, "dirichlet: alpha 0.1"),
        "dirichlet-weak": Dealt(plain, {"name": "dirichlet", "alpha": 1.0}, "dirichlet: alpha 1"),
        "dirichlet-capped": Dealt(
            plain, {"name": "dirichlet", "alpha": 0.1, "form": "capped"}, "dirichlet: alpha 0.1, capped"
        ),
        "pachinko": Dealt(
            deep, {"name": "pachinko", "clients": 10}, "pachinko: classes A1 to E4 in superclasses A to E"
        ),
        "superclass": Dealt(
            _raised(deep),
            {"name": "superclass", "clients": 8},
            "superclass: labels are A to E; rows are subclasses",
            subclasses=True,
        ),
        "both": Dealt(styles, {"name": "both", "clients": 5}, "both: part of a domain, in uneven shares"),
        "noise": Dealt(plain, {"name": "noise", "clients": 10}, "noise: as iid, from client to client noisier"),
    }
    forgotten = set(PARTITIONS) - {dealt.settings["name"] for dealt in pictures.values()}
    if forgotten:
        raise SystemExit(f"these partitions have no picture: {', '.join(sorted(forgotten))}")
    for name, dealt in pictures.items():
        _smaller(bubbles(_federation(dealt), folder / f"partition-{name}.png", dealt.words))
    noisy = {"name": "noise", "clients": 5, "sigma": 80}
    sheet = contact_sheet(fp.make_federation("digits-skew", domains=("plain",), partition=noisy, image_size=32))
    sheet.save(folder / "partition-noise-images.png", optimize=True)
    _smaller(folder / "partition-noise-images.png")


def _smaller(path: Path) -> None:
    """Of few colours, which a drawing does not miss."""
    with Image.open(path) as picture:
        shown = picture.convert("RGB").quantize(32, kmeans=4, dither=Image.Dither.NONE)
    shown.save(path, optimize=True)


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    if sys.argv[1:] == ["data"]:
        synth_digits()
        partitions()
    elif len(sys.argv) > 1:
        fedsce(Path(sys.argv[1]))
    else:
        digits_skew()
        demo()
        synth_digits()
        partitions()
