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
from runners.data.rendering import use_template
from runners.data.rows import Rows
from runners.engines.settings import sampling_of
from runners.environments.environments import Environments
from runners.errors import UserError
from runners.evaluation.episode_figures import SUCCESS, EpisodeFigures, episode_figures
from runners.evaluation.exact_match import held_out, is_correct
from runners.evaluation.results import (
    Metric,
    ModelResult,
    count_answers,
    row_means,
    shares,
    success_shares,
)
from runners.inference.batches import LENGTH, sample_batches
from runners.inference.inference_model import InferenceModel
from runners.rewards.builtin import extract_answer
from runners.rewards.functions import Reward
from runners.rewards.scoring import Scorer

Problems = Sequence[Mapping[str, Any]]
_FIGURES = ("success", "turns", "calls", "failures")  # of a conversation, in its JSON row


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
    use_template(model.tokenizer, config.data.chat_template)
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
    numbered = list(chosen.items())
    scorer = Scorer(rewards, config.reward.timeout, config.reward.on_error)
    problems: list[str] = []
    spent = 0.0
    sampling = attrs.evolve(
        sampling_of(config, model.eos_ids, model.decoder.find_stop(config.rollout.stop)),
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        with_entropy=False,
    )

    def completed(kind: str, sampling: g.Sampling) -> tuple[list[dict[str, Any]], list[EpisodeFigures]]:
        """The JSON rows of all completions, in the problems' order, and the figures of conversations."""
        nonlocal spent
        rows_found: list[dict[str, Any]] = []
        figures: list[EpisodeFigures] = []
        size = sampling.num_generations
        for batch in sample_batches(
            model.engine,
            list(chosen.values()),
            sampling,
            key=evaluation_key(config),
            decoder=model.decoder,
            nudge=config.data.nudge,
            rows=rows or config.rollout.max_batch,
            environments=environments,
            vision=model.vision,
        ):
            played = batch.played
            asked = [example for example in batch.examples for _ in range(size)]
            scores = scorer.score(
                batch.texts,
                [list(example.messages) for example in asked],
                columns_of(batch.examples, size),
                batch.rollout.completions(),
                group_size=size,
                conversations=None if played is None else played.messages,
                environments=None if played is None else played.environments,
            )
            values_kb = scores.values_kb
            problems.extend(scores.problems)
            right = [
                is_correct(text, example.answer) for text, example in zip(batch.texts, asked, strict=True)
            ]
            if played is not None and environments is not None:
                values_kb[:, [bool(fault) for fault in played.faults]] = np.nan
                own = None
                if environments.reward is not None:
                    values = values_kb[rewards.index(environments.reward)].tolist()
                    own = [None if value != value else value for value in values]
                figures += episode_figures(played, right, own, success_at)
                problems.extend(played.problems)
            for row, (text, example) in enumerate(zip(batch.texts, asked, strict=True)):
                number = len(rows_found)
                given = zip(rewards, values_kb[:, row].tolist(), strict=True)
                cells = {
                    "model": name,
                    "kind": kind,
                    "problem": numbered[number // size][0],
                    "sample": number % size,
                    "prompt": example.text,
                    **({"images": [image.name for image in example.images]} if example.images else {}),
                    "answer": example.answer,
                    "completion": text,
                    "extracted": extract_answer(text),
                    "correct": right[row],
                    "tokens": batch.lengths[row],
                    "finish": batch.finish[row],
                    "rewards": {r.name: None if np.isnan(value) else value for r, value in given},
                }
                if played is not None:
                    cells |= {
                        "messages": list(played.messages[row]),
                        **{key: getattr(figures[number], key) for key in _FIGURES},
                        **({"fault": played.faults[row]} if played.faults[row] else {}),
                    }
                rows_found.append(cells)
            spent += batch.seconds
            progress(kind, len(rows_found) // size, len(numbered))
        return rows_found, figures

    greedy, figures = completed("greedy", attrs.evolve(sampling, num_generations=1, temperature=0))
    details = _metrics(greedy, figures, rewards, 1, "")
    metrics = {"success": details.pop("success")} if figures else {}
    metrics["exact match"] = _mean([row["correct"] for row in greedy], 1, percent=True)
    json_rows = greedy
    if num:
        sampled, figures = completed("sample", attrs.evolve(sampling, num_generations=num))
        groups = [sampled[n : n + num] for n in range(0, len(sampled), num)]
        if config.data.answer:
            counts = [
                count_answers([row["completion"] for row in group], group[0]["answer"]) for group in groups
            ]
            metrics |= shares(counts, num, ks)
        elif figures:
            metrics |= success_shares([sum(row["success"] for row in group) for group in groups], num, ks)
        details |= _metrics(sampled, figures, rewards, num, "sampled ")
        json_rows = [*greedy, *sampled]
    metrics |= details
    if not config.data.answer:
        unknown = {"answer", "extracted", "correct", "exact match"}
        if environments is None or environments.reward is None:
            unknown |= {"success", "sampled success", *(f"pass@{k}" for k in ks)}
        metrics = {name: metric for name, metric in metrics.items() if name not in unknown}
        json_rows = [{key: cell for key, cell in row.items() if key not in unknown} for row in json_rows]
    faults = tuple(dict.fromkeys(problems))
    return ModelResult(
        name, tuple(chosen), metrics, tuple(json_rows), faults, 0.0 if environments is None else spent
    )


def evaluation_key(config: Config) -> mx.array:
    """The key of all completions: of the run's seed, but shared with no other purpose."""
    return fold_in(mx.random.key(config.run.seed), EVALUATION)


def _metrics(
    rows: Sequence[dict[str, Any]],
    figures: Sequence[EpisodeFigures],
    rewards: Sequence[Reward],
    num: int,
    prefix: str,
) -> dict[str, Metric]:
    """A number for each problem: the means over its `num` completions, which are the JSON `rows`."""

    def column(name: str, percent: bool = False) -> Metric:
        return _mean([row[name] for row in rows], num, percent)

    metrics = {"success": column("success", percent=True)} if figures else {}
    for reward in rewards:
        metrics[f"reward/{reward.name}"] = _mean([row["rewards"][reward.name] for row in rows], num)
    if figures:
        metrics |= {
            "turns": column("turns"),
            "calls": column("calls"),
            "failed calls": column("failures"),
            "tool seconds": _mean([each.seconds for each in figures], num),
        }
    metrics["length"] = column("tokens")
    metrics["truncated"] = _mean([row["finish"] == LENGTH for row in rows], num, percent=True)
    return {f"{prefix}{name}": metric for name, metric in metrics.items()}


def _mean(values: Sequence[float | None], num: int, percent: bool = False) -> Metric:
    """The mean of each problem's `num` values; None is no value."""
    return Metric(row_means(np.array(values, np.float64).reshape(-1, num)), percent=percent)
