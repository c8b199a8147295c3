"""A contact sheet: a few images of every client, to see at a glance what differs."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from fedprism.errors import FedprismError
from fedprism.federation.base import ClientData, Federation

TILE = 48  # pixels a side, at least
GAP = 4


def contact_sheet(federation: Federation, per_client: int = 8) -> Image.Image:
    """A row a client: its name and `per_client` training images, of as many classes as there are."""
    if per_client < 1:
        raise FedprismError(f"per_client is {per_client}; expected 1 or more.")
    _, height, width = federation.shape
    zoom = max(1, -(-TILE // max(height, width)))
    tile_width, tile_height = width * zoom, height * zoom
    font = ImageFont.load_default()
    labels = {name: name.encode("latin-1", "replace").decode("latin-1") for name in federation.names}
    margin = max(int(font.getlength(label)) for label in labels.values()) + 2 * GAP
    size = (margin + per_client * (tile_width + GAP), len(labels) * (tile_height + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for row, (name, client) in enumerate(federation.clients.items()):
        top = GAP + row * (tile_height + GAP)
        draw.text((GAP, top + tile_height // 2 - 5), labels[name], fill="black", font=font)
        for column, index in enumerate(_varied(client, per_client)):
            tile = _picture(client.train.x[index]).resize((tile_width, tile_height), Image.Resampling.NEAREST)
            sheet.paste(tile, (margin + column * (tile_width + GAP), top))
    return sheet


def _varied(client: ClientData, wanted: int) -> list[int]:
    """Training images one class after the other, then the second of each class, and so on."""
    seen: dict[int, int] = {}
    order = []
    for index, label in enumerate(client.train.y.tolist()):
        seen[label] = seen.get(label, 0) + 1
        order.append((seen[label], label, index))
    return [index for _, _, index in sorted(order)[:wanted]]


def _picture(x: torch.Tensor) -> Image.Image:
    """uint8 [channels, height, width] as a picture; of other than three channels, the first in grey."""
    pixels = x.cpu().numpy()
    shown = pixels if len(pixels) == 3 else np.repeat(pixels[:1], 3, axis=0)
    return Image.fromarray(np.ascontiguousarray(shown.transpose(1, 2, 0)))
