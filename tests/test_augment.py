"""Random changes of training images: what they do to pixels, and on what their draws depend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import fedprism as fp
from fedprism.config import Config, Named, Normal, structure
from fedprism.data.images import Crop, Flip, Rotate, augmentation, changes, normalise
from fedprism.errors import ConfigError
from fedprism.federation import Split
from fedprism.methods.base import Client, Context, Draw, Pass, no_draw
from fedprism.round.noise import Noise, keyed_draw
from tests.harness import BESIDE, Collect, loop_for, same


def draw(seed: int = 0) -> Draw:
    return keyed_draw(None, seed)


def images(n: int = 64, height: int = 6, width: int = 9) -> torch.Tensor:
    return draw(1)("images", n, 3, height, width) * 255


def test_flip_mirrors_whole_images_with_its_probability() -> None:
    x = images(400)
    y = Flip(p=0.25)(x, draw())
    kept = (y == x).flatten(1).all(1)
    mirrored = (y == x.flip(3)).flatten(1).all(1)
    assert (kept ^ mirrored).all()
    assert 60 < int(mirrored.sum()) < 140
    assert torch.equal(Flip(p=0.0)(x, draw()), x)
    assert torch.equal(Flip(p=1.0)(x, draw()), x.flip(3))


def test_crop_moves_an_image_by_at_most_its_padding_and_fills_with_black() -> None:
    x = images(200, 7, 5)
    y = Crop(padding=2)(x, draw())
    assert y.shape == x.shape
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    seen = set()
    for image, margin in zip(y, padded, strict=True):
        places = [(i, j) for i in range(5) for j in range(5) if torch.equal(margin[:, i : i + 7, j : j + 5], image)]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 25  # every place comes up


def test_the_least_and_the_largest_number_crop_at_two_corners() -> None:
    x = images(1, 7, 5)
    padded = torch.nn.functional.pad(x, (2, 2, 2, 2))
    for number, place in ((0.0, 0), (1 - 2**-24, 4)):  # the largest below 1 that noise can be
        y = Crop(padding=2)(x, lambda name, *shape, number=number: torch.full(shape, number))
        assert torch.equal(y, padded[:, :, place : place + 7, place : place + 5])


@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
def test_rotation_is_about_the_middle_by_the_drawn_angle(size: tuple[int, int]) -> None:
    """Against Pillow's, image by image: a smooth picture, so that rounding at edges matters little."""
    height, width = size
    y, x = np.mgrid[:height, :width]
    smooth = 128 + 100 * np.sin(x / width * 4 + 1) * np.cos(y / height * 3)
    batch = torch.tensor(smooth, dtype=torch.float32).expand(8, 3, height, width).contiguous()
    turned = Rotate(degrees=40, interpolation="bilinear")(batch, draw(5))
    angles = (2 * draw(5)("angle", 8) - 1) * 40
    inside = np.hypot(x - (width - 1) / 2, y - (height - 1) / 2) < min(height, width) / 2 - 1.5
    picture = Image.fromarray(smooth.astype(np.float32))
    for image, angle in zip(turned, angles.tolist(), strict=True):
        theirs = np.asarray(picture.rotate(angle, resample=Image.Resampling.BILINEAR))
        assert np.abs(image[0].numpy() - theirs)[inside].max() < 2.0, angle
    assert angles.min() < -10
    assert angles.max() > 10


def test_corners_that_turn_in_are_black() -> None:
    """A square and itself turned by an angle have 2 / (1 + sin + cos) of it in common."""
    white = torch.full((300, 1, 64, 64), 255.0)
    turned = Rotate(degrees=30)(white, draw())
    assert set(turned.unique().tolist()) == {0.0, 255.0}  # nearest: no new values
    assert torch.equal(Rotate(degrees=0)(white, draw()), white)
    angle = ((2 * draw()("angle", 300) - 1) * math.radians(30)).abs()
    lost = (turned == 0).flatten(1).float().mean(1)
    torch.testing.assert_close(lost, 1 - 2 / (1 + angle.sin() + angle.cos()), atol=0.02, rtol=0)
    assert float(lost.max()) > 0.14


def test_draws_depend_on_purpose_and_step_alone() -> None:
    x = images(8, 8, 8).to(torch.uint8)
    change = augmentation((Named("flip"), Named("crop", {"padding": 2})))

    def changed(client_id: str, step: int) -> torch.Tensor:
        return change(x, Noise(BESIDE, 0, "augment", "", 3, client_id, 0).at(step))

    assert torch.equal(changed("north", 0), changed("north", 0))
    assert not torch.equal(changed("north", 0), changed("north", 1))
    assert not torch.equal(changed("north", 0), changed("south", 0))
    assert augmentation("none")(x, no_draw) is x  # and nothing is drawn


def test_two_equal_changes_draw_by_themselves() -> None:
    """With the same draws, the second flip would undo the first of every image."""
    x = images(64, 4, 4)
    twice = augmentation((Named("flip"), Named("flip")))(x, draw())
    mirrored = (twice == x.flip(3)).flatten(1).all(1)
    assert 16 < int(mirrored.sum()) < 48


def test_unknown_changes_and_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'flip'"):
        changes((Named("filp"),))
    with pytest.raises(ConfigError, match=r"Did you mean .degrees.*augment: rotate"):
        changes((Named("rotate", {"degree": 3}),))
    with pytest.raises(ConfigError, match=r"padding is 0; expected 1 or more"):
        changes((Named("crop", {"padding": 0}),))
    with pytest.raises(ConfigError, match="this dataset has texts"):
        augmentation((Named("flip"),))(torch.zeros(2, 5, dtype=torch.int32), draw())


