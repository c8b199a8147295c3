"""Random changes of training images: what they do to pixels, and on what their draws depend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

import fedprism as fp
from fedprism.config import Config, Named, Normal, structure
from fedprism.data.images import Crop, Flip, Rotate, augmentation, changes, normalise
from fedprism.errors import ConfigError
from fedprism.methods.base import Me
from tests.helpers import Collect, loop_for, same


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int = 64, height: int = 6, width: int = 9) -> torch.Tensor:
    return torch.rand(n, 3, height, width, generator=rng(1)) * 255


def test_flip_mirrors_whole_images_with_its_probability() -> None:
    x = images(400)
    y = Flip(p=0.25)(x, rng())
    kept = (y == x).flatten(1).all(1)
    mirrored = (y == x.flip(3)).flatten(1).all(1)
    assert (kept ^ mirrored).all()
    assert 60 < int(mirrored.sum()) < 140
    assert torch.equal(Flip(p=0.0)(x, rng()), x)
    assert torch.equal(Flip(p=1.0)(x, rng()), x.flip(3))


def test_crop_moves_an_image_by_at_most_its_padding_and_fills_with_black() -> None:
    x = images(200, 7, 5)
    y = Crop(padding=2)(x, rng())
    assert y.shape == x.shape
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    seen = set()
    for image, margin in zip(y, padded, strict=True):
        places = [(i, j) for i in range(5) for j in range(5) if torch.equal(margin[:, i : i + 7, j : j + 5], image)]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 25  # every place comes up


@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
def test_rotation_is_about_the_middle_by_the_drawn_angle(size: tuple[int, int]) -> None:
    """Against Pillow's, image by image: a smooth picture, so that rounding at edges matters little."""
    height, width = size
    y, x = np.mgrid[:height, :width]
    smooth = 128 + 100 * np.sin(x / width * 4 + 1) * np.cos(y / height * 3)
    batch = torch.tensor(smooth, dtype=torch.float32).expand(8, 3, height, width).contiguous()
    turned = Rotate(degrees=40, interpolation="bilinear")(batch, rng(5))
    angles = (2 * torch.rand(8, generator=rng(5)) - 1) * 40
    inside = np.hypot(x - (width - 1) / 2, y - (height - 1) / 2) < min(height, width) / 2 - 1.5
    for image, angle in zip(turned, angles.tolist(), strict=True):
        theirs = Image.fromarray(smooth.astype(np.float32)).rotate(angle, resample=Image.Resampling.BILINEAR)
        ours = image[0].numpy()
        other = np.asarray(Image.fromarray(smooth.astype(np.float32)).rotate(-angle, Image.Resampling.BILINEAR))
        gap = min(np.abs(ours - np.asarray(theirs))[inside].max(), np.abs(ours - other)[inside].max())
        assert gap < 2.0, angle


def test_corners_that_turn_in_are_black() -> None:
    """A square and itself turned by an angle have 2 / (1 + sin + cos) of it in common."""
    white = torch.full((300, 1, 64, 64), 255.0)
    turned = Rotate(degrees=30)(white, rng())
    assert set(turned.unique().tolist()) == {0.0, 255.0}  # nearest: no new values
    assert torch.equal(Rotate(degrees=0)(white, rng()), white)
    angle = ((2 * torch.rand(300, generator=rng()) - 1) * math.radians(30)).abs()
    lost = (turned == 0).flatten(1).float().mean(1)
    torch.testing.assert_close(lost, 1 - 2 / (1 + angle.sin() + angle.cos()), atol=0.02, rtol=0)
    assert float(lost.max()) > 0.14


def test_draws_depend_on_purpose_and_step_alone() -> None:
    x = images(8, 8, 8).to(torch.uint8)
    both = (Named("flip"), Named("crop", {"padding": 2}))
    one, other = augmentation(both, 0, "", 3, "north"), augmentation(both, 0, "", 3, "south")
    assert torch.equal(one(x, 0), augmentation(both, 0, "", 3, "north")(x, 0))
    assert not torch.equal(one(x, 0), one(x, 1))
    assert not torch.equal(one(x, 0), other(x, 0))
    assert augmentation("none", 0)(x, 0) is x


def test_unknown_changes_and_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'flip'"):
        changes((Named("filp"),))
    with pytest.raises(ConfigError, match=r"Did you mean .degrees.*augment: rotate"):
        changes((Named("rotate", {"degree": 3}),))
    with pytest.raises(ConfigError, match=r"padding is 0; expected 1 or more"):
        changes((Named("crop", {"padding": 0}),))
    with pytest.raises(ConfigError, match="these are texts"):
        augmentation((Named("flip"),), 0)(torch.zeros(2, 5, dtype=torch.int32), 0)


def test_training_sees_changed_images_and_tests_do_not() -> None:
    raw = {"train": {"rounds": 2, "batch": 16}, "evaluate": {"moments": ["received"]}, "model": {"name": "mlp"}}
    federation = fp.federation("digits-skew", clients=2, samples=24)
    seen: list[torch.Tensor] = []

    class Watching(fp.FedAvg):
        def loss(self, me: Me, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.append(x.clone())
            return super().loss(me, x, y)

    def run(augment: object) -> Collect:
        config = structure({**raw, "data": {"augment": augment}}, Config)
        collected = Collect()
        seen.clear()
        loop_for(Watching(), config, federation).run([collected])
        return collected

    plain = run("none")
    images_plain = list(seen)
    turned, turned_again = (
        run([{"name": "rotate", "degrees": 30}, "flip"]),
        run([{"name": "rotate", "degrees": 30}, "flip"]),
    )
    assert same(turned.snapshots[-1].server, turned_again.snapshots[-1].server)
    assert not same(turned.snapshots[-1].server, plain.snapshots[-1].server)
    assert plain.records[0].scores == turned.records[0].scores  # before any training: the test images are the same
    assert len(seen) == len(images_plain)
    assert not any(torch.equal(a, b) for a, b in zip(seen, images_plain, strict=True))
    assert min(float(x.min()) for x in seen) >= -1  # black is black after normalising, too


def test_named_and_own_normalisation() -> None:
    x = torch.full((2, 3, 1, 1), 255, dtype=torch.uint8)
    theirs = normalise(x, "cifar10")[0].flatten().tolist()
    expected = [(1 - 0.4914) / 0.2023, (1 - 0.4822) / 0.1994, (1 - 0.4465) / 0.2010]
    assert theirs == pytest.approx(expected, abs=1e-5)
    own = normalise(x[:, :1], Normal((0.25,), (0.5,)))
    assert own.flatten().tolist() == [1.5, 1.5]
    with pytest.raises(ConfigError, match="has 3 channels, and these images have 1"):
        normalise(x[:, :1], "imagenet")
    tokens = torch.tensor([[1, 2]], dtype=torch.int32)
    assert normalise(tokens, "half").dtype == torch.int64


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"mean": [0.5]}, "'std' is missing"),
        ({"mean": [0.5, 0.5], "std": [1]}, "2 numbers and std 1"),
        ({"mean": [0.5], "std": [0]}, "above 0"),
        ("halff", "half"),
    ],
)
def test_a_mistaken_normalisation_is_refused(raw: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        structure({"data": {"normalize": raw}}, Config)
