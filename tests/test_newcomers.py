"""Who was not in training, with every method: it learns whatever a schedule has come to, and can take part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from fedprism.config import Config, structure
from fedprism.federation import Federation
from fedprism.methods import METHODS
from fedprism.methods.base import Context, State, Upload
from fedprism.methods.states import not_finite
from fedprism.round.client import Job, client_evaluate, client_receive, client_round
from fedprism.round.engine import Result
from fedprism.round.loop import Loop
from tests.harness import by_method, loop_for, same

pytestmark = pytest.mark.full

NEW = "new"
ROUNDS = 2  # that are over when somebody new comes
SETTINGS: dict[str, dict[str, Any]] = {
    "fedios": {"max_clients": 4},
    "fedtgp": {"server_epochs": 5},
    "lg-fedavg": {"warmup": 1},
}

every_method = pytest.mark.parametrize("name", by_method())
Trained = Callable[[str], Loop]


def config_of(schedule: Any = "none") -> Config:
    raw = {
        "model": {"name": "mlp", "hidden": [16, 8]},
        "train": {"rounds": ROUNDS + 2, "batch_size": 16, "schedule": schedule},
        "evaluate": {"moments": ["received", "adapted"], "splits": ["train"]},
    }
    return structure(raw, Config)


SCHEDULES = [config_of(), config_of({"name": "step", "every": 1, "gamma": 1e-6})]


def loop_of(name: str, config: Config, federation: Federation) -> Loop:
    return loop_for(structure(SETTINGS.get(name, {}), METHODS[name], "method"), config, federation)


@pytest.fixture(scope="module")
def trained(tiny: Federation) -> Trained:
    """Each method after its first rounds, computed once."""

    def run(name: str) -> Loop:
        loop = loop_of(name, config_of(), tiny)
        for round in range(ROUNDS):
            loop.one_round(round)
        return loop

    return cache(run)


def job_of(loop: Loop, client_id: str, round: int = ROUNDS, config: Config | None = None) -> Job:
    """A client's work where one has come later; that one has the images of a member."""
    info, of = replace(loop.info, later=(NEW,)), "textured" if client_id == NEW else client_id
    data = replace(loop.federation.clients[of], name=client_id)
    return Job(loop.method, config or loop.config, info, data, round)


# --- they learn ------------------------------------------------------------------------------------------------------


@every_method
def test_a_newcomer_adapts_at_the_full_rate(name: str, trained: Trained) -> None:
    """When a schedule has ended it learns what it would have learned without one."""
    loop = trained(name)
    ctx = loop.context(ROUNDS)
    download = loop.method.encode(loop.method.send(loop.server, None, ctx), ctx)
    plain, ended = (client_evaluate(job_of(loop, NEW, config=config), None, download) for config in SCHEDULES)
    assert ended["received"] == plain["received"] != plain["adapted"]
    assert ended["adapted"] == plain["adapted"]


@every_method
def test_a_member_that_has_never_trained_adapts_at_the_full_rate(name: str, tiny: Federation) -> None:
    plain, ended = (loop_of(name, config, tiny).evaluate(ROUNDS, tiny.names) for config in SCHEDULES)
    assert ended["received"] == plain["received"] != plain["adapted"]
    assert ended["adapted"] == plain["adapted"]


# --- they take part --------------------------------------------------------------------------------------------------


def take_part(loop: Loop, server: State, states: dict[str, State | None], round: int) -> list[Upload]:
    """What these clients send in a round, sent for by their names; their states become the new ones."""
    method, ctx, uploads = loop.method, later(loop, round), []
    for client_id, state in states.items():
        there = ctx.replace(client_id=client_id)
        download = method.encode(method.send(server, client_id, there), there)
        job = job_of(loop, client_id, round)
        result = client_round(job, state, download)
        assert isinstance(result, Result)
        states[client_id] = result.state
        uploads.append(Upload(client_id, len(job.data.train), method.decode(result.upload, there)))
    return uploads


def later(loop: Loop, round: int) -> Context:
    return loop.context(round).replace(info=replace(loop.info, later=(NEW,)))


@every_method
def test_a_newcomer_takes_part(name: str, trained: Trained) -> None:
    """It is sent something by its name, and what it sends can be aggregated: by itself, and beside a member's."""
    loop = trained(name)
    server, states = loop.server, {"plain": loop.states["plain"], NEW: None}
    for round in (ROUNDS, ROUNDS + 1):
        uploads = take_part(loop, server, states, round)
        for some in (uploads[1:], uploads):
            after = loop.method.aggregate(server, some, later(loop, round))
            assert {n: t.shape for n, t in after.items()} == {n: t.shape for n, t in server.items()}
            assert not_finite(after) is None
        server = after


@pytest.mark.parametrize("name", ["fedamp", "feddistill", "fedfomo"])
def test_a_server_that_keeps_what_each_sent_keeps_nothing_of_a_newcomer(name: str, trained: Trained) -> None:
    loop = trained(name)
    server, states = loop.server, {"plain": loop.states["plain"], NEW: None}
    uploads, ctx = take_part(loop, server, states, ROUNDS), later(loop, ROUNDS)
    assert same(loop.method.aggregate(server, uploads[1:], ctx), server)
    both, member = (loop.method.aggregate(server, some, ctx) for some in (uploads, uploads[:1]))
    assert same(both, member)
    assert not same(member, server)


def test_a_newcomer_of_fedfomo_begins_with_a_mean(trained: Trained) -> None:
    """Sent for by its name it gets models of members, and begins with their mean, not with a model nobody trained."""
    loop, ctx = trained("fedfomo"), later(trained("fedfomo"), ROUNDS).replace(client_id=NEW)
    download = loop.method.send(loop.server, NEW, ctx)
    assert len(download) == len(loop.info.clients) * len(ctx.shared)  # as few as there are, each is sent
    begun = client_receive(job_of(loop, NEW), None, download)
    means = {n: sum(loop.server[f"of.{c}/{n}"] for c in loop.info.clients) / len(loop.info.clients) for n in ctx.shared}
    for n, expected in means.items():
        torch.testing.assert_close(begun[n], torch.as_tensor(expected))
    again = client_receive(job_of(loop, NEW), begun, {n: t + 1 for n, t in download.items()})
    assert same(again, begun)  # from then on they are mixed in before training


def test_a_newcomers_head_counts_in_lg_fedavg(trained: Trained) -> None:
    """It is sent the whole model, however often, and keeps its own body from its first training on."""
    loop = trained("lg-fedavg")
    states: dict[str, State | None] = {NEW: None}
    first = take_part(loop, loop.server, states, ROUNDS)
    ctx = later(loop, ROUNDS + 1).replace(client_id=NEW)
    server = loop.method.aggregate(loop.server, first, later(loop, ROUNDS))
    assert torch.equal(server["head.fc3.weight"], first[0].state["head.fc3.weight"])
    download = loop.method.send(server, NEW, ctx)
    assert download.keys() == server.keys() - {"started"}
    own = client_receive(job_of(loop, NEW, ROUNDS + 1), states[NEW], download)
    assert torch.equal(own["body.fc1.weight"], (states[NEW] or {})["body.fc1.weight"])
    assert not torch.equal(own["body.fc1.weight"], server["body.fc1.weight"])
