"""Helpers that several test files share.

`fingerprint` says whether two runs computed the same numbers. As a program it records the fingerprints of every
registered method and of a mixed federation, or compares with those recorded before a change:

    python -m tests.harness before.json
    python -m tests.harness after.json --against before.json [--set train.epochs=2 ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fedprism.records import RunDirectory

EXAMPLES = Path(__file__).parent.parent / "examples"
MIXED = ("local", "fedproto", "fedsce")  # methods of the mixed federation, with the settings of its file


def fingerprint(run: Any, rename: Callable[[str], str] = lambda leaf: leaf) -> str:
    """A hash of a run's decoded records and of its final server and client states.

    `run` is a `fedprism.Run` or the path of a run directory. `rename` maps the name of a leaf to the name that it is
    compared by, for a change that renames leaves. Timings are left out.
    """
    path = Path(getattr(run, "path", run))
    digest = hashlib.sha256()
    for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        digest.update(json.dumps(json.loads(line), sort_keys=True).encode())
    with RunDirectory.open(path) as directory:
        snapshot = directory.latest()
    assert snapshot is not None, f"{path} has no checkpoint"
    digest.update(f"round {snapshot.round}".encode())
    for owner, state in {"server": snapshot.server, **{f"client {c}": s for c, s in snapshot.clients.items()}}.items():
        digest.update(owner.encode())
        for leaf, tensor in sorted((rename(name), tensor) for name, tensor in (state or {}).items()):
            digest.update(repr((leaf, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprints(more: Sequence[str] = ()) -> dict[str, str]:
    """Two rounds of every registered method on `examples/digits-skew.yaml`, and of a mixed federation, on a CPU with
    one thread; `more` are further settings."""
    from fedprism import api
    from fedprism import config as configuration
    from fedprism.methods import METHODS

    settings = ["train.rounds=2", "run.device=cpu", "run.engine=inprocess", "run.threads=1", *more]
    wanted = {name: ("digits-skew.yaml", name) for name in METHODS}
    wanted |= {f"mixed {name}": ("digits-skew-mixed.yaml", name) for name in MIXED}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for label, (file, method) in wanted.items():
            config = configuration.read(EXAMPLES / file)
            named = [] if config.method.name == method else [f"method={json.dumps({'name': method})}"]
            config = configuration.read(EXAMPLES / file, [*named, *settings])
            found[label] = fingerprint(api.run_config(config, label, out=Path(folder) / label.replace(" ", "-")))
            print(f"{label}: {found[label][:16]}", flush=True)
    return found


def _main() -> int:
    parser = argparse.ArgumentParser(description="Record fingerprints, or compare them with recorded ones.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    found = fingerprints(given.set)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.against is None:
        return 0
    before = json.loads(given.against.read_text(encoding="utf-8"))
    other = [label for label in {**before, **found} if before.get(label) != found.get(label)]
    print(f"{len(found) - len(other)} of {len(found)} are equal" + (f"; not: {', '.join(other)}" if other else ""))
    return bool(other)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(_main())
