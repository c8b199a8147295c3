"""FedPick: its mask, each term of its loss, every row of the paper's ablation table, and what its records hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

import fedprism as fp
from fedprism import keys
from fedprism.config import Config, structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods.base import Client, Method, Net, State, average, no_draw
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedbn import FedBN
from fedprism.methods.fedpick import FedPick, mask_network
from fedprism.methods.leaves import norms
from fedprism.models import Arch
from fedprism.round.client import Job, make_info, open_slot
from fedprism.round.loop import Loop
from fedprism.round.noise import Noise, keyed_draw
from fedprism.round.training import model_inputs
from tests.harness import BESIDE, Collect, batches, loop_for, models_of, same

pytestmark = pytest.mark.full

UNIFORM = {"weighting": "uniform"}
PARTS = ("net.body", "net.head", "mask", "relevant", "irrelevant")
OFF = {"lam_lce": 0.0, "lam_ent": 0.0, "lam_dis": 0.0}


def config_of(**sections: Any) -> Config:
    train = {"rounds": 2, "batch_size": 16, **sections.pop("train", {})}
    return structure({"train": train, "evaluate": {"splits": ["test"]}, **sections}, Config)


def trained(method: Method, federation: Federation, **sections: Any) -> tuple[Loop, Collect]:
    loop, seen = loop_for(method, config_of(**sections), federation), Collect()
    assert loop.run([seen]) == "finished"
    return loop, seen


def part(state: State | None, prefix: str) -> State:
    """What is under a part, without its name."""
    assert state is not None
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def scores(seen: Collect) -> list[Any]:
    return [(s.correct, s.loss) for record in seen.records for s in record.scores["received"]["test"].values()]


def slot(federation: Federation, method: FedPick, **sections: Any) -> tuple[Client, Tensor, Tensor]:
    """A client about to take its first step, with its training images."""
    config = config_of(**sections)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    data = federation.clients["tinted"]
    client = open_slot(Job(method, config, info, data, 0))
    client.model.train()
    client.draw = keyed_draw(None, "a step")
    return client, model_inputs(data.train.x, config), data.train.y


def gradients(federation: Federation, method: FedPick) -> dict[str, State]:
    """The gradient of one step's loss, by part."""
    client, x, y = slot(federation, method)
    method.loss(client, x, y).backward()
    zeros = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in client.model.named_parameters()}
    return {name: part(zeros, f"{name}.") for name in PARTS}


def logged(client: Client, name: str) -> float:
    """The one value that was logged under a name."""
    assert client.log_counts[name] == 1
    return float(client.log_sums[name])


def silence(mask: nn.Module) -> None:
    """A mask network whose logits are all 0."""
    for parameter in mask.parameters():
        nn.init.zeros_(parameter)


# --- Eq. 9: the mask -------------------------------------------------------------------------------------------------


def test_a_hard_mask_is_exact_and_has_the_gradient_of_the_soft_one(tiny: Federation) -> None:
    client, x, _ = slot(tiny, FedPick())
    rng = torch.Generator().manual_seed(0)
    z, noise, weights = client.model.net.body(x).detach(), *torch.randn(2, len(x), 64, generator=rng)
    z.requires_grad_()  # the mask network sends a gradient on to the body

    def gradient(mask: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad((mask * weights).sum(), [*client.model.mask.parameters(), z]))

    for tau, threshold in ((1.0, 0.5), (3.0, 0.4)):
        method = FedPick(tau=tau, threshold=threshold)
        soft, hard = method.pick(client.model, z, noise)
        by_hand = torch.sigmoid((client.model.mask(z) + noise) / tau)
        torch.testing.assert_close(soft, by_hand)
        assert torch.equal(hard, (by_hand >= threshold).float())
        assert set(hard.unique().tolist()) == {0.0, 1.0}
        expected = gradient(by_hand)
        assert all(g.abs().sum() > 0 for g in expected)
        torch.testing.assert_close(gradient(hard), expected)
        again, used = FedPick(tau=tau, threshold=threshold, mask="soft").pick(client.model, z, noise)
        assert torch.equal(used, soft)
        assert torch.equal(again, soft)


