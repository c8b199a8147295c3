"""Hostile inputs and outputs: broken links, named pipes, names with control characters, files that claim to be huge, a
standard output and files that cannot be written."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import os
import pickle
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedprism.bench.results import Results
from fedprism.cli import app
from fedprism.cli.output import print_message, stderr
from fedprism.cli.progress import Progress
from fedprism.config import DataConfig
from fedprism.data import agnews, digit_files, load
from fedprism.data.archives import unpack
from fedprism.data.cifar import COLUMNS, _pickled
from fedprism.data.digit_files import idx, libsvm, listed, mat
from fedprism.data.download import Checksums, digest
from fedprism.data.packed import Jpegs, mosaic
from fedprism.data.pictures import read_picture
from fedprism.errors import DataError, FedprismError
from fedprism.federation import Federation
from fedprism.inspection.clients import Inspection, check_folder, clients_csv
from fedprism.records import read_run
from fedprism.records.sealed import seal, unseal
from fedprism.report.canvas import available
from fedprism.report.formats import Entry, Grid, csv_lines, markdown
from fedprism.report.html import page
from fedprism.report.table import table
from tests.faults.injection import as_any_user
from tests.toy_records import toy_config, toy_plan, toy_run

EVIL = "\x1b]0;gone\x07\r\u202e"  # sets a terminal's title, returns to the start of the line, turns the rest round
SHOWN = r"\x1b]0;gone\x07\r\u202e"
LEFT = r"\x1b]0;gone\u202e"  # rich takes the others away
POSIX = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
HUGE = 1 << 28  # bytes that a small file claims
ROOM = 64 << 20  # bytes that refusing it may take


# --- links and folders -----------------------------------------------------------------------------------------------


def image(path: Path, level: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), level).save(path)
    return path


def sites(root: Path) -> Path:
    for client in ("north", "south"):
        for label in ("cat", "dog"):
            for i in range(4):
                image(root / client / label / f"{i}.png", 20 * i)
    return root


def read(root: Path, options: str = "") -> Any:
    return load(DataConfig(name=f"folder:{root}{options}", image_size=8), 0)


@pytest.mark.parametrize("place", ["west", "south/bird", "south/cat/notes"])
@pytest.mark.parametrize("to", ["/mnt/of-a-site-that-is-gone", "west"])
def test_a_broken_link_in_a_folder_is_refused_by_name(tmp_path: Path, place: str, to: str) -> None:
    root = sites(tmp_path / "sites")
    link = root / place
    link.symlink_to(link if to == "west" else to)  # a loop, or to nothing
    problem = "leads back to itself" if to == "west" else "No such file"
    with pytest.raises(DataError, match=rf"{re.escape(str(link))} is a link to .*{problem}.*remove the link"):
        read(root)


def test_a_broken_link_among_images_is_an_image_that_cannot_be_read(tmp_path: Path) -> None:
    root = sites(tmp_path / "sites")
    (root / "south" / "cat" / "9.png").symlink_to("/mnt/gone.png")
    with pytest.raises(DataError, match=r"1 of 17 images .* south/cat/9\.png \(No such file"):
        read(root)
    with pytest.warns(UserWarning, match=r"south/cat/9\.png .* They are left out"):
        assert len(read(root, "?unreadable=skip")) == 16


def test_a_folder_that_may_not_be_read_is_refused_by_name(tmp_path: Path) -> None:
    root = sites(tmp_path / "sites")
    (root / "south" / "cat").chmod(0)
    try:
        with as_any_user(), pytest.raises(DataError, match=r"south/cat cannot be listed: Permission denied"):
            read(root)
    finally:
        (root / "south" / "cat").chmod(0o700)


IMAGES, LABELS = np.zeros((4, 1, 6, 6), np.uint8), np.arange(4) % 2


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (np.ma.masked_equal(IMAGES, 0), LABELS, "without masked values"),
        (torch.from_numpy(IMAGES).to_sparse(), LABELS, "must be dense"),
        (IMAGES, torch.from_numpy(LABELS).to_sparse(), "must be dense"),
        (IMAGES[:, :0], LABELS, "there is nothing in them"),
        (np.zeros((20, 1, 6, 6), np.uint8), np.full(20, -1), "range from -1 to -1; expected whole numbers from 0"),
    ],
    ids=["masked", "sparse images", "sparse labels", "no channels", "no label"],
)
def test_arrays_that_are_none(x: Any, y: Any, words: str) -> None:
    with pytest.raises(DataError, match=f"client 'a'.*{words}"):
        Federation.from_arrays({"a": (x, y)})


# --- what is no regular file -----------------------------------------------------------------------------------------


@contextmanager
def pipe(path: Path) -> Iterator[Path]:
    """A named pipe that nobody writes to. After seconds it ends, so that a reader that waits for it does not hang."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    stop = threading.Event()

    def end_readers() -> None:
        stop.wait(1.0)
        while not stop.wait(0.05):
            with suppress(OSError):  # nobody reads
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    thread = threading.Thread(target=end_readers, daemon=True)
    thread.start()
    try:
        yield path
    finally:
        stop.set()
        thread.join()


