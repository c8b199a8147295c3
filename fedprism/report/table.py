"""Tables from records: a row per method; columns for clients, mean, worst client and the gain over training alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fedprism.config import LOCAL, plain
from fedprism.errors import RecordError, some, unknown
from fedprism.records import Figure, Gain, Outcome, Protocol, RunRecord, flat, gain, outcome, summarise
from fedprism.records.protocol import figure, paths_of
from fedprism.records.runfile import comparable
from fedprism.report import formats
from fedprism.report.formats import Entry, Fitting, Grid

MANY = 12  # more clients than this have no columns of their own
TOO_MANY = 1000  # more clients than this have none in a CSV either: spreadsheets end at some thousands
SHARES = (5, 25, 50, 75, 95)  # percent of the clients that are below a figure
GAIN = "gain"
MORE = ("spread", "balanced accuracy", "macro F1")  # figures that only the CSV has
BELOW = tuple(f"{share} % of clients below" for share in SHARES)  # likewise, in place of the clients' columns
_APART = ("seed", "run", "method", "evaluate")  # what may differ between runs that are compared
_UPLOADS = ("transforms", "server")  # what training alone does not depend on


@dataclass(frozen=True)
class Row:
    """One method over its seeds. Figures are shares, 0 to 1."""

    label: str
    method: str
    seeds: tuple[int, ...]
    figures: Mapping[str, Figure]  # column -> figure; a column without a figure is left out
    gains: Mapping[str, Figure]  # client -> gain over training alone; empty where that was not run
    mark: str = ""  # † diverged, ‡ not at its end


@dataclass(frozen=True, repr=False)
class Table:
    """Accuracy by method and client under a stated protocol. Print it, or write it as Markdown, LaTeX, CSV or HTML."""

    clients: tuple[str, ...]
    rows: tuple[Row, ...]
    protocol: Protocol
    notes: tuple[str, ...]  # the protocol in words comes first

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns. A client's column has a prefix, so that a client may be called `mean`."""
        return (*(_client(name) for name in self.clients), "mean", "worst", GAIN)

    def best(self, column: str) -> frozenset[str]:
        """The labels of the rows with the highest figure as printed; diverged and unfinished ones do not compete."""
        whole = [row for row in self.rows if column in row.figures and not row.mark]
        shown = {row.label: round(100 * row.figures[column].mean, 1) for row in whole}
        return frozenset(label for label, value in shown.items() if value == max(shown.values()) and len(self.rows) > 1)

    def grid(self, clients: bool | None = None, deviations: Collection[str] | None = None) -> Grid:
        """The cells as texts.

        `clients`: with columns of clients (None: if they are few). `deviations`: the columns with them (None: all).
        """
        few = len(self.clients) <= MANY
        with_clients = few if clients is None else clients
        columns = [c for c in self.columns if with_clients or not c.startswith(_client(""))]
        best = {column: self.best(column) for column in columns}
        rows = []
        for row in self.rows:
            cells = [Entry(row.label + row.mark)]
            for column in columns:
                with_deviation = deviations is None or column in deviations
                cells.append(_entry(row.figures.get(column), column, row.label in best[column], with_deviation))
            rows.append(tuple(cells))
        place = "CSV" if len(self.clients) <= TOO_MANY else "run's metrics.jsonl"
        left_out = f"Columns of {len(self.clients)} clients are left out here; the {place} has them."
        notes = self.notes if with_clients else (*self.notes, left_out)
        header = ("method", *(column.removeprefix(_client("")) for column in columns))
        return Grid(header, tuple(rows), notes)

    def __rich__(self) -> Fitting:
        if len(self.clients) > MANY:
            return Fitting((self.grid(),))
        narrower = [self.grid(deviations=columns) for columns in (("mean", "worst", GAIN), ("mean", GAIN), ("mean",))]
        narrow = "The terminal is too narrow for the columns of the clients."
        without = replace(self.grid(clients=False), notes=(*self.notes, narrow))
        return Fitting((self.grid(), *narrower, without))

    def __str__(self) -> str:
        return formats.text(self.grid())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.html()

    def markdown(self, clients: bool | None = None) -> str:
        return formats.markdown(self.grid(clients))

    def latex(self, clients: bool | None = None) -> str:
        return formats.latex(self.grid(clients))

    def html(self, clients: bool | None = None) -> str:
        return formats.html(self.grid(clients))

    def csv(self) -> str:
        """Every figure in percent with its deviation over seeds; the protocol in a column.

        Every client has a column. Of more than a thousand there are quantiles instead.
        """
        few = len(self.clients) <= TOO_MANY
        kept = self.columns if few else tuple(c for c in self.columns if not c.startswith(_client("")))
        columns = (*kept, *MORE, *(() if few else BELOW))
        header = [name for column in columns for name in (column, f"{column} deviation")]
        lines = [["method", "seeds", "state", *header, "protocol"]]
        for row in self.rows:
            state = {"": "finished", "†": "diverged", "‡": "unfinished"}[row.mark]
            numbers = [text for column in columns for text in _numbers(row.figures.get(column))]
            lines.append([row.label, " ".join(map(str, row.seeds)), state, *numbers, str(self.protocol)])
        return formats.csv_lines(lines)


