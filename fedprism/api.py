"""Train, compare, resume and load: what the command line wraps, and what `import fedprism as fp` offers."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprism import config as configuration
from fedprism.config import Config, EvaluateConfig, Named
from fedprism.data import Dataset, agnews, folder
from fedprism.data.base import chosen_domains, side
from fedprism.data.images import changes, check_inputs, normalise
from fedprism.data.pictures import DAMAGED, read_picture, reason
from fedprism.engines import serverside
from fedprism.engines.choose import check_engine, make_engine
from fedprism.engines.client import Job, client_adapt, client_receive, make_info, make_now
from fedprism.engines.compiled import settle
from fedprism.engines.events import Callback, Snapshot
from fedprism.engines.loop import Loop, digest, make_loop
from fedprism.engines.noise import keyed_draw
from fedprism.engines.numerics import choose_device, choose_precision, numerics
from fedprism.engines.passes import learning_rate, sweep_batch
from fedprism.errors import ConfigError, DataError, RecordError
from fedprism.federation import ClientData, Federation, Split, make_federation
from fedprism.federation.partitions import partition_of
from fedprism.methods import make, named
from fedprism.methods.base import Draw, Info, Method
from fedprism.methods.base import load as load_state
from fedprism.methods.mixed import check_mixed
from fedprism.models import architectures
from fedprism.records import Protocol, RunDirectory, RunRecord, read_run, run_status
from fedprism.report.table import Table
from fedprism.report.table import table as make_table

# --- configurations --------------------------------------------------------------------------------------------------


def resolve(config: Config, given: Method | None = None) -> Config:
    """The same configuration with every default of its method written out; whatever is unknown is an error here.

    A method's own moment is always evaluated: without it there would be nothing to print. Models that clients name in
    their folders are written out, too: a run keeps those that it was begun with.
    """
    config = configuration.structure(configuration.plain(config), Config)  # what Python has built is checked like YAML
    method = given or make(config.method)
    configuration.structure(configuration.plain(method), type(method), "method")
    learning_rate(config.train, 0)
    changes(config.data.augment)
    device = choose_device(config.run.device)
    if config.run.engine != "auto":
        check_engine(config.run.engine, device)
    choose_precision(config.run.precision, device)
    compiled = settle(config.run.compile, config.train.rounds, device, config.run.engine)
    run = replace(config.run, compile=compiled)
    if "test" not in config.evaluate.splits:
        raise ConfigError(f"evaluate.splits is {list(config.evaluate.splits)}; the test part must be in it.")
    moments = tuple(dict.fromkeys((*config.evaluate.moments, method.moment)))
    evaluate = configuration.structure({**configuration.plain(config.evaluate), "moments": moments}, EvaluateConfig)
    if config.model.per_client == "folder":
        config = replace(config, model=replace(config.model, per_client=_own_models(config)))
    return replace(config, method=named(method), evaluate=evaluate, run=run)


def _own_models(config: Config) -> dict[str, Any]:
    """The models that the clients of `folder:PATH` name, as a map by client name."""
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
    named_in = {file.parent.name: (file, entry) for file, entry in folder.own_models(config.data).items()}
    for site in chosen_domains(config.data, tuple(named_in)):
        file, entry = named_in[site]
        try:  # the classes are not known yet, and do not matter to what can be mistaken here
            architectures(replace(config.model, per_client={site: entry}, settings={}), [site], 2, (3, size, size))
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None
        models[site] = entry
    # The partition says what the clients are called; where it deals a site to several, all of them have its model.
    nothing = torch.empty(0, dtype=torch.int64)
    images = torch.empty(0, 3, size, size, dtype=torch.uint8)
    sites = Dataset(config.data.name, images, nothing, nothing, tuple(models), (), None, 0.0, sites=True)
    partition = partition_of(config.data.partition).settled(sites)
    return {share.client: models[share.domain] for share in partition.deal(sites, nothing.numpy(), config.seed)}


def directory_of(config: Config, name: str, out: str | Path | None, method: Method | None = None) -> Path:
    """Where a run is written: `out`, or `run.out` with {config}, {method} and {seed} filled in."""
    pattern = str(out) if out is not None else config.run.out
    try:
        return Path(pattern.format(config=name, method=(method or make(config.method)).id, seed=config.seed))
    except (KeyError, IndexError, ValueError, AttributeError):
        raise ConfigError(
            f"run.out is {pattern!r}; it may hold {{config}}, {{method}} and {{seed}}, and nothing else in braces."
        ) from None


# --- one run ---------------------------------------------------------------------------------------------------------


def train(
    federation: Federation,
    method: Method | str | Mapping[str, Any] = "fedavg",
    model: str | Mapping[str, Any] | Sequence[Any] = "lenet-bn",
    rounds: int | None = None,
    *,
    out: str | Path | bool | None = None,
    overwrite: bool = False,
    settings: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a method on a federation and return the run.

    `method` and `model` are what a configuration has there: a name, or a mapping with a name and settings. A method may
    also be an object, such as `fp.FedProx(mu=0.1)`, and a list of models is dealt to the clients in turn.

    `settings` are laid over the defaults like the command line's `--set`: `["train.epochs=2",
    "train.optimizer.lr=0.01"]`. The run is written to `out` (default: `runs/<data>/<method>-<seed>`); `out=False`
    keeps it on disk only as long as the run is in use; `overwrite=True` replaces a run that is there.
    """
    if not isinstance(federation, Federation):
        raise ConfigError(f"a run needs a federation, not {federation!r}: fp.train(fp.federation(NAME), ...).")
    if isinstance(method, type):
        raise ConfigError(f"method is the class {method.__name__}; give one of it: fp.{method.__name__}().")
    base = configuration.plain(Config(seed=federation.seed, data=federation.data))
    given = method if isinstance(method, Method) else None
    base["method"] = {"name": method} if isinstance(method, str) else named(given).plain() if given else method
    listed = isinstance(model, Sequence) and not isinstance(model, str)
    base["model"] = {"per_client": [*model]} if listed else {**model} if isinstance(model, Mapping) else model
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
    if out is not False:
        path = directory_of(config, federation.name, None if isinstance(out, bool) else out, given)
        return _run_new(config, federation, path, callbacks, given, overwrite)
    folder = Path(tempfile.mkdtemp(prefix="fedprism-"))
    try:
        run = _run_new(config, federation, folder / "run", callbacks, given)
    except BaseException:
        shutil.rmtree(folder)
        raise
    weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)  # when the run is no longer in use
    return run