READERS: dict[str, Callable[[Path], object]] = {
    "an image": lambda path: read_picture(path, 8),
    "packed images": Jpegs,
    "pickled images": lambda path: _pickled(path, COLUMNS["cifar10"], False),
    "a .mat file": lambda path: mat(path, 0, 9, False),
    "labels of IDX": lambda path: idx(path, path, False),
    "text of LIBSVM": lambda path: libsvm(path, False),
    "a list": lambda path: listed(path, path.parent, 8, False),
    "a text": agnews._read,
    "an archive": lambda path: unpack(path, path.parent / "unpacked"),
    "a checksum": digest,
    "checksums": lambda path: Checksums(path.parent),
    "results": lambda path: Results(path, torch.device("cpu"), True),
}


@POSIX
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    refused = pytest.raises(FedprismError, match=r"a named pipe|checksums\.json cannot be read as the list")
    with pipe(tmp_path / Checksums.NAME) as path, refused:
        reader(path)


@POSIX
@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
def test_what_is_no_file_among_images_is_named_and_can_be_skipped(tmp_path: Path, kind: str) -> None:
    root = sites(tmp_path / "s")
    odd = root / "south" / "cat" / "9.png"
    with ExitStack() as stack:
        if kind == "a named pipe":
            stack.enter_context(pipe(odd))
        elif kind == "a socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(odd))
        else:
            odd.symlink_to("/dev/null")
        with pytest.raises(DataError, match=rf"south/cat/9\.png \({kind}, no regular file\)"):
            read(root)
        with pytest.warns(UserWarning, match="They are left out"):
            assert len(read(root, "?unreadable=skip")) == 16


# --- files that claim to be huge -------------------------------------------------------------------------------------


def npy(shape: Sequence[int], content: bytes = b"", dtype: str = "|u1") -> bytes:
    out = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(out, header)
    return out.getvalue() + content


def npz(path: Path, name: str, content: bytes, how: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", how) as file:
        file.writestr(f"{name}.npy", content)
    return path


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def claims(path: Path, name: str, claimed: int, how: int = zipfile.ZIP_DEFLATED) -> Path:
    """An array of zeros whose archive claims another size than it has."""
    content = npz(path, name, npy([8], bytes(8)), how).read_bytes()
    own = struct.pack("<I", len(npy([8], bytes(8))))
    return write(path, content.replace(own, struct.pack("<I", claimed)))


def picture(side: int) -> bytes:
    """A JPEG file of 8 x 8 pixels that claims `side` x `side`."""
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "JPEG")
    return out.getvalue().replace(struct.pack(">HH", 8, 8), struct.pack(">HH", side, side), 1)


def jpegs(path: Path) -> object:
    content = np.frombuffer(picture(9_000), dtype=np.uint8)
    np.savez(path, jpeg=content, offsets=np.array([0, len(content)]))
    return Jpegs(path).picture(0, 8)


