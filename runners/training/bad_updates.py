"""Updates that were skipped because a number was not finite: counts them, and ends a run of too many."""

from __future__ import annotations

import math
from typing import Any

from runners.errors import NumbersError
from runners.training.session import Session


def count_bad_update(session: Session, metrics: dict[str, Any]) -> list[str]:
    """Counts an update that was skipped; returns the lines to show.

    `metrics` are the update's; "bad_updates", the run's count so far, is added if it is not 0.
    """
    state, skipped = session.state, bool(metrics.get("update_skipped"))
    in_a_row = state.bad_updates_in_a_row + 1 if skipped else 0
    session.change(bad_updates=state.bad_updates + skipped, bad_updates_in_a_row=in_a_row)
    if session.state.bad_updates:
        metrics["bad_updates"] = session.state.bad_updates
    if not skipped:
        return []
    why = "the new weights would not be finite"
    if not math.isfinite(metrics["loss"]):
        why = f"its loss is {metrics['loss']}"
    elif not math.isfinite(metrics["grad_norm"]):
        why = f"the norm of its gradient is {metrics['grad_norm']}"
    return [f"update {metrics['update']} skipped: {why}; the weights are unchanged"]


def check_bad_updates(session: Session) -> None:
    """If too many updates in a row were skipped: saves the last good state, and raises NumbersError."""
    limit, in_a_row = session.config.optim.max_bad_updates, session.state.bad_updates_in_a_row
    if not limit or in_a_row < limit:
        return
    session.shown.status("saving")
    session.save("the last good state: ", strict=True)
    raise NumbersError(
        f"{in_a_row} updates in a row had numbers that are not finite (optim.max_bad_updates = {limit}); the "
        "last good state has been saved; lower optim.learning_rate, or look at these updates' completions"
    )
