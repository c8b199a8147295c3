"""The table of published datasets, and `prepare` against a local server."""

from __future__ import annotations

import ast
import io
import json
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from filelock import FileLock
from rich.console import Console

from fedprism.config import DataConfig
from fedprism.data import DATASETS, load, sources
from fedprism.data.archives import unpack
from fedprism.data.download import CHECKSUM
from fedprism.data.sources import NAMES, PACKED, SOURCES, Source, SourceFile, is_there, missing, prepare, sources_of
from fedprism.errors import DataError
from tests.download_server import DATA, FILES, Server, md5, sha256, tar_of, tree, zip_of

FILES_OF = [(source.name, file) for source in SOURCES.values() for file in source.files]


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_says_its_terms(name: str) -> None:
    source = SOURCES[name]
    assert source.name == source.folder == name
    assert source.licence.endswith(".")
    assert source.cite.endswith(".")
    assert source.title
    assert source.files
    assert len({file.name for file in source.files}) == len(source.files)


@pytest.mark.parametrize(("name", "file"), FILES_OF, ids=[f"{name}/{file.name}" for name, file in FILES_OF])
def test_every_file_is_well_formed(name: str, file: SourceFile) -> None:
    for address in (file.address, *file.mirrors):
        assert urlsplit(address).scheme in ("http", "https")
        assert urlsplit(address).hostname
    assert bool(file.checksum) == bool(file.checksum_from)
    if file.checksum:
        assert CHECKSUM.fullmatch(file.checksum)
    else:
        assert file.address_from  # somebody published it, at least
    assert file.size is None or file.size > 0
    assert Path(file.name).name == file.name
    if file.by_hand:
        assert "by hand" in SOURCES[name].note
    else:
        assert "drive.google.com" not in file.address
    if file.unpack:
        assert file.gives  # not the archive itself
    if file.keep:
        assert file.unpack


def test_all_published_datasets_are_there() -> None:
    parts = {"mnist", "mnist-m", "svhn", "usps", "synth-digits"}
    others = {"office-caltech-10", "domainnet-10", "cifar10", "cifar100", "tiny-imagenet", "pacs", "agnews"}
    assert set(SOURCES) == parts | others
    assert {source.name for source in sources_of("digits-five")} == parts
    assert set(NAMES) == parts | others | {"digits-five", "cifar100-super"}
    assert len(SOURCES["domainnet-10"].files) == 18


def test_no_two_checksums_agree() -> None:
    """A copied line would verify nothing."""
    given = [file.checksum for _, file in FILES_OF if file.checksum]
    assert len(set(given)) == len(given)


def test_the_table_needs_no_torch() -> None:
    for name in ("sources.py", "download.py", "archives.py"):
        text = (Path(sources.__file__).parent / name).read_text(encoding="utf-8")
        found = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
        own = {module for module in found if module and module.startswith("fedprism")}
        parts = {f"fedprism.{name}" for name in ("data.archives", "data.download", "errors", "files")}
        assert own <= {"fedprism", *parts}  # atomic
        assert "torch" not in found


# --- missing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_missing_names_every_file_and_the_command(name: str, tmp_path: Path) -> None:
    text = str(missing(name, tmp_path, "It is missing."))
    for source in sources_of(name):
        for ways in source.expects:
            assert f"  {tmp_path / source.name / ways[0]}\n" in text
        for file in source.files:
            assert file.address in text
    assert f"`fedprism data prepare {name}`" in text
    assert "It is missing." in text
    assert "data.root" in text
    assert "$FEDPRISM_DATA" in text
    assert not is_there(name, tmp_path)


def test_missing_names_only_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "usps").mkdir()
    (tmp_path / "usps" / "usps.bz2").write_bytes(b"")
    text = str(missing("usps", tmp_path))
    assert "usps.t.bz2" in text
    assert "usps.bz2" not in text
    (tmp_path / "usps" / "usps.t.bz2").write_bytes(b"")
    assert is_there("usps", tmp_path)
    text = str(missing("usps", tmp_path))  # the reader knows better
    assert "usps/usps.bz2" in text
    assert f"move {tmp_path / 'usps'} away" in text


def test_other_forms_count_as_well(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / "cifar100" / "cifar-100-python").mkdir(parents=True, exist_ok=True)
        (tmp_path / "cifar100" / "cifar-100-python" / name).write_bytes(b"")
    assert is_there("cifar100-super", tmp_path)
    for domain in ("amazon", "caltech10", "dslr", "webcam"):
        (tmp_path / "office-caltech-10" / "images" / domain).mkdir(parents=True)
    assert is_there("office-caltech-10", tmp_path)


