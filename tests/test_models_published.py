"""FedBN's AlexNet, Fed-CO2's small CNN and fastText: published sizes, arithmetic by hand, training by every method."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from fedprism import explain, keys
from fedprism.config import Config, DataConfig, ModelConfig, Named, structure
from fedprism.errors import ConfigError
from fedprism.federation import ClientData, Federation, Split
from fedprism.methods import make
from fedprism.models import MODELS, Arch, architectures, named_arch
from fedprism.models.adapter import Pool2d
from fedprism.models.conv import Biased
from fedprism.round.events import RoundRecord
from tests.harness import Collect, by_method, loop_for, models_of, same

pytestmark = pytest.mark.full

LENGTH, WORDS, CLASSES = 12, 40, 4
ALEXNET_CONVOLUTIONS = [(3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3)]


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "classes", "shape", "settings", "parameters"),
    [
        # weights and biases of the convolutions, of 9216 > 4096 > 4096 > 10, and two for each normed channel
        (
            "alexnet-bn",
            10,
            (3, 256, 256),
            (),
            sum(i * o * k * k + o for i, o, k in ALEXNET_CONVOLUTIONS)
            + (9216 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10)
            + 2 * (64 + 192 + 384 + 256 + 256 + 4096 + 4096),
        ),
        ("convnet-bn", 10, (3, 32, 32), (), 121_686),
        ("convnet-bn", 10, (3, 32, 32), (("bn", False),), 121_686 - 2 * (16 + 32 + 120 + 84)),
        ("fasttext", 4, (200, 98_635), (), 98_635 * 32 + 32 * 32 + 32 + 32 * 4 + 4),
        ("fasttext", 4, (200, 100), (("embedding", 8), ("hidden", 5)), 100 * 8 + 8 * 5 + 5 + 5 * 4 + 4),
    ],
)
def test_published_sizes(
    name: str, classes: int, shape: tuple[int, ...], settings: tuple[tuple[str, Any], ...], parameters: int
) -> None:
    assert Arch(name, classes, shape, settings=settings).parameters == parameters


def test_fedbns_alexnet_has_57_06_million_parameters() -> None:
    made = Arch("alexnet-bn", 10, (3, 256, 256))
    assert f"{made.parameters / 1e6:.2f}" == "57.06"
    fully = sum(p.numel() for part in made.hollow().modules() if isinstance(part, nn.Linear) for p in part.parameters())
    assert f"{fully / 1e6:.1f}" == "54.6"


def test_feature_widths() -> None:
    assert Arch("alexnet-bn", 10, (3, 256, 256)).width == 4096  # FedPick's
    assert Arch("alexnet-bn", 10, (3, 256, 256), "all").width == 9216
    assert Arch("convnet-bn", 10, (3, 32, 32)).width == 84
    assert Arch("convnet-bn", 10, (3, 32, 32), "all").width == 800
    assert Arch("fasttext", 4, (200, 1000)).width == 32


# --- alexnet-bn ------------------------------------------------------------------------------------------------------


def hollow_map(side: int) -> tuple[int, ...]:
    """The shape of what the convolutions of alexnet-bn leave of an image."""
    blocks = dict(Arch("alexnet-bn", 10, (3, 256, 256)).hollow().body.named_children())
    x = torch.empty(2, 3, side, side, device="meta")
    for block in list(blocks.values())[: list(blocks).index("avgpool")]:
        x = block(x)
    return tuple(x.shape)


def test_alexnet_sees_seven_by_seven_at_256_pixels_and_one_at_63() -> None:
    assert hollow_map(256) == (2, 256, 7, 7)
    assert hollow_map(63) == (2, 256, 1, 1)
    with pytest.raises(RuntimeError):
        hollow_map(62)
    with pytest.raises(ConfigError, match="alexnet-bn needs images of 63 x 63"):
        Arch("alexnet-bn", 10, (3, 62, 62))


@pytest.mark.parametrize("shape", [(3, 63, 63), (1, 64, 100), (3, 256, 256)])
def test_alexnet_from_image_to_scores(shape: tuple[int, ...]) -> None:
    model = Arch("alexnet-bn", 7, shape).hollow()
    assert model(torch.empty(2, *shape, device="meta")).shape == (2, 7)


def test_alexnet_is_made_of_real_weights_and_learns() -> None:
    model = Arch("alexnet-bn", 4, (3, 63, 63)).model(0)
    x, y = torch.rand(4, 3, 63, 63, generator=keys.generator("x")), torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0] / 2


@pytest.mark.parametrize(("height", "width"), [(7, 7), (6, 6), (1, 1), (4, 11), (13, 5)])
def test_pooling_of_maps_is_pytorchs(height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width, generator=keys.generator("map"), dtype=torch.float64, requires_grad=True)
    theirs = nn.functional.adaptive_avg_pool2d(x, 6)
    (gradient,) = torch.autograd.grad(theirs.square().sum(), x)
    ours = Pool2d(6, 6)(x)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.square().sum(), x)[0], gradient)


def test_maps_of_a_known_size_are_pooled_as_others() -> None:
    x = torch.randn(2, 3, 7, 11, generator=keys.generator("map"))
    torch.testing.assert_close(Pool2d(6, 5, of=(7, 11))(x), nn.functional.adaptive_avg_pool2d(x, (6, 5)))


# --- what all networks with convolutions have in common --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"), [("cnn4", 32), ("digit6", 28), ("lenet-bn", 16), ("convnet-bn", 32), ("alexnet-bn", 63)]
)
def test_a_pooling_before_its_relu_gives_the_same_bits(name: str, size: int) -> None:
    def scores_and_gradients(relu_first: bool) -> list[torch.Tensor]:
        model = Arch(name, 4, (3, size, size)).model(0)
        blocks = list(model.body.named_children())
        if relu_first:
            for at in [at for at, (block, _) in enumerate(blocks) if block.startswith("pool")]:
                assert blocks[at + 1][0].startswith("relu")
                blocks[at], blocks[at + 1] = blocks[at + 1], blocks[at]
        model.body = nn.Sequential(OrderedDict(blocks))
        scores = model(torch.rand(6, 3, size, size, generator=keys.generator("x")) - 0.5)
        loss = nn.functional.cross_entropy(scores, torch.arange(6) % 4)
        return [scores, *torch.autograd.grad(loss, list(model.parameters()))]

    ctx, before = scores_and_gradients(False), scores_and_gradients(True)
    assert all(torch.equal(one, two) for one, two in zip(ctx, before, strict=True))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_a_bias_that_is_summed_in_two_steps(layout: torch.memory_format) -> None:
    draws = keys.generator("maps")
    maps = torch.randn(3, 5, 4, 6, generator=draws, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    bias = torch.randn(5, generator=draws, dtype=torch.float64, requires_grad=True)
    ours, theirs = Biased.apply(maps.clone(), bias), maps + bias.view(5, 1, 1)
    assert torch.equal(ours, theirs)
    wanted = torch.autograd.grad(theirs.pow(3).sum(), (maps, bias))
    torch.testing.assert_close(torch.autograd.grad(ours.pow(3).sum(), (maps, bias)), wanted)
    assert torch.autograd.gradgradcheck(lambda m, b: Biased.apply(m.clone(), b).pow(3), (maps, bias))


def test_the_gradient_of_a_bias_in_bfloat16_is_rounded_once() -> None:
    maps = torch.randn(16, 5, 20, 20, generator=keys.generator("maps")).bfloat16().requires_grad_()
    bias, toward = (
        torch.zeros(5, dtype=torch.bfloat16, requires_grad=True),
        torch.rand(16, 5, 20, 20, generator=keys.generator("toward")).bfloat16(),
    )
    (found,) = torch.autograd.grad(Biased.apply(maps.clone(), bias), bias, toward)
    assert torch.equal(found, toward.float().sum((2, 3)).sum(0).bfloat16())


# --- convnet-bn ------------------------------------------------------------------------------------------------------


def test_convnet_without_batch_norm_has_the_same_layers() -> None:
    with_bn, without = (Arch("convnet-bn", 10, (3, 32, 32), settings=(("bn", bn),)).model(5) for bn in (True, False))
    assert not any(isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d) for part in without.modules())
    states = [model.state_dict() for model in (with_bn, without)]
    assert list(states[1]) == [name for name in states[0] if ".bn" not in name]
    assert all(torch.equal(states[0][name], leaf) for name, leaf in states[1].items())
    assert Arch("convnet-bn", 10, (3, 32, 32), settings=(("bn", False),)).label == "convnet-bn (bn False)"


# --- fasttext --------------------------------------------------------------------------------------------------------


def test_fasttext_by_hand() -> None:
    model = Arch("fasttext", 2, (4, 3), settings=(("embedding", 2), ("hidden", 1))).model(0)
    with torch.no_grad():
        model.body.embedding.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, -2.0]]))
        model.body.fc1.weight.copy_(torch.tensor([[2.0, -1.0]]))
        model.body.fc1.bias.fill_(-3.0)
        model.head.fc2.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.head.fc2.bias.copy_(torch.tensor([0.5, 0.0]))
    # The mean over all four places, two of them padding: (1 + 3) / 4, (2 - 2) / 4; then 2 * 1 - 0 - 3, unbent.
    texts = torch.tensor([[1, 2, 0, 0]])
    assert model.body(texts).tolist() == [[-1.0]]
    assert model(texts).tolist() == [[-0.5, 1.0]]


def test_the_padding_row_is_zero_and_has_no_gradient() -> None:
    model = Arch("fasttext", CLASSES, (LENGTH, WORDS)).model(0)
    weight = model.body.embedding.weight
    assert weight[0].eq(0).all()
    assert not weight[1:].eq(0).any()
    model(torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])).square().sum().backward()
    assert weight.grad is not None
    assert weight.grad[0].eq(0).all()
    assert not weight.grad[1:4].eq(0).any()
    assert weight.grad[4:].eq(0).all()


def test_padding_counts_as_zeros_whatever_its_row_holds() -> None:
    model = Arch("fasttext", CLASSES, (LENGTH, WORDS)).model(0)
    texts = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])
    before = model(texts)
    with torch.no_grad():
        model.body.embedding.weight[0] = 7.0
    assert torch.equal(model(texts), before)


@pytest.fixture(scope="module")
def texts() -> Federation:
    """Three clients with a dialect each; the class of a text is told by one of its words."""
    clients = {}
    for number, name in enumerate(("north", "south", "west")):
        draw = keys.generator("texts", name)
        y = torch.arange(48) % CLASSES
        x = torch.randint(10 + 10 * number, 20 + 10 * number, (48, LENGTH), generator=draw, dtype=torch.int32)
        x[:, 0] = 2 + y
        x[::3, LENGTH // 2 :] = 0
        train, validation, test = (Split(x[rows], y[rows]) for rows in (slice(32), slice(32, 36), slice(36, 48)))
        clients[name] = ClientData(name, name, train, validation, test, CLASSES)
    none = Split(torch.empty(0, LENGTH, dtype=torch.int32), torch.empty(0, dtype=torch.int64))
    topics = tuple("abcd")
    return Federation("dialects", clients, topics, (LENGTH, WORDS), 0, DataConfig("arrays:dialects"), none)


def settings(method: str, **others: Any) -> Config:
    train = {"rounds": 4, "epochs": 4, "batch_size": 8, "optimizer": {"lr": 0.5}}
    # Their own weights are too much at this rate.
    weak = {"fedsce": {"mu": 0.1}, "feddyn": {"alpha": 0.1}, "pfedme": {"lam": 1.5, "personal_lr": 0.5}}
    named = {"name": method, **weak.get(method, {})}
    return structure({"method": named, "model": "fasttext", "train": train, **others}, Config)


def run(config: Config, texts: Federation) -> Collect:
    """All rounds in memory."""
    seen = Collect()
    assert loop_for(make(config.method), config, texts).run([seen]) == "finished"
    return seen


def accuracy(record: RoundRecord) -> float:
    scores = record.scores["trained"]["test"].values()
    return sum(score.correct for score in scores) / sum(score.total for score in scores)


@pytest.mark.parametrize("method", by_method())
def test_every_method_learns_texts_and_leaves_padding_zero(method: str, texts: Federation) -> None:
    config, seen = settings(method), Collect()
    loop = loop_for(make(config.method), config, texts)
    assert loop.run([seen]) == "finished"
    assert accuracy(seen.records[-1]) > 0.5  # by chance 0.25
    assert len(models_of(loop)) == len(texts.names)
    for state in (loop.server, *models_of(loop).values()):
        for name, leaf in state.items():
            if name.endswith("embedding.weight") and method != "fedsce":  # its subspace pulls at all weights
                assert leaf[0].eq(0).all(), name
                assert leaf[2:].ne(0).any()


def test_without_batch_norm_fedbn_is_fedavg(texts: Federation) -> None:
    first, second = (run(settings(method), texts).snapshots[-1] for method in ("fedavg", "fedbn"))
    assert same(first.server, second.server)


def test_texts_train_to_the_same_bits_in_channels_last(texts: Federation) -> None:
    plain, last = (
        run(settings("fedavg", run={"memory_format": form}), texts).snapshots[-1]
        for form in ("contiguous", "channels_last")
    )
    assert same(plain.server, last.server)


# --- texts and images are told apart ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, family in MODELS.items() if family.takes == "images"])
def test_an_image_model_refuses_texts(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} takes images, but the data are texts; models for texts: fasttext"):
        Arch(name, 4, (200, 1000))


def test_a_text_model_refuses_images() -> None:
    message = "fasttext takes texts, but the data are images; models for images: .*lenet-bn.*vit-tiny"
    with pytest.raises(ConfigError, match=message):
        Arch("fasttext", 4, (3, 16, 16))
    with pytest.raises(ConfigError, match=message):
        architectures(ModelConfig(per_client=["lenet-bn", "fasttext"]), ("a", "b"), 4, (3, 16, 16))
    with pytest.raises(ConfigError, match="lenet-bn takes images"):
        named_arch("lenet-bn", "method.auxiliary", 4, (200, 1000))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"embedding": 0}, "embedding is 0; expected 1 or more"),
        ({"hidden": 1.5}, "1.5 is not a whole number"),
        ({"words": 10}, "unknown key 'words'"),
    ],
)
def test_settings_that_fasttext_does_not_take(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architectures(ModelConfig("fasttext", settings=given), ("a",), 4, (200, 1000))


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_counts_bytes_of_texts() -> None:
    words = explain.data_in_words(ModelConfig("fasttext"), 4, 32)
    assert words == "4 classes, texts of 200 tokens, 98,635 words (as FedCP has AG News)"
    assert explain.data_in_words(ModelConfig("mlp"), 10, 28) == "10 classes, images 3x28x28"
    (counted,) = explain.traffic(make(Named("fedavg")), ModelConfig("fasttext"), classes=4, size=32, rounds=3)
    assert counted.arch.shape == (200, 98_635)
    assert counted.first.down == counted.first.up == 4 * 3_157_508
    both = ModelConfig(per_client=["fasttext", {"name": "fasttext", "hidden": 8}])
    assert [each.arch.width for each in explain.traffic(make(Named("fedproto")), both, 4, 32, 3)] == [8, 8]
    with pytest.raises(ConfigError, match="mlp takes images, but the data are texts"):
        explain.traffic(make(Named("fedproto")), ModelConfig(per_client=["fasttext", "mlp"]), 4, 32, 3)
