"""The configuration of a run: frozen dataclasses, read from YAML, the command line or Python.

Each field has a `doc` text, which `fedprism run --print-config` prints as a comment. A method, model, partition or
schedule is a `Named`: a name with its own settings, which are checked where the name is looked up. An unknown key is
an error that names the closest known key.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from cattrs import Converter, transform_error
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from fedprism import limits
from fedprism.errors import SHOWN, ConfigError, short, shown, some, unknown
from fedprism.yamlfile import parse_yaml, read_yaml

T = TypeVar("T")


def setting(default: Any, doc: str, check: Callable[[Any], bool] | None = None, expected: str = "") -> Any:
    """A dataclass field with its meaning and, where the type is not enough, a check of its value."""
    metadata = {"doc": doc, "check": check, "expected": expected}
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def required(doc: str, check: Callable[[Any], bool] | None = None, expected: str = "") -> Any:
    """A dataclass field without a default."""
    return field(metadata={"doc": doc, "check": check, "expected": expected})


def positive(value: Any) -> bool:
    return value is None or value > 0


def _auto_or_positive(value: Any) -> bool:
    return bool(value == "auto" or value > 0)


def _image_size(value: Any) -> bool:
    return bool(value == "auto" or 1 <= value <= limits.SIDE)


def share(value: Any) -> bool:
    return value is None or 0 <= value <= 1


@dataclass(frozen=True)
class Named:
    """A name and the settings that belong to it: `{name: fedprox, mu: 0.1}`, or just `fedprox`."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:  # settings may hold lists, which have no hash
        return hash(self.name)

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, **self.settings}


@dataclass(frozen=True)
class SplitConfig:
    rule: Literal["shares", "smallest"] = setting(
        "shares",
        "shares: fractions of each client's own images; smallest: fractions of the smallest client's image count, for "
        "every client (FedBN on Office and DomainNet)",
    )
    train: float | None = setting(
        None,
        "training share with rule smallest; null: all remaining images",
        lambda v: v is None or 0 < v <= 1,
        "above 0 to 1",
    )
    validation: float = setting(0.1, "share of each client's images used to select the best round", share, "0 to 1")
    test: float | None = setting(None, "test share; null: the dataset's own test split or share", share, "0 to 1")


@dataclass(frozen=True)
class Normal:
    """A mean and a standard deviation per channel, for pixels from 0 to 1."""

    mean: tuple[float, ...] = required("one number per channel")
    std: tuple[float, ...] = required("one number per channel", lambda v: all(s > 0 for s in v), "numbers above 0")

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std):
            raise ConfigError(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}; expected one of each per channel"
            )


@dataclass(frozen=True)
class DataConfig:
    name: str = setting("digits-skew", "a name in `fedprism data list`, or folder:PATH")
    root: str | None = setting(
        None,
        "directory of published datasets (null: $FEDPRISM_DATA, or the cache) and base of folder: paths (null: the "
        "working directory)",
    )
    domains: tuple[str, ...] | None = setting(None, "domains to use, in this order; null: all")
    partition: Named = setting(Named("domain"), "how images are divided among clients; `fedprism list partitions`")
    split: SplitConfig = setting(SplitConfig(), "train / validation / test, fixed by the seed")
    samples: int | None = setting(None, "number of training images per client; null: all", positive, "1 or more")
    fraction: float = setting(
        1.0, "fraction of each client's training images to use", lambda v: 0 < v <= 1, "above 0 to 1"
    )
    public: int = setting(0, "images set aside as public data before partitioning", lambda v: v >= 0, "0 or more")
    image_size: int | Literal["auto"] = setting(
        "auto", "pixels per side; auto: as published, 16 for digits-skew and folder:", _image_size, "auto, or 1 to 4096"
    )
    normalize: Literal["half", "none", "imagenet", "cifar10", "cifar100"] | Normal = setting(
        "half",
        "half: to [-1, 1]; none: to [0, 1]; a dataset's mean and deviation by name, or {mean: [...], std: [...]}",
    )
    augment: Literal["none"] | tuple[Named, ...] = setting(
        "none",
        "random changes to training images, drawn anew for each batch: [flip, {name: rotate, degrees: 30}, crop]",
    )