def test_training_sees_changed_images_and_tests_do_not() -> None:
    raw = {"train": {"rounds": 2, "batch_size": 16}, "evaluate": {"moments": ["received"]}, "model": {"name": "mlp"}}
    federation = fp.make_federation("digits-skew", clients=2, samples=24)
    seen: list[torch.Tensor] = []

    class Watching(fp.FedAvg):
        def loss(self, client: Client, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.append(x.clone())
            return super().loss(client, x, y)

    def run(augment: object) -> Collect:
        config = structure({**raw, "data": {"augment": augment}}, Config)
        collected = Collect()
        seen.clear()
        loop_for(Watching(), config, federation).run([collected])
        return collected

    plain = run("none")
    images_plain = list(seen)
    turned, turned_again = (run([{"name": "rotate", "degrees": 30}, "flip"]) for _ in range(2))
    assert same(turned.snapshots[-1].server, turned_again.snapshots[-1].server)
    assert not same(turned.snapshots[-1].server, plain.snapshots[-1].server)
    assert plain.records[0].scores == turned.records[0].scores  # before any training: the test images are the same
    assert len(seen) == len(images_plain)
    assert not any(torch.equal(a, b) for a, b in zip(seen, images_plain, strict=True))
    assert min(float(x.min()) for x in seen) >= -1  # black is black after normalising, too


Batches = dict[tuple[int, str, str], list[torch.Tensor]]  # round, client, pass -> the images of its steps


def seen_by_passes(seed: int) -> tuple[Batches, torch.Tensor]:
    """What passes of two clients see of one picture over and over, so that the order of batches plays no part; and the
    picture as a model sees it unchanged."""
    picture = images(1, 8, 8).round().to(torch.uint8)
    x, y = picture.expand(24, -1, -1, -1), torch.arange(24) % 2
    parts = {"train": (x, y), "validation": (x[:8], y[:8]), "test": (x[:8], y[:8])}
    made = fp.Federation.from_arrays({"north": parts, "south": parts}, seed=seed)
    seen: Batches = {}

    class Watching(fp.FedAvg):
        def passes(self, client: Client, ctx: Context) -> list[Pass]:
            def watch(name: str) -> Callable[[Client, torch.Tensor, torch.Tensor], torch.Tensor]:
                def loss(client: Client, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                    seen.setdefault((ctx.round, ctx.client_id or "", name), []).append(x.clone())
                    return self.loss(client, x, y)

                return loss

            return [
                Pass(watch("one"), "one"),
                Pass(watch("two"), "two"),
                Pass(watch("own"), "own", stream="own"),
                Pass(watch("validation"), "validation", data="validation"),
                Pass(watch("public"), "public", data="public"),
                Pass(watch("sweep"), "sweep", trains=()),
            ]

    raw = {"seed": seed, "train": {"rounds": 2, "epochs": 2, "batch_size": 8}, "model": {"name": "mlp", "hidden": [4]}}
    config = structure({**raw, "data": {"augment": ["flip", {"name": "rotate", "degrees": 30}]}}, Config)
    loop_for(Watching(), config, replace(made, public=Split(x[:8], y[:8]))).run([])
    return seen, normalise(picture, "half")


def test_passes_draw_by_seed_stream_round_client_epoch_and_step() -> None:
    (seen, _), (again, _), (other_seed, _) = (seen_by_passes(seed) for seed in (0, 0, 1))

    def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[bool]:
        return [torch.equal(x, other) for x, other in zip(a, b, strict=True)]

    first = seen[0, "north", "one"]
    assert len(first) == 6  # two epochs of three steps
    assert all(equal(first, again[0, "north", "one"]))
    assert not any(equal(first, other_seed[0, "north", "one"]))
    assert not any(equal(first, seen[1, "north", "one"]))
    assert not any(equal(first, seen[0, "south", "one"]))
    assert not any(equal(first[1:], first[:-1]))
    assert not any(equal(first[3:], first[:3]))  # the same steps of another epoch
    assert all(equal(first, seen[0, "north", "two"]))  # of the same stream, whatever its name
    assert not any(equal(first, seen[0, "north", "own"]))


def test_only_passes_that_train_on_the_training_part_see_changed_images() -> None:
    seen, unchanged = seen_by_passes(0)
    for (_, _, name), batches in seen.items():
        for x in batches:
            assert bool((x == unchanged).all()) == (name in ("validation", "public", "sweep")), name


@pytest.mark.parametrize(
    ("name", "mean", "deviation"),
    [
        # Fed-CO2's, for label skew.
        ("cifar10", (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ("cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        # As models that were trained on ImageNet expect it.
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ],
)
def test_named_normalisation(name: str, mean: tuple[float, ...], deviation: tuple[float, ...]) -> None:
    x = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 1, 1)
    black, white = normalise(x, name).flatten(1).tolist()
    assert black == pytest.approx([-m / d for m, d in zip(mean, deviation, strict=True)], abs=1e-5)
    assert white == pytest.approx([(1 - m) / d for m, d in zip(mean, deviation, strict=True)], abs=1e-5)


def test_own_normalisation() -> None:
    x = torch.full((2, 3, 1, 1), 255, dtype=torch.uint8)
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
