"""Every kind of image file that a site may have."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedprism.data.pictures import DAMAGED, read_picture, reason

RED = (200, 30, 10)


def only_colour(pixels: np.ndarray) -> tuple[int, ...]:
    """The colour of an image that has one."""
    flat = pixels.reshape(3, -1)
    assert (flat.max(1) - flat.min(1) <= 3).all()
    return tuple(int(value) for value in flat[:, 0])


def close(given: tuple[int, ...], expected: tuple[int, ...], by: int = 4) -> bool:
    return all(abs(a - b) <= by for a, b in zip(given, expected, strict=True))


def png_header(path: Path, width: int, height: int) -> Path:
    """A PNG that claims a size and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""))
    return path


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "bmp", "webp", "tif", "tiff"])
def test_the_formats_that_are_promised(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.new("RGB", (40, 30), RED).save(path)
    pixels = read_picture(path, 16)
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == np.uint8
    assert close(only_colour(pixels), RED)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "RGBA", "LA"])
def test_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.tif"
    white = Image.new("RGB", (8, 8), "white").convert(mode)
    if mode == "YCbCr":
        path = path.with_suffix(".jpg")
    white.save(path)
    with Image.open(path) as image:
        assert image.mode in (mode, "RGB")
    assert close(only_colour(read_picture(path, 8)), (255, 255, 255))


def test_cmyk_jpeg_keeps_its_colour(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(path)
    with Image.open(path) as image:
        assert image.mode == "CMYK"
    assert close(only_colour(read_picture(path, 8)), (255, 0, 0), by=6)


def test_transparency_shows_the_background(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.new("RGBA", (8, 8), (*RED, 0)).save(path)
    assert only_colour(read_picture(path, 8)) == (0, 0, 0)
    assert only_colour(read_picture(path, 8, "white")) == (255, 255, 255)
    Image.new("RGBA", (8, 8), (200, 100, 0, 128)).save(path)
    assert close(only_colour(read_picture(path, 8)), (100, 50, 0), by=1)


def test_transparent_palette_and_grey_show_the_background(tmp_path: Path) -> None:
    palette = tmp_path / "p.png"
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, *RED])
    image.save(palette)
    assert only_colour(read_picture(palette, 8)) == RED
    image.save(palette, transparency=1)
    assert only_colour(read_picture(palette, 8)) == (0, 0, 0)
    grey = tmp_path / "la.png"
    Image.new("LA", (8, 8), (250, 0)).save(grey)
    assert only_colour(read_picture(grey, 8)) == (0, 0, 0)
    colour = tmp_path / "rgb.png"
    Image.new("RGB", (8, 8), RED).save(colour, transparency=RED)
    assert only_colour(read_picture(colour, 8)) == (0, 0, 0)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, name: str) -> None:
    values = np.array([[0, 257], [32768, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / name)
    pixels = read_picture(tmp_path / name, 2)
    assert (pixels == np.array([[0, 1], [128, 255]])).all()


def test_sixteen_bits_of_the_other_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    values = np.array([[0, 257], [32768, 65535]], dtype=">u2")
    Image.frombytes("I;16B", (2, 2), values.tobytes()).save(path)
    assert (read_picture(path, 2) == np.array([[0, 1], [128, 255]])).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_images_without_an_agreed_range_are_refused(tmp_path: Path, dtype: type) -> None:
    path = tmp_path / "a.tif"
    Image.fromarray(np.ones((4, 4), dtype=dtype)).save(path)
    with pytest.raises(ValueError, match="no agreed range"):
        read_picture(path, 4)


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_exif_orientation_is_applied(tmp_path: Path, suffix: str) -> None:
    """Orientation 6 says: turn by 90 degrees clockwise. What lies left goes to the top."""
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[:, :16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(pixels).save(path, exif=exif)
    turned = read_picture(path, 32)
    assert turned[:, :14].min() > 240
    assert turned[:, 18:].max() < 15


def test_a_large_jpeg_is_read_in_short_and_looks_the_same(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 1200).astype(np.uint8)
    image = Image.fromarray(np.broadcast_to(ramp, (800, 1200)).copy())
    path = tmp_path / "a.jpg"
    image.save(path, quality=95)
    expected = np.asarray(image.resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(read_picture(path, 16).astype(int) - expected).max() <= 3


@pytest.mark.parametrize(
    ("side", "why"),
    [(9000, "at most 80,000,000 are read"), (20000, "more than the 80,000,000"), (2**31 - 1, "more than")],
)
def test_huge_images_are_refused_before_they_are_decoded(tmp_path: Path, side: int, why: str) -> None:
    with pytest.raises(DAMAGED) as seen:
        read_picture(png_header(tmp_path / "a.png", side, side), 8)
    assert why in reason(seen.value)


def test_of_several_frames_the_first_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    Image.new("RGB", (8, 8), RED).save(path, save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")])
    assert only_colour(read_picture(path, 8)) == RED


def test_a_wrong_suffix_does_not_matter(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), RED).save(tmp_path / "a.bmp")
    (tmp_path / "a.bmp").rename(tmp_path / "a.png")
    assert only_colour(read_picture(tmp_path / "a.png", 8)) == RED


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "webp", "tif"])
def test_damaged_files_raise_what_is_caught(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:10], whole[: len(whole) // 2], b"no image at all", bytes(200)):
        path.write_bytes(damaged)
        with pytest.raises(DAMAGED) as seen:
            read_picture(path, 8)
        assert "\n" not in reason(seen.value)
        assert reason(seen.value)
