"""classes.json: counts per class of the best and the last round, from which balanced accuracy and F1 come."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprism import atomic
from fedprism.config import MOMENTS, SPLITS
from fedprism.errors import RecordError
from fedprism.records.metrics import ordered
from fedprism.records.runfile import RecordWarning
from fedprism.records.sealed import seal, unseal
from fedprism.round.events import RoundRecord

NAME = "classes.json"
NO_COUNTS: Mapping[str, Any] = {"last": {"round": -1, "scores": {}}}  # of no round


def class_counts(record: RoundRecord, clients: tuple[str, ...]) -> dict[str, Any]:
    """The counts per class of one round."""
    return {
        "round": record.round,
        "scores": {
            moment: {
                split: {
                    client: {"right": list(s.right), "predicted": list(s.predicted), "actual": list(s.actual)}
                    for client, s in ordered(scores, clients).items()
                }
                for split, scores in ordered(splits, SPLITS).items()
            }
            for moment, splits in ordered(record.scores, MOMENTS).items()
        },
    }


def read_classes(path: Path, expected: bool = False) -> dict[str, Any]:
    """`classes.json` of a run directory; empty where there is none, with a warning where one is expected."""
    try:
        classes = unseal(atomic.read(path / NAME))
        return {which: classes[which] for which in ("best", "last") if classes[which]["scores"] is not None}
    except FileNotFoundError:
        problem = "missing" if expected else ""
    except OSError as error:
        raise RecordError(f"{path / NAME} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError):
        problem = "damaged"
    if problem:  # nothing else is computed from it
        warnings.warn(f"{path / NAME} is {problem}: going on without counts per class.", RecordWarning, stacklevel=2)
    return {}


def write_classes(path: Path, counts: Mapping[str, Any]) -> None:
    """Write the counts of the last round and of the best one."""
    atomic.write(path / NAME, packed(counts))


def packed(counts: Mapping[str, Any]) -> bytes:
    """`classes.json` as it is written. Without validation images no round is the best: then the last one stands for
    it."""
    return seal({"best": counts["last"], **counts}, indent=1)
