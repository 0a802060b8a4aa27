"""Defines the functions that make up a run's steps: propose → experience → learn → gradients →
update → sync.

Each function accepts a `RunState` and returns the next one; the given state does not change. An
update's gradients are not part of `learn`, because a checkpoint must not depend on the number of
ranks: a checkpoint contains the waiting micro-batches, but no rank's sums.
"""

import attrs
import mlx.core as mx

import grpo_fn as g
from grpo_fn.learner import all_reduce
from grpo_fn.prng import ROLLOUTS, fold_in
from runners.data.curriculum import draw_weights, updated
from runners.data.stream import PromptOrder, Weighted, drawn, gold_batch
from runners.engines.engine import Engine
from runners.rewards.experience import Experience, all_rows
from runners.telemetry.run_statistics import Tally
from runners.training.plan import Lesson, Plan, shapes_of
from runners.training.rollout import Draw, gold_experience
from runners.training.run_state import RunState
from runners.training.sampler import fallback_line, given_up, judged, weights_of


def propose(plan: Plan, state: RunState) -> Draw:
    """Returns the next rollout's inputs: prompts, random key, and fallback weights.

    All arrays are evaluated, so another thread can read them.
    """
    run, config = plan.run, plan.config
    if state.batch_step < run.length.supervised:
        gold = PromptOrder(run.data.gold, config.run.seed)
        size = gold_batch(config)
        return Draw(
            drawn=drawn(gold, state.batch_step * size, size), gold=True, key=state.train.key
        )
    weighted = None
    if state.curriculum is not None and config.data.curriculum == "adaptive":
        weights_n = draw_weights(
            state.curriculum,
            state.batch_step,
            target=config.data.target_rate,
            decay=config.data.rate_decay,
            size=config.rollout.num_generations,
        )
        weighted = Weighted(weights_n=weights_n, explore=config.data.explore)
    full = None
    if state.sampler.role is not None:
        full = weights_of(run.learner.sampling, state.train.old_params, given_up(state.sampler, ""))
    key = fold_in(state.train.key, ROLLOUTS, state.batch_step)
    mx.eval(key)
    return Draw(
        drawn=drawn(run.order, state.position, config.optim.batch_size, weighted),
        key=key,
        weighted=weighted,
        trainer_state=plan.progress(state),
        slow_rewards=state.slow_rewards,
        full=full,
    )


def experience(plan: Plan, engine: Engine, draw: Draw) -> Experience:
    """Returns a scored rollout of the proposed prompts, or the proposed reference completions.

    The function does not access the state, and its result is evaluated, so the function may run in
    another thread.
    """
    if draw.gold:
        found = gold_experience(draw.drawn.examples, plan.run.loaded.vision)
    else:
        found = plan.run.collector.collect(engine, draw)
    g.materialize(found.rollout, found.advantages_pg)
    return found


def learn(plan: Plan, state: RunState, experience: Experience) -> RunState:
    """Prepares a rollout's micro-batches and queues them for the coming updates, without using
    the engine.
    """
    config = plan.config
    gold = state.batch_step < plan.run.length.supervised
    with plan.times.timing("learner"):
        quantile = 1.0 if gold else config.loss.top_entropy_quantile
        batch = batch_of(plan, experience, top_entropy_quantile=quantile)
        lesson = Lesson(experience, batch, state.micro_batch_tokens)
        for phase in plan.before_learn:
            lesson = phase(plan, state, lesson)
    if not (gold or config.rollout.max_staleness):  # otherwise, the step did not wait
        for name in ("rollout", "reward"):
            plan.times.add(name, experience.seconds[name])
    sampler = state.sampler
    if not gold:
        sampler = attrs.evolve(sampler, rows=experience.rows)
        state = attrs.evolve(
            state, position=experience.position, slow_rewards=experience.slow_rewards
        )
    if experience.fallback:
        sampler = given_up(sampler, experience.fallback)
        plan.shown.note(fallback_line(sampler))
    tally = attrs.evolve(Tally.of(experience, state.update), quantization=sampler.quantization)
    estimates = state.curriculum
    if estimates is not None:
        first_n = estimates.first_n
        outcomes = [(float(first_n[n]), passed, known) for n, passed, known in experience.outcomes]
        tally = attrs.evolve(tally, outcomes=outcomes)
        estimates = updated(
            estimates, experience.outcomes, state.batch_step, config.data.rate_decay
        )
    state = attrs.evolve(
        state,
        batch_step=state.batch_step + 1,
        sampled_tokens=state.sampled_tokens + experience.sampled_tokens,
        sampler=sampler,
        tallies=(*state.tallies, tally),
        curriculum=estimates,
        waiting=(*state.waiting, lesson.parts),
        shapes=state.shapes.union(*map(shapes_of, lesson.parts)),
        experiences=(*state.experiences, experience),
        micro_batch_tokens=lesson.micro_batch_tokens,
    )
    for phase in plan.after_rollout:
        state = phase(plan, state, experience)
    return state