def table(records: Sequence[RunRecord], protocol: Protocol | str | None = None) -> Table:
    """The table of runs on one federation. Runs that differ only in the seed share a row."""
    if not records:
        raise RecordError("there are no runs to make a table of.")
    if not isinstance(protocol, Protocol):
        protocol = Protocol.parse(protocol) if protocol else Protocol()
    groups = _grouped(records)
    labels = _labels(groups)
    outcomes: dict[str, list[Outcome]] = {}
    problems: dict[str, list[str]] = {}
    errors: list[RecordError] = []
    for key, group in groups.items():
        outcomes[key] = []
        for record in group.values():
            try:
                outcomes[key].append(outcome(record, protocol))
            except RecordError as error:  # one run without a figure must not take the others' table away
                errors.append(error)
                problems.setdefault(f"no figure, because {error}", []).append(_name(labels[key], record))
    reached = [each for group in outcomes.values() for each in group]
    if not reached:
        known = {name for record in records for name in paths_of(record, protocol.moment or record.moment)}
        raise RecordError(unknown("path", protocol.path, known)) if protocol.path and known else errors[0]
    for key, group in groups.items():
        for each in outcomes[key]:
            record = group[each.seed]
            for note in (*each.notes, *_unfinished(record), *_failures(record)):
                problems.setdefault(note, []).append(_name(labels[key], record))
    rows = []
    for key, group in groups.items():
        try:
            better = gain(outcomes[key], _alone(key, groups, outcomes))
        except RecordError as error:
            better = None
            problems.setdefault(f"no gain, because {error}", []).append(labels[key])
        rows.append(_row(labels[key], list(group.values()), outcomes[key], better))
    clients = tuple(dict.fromkeys(name for record in records for name in record.clients))
    notes = [protocol.describe(replace(each, notes=()) for each in reached), *_about_figures(rows)]
    notes += _differences(records)
    notes += [_about_runs(note, names, len(records)) for note, names in problems.items()]
    return Table(clients, tuple(rows), protocol, tuple(notes))


