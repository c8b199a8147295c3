"""One self-contained page about some runs: table, curves, gains, diagnostics, pictures, traffic, configuration."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fedprism import atomic
from fedprism import config as configuration
from fedprism.config import LOCAL, SPLITS
from fedprism.errors import escaped_lines
from fedprism.records import Protocol, RunRecord
from fedprism.report import canvas, figures, formats
from fedprism.report.models import models
from fedprism.report.table import GAIN, MANY, Table, grouped, table
from fedprism.report.transforms import transforms

Pictures = Mapping[str, bytes] | str  # client -> images side by side as PNG; or a sentence that says why there are none


def write_page(
    path: str | Path,
    records: Sequence[RunRecord],
    protocol: Protocol | str | None = None,
    pictures: Pictures = "",
) -> Path:
    """Write the page, all of it or nothing."""
    path = Path(path)
    with atomic.reporting(str(path), "The runs are safe; make room and use `fedprism show --report` on them."):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, page(records, protocol, pictures).encode())
    return path


def page(records: Sequence[RunRecord], protocol: Protocol | str | None = None, pictures: Pictures = "") -> str:
    """The page as HTML. `pictures` show what each client sees; without them that section is left out."""
    result = table(records, protocol)
    first = records[0]
    title = f"{first.config.data.name}, {len(result.clients)} clients"
    sections = [
        ("Result", _result(result)),
        ("Accuracy over rounds", _curves(records, result.protocol)),
        ("Gain of each client over training alone", _gains(result)),
        ("Inside each method", _diagnostics(records)),
        ("What each client trains", _models(records)),
        ("What each client sees", _pictures(first, pictures)),
        ("What transforms did to uploads", _transforms(records)),
        ("Traffic and time", _traffic(records)),
        ("What was run", _settings(records)),
    ]
    body = "\n".join(f"<section>\n<h2>{escape(name)}</h2>\n{inner}\n</section>" for name, inner in sections if inner)
    return escaped_lines(
        _PAGE.format(
            title=escape(title), lead=escape(_lead(result)), body=body, style=_style(), version=escape(_version(first))
        )
    )


# --- sections --------------------------------------------------------------------------------------------------------


def _lead(result: Table) -> str:
    """The result in a sentence."""
    whole = [row for row in result.rows if "mean" in row.figures and not row.mark]
    if len(whole) < 2:
        path = result.protocol.path
        return f"The path {path} by itself, every client." if path else "One method, every client."
    top = max(whole, key=lambda row: row.figures["mean"].mean)
    words = f"{top.label} has the best mean: {100 * top.figures['mean'].mean:.1f} %"
    if top.method == LOCAL:
        return f"{words}. Nothing gained over training alone here."
    if GAIN not in top.figures:
        return f"{words}."
    better = sum(gain.mean > 0 for gain in top.gains.values())
    points = f"{100 * top.figures[GAIN].mean:.1f} points above training alone"
    return f"{words}, {points}; {better} of {len(top.gains)} clients gain."


def _result(result: Table) -> str:
    return result.html()


def _curves(records: Sequence[RunRecord], protocol: Protocol) -> str:
    if not canvas.available():
        return '<p>Figures need matplotlib: <code>pip install "fedprism[report]"</code>, then make this page again.</p>'
    seeds = max(len(group) for group in grouped(records).values())
    over = {"clients": "mean over clients", "samples": "mean over all test images"}[protocol.mean]
    moment = protocol.moment or "at each method’s own moment"
    band = "; the band is one standard deviation over seeds" if seeds > 1 else ""
    crowd = figures.crowded(figures.curves(records, protocol))
    beside = " Dashed: training alone; grey: the method that ends best." if crowd else ""
    part = f" of the path {protocol.path} by itself" if protocol.path else ""
    note = f"Test accuracy{part}, {over}, {moment}{band}. The number behind a name is that of the last round.{beside}"
    if any(record.config.evaluate.clients == "participants" for record in records):
        note += " A client that was not tested in a round counts with its latest test."
    return f'<figure>{figures.curves_svg(records, protocol)}</figure>\n<p class="note">{escape(note)}</p>'


def _gains(result: Table) -> str:
    drawn = figures.gains_svg(result) if canvas.available() else ""
    if not drawn:
        return ""
    note = "Points above (blue) or below (orange) what the client reaches alone, under the protocol of the table."
    count = max((len(row.gains) for row in result.rows), default=0)
    if (every := figures.every_bar(count)) > 1:
        note += f" Of {count:,} clients in the order of their gain, about every {every}th is drawn."
    return f'<figure>{drawn}</figure>\n<p class="note">{escape(note)}</p>'


def _diagnostics(records: Sequence[RunRecord]) -> str:
    if not canvas.available():
        return ""
    parts = []
    for place, (label, group) in enumerate(grouped(records).items()):
        description = f"What {label} shows of its inside, a panel per value."
        if drawn := figures.diagnostics_svg(group, f"inside-{place}", description):
            name = f"<h3>{escape(label)} <small>{escape(group[0].moment)}</small></h3>"
            meanings = "; ".join(f"<b>{escape(each)}</b>: {escape(text)}" for each, text in group[0].shows.items())
            note = f'\n<p class="note">{meanings}.</p>' if meanings else ""
            parts.append(f"{name}\n<figure>{drawn}</figure>{note}")
    if not parts:
        return ""
    note = (
        "On the test images, at the method’s own moment: the accuracy of each part of the model, mean over clients; "
        "and values that the method shows, a line or a box per client. A box is the middle half of the values with "
        "their median, the thick line 5 to 95 percent of them, the thin line all of them. In training: the mean over a "
        "round."
    )
    if max(len(group) for group in grouped(records).values()) > 1:
        note += " Lines and boxes are means over seeds; the band is one standard deviation over seeds."
    if len(records[0].clients) > MANY:
        note += f" Of {len(records[0].clients)} clients, the first {MANY} have a line or a box."
    return "\n".join([f'<p class="note">{escape(note)}</p>', *parts])


def _models(records: Sequence[RunRecord]) -> str:
    """The clients' architectures where they differ; by method where methods have different ones."""
    shown: dict[str, list[str]] = {}
    for label, group in grouped(records).items():
        grid = models(group[0])
        if grid is not None:
            shown.setdefault(formats.html(grid), []).append(label)
        elif group[0].architectures:
            arch = group[0].architectures[0]
            words = f"{arch.label} for all clients: {arch.parameters:,} parameters, {arch.features} features."
            shown.setdefault(f"<p>{escape(words)}</p>", []).append(label)
    if not any("<table>" in text for text in shown):
        return ""
    note = "Parameters of a client’s model, and the number of features that its body gives to its head."
    parts = [f'<p class="note">{escape(note)}</p>']
    for text, labels in shown.items():
        parts += [f"<h3>{escape(', '.join(labels))}</h3>"] * (len(shown) > 1) + [text]
    return "\n".join(parts)


