"""Draws the curves of docs/evidence.md: the mean over the seeds as a line, their range as a band."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import CLOSED, NAMES
from benchmarks.evidence.page import BELOW, PICTURES, panel_names, picture_name, trials
from benchmarks.harness.plots import COLOURS, picture
from benchmarks.harness.record import Curve, Figure, Record, load_records

_COLUMNS = 2
Band = tuple[float, float, float, float]  # x, mean, lowest, highest


def curves(seeds: Mapping[int, Mapping[str, Figure]], name: str) -> list[Curve]:
    """The curves of a figure, one for each seed that has it."""
    return [figures[name].curve for figures in seeds.values() if name in figures and figures[name].curve]


def joined(found: list[Curve]) -> list[Band]:
    """(x, mean, lowest, highest) at every x that all curves contain."""
    by_seed = [dict(curve) for curve in found]
    shared = [x for x in by_seed[0] if all(x in points for points in by_seed)]
    return [
        (x, statistics.fmean(values), min(values), max(values))
        for x in shared
        for values in [[points[x] for points in by_seed]]
    ]


def draw(record: Record, path: Path) -> bool:
    """Writes the picture; returns whether there was a curve to draw.

    Raises:
        ImportError: matplotlib, of the extra `bench`, is not installed.
    """
    by_case = trials(record)
    panels: dict[str, list[tuple[str, list[Band]]]] = {}
    for title, each in panel_names(record.name, [case for case in by_case if case != "logits"]).items():
        for case, name, label in each:
            found = curves(by_case[case], name)
            if found:
                panels.setdefault(title, []).append((label, joined(found)))
    heights = [3.2] * -(-len(panels) // _COLUMNS)
    with picture(path, heights, columns=_COLUMNS, width=9) as axes:
        for axis, (title, lines) in zip(axes, panels.items(), strict=False):
            for place, (label, points) in enumerate(lines):
                _line(axis, label, points, COLOURS[place % len(COLOURS)])
            axis.set_title(title, loc="left")
            axis.set_xlabel(BELOW.get(record.name, "updates"))
            axis.legend(fontsize=8, frameon=False)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
    return bool(panels)


def redraw(
    results: Path,
    say: Callable[[str], None],
    *,
    names: Sequence[str] = (*NAMES, *CLOSED),
    into: Path = PICTURES,
) -> None:
    """Draws the pictures of a folder of results; sends a message to `say` if the library for it is
    not installed.
    """
    for name in names:
        for record in load_records(results / f"{name}.json").values():
            try:
                draw(record, into / picture_name(name))
            except ImportError:
                say(f"{name}: no picture without matplotlib: pip install -e '.[bench]'")


def _line(axis: Any, label: str, points: list[Band], colour: str) -> None:
    x, mean, low, high = zip(*points, strict=True)
    axis.plot(x, mean, color=colour, label=label, linewidth=1.4)
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
