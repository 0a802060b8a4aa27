"""A watchdog error on Metal leads to a message with advice, even if Python cannot catch the error."""

import subprocess
import sys

import pytest

from runners.machine.metal_faults import ADVICE, is_watchdog
from tests.support.commands import grpo

SEEN = "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e:kIOGPU…)"


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError(SEEN), True),
        (RuntimeError("[METAL] Command buffer execution failed: Caused GPU Timeout Error"), True),
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"), False),
        (RuntimeError("GPU timeout of a judge"), False),
        (ValueError(SEEN), False),
    ],
)
def test_only_ended_command_buffers_are_watchdog_faults(error, is_one):
    assert is_watchdog(error) == is_one


def test_a_command_with_a_watchdog_fault_says_what_to_do(monkeypatch):
    """It prints one line and exits with code 2."""

    def fails(*_, **__):
        raise RuntimeError(SEEN)

    monkeypatch.setattr("runners.config.loading.load_config", fails)
    done = grpo("run", "quickstart", code=2)
    assert SEEN.split("…")[0] in done.output and ADVICE in done.output


@pytest.mark.parametrize(
    ("backend", "ending", "explained"),
    [
        ("metal", "os.abort()", True),
        ("metal", "pass", False),
        ("metal", "raise SystemExit(2)", False),
        ("cuda", "os.abort()", False),
    ],
)
def test_a_process_that_aborts_without_a_message_is_explained(backend, ending, explained):
    """MLX ends the process on its own thread, so no exception can be caught."""
    code = (
        "import os\nfrom runners.machine.metal_faults import explained_aborts\n"
        f"with explained_aborts({backend!r}): {ending}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ADVICE in done.stderr) == explained