def test_a_feature_at_the_threshold_is_in(tiny: Federation) -> None:
    """Of logits 0 the soft mask is 1/2 exactly."""
    client, x, _ = slot(tiny, FedPick())
    silence(client.model.mask)
    z = client.model.net.body(x)
    for threshold, chosen in ((0.5, 1.0), (0.500001, 0.0)):
        assert (FedPick(threshold=threshold).pick(client.model, z, 0.0)[1] == chosen).all()


@pytest.mark.parametrize("threshold", [0.5, 0.3, 0.8])
def test_training_draws_the_noise_of_a_fair_choice(threshold: float, tiny: Federation) -> None:
    """The difference of two Gumbel variables is logistic: with logits 0 and tau 1 the soft mask is uniform."""
    method = FedPick(threshold=threshold)
    client, x, y = slot(tiny, method)
    silence(client.model.mask)
    drawn: dict[str, Tensor] = {}

    def draw(name: str, *shape: int) -> Tensor:
        assert name not in drawn
        drawn[name] = keyed_draw(None, "a step")(name, *shape)
        return drawn[name]

    client.draw = draw
    client.model.net.body.eval()
    images = x.repeat(5, 1, 1, 1)
    method.loss(client, images, y.repeat(5))
    first, second = drawn.values()
    assert first.shape == second.shape == (200, 64)  # one for every image and feature
    assert not torch.equal(first, second)
    assert logged(client, "selected") == pytest.approx(1 - threshold, abs=0.02)  # four deviations of 12,800 draws


@pytest.mark.parametrize("mask", ["hard", "soft"])
def test_the_logits_decide_too(mask: Any, tiny: Federation) -> None:
    """With logits far above the noise everything is picked, far below nothing; a high temperature softens that."""
    for bias, selected in ((40.0, 1.0), (-40.0, 0.0)):
        client, x, y = slot(tiny, FedPick(mask=mask))
        silence(client.model.mask)
        nn.init.constant_(client.model.mask[2].bias, bias)
        FedPick(mask=mask).loss(client, x, y)
        assert logged(client, "selected") == selected
        soft, _ = FedPick(tau=40.0).pick(client.model, client.model.net.body(x), 0.0)
        assert torch.allclose(soft, torch.sigmoid(torch.tensor(bias / 40)))


@pytest.mark.parametrize("mask", ["hard", "soft"])
def test_no_noise_at_inference(mask: Any, tiny: Federation) -> None:
    """`no_draw` raises. A hard mask at the threshold 1/2 then depends on the sign of the logits alone: not on tau."""
    client, x, _ = slot(tiny, FedPick(mask=mask))
    client.model.eval()
    cold, hot = (FedPick(mask=mask, tau=tau).predict(client.model, x, no_draw) for tau in (1.0, 10.0))
    assert torch.equal(cold, hot) == (mask == "hard")


# --- Eq. 8 to 15: the loss -------------------------------------------------------------------------------------------


