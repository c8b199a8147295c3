"""How large a checkpoint is: what clients store, beside clients that store all leaves of their models.

    python benchmarks/checkpoint_bytes.py [--clients 10] [--models cnn4 alexnet-bn] [--methods fedavg fedbn ...]

Every client has trained, so each of them has a state of its own. The checkpoints are really written, to a temporary
folder, and the sizes of their files are added up. States are first weights, shifted for each client: sizes do not
depend on values. A Markdown table is printed. The largest checkpoint of the default table needs 12 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

from fedprism.bench.machine import commit, cpu_name
from fedprism.config import Config, structure
from fedprism.conformance.case import storing_everything
from fedprism.methods import make
from fedprism.methods.base import Method
from fedprism.records.checkpoint import Checkpoints
from fedprism.round.client import make_context, make_info, stored_names
from fedprism.round.events import Snapshot
from fedprism.store.clients import DiskStore

METHODS = ("fedavg", "fedbn", "fedper", "ditto", "fedcp", "fed-co2", "fedsce")
MODELS = {"cnn4": (3, 32, 32), "alexnet-bn": (3, 256, 256)}  # with the size of their images
CLASSES, ROUND = 10, 1


def written(method: Method, config: Config, clients: int, shape: tuple[int, ...], folder: Path) -> tuple[int, int, int]:
    """Bytes of the server's file, of the clients' files, and of the whole checkpoint."""
    info = make_info(config, [f"client-{place}" for place in range(clients)], CLASSES, shape)
    first = info.clients[0]
    model = method.build(info.arch, first, info, info.seed)
    ctx = make_context(method, config, info, model, ROUND, first)
    leaves = model.state_dict()
    own = {name: leaves[name] for name in stored_names(method, model, ctx)}
    states = DiskStore(info.clients, lambda state: state, at_once=1)
    states.open(folder / "states")
    for place, client_id in enumerate(info.clients):
        states[client_id] = {
            name: tensor + (place + 1) if tensor.is_floating_point() else tensor for name, tensor in own.items()
        }
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.folder.mkdir()
    server = method.server(model, ctx.replace(client_id=None))
    checkpoints.save(Snapshot(ROUND, server, states.snapshot()), keep=())
    states.close()
    manifest = checkpoints.manifest(ROUND)
    checksum = json.loads(manifest.read_text(encoding="utf-8"))["server"]
    sizes = {path.stem: path.stat().st_size for path in checkpoints.files.iterdir()}
    of_server = sizes.pop(checksum)
    return of_server, sum(sizes.values()), of_server + sum(sizes.values()) + manifest.stat().st_size


def row(model: str, name: str, clients: int) -> str:
    config = structure({"model": model, "method": name, "train": {"rounds": 10}}, Config)
    method, shape = make(config.method), MODELS[model]
    found = []
    for each in (method, storing_everything(method)):
        with tempfile.TemporaryDirectory() as folder:
            found.append(written(each, config, clients, shape, Path(folder)))
    (server, few, now), (_, many, before) = found
    return f"| `{model}` | {name} | {server:,} | {few:,} | {many:,} | {now:,} | {before:,} | {before / now:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    given = parser.parse_args()
    today = datetime.now(UTC).date().isoformat()
    print(f"{today}, commit {commit()}, {cpu_name()}, {platform.machine()}, torch {torch.__version__}\n")
    print("| model | method | server | clients | clients that store all | checkpoint | before | before / now |")
    print("|---|---|---|---|---|---|---|---|")
    for model in given.models:
        for name in given.methods:
            print(row(model, name, given.clients), flush=True)


if __name__ == "__main__":
    main()
