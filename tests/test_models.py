"""Models: published sizes, body and head by construction, first weights by key, and errors that say what to do."""

from __future__ import annotations

import dataclasses
import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedprism import FedProto, LGFedAvg, keys
from fedprism.config import Config, ModelConfig, plain, structure
from fedprism.errors import ConfigError, FedprismError
from fedprism.federation import Federation, make_federation
from fedprism.methods.base import Method, leaves
from fedprism.models import MODELS, Arch, Family, architectures, initialise, last_linear
from fedprism.models.adapter import Pool
from tests.harness import loop_for, models_of

CLIENTS = ("plain", "tinted", "blurred")
LAYERS = {"mlp": 3, "lenet-bn": 2, "cnn4": 2, "digit6": 3, "convnet-bn": 3}
LAYERS |= dict.fromkeys(("resnet18", "resnet34", "resnet50", "vit-b-16", "vit-b-32", "vit-tiny"), 1)
SMALL: dict[str, tuple[tuple[str, Any], ...]] = dict.fromkeys(("resnet18", "resnet34", "resnet50"), (("width", 8),))
SMALL |= dict.fromkeys(("vit-b-16", "vit-b-32", "vit-tiny"), (("width", 24), ("depth", 2), ("heads", 3)))
# Models of images that take small ones; the others are tried in test_models_published.py and test_models_outside.py.
NAMES = [n for n, f in MODELS.items() if f.takes == "images" and f.smallest <= 16 and ":" not in n]
RESNETS = [name for name in MODELS if name.startswith("resnet")]
VITS = [name for name in MODELS if name.startswith("vit")]


def arch(name: str, side: int = 16, head_layers: int | str = 1, classes: int = 10, **adapted: Any) -> Arch:
    return Arch(name, classes, (3, side, side), head_layers, SMALL.get(name, ()), **adapted)


def images(side: int, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=keys.generator("images"))


@pytest.mark.parametrize(
    ("name", "classes", "shape", "parameters"),
    [
        ("cnn4", 10, (1, 28, 28), 582_026),
        ("cnn4", 10, (3, 32, 32), 878_538),
        ("cnn4", 100, (3, 32, 32), 924_708),
        ("cnn4", 200, (3, 64, 64), 5_694_600),
        ("digit6", 10, (3, 28, 28), 14_219_210),
        ("resnet18", 200, (3, 64, 64), 11_279_112),
        # 784*128 + 128, 128*64 + 64, 64*10 + 10
        ("mlp", 10, (1, 28, 28), 109_386),
        # 3*16*25 + 16, 16*32*25 + 32, 32*4*4*64 + 64, 64*10 + 10, and two for each of 16 + 32 + 64 normed channels
        ("lenet-bn", 10, (3, 16, 16), 47_754),
    ],
)
def test_parameter_counts(name: str, classes: int, shape: tuple[int, int, int], parameters: int) -> None:
    made = Arch(name, classes, shape)
    assert sum(p.numel() for p in made.model(0).parameters()) == made.parameters == parameters


@pytest.mark.parametrize(
    ("name", "settings", "parameters"),
    [
        ("resnet18", (), 11_689_512),
        ("resnet34", (), 21_797_672),
        ("resnet50", (), 25_557_032),
        ("vit-b-16", (), 86_567_656),
        ("vit-b-32", (), 88_224_232),
        # DeiT's smallest
        ("vit-tiny", (("patch", 16), ("width", 192), ("depth", 12), ("heads", 3)), 5_717_416),
    ],
)
def test_published_sizes_on_imagenet(name: str, settings: tuple[tuple[str, Any], ...], parameters: int) -> None:
    made = Arch(name, 1000, (3, 224, 224), settings=settings)
    assert made.parameters == parameters
    assert all(parameter.is_meta for parameter in made.hollow().parameters())  # counted, not made


def test_a_model_without_storage_has_the_leaves_of_the_real_one() -> None:
    made = arch("resnet50", features=5, adapter="linear")
    hollow, real = made.hollow().state_dict(), made.model(0).state_dict()
    assert [(name, leaf.shape, leaf.dtype) for name, leaf in hollow.items()] == [
        (name, leaf.shape, leaf.dtype) for name, leaf in real.items()
    ]