def _pictures(record: RunRecord, pictures: Pictures) -> str:
    if isinstance(pictures, str):
        return f"<p>{escape(pictures)}</p>" if pictures else ""
    rows = []
    for client, png in pictures.items():
        counts = ", ".join(f"{n} {part}" for n, part in zip(record.samples.get(client, ()), SPLITS, strict=False))
        image = base64.b64encode(png).decode()
        rows.append(
            f'<div class="client"><div><b>{escape(client)}</b><br><small>{counts}</small></div>'
            f'<img alt="images of {escape(client)}" src="data:image/png;base64,{image}"></div>'
        )
    more = len(record.clients) - len(pictures)
    if more > 0:
        rows.append(f'<p class="note">and {more} more clients</p>')
    return "\n".join(rows)


def _transforms(records: Sequence[RunRecord]) -> str:
    """A table for each row of the result whose runs have transforms that record something."""
    grids = {label: transforms(group) for label, group in grouped(records).items()}
    return "\n".join(f"<h3>{escape(label)}</h3>\n{formats.html(grid)}" for label, grid in grids.items() if grid)


def _traffic(records: Sequence[RunRecord]) -> str:
    """Bytes per client and round, and seconds per round."""
    rows = []
    for label, group in grouped(records).items():
        to = [size for record in group for each in record.rounds for size in each.down.values()]
        back = [size for record in group for each in record.rounds for size in each.up.values()]
        seconds = [s for record in group for each in record.rounds[1:] if (s := each.seconds.get("total")) is not None]
        counts = sorted(set(group[0].parameters.values()))
        sizes = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "–"
        rows.append((label, sizes, fmean(to or [0]), fmean(back or [0]), (sum(to) + sum(back)) / len(group), seconds))
    longest = max(max(down, up) for _, _, down, up, _, _ in rows) or 1
    lines = ['<div class="wide"><table class="traffic">']
    head = ["method", "to a client per round", "from a client per round", "all clients, whole run", "seconds per round"]
    head.append("parameters per client")
    lines.append("<thead><tr>" + "".join(f'<th scope="col">{name}</th>' for name in head) + "</tr></thead><tbody>")
    for label, sizes, down, up, total, seconds in rows:
        time = f"{median(seconds):.2f}" if seconds else "–"
        bars = [f"{_bar(size / longest)}{amount(size)}" for size in (down, up)]
        cells = "".join(f"<td>{cell}</td>" for cell in (*bars, amount(total), time, sizes))
        lines.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def _bar(share: float) -> str:
    return f'<span class="bar" style="width:{60 * share:.1f}%"></span> ' if share else ""


