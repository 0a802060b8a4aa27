"""Checkpoints: folders that mlx-lm opens, written completely or not at all; and which ones are kept.

A checkpoint keeps the master weights (float32, exact) and the rest of the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runners.checkpoints.manifest import write_manifest
from runners.checkpoints.run_folder import TRAINER_STATE, list_checkpoints
from runners.checkpoints.state_files import STATE_FILE, pack_state
from runners.checkpoints.trainer_state import VERSION
from runners.errors import UserError
from runners.files.durable import new_folder, remove_folder
from runners.files.json_files import finite_number, read_json, to_json
from runners.files.tensor_files import save_arrays
from runners.models.loaded_model import LoadedModel
from runners.models.model_writer import trained, write_trained
from runners.tokenization.prompt_settings import PromptSettings, write_prompt

if TYPE_CHECKING:
    from grpo_fn.learner import TrainState


def write_checkpoint(
    run_dir: Path,
    step: int,
    state: TrainState,
    loaded: LoadedModel,
    trainer_state: Mapping[str, Any],
    loop: Mapping[str, Any] | None = None,
    *,
    prompt: PromptSettings | None = None,
) -> Path:
    """Writes `run_dir/checkpoint-{step}` and returns it. A folder of that name is replaced.

    Args:
        run_dir: the run's folder.
        step: the batch step.
        state: the training state.
        loaded: the model the state belongs to.
        trainer_state: JSON values of the loop; "em" and "reward" rank the folder for `prune_checkpoints`.
        loop: trees of arrays that belong to the state.
        prompt: how the model is asked; written to a separate file.

    Raises UserError if the disk refuses; then the existing files are unchanged.
    """
    weights = trained(state.params, loaded)
    arrays, metadata = pack_state(state, weights, loop or {})
    with new_folder(run_dir / f"checkpoint-{step}") as folder:
        write_trained(folder, weights, loaded)
        save_arrays(folder / STATE_FILE, arrays, metadata)
        if prompt is not None:
            write_prompt(folder, prompt)
        line, _ = to_json({"version": VERSION, "step": step, **trainer_state})
        (folder / TRAINER_STATE).write_text(line + "\n", encoding="utf-8")
        write_manifest(folder)
    return run_dir / f"checkpoint-{step}"


def prune_checkpoints(run_dir: Path, *, keep_last: int = 0, keep_best: int = 0) -> None:
    """Deletes checkpoints beyond the last `keep_last` and the best `keep_best`; with `keep_last` 0 none.

    Best is the highest "em" in trainer_state.json, then the highest "eval_reward", then "reward", then the
    newest; a missing or null number ranks lowest.
    """
    folders = list_checkpoints(run_dir)
    if keep_last <= 0:
        return
    ranked = sorted(folders, key=lambda folder: (_score(folder), folders.index(folder)), reverse=True)
    for folder in {*folders} - {*folders[-keep_last:], *ranked[:keep_best]}:
        remove_folder(folder)


def _score(folder: Path) -> list[float]:
    try:
        state = read_json(folder / TRAINER_STATE)
    except UserError:  # a damaged one is deleted first
        state = {}
    numbers = [finite_number(state.get(name)) for name in ("em", "eval_reward", "reward")]
    return [-math.inf if number is None else number for number in numbers]
