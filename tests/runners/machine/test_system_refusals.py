"""What the system refuses: low limits, no room, a folder that is gone. Each is one line and exit code 2."""

import shutil

import pytest
from click.testing import CliRunner

from runners import cli
from runners.errors import system_fault

GENERATE = ("generate", "embedded", "hi", "--max-tokens", "1")


@pytest.mark.parametrize("arguments", [GENERATE, ("run", "quickstart"), ("report", "x"), ("runs",)])
def test_a_working_folder_that_was_deleted(tmp_path, monkeypatch, arguments):
    """Every command ends with a line."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError(28, "No space left on device", "x"), "OSError: [Errno 28] No space left on device: 'x'"),
        (RuntimeError("failed\na.cpp: No space left on device\nb"), "a.cpp: No space left on device"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (RuntimeError("shapes do not match"), None),
        (ValueError("No space left on device"), None),
    ],
)
def test_what_the_system_refuses_is_told_from_faults_of_the_program(error, fault):
    """Those keep their traceback."""
    assert system_fault(error) == fault
