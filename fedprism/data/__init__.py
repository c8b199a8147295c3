"""Datasets as arrays with labels and domains. Importing this package registers them in `DATASETS`."""

from fedprism.data import agnews, cifar, digits, digits_five, folder, image_sets, synth_digits, synthetic
from fedprism.data.base import DATASETS, Dataset, check_names, load
from fedprism.data.images import normalise

__all__ = [
    "DATASETS",
    "Dataset",
    "agnews",
    "check_names",
    "cifar",
    "digits",
    "digits_five",
    "folder",
    "image_sets",
    "load",
    "normalise",
    "synth_digits",
    "synthetic",
]
