"""metrics.jsonl and timings.jsonl: what a line holds, torn and damaged lines, and what a resume cuts off."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from fedprism.errors import RecordError
from fedprism.records import RunDirectory, read_run
from fedprism.records.metrics import Journal, decode, encode, read_rounds, read_seconds
from fedprism.records.sealed import seal, unseal
from fedprism.round.events import RoundRecord, Score
from tests.toy_records import CLIENTS, damage, results, toy_config, toy_run

RECORD = RoundRecord(
    round=3,
    cohort=("b", "a"),
    failed={"b": 'it said "no"\n'},
    down={"b": 20, "a": 10},
    up={"a": 10},
    logs={"b": {"zeta": 1e-300, "alpha": float("inf")}, "a": {"loss": 0.1}},
    scores={"trained": {"test": {"b": Score(1, 2, float("nan")), "a": Score(3, 4, 0.1 + 0.2, (3, 0), (3, 1), (4, 0))}}},
    seconds={"train": 0.123456789},
)


def test_a_line_in_full() -> None:
    line = encode(RECORD, ("a", "b"))
    assert line == (
        b'{"round":3,"cohort":["a","b"],"failed":{"b":"it said \\"no\\"\\n"},"down":{"a":10,"b":20},"up":{"a":10},'
        b'"logs":{"a":{"loss":0.1},"b":{"alpha":null,"zeta":1e-300}},'
        b'"scores":{"trained":{"test":{"a":[3,4,0.30000000000000004],"b":[1,2,null]}}}, "checksum": "'
        + hashlib.sha256(line[:-82]).hexdigest().encode()
        + b'"}\n'
    )


def test_the_order_in_which_clients_finish_does_not_matter() -> None:
    turned = RoundRecord(
        3,
        ("a", "b"),
        RECORD.failed,
        {"a": 10, "b": 20},
        {"a": 10},
        {"a": {"loss": 0.1}, "b": {"alpha": float("inf"), "zeta": 1e-300}},
        {"trained": {"test": dict(reversed(RECORD.scores["trained"]["test"].items()))}},
    )
    assert encode(turned, ("a", "b")) == encode(RECORD, ("a", "b"))


def test_a_line_comes_back() -> None:
    back = decode(json.loads(encode(RECORD, ("a", "b"))), {"train": 1.0})
    assert (back.round, back.cohort, back.failed, back.down, back.up) == (
        3,
        ("a", "b"),
        *[RECORD.failed, RECORD.down, RECORD.up],
    )
    assert back.scores["trained"]["test"]["a"] == Score(3, 4, 0.1 + 0.2)
    assert math.isnan(back.scores["trained"]["test"]["b"].loss)
    assert math.isnan(back.logs["b"]["alpha"])
    assert back.logs["b"]["zeta"] == 1e-300
    assert back.seconds == {"train": 1.0}


def test_what_a_method_shows_of_itself_comes_back() -> None:
    shown = Score(3, 4, 0.5, branches={"online": 2, "offline": 1}, diagnostics={"pir": 0.25, "s/q05": math.nan})
    line = encode(replace(RECORD, scores={"received": {"test": {"a": shown, "b": Score(1, 2, 0.5)}}}), ["a", "b"])
    assert b'"a":[3,4,0.5,{"online":2,"offline":1},{"pir":0.25,"s/q05":null}],"b":[1,2,0.5]' in line
    back = decode(json.loads(line), {}).scores["received"]["test"]
    assert back["a"].branches == shown.branches
    assert back["a"].diagnostics["pir"] == 0.25
    assert math.isnan(back["a"].diagnostics["s/q05"])
    assert back["b"] == Score(1, 2, 0.5)


def test_a_run_has_a_line_a_round_in_both_files(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run")
    rounds = read_rounds(path / "metrics.jsonl")
    assert [entry["round"] for entry in rounds] == list(range(8))
    assert list(rounds[1]) == ["round", "cohort", "failed", "down", "up", "logs", "scores"]
    assert list(rounds[1]["scores"]) == ["received", "trained"]
    assert list(rounds[1]["scores"]["received"]["test"]) == list(CLIENTS)
    timings = [json.loads(line) for line in (path / "timings.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in timings] == list(range(8))
    assert timings[0]["seconds"] == {"train": 0.25, "total": 0.5}
    assert datetime.fromisoformat(timings[0]["at"]).tzinfo is not None


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl"])
def test_a_line_torn_at_any_byte_is_ignored_by_readers_and_cut_off_by_writers(tmp_path: Path, name: str) -> None:
    path = toy_run(tmp_path / "run", until=3)
    whole = (path / name).read_bytes()
    torn = whole.splitlines(keepends=True)[-1]
    for size in (1, 2, len(torn) // 2, len(torn) - 2, len(torn) - 1):
        left = whole + torn[:size].replace(b'"round":3', b'"round":4')
        (path / name).write_bytes(left)
        assert len(read_run(path).rounds) == 4
        assert len(read_seconds(path / "timings.jsonl")) == 4
        assert (path / name).read_bytes() == left  # reading repairs nothing
        journal = Journal(path / name)
        journal.open(last=3)
        journal.close()
        assert (path / name).read_bytes() == whole


@pytest.mark.parametrize("rubbish", [b"\0" * 40 + b"\n", b"\xff\xfe\n", b"[1, 2]\n", b'{"round":"x"}\n', b"\n"])
def test_rubbish_at_the_end_counts_as_torn(tmp_path: Path, rubbish: bytes) -> None:
    straight = results(toy_run(tmp_path / "straight"))
    path = toy_run(tmp_path / "run", until=4)
    damage(path / "metrics.jsonl", lambda data: data + rubbish)
    assert len(read_run(path).rounds) == 5
    toy_run(path)
    assert results(path) == straight


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = toy_run(tmp_path / "run", until=5)
    sound = (path / "metrics.jsonl").read_bytes()
    lines = sound.splitlines(keepends=True)
    for wrong in (b"{}\n", b"\0\0\n", lines[1], lines[2][:-9] + b"\n", b"\n"):
        (path / "metrics.jsonl").write_bytes(b"".join([*lines[:2], wrong, *lines[3:]]))
        with pytest.raises(RecordError, match=r"line 3 of .*metrics.jsonl is damaged: expected the record of round 2"):
            read_run(path)
        with RunDirectory.open(path, write=True) as directory, pytest.raises(RecordError, match="line 3 of"):
            directory.latest()
    (path / "metrics.jsonl").write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(RecordError, match="line 3 of"):
        read_run(path)


def test_damage_after_the_newest_checkpoint_is_cut_off_by_a_resume(tmp_path: Path) -> None:
    """A power cut can leave rubbish in whatever was not yet forced to disk."""
    straight = results(toy_run(tmp_path / "straight"))
    path = toy_run(tmp_path / "run", until=6)
    line = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-1]
    damage(path / "metrics.jsonl", lambda data: data + b"\0\0\0\n" + line.replace(b'"round":6', b'"round":8'))
    with pytest.raises(RecordError, match="line 8 of"):
        read_run(path)
    toy_run(path)
    assert results(path) == straight


def test_a_damaged_timing_is_left_out_and_stops_nothing(tmp_path: Path) -> None:
    straight = results(toy_run(tmp_path / "straight"))
    path = toy_run(tmp_path / "run", until=5)
    lines = (path / "timings.jsonl").read_bytes().splitlines(keepends=True)
    (path / "timings.jsonl").write_bytes(b"".join([lines[0], b"?\n", *lines[2:]]))
    assert [bool(record.seconds) for record in read_run(path).rounds] == [True, False, True, True, True, True]
    toy_run(path)
    assert results(path) == straight
    assert sorted(read_seconds(path / "timings.jsonl")) == [0, 2, 3, 4, 5, 6, 7]


def test_what_is_after_the_checkpoint_is_cut_off(tmp_path: Path) -> None:
    config = toy_config(checkpoint_every=100)
    path = toy_run(tmp_path / "run", config, until=4)
    extra = unseal((path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[-1])
    damage(path / "metrics.jsonl", lambda data: data + seal({**extra, "round": 5, "down": {"north": 999}}))
    assert len(read_run(path).rounds) == 6
    toy_run(path)
    assert results(path) == results(toy_run(tmp_path / "straight", config))


def test_a_line_is_with_the_system_before_the_next_round(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.jsonl")
    journal.open(last=-1)
    journal.append(b'{"round":0}\n')
    assert (tmp_path / "x.jsonl").read_bytes() == b'{"round":0}\n'
    journal.close()
    journal.close()