def by_hand(client: Client, x: Tensor, y: Tensor, mask: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four terms of Eq. 15, with PyTorch's own losses."""
    z = client.model.net.body(x)
    one, two = client.draw("plus", *z.shape).double(), client.draw("minus", *z.shape).double()
    logistic = (-(-one.log()).log() + (-two.log()).log()).float()
    m = torch.sigmoid((client.model.mask(z) + logistic) / 2.0)
    m = (m >= 0.5).float() if mask == "hard" else m
    g, p, u = client.model.net.head(z), client.model.relevant(z * m), client.model.irrelevant(z * (1 - m))
    log_g, log_p = g.log_softmax(1), p.log_softmax(1)
    entropy = torch.distributions.Categorical(logits=u).entropy().mean()
    towards_p = kl_div(log_g, log_p, reduction="batchmean", log_target=True)  # KL(p || g)
    towards_g = kl_div(log_p, log_g, reduction="batchmean", log_target=True)  # KL(g || p)
    return cross_entropy(g, y), cross_entropy(p, y), -entropy, towards_p + towards_g


@pytest.mark.parametrize("mask", ["hard", "soft"])
@pytest.mark.parametrize("detach", [False, True])
def test_the_loss_is_the_sum_of_its_terms(mask: Any, detach: bool, tiny: Federation) -> None:
    weights = {"lam_lce": 0.7, "lam_ent": 0.3, "lam_dis": 1.9}
    method = FedPick(tau=2.0, mask=mask, detach=detach, **weights)
    client, x, y = slot(tiny, method)
    gce, lce, ent, dis = by_hand(client, x, y, mask)
    assert ent < -2  # ten classes: at first nearly log 10 of entropy
    assert dis > 1e-3
    torch.testing.assert_close(method.loss(client, x, y), gce + 0.7 * lce + 0.3 * ent + 1.9 * dis)


@pytest.mark.parametrize(
    ("term", "reaches"),
    [
        ("lam_lce", {"net.body", "mask", "relevant"}),
        ("lam_ent", {"net.body", "mask", "irrelevant"}),
        ("lam_dis", {"net.body", "net.head", "mask", "relevant"}),
    ],
)
def test_where_the_gradient_of_a_term_goes(term: str, reaches: set[str], tiny: Federation) -> None:
    without, given = (gradients(tiny, FedPick(**{**OFF, term: weight})) for weight in (0.0, 1.0))
    assert {name for name in PARTS if not same(without[name], given[name])} == reaches
    for name in set(PARTS) - {"net.body", "net.head"}:  # the global cross-entropy alone
        assert all((g == 0).all() for g in without[name].values())
    assert all(g.abs().sum() > 0 for g in without["net.head"].values())


def test_the_entropy_term_makes_irrelevant_features_uncertain(tiny: Federation) -> None:
    """A step along its gradient raises the entropy; the other sign would lower it."""
    method = FedPick(**{**OFF, "lam_ent": 1.0})
    client, x, y = slot(tiny, method)
    rng = torch.Generator().manual_seed(0)
    nn.init.normal_(client.model.irrelevant[-1].weight, std=0.5, generator=rng)  # certain of itself
    before = -by_hand(client, x, y, "hard")[2]
    method.loss(client, x, y).backward()
    with torch.no_grad():
        for parameter in client.model.irrelevant.parameters():
            parameter -= 0.5 * parameter.grad
    assert -by_hand(client, x, y, "hard")[2] > before + 0.01


def test_distillation_moves_both_heads_and_detached_only_the_students(tiny: Federation) -> None:
    """d KL(p || g) / d logits of g = (g - p) / batch. With a gradient on both sides more is added to it."""

    def logit_gradients(method: FedPick) -> tuple[Tensor, ...]:
        client, x, y = slot(tiny, method)
        kept: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[Any, Any, Tensor], None]:
            return lambda module, given, out: kept.update({name: out}) or out.retain_grad()

        client.model.net.head.register_forward_hook(keep("g"))
        client.model.relevant.register_forward_hook(keep("p"))
        plain, full = (replace(method, lam_dis=weight).loss for weight in (0.0, 1.0))
        plain(client, x, y).backward()
        base = kept["g"].grad
        full(client, x, y).backward()
        assert base is not None
        return kept["g"].softmax(1), kept["p"].softmax(1), kept["g"].grad - base, kept["p"].grad

    g, p, to_g, to_p = logit_gradients(FedPick(**OFF, detach=True))
    torch.testing.assert_close(to_g, (g - p) / len(g), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(to_p, (p - g) / len(g), atol=1e-6, rtol=1e-4)

    def more(a: Tensor, b: Tensor) -> Tensor:
        """d KL(a || b) / d logits of a."""
        ratio = (a / b).log()
        return a * (ratio - (a * ratio).sum(1, keepdim=True)) / len(a)

    g, p, to_g, to_p = logit_gradients(FedPick(**OFF))
    torch.testing.assert_close(to_g, (g - p) / len(g) + more(g, p), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(to_p, (p - g) / len(g) + more(p, g), atol=1e-6, rtol=1e-4)
    assert not torch.allclose(to_g, (g - p) / len(g), atol=1e-6, rtol=1e-4)


# --- Table IV: what an ablation reduces to ---------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.67])
def test_without_feature_selection_it_is_fedbn(participation: float, unequal: Federation) -> None:
    clients = {**UNIFORM, "participation": participation}
    ours, seen = trained(FedPick(pfsm=False), unequal, clients=clients)
    theirs, expected = trained(FedBN(), unequal, clients=clients)
    assert same(part(ours.server, "net."), theirs.server)
    assert models_of(ours).keys() == models_of(theirs).keys()
    for client_id, state in models_of(theirs).items():
        assert same(part(models_of(ours)[client_id], "net."), state)
    assert scores(seen) == scores(expected)
    assert [record.up for record in seen.records] == [record.up for record in expected.records]
    score = next(iter(seen.records[-1].scores["received"]["test"].values()))
    assert not score.branches
    assert not score.diagnostics


def test_by_default_clients_count_by_their_images(unequal: Federation) -> None:
    """Eq. 16; so without selection it is FedBN weighted by samples, and not FedBN as its paper has it."""
    ours, _ = trained(FedPick(pfsm=False), unequal)
    assert same(part(ours.server, "net."), trained(FedBN(), unequal, clients={"weighting": "samples"})[0].server)
    assert not same(part(ours.server, "net."), trained(FedBN(), unequal)[0].server)


@pytest.mark.parametrize("mask", ["hard", "soft"])
def test_with_every_weight_zero_the_shared_model_is_fedbns(mask: Any, unequal: Federation) -> None:
    """A weight of 0 is that loss off, bit by bit: nothing of the selection reaches body and head, or is trained."""
    ours, seen = trained(FedPick(**OFF, mask=mask, ensemble="none"), unequal, clients=UNIFORM)
    theirs, expected = trained(FedBN(), unequal, clients=UNIFORM)
    assert same(part(ours.server, "net."), theirs.server)
    assert scores(seen) == scores(expected)
    first = FedPick().build(ours.info.arch, "plain", ours.info, ours.info.seed).state_dict()
    for client_id, state in models_of(ours).items():
        assert same(part(state, "net."), models_of(theirs)[client_id])
        for name in ("mask.", "relevant.", "irrelevant."):
            assert same(part(state, name), part(first, name))


@pytest.mark.parametrize(
    ("weights", "still"),
    [
        ({"lam_ent": 0.0}, {"irrelevant"}),
        ({"lam_lce": 0.0}, set()),  # the distillation still trains the personal head
        ({"lam_dis": 0.0}, set()),
        ({"lam_lce": 0.0, "lam_dis": 0.0}, {"relevant"}),
        ({}, set()),
    ],
)
def test_what_is_not_trained_without_a_loss(weights: Any, still: set[str], tiny: Federation) -> None:
    loop, _ = trained(FedPick(**weights), tiny, train={"rounds": 1})
    first = FedPick().build(loop.info.arch, "plain", loop.info, loop.info.seed).state_dict()
    for state in models_of(loop).values():
        assert {name for name in PARTS if same(part(state, f"{name}."), part(first, f"{name}."))} == still


@pytest.mark.parametrize("head_layers", [1, "all"])
def test_body_and_global_head_travel_without_batch_norm(head_layers: Any, tiny: Federation) -> None:
    loop, seen = trained(FedPick(), tiny, model={"head_layers": head_layers})
    bn, record = trained(FedBN(), tiny, model={"head_layers": head_layers})
    assert {f"net.{name}" for name in bn.server} == loop.server.keys()
    assert seen.records[-1].up == record.records[-1].up
    assert seen.records[-1].down == record.records[-1].down
    for name in ("mask.", "relevant.", "irrelevant."):
        states = [part(state, name) for state in models_of(loop).values()]
        assert not same(states[0], states[1])


def test_shared_batch_norm(unequal: Federation) -> None:
    """`train.bn: shared`: batch norm is averaged with the rest; without selection that is FedAvg, bit by bit."""
    loop, _ = trained(FedPick(), unequal, train={"bn": "shared"})
    model = FedPick().build(loop.info.arch, "plain", loop.info, 0)
    kept = {name for name in norms(model) if name.startswith("net.")}
    assert kept
    assert kept <= loop.server.keys()
    bare, seen = trained(FedPick(pfsm=False), unequal, train={"bn": "shared"})
    theirs, expected = trained(FedAvg(), unequal)
    assert same(part(bare.server, "net."), theirs.server)
    assert scores(seen) == scores(expected)


@pytest.mark.parametrize("head_layers", [1, "all"])
def test_shared_selection_is_the_mask_network_and_both_heads(head_layers: Any, unequal: Federation) -> None:
    """All of it is averaged by samples; batch norm of the heads (`head_layers: all` has some) stays, as elsewhere."""
    loop, seen = trained(FedPick(share_pfsm=True), unequal, model={"head_layers": head_layers})
    model = FedPick().build(loop.info.arch, "plain", loop.info, 0)
    assert loop.server.keys() == set(model.state_dict()) - set(norms(model))
    assert ("relevant.bn3.weight" in model.state_dict()) == (head_layers == "all")
    sizes = [len(data.train) for data in unequal.clients.values()]
    states = [{name: state[name] for name in loop.server} for state in models_of(loop).values()]
    assert same(loop.server, average(states, [size / sum(sizes) for size in sizes]))
    assert not same(states[0], states[1])
    alone = trained(FedPick(), unequal, model={"head_layers": head_layers})[1].records[-1]
    added = sum(t.numel() for name, t in loop.server.items() if not name.startswith("net."))
    assert seen.records[-1].up["plain"] == alone.up["plain"] + 4 * added


def test_ensembles(tiny: Federation) -> None:
    """Scores that are the heads' biases, for which sums of probabilities and of logits prefer different classes."""
    client, x, _ = slot(tiny, FedPick())
    client.model.eval()
    common, own = torch.full((2, 10), -50.0)
    common[:3], own[:3] = torch.tensor([0.0, 4.0, 2.0]), torch.tensor([3.9, 0.0, 2.5])
    with torch.no_grad():
        for head, bias in ((client.model.net.head, common), (client.model.relevant, own)):
            head[-1].weight.zero_()
            head[-1].bias.copy_(bias)
    added, logits, alone = (
        FedPick(ensemble=kind).predict(client.model, x, no_draw) for kind in ("probabilities", "logits", "none")
    )
    torch.testing.assert_close(added.softmax(1)[0], (common.softmax(0) + own.softmax(0)) / 2)
    torch.testing.assert_close(logits[0], common + own)
    torch.testing.assert_close(alone[0], common)
    assert [int(s[0].argmax()) for s in (added, logits, alone)] == [1, 2, 1]
    assert [int(s.argmax()) for s in (common, own)] == [1, 0]
    with torch.no_grad():
        client.model.relevant[-1].bias[0] = 8.0  # now sure of class 0, which the global head alone does not see
    assert FedPick().predict(client.model, x, no_draw).argmax(1).unique().tolist() == [0]
    assert FedPick(ensemble="none").predict(client.model, x, no_draw).argmax(1).unique().tolist() == [1]


# --- sizes and first weights -----------------------------------------------------------------------------------------


def numbers(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("width", "expected"), [(8192, 67_121_152), (4096, 16_783_360), (64, 4_192)])
def test_the_mask_networks_size(width: int, expected: int) -> None:
    with torch.device("meta"):
        network = mask_network(width)
        assert network(torch.empty(2, width)).shape == (2, width)
    assert numbers(network) == expected == width * width + width // 2 + width
    assert [type(layer) for layer in network] == [nn.Linear, nn.ReLU, nn.Linear]


@pytest.mark.parametrize(("layers", "width"), [("all", 8192), (3, 8192), (2, 2048), (1, 512)])
def test_where_the_encoder_ends(layers: Any, width: int) -> None:
    """The digits network of FedBN on 32 x 32 pixels: after the convolutions, the first or the second FC layer."""
    assert Arch("digit6", 10, (3, 32, 32), head_layers=layers).width == width


@pytest.mark.parametrize("layers", [1, "all"])
def test_parts_and_their_first_weights(layers: Any, tiny: Federation) -> None:
    """Body and global head start as everybody's; the three heads are alike in form and differ in their weights."""
    config = config_of(model={"head_layers": layers})
    info = make_info(config, tiny.names, tiny.classes, tiny.shape)
    model: Net = FedPick().build(info.arch, "plain", info, 0)
    assert same(model.net.state_dict(), info.arch.model(0).state_dict())
    assert numbers(model.mask) == numbers(mask_network(info.arch.width))
    heads = [model.net.head, model.relevant, model.irrelevant]
    shapes = [{name: tensor.shape for name, tensor in head.state_dict().items()} for head in heads]
    assert shapes[0] == shapes[1] == shapes[2]
    for name, layer in model.net.head.named_modules():
        if isinstance(layer, nn.Linear):
            weights = [head.get_submodule(name).weight for head in heads]
            assert not any(torch.equal(weights[i], weights[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert same(model.state_dict(), FedPick().build(info.arch, "tinted", info, 0).state_dict())
    other = FedPick().build(info.arch, "plain", info, 1)
    assert not same(part(model.state_dict(), "mask."), part(other.state_dict(), "mask."))


# --- records ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"mask": "soft", "threshold": 0.48}])
def test_records_hold_the_selection_ratio_and_the_accuracy_of_each_branch(
    settings: Any, tiny: Federation, tmp_path: Path
) -> None:
    run = fp.train(tiny, method=FedPick(**settings), rounds=2, out=tmp_path / "run")
    assert all(set(logs) == {"loss/train", "selected"} for logs in run.record.rounds[-1].logs.values())
    best = next(record for record in run.record.rounds if record.round == run.models.snapshot.round)
    ratios = []
    for client_id, data in tiny.clients.items():
        for record in run.record.rounds:
            assert 0 < record.scores["received"]["test"][client_id].diagnostics["selected"] < 1
        kept = best.scores["received"]["test"][client_id]
        model: Net = run.models[client_id].module.eval()
        with torch.no_grad():
            z = model.net.body(model_inputs(data.test.x, run.record.config))
            soft = model.mask(z).sigmoid()
            chosen = (soft >= settings.get("threshold", 0.5)).float()
            m = soft if settings else chosen
            branches = {
                "global": model.net.head(z),
                "relevant": model.relevant(z * m),
                "irrelevant": model.irrelevant(z * (1 - m)),
            }
        assert set(kept.diagnostics) == {"selected"}
        assert kept.diagnostics["selected"] == pytest.approx(float(chosen.mean()), abs=1e-6)
        assert kept.branches == {name: int((s.argmax(1) == data.test.y).sum()) for name, s in branches.items()}
        ratios.append(kept.diagnostics["selected"])
        # On demand: which features are picked of which image, so how often each is.
        selected = run.models[client_id].diagnostics(data.test.x)["selected"]
        assert selected.shape == (len(data.test), 64)
        assert torch.equal(torch.as_tensor(selected), chosen)
        frequency = selected.mean(0)
        assert frequency.shape == (64,)
        assert float(frequency.mean()) == pytest.approx(kept.diagnostics["selected"], abs=1e-6)
    assert len(set(ratios)) > 1


def test_training_logs_the_selection_with_its_noise(tiny: Federation) -> None:
    """One batch, one step: the log is the share of what that step's mask let through."""
    loop, seen = trained(FedPick(tau=2.0), tiny, seed=1, train={"rounds": 1, "batch_size": 64})
    client, x, y = slot(tiny, FedPick(tau=2.0), seed=1)
    (rows,) = batches(len(y), 64, "keep", 2, keys.generator(loop.info.seed, "batches", "", 0, "tinted", 0))
    draw = Noise(BESIDE, loop.info.seed, "noise", 0, "tinted", "train", 0).at(0)
    logits = client.model.mask(client.model.net.body(x[rows]))
    one, two = (draw(name, *logits.shape) for name in ("plus", "minus"))
    kept, quiet = logits - (-one.log()).log() + (-two.log()).log() >= 0, logits >= 0
    share = seen.records[-1].logs["tinted"]["selected"]
    assert share == pytest.approx(float(kept.float().mean()), abs=4e-4)
    assert abs(share - float(quiet.float().mean())) > 3e-3  # the share without noise is another


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tau": 0.0}, "tau.*above 0"),
        ({"tau": -1.0}, "tau.*above 0"),
        ({"lam_lce": -0.1}, "lam_lce.*0 or more"),
        ({"lam_ent": -0.1}, "lam_ent.*0 or more"),
        ({"lam_dis": -0.1}, "lam_dis.*0 or more"),
        ({"threshold": 0.0}, "threshold.*between 0 and 1"),
        ({"threshold": 1.0}, "threshold.*between 0 and 1"),
        ({"mask": "binary"}, "hard, soft.*method.mask"),
        ({"ensemble": "mean"}, "logits, none, probabilities.*method.ensemble"),
        ({"share_bn": True}, "share_bn"),
    ],
)
def test_bad_settings_are_refused(settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        structure(settings, FedPick, "method")