def grouped(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """The runs of each row of the table, by the row's label."""
    groups = _grouped(records)
    labels = _labels(groups)
    return {labels[key]: list(group.values()) for key, group in groups.items()}


# --- which runs belong together --------------------------------------------------------------------------------------


def _grouped(records: Sequence[RunRecord]) -> dict[str, dict[int, RunRecord]]:
    """Runs by their configuration without the seed and `run`; then by seed."""
    groups: dict[str, dict[int, RunRecord]] = {}
    for record in records:
        group = groups.setdefault(_key(record, without=("seed", "run")), {})
        if record.seed in group:
            raise RecordError(
                f"{record.path} and {group[record.seed].path} are the same run twice: {record.method} with seed "
                f"{record.seed}. Name one of them."
            )
        group[record.seed] = record
    return groups


def _labels(groups: Mapping[str, Mapping[int, RunRecord]]) -> dict[str, str]:
    """Each group's method and, where a method occurs more than once, the settings in which its groups differ."""
    first = {key: next(iter(group.values())) for key, group in groups.items()}
    settings_of = {key: flat(json.loads(_key(record, without=("seed", "run")))) for key, record in first.items()}
    labels = {}
    for key, record in first.items():
        same = [settings_of[other] for other, its in first.items() if its.method == record.method]
        values = {path: [each.get(path) for each in same] for path in settings_of[key]}
        odd = {path: mine for path, mine in settings_of[key].items() if len(set(map(str, values[path]))) > 1}
        written = {path.removeprefix("method."): _written(_brief(mine, values[path])) for path, mine in odd.items()}
        settings = ", ".join(f"{path}={text}" for path, text in written.items())
        labels[key] = f"{record.method} ({settings})" if settings else record.method
    return labels


def _brief(value: object, of_all: Sequence[object]) -> object:
    """A list of named things, such as transforms, without the settings that all things of that name have in common.

    >>> four, eight = ([{"name": "quantize", "bits": bits, "bucket": 512}] for bits in (4, 8))
    >>> _brief(four, [four, eight, []])
    [{'name': 'quantize', 'bits': 4}]
    """
    if not isinstance(value, list):
        return value
    named = [each for other in of_all if isinstance(other, list) for each in other if isinstance(each, dict)]

    def differs(thing: Mapping[str, object], setting: str) -> bool:
        return any(each.get(setting) != thing[setting] for each in named if each.get("name") == thing.get("name"))

    return [
        {name: each[name] for name in ("name", *each) if name == "name" or differs(each, name)}
        if isinstance(each, dict) and "name" in each
        else each
        for each in value
    ]


def _written(value: object) -> str:
    """The value of a setting as a user writes it.

    >>> _written(["cpn", "gh"]), _written(True), _written(0.5)
    ('[cpn, gh]', 'true', '0.5')
    >>> _written([{"name": "clip_norm"}, {"name": "quantize", "bits": 4}])
    '[clip_norm, {name: quantize, bits: 4}]'
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        settings = [f"{name}: {_written(inner)}" for name, inner in value.items()]
        return _written(value["name"]) if value.keys() == {"name"} else f"{{{', '.join(settings)}}}"
    return value if isinstance(value, str) else json.dumps(value)


def _alone(
    key: str, groups: Mapping[str, Mapping[int, RunRecord]], outcomes: Mapping[str, list[Outcome]]
) -> list[Outcome]:
    """The runs of training alone that differ only in the method."""
    apart = (*_APART, *_UPLOADS)
    mine = _key(next(iter(groups[key].values())), apart)
    firsts = {other: next(iter(group.values())) for other, group in groups.items()}
    alike = [k for k, record in firsts.items() if record.method == LOCAL and _key(record, apart) == mine]
    return outcomes[alike[0]] if len(alike) == 1 else []


def _key(record: RunRecord, without: Sequence[str]) -> str:
    settings = {name: value for name, value in plain(comparable(record.config)).items() if name not in without}
    return json.dumps(settings, sort_keys=True, default=str)


# --- rows and the notes under them -----------------------------------------------------------------------------------


def _row(label: str, records: Sequence[RunRecord], outcomes: Sequence[Outcome], better: Gain | None) -> Row:
    figures: dict[str, Figure] = {}
    if outcomes:
        summary = summarise(outcomes)
        figures = {_client(name): figure for name, figure in summary.accuracy.items()}
        figures |= {"mean": summary.mean, "worst": summary.worst, "spread": summary.spread}
        if len(summary.accuracy) > MANY:
            ranked = [sorted(each.accuracy.values()) for each in outcomes]
            for name, share in zip(BELOW, SHARES, strict=True):
                figures[name] = figure([run[round((len(run) - 1) * share / 100)] for run in ranked])
        for name, of_clients in {"balanced accuracy": "balanced", "macro F1": "f1"}.items():
            values = [list(getattr(each, of_clients).values()) for each in outcomes]
            if all(values):  # only the best and the last round have counts per class
                figures[name] = figure([sum(run) / len(run) for run in values])
    if better is not None:
        figures[GAIN] = better.mean if records[0].method != LOCAL else Figure(0.0, None)
    mark = "†" if any(record.diverged for record in records) else "‡" if any(map(_unfinished, records)) else ""
    seeds = tuple(sorted(each.seed for each in outcomes))
    return Row(label, records[0].method, seeds, figures, better.clients if better is not None else {}, mark)


def _unfinished(record: RunRecord) -> list[str]:
    """Why this run's figures are not final. The outcome of a diverged run says so itself."""
    if record.status in ("finished", "diverged"):
        return []
    state = "stopped or still running" if record.status == "running" else record.status
    return [f"{state} after round {len(record.rounds) - 1} of {record.config.train.rounds}"]


def _failures(record: RunRecord) -> list[str]:
    """How often clients failed, and who of them for the most frequent reason."""
    failed = [each for entry in record.rounds for each in entry.failed.items()]
    if not failed:
        return []
    asked = sum(len(entry.down) for entry in record.rounds)
    kinds = Counter(_kind(reason) for _, reason in failed)
    most, count = kinds.most_common(1)[0]
    alike = [each for each in failed if _kind(each[1]) == most]
    who = some(client for client, _ in Counter(client for client, _ in alike).most_common())
    often = f"{count} of them " if len(kinds) > 1 else ""
    example = "for example, " if len({reason for _, reason in alike}) > 1 else ""
    return [f"{len(failed)} of {asked} times a client failed in a round ({often}{who}: {example}{alike[0][1]})"]


def _kind(reason: str) -> str:
    """A reason without its numbers.

    >>> _kind("its update has length 2.4e+38: the limit is 1e+03") == _kind("its update has length 7: the limit is 9.1")
    True
    """
    return re.sub(r"\d[\d.e+-]*|\binf\b", "#", reason)


def _differences(records: Sequence[RunRecord]) -> list[str]:
    """The settings beside method and seed in which the runs differ: then they are not strictly comparable."""
    settings = [(record.method, flat(json.loads(_key(record, _APART)))) for record in records]
    values: dict[str, set[str]] = {path: set() for _, each in settings for path in each}
    for method, each in settings:
        for path in values:
            if method != LOCAL or path.partition(".")[0] not in _UPLOADS:
                values[path].add(json.dumps(each.get(path)))
    odd = [path for path, found in values.items() if len(found) > 1]
    return [f"These runs differ in more than their method: {', '.join(odd)}."] if odd else []


def _about_figures(rows: Sequence[Row]) -> list[str]:
    notes = []
    if any(len(row.seeds) > 1 for row in rows):
        seeds = {row.seeds for row in rows if row.seeds}
        over = "; ".join(f"{row.label}: {_listed(row.seeds)}" for row in rows)
        which = f"seeds {_listed(min(seeds))}" if len(seeds) == 1 else f"the seeds of each method ({over})"
        notes.append(f"Mean ± sample standard deviation over {which}.")
    if any(GAIN in row.figures for row in rows if row.method != LOCAL):
        notes.append("Gain: points of the mean above training alone (local) with the same seeds.")
    return notes


def _about_runs(note: str, names: Sequence[str], runs: int) -> str:
    who = "All runs" if len(names) == runs > 1 else ", ".join(names)
    return f"{who}: {note}" + ("" if note.endswith(".") else ".")


def _name(label: str, record: RunRecord) -> str:
    mark = "†" if record.diverged else "‡" if _unfinished(record) else ""
    return f"{mark}{label}, seed {record.seed}"


def _client(name: str) -> str:
    return f"client:{name}"


def _entry(figure: Figure | None, column: str, best: bool, deviation: bool) -> Entry:
    if figure is None:
        return Entry("–")
    is_gain = column == GAIN
    shown = _signed(figure.mean) if is_gain else f"{100 * figure.mean:.1f}"
    if deviation and figure.deviation is not None:
        shown += f" ± {100 * figure.deviation:.1f}"
    points = round(100 * figure.mean, 1)
    return Entry(shown, best, points > 0 if is_gain and points else None)


def _signed(share: float) -> str:
    points = round(100 * share, 1) + 0.0  # no negative zero
    return f"{points:+.1f}".replace("-", "−") if points else "0.0"


def _numbers(figure: Figure | None) -> tuple[str, str]:
    if figure is None:
        return "", ""
    return f"{100 * figure.mean:.4f}", "" if figure.deviation is None else f"{100 * figure.deviation:.4f}"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
