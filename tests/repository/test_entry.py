"""`grpo` and `grpo-run` with another package called `runners` in the way: one line, no traceback."""

import os

import pytest

from tests.support.processes.new_process import ROOT, python


def start(command, *paths, cwd):
    """The installed script, with these folders first on Python's path."""
    program = f"from grpo_entry import {command}; {command}()"
    found = os.pathsep.join(map(str, [*paths, ROOT]))
    return python("-c", program, "--help", cwd=cwd, code=None, PYTHONPATH=found)


@pytest.mark.parametrize("command", ["main", "run_command"])
def test_a_foreign_package_is_named_in_one_line(command, tmp_path):
    """It is not imported, and the message says what to do; a folder without __init__.py hides nothing."""
    place = tmp_path.resolve() / "runners"
    place.mkdir()
    done = start(command, tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("Usage: ")
    (place / "__init__.py").write_text("raise SystemExit('imported')\n")
    done = start(command, tmp_path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"{place} hides grpo_fn's package runners, which is {ROOT / 'runners'}: rename it, take "
        f"{place.parent} off PYTHONPATH, or install grpo_fn into a separate environment\n"
    )
