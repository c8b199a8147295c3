"""Configurations: every key has a meaning, every mistake is named with its path, and nothing is lost on the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedprism.config import Config, ModelConfig, Named, commented, dump, override, plain, read, structure
from fedprism.errors import ConfigError

# The complete configuration as the project promises it: later work may add keys, never rename one.
PROMISED = """
seed: 0
data: {name: digits-skew, root: null, partition: {name: domain}, split: {validation: 0.1, test: null},
  samples: null, public: 0, image_size: auto, normalize: half, augment: none}
model: {name: lenet-bn, head_layers: 1}
method: {name: fedprox, mu: 0.1}
train: {rounds: 30, epochs: 1, batch_size: 32, last_batch: keep,
  optimizer: {name: sgd, lr: 0.05, momentum: 0.5, weight_decay: 0}, schedule: none, clip: null, bn: method}
server: {optimizer: none, lr: 1.0}
clients: {participation: 1.0, dropout: 0.0, weighting: method, broadcast: method, train: method, state: memory}
evaluate: {every: 1, moments: [received, trained], splits: [validation, test], clients: all, train_loss: false}
run: {engine: auto, device: auto, threads: 1, memory_format: contiguous, deterministic: true, precision: auto,
  compile: false, slots: auto, workers: auto, checkpoint_every: 5, keep_rounds: [],
  out: "runs/{config}/{method}-{seed}"}
