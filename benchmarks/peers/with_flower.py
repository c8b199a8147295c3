"""The workload in Flower's simulation: `FedAvg` of flwr over Ray actors, evaluation switched off."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flower_client import app as client_app
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import Clock, read


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpus", type=int, required=True, help="CPUs a client")
    parser.add_argument("--cores", type=int, required=True)
    options = parser.parse_args()
    work = read(options.workload)
    clock, server_app, seen = Clock(options.folder, work.rounds), ServerApp(), {}

    def after(round: int, arrays: ArrayRecord) -> None:
        """Flower's hook for central evaluation, called before the first round and after each: a clock here."""
        if round == 0:
            clock.start()
        else:
            clock.lap(arrays.to_torch_state_dict() if round in (1, work.rounds) else {})

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=work.clients, min_train_nodes=work.clients)
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(dict(work.weights)),
            num_rounds=work.rounds,
            train_config=ConfigRecord({"workload": str(options.workload.resolve())}),
            evaluate_fn=after,
        )
        seen.update(result.train_metrics_clientapp)

    resources = {"num_cpus": options.cpus, "num_gpus": 0.0}
    init = {"num_cpus": options.cores, "_temp_dir": str(options.folder.resolve() / "ray")}
    run_simulation(
        server_app, client_app, work.clients, backend_config={"client_resources": resources, "init_args": init}
    )
    training = [float(seen[round]["seconds"]) * work.clients for round in sorted(seen)]  # Flower gives the mean
    clock.write(
        workers=options.cores // options.cpus,
        threads=round(float(seen[1]["threads"])),
        training=training,
        packages=("flwr", "ray"),
    )


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
