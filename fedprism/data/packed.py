"""Two compact .npz formats of benchmark images.

*Mosaic*: for each split `train` and `test`, `<split>_mosaic` contains the bytes of one WebP or JPEG picture in which
all images are tiled row by row; `tile` is (height, width), `<split>_y` are the labels in tile order. Tiles beyond the
number of labels are unused.

*JPEG*: `jpeg` contains one JPEG file per image, concatenated; image i is `jpeg[offsets[i]:offsets[i + 1]]`. Further
arrays (`domain`, `label`, `domains`, `classes`, `path`) describe the images. All names may have a prefix.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.WebPImagePlugin import WebPImageFile

from fedprism.data.parts import Pixels, RawSplit, checked, damaged, reading
from fedprism.data.pictures import check_pixels
from fedprism.files import open_regular

SMALL_ARRAY = 128 << 20  # bytes; a larger array must not be much larger than its file: pictures cannot be packed again
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
MOSAIC_PIXELS = 160_000_000  # maximum size of a mosaic; 60,000 images of 32 x 32 have 61 million pixels


def mosaic(path: Path, split: str, classes: int, also: Sequence[tuple[str, int]] = ()) -> RawSplit:
    """One split of a mosaic; `also` lists further labels (`coarse`) and their numbers of values."""
    with reading(path):
        columns = {}
        for key, name, count in [("labels", "y", classes), *((name, name, count) for name, count in also)]:
            columns[key] = checked(path, f"{split}_{name}", _array(path, f"{split}_{name}"), 0, count - 1)
        n = len(columns["labels"])
        if any(values.shape != (n,) for values in columns.values()):
            raise damaged(path, f"its {split} split has columns of different lengths")
    return RawSplit(columns, split == "test", lambda: _tiles(path, split, n))


def _tiles(path: Path, split: str, n: int) -> Iterator[Pixels]:
    """Yield uint8 [m, height, width, 3], one row of the mosaic at a time."""
    with reading(path):
        size = _array(path, "tile")
        if size.shape != (2,) or size.dtype.kind not in "iu" or min(size) < 1:
            raise damaged(path, f"its tile is {size.tolist()}; expected height and width")
        height, width = int(size[0]), int(size[1])
        with _opened(_array(path, f"{split}_mosaic")) as picture:
            across, down = picture.width // width, picture.height // height
            if (across * width, down * height) != picture.size or across * down < n:
                raise damaged(
                    path,
                    f"its {split} mosaic of {picture.width} x {picture.height} pixels does not hold {n} tiles of "
                    f"{width} x {height}",
                )
            for row in range(-(-n // across)):
                band = picture.crop((0, row * height, picture.width, (row + 1) * height))  # decodes all, once
                tiles = np.asarray(band.convert("RGB")).reshape(height, across, width, 3).swapaxes(0, 1)
                yield tiles[: n - row * across]


def _opened(content: NDArray[np.uint8]) -> Image.Image:
    """Open a large mosaic with its format's own class: `Image.open` has a global size limit."""
    data = content.tobytes()
    kind = JpegImageFile if data.startswith(b"\xff\xd8") else WebPImageFile
    picture = kind(io.BytesIO(data))
    if picture.width * picture.height > MOSAIC_PIXELS:
        raise ValueError(f"a mosaic of {picture.width} x {picture.height}, at most {MOSAIC_PIXELS:,} pixels are read")
    return picture


class Jpegs:
    """One JPEG file per image, with labels and names.

    There are `len(jpegs)` images; `jpegs.picture(i, side)` decodes one. `jpegs.column("label", 10)` and
    `jpegs.names("classes")` read the other arrays.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path = path
        self._prefix = prefix
        with reading(path):
            self._jpeg = _array(path, f"{prefix}jpeg")
            self._offsets = offsets = _array(path, f"{prefix}offsets")
        if self._jpeg.dtype != np.uint8 or self._jpeg.ndim != 1:
            raise damaged(path, f"its {prefix}jpeg is {self._jpeg.dtype} {self._jpeg.shape}; expected bytes")
        size = len(self._jpeg)
        if (
            offsets.dtype.kind not in "iu"
            or offsets.ndim != 1
            or len(offsets) < 2
            or offsets[0] < 0
            or offsets[-1] > size
            or (offsets[1:] <= offsets[:-1]).any()
        ):
            raise damaged(path, f"its {prefix}offsets do not cut {prefix}jpeg ({size} bytes) into files")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def picture(self, index: int, side: int) -> Pixels:
        """uint8 [3, side, side]: one image, resized to a square (bilinear)."""
        start, end = self._offsets[index : index + 2]
        with reading(self.path), Image.open(io.BytesIO(self._jpeg[start:end].tobytes()), formats=["JPEG"]) as file:
            check_pixels(file)
            image = file.convert("RGB")
            if image.size != (side, side):
                image = image.resize((side, side), Image.Resampling.BILINEAR)
            return np.asarray(image).transpose(2, 0, 1)

    def column(self, name: str, count: int) -> NDArray[np.int64]:
        """One number per image, from 0 to `count` - 1: `label`, `domain`, `y`."""
        with reading(self.path):
            values = _array(self.path, self._prefix + name)
        if values.shape != (len(self),):
            raise damaged(self.path, f"its {self._prefix}{name} has shape {values.shape}; expected ({len(self)},)")
        return checked(self.path, self._prefix + name, values, 0, count - 1)

    def names(self, name: str, count: int | None = None) -> tuple[str, ...]:
        """Strings, `count` of them: `classes`, `domains` (of the whole file), or `path` (with the prefix)."""
        with reading(self.path):
            texts = _array(self.path, name)
        if texts.dtype.kind != "U" or texts.ndim != 1 or len(texts) != (len(texts) if count is None else count):
            wanted = f"{'a row of' if count is None else count} texts"
            raise damaged(self.path, f"its {name} is {texts.dtype} of shape {texts.shape}; expected {wanted}")
        return tuple(str(text) for text in texts)


def _array(path: Path, name: str) -> NDArray[Any]:
    """One array, read-only. Neither the size that the file claims nor that of its header is believed."""
    with open_regular(path) as file, zipfile.ZipFile(file) as packed:
        try:
            info = packed.getinfo(f"{name}.npy")
        except KeyError:
            raise damaged(path, f"it has no array {name!r}") from None
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # Python unpacks others unbounded
            raise damaged(path, f"its {name} is packed in another way than deflate")
        most = max(SMALL_ARRAY, 2 * path.stat().st_size)
        if info.file_size > most:
            raise damaged(path, f"its {name} has {info.file_size:,} bytes; at most {most:,} are read")
        with packed.open(info) as member:
            content = member.read(info.file_size)
    header = io.BytesIO(content)
    version = np.lib.format.read_magic(header)
    if version not in _HEADERS:
        raise damaged(path, f"its {name} has version {version} of numpy's format; expected 1.0 or 2.0")
    shape, by_column, dtype = _HEADERS[version](header)
    if dtype.hasobject:
        raise damaged(path, f"its {name} holds Python objects, which are not read")
    start = header.tell()
    if math.prod(shape) * dtype.itemsize != len(content) - start:
        raise damaged(path, f"its {name} of {dtype} and shape {shape} has {len(content) - start:,} bytes")
    return np.ndarray(shape, dtype, content, start, order="F" if by_column else "C")
