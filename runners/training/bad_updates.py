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
from runners.checkpoints.run_folder import BAD_BATCHES, RunFolder
from runners.errors import NumbersError, UserError, count_in
from runners.files.durable import new_folder, remove_folder, save_arrays
from runners.files.json_lines import to_json
from runners.rewards.experience import Experience
from runners.telemetry.records import completion_records

MOST_BAD_BATCHES = 10
_NAME = re.compile(r"update-(\d+)")


class BadUpdates:
    """Counts skipped updates, and writes their inputs to disk."""

    def __init__(self, folder: RunFolder, limit: int) -> None:
        """`folder` is the run's; `limit` is optim.max_bad_updates: so many in a row end the run; 0: never."""
        self._folder, self._limit = folder, limit
        self.total = self.in_a_row = 0

    def see(
        self,
        metrics: dict[str, Any],
        experiences: Sequence[Experience],
    ) -> list[str]:
        """Takes in an update; returns the lines to show if it was skipped.

        Args:
            metrics: of the update; "bad_updates", the run's count so far, is added if it is not 0.
            experiences: the update's batch steps, as far as this process has sampled them.
        """
        skipped = bool(metrics.get("update_skipped"))
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.total += skipped
        if self.total:
            metrics["bad_updates"] = self.total
        if not skipped:
            return []
        why = _why(metrics)
        line = f"update {metrics['update']} skipped: {why}; the weights are unchanged"
        if not experiences:
            return [f"{line}; its completions were sampled before the run was resumed"]
        try:
            path = save_bad_batch(self._folder.here(), why, metrics, experiences)
        except UserError as error:  # the disk fails: one record less, but no reason to stop
            return [line, str(error)]
        return [f"{line}; its inputs are in {path}"]

    def check(self) -> None:
        """Raises NumbersError if too many updates in a row were skipped."""
        if self._limit and self.in_a_row >= self._limit:
            raise NumbersError(
                f"{self.in_a_row} updates in a row had numbers that are not finite (optim.max_bad_updates = "
                f"{self._limit}); the last good state has been saved; lower optim.learning_rate, or look into"
                f" {self._folder.path / BAD_BATCHES}"
            )

    def facts(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"bad_updates": self.total, "bad_updates_in_a_row": self.in_a_row}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continues from a checkpoint's facts. Raises UserError if `facts` did not make them."""
        self.total = count_in(facts, "bad_updates", 0)
        self.in_a_row = count_in(facts, "bad_updates_in_a_row", 0)


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
