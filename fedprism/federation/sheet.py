"""A contact sheet: a few images of each client, to compare clients by eye."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from fedprism.errors import FedprismError
from fedprism.federation.base import ClientData, Federation

TILE, LARGEST = 48, 112  # minimum and maximum pixels per side
GAP = 4
HEAD = 14  # height of the line of class names, in pixels
FEWEST, MOST = 8, 12  # bounds of the default number of images per client


def contact_sheet(federation: Federation, per_client: int | None = None, rows: int | None = None) -> Image.Image:
    """Draw one row per client: its name and `per_client` training images of as many classes as possible.

    `per_client` defaults to one image per class, but at least 8 and at most 12. `rows` limits the number of clients,
    which are picked evenly in order. Class names are drawn above the columns if all rows have the same classes in the
    same order.
    """
    for name, number in (("per_client", per_client), ("rows", rows)):
        if number is not None and number < 1:
            raise FedprismError(f"{name} is {number}; expected 1 or more.")
    if len(federation.shape) != 3:
        raise FedprismError(f"federation {federation.name!r} holds texts; a contact sheet shows images.")
    per_client = per_client or min(max(federation.classes, FEWEST), MOST)
    tile_width, tile_height = _tile(*federation.shape[1:])
    font = ImageFont.load_default()
    chosen = spread(federation.names, rows or len(federation.names))
    labels = {name: _printable(name) for name in chosen}
    margin = max(int(font.getlength(label)) for label in labels.values()) + 2 * GAP
    images = {name: _varied(federation.clients[name], per_client) for name in chosen}
    heads = _common([federation.clients[name].train.y[images[name]].tolist() for name in chosen])
    top = GAP + (HEAD if heads else 0)
    size = (margin + per_client * (tile_width + GAP), top + len(labels) * (tile_height + GAP))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for column, label in enumerate(heads):
        text = _fitting(_printable(federation.class_names[label]), tile_width, font.getlength)
        draw.text((margin + column * (tile_width + GAP), GAP - 1), text, fill="black", font=font)
    for row, name in enumerate(chosen):
        client = federation.clients[name]
        y = top + row * (tile_height + GAP)
        draw.text((GAP, y + tile_height // 2 - 5), labels[name], fill="black", font=font)
        shown = client.train.batch(torch.tensor(images[name], device=client.train.y.device))
        for column, image in enumerate(shown):
            picture = _picture(image)
            how = Image.Resampling.NEAREST if picture.width <= tile_width else Image.Resampling.BOX
            sheet.paste(picture.resize((tile_width, tile_height), how), (margin + column * (tile_width + GAP), y))
    return sheet


def spread(names: Sequence[str], wanted: int) -> tuple[str, ...]:
    """Up to `wanted` of the names, evenly spaced from the first to the last.

    >>> spread(["a", "b", "c", "d", "e"], 3)
    ('a', 'c', 'e')
    """
    indices = np.linspace(0, len(names) - 1, min(wanted, len(names))).round().astype(int)
    return tuple(names[i] for i in indices)


def _printable(name: str) -> str:
    return name.encode("latin-1", "replace").decode("latin-1")


def _common(rows: Sequence[list[int]]) -> list[int]:
    """The labels of the columns if all rows have the same ones; rows may be shorter.

    >>> _common([[0, 1], [0, 1, 2]]), _common([[0, 1], [1, 0]])
    ([0, 1, 2], [])
    """
    longest = max(rows, key=len)
    return longest if all(row == longest[: len(row)] for row in rows) else []


def _fitting(text: str, limit: float, width: Callable[[str], float]) -> str:
    """Shorten a text that is too wide, with a full stop.

    >>> _fitting("mouse", 5, len), _fitting("keyboard", 5, len)
    ('mouse', 'keyb.')
    """
    if width(text) <= limit:
        return text
    return next((f"{text[:n]}." for n in range(len(text) - 1, 0, -1) if width(f"{text[:n]}.") <= limit), text[:1])


def _tile(height: int, width: int) -> tuple[int, int]:
    """Width and height of a tile: small images are enlarged by a whole factor, large ones are shrunk.

    >>> _tile(16, 16), _tile(64, 64), _tile(224, 112)
    ((48, 48), (64, 64), (56, 112))
    """
    side = max(height, width)
    if side > LARGEST:
        return max(1, width * LARGEST // side), max(1, height * LARGEST // side)
    zoom = -(-TILE // side)
    return width * zoom, height * zoom


def _varied(client: ClientData, wanted: int) -> list[int]:
    """The indices of the first training image of each class, then of the second, and so on."""
    seen: dict[int, int] = {}
    order = []
    for index, label in enumerate(client.train.y.tolist()):
        seen[label] = seen.get(label, 0) + 1
        order.append((seen[label], label, index))
    return [index for _, _, index in sorted(order)[:wanted]]


def _picture(x: torch.Tensor) -> Image.Image:
    """uint8 [channels, height, width] as a picture; without three channels, the first one in grey."""
    pixels = x.cpu().numpy()
    shown = pixels if len(pixels) == 3 else np.repeat(pixels[:1], 3, axis=0)
    return Image.fromarray(np.ascontiguousarray(shown.transpose(1, 2, 0)))
