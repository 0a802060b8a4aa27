"""docs/models.md has a row for every module of mlx-lm."""

import re
from pathlib import Path

from benchmarks.architectures.small_models import modules

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_every_module_has_a_row():
    """None is missing, none is there that mlx-lm does not have."""
    assert re.findall(r"^\| `([^`]+)` \| \w+ \|", PAGE.read_text(), re.MULTILINE) == modules()
