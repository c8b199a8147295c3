"""The references themselves: each learns, and limit cases that can be worked out by hand hold between them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedprism import keys
from fedprism.models import Arch
from tests.reference import (
    ditto,
    fedavg,
    fedbn,
    fedper,
    fedproto,
    fedprox,
    fedrep,
    fedrod,
    lg_fedavg,
    local,
    scaffold,
    silobn,
)
from tests.reference.common import Scorer, Setup, get, leaves, norm_leaves

pytestmark = pytest.mark.slow

CLASSES, SHAPE, SIZES = 3, (1, 6, 6), (24, 15, 9)
RUNS: dict[str, Callable[[Setup], list[Scorer]]] = {
    "local": local.run,
    "fedavg": fedavg.run,
    "fedprox": lambda setup: fedprox.run(setup, mu=0.1),
    "fedbn": fedbn.run,
    "silobn": silobn.run,
    "fedper": fedper.run,
    "fedrep": lambda setup: fedrep.run(setup, head_epochs=2, body_epochs=1),
    "lg-fedavg": lambda setup: lg_fedavg.run(setup, warmup=2),
    "ditto": lambda setup: ditto.run(setup, lam=0.1),
    "scaffold": scaffold.run,
    "fedproto": lambda setup: fedproto.run(setup, lam=1.0),
    "fedrod": fedrod.run,
}


def draw(client: int, number: int, purpose: str = "train") -> tuple[Tensor, Tensor]:
    """Noisy copies of one pattern per class, at another brightness for each client; every class is there."""
    rng = keys.generator(purpose, client)
    patterns = torch.randn(CLASSES, *SHAPE, generator=keys.generator("patterns"))
    y = torch.arange(number) % CLASSES
    return patterns[y] + 0.5 * torch.randn(number, *SHAPE, generator=rng) + client, y


def make(
    name: str = "lenet-bn", sizes: Sequence[int] = SIZES, batch: int = 6, head_layers: int = 1, **changes: object
) -> Setup:
    """A tiny federation; batches are shuffled anew for every round, client and epoch."""
    data = [draw(client, number) for client, number in enumerate(sizes)]

    def batches(round: int, client: int, epoch: int) -> list[tuple[Tensor, Tensor]]:
        x, y = data[client]
        order = torch.randperm(len(y), generator=keys.generator("order", round, client, epoch))
        return [(x[part], y[part]) for part in order.split(batch)]

    settings = (("hidden", (8, 4)),) if name == "mlp" else ()
    models: list[nn.Module] = [Arch(name, CLASSES, SHAPE, head_layers, settings).model(0) for _ in sizes]
    everyone = list(range(len(sizes)))
    setup = Setup(models, batches, data, 4, 2, 0.05, 0.5, list(sizes), lambda round: everyone)
    return replace(setup, **changes)


def scores(scorers: list[Scorer]) -> Tensor:
    """Every client's scores on test images of its own, `[clients, images, classes]`."""
    return torch.stack([scorer(draw(client, 30, "test")[0]) for client, scorer in enumerate(scorers)])


def same(first: list[Scorer], second: list[Scorer]) -> None:
    torch.testing.assert_close(scores(first), scores(second), rtol=1e-4, atol=1e-5)


def equal_leaves(first: nn.Module, second: nn.Module) -> set[str]:
    """Which leaves agree. Biases are left out: those before a batch norm get no gradient and agree in any case."""
    a, b = (get(model, leaves(model)) for model in (first, second))
    return {name for name in a if torch.allclose(a[name], b[name])} - biases(first)


def biases(model: nn.Module) -> set[str]:
    return {name for name in leaves(model) if name.endswith(".bias")}


def weights(model: nn.Module, prefix: str = "") -> set[str]:
    """The leaves that are not biases."""
    return set(leaves(model, prefix)) - biases(model)


def differ(first: list[Scorer], second: list[Scorer]) -> None:
    assert (scores(first) - scores(second)).abs().max() > 1e-3


# --- of all ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", RUNS)
def test_learns_and_leaves_its_setup_alone(method: str) -> None:
    setup = make(rounds=6)
    before = [get(model, leaves(model)) for model in setup.models]
    result = RUNS[method](setup)
    right = scores(result).argmax(-1) == draw(0, 30, "test")[1]
    assert right.float().mean() > 0.7
    for model, state in zip(setup.models, before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in get(model, leaves(model)).items())


