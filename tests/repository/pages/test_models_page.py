"""docs/models.md has a row for every module of mlx-lm, and its counts are those of its rows."""

import re
from pathlib import Path

from benchmarks.architectures.small_models import modules

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
