"""Reports a run's steps: log lines, the display, warnings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from grpo_fn.learner import routing_stats, take_rows
from grpo_fn.policy import has_routers
from grpo_fn.trees import on_host
from runners.checkpoints.run_folder import saved_best
from runners.data.stream import gold_batch
from runners.files.run_files import BEST, METRICS
from runners.machine.memory_readings import memory_metrics
from runners.report.page import REPORT
from runners.rewards.experience import Experience
from runners.telemetry.events import Completions, Finished, Started, Updated
from runners.telemetry.records import completion_records
from runners.telemetry.run_statistics import loss_metrics, rollout_metrics
from runners.training.plan import Plan
from runners.training.run_state import RunState
from runners.training.session import Session
from runners.training.steps import UpdateResult, batch_of

_ROUTED_TOKENS = 4096  # tokens of an update from which the experts' load is logged
# The metrics of an update that say nothing of reference completions begin so.
_OF_SAMPLES = (
    *("reward", "frac_reward", "length_penalty", "ratio/", "clip_", "cispo_"),
    *("sampling/", "kl", "tokens_per", "groups/", "staleness/"),
)


def show_start(session: Session) -> None:
    """The run's header on the display."""
    config, run, state = session.config, session.run, session.state
    loaded = run.loaded
    updates = run.length.supervised_updates
    header = {
        "run": config.run.name,
        "model": f"{config.model.path} ({loaded.num_parameters:,} parameters, "
        f"{loaded.num_trainable:,} trained, {config.model.tune})",
        "data": f"{config.data.source} ({len(run.data.train):,} to train on, "
        f"{len(run.data.evaluation):,} held out)",
    }
    if not config.sft.only:
        prompts = config.optim.batch_size * config.optim.gradient_accumulation_steps
        header["each update"] = (
            f"{prompts} prompts × {config.rollout.num_generations} completions, "
            f"{config.loss.preset}"
        )
    header["writes to"] = str(run.folder)
    if updates:
        gold = gold_batch(config) * config.optim.gradient_accumulation_steps
        plural = "s" if updates > 1 else ""
        header["supervised"] = f"{updates:,} update{plural} of {gold:,} reference completions"
    session.shown.handle(
        Started(
            updates=run.length.updates,
            header=header,
            done=state.update,
            score=state.scores[-1] if state.scores else None,
            reward=state.eval_rewards[-1] if state.eval_rewards else None,
        )
    )


def show_summary(session: Session, final: Path) -> None:
    """The run's result on the display: the final model and the results of its evaluations."""
    state = session.state
    folder = final.parent
    held_out = len(session.run.data.evaluation)
    scores = list(state.scores)
    rewards = list(state.eval_rewards)
    shown = dict[str, Any]()
    if scores:
        before = f"{scores[0]:.1%} → " if len(scores) > 1 else ""
        shown["exact match"] = f"{before}{scores[-1]:.1%} on {held_out} held-out problems"
    elif rewards:
        before = f"{rewards[0]:.4g} → " if len(rewards) > 1 else ""
        shown["reward"] = f"{before}{rewards[-1]:.4g} on {held_out} held-out prompts"
    shown |= {
        "updates": state.update,
        "tokens sampled": f"{state.sampled_tokens:,}",
        "model": str(final),
    }
    best = saved_best(folder)
    if best:
        shown["best model"] = f"{folder / BEST} (of update {best.get('update')})"
    if (folder / METRICS).is_file():  # not if it was deleted under the run
        shown["log"] = str(folder / METRICS)
    if session.config.log.report:
        shown["report"] = str(folder / REPORT)
    if state.seen.reached:
        shown["ended early"] = state.seen.reached
    if state.bad_updates:
        shown["updates skipped"] = state.bad_updates
    session.shown.handle(Finished(shown))


def log_batch_step(session: Session, experience: Experience) -> None:
    """The problems of a batch step and its completions, unless they are reference completions."""
    if session.plan.is_supervised(session.state):
        return
    for line in experience.problems:
        session.shown.note(line)
    records = completion_records(experience, session.state.batch_step, session.state.update + 1)
    session.shown.handle(Completions(records))


