"""Writes the parts of docs/*.md that are made from the code: `python docs/manual/written.py`.

A part stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. A test checks that all of them are up to
date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PART = re.compile(
    r"(?P<begin><!-- (?P<name>[^>]+):begin -->\n).*?(?P<end>\n<!-- (?P=name):end -->)", re.DOTALL
)


def rendered(page: str, text: str) -> str:
    """The page's text with its parts as the code has them.

    Raises ValueError for a part without a place, or a place without a part.
    """
    from runners.metrics import tables

    made = {f"metrics {title}": table for title, table in tables().items()} if page == "metrics.md" else {}
    places = [found[2] for found in _PART.finditer(text)]
    if sorted(places) != sorted(made):
        raise ValueError(f"{page}: expected places for {sorted(made)}, found {sorted(places)}")
    return _PART.sub(lambda found: found[1] + made[found[2]] + found[3], text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path in sorted((ROOT / "docs").glob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = rendered(path.name, before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"written: docs/{path.name}")
