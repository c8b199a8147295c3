"""`describe`: figures of small federations that can be worked out by hand."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest
import torch

from fedprism.errors import FedprismError
from fedprism.federation import ClientData, Federation, Split, contact_sheet, describe
from fedprism.federation.describe import MAX_CLIENTS, SAMPLE

CLASSES = ("a", "b", "c", "d")


def made(
    labels: dict[str, list[int]],
    shift: dict[str, float] | None = None,
    noise: dict[str, float] | None = None,
    domains: dict[str, str] | None = None,
    of_class: float = 0.0,
) -> Federation:
    """Clients whose grey images are noise around 100, shifted by client and, by `of_class`, for each class."""
    rng = np.random.default_rng(0)
    clients = {}
    for name, y in labels.items():
        level = 100 + (shift or {}).get(name, 0.0) + of_class * np.array(y)
        x = rng.normal(level[:, None, None], 20 + (noise or {}).get(name, 0.0), (len(y), 8, 8))
        images = x.clip(0, 255).astype(np.uint8)
        clients[name] = {"train": (images, y), "test": (images[:1], y[:1])}
    return Federation.from_arrays(clients, class_names=CLASSES, validation=0.0, domains=domains)


def test_identical_shares() -> None:
    found = describe(made({"north": [0, 1, 2, 3] * 5, "south": [0, 1, 2, 3] * 10}))
    assert (found.total_variation, found.jensen_shannon) == (0, 0)
    assert (found.smallest, found.largest, found.classes_per_client) == (20, 40, 4)
    assert found.variation == pytest.approx(1 / 3)  # sizes 20 and 40: 30 ± 10
    assert found.gini == pytest.approx(1 / 6)  # mean difference 10, over twice the mean of 30


def test_disjoint_classes() -> None:
    found = describe(made({"north": [0, 1] * 10, "south": [2, 3] * 10}))
    assert found.total_variation == pytest.approx(0.5)  # each has half of what all have
    assert found.classes_per_client == 2
    # From (1/2, 1/2, 0, 0) and the pooled quarters to (3/8, 3/8, 1/8, 1/8).
    own, pooled = log2((1 / 2) / (3 / 8)), (log2((1 / 4) / (3 / 8)) + log2((1 / 4) / (1 / 8))) / 2
    assert found.jensen_shannon == pytest.approx((own + pooled) / 2)
    assert found.features is None
    assert "cannot be said: no two clients have 2 training images of one class each." in str(found)
    assert "shared very unevenly (total variation 0.50)" in str(found)


def test_shares_are_of_all_images_together() -> None:
    """(1, 0) of 10 images and (0, 1) of 30: the pooled shares are a quarter and three quarters."""
    found = describe(made({"north": [0] * 10, "south": [1] * 30}))
    assert found.total_variation == pytest.approx((0.75 + 0.25) / 2)


def test_random_dealing_is_as_even_as_by_chance() -> None:
    rng = np.random.default_rng(1)
    found = describe(made({f"client-{i}": rng.integers(0, 4, 20).tolist() for i in range(30)}))
    assert found.total_variation == pytest.approx(found.by_chance, rel=0.2)
    assert found.total_variation > 0.1
    assert "as evenly as by chance" in str(found)


def test_one_client() -> None:
    found = describe(made({"alone": [0, 1] * 10}))
    assert found.total_variation == 0
    assert str(found) == "1 client of 20 training images: there is nothing to compare it with."


def test_feature_skew_grows_with_the_shift() -> None:
    labels = {name: [0, 1, 2, 3] * 25 for name in ("north", "south", "west")}
    found = [describe(made(labels, {"north": -step, "south": step})).features for step in (0, 2, 10, 40)]
    assert all(one is not None and one.chance == pytest.approx(1 / 3) for one in found)
    accuracies = [one.accuracy for one in found if one]
    distances = [one.distance for one in found if one]
    assert accuracies[0] < 0.45
    assert accuracies[0] < accuracies[1] < accuracies[2] < accuracies[3] + 1e-9
    assert accuracies[3] == pytest.approx(1)
    assert distances == sorted(distances)
    assert distances[0] < 0.2 < 5 < distances[3]


def test_noise_is_feature_skew() -> None:
    labels = {name: [0, 1, 2, 3] * 25 for name in ("north", "south")}
    still, noisy = (describe(made(labels, noise={"south": extra})).features for extra in (0.0, 20.0))
    assert still is not None
    assert noisy is not None
    assert noisy.accuracy > 0.95
    assert noisy.distance > 1 > still.distance


@pytest.mark.parametrize("of_class", [0.0, 40.0])
def test_label_skew_alone_is_not_feature_skew(of_class: float) -> None:
    """Classes that are easy to distinguish do not reveal whose an image is."""
    mostly = {"north": [0] * 80 + [1] * 10 + [2] * 10, "south": [1] * 90 + [0] * 10, "west": [2] * 90 + [1] * 20}
    found = describe(made(mostly, of_class=of_class))
    assert found.total_variation > 0.4
    assert found.features is not None
    assert found.features.accuracy == pytest.approx(found.features.chance, abs=0.1)
    assert found.features.pairs == pytest.approx(0.5, abs=0.1)
    assert found.features.distance < 0.3


def test_feature_skew_shows_under_label_skew() -> None:
    """A shift is seen, however the classes are shared."""
    mostly = {"north": [0] * 80 + [1] * 20, "south": [1] * 80 + [0] * 20}
    found = describe(made(mostly, {"south": 40}, of_class=40.0)).features  # class 0 of south looks as class 1 of north
    assert found is not None
    assert found.accuracy > 0.9


def test_clients_of_a_domain_are_distinguished_by_domain() -> None:
    labels = {f"{domain}-{i}": [0, 1, 2, 3] * 10 for domain in ("dark", "light") for i in range(2)}
    domains = {name: name.partition("-")[0] for name in labels}
    found = describe(made(labels, {name: 60.0 * (of == "light") for name, of in domains.items()}, domains=domains))
    assert found.features is not None
    assert (found.features.what, found.features.compared, found.features.chance) == ("domains", 2, 0.5)
    assert found.features.accuracy == pytest.approx(1)
    assert "tells domains apart with 100 %, chance 50 %" in str(found)


def test_many_clients_are_sampled() -> None:
    labels = {f"client-{i}": [0, 1, 2, 3] * 50 for i in range(30)}
    found = describe(made(labels))
    assert found.features is not None
    assert (found.features.compared, found.features.of) == (MAX_CLIENTS, 30)
    assert found.features.images <= SAMPLE
    assert f"tells {MAX_CLIENTS} of the 30 clients apart" in str(found)


def test_every_class_has_a_chance_of_its_own() -> None:
    """Class 0 is everyone's (a third), class 1 is two clients' (a half): 60 images to 40."""
    shared = {"north": [0] * 20 + [1] * 20, "south": [0] * 20 + [1] * 20, "west": [0] * 20 + [2] * 20}
    found = describe(made(shared)).features
    assert found is not None
    assert found.images == 100
    assert found.chance == pytest.approx((60 / 3 + 40 / 2) / 100)


def test_the_same_every_time() -> None:
    federation = made({"north": [0, 1] * 30, "south": [0, 1] * 30}, {"south": 5})
    assert describe(federation) == describe(federation)


def test_texts() -> None:
    """Clients that use other words are distinguished; 0 is padding and does not count."""
    rng = np.random.default_rng(0)

    def site(name: str, low: int, high: int) -> ClientData:
        y = torch.arange(40) % 2
        x = torch.from_numpy(rng.integers(low, high, (40, 12)).astype(np.int32))
        x[:, 8:] = 0
        return ClientData(name, name, Split(x, y), Split(x[:0], y[:0]), Split(x[:4], y[:4]), 2)

    def federation(*ranges: tuple[int, int]) -> Federation:
        clients = [site(f"site-{i}", *each) for i, each in enumerate(ranges)]
        like = made({"north": [0, 1] * 10})
        public = Split(clients[0].train.x[:0], clients[0].train.y[:0])
        return Federation("texts", {c.name: c for c in clients}, ("a", "b"), (12, 60), 0, like.data, public)

    same, other = describe(federation((1, 60), (1, 60))), describe(federation((1, 30), (30, 60)))
    assert same.features is not None
    assert other.features is not None
    assert same.features.accuracy < 0.65 < other.features.accuracy
    assert same.features.distance < 0.3 < other.features.distance
    assert "training texts each" in str(other)
    assert "texts differ strongly" in str(other)
    with pytest.raises(FedprismError, match="holds texts"):
        contact_sheet(federation((1, 60)))


def test_numbers_have_what_the_sentence_has() -> None:
    found = describe(made({"north": [0, 1] * 20, "south": [0, 1] * 20}))
    numbers = found.numbers()
    assert numbers["label skew: total variation, mean"] == found.total_variation
    assert found.features is not None
    assert numbers["feature skew: accuracy of telling clients apart"] == found.features.accuracy