def _settings(records: Sequence[RunRecord]) -> str:
    first = records[0]
    train, machine, versions = first.config.train, first.info.get("machine", {}), first.info.get("versions", {})
    archs = dict.fromkeys(arch.label for record in records for arch in record.architectures)
    facts = {
        "methods": ", ".join(grouped(records)),
        "seeds": ", ".join(str(seed) for seed in sorted({record.seed for record in records})),
        "data": f"{first.config.data.name}, {len(first.clients)} clients, {len(first.class_names)} classes",
        "partition": _partition(first.info.get("partition") or configuration.plain(first.config.data.partition)),
        "model": "; ".join(archs) or first.config.model.name,
        "rounds": f"{train.rounds}, {train.epochs} local epochs, batch {train.batch_size}",
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        "machine": ", ".join(f"{name}: {value}" for name, value in machine.items() if value is not None),
        "engine": "; ".join(dict.fromkeys(_engine(record) for record in records)),
        "begun, ended": f"{first.info.get('started')}, {max(str(r.info.get('ended') or '–') for r in records)}",
    }
    for label, group in grouped(records).items():
        reveals = group[0].info.get("reveals")
        about = {**({"others learn": reveals} if reveals else {}), **group[0].decided}
        facts |= {f"{label}: {name}": value for name, value in about.items()}
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    configs = []
    for label, group in grouped(records).items():
        text = escape(configuration.dump(group[0].config))
        note = f" (seed {group[0].seed}; the others differ in nothing else)" if len(group) > 1 else ""
        configs.append(f"<details><summary>configuration of {escape(label)}{note}</summary><pre>{text}</pre></details>")
    return f"<dl>{items}</dl>\n" + "\n".join(configs)


def _engine(record: RunRecord) -> str:
    """The engine of a run and its device."""
    return f"{record.info.get('engine', '–')} on {record.info.get('device', '–')}"


def _partition(settings: Mapping[str, Any]) -> str:
    """A partition with all of its settings.

    >>> _partition({"name": "noise", "clients": 10, "of": None, "sigma": 5.0})
    'noise: clients 10, sigma 5.0'
    """
    words = ", ".join(f"{key} {value}" for key, value in settings.items() if key != "name" and value is not None)
    return f"{settings['name']}: {words}" if words else str(settings["name"])


def amount(size: float) -> str:
    """Bytes with a unit.

    >>> amount(0), amount(999), amount(1_234_567)
    ('0 B', '999 B', '1.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError


def _version(record: RunRecord) -> str:
    return f"fedprism {record.info.get('versions', {}).get('fedprism', '')}".strip()


# --- looks -----------------------------------------------------------------------------------------------------------


def _style() -> str:
    variables = {}
    for theme, (place, series) in {"light": (0, canvas.LIGHT), "dark": (1, canvas.DARK)}.items():
        roles = {f"--{role}": pair[place] for role, pair in canvas.INKS.items()}
        roles |= {f"--series-{i}": colour for i, colour in enumerate(series)}
        variables[theme] = "; ".join(f"{name}: {value}" for name, value in roles.items())
    return _CSS.replace("LIGHT", variables["light"]).replace("DARK", variables["dark"])


_CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --tint: #f4f6f8; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #15191e; --tint: #1e242b; DARK } }
body { background: var(--paper); color: var(--ink); margin: 0;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .2rem; } h3 small { color: var(--muted); font-weight: 400; }
.lead { font-size: 1.1rem; margin: 0; color: var(--muted); }
.note { color: var(--muted); font-size: .88rem; margin: .35rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .42rem .5rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 2px solid var(--grid); font-weight: 600; color: var(--muted); font-size: .9rem; }
tbody th { font-weight: 500; }
td small { color: var(--muted); font-size: .8em; } td.up small, td.down small { color: inherit; }
tbody tr + tr > * { border-top: 1px solid var(--grid); }
tbody tr:hover > * { background: var(--tint); }
.up { color: var(--series-2); } .down { color: var(--series-1); }
.traffic td { min-width: 7rem; }
.traffic td:nth-child(2), .traffic td:nth-child(3) { text-align: left; }
.traffic th:nth-child(2), .traffic th:nth-child(3) { text-align: left; }
.bar { display: inline-block; height: .7em; background: var(--series-0); border-radius: 2px; vertical-align: baseline; }
figure { margin: 0; overflow-x: auto; } svg { width: 100%; min-width: 40rem; height: auto; display: block; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
.client { display: flex; align-items: center; gap: 1rem; margin: .45rem 0; }
.client > div { flex: 0 0 16rem; line-height: 1.25; } .client small { color: var(--muted); }
.client img { max-width: 100%; min-width: 0; height: 3rem; image-rendering: pixelated; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; margin: 0 0 1rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
details { border-top: 1px solid var(--grid); padding: .4rem 0; } summary { cursor: pointer; }
pre { background: var(--tint); padding: .8rem 1rem; overflow-x: auto; font-size: .82rem; border-radius: 6px; }
footer { margin-top: 3rem; color: var(--muted); font-size: .85rem; }
@media (max-width: 40rem) { .client { display: block; } dl { grid-template-columns: 1fr; } dt { margin-top: .4rem; } }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · fedprism</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<p class="lead">{lead}</p>
</header>
{body}
<footer>Made by {version} from the records of these runs.</footer>
</main>
</body>
</html>
"""
