"""Settings of every kind, from a file, `--set` or Python: a configuration or one short error, never a traceback."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import tracemalloc
import typing
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import fedprism as fp
from fedprism import limits
from fedprism.aggregators import AGGREGATORS
from fedprism.cli import app
from fedprism.config import Config, DataConfig, ModelConfig, Named, override, plain, read, structure
from fedprism.data.base import check_names, options
from fedprism.data.folder import own_models
from fedprism.data.images import CHANGES
from fedprism.errors import ConfigError, DataError, FedprismError, shown, unknown
from fedprism.explain import traffic
from fedprism.federation import Federation
from fedprism.federation import base as federation_base
from fedprism.federation.partitions import PARTITIONS
from fedprism.methods import METHODS, find, make
from fedprism.methods.base import Client, Pass
from fedprism.models import MODELS
from fedprism.planning import directory_of, resolve
from fedprism.round.training import Operations, PassRun
from fedprism.schedules import SCHEDULES, learning_rate
from fedprism.transforms import TRANSFORMS
from fedprism.yamlfile import parse_yaml
from tests.harness import loop_for

LONGEST = 400  # characters of an error


def refused(call: Callable[[], object], kind: type[FedprismError] = FedprismError) -> str:
    """The error that a call ends in: one short line."""
    with pytest.raises(kind) as error:
        call()
    return in_short(error.value)


def in_short(error: FedprismError) -> str:
    message = str(error)
    assert len(message.splitlines()) == 1, message
    assert len(message) <= LONGEST, f"{len(message)} characters: {message}"
    assert message.isprintable()
    return message


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def laughs(levels: int) -> str:
    """A list of ten lists of ten lists ..., written with aliases."""
    lines = ["- &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"- &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merges(levels: int) -> str:
    """A mapping whose merged keys double with every level."""
    lines = ["- &a0 {x: 1, y: 2}"]
    lines += [f"- &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, levels)]
    return "\n".join(lines)


def chain(length: int) -> str:
    """Lists inside each other, although no line shows it."""
    return "\n".join(["- &a0 [x]", *(f"- &a{n} [*a{n - 1}]" for n in range(1, length))])


# --- YAML ------------------------------------------------------------------------------------------------------------

# What no YAML reader of Python takes, or takes minutes for: the text, and words of the error.
FAULTY = {
    "impossible date": ("seed: 1\ntrain: 2024-02-31", "'2024-02-31' is no timestamp (day is out of range", 2),
    "long number": ("\n\nseed: " + "9" * 5000, "has 5,000 characters; a number has at most 100", 3),
    "long hexadecimal": ("seed: 0x" + "f" * 5000, "has 5,002 characters", 0),
    "wrong bool": ("seed: !!bool perhaps", "'perhaps' is no bool", 0),
    "wrong timestamp": ("seed: !!timestamp now", "'now' is no timestamp", 0),
    "empty integer": ("seed: !!int ''", "'' is no int", 0),
    "deep": ("model: {per_client: " + "[" * 2000 + "]" * 2000 + "}", "nested more than 100 deep", 0),
    "deep block": ("\n".join(" " * n + "- " * (n == 0) + "a:" for n in range(1, 600)), "nested more than 100", 100),
    "deep by aliases": ("seed:\n" + chain(200), "nested more than 100 deep", 101),
    "alias of itself": ("seed: 1\nmodel: &a\n  per_client: [*a]", "the alias *a is inside what it stands for", 3),
    "unknown alias": ("model: {per_client: *nowhere}", "found undefined alias 'nowhere'", 0),
    "laughs": ("data:\n" + laughs(7), "more than 200,000 values, aliases written out", 7),
    "merges": ("data:\n" + merges(19), "more than 200,000 values, aliases written out", 17),
    "unhashable key": ("{[1]: 2}", "found unhashable key", 0),
    "a tag of Python": ("seed: !!python/object/apply:os.getcwd []", "could not determine a constructor", 0),
    "null character": ("seed: 1\ntrain: \0", r"the character '\x00' is not allowed", 2),
    "no such character": ('seed: 1\ntrain: "\\U00110000"', "the number of a character", 2),
    "no character at all": ('seed: "\\UFFFFFFFF"', "the number of a character", 0),
    "long version": (f"%YAML 1.{'9' * 5000}\n---\nseed: 1", "or of a version is too large", 1),
    "two documents": ("seed: 1\n---\nseed: 2", "but found another document", 2),
    "unfinished": ("train: [", "cannot be read as YAML", 0),
    "long tag": ("seed: !" + "x" * 5000 + " 1", "cannot be read as YAML", 0),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_file_is_one_line_with_its_name_and_the_line(name: str, tmp_path: Path) -> None:
    text, words, line = FAULTY[name]
    file = tmp_path / "faulty.yaml"
    file.write_text(text)
    message = refused(lambda: read(file), ConfigError)
    assert f"{file} cannot be read as YAML: " in message
    assert words in message
    if line:
        assert f"(line {line})" in message


@pytest.mark.parametrize(
    "name", ["impossible date", "wrong bool", "no such character", "deep", "laughs", "alias of itself"]
)
def test_every_reader_of_yaml_refuses_it(name: str, tmp_path: Path) -> None:
    text, words, _ = FAULTY[name]
    message = refused(lambda: override({}, [f"train={text}"]), ConfigError)
    assert message.startswith("--set 'train=")
    assert words in message

    for client_id in ("north", "south"):
        (tmp_path / client_id).mkdir()
        (tmp_path / client_id / "model.yaml").write_text(text)
    message = refused(lambda: own_models(DataConfig(f"folder:{tmp_path}")), DataError)
    assert f"{tmp_path / 'north' / 'model.yaml'} cannot be read as YAML" in message
    assert words in message

    result = CliRunner().invoke(app, ["explain", "fedavg", "--model", text], env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert words in result.stderr


def test_options_in_the_name_of_a_dataset() -> None:
    @dataclasses.dataclass(frozen=True)
    class Size:
        clients: int = 10

    message = refused(lambda: options(DataConfig("synthetic?clients=2024-02-31"), Size), ConfigError)
    assert "data.name is 'synthetic?clients=2024-02-31': the value of clients cannot be read as YAML" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\ntrain: {}\nseed: 2", "the key 'seed' is given twice, in lines 1 and 3; keep one of them"),
        ("train:\n  rounds: 3\n  epochs: 1\n  'rounds': 5", "the key 'rounds' is given twice, in lines 2 and 4"),
        ("seed: 0\ntrain: {rounds: 3, rounds: 5}", "the key 'rounds' is given twice (line 2)"),
        ("{seed: 1, seed: 1}", "the key 'seed' is given twice."),
        ("method:\n  =: 1\n  '=': 2", "the key '=' is given twice, in lines 2 and 3"),
        ("method: {name: fedprox, 1: 2, 0x1: 3}", "the key 1 is given twice"),
        ("base: &a {x: 1}\nmethod:\n  <<: {x: 1, x: 2}", "the key 'x' is given twice (line 3)"),
    ],
)
def test_a_key_that_is_given_twice(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text(text)
    assert words in refused(lambda: read(tmp_path / "twice.yaml"), ConfigError)


def test_a_key_that_is_given_twice_in_an_override() -> None:
    message = refused(lambda: override({}, ["method={name: fedprox, mu: 1, mu: 2}"]), ConfigError)
    assert message.startswith("--set 'method={name: fedprox, mu: 1, mu: 2}'")
    assert "the key 'mu' is given twice" in message


def test_anchors_merges_and_one_key_in_two_places_are_no_faults() -> None:
    text = """
        small: &small {width: 16, stem: small}
        other: &other {width: 8, head_layers: 1}
        both:
          <<: *small
          <<: *other
          width: 32
        list: [*small, *small, {<<: [*small, *other], stem: imagenet}]
        =: text
        empty:
        """
    small = {"width": 16, "stem": "small"}
    wanted = {
        "small": small,
        "other": {"width": 8, "head_layers": 1},
        "both": {"stem": "small", "head_layers": 1, "width": 32},
        "list": [small, small, {"width": 16, "head_layers": 1, "stem": "imagenet"}],
        "=": "text",
        "empty": None,
    }
    assert parse_yaml(text, "here") == yaml.safe_load(text) == wanted
    assert parse_yaml("", "here") is None
    assert parse_yaml("\ufeff" + chain(98) + "\r\n", "here") == yaml.safe_load(chain(98))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "latin.yaml").write_bytes("seed: 1\n# é\n".encode("latin-1"))
    (tmp_path / "long.yaml").write_text("seed: 1 #" + " " * limits.YAML_BYTES)
    for name, words in {
        "folder.yaml": "Is a directory",
        "latin.yaml": "not UTF-8 (line 2)",
        "long.yaml": "longer than 4,194,304 bytes",
        "x" * 5000: "File name too long",
        "a\0b": "null byte",
    }.items():
        assert words in refused(lambda name=name: read(tmp_path / name), ConfigError)


def test_an_override_that_goes_too_deep() -> None:
    deep = override({}, [".".join(["model", "per_client", *["x"] * 2000]) + "=1"])
    assert "nested more than 100 deep" in refused(lambda: structure(deep, Config), ConfigError)


# --- every key with every value --------------------------------------------------------------------------------------

LOOP: list[Any] = []
LOOP.append(LOOP)

NASTY: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "empty text": "",
    "space": " ",
    "null character": "\0",
    "control characters": "a\x1b]0;b\x07\r\n",
    "half a letter": "\ud800",
    "long text": "x" * 100_000,
    "formats": "{}{0.__class__}{seed:>1000}%s$HOME",
    "-1": -1,
    "0": 0,
    "1e300": 1e300,
    "-1e300": -1e300,
    "tiny": 5e-324,
    "infinite": float("inf"),
    "below all": float("-inf"),
    "not a number": float("nan"),
    "as text": "1e400",
    "10**30": 10**30,
    "5,000 digits": 10**5000,
    "date": datetime.date(2024, 2, 29),
    "moment": datetime.datetime(2024, 2, 29, 12),
    "bytes": b"\0\xff",
    "set": {1},
    "empty list": [],
    "list": [1, "a", None, [2]],
    "long list": list(range(1000)),
    "empty mapping": {},
    "mapping": {"name": [1], 2: {"x": None}},
    "unknown keys": {f"key{n}" * 20: n for n in range(100)},
    "named": {"name": "x" * 5000, "y": "z" * 5000},
    "inner name": {"x" * 5000: {"y": "z" * 5000}},
    "deep": nested(2000),
    "deep mapping": {"name": "fedavg", "x": nested(150)},
    "loop": LOOP,
}


def leaves_of(kind: type, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key of a configuration, those of sections and the whole of it included."""
    yield path
    for f in dataclasses.fields(kind):
        inner = typing.get_type_hints(kind)[f.name]
        if dataclasses.is_dataclass(inner) and inner is not Named:
            yield from leaves_of(typing.cast(type, inner), (*path, f.name))
        else:
            yield *path, f.name
    if path == ("data",):
        yield *path, "normalize", "mean"


