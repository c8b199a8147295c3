"""AG News: both forms of its files, the tokeniser and the vocabulary, damaged files, and training on real texts."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedprism import api
from fedprism.config import Config, DataConfig, override, structure
from fedprism.data import agnews, text
from fedprism.data.base import load
from fedprism.errors import ConfigError, DataError
from fedprism.records import Protocol, outcome

TRAIN = [
    (1, "Talks in Geneva", 'The "talks" go on; nobody hopes.'),
    (2, "Goal!", "The team won (again)."),
    (3, "Oil is up", "Oil, gas: up. Up!"),
    (4, "A new chip", "It's small,\nand fast<br />too"),
]
TEST = [(4, "Chip maker", "The unheard-of chip"), (1, "Talks", "Nobody talks"), (2, "Nil", "The team")]
LONGEST = 12  # tokens of a text here: talks in geneva the talks go on nobody hopes . and more


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDPRISM_CACHE", str(tmp_path / "cache"))


def written(rows: Iterable[Iterable[object]]) -> bytes:
    """As published: every field in double quotes, and those inside doubled."""
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
    return file.getvalue().encode()


def published(root: Path, train: bytes | None = None, test: bytes | None = None) -> Path:
    (root / "agnews").mkdir(parents=True)
    (root / "agnews" / "train.csv").write_bytes(written(TRAIN) if train is None else train)
    (root / "agnews" / "test.csv").write_bytes(written(TEST) if test is None else test)
    return root


def compact(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", TRAIN), ("test", TEST)):
        body = written([("label", "text"), *((label, f"{title} {told}") for label, title, told in rows)])
        (root / f"agnews_{part}.csv.gz").write_bytes(gzip.compress(body))
    return root


def config(root: Path, name: str = "agnews", **others: Any) -> DataConfig:
    return structure({"name": name, "root": str(root), **others}, DataConfig)


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Wall St. Bears", ["wall", "st", ".", "bears"]),
        ("it's", ["it", "'", "s"]),
        ('"Yes," he said.', ["yes", ",", "he", "said", "."]),
        ("a;b:c", ["a", "b", "c"]),
        ("(What?!)", ["(", "what", "?", "!", ")"]),
        ("one<br />two<BR />three", ["one", "two", "three"]),
        ("$5-a-day #39;s AT&T\\no\ttab", ["$5-a-day", "#39", "s", "at&t\\no", "tab"]),
        ("3.5", ["3", ".", "5"]),
        ("É\u00a0ß\n", ["é", "ß"]),
        (" \n", []),
    ],
)
def test_tokens(given: str, expected: list[str]) -> None:
    assert text.tokens(given) == expected


def test_the_vocabulary_is_ordered_by_frequency_then_alphabet() -> None:
    texts = ["b a b", "c a b", "d"]
    assert text.vocabulary(texts) == ["b", "a", "c", "d"]
    assert text.vocabulary(texts, max_tokens=4) == ["b", "a"]  # and padding, and unknown
    assert (
        text.vocabulary(texts, max_tokens=6)
        == text.vocabulary(texts, max_tokens=None)
        == text.vocabulary(texts, max_tokens=100)
    )


def test_texts_are_cut_and_filled_up() -> None:
    rows = text.encode(["a b c d", "b", "", "new a"], ["a", "b", "c", "d"], length=3)
    assert rows.dtype == np.int32
    assert rows.tolist() == [[2, 3, 4], [3, 0, 0], [0, 0, 0], [1, 2, 0]]


# --- the dataset -----------------------------------------------------------------------------------------------------


def test_what_is_read(tmp_path: Path) -> None:
    dataset = load(config(published(tmp_path / "data"), "agnews?length=8"), 0)
    words = text.vocabulary(f"{title} {told}" for _, title, told in TRAIN)
    assert dataset.shape == (8, len(words) + 2)
    assert dataset.words == len(words) + 2
    assert dataset.class_names == ("World", "Sports", "Business", "Sci-Tech")
    assert dataset.labels.tolist() == [0, 1, 2, 3, 3, 0, 1]
    assert dataset.is_test is not None
    assert dataset.is_test.tolist() == [False] * 4 + [True] * 3
    assert dataset.domain_names == ("agnews",)
    assert not dataset.domains.any()
    assert words[:2] == [".", "up"]  # three times each
    names = ["", "?", *words]
    assert [names[n] for n in dataset.images[1]] == ["goal", "!", "the", "team", "won", "(", "again", ")"]
    # Of a test text, words that no training text has are unknown: maker, unheard-of.
    assert [names[n] for n in dataset.images[4]] == ["chip", "?", "the", "?", "chip", "", "", ""]


def test_both_forms_give_the_same(tmp_path: Path) -> None:
    first, second = (load(config(root), 0) for root in (published(tmp_path / "a"), compact(tmp_path / "b")))
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.labels, second.labels)
    assert first.words == second.words


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    before = load(config(published(tmp_path / "one")), 0)
    after = load(config(published(tmp_path / "two", train=b"\xef\xbb\xbf" + written(TRAIN))), 0)
    assert torch.equal(before.images, after.images)


def test_published_files_win(tmp_path: Path) -> None:
    root = published(compact(tmp_path / "data"), train=written([(2, "Alone", "here")]))
    assert len(load(config(root), 0)) == 1 + len(TEST)


def test_defaults_are_fedcps(tmp_path: Path) -> None:
    dataset = load(config(published(tmp_path / "data")), 0)
    assert dataset.images.shape[1] == 200
    assert agnews.Options().words == 98_635


@pytest.mark.parametrize(
    ("options", "words"), [("words=5", 5), ("words=null", None), ("words=3", 3), ("words=100000", None)]
)
def test_at_most_so_many_words(options: str, words: int | None, tmp_path: Path) -> None:
    root = published(tmp_path / "data")
    every = load(config(root), 0).words
    limited = load(config(root, f"agnews?{options}"), 0)
    assert limited.words == (words or every)
    assert int(limited.images.max()) == limited.words - 1


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    root = published(tmp_path / "data")
    before = len(load(config(root), 0))
    (root / "agnews" / "test.csv").write_bytes(written([*TEST, (3, "More", "gas")]))
    assert len(load(config(root), 0)) == before + 1


def test_new_texts_are_encoded_as_the_datasets_own(tmp_path: Path) -> None:
    given = config(published(tmp_path / "data"), "agnews?length=9")
    rows = agnews.encode([f"{title} {told}" for _, title, told in (*TRAIN, *TEST)], given)
    assert rows.dtype == np.int32
    assert torch.equal(torch.from_numpy(rows), load(given, 0).images)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (written([*TRAIN, (5, "a", "b")]), r"train.csv, line 6: the topic is '5'; expected 1, 2, 3 or 4"),
        (written([("Class Index", "Title", "Description"), *TRAIN]), r"line 1: the topic is 'Class Index'"),
        (written([*TRAIN[:2], (3, "only a title")]), r"line 3: 2 columns; expected 3"),
        (written([*TRAIN[:1], (1, "a", "b", "c")]), r"line 2: 4 columns; expected 3"),
        (written(TRAIN[:2]) + b'"1","caf\xe9","x"\n', r"line 3: not UTF-8 .* save the file as UTF-8"),
        (written(TRAIN)[:-6], r"the file ends inside a quoted text; it is incomplete"),
        (b"", r"train.csv holds no texts"),
        (b"\n", r"line 1: 0 columns"),
        (b"\x00\x01\x02", r"line 1"),
    ],
)
def test_damaged_files_are_refused_with_the_line(train: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        load(config(published(tmp_path / "data", train=train)), 0)
    assert not list((tmp_path / "cache" / "arrays").glob("agnews-*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", r"agnews_train.csv.gz cannot be read: Not a gzipped file"),
        (gzip.compress(written([("label", "text"), (1, "a b")]))[:-10], r"cannot be read"),
        (gzip.compress(written([(1, "a b")])), r"line 1: expected the header label,text"),
        (gzip.compress(written([("label", "text"), (1, "a", "b")])), r"line 2: 3 columns; expected 2"),
        (gzip.compress(written([("label", "text")])), r"holds no texts"),
    ],
)
def test_damaged_compact_files(content: bytes, message: str, tmp_path: Path) -> None:
    root = compact(tmp_path / "data")
    (root / "agnews_train.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(config(root), 0)


def test_missing_files_are_named(tmp_path: Path) -> None:
    root = compact(tmp_path / "data")
    (root / "agnews_test.csv.gz").unlink()
    with pytest.raises(DataError, match=r"(?s)fedprism data prepare agnews.*agnews/train.csv.*agnews/test.csv"):
        load(config(root), 0)


@pytest.mark.parametrize(
    ("name", "others", "message"),
    [
        ("agnews?lenght=5", {}, "unknown key 'lenght'. Did you mean 'length'"),
        ("agnews?length=0", {}, "length is 0; expected 1 to 10,000"),
        ("agnews?length=1000000000000000000", {}, "expected 1 to 10,000"),
        ("agnews?words=2", {}, "words is 2; expected null, or more than 2"),
        ("agnews", {"image_size": 32}, "data.image_size is 32, but agnews holds texts"),
        ("agnews", {"augment": ["flip"]}, "data.augment is .*, but agnews holds texts"),
        ("agnews", {"domains": ["sports"]}, "unknown domain 'sports'"),
    ],
)
def test_settings_that_texts_do_not_have(name: str, others: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(config(published(tmp_path / "data"), name, **others), 0)


# --- training --------------------------------------------------------------------------------------------------------


def test_from_files_to_predictions(tmp_path: Path) -> None:
    """The whole way: CSV files, a federation by configuration, training, and new texts for a trained model."""
    root = published(tmp_path / "data", written(TRAIN * 30), written(TRAIN * 5))
    given = structure(
        {
            "data": {"name": "agnews?length=16", "root": str(root), "partition": {"name": "domain", "clients": 2}},
            "model": "fasttext",
            "train": {"rounds": 3, "epochs": 10, "batch_size": 10, "optimizer": {"lr": 0.5}},
        },
        Config,
    )
    run = api.run_config(given, "news", out=tmp_path / "run")
    assert run.record.shape == (16, load(given.data, 0).words)
    assert outcome(run.record).mean > 0.9
    texts = ["Oil and gas are up", "The team won again"]
    for model in run.models.values():
        for new in (texts, agnews.encode(texts, given.data)):
            assert [model.class_names[label] for label in model.predict(new)] == ["Business", "Sports"]
        with pytest.raises(DataError, match="is one text; give a list"):
            model.predict(texts[0])
        with pytest.raises(DataError, match="expected a list of texts"):
            model.predict([texts, texts])


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["{name: domain, clients: 4}", "{name: dirichlet, clients: 10, alpha: 0.3}"])
@pytest.mark.parametrize("method", ["fedavg", "fedbn", "fedcp"])
def test_learns_real_news(method: str, partition: str, tmp_path: Path) -> None:
    """8,814 training texts in four topics: chance is 25 %."""
    if not os.environ.get("FEDPRISM_DATA"):
        pytest.skip("FEDPRISM_DATA is not set; it names the folder with AG News")
    given = [f"method={method}", f"data.partition={partition}", "data.name='agnews?length=100,words=5000'"]
    small = ["train.rounds=5", "train.optimizer={name: adam, lr: 0.02}", "evaluate.every=5"]
    raw = override({}, [*given, "model=fasttext", *small])
    run = api.run_config(structure(raw, Config), "news", out=tmp_path / "run")
    assert run.status == "finished"
    assert outcome(run.record, Protocol.parse("received,last")).mean > 0.7
