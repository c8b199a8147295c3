"""A user's own images: layouts, options, and every mistake that a folder can hold."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from fedprism.config import DataConfig
from fedprism.data import Dataset, load
from fedprism.data import progress as progress_module
from fedprism.data.folder import parse
from fedprism.errors import ConfigError, DataError


def fill(folder: Path, n: int, level: int = 100, suffix: str = "png") -> Path:
    """n grey images, each a little brighter than the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        Image.new("L", (10, 12), level + i).save(folder / f"{i:02d}.{suffix}")
    return folder


def sites(
    root: Path, clients: Sequence[str] = ("north", "south"), classes: Sequence[str] = ("cat", "dog"), n: int = 4
) -> Path:
    for c, client in enumerate(clients):
        for k, label in enumerate(classes):
            fill(root / client / label, n, 100 * k + 20 * c)
    return root


def read(root: Path, options: str = "", size: int = 8) -> Dataset:
    return load(DataConfig(name=f"folder:{root}{options}", image_size=size), 0)


def test_a_folder_a_client(tmp_path: Path) -> None:
    dataset = read(sites(tmp_path / "animals"))
    assert dataset.name == "animals"
    assert dataset.domain_names == ("north", "south")
    assert dataset.class_names == ("cat", "dog")
    assert dataset.images.shape == (16, 3, 8, 8)
    assert dataset.is_test is None
    assert dataset.sites
    expected = [20 * c + 100 * k + i for c in range(2) for k in range(2) for i in range(4)]
    assert dataset.images[:, 0, 0, 0].tolist() == expected
    assert dataset.labels.tolist() == [k for _ in range(2) for k in range(2) for _ in range(4)]
    assert dataset.domains.tolist() == [0] * 8 + [1] * 8


def test_train_and_test_folders_are_kept_apart(tmp_path: Path) -> None:
    for client in ("a", "b"):
        for label in ("x", "y"):
            fill(tmp_path / client / "train" / label, 3, 10)
            fill(tmp_path / client / "test" / label, 2, 200)
    dataset = read(tmp_path)
    assert dataset.is_test is not None
    assert len(dataset) == 20
    assert torch.equal(dataset.is_test, dataset.images[:, 0, 0, 0] >= 200)


def test_many_images_come_in_order_whatever_the_threads(tmp_path: Path) -> None:
    fill(tmp_path / "a" / "x", 60, 0)
    fill(tmp_path / "a" / "y", 60, 100)
    dataset = read(tmp_path, size=4)
    assert dataset.images[:, 0, 0, 0].tolist() == [*range(60), *range(100, 160)]


def test_hidden_files_clutter_and_upper_case_suffixes(tmp_path: Path) -> None:
    sites(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "notes.txt").write_text("about")
    (tmp_path / "north" / ".cache").mkdir()
    (tmp_path / "north" / "labels.csv").write_text("a,b")
    (tmp_path / "north" / "cat" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "north" / "cat" / "._00.png").write_bytes(b"x")
    (tmp_path / "north" / "cat" / "Thumbs.db").write_bytes(b"x")
    Image.new("L", (4, 4)).save(tmp_path / "north" / "cat" / "UPPER.PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(tmp_path)) == 17


def test_files_of_other_kinds_are_ignored_with_a_warning(tmp_path: Path) -> None:
    sites(tmp_path)
    (tmp_path / "north" / "cat" / "film.gif").write_bytes(b"GIF89a")
    with pytest.warns(UserWarning, match=r"ignored files .*north/cat/film\.gif"):
        assert len(read(tmp_path)) == 16


def test_links_are_followed(tmp_path: Path) -> None:
    sites(tmp_path / "real", clients=("north",))
    (tmp_path / "view").mkdir()
    (tmp_path / "view" / "linked").symlink_to(tmp_path / "real" / "north", target_is_directory=True)
    assert read(tmp_path / "view").domain_names == ("linked",)


def test_a_relative_path_starts_at_the_root_that_is_set(tmp_path: Path) -> None:
    sites(tmp_path / "animals")
    assert len(load(DataConfig(name="folder:animals", root=str(tmp_path), image_size=8), 0)) == 16
    assert parse("folder:animals")[0] == Path("animals")
    assert parse(f"folder:{tmp_path}", "/elsewhere")[0] == tmp_path
    assert parse("folder:~/x")[0] == Path.home() / "x"


def test_options_are_parsed_and_checked() -> None:
    path, options = parse("folder:a/b?unreadable=skip, background=white")
    assert (path, options.unreadable, options.background) == (Path("a/b"), "skip", "white")
    assert parse("folder:what?")[0] == Path("what?")
    assert parse("folder:a")[1].unreadable == "refuse"
    with pytest.raises(ConfigError, match="Did you mean 'unreadable'"):
        parse("folder:a?unreadible=skip")
    with pytest.raises(ConfigError, match="Did you mean 'skip'"):
        parse("folder:a?unreadable=skipp")
    for name in ("folder:", "folder", "folder:?unreadable=skip"):
        with pytest.raises(DataError, match="names no folder"):
            parse(name)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_home_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match="no user on this machine has that home"):
        read(Path("~nobody-has-this-name/sites"))