KEYS = list(leaves_of(Config))
KEYS += [(*path, key) for path in (("method",), ("train", "schedule"), ("data", "partition")) for key in ("name", "x")]

NAMED: dict[str, tuple[type, dict[str, Any]]] = {  # everything else that a configuration names, with its own settings
    f"{kind} {name}": (cls, {})
    for kind, registry in {
        "method": METHODS,
        "transform": TRANSFORMS,
        "aggregator": AGGREGATORS,
        "schedule": SCHEDULES,
        "partition": PARTITIONS,
        "change": CHANGES,
        "model": MODELS,
    }.items()
    for name, cls in registry.items()
    if dataclasses.is_dataclass(cls) and dataclasses.fields(cls)
}


def put(path: tuple[str, ...], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def accepts(value: Any, kind: type) -> bool:
    """Is this a value of that kind? If it is not, the error is one short line."""
    try:
        assert isinstance(structure(value, kind, "where" if kind is not Config else ""), kind)
    except ConfigError as error:
        in_short(error)
        return False
    return True


@pytest.mark.parametrize("name", NASTY)
def test_every_key_takes_a_nasty_value_or_refuses_it_in_one_line(name: str) -> None:
    taken = [path for path in KEYS if accepts(put(path, NASTY[name]), Config)]
    assert len(taken) < len(KEYS)  # no value suits every key


@pytest.mark.parametrize("named", NAMED)
def test_every_setting_of_what_is_named(named: str) -> None:
    cls, given = NAMED[named]
    for f in dataclasses.fields(cls):
        for value in NASTY.values():
            accepts({**given, f.name: value}, cls)


@pytest.mark.slow
@pytest.mark.parametrize("path", KEYS, ids=lambda path: ".".join(path) or "all")
def test_what_is_taken_can_be_resolved_or_is_refused_in_one_line(path: tuple[str, ...], tmp_path: Path) -> None:
    for value in NASTY.values():
        try:
            config = structure(put(path, value), Config)
            text = yaml.safe_dump(plain(config))
            (tmp_path / "taken.yaml").write_text(text, encoding="utf-8")
            resolved = resolve(read(tmp_path / "taken.yaml"))
            directory_of(resolved, "name", None)
        except FedprismError as error:
            in_short(error)


def test_a_value_in_a_message_is_short_whatever_it_is() -> None:
    for value in NASTY.values():
        assert len(shown(value)) <= 80
        assert shown(value).isprintable()
    assert shown({"b": 1, "a": [2.5, None]}) == "{'b': 1, 'a': [2.5, None]}"
    assert len(unknown("method", "x" * 10**6, ["fedavg"])) < 200


# --- numbers in a run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Federation:
    return fp.make_federation(
        "digits-skew", clients=2, samples=20, image_size=8, split={"validation": 0.02, "test": 0.05}
    )


def train(federation: Federation, *settings: str, method: str = "fedavg") -> fp.Run:
    model = {"name": "mlp", "hidden": [4]}
    given = ["train.batch_size=10", "run.engine=inprocess", *settings]
    return fp.train(federation, method, model, 2, out=False, settings=given)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.clip=1e300"], "1e+300 is out of range; numbers go up to 1e+30 @ train.clip"),
        (["train.clip=.inf"], "inf is not a finite number @ train.clip"),
        (["train.optimizer.lr=1e300"], "1e+300 is out of range"),
        (["train.optimizer.weight_decay=1e39"], "1e+39 is out of range"),
        (["server.lr=1e39"], "1e+39 is out of range"),
        (
            ["server.optimizer=adam", "server.lr=0.01", "server.tau=1e30"],
            "server.tau is 1e+30; expected above 0 to 1e15",
        ),
        (["train.batch_size=1" + 30 * "0"], "expected at most 1,000,000,000"),
        (["train.schedule={name: step, every: [1]}"], "[1] is not a whole number @ train.schedule.every"),
        (["train.schedule={name: cosine, [1]: 2}"], "found unhashable key"),
        (["train.schedule={name: exponential, gamma: 1e30}", "train.rounds=20"], "the learning rate of round 20"),
        (["train.schedule={name: step, every: 1, gamma: 1e30}", "train.rounds=3"], "the learning rate of round 3"),
    ],
)
def test_a_number_that_no_weight_can_hold_is_refused_before_the_first_round(
    two: Federation, settings: list[str], words: str
) -> None:
    assert words in refused(lambda: train(two, *settings), ConfigError)


