"""Office-Caltech-10, DomainNet, PACS and Tiny-ImageNet: published folders and lists, packed files, real counts."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedprism.config import DataConfig
from fedprism.data import Dataset, load
from fedprism.data.image_sets import DOMAINNET, DOMAINNET_DOMAINS, OFFICE, PACS, PACS_DOMAINS
from fedprism.errors import ConfigError, DataError
from fedprism.federation import make_federation

OFFICE_DOMAINS = ("amazon", "caltech", "dslr", "webcam")


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDPRISM_CACHE", str(home))
    return home


def read(name: str, root: Path, size: int | str = 8, domains: tuple[str, ...] | None = None) -> Dataset:
    return load(DataConfig(name=name, root=str(root), image_size=size, domains=domains), 0)  # type: ignore[arg-type]


def grey(level: int, side: int = 12) -> bytes:
    content = io.BytesIO()
    Image.new("L", (side, side), level).save(content, "JPEG", quality=95)
    return content.getvalue()


def fill(folder: Path, level: int, n: int = 2, side: int = 12, suffix: str = "jpg") -> None:
    """n grey pictures, the i-th of brightness level + i."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        (folder / f"image_{i:04d}.{suffix}").write_bytes(grey(level + i, side))


def tree(home: Path, domains: Sequence[str], classes: Iterable[str], n: int = 2, side: int = 12) -> Path:
    """Brightness tells domain (by 50), class (by 4) and image."""
    for d, domain in enumerate(domains):
        for k, label in enumerate(classes):
            fill(home / domain / label, 50 * d + 4 * k, n, side)
    return home


def levels(dataset: Dataset) -> list[int]:
    """The brightness of every image; JPEG may be off by one."""
    return dataset.images.float().mean((1, 2, 3)).round().int().tolist()


def close(found: list[int], expected: list[int]) -> bool:
    return len(found) == len(expected) and all(abs(a - b) <= 1 for a, b in zip(found, expected, strict=True))


# --- Office-Caltech-10 -----------------------------------------------------------------------------------------------


def test_office_folders(tmp_path: Path) -> None:
    tree(tmp_path / "office-caltech-10", OFFICE_DOMAINS, OFFICE)
    dataset = read("office-caltech-10", tmp_path)
    assert dataset.domain_names == OFFICE_DOMAINS
    assert dataset.class_names == tuple(OFFICE)
    assert dataset.images.shape == (80, 3, 8, 8)
    assert close(levels(dataset), [50 * d + 4 * k + i for d in range(4) for k in range(10) for i in range(2)])
    assert dataset.labels.tolist() == [k for _ in range(4) for k in range(10) for _ in range(2)]
    assert dataset.domains.tolist() == [d for d in range(4) for _ in range(20)]
    assert dataset.is_test is None
    assert dataset.round_up
    assert not dataset.sites


def test_every_published_spelling_is_the_same_class(tmp_path: Path) -> None:
    """Office-31 as its authors publish it, with 21 more classes, and Caltech-256 beside it."""
    home = tmp_path / "office-caltech-10" / "domain_adaptation_images"
    office31 = [
        "back_pack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop_computer",
        "monitor",
        "mouse",
        "mug",
        "projector",
    ]
    caltech = [
        "003.backpack",
        "224.touring-bike",
        "027.calculator",
        "101.head-phones",
        "045.computer-keyboard",
        "127.laptop-101",
        "046.computer-monitor",
        "047.computer-mouse",
        "041.coffee-mug",
        "238.video-projector",
    ]
    for d, domain in enumerate(OFFICE_DOMAINS):
        folder = home / ("caltech_10" if domain == "caltech" else f"{domain}/images")
        for k, label in enumerate(caltech if domain == "caltech" else office31):
            fill(folder / label, 50 * d + 4 * k)
        fill(folder / "bike_helmet", 250)
        fill(folder / "desktop_computer", 250)
    dataset = read("office-caltech-10", tmp_path)
    assert dataset.class_names == tuple(OFFICE)
    assert close(levels(dataset), [50 * d + 4 * k + i for d in range(4) for k in range(10) for i in range(2)])


