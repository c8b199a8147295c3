"""`fedprism data`: list, prepare from a server of this machine, and inspect what is built in."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import os
import struct
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedprism.cli import app
from fedprism.data import DATASETS
from fedprism.data.sources import NAMES, PACKED, SOURCES, sources_of
from fedprism.report import datasets
from fedprism.report.inspection import MOST_CLIENTS

COMMANDS = ("list", "prepare", "inspect")
DATA = os.environ.get("FEDPRISM_DATA")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, no data, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def call(*arguments: Any, columns: int = 200) -> Any:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["data", *map(str, arguments)])


def said(result: Any) -> str:
    """What was printed, as one line."""
    return " ".join(result.output.split())


def works(*arguments: Any) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return said(result)


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_by_example(command: str) -> None:
    assert f"Example: fedprism data {command}" in works(command, "--help")
    assert command in works("--help")


# --- list ------------------------------------------------------------------------------------------------------------


def test_list_names_every_dataset() -> None:
    shown = works("list")
    assert all(name in shown for name in DATASETS)
    assert "digits-skew built in 10 5" in shown
    assert "cifar100 not here 100 1 none stated" in shown
    assert f"{Path('cache', 'data')}" in shown


def test_every_dataset_has_its_size() -> None:
    assert set(datasets.SIZES) == set(DATASETS)
    assert set(PACKED) <= {source.name for name in NAMES for source in sources_of(name)}


def test_list_sees_what_is_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published files, or the compact ones; of a dataset of five parts, how many of them."""
    root = here / "data"
    for path in ("agnews/train.csv", "agnews/test.csv", "cifar10.npz", "svhn/train_32x32.mat", "digits_mnist.npz"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    monkeypatch.setenv("FEDPRISM_DATA", str(root))
    shown = works("list")
    assert "agnews ready" in shown
    assert "cifar10 ready" in shown
    assert "mnist ready" in shown
    assert "digits-five 1 of 5" in shown  # half of svhn is not svhn
    assert "tiny-imagenet not here" in shown
    assert "agnews not here" in works("list", "--root", here / "elsewhere")


# --- prepare ---------------------------------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tiny MNIST behind a server of this machine; gives the folder that is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, n in (("train", 60), ("t10k", 20)):
        pixels = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        labels = np.arange(n, dtype=np.uint8) % 10
        for name, numbers, header in (
            ("images-idx3", pixels, struct.pack(">4B3I", 0, 0, 8, 3, n, 28, 28)),
            ("labels-idx1", labels, struct.pack(">4BI", 0, 0, 8, 1, n)),
        ):
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + numbers.tobytes()))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    files = []
    for file in SOURCES["mnist"].files:
        content = (folder / file.name).read_bytes()
        checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        address = f"http://127.0.0.1:{server.server_port}/{file.name}"
        files.append(dataclasses.replace(file, address=address, checksum=checksum, size=len(content), mirrors=()))
    monkeypatch.setitem(SOURCES, "mnist", dataclasses.replace(SOURCES["mnist"], files=tuple(files)))
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


