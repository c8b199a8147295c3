"""clip_norm: no update of a client is longer than a bound."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedprism.config import positive, setting
from fedprism.methods.states import State, length
from fedprism.transforms import TRANSFORMS
from fedprism.transforms.base import Transform, UploadContext


@TRANSFORMS.register("clip_norm")
@dataclass(frozen=True)
class ClipNorm(Transform):
    """scale an update that is longer than `max` down to this length"""

    id = "clip_norm"
    idea = "An update u (upload minus download, all its leaves as one vector) becomes u min(1, max / |u|)."
    shows = {
        "clip_norm/clipped": "share of updates that were clipped",
        "clip_norm/length": "length of the update before clipping",
    }

    max: float = setting(1.0, "maximum Euclidean length of an update", positive, "above 0")

    def client(self, upload: State, context: UploadContext) -> State:
        chosen = context.chosen(upload, self.kinds)
        update = context.update(chosen)
        found = float(length({name: u.double() for name, u in update.items()}))  # squares may overflow in float32
        context.log("clip_norm/length", found)
        context.log("clip_norm/clipped", float(found > self.max))
        if found <= self.max:  # bit by bit what it was
            return upload
        shorter = torch._foreach_mul(list(update.values()), self.max / found)
        return {**upload, **context.add_origin(dict(zip(update, shorter, strict=True)))}
