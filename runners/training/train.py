"""Runs a config from the start or from a checkpoint, up to its final model."""

import math
from contextlib import ExitStack, closing
from pathlib import Path

import attrs

import grpo_fn as g
from runners.config.loading import Config
from runners.engines.apart import blank_weights, serve
from runners.environments.environments import start_worker
from runners.errors import RewardError
from runners.machine import startup
from runners.machine.mac_power import awake
from runners.machine.metal_faults import explained_aborts
from runners.machine.signals import Stopped, StopSignals
from runners.memory.metal_limits import metal_limits
from runners.ranks.messages import RankError
from runners.ranks.rank_place import read_rank_place
from runners.ranks.ranks import Ranks
from runners.telemetry.report import Report
from runners.training.evaluation import evaluate, evaluate_if_due
from runners.training.session import Session
from runners.training.start import start_or_resume
from runners.training.step_log import log_batch_step, log_update, show_start, show_summary
from runners.training.steps import (
    experience,
    gradients,
    judge_sampler,
    learn,
    propose,
    release_sampler,
    reload_sampler,
    sync,
    update,
)


@attrs.frozen(eq=False)
class RunResult:
    """The result of a finished run."""

    folder: Path
    state: g.TrainState
    first_em: float | None  # exact match at the start; None: not measured
    last_em: float | None
    updates: int
    seconds: float


def run_training(
    config: Config,
    *,
    report: Report | None = None,
    resume: Path | bool = False,
    allow_config_change: bool = False,
    overwrite: bool = False,
    ranks: Ranks | None = None,
    signals: StopSignals | None = None,
) -> RunResult:
    """Trains according to the config, and writes all files to OUTPUT_DIR/NAME.

    Args:
        config: see `load_config`.
        report: the display; by default the terminal.
        resume: resume from the last complete checkpoint in the run's folder (True), or from the
            checkpoint in this folder. A run without a checkpoint starts over.
        allow_config_change: continue even if keys that affect the weights differ.
        overwrite: start over even if the folder contains an interrupted run, and remove its
            checkpoints. run.overwrite replaces only a finished run.
        ranks: the ranks that share the run; by default, all ranks that `mlx.launch` has started,
            including this process. Rank 0 owns the folder and the display.
        signals: the handlers for signals that stop the run, already active. None handles SIGINT,
            SIGTERM and SIGHUP during the run.

    Raises UserError or ConfigError for invalid input, before the first step. After the state is
    saved, raises Stopped (a KeyboardInterrupt) after SIGINT, SIGTERM or SIGHUP, OutputLost if the
    display can no longer be written, and NumbersError if too many consecutive updates were skipped.
    """
    with ExitStack() as stack:
        signals = signals or stack.enter_context(StopSignals())
        worker = stack.enter_context(closing(start_worker(config)))
        machine = startup.prepare(config.system.memory_limit_gb, config)
        stack.enter_context(explained_aborts(machine.backend))
        stack.enter_context(awake())
        if ranks is None:  # otherwise, the caller ends its ranks
            ranks = Ranks(read_rank_place(), signals=signals)
            stack.enter_context(ranks.ending_together())
        session = stack.enter_context(
            start_or_resume(
                config,
                machine,
                ranks,
                signals,
                report,
                worker,
                resume=resume,
                allow_config_change=allow_config_change,
                overwrite=overwrite,
            )
        )
        stack.enter_context(metal_limits(machine.backend, session.run.phases, session.shown.note))
        if config.ranks.samplers and not ranks.is_rank_zero:
            with signals.deferred():  # rank 0 decides when to stop
                return sample(session, ranks)
        try:
            try:
                return train(session)
            except (RewardError, RankError) as error:
                # If only some ranks failed, the others are still in a rollout.
                if session.ranks.is_alone or getattr(error, "on_all_ranks", False):
                    failed = "reward" if isinstance(error, RewardError) else "sampling"
                    session.save_to_stop(f"before the {failed} failed: ")
                raise
        except Stopped as stopped:  # also during that save
            session.ranks.stop_together(stopped)
            stopped.begun = True
            session.save_to_stop("interrupted: ")
            session.ranks.agreed_to_end()
            raise


def sample(session: Session, ranks: Ranks) -> RunResult:
    """Samples for rank 0, with the weights that rank 0 sends, until rank 0 ends."""
    learner = session.run.learner
    blank = blank_weights(learner.sampling, session.state.train.params)
    session.change(train=None)  # frees the weights, the reference and the optimizer's moments
    ranks.watchdog.timeout = math.inf  # rank 0 may learn for a long time before its next request
    serve(ranks, learner.engine, learner.sampling, blank)
    return RunResult(session.run.folder, session.state.train, None, None, 0, session.elapsed())


def train(session: Session) -> RunResult:
    """Runs all remaining steps, then the final evaluation, and writes the final model."""
    show_start(session)
    evaluate_if_due(session)  # before training, or again if a signal has interrupted it
    session.save_best_if_due()
    while not session.finished:
        if session.plan.update_due(session.state):
            take_update(session)
        else:
            take_batch_step(session)
        session.check_log()
        evaluate_if_due(session)
        session.save_best_if_due()
        session.check_bad_updates()
        session.save_if_due()
        session.check_output()
        session.check_swap()
    return finish(session)


def take_batch_step(session: Session) -> None:
    """Samples and scores one rollout, and queues its micro-batches for the coming updates."""
    plan, state = session.plan, session.state
    session.begin("rollout", "sampling")
    if session.ahead is None or state.batch_step < session.run.length.supervised:
        # prompts -> completions -> rewards
        found = experience(plan, plan.engine, propose(plan, state))
    else:  # threads sample this batch step and the next ones
        state, found = session.ahead.take(state)
    learned = learn(plan, state, found)  # -> advantages -> micro-batches
    reload_sampler(plan, state, learned)
    with session.committing("the batch step"):
        session.state = learned
        log_batch_step(session, found)


def take_update(session: Session) -> None:
    """Computes gradients and takes one optimizer step."""
    plan = session.plan
    session.begin("gradient", "learning")
    session.state = release_sampler(plan, session.state)
    summed = [gradients(plan, session.state)]  # Σ over the waiting micro-batches
    with session.committing("the update"):
        session.change(train=None)  # MLX writes the new weights into the old weights' memory
        session.state, loss_stats, update_stats = update(plan, summed.pop())
        session.state = judge_sampler(plan, session.state, loss_stats)
        log_update(session, loss_stats, update_stats)
        session.state = sync(plan, session.state)  # the sampler receives the new weights


def finish(session: Session) -> RunResult:
    """Runs the final evaluation, and writes the final model."""
    if session.state.seen.reached:
        session.shown.note(f"the run ends early: {session.state.seen.reached}")
    if session.state.evaluated_at != session.state.update:
        evaluate(session, "at the end")
    session.save_best_if_due()
    session.shown.status("saving the final model")
    final = session.save_final()
    show_summary(session, final)
    state = session.state
    first = state.scores[0] if session.config.eval.at_start and state.scores else None
    return RunResult(final.parent, state.train, first, state.em, state.update, session.elapsed())
