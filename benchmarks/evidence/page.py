"""Writes the tables and pictures of docs/evidence.md from benchmarks/results/evidence. No figure is
typed in.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
from rich.box import MARKDOWN
from rich.table import Table

from benchmarks.evidence import CLOSED, NAMES
from benchmarks.evidence.readings import (
    AFTER,
    BEFORE,
    HELD_OUT_AFTER,
    HELD_OUT_BEFORE,
    LENGTH,
    MISMATCH,
    PEAK,
    RESIDENT,
    REWARD,
    SAMPLE_SIZE,
    SECONDS,
    STEP,
    SYNC,
    TAUGHT,
    TO_ENOUGH,
    TOKENS,
)
from benchmarks.harness.places import filled
from benchmarks.harness.record import Figure, Record, load_records, markdown, spell, surroundings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "evidence.md"
PICTURES = ROOT / "docs" / "pictures"


@attrs.frozen
class Column:
    """A figure of the trials as a column: its mean over the seeds, and their range."""

    figure: str
    title: str
    of_reached: bool = False  # trials without it did not get there: say how many did


_LEARNING = (
    Column(BEFORE, "exact match before, %"),
    Column(AFTER, "after, %"),
    Column(TO_ENOUGH, TO_ENOUGH, of_reached=True),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "against_trl": (
        *_LEARNING,
        Column(REWARD, REWARD),
        Column(SECONDS, "from command to end, s"),
        Column(STEP, "a step, s"),
        Column(RESIDENT, "resident memory, MB"),
    ),
    "samplers": (
        *_LEARNING,
        Column(MISMATCH, "mismatch, nats a token"),
        Column(SAMPLE_SIZE, "effective sample size, %"),
    ),
    "presets": (*_LEARNING, Column(REWARD, REWARD), Column(TOKENS, TOKENS)),
    "masters": (
        Column(BEFORE, "exact match before, %"),
        Column(AFTER, "after, %"),
        Column(REWARD, REWARD),
        Column("weights moved", "weights moved, ‰ of their norm"),
    ),
    "difficulty": (
        Column(BEFORE, "exact match before, %"),
        Column(AFTER, "after, %"),
        Column(TOKENS, TOKENS),
        Column(TAUGHT, "groups that taught, %"),
    ),
    "cold_start": (
        Column(BEFORE, "exact match before, %"),
        Column(AFTER, "after, %"),
        Column(TOKENS, "tokens sampled or learned"),
        Column("seconds of training", "training, s"),
    ),
    "real_samplers": (
        Column(HELD_OUT_BEFORE, HELD_OUT_BEFORE),
        Column(HELD_OUT_AFTER, "after"),
        Column(REWARD, REWARD),
        Column(MISMATCH, "mismatch, nats a token"),
        Column(SAMPLE_SIZE, "effective sample size, %"),
        Column(STEP, "a step, s"),
        Column(SYNC, "sync, % of a step"),
    ),
    "staleness": (
        Column(HELD_OUT_BEFORE, HELD_OUT_BEFORE),
        Column(HELD_OUT_AFTER, "after"),
        Column(REWARD, REWARD),
        Column(SAMPLE_SIZE, "effective sample size, %"),
        Column(LENGTH, LENGTH),
        Column(STEP, "a step, s"),
        Column("seconds of training", "training, s"),
    ),
    "real_model": (
        Column(HELD_OUT_BEFORE, HELD_OUT_BEFORE),
        Column(HELD_OUT_AFTER, "after"),
        Column(REWARD, REWARD),
        Column("seconds of training", "training, s"),
        Column(STEP, "a step, s"),
        Column(SECONDS, "from command to end, s"),
        Column(PEAK, "peak memory, GB"),
    ),
}


def trials(record: Record) -> dict[str, dict[int, dict[str, Figure]]]:
    """Case -> seed -> figure's name -> figure, without the figures over all seeds."""
    found: dict[str, dict[int, dict[str, Figure]]] = {}
    for figure in record.figures:
        case, _, rest = figure.name.partition(": ")
        seed, _, name = rest.partition(": ")
        if seed.startswith("seed "):
            found.setdefault(case, {}).setdefault(int(seed[5:]), {})[name] = figure
    return found


def cell(column: Column, seeds: Mapping[int, Mapping[str, Figure]]) -> str:
    """The mean with the lowest and the highest seed; "" if no seed has the figure."""
    values = [figures[column.figure].value for figures in seeds.values() if column.figure in figures]
    if not values:
        return f"none of {len(seeds)}" if column.of_reached else ""
    text = spell(statistics.fmean(values), "")
    if max(values) > min(values):
        text += f" ({spell(min(values), '')} – {spell(max(values), '')})"
    if column.of_reached and len(values) < len(seeds):
        text += f", {len(values)} of {len(seeds)}"
    return text


