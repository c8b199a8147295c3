"""The built-in digits in five styles."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fedprism.config import DataConfig
from fedprism.data import Dataset, load
from fedprism.errors import DataError

STYLES = ("plain", "tinted", "textured", "blurred", "rotated")


@cache
def digits(seed: int = 0, size: int = 16) -> Dataset:
    return load(DataConfig(image_size=size), seed)


def of(dataset: Dataset, style: str) -> torch.Tensor:
    """[n, 3, height, width] of 0 to 1."""
    return dataset.images[dataset.domains == dataset.domain_names.index(style)].float() / 255


@pytest.mark.parametrize("size", [8, 16, 20, 32])
def test_all_images_are_there_at_the_size_asked_for(size: int) -> None:
    dataset = digits(0, size)
    assert dataset.images.shape == (1797, 3, size, size)
    assert dataset.images.dtype == torch.uint8
    assert dataset.domain_names == STYLES
    assert dataset.class_names == tuple("0123456789")
    assert dataset.is_test is None
    assert dataset.test_share == 0.6


@pytest.mark.parametrize("size", [0, 7, 513])
def test_sizes_that_cannot_be_are_refused(size: int) -> None:
    with pytest.raises(DataError, match="expected 8 to 512"):
        load(DataConfig(image_size=size), 0)


def test_domains_are_even_and_stratified_by_class() -> None:
    dataset = digits()
    table = torch.zeros(5, 10, dtype=torch.int64)
    table.index_put_((dataset.domains, dataset.labels), torch.ones(1797, dtype=torch.int64), accumulate=True)
    assert table.sum(1).max() - table.sum(1).min() <= 1
    assert (table.max(0).values - table.min(0).values).max() <= 1


def test_the_seed_decides_everything_and_global_generators_nothing() -> None:
    before = torch.get_rng_state()
    torch.manual_seed(7)
    again = load(DataConfig(image_size=16), 0)
    torch.set_rng_state(before)
    assert torch.equal(again.images, digits().images)
    assert torch.equal(again.domains, digits().domains)
    load(DataConfig(image_size=16), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_deals_and_draws_anew() -> None:
    assert not torch.equal(digits(1).domains, digits(0).domains)
    both = (digits(1).domains == digits(0).domains).nonzero().flatten()
    assert not torch.equal(digits(1).images[both], digits(0).images[both])


def test_every_image_has_noise_and_place_of_its_own() -> None:
    for style in STYLES:
        images = of(digits(), style).flatten(1)
        assert len(images.unique(dim=0)) == len(images), style


def test_all_styles_are_bright_on_dark() -> None:
    """The middle columns, which the pen crosses, are brighter than the border in every style and channel."""
    for style in STYLES:
        images = of(digits(), style)
        border = torch.cat([images[..., 0], images[..., -1]], -1).mean((0, 2))
        middle = images[..., 7:9].mean((0, 2, 3))
        assert (middle > border).all(), style


def test_styles_are_what_their_names_say() -> None:
    plain, tinted, textured, blurred, rotated = (of(digits(), style) for style in STYLES)

    def colour(images: torch.Tensor) -> float:
        return float((images.amax(1) - images.amin(1)).mean())

    def contrast(images: torch.Tensor) -> float:
        return float((images.mean(1).amax((1, 2)) - images.mean(1).amin((1, 2))).mean())

    def corner(images: torch.Tensor) -> float:
        return float(images[:, :, :3, :2].std((2, 3)).mean())

    assert colour(plain) == 0
    assert colour(tinted) > 0.2
    assert contrast(tinted) < 0.3 < 0.9 < contrast(plain)
    assert corner(textured) > 0.1 > corner(plain)
    assert contrast(blurred) < contrast(plain)
    assert corner(blurred) > 0.01
    assert (rotated[:, 0] >= rotated[:, 2] - 0.12).all()
    assert colour(rotated) > 0.1


def test_rotated_digits_are_turned() -> None:
    """A plain 0 is upright; seen as a cloud of ink, its long axis leans more widely when rotated."""

    def lean(style: str) -> torch.Tensor:
        dataset = digits(0, 32)
        chosen = (dataset.domains == STYLES.index(style)) & (dataset.labels == 0)
        ink = dataset.images[chosen].float().mean(1)
        ink = ink - ink.amin((1, 2), keepdim=True)
        ink = ink / ink.sum((1, 2), keepdim=True)
        y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
        dy = y - (ink * y).sum((1, 2)).view(-1, 1, 1)
        dx = x - (ink * x).sum((1, 2)).view(-1, 1, 1)
        covariance, across, down = ((ink * p).sum((1, 2)) for p in (dx * dy, dx * dx, dy * dy))
        return torch.atan2(2 * covariance, down - across) / 2

    assert lean("rotated").std() > 1.3 * lean("plain").std()
