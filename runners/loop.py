"""The loop of a run: rollout → reward → gradient → update → sync, with evaluation, logs and checkpoints.

It goes in steps after each of which `TrainState` and `LoopState` are all there is to know: a batch step (a
rollout, and its gradient unless it serves several updates), or one optimizer update.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from runners.bad_updates import BadUpdates
from runners.checkpoint import Snapshot, take_snapshot
from runners.constant_rewards import ConstantRewards
from runners.errors import NumbersError, UserError
from runners.evaluate import evaluate
from runners.gradients import Gradients
from runners.interrupts import Stopped, StopSignals
from runners.loop_state import LoopState
from runners.memory_watch import MemoryWatch
from runners.metrics import MetricsLog
from runners.model_writing import save_final
from runners.records import completion_records, header, summary
from runners.report import Report
from runners.rollout import Experience
from runners.row_memory import free_memory
from runners.saving import Saver
from runners.setup import Run
from runners.statistics import Tally, loss_metrics, rollout_metrics
from runners.trl_arguments import TrainerState
from runners.watch import Condition, Watch


@attrs.frozen(eq=False)
class RunResult:
    """What a finished run leaves in the caller's hands."""

    folder: Path
    state: g.TrainState
    first_em: float | None  # exact match before the first step; None: not measured
    last_em: float | None
    updates: int
    seconds: float