def overview(record: Record) -> str:
    """A row for each case: means over its seeds."""
    columns = COLUMNS[record.name]
    lines = Table("case", "seeds", *(column.title for column in columns), box=MARKDOWN)
    for case, seeds in trials(record).items():
        if any(columns[0].figure in figures for figures in seeds.values()):  # not what compares logits alone
            lines.add_row(case, str(len(seeds)), *(cell(column, seeds) for column in columns))
    return markdown(lines)


def verdicts(record: Record) -> list[str]:
    """A line for each figure over all seeds and for each figure with a target."""
    lines = []
    for figure in record.figures:
        if figure.met is None and ": seed " in figure.name:
            continue
        name = figure.name.removeprefix("all seeds: ").replace(": seed 0: ", ": ")
        verdict = {True: ": met", False: ": missed", None: ""}[figure.met]
        target = f" (at most {spell(figure.at_most, figure.unit)}{verdict})" if figure.at_most else ""
        note = f"; {figure.note}" if figure.note else ""
        lines.append(f"- {name}: {spell(figure.value, figure.unit)}{target}{note}")
    return lines


def section(name: str, records: Mapping[str, Record], picture: bool) -> str:
    """The part of the page for a command: picture, table, targets, machine."""
    parts = [f"![{TITLES[name]}](pictures/{picture_name(name)})", ""] if picture else []
    for backend, record in sorted(records.items()):
        quick = " **--quick: sizes too small to mean anything.**" if record.quick else ""
        parts += [overview(record), ""]
        if found_verdicts := verdicts(record):
            parts += [*found_verdicts, ""]
        parts += [f"Measured on {backend}, {record.date}: {surroundings(backend, record)}.{quick}", ""]
    return "\n".join(parts).strip() or "*Not measured yet.*"


def rendered(text: str, results: Path) -> str:
    """The page's text with each command's measurements inserted.

    Raises:
        UserError: a command's markers are missing or in the wrong order, or a result cannot be read.
    """
    sections = {}
    for name in (*NAMES, *CLOSED):
        records = load_records(results / "evidence" / f"{name}.json")
        sections[name] = section(name, records, bool(records) and (PICTURES / picture_name(name)).is_file())
    return filled(PAGE.name, text, sections)


def picture_name(name: str) -> str:
    """The file of a command's picture in docs/pictures."""
    return f"evidence_{name}.svg"


TITLES = {
    "real_samplers": "A pretrained model's reward with few-bit samplers over seconds, means and ranges",
    "against_trl": "Reward and exact match of five runs here and five in TRL, means and ranges",
    "samplers": "Exact match of runs with few-bit samplers, means and ranges, by depth and correction",
    "presets": "Exact match and reward of the nine presets on the hard problems, means and ranges",
    "masters": "Reward of runs with weights in float32 and in bfloat16, means and ranges, by learning rate",
    "difficulty": "Exact match over tokens sampled, by how prompts and groups are drawn, means and ranges",
    "cold_start": "Exact match over tokens: GRPO, supervised updates, and both, means and ranges",
    "real_model": "A pretrained model's reward over seconds of training, here and in TRL, means and ranges",
    "staleness": "Reward over seconds of training by staleness and correction, means and ranges",
}
BELOW = {
    **dict.fromkeys(("real_model", "real_samplers", "staleness"), "seconds of training"),
    **dict.fromkeys(("difficulty", "cold_start"), TOKENS),
}
"""The x-axis of a command's curves; all other curves are over updates."""
FOLLOWED = {
    **dict.fromkeys(("samplers", "difficulty", "cold_start"), (AFTER,)),
    **dict.fromkeys(("masters", "real_model", "real_samplers", "staleness"), (REWARD,)),
}
"""The figures whose curves are drawn; for other commands, both."""
PANELS = {  # the parts of a case's name that begin a panel's title, and those that label a line
    "samplers": "(?P<panel>.+), (?P<label>.+), (?P<correction>.+)",
    "real_samplers": "(?P<panel>.+), (?P<label>.+), (?P<correction>.+)",
    "real_model": "(?P<panel>.+), (?P<label>.+)",
    "staleness": "(?P<panel>.+), (?P<label>.+), (?P<correction>.+)",
    "masters": "(?P<rate>[^,]+), (?P<label>.+)",
}
_NAMES = {REWARD: "reward", AFTER: "exact match, %"}


def panel_names(name: str, cases: Sequence[str]) -> dict[str, list[tuple[str, str, str]]]:
    """Panel's title -> its lines: (case, figure with the curve, label)."""
    panels: dict[str, list[tuple[str, str, str]]] = {}
    for case in cases:
        found = re.fullmatch(PANELS.get(name, "(?P<label>.+)"), case)
        assert found is not None, case
        parts = found.groupdict()
        label = parts.pop("label")
        title = ", ".join(part if key == "panel" else f"{key} {part}" for key, part in parts.items())
        for figure in FOLLOWED.get(name, (REWARD, AFTER)):
            whole = f"{title}: {_NAMES[figure]}" if title else _NAMES[figure]
            panels.setdefault(whole, []).append((case, figure, label))
    return panels
