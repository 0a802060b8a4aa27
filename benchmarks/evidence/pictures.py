"""The curves of docs/evidence.md: the mean over the seeds as a line, their range as a band."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence import NAMES
from benchmarks.evidence.page import BELOW, PICTURES, panel_names, picture_name, trials
from benchmarks.harness.plots import COLOURS
from benchmarks.harness.record import Curve, Figure, Record, load_records

_MORE = ("#c2a33c", "#3fa7a7", "#d36fa5", "#5b5b5b", "#8a5a2b")
_COLUMNS = 2


def curves(seeds: Mapping[int, Mapping[str, Figure]], name: str) -> list[Curve]:
    """The curves of a figure, one for each seed that has it."""
    return [figures[name].curve for figures in seeds.values() if name in figures and figures[name].curve]


def joined(found: list[Curve]) -> list[tuple[float, float, float, float]]:
    """(x, mean, lowest, highest) at every x that all the curves have."""
    by_seed = [dict(curve) for curve in found]
    shared = [x for x in by_seed[0] if all(x in points for points in by_seed)]
    return [
        (x, statistics.fmean(values), min(values), max(values))
        for x in shared
        for values in [[points[x] for points in by_seed]]
    ]


def draw(record: Record, path: Path) -> bool:
    """Writes the picture; whether there was a curve to draw.

    Raises:
        ImportError: matplotlib, of the extra `bench`, is not installed.
    """
    by_case = trials(record)
    panels = panel_names(record.name, [case for case in by_case if case != "logits"])
    lines = {
        title: [
            (label, joined(curves(by_case[case], name)))
            for case, name, label in each
            if curves(by_case[case], name)
        ]
        for title, each in panels.items()
    }
    lines = {title: each for title, each in lines.items() if each}
    if not lines:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    style: Any = {"svg.hashsalt": "grpo_fn", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 10}
    rows = -(-len(lines) // _COLUMNS)
    with mpl.rc_context(style):
        figure, axes = plt.subplots(
            rows, _COLUMNS, figsize=(9, 3.2 * rows), squeeze=False, layout="constrained"
        )
        for axis, (title, each) in zip(axes.flat, lines.items(), strict=False):
            for place, (label, points) in enumerate(each):
                _line(axis, label, points, (*COLOURS, *_MORE)[place % 11])
            axis.set_title(title, loc="left")
            axis.set_xlabel(BELOW.get(record.name, "updates"))
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(fontsize=8, frameon=False)
        for axis in axes.flat[len(lines) :]:
            axis.set_visible(False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
    return True


def redraw(
    results: Path, say: Callable[[str], None], *, names: Sequence[str] = NAMES, into: Path = PICTURES
) -> None:
    """The pictures of a folder of results; a word to `say` where the library for it is not installed."""
    for name in names:
        for record in load_records(results / f"{name}.json").values():
            try:
                draw(record, into / picture_name(name))
            except ImportError:
                say(f"{name}: no picture without matplotlib: pip install -e '.[bench]'")


def _line(axis: Any, label: str, points: list[tuple[float, float, float, float]], colour: str) -> None:
    x, mean, low, high = zip(*points, strict=True)
    axis.plot(x, mean, color=colour, label=label, linewidth=1.4)
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