def test_a_rate_of_a_method_that_a_schedule_makes_too_large() -> None:
    schedule = Named("exponential", {"gamma": 10.0})
    grows = replace(Config().train, rounds=20, schedule=schedule)
    assert learning_rate(grows, 10) == 0.05 * 10.0**10
    assert "round 20 larger than 1e+30" in refused(lambda: learning_rate(grows, 30, base=1e20), ConfigError)


def numbers() -> Iterator[tuple[str, str]]:
    """Every number of a configuration or a method that does not only make a run longer."""
    for path in KEYS:
        kind: Any = Config
        for key in path:
            kind = typing.get_type_hints(kind)[key] if dataclasses.is_dataclass(kind) and kind is not Named else str
        if path[:1] in (("train",), ("server",), ("clients",)) and ("float" in str(kind) or kind is int):
            yield "fedavg", ".".join(path)
    for name, cls in METHODS.items():
        for key, hint in typing.get_type_hints(cls).items():
            if key in {f.name for f in dataclasses.fields(cls)} and ("float" in str(hint) or hint is int):
                yield name, f"method.{key}"


def test_many_epochs_take_time_and_no_memory(two: Federation) -> None:
    """They are not all made before the first one is trained."""
    method, config = fp.FedAvg(), structure({"train": {"epochs": 20_000}}, Config)
    ctx = loop_for(method, config, two).context(1).replace(client_id=two.names[0], data=two.clients[two.names[0]])
    spec, client = Pass(method.loss), typing.cast(Client, None)
    run = PassRun(client, spec, ctx, config, Operations())
    tracemalloc.start()
    try:
        first = [epoch.order.tolist() for epoch in itertools.islice(run.epochs(), 3)]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len({*map(tuple, first)}) == 3
    assert len([*replace(run, spec=replace(spec, steps=1)).epochs()]) == 1


