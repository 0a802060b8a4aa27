"""A benchmark's command with --quick, as a process."""

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import record

ROOT = Path(__file__).resolve().parents[2]


def check_quick_run(name: str, folder: Path) -> None:
    """--quick --check ends well, prints the table, and leaves a result with this machine and its figures.

    `name` is the module's in benchmarks; its last part is the result's.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--check", "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = record.load_records(folder / f"{name.rpartition('.')[2]}.json").values()
    figures = {figure.name: figure.value for figure in found.figures}
    assert (
        figures
        and all(value >= 0 for value in figures.values())
        and all(rate > 0 for rate in found.rates.values())
    )
    assert found.quick and found.machine["mlx"] and found.machine["cores"] >= 1
    assert all(f"| {figure} " in done.stdout for figure in figures)