def test_missing_and_empty_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist; expected PATH/<client>/<class>"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match="holds no folders"):
        read(tmp_path)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(DataError, match="is not a folder"):
        read(file)
    with pytest.raises(DataError, match="cannot be listed: File name too long"):
        read(tmp_path / ("x" * 5000))


def test_a_folder_that_may_not_be_listed(tmp_path: Path) -> None:
    sites(tmp_path)
    locked = tmp_path / "north" / "cat"
    locked.chmod(0)
    try:
        if _readable(locked):
            pytest.skip("this user may read everything")
        with pytest.raises(DataError, match="cannot be listed"):
            read(tmp_path)
    finally:
        locked.chmod(0o755)


def _readable(folder: Path) -> bool:
    try:
        list(folder.iterdir())
    except PermissionError:
        return False
    return True


def test_an_empty_client_is_named(tmp_path: Path) -> None:
    sites(tmp_path)
    (tmp_path / "west").mkdir()
    with pytest.raises(DataError, match="client 'west' has no images"):
        read(tmp_path)
    (tmp_path / "west" / "cat").mkdir()
    with pytest.raises(DataError, match="client 'west' has no images"):
        read(tmp_path)


@pytest.mark.parametrize("empty", ["train", "test"])
def test_a_client_without_training_or_test_images_is_named(tmp_path: Path, empty: str) -> None:
    for client in ("a", "b"):
        for part in ("train", "test"):
            for label in ("x", "y"):
                fill(tmp_path / client / part / label, 0 if (client, part) == ("b", empty) else 3)
    with pytest.raises(DataError, match=f"client 'b' has no images in .*{empty}"):
        read(tmp_path)


def test_a_class_that_nobody_has_is_named(tmp_path: Path) -> None:
    sites(tmp_path)
    (tmp_path / "north" / "owl").mkdir()
    (tmp_path / "south" / "owl").mkdir()
    with pytest.raises(DataError, match="no client has images of the classes owl"):
        read(tmp_path)


def test_a_class_that_nobody_can_train_on_is_named(tmp_path: Path) -> None:
    for label in ("x", "y"):
        fill(tmp_path / "a" / "train" / label, 3)
        fill(tmp_path / "a" / "test" / label, 3)
    fill(tmp_path / "a" / "test" / "z", 3)
    with pytest.raises(DataError, match="no client has training images of the classes z"):
        read(tmp_path)


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one class only"):
        read(sites(tmp_path, classes=("cat",)))


def test_different_classes_make_a_union_and_a_warning(tmp_path: Path) -> None:
    sites(tmp_path)
    fill(tmp_path / "south" / "owl", 2)
    (tmp_path / "north" / "owl").mkdir()
    fill(tmp_path / "east" / "owl", 2)
    with pytest.warns(UserWarning, match="'east' lacks cat, dog; 'north' lacks owl") as seen:
        dataset = read(tmp_path)
    assert "south" not in str(seen[0].message)
    assert dataset.class_names == ("cat", "dog", "owl")
    assert dataset.domain_names == ("east", "north", "south")


def test_names_differing_only_by_case_are_refused(tmp_path: Path) -> None:
    sites(tmp_path, clients=("North", "north"))
    if len(list(tmp_path.iterdir())) < 2:
        pytest.skip("this file system does not tell case")
    with pytest.raises(DataError, match="client names 'North' and 'north' differ only by case"):
        read(tmp_path)


def test_classes_differing_only_by_case_are_refused(tmp_path: Path) -> None:
    sites(tmp_path, clients=("a",), classes=("Cat", "dog"))
    sites(tmp_path, clients=("b",), classes=("cat", "dog"))
    with pytest.raises(DataError, match="class names 'Cat' and 'cat' differ only by case"):
        read(tmp_path)


@pytest.mark.parametrize("bad", ["a\nb", "x" * 101, "a..b", "a\\b"])
def test_bad_client_names_are_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(DataError, match="client name"):
        read(sites(tmp_path, clients=("good", bad)))


def test_images_outside_of_class_folders(tmp_path: Path) -> None:
    sites(tmp_path)
    fill(tmp_path / "north", 1)
    with pytest.raises(DataError, match=r"outside of a class folder, such as '00\.png'"):
        read(tmp_path)


def test_images_directly_in_train(tmp_path: Path) -> None:
    for part in ("train", "test"):
        fill(tmp_path / "a" / part, 2)
    with pytest.raises(DataError, match="outside of a class folder"):
        read(tmp_path)


def test_folders_in_class_folders(tmp_path: Path) -> None:
    sites(tmp_path)
    fill(tmp_path / "north" / "cat" / "kittens", 2)
    with pytest.raises(DataError, match=r"cat should be a class folder but holds folders \(kittens\)"):
        read(tmp_path)


