"""Noise by purpose: the same whoever asks, in whichever order and however many steps of it at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprism.config import Config, structure
from fedprism.federation import Federation
from fedprism.methods.base import Client, Context, Method, Pass, State
from fedprism.methods.ditto import Ditto
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedbn import FedBN
from fedprism.methods.fedper import FedPer
from fedprism.methods.fedprox import FedProx
from fedprism.methods.fedrep import FedRep
from fedprism.methods.local import Local
from fedprism.round.noise import BLOCK, Noise
from tests.harness import BESIDE, loop_for, models_of, same

STEPS = 2 * BLOCK + 3
SHAPES = [(), (1,), (6,), (2, 3), (3, 2), (23,)]


def noise(*purpose: int | str) -> Noise:
    return Noise(BESIDE, 0, "noise", *purpose)


# --- what it depends on ----------------------------------------------------------------------------------------------


def test_the_same_whoever_asks_in_whichever_order() -> None:
    """One asks step after step; another, who has been asked for other things too, in any order and twice."""
    asked = [(name, shape, step) for name in ("mask", "policy") for shape in ((4,), (2, 3)) for step in range(STEPS)]
    plain = {(name, shape, step): noise().at(step)(name, *shape) for name, shape, step in asked}
    busy = noise()
    for seed in range(3):
        for name, shape, step in random.Random(seed).sample(asked, len(asked)):
            busy.at(step)("something else", 5)
            found = busy.at(step)(name, *shape)
            assert found.shape == shape
            assert torch.equal(found, plain[name, shape, step])


def test_steps_and_blocks_differ() -> None:
    one = noise()
    seen = [one.at(step)("mask", 50) for step in range(STEPS)]
    assert not any((a == b).any() for a, b in combinations(seen, 2))


def test_purposes_names_and_shapes_differ() -> None:
    """The epoch, the client, the round and the pass are parts of the purpose."""
    purposes = [(1, "a", "train", 0), (1, "a", "train", 1), (1, "a", "other", 0), (1, "b", "train", 0)]
    purposes.append((2, "a", "train", 0))
    asked = [(purpose, name) for purpose in purposes for name in ("mask", "policy")]
    seen = [noise(*purpose).at(3)(name, 50) for purpose, name in asked]
    assert not any((a == b).any() for a, b in combinations(seen, 2))
    first = [noise().at(0)("mask", *shape).flatten()[0].item() for shape in SHAPES]
    assert len(set(first)) == len(SHAPES)  # another shape is other noise, not the same cut in another way


def test_it_is_uniform_from_0_to_1() -> None:
    one = noise()
    values = torch.stack([one.at(step)("mask", 100, 40) for step in range(STEPS)])
    assert values.dtype == torch.float32
    assert values.min() >= 0
    assert values.max() < 1
    places = (values.flatten() * 10).long().bincount(minlength=10) / values.numel()
    assert float((places - 0.1).abs().max()) < 0.004  # five deviations of 140,000 draws
    assert float((values.mean((1, 2)) - 0.5).abs().max()) < 0.023  # of every step, five of 4,000
    assert abs(float(torch.corrcoef(values.flatten(1))[0, 1:].abs().max())) < 0.08


def test_the_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    first = noise().at(0)("mask", 3)
    torch.rand(5)
    assert torch.equal(noise().at(0)("mask", 3), first)
    torch.set_rng_state(before)
    noise().at(0)("mask", 3)
    assert torch.equal(torch.get_rng_state(), before)


# --- many steps at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16])
def test_noise_of_some_steps_at_once_is_that_of_each(chunk: int, dtype: torch.dtype) -> None:
    """Whatever was there before; and whether or not the same source was asked for single steps in between."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        alone, mixed = noise(), noise()
        for shape in ((5,), (2, 3), ()):
            for begin in range(0, 3 * BLOCK, chunk):
                out, buffer = torch.full((chunk, *shape), 9.0), torch.full((BLOCK, *shape), 9.0)
                alone.fill("mask", out, begin)
                expected = torch.stack([mixed.at(step)("mask", *shape) for step in range(begin, begin + chunk)])
                assert out.dtype == expected.dtype == dtype
                assert torch.equal(out, expected)
                mixed.fill("mask", buffer[:chunk], begin)  # the first places of a longer one
                assert torch.equal(buffer[:chunk], expected)
                assert (buffer[chunk:] == 9).all()
    finally:
        torch.set_default_dtype(before)


# --- in training -----------------------------------------------------------------------------------------------------


