"""Errors of the operating system are distinguished from faults of the program."""

import pytest

from runners.errors import system_fault


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
def test_errors_of_the_system_are_recognized(error, fault):
    """Faults of the program keep their traceback."""
    assert system_fault(error) == fault
