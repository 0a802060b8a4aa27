"""Writes the pages that show benchmarks/results: README.md, benchmarks/README.md, and pages of the
manual.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.evidence import CLOSED, COLUMNS, REACHED
from benchmarks.evidence import NAMES as COMPARISONS
from benchmarks.harness import headlines, plots
from benchmarks.harness.record import (
    EVIDENCE,
    RESULTS,
    Figure,
    Record,
    cross_table,
    grid,
    load_records,
    load_results,
    markdown,
    spell,
    surroundings,
    table,
    titled,
)
from runners.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "benchmarks" / "README.md"
PAGE = ROOT / "docs" / "evidence.md"
PICTURES = ROOT / "docs" / "pictures"
OWN_PAGES = {"gsm8k.md": ("gsm8k", "programs", "gpu_step"), "learning-rate.md": ("rates",)}
"""Pages of docs/ that have the results of evidence in git."""
NAMES = (
    "quickstart",
    "first_update",
    "rollout",
    "serving",
    "http_serving",
    "real_quant",
    "learner",
    "overlap",
    "peers",
    "memory",
    "ranks",
    "mechanisms",
    "mac",
)
GRIDS = ("real_quant", "mechanisms")  # one table for many rows
QUICK = " **--quick: sizes too small to mean anything.**"


def rendered(results: Path) -> dict[Path, str]:
    """Every page of the repository with results, with the content of this folder of results.

    Raises UserError if a place on a page is missing or a result cannot be read.
    """
    records = {name: load_results(results, name) for name in NAMES}
    places = {
        README: {"list": listed(records), "missed": missed(records)},
        ROOT / "README.md": {"quickstart": headlines.shown(results), "figures": headlines.headlines(results)},
        PAGE: {"headlines": headlines.ten(results)},
    }
    for page, names in OWN_PAGES.items():
        places[ROOT / "docs" / page] = {name: dated(results, name) for name in names}
    return {page: filled(page.name, _read(page), parts) for page, parts in places.items()}


def manual_pages(results: Path) -> dict[str, str]:
    """The pages that are generated when the manual is built: one for each benchmark, and the
    evidence.
    """
    sections = {name: section(results, name) for name in (*COMPARISONS, *CLOSED)}
    evidence = {"evidence.md": filled(PAGE.name, _read(PAGE), sections)}
    pages = {f"benchmarks/{name}.md": page(results, name, load_results(results, name)) for name in NAMES}
    return evidence | pages


def refresh(*, write: bool = True) -> list[Path]:
    """Updates the pages from benchmarks/results, or only checks them; returns the outdated ones."""
    new = rendered(RESULTS)
    changed = [page for page, text in new.items() if _read(page) != text]
    for page in changed if write else ():
        page.write_text(new[page], encoding="utf-8")
    return changed


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.is_file() else ""


def filled(page: str, text: str, contents: Mapping[str, str]) -> str:
    """A page's text with each content, by name, between <!-- NAME:begin --> and <!-- NAME:end -->.
    Raises UserError if a place is missing.
    """
    for name, content in contents.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise UserError(f"{page}: expected {begin} and, after it, {end}")
        text = f"{head}{begin}\n{content}\n{end}{tail}"
    return text


def description(name: str) -> str:
    """A benchmark's description: its module's docstring, which is Markdown."""
    text = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(text)) or ""


def page(results: Path, name: str, records: dict[str, Record]) -> str:
    """One benchmark's page: its description, then a table per backend with the machine on which it
    was measured.
    """
    parts = [f"# {name}", description(name), f"`python -m benchmarks.{name}`"]
    if (results / f"{name}.svg").is_file():
        parts.append(f"![{name}](../results/{name}.svg)")
    for backend, record in sorted(records.items()):
        quick = QUICK if record.quick else ""
        older = ", ".join(sorted({figure.date for figure in record.figures if figure.date}))
        days = f"{record.date} (some figures: {older})" if older else record.date
        parts.append(f"**{backend}**, {days}, {surroundings(backend, record)}.{quick}")
        parts.append(grid(record) if name in GRIDS else table(record))
    return "\n\n".join(parts) + ("\n" if records else "\n\n*Not measured yet.*\n")


def listed(records: dict[str, dict[str, Record]]) -> str:
    """A row for each benchmark with its question and the number of targets that are met."""
    lines = ["| benchmark | question | targets met | measured |", "|---|---|---|---|"]
    for name, found in records.items():
        met = []
        for backend, record in sorted(found.items()):
            verdicts = [figure.met for figure in record.figures if figure.met is not None]
            met += [f"{backend}: {sum(verdicts)} of {len(verdicts)}"] if verdicts else []
        days = [f"{backend}: {record.date}" for backend, record in sorted(found.items())]
        question = description(name).partition("\n")[0].replace("|", "\\|")
        targets = ", ".join(met) or "–"
        lines.append(f"| [{name}](results/{name}.json) | {question} | {targets} | {', '.join(days) or '–'} |")
    return "\n".join(lines)


def missed(records: dict[str, dict[str, Record]]) -> str:
    """A line for each missed target."""
    lines = []
    for name, found in records.items():
        for backend, record in sorted(found.items()):
            words = [f"{each.name}: {spell(each.value, each.unit)}" for each in record.missed()]
            lines += [f"- {name} on {backend}: {each}" for each in words]
    return "\n".join(lines) or "None."


def overview(record: Record) -> str:
    """A row for each case, with means over its seeds and their ranges; for a result without seeds,
    a column for each figure.
    """
    cases = plots.trials(record)
    if not cases:
        rows: dict[str, dict[str, Figure]] = {}
        for figure in record.figures:
            name, _, title = figure.name.rpartition(": ")
            rows.setdefault(name, {})[title] = figure
        return cross_table("", rows)
    columns = COLUMNS[record.name]
    seeds_of = {case: list(seeds.values()) for case, seeds in cases.items()}
    units = {f.name.split(": ", 2)[2]: f.unit for f in record.figures if ": seed " in f.name}
    titles = [titled(name, units.get(name, "")) for name in columns]
    rows_of_cells = [
        [case, str(len(seeds)), *(cell(name, seeds) for name in columns)]
        for case, seeds in seeds_of.items()
        if any(columns[0] in figures for figures in seeds)  # not a case that compares logits alone
    ]
    return markdown(["case", "seeds", *titles], rows_of_cells)


def cell(name: str, seeds: list[dict[str, Figure]]) -> str:
    """The mean with the lowest and the highest seed; "" if no seed has the figure."""
    values = [figures[name].value for figures in seeds if name in figures]
    if not values:
        return f"none of {len(seeds)}" if name == REACHED else ""
    text = spell(statistics.fmean(values), "")
    if max(values) > min(values):
        text += f" ({spell(min(values), '')} – {spell(max(values), '')})"
    if name == REACHED and len(values) < len(seeds):
        text += f", {len(values)} of {len(seeds)}"
    return text


def verdict_lines(record: Record) -> str:
    """A line for each figure over all seeds and for each figure with a target."""
    lines = []
    for figure in record.figures:
        if figure.met is None and ": seed " in figure.name:
            continue
        name = figure.name.removeprefix("all seeds: ").replace(": seed 0: ", ": ")
        verdict = {True: ": met", False: ": missed", None: ""}[figure.met]
        most = spell(figure.at_most, figure.unit) if figure.at_most else ""
        target = f" (at most {most}{verdict})" if most else ""
        note = f"; {figure.note}" if figure.note else ""
        lines.append(f"- {name}: {spell(figure.value, figure.unit)}{target}{note}")
    return "\n".join(lines)


def section(results: Path, name: str) -> str:
    """The part of the manual for a comparison: picture, table, targets, machine."""
    records = load_records(results / "evidence" / f"{name}.json")
    parts = [_picture(name)] if records else []
    for backend, record in sorted(records.items()):
        quick = QUICK if record.quick else ""
        parts += [overview(record), verdict_lines(record)]
        parts.append(f"Measured on {backend}, {record.date}: {surroundings(backend, record)}.{quick}")
    return "\n\n".join(filter(None, parts)) or "*Not measured yet.*"


def dated(results: Path, name: str) -> str:
    """The same for a page in git, without the details of the machine."""
    parts = []
    for record in load_records(results / "evidence" / f"{name}.json").values():
        machine = f"{record.machine['device']}; mlx {record.machine['mlx']}"
        command = f"`python -m benchmarks.evidence.{name}`"
        parts += [_picture(name), overview(record), f"Measured on {record.date}: {machine}; {command}."]
    return "\n\n".join(filter(None, parts)) or "*Not measured yet.*"


def picture_name(name: str) -> str:
    """The file of a comparison's picture."""
    return "gsm8k.svg" if name == "gsm8k" else f"evidence_{name}.svg"


