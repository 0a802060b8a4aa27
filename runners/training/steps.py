"""The steps of a run: rollout → reward → micro-batches, and gradient → update → sync.

Each takes a `RunState` and leaves it as it is; `accept`, `update` and `sync` give the next one.
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
from mlx.utils import tree_map

import grpo_fn as g
from grpo_fn.backends import number
from grpo_fn.learner import (
    Shape,
    all_reduce,
    chosen_experts,
    deal,
    piece_tokens,
    routing_stats,
    shape_of,
    take_rows,
)
from grpo_fn.policy import Moments, QuantizedRole, has_routers
from grpo_fn.prng import ROLLOUTS, fold_in
from grpo_fn.trees import on_host
from runners.data.curriculum import updated
from runners.data.stream import PromptStream, gold_batch
from runners.machine.metal_faults import LONGEST
from runners.models.role_quantization import (
    budgeted_formats,
    formats_line,
    is_calibrated,
    measured_moments,
)
from runners.rewards.calls import TrainerState
from runners.rewards.experience import Experience
from runners.telemetry.diary import Diary
from runners.telemetry.run_statistics import PartTimes, Tally
from runners.training.gradients import MicroBatches
from runners.training.rollout import gold_experience
from runners.training.run_state import Pieces, RunState
from runners.training.setup import Run

_ROUTED_TOKENS = 4096  # tokens of an update from which the experts' load is logged
_SMALL = 2_500_000  # parameters; below this size, step time no longer depends on the parameter count


@attrs.define(eq=False)
class Sums:
    """A state with the gradients of its next update, added up."""

    state: RunState | None  # None once `update` has taken it over
    stats: list[g.LossStats]  # of each batch step


class TrainSteps:
    """The steps of a run; holds no state of it."""

    def __init__(self, run: Run, shown: Diary) -> None:
        """`shown` gets the lines about what happens in a step."""
        self.run, self.config, self.shown = run, run.config, shown
        self.engine, self.ranks, self.times = run.learner.engine, run.ranks, PartTimes()
        self.micro_batches = MicroBatches(
            run.learner.grad_step,
            run.learner.logprob_step,
            self.config.system.micro_batch_tokens,
            run.ranks,
            shown.note,
            longest=LONGEST if mx.metal.is_available() else 0.0,
            advance=shown.advanced,
        )
        self.sft = attrs.evolve(self.micro_batches, grad_step=run.learner.sft_step)
        self.uses = self.config.optim.num_iterations * self.config.optim.minibatches  # updates a rollout

    def supervised(self, state: RunState) -> bool:
        """Whether the last batch step was one of gold completions."""
        return state.batch_step <= self.run.length.supervised

    def gold_stream(self, state: RunState) -> PromptStream:
        """The gold completions where this batch step begins."""
        position = state.batch_step * gold_batch(self.config)
        return PromptStream(self.run.data.gold, self.config.run.seed, position)

    def update_due(self, state: RunState) -> bool:
        """Whether there are enough batch steps for an update."""
        enough = state.batch_step % self.config.optim.gradient_accumulation_steps == 0
        return bool(state.waiting) and (enough or state.batch_step == self.run.length.batch_steps)

    # a batch step

    def roll_out(self, state: RunState) -> Experience:
        """The rollout of the next batch step, scored; or gold completions."""
        length, stream = self.run.length, self.run.stream
        if state.batch_step < length.supervised:
            taken = self.gold_stream(state).take(gold_batch(self.config))
            return gold_experience(taken, self.run.loaded.vision)
        key = fold_in(state.train.key, ROLLOUTS, state.batch_step)
        progress = TrainerState(state.update, length.updates, stream.epoch, self.config.optim.num_epochs)
        take = stream.taking(state.curriculum, state.batch_step, self.config)
        experience = self.run.collector.collect(take, key, progress)
        for part in ("rollout", "reward"):
            self.times.add(part, experience.seconds[part])
        return experience

    def cut(self, state: RunState, experience: Experience) -> tuple[list[Pieces], int]:
        """The micro-batches of each minibatch of a batch step, with what has to be computed before the next
        update; and system.micro_batch_tokens from now on."""
        config, learner, stream = self.config, self.run.learner, self.run.stream
        shapes, budget = set(state.shapes), state.micro_batch_tokens
        parameters = self.run.loaded.num_parameters
        price = new_shape_tokens(parameters, stream.epoch)
        parts, gold = [], state.batch_step < self.run.length.supervised
        with self.times.timing("learner"):
            batch = self.counted(
                experience, top_entropy_quantile=1.0 if gold else config.loss.top_entropy_quantile
            )
            grader = None if gold else learner.grader
            if grader is not None:
                batch, budget = grader.graded(batch, experience, self.micro_batches, budget)
            for part in g.minibatches(batch, 1 if gold else config.optim.minibatches):
                # These terms have a gradient in every row.
                if not (config.loss.router_aux_coef or (grader is not None and grader.in_loss)):
                    part = g.drop_inactive(part, learner.spec)
                how = {"known": shapes, "new_shape_tokens": price}
                how |= {
                    "share_prompts": learner.share_prompts and not gold,
                    "piece_tokens": piece_tokens(parameters),
                }
                shares = deal(part, self.ranks.count)
                pieces = [
                    piece for share in shares for piece in g.split_batch(share, max_tokens=budget, **how)
                ]
                shapes |= _shapes(pieces)
                if config.loss.router_replay and not gold:
                    pieces = [self._with_experts(piece) for piece in pieces]
                if (self.uses > 1 or state.stale) and not gold:
                    # When this batch is used, π_θ differs from π_old: its log-probs are computed now.
                    pieces, budget = self.micro_batches.with_old_logp(state.train.old_params, pieces, budget)
                parts.append(pieces)
        return parts, budget

    def accept(self, state: RunState, experience: Experience, parts: list[Pieces], budget: int) -> RunState:
        """After a batch step: its micro-batches wait for their updates."""
        tally = attrs.evolve(Tally.of(experience), quantization=self.engine.quantization)
        state = self._calibrated(state, experience)
        if (known := state.curriculum) is not None:
            outcomes = experience.outcomes
            tally = attrs.evolve(tally, outcomes=[(float(known.first_n[n]), *rest) for n, *rest in outcomes])
            known = updated(known, outcomes, state.batch_step, self.config.data.rate_decay)
        return attrs.evolve(
            state,
            batch_step=state.batch_step + 1,
            position=self.run.stream.position,
            sampled_tokens=state.sampled_tokens + experience.sampled_tokens,
            tallies=(*state.tallies, tally),
            curriculum=known,
            waiting=(*state.waiting, parts),
            shapes=state.shapes.union(*map(_shapes, parts)),
            experiences=(*state.experiences, experience),
            micro_batch_tokens=budget,
            **self._of_engine(),
        )

    # an update

    def free_sampler(self, state: RunState) -> RunState:
        """Before an update after which the sampler takes the new weights: the old ones are freed."""
        if not self._syncs(state):
            return state
        self.engine.load(None, state.update)
        return attrs.evolve(state, train=attrs.evolve(state.train, old_params=None))

    def gradients(self, state: RunState) -> Sums:
        """The accumulated gradient of the next update."""
        with self.times.timing("learner"):
            steps = [parts[state.reused % len(parts)] for parts in state.waiting]
            learn = self.sft if self.supervised(state) else self.micro_batches
            train, stats, budget = learn.gradients(state.train, steps, state.micro_batch_tokens)
        return Sums(attrs.evolve(state, train=train, micro_batch_tokens=budget), stats)

    def update(self, sums: Sums) -> tuple[RunState, g.LossStats, g.UpdateStats]:
        """One optimizer step. The new weights take the old ones' memory if nobody else holds these."""
        state, sums.state = sums.state, None
        assert state is not None
        train, state = state.train, attrs.evolve(state, train=None)
        with self.times.timing("update"), self.ranks.moving_arrays():
            train, update = self.run.learner.update_step(all_reduce(train, self.ranks))
            g.materialize(train, update)
        stats = g.merge_stats(sums.stats)
        drawn_as = {tally.quantization for tally in state.tallies}
        if not self.supervised(state) and drawn_as == {self.engine.quantization}:  # not a coarser format
            self.engine.check_mismatch(stats)
        changes = {"train": train, "update": state.update + 1, **self._of_engine()}
        return attrs.evolve(state, **changes), stats, update

    def sync(self, state: RunState) -> RunState:
        """After an update: if its rollouts serve no further one, prepares the next rollout."""
        loss, syncs = self.config.loss, self._syncs(state)
        if state.reused + 1 < self.uses and not self.supervised(state):
            return attrs.evolve(state, reused=state.reused + 1)
        rest = {"reused": 0, "tallies": (), "waiting": (), "experiences": ()}
        state = attrs.evolve(state, **rest, stale=not syncs, **self._of_engine())
        if syncs:
            with self.times.timing("sync"):
                train = g.sync_old(state.train)
                self.engine.load(train.old_params, state.update)
                if not self.supervised(state):
                    _ = self.engine.sampler  # is rounded here; supervised steps draw nothing
            state = attrs.evolve(state, train=train, synced_at=state.batch_step, version=state.update)
        every = loss.ref_sync_every
        if every and state.train.ref_params is not None and state.batch_step - state.ref_synced_at >= every:
            reference = self._reference(state.moments)
            train = g.sync_ref(state.train, loss.ref_mixup, reference and reference.transform)
            state = attrs.evolve(state, train=train, ref_synced_at=state.batch_step)
        if state.batch_step == self.run.length.supervised < self.run.length.batch_steps:
            # GRPO begins: with new moments, and a reference at these weights, rounded if it is.
            train = attrs.evolve(state.train, opt_state=tree_map(mx.zeros_like, state.train.opt_state))
            if train.ref_params is not None:
                reference = self._reference(state.moments)
                train = g.sync_ref(train, transform=reference and reference.transform)
            state = attrs.evolve(state, train=train, ref_synced_at=state.batch_step)
        return state

    def _calibrated(self, state: RunState, experience: Experience) -> RunState:
        """After the first rollout with tokens: its layers' moments, with which the roles are rounded from now
        on."""
        learner, length, quantized = self.run.learner, self.run.length, self.engine.quantized
        names = self.config.rollout.quantization, self.config.loss.ref_quantization
        roles = zip(names, (quantized, learner.reference), strict=True)
        calibrated = [role for name, role in roles if role and is_calibrated(self.config, name)]
        gold, params = state.batch_step < length.supervised, state.train.old_params
        if not calibrated or state.moments is not None or gold or not experience.rollout.prompts:
            return state
        with self.times.timing("sync"):
            batch, formats = g.make_batch(experience.rollout, mx.zeros(experience.rewards_pg.shape)), None
            moments = measured_moments(learner.policy, calibrated[0], params, batch)
            if self.config.rollout.bits_budget and quantized:
                formats = budgeted_formats(self.config, learner.policy, quantized, params, batch, moments)
                self.shown.note(formats_line(self.config, formats, learner.policy, params))
            self.engine.round_as("", moments, formats)
            _ = self.engine.sampler
            state = attrs.evolve(state, moments=moments, formats=formats)
            role, first = self._reference(moments), state.update == length.supervised_updates
            if role is not None and first and state.train.ref_params is not None:
                reference = role.transform(state.train.params)
                state = attrs.evolve(state, train=attrs.evolve(state.train, ref_params=reference))
        return state

    def _reference(self, moments: Moments | None) -> QuantizedRole | None:
        """The reference as it is rounded now."""
        learner, name = self.run.learner, self.config.loss.ref_quantization
        if learner.reference is None or not is_calibrated(self.config, name) or moments is None:
            return learner.reference
        return learner.reference.remade(name, moments)

    def _of_engine(self) -> dict[str, Any]:
        """What the state remembers of the engine."""
        finer = self.engine.format if self.engine.format != self.config.rollout.quantization else ""
        return {"fallback": self.engine.fallback, "sampler_format": finer}

    # for logs and checkpoints

    def counted(self, experience: Experience, **how: Any) -> g.Batch:
        """A batch step as one batch; its mask is True on the tokens that count in the loss."""
        truncated, adv_pg = self.config.loss.mask_truncated_completions, experience.advantages_pg
        if adv_pg.ndim == 3:
            adv_pg = g.spread_over_turns(adv_pg, experience.rollout)
        return g.make_batch(experience.rollout, adv_pg, mask_truncated=truncated, **how)

    def expert_metrics(self, state: RunState) -> dict[str, float]:
        """How evenly the last rollout uses the experts, from a forward pass over some of its rows. Empty for
        a model without known routers, with checkpointed blocks, or if no token counts."""
        policy = self.run.learner.policy
        if self.config.system.grad_checkpoint or not has_routers(policy.module) or not state.experiences:
            return {}
        batch = self.counted(state.experiences[-1])
        counted = [row for row, counts in enumerate(on_host(batch.mask_bt.any(axis=1))) if counts]
        if not counted:
            return {}
        fit = max(1, min(_ROUTED_TOKENS, state.micro_batch_tokens) // batch.tokens_bl.shape[1])  # rows
        every = -(-len(counted) // fit)
        stats = routing_stats(policy, state.train.params, take_rows(batch, counted[::every]))
        return {f"experts/{name}": float(value.item()) for name, value in stats._asdict().items()}

    def _syncs(self, state: RunState) -> bool:
        """Whether the sampler takes the learner's weights after this update."""
        return self.supervised(state) or state.batch_step - state.synced_at >= self.config.loss.sync_every

    def _with_experts(self, piece: g.Batch) -> g.Batch:
        """A micro-batch with the sampler's choice of experts for its tokens; takes one more forward pass."""
        if not piece.mask_bt.shape[0]:
            return piece
        experts_blnk = chosen_experts(*self.engine.sampler, piece)
        mx.eval(experts_blnk)
        return attrs.evolve(piece, experts_blnk=experts_blnk)


def _shapes(pieces: Pieces) -> set[Shape]:
    """The shapes for which the steps are compiled."""
    return {shape_of(piece) for piece in pieces if piece.mask_bt.shape[0]}


def new_shape_tokens(parameters: int, epoch: float) -> int:
    """Tokens of padding that are accepted to avoid a new shape: as many as compute in the time that tracing
    the step takes. On a CPU almost any number once an epoch has shown all lengths; a GPU would then compute
    mostly padding once completions have become shorter."""
    return number("trace") // max(parameters, _SMALL) if epoch < 1 or number("launch") else 1_000_000
