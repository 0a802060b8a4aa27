"""The files of `grpo difficulty`: how often a model passed each training prompt, a JSON object a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from runners.config.sections import DataConfig
from runners.data.curriculum import Estimates, measured
from runners.data.prompts import Example
from runners.errors import UserError
from runners.files.json_lines import LineFile


def read_difficulty(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; docs/curriculum.md lists their keys. UserError if it is no such file."""
    file = LineFile(path)
    lines = list(file.read())
    keys = ("prompt", "passes", "samples")
    kinds = {tuple(type(line.get(key)) for key in keys) for line in lines}
    if file.bad or kinds - {(str, int, int)} or any(line["passes"] > line["samples"] for line in lines):
        expected = 'lines {"prompt": HASH, "samples": K, "passes": from 0 to K}'
        raise UserError(f"{path}: expected {expected}, as `grpo difficulty` writes them")
    return lines


def with_difficulty(
    examples: Sequence[Example], config: DataConfig
) -> tuple[list[Example], Estimates | None, list[str]]:
    """The training prompts as data.curriculum has them, numbered in their order; what a run knows of them
    before its first step, None without a curriculum; and a line on those that are left out.

    Raises UserError if none is left, or if no prompt is in the file.
    """
    if config.curriculum == "none":
        return list(examples), None, []
    place = f"data.difficulty = {config.difficulty}"
    counts = measured(examples, read_difficulty(Path(config.difficulty)) if config.difficulty else [])
    if config.difficulty and not any(samples for _, samples in counts):
        raise UserError(f"{place}: none of the {len(examples)} training prompts is in it")
    kept = list(zip(examples, counts, strict=True))
    if config.curriculum == "static":
        low, high = config.pass_rates
        kept = [(each, (a, b)) for each, (a, b) in kept if b and low <= a / b <= high]
        if not kept:
            raise UserError(f"{place}: no prompt has a pass rate from {low:g} to {high:g} (data.pass_rates)")
    notice = (
        f"data.curriculum: {len(examples) - len(kept)} of {len(examples)} training prompts are left out, as "
        "their pass rate is outside of data.pass_rates, or was not measured"
    )
    numbered = [attrs.evolve(example, number=number) for number, (example, _) in enumerate(kept)]
    known = Estimates.of([count for _, count in kept])
    return numbered, known, [notice] if len(kept) < len(examples) else []