def packed_mat(count: int) -> bytes:
    def element(kind: int, content: bytes) -> bytes:
        return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)

    begin = element(6, struct.pack("<II", 9, 0)) + element(5, struct.pack("<ii", count, 1)) + element(1, b"y")
    begin += struct.pack("<II", 2, count)
    content = zlib.compress(struct.pack("<II", 14, len(begin) + count) + begin + bytes(1 << 10))
    return bytes(124) + b"\x00\x01IM" + struct.pack("<II", 15, len(content)) + content


def unpickle(path: Path, content: bytes) -> object:
    return _pickled(write(path, content), COLUMNS["cifar10"], False)


def encoding(times: int, size: int) -> bytes:
    """A pickle that encodes one text again and again."""
    text = b"X" + struct.pack("<I", size) + b"a" * size + b"q\x00"
    return b"\x80\x02c_codecs\nencode\nq\x010(" + text + b"h\x01h\x00U\x06latin1\x86R" * times + b"l."


def keyed(depth: int) -> bytes:
    """A pickle whose key is a tuple of a tuple of ..., each twice: to hash it takes 2 ** depth steps."""
    return b"\x80\x02}K\x00" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(depth)) + b"Ns."


def idx_of(path: Path, count: int) -> object:
    labels = write(path / "labels.gz", gzip.compress(struct.pack(">II", 0x801, count) + bytes(count)))
    images = write(path / "images.gz", gzip.compress(struct.pack(">IIII", 0x803, count, 256, 256) + bytes(100)))
    return idx(images, labels, False)


BOMBS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle: bytes": (
        lambda p: unpickle(p / "a", b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b"x."),
        "ends too early",
    ),
    "pickle: text": (lambda p: unpickle(p / "a", b"\x80\x04\x8d" + struct.pack("<Q", HUGE) + b"x."), "ends too early"),
    "pickle: long": (lambda p: unpickle(p / "a", b"\x80\x02\x8b" + struct.pack("<i", HUGE) + b"x."), "ends too early"),
    "pickle: frame": (
        lambda p: unpickle(p / "a", b"\x80\x04\x95" + struct.pack("<Q", HUGE) + b"N."),
        "no array `data`",
    ),
    "pickle: bytearray": (
        lambda p: unpickle(p / "a", b"\x80\x05\x96" + struct.pack("<Q", HUGE) + b"x."),
        "holds something else than arrays",
    ),
    "pickle: encoded again": (lambda p: unpickle(p / "a", encoding(4_000, 40_000)), "encodes more text than it holds"),
    "pickle: keys": (lambda p: unpickle(p / "a", keyed(14)), "one of its keys is a tuple"),
    "npz: shape": (lambda p: Jpegs(npz(p / "a.npz", "jpeg", npy([HUGE], bytes(9)))), "jpeg of uint8 and shape"),
    "npz: size": (lambda p: Jpegs(claims(p / "a.npz", "jpeg", HUGE)), "at most 134,217,728 are read"),
    "npz: bzip2": (lambda p: Jpegs(npz(p / "a.npz", "jpeg", npy([9], bytes(9)), zipfile.ZIP_BZIP2)), "than deflate"),
    "npz: column": (lambda p: mosaic(npz(p / "a.npz", "test_y", npy([HUGE])), "test", 9), "has 0 bytes"),
    "npz: picture": (lambda p: jpegs(p / "a.npz"), "9000 x 9000 pixels, at most 80,000,000"),
    "mat": (lambda p: mat(write(p / "a.mat", packed_mat(HUGE)), 0, 9, False), "bytes, more than are stored"),
    "idx": (lambda p: idx_of(p, 9_000), "says that it has 9000 images, more than a file of its size can hold"),
    "csv.gz": (lambda p: agnews._read(write(p / "a.csv.gz", gzip.compress(bytes(2 << 20)))), "unpacks to more than"),
    "bz2": (lambda p: libsvm(write(p / "a.bz2", bz2.compress(bytes(2 << 20))), False), "unpacks to more than"),
    "rows": (lambda p: libsvm(write(p / "a", b"1\n" * 40_000), False), "more than 9,999 lines"),
}