"""


def test_the_promised_configuration_is_the_default() -> None:
    config = structure(yaml.safe_load(PROMISED), Config)
    assert config == Config(method=Named("fedprox", {"mu": 0.1}))
    assert structure({}, Config) == structure(None, Config) == Config()


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {
            "method": {"name": "fedrep", "head_epochs": 2},
            "train": {"schedule": {"name": "step", "every": 3, "gamma": 0.1}},
        },
        {"model": {"name": "resnet18", "width": 16, "head_layers": "all"}, "clients": {"participation": [0.1, 1.0]}},
        {"model": {"per_client": ["mlp", {"name": "lenet-bn"}]}, "run": {"keep_rounds": [1, 2], "slots": 4}},
        {"evaluate": {"moments": [], "splits": ["train"]}, "data": {"split": {"test": 0.25}}},
    ],
)
def test_writing_and_reading_loses_nothing(raw: dict[str, Any], tmp_path: Path) -> None:
    config = structure(raw, Config)
    assert structure(plain(config), Config) == config
    for text in (dump(config), commented(config)):
        (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
        assert read(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"trian": {}}, "unknown key 'trian'. Did you mean 'train'?"),
        ({"train": {"rouns": 3}}, "unknown key 'rouns'. Did you mean 'rounds'?"),
        ({"train": {"rounds": "many"}}, "'many' is not a whole number @ train.rounds"),
        ({"train": {"rounds": 1.5}}, "1.5 is not a whole number @ train.rounds"),
        ({"train": {"rounds": True}}, "True is not a whole number @ train.rounds"),
        ({"train": {"rounds": 0}}, "train.rounds is 0; expected 1 or more"),
        ({"train": {"optimizer": {"lr": -1}}}, "train.optimizer.lr is -1.0; expected above 0"),
        ({"train": {"bn": "lokal"}}, "Did you mean 'local'?"),
        ({"train": 3}, "@ train"),
        ({"model": {"name": "mlp", "per_client": ["mlp"]}}, "model.name 'mlp' and model.per_client are both set"),
        ({"clients": {"participation": 0}}, "expected above 0 to 1, or [lo, hi]"),
        ({"clients": {"participation": [0.9, 0.1]}}, "clients.participation is (0.9, 0.1)"),
        ({"clients": {"participation": [0.1, 0.2, 0.3]}}, "clients.participation"),
        ({"clients": {"dropout": 1.2}}, "clients.dropout is 1.2; expected 0 to 1"),
        ({"evaluate": {"moments": ["receved"]}}, "Did you mean 'received'?"),
        ({"evaluate": {"train_loss": "no"}}, "'no' is not true or false"),
        ({"method": {"mu": 3}}, "neither a name nor a mapping with a `name`"),
        ({"model": 7}, "neither a model's name nor a mapping"),
        ({"model": {"head_layers": "al"}}, "Did you mean 'all'?"),
        ({"run": {"compile": "always"}}, "run.compile"),
    ],
)
def test_a_mistake_is_named_with_its_path(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        structure(raw, Config)
    assert words in str(error.value)


def test_overrides_are_yaml_and_reach_any_depth() -> None:
    raw = override(
        {"method": "fedprox"}, ["method.mu=1e-3", "train.optimizer.lr=1e-2", "run.keep_rounds=[3, 4]", "seed=7"]
    )
    config = structure(raw, Config)
    assert config.train.optimizer.lr == 0.01
    assert config.run.keep_rounds == (3, 4)
    assert config.seed == 7
    assert config.method.name == "fedprox"
    assert structure(override({}, ["data.partition.clients=2"]), Config).data.partition == Named(
        "domain", {"clients": 2}
    )
    assert structure(override({}, ["train.schedule=cosine"]), Config).train.schedule == Named("cosine")
    for wrong in ("train.rounds", "=3", "train..rounds=3", "seed=[1"):
        with pytest.raises(ConfigError, match="--set"):
            override({}, [wrong])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration at"):
        read(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="contains a list"):
        read(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        read(tmp_path / "broken.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert read(tmp_path / "empty.yaml") == Config()


def sections(kind: type) -> list[Any]:
    found = [kind]
    for f in dataclasses.fields(kind):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if dataclasses.is_dataclass(default) and not isinstance(default, Named):
            found += sections(type(default))
    return found


@pytest.mark.parametrize("section", sections(Config), ids=lambda s: s.__name__)
def test_every_key_says_what_it_means(section: type) -> None:
    for f in dataclasses.fields(section):
        nested = section is Config and f.name not in ("seed", "method")
        assert f.metadata.get("doc") or nested, f"{section.__name__}.{f.name} has no meaning"
        assert f.name in commented(Config()) or (section is ModelConfig and f.name == "settings")


def test_settings_of_a_method_have_lines_of_their_own() -> None:
    config = Config(method=Named("fedcp", {"lam": 1.0, "without": ["cpn", "gh"]}))
    text = commented(config, {"lam": "weight\n    of it", "without": ""})
    assert "\nmethod:\n  name: fedcp  # a name in `fedprism list" in text
    assert "\n  lam: 1.0  # weight of it\n  without: [cpn, gh]\n" in text
    assert structure(yaml.safe_load(text), Config) == config


def test_one_model_or_one_a_client_is_what_was_set_last() -> None:
    listed = {"model": {"per_client": ["mlp", "cnn4"]}}
    assert override(listed, ["model.name=mlp"])["model"] == {"name": "mlp"}
    assert override(listed, ["model=mlp"])["model"] == "mlp"
    assert override({}, ["model.per_client=[mlp, cnn4]"])["model"] == listed["model"]
    assert override({"model": "mlp"}, ["model.per_client=[mlp, cnn4]"])["model"] == listed["model"]
    assert structure(override(listed, ["model.per_client=null"]), Config).model == Config().model


def test_another_name_does_not_inherit_settings() -> None:
    raw = {"method": {"name": "fedsce", "p": 1}, "model": {"name": "resnet18", "width": 16, "head_layers": "all"}}
    assert override(raw, ["method.name=lg-fedavg", "method.warmup=0"])["method"] == {"name": "lg-fedavg", "warmup": 0}
    assert override(raw, ["method.warmup=0", "method.name=lg-fedavg"])["method"] == {"name": "lg-fedavg", "warmup": 0}
    assert override(raw, ["method.name=fedsce", "method.R=2"])["method"] == {"name": "fedsce", "p": 1, "R": 2}
    assert override(raw, ["model.name=mlp"])["model"] == {"name": "mlp", "head_layers": "all"}
    assert raw["method"] == {"name": "fedsce", "p": 1}
    for same in ("'resnet18'", '"resnet18"', " resnet18", "resnet18  # the same"):
        assert override(raw, [f"model.name={same}"])["model"] == raw["model"]
    listed = {"head_layers": "all", "per_client": ["mlp"]}
    assert override(raw, ["model.per_client=[mlp]"])["model"] == listed
    assert override({}, ["model.per_client.plain=mlp"])["model"] == {"per_client": {"plain": "mlp"}}
    assert raw["method"] == {"name": "fedsce", "p": 1}


def test_another_partition_or_schedule_does_not_inherit_settings() -> None:
    raw = {
        "data": {"partition": {"name": "domain", "clients": 20, "order": "blocks"}},
        "train": {"schedule": {"name": "step", "every": 10}},
    }
    changed = override(raw, ["data.partition.name=dirichlet", "train.schedule.name=cosine"])
    assert changed["data"]["partition"] == {"name": "dirichlet", "clients": 20}
    assert changed["train"]["schedule"] == {"name": "cosine"}
    assert override(raw, ["data.partition.name=domain"]) == raw
    assert raw["data"]["partition"]["order"] == "blocks"
