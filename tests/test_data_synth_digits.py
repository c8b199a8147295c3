"""Digits drawn after the recipe of SynthDigits."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from fedprism.config import DataConfig
from fedprism.data import load
from fedprism.data import synth_digits as module
from fedprism.data.synth_digits import synth_digits_like
from fedprism.errors import ConfigError, DataError

pytestmark = pytest.mark.full


@cache
def drawn(side: int = 32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return synth_digits_like(side, seed, 300, 140)


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path))
    return tmp_path


def test_images_labels_and_parts() -> None:
    images, labels, is_test = drawn()
    assert images.shape == (440, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert (labels.dtype, is_test.dtype) == (torch.int64, torch.bool)
    assert is_test.tolist() == [False] * 300 + [True] * 140
    assert labels.bincount(minlength=10).min() > 20
    assert len(labels.unique()) == 10


def test_an_image_does_not_depend_on_how_many_there_are() -> None:
    images, labels, _ = drawn()
    few, few_labels, is_test = synth_digits_like(32, 0, 5, 3)
    assert torch.equal(few, images[[0, 1, 2, 3, 4, 300, 301, 302]])
    assert torch.equal(few_labels, labels[[0, 1, 2, 3, 4, 300, 301, 302]])
    assert is_test.sum() == 3
    assert not torch.equal(few[:3], few[5:])


def test_the_seed_decides_everything_and_global_generators_nothing() -> None:
    before = torch.get_rng_state()
    other, labels, _ = synth_digits_like(32, 1, 20, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(other, drawn()[0][:20])
    assert not torch.equal(labels, drawn()[1][:20])
    torch.manual_seed(7)
    assert torch.equal(synth_digits_like(32, 1, 20, 0)[0], other)
    torch.set_rng_state(before)


def test_other_sides_show_the_same_numbers() -> None:
    large, labels, _ = synth_digits_like(64, 0, 100, 0)
    assert torch.equal(labels, drawn(32)[1][:100])
    shrunk = torch.nn.functional.avg_pool2d(large.float(), 2)
    assert (shrunk - drawn(32)[0][:100]).abs().mean() < 12


def test_colours_and_backgrounds_vary_and_digits_stand_out() -> None:
    images = drawn()[0].float() / 255
    corners = images[:, :, :3, :3].mean((2, 3))
    assert corners.std(0).min() > 0.15  # the ground's colour
    assert (corners.amax(1) - corners.amin(1)).mean() > 0.2  # not grey
    grey = (images * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1)
    middle = grey[:, 4:28, 8:24].flatten(1)
    apart = middle.quantile(0.98, 1) - middle.quantile(0.02, 1)
    assert apart.min() > 0.1
    assert apart.mean() > 0.35


def test_pens_have_the_contrast() -> None:
    rng = torch.Generator().manual_seed(0)
    pen, ground = torch.rand(1000, 3, generator=rng), torch.rand(1000, 3, generator=rng)
    pen[:4] = ground[:4] = torch.tensor([[0.0], [1.0], [0.3], [0.7]])
    found = module._standing_out(pen, ground)
    assert found.min() >= 0
    assert found.max() <= 1
    weights = torch.tensor([0.299, 0.587, 0.114])
    before, after = ((colour @ weights - ground @ weights).abs() for colour in (pen, found))
    assert after.min() > module.CONTRAST - 1e-5
    assert torch.allclose(found[before > module.CONTRAST], pen[before > module.CONTRAST], atol=1e-6)


def test_numbers_of_one_to_three_digits() -> None:
    """A text's neighbours are there in half of the images each, and differ from the label's digit."""
    text = module._text(module._Numbers(torch.rand(4000, 4, generator=torch.Generator().manual_seed(0))))
    left, right = text.left < 10, text.right < 10
    for there in (left, right, left & ~right | right & ~left):
        assert 0.45 < there.float().mean() < 0.55
    assert text.middle.max() == 9
    assert (text.left == text.middle)[left].float().mean() < 0.15


def test_the_label_is_the_digit_in_the_middle() -> None:
    """A network that sees only the middle half learns the labels: 1,000 images, chance is 10 %."""
    images, labels, is_test = synth_digits_like(32, 0, 1000, 250)
    grey = images.float().mean(1, keepdim=True)[..., 8:24] / 255
    flat = grey - grey.mean((2, 3), keepdim=True)
    x = flat / flat.std((2, 3), keepdim=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 5, padding=2), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 5, padding=2), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(32 * 8 * 4, 10),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(6):
            for batch in torch.randperm(1000).split(50):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[batch]), labels[batch]).backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            right = model(x[is_test]).argmax(1) == labels[is_test]
    assert right.float().mean() > 0.7


def test_every_random_number_is_used_once() -> None:
    """Too few would draw nothing in silence; too many would be a mistake in the count."""
    numbers = module._Numbers(torch.full((2, module.NUMBERS), 0.5))
    fill = module._written(module._text(numbers), 16, numbers)
    module._coloured(*fill.unbind(2), numbers)
    numbers.between(0, 1, 2)
    assert numbers._next == module.NUMBERS


# --- as a dataset ----------------------------------------------------------------------------------------------------


def test_the_dataset_is_cached_and_the_same(cache_home: Path) -> None:
    config = DataConfig(name="synth-digits-like?train=300,test=140")
    for seed in (0, 5):  # the run's seed deals the images, it does not make them
        dataset = load(config, seed)
        assert torch.equal(dataset.images, drawn()[0])
        assert torch.equal(dataset.labels, drawn()[1])
        assert dataset.is_test is not None
        assert torch.equal(dataset.is_test, drawn()[2])
    assert dataset.domain_names == ("synth-digits-like",)
    assert dataset.class_names == tuple("0123456789")
    assert len([path for path in (cache_home / "arrays").iterdir() if path.is_dir()]) == 1


def test_options_and_side() -> None:
    dataset = load(DataConfig(name="synth-digits-like?train=20,test=5,seed=3", image_size=28), 0)
    assert dataset.images.shape == (25, 3, 28, 28)
    assert torch.equal(dataset.images, synth_digits_like(28, 3, 20, 5)[0])


def test_what_is_refused() -> None:
    for wrong in (0, 10**20):
        with pytest.raises(ConfigError, match=f"train is {wrong}; expected 1 to 10,000,000"):
            load(DataConfig(name=f"synth-digits-like?train={wrong}"), 0)
    with pytest.raises(DataError, match="expected 16 to 256"):
        load(DataConfig(name="synth-digits-like", image_size=8), 0)
    with pytest.raises(DataError, match="expected 16 to 256"):
        synth_digits_like(500, 0, 1, 1)
    with pytest.raises(DataError, match="-1 training and 2 test images"):
        synth_digits_like(32, 0, -1, 2)
