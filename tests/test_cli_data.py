"""`fedprism data`: list, prepare from a server of this machine, and inspect what is built in."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import hashlib
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from fedprism.cli import app
from fedprism.config import SPLITS, DataConfig
from fedprism.data import DATASETS, Dataset
from fedprism.data.base import Level
from fedprism.data.sources import NAMES, PACKED, SOURCES, sources_of
from fedprism.federation import make_federation
from fedprism.federation.sheet import HEAD
from fedprism.inspection import datasets
from fedprism.inspection.clients import MOST_CLIENTS, ClientTable, inspect_federation

pytestmark = pytest.mark.full

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


def output_of(result: Any) -> str:
    """What was printed, as one line."""
    return " ".join(result.output.split())


def works(*arguments: Any) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return output_of(result)


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
    assert set(datasets.PUBLISHED) <= set(NAMES) & set(DATASETS)
    assert sum(datasets.PUBLISHED["office-caltech-10"].values()) == 2533
    assert sum(datasets.PUBLISHED["pacs"].values()) == 9991
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
    assert "cifar10 compact" in shown
    assert "mnist compact" in shown
    assert "may hold a part of a dataset only" in shown
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
    assert "mnist is ready: 80 of the published 70,000 images." in shown
    assert "fedprism data inspect mnist --root mine" in shown
    assert (here / "mine" / "mnist" / "train-images-idx3-ubyte.gz").is_file()
    assert any((here / "cache").rglob("*.npy"))  # converted, once
    assert "mnist ready" in works("list", "--root", "mine")
    (served / "t10k-labels-idx1-ubyte.gz").unlink()
    assert "all files are there already" in works("prepare", "mnist", "--root", "mine")
    shown = works("inspect", "mnist", "--root", "mine", "--partition", "iid", "--clients", 2, "--seed", 3)
    assert "mnist: 2 clients, 10 classes, images 1x28x28" in shown
    assert "This copy is not all of it: 80 of the published 70,000 images." in shown
    assert "partition iid: clients 2; seed 3" in shown
    assert "split: its own test part, validation 0.1 of the rest; image_size 28; normalize half" in shown
    assert "client-01 27 3 10" in shown  # of 60 and 20 images


def test_prepare_of_what_needs_no_files_and_of_nothing() -> None:
    for name, why in (
        ("digits-skew", "is made here and has nothing to download"),
        ("folder", "reads images of your own where they lie"),
        ("folder:sites", "fedprism data inspect folder:PATH"),
        ("mnits", "Did you mean 'mnist'?"),
    ):
        result = call("prepare", name)
        assert result.exit_code == 2
        assert f"'{name}'" in output_of(result)
        assert why in output_of(result)


def test_a_changed_file_is_refused(served: Path) -> None:
    name = "train-labels-idx1-ubyte.gz"
    (served / name).write_bytes((served / name).read_bytes()[:-1] + b"?")
    result = call("prepare", "mnist", "--root", "mine")
    assert result.exit_code == 2
    assert "checksum" in output_of(result)
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
    counted = lines(here / "look" / "clients.csv")
    assert [row["client"] for row in counted] == ["plain", "tinted", "textured", "blurred", "rotated"]
    for row in counted:
        parts = sum(int(row[part]) for part in ("train", "validation", "test"))
        assert parts == sum(int(row[f"class:{digit}"]) for digit in range(10))
    assert sum(int(row["class:0"]) for row in counted) == 178  # zeros of scikit-learn's digits
    assert Image.open(here / "look" / "bubbles.png").width > 500
    sheet = Image.open(here / "look" / "contact-sheet.png")
    assert sheet.height == HEAD + 5 * 52 + 4
    assert sheet.width > 10 * 52  # all ten digits
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
    counted = lines(here / "look" / "clients.csv")
    assert len(counted) == 40  # all of them
    assert len(counted[0]) == 5 + 50
    assert Image.open(here / "look" / "contact-sheet.png").height == MOST_CLIENTS * 52 + 4


def test_inspect_a_configuration(here: Path) -> None:
    (here / "mine.yaml").write_text("seed: 4\ndata: {samples: 20, partition: {name: domain, clients: 2}}\n")
    shown = works("inspect", "mine.yaml")
    assert "partition domain: clients 2, order turns; seed 4" in shown
    assert "split: test 0.6, validation 0.1; image_size 16; normalize half; samples 20" in shown
    assert "2 clients of 20 training images each" in shown
    shown = works("inspect", "mine.yaml", "--partition", "iid", "--clients", 3, "--seed", 5, "--set", "data.samples=10")
    assert "partition iid: clients 3; seed 5" in shown
    assert "3 clients of 10 training images each" in shown


def test_settings_of_a_partition() -> None:
    args = ("digits-skew", "--partition", "dirichlet", "--clients", 4, "--set", "data.partition.alpha=0.2")
    assert "partition dirichlet: clients 4, alpha 0.2, form plain, least 10; seed 0" in works("inspect", *args)


def test_what_else_is_set_is_said() -> None:
    settings = {
        "data.split": "{rule: smallest, train: 0.5, validation: 0.4, test: 0.3}",
        "data.domains": "[tinted, plain]",
        "data.fraction": "0.5",
        "data.public": "20",
        "data.normalize": "{mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]}",
        "data.augment": "[flip, {name: rotate, degrees: 10}]",
    }
    shown = works("inspect", "digits-skew", *(f"--set={key}={value}" for key, value in settings.items()))
    assert "split as the smallest client's: test 0.3, train 0.5, validation 0.4; image_size 16; " in shown
    assert "normalize {mean: [0.5, 0.5, 0.5], std: [0.25, 0.25, 0.25]}; " in shown
    assert "augment [flip, {name: rotate, degrees: 10}]; fraction 0.5; public 20; domains [tinted, plain]" in shown


def on_a_terminal(name: str, columns: int, **settings: Any) -> list[str]:
    """The lines of the table, without rich's colours."""
    out = StringIO()
    terminal = Console(file=out, force_terminal=True, color_system=None, width=columns)
    terminal.print(ClientTable(inspect_federation(make_federation(name, **settings))))
    return [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize("columns", [60, 80])
def test_no_number_is_cut_on_a_narrow_terminal(columns: int) -> None:
    name = "synthetic?clients=3,samples=3000,classes=11,label_skew=0.9"
    shown = on_a_terminal(name, columns, image_size=4)
    assert all(len(line) <= columns for line in shown)
    made = make_federation(name, image_size=4)
    header, first = shown[0].split(), shown[2].split()
    assert header[:5] == ["client", "train", "validation", "test", "classes"]
    sizes = [f"{len(made.clients['client-0001'].split(part)):,}" for part in ("train", "validation", "test")]
    assert first[:5] == ["client-0001", *sizes, "11"]
    if columns > 60:
        largest, number = made.clients["client-0001"].class_counts().max(0).indices, shown[2].split(": ")[1]
        every = sum(int(made.clients["client-0001"].class_counts(part)[largest]) for part in SPLITS)
        assert header[5] == "largest"
        assert number.startswith(f"{every:,}, ")
        assert shown[2].index(first[5]) == shown[0].index("largest")  # at the left
    else:
        assert len(header) == 5


def test_classes_have_columns_where_these_fit() -> None:
    assert on_a_terminal("digits-skew", 120)[0].split()[4:] == [str(digit) for digit in range(10)]
    assert on_a_terminal("digits-skew", 60)[0].split()[4:] == ["classes", "largest"]


def test_subclasses_are_counted_where_they_are_dealt(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four subclasses in two superclasses, and two clients with one subclass of each."""

    def loader(config: DataConfig, seed: int) -> Dataset:
        fine = torch.arange(4).repeat(30)
        images = torch.zeros(len(fine), 1, 4, 4, dtype=torch.uint8)
        names = ("shark", "rose", "trout", "tulip")  # fish are 0 and 2
        return Dataset(
            "alive", images, fine % 2, fine * 0, ("alive",), ("fish", "flowers"), None, 0.2, fine=Level(fine, names)
        )

    monkeypatch.setitem(DATASETS._items, "alive", loader)
    shown = works("inspect", "alive", "--partition", "superclass", "--clients", 2, "--set=data.public=4", "--out=look")
    assert "alive: 2 clients, 2 classes" in shown
    assert "client train validation test shark trout rose tulip" in shown  # those of a superclass side by side
    assert "clients and subclasses" in shown
    first, second = lines(here / "look" / "clients.csv")
    for pair in (("shark", "trout"), ("rose", "tulip")):
        counted = [[int(client[f"class:{name}"]) for name in pair] for client in (first, second)]
        assert sorted(counted) == [[0, 29], [29, 0]]


def test_noise_has_a_column(here: Path) -> None:
    args = ("digits-skew", "--partition", "noise", "--clients", 2, "--set=data.partition.of=5", "--out", "look")
    shown = works("inspect", *args, "--set=data.partition.sigma=40")
    assert "partition noise: clients 2, of 5, sigma 40" in shown
    rows = lines(here / "look" / "clients.csv")
    assert len(rows) == 2
    for row in rows:
        number = int(row["client"].removeprefix("client-")) - 1
        assert float(row["noise"]) == 10 * number
        assert f"{row['client']} {row['train']} {row['validation']} {row['test']} {10 * number:.1f} " in shown


def test_inspect_a_folder(here: Path) -> None:
    for site, grey in (("north", 40), ("south", 200)):
        for label in ("cat", "dog"):
            for number in range(8):
                path = here / "sites" / site / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (16, 16), (grey, grey, grey + number)).save(path)
    result = call("inspect", here / "sites")
    assert result.exit_code == 2
    assert f"write folder:{here / 'sites'}" in output_of(result)
    shown = works("inspect", "folder:sites", "--out", "look")
    assert "split: test/ of each client, or 0.2 where there is none, validation 0.1" in shown
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
def test_mistakes_are_one_message(arguments: tuple[str, ...], why: str) -> None:
    result = call("inspect", *arguments)
    assert result.exit_code == 2
    assert why in output_of(result)
    assert "Traceback" not in result.output


def test_without_matplotlib_the_rest_is_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "it needs matplotlib: pip install 'fedprism[report]'" in works("inspect", "digits-skew", "--out", "look")
    assert sorted(path.name for path in (here / "look").iterdir()) == ["clients.csv", "contact-sheet.png"]


def test_a_folder_that_cannot_be_written(here: Path) -> None:
    """It is refused before anything is loaded: the dataset is not there, and nobody has noticed."""
    (here / "look").write_text("a file")
    result = call("inspect", "cifar10", "--out", "look")
    assert result.exit_code == 2
    assert "Choose another --out" in output_of(result)
    assert "cifar10" not in output_of(result)


def test_files_are_written_though_nobody_reads(here: Path) -> None:
    """As with `| head -1`: the reader is gone before the first line."""
    reads, writes = os.pipe()
    os.close(reads)
    code = "from fedprism.cli import main; main()"
    arguments = [sys.executable, "-c", code, "data", "inspect", "digits-skew", "--clients", "2", "--out", "look"]
    done = subprocess.run(arguments, stdout=writes, stderr=subprocess.DEVNULL, timeout=120)
    os.close(writes)
    assert done.returncode
    assert {path.name for path in (here / "look").iterdir()} == {"bubbles.png", "clients.csv", "contact-sheet.png"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) & set(DATASETS)))
def test_every_real_dataset_can_be_inspected(name: str, here: Path) -> None:
    if DATA is None:
        pytest.skip("$FEDPRISM_DATA names no folder of real data")
    asked = () if name == "agnews" else ("--set", "data.image_size=32")
    there = datasets.state(name, Path(DATA)) in (datasets.READY, datasets.COMPACT)
    if name == "digits-five" and not there:
        asked += ("--set", "data.domains=[mnist, mnist-m, svhn, usps, synth-digits-like]")
    elif not there:
        pytest.skip(f"{name} is not in $FEDPRISM_DATA")
    shown = works("inspect", name, "--root", DATA, *asked, "--out", "look")
    assert f"{name}: " in shown
    assert "classes are shared" in shown
    classes, _ = datasets.SIZES[name]
    assert len(lines(here / "look" / "clients.csv")[0]) == 5 + int(classes)
