"""Reports a run's steps as log lines, on the display and as warnings."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpo_fn as g
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
from runners.training.steps import batch_of

_ROUTED_TOKENS = 4096  # number of tokens per update for which the experts' load is computed
# Prefixes of metrics that have no meaning for reference completions.
_OF_SAMPLES = (
    *("reward", "frac_reward", "length_penalty", "ratio/", "clip_", "cispo_"),
    *("sampling/", "kl", "tokens_per", "groups/", "staleness/"),
)


def show_start(session: Session) -> None:
    """Shows the run's header on the display."""
    config, run, state = session.config, session.run, session.state
    loaded = run.loaded
    accumulated = config.optim.gradient_accumulation_steps
    header = {
        "run": config.run.name,
        "model": f"{config.model.path} ({loaded.num_parameters:,} parameters, "
        f"{loaded.num_trainable:,} trained, {config.model.tune})",
        "data": f"{config.data.source} ({len(run.data.train):,} to train on, "
        f"{len(run.data.evaluation):,} held out)",
    }
    if not config.sft.only:
        header["each update"] = (
            f"{config.optim.batch_size * accumulated} prompts × {config.rollout.num_generations} "
            f"completions, {config.loss.preset}"
        )
    header["writes to"] = str(run.folder)
    updates = run.length.supervised_updates
    if updates:
        header["supervised"] = (
            f"{updates:,} update{'s' if updates > 1 else ''} of "
            f"{gold_batch(config) * accumulated:,} reference completions"
        )
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
    """Shows the run's result on the display: the final model and its evaluations' results."""
    state = session.state
    folder = final.parent
    held_out = len(session.run.data.evaluation)
    shown = dict[str, Any]()
    if state.scores:
        shown["exact match"] = f"{_ends(state.scores, '.1%')} on {held_out} held-out problems"
    elif state.eval_rewards:
        shown["reward"] = f"{_ends(state.eval_rewards, '.4g')} on {held_out} held-out prompts"
    shown |= {
        "updates": state.update,
        "tokens sampled": f"{state.sampled_tokens:,}",
        "model": str(final),
    }
    best = saved_best(folder)
    if best:
        shown["best model"] = f"{folder / BEST} (of update {best.get('update')})"
    if (folder / METRICS).is_file():  # unless it was deleted during the run
        shown["log"] = str(folder / METRICS)
    if session.config.log.report:
        shown["report"] = str(folder / REPORT)
    if state.seen.reached:
        shown["ended early"] = state.seen.reached
    if state.bad_updates:
        shown["updates skipped"] = state.bad_updates
    session.shown.handle(Finished(shown))


def _ends(values: Sequence[float], form: str) -> str:
    """Formats the first and the last value, or the only one."""
    return " → ".join(format(value, form) for value in (*values[:1], *values[1:][-1:]))


def log_batch_step(session: Session, experience: Experience) -> None:
    """Logs a batch step's problems, and its completions unless they are reference completions."""
    state = session.state
    if session.plan.is_supervised(state):
        return
    for line in experience.problems:
        session.shown.note(line)
    session.shown.handle(
        Completions(completion_records(experience, state.batch_step, state.update + 1))
    )


def log_update(session: Session, loss: g.LossStats, update: g.UpdateStats) -> None:
    """Logs an update's metrics, and shows warnings about them."""
    metrics = update_metrics(session, loss, update)
    # All ranks use rank 0's values.
    metrics = session.ranks.all_gather_object("the metrics", metrics)[0]
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
    is_last = state.update == session.run.length.updates or bool(seen.reached)
    is_due = state.update % session.config.log.every == 0
    session.shown.handle(Updated(metrics, logged=is_due or is_last))
    if skipped:
        session.shown.note(
            f"update {state.update} was skipped because the new weights would not be finite; its "
            f"loss is {metrics['loss']:.3g}, the norm of its gradient {metrics['grad_norm']:.3g}"
        )
    slower = session.power.slower(metrics.get("tokens_per_second/step", 0.0))
    for line in filter(None, [*warnings, slower]):
        session.shown.note(line)


def update_metrics(session: Session, loss: g.LossStats, update: g.UpdateStats) -> dict[str, Any]:
    """Returns all metrics of an update."""
    state, run, plan = session.state, session.run, session.plan
    gold = plan.is_supervised(state)
    epoch = run.order.epoch(state.position)
    rewards = [reward.name for reward in run.collector.scorer.rewards]
    if gold:
        epoch = state.batch_step * gold_batch(session.config) / len(run.data.gold)
        rewards = []
    sampled = sum(tally.sampled_tokens for tally in state.tallies)
    sampling = sum(tally.seconds["rollout"] for tally in state.tallies)
    experts = expert_metrics(
        plan, state
    )  # before the times are read, because it is part of the step
    times = plan.times.take()
    if session.config.rollout.max_staleness and not gold:
        scoring = sum(tally.seconds["reward"] for tally in state.tallies)
        times["time/ahead"] = max(sampling + scoring - times["time/rollout"], 0.0)
    metrics = {
        **session.place(),
        "epoch": round(epoch, 4),
        **rollout_metrics(state.tallies, rewards, session.config),
        **loss_metrics(
            loss,
            update,
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
    """Measures how evenly the last rollout uses the experts, in a forward pass over some of its
    rows.

    Returns no metrics for a model without known routers, with checkpointed blocks, or if all tokens
    are masked.
    """
    policy = plan.run.learner.policy
    supported = has_routers(policy.module) and not plan.config.system.grad_checkpoint
    if not supported or not state.experiences:
        return {}
    batch = batch_of(plan, state.experiences[-1])
    counted = [row for row, counts in enumerate(on_host(batch.mask_bt.any(axis=1))) if counts]
    if not counted:
        return {}
    fit = max(1, min(_ROUTED_TOKENS, state.micro_batch_tokens) // batch.tokens_bl.shape[1])  # rows
    every = -(-len(counted) // fit)
    stats = routing_stats(policy, state.train.params, take_rows(batch, counted[::every]))
    return {f"experts/{name}": float(value.item()) for name, value in stats._asdict().items()}


def _rank_metrics(session: Session) -> dict[str, Any]:
    """Returns the time spent on coordinating several ranks: seconds for exchanges and sums, and for
    each rank's rollouts.
    """
    ranks = session.ranks
    if ranks.is_alone:
        return {}
    seconds = ranks.seconds()
    spent = {
        name: sum(tally.seconds.get(name, 0.0) for tally in session.state.tallies)
        for name in (f"rollout_seconds/{rank}" for rank in range(ranks.count))
    }
    values = list(spent.values())
    return {
        "ranks/number": ranks.count,
        "ranks/waiting_seconds": seconds["waiting"],
        "ranks/reducing_seconds": seconds["reducing"],
        **{f"ranks/{name}": value for name, value in spent.items()},
        "ranks/rollout_skew": max(values) - min(values),
        "ranks/slowest": values.index(max(values)),
    }
