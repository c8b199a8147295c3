"""AG News (Zhang, Zhao, LeCun 2015): news in four topics, as token ids.

The loader reads the published `agnews/train.csv` and `agnews/test.csv` (topic 1 to 4, title, description; no header)
or the compact `agnews_train.csv.gz` and `agnews_test.csv.gz` (a header, then topic and text). A text is the title, a
space and the description. The vocabulary is built from the training texts alone.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedprism.config import DataConfig, plain, setting
from fedprism.data import text
from fedprism.data.base import DATASETS, WITH_OPTIONS, Dataset, options
from fedprism.data.cache import Arrays, ArrayWriter, converted
from fedprism.data.places import root_of
from fedprism.data.sources import looking, missing
from fedprism.errors import ConfigError, DataError
from fedprism.files import open_regular, read_most

NAME = "agnews"
CLASSES = ("World", "Sports", "Business", "Sci-Tech")  # published as Sci/Tech, which cannot be a file's name
SPLITS = ("train", "test")
TEST_SHARE = 0.25  # FedCP's, where train and test are merged
MAX_LENGTH = 10_000  # largest `length` option; the longest texts have a few hundred tokens
MAX_BYTES = 256 << 20  # of a file, unpacked; the published training texts have 29 MB
VERSION = 1  # of the conversion

WITH_OPTIONS.add(NAME)


@dataclass(frozen=True)
class Options:
    length: int = setting(
        200, "tokens per text; longer texts are cut", lambda v: 1 <= v <= MAX_LENGTH, f"1 to {MAX_LENGTH:,}"
    )
    words: int | None = setting(
        98_635,
        "maximum vocabulary size, padding and the unknown word included; null: every word of the training texts",
        lambda v: v is None or v > text.SPECIAL,
        f"null, or more than {text.SPECIAL}",
    )


@DATASETS.register(NAME)
def load(config: DataConfig, seed: int) -> Dataset:
    """AG News: news in four topics as texts of 200 tokens; own test split; for text models such as fasttext."""
    for key, value, neutral in (("image_size", config.image_size, "auto"), ("augment", config.augment, "none")):
        if value != neutral:
            raise ConfigError(f"data.{key} is {plain(value)}, but {NAME} holds texts, not images; set it to {neutral}.")
    arrays = _arrays(config)
    labels = arrays.columns["label"]
    return Dataset(
        name=NAME,
        images=arrays.inputs,
        labels=labels,
        domains=torch.zeros_like(labels),
        domain_names=(NAME,),
        class_names=CLASSES,
        is_test=arrays.columns["is_test"],
        test_share=TEST_SHARE,
        words=len(arrays.facts["words"]) + text.SPECIAL,
        round_up=True,
    )


def encode(texts: Sequence[str], config: DataConfig) -> NDArray[np.int32]:
    """int32 [n, length]: new texts, encoded as this configuration's dataset, for a trained model to predict.

    `encode(["Oil prices rise again"], DataConfig("agnews"))`
    """
    return text.encode(texts, _arrays(config).facts["words"], options(config, Options).length)


@looking()
def _arrays(config: DataConfig) -> Arrays:
    chosen, files = options(config, Options), _files(root_of(config))

    def convert(writer: ArrayWriter) -> None:
        raw = {split: _read(file) for split, file in zip(SPLITS, files, strict=True)}
        texts = [each for split in SPLITS for each in raw[split][1]]
        words = text.vocabulary(raw["train"][1], chosen.words)
        text.encode(texts, words, chosen.length, writer.inputs((len(texts), chosen.length), np.int32))
        writer.columns["label"] = np.concatenate([raw[split][0] for split in SPLITS])
        writer.columns["is_test"] = np.repeat([False, True], [len(raw[split][0]) for split in SPLITS])
        writer.facts["words"] = words

    return converted(NAME, VERSION, files, {"length": chosen.length, "words": chosen.words}, convert)


def _files(root: Path) -> list[Path]:
    """The training and the test file; the published ones take precedence over the compact ones."""
    published = [root / NAME / f"{split}.csv" for split in SPLITS]
    compact = [root / f"{NAME}_{split}.csv.gz" for split in SPLITS]
    for files in (published, compact):
        if all(file.is_file() for file in files):
            return files
    raise missing(NAME, root)


def _read(path: Path) -> tuple[NDArray[np.int64], list[str]]:
    """The labels, counted from 0, and the texts of one file."""
    content = _content(path)
    compact = _packed(path)
    columns = 2 if compact else 3
    labels, texts = [], []
    rows = csv.reader(io.StringIO(content, newline=""))
    try:
        if compact and next(rows, None) != ["label", "text"]:
            raise DataError(f"{path}, line 1: expected the header label,text.")
        for row in rows:
            if len(row) != columns:
                raise DataError(f"{path}, line {rows.line_num}: {len(row)} columns; expected {columns}.")
            if row[0] not in ("1", "2", "3", "4"):
                raise DataError(f"{path}, line {rows.line_num}: the topic is {row[0][:40]!r}; expected 1, 2, 3 or 4.")
            labels.append(int(row[0]) - 1)
            texts.append(" ".join(row[1:]))
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: {error}; expected CSV with texts in double quotes.") from None
    if not texts:
        raise DataError(f"{path} holds no texts.")
    if content.count('"') % 2:
        raise DataError(f"{path}, line {rows.line_num}: the file ends inside a quoted text; it is incomplete.")
    return np.array(labels, dtype=np.int64), texts


def _packed(path: Path) -> bool:
    return path.suffix == ".gz"


def _content(path: Path) -> str:
    try:
        with open_regular(path) as stored, cast(IO[bytes], gzip.open(stored) if _packed(path) else stored) as file:
            raw = read_most(file, MAX_BYTES)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8.") from None
