"""Read one image file as RGB pixels of a given size.

The rules, repeated in docs:
- transparency is composited over a background colour, by default black;
- 16-bit greyscale is scaled from 0..65535 to 0..255, not clipped; images with 32 bits or floating-point numbers per
  channel are refused, as they have no agreed range;
- CMYK, palette, grey and black-and-white images become RGB;
- the EXIF orientation is applied; of several frames the first is used;
- the whole image is resized to a square;
- an image of more than `MAX_PIXELS` is refused before it is decoded.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedprism.files import NotAFile, open_regular

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")  # detected by content, not by suffix
MAX_PIXELS = 80_000_000

# Exceptions of Pillow's readers on damaged files, and what is no file at all.
DAMAGED = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    NotAFile,
)


def read_picture(path: Path, size: int, background: str = "black") -> NDArray[np.uint8]:
    """uint8 [3, size, size]; raises one of `DAMAGED` if the file cannot be read."""
    with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
        check_pixels(image)
        image.draft(None, (2 * size, 2 * size))  # decode a JPEG at a fraction of its size
        upright = ImageOps.exif_transpose(image)
        square = _rgb(upright, image.format, background).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(square).transpose(2, 0, 1)


def check_pixels(image: Image.Image) -> None:
    """Refuse an image that is too large, before it is decoded."""
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels, at most {MAX_PIXELS:,} are read")


def reason(error: BaseException) -> str:
    """A short reason why an image could not be read."""
    if isinstance(error, NotAFile):
        return f"{error.kind}, no regular file"
    if isinstance(error, Image.DecompressionBombError):
        return f"more than the {MAX_PIXELS:,} pixels that are read"
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known kind"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which the message names
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    if isinstance(error, EOFError) and not str(error):
        return "it ends too early"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _rgb(image: Image.Image, kind: str | None, background: str) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and kind == "PNG"):  # older Pillow: a 16-bit PNG is "I"
        return _from_16_bit(np.asarray(image)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32 bits per pixel have no agreed range; save it with 8 or 16")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", coloured.size, background), coloured).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(pixels: NDArray[np.generic]) -> Image.Image:
    """0..65535 to 0..255, rounded: 65535 / 255 is 257."""
    return Image.fromarray(((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8))