@dataclass(frozen=True)
class ModelConfig:
    name: str = setting("lenet-bn", "a name in `fedprism list models`")
    head_layers: int | Literal["all"] = setting(1, "number of fully connected layers in the head: 1, 2 or all")
    features: int | Literal["auto", "own"] = setting(
        "auto",
        "width of the features from body to head; auto: the model's own, or the smallest of all clients where they "
        "differ; own: the model's own",
        lambda v: v in ("auto", "own") or v > 0,
        "auto, own, or 1 or more",
    )
    adapter: Literal["pool", "linear"] = setting(
        "pool", "how features get that width; pool: means of neighbours; linear: a fully connected layer"
    )
    per_client: Any = setting(
        None,
        "instead of name: a list (client m gets entry m mod its length), a mapping by client name, or folder (each "
        "client's folder names its model)",
    )
    settings: Mapping[str, Any] = setting({}, "other settings of the named model, such as width")


@dataclass(frozen=True)
class OptimizerConfig:
    name: Literal["sgd", "adam"] = setting("sgd", "sgd or adam; its state starts at zero in every pass")
    lr: float = setting(0.05, "learning rate", positive, "above 0")
    momentum: float = setting(0.5, "SGD momentum", lambda v: 0 <= v < 1, "0 to below 1")
    weight_decay: float = setting(0.0, "L2 penalty", lambda v: v >= 0, "0 or more")


@dataclass(frozen=True)
class TrainConfig:
    rounds: int = setting(30, "communication rounds", positive, "1 or more")
    epochs: int = setting(1, "local epochs per round", positive, "1 or more")
    batch_size: int = setting(32, "images per step", positive, "1 or more")
    last_batch: Literal["keep", "drop"] = setting(
        "keep", "what to do with a smaller last batch (a client's only batch is always kept)"
    )
    optimizer: OptimizerConfig = setting(OptimizerConfig(), "the clients' optimizer")
    schedule: Named = setting(
        Named("none"), "none, cosine, {name: step, every: 10, gamma: 0.5}, {name: exponential, gamma: 0.99}"
    )
    clip: float | None = setting(None, "maximum gradient norm per step; null: no limit", positive, "above 0")
    bn: Literal["method", "shared", "local", "local-stats", "local-affine"] = setting(
        "method",
        "batch norm: shared, local, local-stats (affine shared, statistics local), local-affine (the reverse), or "
        "method (as in its paper)",
    )


@dataclass(frozen=True)
class ServerConfig:
    optimizer: Literal["none", "momentum", "adam", "yogi"] = setting(
        "none", "server optimizer: none, momentum (FedAvgM), adam (FedAdam) or yogi (FedYogi)"
    )
    lr: float = setting(
        1.0,
        "server learning rate: 1.0 with none takes the average; adam and yogi need a small one, such as 0.01",
        positive,
        "above 0",
    )
    momentum: float = setting(0.9, "with momentum: decay of the previous step", lambda v: 0 <= v < 1, "0 to below 1")
    betas: tuple[float, float] = setting(
        (0.9, 0.99),
        "with adam and yogi: decay of the mean step and of the mean square",
        lambda v: all(0 <= beta < 1 for beta in v),
        "two numbers of 0 to below 1",
    )
    tau: float = setting(
        1e-3,
        "with adam and yogi: added to the root of the mean square; a smaller value evens out the steps of the weights",
        lambda v: 0 < v <= 1e15,  # its square is a 32-bit number
        "above 0 to 1e15",
    )
    aggregator: Named = setting(
        Named("mean"),
        "mean, or one that bounds what a few clients can do: {name: trimmed_mean, trim: 0.2}, median, norm_bounded",
    )

    def __post_init__(self) -> None:
        if self.optimizer in ("adam", "yogi") and self.lr >= 1 and self.tau < 0.01:
            raise ConfigError(
                f"server.lr is {self.lr}, but {self.optimizer} moves a weight by up to about server.lr per round where "
                f"the average moves by more than server.tau ({self.tau}); set server.lr to a value below 1, such as "
                "0.01, or server.tau to 0.01 or more"
            )