@pytest.mark.parametrize(("reader", "message"), BOMBS.values(), ids=BOMBS.keys())
def test_a_small_file_that_claims_to_be_huge_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path], object], message: str
) -> None:
    monkeypatch.setattr(agnews, "MAX_BYTES", 1 << 20, raising=False)  # a file that unpacks to the limit takes a second
    monkeypatch.setattr(digit_files, "MAX_TEXT", 1 << 20, raising=False)
    monkeypatch.setattr(digit_files, "MAX_LINES", 9_999, raising=False)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=message) as caught:
            reader(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < ROOM
    assert "\n" not in str(caught.value)


def test_an_archive_packed_in_a_way_that_python_unpacks_unbounded_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("a.txt", bytes(1 << 20))
    with pytest.raises(DataError, match=r"a\.zip: 'a\.txt' is packed in another way than deflate"):
        unpack(tmp_path / "a.zip", tmp_path / "here")


def test_a_pickle_as_it_is_published_is_still_read(tmp_path: Path) -> None:
    batch = {b"data": np.zeros((3, 3072), np.uint8), b"labels": [1, 2, 3], b"batch_label": b"one"}
    for protocol in range(5):
        (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol=protocol))
        assert _pickled(tmp_path / "batch", COLUMNS["cifar10"], False).columns["labels"].tolist() == [1, 2, 3]


# --- names that reach a terminal, a table or a spreadsheet -----------------------------------------------------------


def renamed(entry: Any) -> Any:
    """The same record, with other names for a client and the method."""
    text = json.dumps(entry).replace('"north"', json.dumps(f"{EVIL}|\nnorth"))
    return json.loads(text.replace('"toy"', json.dumps(f"=1+1{EVIL}")))


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A run whose records come from elsewhere: client and method have names that no run of ours could have."""
    path = toy_run(tmp_path / "run", toy_config(rounds=1))
    for name in ("run.json", "metrics.jsonl", "classes.json"):
        whole = (path / name).read_bytes()
        sealed = whole.splitlines(keepends=True) if name.endswith("l") else [whole]
        (path / name).write_bytes(b"".join(seal(renamed(unseal(part))) for part in sealed))
    return path


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def command(*args: str, **given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fedprism", *args], text=True, stderr=subprocess.PIPE, **given)


@pytest.mark.parametrize("form", ["terminal", "markdown", "latex", "csv", "html"])
def test_no_name_of_a_record_brings_a_control_character(hostile: Path, form: str) -> None:
    done = CliRunner().invoke(app, ["show", str(hostile), "--format", form])
    assert done.exit_code == 0
    assert "gone" in done.stdout
    assert harmless(done.stdout)
    assert harmless(done.stderr)


def test_no_name_of_a_record_brings_a_control_character_to_a_page(hostile: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # matplotlib's: no font has these letters
        text = page([read_run(hostile)])
    assert text.count("gone") > (2 if available() else 1)
    assert harmless(text)


def test_errors_messages_and_progress_are_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = CliRunner().invoke(app, ["show", str(tmp_path / f"[/]{EVIL}")])
    assert LEFT in done.stderr
    assert harmless(done.stderr)
    print_message(f"warning: {EVIL}\nsecond line", "yellow")
    with Progress(stderr()) as progress:
        plan = toy_plan(toy_config())
        object.__setattr__(plan, "method", f"[/]{EVIL}")
        progress.begin(plan)
        progress.end("finished")
    shown = capsys.readouterr().err
    assert shown.count(LEFT) == 2
    assert "second line\n" in shown
    assert harmless(shown)


def test_what_a_terminal_is_sent_is_harmless_and_in_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    console = stderr()
    console.file = out
    console.print(Grid(("client", "mean"), ((Entry(f"north{EVIL}"), Entry("1", best=True)),)))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert shown != out.getvalue()
    assert SHOWN in shown
    assert harmless(shown)


FORMULAS = ("=1+1", "+cmd", "-x", "@x", "\t=1", "\r=1", " =1", "-1+cmd")


def test_no_name_becomes_a_formula_in_a_csv(hostile: Path) -> None:
    rows = list(csv.reader(io.StringIO(table([read_run(hostile)]).csv())))
    assert rows[1][0].startswith("'=1+1")
    for name in FORMULAS:
        info = unseal((hostile / "run.json").read_bytes())
        (hostile / "run.json").write_bytes(seal({**info, "method": name}))
        cell = next(csv.reader(io.StringIO(table([read_run(hostile)]).csv().split("\n", 1)[1])))[0]
        assert cell[0] in "'\\"
        assert harmless(cell)


def test_no_name_becomes_a_formula_in_the_csv_of_clients() -> None:
    made = (np.zeros((20, 3, 16, 16), np.uint8), np.arange(20) % 2)
    federation = Federation.from_arrays({"=1+1": made, "-x": made}, name="mine", class_names=("@x", "b"))
    text = clients_csv(Inspection(federation, federation, "classes", "", {}, ""))
    lines = [line.split(",") for line in text.splitlines()]
    assert [line[0] for line in lines[1:]] == ["'=1+1", "'-x"]
    assert all(cell.isdecimal() for line in lines[1:] for cell in line[2:])


def test_a_negative_number_in_a_csv_stays_a_number() -> None:
    assert csv_lines([["-3.5", "+1", "-inf", "x"]]) == "-3.5,+1,-inf,x\n"


def test_a_name_cannot_end_a_row_of_a_markdown_table() -> None:
    grid = Grid(("a\n|b", "n"), ((Entry("c|d\r\n| e |"), Entry("1")),), ("a note\n| x | y |",))
    lines = markdown(grid).splitlines()
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
    assert cells == [3, 3, 3, 0, 0]


# --- code that ends the program ---------------------------------------------------------------------------------------

EXITS = """
import sys
from dataclasses import dataclass
import fedprism as fp