def test_domains_can_be_chosen_and_only_these_are_needed(tmp_path: Path) -> None:
    tree(tmp_path / "office-caltech-10", ("dslr", "amazon"), OFFICE)
    dataset = read("office-caltech-10", tmp_path, domains=("amazon", "dslr"))
    assert dataset.domain_names == ("amazon", "dslr")
    assert levels(dataset)[0] >= 49
    assert levels(dataset)[20] <= 1
    with pytest.raises(DataError, match="The domain 'caltech' is missing"):
        read("office-caltech-10", tmp_path)
    with pytest.raises(ConfigError, match="unknown domain 'dlsr'"):
        read("office-caltech-10", tmp_path, domains=("dlsr",))


def test_sides(tmp_path: Path) -> None:
    tree(tmp_path / "office-caltech-10", ("dslr",), OFFICE, n=1)
    for size, expected in (("auto", 256), (20, 20)):
        assert read("office-caltech-10", tmp_path, size, ("dslr",)).images.shape == (10, 3, expected, expected)


def test_the_whole_picture_is_squeezed_to_a_square(tmp_path: Path) -> None:
    tree(tmp_path / "office-caltech-10", ("dslr",), OFFICE, n=1)
    half = Image.new("RGB", (60, 20))
    half.paste((255, 0, 0), (30, 0, 60, 20))
    half.save(tmp_path / "office-caltech-10" / "dslr" / "backpack" / "image_0000.jpg", quality=95)
    image = read("office-caltech-10", tmp_path, 8, ("dslr",)).images[0].float()
    assert image[0, :, :3].max() < 30
    assert image[0, :, 5:].min() > 220
    assert image[1].max() < 40


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fedprism data prepare office-caltech-10"):
        read("office-caltech-10", tmp_path)
    home = tree(tmp_path / "office-caltech-10", OFFICE_DOMAINS, list(OFFICE)[1:])
    with pytest.raises(DataError, match=r"The class 'backpack' is missing in .*amazon"):
        read("office-caltech-10", tmp_path)
    for domain in OFFICE_DOMAINS:
        (home / domain / "backpack").mkdir()
    with pytest.raises(DataError, match=r"amazon/backpack holds no images"):
        read("office-caltech-10", tmp_path)
    fill(home / "amazon" / "back_pack", 3)
    with pytest.raises(DataError, match="holds back_pack and backpack, which are both 'backpack'"):
        read("office-caltech-10", tmp_path)


