"""The papers' set-ups as configurations: each can be read, resolved and, where the data are, made a federation."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fedprism import config as configuration
from fedprism.api import resolve
from fedprism.data import DATASETS
from fedprism.federation import build_federation
from fedprism.federation.partitions import partition_of
from fedprism.methods import METHODS
from fedprism.records import Protocol

SETUPS = sorted((Path(__file__).parent.parent / "experiments" / "setups").glob("*.yaml"))
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))


def ids(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", SETUPS, ids=ids)
def test_a_set_up_can_be_read_and_names_things_that_there_are(path: Path) -> None:
    config = resolve(configuration.read(path))
    assert config.data.name in DATASETS
    partition_of(config.data.partition)


@pytest.mark.parametrize("path", SETUPS, ids=ids)
def test_the_command_in_the_first_line_is_right(path: Path) -> None:
    words = shlex.split(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "))
    assert words[:2] == ["fedprism", "compare"]
    assert words[2] == f"experiments/setups/{path.name}"
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given.keys() == {"--methods", "--seeds", "--protocol"}
    for method in given["--methods"].split(","):
        assert method in METHODS
    assert [int(seed) for seed in given["--seeds"].split(",")]
    Protocol.parse(given["--protocol"])


@pytest.mark.slow
@pytest.mark.parametrize("path", SETUPS, ids=ids)
def test_a_set_up_makes_its_federation_of_real_data(path: Path) -> None:
    if "FEDPRISM_DATA" not in os.environ:
        pytest.skip("set FEDPRISM_DATA to the folder of the benchmark data")
    data = configuration.read(path).data
    if data.name.startswith("domainnet"):
        pytest.skip("DomainNet is not among the benchmark data")
    if data.name == "digits-five":
        data = replace(data, domains=("mnist", "mnist-m", "svhn", "usps"))
        if data.partition.settings.get("clients") == 20:
            data = replace(data, samples=None)
    if data.image_size == 256:
        data = replace(data, image_size=64)
    made = build_federation(data, 0)
    wanted = data.partition.settings.get("clients")
    assert wanted in (None, len(made.clients))
    if data.samples is not None:
        assert {len(client.train) for client in made.clients.values()} == {data.samples}
