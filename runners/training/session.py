"""Manages a run in progress: holds its current state, and commits, saves and ends it."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

import grpo_fn as g
from runners.checkpoints.checkpoint import prune_checkpoints, write_checkpoint
from runners.checkpoints.run_folder import check_place, place_of, saved_best
from runners.config.conditions import Condition
from runners.errors import NumbersError, UserError, gigabytes
from runners.files.durable import disk_errors, flush
from runners.files.run_files import BEST
from runners.machine.mac_power import PowerWatch
from runners.machine.memory_readings import swap_limit, swap_used
from runners.machine.terminal import OutputLost
from runners.memory.metal_limits import keep_cache_of
from runners.models.model_writer import save_model
from runners.telemetry.diary import Diary
from runners.telemetry.log import MetricsLog
from runners.telemetry.run_watch import Watch
from runners.tokenization.prompt_settings import PromptSettings
from runners.training.ahead import Ahead
from runners.training.plan import plan_of
from runners.training.run_state import RunState
from runners.training.setup import Run


class Session:
    """A run in progress.

    `state` is replaced only within `committing`, on all ranks or on none. Therefore, a signal may
    interrupt any other code: the current step is dropped, and the last committed state is saved.
    """

    def __init__(
        self, run: Run, state: RunState, *, log: MetricsLog, shown: Diary, facts: Mapping[str, Any]
    ) -> None:
        """Creates a session. `state` is the state from which the run starts or resumes. `facts` are
        constant entries in every trainer_state.json.
        """
        self.run = run
        self.config = run.config
        self.ranks = run.ranks
        self.state = state
        self.log = log
        self.shown = shown
        self.plan = plan_of(run, shown)
        self.ahead = Ahead(self.plan) if self.config.rollout.max_staleness else None
        self.watch = Watch(
            self.config, list(filter(None, map(Condition.parse, self.config.stop.when)))
        )
        self._place = place_of(run.folder)
        self._facts = facts
        self._prompt = PromptSettings.of(self.config.to_dict())
        self._log_fault: str | None = None  # the last log fault that was reported
        self._saved: tuple[int, int] | None = None  # batch step and update of the last checkpoint
        self._lost: str | None = None  # why rank 0's display has no reader
        self._swap_limit = swap_limit(self.config.system.swap_limit_gb)
        self._swap = swap_used() or 0 if self._swap_limit else 0  # at the start of the run
        self.power = PowerWatch()
        self._started = time.perf_counter()
        self.ranks.watchdog.on_fault = lambda line: log.log({**self.place(), "fault": line})
        g.materialize(state.train, state.waiting)

    def place(self) -> dict[str, int]:
        """Returns the current update and batch step, for log entries."""
        return {"update": self.state.update, "batch_step": self.state.batch_step}

    def elapsed(self) -> float:
        """Returns the run's duration in seconds, including the time before a resume."""
        return self.state.elapsed + time.perf_counter() - self._started

    @property
    def finished(self) -> bool:
        """Whether no step remains."""
        state = self.state
        if self.plan.update_due(state):
            return False
        return bool(state.seen.reached) or state.batch_step >= self.run.length.batch_steps

    def begin(self, phase: str, text: str) -> None:
        """Shows which phase of the run begins, and adapts MLX's cache limit to its memory
        forecast.
        """
        self.shown.status(text)
        if self.ahead is None:  # otherwise, phases overlap
            keep_cache_of(self.run.phases.get(phase))

    @contextmanager
    def committing(self, step: str) -> Iterator[None]:
        """Runs a block that replaces the run's state, on all ranks or on none. No signal interrupts
        the block.
        """
        fault = self.shown.fault
        with self.ranks.committing(step, None if fault is None else str(fault)) as faults:
            self._lost = faults[0]
            yield
            # Another thread could not evaluate these arrays.
            g.materialize(self.state.train, self.state.waiting)

    def change(self, **changes: Any) -> None:
        """Replaces fields of the state. Call this method only within `committing`."""
        self.state = attrs.evolve(self.state, **changes)

    # saves

    def save_if_due(self) -> None:
        """Saves a checkpoint if checkpoint.every requests one now."""
        every = self.config.checkpoint.every
        if every and self.state.batch_step % every == 0 and not self.plan.update_due(self.state):
            self.save()

    def save(self, why: str = "", *, strict: bool = False) -> None:
        """Saves a checkpoint, which rank 0 writes. With `strict`, the method returns only after the
        checkpoint has been written to the disk, and errors are raised regardless of
        checkpoint.on_error.
        """
        with self.plan.times.timing("checkpoint"), self.ranks.committing("the checkpoint"):
            if self.ranks.is_rank_zero:
                self._write(why, strict)
            if strict:
                # A rank that ended earlier would also end the others.
                self.ranks.all_gather_object("the save")

    def save_to_stop(self, why: str) -> None:
        """Saves a checkpoint before the run ends early, unless the last checkpoint is current or no
        step has finished.
        """
        state = self.state
        begun = state.batch_step > 0 or state.evaluated_at >= 0  # an evaluation is worth saving too
        missing = begun and self._saved != (state.batch_step, state.update)
        if self.ranks.all_gather_object("what is saved", missing)[0]:
            self.shown.status("saving")
            self.save(why, strict=True)

    def save_best_if_due(self) -> None:
        """Writes the weights to best/ if their evaluation is the best so far, unless best/ already
        contains them.
        """
        state = self.state
        best = state.seen.progress.held_out
        if best is None or best.update != state.update or not self.config.checkpoint.keep_best:
            return
        with self.ranks.committing("the best model"):
            if self.ranks.is_rank_zero and saved_best(self.run.folder).get("update") != best.update:
                scores = {"em": state.scores, "eval/reward": state.eval_rewards}
                measured = {name: values[-1] for name, values in scores.items() if values}
                try:
                    self._save_model(BEST, {"update": state.update, **measured})
                except UserError as error:
                    self.failed(error)

    def _save_model(self, name: str, evaluation: dict[str, Any] | None = None) -> Path:
        """Writes the current weights as a model to the subfolder `name` of the run's folder."""
        folder = self.run.folder
        check_place(folder, self._place)
        params = self.state.train.params
        return save_model(
            folder / name, params, self.run.loaded, self._prompt, evaluation=evaluation
        )

    def save_final(self) -> Path:
        """Writes the final model. Raises UserError if that fails."""
        final = self.run.folder / "final"
        fault = None
        try:
            if self.ranks.is_rank_zero:
                final = self._save_model("final")
        except UserError as error:
            fault = error
        if self.ranks.any_rank("the final model", fault is not None):
            # The disk may be full, but a checkpoint may be smaller, or space may have been freed.
            try:
                self.save_to_stop("could not save the final model, only the training state: ")
            finally:
                if fault is not None:
                    raise fault
        return final

    def _write(self, why: str, strict: bool) -> None:
        """Flushes the run's logs to the disk, and writes the complete state of the run."""
        folder = self.run.folder
        keep = self.config.checkpoint
        state = attrs.evolve(self.state, elapsed=self.elapsed())
        try:
            check_place(folder, self._place)
            plain, trees = state.saved()
            facts = {
                **self._facts,
                "em": state.em,
                "eval_reward": state.eval_rewards[-1] if state.eval_rewards else None,
                "reward": state.reward,
                "logs": self.log.positions(),
                "loop": plain,
            }
            with disk_errors(f"{folder}: checkpoint-{state.batch_step} cannot be saved"):
                for log in self.log.names:
                    flush(folder / log)
                path = write_checkpoint(
                    folder,
                    state.batch_step,
                    state.train,
                    self.run.loaded,
                    facts,
                    trees,
                    prompt=self._prompt,
                )
                prune_checkpoints(folder, keep_last=keep.keep_last, keep_best=keep.keep_best)
        except UserError as error:
            self.failed(error, strict)
        else:
            self._saved = (state.batch_step, state.update)
            self.shown.note(f"{why}saved {path}")

    def failed(self, error: UserError, strict: bool = False) -> None:
        """Continues after reporting the error, or raises it, according to checkpoint.on_error. With
        `strict`, the error is raised regardless of this setting.
        """
        if strict or self.config.checkpoint.on_error == "stop":
            raise error
        self.shown.note(f"{error}; the run continues (checkpoint.on_error)")

    # ends

    def check_output(self) -> None:
        """Saves the run and raises OutputLost if the display's output was closed."""
        if self._lost is not None:
            end = OutputLost(self.shown.fault or OSError(self._lost))
            self.shown.note(f"{end}: the run ends")
            self.save_to_stop("interrupted: ")
            self.ranks.agreed_to_end()
            raise end

    def check_bad_updates(self) -> None:
        """Saves the last good state and raises NumbersError if too many consecutive updates were
        skipped.
        """
        limit = self.config.optim.max_bad_updates
        in_a_row = self.state.bad_updates_in_a_row
        if limit and in_a_row >= limit:
            self.shown.status("saving")
            self.save("the last good state: ", strict=True)
            raise NumbersError(
                f"{in_a_row} consecutive updates contained NaN or infinite values "
                f"(optim.max_bad_updates = {limit}); the last good state was saved; lower "
                "optim.learning_rate, or look at these updates' completions"
            )

    def check_swap(self) -> None:
        """Saves the run and raises UserError if the system has swapped out more than
        system.swap_limit_gb since the start.
        """
        if not self._swap_limit:
            return
        grown = (swap_used() or 0) - self._swap
        if self.ranks.any_rank("the swap", grown > self._swap_limit):
            self.save_to_stop("stopped before the system swaps more: ")
            raise UserError(
                f"{self.config.where('system.swap_limit_gb')}: the system has swapped out "
                f"{gigabytes(grown)} since the start; lower system.micro_batch_tokens or "
                "rollout.max_batch, or close programs, and continue with --resume"
            )

    def check_log(self) -> None:
        """Reports once that a log line cannot be written. The line is written later, when space is
        available.
        """
        fault = self.log.fault()
        if fault and fault != self._log_fault:
            self.failed(UserError(fault))
        self._log_fault = fault
