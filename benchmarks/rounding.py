"""How far rounding alone takes a network in one epoch of `fedprism bench`: inputs of layers as TF32 has them, on a CPU.

    python benchmarks/rounding.py digit6-n5-b32

The first client is trained three times from the same weights on the same batches: in fp32, and twice with what enters
convolutions and linear layers (forward) cut to TF32's ten bits, at two rounding points. Prints what differs most.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.overrides import TorchFunctionMode

from fedprism.bench.machine import machine, moment
from fedprism.bench.workloads import WORKLOADS, configure, make_clients
from fedprism.models import architectures
from fedprism.round.training import model_inputs

CPU = torch.device("cpu")
LOST = 2**13  # of the 23 bits of a fraction ten are left
POINTS = {"nearest": LOST // 2, "above": LOST // 2 + 1500}  # added before the rest is cut off
ROWS = 5


class TF32(TorchFunctionMode):
    """Within: layers see inputs and weights of ten bits; gradients pass as they are."""

    def __init__(self, point: int) -> None:
        super().__init__()
        self.point = point

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.conv2d, linear):
            args = (self.cut(args[0]), self.cut(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))

    def cut(self, x: Tensor) -> Tensor:
        bits = x.detach().contiguous().view(torch.int32)
        return x + (((bits + self.point) & -LOST).view(torch.float32) - x).detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=list(WORKLOADS))
    name = parser.parse_args().workload
    workload = WORKLOADS[name]
    config, federation = configure(workload, "fedbn", CPU, {"engine": "inprocess"}), make_clients(workload, None)
    client_id = federation.names[0]
    arch = architectures(config.model, federation.names, federation.classes, federation.shape)[client_id]
    data = federation.clients[client_id].train
    batches = [rows for rows in torch.arange(len(data)).split(workload.batch) if len(rows) == workload.batch]

    def trained(mode: Any) -> dict[str, Tensor]:
        model = arch.model(0).train()
        optimizer = torch.optim.SGD(model.parameters(), config.train.optimizer.lr)
        for rows in batches:
            with mode:
                scores = model(model_inputs(data.batch(rows), config))
            optimizer.zero_grad()
            cross_entropy(scores, data.y[rows]).backward()
            optimizer.step()
        return {leaf: t.detach().clone() for leaf, t in model.state_dict().items() if t.is_floating_point()}

    plain, nearest, above = (trained(mode) for mode in (nullcontext(), *map(TF32, POINTS.values())))
    first = arch.model(0).state_dict()
    apart = {leaf: float((nearest[leaf] - above[leaf]).abs().max()) for leaf in plain}
    where = f"{machine(CPU)['device']}, torch {torch.__version__}, {moment()['date']}"
    print(f"{name}, {client_id}, {len(batches)} steps; {where}")
    print("leaf: two roundings apart | fp32 and TF32 apart | moved in the epoch")
    for leaf in sorted(apart, key=lambda leaf: -apart[leaf])[:ROWS]:
        others = ((plain[leaf] - nearest[leaf]).abs().max(), (plain[leaf] - first[leaf]).abs().max())
        print(f"{leaf}: {apart[leaf]:.3f} | {others[0]:.3f} | {others[1]:.3f}")


if __name__ == "__main__":
    main()
