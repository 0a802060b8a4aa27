"""`Plan`: the unchanging parts of a run's steps, with the phases that its config requires.

The phases of `before_learn` convert an experience to micro-batches. The phases of `after_rollout`
and `after_update` run after a batch step and after an update.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import mlx.core as mx
from mlx.utils import tree_map

import grpo_fn as g
from grpo_fn.backends import number
from grpo_fn.learner import Shape, chosen_experts, deal, piece_tokens, shape_of
from grpo_fn.policy import QuantizedRole
from runners.config.loading import Config
from runners.engines.engine import Engine, Weights
from runners.machine.metal_faults import LONGEST
from runners.models.role_quantization import (
    budgeted_formats,
    formats_line,
    is_calibrated,
    measured_moments,
)
from runners.ranks.ranks import Ranks
from runners.rewards.experience import Experience
from runners.telemetry.diary import Diary
from runners.telemetry.run_statistics import PartTimes
from runners.training.gradients import MicroBatches
from runners.training.run_state import Pieces, RunState
from runners.training.sampler import rounded_as, weights_of
from runners.training.setup import Run

# parameters; below this size, step time no longer depends on the parameter count
_SMALL = 2_500_000


@attrs.frozen(eq=False)
class Lesson:
    """An experience that is being converted to micro-batches."""

    experience: Experience
    batch: g.Batch
    micro_batch_tokens: int  # the budget; less once memory ran out
    parts: tuple[Pieces, ...] = ()  # of each minibatch


BeforeLearn = Callable[["Plan", RunState, Lesson], Lesson]
AfterRollout = Callable[["Plan", RunState, Experience], RunState]
AfterUpdate = Callable[["Plan", RunState], RunState]


@attrs.frozen(eq=False)
class Plan:
    """The parts of a run, and the phases of its steps."""

    run: Run
    micro_batches: MicroBatches
    supervised: MicroBatches  # of reference completions
    before_learn: tuple[BeforeLearn, ...]
    after_rollout: tuple[AfterRollout, ...]
    after_update: tuple[AfterUpdate, ...]
    shown: Diary  # gets the lines about what happens in a step
    times: PartTimes = attrs.field(factory=PartTimes)

    @property
    def config(self) -> Config:
        """The run's checked config."""
        return self.run.config

    @property
    def engine(self) -> Engine:
        """The engine that samples the run's completions."""
        return self.run.learner.engine

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the run."""
        return self.run.ranks

    @property
    def uses(self) -> int:
        """Number of updates per rollout."""
        return self.config.optim.num_iterations * self.config.optim.minibatches

    def is_supervised(self, state: RunState) -> bool:
        """Whether the last batch step used reference completions."""
        return state.batch_step <= self.run.length.supervised

    def update_due(self, state: RunState) -> bool:
        """Whether enough batch steps are available for an update."""
        enough = state.batch_step % self.config.optim.gradient_accumulation_steps == 0
        return bool(state.waiting) and (enough or state.batch_step == self.run.length.batch_steps)

    def syncs(self, state: RunState) -> bool:
        """Whether the sampler receives the learner's weights after the next update."""
        due = state.batch_step - state.synced_at >= self.config.loss.sync_every
        return due or self.is_supervised(state)

    def weights(self, state: RunState) -> Weights:
        """The sampler's weights."""
        return weights_of(self.run.learner.sampling, state.train.old_params, state.sampler)

    def load(self, state: RunState) -> None:
        """Passes the sampler's weights to the engine. Rollouts ahead include their own weights."""
        if not self.config.rollout.max_staleness:
            self.engine.load(self.weights(state))