@pytest.mark.full
@pytest.mark.parametrize("side", [16, 28, 32])
@pytest.mark.parametrize("name", NAMES)
def test_every_cut_gives_features_and_scores(name: str, side: int) -> None:
    for layers in [*range(1, LAYERS[name] + 1), "all"]:
        cut = arch(name, side, layers)
        model = cut.model(0)
        features = model.body(images(side))
        assert features.shape == (3, cut.width)
        assert model.head(features).shape == (3, 10)
        assert sum(isinstance(part, nn.Linear) for part in model.head) == (LAYERS[name] if layers == "all" else layers)
        assert not any(isinstance(part, nn.Conv2d) for part in model.head)
        model(images(side)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_published_feature_widths() -> None:
    assert Arch("cnn4", 10, (3, 32, 32)).width == 512
    assert Arch("cnn4", 10, (3, 32, 32), "all").width == 1600
    assert Arch("digit6", 10, (3, 28, 28), 2).width == 2048
    assert Arch("digit6", 10, (3, 28, 28), "all").width == 6272
    assert Arch("digit6", 10, (3, 32, 32), 3).width == 8192  # FedPick's
    assert [Arch(name, 10, (3, 32, 32)).width for name in RESNETS] == [512, 512, 2048]
    assert [Arch(name, 10, (3, 32, 32)).width for name in ("vit-b-16", "vit-b-32")] == [768, 768]
    assert Arch("resnet50", 10, (3, 32, 32), settings=(("width", 4),)).width == 128


def test_images_need_not_be_square() -> None:
    for name in NAMES:
        model = Arch(name, 4, (1, 20, 32), settings=SMALL.get(name, ())).model(0)
        assert model(torch.zeros(2, 1, 20, 32)).shape == (2, 4)


def test_leaves_are_named_by_part() -> None:
    one, two = arch("lenet-bn").model(0), arch("lenet-bn", head_layers=2).model(0)
    assert {"body.conv1.weight", "body.fc1.bias", "body.bn3.running_mean", "head.fc2.weight"} <= set(one.state_dict())
    assert {name for name in two.state_dict() if name.startswith("head.bn3.")} == {
        f"head.bn3.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    resnet = set(arch("resnet18").model(0).state_dict())
    assert {"body.layer2.0.downsample.1.running_var", "body.layer4.1.conv2.weight", "head.fc.bias"} <= resnet
    assert "body.layer1.0.downsample.0.weight" not in resnet


@pytest.mark.parametrize("name", [name for name, layers in LAYERS.items() if layers > 1])
def test_first_weights_do_not_depend_on_the_cut(name: str) -> None:
    states = [arch(name, head_layers=layers).model(3).state_dict() for layers in (1, 2, "all")]
    uncut = [{leaf.split(".", 1)[1]: tensor for leaf, tensor in state.items()} for state in states]
    assert uncut[0].keys() == uncut[1].keys() == uncut[2].keys()
    assert all(torch.equal(uncut[0][leaf], other[leaf]) for other in uncut[1:] for leaf in other)


def test_first_weights_do_not_depend_on_other_modules() -> None:
    ten, five = arch("lenet-bn").model(0), arch("lenet-bn", classes=5).model(0)
    assert all(torch.equal(tensor, five.state_dict()[f"body.{leaf}"]) for leaf, tensor in ten.body.state_dict().items())


def test_first_weights_are_keyed_by_seed_and_uncut_name() -> None:
    model = arch("cnn4").model(7)
    with keys.keyed(7, "init", "fc2"):
        fc2 = nn.Linear(512, 10)
    assert torch.equal(model.head.fc2.weight, fc2.weight)
    assert torch.equal(model.head.fc2.bias, fc2.bias)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides(name: str) -> None:
    first, again, other = (arch(name).model(seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert not torch.equal(last_linear(first).weight, last_linear(other).weight)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_modules_of_one_shape_are_drawn_apart() -> None:
    stage = arch("resnet18").model(0).body.layer1
    assert not torch.equal(stage[0].conv1.weight, stage[1].conv1.weight)


def test_resnet_convolutions_are_drawn_by_fan_out() -> None:
    weight = Arch("resnet18", 10, (3, 16, 16)).model(0).body.layer3[1].conv1.weight
    assert weight.std().item() == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.01)


def test_batch_norm_starts_fresh() -> None:
    for part in arch("digit6").model(0).modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            assert part.weight.eq(1).all()
            assert part.bias.eq(0).all()
            assert part.running_mean.eq(0).all()
            assert part.running_var.eq(1).all()
            assert part.num_batches_tracked.item() == 0


@pytest.mark.parametrize("name", NAMES)
def test_global_generators_are_left_alone(name: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    arch(name).model(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@pytest.mark.parametrize("name", NAMES)
def test_channels_last_gives_the_same_scores(name: str) -> None:
    contiguous = arch(name).model(0).double()  # batch norm over three images makes much of the last bits
    last = arch(name).model(0).double().to(memory_format=torch.channels_last)
    x = images(16).double()
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), contiguous(x), rtol=1e-4, atol=1e-5)


def test_scores_are_the_head_of_the_body() -> None:
    model = arch("lenet-bn").model(0).eval()
    assert torch.equal(model(images(16)), model.head(model.body(images(16))))


@pytest.mark.parametrize("name", NAMES)
def test_every_model_works_in_double_precision(name: str) -> None:
    single, double, x = arch(name).model(0).eval(), arch(name).model(0).double().eval(), images(16)
    scores = double(x.double())
    assert scores.dtype == torch.float64
    torch.testing.assert_close(single(x).double(), scores, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_one_step_of_training_moves_every_parameter(name: str) -> None:
    model = arch(name).model(0)
    before = {leaf: p.detach().clone() for leaf, p in model.named_parameters()}
    loss = nn.functional.cross_entropy(model(images(16)), torch.tensor([0, 1, 2]))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    still = [leaf for leaf, p in model.named_parameters() if torch.equal(p, before[leaf])]
    # A bias before batch norm, or of attention's keys, does nothing to the scores.
    assert not [leaf for leaf in still if not leaf.endswith("bias")]
    after = nn.functional.cross_entropy(model(images(16)), torch.tensor([0, 1, 2]))
    assert after.isfinite()


# --- ResNets ----------------------------------------------------------------------------------------------------------


def test_resnet18_keeps_its_names_and_draws() -> None:
    """A run of an older version can be repeated: names, order and the key of every draw are as they were."""
    model = arch("resnet18").model(7)
    names = "\n".join(f"{name} {list(leaf.shape)}" for name, leaf in model.state_dict().items())
    assert (
        hashlib.sha256(names.encode()).hexdigest() == "6bfcfd69c62822f879196fed0a1c8bc9b8c981a75e506d964dd45ae2fe40d822"
    )
    for part in (model.body, model.head):
        for name, module in part.named_modules():
            if isinstance(module, nn.Conv2d):
                expected = torch.empty_like(module.weight)
                with keys.keyed(7, "init", name):
                    nn.init.kaiming_normal_(expected, mode="fan_out", nonlinearity="relu")
                assert torch.equal(module.weight, expected), name
            elif isinstance(module, nn.Linear):
                with keys.keyed(7, "init", name):
                    assert torch.equal(module.weight, nn.Linear(64, 10).weight)


def test_a_bottleneck_has_its_stride_in_the_middle() -> None:
    block = arch("resnet50").model(0).body.layer2[0]
    assert [conv.stride for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]
    assert [conv.kernel_size for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (3, 3), (1, 1)]


@pytest.mark.parametrize("name", RESNETS)
def test_the_small_stem_leaves_small_images_large(name: str) -> None:
    sides = {}
    for stem in ("imagenet", "small"):
        body = Arch(name, 10, (3, 16, 16), settings=(("width", 8), ("stem", stem))).model(0).body
        end = list(dict(body.named_children())).index("layer1")
        sides[stem] = body[:end](images(16)).shape[2]
    assert sides == {"imagenet": 4, "small": 16}


@pytest.mark.parametrize("name", RESNETS)
def test_resnets_are_torchvisions(name: str) -> None:
    theirs = getattr(pytest.importorskip("torchvision.models"), name)(num_classes=10)
    ours = Arch(name, 10, (3, 64, 64)).model(0)
    theirs.load_state_dict({leaf.split(".", 1)[1]: tensor for leaf, tensor in ours.state_dict().items()})
    x = images(64)
    torch.testing.assert_close(ours(x), theirs(x))  # in training: statistics of the batch, and running ones are moved
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


# --- vision transformers ----------------------------------------------------------------------------------------------


def torchvision_name(leaf: str) -> str:
    """What torchvision calls this leaf of a vision transformer."""
    whole = {
        "tokens.token": "class_token",
        "tokens.places": "encoder.pos_embedding",
        "patches": "conv_proj",
        "norm": "encoder.ln",
        "fc": "heads.head",
    }
    _, leaf = leaf.split(".", 1)
    if leaf.startswith("encoder."):
        _, block, rest = leaf.split(".", 2)
        for ours, theirs in {
            "norm1": "ln_1",
            "norm2": "ln_2",
            "attention.into.": "self_attention.in_proj_",
            "attention.out": "self_attention.out_proj",
            "mlp.2": "mlp.3",
        }.items():
            rest = rest.replace(ours, theirs)
        return f"encoder.layers.encoder_layer_{block}.{rest}"
    start = leaf if leaf in whole else leaf.split(".")[0]
    return whole[start] + leaf.removeprefix(start)


@pytest.mark.parametrize(("name", "side"), [("vit-b-16", 32), ("vit-b-32", 64)])
def test_vision_transformers_are_torchvisions(name: str, side: int) -> None:
    models = pytest.importorskip("torchvision.models")
    theirs = getattr(models, name.replace("-", "_"))(num_classes=10, image_size=side)
    ours = Arch(name, 10, (3, side, side)).model(0)
    with torch.no_grad():
        for place, parameter in enumerate(ours.parameters()):  # so that no token, bias or norm is as all others
            parameter += 0.02 * torch.randn(parameter.shape, generator=keys.generator("noise", place))
    theirs.load_state_dict({torchvision_name(leaf): tensor for leaf, tensor in ours.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(ours(images(side)), theirs.eval()(images(side)), rtol=1e-4, atol=1e-4)


def test_attention_is_pytorchs() -> None:
    attention = arch("vit-tiny").model(0).body.encoder[1].attention.double()
    theirs = nn.MultiheadAttention(24, 3, batch_first=True).double()
    names = {"in_proj_weight": "into.weight", "in_proj_bias": "into.bias", "out_proj.weight": "out.weight"}
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += torch.randn(parameter.shape, generator=keys.generator("noise"))
    state = attention.state_dict()
    theirs.load_state_dict({**{k: state[v] for k, v in names.items()}, "out_proj.bias": state["out.bias"]})
    x = torch.randn(2, 5, 24, generator=keys.generator("tokens"), dtype=torch.float64)
    torch.testing.assert_close(attention(x), theirs(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(("side", "patch", "patches"), [(16, 4, 16), (16, 32, 1), (20, 8, 9), (1, 16, 1)])
def test_images_are_filled_up_to_whole_patches(side: int, patch: int, patches: int) -> None:
    settings = (("patch", patch), ("width", 8), ("depth", 1), ("heads", 2))
    model = Arch("vit-tiny", 4, (3, side, side), settings=settings).model(0)
    assert model.body.tokens.places.shape == (1, 1 + patches, 8)
    filled = nn.functional.pad(images(side), (0, -side % patch, 0, -side % patch))
    assert torch.equal(model(images(side)), model(filled))


def test_every_patch_and_its_place_matters() -> None:
    model, x = arch("vit-tiny").model(0), images(16, batch=1)
    scores = model(x)
    for row in range(0, 16, 8):
        for column in range(0, 16, 8):
            other = x.clone()
            other[:, :, row : row + 8, column : column + 8] += 1
            assert not torch.allclose(model(other), scores, atol=1e-7, rtol=0)
    assert not torch.allclose(model(x.roll(8, 3)), scores, atol=1e-7, rtol=0)  # the same patches at other places


def test_first_weights_of_a_vision_transformer() -> None:
    body = Arch("vit-b-16", 10, (3, 32, 32), settings=(("depth", 1),)).model(0).body
    block = body.encoder[0]
    assert body.patches.weight.std().item() == pytest.approx(
        768**-0.5, rel=0.01
    )  # 768 inputs of a patch of 3 x 16 x 16
    assert body.tokens.places.std().item() == pytest.approx(0.02, rel=0.05)
    for leaf in (body.tokens.token, body.patches.bias, block.attention.into.bias, block.attention.out.bias):
        assert leaf.eq(0).all()
    # Uniform up to sqrt(6 / (inputs + outputs)), whose deviation is that by sqrt(3).
    for linear, ends in ((block.attention.into, 768 + 3 * 768), (block.mlp[0], 5 * 768), (block.mlp[2], 5 * 768)):
        assert linear.weight.std().item() == pytest.approx((2 / ends) ** 0.5, rel=0.01)
        assert linear.weight.abs().max().item() <= (6 / ends) ** 0.5
    assert block.attention.out.weight.std().item() == pytest.approx((3 * 768) ** -0.5, rel=0.01)  # PyTorch's
    assert 0 < block.mlp[0].bias.abs().max().item() < 1e-5


def test_layers_are_defined_in_the_order_of_the_forward_pass() -> None:
    """FedSCE constrains the last layers, so their order must be right, in an adapted model too."""
    for name in NAMES:
        model = arch(name, features=6, adapter="linear").model(0)
        ran: list[nn.Module] = []
        for part in model.modules():
            if next(part.parameters(recurse=False), None) is not None:
                part.register_forward_hook(lambda part, *_, ran=ran: ran.append(part))
        model(images(16))
        defined = [part for part in model.modules() if next(part.parameters(recurse=False), None) is not None]
        assert ran == defined, name
        last = list(model.head._modules)[-1]
        assert leaves.last(model, 2) == (
            *("body.adapter.weight", "body.adapter.bias"),
            *(f"head.{last}.weight", f"head.{last}.bias"),
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 5}, "heads is 5 and model.width is 64, .* set heads to a number that divides width"),
        ({"heads": 0}, "heads is 0; expected 1 or more"),
        ({"patch": 0}, "patch is 0"),
        ({"depth": 0}, "depth is 0"),
        ({"mlp": 0}, "mlp is 0"),
        ({"layers": 3}, "unknown key 'layers'"),
    ],
)
def test_settings_that_a_vision_transformer_does_not_take(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architectures(ModelConfig("vit-tiny", settings=settings), CLIENTS, 10, (3, 16, 16))


# --- features of one width --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "features"), [(6, 3), (7, 3), (768, 512), (2048, 768), (4, 4), (3, 7), (1, 5), (5, 1)]
)
def test_pooling_is_pytorchs(width: int, features: int) -> None:
    x = torch.randn(2, width, generator=keys.generator("features"), dtype=torch.float64, requires_grad=True)
    theirs = nn.functional.adaptive_avg_pool1d(x, features)
    (gradient,) = torch.autograd.grad(theirs.square().sum(), x)
    ours = Pool(width, features).double()(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours.square().sum(), x)[0], gradient)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["pool", "linear"])
@pytest.mark.parametrize("name", NAMES)
def test_every_model_is_brought_to_any_width(name: str, adapter: str) -> None:
    for features in (5, 700):
        for layers in {1, LAYERS[name]}:
            made = arch(name, head_layers=layers, features=features, adapter=adapter)
            model = made.model(0)
            assert made.width == features
            assert list(model.body._modules)[-1] == "adapter"
            assert model.body(images(16)).shape == (3, features)
            assert model(images(16)).shape == (3, 10)
            assert sum(isinstance(part, nn.Linear) for part in model.head) == layers
            assert sum(p.numel() for p in model.parameters()) == made.parameters
            model(images(16)).sum().backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_pooling_adds_no_leaf_and_a_layer_adds_two() -> None:
    own, pool, linear = (
        set(made.model(0).state_dict())
        for made in (arch("cnn4"), arch("cnn4", features=64), arch("cnn4", features=64, adapter="linear"))
    )
    assert pool == own
    assert linear - own == {"body.adapter.weight", "body.adapter.bias"}
    assert arch("cnn4", features=64).model(0).head.fc2.weight.shape == (10, 64)


def test_an_adapter_changes_no_other_first_weights() -> None:
    own, adapted = arch("digit6").model(3), arch("digit6", features=64, adapter="linear").model(3)
    body = adapted.body.state_dict()
    assert all(torch.equal(tensor, body[leaf]) for leaf, tensor in own.body.state_dict().items())
    with keys.keyed(3, "init", "adapter"):
        assert torch.equal(adapted.body.adapter.weight, nn.Linear(512, 64).weight)


def test_a_body_of_the_right_width_is_left_alone() -> None:
    own, asked = arch("cnn4"), arch("cnn4", features=512, adapter="linear")
    assert own == asked == arch("cnn4", adapter="linear")
    assert hash(own) == hash(asked)
    assert (asked.features, asked.adapter) == (None, "pool")
    assert all(
        torch.equal(a, b)
        for a, b in zip(own.model(0).state_dict().values(), asked.model(0).state_dict().values(), strict=True)
    )
    assert arch("cnn4", features=64) != arch("cnn4", features=64, adapter="linear") != own


def test_a_pool_is_copied_moved_and_cast_as_the_rest() -> None:
    made = arch("cnn4", features=100)
    state = made.model(0).state_dict()
    other = made.model(1).double()
    other.load_state_dict(state)
    torch.testing.assert_close(other(images(16).double()).float(), made.model(0)(images(16)))


@pytest.mark.parametrize(
    ("adapted", "message"),
    [
        ({"features": 0}, "model.features is 0; expected auto, own, or 1 or more"),
        ({"features": -3}, "model.features is -3"),
        ({"features": True}, "model.features is True"),
        ({"features": 2.5}, "model.features is 2.5"),
        ({"features": "all"}, "model.features is 'all'"),
        ({"features": 8, "adapter": "pol"}, "model.adapter: unknown adapter 'pol'. Did you mean 'pool'"),
        ({"adapter": ["pool"]}, "model.adapter: unknown adapter"),
    ],
)
def test_features_that_cannot_be(adapted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arch("cnn4", **adapted)


@pytest.mark.parametrize(
    ("made", "label"),
    [
        (Arch("resnet18", 10, (3, 32, 32)), "resnet18"),
        (Arch("resnet18", 10, (3, 32, 32), settings=(("width", 16),)), "resnet18 (width 16)"),
        (Arch("vit-tiny", 10, (3, 32, 32), 1, (("depth", 3),), 32), "vit-tiny (depth 3, features 32)"),
        (Arch("vit-b-32", 10, (3, 32, 32), settings=(("patch", 32),)), "vit-b-32"),
        (Arch("mlp", 10, (3, 32, 32), 2, (("hidden", [8, 4]),)), "mlp (hidden [8, 4], head_layers 2)"),
        (Arch("cnn4", 10, (3, 32, 32), "all", (), 9, "linear"), "cnn4 (head_layers 2, features 9, adapter linear)"),
    ],
)
def test_labels_for_people(made: Arch, label: str) -> None:
    assert made.label == label


# --- initialise, last_linear ------------------------------------------------------------------------------------------


def test_new_parts_are_drawn_under_their_own_name() -> None:
    personal, other, whole = nn.Linear(4, 3), nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3))
    initialise(personal, 0, "personal")
    initialise(other, 0, "other")
    initialise(whole, 0, "personal")
    assert not torch.equal(personal.weight, other.weight)
    with keys.keyed(0, "init", "personal.0"):
        expected = nn.Linear(4, 3)
    assert torch.equal(whole[0].weight, expected.weight)


def test_a_module_must_say_how_its_parameters_are_drawn() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

    with pytest.raises(FedprismError, match=r"'gate.0' \(Bare\) has parameters .* `reset_parameters`"):
        initialise(nn.Sequential(Bare()), 0, "gate")
    with pytest.raises(FedprismError, match="initialise, then move"):
        initialise(nn.Linear(2, 2, device="meta"), 0)


def test_a_family_of_a_users_own_must_fill_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", torch.ones(1))

    class Shifted(Family):
        def blocks(self, classes: int, shape: tuple[int, int, int]) -> list[tuple[str, nn.Module]]:
            return [("flatten", nn.Flatten()), ("shift", Shift()), ("fc", nn.Linear(shape[0], classes))]

    monkeypatch.setitem(MODELS._items, "shifted", Shifted)
    with pytest.raises(FedprismError, match=r"'shift' \(Shift\) has buffers"):
        Arch("shifted", 2, (3, 1, 1)).model(0)


def test_last_linear() -> None:
    model = arch("digit6", head_layers="all").model(0)
    assert last_linear(model) is last_linear(model.head) is model.head.fc3
    with pytest.raises(FedprismError, match="no fully connected layer"):
        last_linear(nn.ReLU())


# --- descriptions and errors ------------------------------------------------------------------------------------------


def test_an_arch_is_a_value() -> None:
    default, given = Arch("mlp", 10, (3, 16, 16)), Arch("mlp", 10, [3, 16, 16], 1, (("hidden", [128, 64]),))  # type: ignore[arg-type]
    assert default == given
    assert hash(default) == hash(given)
    assert default != Arch("mlp", 10, (3, 16, 16), settings=(("hidden", [64]),))
    assert Arch("mlp", 10, (3, 16, 16), settings=(("hidden", []),)).width == 768


def test_every_model_has_a_one_line_description() -> None:
    assert all(family.description and "\n" not in family.description for _, family in MODELS.items())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_image(name: str) -> None:
    least = MODELS[name].smallest
    assert arch(name, least).model(0)(images(least)).shape == (3, 10)
    if least > 1:
        with pytest.raises(
            ConfigError, match=f"{name} needs images of {least} x {least} .* set data.image_size to {least}"
        ):
            arch(name, least - 1)
        with pytest.raises(RuntimeError):  # and indeed nothing is left of it
            nn.Sequential(*(block for _, block in MODELS[name]().blocks(10, (3, least - 1, least - 1))))(
                images(least - 1)
            )


@pytest.mark.parametrize(
    ("name", "head_layers", "message"),
    [
        ("resnet18", 2, "head_layers is 2, and resnet18 has 1 fully connected layer; set it to 1 or all"),
        ("cnn4", 3, "cnn4 has 2 fully connected layers; set it to 1, 2 or all"),
        ("cnn4", 0, "head_layers is 0"),
        ("cnn4", "both", "head_layers is 'both'"),
        ("cnn4", True, "head_layers is True"),
    ],
)
def test_head_layers_that_are_not_there(name: str, head_layers: int | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arch(name, head_layers=head_layers)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet18", {"widht": 16}, "model: unknown key 'widht'. Did you mean 'width'"),
        ("resnet18", {"width": 0}, "width is 0; expected 1 or more"),
        ("resnet18", {"width": "16"}, "'16' is not a whole number"),
        ("mlp", {"hidden": [8, 0]}, r"hidden is \(8, 0\)"),
        ("cnn4", {"width": 3}, "unknown key 'width'"),
        ("lenet", {}, "unknown model 'lenet'. Did you mean 'lenet-bn'"),
    ],
)
def test_settings_that_a_model_does_not_take(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architectures(ModelConfig(name, settings=settings), CLIENTS, 10, (3, 16, 16))


# --- who gets which ---------------------------------------------------------------------------------------------------


def chosen(model: object) -> dict[str, Arch]:
    return architectures(structure(model, ModelConfig), CLIENTS, 10, (3, 16, 16))


def test_one_architecture_for_all() -> None:
    archs = chosen({"name": "resnet18", "width": 8, "head_layers": "all"})
    assert tuple(archs) == CLIENTS
    assert set(archs.values()) == {Arch("resnet18", 10, (3, 16, 16), "all", (("width", 8),))}


def test_a_list_is_dealt_in_turn() -> None:
    archs = chosen({"per_client": ["mlp", {"name": "cnn4", "head_layers": 2}]})
    assert [(a.name, a.head_layers) for a in archs.values()] == [("mlp", 1), ("cnn4", 2), ("mlp", 1)]


def test_a_map_names_every_client() -> None:
    archs = chosen(
        {"head_layers": 2, "per_client": {"blurred": "mlp", "plain": "cnn4", "tinted": {"name": "mlp", "hidden": [8]}}}
    )
    assert list(archs) == list(CLIENTS)
    assert [(a.name, a.head_layers) for a in archs.values()] == [("cnn4", 2), ("mlp", 2), ("mlp", 2)]
    assert dict(archs["tinted"].settings) == {"hidden": (8,)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"per_client": []}, r"per_client is \[\]; expected a list"),
        ({"per_client": "mlp"}, "expected a list of models"),
        ({"per_client": {"plain": "mlp", "tinted": "mlp"}}, "no model for blurred"),
        ({"per_client": {1: "mlp", "1": "cnn4"}}, "names a model for '1' twice"),
        ({"per_client": {"plian": "mlp"}}, "unknown client 'plian'. Did you mean 'plain'"),
        ({"per_client": ["mlp", {"width": 3}]}, "per_client of 'tinted' is .* mapping with a `name`"),
        ({"per_client": ["mlp", "cnn5"]}, "unknown model 'cnn5'"),
        ({"per_client": ["mlp"], "width": 3}, "model.width and model.per_client are both set"),
    ],
)
def test_mistakes_in_per_client(model: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(model)


def widths(model: object) -> list[int]:
    return [made.width for made in chosen(model).values()]


MIXED = ["lenet-bn", {"name": "resnet18", "width": 4}, {"name": "mlp", "hidden": [48]}]  # 64, 32 and 48 features


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"per_client": MIXED}, [32, 32, 32]),
        ({"per_client": MIXED, "features": "own"}, [64, 32, 48]),
        ({"per_client": MIXED, "features": 40}, [40, 40, 40]),
        ({"per_client": [{**MIXED[1], "features": 16}, *MIXED[1:]]}, [16, 16, 16]),  # type: ignore[dict-item]
        ({"per_client": [{"name": "lenet-bn", "features": "own"}, *MIXED[1:]]}, [64, 32, 32]),
        ({"per_client": [{"name": "lenet-bn", "features": 20}, *MIXED[1:]], "features": 40}, [20, 40, 40]),
        ({"per_client": [{"name": "lenet-bn", "features": 20}, *MIXED[1:]], "features": "own"}, [20, 32, 48]),
        ({"per_client": dict(zip(CLIENTS, MIXED, strict=True))}, [32, 32, 32]),
        ({"per_client": MIXED, "head_layers": "all"}, [32, 32, 32]),
        ({"name": "lenet-bn"}, [64, 64, 64]),
        ({"name": "lenet-bn", "features": "own"}, [64, 64, 64]),
        ({"name": "lenet-bn", "features": 16}, [16, 16, 16]),
    ],
)
def test_features_meet(model: object, expected: list[int]) -> None:
    assert widths(model) == expected


