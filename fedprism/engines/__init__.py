"""Where clients run: the registry of engines. `inprocess.py` is the reference; `processes/` and `cuda/` are faster."""

from __future__ import annotations

from typing import Protocol

import torch

from fedprism.config import Config
from fedprism.federation import Federation
from fedprism.methods.base import Info, Method
from fedprism.registry import Registry
from fedprism.round.engine import Engine


class EngineFactory(Protocol):
    """What makes an engine: its class."""

    def __call__(
        self, method: Method, config: Config, info: Info, federation: Federation, device: torch.device
    ) -> Engine: ...


ENGINES: Registry[EngineFactory] = Registry("engine")