def plan_of(run: Run, shown: Diary) -> Plan:
    """The plan of a run, with the phases of its config."""
    config, learner = run.config, run.learner
    micro_batches = MicroBatches(
        learner.grad_step,
        config.system.micro_batch_tokens,
        run.ranks,
        shown.note,
        longest=LONGEST if mx.metal.is_available() else 0.0,
        advance=shown.advanced,
    )
    before_learn = [cut_to_micro_batches, with_old_logprobs]
    if config.loss.router_replay:
        before_learn.insert(1, with_replayed_experts)
    if learner.grader is not None:
        before_learn.insert(0, graded_by_teacher)
    return Plan(
        run=run,
        micro_batches=micro_batches,
        supervised=attrs.evolve(micro_batches, grad_step=learner.sft_step),
        before_learn=tuple(before_learn),
        after_rollout=(calibrated,) if calibrated_roles(run) else (),
        after_update=(moved_reference, started_grpo),
        shown=shown,
    )


# before learning: a batch becomes micro-batches


def graded_by_teacher(plan: Plan, state: RunState, lesson: Lesson) -> Lesson:
    """The teacher's part of the advantages, or its prompts."""
    grader = plan.run.learner.grader
    assert grader is not None
    graded = grader.graded(
        lesson.batch, lesson.experience, plan.micro_batches, lesson.micro_batch_tokens
    )
    return attrs.evolve(lesson, batch=graded.value, micro_batch_tokens=graded.micro_batch_tokens)


def cut_to_micro_batches(plan: Plan, state: RunState, lesson: Lesson) -> Lesson:
    """The micro-batches of each minibatch; rows without a gradient are omitted."""
    run, config = plan.run, plan.config
    learner = run.learner
    gold = state.batch_step < run.length.supervised
    parameters = run.loaded.num_parameters
    in_loss = learner.grader is not None and learner.grader.in_loss
    shapes = set(state.shapes)
    parts = []
    for part in g.minibatches(lesson.batch, 1 if gold else config.optim.minibatches):
        # these have a gradient in every row
        if gold or not (config.loss.router_aux_coef or in_loss):
            part = g.drop_inactive(part, learner.spec)
        pieces: Pieces = []
        for share in deal(part, run.ranks.count):
            pieces += g.split_batch(
                share,
                max_tokens=lesson.micro_batch_tokens,
                share_prompts=learner.share_prompts and not gold,
                known=shapes,
                new_shape_tokens=new_shape_tokens(parameters, run.order.epoch(state.position)),
                piece_tokens=piece_tokens(parameters),
            )
        shapes |= shapes_of(pieces)
        parts.append(pieces)
    return attrs.evolve(lesson, parts=tuple(parts))


def with_replayed_experts(plan: Plan, state: RunState, lesson: Lesson) -> Lesson:
    """Micro-batches with the experts that the sampler chooses for their tokens; this requires an
    additional forward pass.
    """
    weights = plan.weights(state)
    # In full precision the learner's own module is the same function, and the sampler's may be in use.
    policy = plan.run.learner.policy if state.sampler.role is None else weights.policy

    def replayed(piece: g.Batch) -> g.Batch:
        if not piece.mask_bt.shape[0]:
            return piece
        experts_blnk = chosen_experts(policy, weights.params, piece)
        mx.eval(experts_blnk)
        return attrs.evolve(piece, experts_blnk=experts_blnk)

    return attrs.evolve(
        lesson, parts=tuple([replayed(piece) for piece in pieces] for pieces in lesson.parts)
    )


def with_old_logprobs(plan: Plan, state: RunState, lesson: Lesson) -> Lesson:
    """Micro-batches with log π_old if π_θ will differ from it, because a rollout is used for
    several updates or the sampler's weights are older than the learner's. π_old is the learner at
    the start of a rollout's updates, or at the sampler's last sync. A row sampled by older weights
    is corrected by π_old/μ.
    """
    if plan.uses == 1 and state.sampler.version == state.update:
        return lesson
    parts = []
    budget = lesson.micro_batch_tokens
    step = plan.run.learner.logprob_step
    for pieces in lesson.parts:
        found = plan.micro_batches.logprobs(step, state.train.old_params, pieces, budget)
        budget = found.micro_batch_tokens
        parts.append(
            [
                attrs.evolve(piece, old_logp_bt=found.value[number])
                if number in found.value
                else piece
                for number, piece in enumerate(found.steps[0])
            ]
        )
    return attrs.evolve(lesson, parts=tuple(parts), micro_batch_tokens=budget)


