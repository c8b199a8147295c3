"""What all tests run under, and the small federation that many of them train."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fedprism.engines.processes.handle import Pool, end_all
from fedprism.federation import Federation, make_federation
from tests.download_server import Server, serve
from tests.harness import cut


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are no part of a test's name: packed ones hold the second they were made in, and two workers that collect
    tests of different names run none at all."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The bits depend on the number of intra-op threads, and two on a busy machine can be far slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Converted data of tests do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPRISM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def tiny() -> Federation:
    """Three clients of 40 training and 36 test images, 16 pixels a side."""
    return make_federation("digits-skew", clients=3, seed=0, samples=40, split={"validation": 0.02, "test": 0.1})


@pytest.fixture(scope="session")
def unequal(tiny: Federation) -> Federation:
    """40, 25 and 10 training images, so that weighting by samples and uniform weighting differ."""
    return cut(tiny, (40, 25, 10))


@pytest.fixture(scope="session")
def spare() -> Iterator[Pool]:
    """Worker processes that no engine has at the moment (`Borrowed` in harness.py)."""
    pool: Pool = []
    yield pool
    end_all(pool, os.getpid())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A web server on this machine."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serve() as made:
        yield made