@dataclass(frozen=True)
class ClientsConfig:
    participation: float | tuple[float, float] = setting(
        1.0,
        "share of clients per round, or [lo, hi] from which each round draws its share; at least one client",
        lambda v: 0 < v <= 1 if isinstance(v, float | int) else 0 <= v[0] <= v[1] <= 1 and v[1] > 0,
        "above 0 to 1, or [lo, hi] within 0 to 1",
    )
    dropout: float = setting(0.0, "probability that a sampled client fails after training", share, "0 to 1")
    weighting: Literal["method", "samples", "uniform"] = setting("method", "weights of the clients in an average")
    broadcast: Literal["method", "participants", "all"] = setting("method", "who receives the new state")
    train: Literal["method", "participants", "all"] = setting("method", "who trains; only participants are averaged")
    state: Literal["memory", "disk"] = setting(
        "memory", "where clients' states live between rounds; disk: one file per client, so that memory stays bounded"
    )


MOMENTS = ("received", "trained", "adapted", "global")
SPLITS = ("train", "validation", "test")
LOCAL = "local"  # training alone, against which gains are measured


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = setting(
        1,
        "rounds between evaluations; the initial state and the last round are always evaluated",
        positive,
        "1 or more",
    )
    moments: tuple[Literal["received", "trained", "adapted", "global"], ...] = setting(
        ("received", "trained"), "received, trained, adapted, global: see docs/protocols.md"
    )
    splits: tuple[Literal["train", "validation", "test"], ...] = setting(
        ("validation", "test"), "splits of each client's data to evaluate"
    )
    clients: Literal["all", "participants"] = setting("all", "clients to evaluate")
    train_loss: bool = setting(False, "also evaluate the training split")


@dataclass(frozen=True)
class RunConfig:
    engine: str = setting("auto", "auto, or a name in `fedprism list engines`")
    device: str = setting("auto", "cpu, cuda, cuda:1; auto: cuda if available")
    threads: int = setting(
        1, "intra-op threads per client; affects the last bits of results", lambda v: 1 <= v <= 1024, "1 to 1024"
    )
    memory_format: Literal["contiguous", "channels_last"] = setting(
        "contiguous", "memory format of images; affects the last bits of results"
    )
    deterministic: bool = setting(True, "the same seed gives bitwise equal results, on a GPU too")
    precision: Literal["auto", "fp32", "tf32", "bf16"] = setting(
        "auto", "auto: tf32 on a GPU that has it, fp32 elsewhere; bf16: layers compute in bfloat16, weights stay fp32"
    )
    compile: Literal[False, True, "auto"] = setting(
        False, "compile the training step (cuda-graphs); auto: where it is faster. Equal up to rounding, not bitwise"
    )
    slots: int | Literal["auto"] = setting(
        "auto",
        "clients trained at once on a GPU; auto: found by a short probe. Does not affect results",
        _auto_or_positive,
        "auto, or 1 or more",
    )
    workers: int | Literal["auto"] = setting(
        "auto",
        "worker processes on a CPU; auto: one per core. Does not affect results",
        _auto_or_positive,
        "auto, or 1 or more",
    )
    checkpoint_every: int = setting(
        5, "rounds between checkpoints; a new best round is always kept", positive, "1 or more"
    )
    keep_rounds: tuple[int, ...] = setting((), "rounds whose checkpoints are never deleted")
    out: str = setting("runs/{config}/{method}-{seed}", "directory of the run")


@dataclass(frozen=True)
class Config:
    seed: int = setting(0, "seed of the split, the initial weights and every random draw")
    data: DataConfig = setting(DataConfig(), "")
    model: ModelConfig = setting(ModelConfig(), "")
    method: Named = setting(
        Named("fedavg"), "a name in `fedprism list methods` (`fedprism explain METHOD`), or path/to/file.py:Class"
    )
    train: TrainConfig = setting(TrainConfig(), "")
    transforms: tuple[Named, ...] = setting(
        (), "changes to uploads on their way, in order: [{name: clip_norm, max: 1.0}, {name: quantize, bits: 8}]"
    )
    server: ServerConfig = setting(ServerConfig(), "")
    clients: ClientsConfig = setting(ClientsConfig(), "")
    evaluate: EvaluateConfig = setting(EvaluateConfig(), "")
    run: RunConfig = setting(RunConfig(), "")


_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

# --- from and to plain values ----------------------------------------------------------------------------------------


def _strict(kind: type, accepts: tuple[type, ...], expected: str) -> Callable[[Any, Any], Any]:
    def hook(raw: Any, _: Any) -> Any:
        if not isinstance(raw, accepts) or (isinstance(raw, bool) and kind is not bool):
            raise ConfigError(f"{shown(raw)} is not {expected}")
        return kind(raw)

    return hook


