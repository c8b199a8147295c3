"""Named datasets as arrays with domain names. Importing this package registers them in `DATASETS`."""

from fedprism.data import digits, folder
from fedprism.data.base import DATASETS, Dataset, check_names, load
from fedprism.data.images import normalise

__all__ = ["DATASETS", "Dataset", "check_names", "digits", "folder", "load", "normalise"]
