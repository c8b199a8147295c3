"""Unpack the packed benchmark files in a folder (`$FEDPRISM_DATA`) into one folder of images a site, for `folder:PATH`.

    python experiments/unpack.py office  # unpacked/office/<domain>/<class>/*.jpg
    python experiments/unpack.py digits  # unpacked/digits/<domain>/{train,test}/<digit>/*.png

Two formats are read: one JPEG an image in one array (`office_caltech10.npz`: jpeg, offsets, domain, label, domains,
classes), and all images of a split as tiles of one picture (`digits_<domain>.npz`: train_mosaic, train_y, tile, ...).
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

DIGITS = ("mnist", "mnistm", "svhn", "usps")
Image.MAX_IMAGE_PIXELS = None  # a mosaic of 60,000 digits is meant to be large


def office(source: Path, target: Path) -> None:
    """Every image as the file that it is."""
    with np.load(source / "office_caltech10.npz", allow_pickle=False) as packed:
        data = {name: packed[name] for name in ("jpeg", "offsets", "domain", "label", "domains", "classes")}
    for number, (start, end) in enumerate(zip(data["offsets"][:-1], data["offsets"][1:], strict=True)):
        site, kind = data["domains"][data["domain"][number]], data["classes"][data["label"][number]]
        write(target / str(site) / str(kind) / f"{number:04d}.jpg", data["jpeg"][start:end].tobytes())


def digits(source: Path, target: Path, train: int, test: int) -> None:
    """So many training and test images of each domain, drawn from the parts that the files have."""
    for domain in DIGITS:
        for split, count in (("train", train), ("test", test)):
            for number, (tile, label) in enumerate(tiles(source / f"digits_{domain}.npz", split, count)):
                picture = io.BytesIO()
                Image.fromarray(tile).save(picture, "PNG")
                write(target / domain / split / str(label) / f"{number:05d}.png", picture.getvalue())


def tiles(path: Path, split: str, count: int) -> Iterator[tuple[np.ndarray, int]]:
    """`count` images `[height, width, 3]` of a mosaic with their labels, drawn with seed 0."""
    with np.load(path, allow_pickle=False) as packed:
        high, wide = packed["tile"]
        labels = packed[f"{split}_y"]
        mosaic = np.asarray(Image.open(io.BytesIO(packed[f"{split}_mosaic"].tobytes())).convert("RGB"))
    across = mosaic.shape[1] // wide
    for number in np.random.default_rng(0).permutation(len(labels))[:count]:
        row, column = divmod(int(number), across)
        yield mosaic[row * high : (row + 1) * high, column * wide : (column + 1) * wide], int(labels[number])


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def main() -> None:
    parser = argparse.ArgumentParser(description="Unpack packed benchmark files into one folder of images a site.")
    parser.add_argument("what", choices=["office", "digits"])
    parser.add_argument("--source", type=Path, default=os.environ.get("FEDPRISM_DATA"), help="default: $FEDPRISM_DATA")
    parser.add_argument("--out", type=Path, help="default: unpacked/WHAT")
    parser.add_argument("--train", type=int, default=743, help="training images a domain (digits; the papers take 743)")
    parser.add_argument("--test", type=int, default=2000, help="test images a domain (digits)")
    given = parser.parse_args()
    target = given.out or Path("unpacked") / given.what
    if given.source is None or not Path(given.source).is_dir():
        sys.exit(f"{given.source or 'FEDPRISM_DATA'} is no folder; set FEDPRISM_DATA or --source to the packed files.")
    if target.exists():
        sys.exit(f"{target} exists already; remove it, or choose another folder with --out.")
    if given.what == "office":
        office(given.source, target)
    else:
        digits(given.source, target, given.train, given.test)
    print(f"unpacked to {target}: {', '.join(sorted(site.name for site in target.iterdir()))}")


if __name__ == "__main__":
    main()