def test_only_who_needs_an_adapter_has_one() -> None:
    lenet, resnet, mlp = chosen({"per_client": MIXED, "adapter": "linear"}).values()
    assert resnet == Arch("resnet18", 10, (3, 16, 16), settings=(("width", 4),))
    assert (lenet.features, lenet.adapter, mlp.features, mlp.adapter) == (32, "linear", 32, "linear")
    same = chosen({"per_client": ["lenet-bn", {"name": "mlp", "hidden": [64]}]})  # both make 64
    assert {made.features for made in same.values()} == {None}
    own = chosen({"per_client": [{"name": "lenet-bn", "adapter": "linear"}, *MIXED[1:]]})
    assert [made.adapter for made in own.values()] == ["linear", "pool", "pool"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"features": "al"}, "Did you mean 'auto'|unknown value 'al'"),
        ({"features": 0}, "features is 0; expected auto, own, or 1 or more"),
        ({"features": 1.5}, "1.5 is not a whole number"),
        ({"adapter": "pol"}, "Did you mean 'pool'"),
        ({"per_client": ["mlp", {"name": "cnn4", "features": 0}]}, "model.features is 0"),
        (
            {"per_client": ["mlp", {"name": "cnn4", "features": "auto"}]},
            "'tinted' has features: auto, .* a number or own",
        ),
        ({"per_client": ["mlp", {"name": "cnn4", "adapter": "conv"}]}, "unknown adapter 'conv'"),
        ({"per_client": ["mlp", {"name": "cnn4", "featurs": 3}]}, "unknown key 'featurs'. Did you mean 'features'"),
        ({"name": "cnn4", "featurs": 3}, "unknown key 'featurs'. Did you mean 'features'"),
    ],
)
def test_mistakes_in_features(model: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(model)


def test_features_and_adapter_are_written_and_read() -> None:
    for raw in ({"name": "cnn4", "features": 64, "adapter": "linear"}, {"per_client": MIXED, "features": "own"}):
        config = structure({"model": raw}, Config)
        assert structure(plain(config), Config) == config
        assert raw.items() <= plain(config)["model"].items()


@pytest.fixture(scope="module")
def three() -> Federation:
    return make_federation("digits-skew", clients=3, seed=0, samples=20)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["pool", "linear"])