def test_train_without_test(tmp_path: Path) -> None:
    for label in ("x", "y"):
        fill(tmp_path / "a" / "train" / label, 2)
    with pytest.raises(DataError, match="train should be a class folder but holds folders"):
        read(tmp_path)


def test_something_beside_train_and_test(tmp_path: Path) -> None:
    for part in ("train", "test", "val"):
        for label in ("x", "y"):
            fill(tmp_path / "a" / part / label, 2)
    with pytest.raises(DataError, match="train/ and test/ and also val"):
        read(tmp_path)


def test_mixed_layouts(tmp_path: Path) -> None:
    sites(tmp_path, clients=("a",))
    for part in ("train", "test"):
        for label in ("cat", "dog"):
            fill(tmp_path / "b" / part / label, 2)
    with pytest.raises(DataError, match=r"have train/ and test/ \(b\), others not \(a\)"):
        read(tmp_path)


# --- images that cannot be read --------------------------------------------------------------------------------------


def test_unreadable_images_are_counted_and_named(tmp_path: Path) -> None:
    sites(tmp_path, n=9)
    for i in range(7):
        (tmp_path / "south" / "dog" / f"{i:02d}.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="7 of 36 images") as seen:
        read(tmp_path)
    message = str(seen.value)
    assert "south/dog/00.png (not an image of a known kind)" in message
    assert "04.png" in message
    assert "05.png" not in message
    assert "and 2 more" in message
    assert "?unreadable=skip" in message


def test_unreadable_images_are_skipped_on_request(tmp_path: Path) -> None:
    sites(tmp_path)
    (tmp_path / "north" / "cat" / "01.png").write_bytes(b"broken")
    with pytest.warns(UserWarning, match=r"1 of 16 images .*north/cat/01\.png.* left out"):
        dataset = read(tmp_path, "?unreadable=skip")
    assert len(dataset) == 15
    assert dataset.images[:4, 0, 0, 0].tolist() == [0, 2, 3, 100]
    assert dataset.labels[:4].tolist() == [0, 0, 0, 1]


@pytest.mark.filterwarnings("ignore:.*cannot be read")
def test_skipping_does_not_hide_an_empty_client_or_class(tmp_path: Path) -> None:
    sites(tmp_path, n=1)
    for label in ("cat", "dog"):
        (tmp_path / "north" / label / "00.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="client 'north' has no images"):
        read(tmp_path, "?unreadable=skip")
    sites(tmp_path, n=1)
    for client in ("north", "south"):
        (tmp_path / client / "dog" / "00.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="no client has images of the classes dog"):
        read(tmp_path, "?unreadable=skip")


def test_a_huge_image_is_named(tmp_path: Path) -> None:
    sites(tmp_path)
    Image.new("1", (20000, 10000)).save(tmp_path / "north" / "cat" / "00.png")
    with pytest.raises(DataError, match=r"north/cat/00\.png \(more than the 80,000,000 pixels"):
        read(tmp_path)


def test_a_broken_link_is_unreadable(tmp_path: Path) -> None:
    sites(tmp_path)
    (tmp_path / "north" / "cat" / "99.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(DataError, match=r"1 of 17 images .*99\.png"):
        read(tmp_path)


def test_all_kinds_at_once(tmp_path: Path) -> None:
    sites(tmp_path)
    folder = tmp_path / "north" / "cat"
    Image.new("RGBA", (9, 7), (255, 0, 0, 255)).save(folder / "rgba.png")
    Image.new("CMYK", (9, 7)).save(folder / "cmyk.jpg")
    Image.fromarray(np.full((9, 7), 65535, dtype=np.uint16)).save(folder / "deep.tif")
    Image.new("P", (9, 7)).save(folder / "palette.bmp")
    dataset = read(tmp_path)
    assert len(dataset) == 20
    by_name = dict(zip(sorted(path.name for path in folder.iterdir()), dataset.images[:8], strict=True))
    assert by_name["rgba.png"][:, 0, 0].tolist() == [255, 0, 0]
    assert by_name["deep.tif"].min() == 255


def test_the_background_option(tmp_path: Path) -> None:
    sites(tmp_path)
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "north" / "cat" / "00.png")
    assert read(tmp_path).images[0].max() == 0
    assert read(tmp_path, "?background=white").images[0].min() == 255


# --- progress --------------------------------------------------------------------------------------------------------


def shown(monkeypatch: pytest.MonkeyPatch, patience: float, terminal: bool) -> str:
    monkeypatch.setattr(progress_module, "PATIENCE", patience)
    stream = io.StringIO()
    with progress_module.progress("reading images", 3, Console(file=stream, force_terminal=terminal, width=80)) as step:
        for _ in range(3):
            step()
    return stream.getvalue()


def test_progress_shows_on_a_terminal_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reading images" in shown(monkeypatch, -1, terminal=True)
    assert shown(monkeypatch, 1000, terminal=True) == ""
    assert shown(monkeypatch, -1, terminal=False) == ""