def reload_sampler(plan: Plan, before: RunState, learned: RunState) -> None:
    """Passes the sampler's weights to the engine, after `learn`, if the rollout has determined how
    they are rounded.
    """
    role = learned.sampler.role
    if role is not None and role is not before.sampler.role:
        with plan.times.timing("sync"):
            plan.load(learned)


def release_sampler(plan: Plan, state: RunState) -> RunState:
    """Frees the sampler's old weights before an update after which the sampler receives new
    weights.
    """
    if not plan.syncs(state) or plan.config.rollout.max_staleness:
        return state
    plan.engine.load(None)
    return attrs.evolve(state, train=attrs.evolve(state.train, old_params=None))


def gradients(plan: Plan, state: RunState) -> RunState:
    """Accumulates the next update's gradients over the waiting micro-batches."""
    with plan.times.timing("learner"):
        steps = [parts[state.reused % len(parts)] for parts in state.waiting]
        learn = plan.supervised if plan.is_supervised(state) else plan.micro_batches
        found = learn.gradients(state.train, steps, state.micro_batch_tokens)
    train, stats = found.value
    return attrs.evolve(
        state, train=train, loss_stats=stats, micro_batch_tokens=found.micro_batch_tokens
    )


def update(plan: Plan, state: RunState) -> tuple[RunState, g.LossStats, g.UpdateStats]:
    """Takes one optimizer step with the accumulated gradients, and returns the next state and the
    statistics.

    The new weights reuse the old weights' memory if nothing else refers to it, so the caller must
    not keep a reference to the state.
    """
    train = state.train
    state = attrs.evolve(state, train=None)
    ranks = plan.run.ranks
    with plan.times.timing("update"), ranks.moving_arrays():
        train, update_stats = plan.run.learner.update_step(all_reduce(train, ranks))
        g.materialize(train, update_stats)
    loss_stats = g.merge_stats(list(state.loss_stats))
    state = attrs.evolve(state, train=train, update=state.update + 1, loss_stats=())
    return state, loss_stats, update_stats


def judge_sampler(plan: Plan, state: RunState, stats: g.LossStats) -> RunState:
    """Switches, after an update, to a sampler in a finer format if the sampler's probabilities
    differ too much from the learner's.
    """
    formats = {tally.quantization for tally in state.tallies}  # may be coarser than the sampler's
    if plan.is_supervised(state) or formats != {state.sampler.quantization}:
        return state
    sampler, line = judged(state.sampler, stats, plan.run.learner.quantized, plan.config)
    if line is None:
        return state
    plan.shown.note(line)
    state = attrs.evolve(state, sampler=sampler)
    if not plan.syncs(state):  # otherwise, the sync passes the weights
        plan.load(state)
    return state


def sync(plan: Plan, state: RunState) -> RunState:
    """Prepares the next rollout after an update, unless the current rollouts are used for further
    updates.
    """
    if state.reused + 1 < plan.uses and not plan.is_supervised(state):
        return attrs.evolve(state, reused=state.reused + 1)
    syncs = plan.syncs(state)
    state = attrs.evolve(state, reused=0, tallies=(), waiting=(), experiences=())
    if syncs:
        with plan.times.timing("sync"):
            state = attrs.evolve(
                state,
                train=g.sync_old(state.train),
                sampler=attrs.evolve(state.sampler, version=state.update),
                synced_at=state.batch_step,
            )
            if state.batch_step >= plan.run.length.supervised:  # supervised steps sample nothing
                plan.load(state)
    for phase in plan.after_update:
        state = phase(plan, state)
    return state


def batch_of(plan: Plan, experience: Experience, top_entropy_quantile: float = 1.0) -> g.Batch:
    """Converts a batch step to one batch, whose mask is True for the tokens that contribute to the
    loss.
    """
    rollout, adv_pg, group_b = experience.rollout, experience.advantages_pg, None
    if any(each.earlier for each in experience.played or ()):
        rollout, adv_pg, group_b = all_rows(experience)
    if adv_pg.ndim == 3:
        adv_pg = g.spread_over_turns(adv_pg, rollout)
    batch = g.make_batch(
        rollout,
        adv_pg,
        mask_truncated=plan.config.loss.mask_truncated_completions,
        top_entropy_quantile=top_entropy_quantile,
    )
    return batch if group_b is None else attrs.evolve(batch, group_b=group_b)
