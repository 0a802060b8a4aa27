"""Measures a model on a set of problems: greedy exact match, pass@k and maj@k, rewards, lengths.

Prompts, extraction and stop strings are those of training: `build_examples`, `extract_answer`, `find_stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from grpo_fn.prng import EVALUATION
from runners.config.loading import Config
from runners.data.datasets import load_rows, load_split
from runners.data.prompts import Example, build_examples, columns_of
from runners.data.rows import Rows
from runners.errors import UserError
from runners.evaluation.estimators import Interval, bootstrap, majority_at_k, pass_at_k, wilson
from runners.evaluation.exact_match import held_out, is_correct
from runners.inference.inference_model import InferenceModel
from runners.inference.text_generation import LENGTH, Completion, Sampling, generate_batches
from runners.rewards.builtin import extract_answer, numbers_equal
from runners.rewards.functions import Reward
from runners.rewards.scoring import Scorer
from runners.tokenization.text import TextDecoder

Problems = Sequence[Mapping[str, Any]]


@attrs.frozen
class SamplingPlan:
    """The measurements besides greedy completions."""

    num: int = 0  # samples of each problem; 0: none
    ks: tuple[int, ...] = ()  # of pass@k and maj@k
    max_batch: int = 0  # completions decoded together; 0: 256


@attrs.frozen(eq=False)
class Metric:
    """One number for each problem, with their mean and interval."""

    values: np.ndarray  # float64; NaN for a problem without a value
    percent: bool = False  # shown as a percentage

    @property
    def mean(self) -> float:
        """The mean over the problems with a value; NaN without any."""
        known = self.values[~np.isnan(self.values)]
        return float(known.mean()) if known.size else float("nan")

    @property
    def interval(self) -> Interval | None:
        """95 %: Wilson's if each value is 0 or 1, else by resampling the problems; None without values."""
        known = self.values[~np.isnan(self.values)]
        if not known.size:
            return None
        if self.percent and set(known.tolist()) <= {0.0, 1.0}:
            return wilson(round(known.sum()), known.size)
        return bootstrap(known.tolist())


@attrs.frozen(eq=False)
class ModelResult:
    """One model on some problems."""

    model: str
    indices: tuple[int, ...]  # which rows of the data
    metrics: dict[str, Metric]  # name -> values in the order of `indices`
    completions: tuple[dict[str, Any], ...]  # JSON rows
    problems: tuple[str, ...]  # faults in scoring
    seconds: float = 0.0  # of conversations with tools


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
    return dict(held_out(fitting, config.eval.samples)), len(examples) - len(fitting)


