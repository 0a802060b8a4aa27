"""Defines `Plan`, the unchanging parts of a run's steps, and functions that these steps use:
splitting a batch into micro-batches, and the work after a rollout or an update.
"""

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
from runners.rewards.calls import TrainerState
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
    micro_batch_tokens: int  # the budget; smaller after memory has run out
    parts: tuple[Pieces, ...] = ()  # for each minibatch


BeforeLearn = Callable[["Plan", RunState, Lesson], Lesson]
AfterRollout = Callable[["Plan", RunState, Experience], RunState]
AfterUpdate = Callable[["Plan", RunState], RunState]


@attrs.frozen(eq=False)
class Plan:
    """The unchanging parts of a run's steps, and the optional phases of the steps."""

    run: Run
    micro_batches: MicroBatches
    supervised: MicroBatches  # for reference completions
    before_learn: tuple[BeforeLearn, ...]
    after_rollout: tuple[AfterRollout, ...]
    after_update: tuple[AfterUpdate, ...]
    shown: Diary  # receives messages about the steps
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
    def uses(self) -> int:
        """The number of updates per rollout."""
        return self.config.optim.num_iterations * self.config.optim.minibatches

    def is_supervised(self, state: RunState) -> bool:
        """Returns whether the last batch step used reference completions."""
        return state.batch_step <= self.run.length.supervised

    def update_due(self, state: RunState) -> bool:
        """Returns whether enough batch steps are available for an update."""
        enough = state.batch_step % self.config.optim.gradient_accumulation_steps == 0
        return bool(state.waiting) and (enough or state.batch_step == self.run.length.batch_steps)

    def syncs(self, state: RunState) -> bool:
        """Returns whether the sampler receives the learner's weights after the next update."""
        due = state.batch_step - state.synced_at >= self.config.loss.sync_every
        return due or self.is_supervised(state)

    def progress(self, state: RunState) -> TrainerState:
        """Returns the progress of the run, for rewards."""
        run = self.run
        epoch = run.order.epoch(state.position)
        return TrainerState(state.update, run.length.updates, epoch, self.config.optim.num_epochs)

    def weights(self, state: RunState) -> Weights:
        """Returns the sampler's weights."""
        return weights_of(self.run.learner.sampling, state.train.old_params, state.sampler)

    def load(self, state: RunState) -> None:
        """Passes the sampler's weights to the engine. A rollout that runs ahead has its own weights
        instead.
        """
        if not self.config.rollout.max_staleness:
            self.engine.load(self.weights(state))


def plan_of(run: Run, shown: Diary) -> Plan:
    """Creates the plan of a run."""
    micro_batches = MicroBatches(
        run.learner.grad_step,
        run.config.system.micro_batch_tokens,
        run.ranks,
        shown.note,
        longest=LONGEST if mx.metal.is_available() else 0.0,
        advance=shown.advanced,
    )
    before_learn = [cut_to_micro_batches, with_old_logprobs]
    if run.config.loss.router_replay:
        before_learn.insert(1, with_replayed_experts)
    if run.learner.grader is not None:
        before_learn.insert(0, graded_by_teacher)
    return Plan(
        run=run,
        micro_batches=micro_batches,
        supervised=attrs.evolve(micro_batches, grad_step=run.learner.sft_step),
        before_learn=tuple(before_learn),
        after_rollout=(calibrated,) if calibrated_roles(run) else (),
        after_update=(moved_reference, started_grpo),
        shown=shown,
    )


# before learning: splitting a batch into micro-batches


def graded_by_teacher(plan: Plan, state: RunState, lesson: Lesson) -> Lesson:
    """Adds the teacher's part of the advantages, or its prompts."""
    grader = plan.run.learner.grader
    assert grader is not None
    graded = grader.graded(
        lesson.batch, lesson.experience, plan.micro_batches, lesson.micro_batch_tokens
    )
    return attrs.evolve(lesson, batch=graded.value, micro_batch_tokens=graded.micro_batch_tokens)


