"""Measures a model on a set of problems: greedy exact match, pass@k and maj@k, rewards, lengths.

Prompts, extraction and stop strings are those of training: `build_examples`, `extract_answer`, `find_stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np

import grpo_fn as g
from grpo_fn.prng import EVALUATION, fold_in
from runners.config.loading import Config
from runners.data.datasets import load_rows, load_split
from runners.data.prompts import Example, build_examples, columns_of
from runners.data.rows import Rows
from runners.engines.settings import sampling_of
from runners.environments.environments import Environments
from runners.errors import UserError
from runners.evaluation.episode_figures import SUCCESS, EpisodeFigures
from runners.evaluation.exact_match import held_out, is_correct
from runners.evaluation.results import (
    Metric,
    ModelResult,
    count_answers,
    row_means,
    shares,
    success_shares,
)
from runners.inference.batches import LENGTH, Batch, sample_batches
from runners.inference.inference_model import InferenceModel
from runners.rewards.builtin import extract_answer
from runners.rewards.functions import Reward
from runners.rewards.scoring import Scorer

Problems = Sequence[Mapping[str, Any]]


def eval_rows(config: Config, *, whole: bool) -> Rows:
    """The problems of a config: those that training holds out, or with `whole` all of `data.eval_split`.

    Raises UserError if the data is missing or has faults.
    """
    if whole:
        return load_split(config.data, config.data.eval_split, folders=config.folders)
    return load_rows(config.data, config.folders)[1]


def choose_problems(
    rows: Problems, model: InferenceModel, config: Config, tools: Sequence[dict[str, Any]] = ()
) -> tuple[dict[int, Example], int]:
    """The problems by their rows' numbers, the same `eval.samples` as in training; and how many prompts are
    longer than `data.max_prompt_length`. `tools`: schemas that the prompts show."""
    unlimited = attrs.evolve(config.data, max_prompt_length=2**31 - 1)
    processor = model.vision.processor if model.vision else None
    examples, _ = build_examples(rows, unlimited, model.tokenizer, tools, processor)
    fitting = [(each.number, each) for each in examples if len(each.tokens) <= config.data.max_prompt_length]
    if not fitting:
        shortest = min(len(example.tokens) for example in examples)
        raise UserError(
            f"data.max_prompt_length is {config.data.max_prompt_length}, but the shortest of {len(examples)} "
            f"prompts has {shortest} tokens"
        )
    most = config.eval.max_new_tokens or config.rollout.max_new_tokens
    model.check([example.tokens for _, example in fitting], most)
    return dict(held_out(fitting, config.eval.samples)), len(examples) - len(fitting)


@attrs.define(eq=False)
class _Completed:
    """All completions of a kind, with their rewards, in the problems' order."""

    texts: list[str] = attrs.field(factory=list)
    lengths: list[int] = attrs.field(factory=list)
    finish: list[str] = attrs.field(factory=list)
    values: list[np.ndarray] = attrs.field(factory=list)  # [K,B] of each batch
    messages: list[Sequence[dict[str, Any]]] = attrs.field(factory=list)  # of conversations, as `faults`
    faults: list[str] = attrs.field(factory=list)
    figures: EpisodeFigures = attrs.field(factory=EpisodeFigures)
    seconds: float = 0.0

    @property
    def values_kb(self) -> np.ndarray:
        """The rewards of all."""
        return np.concatenate(self.values, axis=1)

    def add(self, batch: Batch, values_kb: np.ndarray) -> None:
        """One more batch and its rewards."""
        self.texts += batch.texts
        self.lengths += batch.lengths
        self.finish += batch.finish
        self.values.append(values_kb)
        self.seconds += batch.seconds
        if batch.played is not None:
            self.messages += batch.played.messages
            self.faults += batch.played.faults


