"""One image file as RGB pixels of a given size, whatever kind of image it is.

Decided here, and said in docs:
- transparency is laid over a background colour, black unless told otherwise;
- 16-bit greyscale is scaled from 0..65535 to 0..255, not clipped; images of 32 bits or floating-point numbers a channel
  are refused, as they have no agreed range;
- CMYK, palette, grey and black-and-white images become RGB;
- an EXIF orientation is applied; of several frames the first counts;
- the whole image is squeezed to a square;
- an image of more than `MAX_PIXELS` is refused before it is decoded.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF")  # told by content, whatever the suffix says
MAX_PIXELS = 80_000_000

# What Pillow's readers raise on damaged files, beside OSError.
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
)


def read_picture(path: Path, size: int, background: str = "black") -> NDArray[np.uint8]:
    """uint8 [3, size, size]; raises one of `DAMAGED` if the file cannot be read."""
    with Image.open(path, formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, at most {MAX_PIXELS:,} are read")
        image.draft(None, (2 * size, 2 * size))  # lets a JPEG decode at a fraction of its size
        upright = ImageOps.exif_transpose(image)
        square = _rgb(upright, image.format, background).resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(square).transpose(2, 0, 1)


def reason(error: BaseException) -> str:
    """Why an image could not be read, in a few words."""
    if isinstance(error, Image.DecompressionBombError):
        return f"more than the {MAX_PIXELS:,} pixels that are read"
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known kind"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # without the path, which is named beside it
    if isinstance(error, MemoryError):
        return "it asks for more memory than there is"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _rgb(image: Image.Image, kind: str | None, background: str) -> Image.Image:
    if image.mode.startswith("I;16") or (image.mode == "I" and kind == "PNG"):  # older Pillow: a 16-bit PNG is "I"
        return _from_16_bit(np.asarray(image)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("32 bits a pixel have no agreed range; save it with 8 or 16")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        coloured = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", coloured.size, background), coloured).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(pixels: NDArray[np.generic]) -> Image.Image:
    """0..65535 to 0..255, rounded: 65535 / 255 is 257."""
    return Image.fromarray(((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8))
