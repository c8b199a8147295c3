"""Make the pictures of the documentation that come from built-in data: `python docs/make_pictures.py`.

The result is committed, so that building the documentation needs neither training nor data.
"""

from __future__ import annotations

from pathlib import Path

import fedprism as fp
from fedprism.federation import contact_sheet

ASSETS = Path(__file__).parent / "assets"


def digits_skew() -> None:
    """A row of images for each of the five styles, as the clients get them."""
    federation = fp.federation("digits-skew", clients=5, seed=0, image_size=32)
    contact_sheet(federation, per_client=10).save(ASSETS / "digits-skew.png", optimize=True)


if __name__ == "__main__":
    ASSETS.mkdir(exist_ok=True)
    digits_skew()
