"""Writes what is made from the code: parts of docs/*.md, and runners/config/loss_keys.json.

`python docs/manual/written.py` writes them; a test checks that they are current. A part of a page stands
between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MIGRATION = Path(__file__).with_name("migration.tsv")
LOSS_KEYS = ROOT / "runners" / "config" / "loss_keys.json"
_PART = re.compile(
    r"(?P<begin><!-- (?P<name>[^>]+):begin -->\n).*?(?P<end>\n<!-- (?P=name):end -->)", re.DOTALL
)


def rendered(page: str, text: str) -> str:
    """The page's text with its parts as the code has them.

    Raises ValueError for a part without a place, or a place without a part.
    """
    tables = PAGES[page]()
    made = {
        f"{page.removesuffix('.md')} {title}": "\n".join(rows) for title, rows in tables.items()
    }
    places = [found[2] for found in _PART.finditer(text)]
    if sorted(places) != sorted(made):
        raise ValueError(f"{page}: expected places for {sorted(made)}, found {sorted(places)}")
    return _PART.sub(lambda found: found[1] + made[found[2]] + found[3], text)


def metric_tables() -> dict[str, list[str]]:
    """The lines of the Markdown table of each section of metrics."""
    from runners.metrics import METRICS

    found: dict[str, list[str]] = {}
    for metric in METRICS.values():
        row = (f"`{metric.name}`", metric.unit, metric.meaning, metric.normal, metric.otherwise)
        head = ["| name | unit | what it is | normal | if not |", "|---|---|---|---|---|"]
        found.setdefault(metric.section, head).append(f"| {' | '.join(row)} |")
    return found


def key_tables() -> dict[str, list[str]]:
    """The lines of the Markdown table of each section of the config."""
    from runners.config.loading import KEYS
    from runners.config.rules import cells

    found: dict[str, list[str]] = {}
    for (section, *path), field in KEYS.items():
        head = ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
        row = f"| `{'.'.join(path)}` | {' | '.join(cells(field))} |"
        found.setdefault(section, head).append(row)
    return found


def flat_tables() -> dict[str, list[str]]:
    """The lines of the Markdown tables of MLX-GRPO's keys, and of the values that its script fixes."""
    from runners.config.flat_keys import FIXED, FLAT_KEYS
    from runners.errors import spell

    keys = ["| flat key | here | MLX-GRPO's default |", "|---|---|---|"]
    for name, flat in FLAT_KEYS.items():
        only = f", if `{flat.unless}` is not set" if flat.unless else ""
        default = "–" if flat.default is None else f"`{spell(flat.default)}`"
        keys.append(f"| `{name}` | `{flat.target}`{flat.note}{only} | {default} |")
    fixed = [f"| `{target}` | `{spell(value)}` |" for target, value in FIXED.items()]
    return {"keys": keys, "fixed": ["| here | value |", "|---|---|", *fixed]} | option_tables()


def option_tables() -> dict[str, list[str]]:
    """The lines of the Markdown table of each other trainer's options, from migration.tsv.

    Its columns: trainer, option, key here, the option's default, what differs.
    """
    from runners.config.loading import KEYS
    from runners.config.rules import cells

    defaults = {".".join(path): cells(field)[1] for path, field in KEYS.items()}
    found: dict[str, list[str]] = {}
    for line in MIGRATION.read_text(encoding="utf-8").splitlines():
        trainer, option, here, default, note, *_ = [*line.split("\t"), "", ""]
        named = [defaults[code] for code in re.findall(r"`([^`]+)`", here) if code in defaults]
        named = ["[text](config.md#data)" if each == "below" else each for each in named]
        row = [option, here, default, ", ".join(named) or "–", note]
        head = [trainer, "here", f"{trainer}'s default", "default here", "what differs"]
        if trainer == "verl":  # its defaults are in several files
            del row[2:4], head[2:4]
        top = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        found.setdefault(trainer, top).append(f"| {' | '.join(row)} |")
    return found


PAGES = {"config.md": key_tables, "metrics.md": metric_tables, "migrating.md": flat_tables}


def loss_keys() -> str:
    """What LossSpec says of its fields, and the presets' names, as runners/config/loss_keys.json has them."""
    import attrs

    from grpo_fn import PRESETS, LossSpec
    from grpo_fn.algorithm import CHOICES
    from runners.config.rules import words

    meaning = "the algorithm; the keys below override parts of it"
    found: dict[str, dict[str, Any]] = {
        "preset": {"type": "string", "range": "", "choices": [*PRESETS], "meaning": meaning}
    }
    for field in attrs.fields(attrs.resolve_types(LossSpec)):
        stated = {"type": words(field.type).removeprefix("a "), "range": field.metadata["range"]}
        choices = [*CHOICES.get(field.name, ())]
        found[field.name] = {**stated, "choices": choices, "meaning": field.metadata["meaning"]}
    lines = ",\n".join(
        f'"{name}": {json.dumps(key, ensure_ascii=False)}' for name, key in found.items()
    )
    return f"{{\n{lines}\n}}\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    LOSS_KEYS.write_text(loss_keys(), encoding="utf-8")  # first: the config's classes read it
    for path in (ROOT / "docs" / page for page in PAGES):
        before = path.read_text(encoding="utf-8")
        after = rendered(path.name, before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"written: docs/{path.name}")
