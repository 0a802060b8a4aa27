"""`python -m tests.file_by_file PATH…`: each test file in a process of its own.

On a GPU one fault ends everything that the same process computes later: the tests of other files are kept
apart from it. Only the output of files that fail is shown.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.harness.side_by_side import side_by_side


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--jobs", default=6, show_default=True, help="Files that run side by side.")
@click.option("--seconds", default=900.0, show_default=True, help="Time that each file may take.")
def main(paths: Sequence[Path], jobs: int, seconds: float) -> None:
    """Run the test files of PATHS, files or folders; exit with 1 if any fails."""
    found = {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    files = sorted(found, key=lambda file: -file.stat().st_size)  # the long ones first

    def tested(file: Path, environment: dict[str, str]) -> bool:
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", str(file)]
        try:
            ending = subprocess.run(
                command, env=environment, timeout=seconds, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            passed, output = ending.returncode in (0, 5), ending.stdout  # 5: no tests
        except subprocess.TimeoutExpired as late:
            passed, output = False, (late.stdout or b"").decode(errors="replace")
        last = output.strip().rpartition("\n")[2].strip("= ")
        click.echo(f"{'passed' if passed else 'FAILED'} {file} in {time.monotonic() - began:.0f} s: {last}")
        if not passed:
            click.echo(output)
        return passed

    if not all(side_by_side(tested, files, jobs)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