def test_unknown_and_generated_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'cifar10'"):
        prepare("cifar11", tmp_path)
    with pytest.raises(DataError, match="Generated datasets need no files"):
        prepare("synthetic", tmp_path)


# --- prepare ----------------------------------------------------------------------------------------------------------


def put(monkeypatch: pytest.MonkeyPatch, name: str, *files: SourceFile, note: str = "") -> None:
    """Replace a source by one with these files."""
    monkeypatch.setitem(SOURCES, name, Source(name, f"{name}: a test", files, "Only for tests.", "Nobody, 2000.", note))


def run(name: str, root: Path) -> str:
    out = io.StringIO()
    prepare(name, root, Console(file=out, width=200))
    return out.getvalue()


def test_prepare_end_to_end(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = zip_of(FILES)
    put(
        monkeypatch,
        "mnist",
        SourceFile("plain.bin", server.put("/plain.bin"), sha256(DATA), len(DATA), "a list"),
        SourceFile(
            "a.zip",
            server.put("/a.zip", packed),
            md5(packed),
            None,
            "a list",
            unpack=True,
            gives=(("top",), ("c.txt",)),
        ),
    )
    text = run("mnist", tmp_path / "root")
    assert text.index("Only for tests.") < text.index("Nobody, 2000.") < text.index("plain.bin: downloading")
    assert "plain.bin: verified, " + sha256(DATA) + " (a list)" in text
    assert "a.zip: unpacked" in text
    there = {"plain.bin": DATA, "a.zip": packed, **FILES}
    assert tree(tmp_path / "root" / "mnist") == there
    assert is_there("mnist", tmp_path / "root")
    record = json.loads((tmp_path / "root" / "checksums.json").read_text())["files"]
    assert {key: value["status"] for key, value in record.items()} == dict.fromkeys(
        ["mnist/plain.bin", "mnist/a.zip"], "verified"
    )
    asked = len(server.seen)
    again = run("mnist", tmp_path / "root")
    assert "all files are there already" in again
    assert "downloading" not in again
    (tmp_path / "root" / "mnist" / "a.zip").unlink()  # an unpacked archive is not missed
    assert "all files are there already" in run("mnist", tmp_path / "root")
    assert len(server.seen) == asked
    assert tree(tmp_path / "root" / "mnist") == {key: value for key, value in there.items() if key != "a.zip"}


def test_a_dataset_of_several_sources(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in sources_of("digits-five"):
        data = source.name.encode()
        put(
            monkeypatch, source.name, SourceFile("x", server.put(f"/{source.name}", data), sha256(data), None, "a list")
        )
    run("digits-five", tmp_path)
    for source in sources_of("digits-five"):
        assert (tmp_path / source.name / "x").read_bytes() == source.name.encode()


def test_unverified_is_recorded_and_then_must_agree(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, "pacs", SourceFile("x", server.put("/x"), address_from="a page"))
    text = run("pacs", tmp_path)
    assert "x: unverified, as no checksum is published; recorded in" in text
    record = json.loads((tmp_path / "checksums.json").read_text())["files"]["pacs/x"]
    assert record == {
        "checksum": sha256(DATA),
        "size": len(DATA),
        "address": server.address + "/x",
        "status": "unverified",
    }
    (tmp_path / "pacs" / "x").unlink()
    assert "the same as at the first download" in run("pacs", tmp_path)
    (tmp_path / "pacs" / "x").unlink()
    server.put("/x", b"something else")
    with pytest.raises(DataError, match="recorded at the first download") as error:
        run("pacs", tmp_path)
    assert sha256(DATA) in str(error.value)
    assert sha256(b"something else") in str(error.value)
    assert not (tmp_path / "pacs" / "x").exists()


def test_a_wrong_checksum_stops_before_unpacking(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.put("/a.tar", tar_of(FILES))
    put(monkeypatch, "mnist", SourceFile("a.tar", address, md5(DATA), None, "a list", unpack=True, gives=(("top",),)))
    with pytest.raises(DataError, match=r"published by a list"):
        run("mnist", tmp_path)
    assert tree(tmp_path / "mnist") == {}


def test_a_damaged_unverified_archive_is_not_held_on_to(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tar_of(FILES)
    file = SourceFile("a.tar", server.put("/a", whole[:600]), address_from="a page", unpack=True, gives=(("top",),))
    put(monkeypatch, "pacs", file)
    with pytest.raises(DataError, match="damaged"):
        run("pacs", tmp_path)
    assert tree(tmp_path / "pacs") == {}  # nobody else would remove it
    server.put("/a", whole)
    assert "a.tar: unpacked" in run("pacs", tmp_path)
    assert is_there("pacs", tmp_path)


def test_what_was_recorded_before_is_held_on_to(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the archive cannot be unpacked, or turns out to be another."""
    file = SourceFile("a.tar", server.put("/a", tar_of(FILES)), address_from="a page", unpack=True, gives=(("top",),))
    put(monkeypatch, "pacs", file)
    run("pacs", tmp_path)
    before = (tmp_path / "checksums.json").read_text()
    shutil.rmtree(tmp_path / "pacs" / "top")
    (tmp_path / "pacs" / ".a.tar.unpacked.json").unlink()
    with pytest.raises(DataError, match=r"c\.txt is in the way"):
        run("pacs", tmp_path)
    assert (tmp_path / "checksums.json").read_text() == before
    (tmp_path / "pacs" / "a.tar").write_bytes(b"another")
    with pytest.raises(DataError, match="is not the published file"):
        run("pacs", tmp_path)
    assert (tmp_path / "checksums.json").read_text() == before


def test_a_damaged_archive_that_was_put_there_is_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(
        monkeypatch,
        "pacs",
        SourceFile("a.tar", "http://127.0.0.1:9/", address_from="x", unpack=True, gives=(("top",),)),
    )
    (tmp_path / "pacs").mkdir()
    (tmp_path / "pacs" / "a.tar").write_bytes(tar_of(FILES)[:600])
    with pytest.raises(DataError, match=r"damaged: .* Remove it first\."):
        run("pacs", tmp_path)
    assert (tmp_path / "pacs" / "a.tar").exists()
    (tmp_path / "pacs" / "a.tar").write_bytes(tar_of(FILES))
    assert "a.tar: unpacked" in run("pacs", tmp_path)


def test_files_put_there_by_hand_are_checked_once(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, "mnist", SourceFile("x", server.put("/x"), sha256(DATA), None, "a list"))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "x").write_bytes(b"not it")
    with pytest.raises(DataError, match="is not the published file"):
        run("mnist", tmp_path)
    assert (tmp_path / "mnist" / "x").read_bytes() == b"not it"
    (tmp_path / "mnist" / "x").write_bytes(DATA)
    assert "x: verified" in run("mnist", tmp_path)
    assert "all files are there already" in run("mnist", tmp_path)
    assert not server.seen


def test_what_must_be_fetched_by_hand(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "https://example.org/page"
    by_hand = SourceFile("a.zip", page, address_from="x", unpack=True, gives=(("c.txt",),), by_hand=True)
    put(monkeypatch, "mnist", SourceFile("x", server.put("/x"), sha256(DATA), None, "a list"), by_hand)
    with pytest.raises(DataError, match="by hand") as error:
        run("mnist", tmp_path)
    assert page in str(error.value)
    assert f"save it as {tmp_path / 'mnist' / 'a.zip'}" in str(error.value)
    assert (tmp_path / "mnist" / "x").exists()  # the rest was done
    (tmp_path / "mnist" / "a.zip").write_bytes(zip_of(FILES))
    assert "a.zip: unpacked" in run("mnist", tmp_path)
    assert is_there("mnist", tmp_path)


def test_an_archive_with_another_layout_is_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tar_of({"other/a": b"1"})
    put(
        monkeypatch,
        "mnist",
        SourceFile("a.tar", server.put("/a", data), md5(data), None, "x", unpack=True, gives=(("top",),)),
    )
    for _ in range(2):
        with pytest.raises(DataError, match="but top is not in"):
            run("mnist", tmp_path)


def test_what_was_deleted_is_unpacked_again(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tar_of(FILES)
    file = SourceFile("a.tar", server.put("/a", data), md5(data), None, "x", unpack=True, gives=(("top",),))
    put(monkeypatch, "mnist", file)
    run("mnist", tmp_path)
    shutil.rmtree(tmp_path / "mnist" / "top" / "deep")
    assert "already" not in run("mnist", tmp_path)
    assert tree(tmp_path / "mnist") == {"a.tar": data, **FILES}
    assert len(server.seen) == 1


def test_what_a_kill_leaves_is_neither_read_nor_kept(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tar_of(FILES)
    gives = (("a.txt", "*/a.txt"), ("c.txt", "*/c.txt"))
    put(
        monkeypatch,
        "mnist",
        SourceFile("a.tar", server.put("/a", data), md5(data), None, "x", unpack=True, gives=gives),
    )
    half = tmp_path / "mnist" / ".unpacking-a.tar"
    half.mkdir(parents=True)
    for name in ("a.txt", "c.txt"):
        (half / name).write_bytes(b"half")
    assert not is_there("mnist", tmp_path)
    assert "a.tar: unpacked" in run("mnist", tmp_path)
    assert not half.exists()
    half.mkdir()
    run("mnist", tmp_path)  # all is there
    assert not half.exists()
    assert tree(tmp_path / "mnist") == {"a.tar": data, **FILES}


def test_a_compact_form_needs_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "agnews", SourceFile("train.csv", "http://127.0.0.1:9/", address_from="x"))
    (tmp_path / "agnews_train.csv.gz").write_bytes(b"")
    assert not is_there("agnews", tmp_path)
    with pytest.raises(DataError, match="could not be downloaded"):
        run("agnews", tmp_path)
    (tmp_path / "agnews_test.csv.gz").write_bytes(b"")
    assert is_there("agnews", tmp_path)
    text = run("agnews", tmp_path)
    assert "the compact form is there, so nothing is downloaded" in text
    assert str(tmp_path / "agnews_test.csv.gz") in text
    for name, files in PACKED.items():
        for file in files:
            (tmp_path / file).write_bytes(b"")
        assert is_there(name, tmp_path)
    text = str(missing("digits-five", tmp_path))  # of five only one is missing
    assert "synth_train_32x32.mat" in text
    assert "mnist" not in text


def test_without_a_network_all_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "fetch", partial(sources.fetch, pause=0))
    files = [
        SourceFile(name, f"http://127.0.0.1:9/{name}", sha256(DATA), None, "a list") for name in ("one", "two", "three")
    ]
    put(monkeypatch, "mnist", *files)
    with pytest.raises(DataError, match="no connection") as error:
        run("mnist", tmp_path)
    for file in files:
        assert str(tmp_path / "mnist" / file.name) in str(error.value)
        assert file.address in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_paths_that_become_too_long_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everything else that the system refuses to look at."""
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / "cache"))
    limit = os.pathconf("/", "PC_PATH_MAX")
    root = "/" + "nothing/" * (limit // 8 - 1)
    root += "x" * (limit - 2 - len(root))
    for use in (is_there, prepare, missing):
        with pytest.raises(DataError, match=r"cannot be (read|used): File name too long"):
            use(name, Path(root))
    if name in DATASETS:
        with pytest.raises(DataError, match="cannot be read: File name too long"):
            load(DataConfig(name=name, root=root), 0)


def test_an_interrupted_move_is_repaired(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tar_of(FILES)
    put(
        monkeypatch,
        "mnist",
        SourceFile("a.tar", server.put("/a", data), md5(data), None, "x", unpack=True, gives=(("top",),)),
    )
    run("mnist", tmp_path)
    marker = tmp_path / "mnist" / ".a.tar.unpacked.json"
    marker.write_text(marker.read_text().replace("true", "false"))
    (tmp_path / "mnist" / "c.txt").unlink()
    assert "a.tar: unpacked" in run("mnist", tmp_path)
    assert tree(tmp_path / "mnist") == {"a.tar": data, **FILES}


def test_two_at_once_take_turns(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, "mnist", SourceFile("x", server.put("/x"), sha256(DATA), None, "a list"))
    out = io.StringIO()
    other = threading.Thread(target=prepare, args=("mnist", tmp_path, Console(file=out, width=200)))
    with FileLock(tmp_path / ".prepare.lock"):
        other.start()
        deadline = time.monotonic() + 60
        while "waiting" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "Another process downloads" in out.getvalue()
        assert not server.seen
    other.join(60)
    assert (tmp_path / "mnist" / "x").read_bytes() == DATA


def test_a_root_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"FEDPRISM_DATA"):
        prepare("mnist", tmp_path / "file" / "root")


@pytest.mark.parametrize(
    ("name", "domain", "kept", "others"),
    [
        ("office-caltech-10", "amazon", ("back_pack", "bike", "laptop_computer", "mug"), ("bike_helmet", "laptops")),
        ("office-caltech-10", "caltech", ("backpack", "003.backpack", "127.laptop-101"), ("bathtub", "011.billiards")),
        ("domainnet-10", "clipart", ("bird", "ice_cream", "wine_glass"), ("bat", "birds", "glass")),
    ],
)
def test_archives_are_unpacked_as_far_as_they_hold_the_ten_classes(
    name: str, domain: str, kept: tuple[str, ...], others: tuple[str, ...], tmp_path: Path
) -> None:
    """Under each of their spellings, and nothing with a similar name."""
    file = next(file for file in SOURCES[name].files if file.name == f"{domain}.zip")
    archive = tmp_path / file.name
    archive.write_bytes(zip_of({f"{domain}/{label}/1.jpg": b"x" for label in (*kept, *others)}))
    unpack(archive, tmp_path, keep=file.keep)
    assert {path.name for path in (tmp_path / domain).iterdir()} == set(kept)
