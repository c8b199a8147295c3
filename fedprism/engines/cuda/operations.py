"""Operations of training and evaluation on a GPU: fused, with every number that may change kept on the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fedprism.config import OptimizerConfig
from fedprism.federation import Split
from fedprism.round.training import Operations

LEAST_ROWS = 16  # of a padded batch
SMALL_IMAGE = 4096  # numbers


class CudaOperations(Operations):
    """The same results for `inprocess` and `cuda-graphs` on one GPU: both use these."""

    def __init__(self) -> None:
        self.ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def make_optimizer(self, settings: OptimizerConfig, parameters: list[nn.Parameter], lr: float) -> Any:
        """One kernel per step, which reads the learning rate on the device, so that a step can be captured."""
        common: dict[str, Any] = {"lr": lr, "weight_decay": settings.weight_decay, "fused": True}
        optimizer: torch.optim.Optimizer
        if settings.name == "adam":
            optimizer = torch.optim.Adam(parameters, **common, capturable=True)
        else:
            optimizer = torch.optim.SGD(parameters, **common, momentum=settings.momentum)
        optimizer.param_groups[0]["lr"] = torch.full((), lr, dtype=torch.float32, device=parameters[0].device)
        if settings.name == "sgd" and settings.momentum:
            for parameter in parameters:  # zero instead of missing: the first step is then like every other
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer

    def backward(self, loss: Tensor) -> None:
        """The gradient that it starts from is made once, not by a kernel in every step."""
        kind = (loss.dtype, loss.device)
        if kind not in self.ones:
            self.ones[kind] = torch.ones_like(loss)
        loss.backward(self.ones[kind])  # type: ignore[no-untyped-call]

    def rows_at_once(self, split: Split) -> int:
        """What fills a GPU, unless images are large."""
        return 1024 if math.prod(split.kind[1]) <= SMALL_IMAGE else super().rows_at_once(split)

    def padded(self, count: int) -> int:
        """One of four sizes between a power of two and the next, so that one captured batch serves many clients.

        >>> [CudaOperations().padded(count) for count in (3, 65, 150, 750, 1024)]
        [16, 80, 160, 768, 1024]
        """
        step = max(LEAST_ROWS, (1 << math.ceil(math.log2(count))) // 8)
        return -(-count // step) * step


def operations_for(device: torch.device) -> Operations:
    """The operations of a device."""
    return CudaOperations() if device.type == "cuda" else Operations()
