"""Renders benchmarks/results into charts, tables of benchmarks/README.md and figures of README.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.evidence import page as evidence
from benchmarks.harness import gains, headlines, plots
from benchmarks.harness.record import RESULTS, Record, grid, load_records, table
from runners.errors import UserError

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- results:begin {} -->", "<!-- results:end {} -->"
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
    "matrix",
    "rollout",
    "turns",
    "quant",
    "router_replay",
    "sync",
    "learner",
    "logprobs",
    "gated_delta",
    "loss",
    "step",
    "peers",
    "generation",
    "loading",
    "memory",
    "checkpoint",
    "depth",
    "ranks",
    "run_report",
    "mechanisms",
)
GRIDS = ("quant", "router_replay", "sync", "depth", "mechanisms")  # with the same columns for many rows


def section(records: dict[str, Record]) -> str:
    """One benchmark's tables, a backend after the other, each with what it was measured on."""
    parts = []
    for backend, record in sorted(records.items()):
        quick = " **--quick: sizes too small to mean anything.**" if record.quick else ""
        parts += [
            f"**{backend}**, {record.date}, {_surroundings(backend, record)}.{quick}",
            "",
            grid(record) if record.name in GRIDS else table(record),
            "",
        ]
    return "\n".join(parts).strip() or "*Not measured yet.*"


def _surroundings(backend: str, record: Record) -> str:
    """Machine, versions and rates in a line."""
    found, speed = record.machine, record.rates
    words = [f"{found['cpu']} ({found['cores']} cores, {found['memory_gb']:.0f} GB)", found["system"]]
    if backend == "cpu":
        words.append(f"{found['blas']} with threads: {found['blas_threads']}")
    else:
        words.insert(0, found["device"])
    words += [f"load {found['load']:g} at the start", *(f"{name} {found[name]}" for name in VERSIONS)]
    rates = [
        f"{title} {speed[name] / scale:,.{digits}f} {unit}"
        for name, title, scale, digits, unit in RATES
        if name in speed
    ]
    words.append(", ".join(rates))
    words += [f"with {name} = {value}" for name, value in record.settings.items()]
    return "; ".join(words)


def rendered(text: str, results: Path) -> str:
    """The README's text with every benchmark's tables in its place.

    Raises:
        UserError: a benchmark's markers are missing or in the wrong order, or a result cannot be read.
    """
    for name in NAMES:
        begin, end = BEGIN.format(name), END.format(name)
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise UserError(f"{README.name}: wanted {begin} and, after it, {end}")
        chart = f"![{name}](results/{name}.svg)\n\n" if (results / f"{name}.svg").is_file() else ""
        text = f"{head}{begin}\n{chart}{section(load_records(results / f'{name}.json'))}\n{end}{tail}"
    return text


def refresh(readme: Path, results: Path, *, write: bool = True) -> list[Path]:
    """Bring the pages up to date with a folder of results, or only look; those that were out of date.

    They are `readme` and, where the results are the project's own, its first page, the table of mechanisms
    and the page of evidence. Raises UserError as `rendered` does, here and in the modules of these pages.
    """
    pages: dict[Path, Callable[[str, Path], str]] = {readme: rendered}
    if results.resolve() == RESULTS:
        pages[headlines.FRONT] = headlines.rendered
        pages[gains.PAGE] = gains.rendered
        pages[evidence.PAGE] = evidence.rendered
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    new = {page: render(texts[page], results) for page, render in pages.items()}
    changed = [page for page in pages if new[page] != texts[page]]
    for page in changed if write else ():
        page.write_text(new[page], encoding="utf-8")
    return changed


def draw_chart(folder: Path, name: str, say: Callable[[str], None]) -> None:
    """FOLDER/NAME.svg from FOLDER/NAME.json; a word to `say` where the library for it is not installed."""
    try:
        plots.draw(load_records(folder / f"{name}.json"), folder / f"{name}.svg")
    except ImportError:
        say(f"{name}: no chart without matplotlib: pip install -e '.[bench]'")


def verdicts(results: Path) -> Iterator[str]:
    """A line for every target: PASS or MISS, benchmark, figure and value."""
    for name in NAMES:
        for backend, record in load_records(results / f"{name}.json").items():
            for figure in record.figures:
                if figure.met is not None:
                    verdict = "PASS" if figure.met else "MISS"
                    yield f"{verdict}  {name} on {backend}: {figure.name}: {figure.value:.4g} {figure.unit}"