def _number(raw: Any, _: Any) -> float:
    if isinstance(raw, str) and len(raw) <= limits.DIGITS and _SCIENTIFIC.fullmatch(raw):
        raw = float(raw)  # YAML reads 1e-3 as a string
    if not isinstance(raw, int | float) or isinstance(raw, bool):
        raise ConfigError(f"{shown(raw)} is not a number")
    if isinstance(raw, float) and not math.isfinite(raw):
        raise ConfigError(f"{raw!r} is not a finite number")
    if abs(raw) > limits.NUMBER:
        raise ConfigError(f"{shown(raw)} is out of range; numbers go up to {limits.NUMBER:g}")
    return float(raw)


def _literal(raw: Any, kind: Any) -> Any:
    choices = typing.get_args(kind)
    for choice in choices:
        if (raw == choice and type(raw) is type(choice)) or (isinstance(raw, str) and raw == str(choice)):
            return choice  # bits: "4" is 4
    given = raw if isinstance(raw, str) else shown(raw)
    raise ConfigError(unknown("value", given, [str(choice) for choice in choices]))


def _union(raw: Any, kind: Any) -> Any:
    if raw is None and type(None) in typing.get_args(kind):
        return None
    failures = []
    for option in typing.get_args(kind):
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            if isinstance(raw, Mapping):
                return _converter.structure(raw, option)  # its own error names the wrong key
            keys = ", ".join(f.name for f in dataclasses.fields(option))
            failures.append(f"{shown(raw)} is not a mapping of {keys}")
        elif option is not type(None):
            try:
                return _converter.structure(raw, option)
            except (BaseValidationError, ConfigError, TypeError, ValueError) as error:
                failures.append(str(error) if isinstance(error, ConfigError) else f"{shown(raw)} is not {option}")
    raise ConfigError("; ".join(failures))


def _named(raw: Any, _: Any) -> Named:
    if isinstance(raw, Named):
        return raw
    if isinstance(raw, str):
        return Named(limits.check_text(raw))
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        advice = ""
        if isinstance(raw, Mapping) and len(raw) == 1 and isinstance((inner := next(iter(raw.values()))), Mapping):
            advice = f"; write {_flow({'name': next(iter(raw)), **inner})}"
        raise ConfigError(f"{shown(raw)} is neither a name nor a mapping with a `name`{short(advice, SHOWN)}")
    return Named(limits.check_text(raw["name"]), {str(k): v for k, v in raw.items() if k != "name"})


def _model(raw: Any, _: Any) -> ModelConfig:
    """`model` takes the settings of the named model beside its own keys."""
    if isinstance(raw, str):
        raw = {"name": raw}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{shown(raw)} is neither a model's name nor a mapping")
    if not isinstance(raw.get("name", ""), str):
        raise ConfigError(f"{shown(raw['name'])} is not a model's name")
    if "name" in raw and raw.get("per_client") is not None:
        raise ConfigError(f"model.name {shown(raw['name'])} and model.per_client are both set; remove one of them")
    own = {f.name for f in dataclasses.fields(ModelConfig)} - {"settings"}
    known = {k: v for k, v in raw.items() if k in own}
    kinds = typing.get_type_hints(ModelConfig)
    for key in ("name", "head_layers", "features", "adapter"):
        if key in known:
            known[key] = _converter.structure(known[key], kinds[key])
    return ModelConfig(**known, settings={str(k): v for k, v in raw.items() if k not in own})


def _tuple(raw: Any, kind: Any) -> Any:
    if not isinstance(raw, list | tuple):
        raise ConfigError(f"{shown(raw)} is not a list; write {short(_flow([] if raw is None else [raw]), SHOWN)}")
    items = typing.get_args(kind)
    kinds = [items[0]] * len(raw) if items[-1] is Ellipsis else items
    if len(kinds) != len(raw):
        raise ConfigError(f"{shown(raw)} is not a list of {len(kinds)}")
    return tuple(_converter.structure(item, each) for item, each in zip(raw, kinds, strict=True))


def _section(kind: type[Any]) -> Callable[[Any, Any], Any]:
    """What reads a dataclass."""
    read = make_dict_structure_fn(kind, _converter, _cattrs_forbid_extra_keys=True)

    def hook(raw: Any, _: Any) -> Any:
        if not isinstance(raw, Mapping):
            keys = some(f.name for f in dataclasses.fields(kind))
            raise ConfigError(f"{shown(raw)} is not a mapping" + (f" of {keys}" if keys else ""))
        return read(raw, kind)

    return hook


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _is_literal(kind: Any) -> bool:
    return bool(typing.get_origin(kind) == Literal)


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union