# after a batch step


def calibrated_roles(run: Run) -> list[QuantizedRole]:
    """The roles in this run with calibrated rounding."""
    loss, rollout, learner = run.config.loss, run.config.rollout, run.learner
    roles = ((rollout.quantization, learner.quantized), (loss.ref_quantization, learner.reference))
    return [role for name, role in roles if role is not None and is_calibrated(run.config, name)]


def calibrated(plan: Plan, state: RunState, experience: Experience) -> RunState:
    """After the first rollout with tokens, collects the moments of the layers' inputs, which
    determine the roles' rounding from then on.
    """
    config, learner = plan.config, plan.run.learner
    gold = plan.is_supervised(state)
    if state.sampler.moments is not None or gold or not experience.rollout.prompts:
        return state
    params = state.train.old_params
    with plan.times.timing("sync"):
        batch = g.make_batch(experience.rollout, mx.zeros(experience.rewards_pg.shape))
        moments = measured_moments(learner.policy, calibrated_roles(plan.run)[0], params, batch)
        sampler = attrs.evolve(state.sampler, moments=moments)
        name = config.rollout.quantization
        if learner.quantized is not None and is_calibrated(config, name):
            formats = None
            if config.rollout.bits_budget:
                formats = budgeted_formats(
                    config, learner.policy, learner.quantized, params, batch, moments
                )
                plan.shown.note(formats_line(config, formats, learner.policy, params))
            sampler = rounded_as(sampler, learner.quantized, name, moments, formats)
        state = attrs.evolve(state, sampler=sampler)
        role = reference_role(plan, state)
        first = state.update == plan.run.length.supervised_updates
        if role is not None and first and state.train.ref_params is not None:
            reference = role.transform(state.train.params)
            state = attrs.evolve(state, train=attrs.evolve(state.train, ref_params=reference))
    return state


# after an update


def moved_reference(plan: Plan, state: RunState) -> RunState:
    """Updates the reference model from the learner every loss.ref_sync_every batch steps."""
    loss = plan.config.loss
    due = loss.ref_sync_every and state.batch_step - state.ref_synced_at >= loss.ref_sync_every
    if not due or state.train.ref_params is None:
        return state
    role = reference_role(plan, state)
    train = g.sync_ref(state.train, loss.ref_mixup, role and role.transform)
    return attrs.evolve(state, train=train, ref_synced_at=state.batch_step)


def started_grpo(plan: Plan, state: RunState) -> RunState:
    """After the last supervised update, GRPO starts with new optimizer moments, and these weights
    become the reference.
    """
    length = plan.run.length
    if not state.batch_step == length.supervised < length.batch_steps:
        return state
    train = attrs.evolve(state.train, opt_state=tree_map(mx.zeros_like, state.train.opt_state))
    if train.ref_params is not None:
        role = reference_role(plan, state)
        train = g.sync_ref(train, transform=role and role.transform)
    return attrs.evolve(state, train=train, ref_synced_at=state.batch_step)


def reference_role(plan: Plan, state: RunState) -> QuantizedRole | None:
    """The current rounding of the reference model; None if it is not rounded."""
    role = plan.run.learner.reference
    name = plan.config.loss.ref_quantization
    moments = state.sampler.moments
    if role is None or not is_calibrated(plan.config, name) or moments is None:
        return role
    return role.remade(name, moments)


def shapes_of(pieces: Pieces) -> set[Shape]:
    """The shapes for which the steps have been compiled."""
    return {shape_of(piece) for piece in pieces if piece.mask_bt.shape[0]}


def new_shape_tokens(parameters: int, epoch: float) -> int:
    """The number of padding tokens accepted to avoid a new shape: computing them takes as long as
    tracing the step. On a CPU, it is almost unlimited once an epoch has shown all lengths; on a
    GPU, that would be mostly padding once completions have become shorter.
    """
    return (
        number("trace") // max(parameters, _SMALL) if epoch < 1 or number("launch") else 1_000_000
    )
