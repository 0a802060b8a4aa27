"""Updates that were skipped because a number was not finite: counts them, saves their inputs, and ends a run
that has too many in a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import grpo_fn as g
from runners.checkpoints.run_folder import BAD_BATCHES
from runners.errors import NumbersError, UserError
from runners.files.durable import new_folder, remove_folder
from runners.files.json_files import to_json
from runners.files.tensor_files import save_arrays
from runners.rewards.experience import Experience
from runners.telemetry.records import completion_records
from runners.training.session import Session

MOST_BAD_BATCHES = 10
_NAME = re.compile(r"update-(\d+)")


def count_bad_update(session: Session, metrics: dict[str, Any]) -> list[str]:
    """Counts an update that was skipped, and saves its inputs; returns the lines to show.

    `metrics` are the update's; "bad_updates", the run's count so far, is added if it is not 0.
    """
    state, skipped = session.state, bool(metrics.get("update_skipped"))
    in_a_row = state.bad_updates_in_a_row + 1 if skipped else 0
    session.change(bad_updates=state.bad_updates + skipped, bad_updates_in_a_row=in_a_row)
    if session.state.bad_updates:
        metrics["bad_updates"] = session.state.bad_updates
    if not skipped:
        return []
    why = _why(metrics)
    line = f"update {metrics['update']} skipped: {why}; the weights are unchanged"
    if not state.experiences:
        return [f"{line}; its completions were sampled before the run was resumed"]
    try:
        path = save_bad_batch(session.folder.here(), why, metrics, state.experiences)
    except UserError as error:  # the disk fails: one record less, but no reason to stop
        return [line, str(error)]
    return [f"{line}; its inputs are in {path}"]


def check_bad_updates(session: Session) -> None:
    """If too many updates in a row were skipped: saves the last good state, and raises NumbersError."""
    limit, in_a_row = session.config.optim.max_bad_updates, session.state.bad_updates_in_a_row
    if not limit or in_a_row < limit:
        return
    session.shown.status("saving")
    session.save("the last good state: ", strict=True)
    raise NumbersError(
        f"{in_a_row} updates in a row had numbers that are not finite (optim.max_bad_updates = {limit}); the "
        "last good state has been saved; lower optim.learning_rate, or look into "
        f"{session.run.folder / BAD_BATCHES}"
    )


def save_bad_batch(
    run_dir: Path, why: str, metrics: Mapping[str, Any], experiences: Sequence[Experience]
) -> Path:
    """Writes `bad_batches/update-N` with batch.safetensors and batch.json; the last 10 such folders are kept.

    The arrays are a rollout's, rows prompt-major: `prompts_pl` (0 behind `prompt_lengths_p`), `tokens_bt`,
    `lengths_b`, `logp_bt`, `rewards_kb` (one row a reward; NaN: none), `rewards_pg`, `advantages_pg`.

    Raises UserError if the disk refuses.
    """
    folder = run_dir / BAD_BATCHES / f"update-{metrics['update']}"
    rollout = g.join_rollouts([experience.rollout for experience in experiences])
    longest = max(map(len, rollout.prompts))
    arrays = {
        "prompts_pl": mx.array([[*prompt, *[0] * (longest - len(prompt))] for prompt in rollout.prompts]),
        "prompt_lengths_p": mx.array([len(prompt) for prompt in rollout.prompts]),
        "tokens_bt": rollout.tokens_bt,
        "lengths_b": rollout.lengths_b,
        "logp_bt": rollout.logp_bt,
        "rewards_kb": mx.array(np.concatenate([each.values_kb for each in experiences], axis=1), mx.float32),
        "rewards_pg": mx.array(np.concatenate([each.rewards_pg for each in experiences]), mx.float32),
        "advantages_pg": mx.concatenate([each.advantages_pg for each in experiences]),
    }
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, str)}
    first = metrics["batch_step"] - len(experiences) + 1
    records = [
        record
        for step, each in enumerate(experiences, first)
        for record in completion_records(each, step, metrics["update"])
    ]
    text, _ = to_json({"why": why, "metrics": numbers, "completions": records})
    try:
        with new_folder(folder) as temporary:
            save_arrays(temporary / "batch.safetensors", arrays, {"format": "mlx"})
            (temporary / "batch.json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        found = {int(m[1]): path for path in folder.parent.iterdir() if (m := _NAME.fullmatch(path.name))}
        for number in sorted(found)[:-MOST_BAD_BATCHES]:
            remove_folder(found[number])
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return folder


def _why(metrics: Mapping[str, Any]) -> str:
    if not np.isfinite(metrics["loss"]):
        return f"its loss is {metrics['loss']}"
    if not np.isfinite(metrics["grad_norm"]):
        return f"the norm of its gradient is {metrics['grad_norm']}"
    return "the new weights would not be finite"
