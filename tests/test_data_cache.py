"""Converted once, mapped afterwards: whatever happens in between, a cache is whole or not there."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedprism.config import DataConfig
from fedprism.data.cache import Arrays, ArrayWriter, converted
from fedprism.data.places import cache_home, root_of
from fedprism.errors import ConfigError, DataError

N = 50


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "numbers.bin"
    path.parent.mkdir()
    path.write_bytes(bytes(range(N)))
    return path


class Counting:
    """A conversion that counts how often it is called."""

    def __init__(self, source: Path, side: int = 4) -> None:
        self.source, self.side, self.calls = source, side, 0

    def __call__(self, writer: ArrayWriter) -> None:
        self.calls += 1
        values = np.frombuffer(self.source.read_bytes(), dtype=np.uint8)
        inputs = writer.inputs((len(values), 3, self.side, self.side))
        with writer.progress(len(values)) as step:
            for i, value in enumerate(values):
                inputs[i] = value
                step()
        writer.columns["labels"] = values % 10
        writer.columns["is_test"] = values > 40
        writer.facts["words"] = ["a", "b"]

    def load(self, version: int = 1, **settings: Any) -> Arrays:
        return converted("numbers", version, [self.source], {"side": self.side, **settings}, self)


def folder_of(home: Path) -> Path:
    """The one cache that there is."""
    (found,) = (path for path in (home / "arrays").iterdir() if not path.name.startswith("."))
    return found


def in_child(work: Callable[[], None]) -> int:
    """What a process of its own ends with: 0, or minus the number of a signal."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def test_the_second_time_nothing_is_converted(source: Path) -> None:
    convert = Counting(source)
    first, second = convert.load(), convert.load()
    assert convert.calls == 1
    for arrays in (first, second):
        assert arrays.inputs.dtype == torch.uint8
        assert arrays.inputs.shape == (N, 3, 4, 4)
        assert torch.equal(arrays.inputs[:, 2, 3, 1], torch.arange(N, dtype=torch.uint8))
        assert torch.equal(arrays.columns["labels"], torch.arange(N) % 10)
        assert arrays.columns["is_test"].dtype == torch.bool
        assert int(arrays.columns["is_test"].sum()) == 9
        assert arrays.facts == {"words": ["a", "b"]}


def test_other_kinds_of_inputs(source: Path) -> None:
    def convert(writer: ArrayWriter) -> None:
        writer.inputs((3, 7), np.int32)[:] = np.arange(21).reshape(3, 7) + 100_000

    arrays = converted("texts", 1, [source], {}, convert)
    assert arrays.inputs.dtype == torch.int32
    assert arrays.inputs.tolist() == (torch.arange(21).view(3, 7) + 100_000).tolist()
    assert arrays.columns == {}


def test_writing_to_what_was_loaded_changes_nothing_on_the_disk(source: Path) -> None:
    convert = Counting(source)
    convert.load().inputs.zero_()
    assert int(convert.load().inputs.max()) == N - 1
    assert convert.calls == 1


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell what is mapped")
def test_nothing_of_the_images_is_read_before_it_is_used(source: Path, home: Path) -> None:
    convert = Counting(source, side=200)  # 6 MB

    def resident() -> int:
        """kB of the images that are in this process's memory."""
        lines = Path("/proc/self/smaps").read_text().splitlines()
        where = [i for i, line in enumerate(lines) if str(folder_of(home)) in line]
        return sum(int(next(line for line in lines[i:] if line.startswith("Rss:")).split()[1]) for i in where)

    convert.load()
    arrays = convert.load()
    assert resident() < 500
    assert int(arrays.inputs.sum()) == sum(range(N)) * 3 * 200 * 200
    assert resident() >= N * 3 * 200 * 200 // 1024


def test_a_changed_source_setting_or_version_converts_again(source: Path) -> None:
    convert = Counting(source)
    convert.load()
    source.write_bytes(bytes(range(1, N + 1)))
    os.utime(source, ns=(0, source.stat().st_mtime_ns + 1))  # the clock may be coarse
    assert int(convert.load().inputs[0, 0, 0, 0]) == 1
    convert.load(version=2)
    convert.load(colour="red")
    assert convert.calls == 4
    convert.load()
    assert convert.calls == 4


