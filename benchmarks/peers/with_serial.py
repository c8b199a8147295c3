"""FedAvg as a plain loop: copy the global model, train it, add it to the mean. What one would write by hand."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from torch import nn
from workload import Clock, Workload, first_model, read, train


def one_round(server: nn.Module, work: Workload, round: int) -> float:
    """Move the server's model by one round; the seconds that clients' training took."""
    mean: dict[str, torch.Tensor] = {}
    spent = 0.0
    for client in range(work.clients):
        model = copy.deepcopy(server)
        spent += train(model, work, round, client)
        for leaf, tensor in model.state_dict().items():
            mean[leaf] = mean.get(leaf, 0) + tensor / work.clients
    server.load_state_dict(mean)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = read(options.workload)
    server, clock, training = first_model(work), Clock(options.folder, work.rounds), []
    clock.start()
    for round in range(work.rounds):
        spent = one_round(server, work, round)
        clock.lap(server.state_dict())
        training.append(spent)
    clock.write(workers=1, threads=torch.get_num_threads(), training=training, packages=())


if __name__ == "__main__":
    main()
