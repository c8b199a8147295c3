"""Models: published sizes, body and head by construction, first weights by key, and errors that say what to do."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from fedprism import keys
from fedprism.config import ModelConfig, structure
from fedprism.errors import ConfigError, FedprismError
from fedprism.models import MODELS, Arch, Family, architectures, initialise, last_linear

CLIENTS = ("plain", "tinted", "blurred")
LAYERS = {"mlp": 3, "lenet-bn": 2, "cnn4": 2, "digit6": 3, "resnet18": 1}
SMALL = {"resnet18": (("width", 8),)}


def arch(name: str, side: int = 16, head_layers: int | str = 1, classes: int = 10) -> Arch:
    return Arch(name, classes, (3, side, side), head_layers, SMALL.get(name, ()))


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
    model = Arch(name, classes, shape).model(0)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("side", [16, 28, 32])
@pytest.mark.parametrize("name", list(MODELS))
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
    assert Arch("resnet18", 10, (3, 32, 32)).width == 512


def test_images_need_not_be_square() -> None:
    for name in MODELS:
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


@pytest.mark.parametrize("name", list(MODELS))
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


@pytest.mark.parametrize("name", list(MODELS))
def test_global_generators_are_left_alone(name: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    arch(name).model(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@pytest.mark.parametrize("name", list(MODELS))
def test_channels_last_gives_the_same_scores(name: str) -> None:
    plain = arch(name).model(0)
    last = arch(name).model(0).to(memory_format=torch.channels_last)
    x = images(16)
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), plain(x), rtol=1e-4, atol=1e-5)


def test_scores_are_the_head_of_the_body() -> None:
    model = arch("lenet-bn").model(0).eval()
    assert torch.equal(model(images(16)), model.head(model.body(images(16))))


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

    with pytest.raises(FedprismError, match=r"'gate.0' \(Bare\) holds parameters .* `reset_parameters`"):
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
    with pytest.raises(FedprismError, match=r"'shift' \(Shift\) holds buffers"):
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
@pytest.mark.parametrize("name", list(MODELS))
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
        ({"per_client": {"plian": "mlp"}}, "unknown client 'plian'. Did you mean 'plain'"),
        ({"per_client": ["mlp", {"width": 3}]}, "per_client of 'tinted' is .* mapping with a `name`"),
        ({"per_client": ["mlp", "cnn5"]}, "unknown model 'cnn5'"),
        ({"per_client": ["mlp"], "width": 3}, "model.width stands beside model.per_client"),
    ],
)
def test_mistakes_in_per_client(model: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(model)