def test_data_may_be_moved_but_not_rearranged(tmp_path: Path) -> None:
    calls = []

    def load(root: Path) -> Arrays:
        def convert(writer: ArrayWriter) -> None:
            calls.append(root)
            writer.inputs((1, 1))

        return converted("folders", 1, sorted(path for path in root.rglob("*") if path.is_file()), {}, convert)

    for name in ("a/1.png", "b/2.png"):
        (tmp_path / "here" / name).parent.mkdir(parents=True)
        (tmp_path / "here" / name).write_text(name)
    load(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    load(tmp_path / "there")
    assert len(calls) == 1
    (tmp_path / "there" / "a" / "1.png").rename(tmp_path / "there" / "b" / "1.png")
    (tmp_path / "there" / "c").mkdir()
    (tmp_path / "there" / "b" / "2.png").rename(tmp_path / "there" / "c" / "2.png")
    load(tmp_path / "there")
    assert len(calls) == 2


def test_without_sources_settings_alone_decide() -> None:
    calls = []

    def load(seed: int) -> None:
        def convert(writer: ArrayWriter) -> None:
            calls.append(seed)
            writer.inputs((1, 1))[:] = seed

        converted("drawn", 1, [], {"seed": seed}, convert)

    for seed in (3, 4, 3):
        load(seed)
    assert calls == [3, 4]


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"numbers\.bin cannot be read: No such file"):
        Counting(tmp_path / "numbers.bin").load()


def test_killed_in_the_middle_leaves_no_half_cache(source: Path, home: Path) -> None:
    def killed(writer: ArrayWriter) -> None:
        writer.inputs((N, 3, 4, 4))[:20] = 7
        os.kill(os.getpid(), signal.SIGKILL)

    ended = in_child(lambda: converted("numbers", 1, [source], {"side": 4}, killed) and None)
    assert ended == -signal.SIGKILL
    left = sorted(path.name for path in (home / "arrays").iterdir())
    assert all(name.startswith(".") for name in left)
    assert any(name.endswith(".partial") for name in left), "it was killed too early to show anything"
    convert = Counting(source)
    assert int(convert.load().inputs[:20, 0, 0, 0].sum()) == sum(range(20))
    assert convert.calls == 1
    assert not any(path.name.endswith(".partial") for path in (home / "arrays").iterdir())


def test_killed_at_any_operation_on_a_file_a_cache_is_whole_or_not_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []
    for kill_at in itertools.count(1):
        monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / f"cache-{kill_at}"))

        def work(kill_at: int = kill_at) -> None:
            count = 0

            def hook(event: str, _: tuple[Any, ...]) -> None:
                nonlocal count
                if event.startswith(("os.", "shutil.", "fcntl.")) or event == "open":
                    count += 1
                    if count == kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)  # for good: only for a process that ends after it
            Counting(source).load()
            os._exit(0)

        if in_child(work) == 0:
            break
        convert = Counting(source)
        assert int(convert.load().inputs[:, 1, 1, 1].sum()) == sum(range(N))
        whole.append(convert.calls == 0)
    assert whole.count(False) > 10
    assert whole == sorted(whole), "once whole, it stays so"
    assert whole[-1]


def test_two_processes_at_once_convert_once(source: Path, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    def wait_for(path: Path) -> None:
        end = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)

    def load(name: str) -> None:
        def convert(writer: ArrayWriter) -> None:
            with log.open("a") as file:
                file.write(f"{name}\n")
            (tmp_path / f"{name}-converts").touch()
            wait_for(go)
            Counting(source)(writer)

        (tmp_path / f"{name}-loads").touch()
        arrays = converted("numbers", 1, [source], {"side": 4}, convert)
        assert int(arrays.inputs[:, 0, 0, 0].sum()) == sum(range(N))

    fork = multiprocessing.get_context("fork")
    first, second = (fork.Process(target=load, args=(name,)) for name in ("first", "second"))
    first.start()
    wait_for(tmp_path / "first-converts")
    second.start()
    wait_for(tmp_path / "second-loads")
    time.sleep(0.3)  # enough for the second to begin, were it not kept from it
    go.touch()
    for process in (first, second):
        process.join(60)
        assert process.exitcode == 0
    assert log.read_text() == "first\n"


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("inputs.npy", shorten),
        ("inputs.npy", Path.unlink),
        ("columns.npz", flip),
        ("columns.npz", shorten),
        ("columns.npz", Path.unlink),
        ("facts.json", shorten),
        ("facts.json", lambda path: path.write_text("[]")),
        ("facts.json", lambda path: path.write_text(json.dumps({"facts": {}}))),
        ("facts.json", Path.unlink),
        ("", shutil.rmtree),
    ],
)
def test_a_damaged_cache_is_made_again(source: Path, home: Path, name: str, damage: Callable[[Path], Any]) -> None:
    convert = Counting(source)
    convert.load()
    damage(folder_of(home) / name)
    assert int(convert.load().inputs[:, 0, 0, 0].sum()) == sum(range(N))
    assert convert.calls == 2
    convert.load()
    assert convert.calls == 2