@dataclass(frozen=True)
class Exits(fp.FedAvg):
    def combine(self, server, mean, ctx):
        sys.exit(0)
"""


@pytest.mark.parametrize("where", ["as it is loaded", "in a round"])
def test_somebodys_code_that_ends_the_program_is_no_success(tmp_path: Path, where: str) -> None:
    config = {
        "data": {"name": "digits-skew", "partition": {"name": "domain", "clients": 2}, "samples": 20},
        "model": "mlp",
        "train": {"rounds": 1},
        "run": {"device": "cpu", "engine": "inprocess"},
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(config))
    (tmp_path / "exits.py").write_text(EXITS + "sys.exit(0)\n" * (where == "as it is loaded"))
    run = ["run", str(tmp_path / "tiny.yaml"), "--method", f"{tmp_path / 'exits.py'}:Exits"]
    done = CliRunner().invoke(app, [*run, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: Python code that is not part of fedprism has ended the program by sys.exit()")
    assert done.stderr.count("\n") == 1
    assert f"`fedprism resume {tmp_path / 'run'}` goes on." in done.stderr or where == "as it is loaded"


# --- outputs that cannot be written ----------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("args", [["show", "RUN"], ["show", "RUN", "--format", "csv"], ["list", "methods"], ["--help"]])
def test_a_full_standard_output_is_one_line_and_a_failure(tmp_path: Path, args: list[str]) -> None:
    if "RUN" in args:
        args = [str(toy_run(tmp_path / "run", toy_config(rounds=1))) if arg == "RUN" else arg for arg in args]
    with open("/dev/full", "w") as full:
        done = command(*args, stdout=full)
    assert done.stderr == "error: standard output could not be written: No space left on device.\n"
    assert done.returncode == 1


@POSIX
def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command("show", str(toy_run(tmp_path / "run", toy_config(rounds=1))), stdout=writer)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_message_that_cannot_be_written_keeps_the_exit_code() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "fedprism", "show", "nowhere"], stderr=full)
    assert done.returncode == 2


LONG, NUL = "a" * 5_000, r'"a\0b"'
PATHS = {
    "show": ["show", LONG],
    "resume": ["resume", LONG],
    "run --out": ["run", "--print-config", "--out", LONG, "--method", f"{LONG}.py:X"],
    "inspect": ["data", "inspect", LONG],
    "inspect folder": ["data", "inspect", f"folder:{LONG}"],
    "check": ["check", f"{LONG}.py:X"],
    "bench": ["bench", "--quick", "--out", f"{LONG}.json"],
    "demo": ["demo", "--quick", "--out", LONG],
    "page": ["show", "RUN", "--report", f"{LONG}.html"],
    "a method's NUL": ["run", "--print-config", "--set", r'method.name="a\0b.py:X"'],
    "a folder's NUL": ["data", "inspect", "digits-skew", "--set", r'data.name="folder:a\0b"'],
    "a run's NUL": ["run", "CONFIG", "--set", r'run.out="a\0b"'],
}


@pytest.mark.parametrize("args", PATHS.values(), ids=PATHS.keys())
def test_a_path_that_no_system_has_is_an_error_in_one_line(tmp_path: Path, args: list[str]) -> None:
    config = tmp_path / "some.yaml"
    config.write_text("data: {name: digits-skew}\n", encoding="utf-8")
    there = {"CONFIG": config, "RUN": toy_run(tmp_path / "run") if "RUN" in args else None}
    done = CliRunner().invoke(app, [str(there.get(arg, arg)) for arg in args])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr) < 2_000
    assert done.stderr.count("\n") == 1
    assert harmless(done.stderr)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow beyond a few bytes, as on a disk that is almost full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


SHORT = [
    *("bench", "cnn4-n20-b10", "--quick", "--device", "cpu", "--methods", "fedavg", "--engines", "serial"),
    *("--samples", "2", "--rounds", "1"),
]


@pytest.mark.parametrize("where", ["a file", "a folder of that name", "a full disk"])
def test_bench_refuses_a_place_that_cannot_be_written_before_it_measures(tmp_path: Path, where: str) -> None:
    out = tmp_path / "out"
    if where == "a file":
        out.write_text("mine", encoding="utf-8")
    elif where == "a folder of that name":
        out = out / "some.json"
        (out.parent / "some.md").mkdir(parents=True)
    with full_disk() if where == "a full disk" else nullcontext():
        done = CliRunner().invoke(app, [*SHORT, "--out", str(out)])
    assert done.exit_code == 2
    assert re.search(r"could not be written: .* Choose another --out\.", done.stderr)
    assert "Writes" not in done.stderr  # what is said when measuring begins
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == (["out"] if where == "a file" else [])


@pytest.mark.parametrize("name", ["clients.csv", "bubbles.png", "contact-sheet.png"])
def test_inspect_refuses_a_folder_where_a_file_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(FedprismError, match=r"could not be written: .* Choose another --out\."):
        check_folder(tmp_path)


def test_inspect_refuses_a_full_disk(tmp_path: Path) -> None:
    with full_disk(), pytest.raises(FedprismError, match=r"could not be written: File too large"):
        check_folder(tmp_path / "out")


@POSIX
@pytest.mark.parametrize("what", ["a folder", "a named pipe"])
def test_show_refuses_a_page_that_cannot_be_written_before_it_reads(tmp_path: Path, hostile: Path, what: str) -> None:
    report = tmp_path / "report.html"
    report.mkdir() if what == "a folder" else os.mkfifo(report)
    done = CliRunner().invoke(app, ["show", str(hostile), "--report", str(report)])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert re.search(r"report\.html (could not be written: .* Choose another --report|is a named pipe)", done.stderr)
    assert not report.is_file()