LONGER = ("epochs", "rounds", "steps", "samples", "batches")  # in the name of a setting: 1e9 of them never end


@pytest.mark.slow
@pytest.mark.parametrize(("method", "key"), [each for each in numbers() if not each[1].endswith(LONGER)])
@pytest.mark.parametrize("value", ["1e30", "1e-300", "0.0", "-1e30", "1000000000", "0"])
def test_a_run_at_the_limits_ends_or_is_refused(two: Federation, method: str, key: str, value: str) -> None:
    try:
        train(two, f"{key}={value}", method=method)
    except FedprismError as error:
        in_short(error)


# --- the run directory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("{seed:>1000}", "nothing else in braces"),
        ("{seed!r}", "nothing else in braces"),
        ("{config.__class__}", "nothing else in braces"),
        ("runs/{", "nothing else in braces"),
        ("runs/{{seed}}", "nothing else in braces"),
        ("runs/{day}", "nothing else in braces"),
        ("runs/" + 5000 * "x", "expected at most 3,900 and 255"),
        ("runs/" + 300 * "x", "a path of 305 bytes whose longest part has 300"),
        ("y/" * 2500, "a path of 5,000 bytes"),
        ("runs\0", "holds a null character"),
    ],
)
def test_a_directory_that_cannot_be(out: str, words: str) -> None:
    run = replace(Config().run, out=out)
    assert words in refused(lambda: directory_of(Config(run=run), "mine", None), ConfigError)
    assert words in refused(lambda: directory_of(Config(), "mine", out), ConfigError)