@pytest.mark.parametrize("method", [FedProto(), LGFedAvg(warmup=0)], ids=lambda method: method.id)
def test_resnets_and_vision_transformers_train_together(method: Method, adapter: str, three: Federation) -> None:
    mixed = [{"name": "resnet18", "width": 4}, {"name": "resnet50", "width": 2}, {"name": "vit-tiny", "depth": 1}]
    raw = {"train": {"rounds": 1}, "model": {"per_client": mixed, "adapter": adapter}}
    loop = loop_for(method, structure(raw, Config), three)
    assert {made.width for made in loop.info.archs.values()} == {32}
    assert loop.run([]) == "finished"
    states = list(models_of(loop).values())
    assert len(states) == 3
    shared = [name for name in loop.server if name in states[0] and name != "started"]
    assert shared
    assert all(tensor.isfinite().all() for state in states for tensor in state.values())


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        (FedProto(), {"per_client": MIXED, "features": "own"}, r"\[32, 48, 64\]; set model.features to auto"),
        (
            LGFedAvg(warmup=0),
            {"per_client": ["resnet18", {"name": "resnet18", "width": 4}], "features": "own"},
            r"\[32, 512\]; set model.features to auto",
        ),
        (
            LGFedAvg(warmup=0),
            {"per_client": ["mlp", "lenet-bn"]},
            "mlp: fc3.weight, .* Choose models whose heads agree",
        ),
    ],
)
def test_methods_say_how_features_are_brought_together(
    method: Method, model: object, message: str, three: Federation
) -> None:
    with pytest.raises(ConfigError, match=message):
        loop_for(method, structure({"model": model}, Config), three)


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in MODELS if ":" not in name])
def test_the_page_has_the_numbers_of_the_code(name: str) -> None:
    classes, shape = {"alexnet-bn": (10, (3, 256, 256)), "fasttext": (4, (200, 98_635))}.get(name, (10, (3, 32, 32)))
    made = Arch(name, classes, shape)
    settings = ", ".join(f"`{f.name}`" for f in dataclasses.fields(MODELS[name])) or "none"
    row = f"| `{name}` | {MODELS[name].description} | {settings} | {made.parameters:,} | {made.width:,} |"
    page = Path(__file__).parent.parent / "docs" / "models.md"
    assert row in page.read_text(encoding="utf-8").splitlines(), row


