"""Writes the pages that show benchmarks/results: the list in benchmarks/README.md, and pages of the
manual.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.evidence import page as evidence
from benchmarks.harness import headlines, plots
from benchmarks.harness.places import filled
from benchmarks.harness.record import (
    RESULTS,
    Record,
    grid,
    load_records,
    load_results,
    spell,
    surroundings,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "benchmarks" / "README.md"
VERSIONS = ("python", "mlx", "mlx-lm", "grpo_fn")
RATES = (  # key, words, scale, digits, unit
    ("matmul", "float32 matmul", 1e9, 0, "GFLOP/s"),
    ("matmul_bf16", "bfloat16 matmul", 1e9, 0, "GFLOP/s"),
    ("exp", "exp", 1e6, 0, "M/s"),
    ("copy", "copy", 1e9, 1, "GB/s"),
    ("read", "read", 1e9, 1, "GB/s"),
)
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


def rendered(results: Path) -> dict[Path, str]:
    """Every page of the repository with results, with the content of this folder of results.

    Raises UserError if a place on a page is missing or a result cannot be read.
    """
    records = {name: load_results(results, name) for name in NAMES}
    parts = {"list": listed(records), "missed": missed(records)}
    ten = {"headlines": headlines.ten(results)}
    return {
        README: filled(README.name, _read(README), parts),
        headlines.FRONT: headlines.rendered(_read(headlines.FRONT), results),
        evidence.PAGE: filled(evidence.PAGE.name, _read(evidence.PAGE), ten),
    }


def manual_pages(results: Path) -> dict[str, str]:
    """The pages that are generated when the manual is built: one for each benchmark, and the
    evidence.
    """
    pages = {f"benchmarks/{name}.md": page(results, name, load_results(results, name)) for name in NAMES}
    return {"evidence.md": evidence.rendered(_read(evidence.PAGE), results)} | pages


def refresh(*, write: bool = True) -> list[Path]:
    """Updates the pages from benchmarks/results, or only checks them; returns the outdated ones."""
    new = rendered(RESULTS)
    changed = [page for page, text in new.items() if _read(page) != text]
    for page in changed if write else ():
        page.write_text(new[page], encoding="utf-8")
    return changed


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.is_file() else ""


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
        quick = " **--quick: sizes too small to mean anything.**" if record.quick else ""
        older = ", ".join(sorted({figure.date for figure in record.figures if figure.date}))
        days = f"{record.date} (some figures: {older})" if older else record.date
        parts.append(f"**{backend}**, {days}, {surroundings(backend, record)}.{quick}")
        parts.append(grid(record) if name in GRIDS else table(record))
    return "\n\n".join(parts) + ("\n" if records else "\n\n*Not measured yet.*\n")


def listed(records: dict[str, dict[str, Record]]) -> str:
    """A row for each benchmark with its question and the number of targets that are met."""
    lines = ["| benchmark | question | targets met | measured |", "|---|---|---|---|"]
    for name, found in records.items():
        met, days = [], []
        for backend, record in sorted(found.items()):
            verdicts = [figure.met for figure in record.figures if figure.met is not None]
            met += [f"{backend}: {sum(verdicts)} of {len(verdicts)}"] if verdicts else []
            days.append(f"{backend}: {record.date}")
        first = description(name).partition("\n")[0].replace("|", "\\|")
        cells = [
            f"[{name}](results/{name}.json)",
            first,
            ", ".join(met) or "–",
            ", ".join(days) or "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def missed(records: dict[str, dict[str, Record]]) -> str:
    """A line for each missed target."""
    lines = [
        f"- {name} on {backend}: {figure.name}: {spell(figure.value, figure.unit)}"
        for name, found in records.items()
        for backend, record in sorted(found.items())
        for figure in record.missed()
    ]
    return "\n".join(lines) or "None."


def draw_chart(folder: Path, name: str, say: Callable[[str], None]) -> None:
    """Draws FOLDER/NAME.svg from FOLDER/NAME.json; sends a message to `say` if the library for it
    is not installed.
    """
    try:
        plots.draw(load_records(folder / f"{name}.json"), folder / f"{name}.svg")
    except ImportError:
        say(f"{name}: no chart without matplotlib: pip install -e '.[bench]'")


def verdicts(results: Path) -> Iterator[str]:
    """A line for every target: PASS or MISS, benchmark, figure and value."""
    for name in NAMES:
        for backend, record in load_results(results, name).items():
            for figure in record.figures:
                if figure.met is not None:
                    verdict = "PASS" if figure.met else "MISS"
                    yield f"{verdict}  {name} on {backend}: {figure.name}: {figure.value:.4g} {figure.unit}"
