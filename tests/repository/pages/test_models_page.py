"""docs/models.md has a row for every module of mlx-lm, and its counts are those of its rows."""

import re
from pathlib import Path

from benchmarks.architectures.page import row_of
from benchmarks.architectures.small_models import modules
from benchmarks.architectures.trial import SLOWER, Outcome

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def rows():
    """Architecture and verdict of each row."""
    return re.findall(r"^\| `([^`]+)` \| (\w+) \|", PAGE.read_text(), re.MULTILINE)


def test_every_module_has_a_row():
    """None is missing, none is there that mlx-lm does not have."""
    assert [name for name, _ in rows()] == modules()


def test_the_counts_are_those_of_the_rows():
    """The sentence above the table."""
    verdicts = [verdict for _, verdict in rows()]
    works, slower, refused = (verdicts.count(each) for each in ("works", "slower", "refused"))
    assert works + slower + refused == len(verdicts)
    text = f"Of {len(verdicts)} architectures {works} work, {slower} work slower, and {refused} are refused."
    assert text in PAGE.read_text()


def test_a_verdict_follows_from_the_outcomes():
    """A fault of decoding refuses; one of LoRA alone is a word; equal lengths are slower."""
    right = [Outcome("load"), Outcome("gradient")]
    assert row_of(right) == ("works", "")
    assert row_of([*right, Outcome("ragged", note=SLOWER)]) == ("slower", "")
    assert row_of([Outcome("load"), Outcome("equal", "off by 1")]) == ("refused", "equal: off by 1")
    assert row_of([*right, Outcome("lora", "off by 1")])[0] == "works"