def cut_to_micro_batches(plan: Plan, state: RunState, lesson: Lesson) -> Lesson:
    """Splits each minibatch into micro-batches within the budget. Rows without a gradient are
    omitted.
    """
    run, config = plan.run, plan.config
    learner = run.learner
    gold = state.batch_step < run.length.supervised
    parameters = run.loaded.num_parameters
    in_loss = learner.grader is not None and learner.grader.in_loss
    shapes = set(state.shapes)
    parts = []
    for part in g.minibatches(lesson.batch, 1 if gold else config.optim.minibatches):
        # If the loss has one of these terms, every row has a gradient.
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
    """Adds the sampler's expert choices to each micro-batch, which requires an additional forward
    pass.
    """
    weights = plan.weights(state)
    # In full precision, the learner's module computes the same function; the sampler's may be in use.
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
    """Adds log π_old to each micro-batch if π_θ will differ from π_old, because a rollout is used
    for several updates or the sampler's weights are older than the learner's.

    π_old is the learner at the start of a rollout's updates, or at the sampler's last sync. A row
    that was sampled with older weights is corrected by π_old/μ.
    """
    if plan.uses == 1 and state.sampler.version == state.update:
        return lesson
    budget = lesson.micro_batch_tokens
    parts = []
    for pieces in lesson.parts:
        found = plan.micro_batches.logprobs(
            plan.run.learner.logprob_step, state.train.old_params, pieces, budget
        )
        budget = found.micro_batch_tokens
        cut = list(found.steps[0])
        for place, logp_bt in found.value.items():
            cut[place] = attrs.evolve(cut[place], old_logp_bt=logp_bt)
        parts.append(cut)
    return attrs.evolve(lesson, parts=tuple(parts), micro_batch_tokens=budget)


# after a batch step


def calibrated_roles(run: Run) -> list[QuantizedRole]:
    """Returns the roles in this run that use calibrated rounding."""
    loss, rollout, learner = run.config.loss, run.config.rollout, run.learner
    roles = ((rollout.quantization, learner.quantized), (loss.ref_quantization, learner.reference))
    return [role for name, role in roles if role is not None and is_calibrated(run.config, name)]


def calibrated(plan: Plan, state: RunState, experience: Experience) -> RunState:
    """Collects the moments of the layers' inputs after the first rollout that has tokens. After
    that, the moments determine how the roles' weights are rounded.
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
        if learner.reference is not None and state.update == plan.run.length.supervised_updates:
            state = synced_reference(plan, state)
    return state


# after an update


def moved_reference(plan: Plan, state: RunState) -> RunState:
    """Updates the reference model from the learner every loss.ref_sync_every batch steps."""
    loss = plan.config.loss
    if not loss.ref_sync_every or state.batch_step - state.ref_synced_at < loss.ref_sync_every:
        return state
    state = synced_reference(plan, state, loss.ref_mixup)
    return attrs.evolve(state, ref_synced_at=state.batch_step)


def started_grpo(plan: Plan, state: RunState) -> RunState:
    """Starts GRPO after the last supervised update: resets the optimizer's moments, and makes the
    current weights the reference.
    """
    length = plan.run.length
    if not state.batch_step == length.supervised < length.batch_steps:
        return state
    train = attrs.evolve(state.train, opt_state=tree_map(mx.zeros_like, state.train.opt_state))
    state = synced_reference(plan, attrs.evolve(state, train=train))
    return attrs.evolve(state, ref_synced_at=state.batch_step)


def synced_reference(plan: Plan, state: RunState, mixup: float = 1.0) -> RunState:
    """Returns the state after updating the reference model from the learner's weights, in the
    reference's current rounding. Without a reference model, the state is unchanged.
    """
    if state.train.ref_params is None:
        return state
    role = plan.run.learner.reference
    name = plan.config.loss.ref_quantization
    moments = state.sampler.moments
    if role is not None and moments is not None and is_calibrated(plan.config, name):
        role = role.remade(name, moments)
    train = g.sync_ref(state.train, mixup, role and role.transform)
    return attrs.evolve(state, train=train)


def shapes_of(pieces: Pieces) -> set[Shape]:
    """Returns the shapes of these micro-batches, for which the steps are compiled."""
    return {shape_of(piece) for piece in pieces if piece.mask_bt.shape[0]}


def new_shape_tokens(parameters: int, epoch: float) -> int:
    """Returns the number of padding tokens that are accepted to avoid a new shape. Computing this
    many tokens takes as long as tracing the step.

    On a CPU, the number is almost unlimited after the first epoch, which has shown all lengths. On
    a GPU, an unlimited number would cause mostly padding once completions have become shorter.
    """
    return (
        number("trace") // max(parameters, _SMALL) if epoch < 1 or number("launch") else 1_000_000
    )
