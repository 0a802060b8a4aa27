"""A benchmark's result: figures with their targets, as JSON and as Markdown tables."""

from __future__ import annotations

import io
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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
EVIDENCE = RESULTS / "evidence"
Curve = tuple[tuple[float, float], ...]  # points (x, y)
VERSIONS = ("python", "mlx", "mlx-lm", "grpo_fn", "trl", "transformers", "torch")
RATES = (  # key, words, scale, digits, unit
    ("matmul", "float32 matmul", 1e9, 0, "GFLOP/s"),
    ("matmul_bf16", "bfloat16 matmul", 1e9, 0, "GFLOP/s"),
    ("exp", "exp", 1e6, 0, "M/s"),
    ("copy", "copy", 1e9, 1, "GB/s"),
    ("read", "read", 1e9, 1, "GB/s"),
)


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return tuple((x, y) for x, y in points)


@attrs.frozen
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
    curve: Curve = attrs.field(default=(), converter=_curve)  # (update, value) at several updates

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is none."""
        if self.at_most is None and self.at_least is None:
            return None
        below = self.at_most is None or self.value <= self.at_most
        return below and (self.at_least is None or self.value >= self.at_least)

    @property
    def part(self) -> str:
        """The first two parts of the name, such as "CASE: seed 0", which are replaced together."""
        return ": ".join(self.name.split(": ")[:2])

    def unjudged(self) -> Figure:
        """The figure without its targets."""
        return attrs.evolve(self, at_most=None, at_least=None)


def sample_figure(name: str, samples: Iterable[float], unit: str = "", **more: Any) -> Figure:
    """The median of samples with their range; `more` may contain a different `value`."""
    values = list(samples)
    more = {"value": statistics.median(values), "low": min(values), "high": max(values), **more}
    return Figure(name, unit=unit, samples=len(values), **more)


def time_figure(name: str, timing: Timing, unit: str = "s", **more: Any) -> Figure:
    """A timing in "s" or "ms"; `predicted` and targets in that unit."""
    scale = {"s": 1.0, "ms": 1e3}[unit]
    return sample_figure(name, [scale * each for each in timing.samples], unit, **more)


def rate_figure(name: str, tokens: int, timing: Timing, **more: Any) -> Figure:
    """Tokens per second of a call that samples them."""
    rates = [tokens / seconds for seconds in timing.samples]
    return sample_figure(name, rates, "tokens/s", **more)


def ratio_figure(name: str, ratio: Ratio, **more: Any) -> Figure:
    """The ratio of two timings' medians, to which a target applies, with the rounds' ratios."""
    return sample_figure(name, ratio.pairs, "x", value=ratio.of_medians, paired=ratio.paired, **more)


def today() -> str:
    """The date."""
    return datetime.now(UTC).date().isoformat()


@attrs.frozen(kw_only=True)
class Record:
    """One run of a benchmark.

    Raises:
        ValueError: two figures share a name, or one is not finite.
    """

    name: str
    date: str = attrs.field(factory=today)
    quick: bool = False
    settings: Mapping[str, str] = attrs.field(factory=dict)  # options that change the work
    machine: Mapping[str, Any]
    rates: Mapping[str, float] = attrs.field(factory=dict)
    figures: tuple[Figure, ...] = attrs.field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        names = [figure.name for figure in self.figures]
        if len(set(names)) < len(names):
            raise ValueError(f"{self.name}: two figures share a name: {sorted(names)}")
        broken = [figure.name for figure in self.figures if not math.isfinite(figure.value)]
        if broken:
            raise ValueError(f"{self.name}: not finite: {', '.join(broken)}")

    def missed(self) -> list[Figure]:
        """The figures that miss their targets."""
        return [figure for figure in self.figures if figure.met is False]


def load_records(path: Path) -> dict[str, Record]:
    """The records of a result file by backend; {} if there is no file.

    Raises:
        UserError: the file is not a result file.
    """
    if not path.is_file():
        return {}
    try:
        return {
            backend: Record(**{**raw, "figures": [Figure(**figure) for figure in raw["figures"]]})
            for backend, raw in json.loads(path.read_text()).items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a result of a benchmark ({error}); move it away") from error


def load_results(results: Path, name: str) -> dict[str, Record]:
    """A benchmark's records by backend in a folder of results. For Metal, the newest record counts,
    including those that users sent (metal/MACHINE/NAME.json).

    Raises:
        UserError: a file is not a result file.
    """
    records = load_records(results / f"{name}.json")
    sent = [load_records(file) for file in sorted((results / "metal").glob(f"*/{name}.json"))]
    found = [each["metal"] for each in (*sent, records) if "metal" in each]
    found = [record for record in found if not record.quick]
    return records | ({"metal": max(found, key=lambda record: record.date)} if found else {})


def save_record(
    folder: Path,
    backend: str,
    record: Record,
    *,
    parts: Iterable[str] | None = None,
    arranged: Callable[[Sequence[Figure]], Sequence[Figure]] = tuple,
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
        new = {figure.name for figure in record.figures}
        gone = tuple(f"{part}: " for part in parts)
        kept = [f for f in last.figures if f.name not in new and not f.name.startswith(gone)]
        if last.date != record.date:
            kept = [attrs.evolve(figure, date=figure.date or last.date) for figure in kept]
        record = attrs.evolve(record, figures=(*kept, *record.figures))
    record = attrs.evolve(record, figures=tuple(arranged(record.figures)))
    records[backend] = record
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(_spelled(records))
    return last, record


def _spelled(records: Mapping[str, Record]) -> str:
    """The records as JSON with each curve on one line, without empty dates and curves."""

    def is_kept(field: Any, value: Any) -> bool:
        return bool(value) or field.name not in ("date", "curve")

    plain = {name: attrs.asdict(records[name], filter=is_kept) for name in sorted(records)}
    text = json.dumps(plain, indent=1, allow_nan=False) + "\n"
    return re.sub(
        r'"curve": (\[[^"{}]*\])', lambda found: f'"curve": {json.dumps(json.loads(found[1]))}', text
    )


def alike(one: Record, other: Record) -> bool:
    """Whether both were measured in the same way, so that their figures can be compared."""
    return (one.quick, one.settings) == (other.quick, other.settings)


def table(record: Record, last: Record | None = None) -> str:
    """The figures as a Markdown table, with the change from `last` if it was measured in the same
    way.
    """
    comparable = last is not None and alike(last, record)
    before = {figure.name: figure for figure in last.figures} if comparable and last else {}
    titles = ["figure", "measured", "range", "floor", "target", "met"]
    rows = []
    for figure in record.figures:
        floor = "" if figure.predicted is None else spell(figure.predicted, figure.unit)
        verdict = {True: "PASS", False: "MISS", None: ""}[figure.met]
        measured = spell(figure.value, figure.unit)
        row = [figure.name, measured, _span(figure), floor, _target(figure), verdict]
        rows.append([*row, _change(figure, before.get(figure.name))] if before else row)
    return markdown([*titles, "change"] if before else titles, rows)


def grid(record: Record) -> str:
    """Figures named "MODEL: ROW: COLUMN" as a table for each model, and names without a row as a
    single table.
    """
    models: dict[str, dict[str, dict[str, Figure]]] = {}
    for figure in record.figures:
        model, *row, column = figure.name.split(": ")
        models.setdefault(model, {}).setdefault(": ".join(row) or "all", {})[column] = figure
    return "\n\n".join(cross_table(model, rows) for model, rows in models.items())


def cross_table(title: str, rows: Mapping[str, Mapping[str, Figure]]) -> str:
    """A table with a row for each name and a column for each name of a figure, with its unit."""
    units = {name: figure.unit for row in rows.values() for name, figure in row.items()}
    titles = [name if unit in name.split() else titled(name, unit) for name, unit in units.items()]
    cells = [
        [row, *(spell(found[name].value, "") if name in found else "" for name in units)]
        for row, found in rows.items()
    ]
    return markdown([title, *titles], cells)


def titled(name: str, unit: str) -> str:
    """A column's title."""
    return f"{name}, {unit}" if unit else name


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    lines = Table(*titles, box=MARKDOWN)
    for row in rows:
        lines.add_row(*row)
    stream = io.StringIO()
    Console(file=stream, width=1000, color_system=None).print(lines, markup=False)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def surroundings(backend: str, record: Record) -> str:
    """Machine, versions and rates in one line."""
    found, speed = record.machine, record.rates
    words = [f"{found['cpu']} ({found['cores']} cores, {found['memory_gb']:.0f} GB)"]
    words.append(found["system"])
    if backend == "cpu":
        words.append(f"{found['blas']} with threads: {found['blas_threads']}")
    else:
        words.insert(0, found["device"])
    words.append(f"load {found['load']:g} at the start")
    words += [f"{name} {found[name]}" for name in VERSIONS if name in found]
    rates = [
        f"{title} {speed[name] / scale:,.{digits}f} {unit}"
        for name, title, scale, digits, unit in RATES
        if name in speed
    ]
    words += [", ".join(rates)] if rates else []
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
        ends = f"{spell(figure.low, '')} – {spell(figure.high, '')}"
        parts.append(f"{ends} (n = {figure.samples})")
    return "; ".join(parts)


def _target(figure: Figure) -> str:
    bounds = [("<=", figure.at_most), (">=", figure.at_least)]
    return ", ".join(f"{sign} {spell(bound, figure.unit)}" for sign, bound in bounds if bound is not None)
