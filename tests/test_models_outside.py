"""Models of torchvision and timm: how a network is cut and made repeatable, and, where the libraries are, real ones.

The first part needs neither library: it cuts networks of the same shapes as theirs.
"""

from __future__ import annotations

import copy
import importlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedprism import api, explain, keys
from fedprism.config import Config, ModelConfig, Named, structure
from fedprism.errors import ConfigError
from fedprism.federation import Federation
from fedprism.methods import make
from fedprism.models import MODELS, Arch, architectures, named_arch, outside
from fedprism.models.adapter import Pool2d
from fedprism.round.events import Callback, RoundRecord, Snapshot
from tests.harness import Collect, loop_for, models_of, same

pytestmark = pytest.mark.full

CLASSES = 10


# --- networks of their shapes ----------------------------------------------------------------------------------------


class ResNetLike(nn.Module):
    """Ends in `fc`; draws its own first weights, and holds what has no `reset_parameters`."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3)
        self.bn = nn.BatchNorm2d(6)
        self.scale = nn.Parameter(torch.full((6, 1, 1), 0.5))
        self.register_buffer("shift", torch.full((6, 1, 1), 0.25))
        self.places = torch.arange(6.0)  # neither parameter nor buffer
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(6, classes)
        nn.init.normal_(self.conv.weight, std=3.0)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x))) * self.scale + self.shift
        return self.fc(self.pool(x).flatten(1) + self.places.to(x.device))  # type: ignore[no-any-return]


class StochasticDepth(nn.Module):
    """Of the name and the attribute of torchvision's."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty(len(x), 1, 1, 1).bernoulli_(1 - self.p) if self.training and self.p > 0 else x


class EfficientNetLike(nn.Module):
    """Ends in `classifier[-1]`, behind dropout; drops paths."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.SiLU(), StochasticDepth(0.5))
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(24, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))  # type: ignore[no-any-return]


class Heads(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # type: ignore[no-any-return]


class ViTLike(nn.Module):
    """Ends in `heads.head`; has a class token, and attention with dropout. Its head sees every token."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.heads = Heads(classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.heads(x + self.attention(x, x, x, need_weights=False)[0])[:, 0]  # type: ignore[no-any-return]


class FirstToken(ViTLike):
    """As torchvision's: the class token alone goes to the head."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.heads((x + self.attention(x, x, x, need_weights=False)[0])[:, 0])  # type: ignore[no-any-return]


class TimmLike(nn.Module):
    """Says by `get_classifier` which of its layers it is, and it is not the one that is defined last."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(5, classes)
        self.stem = nn.Linear(48, 5)
        self.drop_rate = 0.3

    def get_classifier(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))
        return self.head(nn.functional.dropout(x, self.drop_rate, self.training))  # type: ignore[no-any-return]


class Distilled(TimmLike):
    """As timm's distilled transformers: two classifiers."""

    def get_classifier(self) -> Any:
        return self.head, self.stem


class SqueezeNetLike(nn.Module):
    """A convolution gives the class scores."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Sequential(nn.Conv2d(3, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x)  # type: ignore[no-any-return]


class Temperature(ResNetLike):
    """Changes the scores of its classifier."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class TwoNames(ResNetLike):
    """Its classifier has two names, and the second one is called."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.head = self.fc

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.conv(x))) * self.scale + self.shift
        return self.head(self.pool(x).flatten(1))  # type: ignore[no-any-return]


class Unused(ResNetLike):
    """The layer that is defined last is for training on something else, and gives no scores."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.rotations = nn.Linear(6, classes)


class Twice(ResNetLike):
    """Asks its classifier about the mirrored images too, and keeps the answer."""

    def forward(self, x: Tensor) -> Tensor:
        scores = super().forward(x)
        self.mirrored = super().forward(x.flip(3))
        return scores


