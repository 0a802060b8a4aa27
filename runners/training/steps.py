"""The steps of a run: rollout → reward, and gradient → update → sync, each from the two states to the next.

What takes long (`roll_out`, `cut`, `gradients`) leaves both states as they are: it can be interrupted at any
moment. `accept` and `update` change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.backends import number
from grpo_fn.learner import (
    all_reduce,
    chosen_experts,
    deal,
    routing_stats,
    shape_of,
    take_rows,
)
from grpo_fn.policy import has_routers
from grpo_fn.prng import ROLLOUTS, fold_in
from grpo_fn.trees import on_host
from runners.rewards.experience import Experience
from runners.rewards.trl_arguments import TrainerState
from runners.telemetry.part_times import PartTimes
from runners.telemetry.run_statistics import Tally
from runners.training.gradients import Gradients
from runners.training.loop_state import LoopState
from runners.training.setup import Run

_ROUTED_TOKENS = 4096  # tokens of an update from which the experts' load is logged
_SMALL = 2_500_000  # parameters; below this size, step time no longer depends on the parameter count


@attrs.define(eq=False)
class Sums:
    """The state with the gradients of an update under way; None once the update has taken it over."""

    state: Any  # g.TrainState | None


class TrainSteps:
    """A run's two states, `state` and `at`, and the functions that advance them."""

    def __init__(
        self,
        run: Run,
        state: g.TrainState,
        at: LoopState,
        note: Callable[[str], None],
        remark: Callable[[str, str], None] = lambda kind, text: None,
    ) -> None:
        """`state` and `at`: where the run starts or resumes. `note` takes lines; `remark` takes rare events,
        as a kind and a line."""
        self.run, self.config, self.note, self.remark = run, run.config, note, remark
        self.state, self.at = state, at
        self.engine = run.learner.engine
        self.engine.load(state.old_params, at.version)
        learner, optim = run.learner, self.config.optim
        self.ranks, self.sharding = run.ranks, learner.sharding
        self.gradients = Gradients(
            learner.grad_step, learner.logprob_step, self.config.system.micro_batch_tokens, note, run.ranks
        )
        self.uses = optim.num_iterations * optim.minibatches  # updates that each rollout serves
        self.experiences: list[Experience] = []  # of the batch steps since the last update; not saved
        self.times = PartTimes()

    def update_due(self) -> bool:
        """Whether there are enough batch steps for an update."""
        enough = self.at.batch_step % self.config.optim.gradient_accumulation_steps == 0
        return bool(self.at.tallies) and (enough or self.at.batch_step == self.run.length.batch_steps)

    def roll_out(self) -> Experience:
        """The rollout of the next batch step, scored."""
        at, length, stream = self.at, self.run.length, self.run.stream
        key = fold_in(self.state.key, ROLLOUTS, at.batch_step)
        progress = TrainerState(at.update, length.updates, stream.epoch, self.config.optim.num_epochs)
        try:
            experience = self.run.collector.collect(stream.take, key, progress)
        finally:
            self._report_events()
        for part in ("rollout", "reward"):
            self.times.add(part, experience.seconds[part])
        return experience

    def accept(self, experience: Experience, parts: list[list[g.Batch]]) -> None:
        """A batch step was taken: its rollout, and what `cut` made of it, wait for their updates."""
        at = self.at
        at.batch_step += 1
        at.position = self.run.stream.position
        at.sampled_tokens += experience.sampled_tokens
        at.tallies.append(Tally.of(experience))
        at.waiting.append(parts)
        at.shapes |= {shape_of(piece) for pieces in parts for piece in pieces if piece.mask_bt.shape[0]}
        self.experiences.append(experience)

    def gradients_of_update(self) -> tuple[Sums, list[g.LossStats]]:
        """The accumulated gradient of the next update, and the statistics of each batch step."""
        at = self.at
        if self._syncs():
            # The next rollout uses the new weights, so the old ones can be freed before the update.
            self.state = attrs.evolve(self.state, old_params=None)
            self.engine.load(None, at.update)
        sums = Sums(self.state)
        with self.times.timing("learner"):
            found = [self.gradients.add(sums, parts[at.reused % len(parts)]) for parts in at.waiting]
        return sums, [*at.stats, *found]

    def update(self, sums: Sums, found: Sequence[g.LossStats]) -> tuple[g.LossStats, g.UpdateStats]:
        """One optimizer update with what `gradients_of_update` gave; `finish_update` must follow."""
        at = self.at
        self.state, sums.state = sums.state, None  # nothing else may keep the old weights
        with self.times.timing("update"), self.ranks.moving_arrays():
            if self.sharding is None:
                self.state = all_reduce(self.state, self.ranks)
            self.state, update = self.run.learner.update_step(self.state)
            g.materialize(self.state, update)
        self.gradients.applied()
        at.update += 1
        stats, at.stats = g.merge_stats(found), []
        self.engine.check_mismatch(float(stats.logp_diff_mean))
        return stats, update

    def finish_update(self) -> None:
        """After an update: if its rollouts serve no further update, prepares the next rollout."""
        at, loss = self.at, self.config.loss
        at.reused += 1
        if at.reused < self.uses:
            return
        sync = self._syncs()
        at.reused, at.tallies, at.waiting, at.stale = 0, [], [], not sync
        self.experiences = []
        self._report_events()
        if sync:
            with self.times.timing("sync"):
                self.state = g.sync_old(self.state)
                self.engine.load(self.state.old_params, at.update)
            at.synced_at, at.version = at.batch_step, at.update
            if loss.sync_every > 1:
                self.remark("sync", "the sampler took the learner's weights")
        every = loss.ref_sync_every
        if every and self.state.ref_params is not None and at.batch_step - at.ref_synced_at >= every:
            self.state = g.sync_ref(self.state, loss.ref_mixup, self.run.learner.reference.transform)
            at.ref_synced_at = at.batch_step
            self.remark("sync", "the reference took the learner's weights")

    def counted(self, experience: Experience) -> g.Batch:
        """A batch step as one batch; its mask is True on the tokens that count in the loss."""
        loss = self.config.loss
        return g.make_batch(
            experience.rollout,
            experience.advantages_pg,
            mask_truncated=loss.mask_truncated_completions,
        )

    def expert_metrics(self) -> dict[str, float]:
        """How evenly the last rollout uses the experts, from a forward pass over some of its rows. Empty for
        a model without known routers, with checkpointed blocks, or if no token counts."""
        policy = self.run.learner.policy
        if self.config.system.grad_checkpoint or not has_routers(policy.module) or not self.experiences:
            return {}
        batch = self.counted(self.experiences[-1])
        counted = [row for row, counts in enumerate(on_host(batch.mask_bt.any(axis=1))) if counts]
        if not counted:
            return {}
        width = batch.tokens_bl.shape[1]
        few = min(len(counted), max(1, min(_ROUTED_TOKENS, self.gradients.max_tokens) // width))
        rows = [counted[n * len(counted) // few] for n in range(few)]
        stats = routing_stats(policy, self.state.params, take_rows(batch, rows))
        return {f"experts/{name}": float(value.item()) for name, value in stats._asdict().items()}

    def logprobs_now(self, experience: Experience) -> mx.array:
        """[B,T] log-probs of a rollout's tokens under the learner's current weights, from a forward pass."""
        batch = g.make_batch(experience.rollout, experience.advantages_pg)
        rows, width = batch.tokens_bl.shape
        step = max(1, min(rows, self.gradients.max_tokens // width))
        parts = [take_rows(batch, range(at, min(at + step, rows))) for at in range(0, rows, step)]
        found = self.gradients.with_old_logp(self.state.params, parts)
        return mx.concatenate([part.old_logp_bt for part in found if part.old_logp_bt is not None])

    def settle(self) -> None:
        """Computes all arrays of both states: another thread could only read them."""
        g.materialize(self.state, self.at.waiting)

    def facts(self) -> dict[str, Any]:
        """For a checkpoint, besides the two states."""
        return {"rollout_fallback": self.engine.fallback, **self.gradients.facts()}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continues with the budget in a checkpoint's facts. Raises UserError if it is not a count."""
        self.gradients.restore(facts)

    def _syncs(self) -> bool:
        """Whether the sampler takes the learner's weights after this update."""
        return self.at.batch_step - self.at.synced_at >= self.config.loss.sync_every

    def _report_events(self) -> None:
        """Reports that the engine has given up its quantized weights."""
        for line in self.engine.events():
            self.note(line)

    def whole(self) -> g.TrainState:
        """The state as a single rank would have it. All ranks must call it."""
        if self.ranks.is_alone:
            return self.state
        self.ranks.all_gather_object("the whole state")
        with self.ranks.moving_arrays():
            if self.sharding is None:
                return self.state
            whole = self.sharding.whole(self.state)
            g.materialize(whole)
        return whole

    def cut(self, experience: Experience) -> list[list[g.Batch]]:
        """A batch step's micro-batches, for each of its minibatches, with what has to be computed now."""
        with self.times.timing("learner"):
            return self._cut(experience)

    def _cut(self, experience: Experience) -> list[list[g.Batch]]:
        config, shapes = self.config, set(self.at.shapes)
        batch = g.make_batch(
            experience.rollout,
            experience.advantages_pg,
            mask_truncated=config.loss.mask_truncated_completions,
            top_entropy_quantile=config.loss.top_entropy_quantile,
        )
        ready = []
        for part in g.minibatches(batch, config.optim.minibatches):
            if not config.loss.router_aux_coef:  # its term has a gradient in every row
                part = g.drop_inactive(part, self.run.learner.spec)
            pieces = [
                piece
                for share in deal(part, self.ranks.count)
                for piece in g.split_batch(
                    share,
                    max_tokens=self.gradients.max_tokens,
                    share_prompts=self.run.learner.share_prompts,
                    known=shapes,
                    new_shape_tokens=new_shape_tokens(self.run.loaded.num_parameters, self.run.stream.epoch),
                )
            ]
            shapes |= {shape_of(piece) for piece in pieces if piece.mask_bt.shape[0]}
            if config.loss.router_replay:
                pieces = [self._with_experts(piece) for piece in pieces]
            if self.uses > 1 or self.at.stale:
                # When this batch is used, π_θ differs from π_old: its log-probs are computed now.
                pieces = self.gradients.with_old_logp(self.state.old_params, pieces)
            ready.append(pieces)
        return ready

    def _with_experts(self, piece: g.Batch) -> g.Batch:
        """A micro-batch with the sampler's choice of experts for its tokens; takes one more forward pass."""
        if not piece.mask_bt.shape[0]:
            return piece
        experts_blnk = chosen_experts(*self.engine.sampler, piece)
        mx.eval(experts_blnk)
        return attrs.evolve(piece, experts_blnk=experts_blnk)


def new_shape_tokens(parameters: int, epoch: float) -> int:
    """Tokens of padding that are accepted to avoid a new shape: as many as compute in the time that tracing
    the step takes. Almost any number once an epoch has shown all lengths."""
    return number("trace") // max(parameters, _SMALL) if epoch < 1 else 1_000_000
