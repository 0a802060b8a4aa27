"""The line about a run whose final model is worse than an earlier one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from runners.checkpoints.run_folder import TRAINER_STATE, list_checkpoints
from runners.errors import UserError
from runners.files.json_files import finite_number, read_json

_ERRORS = 2.0  # standard errors of the difference by which a score has to have fallen


def decline_line(folder: Path, scores: Sequence[float], problems: int) -> str | None:
    """What to say if the last score of exact match, 0 to 1, is below the best by more than chance; else None.

    `problems` is the number of held-out ones; the line names the best checkpoint that `folder` still has.
    """
    if len(scores) < 2 or not problems:
        return None
    best = max(scores)
    last = scores[-1]
    variance = (best * (1 - best) + last * (1 - last)) / problems
    if best - last <= _ERRORS * math.sqrt(variance):
        return None
    line = f"the final model is worse than an earlier one: exact match fell from {best:.1%} to {last:.1%}"
    kept = max(list_checkpoints(folder), key=_score, default=None)
    if kept is not None and _score(kept) > last:
        return f"{line}; {kept} has {_score(kept):.1%}: `grpo export {kept}` exports it"
    return (
        f"{line}; no better checkpoint was kept: set checkpoint.every, or lower optim.learning_rate"
    )


def _score(checkpoint: Path) -> float:
    try:
        score = finite_number(read_json(checkpoint / TRAINER_STATE).get("em"))
    except UserError:  # a damaged one is not recommended
        score = None
    return -1.0 if score is None else score