def test_an_error_while_converting_is_the_readers_own_and_leaves_nothing(source: Path, home: Path) -> None:
    def fails(writer: ArrayWriter) -> None:
        writer.inputs((N, 1))
        raise DataError("numbers.bin: it is damaged.")

    with pytest.raises(DataError, match=r"^numbers\.bin: it is damaged"):
        converted("numbers", 1, [source], {"side": 4}, fails)
    assert [path.name for path in (home / "arrays").iterdir() if not path.name.endswith(".lock")] == []


def test_room_on_the_disk_is_taken_at_once(source: Path) -> None:
    """A mapped file without it would end the process by a signal once the disk is full."""

    def convert(writer: ArrayWriter) -> None:
        taken.append(os.stat(str(writer.inputs((1000, 1000)).filename)).st_blocks * 512)

    taken: list[int] = []
    converted("numbers", 1, [source], {}, convert)
    assert taken[0] >= 1_000_000


def test_a_conversion_that_forgets_something_is_told(source: Path, home: Path) -> None:
    def load(convert: Callable[[ArrayWriter], None]) -> None:
        converted("numbers", 1, [source], {}, convert)

    def short(writer: ArrayWriter) -> None:
        writer.inputs((3, 1))
        writer.columns["labels"] = np.zeros(2, dtype=np.int64)

    with pytest.raises(ValueError, match="has made no inputs"):
        load(lambda writer: None)
    with pytest.raises(ValueError, match=r"column 'labels' of 'numbers' has shape \(2,\); expected \(3,\)"):
        load(short)
    with pytest.raises(ValueError, match="with sizes of 1 or more"):
        load(lambda writer: writer.inputs((0, 3)) and None)


def test_a_cache_that_is_there_needs_no_writing(source: Path, home: Path) -> None:
    """So it may lie on a read-only disk."""
    convert = Counting(source)
    convert.load()
    for path in (home / "arrays").glob(".*"):
        path.unlink()
    before = sorted(home.rglob("*"))
    convert.load()
    assert convert.calls == 1
    assert sorted(home.rglob("*")) == before


def test_a_cache_that_cannot_be_written_is_refused(source: Path, home: Path) -> None:
    home.write_text("a file where the folder would be")
    with pytest.raises(DataError, match=r"cannot be written: .*set FEDPRISM_CACHE to another folder") as refused:
        Counting(source).load()
    assert str(home) in str(refused.value)


def test_a_full_disk_is_refused_before_anything_is_written(source: Path, home: Path) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(DataError, match="Make room or allow writing there, or set FEDPRISM_CACHE"):
            Counting(source, side=200).load()

    assert in_child(work) == 0
    assert [path.name for path in (home / "arrays").iterdir() if not path.name.endswith(".lock")] == []


def test_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_home() == tmp_path / "cache"
    monkeypatch.setenv("FEDPRISM_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert cache_home() == Path("/var/caches/fedprism")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the standard says to ignore
    assert cache_home() == Path("/home/someone/.cache/fedprism")
    monkeypatch.delenv("FEDPRISM_DATA", raising=False)
    assert root_of(DataConfig()) == Path("/home/someone/.cache/fedprism/data")
    monkeypatch.setenv("FEDPRISM_DATA", "~/benchmarks")
    assert root_of(DataConfig()) == Path("/home/someone/benchmarks")
    assert root_of(DataConfig(root="own")) == Path("own")


@pytest.mark.parametrize("given", ["~nobody-has-this-name/data", "/" + "long" * 100, "/deep" * 2000, "a\0b"])
def test_places_that_cannot_be(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: .*Set data\.root or \$FEDPRISM_DATA to another"):
        root_of(DataConfig(root=given))
    if "\0" not in given:
        monkeypatch.setenv("FEDPRISM_CACHE", given)
        with pytest.raises(ConfigError, match=r"cannot be used: .*Set \$FEDPRISM_CACHE to another"):
            cache_home()


def test_a_damaged_header_is_made_again(source: Path, home: Path) -> None:
    """Whatever stands in it: numpy hands it to Python's own parser."""
    convert = Counting(source)
    convert.load()
    path = folder_of(home) / "inputs.npy"
    content = path.read_bytes()
    for place, header in enumerate(
        (b"{'descr':(((", b"(" * 100, b"{'descr': '|u1', 'shape': (99999999999999,), 'f", b"\0")
    ):
        path.write_bytes(content[:10] + header + content[10 + len(header) :])
        assert torch.equal(convert.load().inputs[:, 0, 0, 0], torch.arange(N, dtype=torch.uint8))
        assert convert.calls == 2 + place
