"""Images of each client for the page of a report."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
from PIL import Image

from fedprism.errors import FedprismError
from fedprism.federation import ClientData, Federation, build_federation
from fedprism.records import RunRecord
from fedprism.report.html import Pictures

CLIENTS = 12  # whose images are shown
IMAGES = 10  # per client
LARGEST = 64  # pixels a side of an image


def pictures_of(record: RunRecord, federation: Federation | None = None) -> Pictures:
    """The first clients' training images side by side, as PNG by client; or a sentence that says why there are none.

    The federation is built again unless it is given.
    """
    if record.config.data.name.startswith("folder:"):
        return "The images of real sites are not put into this page, so that it can be passed on."
    try:
        federation = federation or build_federation(record.config.data, record.seed)
    except (FedprismError, OSError) as error:
        return f"The images cannot be shown: {error}"
    if len(federation.shape) == 2:
        return "The clients' texts are not put into this page."
    return {client.name: _strip(client) for client in list(federation.clients.values())[:CLIENTS]}


def _strip(client: ClientData) -> bytes:
    """Training images side by side, one class after the other."""
    labels = client.train.y.numpy()
    nth = np.zeros(len(labels), dtype=int)  # first, second, … image of its class
    for label in np.unique(labels):
        nth[labels == label] = np.arange((labels == label).sum())
    chosen = np.lexsort((labels, nth))[:IMAGES]
    pixels = client.train.batch(torch.from_numpy(chosen)).numpy()  # [n, channels, height, width]
    pixels = pixels if pixels.shape[1] == 3 else np.repeat(pixels[:, :1], 3, axis=1)
    tiles = [Image.fromarray(np.ascontiguousarray(tile.transpose(1, 2, 0))) for tile in pixels]
    for tile in tiles:
        tile.thumbnail((LARGEST, LARGEST))
    zoom = max(1, LARGEST // (2 * max(tiles[0].size)))
    wide, tall = tiles[0].width * zoom, tiles[0].height * zoom
    gap = max(1, wide // 12)
    strip = Image.new("RGBA", ((wide + gap) * len(tiles) - gap, tall))
    for place, tile in enumerate(tiles):
        strip.paste(tile.resize((wide, tall), Image.Resampling.NEAREST), (place * (wide + gap), 0))
    out = BytesIO()
    strip.save(out, "PNG", optimize=True)
    return out.getvalue()