def test_prepare_list_inspect(here: Path, served: Path) -> None:
    shown = works("prepare", "mnist", "--root", "mine")
    assert "licence: Creative Commons" in shown
    assert "mnist is ready: 80 images." in shown
    assert "fedprism data inspect mnist --root mine" in shown
    assert (here / "mine" / "mnist" / "train-images-idx3-ubyte.gz").is_file()
    assert any((here / "cache").rglob("*.npy"))  # converted, once
    assert "mnist ready" in works("list", "--root", "mine")
    (served / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "all files are there already" in works("prepare", "mnist", "--root", "mine")
    shown = works("inspect", "mnist", "--root", "mine", "--partition", "iid", "--clients", 2, "--seed", 3)
    assert "mnist: 2 clients, 10 classes, images 1x28x28" in shown
    assert "partition iid, clients 2, seed 3" in shown
    assert "client-01 27 3 10" in shown  # of 60 and 20 images


def test_prepare_of_what_needs_no_files_and_of_nothing() -> None:
    for name in ("digits-skew", "mnits"):
        result = call("prepare", name)
        assert result.exit_code == 2
        assert f"'{name}'" in said(result)
    assert "Did you mean 'mnist'?" in said(result)


def test_a_changed_file_is_refused(served: Path) -> None:
    name = "train-labels-idx1-ubyte.gz"
    (served / name).write_bytes((served / name).read_bytes()[:-1] + b"?")
    result = call("prepare", "mnist", "--root", "mine")
    assert result.exit_code == 2
    assert "checksum" in said(result)
    assert not (Path("mine") / "mnist" / name).exists()


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_inspect_prints_counts_and_a_sentence() -> None:
    shown = works("inspect", "digits-skew", "--clients", 2, "--set", "data.samples=100")
    assert "digits-skew: 2 clients, 10 classes, images 3x16x16" in shown
    assert "plain 100 36 216" in shown
    assert "Left out: 1,093 images." in shown
    assert "2 clients of 100 training images each: classes are shared evenly" in shown
    assert "label skew: total variation, mean" in shown
    assert "--out FOLDER" in shown
    assert not list(Path().glob("*.png"))


def test_inspect_writes_what_it_says(here: Path) -> None:
    assert "images of every client" in works("inspect", "digits-skew", "--out", "look")
    held = lines(here / "look" / "clients.csv")
    assert [row["client"] for row in held] == ["plain", "tinted", "textured", "blurred", "rotated"]
    for row in held:
        parts = sum(int(row[part]) for part in ("train", "validation", "test"))
        assert parts == sum(int(row[f"class:{digit}"]) for digit in range(10))
    assert sum(int(row["class:0"]) for row in held) == 178  # zeros of scikit-learn's digits
    assert Image.open(here / "look" / "bubbles.png").width > 500
    assert Image.open(here / "look" / "contact-sheet.png").height == 5 * 52 + 4
    assert sorted(path.name for path in (here / "look").iterdir()) == [
        "bubbles.png",
        "clients.csv",
        "contact-sheet.png",
    ]


def test_many_clients_and_classes_are_summarised(here: Path) -> None:
    name = "synthetic?clients=40,samples=30,classes=50,label_skew=0.8"
    shown = works("inspect", name, "--set", "data.image_size=8", "--out", "look")
    assert f"{MOST_CLIENTS} of 40 clients, evenly drawn" in shown
    assert "client train validation test classes largest" in shown
    assert f"images of {MOST_CLIENTS} of 40 clients, evenly drawn" in shown
    held = lines(here / "look" / "clients.csv")
    assert len(held) == 40  # all of them
    assert len(held[0]) == 5 + 50
    assert Image.open(here / "look" / "contact-sheet.png").height == MOST_CLIENTS * 52 + 4


def test_inspect_a_configuration(here: Path) -> None:
    (here / "mine.yaml").write_text("seed: 4\ndata: {samples: 20, partition: {name: domain, clients: 2}}\n")
    shown = works("inspect", "mine.yaml")
    assert "partition domain, clients 2, seed 4" in shown
    assert "2 clients of 20 training images each" in shown
    shown = works("inspect", "mine.yaml", "--partition", "iid", "--clients", 3, "--seed", 5, "--set", "data.samples=10")
    assert "partition iid, clients 3, seed 5" in shown
    assert "3 clients of 10 training images each" in shown


def test_settings_of_a_partition() -> None:
    args = ("digits-skew", "--partition", "dirichlet", "--clients", 4, "--set", "data.partition.alpha=0.2")
    assert "partition dirichlet, clients 4, alpha 0.2" in works("inspect", *args)


def test_inspect_a_folder(here: Path) -> None:
    for site, grey in (("north", 40), ("south", 200)):
        for label in ("cat", "dog"):
            for number in range(8):
                path = here / "sites" / site / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (16, 16), (grey, grey, grey + number)).save(path)
    shown = works("inspect", "folder:sites", "--out", "look")
    assert "north" in shown
    assert "images differ strongly" in shown
    assert {row["domain"] for row in lines(here / "look" / "clients.csv")} == {"north", "south"}


def test_texts_have_no_contact_sheet(here: Path) -> None:
    (here / "data" / "agnews").mkdir(parents=True)
    for part, n in (("train", 80), ("test", 40)):
        rows = [[str(1 + i % 4), f"title {i % 7}", f"words of topic {i % 4}"] for i in range(n)]
        with (here / "data" / "agnews" / f"{part}.csv").open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    shown = works("inspect", "agnews", "--root", "data", "--partition", "iid", "--clients", 2, "--out", "look")
    assert "training texts each" in shown
    assert "not drawn; these are texts" in shown
    assert not (here / "look" / "contact-sheet.png").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("cifar11",), "Did you mean 'cifar10'?"),
        (("cifar10",), "fedprism data prepare cifar10"),
        (("digits-skew", "--partition", "dirichlett"), "Did you mean 'dirichlet'?"),
        (("digits-skew", "--set", "data.smaples=3"), "Did you mean 'samples'?"),
        (("digits-skew", "--set", "data.partition.alpa=3"), "unknown key 'alpa'"),
        (("nowhere.yaml",), "there is no configuration at nowhere.yaml"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: tuple[str, ...], why: str) -> None:
    result = call("inspect", *arguments)
    assert result.exit_code == 2
    assert why in said(result)
    assert "Traceback" not in result.output


def test_without_matplotlib_the_rest_is_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "it needs matplotlib: pip install 'fedprism[report]'" in works("inspect", "digits-skew", "--out", "look")
    assert sorted(path.name for path in (here / "look").iterdir()) == ["clients.csv", "contact-sheet.png"]


def test_a_folder_that_cannot_be_written(here: Path) -> None:
    (here / "look").write_text("a file")
    result = call("inspect", "digits-skew", "--out", "look")
    assert result.exit_code == 2
    assert "Choose another --out" in said(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) & set(DATASETS)))
def test_every_real_dataset_can_be_inspected(name: str, here: Path) -> None:
    if DATA is None:
        pytest.skip("$FEDPRISM_DATA names no folder of real data")
    asked = () if name == "agnews" else ("--set", "data.image_size=32")
    if name == "digits-five" and datasets.state(name, Path(DATA)) != datasets.READY:
        asked += ("--set", "data.domains=[mnist, mnist-m, svhn, usps, synth-digits-like]")
    elif datasets.state(name, Path(DATA)) != datasets.READY:
        pytest.skip(f"{name} is not in $FEDPRISM_DATA")
    shown = works("inspect", name, "--root", DATA, *asked, "--out", "look")
    assert f"{name}: " in shown
    assert "classes are shared" in shown
    classes, _ = datasets.SIZES[name]
    assert len(lines(here / "look" / "clients.csv")[0]) == 5 + int(classes)
