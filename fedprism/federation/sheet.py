"""A contact sheet: a few images of every client, to see at a glance what differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from fedprism.errors import FedprismError
from fedprism.federation.base import ClientData, Federation

TILE, LARGEST = 48, 112  # pixels a side, at least and at most
GAP = 4


def contact_sheet(federation: Federation, per_client: int = 8, rows: int | None = None) -> Image.Image:
    """A row a client: its name and `per_client` training images, of as many classes as there are.

    `rows`: at most so many clients, drawn evenly from all of them in their order.
    """
    for name, number in (("per_client", per_client), ("rows", rows)):
        if number is not None and number < 1:
            raise FedprismError(f"{name} is {number}; expected 1 or more.")
    if len(federation.shape) != 3:
        raise FedprismError(f"federation {federation.name!r} holds texts; a contact sheet shows images.")
    tile_width, tile_height = _tile(*federation.shape[1:])
    font = ImageFont.load_default()
    chosen = spread(federation.names, rows or len(federation.names))
    labels = {name: name.encode("latin-1", "replace").decode("latin-1") for name in chosen}
    margin = max(int(font.getlength(label)) for label in labels.values()) + 2 * GAP
    size = (margin + per_client * (tile_width + GAP), len(labels) * (tile_height + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for row, name in enumerate(chosen):
        client = federation.clients[name]
        top = GAP + row * (tile_height + GAP)
        draw.text((GAP, top + tile_height // 2 - 5), labels[name], fill="black", font=font)
        shown = client.train.batch(torch.tensor(_varied(client, per_client), device=client.train.y.device))
        for column, image in enumerate(shown):
            picture = _picture(image)
            how = Image.Resampling.NEAREST if picture.width <= tile_width else Image.Resampling.BOX
            sheet.paste(picture.resize((tile_width, tile_height), how), (margin + column * (tile_width + GAP), top))
    return sheet


def spread(names: Sequence[str], wanted: int) -> tuple[str, ...]:
    """At most so many of the names, evenly drawn from the first to the last.

    >>> spread(["a", "b", "c", "d", "e"], 3)
    ('a', 'c', 'e')
    """
    places = np.linspace(0, len(names) - 1, min(wanted, len(names))).round().astype(int)
    return tuple(names[place] for place in places)


def _tile(height: int, width: int) -> tuple[int, int]:
    """Width and height that an image is shown in: small ones whole times larger, large ones smaller.

    >>> _tile(16, 16), _tile(64, 64), _tile(224, 112)
    ((48, 48), (64, 64), (56, 112))
    """
    side = max(height, width)
    if side > LARGEST:
        return max(1, width * LARGEST // side), max(1, height * LARGEST // side)
    zoom = -(-TILE // side)
    return width * zoom, height * zoom


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
