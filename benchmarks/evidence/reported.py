"""`python -m benchmarks.evidence.reported`: writes the tables and the picture of docs/gsm8k.md and
docs/learning-rate.md.

They are generated from the results of `gsm8k`, `programs`, `rates` and `gpu_step`; no figure is
typed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from benchmarks.evidence.command import EVIDENCE
from benchmarks.evidence.page import PICTURES, ROOT, Column, cell, trials
from benchmarks.evidence.pictures import curves, joined
from benchmarks.evidence.readings import PEAK, REWARD, SECONDS, STEP
from benchmarks.harness.places import filled
from benchmarks.harness.plots import COLOURS
from benchmarks.harness.record import Record, load_records, markdown, spell
from runners.machine.terminal import echo

PICTURE = "gsm8k.svg"
ALT = "Mean reward of a step and share of right test problems over minutes, means and ranges over seeds"
SCORES = tuple(
    Column(f"{name} {when}", f"{name} {when}, %")
    for name in ("lenient", "strict")
    for when in ("before", "after")
)
COST = (
    Column("updates", "updates"),
    Column(STEP, "a step, s"),
    Column(SECONDS, "from command to end, s"),
    Column(PEAK, "peak memory, GB"),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "gsm8k": (*SCORES, *COST),
    "programs": (
        Column("MBPP before", "MBPP before, %"),
        Column("MBPP after", "after, %"),
        Column("HumanEval before", "HumanEval before, %"),
        Column("HumanEval after", "after, %"),
        Column("step: reward", "rewards of a step, s"),
        *COST,
    ),
    "rates": (
        Column("lenient after", "lenient, %"),
        Column("strict after", "strict, %"),
        Column("cut off after", "cut off, %"),
        Column(REWARD, "reward, last tenth"),
        Column("updates", "updates"),
        Column(STEP, "a step, s"),
    ),
}
PAGES = {"gsm8k.md": ("gsm8k", "programs", "gpu_step"), "learning-rate.md": ("rates",)}


def overview(record: Record) -> str:
    """A row for each case, with means over its seeds and their ranges."""
    columns = COLUMNS[record.name]
    lines = Table("case", "seeds", *(column.title for column in columns), box=MARKDOWN)
    for case, seeds in sorted(trials(record).items()):
        lines.add_row(case, str(len(seeds)), *(cell(column, seeds) for column in columns))
    return markdown(lines)


def figures_table(record: Record) -> str:
    """A row for each "NAME: FIGURE" and a column for each kind of figure."""
    rows: dict[str, dict[str, str]] = {}
    titles: dict[str, None] = {}
    for figure in record.figures:
        name, _, title = figure.name.rpartition(": ")
        heading = f"{title}, {figure.unit}" if figure.unit else title
        titles[heading] = None
        rows.setdefault(name, {})[heading] = spell(figure.value, "")
    lines = Table("", *titles, box=MARKDOWN)
    for name, cells in rows.items():
        lines.add_row(name, *(cells.get(title, "") for title in titles))
    return markdown(lines)


def section(record: Record) -> str:
    """A result in the form for its page."""
    table = figures_table(record) if record.name == "gpu_step" else overview(record)
    if record.name == "gsm8k" and (PICTURES / PICTURE).is_file():
        table = f"![{ALT}](pictures/{PICTURE})\n\n{table}"
    machine = f"{record.machine['device']}; mlx {record.machine['mlx']}"
    return f"{table}\n\nMeasured on {record.date}: {machine}; `python -m benchmarks.evidence.{record.name}`."


def draw(record: Record, path: Path) -> None:
    """Rewards and scores over minutes, here and in TRL: means over the seeds, and their ranges."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cases = trials(record)
    panels = {"mean reward of a step": REWARD, "right of 1,319 test problems, %": "lenient after"}
    style: Any = {"svg.hashsalt": "grpo_fn", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 10}
    with mpl.rc_context(style):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
        for axis, (title, name) in zip(axes, panels.items(), strict=True):
            for place, (case, seeds) in enumerate(sorted(cases.items())):
                _band(axis, case, joined_curves(seeds, name), COLOURS[place % len(COLOURS)])
            axis.set_title(title, loc="left")
            axis.set_xlabel("minutes since the command")
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].legend(fontsize=8, frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def joined_curves(seeds: Mapping[int, Any], name: str) -> Sequence[tuple[float, float, float, float]]:
    """(minute, mean, lowest, highest) of a figure's curves; empty if no seed has one."""
    found = curves(seeds, name)
    return joined(found) if found else []


def _band(axis: Any, label: str, points: Sequence[tuple[float, ...]], colour: str) -> None:
    if points:
        x, mean, low, high = zip(*points, strict=True)
        axis.plot(x, mean, color=colour, label=label, linewidth=1.4)
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def rendered(page: str, text: str, results: Path = EVIDENCE) -> str:
    """The text of a page with the tables of its results."""
    sections = {}
    for name in PAGES[page]:
        records = load_records(results / f"{name}.json")
        sections[name] = "\n\n".join(map(section, records.values())) or "*Not measured yet.*"
    return filled(page, text, sections)


def main() -> None:
    """Draw the picture and fill the pages."""
    for record in load_records(EVIDENCE / "gsm8k.json").values():
        draw(record, PICTURES / PICTURE)
    for page in PAGES:
        path = ROOT / "docs" / page
        path.write_text(rendered(page, path.read_text(encoding="utf-8")), encoding="utf-8")
        echo(f"{path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
