"""Train, compare, resume and load: what the command line wraps, and what `import fedprism as fp` offers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprism import config as configuration
from fedprism.config import Config, Named
from fedprism.data.images import normalise
from fedprism.engines.client import Job, client_receive, make_info, make_now
from fedprism.engines.events import Callback, Snapshot
from fedprism.engines.inprocess import ENGINES
from fedprism.engines.loop import make_loop
from fedprism.engines.numerics import choose_device, choose_precision, numerics
from fedprism.engines.passes import keyed_draw, learning_rate
from fedprism.errors import ConfigError, DataError, FedprismError, RecordError
from fedprism.federation import ClientData, Federation, Split, make_federation
from fedprism.methods import make, named
from fedprism.methods.base import Info, Method
from fedprism.methods.base import load as load_state
from fedprism.records import Protocol, RunDirectory, RunRecord, read_run, run_status
from fedprism.report.table import Table, table

# --- configurations --------------------------------------------------------------------------------------------------


def resolve(config: Config, method: Method | None = None) -> Config:
    """The same configuration with every default of its method written out; whatever is unknown is an error here."""
    learning_rate(config.train, 0)
    if config.run.engine != "auto":
        ENGINES[config.run.engine]
    choose_precision(config.run.precision, choose_device(config.run.device))
    return replace(config, method=named(method or make(config.method)))


def directory_of(config: Config, name: str, out: str | Path | None, method: Method | None = None) -> Path:
    """Where a run is written: `out`, or `run.out` with {config}, {method} and {seed} filled in."""
    pattern = str(out) if out is not None else config.run.out
    try:
        return Path(pattern.format(config=name, method=(method or make(config.method)).id, seed=config.seed))
    except (KeyError, IndexError, ValueError):
        raise ConfigError(
            f"run.out is {pattern!r}; it may hold {{config}}, {{method}} and {{seed}}, and nothing else in braces."
        ) from None


# --- one run ---------------------------------------------------------------------------------------------------------


def train(
    federation: Federation,
    method: Method | str = "fedavg",
    model: str | Mapping[str, Any] = "lenet-bn",
    rounds: int | None = None,
    *,
    out: str | Path | bool | None = None,
    overwrite: bool = False,
    settings: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a method on a federation and return the run.

    `settings` are laid over the defaults like the command line's `--set`: `["train.epochs=2",
    "train.optimizer.lr=0.01"]`. The run is written to `out` (default: `runs/<data>/<method>-<seed>`); `out=False`
    keeps nothing on disk after Python ends; `overwrite=True` replaces a run that is there.
    """
    base = configuration.plain(Config(seed=federation.seed, data=federation.data))
    given = method if isinstance(method, Method) else None
    base["method"] = named(given).plain() if given is not None else {"name": method}
    base["model"] = {"name": model} if isinstance(model, str) else dict(model)
    if rounds is not None:
        base["train"]["rounds"] = rounds
    config = configuration.structure(configuration.override(base, settings), Config)
    if given is not None and config.method != named(given):
        raise ConfigError("settings cannot change a method that is already made; give its hyper-parameters to it.")
    config = resolve(config, given)
    if config.data != federation.data or config.seed != federation.seed:
        raise ConfigError(
            "settings cannot change the seed or the data of a federation that is made; pass them to fp.federation()."
        )
    if out is False:
        path = Path(tempfile.mkdtemp(prefix="fedprism-")) / "run"
    else:
        path = directory_of(config, federation.name, None if out is None or out is True else out, given)
    if overwrite and path.exists():
        read_run(path)  # refuses to delete what is not a run
        shutil.rmtree(path)
    with RunDirectory.create(path, config) as directory:
        return _run(config, federation, directory, callbacks, given)


