"""The training loop: rollout → reward → gradient → update → sync, with evaluation, logs and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.trees import Tree
from runners import platform
from runners.checkpoint import prune_checkpoints, save_checkpoint, save_final
from runners.config import Config, write_resolved
from runners.evaluate import evaluate
from runners.metrics import MetricsLog
from runners.report import Report, make_report
from runners.rollout import Experience
from runners.setup import Run, build_run
from runners.statistics import loss_metrics, rollout_metrics


@attrs.frozen(eq=False)
class RunResult:
    """What a finished run leaves in the caller's hands."""

    folder: Path
    state: g.TrainState
    first_em: float | None  # exact match before the first step; None: not measured
    last_em: float | None
    updates: int
    seconds: float


def run_training(config: Config, *, report: Report | None = None) -> RunResult:
    """Train as the config says; everything is written to OUTPUT_DIR/NAME.

    Raises UserError or ConfigError for bad input, before the first step; KeyboardInterrupt after a checkpoint
    of the last complete state has been saved.
    """
    machine = platform.prepare(config.system.memory_limit_gb)
    with report or make_report(every=config.log.every) as shown:
        run = build_run(config, machine, shown.status)
        write_resolved(run.config)
        for notice in run.notices:
            shown.note(notice)
        with MetricsLog(
            run.folder, run.config.log, name=run.config.run.name, config=run.config.to_dict()
        ) as log:
            return _Loop(run, log, shown).run_to_end()


