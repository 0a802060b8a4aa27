"""Measures a model with tools or in an environment, for `grpo eval`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

import grpo_fn as g
from runners.config.loading import Config
from runners.data.prompts import Example, columns_of
from runners.environments.environments import Environments
from runners.evaluation.episode_figures import SUCCESS, EpisodeFigures
from runners.evaluation.exact_match import is_correct
from runners.evaluation.measurement import (
    Metric,
    ModelResult,
    SamplingPlan,
    count_answers,
    row_means,
    sampling_of_rollout,
    shares,
    success_shares,
)
from runners.inference.episode_batches import Episodes, play_episodes
from runners.inference.inference_model import InferenceModel
from runners.inference.text_generation import DEFAULT_ROWS, LENGTH, Sampling
from runners.machine.launch_modes import launch_keywords
from runners.rewards.builtin import extract_answer
from runners.rewards.functions import Reward
from runners.rewards.scoring import Scorer
from runners.tokenization.text import TextDecoder


@attrs.define(eq=False)
class _Rows:
    """All conversations of a kind, in the problems' order."""

    texts: list[str] = attrs.field(factory=list)
    lengths: list[int] = attrs.field(factory=list)
    finish: list[str] = attrs.field(factory=list)
    messages: list[Sequence[dict[str, Any]]] = attrs.field(factory=list)
    faults: list[str] = attrs.field(factory=list)
    values_kb: list[np.ndarray] = attrs.field(factory=list)
    figures: EpisodeFigures = attrs.field(factory=EpisodeFigures)
    seconds: float = 0.0

    def add(self, episodes: Episodes, values_kb: np.ndarray, figures: EpisodeFigures) -> None:
        played = episodes.played
        self.texts += episodes.texts
        self.lengths += [len(tokens) for tokens in played.sampled]
        self.finish += episodes.finish
        self.messages += played.messages
        self.faults += played.faults
        self.values_kb.append(values_kb)
        self.figures = self.figures.concatenated(figures)
        self.seconds += episodes.seconds


