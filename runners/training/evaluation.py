"""Evaluations during a run: exact match on the held-out problems, with the learner's weights."""

from __future__ import annotations

import attrs

from runners.evaluation.episode_figures import logged_figures
from runners.evaluation.exact_match import EvalResult, evaluate_on_ranks
from runners.telemetry.events import Evaluated
from runners.telemetry.records import evaluation_records
from runners.training.session import Session


def evaluate_if_due(session: Session) -> None:
    """The evaluation that eval.at_start or eval.every asks for."""
    every, state = session.config.eval.every, session.state
    if session.config.eval.at_start and state.evaluated_at < 0:
        evaluate(session, "before training")
    elif every and state.update and state.update % every == 0 and state.evaluated_at < state.update:
        evaluate(session, f"after update {state.update}")


def evaluate(session: Session, name: str) -> None:
    """Measures exact match, for the log and the display."""
    if not session.config.data.answer:  # an environment rewards, and there are no answers to compare with
        return
    with session.steps.times.stopped():
        session.shown.status("evaluating")
        result = _measured(session)
        with session.committing("the evaluation"):
            _log(session, name, result)


def _measured(session: Session) -> EvalResult:
    config, run, state = session.config, session.run, session.state
    engine = run.learner.evaluator
    engine.load(state.train.params, state.update)
    limit = config.eval.max_new_tokens or config.rollout.max_new_tokens
    result = evaluate_on_ranks(
        session.ranks,
        engine,
        run.data.evaluation,
        attrs.evolve(run.collector.sampling, max_new_tokens=limit),
        decoder=run.decoder,
        nudge=config.data.nudge,
        max_batch=config.rollout.max_batch,
        environments=run.environments,
        vision=run.loaded.vision,
    )
    engine.load(None, state.update)
    return result


def _log(session: Session, name: str, result: EvalResult) -> None:
    found = logged_figures(result.figures)
    record = {**session.place(), "em": result.score, "em_subset": result.total, "time/eval": result.seconds}
    record |= {"time/elapsed": session.elapsed(), **found}
    update = session.state.update
    problems = evaluation_records(session.run.data.evaluation, result.texts, result.right, update)
    measured = {name: record[name] for name in ("em", "time/eval", *found)}
    seen, _ = session.watch.see(measured, session.state.seen)
    session.change(scores=(*session.state.scores, result.score), evaluated_at=update, seen=seen)
    figures = result.score, result.correct, result.total, result.seconds
    session.shown.handle(Evaluated(name, *figures, record, problems))
