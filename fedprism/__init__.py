"""Personalised federated learning: what clients share, what stays their own, and what each one gains.

In a few lines:

    import fedprism as fp

    federation = fp.federation("digits-skew", clients=5, seed=0)
    run = fp.train(federation, method=fp.FedBN(), model="lenet-bn", rounds=30)
    print(run.table())
    run.models["tinted"].predict(images)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedprism.api import ClientModel, Run, compare, load, resume, run_config, table, train
    from fedprism.config import Config, read_config, setting
    from fedprism.errors import ConfigError, DataError, FedprismError, RecordError
    from fedprism.federation import ClientData, Federation, federation
    from fedprism.federation.describe import describe
    from fedprism.methods.base import Method
    from fedprism.methods.ditto import Ditto
    from fedprism.methods.fed_co2 import FedCO2
    from fedprism.methods.fedavg import FedAvg
    from fedprism.methods.fedbn import FedBN
    from fedprism.methods.fedcp import FedCP
    from fedprism.methods.fedios import FediOS
    from fedprism.methods.fedper import FedPer
    from fedprism.methods.fedpick import FedPick
    from fedprism.methods.fedproto import FedProto
    from fedprism.methods.fedprox import FedProx
    from fedprism.methods.fedrep import FedRep
    from fedprism.methods.fedrod import FedRoD
    from fedprism.methods.fedsce import FedSCE
    from fedprism.methods.lg_fedavg import LGFedAvg
    from fedprism.methods.local import Local
    from fedprism.methods.scaffold import Scaffold
    from fedprism.methods.silobn import SiloBN

__version__ = "0.1.0"

# Where each public name lives. They are imported when first used, so that `fedprism --help` need not wait for PyTorch.
_HOMES = {
    "fedprism.api": ["ClientModel", "Run", "compare", "load", "resume", "run_config", "table", "train"],
    "fedprism.config": ["Config", "read_config", "setting"],
    "fedprism.errors": ["ConfigError", "DataError", "FedprismError", "RecordError"],
    "fedprism.federation": ["ClientData", "Federation", "federation"],
    "fedprism.federation.describe": ["describe"],
    "fedprism.methods.base": ["Method"],
    "fedprism.methods.ditto": ["Ditto"],
    "fedprism.methods.fed_co2": ["FedCO2"],
    "fedprism.methods.fedavg": ["FedAvg"],
    "fedprism.methods.fedbn": ["FedBN"],
    "fedprism.methods.fedcp": ["FedCP"],
    "fedprism.methods.fedios": ["FediOS"],
    "fedprism.methods.fedper": ["FedPer"],
    "fedprism.methods.fedpick": ["FedPick"],
    "fedprism.methods.fedproto": ["FedProto"],
    "fedprism.methods.fedprox": ["FedProx"],
    "fedprism.methods.fedrep": ["FedRep"],
    "fedprism.methods.fedrod": ["FedRoD"],
    "fedprism.methods.fedsce": ["FedSCE"],
    "fedprism.methods.lg_fedavg": ["LGFedAvg"],
    "fedprism.methods.local": ["Local"],
    "fedprism.methods.scaffold": ["Scaffold"],
    "fedprism.methods.silobn": ["SiloBN"],
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'fedprism' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "ClientData",
    "ClientModel",
    "Config",
    "ConfigError",
    "DataError",
    "Ditto",
    "FedAvg",
    "FedBN",
    "FedCO2",
    "FedCP",
    "FedPer",
    "FedPick",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedSCE",
    "Federation",
    "FediOS",
    "FedprismError",
    "LGFedAvg",
    "Local",
    "Method",
    "RecordError",
    "Run",
    "Scaffold",
    "SiloBN",
    "__version__",
    "compare",
    "describe",
    "federation",
    "load",
    "read_config",
    "resume",
    "run_config",
    "setting",
    "table",
    "train",
]
