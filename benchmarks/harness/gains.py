"""The measured gains in the table of docs/architecture.md, out of benchmarks/results: none is typed in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.record import Record, load_records
from runners.errors import UserError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
_HEADER = "| mechanism | acts on | where | lines | gain |"
_UNKNOWN = "not measured alone yet"
_MAKER_AND_MEMORY = re.compile(r"^NVIDIA | \d+GB.*$")  # of a GPU's name
_OURS = re.compile(rf"{_UNKNOWN}|step without it: .*?; benchmarks `mechanisms`")


def gain_of(records: Mapping[str, Record], title: str) -> str:
    """What a step takes without the mechanism, on each shape; "" where it was not measured."""
    shapes: dict[str, dict[str, float]] = {}
    for backend, record in records.items():
        device = "" if backend == "cpu" else f" on {_MAKER_AND_MEMORY.sub('', str(record.machine['device']))}"
        for figure in record.figures:
            shape, name, part = figure.name.split(": ")
            if name == title:
                where = f" ({figure.note})" if figure.note else device  # measured on another machine
                shapes.setdefault(f"{shape}{where}", {})[part] = figure.value
    parts = [
        f"{shape}: {_times(found['time'])} the time, {_times(found['CPU time'])} the CPU time, "
        f"{_times(found['peak'])} the peak"
        for shape, found in shapes.items()
    ]
    return f"step without it: {'; '.join(parts)}; benchmarks `mechanisms`" if parts else ""


def _times(ratio: float) -> str:
    return f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×"


def rendered(text: str, results: Path) -> str:
    """The page's text with the gain of each measured mechanism in its row; other words of the cell stay.

    Raises:
        UserError: a mechanism that was measured has no row.
    """
    records = load_records(results / "mechanisms.json")
    wanted = {figure.name.split(": ")[1] for record in records.values() for figure in record.figures}
    lines, inside = text.split("\n"), False
    for number, line in enumerate(lines):
        inside = line.startswith(_HEADER) or (inside and line.startswith("|"))
        cells = line.split(" | ")
        title = cells[0].removeprefix("| ")
        if inside and title in wanted:
            wanted.discard(title)
            cells[4] = _with_gain(cells[4], gain_of(records, title))
            lines[number] = " | ".join(cells)
    if wanted:
        raise UserError(f"{PAGE.name}: no row for the mechanism {min(wanted)!r}")
    return "\n".join(lines)


def _with_gain(cell: str, gain: str) -> str:
    found, count = _OURS.subn(lambda _: gain, cell, count=1)
    return found if count else f"{cell}; {gain}"
