"""What a user does with fedprism. Every operation is run through every fault: one line here adds one to all of them.

An operation runs in a process of its own, in a folder that has `mine.yaml` and what its start says: nothing, a run that
was killed (`study`), one that has finished (`study`), or a comparison (`studies`).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedprism import api, cli
from fedprism import config as configuration
from fedprism.cli.output import user_errors
from fedprism.federation import build_federation
from fedprism.records import runfile
from fedprism.round.events import Callback, RoundRecord, Snapshot
from fedprism.store.serialize import serialize
from fedprism.yamlfile import read_yaml

CONFIG = {
    "data": {"name": "digits-skew", "samples": 20, "partition": {"name": "domain", "clients": 2}},
    "model": {"name": "mlp", "hidden": [8]},
    "method": {"name": "fedper"},
    "train": {"rounds": 3, "batch_size": 10},
    "run": {"engine": "inprocess", "device": "cpu", "checkpoint_every": 2},
}
NOTES = {"notes.txt": b"mine\n", "study/notes.txt": b"mine too\n", "study/plots/figure.txt": b"and this\n"}  # a user's


@dataclass(frozen=True)
class Operation:
    """`changes` are the files and folders that it may make or change; nothing else may look different afterwards."""

    name: str
    act: Callable[[], None]
    start: str = "nothing"
    changes: tuple[str, ...] = ()
    replaces: bool = False  # the whole run directory, with what a user has put into it
    slow: bool = False  # it starts processes that import PyTorch


def command(*words: str) -> Callable[[], None]:
    """A command line, as it is typed."""

    def act() -> None:
        sys.argv = ["fedprism", *words]
        cli.main()

    return act


def overwrite() -> None:
    """Train in the place of another run."""
    with user_errors():
        given = read_yaml("mine.yaml")
        rest = {key: value for key, value in given.items() if key not in ("data", "seed", "model", "method")}
        settings = [f"{key}={json.dumps(value)}" for key, value in runfile.flat(rest).items()]
        config = configuration.read("mine.yaml")
        federation = build_federation(config.data, config.seed)
        api.train(federation, given["method"], given["model"], out="study", overwrite=True, settings=settings)


def load_models() -> None:
    """Every client's model, every bit of it."""
    with user_errors():
        for name, model in api.load("study").models.items():
            print(name, hashlib.sha256(serialize(model.module.state_dict())).hexdigest())


def go_on(operation: Operation) -> Callable[[], None]:
    """What a user does after a fault: resume a run that was begun, otherwise the same again."""

    def act() -> None:
        begun = operation.changes == ("study",) and not operation.replaces and runfile.exists(Path("study"))
        (command("resume", "study") if begun else operation.act)()

    return act


RUN = ("run", "mine.yaml", "--out", "study")
COMPARE = command("compare", "mine.yaml", "--methods", "fedavg,fedper", "--out", "studies")
SUMMARY = ("studies/comparison.csv", "studies/comparison.md", "studies/report.html")
PROCESSES = ("--set", "run.engine=processes", "--set", "run.workers=2")

_ALL: Sequence[Operation] = (
    Operation("train", command(*RUN), changes=("study",)),
    Operation("train-on-disk", command(*RUN, "--set", "clients.state=disk"), changes=("study",)),
    Operation("train-in-workers", command(*RUN, *PROCESSES), changes=("study",), slow=True),
    Operation("resume", command("resume", "study"), "interrupted", changes=("study",)),
    Operation("resume-on-disk", command("resume", "study"), "interrupted-on-disk", changes=("study",)),
    Operation("compare", COMPARE, changes=("studies",)),
    Operation("compare-again", COMPARE, "compared", changes=SUMMARY),
    Operation("overwrite", overwrite, "finished", changes=("study",), replaces=True),
    Operation("fsck", command("fsck", "study"), "finished"),
    Operation("load", load_models, "finished"),
    Operation("show", command("show", "study"), "finished"),
    Operation("report", command("show", "study", "--report", "page.html"), "finished", changes=("page.html",)),
    Operation("inspect", command("data", "inspect", "mine.yaml", "--out", "look"), changes=("look",)),
)
OPERATIONS = {operation.name: operation for operation in _ALL}


# --- what operations start with --------------------------------------------------------------------------------------


class Die(Callback):
    """A power cut after a round that no checkpoint holds."""

    def round(self, record: RoundRecord, snapshot: Snapshot) -> None:
        if record.round == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def killed(*overrides: str) -> Callable[[], None]:
    def act() -> None:
        api.run_config(configuration.read("mine.yaml", list(overrides)), "mine", out="study", callbacks=[Die()])

    return act


STARTS: dict[str, Callable[[], None] | None] = {
    "nothing": None,
    "interrupted": killed(),
    "interrupted-on-disk": killed("clients.state=disk"),
    "finished": command(*RUN),
    "compared": COMPARE,
}


# --- the suite must be able to fail ----------------------------------------------------------------------------------


def _harm(what: Callable[[], object]) -> Callable[[], None]:
    def act() -> None:
        what()
        command(*RUN)()

    return act


def _forget_the_last_round() -> None:
    try:
        command(*RUN)()
    finally:
        path = Path("study/metrics.jsonl")
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


# Each breaks one promise; what the verdict on it must say.
SABOTAGE: dict[str, tuple[Callable[[], None], str]] = {
    "it changes what lies beside it": (_harm(lambda: Path("../beside/theirs.txt").write_bytes(b"")), "beside"),
    "it deletes a user's file": (_harm(Path("notes.txt").unlink), "a user's files"),
    "it leaves a temporary file": (_harm(tempfile.mkstemp), "temporary folder"),
    "it leaves a process": (_harm(lambda: subprocess.Popen(["sleep", "60"])), "a process of it went on"),
    "it ends with a traceback": (lambda: {}["nothing"], "Traceback"),
    "it says nothing": (lambda: sys.exit(2), "without a word"),
    "it aborts": (os.abort, "SIGABRT"),
    "it loses a round": (_forget_the_last_round, "metrics.jsonl is changed"),
}