_converter = Converter(forbid_extra_keys=True)
_converter.register_structure_hook_factory(dataclasses.is_dataclass, _section)
_converter.register_structure_hook(bool, _strict(bool, (bool,), "true or false"))
_converter.register_structure_hook(int, _strict(int, (int,), "a whole number"))
_converter.register_structure_hook(float, _number)
_converter.register_structure_hook(str, lambda raw, _: limits.check_text(raw))
_converter.register_structure_hook_func(_is_literal, _literal)
_converter.register_structure_hook_func(_is_union, _union)
_converter.register_structure_hook_func(_is_tuple, _tuple)
_converter.register_structure_hook(Named, _named)
_converter.register_structure_hook(ModelConfig, _model)
_converter.register_unstructure_hook(Named, lambda named: named.plain())
_converter.register_unstructure_hook(tuple, list)


def structure(raw: Any, kind: type[T], where: str = "") -> T:
    """Convert plain dicts, lists and scalars to a dataclass; an error names the path of the wrong key or value."""
    try:
        limits.check_plain(raw)
        value = _converter.structure(raw if raw is not None else {}, kind)
    except BaseValidationError as error:
        lines = transform_error(error, path=where or "$", format_exception=_describe)
        lines = [line.replace("$.", "").replace("$", "the configuration") for line in lines]
        raise ConfigError(some(lines, "; ")) from None
    except ConfigError as error:
        raise ConfigError(f"{error} @ {where}" if where else str(error)) from None
    _check(value, where)
    return value


def _describe(error: BaseException, kind: type | None) -> str:
    if isinstance(error, ForbiddenExtraKeysError):
        known = [f.name for f in dataclasses.fields(error.cl)]
        first, *more = sorted(map(str, error.extra_fields))
        return unknown("key", first, known) + (f" Unknown, too: {short(some(more), SHOWN)}." if more else "")
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    return f"expected {getattr(kind, '__name__', kind)} ({short(str(error))})"


def _check(value: Any, where: str) -> None:
    """Check the ranges in each field's metadata, which its type cannot express."""
    for f in dataclasses.fields(value):
        item, path = getattr(value, f.name), f"{where}.{f.name}" if where else f.name
        check = f.metadata.get("check")
        if check is not None and not check(item):
            raise ConfigError(f"{path} is {shown(item)}; expected {f.metadata['expected']}.")
        if check is not None and any(isinstance(n, int) and n > limits.COUNT for n in _items(item)):
            raise ConfigError(f"{path} is {shown(item)}; expected at most {limits.COUNT:,}.")
        if dataclasses.is_dataclass(item) and not isinstance(item, Named):
            _check(item, path)


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple) else (value,)


def plain(value: Any) -> Any:
    """The inverse of `structure`: dicts, lists and scalars that YAML and JSON can hold."""
    if isinstance(value, Named):
        return {k: plain(v) for k, v in value.plain().items()}
    if isinstance(value, ModelConfig):
        own = {"per_client": value.per_client} if value.per_client is not None else {"name": value.name}
        own |= {key: getattr(value, key) for key in ("head_layers", "features", "adapter")}
        return plain({**own, **value.settings})
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


# --- files, overrides, comments --------------------------------------------------------------------------------------


