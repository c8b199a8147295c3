"""What all figures share: colours, an empty figure, and ways to write it. Matplotlib comes with the extra `report`.

A figure for the page is an SVG whose colours are CSS variables, so that it follows the page's dark theme. A figure for
a file has the colours of the light theme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedprism import atomic
from fedprism.errors import FedprismError, escaped_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which stay apart for the colour-blind, and lighter ones of the same hues for a dark ground.
LIGHT = ("#0072b2", "#d55e00", "#009e73", "#b0528c", "#b07d00", "#3a9bd5")
DARK = ("#5aaee8", "#f58a4b", "#35c79d", "#e69ac6", "#f0b93f", "#a5daf7")
INKS = {"ink": ("#1c2024", "#e8eaed"), "muted": ("#5f6871", "#a3acb5"), "grid": ("#dfe3e7", "#343b43")}


@dataclass(frozen=True)
class Theme:
    """Colours by role: real ones, or stand-ins that become CSS variables."""

    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]


PLAIN = Theme(INKS["ink"][0], INKS["muted"][0], INKS["grid"][0], LIGHT)
STAND_INS = Theme("#000001", "#000002", "#000003", tuple(f"#00001{i}" for i in range(len(LIGHT))))


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def checked_path(path: str | Path) -> Path:
    """The path of a figure, after a check that it can be drawn and written there."""
    if not available():
        raise FedprismError("figures need matplotlib: pip install 'fedprism[report]'.")
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise FedprismError(f"{path} ends in {path.suffix!r}; a figure is written as .png or .svg.")
    return path


def write_figure(canvas: Any, path: Path) -> Path:
    """Write a figure as PNG or SVG."""
    out = BytesIO()
    canvas.savefig(out, format=path.suffix[1:], dpi=160, facecolor="white", metadata=_undated(path.suffix))
    content = out.getvalue()
    if path.suffix == ".svg":
        content = escaped_lines(content.decode()).encode()  # XML allows no control characters
    atomic.write(path, content)
    return path


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Any]:
    """An empty figure, without pyplot's global state."""
    import matplotlib
    from matplotlib.figure import Figure

    looks: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "fedprism", "font.family": "DejaVu Sans"}
    with matplotlib.rc_context({**looks, "text.parse_math": False}):  # a name may have dollars in it
        yield Figure(figsize=(width, height))


def _undated(suffix: str) -> dict[str, Any]:
    """Metadata without a date: the same records make the same file."""
    return {"Date": None} if suffix == ".svg" else {"Software": None}


def inline_svg(figure: Any, name: str, label: str) -> str:
    """The figure as SVG inside a page: no prologue, no namespaces, unique ids, the page's colours."""
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=_undated(".svg"))
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = re.sub(r"font:\s*([\d.]+)px[^;\"]*", r"font-size: \1px", svg)  # the page's own font
    for role, colour in zip(("ink", "muted", "grid"), (STAND_INS.ink, STAND_INS.muted, STAND_INS.grid), strict=True):
        svg = svg.replace(colour, f"var(--{role})")
    for place, colour in enumerate(STAND_INS.series):
        svg = svg.replace(colour, f"var(--series-{place})")
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    start = f'<svg role="img" aria-label="{label}" viewBox="{box[1]}">'
    return start + svg[svg.index(">") + 1 :]


def plain_axes(axes: Axes, theme: Theme) -> None:
    """Axes with horizontal grid lines and a baseline only."""
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)
    axes.set_facecolor("none")
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9.5, colors=theme.muted)


def shorten(name: str, most: int = 15) -> str:
    """A long name, cut in the middle: names of clients often differ at their ends.

    >>> shorten("hospital-of-saint-mary-07")
    'hospita…mary-07'
    """
    half = most // 2
    return name if len(name) <= most else f"{name[:half]}…{name[-half:]}"