def log_update(session: Session, updated: UpdateResult) -> None:
    """The metrics of an update, and the warnings about it."""
    metrics = update_metrics(session, updated)
    # Rank 0's values count for all.
    metrics = session.ranks.all_gather_object("the metrics", metrics)[0].value
    state = session.state
    reward = metrics.get("reward", math.nan)
    skipped = bool(metrics.get("update_skipped"))
    bad = state.bad_updates + skipped
    if bad:
        metrics["bad_updates"] = bad
    seen, warnings = session.watch.see(metrics, state.seen)
    if seen.progress.worse:
        metrics["worse"] = seen.progress.line
    session.change(
        reward=reward if reward == reward else None,
        seen=seen,
        bad_updates=bad,
        bad_updates_in_a_row=state.bad_updates_in_a_row + 1 if skipped else 0,
    )
    last = state.update == session.run.length.updates or seen.reached
    due = session.state.update % session.config.log.every == 0 or bool(last)
    session.shown.handle(Updated(metrics, logged=due))
    if skipped:
        session.shown.note(
            f"update {state.update} was skipped because the new weights would not be finite; its "
            f"loss is "
            f"{metrics['loss']:.3g}, the norm of its gradient {metrics['grad_norm']:.3g}"
        )
    slower = session.power.slower(metrics.get("tokens_per_second/step", 0.0))
    for line in (*warnings, *filter(None, [slower])):
        session.shown.note(line)


def update_metrics(session: Session, updated: UpdateResult) -> dict[str, Any]:
    """All metrics of an update."""
    state, run, plan = session.state, session.run, session.plan
    gold = plan.is_supervised(state)
    rewards = [] if gold else [reward.name for reward in run.collector.scorer.rewards]
    sampled = sum(tally.sampled_tokens for tally in state.tallies)
    sampling = sum(tally.seconds["rollout"] for tally in state.tallies)
    experts = expert_metrics(plan, state)  # its time counts for the step
    times = plan.times.take()
    if session.config.rollout.max_staleness and not gold:
        spent = sum(tally.seconds["rollout"] + tally.seconds["reward"] for tally in state.tallies)
        times["time/ahead"] = max(spent - times["time/rollout"], 0.0)
    metrics = {
        **session.place(),
        "epoch": round(_epoch(session, gold), 4),
        **rollout_metrics(state.tallies, rewards, session.config),
        **loss_metrics(
            updated.loss,
            updated.update,
            run.learner.spec,
            has_reference=state.train.ref_params is not None,
            has_teacher=run.learner.grader is not None,
        ),
        **experts,
        **state.sampler.metrics(),
        "num_tokens": state.sampled_tokens,
        **times,
        "tokens_per_second": sampled / max(sampling, 1e-9),
        "tokens_per_second/step": sampled / max(times["step_time"], 1e-9),
        **_rank_metrics(session),
        "time/elapsed": session.elapsed(),
        **memory_metrics(),
        **session.power.metrics(),
    }
    if not gold:
        return metrics
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_SAMPLES)}


def expert_metrics(plan: Plan, state: RunState) -> dict[str, float]:
    """Metrics of how evenly the last rollout uses the experts, from a forward pass over some of its
    rows. Empty for a model without known routers, with checkpointed blocks, or if all tokens are
    masked.
    """
    policy = plan.run.learner.policy
    if (
        plan.config.system.grad_checkpoint
        or not has_routers(policy.module)
        or not state.experiences
    ):
        return {}
    batch = batch_of(plan, state.experiences[-1])
    counted = [row for row, counts in enumerate(on_host(batch.mask_bt.any(axis=1))) if counts]
    if not counted:
        return {}
    fit = max(1, min(_ROUTED_TOKENS, state.micro_batch_tokens) // batch.tokens_bl.shape[1])  # rows
    every = -(-len(counted) // fit)
    stats = routing_stats(policy, state.train.params, take_rows(batch, counted[::every]))
    return {f"experts/{name}": float(value.item()) for name, value in stats._asdict().items()}


def _epoch(session: Session, gold: bool) -> float:
    """The number of epochs over the training examples or the reference completions so far."""
    run, state = session.run, session.state
    if gold:
        return state.batch_step * gold_batch(session.config) / len(run.data.gold)
    return run.order.epoch(state.position)


def _rank_metrics(session: Session) -> dict[str, Any]:
    """The cost of several ranks: seconds for exchanges and sums, and for each rank's rollouts."""
    ranks = session.ranks
    own = "rollout_seconds/"
    if ranks.is_alone:
        return {}
    seconds = ranks.seconds()
    spent = [
        sum(tally.seconds.get(f"{own}{rank}", 0.0) for tally in session.state.tallies)
        for rank in range(ranks.count)
    ]
    return {
        "ranks/number": ranks.count,
        "ranks/waiting_seconds": seconds["waiting"],
        "ranks/reducing_seconds": seconds["reducing"],
        **{f"ranks/{own}{rank}": value for rank, value in enumerate(spent)},
        "ranks/rollout_skew": max(spent) - min(spent),
        "ranks/slowest": spent.index(max(spent)),
    }