def run_config(config: Config, name: str, *, out: str | Path | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Train what a configuration describes; `name` is the {config} in `run.out`."""
    config = resolve(config)
    federation = _federation(config)
    with RunDirectory.create(directory_of(config, name, out), config) as directory:
        return _run(config, federation, directory, callbacks)


def resume(
    path: str | Path,
    *,
    federation: Federation | None = None,
    method: Method | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Go on with a run that was interrupted.

    A federation of one's own arrays, or a method that was written in a Python session, must be given again.
    """
    with RunDirectory.open(path, write=True) as directory:
        if directory.status in ("finished", "diverged"):
            return load(path, method=method)
        config = directory.config
        return _run(config, federation or _federation(config), directory, callbacks, method)


def _run(
    config: Config,
    federation: Federation,
    directory: RunDirectory,
    callbacks: Sequence[Callback],
    given: Method | None = None,
) -> Run:
    method, device = given or make(config.method), choose_device(config.run.device)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    kind = ENGINES["inprocess" if config.run.engine == "auto" else config.run.engine]
    engine = kind(method, config, info, federation, device)
    with numerics(config.run, device):
        loop = make_loop(method, config, info, federation, engine, device)
        loop.run([directory.recorder(), *callbacks], start=directory.latest())
    return load(directory.path, method=given)


def _federation(config: Config) -> Federation:
    """The federation of a configuration, made with the run's number of threads: the bits of its images depend on it."""
    with numerics(config.run, choose_device(config.run.device)):
        return make_federation(config.data, config.seed)


def load(path: str | Path, *, method: Method | None = None) -> Run:
    """A run from its directory, finished or not; needs none of its data."""
    return Run(Path(path), read_run(path), method)


# --- many runs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run of a comparison."""

    config: Config
    path: Path


def cells(
    config: Config, methods: Sequence[str], seeds: Sequence[int], name: str, out: str | Path | None = None
) -> list[Cell]:
    """The runs of a comparison: every method with every seed. `out` is the folder that holds them."""
    if not methods or not seeds:
        raise ConfigError("a comparison needs at least one method and one seed.")
    for kind, items in (("method", methods), ("seed", seeds)):
        if len(set(items)) < len(items):
            raise ConfigError(f"a comparison was given a {kind} twice: {', '.join(map(str, items))}.")
    result = []
    for method in methods:
        chosen = config.method if config.method.name == method else Named(method)
        for seed in seeds:
            each = resolve(replace(config, seed=seed, method=chosen))
            result.append(Cell(each, directory_of(each, name, None if out is None else Path(out) / "{method}-{seed}")))
    return result


def compare(
    config: Config,
    methods: Sequence[str],
    seeds: Sequence[int],
    name: str,
    *,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    on_error: Callable[[Cell, FedprismError], None] | None = None,
) -> list[Run]:
    """Run every cell, one directory each: finished ones are skipped, begun ones resumed.

    A cell that diverges is recorded as such and the next one runs. An error of a cell is raised, or given to
    `on_error`.
    """
    runs: list[Run] = []
    federations: dict[int, Federation] = {}
    planned = cells(config, methods, seeds, name, out)
    place = {cell.path: i for i, cell in enumerate(planned)}
    for cell in sorted(planned, key=lambda c: seeds.index(c.config.seed)):  # a federation is made once a seed
        try:
            runs.append(_run_cell(cell, federations, callbacks))
        except FedprismError as error:
            if on_error is None:
                raise
            on_error(cell, error)
    return sorted(runs, key=lambda run: place[run.path])


def _run_cell(cell: Cell, federations: dict[int, Federation], callbacks: Sequence[Callback]) -> Run:
    config = cell.config
    status = run_status(cell.path)
    if status is not None:
        RunDirectory.open(cell.path, expect=config)  # refuses a run of another configuration
    if status in ("finished", "diverged"):
        return load(cell.path)
    if config.seed not in federations:
        federations.clear()  # one at a time in memory
        federations[config.seed] = _federation(config)
    begun = status is not None
    with RunDirectory.open(cell.path, write=True) if begun else RunDirectory.create(cell.path, config) as directory:
        return _run(config, federations[config.seed], directory, callbacks)


# --- what comes out --------------------------------------------------------------------------------------------------


class Run:
    """A run: its records, its table and its models."""

    def __init__(self, path: Path, record: RunRecord, method: Method | None = None) -> None:
        self.path = path
        self.record = record
        self._method = method

    @property
    def method(self) -> str:
        return self.record.method

    @property
    def seed(self) -> int:
        return self.record.config.seed

    @property
    def status(self) -> str:
        return self.record.status

    def table(self, protocol: Protocol | str | None = None) -> Table:
        """Accuracy of every client, under a stated protocol."""
        return table([self.record], protocol)

    @cached_property
    def models(self) -> Models:
        """Each client's model of the best round on validation data, by name."""
        return Models(self.path, self.record, self._method or make(self.record.config.method))

    def __repr__(self) -> str:
        return f"<fedprism run of {self.method}, seed {self.seed}, {self.status}, in {self.path}>"


class Models(Mapping[str, "ClientModel"]):
    """The clients' models, loaded from the best checkpoint when first asked for."""

    def __init__(self, path: Path, record: RunRecord, method: Method) -> None:
        self._config, self._method = record.config, method
        self._info = make_info(self._config, record.clients, len(record.class_names), record.shape)
        self._class_names = record.class_names
        with RunDirectory.open(path) as directory:
            snapshot = directory.best()
        if snapshot is None:
            raise RecordError(f"{path} holds no checkpoint yet; its models are there after the first one.")
        self.snapshot: Snapshot = snapshot

    def __getitem__(self, client: str) -> ClientModel:
        if client not in self._info.clients:
            raise KeyError(f"there is no client {client!r}; there are {', '.join(self._info.clients)}.")
        return ClientModel.of(self._method, self._config, self._info, self._class_names, self.snapshot, client)

    def __iter__(self) -> Iterator[str]:
        return iter(self._info.clients)

    def __len__(self) -> int:
        return len(self._info.clients)


@dataclass(frozen=True)
class ClientModel:
    """One client's model, ready to predict."""

    client: str
    method: Method
    module: nn.Module
    config: Config
    info: Info
    class_names: tuple[str, ...]

    @classmethod
    def of(
        cls, method: Method, config: Config, info: Info, names: tuple[str, ...], snapshot: Snapshot, client: str
    ) -> ClientModel:
        """The client's model at its method's own moment: as received, or as it left local training."""
        arch = info.archs[client]
        module = method.build(arch, client, info, info.seed)
        state = snapshot.clients[client]
        if method.moment != "trained" or state is None:
            nothing = Split(torch.empty(0, *arch.shape, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
            data = ClientData(client, client, nothing, nothing, nothing, info.classes)
            job = Job(method, config, info, data, snapshot.round)
            now = replace(make_now(method, config, info, module, snapshot.round), client=client)
            down = method.encode(method.send(snapshot.server, client, now), now)
            state = client_receive(job, state, down)
        load_state(module, state)
        return cls(client, method, module.eval(), config, info, names)

    @torch.no_grad()
    def probabilities(self, images: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Class probabilities `[n, classes]` of uint8 images, `[n, height, width, channels]` or channels first."""
        draw = keyed_draw(torch.device("cpu"), self.info.seed, "serve", self.client)
        x = normalise(_images(images, self.info.archs[self.client].shape), self.config.data.normalize)
        scores = [self.method.predict(self.module, part, draw) for part in torch.split(x, 256)]
        return torch.cat(scores).softmax(1).numpy() if scores else np.empty((0, self.info.classes), np.float32)

    def predict(self, images: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The most probable class of each image, as a number; `class_names` has the words."""
        result: np.ndarray[Any, np.dtype[np.int64]] = self.probabilities(images).argmax(1)
        return result


def _images(images: Any, shape: tuple[int, int, int]) -> Tensor:
    """Whatever a user holds as uint8 `[n, channels, height, width]`."""
    x = images if isinstance(images, Tensor) else torch.as_tensor(np.asarray(images))
    channels, height, width = shape
    if x.dtype != torch.uint8:
        raise DataError(f"images are {x.dtype}; expected uint8 from 0 to 255, as they are in a file.")
    if x.ndim == 4 and tuple(x.shape[1:]) == shape:
        return x
    if x.ndim == 4 and tuple(x.shape[1:]) == (height, width, channels):
        return x.permute(0, 3, 1, 2).contiguous()
    raise DataError(
        f"images have shape {tuple(x.shape)}; expected [n, {height}, {width}, {channels}], or the channels first."
    )
