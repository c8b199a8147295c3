"""From a configuration to its runs: every default written out, directories, the cells of a comparison."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedprism import config as configuration
from fedprism import limits
from fedprism.aggregators import AGGREGATORS, check_aggregator, make_aggregator
from fedprism.config import LOCAL, Config, EvaluateConfig, Named
from fedprism.data import Dataset, folder
from fedprism.data.base import chosen_domains, side
from fedprism.data.images import changes
from fedprism.engines.choose import check_engine, resolve_compile
from fedprism.engines.numerics import choose_device, choose_precision
from fedprism.errors import ConfigError, shown
from fedprism.federation.partitions import partition_of
from fedprism.methods import make, named
from fedprism.methods.base import Method
from fedprism.models import architectures
from fedprism.schedules import learning_rate
from fedprism.transforms import TRANSFORMS, make_transforms


def resolve(config: Config, method: Method | None = None) -> Config:
    """The same configuration with every default of its method written out. Whatever is unknown is an error here.

    A method's own moment is always evaluated: without it there would be nothing to print. Models that clients name in
    their folders are written out, too: a run keeps those that it was begun with. `method` is a method that is already
    made.
    """
    config = configuration.structure(configuration.plain(config), Config)  # one built in Python is checked like YAML
    method = method or make(config.method)
    configuration.structure(configuration.plain(method), type(method), "method")
    learning_rate(config.train, config.train.rounds)  # the last round's is the largest that a schedule can grow to
    changes(config.data.augment)
    device = choose_device(config.run.device)
    if config.run.engine != "auto":
        check_engine(config.run.engine, device)
    choose_precision(config.run.precision, device)
    compiled = resolve_compile(config.run.compile, config.train.rounds, device, config.run.engine)
    run = replace(config.run, compile=compiled)
    if "test" not in config.evaluate.splits:
        raise ConfigError(f"evaluate.splits is {list(config.evaluate.splits)}; the test part must be in it.")
    moments = tuple(dict.fromkeys((*config.evaluate.moments, method.moment)))
    evaluate = configuration.structure({**configuration.plain(config.evaluate), "moments": moments}, EvaluateConfig)
    if config.model.per_client == "folder":
        config = replace(config, model=replace(config.model, per_client=_models_in_folders(config)))
    transforms = tuple(map(TRANSFORMS.named, make_transforms(config.transforms)))
    aggregator = make_aggregator(config.server.aggregator)
    check_aggregator(aggregator, method)
    server = replace(config.server, aggregator=AGGREGATORS.named(aggregator))
    return replace(config, method=named(method), transforms=transforms, server=server, evaluate=evaluate, run=run)


def _models_in_folders(config: Config) -> dict[str, Any]:
    """The models that the clients of `folder:PATH` name in their folders, by client name."""
    if config.data.name.partition(":")[0] != "folder":
        raise ConfigError(
            "model.per_client is folder, which is for clients of folder:PATH that name their own models, but data.name "
            f"is {config.data.name!r}; write a list of models, or a map from client names to models."
        )
    if config.data.partition.name != "domain":
        raise ConfigError(
            "model.per_client is folder, so every client is a site or a part of one, but data.partition is "
            f"{config.data.partition.name!r}; take domain, or write a list of models."
        )
    models, size = {}, side(config.data, folder.SIDE)
    entries = {file.parent.name: (file, entry) for file, entry in folder.own_models(config.data).items()}
    for site in chosen_domains(config.data, tuple(entries)):
        file, entry = entries[site]
        try:  # the number of classes is not known yet, and does not matter to this check
            architectures(replace(config.model, per_client={site: entry}, settings={}), [site], 2, (3, size, size))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        models[site] = entry
    # The partition names the clients. Where it deals a site to several clients, all of them have the site's model.
    nothing = torch.empty(0, dtype=torch.int64)
    images = torch.empty(0, 3, size, size, dtype=torch.uint8)
    sites = Dataset(config.data.name, images, nothing, nothing, tuple(models), (), None, 0.0, sites=True)
    partition = partition_of(config.data.partition).settled(sites)
    return {share.client: models[share.domain] for share in partition.deal(sites, nothing.numpy(), config.seed)}


def directory_of(config: Config, name: str, out: str | Path | None, method: Method | None = None) -> Path:
    """Where a run is written: `out`, or `run.out` with {config}, {method} and {seed} filled in."""
    pattern = str(out) if out is not None else config.run.out
    parts = {"config": name, "method": (method or make(config.method)).id, "seed": str(config.seed)}
    if re.search(r"[{}]", re.sub(rf"\{{({'|'.join(parts)})\}}", "", pattern)):
        raise ConfigError(
            f"run.out is {shown(pattern)}; it may hold {{config}}, {{method}} and {{seed}}, and nothing else in braces."
        )
    path = re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], pattern)
    if "\0" in path:
        raise ConfigError(f"run.out is {shown(path)}, which holds a null character; choose another directory.")
    length, longest = len(os.fsencode(path)), max(len(os.fsencode(part)) for part in path.split(os.sep))
    if length > limits.PATH_BYTES or longest > limits.PART_BYTES:
        raise ConfigError(
            f"run.out is {shown(path)}, a path of {length:,} bytes whose longest part has {longest:,}; expected at "
            f"most {limits.PATH_BYTES:,} and {limits.PART_BYTES}. Choose a shorter one."
        )
    return Path(path)


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    config: Config
    path: Path


def cells(
    config: Config, methods: Sequence[str], seeds: Sequence[int], name: str, out: str | Path | None = None
) -> list[Cell]:
    """The runs of a comparison: every method with every seed. `out` is the folder of the runs.

    Training alone uploads nothing that transforms could act on, so it is compared without them.
    """
    if not methods or not seeds:
        raise ConfigError("a comparison needs at least one method and one seed.")
    for kind, items in (("method", methods), ("seed", seeds)):
        if len(set(items)) < len(items):
            raise ConfigError(f"a comparison was given a {kind} twice: {', '.join(map(str, items))}.")
    result = []
    for method in methods:
        chosen = config.method if config.method.name == method else Named(method)
        for seed in seeds:
            transforms = () if method == LOCAL else config.transforms
            each = resolve(replace(config, seed=seed, method=chosen, transforms=transforms))
            result.append(Cell(each, directory_of(each, name, None if out is None else Path(out) / "{method}-{seed}")))
    paths = [cell.path for cell in result]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(f"two runs of this comparison would be written to {twice}; give --out, or other names.")
    return result