def test_the_three_fields_of_a_directory() -> None:
    run = replace(Config().run, out="{config}/{method}/{seed}/{seed}-é")
    assert directory_of(Config(run=run, seed=7), "{method}", None) == Path("{method}/fedavg/7/7-é")
    message = refused(lambda: structure({"run": {"out": "runs\0"}}, Config), ConfigError)
    assert "holds control characters" in message
    assert message.endswith("@ run.out")


# --- counts ----------------------------------------------------------------------------------------------------------


def explain(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "1000"})
    assert result.exit_code == 2, f"exit code {result.exit_code}: {result.exception!r}"
    return result.stderr


def test_explain_checks_counts_before_it_makes_anything() -> None:
    for option, given, most in (("--classes", "1000001", "1000000"), ("--image-size", "100000", "4096")):
        message = explain("fedavg", option, given)
        assert option in message
        assert most in message.replace(given, "")


@pytest.mark.parametrize(
    ("method", "model", "classes"),
    [
        ("fedavg", "{name: mlp, hidden: [100000000]}", 1_000_000),
        ("fedavg", "{name: mlp, hidden: [1000000000, 1000000000]}", 10),
        ("fedavg", "{name: resnet18, width: 1000000000}", 10),
        ("feddistill", "mlp", 1_000_000),
        ("moon", "mlp", 10),
    ],
)
def test_a_model_that_no_memory_holds(method: str, model: str, classes: int) -> None:
    settings = {"projection": 1_000_000_000} if method == "moon" else {}
    made, models = make(Named(method, settings)), structure(parse_yaml(model, "model"), ModelConfig, "model")
    message = refused(lambda: traffic(made, models, classes, 32, 2), ConfigError)
    assert "need" in message or "too large for any computer" in message


def test_the_depth_of_a_transformer() -> None:
    models = structure({"name": "vit-tiny", "depth": 1001}, ModelConfig, "model")
    assert "expected 1 to 1000" in refused(lambda: traffic(make(Named("fedavg")), models, 10, 32, 2), ConfigError)


IMAGES = np.zeros((20, 3, 4, 4), dtype=np.uint8)


def test_labels_name_no_more_classes_than_there_can_be() -> None:
    labels = np.arange(20) % 2
    labels[3] = limits.CLASSES
    message = refused(lambda: Federation.from_arrays({"north": (IMAGES, labels)}), DataError)
    assert "the highest label is 1,000,000" in message
    assert "at most 1,000,000 are possible" in message


def test_classes_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Federation.from_arrays({"north": (IMAGES, np.arange(20) % 4)}, class_names=tuple("abcde"))
    client, whole = made.clients["north"], made.clients["north"].class_counts()
    monkeypatch.setattr(federation_base, "COMPARED_AT_ONCE", 7)
    assert torch.equal(client.class_counts(), whole)
    assert whole.tolist() == torch.bincount(client.train.y, minlength=5).tolist()
    empty = federation_base.Split(client.train.x[:0], client.train.y[:0])
    assert replace(client, train=empty).class_counts().tolist() == [0] * 5


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ({"name": "domain", "clients": 3000}, "there are 1,797 images to divide"),
        ({"name": "domain", "clients": 3000}, "At most 25 clients are possible"),
        ({"name": "iid", "clients": 3000}, "data.partition.clients is 3000, but there are 1,797 images to divide"),
        ({"name": "noise", "clients": 90}, "needs at least 20 to train on"),
        ({"name": "iid", "clients": 2, "of": 3000}, "data.partition.of is 3000, but there are 1,797 images"),
        ({"name": "iid", "clients": 1_000_001}, "data.partition.clients is 1000001; expected at most 1,000,000"),
        ({"name": "iid", "clients": 10**12}, "expected at most 1,000,000,000"),
    ],
)
def test_more_clients_than_images_can_serve(partition: dict[str, Any], words: str) -> None:
    assert words in refused(lambda: fp.make_federation("digits-skew", partition=partition))


