"""The bubble plot: what is drawn where and how large, read back from the SVG."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedprism.errors import FedprismError
from fedprism.federation import ClientData, Federation, Split
from fedprism.inspection.bubbles import bubbles, counts
from fedprism.report.canvas import LIGHT


def made(samples: np.ndarray, domains: tuple[str, ...] = ("one",), test: int = 1) -> Federation:
    """Clients with these training counts per class, and `test` test images of class 0."""
    source, like = torch.zeros(1, 1, 2, 2, dtype=torch.uint8), np.zeros((20, 1, 2, 2), dtype=np.uint8)
    data = Federation.from_arrays({"a": (like, np.arange(20) % 2)}).data

    def rows(y: np.ndarray) -> Split:
        labels = torch.from_numpy(y)
        return Split.of(source, torch.zeros_like(labels), labels)

    classes, clients = samples.shape[1], {}
    for place, row in enumerate(samples):
        train, tested = rows(np.repeat(np.arange(classes), row)), rows(np.zeros(test, dtype=np.int64))
        name = f"client-{place:03}"
        domain = domains[place % len(domains)]
        clients[name] = ClientData(name, domain, train, rows(np.arange(0)), tested, classes)
    names = tuple(f"class {label}" for label in range(classes))
    return Federation("counted", clients, names, (1, 2, 2), 0, data, rows(np.arange(0)))


def test_counts_of_all_parts_or_one() -> None:
    federation = made(np.array([[3, 0], [2, 5]]), test=4)
    assert counts(federation).tolist() == [[7, 0], [6, 5]]
    assert counts(federation, "train").tolist() == [[3, 0], [2, 5]]
    assert counts(federation, "test").tolist() == [[4, 0], [4, 0]]


def circles(svg: str) -> dict[tuple[int, int], float]:
    """The radius of every circle of the plot by its place, rounded."""
    plot = svg[svg.index('id="PathCollection_1"') :]
    found = {}
    for path in re.findall(r'<path d="([^"]*)"', plot[: plot.index("\n   </g>")]):
        points = np.array(re.findall(r"-?\d+(?:\.\d+)?", path), dtype=float).reshape(-1, 2)
        x, y = ((points.max(0) + points.min(0)) / 2).round().astype(int).tolist()
        found[x, y] = float(np.ptp(points[:, 0]) / 2)
    return found


def test_areas_are_numbers(tmp_path: Path) -> None:
    """Client 0 has 100 of class 0; client 1 has 25 of class 0 and 400 of class 1: radii as 2 to 1 to 4."""
    samples = np.array([[100, 0], [25, 400]])
    found = circles(bubbles(made(samples), tmp_path / "b.svg", part="train").read_text())
    assert len(found) == 3  # nothing where there is nothing
    (left, low), (right, high) = min(found), max(found, key=lambda place: (place[0], -place[1]))
    assert found[right, high] / found[left, low] == pytest.approx(2, rel=0.01)
    assert found[right, low] / found[left, low] == pytest.approx(0.5, rel=0.01)
    assert high < low  # class 1 stands above class 0


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (5, 10), (500, 100), (20, 200)])
def test_any_size_is_readable(tmp_path: Path, clients: int, classes: int) -> None:
    """The picture stays of a size that a screen can show, and every taken place has a circle."""
    rng = np.random.default_rng(0)
    samples = rng.integers(1, 4, (clients, classes)) * (rng.random((clients, classes)) < 0.1)
    samples[:, 0] = 2
    picture = Image.open(bubbles(made(samples), tmp_path / "b.png"))
    assert 500 < picture.width < 2500
    assert 250 < picture.height < 2500
    svg = bubbles(made(samples), tmp_path / "b.svg").read_text()
    assert len(circles(svg)) == int((samples > 0).sum())
    shown = [int(number) for number in re.findall(r">client-(\d+)<", svg)]
    steps = set(np.diff(shown).tolist())
    assert shown[0] == 0
    assert len(steps) <= 1
    assert len(shown) <= 100


def test_rows_never_merge(tmp_path: Path) -> None:
    """Of 200 classes side by side, the largest circles are not higher than their rows."""
    samples = np.zeros((20, 200), dtype=np.int64)
    samples[0], samples[1:, 0] = 50, 2
    svg = bubbles(made(samples), tmp_path / "b.svg", part="train").read_text()
    places = sorted((x, y) for x, y in circles(svg))
    heights = [y for x, y in places if x == places[0][0]]
    pitch = (max(heights) - min(heights)) / (len(heights) - 1)
    assert len(heights) == 200
    assert 2 * max(circles(svg).values()) <= pitch * 1.02


def test_names_of_thirty_letters_are_whole(tmp_path: Path) -> None:
    federation = made(np.full((2, 2), 10))
    named = replace(federation, class_names=("synth-digits-like and so on", "x" * 40))
    svg = bubbles(named, tmp_path / "b.svg", rows="subclasses").read_text()
    assert ">synth-digits-like and so on<" in svg
    assert ">2 subclasses<" in svg
    assert f">{'x' * 15}…{'x' * 15}<" in svg


def test_domains_have_colours_where_clients_share_them(tmp_path: Path) -> None:
    samples = np.full((4, 2), 10)
    shared = bubbles(made(samples, ("dark", "light")), tmp_path / "b.svg").read_text()
    assert all(colour in shared for colour in LIGHT[:2])
    assert ">dark<" in shared
    assert ">light<" in shared
    own = bubbles(made(samples, ("a", "b", "c", "d")), tmp_path / "c.svg").read_text()
    assert LIGHT[1] not in own


def test_title_and_names_are_shown_as_they_are(tmp_path: Path) -> None:
    svg = bubbles(made(np.full((2, 2), 10)), tmp_path / "b.svg", title="$5 a share").read_text()
    assert ">$5 a share<" in svg
    assert ">class 1<" in svg
    plain = bubbles(made(np.full((2, 2), 10)), tmp_path / "b.svg", part="test").read_text()
    assert ">counted, test: 2 images<" in plain


def test_the_same_file_every_time(tmp_path: Path) -> None:
    first, again = (bubbles(made(np.full((3, 2), 10)), tmp_path / name) for name in ("a.png", "b.png"))
    assert first.read_bytes() == again.read_bytes()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = made(np.full((2, 2), 10))
    with pytest.raises(FedprismError, match=r"\.png or \.svg"):
        bubbles(federation, tmp_path / "b.pdf")
    with pytest.raises(FedprismError, match="unknown split 'trian'"):
        bubbles(federation, tmp_path / "b.png", part="trian")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FedprismError, match="pip install"):
        bubbles(federation, tmp_path / "b.png")
