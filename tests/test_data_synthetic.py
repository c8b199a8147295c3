"""A synthetic federation: exact sizes, skews that grow with their numbers and are absent at 0, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fedprism.config import DataConfig
from fedprism.data import Dataset, load
from fedprism.errors import ConfigError, DataError
from fedprism.federation import make_federation


def make(options: str = "", seed: int = 0, **settings: object) -> Dataset:
    return load(DataConfig(name=f"synthetic?{options}", **settings), seed)  # type: ignore[arg-type]


def sizes(dataset: Dataset) -> np.ndarray:
    return np.bincount(dataset.domains.numpy(), minlength=len(dataset.domain_names))


def table(dataset: Dataset) -> np.ndarray:
    """Images [client, class]."""
    flat = dataset.domains.numpy() * len(dataset.class_names) + dataset.labels.numpy()
    return np.bincount(flat, minlength=len(dataset.domain_names) * len(dataset.class_names)).reshape(
        len(dataset.domain_names), -1
    )


def total_variation(dataset: Dataset) -> float:
    """Mean distance of clients' class shares from everybody's."""
    counts = table(dataset)
    shares = counts / counts.sum(1, keepdims=True)
    return float(np.abs(shares - counts.sum(0) / counts.sum()).sum(1).mean() / 2)


def accuracy(dataset: Dataset, targets: torch.Tensor) -> float:
    """Of a linear model on the second half of each client's shuffled images, trained on the first."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    x = dataset.images[order].flatten(1).numpy() / 255.0 - 0.5
    y, half = targets[order].numpy(), len(order) // 2
    return float(LogisticRegression(max_iter=200).fit(x[:half], y[:half]).score(x[half:], y[half:]))


# --- what is asked for is what there is ------------------------------------------------------------------------------


def test_the_defaults() -> None:
    dataset = make()
    assert dataset.images.shape == (1000, 3, 16, 16)
    assert dataset.domain_names[0] == "client-0001"
    assert dataset.sites
    assert dataset.is_test is None
    assert (table(dataset) == 10).all()


@pytest.mark.parametrize(
    ("options", "side", "shape"),
    [
        ("clients=3,samples=7,classes=2,channels=1", 4, (21, 1, 4, 4)),
        ("clients=1,samples=4,classes=30", 32, (4, 3, 32, 32)),
        ("clients=7,samples=11,size_skew=2", "auto", (77, 3, 16, 16)),
    ],
)
def test_sizes_are_exact(options: str, side: int | str, shape: tuple[int, ...]) -> None:
    dataset = make(options, image_size=side)
    assert dataset.images.shape == shape
    assert sizes(dataset).min() >= 4


def test_names_sort_in_their_order() -> None:
    names = make("clients=10001,samples=4,channels=1", image_size=4).domain_names
    assert names[0] == "client-00001"
    assert list(names) == sorted(names)
    assert len(set(names)) == 10001


def test_seeds_reproduce_and_differ() -> None:
    options = "clients=5,samples=20,label_skew=0.3,feature_skew=1,size_skew=1,concept=0.5"
    first, again, other = make(options), make(options), make(options, seed=1)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(sizes_tensor(first), sizes_tensor(other))
    before = torch.get_rng_state()
    make(options)
    assert torch.equal(torch.get_rng_state(), before)


def sizes_tensor(dataset: Dataset) -> torch.Tensor:
    return torch.from_numpy(sizes(dataset))


def test_a_client_does_not_depend_on_how_many_there_are() -> None:
    few, many = make("clients=3,samples=20,feature_skew=1"), make("clients=6,samples=20,feature_skew=1")
    assert torch.equal(few.images, many.images[:60])
    assert torch.equal(few.labels, many.labels[:60])


def test_chosen_clients_are_the_same_clients() -> None:
    options = "clients=6,samples=20,feature_skew=1,size_skew=1,label_skew=0.5"
    every, some = make(options), make(options, domains=("client-0005", "client-0002"))
    assert some.domain_names == ("client-0005", "client-0002")
    for number, name in enumerate(some.domain_names):
        own = every.domains == every.domain_names.index(name)
        assert torch.equal(some.images[some.domains == number], every.images[own])
        assert torch.equal(some.labels[some.domains == number], every.labels[own])


def test_many_images_of_one_client_are_made_in_pieces() -> None:
    dataset = make("clients=2,samples=600", image_size=32)  # 1200 x 3072 pixels: more than one piece a client
    assert len(torch.unique(dataset.images.flatten(1), dim=0)) == 1200
    assert abs(dataset.images.float().mean() - 127.5) < 5


# --- skews -----------------------------------------------------------------------------------------------------------


def test_label_skew_grows_from_none_to_one_class_a_client() -> None:
    skews = [0, 0.2, 0.5, 0.8, 1]
    datasets = [make(f"clients=20,samples=100,label_skew={skew}", image_size=4) for skew in skews]
    measured = [total_variation(dataset) for dataset in datasets]
    assert measured[0] == 0
    assert measured == sorted(measured)
    assert measured == pytest.approx([0.9 * skew for skew in skews], abs=0.01)  # two of 20 clients share a class
    assert (table(datasets[-1]) > 0).sum(1).tolist() == [1] * 20