def measure_episodes(
    model: InferenceModel,
    name: str,
    chosen: Mapping[int, Example],
    config: Config,
    plan: SamplingPlan,
    rewards: Sequence[Reward],
    environments: Environments,
    *,
    success_at: float = SUCCESS,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> ModelResult:
    """As `measure_model`, for conversations; with success, turns, calls and failed calls.

    Args:
        rewards: the config's, and the environment's own at the end.
        environments: built for this model's tokenizer.
        config: with data.answer = "" there are no gold answers: no exact match, and pass@k is of successes.
        success_at: an episode succeeds if the environment's own reward is at least this; without one, if the
            model's last turn has the gold answer.
    """
    decoder = TextDecoder(model.tokenizer)
    examples = list(chosen.values())
    limit = config.eval.max_new_tokens or config.rollout.max_new_tokens
    scorer = Scorer(rewards, config.reward.timeout, config.reward.on_error)
    problems: list[str] = []

    def played(what: str, sampling: Sampling, num: int) -> _Rows:
        found = _Rows()
        for episodes in play_episodes(
            environments,
            model.policy,
            {},
            examples,
            sampling.core(model.eos_ids, decoder.find_stop(config.rollout.stop), num),
            key=sampling.key,
            decoding=g.Decoding(**launch_keywords(model.launch)),
            rows=plan.max_batch or config.rollout.max_batch or DEFAULT_ROWS,
        ):
            part = episodes.examples
            scores = scorer.score(
                episodes.texts,
                [list(example.messages) for example in part for _ in range(num)],
                columns_of(part, num),
                episodes.rollout.completions(),
                group_size=num,
                conversations=episodes.played.messages,
                environments=episodes.played.environments,
            )
            values_kb = scores.values_kb
            values_kb[:, [bool(fault) for fault in episodes.played.faults]] = np.nan
            golds = [example.answer for example in part for _ in range(num)]
            right = [is_correct(text, gold) for text, gold in zip(episodes.texts, golds, strict=True)]
            own = None
            if environments.reward is not None:
                own = [None if v != v else v for v in values_kb[rewards.index(environments.reward)].tolist()]
            found.add(episodes, values_kb, EpisodeFigures.of(episodes, right, own, success_at))
            problems.extend([*episodes.played.problems, *scores.problems])
            progress(what, len(found.texts) // num, len(examples))
        return found

    greedy = played("greedy", Sampling(temperature=0.0, max_tokens=limit), 1)
    found = _figures(greedy, rewards, 1, "")
    metrics = {"success": found.pop("success")}
    right = [is_correct(text, each.answer) for text, each in zip(greedy.texts, examples, strict=True)]
    metrics["exact match"] = Metric(np.array(right, np.float64), percent=True)
    rows = _json_rows(name, "greedy", chosen, greedy, rewards, 1)
    seconds = greedy.seconds
    has_answers = bool(config.data.answer)
    if plan.num:
        sampled = played("sampled", sampling_of_rollout(config, limit), plan.num)
        if has_answers:
            groups = [sampled.texts[n : n + plan.num] for n in range(0, len(sampled.texts), plan.num)]
            counts = [count_answers(group, each.answer) for group, each in zip(groups, examples, strict=True)]
            metrics |= shares(counts, plan)
        else:
            succeeded = np.reshape(sampled.figures.success, (-1, plan.num)).sum(axis=1).tolist()
            metrics |= success_shares(succeeded, plan)
        found |= _figures(sampled, rewards, plan.num, "sampled ")
        rows += _json_rows(name, "sample", chosen, sampled, rewards, plan.num)
        seconds += sampled.seconds
    metrics |= found
    if not has_answers:
        unknown = {"answer", "extracted", "correct", "exact match"}
        if environments.reward is None:
            unknown |= {"success", "sampled success", *(f"pass@{k}" for k in plan.ks)}
        metrics = {name: metric for name, metric in metrics.items() if name not in unknown}
        rows = [{name: cell for name, cell in row.items() if name not in unknown} for row in rows]
    faults = tuple(dict.fromkeys(problems))
    return ModelResult(name, tuple(chosen), metrics, tuple(rows), faults, seconds)


def _figures(found: _Rows, rewards: Sequence[Reward], num: int, prefix: str) -> dict[str, Metric]:
    """A number for each problem: the means over its conversations."""

    def means(values: Sequence[Any]) -> np.ndarray:
        return row_means(np.asarray(values, np.float64).reshape(-1, num))

    figures = found.figures
    metrics = {f"{prefix}success": Metric(means(figures.success), percent=True)}
    for reward, values_b in zip(rewards, np.concatenate(found.values_kb, axis=1), strict=True):
        metrics[f"{prefix}reward/{reward.name}"] = Metric(means(values_b))
    metrics |= {
        f"{prefix}turns": Metric(means(figures.turns)),
        f"{prefix}calls": Metric(means(figures.calls)),
        f"{prefix}failed calls": Metric(means(figures.failures)),
        f"{prefix}tool seconds": Metric(means(figures.seconds)),
        f"{prefix}length": Metric(means(found.lengths)),
        f"{prefix}truncated": Metric(means([each == LENGTH for each in found.finish]), percent=True),
    }
    return metrics


def _json_rows(
    name: str, kind: str, chosen: Mapping[int, Example], found: _Rows, rewards: Sequence[Reward], num: int
) -> list[dict[str, Any]]:
    values_kb, figures = np.concatenate(found.values_kb, axis=1), found.figures
    rows, problems = [], list(chosen.items())
    for row, text in enumerate(found.texts):
        index, example = problems[row // num]
        given = zip(rewards, values_kb[:, row].tolist(), strict=True)
        rows.append(
            {
                "model": name,
                "kind": kind,
                "problem": index,
                "sample": row % num,
                "prompt": example.text,
                "answer": example.answer,
                "completion": text,
                "extracted": extract_answer(text),
                "correct": is_correct(text, example.answer),
                "tokens": found.lengths[row],
                "finish": found.finish[row],
                "rewards": {r.name: None if np.isnan(value) else value for r, value in given},
                "messages": list(found.messages[row]),
                "success": figures.success[row],
                "turns": figures.turns[row],
                "calls": figures.calls[row],
                "failures": figures.failures[row],
                **({"fault": found.faults[row]} if found.faults[row] else {}),
            }
        )
    return rows