def test_head_layers_all_is_their_number() -> None:
    assert Arch("resnet18", 10, (3, 32, 32), "all") == Arch("resnet18", 10, (3, 32, 32), 1)


def test_a_vision_transformer_by_hand() -> None:
    """Two patches, one block of two heads, each product written out."""
    settings = (("patch", 4), ("width", 6), ("depth", 1), ("heads", 2), ("mlp", 2))
    model = Arch("vit-tiny", 3, (1, 4, 8), settings=settings).model(0).double().eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.3)
    w = {name.removeprefix("body."): tensor for name, tensor in model.state_dict().items()}
    x = torch.randn(2, 1, 4, 8, generator=rng).double() * 1e-3  # so small that the norms' epsilon counts

    def norm(z: Tensor, name: str) -> Tensor:
        mean = z.mean(-1, keepdim=True)
        variance = (z - mean).square().mean(-1, keepdim=True)
        return (z - mean) / (variance + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(z: Tensor, name: str) -> Tensor:
        return z @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    w["tokens.token"] *= 1e-3
    w["tokens.places"] *= 1e-3
    w["patches.bias"] *= 1e-3
    patches = torch.stack([x[..., :4].flatten(1), x[..., 4:].flatten(1)], 1)
    patches = patches @ w["patches.weight"].flatten(1).T + w["patches.bias"]
    z = torch.cat([w["tokens.token"].expand(2, 1, 6), patches], 1) + w["tokens.places"]
    block = "encoder.0"
    qkv = linear(norm(z, f"{block}.norm1"), f"{block}.attention.into")
    heads = []
    for head in (0, 1):
        q, k, v = (qkv[..., 6 * part + 3 * head : 6 * part + 3 * head + 3] for part in range(3))
        heads.append((q @ k.transpose(1, 2) / 3**0.5).softmax(2) @ v)
    z = z + linear(torch.cat(heads, 2), f"{block}.attention.out")
    inner = linear(norm(z, f"{block}.norm2"), f"{block}.mlp.0")
    inner = inner * 0.5 * (1 + torch.erf(inner / 2**0.5))  # GELU
    z = z + linear(inner, f"{block}.mlp.2")
    expected = linear(norm(z[:, 0], "norm"), "head.fc")
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-12)
