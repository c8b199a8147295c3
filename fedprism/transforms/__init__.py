"""Changes to uploads on their way from clients to the server; read `base.py` first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

from fedprism.config import Named, plain
from fedprism.plugins import Plugins
from fedprism.transforms.base import Transform

TRANSFORMS: Plugins[Transform] = Plugins("transform", Transform)


def make_transforms(listed: Sequence[Named]) -> tuple[Transform, ...]:
    """The transforms of a configuration, in its order."""
    return _made(json.dumps(plain(listed), default=str))


@lru_cache(maxsize=16)  # every client asks in every round
def _made(listed: str) -> tuple[Transform, ...]:
    named = [Named(each.pop("name"), each) for each in json.loads(listed)]
    return tuple(TRANSFORMS.make(each, f"transforms[{place}]") for place, each in enumerate(named))


from fedprism.transforms import clip_norm, quantize  # noqa: E402, F401 - they register themselves