class Loop:
    """A run on its way: its two states, `state` and `at`, and the functions that move them on."""

    def __init__(
        self,
        run: Run,
        state: g.TrainState,
        at: LoopState,
        *,
        log: MetricsLog,
        report: Report,
        saver: Saver,
        signals: StopSignals,
        facts: Mapping[str, Any],
    ) -> None:
        """`state` is what to go on from, `at` where that is, `facts` what every trainer_state.json holds."""
        self.log, self.report, self.saver, self.signals = log, report, saver, signals
        self.run, self.config, self.facts = run, run.config, facts
        self.state, self.at = state, at
        self.role = run.learner.role
        self.memory = MemoryWatch(self.config.system.memory_limit_gb, run.memory_key)
        self.constant = ConstantRewards([reward.name for reward in run.collector.scorer.rewards])
        learner, budget = run.learner, self.config.system.micro_batch_tokens
        self.gradients = Gradients(learner.grad_step, learner.logprob_step, budget, report.note)
        self.bad_updates = BadUpdates(run.folder, self.config.optim.max_bad_updates)
        conditions = [Condition.parse(text) for text in self.config.stop.when]
        self.watch = Watch(self.config.watch, [condition for condition in conditions if condition])
        self.experiences: list[Experience] = []  # of the batch steps since the last update; not saved
        self._told: str | None = None  # what was last said of the log
        self.started = self.update_started = time.perf_counter()
        optim = self.config.optim
        self.uses = optim.num_iterations * optim.minibatches  # updates that each rollout serves

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Goes on with what a checkpoint's facts say of budgets, warnings and skipped updates.

        Raises UserError where they say something else than a run saves.
        """
        for part in (self.gradients, self.bad_updates, self.watch):
            part.restore(facts)

    def run_to_end(self) -> RunResult:
        """All steps that are left, then the final evaluation and model."""
        config, at = self.config, self.at
        self.report.start(self.run.plan.updates, header(self.run))
        if config.eval.at_start and at.evaluated_at < 0:
            self._evaluate("before training")
        self._heed_signals()
        while self._update_due() or (at.batch_step < self.run.plan.batch_steps and not self.watch.reached):
            self._step()
            self._heed_numbers()
            every = config.checkpoint.every
            if every and at.batch_step % every == 0 and not self._update_due():
                self.saver.save(self._snapshot, self._place())
            self._heed_signals()
        if self.watch.reached:
            self.report.note(f"the run ends early: {self.watch.reached}")
        if at.evaluated_at != at.update:
            self._evaluate("at the end")
        self.saver.settle()
        self.report.status("saving the final model")
        final = save_final(self.run.folder, self.state, self.run.loaded)
        first = at.scores[0] if config.eval.at_start and at.scores else None
        last = at.scores[-1] if at.scores else None
        shown = summary(self.run, final, first=first, last=last, updates=at.update, tokens=at.sampled_tokens)
        if self.watch.reached:
            shown["ended early"] = self.watch.reached
        if self.bad_updates.total:
            shown["updates skipped"] = self.bad_updates.total
        self.report.finish(shown)
        return RunResult(self.run.folder, self.state, first, last, at.update, self._elapsed())

    def _update_due(self) -> bool:
        """Whether the batch steps gathered are as many as an update takes."""
        enough = self.at.batch_step % self.config.optim.gradient_accumulation_steps == 0
        return bool(self.at.tallies) and (enough or self.at.batch_step == self.run.plan.batch_steps)

    def _step(self) -> None:
        """An update where one is due, else a batch step."""
        self.saver.poll()
        if self._update_due():
            self._update()
        else:
            self._batch_step()
        self._heed_log()

    def _batch_step(self) -> None:
        """One rollout, and its gradient unless it serves several updates."""
        self.report.status("sampling")
        at = self.at
        key = g.fold_in(self.state.key[None], mx.array([at.batch_step]))[0]
        plan, stream = self.run.plan, self.run.stream
        progress = TrainerState(at.update, plan.updates, stream.epoch, self.config.optim.num_epochs)
        experience = self.run.collector.collect(self.state.old_params, stream.take, key, progress)
        self._heed_role()
        at.batch_step += 1
        at.position = self.run.stream.position
        at.sampled_tokens += experience.sampled_tokens
        at.tallies.append(Tally.of(experience))
        self.experiences.append(experience)
        for problem in (*experience.problems, *self.constant.read(experience.values_kb)):
            self.report.note(problem)
        self.log.completions(completion_records(experience, at.batch_step, at.update + 1))
        self.report.status("learning")
        if self.uses > 1:
            at.waiting.append(self._learner_batches(experience))
        else:
            self._grad(self._learner_batches(experience)[0])

    def _learner_batches(self, experience: Experience) -> list[list[g.Batch]]:
        """A batch step's micro-batches, for each of its minibatches."""
        config = self.config
        batch = g.make_batch(
            experience.rollout,
            experience.advantages_pg,
            mask_truncated=config.loss.mask_truncated_completions,
            top_entropy_quantile=config.loss.top_entropy_quantile,
        )
        ready = []
        for part in g.minibatches(batch, config.optim.minibatches):
            part = g.drop_inactive(part, self.run.learner.spec)
            pieces = g.split_batch(
                part,
                max_tokens=self.gradients.max_tokens,
                share_prompts=self.run.learner.share_prompts,
                known=self.at.shapes,
                new_shape_tokens=self._new_shape_tokens(),
            )
            self.at.shapes |= {g.shape_of(piece) for piece in pieces if piece.mask_bt.shape[0]}
            if self.uses > 1 or self.at.stale:
                # By the time this is read π_θ has left π_old: its log-probs are taken now.
                pieces = self.gradients.with_old_logp(self.role.anchor, pieces)
            ready.append(pieces)
        return ready

    def _new_shape_tokens(self) -> int:
        """What a shape that has to be compiled is worth in padding: more where that takes long, and nearly
        anything once an epoch has shown what lengths there are."""
        first_epoch = 3_000 if self.run.on_gpu else 300
        return first_epoch if self.run.stream.epoch < 1 else 1_000_000

    def _grad(self, pieces: Sequence[g.Batch]) -> None:
        self.at.stats.append(self.gradients.add(self, pieces))

    def _update(self) -> None:
        """One update of the gathered batch steps, and what follows the last of them."""
        at = self.at
        sync = at.batch_step - at.synced_at >= self.config.loss.sync_every
        if sync:
            # The next rollout takes the new weights: the old ones need not live through the update.
            self.state, self.role.anchor = attrs.evolve(self.state, old_params=None), None
        for parts in at.waiting:
            self._grad(parts[at.reused % len(parts)])
        self._apply()
        at.reused += 1
        if at.reused >= self.uses:
            self._turn(sync)

    def _turn(self, sync: bool) -> None:
        """From the last update of some batch steps to the next rollout."""
        at, loss = self.at, self.config.loss
        at.reused, at.tallies, at.waiting, at.stale = 0, [], [], not sync
        self.experiences = []
        self._heed_role()
        if sync:
            self.state = self.role.sync(self.state)
            g.materialize(self.state.old_params)
            at.synced_at = at.batch_step
        every = loss.ref_sync_every
        if every and self.state.ref_params is not None and at.batch_step - at.ref_synced_at >= every:
            self.state = g.sync_ref(self.state, loss.ref_mixup, self.run.learner.reference.transform)
            at.ref_synced_at = at.batch_step

    def _heed_role(self) -> None:
        """What the sampler has become is said, and what it samples from follows."""
        for line in self.role.news():
            self.report.note(line)
        self.state = self.role.settle(self.state)

    def _apply(self) -> None:
        """One optimizer update, its log line, and the evaluation that may be due."""
        at = self.at
        self.saver.make_way(lambda: free_memory(self.config.system.memory_limit_gb))
        self.state, update = self.run.learner.update_step(self.state)
        g.materialize(self.state, update)
        self.gradients.applied()
        at.update += 1
        stats = g.merge_stats(at.stats)
        self.role.judge(stats)
        metrics = self._metrics(stats, update, time.perf_counter() - self.update_started)
        at.stats, at.reward = [], metrics["reward"] if metrics["reward"] == metrics["reward"] else None
        notes = [*self.bad_updates.see(metrics, self.experiences), *self.watch.see(metrics)]
        last = at.update == self.run.plan.updates or self.watch.reached
        if at.update % self.config.log.every == 0 or last:
            self.log.log(metrics)
        self.report.step(metrics)
        for line in notes:
            self.report.note(line)
        every = self.config.eval.every
        if every and at.update % every == 0:
            self._evaluate(f"after update {at.update}")
        self.update_started = time.perf_counter()

    def _metrics(self, stats: g.LossStats, update: g.UpdateStats, seconds: float) -> dict[str, Any]:
        at, rewards = self.at, [reward.name for reward in self.run.collector.scorer.rewards]
        timed = {
            f"time/{name}": sum(tally.seconds[name] for tally in at.tallies) for name in ("rollout", "reward")
        }
        memory, warning = self.memory.read()
        if warning:
            self.report.note(warning)
        return {
            "update": at.update,
            "batch_step": at.batch_step,
            "epoch": round(self.run.stream.epoch, 4),
            **rollout_metrics(at.tallies, rewards),
            **loss_metrics(stats, update, self.state.ref_params is not None),
            **self.role.metrics(),
            "num_tokens": at.sampled_tokens,
            "step_time": seconds,
            "tokens_per_second": sum(tally.sampled_tokens for tally in at.tallies)
            / max(timed["time/rollout"], 1e-9),
            **timed,
            "time/checkpoint": self.saver.stopped_seconds(),
            **memory,
        }

    def _evaluate(self, name: str) -> None:
        """Exact match of the learner's weights, in the log and on the display."""
        config, at = self.config, self.at
        self.report.status("evaluating")
        result = evaluate(
            self.run.learner.policy,
            self.state.params,
            self.run.data.evaluation,
            decoder=self.run.decoder,
            nudge=config.data.nudge,
            max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
            eos_ids=self.run.loaded.eos_ids,
            find_stop=self.run.find_stop,
            max_batch=config.rollout.max_batch,
        )
        at.scores, at.evaluated_at = (*at.scores, result.score), at.update
        record = {"update": at.update, "batch_step": at.batch_step, "em": result.score}
        record |= {"em_subset": result.total, "time/eval": result.seconds}
        self.log.log(record)
        self.watch.see({name: record[name] for name in ("em", "time/eval")})
        self.report.eval(name, result.score, result.correct, result.total, result.seconds)

    def _snapshot(self) -> Snapshot:
        """All that the run is now. UserError where the log is not on the disk as far as this."""
        at = self.at
        facts = {
            **self.facts,
            "em": at.scores[-1] if at.scores else None,
            "reward": at.reward,
            **self.role.facts(),
            **self.gradients.facts(),
            **self.bad_updates.facts(),
            **self.watch.facts(),
            "logs": self.log.positions(),
            "loop": {**at.plain(), "elapsed": self._elapsed()},
        }
        trees = {**at.trees(), "anchor": self.role.anchor}
        return take_snapshot(at.batch_step, self.state, self.run.loaded, facts, trees)

    def _heed_numbers(self) -> None:
        """Where too many updates in a row were skipped: saves, and raises NumbersError."""
        try:
            self.bad_updates.check()
        except NumbersError:
            self.report.status("saving")
            self.saver.save(self._snapshot, self._place(), "the last good state: ", strict=True)
            raise

    def _heed_signals(self) -> None:
        """Where the process was asked to stop: saves, and raises Stopped."""
        number = self.signals.received
        if number is None:
            return
        self.saver.settle()
        if self.at.batch_step and self.saver.done != self._place():
            self.report.status("saving")
            self.saver.save(self._snapshot, self._place(), "interrupted: ", strict=True)
        raise Stopped(number)

    def _place(self) -> tuple[int, int]:
        return self.at.batch_step, self.at.update

    def _heed_log(self) -> None:
        """Tells, once, of a line of the log that the disk does not take; it is written when there is room."""
        fault = self.log.fault()
        if fault and fault != self._told:
            self.saver.failed(UserError(fault))
        self._told = fault

    def _elapsed(self) -> float:
        """Seconds that the run has taken, those before a resume among them."""
        return self.at.elapsed + time.perf_counter() - self.started
