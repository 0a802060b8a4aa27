"""Draws results: bars for a benchmark's main figures, and the curves of comparisons over seeds."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from benchmarks.harness.record import Curve, Figure, Record

COLOURS = ("#3b6ea8", "#d9822b", "#4f9d69", "#8c5fa8", "#b04a4a", "#7a7a7a")
COLOURS += ("#c2a33c", "#3fa7a7", "#d36fa5", "#5b5b5b", "#8a5a2b")
SPREAD = 30  # ratio of the largest to the smallest bar from which on an axis is logarithmic
CHARTS: dict[str, tuple[tuple[str, str, str], ...]] = {  # pattern of figures, their unit, title
    "quickstart": ((r"(?P<row>seed \d+): exact match (?P<series>before|after)", "%", "exact match, %"),),
    "rollout": (
        (
            r"(?P<panel>[^:]+): (?P<row>ours|BatchGenerator, .+|finished .+|equal|ragged)",
            "tokens/s",
            "tokens a second",
        ),
    ),
    "real_quant": (
        (r"rates: (?P<row>[^:]+): tokens/s at (?P<series>batch \d+)", "tokens/s", "tokens a second"),
        (r"rates: (?P<row>[^:]+): (?P<series>weights|peak)", "MB", "memory, MB"),
    ),
    "mac": (
        (r"(?P<row>.+): sampling", "tokens/s", "sampled tokens a second"),
        (r"(?P<row>.+): steps", "steps/s", "steps a second"),
        (r"(?P<row>.+): (?P<series>measured peak|predicted)", "MB", "peak, MB"),
    ),
    "learner": (
        (r"(?P<panel>.+): time, (?P<row>.+)", "s", "seconds"),
        (r"(?P<panel>.+): peak, (?P<row>.+)", "MB", "peak, MB"),
    ),
    "peers": (
        (r"(?P<row>\w+: (step|rollout|the rest)), (?P<series>.+)", "s", "seconds"),
        (r"(?P<row>\w+: peak of its arrays), (?P<series>.+)", "MB", "peak, MB"),
    ),
}
"""The pattern's groups: `row` labels a bar, `series` selects its colour, and `panel` its chart."""
CURVES = {  # figures with curves, and the titles of their panels
    "reward, last tenth": "reward",
    "exact match after": "exact match, %",
    "lenient after": "right test problems, %",
}
BELOW = {**dict.fromkeys(("real_model", "staleness"), "seconds of training"), "gsm8k": "minutes"}
PANELS = {  # the parts of a case's name that begin a panel's title, and those that label a line
    "real_model": "(?P<panel>.+), (?P<label>.+)",
    "staleness": "(?P<panel>.+), (?P<label>.+), (?P<correction>.+)",
}
Band = tuple[float, float, float, float]  # x, mean, lowest, highest


@attrs.frozen
class Panel:
    """One set of axes with bars."""

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


def panels(records: Mapping[str, Record]) -> Iterator[Panel]:
    """The panels of a result, one backend after another; none if no figure belongs to a chart."""
    for backend, record in sorted(records.items()):
        for pattern, unit, title in CHARTS.get(record.name, ()):
            charts: dict[str, dict[tuple[str, str], Figure]] = {}
            for figure in record.figures:
                match = re.fullmatch(pattern, figure.name)
                if match and figure.unit == unit:
                    groups = match.groupdict()
                    bars = charts.setdefault(groups.get("panel") or "", {})
                    bars[groups["row"], groups.get("series") or ""] = figure
            for name, bars in charts.items():
                yield Panel(", ".join(filter(None, (backend, name, title))), bars)


def draw(records: Mapping[str, Record], path: Path) -> None:
    """Writes the bars to `path` in the format of its suffix, if there is anything to draw.

    Raises:
        ImportError: matplotlib, of the extra `bench`, is not installed.
    """
    shown = list(panels(records))
    heights = [0.7 + 0.24 * len(panel.bars) + 0.12 * len(panel.rows) for panel in shown]
    with picture(path, heights, columns=1, width=8) as axes:
        for axis, panel in zip(axes, shown, strict=True):
            _bars(axis, panel)


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
    labels: list[tuple[float, str]] = []
    place = 0.0
    for row in panel.rows:
        begun = place
        for number, series in enumerate(panel.series):
            figure = panel.bars.get((row, series))
            if figure is None:
                continue
            axis.barh(place, figure.value, height=0.85, color=COLOURS[number % len(COLOURS)])
            value = f"{figure.value:,.0f}" if figure.value >= 100 else f"{figure.value:.3g}"
            axis.annotate(f" {value}", (figure.value, place), va="center", fontsize=8, annotation_clip=False)
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


def trials(record: Record) -> dict[str, dict[int, dict[str, Figure]]]:
    """Case -> seed -> figure's name -> figure, without the figures over all seeds."""
    found: dict[str, dict[int, dict[str, Figure]]] = {}
    for figure in record.figures:
        case, _, rest = figure.name.partition(": ")
        seed, _, name = rest.partition(": ")
        if seed.startswith("seed "):
            found.setdefault(case, {}).setdefault(int(seed[5:]), {})[name] = figure
    return found


def joined(curves: Sequence[Curve]) -> list[Band]:
    """(x, mean, lowest, highest) at every x that all curves contain."""
    by_seed = [dict(curve) for curve in curves]
    shared = [x for x in (by_seed or [{}])[0] if all(x in points for points in by_seed)]
    columns = [[points[x] for points in by_seed] for x in shared]
    return [
        (x, statistics.fmean(values), min(values), max(values))
        for x, values in zip(shared, columns, strict=True)
    ]


def draw_curves(record: Record, path: Path) -> None:
    """Writes a panel for each followed figure and group of cases, if there are curves: the mean over
    the seeds as a line, their range as a band.

    Raises:
        ImportError: matplotlib, of the extra `bench`, is not installed.
    """
    shown: dict[str, list[tuple[str, list[Band]]]] = {}
    for case, seeds in trials(record).items():
        match = re.fullmatch(PANELS.get(record.name, "(?P<label>.+)"), case)
        parts = match.groupdict() if match else {"label": case}
        label = parts.pop("label")
        for name, title in CURVES.items():
            curves = [figures[name].curve for figures in seeds.values() if name in figures]
            points = joined([curve for curve in curves if curve])
            if points:
                whole = ": ".join(filter(None, (", ".join(parts.values()), title)))
                shown.setdefault(whole, []).append((label, points))
    with picture(path, [3.2] * -(-len(shown) // 2), columns=2, width=9) as axes:
        for axis, (title, lines) in zip(axes, shown.items(), strict=False):
            for place, (label, points) in enumerate(lines):
                x, mean, low, high = zip(*points, strict=True)
                colour = COLOURS[place % len(COLOURS)]
                axis.plot(x, mean, color=colour, label=label, linewidth=1.4)
                axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.set_title(title, loc="left")
            axis.set_xlabel(BELOW.get(record.name, "updates"))
            axis.legend(fontsize=8, frameon=False)
        for axis in axes[len(shown) :]:
            axis.set_visible(False)
