"""The loop of a run: its steps to the end, with evaluation, logs and checkpoints.

A step is a batch step (one rollout) or one optimizer update, with its gradients. `TrainState` and `LoopState`
are the complete state of the run; they change only where the ranks commit to a step that is done. So a signal
may interrupt anything else: the step under way is dropped, and what is saved is the state before it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np

import grpo_fn as g
from runners.checkpoints.run_folder import RunFolder
from runners.checkpoints.saving import Saver
from runners.config.conditions import Condition
from runners.errors import NumbersError, RewardError, UserError
from runners.evaluation.episode_figures import logged_figures
from runners.evaluation.exact_match import EvalResult, evaluate_on_ranks
from runners.machine.memory_readings import free_memory
from runners.machine.signals import Stopped
from runners.machine.terminal import OutputLost
from runners.memory.peak_watch import MemoryWatch
from runners.rewards.experience import Experience
from runners.telemetry.constant_rewards import ConstantRewards
from runners.telemetry.diary import Diary
from runners.telemetry.events import Evaluated, Finished, Started, Updated
from runners.telemetry.log import MetricsLog
from runners.telemetry.records import (
    PieceLengths,
    completion_records,
    evaluation_records,
    moved_record,
    run_header,
    run_summary,
    token_record,
)
from runners.telemetry.run_statistics import loss_metrics, penalty_metrics, rollout_metrics
from runners.telemetry.run_watch import Watch
from runners.training.bad_updates import BadUpdates
from runners.training.loop_state import LoopState
from runners.training.rollouts.rank_rollout import skew_metrics
from runners.training.run_saves import RunSaves
from runners.training.setup import Run
from runners.training.steps import TrainSteps


@attrs.frozen(eq=False)
class RunResult:
    """The result of a finished run."""

    folder: Path
    state: g.TrainState
    first_em: float | None  # exact match before the first step; None: not measured
    last_em: float | None
    updates: int
    seconds: float


class Loop:
    """A run in progress: its steps, and the reports, evaluations and checkpoints around them."""

    def __init__(
        self,
        run: Run,
        state: g.TrainState,
        at: LoopState,
        *,
        folder: RunFolder,
        log: MetricsLog,
        report: Diary,
        saver: Saver,
        facts: Mapping[str, Any],
    ) -> None:
        """`state` and `at`: where the run starts or resumes; `facts`: what every trainer_state.json holds."""
        self.log, self.report, self.saver = log, report, saver
        self.run, self.config = run, run.config
        self.steps, self.at = TrainSteps(run, state, at, report.note, report.remark), at
        self.pieces = PieceLengths(run.decoder)
        self.memory = MemoryWatch(self.config.system.memory_limit_gb, run.memory_key)
        self.constant = ConstantRewards([reward.name for reward in run.collector.scorer.rewards])
        self.bad_updates = BadUpdates(folder, self.config.optim.max_bad_updates)
        conditions = [Condition.parse(text) for text in self.config.stop.when]
        self.watch = Watch(self.config.watch, [condition for condition in conditions if condition])
        self.parts = (self.steps, self.bad_updates, self.watch, self.constant)  # those that have facts
        self.saves = RunSaves(
            run,
            self.steps,
            at,
            folder=folder,
            log=log,
            report=report,
            saver=saver,
            facts=facts,
            parts=self.parts,
            elapsed=self._elapsed,
        )
        self._log_fault: str | None = None  # the last reported fault of the log
        self._lost: str | None = None  # why rank 0's display has no reader
        self.ranks = run.ranks
        self.ranks.on_fault(
            lambda line: log.log({"update": at.update, "batch_step": at.batch_step, "fault": line})
        )
        self.started = time.perf_counter()

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continues with the budgets, warnings and skipped updates of a checkpoint's facts.

        Raises UserError if a run cannot have saved them.
        """
        for part in self.parts:
            part.restore(facts)

    def run_to_end(self) -> RunResult:
        """Runs all remaining steps, then the final evaluation, and saves the final model.

        After a signal it saves what is not saved yet, and raises Stopped on all ranks.
        """
        try:
            return self._run_to_end()
        except Stopped as stopped:
            self.ranks.stop_together(stopped)
            self.saves.save_to_stop("interrupted: ")
            self.ranks.agreed_to_end()
            stopped.saved = bool(self.at.batch_step)
            raise

    def save_now(self) -> bool:
        """Saves while the main thread computes; whether there is a state to continue from."""
        self.saves.save_to_stop("interrupted: ")
        return bool(self.at.batch_step)

    def _run_to_end(self) -> RunResult:
        config, at, steps = self.config, self.at, self.steps
        steps.settle()
        run, held_out = self.run, len(self.run.data.evaluation)
        head = run_header(config, run.folder, run.loaded, len(run.data.train), held_out)
        self.report.handle(Started(run.length.updates, head, at.update, at.scores))
        if config.eval.at_start and at.evaluated_at < 0:
            self._evaluate("before training")
        self._evaluate_if_due()  # a signal may have interrupted it
        while steps.update_due() or (at.batch_step < self.run.length.batch_steps and not self.watch.reached):
            self._step()
            self._evaluate_if_due()
            self._check_numbers()
            every = config.checkpoint.every
            if every and at.batch_step % every == 0 and not steps.update_due():
                self.saves.save()
            self._check_output()
        if self.watch.reached:
            self.report.note(f"the run ends early: {self.watch.reached}")
        if at.evaluated_at != at.update:
            self._evaluate("at the end")
        self.saver.wait()
        self.report.status("saving the final model")
        whole = steps.whole()
        final, fault = run.folder / "final", None
        try:
            final = self.saves.save_final(whole) if self.ranks.is_rank_zero else final
        except UserError as error:
            fault = error
        if self.ranks.any_rank("the final model", fault is not None):
            # The disk may be full. A checkpoint may be smaller, or there may be space again.
            with suppress(UserError):
                self.saves.save_to_stop("the final model could not be saved, but the training state is: ")
        if fault is not None:
            raise fault
        first = at.scores[0] if config.eval.at_start and at.scores else None
        last = at.scores[-1] if at.scores else None
        shown = run_summary(
            config,
            final,
            first=first,
            last=last,
            held_out=held_out,
            updates=at.update,
            tokens=at.sampled_tokens,
        )
        if self.watch.reached:
            shown["ended early"] = self.watch.reached
        if self.bad_updates.total:
            shown["updates skipped"] = self.bad_updates.total
        self.report.handle(Finished(shown))
        return RunResult(final.parent, whole, first, last, at.update, self._elapsed())

    def _step(self) -> None:
        """An update if one is due, else a batch step."""
        self.saver.poll()
        if self.steps.update_due():
            self._update()
        else:
            self._batch_step()
        self._check_log()

    def _batch_step(self) -> None:
        """One rollout, cut for its gradients, and the notices about it."""
        self.report.status("sampling")
        try:
            experience = self.steps.roll_out()
        except RewardError:
            self.saves.save_to_stop("before the reward failed: ")
            raise
        parts = self.steps.cut(experience)
        with self._committing("the batch step"):
            self.steps.accept(experience, parts)
            for problem in (*experience.problems, *self.constant.read(experience.values_kb)):
                self.report.note(problem)
            self._log_completions(experience)

    def _update(self) -> None:
        """One optimizer update, with its gradients and its log line."""
        at = self.at
        self.report.status("learning")
        sums, found = self.steps.gradients_of_update()
        # New weights are about to be made: waits for a checkpoint if memory cannot hold both.
        self.saver.wait_for_memory(lambda: free_memory(self.config.system.memory_limit_gb))
        with self._committing("the update"):
            metrics = self._metrics(*self.steps.update(sums, found))
            # Rank 0's values count for all.
            metrics = self.ranks.all_gather_object("the metrics", metrics)[0].value
            self._log_moved()
            at.reward = metrics["reward"] if metrics["reward"] == metrics["reward"] else None
            notes = [*self.bad_updates.see(metrics, self.steps.experiences), *self.watch.see(metrics)]
            last = at.update == self.run.length.updates or self.watch.reached
            if at.update % self.config.log.every == 0 or last:
                self.log.log(metrics)
            self.report.handle(Updated(metrics))
            for line in notes:
                self.report.note(line)
            self.steps.finish_update()

    @contextmanager
    def _committing(self, step: str) -> Iterator[None]:
        """The block changes the run's state: on all ranks or on none, and no signal interrupts it."""
        fault = self.report.fault
        with self.ranks.committing(step, None if fault is None else str(fault)) as messages:
            self._lost = messages[0].value
            yield
            self.steps.settle()

    def _log_completions(self, experience: Experience) -> None:
        """Logs a batch step's completions, and their tokens if the config asks for them."""
        step, update, given = self.at.batch_step, self.at.update + 1, len(self.config.data.nudge)
        if self.log.wants_completions:
            self.log.completions(completion_records(experience, step, update, self.pieces, given))
        if self.log.keeps_tokens:
            mask_bt = np.array(self.steps.counted(experience).mask_bt)
            self.log.tokens(token_record(experience, mask_bt, step, update, self.pieces, given))

    def _log_moved(self) -> None:
        """Logs how the update moved the tokens that it learned from, if log.tokens asks for it."""
        if self.log.keeps_tokens and self.config.log.tokens == "moved":
            first = self.at.batch_step - len(self.steps.experiences) + 1
            for step, experience in enumerate(self.steps.experiences, first):
                logp_bt = np.array(self.steps.logprobs_now(experience))
                self.log.tokens(moved_record(experience, logp_bt, step, self.at.update))

    def _metrics(self, stats: g.LossStats, update: g.UpdateStats) -> dict[str, Any]:
        at, rewards = self.at, [reward.name for reward in self.run.collector.scorer.rewards]
        sampled = sum(tally.sampled_tokens for tally in at.tallies)
        sampling = sum(tally.seconds["rollout"] for tally in at.tallies)
        experts = self.steps.expert_metrics()  # its time counts for the step
        self.steps.times.add("checkpoint", self.saver.stopped_seconds())
        times = self.steps.times.take()
        memory, warning = self.memory.read()
        if warning:
            self.report.note(warning)
        return {
            "update": at.update,
            "batch_step": at.batch_step,
            "epoch": round(self.run.stream.epoch, 4),
            **rollout_metrics(at.tallies, rewards, baseline=self.config.loss.baseline),
            **penalty_metrics(at.tallies, self.config),
            **loss_metrics(stats, update, self.run.learner.spec, self.steps.state.ref_params is not None),
            **experts,
            **self.steps.engine.metrics(),
            "num_tokens": at.sampled_tokens,
            **times,
            "tokens_per_second": sampled / max(sampling, 1e-9),
            "tokens_per_second/step": sampled / max(times["step_time"], 1e-9),
            **self._rank_metrics(),
            "time/elapsed": self._elapsed(),
            **memory,
        }

    def _rank_metrics(self) -> dict[str, Any]:
        """The costs of several ranks: seconds in exchanges and sums, and each rank's rollouts."""
        if self.ranks.is_alone:
            return {}
        seconds = self.ranks.seconds()
        return {
            "ranks/number": self.ranks.count,
            "ranks/waiting_seconds": seconds["waiting"],
            "ranks/reducing_seconds": seconds["reducing"],
            **skew_metrics([tally.seconds for tally in self.at.tallies]),
        }

    def _evaluate_if_due(self) -> None:
        """The evaluation that eval.every asks for after an update."""
        every, at = self.config.eval.every, self.at
        if every and at.update and at.update % every == 0 and at.evaluated_at < at.update:
            self._evaluate(f"after update {at.update}")

    def _evaluate(self, name: str) -> None:
        """Measures exact match with the learner's weights, for the log and the display."""
        if not self.config.data.answer:  # an environment rewards, and there are no answers to compare with
            return
        with self.steps.times.stopped():
            self.report.status("evaluating")
            result = self._measured()
            with self._committing("the evaluation"):
                self._log_evaluation(name, result)

    def _measured(self) -> EvalResult:
        config, engine, at = self.config, self.run.learner.evaluator, self.at
        engine.load(self.steps.state.params, at.update)
        limit = config.eval.max_new_tokens or config.rollout.max_new_tokens
        result = evaluate_on_ranks(
            self.ranks,
            engine,
            self.run.data.evaluation,
            attrs.evolve(self.run.collector.sampling, max_new_tokens=limit),
            decoder=self.run.decoder,
            nudge=config.data.nudge,
            max_batch=config.rollout.max_batch,
            environments=self.run.environments,
            vision=self.run.loaded.vision,
        )
        engine.load(None, at.update)
        return result

    def _log_evaluation(self, name: str, result: EvalResult) -> None:
        at = self.at
        at.scores, at.evaluated_at = (*at.scores, result.score), at.update
        record = {"update": at.update, "batch_step": at.batch_step, "em": result.score}
        record |= {"em_subset": result.total, "time/eval": result.seconds, "time/elapsed": self._elapsed()}
        found = logged_figures(result.figures)
        record |= found
        self.log.log(record)
        self.log.evaluation(
            evaluation_records(self.run.data.evaluation, result.texts, result.right, at.update)
        )
        self.watch.see({name: record[name] for name in ("em", "time/eval", *found)})
        self.report.handle(Evaluated(name, result.score, result.correct, result.total, result.seconds))

    def _check_numbers(self) -> None:
        """If too many updates in a row were skipped: saves, and raises NumbersError."""
        try:
            self.bad_updates.check()
        except NumbersError:
            self.report.status("saving")
            self.saves.save("the last good state: ", strict=True)
            raise

    def _check_output(self) -> None:
        """If the display has no reader: saves, and raises OutputLost."""
        if self._lost is None:
            return
        end = OutputLost(self.report.fault or BrokenPipeError(self._lost))
        self.report.note(f"{end}: the run ends")
        self.saves.save_to_stop("interrupted: ")
        self.ranks.agreed_to_end()
        raise end

    def _check_log(self) -> None:
        """Reports once that a line of the log cannot be written; it is written when there is space."""
        fault = self.log.fault()
        if fault and fault != self._log_fault:
            self.saver.failed(UserError(fault))
        self._log_fault = fault

    def _elapsed(self) -> float:
        """Seconds that the run has taken, including those before a resume."""
        return self.at.elapsed + time.perf_counter() - self.started