def config_of(**sections: Any) -> Config:
    train = {"rounds": 2, "epochs": 2, "batch_size": 2, **sections.pop("train", {})}
    raw = {"model": {"name": "mlp", "hidden": [8]}, "evaluate": {"splits": ["test"]}, "train": train, **sections}
    return structure(raw, Config)


def drawn_in(config: Config, federation: Federation, *more: Pass) -> dict[tuple[int, str, str], list[Tensor]]:
    """What steps of the passes `train` and `sweep` draw, by round, client and pass; `more` passes come first."""
    drawn: dict[tuple[int, str, str], list[Tensor]] = {}

    @dataclass(frozen=True)
    class Noisy(Method):
        def passes(self, client: Client, ctx: Context) -> list[Pass]:
            def watch(name: str) -> Callable[[Client, Tensor, Tensor], Tensor]:
                def loss(client: Client, x: Tensor, y: Tensor) -> Tensor:
                    mask = client.draw("mask", len(x), 3).clone()
                    drawn.setdefault((ctx.round, ctx.client_id or "", name), []).append(mask)
                    return self.loss(client, x, y)

                return loss

            return [*more, Pass(watch("train")), Pass(watch("sweep"), "sweep", trains=())]

    assert loop_for(Noisy(), config, federation).run([]) == "finished"
    return drawn


def test_passes_draw_by_round_client_pass_epoch_and_step(tiny: Federation) -> None:
    """40 images in batches of 2, so more steps per epoch than a block has; and of 3, where the last one has 4."""
    for batch, sizes in ((2, [2] * 20), (3, [3] * 12 + [4])):
        drawn = drawn_in(config_of(seed=5, train={"batch_size": batch}), tiny)
        assert len(drawn) == 2 * 3 * 2
        for (round, client_id, name), found in drawn.items():
            epochs = [sizes, sizes] if name == "train" else [[40]]
            expected = [
                Noise(BESIDE, 5, "noise", round, client_id, name, epoch).at(step)("mask", size, 3)
                for epoch, cut in enumerate(epochs)
                for step, size in enumerate(cut)
            ]
            assert [len(x) for x in found] == [len(x) for x in expected]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        every = [x[:2] for found in drawn.values() for x in found]
        assert len({tuple(x.flatten().tolist()) for x in every}) == len(every)


def test_a_pass_draws_the_same_whatever_else_is_trained(tiny: Federation) -> None:
    def other(client: Client, x: Tensor, y: Tensor) -> Tensor:
        return client.model(x).square().mean() * client.draw("mask", len(x), 3).mean()

    alone = drawn_in(config_of(), tiny)
    after = drawn_in(config_of(), tiny, Pass(other, "other", epochs=3))
    assert alone.keys() == after.keys()
    for where, found in alone.items():
        assert all(torch.equal(a, b) for a, b in zip(found, after[where], strict=True))


TURNED = {"augment": ["flip", {"name": "rotate", "degrees": 30}, {"name": "crop", "padding": 2}]}
ALL_HEAD = {"name": "mlp", "hidden": [8], "head_layers": "all"}
PAIRS: list[tuple[Method, Method, str, dict[str, Any]]] = [
    (Ditto(lam=0.0), Local(), "personal.", {}),
    (Ditto(lam=0.0), FedAvg(), "common.", {"clients": {"weighting": "uniform"}}),
    (Ditto(lam=0.0, personal_epochs=2), Local(), "personal.", {}),
    (FedProx(mu=0.0), FedAvg(), "", {}),
    (FedBN(), FedAvg(), "", {}),  # of a network without norm layers
    (FedPer(), Local(), "", {"model": ALL_HEAD}),
    (FedRep(head_epochs=2), Local(), "", {"model": ALL_HEAD}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "other", "prefix", "sections"), PAIRS)
def test_images_change_alike_for_a_method_and_what_it_becomes_at_its_edge(
    method: Method, other: Method, prefix: str, sections: dict[str, Any], tiny: Federation
) -> None:
    """Bit by bit, over two epochs of more steps than a block: changes depend on no method and no pass."""

    def states(of: Method, data: dict[str, Any]) -> list[State]:
        loop = loop_for(of, config_of(data=data, **sections), tiny)
        assert loop.run([]) == "finished"
        return list(models_of(loop).values())

    def part(state: State) -> State:
        return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}

    expected, plain = states(other, TURNED), states(other, {})
    assert len(expected) == len(tiny.names)
    for state, found, unchanged in zip(expected, states(method, TURNED), plain, strict=True):
        assert same(part(found), state)
        assert not same(state, unchanged)
