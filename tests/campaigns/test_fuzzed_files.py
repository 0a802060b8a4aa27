"""A short fuzz of every reader; `python -m tests.campaigns.fuzz --inputs 10000` takes longer."""

from tests.campaigns import fuzz


def test_no_file_brings_a_traceback():
    """A hundred inputs of each kind, twenty of those that take a process each."""
    quick = [name for name in fuzz.TARGETS if name not in fuzz.PATIENCE]
    said = fuzz.fuzz(quick, 100, 0) + fuzz.fuzz(list(fuzz.PATIENCE), 20, 0)
    assert all(f"{name}: {20 if name in fuzz.PATIENCE else 100} inputs" in said for name in fuzz.TARGETS), (
        said
    )