class NoMeta(ResNetLike):
    """Cannot be made without storage: it asks for a value on its way."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.rates = torch.linspace(0, 1, 3).tolist()


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "resnet": ResNetLike,
    "efficientnet": EfficientNetLike,
    "vit": FirstToken,
    "timm": TimmLike,
    "nometa": NoMeta,
    "twonames": TwoNames,
    "tokens": ViTLike,
    "temperature": Temperature,
    "distilled": Distilled,
    "squeezenet": SqueezeNetLike,
    "unused": Unused,
    "twice": Twice,
}
GOOD = ("resnet", "efficientnet", "vit", "timm", "nometa", "twonames")


@dataclass(frozen=True)
class Handmade(outside.Outside):
    description: ClassVar[str] = "networks of this file"
    library: ClassVar[str] = "handmade"


@pytest.fixture(autouse=True)
def handmade(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third library, beside torchvision and timm."""

    def build(name: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
        outside._known("handmade", name, list(NETWORKS))
        return NETWORKS[name](classes)

    monkeypatch.setitem(outside.LIBRARIES, "handmade", build)
    monkeypatch.setitem(MODELS._items, "handmade:NAME", Handmade)


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=keys.generator("outside images"))


def arch(name: str, **given: Any) -> Arch:
    return Arch(f"handmade:{name}", CLASSES, (3, 16, 16), **given)


# --- body and head ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOOD)
def test_head_of_body_is_the_network(name: str) -> None:
    whole = NETWORKS[name](CLASSES).eval()
    body, head = outside.split(copy.deepcopy(whole), CLASSES)
    assert isinstance(head, nn.Linear)
    assert head.out_features == CLASSES
    torch.testing.assert_close(head(body.eval()(images())), whole(images()))
    assert head not in list(body.modules())