def test_the_limits_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    values = [value for name, value in vars(limits).items() if name.isupper()]
    assert len(values) > 5
    missing = [value for value in values if f"{value:,}" not in page and f"{value:g}".replace("+", "") not in page]
    assert not missing


@pytest.mark.parametrize("seed", [10**5000, 1.0, None, "0"], ids=["huge", "float", "none", "text"])
def test_a_seed_that_is_none(seed: Any) -> None:
    refused(lambda: fp.make_federation("digits-skew", seed=seed), ConfigError)
    refused(lambda: Federation.from_arrays({"north": (IMAGES, np.arange(20) % 2)}, seed=seed), ConfigError)


def test_a_number_of_clients_that_equals_nothing() -> None:
    message = refused(lambda: fp.make_federation("digits-skew", clients=float("nan")), ConfigError)  # type: ignore[arg-type]
    assert message == "nan is not a whole number @ data.partition.clients"


@pytest.mark.parametrize(
    "args",
    [
        ["compare", "FILE", "--methods", "local", "--seeds", "9" * 5000],
        ["compare", "FILE", "--methods", "," * 5000],
        ["bench", "--quick", "--device", "x" * 5000],
        ["run", "FILE", "--set", f"run.device={'x' * 4000}"],
    ],
    ids=["seeds", "methods", "device", "run.device"],
)
def test_an_option_of_any_length_is_short_in_its_error(args: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    result = CliRunner().invoke(app, [str(tmp_path / "empty.yaml") if arg == "FILE" else arg for arg in args])
    assert result.exit_code == 2
    assert len(result.stderr) <= LONGEST


# --- names -----------------------------------------------------------------------------------------------------------


def test_names_that_look_the_same_are_said_to_be_spelt_differently() -> None:
    composed, apart = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))
    message = refused(lambda: check_names("client", [composed, apart]), DataError)
    assert "client names 'Z\\xfcrich' and 'Zu\\u0308rich' differ only by how Unicode spells" in message
    assert "('Zürich')" in message
    assert "case" not in message
    assert "differ only by case" in refused(lambda: check_names("client", [composed, apart.lower()]), DataError)
    assert "is given twice" in refused(lambda: check_names("class", ["a", "a"]), DataError)


ODD = {
    "dot": (".:x", "neither path/to/file.py:Class nor package.module:Class"),
    "dots": ("..", "unknown method '..'"),
    "dots with a class": ("..:X", "neither path"),
    "slash": ("/", "unknown method '/'"),
    "two colons": ("a:b:c", "neither path"),
    "colon": (":", "neither path"),
    "no class": ("json:", "neither path"),
    "no module": (":X", "neither path"),
    "space": ("a b:C", "neither path"),
    "no class of a file": ("x.py:", "there is no file 'x.py'"),
    "folder": (f"{Path(__file__).parent}", "unknown method"),
    "null character": ("a\0.py:X", "holds control characters"),
    "control characters": ("a\x1b[31m", "holds control characters"),
    "newline": ("a\nb:C", "holds control characters"),
    "long": ("x" * 5000, "has 5,000 characters; expected at most 4,000"),
    "long file": ("x" * 3000 + ".py:X", "there is no file"),
    "long module": ("x" * 3000 + ":X", "cannot be imported"),
    "empty": ("", "unknown method ''"),
    "no method": ("json:loads", "expected a frozen dataclass"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_is_no_method(name: str) -> None:
    given, words = ODD[name]
    assert words in refused(lambda: find(given), ConfigError)


def test_files_that_are_no_method(tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    for file in ("folder.py", "loop.py"):
        assert "there is no file" in refused(lambda file=file: find(f"{tmp_path / file}:X"), ConfigError)


@pytest.mark.parametrize("name", [".:x", "..", "a:b:c", "x.py:", "x" * 5000])
def test_explain_says_so_without_a_traceback(name: str) -> None:
    assert explain(name).startswith("error: ")