class _Loop:
    """The loop's own variables: the state, what has gathered since the last update, and the counters."""

    def __init__(self, run: Run, log: MetricsLog, report: Report) -> None:
        self.run, self.log, self.report, self.config = run, log, report, run.config
        self.state = run.learner.state
        self.batch_step = 0  # rollouts made
        self.update = 0  # optimizer updates taken
        self.sampled_tokens = 0  # of the whole run
        self.synced_at = self.ref_synced_at = 0  # batch steps
        self.anchor: Tree = self.state.params  # the learner's weights that the rollout policy was made from
        self.stale = False  # whether the learner has moved on since
        self.gathered: list[Experience] = []  # batch steps since the last update
        self.waiting: list[list[list[g.Batch]]] = []  # of each, minibatch × micro-batch, where used again
        self.stats: list[g.LossStats] = []
        self.scores: list[float] = []
        self.evaluated_at = -1
        self.last_metrics: dict[str, Any] = {}
        self.started = self.update_started = time.perf_counter()
        self.reuses = self.config.optim.num_iterations * self.config.optim.minibatches > 1

    def run_to_end(self) -> RunResult:
        """All batch steps, then the final evaluation and model."""
        config, plan = self.config, self.run.plan
        self.report.start(plan.updates, self._header())
        try:
            if config.eval.at_start:
                self._evaluate("before training")
            while self.batch_step < plan.batch_steps:
                self._batch_step()
                accumulated = self.batch_step % config.optim.gradient_accumulation_steps == 0
                if accumulated or self.batch_step == plan.batch_steps:
                    self._updates()
                if config.checkpoint.every and self.batch_step % config.checkpoint.every == 0:
                    self._save_checkpoint()
            if self.evaluated_at != self.update:
                self._evaluate("at the end")
        except KeyboardInterrupt:
            if self.batch_step:
                self._save_checkpoint("interrupted: ")
            raise
        self.report.status("saving the final model")
        final = save_final(self.run.folder, self.state, self.run.loaded)
        first = self.scores[0] if config.eval.at_start and self.scores else None
        last = self.scores[-1] if self.scores else None
        seconds = time.perf_counter() - self.started
        self.report.finish(self._summary(final, first, last))
        return RunResult(self.run.folder, self.state, first, last, self.update, seconds)

    def _batch_step(self) -> None:
        """One rollout, and its gradient unless it serves several updates."""
        self.report.status("sampling")
        key = g.fold_in(self.state.key[None], mx.array([self.batch_step]))[0]
        experience = self.run.collector.collect(self.state.old_params, self.run.stream.take, key)
        self.batch_step += 1
        self.sampled_tokens += experience.sampled_tokens
        self.gathered.append(experience)
        for problem in experience.problems:
            self.report.note(problem)
        self.log.completions(completion_records(experience, self.batch_step, self.update + 1))
        self.report.status("learning")
        if self.reuses:
            self.waiting.append(self._learner_batches(experience))
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
                max_tokens=config.system.micro_batch_tokens,
                share_prompts=self.run.learner.share_prompts,
            )
            if self.reuses or self.stale:
                # By the time this is read π_θ has left π_old: its log-probs are taken now.
                pieces = [self._with_old_logp(piece) for piece in pieces]
            ready.append(pieces)
        return ready

    def _with_old_logp(self, piece: g.Batch) -> g.Batch:
        if piece.mask_bt.shape[0] == 0:
            return piece
        old_logp_bt = self.run.learner.logprob_step(self.anchor, piece)
        mx.eval(old_logp_bt)
        return attrs.evolve(piece, old_logp_bt=old_logp_bt)

    def _grad(self, pieces: Sequence[g.Batch]) -> None:
        self.state, stats = self.run.learner.grad_step(self.state, pieces)
        g.materialize(self.state.accum_grads, self.state.accum_weight, stats)
        self.stats.append(stats)

    def _updates(self) -> None:
        """The update that the gathered batch steps are for: several where they are used more than once."""
        sync = self.batch_step - self.synced_at >= self.config.loss.sync_every
        if sync:
            # The next rollout takes the new weights: the old ones need not live through the update.
            self.state, self.anchor = attrs.evolve(self.state, old_params=None), None
        if not self.reuses:
            self._apply()
        else:
            for _ in range(self.config.optim.num_iterations):
                for number in range(self.config.optim.minibatches):
                    for parts in self.waiting:
                        self._grad(parts[number])
                    self._apply()
        self.stale = not sync
        if sync:
            self._sync()
        every = self.config.loss.ref_sync_every
        if every and self.state.ref_params is not None and self.batch_step - self.ref_synced_at >= every:
            self.state = g.sync_ref(self.state, self.config.loss.ref_mixup)
            self.ref_synced_at = self.batch_step
        self.waiting, self.gathered = [], []

    def _sync(self) -> None:
        self.state = g.sync_old(self.state, self.run.learner.quantizer)
        g.materialize(self.state.old_params)
        self.anchor, self.synced_at = self.state.params, self.batch_step

    def _apply(self) -> None:
        """One optimizer update, its log line, and the evaluation that may be due."""
        self.state, update = self.run.learner.update_step(self.state)
        g.materialize(self.state, update)
        self.update += 1
        now = time.perf_counter()
        metrics = self._metrics(update, now - self.update_started)
        self.stats, self.last_metrics = [], metrics
        last = self.update == self.run.plan.updates
        if self.update % self.config.log.every == 0 or last:
            self.log.log(metrics)
        self.report.step(metrics)
        if metrics.get("update_skipped"):
            self.report.note(f"update {self.update} skipped: its gradient is not finite")
        every = self.config.eval.every
        if every and self.update % every == 0:
            self._evaluate(f"after update {self.update}")
        self.update_started = time.perf_counter()

    def _metrics(self, update: g.UpdateStats, seconds: float) -> dict[str, Any]:
        rewards = [reward.name for reward in self.run.collector.scorer.rewards]
        tokens = sum(experience.sampled_tokens for experience in self.gathered)
        timed = {
            f"time/{name}": sum(experience.seconds[name] for experience in self.gathered)
            for name in ("rollout", "reward")
        }
        memory = platform.memory()
        return {
            "update": self.update,
            "batch_step": self.batch_step,
            "epoch": round(self.run.stream.epoch, 4),
            **rollout_metrics(self.gathered, rewards),
            **loss_metrics(g.merge_stats(self.stats), update, self.state.ref_params is not None),
            "num_tokens": self.sampled_tokens,
            "step_time": seconds,
            "tokens_per_second": tokens / max(timed["time/rollout"], 1e-9),
            **timed,
            "memory/active_gb": memory.active / 1e9,
            "memory/peak_gb": memory.peak / 1e9,
        }

    def _evaluate(self, name: str) -> None:
        """Exact match of the learner's weights, in the log and on the display."""
        config = self.config
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
        self.scores.append(result.score)
        self.evaluated_at = self.update
        record = {"update": self.update, "batch_step": self.batch_step, "em": result.score}
        self.log.log({**record, "em_subset": result.total, "time/eval": result.seconds})
        self.report.eval(name, result.score, result.correct, result.total, result.seconds)

    def _save_checkpoint(self, why: str = "") -> None:
        state = self.state
        if state.old_params is None:  # interrupted between an update and its sync
            state = g.sync_old(state, self.run.learner.quantizer)
        facts = {
            "update": self.update,
            "epoch": self.run.stream.epoch,
            "position": self.run.stream.position,
            "em": self.scores[-1] if self.scores else None,
            "reward": self.last_metrics.get("reward"),
        }
        path = save_checkpoint(self.run.folder, self.batch_step, state, self.run.loaded, facts)
        self.report.note(f"{why}saved {path}")
        keep = self.config.checkpoint
        prune_checkpoints(self.run.folder, keep_last=keep.keep_last, keep_best=keep.keep_best)

    def _header(self) -> dict[str, Any]:
        config, run = self.config, self.run
        return {
            "run": config.run.name,
            "model": f"{config.model.path} ({run.loaded.num_parameters:,} parameters, "
            f"{run.loaded.num_trainable:,} trained, {config.model.tune})",
            "data": f"{config.data.source} ({len(run.data.train):,} to train on, "
            f"{len(run.data.evaluation):,} held out)",
            "each update": f"{config.optim.batch_size * config.optim.gradient_accumulation_steps} prompts × "
            f"{config.rollout.num_generations} completions, {config.loss.preset}",
            "writes to": str(run.folder),
        }

    def _summary(self, final: Path, first: float | None, last: float | None) -> dict[str, Any]:
        summary: dict[str, Any] = {}
        if last is not None:
            before = f"{first:.1%} → " if first is not None else ""
            summary["exact match"] = (
                f"{before}{last:.1%} on {len(self.run.data.evaluation)} held-out problems"
            )
        summary["updates"] = self.update
        summary["tokens sampled"] = f"{self.sampled_tokens:,}"
        summary["model"] = str(final)
        if self.config.log.jsonl:
            summary["log"] = str(self.run.folder / "training_log.jsonl")
        return summary


def completion_records(experience: Experience, batch_step: int, update: int) -> Iterator[dict[str, Any]]:
    """One record for each completion, for completions.jsonl."""
    size = experience.rollout.num_generations
    rewards = experience.rewards_pg.reshape(-1).tolist()
    advantages = np.array(experience.advantages_pg).reshape(-1).tolist()
    lengths = np.array(experience.rollout.lengths_b).tolist()
    for row, text in enumerate(experience.texts):
        example = experience.examples[row // size]
        yield {
            "batch_step": batch_step,
            "update": update,
            "prompt": example.messages[-1]["content"],
            "completion": text,
            "answer": example.answer,
            "reward": rewards[row],
            "advantage": advantages[row],
            "tokens": lengths[row],
        }
