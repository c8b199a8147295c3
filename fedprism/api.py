"""Train, compare, resume and load: what the command line wraps, and what `import fedprism as fp` offers."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from fedprism import config as configuration
from fedprism.aggregators import AGGREGATORS
from fedprism.atomic import temporary_folder
from fedprism.config import Config
from fedprism.data.images import check_inputs
from fedprism.engines.choose import make_engine
from fedprism.engines.numerics import choose_device, numerics
from fedprism.errors import ConfigError, RecordError, some
from fedprism.federation import Federation, build_federation
from fedprism.federation.partitions import partition_of
from fedprism.methods import METHODS, make, named
from fedprism.methods.base import Info, Method
from fedprism.methods.mixed import check_mixed
from fedprism.models import Arch
from fedprism.planning import Cell, cells, directory_of, resolve
from fedprism.predict import ClientModels
from fedprism.records import Protocol, RunDirectory, RunRecord, read_run, run_status, runfile
from fedprism.records.folder import recover, refuse_set_aside
from fedprism.records.read import common_folder
from fedprism.records.rundir import Settling
from fedprism.report.table import Table
from fedprism.report.table import table as make_table
from fedprism.round.client import make_info, uploaded_kinds
from fedprism.round.events import Callback
from fedprism.round.loop import make_loop
from fedprism.round.memory import enough_memory
from fedprism.summary import write_comparison
from fedprism.transforms import TRANSFORMS, make_transforms
from fedprism.transforms.base import check_transforms, suffixes

ENDED = runfile.ENDED

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
    also be an object, such as `fp.FedProx(mu=0.1)`. A list of models is dealt to the clients in turn.

    `settings` are laid over the defaults like the command line's `--set`: `["train.epochs=2",
    "train.optimizer.lr=0.01"]`. The run is written to `out` (default: `runs/<data>/<method>-<seed>`). `out=False`
    keeps it on disk only as long as the run is in use. `overwrite=True` replaces a run that is there.
    """
    if not isinstance(federation, Federation):
        raise ConfigError(f"a run needs a federation, not {federation!r}: fp.train(fp.make_federation(NAME), ...).")
    if isinstance(method, type):
        raise ConfigError(f"method is the class {method.__name__}; give one of it: fp.{method.__name__}().")
    base = configuration.plain(Config(seed=federation.seed, data=federation.data))
    made = method if isinstance(method, Method) else None
    base["method"] = {"name": method} if isinstance(method, str) else named(made).plain() if made else method
    listed = isinstance(model, Sequence) and not isinstance(model, str)
    base["model"] = {"per_client": [*model]} if listed else {**model} if isinstance(model, Mapping) else model
    if rounds is not None:
        base["train"]["rounds"] = rounds
    config = configuration.structure(configuration.override(base, settings), Config)
    if made is not None and config.method != named(made):
        raise ConfigError("settings cannot change a method that is already made; give its hyper-parameters to it.")
    config = resolve(config, made)
    if config.data != federation.data or config.seed != federation.seed:
        raise ConfigError(
            "settings cannot change the seed or the data of a federation that is made; pass them to "
            "fp.make_federation()."
        )
    if out is not False:
        path = directory_of(config, federation.name, None if isinstance(out, bool) else out, made)
        return _run(config, federation, _created(path, config, overwrite), callbacks, made)
    folder = temporary_folder("fedprism-")
    try:
        run = _run(config, federation, _created(folder / "run", config), callbacks, made)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)  # when the run is no longer in use
    return run