def run_config(config: Config, name: str, *, out: str | Path | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Train what a configuration describes; `name` is the {config} in `run.out`."""
    config = resolve(config)
    return _run_new(config, make_federation(config.data, config.seed), directory_of(config, name, out), callbacks)


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
            return load(path, method=method, federation=federation)
        config = directory.config
        federation = federation or make_federation(config.data, config.seed)
        _check_clients(directory, federation)
        return _run(_make_loop(config, federation, method), directory, callbacks, method)


def _check_clients(directory: RunDirectory, federation: Federation) -> None:
    """A run goes on with the clients that it was begun with."""
    begun, now = directory.clients, federation.names
    known, here = set(begun), set(now)
    odd = [f"{name!r} is new" for name in now if name not in known]
    odd += [f"{name!r} is gone" for name in begun if name not in here]
    if begun and odd:
        raise RecordError(
            f"{directory.path} was begun with the clients {', '.join(begun)}, but now {', '.join(odd)}. Go on with the "
            "same clients, or begin a new run."
        )


def _make_loop(config: Config, federation: Federation, given: Method | None = None) -> Loop:
    """The run in memory, before anything is written: what does not fit together is told here."""
    method, device = given or make(config.method), choose_device(config.run.device)
    check_inputs(config.data, federation.shape)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    engine = make_engine(method, config, info, federation, device)
    return make_loop(method, config, info, federation, engine, device)


def _run_new(
    config: Config,
    federation: Federation,
    path: Path,
    callbacks: Sequence[Callback],
    given: Method | None = None,
    overwrite: bool = False,
) -> Run:
    loop = _make_loop(config, federation, given)
    aside = _set_aside(path) if overwrite and path.exists() else None
    with RunDirectory.create(path, config) as directory:
        if aside is not None:
            shutil.rmtree(aside)
        try:
            return _run(loop, directory, callbacks, given)
        except BaseException:
            if not directory.begun():  # nothing was recorded: leave no directory in the way of the next try
                shutil.rmtree(path)
            raise


def _run(loop: Loop, directory: RunDirectory, callbacks: Sequence[Callback], given: Method | None) -> Run:
    with numerics(loop.config.run, loop.device):
        loop.run([directory.recorder(), *callbacks], start=directory.latest(), folder=directory.states)
    return load(directory.path, method=given, federation=loop.federation)


def _set_aside(path: Path) -> Path:
    """Move a run out of the way of its successor; one that is being written, or that is no run, is refused."""
    with RunDirectory.open(path, write=True):
        aside = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        return path.rename(aside / path.name).parent


def load(path: str | Path, *, method: Method | None = None, federation: Federation | None = None) -> Run:
    """A run from its directory, finished or not.

    Its data are needed by the models of methods that adapt before they are tested, and by nothing else. They are read
    as the run read them; a federation of one's own arrays must be given again.
    """
    return Run(Path(path), read_run(path), method, federation)


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
    paths = [cell.path for cell in result]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(f"two runs of this comparison would be written to {twice}; give --out, or other names.")
    return result


def compare(
    config: Config,
    methods: Sequence[str],
    seeds: Sequence[int],
    name: str,
    *,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    on_error: Callable[[Cell, Exception], None] | None = None,
) -> list[Run]:
    """Run every cell, one directory each: finished ones are skipped, begun ones resumed.

    A cell that diverges is recorded as such and the next one runs. An error of a cell is raised, or given to
    `on_error`.
    """
    runs: list[Run] = []
    federations: dict[int, Federation] = {}  # made once a seed
    planned = cells(config, methods, seeds, name, out)
    place = {cell.path: i for i, cell in enumerate(planned)}
    for cell in planned:
        if run_status(cell.path) is not None:
            RunDirectory.open(cell.path, expect=cell.config)  # a run of another configuration: told before any trains
    ordered = sorted(planned, key=lambda cell: seeds.index(cell.config.seed))
    _check_models([cell for cell in ordered if run_status(cell.path) not in ("finished", "diverged")], federations)
    for cell in ordered:
        try:
            runs.append(_run_cell(cell, federations, callbacks))
        except Exception as error:  # a bug in one method must not take the other runs' results away
            if on_error is None:
                raise
            on_error(cell, error)
    return sorted(runs, key=lambda run: place[run.path])


def _check_models(cells: Sequence[Cell], federations: dict[int, Federation]) -> None:
    """Methods that cannot do with the clients' different architectures: told before any trains."""
    if not cells or cells[0].config.model.per_client is None:
        return
    config = cells[0].config
    made = federations[config.seed] = make_federation(config.data, config.seed)
    methods = {cell.config.method.name: make(cell.config.method) for cell in cells}
    check_mixed(list(methods.values()), make_info(config, made.names, made.classes, made.shape))


def _run_cell(cell: Cell, federations: dict[int, Federation], callbacks: Sequence[Callback]) -> Run:
    config = cell.config
    status = run_status(cell.path)
    if status in ("finished", "diverged"):
        return load(cell.path)
    if config.seed not in federations:
        federations.clear()  # one at a time in memory
        federations[config.seed] = make_federation(config.data, config.seed)
    if status is None:
        _run_new(config, federations[config.seed], cell.path, callbacks)
    else:
        with RunDirectory.open(cell.path, write=True) as directory:
            _check_clients(directory, federations[config.seed])
            _run(_make_loop(config, federations[config.seed]), directory, callbacks, None)
    return load(cell.path)  # without the federation


def table(runs: Sequence[Run], protocol: Protocol | str | None = None) -> Table:
    """One table of several runs: print it, or write it with `.csv()`, `.markdown()`, `.latex()` or `.html()`."""
    return make_table([run.record for run in runs], protocol)


# --- what comes out --------------------------------------------------------------------------------------------------


class Run:
    """A run: its records, its table and its models."""

    def __init__(
        self, path: Path, record: RunRecord, method: Method | None = None, federation: Federation | None = None
    ) -> None:
        self.path = path
        self.record = record
        self._method = method
        self._federation = federation

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
        return make_table([self.record], protocol)

    @cached_property
    def models(self) -> Models:
        """Each client's model of the best round on validation data, by name, at the moment of the method's test.

        Of a method that adapts before it (FedBABU, fine-tuning, Per-FedAvg) a model is adapted when it is asked for.
        """
        method = self._method or make(self.record.config.method)
        return Models(self.path, self.record, method, self._federation)

    def __repr__(self) -> str:
        return f"<fedprism run of {self.method}, seed {self.seed}, {self.status}, in {self.path}>"


class Models(Mapping[str, "ClientModel"]):
    """The clients' models, loaded from the best checkpoint when first asked for."""

    def __init__(self, path: Path, record: RunRecord, method: Method, federation: Federation | None = None) -> None:
        self._path, self._config, self._method, self._federation = path, record.config, method, federation
        self._digests = dict(record.info.get("images", {}))  # of clients whose images have not been compared yet
        self._info = make_info(self._config, record.clients, len(record.class_names), record.shape)
        self._class_names = record.class_names
        with RunDirectory.open(path) as directory:
            snapshot = directory.best()
        if snapshot is None:
            raise RecordError(f"{path} holds no checkpoint yet; its models are there after the first one.")
        self.snapshot: Snapshot = snapshot

    def __getitem__(self, client: str) -> ClientModel:
        if client not in self._info.archs:
            raise KeyError(f"there is no client {client!r}; there are {', '.join(self._info.clients)}.")
        data = self._data(client) if self._method.moment == "adapted" else None
        return ClientModel.of(self._method, self._config, self._info, self._class_names, self.snapshot, client, data)

    def _data(self, client: str) -> Federation:
        """The images that the run had, to adapt a model on."""
        again = f"give them to fp.load({str(self._path)!r}, federation=...)"
        if self._federation is None:
            try:
                self._federation = make_federation(self._config.data, self._config.seed)
            except (ConfigError, DataError) as error:
                raise DataError(
                    f"{self._method.id} adapts a model to its client's images before it is tested, and the images of "
                    f"this run cannot be read again. To have its models, {again}. The reason: {error}"
                ) from error
        given = self._federation.clients.get(client)
        if given is None or (client in self._digests and digest(given) != self._digests[client]):
            wrong = "are not there" if given is None else f"are not the ones that {self._path} was run with"
            raise RecordError(
                f"{self._method.id} adapts a model to its client's images before it is tested, but those of {client!r} "
                f"{wrong}; {again}."
            )
        self._digests.pop(client, None)
        return self._federation

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
        cls,
        method: Method,
        config: Config,
        info: Info,
        names: tuple[str, ...],
        snapshot: Snapshot,
        client: str,
        federation: Federation | None = None,
    ) -> ClientModel:
        """The client's model at its method's own moment: as received, as it left local training, or adapted to the
        client's images, for which alone a federation is needed."""
        arch = info.archs[client]
        module = method.build(arch, client, info, info.seed)
        state = snapshot.clients[client]
        if method.moment != "trained" or state is None:
            now = replace(make_now(method, config, info, module, snapshot.round), client=client)
            down = method.encode(method.send(serverside.of_method(snapshot.server), client, now), now)
            if federation is None:
                nothing = Split(_as_inputs((), arch.shape), torch.empty(0, dtype=torch.int64))
                data = ClientData(client, client, nothing, nothing, nothing, info.classes)
                state = client_receive(Job(method, config, info, data, snapshot.round), state, down)
            else:
                job = Job(method, config, info, federation.clients[client], snapshot.round, public=federation.public)
                run = replace(config.run, precision="bf16" if config.run.precision == "bf16" else "fp32")  # on a CPU
                with numerics(run, job.device):
                    state = client_adapt(job, state, down)
        load_state(module, state)
        return cls(client, method, module.eval(), config, info, names)

    @torch.no_grad()
    def probabilities(self, images: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Class probabilities `[n, classes]` of uint8 images, `[n, height, width, channels]` or channels first; or of
        texts, as they are or as tokens `[n, length]`."""
        scores = [self.method.predict(self.module, x, draw) for x, draw in self._parts(images)]
        return torch.cat(scores).softmax(1).numpy() if scores else np.empty((0, self.info.classes), np.float32)

    @torch.no_grad()
    def examine(self, images: Any) -> dict[str, np.ndarray[Any, Any]]:
        """What the method shows of its inside, image by image: arrays `[n, ...]` by name, such as FedPick's `selected`.

        The scores of a part of the model by itself are there as `scores/<path>`. Nothing to show: an empty dict.
        """
        found: dict[str, list[Tensor]] = {}
        for x, draw in self._parts(images):
            seen = self.method.examine(self.module, x, draw)
            paths = {f"scores/{name}": scores for name, scores in seen.paths.items()}
            for name, values in {**paths, **seen.means, **seen.spreads}.items():
                found.setdefault(name, []).append(values)
        return {name: torch.cat(values).numpy() for name, values in found.items()}

    def _parts(self, images: Any) -> Iterator[tuple[Tensor, Draw]]:
        """Images or texts as the model takes them, some at a time, with the noise of each."""
        shape = self.info.archs[self.client].shape
        if isinstance(images, str) and len(shape) == 2:
            raise DataError(f"{images[:40]!r} is one text; give a list: [{images[:40]!r}].")
        if len(shape) == 2 and isinstance(images, Sequence) and images and all(isinstance(x, str) for x in images):
            images = agnews.encode(images, self.config.data)
        x = normalise(_as_inputs(images, shape), self.config.data.normalize)
        size = sweep_batch(x.device, (x.dtype, tuple(x.shape[1:])))
        for step, part in enumerate(torch.split(x, size) if len(x) else ()):
            yield part, keyed_draw(torch.device("cpu"), self.info.seed, "serve", self.client, step)

    def predict_files(self, paths: Sequence[str | Path]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The most probable class of each image file, read as `folder:PATH` reads them."""
        shape, images = self.info.archs[self.client].shape, []
        if len(shape) != 3:
            raise DataError("this model takes texts, not image files; give their tokens to `predict`.")
        size = shape[-1]
        for path in map(Path, paths):
            try:
                images.append(read_picture(path, size))
            except DAMAGED as error:
                raise DataError(f"{path} cannot be read: {reason(error)}.") from error
        return self.predict(np.stack(images) if images else np.empty((0, 3, size, size), np.uint8))

    def predict(self, images: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The most probable class of each image, as a number; `class_names` has the words."""
        result: np.ndarray[Any, np.dtype[np.int64]] = self.probabilities(images).argmax(1)
        return result


def _as_inputs(given: Any, shape: tuple[int, ...]) -> Tensor:
    """Whatever a user holds as uint8 `[n, channels, height, width]`, or tokens as int32 `[n, length]`."""
    try:
        x = given if isinstance(given, Tensor) else torch.as_tensor(np.array(given))
    except (TypeError, ValueError) as error:
        if len(shape) == 2:
            raise DataError("expected a list of texts (str), or their tokens as an array of whole numbers.") from error
        raise DataError(f"images cannot be made an array: {error}. For files use `predict_files`.") from error
    if x.ndim and not len(x):
        return torch.empty(0, *shape, dtype=torch.uint8) if len(shape) == 3 else torch.empty(0, shape[0]).int()
    return _as_images(x, shape) if len(shape) == 3 else _as_tokens(x, *shape)


def _as_tokens(x: Tensor, length: int, words: int) -> Tensor:
    if x.is_floating_point() or x.dtype == torch.bool or x.ndim != 2 or x.shape[1] != length:
        raise DataError(f"texts are {x.dtype} {tuple(x.shape)}; expected whole numbers [n, {length}]: their tokens.")
    if int(x.min()) < 0 or int(x.max()) >= words:
        raise DataError(f"tokens reach from {int(x.min())} to {int(x.max())}; expected 0 to {words - 1}.")
    return x.to(torch.int32)


def _as_images(x: Tensor, shape: tuple[int, ...]) -> Tensor:
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