def test_damaged_images_are_named_and_nothing_is_kept(tmp_path: Path, cache_home: Path) -> None:
    home = tree(tmp_path / "office-caltech-10", OFFICE_DOMAINS, OFFICE)
    whole = (home / "dslr" / "mug" / "image_0001.jpg").read_bytes()
    for number in range(7):
        fill(home / "webcam" / list(OFFICE)[number], 0, 3)
        (home / "webcam" / list(OFFICE)[number] / "image_0002.jpg").write_bytes(b"broken")
    (home / "dslr" / "mug" / "image_0001.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="8 of 87 images of office-caltech-10 cannot be read") as seen:
        read("office-caltech-10", tmp_path)
    message = str(seen.value)
    assert "dslr/mug/image_0001.jpg" in message
    assert "webcam/backpack/image_0002.jpg (not an image of a known kind)" in message
    assert "and 3 more" in message
    assert not [path for path in (cache_home / "arrays").iterdir() if path.is_dir()]


def test_files_are_read_once(tmp_path: Path, cache_home: Path) -> None:
    """The second time nothing but the folders is looked at; a new image is noticed."""
    home = tree(tmp_path / "office-caltech-10", OFFICE_DOMAINS, OFFICE)
    first = read("office-caltech-10", tmp_path)
    made = sorted(path.name for path in (cache_home / "arrays").iterdir())
    (home / "amazon" / "mug" / "image_0000.jpg").write_bytes(b"changed in place")
    assert torch.equal(read("office-caltech-10", tmp_path).images, first.images)
    assert sorted(path.name for path in (cache_home / "arrays").iterdir()) == made
    fill(home / "amazon" / "mug", 200, 3)
    assert len(read("office-caltech-10", tmp_path)) == 81


# --- packed JPEG files -----------------------------------------------------------------------------------------------


def pack(path: Path, domains: Sequence[str], classes: Sequence[str], order: Sequence[tuple[int, int]]) -> Path:
    """An image for each (domain, class) of `order`, of brightness 50 x domain + 4 x class."""
    files = [grey(50 * d + 4 * k) for d, k in order]
    np.savez(
        path,
        jpeg=np.frombuffer(b"".join(files), dtype=np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        domain=np.array([d for d, _ in order], dtype=np.uint8),
        label=np.array([k for _, k in order], dtype=np.uint8),
        domains=np.array(domains),
        classes=np.array(classes),
        path=np.array([f"{domains[d]}/{classes[k]}/{i}.jpg" for i, (d, k) in enumerate(order)]),
    )
    return path


@pytest.mark.parametrize(
    ("name", "file", "domains", "classes", "side"),
    [
        ("office-caltech-10", "office_caltech10.npz", OFFICE_DOMAINS, tuple(OFFICE), 256),
        ("pacs", "pacs_128.npz", tuple(PACS_DOMAINS), tuple(PACS), 128),
    ],
)
def test_packed_files(
    tmp_path: Path, name: str, file: str, domains: tuple[str, ...], classes: tuple[str, ...], side: int
) -> None:
    """In whatever order they are packed, the images come by domain and class."""
    order = [(d, k) for k in range(len(classes)) for d in reversed(range(4))]
    pack(tmp_path / file, domains, classes, order)
    dataset = read(name, tmp_path)
    assert (dataset.domain_names, dataset.class_names) == (domains, classes)
    assert close(levels(dataset), [50 * d + 4 * k for d in range(4) for k in range(len(classes))])
    assert dataset.labels.tolist() == list(range(len(classes))) * 4
    assert read(name, tmp_path, "auto").images.shape[2:] == (side, side)
    some = read(name, tmp_path, 8, (domains[2], domains[0]))
    assert close(levels(some), [50 * d + 4 * k for d in (2, 0) for k in range(len(classes))])


def test_published_folders_win_over_the_packed_file(tmp_path: Path) -> None:
    pack(tmp_path / "pacs_128.npz", tuple(PACS_DOMAINS), tuple(PACS), [(d, k) for d in range(4) for k in range(7)])
    assert len(read("pacs", tmp_path)) == 28
    (tmp_path / "pacs").mkdir()
    assert len(read("pacs", tmp_path)) == 28
    tree(tmp_path / "pacs", tuple(PACS_DOMAINS), PACS, n=3)
    assert len(read("pacs", tmp_path)) == 84


def test_a_damaged_packed_file_is_named(tmp_path: Path) -> None:
    path = pack(tmp_path / "pacs_128.npz", ("photo", "sketch"), tuple(PACS), [(0, 0), (1, 1)])
    with pytest.raises(DataError, match=r"pacs_128\.npz: it has no domain 'art_painting', but photo, sketch"):
        read("pacs", tmp_path)
    whole = dict(np.load(path))
    whole["jpeg"] = whole["jpeg"].copy()
    whole["jpeg"][int(whole["offsets"][1]) :] = 0
    np.savez(path, **whole)
    with pytest.raises(DataError, match=r"1 of 2 images of pacs cannot be read: sketch/elephant/1\.jpg"):
        read("pacs", tmp_path, 8, ("photo", "sketch"))
    np.savez(path, **{**whole, "path": whole["path"][:1]})
    with pytest.raises(DataError, match=r"pacs_128\.npz: its path is .*; expected 2 texts"):
        read("pacs", tmp_path, 8, ("photo", "sketch"))
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"pacs_128\.npz"):
        read("pacs", tmp_path)


# --- PACS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "PACS/kfold"])
def test_pacs_folders(tmp_path: Path, inside: str) -> None:
    tree(tmp_path / "pacs" / inside, tuple(PACS_DOMAINS), PACS, side=227)
    dataset = read("pacs", tmp_path, "auto")
    assert dataset.images.shape == (56, 3, 227, 227)
    assert dataset.domain_names == ("art_painting", "cartoon", "photo", "sketch")
    assert dataset.class_names == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert (dataset.is_test, dataset.test_share) == (None, 0.2)
    assert close(levels(dataset), [50 * d + 4 * k + i for d in range(4) for k in range(7) for i in range(2)])


# --- DomainNet -------------------------------------------------------------------------------------------------------


def domainnet(root: Path, inside: str = "", domains: Sequence[str] = tuple(DOMAINNET_DOMAINS)) -> Path:
    """Three images a class and domain, of which the second is a test image; one class that is not among the ten."""
    home = root / "domainnet-10" / inside
    for d, domain in enumerate(domains):
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for number, label in enumerate(["aircraft_carrier", *DOMAINNET]):
            fill(home / domain / label, 40 * d + 3 * (number - 1) if number else 255, 3 if number else 1)
            for i in range(3 if number else 1):
                line = f"{domain}/{label}/image_{i:04d}.jpg {number * 30}"
                lines["test" if i == 1 else "train"].append(line)
        for part, listed in lines.items():
            (home / f"{domain}_{part}.txt").write_text("\n".join(listed) + "\n")
    return home


@pytest.mark.parametrize("inside", ["", "domainnet"])
def test_domainnet_lists(tmp_path: Path, inside: str) -> None:
    domainnet(tmp_path, inside)
    dataset = read("domainnet-10", tmp_path)
    assert dataset.domain_names == ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
    assert dataset.class_names == (
        "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
    )  # fmt: skip
    assert dataset.is_test is not None
    expected = [
        (d, k, i == 1, 40 * d + 3 * k + i) for d in range(6) for part in ((0, 2), (1,)) for k in range(10) for i in part
    ]
    assert dataset.domains.tolist() == [d for d, _, _, _ in expected]
    assert dataset.labels.tolist() == [k for _, k, _, _ in expected]
    assert dataset.is_test.tolist() == [test for _, _, test, _ in expected]
    assert close(levels(dataset), [level for _, _, _, level in expected])
    assert read("domainnet-10", tmp_path, "auto", ("real",)).images.shape == (30, 3, 256, 256)


def test_domainnet_files_that_are_not_listed_are_not_taken(tmp_path: Path) -> None:
    home = domainnet(tmp_path)
    fill(home / "real" / "zebra", 200, 9)
    assert len(read("domainnet-10", tmp_path)) == 180


def test_domainnet_lists_that_cannot_be(tmp_path: Path) -> None:
    home = domainnet(tmp_path, domains=("real",))
    listed = home / "real_test.txt"
    good = listed.read_text()
    for line, message in (
        ("real/zebra/image_0001.jpg", "one of its lines is 'real/zebra/image_0001.jpg'; expected a path, real/<class>"),
        ("real/zebra/../../secret.jpg 3", "one of its lines is"),
        ("/etc/passwd 3", "one of its lines is"),
        ("clipart/zebra/image_0001.jpg 3", "one of its lines is"),
        ("real/zebra/image_0002.jpg 3", "name real/zebra/image_0002.jpg more than once"),
        ("real/zebra/image_0009.jpg 3", r"real/zebra/image_0009.jpg \(No such file or directory\)"),
    ):
        listed.write_text(good + line + "\n")
        with pytest.raises(DataError, match=message):
            read("domainnet-10", tmp_path, 8, ("real",))
    listed.write_text("real/aircraft_carrier/image_0000.jpg 0\n")
    with pytest.raises(DataError, match=r"real_test\.txt: it names no images of bird, feather"):
        read("domainnet-10", tmp_path, 8, ("real",))
    listed.write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError, match=r"real_test\.txt"):
        read("domainnet-10", tmp_path, 8, ("real",))
    listed.write_text("")
    with pytest.raises(DataError, match=r"real_test\.txt: it is empty"):
        read("domainnet-10", tmp_path, 8, ("real",))
    listed.unlink()
    with pytest.raises(DataError, match=r"The list real_test\.txt is missing"):
        read("domainnet-10", tmp_path, 8, ("real",))


