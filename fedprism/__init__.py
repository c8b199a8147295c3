"""Personalised federated learning: what clients share, what stays their own, and what each one gains.

In a few lines:

    import fedprism as fp

    federation = fp.federation("digits-skew", clients=5, seed=0)
    run = fp.train(federation, method=fp.FedBN(), model="lenet-bn", rounds=30)
    print(run.table())
    run.models["tinted"].predict(images)
"""

from fedprism.api import ClientModel, Run, compare, load, resume, run_config, train
from fedprism.config import Config, setting
from fedprism.errors import ConfigError, DataError, FedprismError, RecordError, UploadError
from fedprism.federation import ClientData, Federation, federation
from fedprism.methods.base import Method
from fedprism.methods.ditto import Ditto
from fedprism.methods.fedavg import FedAvg
from fedprism.methods.fedbn import FedBN
from fedprism.methods.fedper import FedPer
from fedprism.methods.fedproto import FedProto
from fedprism.methods.fedprox import FedProx
from fedprism.methods.fedrep import FedRep
from fedprism.methods.fedrod import FedRoD
from fedprism.methods.lg_fedavg import LGFedAvg
from fedprism.methods.local import Local
from fedprism.methods.scaffold import Scaffold
from fedprism.methods.silobn import SiloBN

__version__ = "0.1.0"

__all__ = [
    "ClientData",
    "ClientModel",
    "Config",
    "ConfigError",
    "DataError",
    "Ditto",
    "FedAvg",
    "FedBN",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "Federation",
    "FedprismError",
    "LGFedAvg",
    "Local",
    "Method",
    "RecordError",
    "Run",
    "Scaffold",
    "SiloBN",
    "UploadError",
    "__version__",
    "compare",
    "federation",
    "load",
    "resume",
    "run_config",
    "setting",
    "train",
]
