"""Personalised federated learning: what clients share, what stays their own, and what each one gains.

In a few lines:

    import fedprism as fp

    federation = fp.make_federation("digits-skew", clients=5, seed=0)
    run = fp.train(federation, method=fp.FedBN(), model="lenet-bn", rounds=30)
    print(run.table())
    run.models["tinted"].predict(images)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedprism import index

if TYPE_CHECKING:  # what `__getattr__` finds, for type checkers and editors
    from fedprism.aggregators import Aggregator as Aggregator
    from fedprism.api import Run as Run
    from fedprism.api import compare as compare
    from fedprism.api import load as load
    from fedprism.api import resume as resume
    from fedprism.api import run_config as run_config
    from fedprism.api import table as table
    from fedprism.api import train as train
    from fedprism.config import Config as Config
    from fedprism.config import read_config as read_config
    from fedprism.config import setting as setting
    from fedprism.errors import ConfigError as ConfigError
    from fedprism.errors import DataError as DataError
    from fedprism.errors import FedprismError as FedprismError
    from fedprism.errors import RecordError as RecordError
    from fedprism.federation import ClientData as ClientData
    from fedprism.federation import Federation as Federation
    from fedprism.federation import make_federation as make_federation
    from fedprism.federation.describe import describe as describe
    from fedprism.methods import leaves as leaves
    from fedprism.methods.apfl import APFL as APFL
    from fedprism.methods.base import Client as Client
    from fedprism.methods.base import Context as Context
    from fedprism.methods.base import Method as Method
    from fedprism.methods.base import Output as Output
    from fedprism.methods.base import Pass as Pass
    from fedprism.methods.base import Upload as Upload
    from fedprism.methods.copa import COPA as COPA
    from fedprism.methods.ditto import Ditto as Ditto
    from fedprism.methods.fed_co2 import FedCO2 as FedCO2
    from fedprism.methods.fedamp import FedAMP as FedAMP
    from fedprism.methods.fedavg import FedAvg as FedAvg
    from fedprism.methods.fedbabu import FedBABU as FedBABU
    from fedprism.methods.fedbn import FedBN as FedBN
    from fedprism.methods.fedcp import FedCP as FedCP
    from fedprism.methods.feddistill import FedDistill as FedDistill
    from fedprism.methods.feddyn import FedDyn as FedDyn
    from fedprism.methods.fedfomo import FedFomo as FedFomo
    from fedprism.methods.fedios import FediOS as FediOS
    from fedprism.methods.fedkd import FedKD as FedKD
    from fedprism.methods.fedper import FedPer as FedPer
    from fedprism.methods.fedphp import FedPHP as FedPHP
    from fedprism.methods.fedpick import FedPick as FedPick
    from fedprism.methods.fedproto import FedProto as FedProto
    from fedprism.methods.fedprox import FedProx as FedProx
    from fedprism.methods.fedrep import FedRep as FedRep
    from fedprism.methods.fedrod import FedRoD as FedRoD
    from fedprism.methods.fedsce import FedSCE as FedSCE
    from fedprism.methods.fedtgp import FedTGP as FedTGP
    from fedprism.methods.finetune import FineTune as FineTune
    from fedprism.methods.fml import FML as FML
    from fedprism.methods.lg_fedavg import LGFedAvg as LGFedAvg
    from fedprism.methods.local import Local as Local
    from fedprism.methods.moon import MOON as MOON
    from fedprism.methods.per_fedavg import PerFedAvg as PerFedAvg
    from fedprism.methods.pfedme import PFedMe as PFedMe
    from fedprism.methods.pfedvem import PFedVEM as PFedVEM
    from fedprism.methods.scaffold import Scaffold as Scaffold
    from fedprism.methods.silobn import SiloBN as SiloBN
    from fedprism.predict import ClientModel as ClientModel
    from fedprism.round.events import Callback as Callback
    from fedprism.transforms.base import Transform as Transform

__version__ = "0.1.0"

# Where each public name is defined. A name is imported when it is first used: `fedprism --help` need not wait for
# PyTorch. The classes of the methods come from the index of built-in methods.
_HOMES = {
    "fedprism.aggregators": ["Aggregator"],
    "fedprism.api": ["Run", "compare", "load", "resume", "run_config", "table", "train"],
    "fedprism.config": ["Config", "read_config", "setting"],
    "fedprism.errors": ["ConfigError", "DataError", "FedprismError", "RecordError"],
    "fedprism.federation": ["ClientData", "Federation", "make_federation"],
    "fedprism.federation.describe": ["describe"],
    "fedprism.methods": ["leaves"],
    "fedprism.methods.base": ["Client", "Context", "Method", "Output", "Pass", "Upload"],
    "fedprism.predict": ["ClientModel"],
    "fedprism.round.events": ["Callback"],
    "fedprism.transforms.base": ["Transform"],
}


def _methods() -> dict[str, str]:
    """The class name of every built-in method -> the module that defines it."""
    return {entry.definition: entry.module for entry in index.entries("methods").values()}


def _home(name: str) -> str | None:
    for home, names in _HOMES.items():
        if name in names:
            return home
    return _methods().get(name) if name[:1].isupper() else None  # a submodule is no class


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    home = _home(name)
    if home is None:
        raise AttributeError(f"module 'fedprism' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *(name for names in _HOMES.values() for name in names), *_methods()])
