"""Evaluates a run during training on held-out problems, using the learner's weights."""

import math
from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx

import grpo_fn as g
from runners.data.prompts import Example
from runners.engines.engine import DEFAULT_ROWS, Weights
from runners.evaluation.completions import Completion, Evaluator
from runners.evaluation.evaluation import EvalResult, evaluate_on_ranks
from runners.telemetry.events import Evaluated
from runners.telemetry.records import evaluation_records
from runners.training.rollout import gold_experience
from runners.training.session import Session


def evaluate_if_due(session: Session) -> None:
    """Runs the evaluation that eval.at_start or eval.every requests, if it is due."""
    every = session.config.eval.every
    state = session.state
    if session.config.eval.at_start and state.evaluated_at < 0:
        evaluate(session, "before training")
    elif every and state.update and state.update % every == 0 and state.evaluated_at < state.update:
        evaluate(session, f"after update {state.update}")


def evaluate(session: Session, name: str) -> None:
    """Measures exact match, the run's own rewards, and the loss on held-out reference completions.
    No rollout runs during the evaluation.
    """
    if session.ahead is not None:
        session.shown.status("sampling")
        session.ahead.settle()
    with session.plan.times.timing(None):
        gold = _gold_metrics(session)
        # Completions are measured by the run's rewards or by their answers.
        collector = session.run.collector
        problems = []
        result = EvalResult(0.0, ())
        if collector.scorer.rewards or session.config.answer_form or collector.environments:
            problems = session.run.data.evaluation
            result = _measured(session, problems)
        with session.committing("the evaluation"):
            _log(session, name, problems, result, gold)


def _gold_metrics(session: Session) -> dict[str, float]:
    """Returns the learner's loss and perplexity on the held-out reference completions, or an empty
    dict if there are none.
    """
    run, state, ranks = session.run, session.state, session.ranks
    examples = run.data.gold_evaluation
    if not examples:
        return {}
    session.shown.status("evaluating")
    total = 0.0
    tokens = 0
    own = examples[ranks.number :: ranks.count]
    if own:
        experience = gold_experience(own, run.loaded.vision)
        batch = g.make_batch(experience.rollout, experience.advantages_pg)
        for piece in g.split_batch(batch, max_tokens=state.micro_batch_tokens):
            logp_bt = run.learner.gold_logprob_step(state.train.params, piece)
            total -= mx.where(piece.mask_bt, logp_bt, 0).sum().item()
        tokens = experience.sampled_tokens
    losses, counts = zip(
        *ranks.all_gather_object("the held-out loss", [total, tokens]), strict=True
    )
    loss = math.fsum(losses) / sum(counts)
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


def _measured(session: Session, problems: Sequence[Example]) -> EvalResult:
    """Samples completions of the problems with the learner's weights, and scores them."""
    config, run, state = session.config, session.run, session.state
    engine = run.learner.held_out
    engine.load(Weights(run.learner.sampling, state.train.params, state.update, state.sampler.rows))
    limit = config.eval.max_new_tokens or config.rollout.max_new_tokens
    evaluator = Evaluator(
        engine=engine,
        scorer=run.collector.scorer,
        form=config.answer_form,
        decoder=run.collector.decoder,
        nudge=config.data.nudge,
        rows=config.rollout.max_batch,
        environments=run.collector.environments,
        vision=run.loaded.vision,
        state=session.plan.progress(state),
    )
    sampling = attrs.evolve(run.collector.sampling, max_new_tokens=limit)
    rows = (config.rollout.max_batch or DEFAULT_ROWS) * session.ranks.count
    seconds = 0.0
    completions = list[Completion]()
    lines = list[str]()
    for start in range(0, len(problems), rows):
        done = f", {start:,} of {len(problems):,} done" if start else ""
        session.begin("evaluation", f"evaluating{done}")
        part = evaluate_on_ranks(session.ranks, evaluator, problems[start : start + rows], sampling)
        seconds += part.seconds
        completions += part.completions
        lines += part.problems
    engine.load(None)
    if state.evaluated_at < 0:
        lines += filter(None, [evaluator.notice(completions, problems, limit)])
    for line in dict.fromkeys(lines):
        session.shown.note(line)
    return EvalResult(seconds, tuple(completions))


def _log(
    session: Session,
    name: str,
    problems: Sequence[Example],
    result: EvalResult,
    gold: Mapping[str, float],
) -> None:
    measured = {**result.metrics, **gold}
    state = session.state
    record = {**session.place(), **measured, "time/elapsed": session.elapsed()}
    seen, warnings = session.watch.see(measured, state.seen, state.update)
    if seen.progress.worse:
        record["worse"] = seen.progress.line
    session.change(
        scores=state.scores if result.score is None else (*state.scores, result.score),
        eval_rewards=(
            state.eval_rewards if result.reward is None else (*state.eval_rewards, result.reward)
        ),
        evaluated_at=state.update,
        seen=seen,
    )
    session.shown.handle(
        Evaluated(
            name=name,
            score=result.score,
            correct=sum(bool(each.right) for each in result.completions),
            total=len(result.completions),
            seconds=result.seconds,
            metrics=record,
            problems=evaluation_records(problems, result.completions, state.update),
            reward=result.reward,
        )
    )
    for line in warnings:
        session.shown.note(line)
