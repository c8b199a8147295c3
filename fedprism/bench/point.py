"""Measure one point of a growth curve in its own process, so that its memory is not shared.

python -m fedprism.bench.point '{"clients": 100, "participation": 0.1}'
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from fedprism.bench.machine import children, peak_resident, wait
from fedprism.bench.race import open_loop
from fedprism.bench.workloads import ROUNDS
from fedprism.config import Config, structure
from fedprism.engines.numerics import choose_device, numerics
from fedprism.federation import build_federation
from fedprism.planning import resolve

SAMPLES = 20  # images per client


def measure(point: Mapping[str, Any]) -> dict[str, Any]:
    """Measure set-up, rounds and memory of `clients` clients with `model` and `participation`."""
    raw = {
        "data": {
            "name": f"synthetic?clients={point['clients']},samples={point.get('samples', SAMPLES)}",
            "image_size": point.get("side", 16),
            "split": {"validation": 0.0},
        },
        "model": point.get("model", "cnn4"),
        "train": {"rounds": ROUNDS, "batch_size": 10},
        "clients": {"participation": point.get("participation", 1.0), "state": point.get("state", "memory")},
        "evaluate": {"clients": "participants", "moments": ["received"], "splits": ["test"]},
        "run": {"device": point.get("device", "cpu"), "engine": point.get("engine", "auto")},
    }
    config = resolve(structure(raw, Config))
    device = choose_device(config.run.device)
    loaded = peak_resident(os.getpid())
    begun = time.perf_counter()
    seconds = []
    with numerics(config.run, device):
        federation = build_federation(config.data, config.seed)
        loop = open_loop(config, federation, device)
        set_up = time.perf_counter() - begun
        try:
            for round in range(point.get("rounds", 3) + 1):
                start = time.perf_counter()
                record, _ = loop.one_round(round)
                wait(device)
                seconds.append(time.perf_counter() - start)
            memory = sum(peak_resident(pid) for pid in (os.getpid(), *children()))
        finally:
            loop.engine.close()
            loop.states.close()
    return {
        "clients": len(federation.clients),
        "participants": len(record.cohort),
        "parameters": sum(p.numel() for p in loop.models[loop.info.arch].parameters()),
        "set_up_seconds": float(f"{set_up:.4g}"),
        "round_seconds": float(f"{statistics.median(seconds[1:]):.4g}"),
        "first_round_seconds": float(f"{seconds[0]:.4g}"),
        "peak_memory_bytes": memory,
        "memory_when_loaded_bytes": loaded,
        "device_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
