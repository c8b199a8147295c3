"""Downloads from a real local server that cuts off, changes its mind or lies, and archives that mean harm."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fedprism.data import download
from fedprism.data.archives import half_unpacked, unpack
from fedprism.data.download import Checksums, byte_bar, digest, fetch
from fedprism.errors import DataError
from tests.download_server import DATA, FILES, Server, md5, sha256, tar_of, tree, zip_of

pytestmark = pytest.mark.full

NOISE = random.Random(0).randbytes(9000)  # cannot be compressed


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- fetching ---------------------------------------------------------------------------------------------------------


def test_a_file_arrives_whole_and_alone(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin")
    assert fetch([address], tmp_path / "deep" / "a.bin", checksum=sha256(DATA), size=len(DATA)) == address
    assert (tmp_path / "deep" / "a.bin").read_bytes() == DATA
    assert names(tmp_path / "deep") == {"a.bin"}


def test_cut_off_and_resumed(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin", cuts=[1000, 5000])
    told: list[tuple[int, int | None]] = []
    report = lambda done, total: told.append((done, total))  # noqa: E731
    fetch([address], tmp_path / "a.bin", checksum=md5(DATA), report=report, pause=0)
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert server.ranges() == [None, "bytes=1000-", "bytes=6000-"]
    assert server.seen[1][1]["If-Range"] == '"one"'
    assert told[-1] == (len(DATA), len(DATA))


def test_resumed_by_a_later_process_after_a_kill(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    hold = threading.Event()
    address = server.put("/a.bin", hold=hold)
    code = "import sys; from pathlib import Path; from fedprism.data.download import fetch; "
    code += "fetch([sys.argv[1]], Path(sys.argv[2]))"
    child = subprocess.Popen([sys.executable, "-c", code, address, str(path)])
    part = tmp_path / "a.bin.part"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    hold.set()
    there = part.stat().st_size
    assert 0 < there < len(DATA)
    assert not path.exists()
    fetch([address], path)
    assert path.read_bytes() == DATA
    assert server.ranges() == [None, f"bytes={there}-"]


def test_a_server_that_stalls_is_left_and_asked_for_the_rest(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.5)
    hold = threading.Event()
    fetch([server.put("/a.bin", hold=hold)], tmp_path / "a.bin", pause=0)
    hold.set()
    assert server.ranges() == [None, f"bytes={len(DATA) // 2}-"]
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin", cuts=[1000], ranges=False)
    fetch([address], tmp_path / "a.bin", pause=0)
    assert server.ranges() == [None, "bytes=1000-"]
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_a_file_that_changes_between_tries_is_not_mixed(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin", cuts=[1000])
    with pytest.raises(DataError):
        fetch([address], tmp_path / "a.bin", tries=0)
    assert (tmp_path / "a.bin.part").stat().st_size == 1000
    other = DATA[::-1]
    server.put("/a.bin", other, tag='"two"')
    fetch([address], tmp_path / "a.bin", pause=0)
    assert (tmp_path / "a.bin").read_bytes() == other


def test_a_server_that_resumes_another_file_starts_over(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin", cuts=[1000], tag=None)  # nothing to compare but the size
    with pytest.raises(DataError):
        fetch([address], tmp_path / "a.bin", checksum=md5(DATA + b"more"), tries=0)
    server.put("/a.bin", DATA + b"more", tag=None)
    fetch([address], tmp_path / "a.bin", checksum=md5(DATA + b"more"), pause=0)
    assert server.ranges() == [None, "bytes=1000-", None]
    assert (tmp_path / "a.bin").read_bytes() == DATA + b"more"


def test_without_tag_and_checksum_nothing_is_resumed(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin", cuts=[1000], tag=None)
    fetch([address], tmp_path / "a.bin", pause=0)
    assert server.ranges() == [None, None]
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_a_whole_part_needs_no_request(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin")
    (tmp_path / "a.bin.part").write_bytes(DATA)
    note = {"address": address, "etag": '"one"', "modified": None, "total": len(DATA)}
    (tmp_path / "a.bin.part.json").write_text(json.dumps(note))
    fetch([address], tmp_path / "a.bin", checksum=md5(DATA))
    assert not server.seen
    assert names(tmp_path) == {"a.bin"}


@pytest.mark.parametrize("extra", [b"", b"too much"])
def test_nothing_left_to_send(server: Server, tmp_path: Path, extra: bytes) -> None:
    """416: the part is whole, or belongs to something else."""
    address = server.put("/a.bin")
    (tmp_path / "a.bin.part").write_bytes(DATA + extra)
    note = {"address": address, "etag": '"one"', "modified": None, "total": None}
    (tmp_path / "a.bin.part.json").write_text(json.dumps(note))
    fetch([address], tmp_path / "a.bin", checksum=md5(DATA), pause=0)
    assert server.ranges() == [f"bytes={len(DATA + extra)}-"] + ([None] if extra else [])
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_a_wrong_checksum_is_refused_and_the_good_file_stays(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"good")
    address = server.put("/a.bin")
    with pytest.raises(DataError, match=rf"checksum {md5(DATA)}; expected {md5(b'good')} \(published by X\)"):
        fetch([address], tmp_path / "a.bin", checksum=md5(b"good"), origin="published by X")
    assert (tmp_path / "a.bin").read_bytes() == b"good"
    assert names(tmp_path) == {"a.bin"}
    fetch([address], tmp_path / "a.bin", checksum=sha256(DATA))
    assert server.ranges() == [None, None]  # it starts anew
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_more_than_expected_is_not_stored(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin", says_length=False)
    with pytest.raises(DataError, match="more than the expected 1000 bytes"):
        fetch([address], tmp_path / "a.bin", size=1000)
    server.put("/a.bin")
    with pytest.raises(DataError, match=f"the file has {len(DATA)} bytes there; expected 1000"):
        fetch([address], tmp_path / "a.bin", size=1000)
    server.put("/a.bin", says_length=False)
    with pytest.raises(DataError, match=f"{len(DATA)} bytes arrived; expected {len(DATA) + 1}"):
        fetch([address], tmp_path / "a.bin", size=len(DATA) + 1)
    assert names(tmp_path) == set()


def test_no_such_file_is_not_tried_again_but_the_mirror_is(server: Server, tmp_path: Path) -> None:
    mirror = server.put("/mirror.bin")
    gone = server.address + "/gone.bin"
    with pytest.raises(DataError, match="404") as error:
        fetch([gone], tmp_path / "a.bin")
    assert str(tmp_path / "a.bin") in str(error.value)
    assert len(server.seen) == 1
    assert fetch([gone, mirror], tmp_path / "a.bin") == mirror


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    fetch([server.put("/a.bin", busy=3)], tmp_path / "a.bin", pause=0)
    assert len(server.seen) == 4
    with pytest.raises(DataError, match=r"503 .*\(2 attempts\)"):
        fetch([server.put("/a.bin", busy=9)], tmp_path / "b.bin", pause=0, tries=2)


def test_nobody_listens(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no connection"):
        fetch(["http://127.0.0.1:9/a.bin"], tmp_path / "a.bin", tries=2, pause=0)


def test_where_nothing_can_be_reached_it_gives_up_soon(server: Server, tmp_path: Path) -> None:
    for address in ("http://127.0.0.1:9/a.bin", "http://nowhere.invalid/a.bin"):
        with pytest.raises(DataError, match=r"no connection: .* \(2 attempts\)"):
            fetch([address], tmp_path / "a.bin", pause=0)
    with pytest.raises(DataError, match=r"503 .*\(5 attempts\)"):
        fetch([server.put("/a.bin", busy=9)], tmp_path / "a.bin", pause=0)


def test_a_server_that_never_gets_further_is_given_up(server: Server, tmp_path: Path) -> None:
    address = server.put("/a.bin", cuts=[6000, 3000] * 20, ranges=False)
    with pytest.raises(DataError, match=r"cut off after \d+ of .* \(5 attempts\)"):
        fetch([address], tmp_path / "a.bin", checksum=md5(DATA), pause=0)
    assert len(server.seen) == 6


@pytest.mark.parametrize("summed", [False, True])
def test_a_part_that_is_not_said_to_be_of_the_same_file(server: Server, tmp_path: Path, summed: bool) -> None:
    """Taken only where the checksum tells in the end."""
    address = server.put("/a.bin", cuts=[1000], forgets=True)
    fetch([address], tmp_path / "a.bin", checksum=md5(DATA) if summed else None, pause=0)
    assert server.ranges() == [None, "bytes=1000-"] + ([] if summed else [None])
    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_a_part_that_nobody_asked_for_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(b"of something else")
    with pytest.raises(DataError, match="answered 206"):
        fetch([server.put("/a.bin", status=206)], tmp_path / "a.bin", pause=0)


def test_a_file_that_is_packed_on_the_way_is_refused(server: Server, tmp_path: Path) -> None:
    packed = gzip.compress(DATA)
    address = server.put("/a.bin", packed, headers={"Content-Encoding": "gzip"})
    with pytest.raises(DataError, match=r"packed once more \(gzip\)"):
        fetch([address], tmp_path / "a.bin")
    assert server.seen[0][1]["Accept-Encoding"] == "identity"
    fetch([address], tmp_path / "a.bin", checksum=md5(packed))  # it was the file's own packing


@pytest.mark.parametrize(
    "how",
    [
        {"headers": {"Content-Length": "9" * 5000}},
        {"status": 503, "headers": {"Retry-After": "9" * 5000}},
        {"cuts": [1000], "headers": {"Content-Range": "bytes 1000-2000/" + "9" * 5000}},
        {"to": "http://[bad/x"},
        {"to": "http://127.0.0.1:port/x"},
        {"to": "http://127.0.0.1:1/\xe9 \x7f"},
    ],
)
def test_headers_that_cannot_be_read(server: Server, tmp_path: Path, how: dict[str, object]) -> None:
    """An error that says so, or the file."""
    address = server.put("/a.bin", **how)
    try:
        fetch([address], tmp_path / "a.bin", pause=0, tries=2)
    except DataError as error:
        assert "could not be downloaded" in str(error)  # noqa: PT017
        assert not (tmp_path / "a.bin").exists()
    else:
        assert (tmp_path / "a.bin").read_bytes() == DATA


def test_redirects_are_followed_and_resumed(server: Server, tmp_path: Path) -> None:
    server.put("/real.bin", cuts=[1000])
    fetch([server.put("/a.bin", to="/real.bin")], tmp_path / "a.bin", pause=0)
    assert [path for path, _ in server.seen] == ["/a.bin", "/real.bin"] * 2
    assert server.ranges()[3] == "bytes=1000-"
    assert (tmp_path / "a.bin").read_bytes() == DATA


@pytest.mark.parametrize("to", ["file:///etc/hostname", "ftp://127.0.0.1/a.bin"])
def test_redirects_to_elsewhere_are_refused(server: Server, tmp_path: Path, to: str) -> None:
    with pytest.raises(DataError, match=r"not allowed|not safe"):
        fetch([server.put("/a.bin", to=to)], tmp_path / "a.bin", pause=0)


@pytest.mark.parametrize(
    "address", ["file:///etc/hostname", "ftp://a/b", "a.bin", "http://", "http://a/b c", "http://["]
)
def test_only_web_addresses(tmp_path: Path, address: str) -> None:
    with pytest.raises(DataError, match="not an http or https address"):
        fetch([address], tmp_path / "a.bin")


def test_a_web_page_is_not_the_file(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="web page"):
        fetch([server.put("/a.zip", b"<html>log in</html>", kind="text/html")], tmp_path / "a.zip")
    assert names(tmp_path) == set()


def test_a_misspelt_checksum(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'md5:xyz' is not"):
        fetch(["http://127.0.0.1/a"], tmp_path / "a", checksum="md5:xyz")


def test_an_unusable_folder(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"FEDPRISM_DATA"):
        fetch([server.put("/a.bin")], tmp_path / "file" / "a.bin")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").symlink_to("/dev/full")
    with pytest.raises(DataError, match="No space left on device"):
        fetch([server.put("/a.bin")], tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()


def test_too_little_room_is_said_before(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="are free"):
        download._check_space(tmp_path, 1 << 60, "a.bin")


def test_a_bar_on_terminals_only() -> None:
    quiet, loud = io.StringIO(), io.StringIO()
    for file, terminal in ((quiet, False), (loud, True)):
        with byte_bar("a.bin", Console(file=file, force_terminal=terminal, width=120)) as report:
            report(500, 1000)
            report(800, 1000)
    assert quiet.getvalue() == ""
    assert "a.bin" in loud.getvalue()
    assert "0.8/1.0 kB" in loud.getvalue()


# --- checksums.json ---------------------------------------------------------------------------------------------------


def test_checksums_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(DATA)
    assert digest(tmp_path / "a") == sha256(DATA)
    seen = Checksums(tmp_path)
    seen.record("pacs/a", sha256(DATA), len(DATA), "http://x/a", verified=False)
    assert Checksums(tmp_path).of("pacs/a") == sha256(DATA)
    assert Checksums(tmp_path).files["pacs/a"]["status"] == "unverified"
    assert Checksums(tmp_path).of("pacs/b") is None
    assert names(tmp_path) == {"a", "checksums.json"}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"files": 1}', '{"files": {"a": {"checksum": "x"}}}', '{"files": {"a": {}}}']
)
def test_damaged_checksums_are_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(DataError, match=r"checksums\.json cannot be read"):
        Checksums(tmp_path)


# --- unpacking --------------------------------------------------------------------------------------------------------


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, size
    return info


def sparse(**headers: str) -> tarfile.TarInfo:
    info = entry("a/x")
    info.pax_headers = headers
    return info


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "a.tar": bytes,
    "a.tar.gz": gzip.compress,
    "a.tar.bz2": bz2.compress,
    "a.tar.xz": lzma.compress,
}


@pytest.mark.parametrize("name", [*PACKERS, "a.zip"])
def test_archives_are_unpacked_once(tmp_path: Path, name: str) -> None:
    archive, folder = tmp_path / name, tmp_path / "out"
    archive.write_bytes(zip_of(FILES) if name == "a.zip" else PACKERS[name](tar_of(FILES)))
    assert unpack(archive, folder)
    assert tree(folder) == FILES
    (folder / "top" / "a.txt").write_bytes(b"mine")
    assert not unpack(archive, folder)
    assert (folder / "top" / "a.txt").read_bytes() == b"mine"


def test_what_was_deleted_is_unpacked_again(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of(FILES))
    unpack(tmp_path / "a.zip", tmp_path / "out")
    for gone in ("c.txt", "top/deep/b.txt"):
        (tmp_path / "out" / gone).unlink()
        assert half_unpacked(tmp_path / "a.zip", tmp_path / "out")
        assert unpack(tmp_path / "a.zip", tmp_path / "out")
        assert tree(tmp_path / "out") == FILES


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_only_what_is_wanted(tmp_path: Path, kind: str) -> None:
    files = {**FILES, "top/.hidden": b"x", "__MACOSX/top/._a.txt": b"x"}
    (tmp_path / "a").write_bytes(tar_of(files) if kind == "tar" else zip_of(files))
    unpack(tmp_path / "a", tmp_path / "out")
    assert tree(tmp_path / "out") == FILES
    unpack(tmp_path / "a", tmp_path / "some", keep=["*/deep/*"])
    assert tree(tmp_path / "some") == {"top/deep/b.txt": FILES["top/deep/b.txt"]}


HOSTILE: dict[str, tuple[bytes, str]] = {
    "tar-dots": (tar_of({"ok": b"", "../x": b"x"}), "leaves the folder"),
    "tar-hidden-dots": (tar_of({"a/../../x": b"x"}), "leaves the folder"),
    "tar-absolute": (tar_of({"/tmp/x": b"x"}), "is absolute"),
    "tar-drive": (tar_of({"C:/x": b"x"}), "is absolute"),
    "tar-backslash": (tar_of({"..\\x": b"x"}), "backslash"),
    "tar-symlink": (tar_of({}, entry("l", tarfile.SYMTYPE, "/etc"), entry("l/x")), "link to '/etc'"),
    "tar-symlink-up": (tar_of({}, entry("l", tarfile.SYMTYPE, "../..")), "link to"),
    "tar-hardlink": (tar_of({}, entry("l", tarfile.LNKTYPE, "../../x")), "link to"),
    "tar-device": (tar_of({}, entry("null", tarfile.CHRTYPE)), "device or pipe"),
    "tar-pipe": (tar_of({}, entry("pipe", tarfile.FIFOTYPE)), "device or pipe"),
    "tar-case": (tar_of({"top/a": b"", "Top/b": b""}), "differs only by case from 'top'"),
    "tar-twice": (tar_of({"a": b"1"}, entry("a")), "is there twice"),
    "tar-file-and-folder": (tar_of({"a": b"1", "a/b": b""}), "is a file and a folder"),
    "tar-bomb": (gzip.compress(tar_of({}, entry("big", size=3_000_000))), "more than 1000000 bytes"),
    "tar-many": (tar_of({f"f{i}": b"" for i in range(30)}), "more than 20 files"),
    "tar-header": (entry("x", tarfile.XHDTYPE, size=80 << 20).tobuf() + bytes(2048), "damaged: a header of"),
    "zip-dots": (zip_of({"ok": b"", "../x": b"x"}), "leaves the folder"),
    "zip-absolute": (zip_of({"/tmp/x": b"x"}), "is absolute"),
    "zip-backslash": (zip_of({"..\\x": b"x"}), "backslash"),
    "zip-symlink": (zip_of({"l": b"/etc"}, {"l": 0o120777}), "is a link"),
    "zip-device": (zip_of({"d": b""}, {"d": 0o020644}), "device or pipe"),
    "zip-case": (zip_of({"A.txt": b"", "a.TXT": b""}), "differs only by case"),
    "zip-bomb": (zip_of({"big": bytes(3_000_000)}), "more than 1000000 bytes"),
    "zip-many": (zip_of({f"f{i}": b"" for i in range(30)}), "more than 20 files"),
    "page": (b"<!DOCTYPE html><html></html>", "web page"),
    "empty": (b"", "neither a tar nor a zip"),
    "gz-cut": (gzip.compress(tar_of({"a": NOISE}))[:5000], "damaged"),
    "bz2-broken": (b"BZh9" + bytes(100), "damaged"),
    "zip-cut": (zip_of({"a": NOISE})[:5000], "damaged"),
    "zip-changed": (flipped(zip_of({"a": NOISE}), 4000), "damaged"),
    "zip-letters": (zip_of({"a/é": b"1"}).replace("é".encode(), b"\xff\xfe"), "damaged"),
    "tar-sparse": (tar_of({}, sparse(**{"GNU.sparse.size": "abc", "GNU.sparse.map": "q,w"})), "damaged"),
    "tar-sparse-1.0": (tar_of({}, sparse(**{"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})), "damaged"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_and_damaged_archives_leave_nothing(tmp_path: Path, case: str) -> None:
    data, why = HOSTILE[case]
    home = tmp_path / "a" / "b" / "c"
    home.mkdir(parents=True)
    (tmp_path / "archive").write_bytes(data)
    with pytest.raises(DataError, match=why):
        unpack(tmp_path / "archive", home, max_bytes=1_000_000, max_files=20)
    assert tree(tmp_path) == {"archive": data}
    assert names(home) == set()


def test_interrupted_unpacking_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(FILES))
    calls = []

    def report(done: int, total: int | None) -> None:
        calls.append(done)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(tmp_path / "a.tar", tmp_path / "out", report=report)
    assert names(tmp_path / "out") == set()
    killed = tmp_path / "out" / ".unpacking-a.tar"  # what a killed process leaves
    killed.mkdir()
    (killed / "junk").write_text("half")
    unpack(tmp_path / "a.tar", tmp_path / "out")
    assert tree(tmp_path / "out") == FILES
    assert not killed.exists()


def test_a_kill_while_moving_is_repaired(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(FILES))
    out = tmp_path / "out"
    unpack(tmp_path / "a.tar", out)
    assert not half_unpacked(tmp_path / "a.tar", out)
    marker = out / ".a.tar.unpacked.json"
    marker.write_text(marker.read_text().replace("true", "false"))
    (out / "c.txt").unlink()
    assert half_unpacked(tmp_path / "a.tar", out)
    assert unpack(tmp_path / "a.tar", out)
    assert tree(out) == FILES
    assert names(out) == {"top", "c.txt", ".a.tar.unpacked.json"}


def test_what_was_there_before_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(FILES))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "c.txt").write_text("mine")
    with pytest.raises(DataError, match="in the way"):
        unpack(tmp_path / "a.tar", tmp_path / "out")
    assert tree(tmp_path / "out") == {"c.txt": b"mine"}


def test_unpacking_into_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of(FILES))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="could not be unpacked"):
        unpack(tmp_path / "a.tar", tmp_path / "file" / "out")
