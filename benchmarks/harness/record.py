"""A benchmark's result: figures with their targets, as JSON (next to the previous result) and as a
Markdown table.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from benchmarks.harness.measure import Ratio, Timing
from runners.errors import UserError

RESULTS = Path(__file__).resolve().parents[1] / "results"
Curve = tuple[tuple[float, float], ...]  # points (x, y)
VERSIONS = ("python", "mlx", "mlx-lm", "grpo_fn", "trl", "transformers", "torch")  # those that a record has
RATES = (  # key, words, scale, digits, unit
    ("matmul", "float32 matmul", 1e9, 0, "GFLOP/s"),
    ("matmul_bf16", "bfloat16 matmul", 1e9, 0, "GFLOP/s"),
    ("exp", "exp", 1e6, 0, "M/s"),
    ("copy", "copy", 1e9, 1, "GB/s"),
    ("read", "read", 1e9, 1, "GB/s"),
)


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return tuple((x, y) for x, y in points)


@attrs.frozen(kw_only=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str = ""  # "s", "ms", "MB", "x" (a ratio), "%", "tokens/s", "" (a count)
    low: float | None = None  # of the samples that `value` is the median of
    high: float | None = None
    samples: int = 1
    paired: float | None = None  # of a ratio: the median of the rounds' ratios
    predicted: float | None = None  # the floor that bytes, operations and the machine's rates give
    at_most: float | None = None  # targets
    at_least: float | None = None
    note: str = ""
    date: str = ""  # of the run that measured it, if that is not its record's
    curve: Curve = attrs.field(default=(), converter=_curve)  # of a value that was followed: (update, value)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is none."""
        if self.at_most is None and self.at_least is None:
            return None
        below = self.at_most is None or self.value <= self.at_most
        return below and (self.at_least is None or self.value >= self.at_least)


def time_figure(name: str, timing: Timing, unit: str = "s", **more: Any) -> Figure:
    """A timing as a figure, in "s" or "ms"; `predicted` and targets in that unit."""
    scale = {"s": 1.0, "ms": 1e3}[unit]
    return Figure(
        name=name,
        value=timing.median * scale,
        unit=unit,
        low=timing.low * scale,
        high=timing.high * scale,
        samples=len(timing.samples),
        **more,
    )


def ratio_figure(name: str, ratio: Ratio, unit: str = "x", **more: Any) -> Figure:
    """The ratio of two timings' medians, to which a target applies, with the rounds' ratios; in "x"
    or "%".
    """
    scale = {"x": 1.0, "%": 100.0}[unit]
    return Figure(
        name=name,
        value=scale * ratio.of_medians,
        unit=unit,
        paired=scale * ratio.paired,
        low=scale * min(ratio.pairs),
        high=scale * max(ratio.pairs),
        samples=len(ratio.pairs),
        **more,
    )


Arranged = Callable[[Sequence[Figure]], Sequence[Figure]]


@attrs.frozen
class Measured:
    """An alternative result of a benchmark: figures, and text files to store next to the result."""

    figures: Sequence[Figure]
    files: Mapping[str, str]  # name -> text


@attrs.frozen(kw_only=True)
class Record:
    """One run of a benchmark."""

    name: str
    date: str
    quick: bool
    settings: Mapping[str, str]  # what the command line set that changes the work
    machine: Mapping[str, Any]
    rates: Mapping[str, float]
    figures: tuple[Figure, ...]

    def missed(self) -> list[Figure]:
        """The figures that miss their targets."""
        return [figure for figure in self.figures if figure.met is False]


def make_record(
    name: str,
    figures: Sequence[Figure],
    *,
    quick: bool,
    machine: Mapping[str, Any],
    rates: Mapping[str, float],
    settings: Mapping[str, str] | None = None,
) -> Record:
    """A record of now.

    Raises:
        ValueError: two figures share a name, or one is not finite.
    """
    names = [figure.name for figure in figures]
    if len(set(names)) < len(names):
        raise ValueError(f"{name}: two figures share a name: {sorted(names)}")
    broken = [figure.name for figure in figures if not math.isfinite(figure.value)]
    if broken:
        raise ValueError(f"{name}: not finite: {', '.join(broken)}")
    today = datetime.now(UTC).date().isoformat()
    return Record(
        name=name,
        date=today,
        quick=quick,
        settings=settings or {},
        machine=machine,
        rates=rates,
        figures=tuple(figures),
    )