def run_config(config: Config, name: str, *, out: str | Path | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Train what a configuration describes; `name` is the {config} in `run.out`."""
    config = resolve(config)
    federation = build_federation(config.data, config.seed)
    return _run(config, federation, _created(directory_of(config, name, out), config), callbacks)


def resume(
    path: str | Path,
    *,
    federation: Federation | None = None,
    method: Method | None = None,
    reset_damaged: bool = False,
    callbacks: Sequence[Callback] = (),
    trust: bool = False,
) -> Run:
    """Go on with a run that was interrupted.

    A federation of your own arrays, or a method that was written in a Python session, must be given again. A run that
    names Python files or modules of somebody's own is refused, since they would be executed, unless you `trust` them.
    With `reset_damaged`, clients whose state on disk is damaged begin anew; the records name them.
    """
    with RunDirectory.open(path, write=True) as directory:
        if directory.status in ENDED:
            return load(path, method=method, federation=federation, trust=trust)
        if not trust:
            executed = _method_code(directory.config, method) | _other_code(directory.config)
            _refuse_code(directory.path, executed, f"`fedprism resume {path} --trust`, or in Python by trust=True")
        return _go_on(directory, federation, method, callbacks, reset_damaged)


def load(
    path: str | Path, *, method: Method | None = None, federation: Federation | None = None, trust: bool = False
) -> Run:
    """A run from its directory, finished or not. Its records execute nothing.

    Its models need its method. If that is in a Python file or module of somebody's own, that is executed, so give the
    `method`, or `trust` the run. Only the models of methods that adapt before they are tested need the run's data. They
    are read as the run read them; a federation of your own arrays must be given again.
    """
    refuse_set_aside(Path(path))
    return Run(Path(path), read_run(path), method, federation, trust)


def _go_on(
    directory: RunDirectory,
    federation: Federation | None,
    method: Method | None,
    callbacks: Sequence[Callback],
    reset_damaged: bool = False,
) -> Run:
    """The rounds that are left of a run that was begun."""
    config = directory.config
    federation = federation or build_federation(config.data, config.seed)
    _check_clients(directory.path, directory.clients, federation)
    return _run(config, federation, nullcontext(directory), callbacks, method, reset_damaged)


def _method_code(config: Config, given: Method | None) -> dict[str, str]:
    """The code that making a configuration's method would execute, by key; none if the method is given."""
    return {} if given is not None else {"method": METHODS.executes(config.method.name)}


def _other_code(config: Config) -> dict[str, str]:
    """The code that making a configuration's transforms and aggregator would execute, by key."""
    transforms = {f"transforms[{i}]": TRANSFORMS.executes(each.name) for i, each in enumerate(config.transforms)}
    return {**transforms, "server.aggregator": AGGREGATORS.executes(config.server.aggregator.name)}


def _refuse_code(path: Path, executed: Mapping[str, str], way: str) -> None:
    """A run directory may come from somebody else: what it names is executed only if the user says so."""
    code = [f"{code!r} ({key})" for key, code in executed.items() if code]
    if code:
        raise RecordError(
            f"{path} names code that is not part of fedprism: {some(code)}. Nothing of it was executed. If you know it "
            f"and trust it, allow it by {way}."
        )


def _run(
    config: Config,
    federation: Federation,
    opened: AbstractContextManager[RunDirectory],
    callbacks: Sequence[Callback],
    made: Method | None = None,
    reset_damaged: bool = False,
) -> Run:
    """Run the rounds that are left. `made` is a method that the configuration alone does not make.

    The loop is made before the directory is opened: settings that do not fit together leave no directory behind.
    """
    method, device = made or make(config.method), choose_device(config.run.device)
    check_inputs(config.data, federation.shape)
    info = make_info(config, federation.names, federation.classes, federation.shape)
    loop = make_loop(method, config, info, federation, make_engine(method, config, info, federation, device))
    with opened as directory, numerics(config.run, device):
        lost: list[str] | None = [] if reset_damaged else None
        start = directory.latest(lost)
        _check_clients(directory.path, () if start is None else tuple(start.clients), federation)
        recorder = directory.recorder(_about(method, config, info), reset=lost or ())
        loop.run([recorder, Settling(directory), *callbacks], start=start, folder=directory.states)
    return load(directory.path, method=made, federation=federation, trust=True)


@contextmanager
def _created(path: Path, config: Config, overwrite: bool = False) -> Iterator[RunDirectory]:
    """A new run directory. It is removed if nothing was recorded, so that it is not in the way of the next try.

    With `overwrite`, a run that is there is removed once its successor is on disk, and comes back if that fails before.
    """
    with RunDirectory.create(path, config, overwrite) as directory:
        try:
            yield directory
        except BaseException as error:
            directory.give_up(error)
            raise


def _check_clients(path: Path, begun: Sequence[str], federation: Federation) -> None:
    """Refuse to go on with other clients than the run was begun with, by run.json or by its checkpoint."""
    given = federation.names
    known, here = set(begun), set(given)
    odd = [f"{name!r} is new" for name in given if name not in known]
    odd += [f"{name!r} is gone" for name in begun if name not in here]
    if begun and odd:
        raise RecordError(
            f"{path} was begun with the clients {', '.join(begun)}, but now {', '.join(odd)}. Go on with the "
            "same clients, or begin a new run."
        )


def _about(method: Method, config: Config, info: Info) -> dict[str, Any]:
    """What `run.json` keeps for reports, which read records and do not know methods, models or partitions."""
    clients: dict[Arch, list[str]] = {}
    for client_id, arch in info.archs.items():
        clients.setdefault(arch, []).append(client_id)
    partition, transforms = config.data.partition, make_transforms(config.transforms)
    return {
        "partition": {"name": partition.name, **configuration.plain(partition_of(partition))},
        "architectures": [
            {"label": arch.label, "parameters": arch.parameters, "features": arch.width, "clients": clients[arch]}
            for arch in clients
        ],
        "shows": dict(method.shows),
        "transforms": [
            {"name": each.id + suffix, "shows": {name + suffix: words for name, words in each.shows.items()}}
            for each, suffix in zip(transforms, suffixes(transforms), strict=True)
        ],
        "decided": dict(method.facts(info)),
    }


# --- many runs -------------------------------------------------------------------------------------------------------


def compare(
    config: Config,
    methods: Sequence[str],
    seeds: Sequence[int],
    name: str,
    *,
    out: str | Path | None = None,
    summary: str | Path | bool = True,
    protocol: Protocol | str | None = None,
    callbacks: Sequence[Callback] = (),
    on_error: Callable[[Cell, Exception], None] | None = None,
) -> list[Run]:
    """Run every method with every seed, one directory each: finished runs are skipped, begun ones resumed.

    `out` is the folder of the runs. A run that diverges is recorded as such and the next one begins. An error in a run
    is raised, or given to `on_error`.

    comparison.csv, comparison.md and report.html are written into the common folder of the runs, under `protocol`.
    `summary` names another folder; `summary=False` writes none of them.
    """
    planned = cells(config, methods, seeds, name, out)
    for cell in planned:  # a run of another configuration is an error before any run begins
        recover(cell.path)
        if run_status(cell.path) is not None:
            RunDirectory.open(cell.path, expect=cell.config)
    runs: dict[Path, Run] = {}
    federations: dict[int, Federation] = {}  # by seed
    by_seed = sorted(planned, key=lambda cell: seeds.index(cell.config.seed))
    _check_methods([cell for cell in by_seed if run_status(cell.path) not in ENDED], federations)
    for cell in by_seed:
        try:
            with enough_memory():
                _run_cell(cell, federations, callbacks)
                runs[cell.path] = load(cell.path, trust=True)  # without the federation
        except Exception as error:  # a bug in one method must not take the other runs' results away
            if on_error is None:
                raise
            on_error(cell, error)
    done = [runs[cell.path] for cell in planned if cell.path in runs]
    if done and summary is not False:
        folder = common_folder(cell.path for cell in planned) if summary is True else summary
        write_comparison(folder, [run.record for run in done], protocol, federations.get(done[0].seed))
    return done


def _check_methods(cells: Sequence[Cell], federations: dict[int, Federation]) -> None:
    """Refuse methods that need one architecture for all clients, where these differ, or upload nothing that the
    transforms act on, before any run begins."""
    configs = {cell.config.method.name: cell.config for cell in cells}
    if all(config.model.per_client is None and not config.transforms for config in configs.values()):
        return
    config = cells[0].config
    made = federations[config.seed] = build_federation(config.data, config.seed)
    info = make_info(config, made.names, made.classes, made.shape)
    methods = {name: make(config.method) for name, config in configs.items()}
    check_mixed(list(methods.values()), info)
    for name, method in methods.items():
        own = configs[name]
        check_transforms(make_transforms(own.transforms), method.id, uploaded_kinds(method, own, info))


def _run_cell(cell: Cell, federations: dict[int, Federation], callbacks: Sequence[Callback]) -> None:
    config, status = cell.config, run_status(cell.path)
    if status in ENDED:
        return
    if config.seed not in federations:
        federations.clear()  # one at a time in memory
        federations[config.seed] = build_federation(config.data, config.seed)
    if status is None:
        _run(config, federations[config.seed], _created(cell.path, config), callbacks)
    else:  # what it executes is what this configuration names
        with RunDirectory.open(cell.path, write=True, expect=config) as directory:
            _go_on(directory, federations[config.seed], None, callbacks)


def table(runs: Sequence[Run], protocol: Protocol | str | None = None) -> Table:
    """One table of several runs. Print it, or write it with `.csv()`, `.markdown()`, `.latex()` or `.html()`."""
    return make_table([run.record for run in runs], protocol)


# --- results ---------------------------------------------------------------------------------------------------------


class Run:
    """A run: its records, its table and its models."""

    def __init__(
        self,
        path: Path,
        record: RunRecord,
        method: Method | None = None,
        federation: Federation | None = None,
        trust: bool = False,
    ) -> None:
        self.path = path
        self.record = record
        self._method = method
        self._federation = federation
        self._trust = trust

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
    def models(self) -> ClientModels:
        """Each client's model of the best round on validation data, by client, at the moment of the method's test.

        If the method adapts before it is tested (FedBABU, fine-tuning, Per-FedAvg), a model is adapted when it is asked
        for.
        """
        config = self.record.config
        if not self._trust:
            executed = _method_code(config, self._method)
            _refuse_code(self.path, executed, f"fp.load({str(self.path)!r}, trust=True)")
        method = self._method or make(config.method)
        return ClientModels(self.path, self.record, method, self._federation)

    def __repr__(self) -> str:
        return f"<fedprism run of {self.method}, seed {self.seed}, {self.status}, in {self.path}>"