@pytest.mark.parametrize("method", RUNS)
@pytest.mark.parametrize("model", ["mlp", "lenet-bn"])
def test_runs_with_some_participants_and_a_deeper_head(method: str, model: str) -> None:
    result = RUNS[method](make(model, head_layers=2, participants=lambda round: [[0, 2], [1], [2, 0], [0]][round]))
    assert scores(result).isfinite().all()


@pytest.mark.parametrize(
    "method", [name for name in RUNS if name not in ("fedprox", "fedrep", "ditto", "fedproto", "fedrod")]
)
def test_one_client_is_alone(method: str) -> None:
    setup = make(sizes=[12], momentum=0.0)
    same(RUNS[method](setup), local.run(setup))


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold"])
def test_one_model_for_everybody(method: str) -> None:
    first, *others = RUNS[method](make(participants=lambda round: [0, 1]))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))


def test_references_are_short_and_know_nothing_of_the_package() -> None:
    for path in sorted((Path(__file__).parent / "reference").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        named = {getattr(node, "module", None) or "" for node in imports} | {
            a.name for node in imports for a in node.names
        }
        assert not any(name.startswith("fedprism") for name in named), path.name
        most = 155 if "\nVARIANTS" in text else 65  # one that writes out a method's options and ablations too is longer
        assert path.name == "common.py" or len(text.splitlines()) <= most, path.name


# --- one by one ------------------------------------------------------------------------------------------------------


def test_fedavg_of_one_full_step_is_a_step_on_all_data() -> None:
    setup = make("mlp", batch=100, rounds=1, epochs=1)
    x, y = (torch.cat(parts) for parts in zip(*setup.train, strict=True))
    pooled = Arch("mlp", CLASSES, SHAPE, settings=(("hidden", (8, 4)),)).model(0)
    cross_entropy(pooled(x), y).backward()
    for p, averaged in zip(pooled.parameters(), fedavg.run(setup)[0].model.parameters(), strict=True):
        torch.testing.assert_close(averaged, p - setup.lr * p.grad)


def test_local_is_untouched_without_participation() -> None:
    setup = make(participants=lambda round: [0])
    result = local.run(setup)
    first = scores([Scorer(model) for model in setup.models])
    assert torch.equal(scores(result)[1:], first[1:])
    assert not torch.allclose(scores(result)[0], first[0])


def test_fedprox() -> None:
    setup = make()
    same(fedprox.run(setup, mu=0.0), fedavg.run(setup))
    differ(fedprox.run(setup, mu=1.0), fedavg.run(setup))

    def moved(mu: float) -> float:
        pairs = zip(fedprox.run(setup, mu)[0].model.parameters(), setup.models[0].parameters(), strict=True)
        return sum((a - b).square().sum().item() for a, b in pairs)

    assert moved(5.0) < moved(0.0)


def test_batch_norm_at_home() -> None:
    plain, normed = make("mlp"), make()
    alike = replace(plain, samples=[1] * len(plain.samples))  # FedBN averages plainly
    same(fedbn.run(plain), fedavg.run(alike))
    same(silobn.run(plain), fedavg.run(plain))
    averaged, silo, own = fedavg.run(normed), silobn.run(normed), fedbn.run(normed)
    # Training does not read running statistics: SiloBN's parameters are FedAvg's.
    for a, b in zip(silo, averaged, strict=True):
        for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    differ(silo, averaged)
    statistics = norm_leaves(normed.models[0], ("running_mean", "running_var"))
    assert equal_leaves(silo[0].model, silo[1].model) == weights(silo[0].model) - statistics
    assert equal_leaves(own[0].model, own[1].model) == weights(own[0].model) - norm_leaves(own[0].model)


@pytest.mark.parametrize("method", ["fedper", "fedrep"])
def test_bodies_are_shared_and_heads_are_not(method: str) -> None:
    first, second, _ = RUNS[method](make(head_layers=2))
    assert equal_leaves(first.model, second.model) == weights(first.model, "body.")


def test_fedrep_trains_one_part_at_a_time() -> None:
    setup = make(rounds=1)
    heads, bodies = fedrep.run(setup, 2, 0)[0].model, fedrep.run(setup, 0, 1)[0].model
    first = setup.models[0]
    assert equal_leaves(heads, first) == weights(first, "body.")  # statistics too
    assert equal_leaves(bodies, first) == weights(first, "head.")


def test_lg_fedavg() -> None:
    equal = make(sizes=(12, 12, 12))
    same(lg_fedavg.run(equal, warmup=4), fedavg.run(equal))
    differ(lg_fedavg.run(make(), warmup=4), fedavg.run(make()))  # uniform, whatever the sizes
    first, second, _ = lg_fedavg.run(equal, warmup=2)
    assert equal_leaves(first.model, second.model) == weights(first.model, "head.")


def test_lg_fedavg_gives_the_averaged_body_to_all() -> None:
    """A client that never takes part keeps the body of the warm-up's average."""
    setup = make(participants=lambda round: [0, 1])
    absent = lg_fedavg.run(setup, warmup=2)[2].model
    averaged = lg_fedavg.run(replace(setup, rounds=2), warmup=2)[2].model
    assert equal_leaves(absent, averaged) == weights(absent, "body.")


def test_ditto() -> None:
    setup = make()
    same(ditto.run(setup, lam=0.0), local.run(setup))
    differ(ditto.run(setup, lam=1.0), local.run(setup))


def test_penalties_by_hand() -> None:
    """Every parameter 0.5 off its anchor costs mu / 2 * 0.25 each."""
    model = make("mlp").models[0]
    x, y = draw(0, 6)
    count = sum(p.numel() for p in model.parameters())
    proximal = fedprox.proximal(model, mu=0.4)
    towards = ditto.towards(model, [p.clone() for p in model.parameters()], 0.4)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.5
    expected = cross_entropy(model(x), y) + 0.2 * 0.25 * count
    torch.testing.assert_close(proximal(x, y), expected)
    torch.testing.assert_close(towards(x, y), expected)


def test_scaffold() -> None:
    still = make(sizes=(12, 12, 12), momentum=0.0)
    first, one_step = replace(still, rounds=1), make(sizes=(12, 12, 12), momentum=0.0, batch=12, epochs=1)
    same(scaffold.run(first), fedavg.run(first))  # all control variates are zero
    same(scaffold.run(one_step), fedavg.run(one_step))  # the corrections of one step cancel in the mean
    differ(scaffold.run(still), fedavg.run(still))
    same(scaffold.run(still), scaffold.run(replace(still, momentum=0.5)))


def test_scaffold_by_hand() -> None:
    """Losses of slope +1 and -3 on one weight, a step of 0.1 per round; both take part, then each alone."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:  # scores (0, sw) and label 0: a loss of log(1 + e^(sw))
            return self.w * x

    slopes = [torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, -6.0]])]
    y = torch.tensor([0])
    setup = Setup(
        models=[Weight(), Weight()],
        batches=lambda round, client, epoch: [(slopes[client], y)],
        train=[(slope, y) for slope in slopes],
        rounds=3,
        epochs=1,
        lr=0.1,
        momentum=0.0,
        samples=[1, 1],
        participants=lambda round: [[0, 1], [0], [1]][round],
    )
    # Round 1 at w = 0: log(1 + e^(sw)) has slope s/2: +1 and -3. So y = -0.1 and 0.3, w = 0.1, c_k = 1 and -3, c = -1.
    # Round 2, client 1: w = 0.1 - 0.1 (g - c_1 + c), then c_1 = g and c moves by (g - 1) / 2.
    g = 2 * torch.sigmoid(torch.tensor(0.2))
    w, c = 0.1 - 0.1 * (g - 1 + -1), -1 + (g - 1) / 2
    # Round 3, client 2, by its c_2 of the first round.
    w = w - 0.1 * (-6 * torch.sigmoid(-6 * w) + 3 + c)
    torch.testing.assert_close(scaffold.run(setup)[1].model.w.detach(), w.reshape(1))


def test_fedproto() -> None:
    setup = make()
    free, alone = fedproto.run(setup, lam=0.0), local.run(setup)
    for a, b in zip(free, alone, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    # One round: a prototype is the mean of all clients' features of its class, each by its own model.
    one = replace(setup, rounds=1)
    result = fedproto.run(one, lam=1.0)
    with torch.no_grad():
        features = torch.cat([s.model.eval().body(x)[y == 2] for s, (x, y) in zip(result, one.train, strict=True)])
        z = result[0].model.body(one.train[0][0])
    expected = -(z - features.mean(0)).square().sum(1)
    torch.testing.assert_close(result[0](one.train[0][0])[:, 2], expected)


def test_fedproto_loss_by_hand() -> None:
    """Classes 0 and 2 have prototypes, 1 has none: it adds nothing but stays in the denominator."""
    model = make("mlp").models[0]
    x, y = draw(0, 6)  # labels 0 1 2 0 1 2, features of width 4
    prototypes = {0: torch.zeros(4), 2: torch.ones(4)}
    z = model.body(x)
    pull = (z[[0, 3]].square().sum() + (z[[2, 5]] - 1).square().sum()) / 24
    torch.testing.assert_close(fedproto.attracted(model, prototypes, 3.0)(x, y), cross_entropy(model(x), y) + 3 * pull)
    setup = make()
    one, two = replace(setup, rounds=1), replace(setup, rounds=2)  # only the second round knows prototypes
    same(fedproto.run(one, lam=1.0), fedproto.run(one, lam=0.0))
    differ(fedproto.run(two, lam=1.0), fedproto.run(two, lam=0.0))


def test_fedproto_of_classes_that_nobody_has() -> None:
    setup = make(rounds=2)
    twos = [(x[y < 2], y[y < 2]) for x, y in setup.train]
    setup = replace(setup, train=twos, batches=lambda round, client, epoch: [twos[client]])
    scores = fedproto.run(setup, lam=1.0)[0](setup.train[0][0])
    assert (scores[:, 2:] < scores[:, :2].amin(1, keepdim=True) - 9e5).all()
    untrained = replace(setup, rounds=0)
    same(fedproto.run(untrained, lam=1.0), local.run(untrained))


def test_fedproto_keeps_a_prototype_that_nobody_renews() -> None:
    setup = make(rounds=2, participants=lambda round: [[0], [1]][round])
    x, y = setup.train[1]
    lacking = [setup.train[0], (x[y > 0], y[y > 0]), setup.train[2]]
    setup = replace(setup, train=lacking, batches=lambda round, client, epoch: [lacking[client]])
    once, twice = fedproto.run(replace(setup, rounds=1), lam=1.0)[0], fedproto.run(setup, lam=1.0)[0]
    images = draw(0, 12)[0]  # client 0's model is the same in both: it took part in the first round only
    torch.testing.assert_close(once(images)[:, 0], twice(images)[:, 0])
    assert not torch.allclose(once(images)[:, 1], twice(images)[:, 1])


def test_fedproto_of_different_models() -> None:
    setup = make("mlp")
    setup.models[1] = Arch("mlp", CLASSES, SHAPE, settings=(("hidden", (6, 4)),)).model(1)
    assert scores(fedproto.run(setup, lam=1.0)).isfinite().all()


def test_fedrod() -> None:
    setup = make()
    generic, averaged = fedrod.run(setup, gamma=0.0), fedavg.run(setup)
    for a, b in zip(generic, averaged, strict=True):  # the personal head sends no gradient back
        torch.testing.assert_close(get(a.model, leaves(b.model)), get(b.model, leaves(b.model)))
    personal = [a.model.personal.fc2.weight for a in generic]
    assert not torch.equal(personal[0], personal[1])
    lacking = [(x[y < 2], y[y < 2]) for x, y in setup.train]
    skewed = replace(setup, train=lacking, batches=lambda round, client, epoch: [lacking[client]])
    result = fedrod.run(skewed)
    assert scores(result).isfinite().all()
    # Balanced softmax leaves the generic score of an absent class alone: its bias gets no gradient.
    assert torch.equal(result[0].model.head.fc2.bias[2], setup.models[0].head.fc2.bias[2])
    assert not torch.equal(fedavg.run(skewed)[0].model.head.fc2.bias[2], setup.models[0].head.fc2.bias[2])