def load_records(path: Path) -> dict[str, Record]:
    """The records of a result file by backend; {} if there is no file.

    Raises:
        UserError: the file is not a result file.
    """
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text())
        return {
            backend: Record(**{**raw, "figures": tuple(Figure(**figure) for figure in raw["figures"])})
            for backend, raw in stored.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a result of a benchmark ({error}); move it away") from error


def load_results(results: Path, name: str) -> dict[str, Record]:
    """A benchmark's records by backend in a folder of results; for Metal the newest, those that users sent
    (metal/MACHINE/NAME.json) included.

    Raises:
        UserError: a file is not a result file.
    """
    records = load_records(results / f"{name}.json")
    sent = [load_records(file) for file in sorted((results / "metal").glob(f"*/{name}.json"))]
    found = [each["metal"] for each in (*sent, records) if "metal" in each and not each["metal"].quick]
    return records | ({"metal": max(found, key=lambda record: record.date)} if found else {})


def save_record(
    folder: Path,
    backend: str,
    record: Record,
    *,
    parts: Sequence[str] | None = None,
    arranged: Arranged = tuple,
) -> tuple[Record | None, Record]:
    """Writes FOLDER/NAME.json and keeps the records of other backends.

    With `parts`, figures of the last record are kept if it was measured in the same way, except
    those whose names are in `record` or are "PART: ..." of these parts. Machine and rates are then
    the latest run's. `arranged` converts these figures to the record's figures.

    Returns:
        (the record that was there, the one that is there now).
    """
    path = folder / f"{record.name}.json"
    records = load_records(path)
    last = records.get(backend)
    if last is not None and parts is not None and alike(last, record):
        new, gone = {figure.name for figure in record.figures}, tuple(f"{part}: " for part in parts)
        stay = [f for f in last.figures if f.name not in new and not f.name.startswith(gone)]
        if last.date != record.date:
            stay = [attrs.evolve(figure, date=figure.date or last.date) for figure in stay]
        record = attrs.evolve(record, figures=(*stay, *record.figures))
    record = attrs.evolve(record, figures=tuple(arranged(record.figures)))
    records[backend] = record
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(_spelled(records))
    return last, record


def _spelled(records: Mapping[str, Record]) -> str:
    """The records as JSON, with a line for each field or whole curve, and without empty dates or
    curves.
    """
    plain = {name: attrs.asdict(records[name]) for name in sorted(records)}
    curves: list[str] = []
    for record in plain.values():
        for figure in record["figures"]:
            if not figure["date"]:
                del figure["date"]
            points = figure.pop("curve")
            if points:
                figure["curve"] = f"\0{len(curves)}\0"  # no other text has such a character
                curves.append(json.dumps(points, allow_nan=False))
    text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
    return re.sub(r'"\\u0000(\d+)\\u0000"', lambda found: curves[int(found[1])], text)


def alike(one: Record, other: Record) -> bool:
    """Whether both were measured in the same way, so that their figures can be compared."""
    return (one.quick, one.settings) == (other.quick, other.settings)


def table(record: Record, last: Record | None = None) -> str:
    """The figures as a Markdown table, with the change from `last` if it was measured in the same
    way.
    """
    comparable = last is not None and alike(last, record)
    before = {figure.name: figure for figure in last.figures} if comparable and last else {}
    columns = ["figure", "measured", "range", "floor", "target", "met", *(["change"] if before else [])]
    lines = Table(*columns, box=MARKDOWN)
    for figure in record.figures:
        floor = "" if figure.predicted is None else spell(figure.predicted, figure.unit)
        verdict = {True: "PASS", False: "MISS", None: ""}[figure.met]
        row = [figure.name, spell(figure.value, figure.unit), _span(figure), floor, _target(figure), verdict]
        if before:
            row.append(_change(figure, before.get(figure.name)))
        lines.add_row(*row)
    return markdown(lines)


def grid(record: Record) -> str:
    """Figures named "MODEL: ROW: COLUMN" as a Markdown table for each model; names without a row
    form a single table.
    """
    found: dict[str, dict[str, dict[str, Figure]]] = {}
    for figure in record.figures:
        model, *row, column = figure.name.split(": ")
        found.setdefault(model, {}).setdefault(": ".join(row) or "all", {})[column] = figure
    parts = []
    for model, rows in found.items():
        units = {column: figure.unit for row in rows.values() for column, figure in row.items()}
        titles = [name if unit in name.split() else f"{name}, {unit}" for name, unit in units.items()]
        cross = Table(model, *titles, box=MARKDOWN)
        for row, columns in rows.items():
            cells = [spell(columns[name].value, "") if name in columns else "" for name in units]
            cross.add_row(row, *cells)
        parts.append(markdown(cross))
    return "\n\n".join(parts)


def markdown(lines: Table) -> str:
    """A rich table as Markdown."""
    stream = io.StringIO()
    Console(file=stream, width=1000, color_system=None).print(lines, markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def surroundings(backend: str, record: Record) -> str:
    """Machine, versions and rates in one line."""
    found, speed = record.machine, record.rates
    words = [f"{found['cpu']} ({found['cores']} cores, {found['memory_gb']:.0f} GB)", found["system"]]
    if backend == "cpu":
        words.append(f"{found['blas']} with threads: {found['blas_threads']}")
    else:
        words.insert(0, found["device"])
    words += [
        f"load {found['load']:g} at the start",
        *(f"{name} {found[name]}" for name in VERSIONS if name in found),
    ]
    rates = [
        f"{title} {speed[name] / scale:,.{digits}f} {unit}"
        for name, title, scale, digits, unit in RATES
        if name in speed
    ]
    words.append(", ".join(rates))
    words += [f"with {name} = {value}" for name, value in record.settings.items()]
    return "; ".join(words)


def _change(figure: Figure, last: Figure | None) -> str:
    if last is None or last.unit != figure.unit or last.value == 0:
        return "new" if last is None else ""
    return f"{100 * (figure.value / last.value - 1):+.0f} %"


def spell(value: float, unit: str) -> str:
    """A number with about three digits, and its unit."""
    size = abs(value)
    if 0 < size < 1e-3:
        text = f"{value:.1e}"
    elif size >= 100 or value == int(value):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.1f}" if size >= 10 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def _span(figure: Figure) -> str:
    parts = [figure.note] if figure.note else []
    if figure.date:
        parts.append(f"of {figure.date}")
    if figure.paired is not None:
        parts.append(f"paired {spell(figure.paired, '')}")
    if figure.low is not None and figure.high is not None and figure.samples > 1:
        parts.append(f"{spell(figure.low, '')} – {spell(figure.high, '')} (n = {figure.samples})")
    return "; ".join(parts)


def _target(figure: Figure) -> str:
    bounds = [("<=", figure.at_most), (">=", figure.at_least)]
    return ", ".join(f"{sign} {spell(bound, figure.unit)}" for sign, bound in bounds if bound is not None)
