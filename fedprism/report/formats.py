"""One grid of texts, written as plain text, Markdown, LaTeX, HTML or for a terminal. table.py fills it."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from io import StringIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from fedprism.errors import escaped

_FORMULA = tuple("=+-@＝＋－＠")  # some spreadsheets take the wide ones, too
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "−": "$-$",
    "–": "--",
}


@dataclass(frozen=True)
class Entry:
    """One cell."""

    text: str
    best: bool = False
    good: bool | None = None  # better or worse than training alone; None: neither


@dataclass(frozen=True)
class Grid:
    """A header, rows, and notes under them. The first column is text, the others are numbers.

    Every text is one line without control characters: in no format does a name end a row or hide another one.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rows = tuple(tuple(replace(entry, text=escaped(entry.text)) for entry in row) for row in self.rows)
        texts = {"header": tuple(map(escaped, self.header)), "notes": tuple(map(escaped, self.notes))}
        for name, value in {**texts, "rows": rows}.items():
            object.__setattr__(self, name, value)

    def __rich__(self) -> Fitting:
        return Fitting((self,))

    def __str__(self) -> str:
        return text(self)


def terminal(grid: Grid, stars: bool) -> RichTable:
    """The rows for rich; `stars` marks the best with a star where bold cannot be seen."""
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold")
    for place, name in enumerate(grid.header):
        table.add_column(Text(name), justify="right" if place else "left", no_wrap=True)
    room = " " if stars and any(entry.best for row in grid.rows for entry in row) else ""  # aligns the digits
    for row in grid.rows:
        texts = [Text(row[0].text)]
        for entry in row[1:]:
            mark = ("*" if entry.best else room) if stars else ""
            colour = {True: "green", False: "red", None: ""}[entry.good]
            texts.append(Text(entry.text + mark, style=f"bold {colour}".strip() if entry.best else colour))
        table.add_row(*texts)
    return table


@dataclass(frozen=True)
class Fitting:
    """The first of several grids, widest first, that fits the terminal, with its notes under it."""

    grids: tuple[Grid, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stars = console.color_system is None
        for grid in self.grids:
            table = terminal(grid, stars)
            width = Measurement.get(console, options.update(width=10_000), table).maximum
            if width <= options.max_width or grid is self.grids[-1]:
                break
        note = "* best of its column" if stars and any(e.best for row in grid.rows for e in row) else ""
        notes = [Text(text, style="dim") for text in (*grid.notes, note) if text]
        yield Group(table, *notes)


def text(grid: Grid) -> str:
    """Plain text: as on a terminal without colours, as wide as it needs to be."""
    table = terminal(grid, stars=True)
    probe = Console(file=StringIO(), color_system=None, width=10_000)
    width = max(80, Measurement.get(probe, probe.options, table).maximum)
    out = StringIO()
    Console(file=out, color_system=None, width=width, legacy_windows=False).print(Fitting((grid,)))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def markdown(grid: Grid) -> str:
    """A Markdown table, the best in bold."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def cell(entry: Entry) -> str:
        shown = re.sub(r"([\\`*_|<>\[\]])", r"\\\1", entry.text)
        return f"**{shown}**" if entry.best else shown

    lines = [line(cell(Entry(name)) for name in grid.header)]
    lines.append(line(["---", *["---:"] * (len(grid.header) - 1)]))
    lines += [line(map(cell, row)) for row in grid.rows]
    return "\n".join([*lines, "", *_paragraphs(cell(Entry(note)) for note in grid.notes)]) + "\n"


def latex(grid: Grid) -> str:
    """A LaTeX table in the style of booktabs, the best in bold."""

    def cell(entry: Entry) -> str:
        shown = _latex(entry.text)
        return rf"\textbf{{{shown}}}" if entry.best else shown

    def line(cells: Iterable[str]) -> str:
        return "    " + " & ".join(cells) + r" \\"

    notes = " ".join(_latex(note) for note in grid.notes)
    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \begin{{tabular}}{{l{'r' * (len(grid.header) - 1)}}}",
            r"    \toprule",
            line(map(_latex, grid.header)),
            r"    \midrule",
            *(line(map(cell, row)) for row in grid.rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            rf"  \caption{{{notes}}}",
            r"\end{table}",
            "",
        ]
    )


def html(grid: Grid) -> str:
    """An HTML table with its notes, without styles."""
    lines = ['<div class="wide"><table>', "<thead><tr>"]
    lines += [f'<th scope="col">{escape(name)}</th>' for name in grid.header]
    lines.append("</tr></thead>\n<tbody>")
    for row in grid.rows:
        cells = [f'<th scope="row">{escape(row[0].text)}</th>']
        for entry in row[1:]:
            kind = {True: ' class="up"', False: ' class="down"', None: ""}[entry.good]
            value, plus_minus, deviation = escape(entry.text).partition(" ± ")
            shown = f"{value} <small>± {deviation}</small>" if plus_minus else value
            cells.append(f"<td{kind}>{f'<strong>{shown}</strong>' if entry.best else shown}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines.append("</tbody></table></div>")
    lines += [f'<p class="note">{escape(note)}</p>' for note in grid.notes]
    return "\n".join(lines)


def csv_lines(rows: Iterable[Sequence[str]]) -> str:
    """Rows as CSV. A spreadsheet would run a text that begins like a formula: such a text gets an apostrophe in front.

    >>> print(csv_lines([["=1+1", "-x", "-3.5", "a,b"]]), end="")
    '=1+1,'-x,-3.5,"a,b"
    """
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerows([_csv_cell(escaped(text)) for text in row] for row in rows)
    return out.getvalue()


def _csv_cell(text: str) -> str:
    if not text.lstrip().startswith(_FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text  # a number with its sign


def _latex(shown: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in shown)


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for place, paragraph in enumerate(texts):
        if place:
            yield ""
        yield paragraph
