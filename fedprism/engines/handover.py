"""A client's round as files: for a worker in another process or on another machine that shares nothing but a folder.

In the folder: `task.json` (the configuration, public knowledge, the round), `data.safetensors`, `state.safetensors`
(absent the first time) and `down.safetensors`. Afterwards: `state.safetensors`, `upload.safetensors` and
`records.json`, or `failure.json`.

    python -m fedprism.engines.handover FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fedprism.config import SPLITS, Config, plain, structure
from fedprism.engines.client import Failure, Job, Result, client_round, make_info
from fedprism.engines.events import Score
from fedprism.engines.numerics import choose_device, numerics
from fedprism.engines.wire import deserialise, serialise
from fedprism.federation import ClientData, Split
from fedprism.methods import make
from fedprism.methods.base import State
from fedprism.models import Arch

_INPUTS = ("task.json", "data.safetensors", "down.safetensors", "state.safetensors")
_OUTPUTS = ("upload.safetensors", "records.json", "failure.json")


def write_task(folder: Path, job: Job, state: State | None, down: State) -> None:
    """All that a client's round needs, and nothing else, as files."""
    task = {
        "config": plain(job.config),
        "clients": list(job.info.clients),
        "later": {client: _plain(job.info.arch_of(client)) for client in job.info.later},
        "classes": job.info.classes,
        "shape": list(job.info.arch.shape),
        "client": job.data.name,
        "domain": job.data.domain,
        "round": job.round,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*_INPUTS, *_OUTPUTS):  # of an earlier round
        (folder / name).unlink(missing_ok=True)
    (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
    splits = {s: job.data.split(s) for s in SPLITS} | ({"public": job.public} if job.public is not None else {})
    parts = {f"{s}.{leaf}": getattr(split, leaf) for s, split in splits.items() for leaf in ("x", "y")}
    _write(folder / "data.safetensors", parts)
    _write(folder / "down.safetensors", down)
    if state is not None:
        _write(folder / "state.safetensors", state)


def run_task(folder: Path) -> None:
    """Read a task, run the client's round, write what it gives back."""
    task: dict[str, Any] = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    config = structure(task["config"], Config)
    device = choose_device(config.run.device)
    known = make_info(config, task["clients"], task["classes"], tuple(task["shape"]))
    archs = {client: _arch(raw, known.arch) for client, raw in task["later"].items()}
    info = dataclasses.replace(known, later=tuple(archs), archs={**known.archs, **archs})
    parts = _read(folder / "data.safetensors")
    splits = {s: Split(parts[f"{s}.x"], parts[f"{s}.y"]).to(device) for s in (*SPLITS, "public") if f"{s}.x" in parts}
    public = splits.pop("public", None)
    data = ClientData(task["client"], task["domain"], **splits, classes=info.classes)
    job = Job(make(config.method), config, info, data, task["round"], device, public)
    kept = folder / "state.safetensors"
    state = _read(kept) if kept.exists() else None
    with numerics(config.run, device):
        answer = client_round(job, state, _read(folder / "down.safetensors"))
    if isinstance(answer, Failure):
        (folder / "failure.json").write_text(json.dumps(dataclasses.asdict(answer)), encoding="utf-8")
        return
    _write(folder / "upload.safetensors", answer.upload)
    records = {"samples": answer.samples, "logs": answer.logs, "scores": plain(answer.scores)}
    (folder / "records.json").write_text(json.dumps(records), encoding="utf-8")
    _write(kept, answer.state)


def read_result(folder: Path) -> Result | Failure:
    """What `run_task` left."""
    failure = folder / "failure.json"
    if failure.exists():
        return Failure(**json.loads(failure.read_text(encoding="utf-8")))
    records = json.loads((folder / "records.json").read_text(encoding="utf-8"))
    scores = {m: {part: structure(values, Score) for part, values in of.items()} for m, of in records["scores"].items()}
    state, upload = _read(folder / "state.safetensors"), _read(folder / "upload.safetensors")
    return Result(state, upload, records["samples"], records["logs"], scores)


def _plain(arch: Arch) -> dict[str, Any]:
    """The architecture of a client that the configuration does not know."""
    own = {name: getattr(arch, name) for name in ("name", "head_layers", "features", "adapter")}
    return {**own, "settings": plain(dict(arch.settings))}


def _arch(raw: dict[str, Any], like: Arch) -> Arch:
    return dataclasses.replace(like, **{**raw, "settings": tuple(raw["settings"].items())})


def _write(path: Path, state: State) -> None:
    path.write_bytes(serialise(state))


def _read(path: Path) -> State:
    return deserialise(path.read_bytes())


if __name__ == "__main__":
    torch.set_num_interop_threads(1)
    run_task(Path(sys.argv[1]))