def measure(
    model: InferenceModel,
    name: str,
    chosen: Mapping[int, Example],
    config: Config,
    rewards: Sequence[Reward],
    *,
    num: int = 0,
    ks: Sequence[int] = (),
    rows: int = 0,
    environments: Environments | None = None,
    success_at: float = SUCCESS,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ModelResult:
    """Completes the problems greedily and, if asked for, by sampling as in [rollout].

    With environments each completion is a conversation: there are success, turns, calls and failed calls too.

    Args:
        model: it answers.
        name: the model's name in the result.
        chosen: problems by number, from `choose_problems`.
        config: with data.answer = "" there are no gold answers: no exact match, and pass@k is of successes.
        rewards: the config's; with environments their own at the end.
        num: samples of each problem; 0: none.
        ks: of pass@k and maj@k.
        rows: completions at a time; 0: the config's, else 256.
        environments: built for this model's tokenizer.
        success_at: a conversation succeeds if the environment's own reward is at least this; without one, if
            the model's last turn has the gold answer.
        progress: called with the kind of completions, how many problems are done, and of how many.
    """
    examples = list(chosen.values())
    golds = [example.answer for example in examples]
    scorer = Scorer(rewards, config.reward.timeout, config.reward.on_error)
    problems: list[str] = []
    sampling = attrs.evolve(
        sampling_of(config, model.eos_ids, model.decoder.find_stop(config.rollout.stop)),
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        with_entropy=False,
    )

    def completed(what: str, sampling: g.Sampling) -> _Completed:
        found, size = _Completed(), sampling.num_generations
        for batch in sample_batches(
            model.engine,
            examples,
            sampling,
            key=evaluation_key(config),
            decoder=model.decoder,
            nudge=config.data.nudge,
            rows=rows or config.rollout.max_batch,
            environments=environments,
            vision=model.vision,
        ):
            played = batch.played
            scores = scorer.score(
                batch.texts,
                [list(example.messages) for example in batch.examples for _ in range(size)],
                columns_of(batch.examples, size),
                batch.rollout.completions(),
                group_size=size,
                conversations=None if played is None else played.messages,
                environments=None if played is None else played.environments,
            )
            values_kb = scores.values_kb
            problems.extend(scores.problems)
            if played is not None and environments is not None:
                values_kb[:, [bool(fault) for fault in played.faults]] = np.nan
                gold = [example.answer for example in batch.examples for _ in range(size)]
                right = [is_correct(text, answer) for text, answer in zip(batch.texts, gold, strict=True)]
                own = None
                if environments.reward is not None:
                    values = values_kb[rewards.index(environments.reward)].tolist()
                    own = [None if value != value else value for value in values]
                figures = EpisodeFigures.of(played, right, own, success_at)
                found.figures = found.figures.concatenated(figures)
                problems.extend(played.problems)
            found.add(batch, values_kb)
            progress(what, len(found.texts) // size, len(examples))
        return found

    greedy = completed("greedy", attrs.evolve(sampling, num_generations=1, temperature=0))
    details = _metrics(greedy, rewards, 1, "")
    json_rows = _json_rows(name, "greedy", chosen, greedy, rewards, 1)
    right = [is_correct(text, gold) for text, gold in zip(greedy.texts, golds, strict=True)]
    metrics = {"success": details.pop("success")} if environments is not None else {}
    metrics["exact match"] = Metric(np.array(right, np.float64), percent=True)
    seconds = greedy.seconds
    if num:
        sampled = completed("sampled", attrs.evolve(sampling, num_generations=num))
        if config.data.answer:
            groups = [sampled.texts[n : n + num] for n in range(0, len(sampled.texts), num)]
            counts = [count_answers(group, gold) for group, gold in zip(groups, golds, strict=True)]
            metrics |= shares(counts, num, ks)
        elif environments is not None:
            succeeded = np.reshape(sampled.figures.success, (-1, num)).sum(axis=1).tolist()
            metrics |= success_shares(succeeded, num, ks)
        details |= _metrics(sampled, rewards, num, "sampled ")
        json_rows += _json_rows(name, "sample", chosen, sampled, rewards, num)
        seconds += sampled.seconds
    metrics |= details
    if not config.data.answer:
        unknown = {"answer", "extracted", "correct", "exact match"}
        if environments is None or environments.reward is None:
            unknown |= {"success", "sampled success", *(f"pass@{k}" for k in ks)}
        metrics = {name: metric for name, metric in metrics.items() if name not in unknown}
        json_rows = [{key: cell for key, cell in row.items() if key not in unknown} for row in json_rows]
    faults = tuple(dict.fromkeys(problems))
    spent = 0.0 if environments is None else seconds
    return ModelResult(name, tuple(chosen), metrics, tuple(json_rows), faults, spent)


def evaluation_key(config: Config) -> mx.array:
    """The key of all completions: of the run's seed, but shared with no other purpose."""
    return fold_in(mx.random.key(config.run.seed), EVALUATION)


def _metrics(found: _Completed, rewards: Sequence[Reward], num: int, prefix: str) -> dict[str, Metric]:
    """A number for each problem: the means over its completions."""

    def mean(values: Any, percent: bool = False) -> Metric:
        return Metric(row_means(np.asarray(values, np.float64).reshape(-1, num)), percent=percent)

    figures = found.figures
    metrics = {"success": mean(figures.success, percent=True)} if found.messages else {}
    for reward, values_b in zip(rewards, found.values_kb, strict=True):
        metrics[f"reward/{reward.name}"] = mean(values_b)
    if found.messages:
        metrics |= {
            "turns": mean(figures.turns),
            "calls": mean(figures.calls),
            "failed calls": mean(figures.failures),
            "tool seconds": mean(figures.seconds),
        }
    metrics["length"] = mean(found.lengths)
    metrics["truncated"] = mean([each == LENGTH for each in found.finish], percent=True)
    return {f"{prefix}{name}": metric for name, metric in metrics.items()}


def _json_rows(
    name: str,
    kind: str,
    chosen: Mapping[int, Example],
    found: _Completed,
    rewards: Sequence[Reward],
    num: int,
) -> list[dict[str, Any]]:
    values_kb, figures, problems = found.values_kb, found.figures, list(chosen.items())
    rows = []
    for row, text in enumerate(found.texts):
        index, example = problems[row // num]
        given = zip(rewards, values_kb[:, row].tolist(), strict=True)
        cells = {
            "model": name,
            "kind": kind,
            "problem": index,
            "sample": row % num,
            "prompt": example.text,
            **({"images": [image.name for image in example.images]} if example.images else {}),
            "answer": example.answer,
            "completion": text,
            "extracted": extract_answer(text),
            "correct": is_correct(text, example.answer),
            "tokens": found.lengths[row],
            "finish": found.finish[row],
            "rewards": {r.name: None if np.isnan(value) else value for r, value in given},
        }
        if found.messages:
            cells |= {
                "messages": list(found.messages[row]),
                "success": figures.success[row],
                "turns": figures.turns[row],
                "calls": figures.calls[row],
                "failures": figures.failures[row],
                **({"fault": found.faults[row]} if found.faults[row] else {}),
            }
        rows.append(cells)
    return rows