# --- Tiny-ImageNet ---------------------------------------------------------------------------------------------------

WORDS = {"n02": "crane, bird", "n01": "goldfish, Carassius auratus", "n03": "crane"}


def tiny(root: Path, inside: str = "tiny-imagenet-200") -> Path:
    """Three classes with two training images and a validation image each."""
    home = root / "tiny-imagenet" / inside
    for k, wnid in enumerate(sorted(WORDS)):
        fill(home / "train" / wnid / "images", 60 * k, suffix="JPEG")
        (home / "train" / wnid / f"{wnid}_boxes.txt").write_text("image_0000.JPEG\t0\t0\t62\t63\n")
    fill(home / "val" / "images", 200, 3, suffix="JPEG")
    (home / "val" / "val_annotations.txt").write_text(
        "".join(f"image_{i:04d}.JPEG\t{wnid}\t0\t32\t44\t62\n" for i, wnid in enumerate(("n03", "n01", "n02")))
    )
    (home / "wnids.txt").write_text("n02\nn03\nn01\n")
    (home / "words.txt").write_text("".join(f"{wnid}\t{words}\n" for wnid, words in WORDS.items()) + "n99\tother\n")
    fill(home / "test" / "images", 250, suffix="JPEG")
    return home


@pytest.mark.parametrize("inside", ["", "tiny-imagenet-200"])
def test_tiny_imagenet(tmp_path: Path, inside: str) -> None:
    tiny(tmp_path, inside)
    dataset = read("tiny-imagenet", tmp_path, "auto")
    assert dataset.images.shape == (9, 3, 64, 64)
    assert dataset.class_names == ("goldfish", "crane n02", "crane n03")
    assert dataset.domain_names == ("tiny-imagenet",)
    assert dataset.labels.tolist() == [0, 0, 1, 1, 2, 2, 2, 0, 1]
    assert dataset.is_test is not None
    assert dataset.is_test.tolist() == [False] * 6 + [True] * 3
    assert close(levels(dataset), [0, 1, 60, 61, 120, 121, 200, 201, 202])


