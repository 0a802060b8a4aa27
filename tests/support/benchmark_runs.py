"""A benchmark's command with --quick in a new process."""

from pathlib import Path

from benchmarks.harness import record
from tests.support.processes.new_process import python


def check_quick_run(name: str, folder: Path) -> None:
    """`python -m benchmarks.NAME --quick --check` ends well, prints its table and leaves a result."""
    done = python("-m", f"benchmarks.{name}", "--quick", "--check", "--out", folder)
    (found,) = record.load_records(folder / f"{name.rpartition('.')[2]}.json").values()
    figures = {figure.name: figure.value for figure in found.figures}
    assert figures and min(figures.values()) >= 0 and all(rate > 0 for rate in found.rates.values())
    assert found.quick and found.machine["mlx"] and found.machine["cores"] >= 1
    assert all(f"| {figure} " in done.stdout for figure in figures)
