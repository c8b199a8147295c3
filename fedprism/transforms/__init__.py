"""Changes to uploads on their way from clients to the server; read `base.py` first."""

from __future__ import annotations

from collections.abc import Sequence

from fedprism.config import Named
from fedprism.plugins import Plugins
from fedprism.transforms.base import Transform

TRANSFORMS: Plugins[Transform] = Plugins("transform", Transform)


def make_transforms(listed: Sequence[Named]) -> tuple[Transform, ...]:
    """The transforms of a configuration, in its order."""
    return tuple(TRANSFORMS.make(each, f"transforms[{place}]") for place, each in enumerate(listed))


from fedprism.transforms import clip_norm, quantize  # noqa: E402, F401 - they register themselves
