"""What a run saves: checkpoints, one before an early end, and the final model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpo_fn as g
from runners.checkpoints.run_folder import FolderGone, RunFolder
from runners.checkpoints.saving import Saver
from runners.checkpoints.snapshot import Snapshot, take_snapshot
from runners.models.model_writer import save_final
from runners.telemetry.diary import Diary
from runners.telemetry.log import MetricsLog
from runners.tokenization.prompt_settings import PromptSettings
from runners.training.loop_state import LoopState
from runners.training.setup import Run
from runners.training.steps import TrainSteps


class RunSaves:
    """Saves a run into its folder, from its steps, its `LoopState` and the facts of its parts."""

    def __init__(
        self,
        run: Run,
        steps: TrainSteps,
        at: LoopState,
        *,
        folder: RunFolder,
        log: MetricsLog,
        report: Diary,
        saver: Saver,
        facts: Mapping[str, Any],
        parts: Sequence[Any],
        elapsed: Callable[[], float],
    ) -> None:
        """`facts`: what every trainer_state.json holds; `parts` have more of them, by `facts()`."""
        self.run, self.steps, self.at = run, steps, at
        self.folder = folder
        self.log, self.report, self.saver = log, report, saver
        self.facts, self.parts, self.elapsed = facts, parts, elapsed
        self.prompt = PromptSettings.of(run.config.to_dict())

    def save(self, why: str = "", *, strict: bool = False) -> None:
        """Saves a checkpoint, which rank 0 writes; with `strict` it is on the disk when this returns."""
        with self.run.ranks.committing("the checkpoint"):
            whole = self.steps.whole()
            self.saver.save(lambda: self._snapshot(whole), self._place(), why, strict=strict)
            if strict:
                # A rank that ends earlier would end the others too.
                self.run.ranks.all_gather_object("the save")

    def save_to_stop(self, why: str) -> None:
        """Saves a checkpoint before the run ends early, unless the last one is current."""
        self.saver.wait()
        missing = bool(self.at.batch_step) and self.saver.done != self._place()
        if self.run.ranks.all_gather_object("what is saved", missing)[0].value:
            self.report.status("saving")
            self.save(why, strict=True)

    def save_final(self, state: g.TrainState) -> Path:
        """Writes the final model; if the run's folder is gone, into a new one."""
        try:
            return save_final(self.folder.here(), state, self.run.loaded, self.prompt)
        except FolderGone:
            with self.folder.anew() as folder:
                return save_final(folder.path, state, self.run.loaded, self.prompt)

    def _snapshot(self, state: g.TrainState) -> Snapshot:
        """The complete state of the run. Raises UserError if the log is not yet on the disk up to here."""
        at = self.at
        facts = {**self.facts, "em": at.scores[-1] if at.scores else None, "reward": at.reward}
        for part in self.parts:
            facts |= part.facts()
        facts |= {"logs": self.log.positions(), "loop": {**at.plain(), "elapsed": self.elapsed()}}
        return take_snapshot(at.batch_step, state, self.run.loaded, facts, at.trees(), prompt=self.prompt)

    def _place(self) -> tuple[int, int]:
        return self.at.batch_step, self.at.update
