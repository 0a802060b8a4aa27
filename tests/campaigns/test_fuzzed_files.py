"""A short fuzz of every reader; `python -m tests.campaigns.fuzz --inputs 10000` takes longer."""

from tests.campaigns import fuzz


def test_no_file_brings_a_traceback():
    """Some hundred inputs of each kind, in a process of its own."""
    lines = []
    assert fuzz.fuzz([list(fuzz.TARGETS)], 120, 0, lines.append) == []
    said = "\n".join(lines)
    assert all(f"{name}: 120 inputs" in said for name in fuzz.TARGETS), said
