"""The files of `grpo difficulty`: how often a model passed each training prompt, a JSON object a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from runners.config.sections import DataConfig
from runners.data.curriculum import Estimates, measured
from runners.data.prompts import Example
from runners.errors import UserError
from runners.files.json_lines import LineFile


def read_difficulty(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; docs/curriculum.md lists their keys. UserError if it is no such file."""
    file = LineFile(path)
    lines = list(file.read())
    if file.bad or not all(map(_fits, lines)):
        expected = 'lines {"prompt": HASH, "samples": K, "passes": from 0 to K}'
        raise UserError(f"{path}: expected {expected}, as `grpo difficulty` writes them")
    return lines


def _fits(line: dict[str, Any]) -> bool:
    prompt, samples, passes = (line.get(name) for name in ("prompt", "samples", "passes"))
    return isinstance(prompt, str) and type(samples) is type(passes) is int and 0 <= passes <= samples


def with_difficulty(
    examples: Sequence[Example], config: DataConfig
) -> tuple[list[Example], np.ndarray | None, Estimates | None, tuple[str, ...]]:
    """The training prompts as data.curriculum has them, numbered in their order.

    Returns them; with "static" the measured rate of each, by which a stream orders them; what a run knows of
    them before its first step, None without a curriculum; and a line on those that are left out.

    Raises UserError if none is left, or if no prompt is in the file.
    """
    if config.curriculum == "none":
        return list(examples), None, None, ()
    lines = read_difficulty(Path(config.difficulty)) if config.difficulty else []
    counts = measured(examples, lines)
    if lines and not any(count for _, count in counts):
        raise UserError(
            f"data.difficulty = {config.difficulty}: none of the {len(examples)} training prompts is in it; "
            "it was measured with other data, or another system prompt"
        )
    if config.curriculum == "static":
        low, high = config.pass_rates
        fits = [count > 0 and low <= passes / count <= high for passes, count in counts]
        left_out = len(fits) - sum(fits)
        if left_out == len(fits):
            raise UserError(
                f"data.difficulty = {config.difficulty}: no prompt has a pass rate from {low:g} to {high:g} "
                "(data.pass_rates)"
            )
        examples = [example for example, fit in zip(examples, fits, strict=True) if fit]
        counts = [count for count, fit in zip(counts, fits, strict=True) if fit]
        notices = (
            f"data.curriculum: {left_out} of {len(fits)} training prompts are left out, as their pass rate "
            f"is not from {low:g} to {high:g}, or was not measured",
        )
    else:
        notices = ()
    estimates = Estimates.of(counts)
    numbered = [attrs.evolve(example, number=number) for number, example in enumerate(examples)]
    return numbered, estimates.first_n if config.curriculum == "static" else None, estimates, notices
