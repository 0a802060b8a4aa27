"""docs/gsm8k.md: its forecasts are those of today's code; what users send in from Macs is a result."""

import re

import pytest

from benchmarks.forecast import PAGE, rendered
from benchmarks.harness.record import RESULTS, load_records

SENT = sorted((RESULTS / "metal").glob("*/*.json"))


def test_the_forecasts_are_up_to_date():
    """The table is what `python -m benchmarks.forecast --write` would write."""
    text = PAGE.read_text(encoding="utf-8")
    assert rendered(text) == text


@pytest.mark.parametrize("file", SENT, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_what_was_sent_in_is_a_result_of_metal(file):
    """It loads, is of the backend metal alone, and names no folder of the sender's machine."""
    assert set(load_records(file)) == {"metal"}
    assert not re.search(r"/(Users|home|private)/", file.read_text(encoding="utf-8"))
