"""`python -m tests.file_by_file PATH…`: each test file in a process of its own.

On a GPU one fault ends everything that its process computes later: other files are kept apart from it.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

NO_TESTS = 5  # pytest's exit code where a file has none


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--jobs", default=6, show_default=True, help="Files that are tested side by side.")
@click.option("--seconds", default=900.0, show_default=True, help="Time that each file may take.")
def main(paths: Sequence[Path], jobs: int, seconds: float) -> None:
    """Run the tests of PATHS, files or folders, and show the output of files that fail; then exit with 1."""
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    long_ones_first = sorted(files, key=lambda file: (-file.stat().st_size, file))

    def tested(file: Path) -> bool:
        began = time.monotonic()
        # -vv: the test during which a process ends is the last that is named.
        command = ["-m", "pytest", "-vv", "-p", "no:cacheprovider", "--color", "no", str(file)]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen([sys.executable, *command], **piped) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
        passed = process.returncode in (0, NO_TESTS)
        text = output.decode(errors="replace").strip()
        summary = text.rpartition("\n")[2].strip("= ") if process.returncode in (0, 1) else "it ended early"
        verdict = "passed" if passed else "FAILED"
        click.echo(f"{verdict} {file} in {time.monotonic() - began:.0f} s: {summary}")
        if not passed:
            click.echo(text)
        return passed

    with ThreadPoolExecutor(jobs) as pool:
        failed = [*pool.map(tested, long_ones_first)].count(False)
    click.echo(f"{len(files) - failed} of {len(files)} files passed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