def measure_model(
    model: InferenceModel,
    name: str,
    chosen: Mapping[int, Example],
    config: Config,
    plan: SamplingPlan,
    rewards: Sequence[Reward],
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ModelResult:
    """Completes the problems greedily and, if the plan asks for it, by sampling as in [rollout].

    Args:
        name: the model's name in the result.
        chosen: problems by number, from `choose_problems`.
        progress: called with the kind of completions, how many problems are done, and of how many.
    """
    decoder = TextDecoder(model.tokenizer)
    examples = list(chosen.values())
    limit = config.eval.max_new_tokens or config.rollout.max_new_tokens
    scorer = Scorer(rewards, config.reward.timeout, config.reward.on_error)
    metrics: dict[str, Metric] = {}
    rows: list[dict[str, Any]] = []
    faults: list[str] = []

    def complete(what: str, sampling: Sampling, num: int) -> list[list[Completion]]:
        done: list[list[Completion]] = []
        for group in generate_batches(
            model,
            [example.tokens for example in examples],
            sampling,
            decoder=decoder,
            num_generations=num,
            find_stop=decoder.find_stop(config.rollout.stop),
            max_batch=plan.max_batch or config.rollout.max_batch,
            shown=examples,
        ):
            done.append(group)
            progress(what, len(done), len(examples))
        return done

    def judge(kind: str, groups: list[list[Completion]], prefix: str) -> list[list[str]]:
        """Rewards, lengths and truncation of the groups; JSON rows; the texts."""
        texts = [[config.data.nudge + completion.text for completion in group] for group in groups]
        num = len(groups[0])
        flat = [completion for group in groups for completion in group]
        scores = scorer.score(
            [text for group in texts for text in group],
            [list(example.messages) for example in examples for _ in range(num)],
            columns_of(examples, num),
            [list(completion.tokens) for completion in flat],
            group_size=num,
        )
        faults.extend(scores.problems)
        values_kpn = scores.values_kb.reshape(len(rewards), len(groups), num)
        for reward, values_pn in zip(rewards, values_kpn, strict=True):
            metrics[f"{prefix}reward/{reward.name}"] = Metric(row_means(values_pn))
        metrics[f"{prefix}length"] = Metric(row_means([[len(c.tokens) for c in group] for group in groups]))
        cut = row_means([[c.finish == LENGTH for c in group] for group in groups])
        metrics[f"{prefix}truncated"] = Metric(cut, percent=True)
        for p, (index, example) in enumerate(chosen.items()):
            for n, completion in enumerate(groups[p]):
                given = zip(rewards, scores.values_kb[:, p * num + n].tolist(), strict=True)
                rows.append(
                    {
                        "model": name,
                        "kind": kind,
                        "problem": index,
                        "sample": n,
                        "prompt": example.text,
                        **({"images": [image.name for image in example.images]} if example.images else {}),
                        "answer": example.answer,
                        "completion": texts[p][n],
                        "extracted": extract_answer(texts[p][n]),
                        "correct": is_correct(texts[p][n], example.answer),
                        "tokens": len(completion.tokens),
                        "finish": completion.finish,
                        "rewards": {r.name: None if np.isnan(value) else value for r, value in given},
                    }
                )
        return texts

    greedy = complete("greedy", Sampling(temperature=0.0, max_tokens=limit), 1)
    sampled = complete("sampled", sampling_of_rollout(config, limit), plan.num) if plan.num else []
    texts = judge("greedy", greedy, "")
    right = [is_correct(text, example.answer) for (text,), example in zip(texts, examples, strict=True)]
    scores = {"exact match": Metric(np.array(right, np.float64), percent=True)}
    if sampled:
        texts = judge("sample", sampled, "sampled ")
        scores |= shares(
            [count_answers(group, each.answer) for group, each in zip(texts, examples, strict=True)], plan
        )
    return ModelResult(name, tuple(chosen), {**scores, **metrics}, tuple(rows), tuple(faults))


@attrs.frozen
class _AnswerCounts:
    """The answers of one problem's samples."""

    votes: tuple[int, ...]  # samples of each different answer
    silent: int  # samples without an answer
    right: int | None  # which answer is the gold one

    @property
    def correct(self) -> int:
        return 0 if self.right is None else self.votes[self.right]


def count_answers(texts: Iterable[str], gold: str) -> _AnswerCounts:
    answers: list[str] = []
    votes: list[int] = []
    silent = 0
    for text in texts:
        answer = extract_answer(text)
        if answer is None:
            silent += 1
            continue
        place = next((i for i, known in enumerate(answers) if numbers_equal(known, answer)), len(answers))
        if place == len(answers):
            answers.append(answer)
            votes.append(0)
        votes[place] += 1
    right = next((i for i, answer in enumerate(answers) if numbers_equal(answer, gold)), None)
    return _AnswerCounts(tuple(votes), silent, right)


def shares(tallies: Sequence[_AnswerCounts], plan: SamplingPlan) -> dict[str, Metric]:
    """pass@k for every k, and maj@k for k above 1 (for k = 1 they are the same)."""
    found = {}
    for k in plan.ks:
        found[f"pass@{k}"] = [pass_at_k(plan.num, tally.correct, k) for tally in tallies]
    for k in (k for k in plan.ks if k > 1):
        found[f"maj@{k}"] = [majority_at_k(tally.votes, tally.silent, tally.right, k) for tally in tallies]
    return {name: Metric(np.array(values), percent=True) for name, values in found.items()}


def success_shares(succeeded: Sequence[int], plan: SamplingPlan) -> dict[str, Metric]:
    """pass@k for every k, from the number of succeeded samples of each problem."""
    found = {f"pass@{k}": [pass_at_k(plan.num, count, k) for count in succeeded] for k in plan.ks}
    return {name: Metric(np.array(values), percent=True) for name, values in found.items()}


def sampling_of_rollout(config: Config, limit: int) -> Sampling:
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        seed=config.run.seed,
        purpose=EVALUATION,
        max_tokens=limit,
    )


def row_means(values: Any) -> np.ndarray:
    """Means of rows, ignoring NaN; NaN for a row without values."""
    array = np.asarray(values, np.float64)
    known = ~np.isnan(array)
    with np.errstate(invalid="ignore"):
        return np.where(known, array, 0.0).sum(axis=1) / known.sum(axis=1)