def test_size_skew_grows_from_none() -> None:
    quantiles = []
    for skew in (0, 0.3, 1, 2):
        counts = sizes(make(f"clients=50,samples=60,size_skew={skew}", image_size=4))
        assert counts.sum() == 3000
        assert counts.min() >= 4
        quantiles.append(np.log(counts).std())
    assert quantiles[0] == 0
    assert quantiles == sorted(quantiles)
    assert quantiles[2] == pytest.approx(1, abs=0.25)


def test_feature_skew_makes_clients_separable() -> None:
    """How well a linear model tells four clients apart: not at all at 0, wholly at 1."""
    measured = []
    for skew in (0, 0.1, 0.3, 1):
        dataset = make(f"clients=4,samples=150,classes=2,noise=3,feature_skew={skew}", image_size=8)
        measured.append(accuracy(dataset, dataset.domains))
    assert measured[0] < 0.33
    assert measured == sorted(measured)
    assert measured[-1] > 0.95


def test_concept_gives_the_same_image_another_label() -> None:
    plain, shifted = make("clients=10,samples=20,concept=0"), make("clients=10,samples=20,concept=0.4")
    assert torch.equal(plain.labels, shifted.labels)
    differ = [
        not torch.equal(plain.images[plain.domains == client], shifted.images[plain.domains == client])
        for client in range(10)
    ]
    assert sum(differ) == 4
    quiet = make("clients=10,samples=20,concept=0.4,noise=0")
    reference = quiet.images[quiet.domains == differ.index(False)], quiet.labels[quiet.domains == differ.index(False)]
    pattern = {int(label): image for image, label in zip(*reference, strict=True)}
    for client in range(10):
        own = quiet.domains == client
        agrees = [
            torch.equal(image, pattern[int(label)])
            for image, label in zip(quiet.images[own], quiet.labels[own], strict=True)
        ]
        assert not any(agrees) if differ[client] else all(agrees)


def test_a_linear_model_learns_it_until_noise_is_large() -> None:
    measured = []
    for noise in (0.1, 1, 100):
        dataset = make(f"clients=4,samples=200,noise={noise}", image_size=8)
        measured.append(accuracy(dataset, dataset.labels))
    assert measured[0] == 1
    assert measured[1] > 0.95
    assert measured[2] < 0.5


def test_few_pixels_are_cut_off_at_black_and_white() -> None:
    for options in ("noise=0", "noise=5", "feature_skew=2,noise=0.5", "channels=1"):
        images = make(options).images
        assert ((images == 0) | (images == 255)).float().mean() < 0.05
        assert images.float().std() > 20


# --- as a federation -------------------------------------------------------------------------------------------------


def test_a_client_a_site() -> None:
    made = make_federation("synthetic?clients=7,samples=10", seed=0)
    assert made.names == tuple(f"client-{i:04d}" for i in range(1, 8))
    for client in made.clients.values():
        assert (len(client.train), len(client.validation), len(client.test)) == (7, 1, 2)


def test_the_smallest_client_can_train_and_test() -> None:
    made = make_federation("synthetic?clients=3,samples=4")
    assert all(len(client.train) >= 2 and len(client.test) == 1 for client in made.clients.values())


@pytest.mark.slow
def test_memory_is_little_more_than_the_images() -> None:
    """In a process of its own, as the peak is that of a process's whole life."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not say how much memory a process has had")
    program = """if True:
        import re
        from pathlib import Path
        from fedprism.config import DataConfig
        from fedprism.data import load

        def peak():
            return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

        skews = "label_skew=0.3,feature_skew=1,size_skew=1,concept=0.5"
        load(DataConfig("synthetic?clients=2," + skews), 0)
        before = peak()
        images = load(DataConfig("synthetic?clients=2000,samples=50," + skews), 0).images
        print((peak() - before) / images.nbytes)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < 1.3


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("samples=3", "samples is 3; expected 4 or more"),
        ("clients=0", "clients is 0; expected 1 or more"),
        ("classes=1", "classes is 1; expected 2 or more"),
        ("label_skew=1.5", "label_skew is 1.5; expected 0 to 1"),
        ("concept=-1", "concept is -1.0; expected 0 to 1"),
        ("feature_skew=-1", "feature_skew is -1.0; expected 0 to 5"),
        ("client=5", "Did you mean 'clients'"),
        ("clients", "'clients' is not key=value"),
        ("clients=many", "'many' is not a whole number"),
    ],
)
def test_impossible_requests_are_refused(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(options)


@pytest.mark.parametrize("side", [1, 3, 513])
def test_impossible_sides_are_refused(side: int) -> None:
    with pytest.raises(DataError, match="expected 4 to 512"):
        make("", image_size=side)


@pytest.mark.parametrize(
    ("options", "side", "gib"),
    [
        ("clients=1000,samples=1000000,channels=1000", 512, "244,1"),
        ("clients=1000000000,samples=4,channels=1", 4, ""),
        ("clients=1,samples=4,channels=10000000,feature_skew=1", 4, ""),
        ("clients=1,samples=4,classes=1000000000", 4, ""),
    ],
)
def test_more_than_the_machine_has_is_refused(options: str, side: int, gib: str) -> None:
    if not hasattr(os, "sysconf"):
        pytest.skip("this system does not say how much memory it has")
    with pytest.raises(DataError, match=rf"need {gib}[\d,.]+ GiB, and this machine has"):
        make(options, image_size=side)


def test_unknown_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown domain 'client-0011'"):
        make("", domains=("client-0011",))