def _picture(name: str) -> str:
    if not (PICTURES / picture_name(name)).is_file():
        return ""
    return f"![Curves of {name}, means and ranges over seeds](pictures/{picture_name(name)})"


def draw_picture(folder: Path, name: str, say: Callable[[str], None]) -> None:
    """Draws FOLDER/NAME.json: bars next to it, or the curves of a comparison, which belong to docs/
    if the result belongs to the project. Sends a message to `say` if matplotlib is missing.
    """
    records = load_records(folder / f"{name}.json")
    own = folder.resolve() == EVIDENCE
    try:
        for record in records.values() if name in COLUMNS else ():
            plots.draw_curves(record, (PICTURES if own else folder) / picture_name(name))
        plots.draw(records, folder / f"{name}.svg")
    except ImportError:
        say(f"{name}: no picture without matplotlib: pip install -e '.[bench]'")


def verdicts(results: Path) -> Iterator[str]:
    """A line for every target: PASS or MISS, benchmark, figure and value."""
    for name in NAMES:
        for backend, record in load_results(results, name).items():
            for figure in record.figures:
                if figure.met is not None:
                    verdict = "PASS" if figure.met else "MISS"
                    value = f"{figure.name}: {figure.value:.4g} {figure.unit}"
                    yield f"{verdict}  {name} on {backend}: {value}"
