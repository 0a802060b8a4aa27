"""Draws results as charts: benchmarks/results/NAME.svg, with bars for a benchmark's main figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from benchmarks.harness.record import Figure, Record

COLOURS = ("#3b6ea8", "#d9822b", "#4f9d69", "#8c5fa8", "#b04a4a", "#7a7a7a")
COLOURS += ("#c2a33c", "#3fa7a7", "#d36fa5", "#5b5b5b", "#8a5a2b")
SPREAD = 30  # largest over smallest bar from which on an axis is logarithmic


@attrs.frozen
class Chart:
    """Selects the figures that become bars, by unit and name.

    The pattern's groups: `row` labels a bar, `series` selects its colour, and `panel` its chart.
    """

    pattern: str
    unit: str
    title: str


CHARTS: dict[str, tuple[Chart, ...]] = {
    "quickstart": (Chart(r"(?P<row>seed \d+): exact match (?P<series>before|after)", "%", "exact match, %"),),
    "rollout": (
        Chart(
            r"(?P<panel>[^:]+): (?P<row>ours|BatchGenerator, .+|finished .+|equal|ragged)",
            "tokens/s",
            "tokens a second",
        ),
    ),
    "real_quant": (
        Chart(r"rates: (?P<row>[^:]+): tokens/s at (?P<series>batch \d+)", "tokens/s", "tokens a second"),
        Chart(r"rates: (?P<row>[^:]+): (?P<series>weights|peak)", "MB", "memory, MB"),
    ),
    "mac": (
        Chart(r"(?P<row>.+): sampling", "tokens/s", "sampled tokens a second"),
        Chart(r"(?P<row>.+): steps", "steps/s", "steps a second"),
        Chart(r"(?P<row>.+): (?P<series>measured peak|predicted)", "MB", "peak, MB"),
    ),
    "learner": (
        Chart(r"(?P<panel>.+): time, (?P<row>.+)", "s", "seconds"),
        Chart(r"(?P<panel>.+): peak, (?P<row>.+)", "MB", "peak, MB"),
    ),
    "peers": (
        Chart(r"(?P<row>\w+: (step|rollout|the rest)), (?P<series>.+)", "s", "seconds"),
        Chart(r"(?P<row>\w+: peak of its arrays), (?P<series>.+)", "MB", "peak, MB"),
    ),
}


@attrs.frozen
class Panel:
    """One set of axes."""

    title: str
    bars: dict[tuple[str, str], Figure]  # (row, series) -> figure

    @property
    def rows(self) -> list[str]:
        """The labels, in the record's order."""
        return list(dict.fromkeys(row for row, _ in self.bars))

    @property
    def series(self) -> list[str]:
        """The names of the colours."""
        return list(dict.fromkeys(series for _, series in self.bars))


def panels(records: Mapping[str, Record]) -> list[Panel]:
    """The panels of a result, one backend after another; empty if no figure belongs to a chart."""
    return [panel for backend in sorted(records) for panel in _panels(backend, records[backend])]


def _panels(backend: str, record: Record) -> Iterator[Panel]:
    for chart in CHARTS.get(record.name, ()):
        found: dict[str, dict[tuple[str, str], Figure]] = {}
        for figure in record.figures:
            match = re.fullmatch(chart.pattern, figure.name)
            if match and figure.unit == chart.unit:
                groups = match.groupdict()
                bars = found.setdefault(groups.get("panel") or "", {})
                bars[groups["row"], groups.get("series") or ""] = figure
        for name, bars in found.items():
            title = ", ".join(part for part in (backend, name, chart.title) if part)
            yield Panel(title, bars)


def draw(records: Mapping[str, Record], path: Path) -> bool:
    """Writes the bars to `path` in the format of its suffix; returns whether there was anything to
    draw.

    Raises:
        ImportError: matplotlib, of the extra `bench`, is not installed.
    """
    shown = panels(records)
    heights = [0.7 + 0.24 * len(panel.bars) + 0.12 * len(panel.rows) for panel in shown]
    with picture(path, heights, columns=1, width=8) as axes:
        for axis, panel in zip(axes, shown, strict=True):
            _bars(axis, panel)
    return bool(shown)


@contextmanager
def picture(path: Path, heights: Sequence[float], *, columns: int, width: float) -> Iterator[list[Any]]:
    """Axes in a grid, with a height in inches for each row; without any, no file is written.

    Raises:
        ImportError: matplotlib, of the extra `bench`, is not installed.
    """
    if not heights:
        yield []
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    # The same result gives the same file; text stays text.
    style: Any = {"svg.hashsalt": "grpo_fn", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 10}
    size = (width, sum(heights))
    with mpl.rc_context(style):
        figure, axes = plt.subplots(
            len(heights), columns, figsize=size, height_ratios=heights, squeeze=False, layout="constrained"
        )
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
        yield list(axes.flat)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _bars(axis: Any, panel: Panel) -> None:
    """Horizontal bars with their values, the first row on top, and a tick at each target."""
    labels, place = [], 0.0
    for row in panel.rows:
        begun = place
        for number, series in enumerate(panel.series):
            figure = panel.bars.get((row, series))
            if figure is None:
                continue
            axis.barh(place, figure.value, height=0.85, color=COLOURS[number % len(COLOURS)])
            axis.annotate(
                f" {_short(figure.value)}",
                (figure.value, place),
                va="center",
                fontsize=8,
                annotation_clip=False,
            )
            for target in (figure.at_most, figure.at_least):
                if target is not None:
                    axis.plot([target, target], [place - 0.5, place + 0.5], color="black", linewidth=1.5)
            place += 1
        labels.append(((begun + place - 1) / 2, row))
        place += 0.5
    axis.set_yticks([at for at, _ in labels], [label for _, label in labels])
    axis.set_ylim(place - 0.4, -0.6)  # the first row on top
    axis.set_title(panel.title, loc="left")
    values = [figure.value for figure in panel.bars.values()]
    if min(values) > 0 and max(values) / min(values) > SPREAD:
        axis.set_xscale("log")
    axis.margins(x=0.12)
    if any(panel.series):
        patches = [axis.barh(0, 0, color=COLOURS[n % len(COLOURS)]) for n in range(len(panel.series))]
        # Above the axes, beside the title: nothing lies under it there.
        place_it = {"loc": "lower right", "bbox_to_anchor": (1, 0.98), "ncols": len(panel.series)}
        axis.legend(patches, panel.series, fontsize=8, frameon=False, **place_it)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