def test_tiny_imagenet_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fedprism data prepare tiny-imagenet"):
        read("tiny-imagenet", tmp_path)
    home = tiny(tmp_path)
    annotations = home / "val" / "val_annotations.txt"
    good = annotations.read_text()
    for line in ("image_0001.JPEG\tn77\t0", "image_0001.JPEG", "../train/n01/images/image_0000.JPEG\tn01"):
        annotations.write_text(good + line + "\n")
        with pytest.raises(DataError, match=r"val_annotations\.txt: line 4 is"):
            read("tiny-imagenet", tmp_path)
    annotations.write_text(good)
    (home / "wnids.txt").write_text("n01\nn02\nn03\nn04\n")
    with pytest.raises(DataError, match=r"n04/images is missing"):
        read("tiny-imagenet", tmp_path)
    (home / "words.txt").unlink()
    with pytest.raises(DataError, match=r"words\.txt is missing"):
        read("tiny-imagenet", tmp_path)


def test_tiny_imagenet_packed(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    for prefix, labels in (("train_", [2, 0, 1, 0]), ("test_", [1, 2])):
        files = [grey(100 * (prefix == "test_") + 20 * label) for label in labels]
        arrays[f"{prefix}jpeg"] = np.frombuffer(b"".join(files), dtype=np.uint8)
        arrays[f"{prefix}offsets"] = np.cumsum([0, *map(len, files)])
        arrays[f"{prefix}y"] = np.array(labels, dtype=np.uint8)
        arrays[f"{prefix}path"] = np.array([f"{i}.JPEG" for i in range(len(labels))])
    words = [WORDS[wnid] for wnid in sorted(WORDS)]
    path = tmp_path / "tiny_imagenet_subset.npz"
    np.savez(path, classes=np.array(sorted(WORDS)), class_words=np.array(words), **arrays)
    dataset = read("tiny-imagenet", tmp_path)
    assert dataset.class_names == ("goldfish", "crane n02", "crane n03")
    assert dataset.labels.tolist() == [2, 0, 1, 0, 1, 2]
    assert dataset.is_test is not None
    assert dataset.is_test.tolist() == [False] * 4 + [True] * 2
    assert close(levels(dataset), [40, 0, 20, 0, 120, 140])
    np.savez(path, classes=np.array(sorted(WORDS)), class_words=np.array(words[:2]), **arrays)
    with pytest.raises(DataError, match=r"tiny_imagenet_subset\.npz: its class_words is .*; expected 3 texts"):
        read("tiny-imagenet", tmp_path)


# --- real data -------------------------------------------------------------------------------------------------------


@pytest.fixture
def real() -> Path:
    folder = os.environ.get("FEDPRISM_DATA")
    if not folder:
        pytest.skip("FEDPRISM_DATA is not set; it names the folder with the packed benchmark files")
    return Path(folder)


def counts(dataset: Dataset) -> dict[str, list[int]]:
    return {
        name: torch.bincount(dataset.labels[dataset.domains == d], minlength=len(dataset.class_names)).tolist()
        for d, name in enumerate(dataset.domain_names)
    }


@pytest.mark.slow
def test_real_office(real: Path) -> None:
    dataset = read("office-caltech-10", real, 32)
    assert counts(dataset) == {
        "amazon": [92, 82, 94, 99, 100, 100, 99, 100, 94, 98],
        "caltech": [151, 110, 100, 138, 85, 128, 133, 94, 87, 97],
        "dslr": [12, 21, 12, 13, 10, 24, 22, 12, 8, 23],
        "webcam": [29, 21, 31, 27, 27, 30, 43, 30, 27, 30],
    }
    made = make_federation("office-caltech-10", root=str(real), image_size=32, split={"validation": 0}, clients=4)
    parts = {name: (len(client.train), len(client.test)) for name, client in made.clients.items()}
    assert parts == {"amazon": (766, 192), "caltech": (898, 225), "dslr": (125, 32), "webcam": (236, 59)}


@pytest.mark.slow
def test_real_pacs(real: Path) -> None:
    dataset = read("pacs", real, "auto")
    assert dataset.images.shape == (5315, 3, 128, 128)
    assert counts(dataset) == {
        "art_painting": [200, 200, 200, 184, 200, 200, 200],
        "cartoon": [200, 200, 200, 135, 200, 200, 200],
        "photo": [189, 200, 182, 186, 199, 200, 200],
        "sketch": [200, 200, 200, 200, 200, 80, 160],
    }


@pytest.mark.slow
def test_real_tiny_imagenet(real: Path) -> None:
    dataset = read("tiny-imagenet", real, "auto")
    assert dataset.images.shape == (12000, 3, 64, 64)
    assert len(set(dataset.class_names)) == 200
    assert dataset.class_names[:2] == ("goldfish", "European fire salamander")
    assert dataset.is_test is not None
    for part, each in ((~dataset.is_test, 50), (dataset.is_test, 10)):
        assert torch.bincount(dataset.labels[part], minlength=200).tolist() == [each] * 200