def test_where_the_classifier_is_found() -> None:
    for network, path in (
        (ResNetLike(3), "fc"),
        (EfficientNetLike(3), "classifier.1"),
        (ViTLike(3), "heads.head"),
        (TimmLike(3), "head"),
        (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)), "1"),
    ):
        assert outside.classifier_of(network, 3) is network.get_submodule(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "squeezenet",
            "handmade:squeezenet cannot be used: its classifier is no fully connected layer",
        ),
        ("distilled", "its classifier is more than one layer; expected one fully connected layer with 10 outputs"),
        ("tokens", "handmade:tokens cannot be used: its scores are not its classifier's output"),
        ("temperature", "handmade:temperature cannot be used: its scores are not its classifier's output"),
        ("unused", "handmade:unused cannot be used: its scores are not its classifier's output"),
        ("twice", "handmade:twice cannot be used: its scores are not its classifier's output"),
        ("resnat", "handmade has no classification model 'resnat'. Nearest: resnet"),
    ],
)
def test_what_cannot_be_cut(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arch(name)


def test_a_classifier_of_another_width_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its classifier is Linear\(in_features=6, out_features=4"):
        outside.split(ResNetLike(4), 3)


def test_images_that_it_cannot_take() -> None:
    message = "handmade:resnet cannot take images of 1 x 16 x 16: .* Set data.image_size"
    with pytest.raises(ConfigError, match=message):
        Arch("handmade:resnet", CLASSES, (1, 16, 16))
    with pytest.raises(ConfigError, match="handmade:resnet cannot take images of 3 x 2 x 2"):
        Arch("handmade:resnet", CLASSES, (3, 2, 2))


@pytest.mark.parametrize("name", GOOD)
def test_training_draws_nothing_at_random(name: str) -> None:
    model = arch(name).model(0).train()
    before = torch.get_rng_state()
    first, again = model(images()), model(images())
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_switched_off() -> None:
    drops = EfficientNetLike(3).train()
    assert not torch.equal(drops(images()), drops(images()))
    outside.repeatable(drops)
    assert torch.equal(drops(images()), drops(images()))
    assert isinstance(drops.avgpool, Pool2d)
    attention = ViTLike(3)
    outside.repeatable(attention)
    assert attention.attention.dropout == 0.0


def test_which_pooling_is_replaced() -> None:
    """Not that to one pixel, a mean with a repeatable gradient; nor where one side stays as long as it is."""
    sizes = (1, (1, 1), (None, 2), (2, None))
    model = nn.ModuleList([nn.AdaptiveAvgPool2d(size) for size in sizes])
    outside.repeatable(model)
    assert [type(part) for part in model] == [nn.AdaptiveAvgPool2d] * 4
    model = nn.ModuleList([nn.AdaptiveAvgPool2d(size) for size in (2, (1, 3), (3, 1))])
    given = [part(images()) for part in model]
    outside.repeatable(model)
    assert [type(part) for part in model] == [Pool2d] * 3
    for part, before in zip(model, given, strict=True):
        torch.testing.assert_close(part(images()), before)


def operations(scores: Tensor) -> set[str]:
    """The names of all that has a gradient on the way to these scores."""
    found, open_ends = {}, [scores.grad_fn]
    while open_ends:
        node = open_ends.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            open_ends += [before for before, _ in node.next_functions]
    return set(found.values())


def test_attention_is_plain_products() -> None:
    """The gradients of the fused kinds are not repeatable on a GPU."""
    fused, alone = "ScaledDotProduct", FirstToken(CLASSES)
    outside.repeatable(alone)  # with dropout PyTorch has no fused kind on a CPU
    assert any(fused in name for name in operations(alone(images())))
    assert not any(fused in name for name in operations(arch("vit").model(0)(images())))


# --- first weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOOD)
def test_first_weights_are_the_librarys_own_under_one_key(name: str) -> None:
    model = arch(name).model(7)
    with keys.keyed(7, "init", "handmade"):
        body, _ = outside.split(NETWORKS[name](CLASSES), CLASSES)
    assert same(model.body.handmade.net.state_dict(), body.state_dict())
    with keys.keyed(7, "init", "fc"):
        fc = nn.Linear(model.head.fc.in_features, CLASSES)
    assert torch.equal(model.head.fc.weight, fc.weight)
    other = arch(name).model(8)
    assert not same(model.body.state_dict(), other.body.state_dict())


def test_what_is_neither_parameter_nor_buffer_is_there_too() -> None:
    net = arch("resnet").model(0).body.handmade.net
    assert net.places.tolist() == [0, 1, 2, 3, 4, 5]
    assert net.shift.eq(0.25).all()
    assert net.scale.eq(0.5).all()


@pytest.mark.parametrize("name", GOOD)
def test_without_storage_it_has_the_leaves_of_the_real_one(name: str) -> None:
    made = arch(name)
    hollow, real = made.hollow(), made.model(0)
    assert all(leaf.is_meta for leaf in hollow.state_dict().values())
    assert [(n, leaf.shape) for n, leaf in hollow.state_dict().items()] == [
        (n, leaf.shape) for n, leaf in real.state_dict().items()
    ]
    assert made.parameters == sum(p.numel() for p in real.parameters())
    assert made.width == real.head.fc.in_features


@pytest.mark.parametrize("name", GOOD)
def test_the_global_generator_is_left_alone(name: str) -> None:
    before = torch.get_rng_state()
    arch(name).model(0)
    assert torch.equal(torch.get_rng_state(), before)


# --- in the project --------------------------------------------------------------------------------------------------


def test_names_with_a_colon_are_models_everywhere() -> None:
    assert "handmade:resnet" in MODELS
    assert "timm:anything" in MODELS  # whether there is such a model is asked when it is made
    assert "keras:resnet" not in MODELS
    clients, shape = ("a", "b"), (3, 16, 16)
    given = ModelConfig(per_client=["handmade:resnet", {"name": "handmade:efficientnet", "pretrained": False}])
    made = architectures(given, clients, CLASSES, shape)
    assert [each.name for each in made.values()] == ["handmade:resnet", "handmade:efficientnet"]
    assert {each.width for each in made.values()} == {6}
    assert made["b"].label == "handmade:efficientnet (features 6)"
    assert named_arch("handmade:vit", "method.auxiliary", CLASSES, shape).width == 8
    with pytest.raises(ConfigError, match="model: unknown key 'depth'"):
        architectures(ModelConfig("handmade:resnet", settings={"depth": 2}), clients, CLASSES, shape)
    with pytest.raises(ConfigError, match="pretrained"):
        architectures(ModelConfig("handmade:resnet", settings={"pretrained": True}), clients, CLASSES, shape)
    with pytest.raises(ConfigError, match=r"unknown model 'keras:resnet'.*timm:NAME, torchvision:NAME"):
        named_arch("keras:resnet", "model", CLASSES, shape)
    (counted,) = explain.traffic(make(Named("fedavg")), ModelConfig("handmade:resnet"), CLASSES, 16, 2)
    assert counted.first.up == sum(
        leaf.numel() * leaf.element_size() for leaf in arch("resnet").model(0).state_dict().values()
    )


@pytest.mark.parametrize("adapter", ["pool", "linear"])
def test_features_of_another_width(adapter: str) -> None:
    model = arch("resnet", features=4, adapter=adapter).model(0)
    assert same(model.body.handmade.state_dict(), arch("resnet").model(0).body.handmade.state_dict())
    assert model.body(images()).shape == (4, 4)
    assert model(images()).shape == (4, CLASSES)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedios", "fedpick", "fedcp", "fed-co2", "fedsce"])
def test_methods_train_it(method: str, tiny: Federation) -> None:
    settings: dict[str, Any] = {"subspaces": "random"} if method == "fedios" else {}
    raw = {"method": {"name": method, **settings}, "model": "handmade:resnet", "train": {"rounds": 1}}
    config, loops = structure(raw, Config), []
    for _ in range(2):
        loops.append(loop_for(make(config.method), config, tiny))
        assert loops[-1].run([]) == "finished"
    assert same(loops[0].server, loops[1].server)
    one, two = (models_of(loop) for loop in loops)
    assert one.keys() == two.keys() == set(tiny.names)
    assert all(same(model, two[client_id]) for client_id, model in one.items())


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r'models of nowhere need nowhere, and nowhere is not installed. `pip install "fedprism\[vision\]"`'
    with pytest.raises(ConfigError, match=message):
        outside._library("nowhere")


def test_a_library_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unfit.py").write_text('raise RuntimeError("operator unfit::nms does not exist")\n')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"it cannot be imported: operator unfit::nms does not exist. `pip install"):
        outside._library("unfit")


# --- real ones, where the libraries can be imported ------------------------------------------------------------------


def has(library: str) -> bool:
    try:
        importlib.import_module(library)
    except (ImportError, OSError, RuntimeError, AttributeError):
        return False
    return True


TORCHVISION = pytest.mark.skipif(not has("torchvision"), reason="torchvision cannot be imported here")
TIMM = pytest.mark.skipif(not has("timm"), reason="timm cannot be imported here")
REAL = [
    *(
        pytest.param(f"torchvision:{name}", side, parameters, marks=TORCHVISION)
        for name, side, parameters in (
            ("resnet18", 32, 11_689_512),
            ("mobilenet_v2", 32, 3_504_872),
            ("efficientnet_b0", 32, 5_288_548),
            ("densenet121", 32, 7_978_856),
            ("vit_b_16", 32, None),
            ("convnext_tiny", 32, 28_589_128),
        )
    ),
    *(
        pytest.param(f"timm:{name}", side, parameters, marks=TIMM)
        for name, side, parameters in (
            ("mobilenetv3_small_050", 32, None),
            ("efficientnet_b0", 32, 5_288_548),
            ("deit_tiny_patch16_224", 32, None),
        )
    ),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("name", "side", "parameters"), REAL)
def test_a_real_model_is_cut(name: str, side: int, parameters: int | None) -> None:
    if parameters is not None:  # as torchvision's pages have them, with 1000 classes
        assert Arch(name, 1000, (3, side, side)).parameters == parameters
    made = Arch(name, CLASSES, (3, side, side))
    model = made.model(0).train()
    x = torch.randn(2, 3, side, side, generator=keys.generator("real"))
    features = model.body(x)
    assert features.shape == (2, made.width)
    assert model.head(features).shape == (2, CLASSES)
    assert torch.equal(model.body(x), features)  # nothing is drawn
    model(x).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.body.parameters())
    assert same(made.model(0).state_dict(), Arch(name, CLASSES, (3, side, side)).model(0).state_dict())


@TORCHVISION
def test_resnet18_has_the_leaves_of_ours() -> None:
    ours, theirs = (Arch(name, CLASSES, (3, 32, 32)).hollow() for name in ("resnet18", "torchvision:resnet18"))
    assert [leaf.shape for leaf in ours.state_dict().values()] == [leaf.shape for leaf in theirs.state_dict().values()]


class Stop(Callback):
    """Ends a run after some rounds, as a user's Ctrl-C would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        if record.round == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("name", "side", "parameters"), [*((f"handmade:{each}", 16, None) for each in GOOD), *REAL])
def test_it_trains_to_the_same_bits_twice_and_after_a_resume(
    name: str, side: int, parameters: int | None, tmp_path: Path
) -> None:
    def site(offset: int) -> tuple[Any, Any]:
        draw = keys.generator("site", offset)
        x = torch.randint(0, 256, (14, 3, side, side), generator=draw, dtype=torch.uint8)
        return x, torch.arange(14) % 2

    federation = Federation.from_arrays({"north": site(0), "south": site(1)}, class_names=("a", "b"))
    settings = [f"run.device={DEVICE}", "train.batch_size=4", "run.checkpoint_every=1", "train.optimizer.lr=0.001"]
    ends = []
    for stops in (False, False, True):
        out, seen = tmp_path / "run", Collect()
        try:
            stop = [Stop(after=1)] if stops else []
            api.train(federation, "fedavg", name, rounds=2, out=out, settings=settings, callbacks=[*stop, seen])
            assert not stops
        except KeyboardInterrupt:
            api.resume(out, federation=federation, callbacks=[seen])
        assert [snapshot.round for snapshot in seen.snapshots] == ([0, 2] if stops else [0, 1, 2])
        ends.append(seen.snapshots[-1])
        shutil.rmtree(out)  # of the largest, more than a gigabyte
    for other in ends[1:]:
        assert same(ends[0].server, other.server)
        assert all(same(state, other.clients[client]) for client, state in ends[0].clients.items())


@TORCHVISION
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "squeezenet1_0",
            (3, 32, 32),
            "torchvision:squeezenet1_0 cannot be used: its classifier is no fully connected layer",
        ),
        ("resnet81", (3, 32, 32), "torchvision has no classification model 'resnet81'. Nearest: .*resnet18"),
        ("fasterrcnn_resnet50_fpn", (3, 32, 32), "torchvision has no classification model"),
        ("densenet121", (3, 8, 8), "torchvision:densenet121 cannot take images of 3 x 8 x 8"),
        ("vit_b_16", (3, 20, 20), "torchvision:vit_b_16 cannot take images of 3 x 20 x 20"),
        ("resnet18", (1, 28, 28), "torchvision's models take 3 channels, but these images have 1; use a timm model"),
    ],
)
def test_real_models_of_torchvision_that_are_refused(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Arch(f"torchvision:{name}", CLASSES, shape)


@TIMM
def test_real_models_of_timm_that_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"timm has no classification model 'resnet81'. Nearest: .*resnet18"):
        Arch("timm:resnet81", CLASSES, (3, 32, 32))
    with pytest.raises(
        ConfigError, match=r"timm:deit_tiny_distilled_patch16_224 cannot be used: .* more than one layer"
    ):
        Arch("timm:deit_tiny_distilled_patch16_224", CLASSES, (3, 32, 32))
    assert Arch("timm:resnet18", CLASSES, (1, 28, 28)).model(0)(torch.zeros(2, 1, 28, 28)).shape == (2, CLASSES)


@TORCHVISION
def test_inception_and_googlenet_have_no_second_output() -> None:
    for name, side in (("googlenet", 32), ("inception_v3", 75)):
        model = Arch(f"torchvision:{name}", CLASSES, (3, side, side)).model(0).train()
        assert model(torch.zeros(2, 3, side, side)).shape == (2, CLASSES)
