"""classes.json: counts per class of the best and the last round, from which balanced accuracy and F1 come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprism import atomic
from fedprism.config import MOMENTS, SPLITS
from fedprism.errors import RecordError
from fedprism.records.metrics import ordered
from fedprism.round.events import RoundRecord

NAME = "classes.json"


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


def read_classes(path: Path) -> dict[str, Any]:
    """`classes.json` of a run directory; empty where there is none yet."""
    try:
        classes = json.loads((path / NAME).read_bytes())
        return {which: classes[which] for which in ("best", "last") if classes[which]["scores"] is not None}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RecordError(f"{path / NAME} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError):
        raise RecordError(f"{path / NAME} is damaged; delete it to go on without counts per class.") from None


def write_classes(path: Path, counts: Mapping[str, Any]) -> None:
    """Write the counts of the last round and of the best one. Without validation images no round is the best: then the
    last one stands for it."""
    atomic.write_json(path / NAME, {"best": counts["last"], **counts})
