"""The workload in Apple's pfl: `FederatedAveraging` on `SimulatedBackend`, evaluation switched off.

With `python -m torch.distributed.run` around it, pfl deals the clients to the processes by itself.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.dataset import AbstractDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from workload import Clock, first_model, inputs, read


class Net(nn.Module):
    """The model with the loss and the metrics that pfl asks of it."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.body, self.head = model.body, model.head

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.head(self.body(inputs(x))), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        loss = cross_entropy(self.head(self.body(inputs(x))), y, reduction="sum")
        return {"loss": Weighted(float(loss), len(y))}


class Timed(FederatedAveraging):
    """pfl's own, with a clock around local training."""

    spent = 0.0

    def train_one_user(self, *args: object, **kwargs: object) -> tuple[object, Metrics]:
        begun = time.perf_counter()
        result = super().train_one_user(*args, **kwargs)
        self.spent += time.perf_counter() - begun
        return result


class After(TrainingProcessCallback):
    """Called after every round."""

    def __init__(self, clock: Clock, algorithm: Timed) -> None:
        self.clock, self.algorithm = clock, algorithm
        self.round, self.training = 0, []

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.clock.start()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.clock.lap(model.pytorch_model.state_dict())
        self.round += 1
        self.training.append(self.algorithm.spent)
        self.algorithm.spent = 0.0
        return False, Metrics()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    work, rank, size = read(options.workload), pytorch_ops.distributed.global_rank, pytorch_ops.distributed.world_size
    folder = options.folder / f"rank{rank}"
    folder.mkdir()
    algorithm = Timed()
    after = After(Clock(folder, work.rounds), algorithm)

    def client_data(client: int) -> AbstractDataset:
        """pfl takes batches in the order of the data, so the data are put into this round's order."""
        rows = work.order[after.round, client]
        return PyTorchTensorDataset((work.images[client][rows], work.labels[client][rows]), user_id=str(client))

    model = Net(first_model(work))
    pfl_model = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    data = FederatedDataset(client_data, get_user_sampler("minimize_reuse", range(work.clients)))
    algorithm.run(
        # The first round is always evaluated; it is among those that warm up.
        NNAlgorithmParams(work.rounds, evaluation_frequency=10**9, train_cohort_size=work.clients, val_cohort_size=0),
        SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        pfl_model,
        NNTrainHyperParams(local_batch_size=work.batch, local_num_epochs=1, local_learning_rate=work.lr),
        NNEvalHyperParams(local_batch_size=work.samples),
        [after],
    )
    after.clock.write(
        workers=size,
        threads=torch.get_num_threads(),
        training=[spent * size for spent in after.training],  # both have as many clients of the same size
        packages=("pfl",),
    )


if __name__ == "__main__":
    main()