def read(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file as a `Config` and apply `key.path=value` overrides."""
    raw = read_yaml(path, f"there is no configuration at {path}; `fedprism run --print-config > {path}` writes one.")
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(f"{path} contains a {type(raw).__name__}; expected keys such as `data:` and `method:`.")
    return structure(override(raw or {}, overrides), Config)


def override(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return `raw` with overrides such as `train.rounds=50` applied; values are read as YAML.

    >>> override({"train": {"rounds": 30}}, ["train.rounds=50", "method.name=fedprox"])
    {'train': {'rounds': 50}, 'method': {'name': 'fedprox'}}
    """
    result: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in raw.items()}
    given = [(text, *_key_and_value(text)) for text in overrides]
    _forget_settings(result, [(keys, value) for _, keys, value in given])
    for text, keys, value in given:
        level, default = result, plain(Config())
        for name in keys[:-1]:
            default = default.get(name, {}) if isinstance(default, Mapping) else {}
            inner = level.get(name, default)
            if isinstance(inner, str):  # a bare name: its settings go beside it, except for `normalize`
                inner = {"name": inner} if name != "normalize" else {}
            if inner is not None and not isinstance(inner, Mapping):
                what = "a list; set all of it" if isinstance(inner, list) else "a single value without keys of its own"
                raise ConfigError(f"--set {shown(text)}: {name} is {shown(inner)}, {what}.")
            # A key that the file does not set keeps the default's name: `method.mu=1` alone sets the default method's.
            level[name] = (
                dict(inner or {}) if name in level else {k: v for k, v in (inner or {}).items() if k == "name"}
            )
            level = level[name]
        level[keys[-1]] = value
        if keys == ["model", "name"]:  # one model for all, or one per client: the last setting wins
            level.pop("per_client", None)
        elif keys[:2] == ["model", "per_client"] and value is not None:
            result["model"].pop("name", None)
    return result


def _key_and_value(text: str) -> tuple[list[str], Any]:
    """The keys from the top and the value of an override."""
    path, equals, value = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {shown(text)}: expected key.path=value, such as train.rounds=50.")
    return keys, parse_yaml(value, f"--set {shown(text)}: the value")


def _forget_settings(raw: dict[str, Any], given: Iterable[tuple[list[str], Any]]) -> None:
    """Drop the settings of the file's method, model, partition or schedule where an override names another."""
    stays: dict[str, set[str]] = {
        "method": set(),
        "model": {f.name for f in dataclasses.fields(ModelConfig)},
        "data.partition": {"clients", "of"},  # which all of them have
        "train.schedule": set(),
        "server.aggregator": set(),
    }
    for (*above, key), value in given:
        kind = ".".join(above)
        if kind not in stays:
            continue
        level: Any = raw
        for name in above[:-1]:
            level = level.get(name) if isinstance(level, dict) else None
        current = level.get(above[-1]) if isinstance(level, dict) else None
        if not isinstance(current, dict):
            continue
        other = key == "name" and current.get("name") not in (None, value)
        if other or (kind, key) == ("model", "per_client"):
            level[above[-1]] = {k: v for k, v in current.items() if k in stays[kind]}


read_config = read  # its public name


def dump(config: Config) -> str:
    """The configuration as YAML without comments, as a run directory stores it."""
    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True)


def commented(config: Config, method: Mapping[str, str] | None = None) -> str:
    """The configuration as YAML with each key's meaning as a comment; `method` documents the method's settings."""
    lines: list[str] = [
        "# A complete fedprism configuration: every key, its value and its meaning. Run it with `fedprism run FILE`."
    ]
    _commented(config, "", lines, method or {})
    return "\n".join(lines) + "\n"


def _commented(value: Any, indent: str, lines: list[str], method: Mapping[str, str]) -> None:
    for f in dataclasses.fields(value):
        item, doc = getattr(value, f.name), f.metadata.get("doc", "")
        note = f"  # {doc}" if doc else ""
        if isinstance(item, ModelConfig) or (dataclasses.is_dataclass(item) and not isinstance(item, Named)):
            lines.append(f"{indent}{f.name}:{note}")
            _commented(item, indent + "  ", lines, method)
        elif isinstance(value, ModelConfig) and (
            f.name == "settings" or (f.name == "name" and value.per_client is not None)
        ):
            lines.extend(f"{indent}{k}: {_flow(v)}" for k, v in (item.items() if f.name == "settings" else ()))
        elif isinstance(value, ModelConfig) and f.name == "per_client" and item is None:
            lines.append(f"{indent}# per_client: [lenet-bn, mlp]{note}")
        elif isinstance(value, Config) and f.name == "method" and item.settings:
            lines += ["method:", f"  name: {_flow(item.name)}{note}"]
            for key, chosen in item.settings.items():
                meaning = " ".join(method.get(key, "").split())
                lines.append(f"  {key}: {_flow(plain(chosen))}" + (f"  # {meaning}" if meaning else ""))
        else:
            lines.append(f"{indent}{f.name}: {_flow(plain(item))}{note}")


def _flow(value: Any) -> str:
    """A value as a user writes it in YAML, in one line.

    >>> _flow([{"name": "clip_norm", "max": 1.0}])
    '[{name: clip_norm, max: 1.0}]'
    """
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()
