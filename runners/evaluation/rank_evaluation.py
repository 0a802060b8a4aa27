"""Evaluation on several ranks: each answers every N-th problem, and all get the complete result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

import grpo_fn as g
from runners.data.prompts import Example
from runners.engines.engine import Samples
from runners.evaluation.episode_figures import EpisodeFigures
from runners.evaluation.exact_match import EvalResult, evaluate
from runners.ranks.ranks import Ranks


def evaluate_on_ranks(
    ranks: Ranks,
    engine: Samples,
    examples: Sequence[Example],
    sampling: g.Sampling,
    **how: Any,
) -> EvalResult:
    """`evaluate`, by all ranks together; `how` has its other arguments."""
    own = examples[ranks.number :: ranks.count]
    result = evaluate(engine, own, sampling, **how)
    if ranks.is_alone:
        return result
    found = [message.value for message in ranks.all_gather_object("the evaluation", attrs.asdict(result))]
    places = [(found[number % ranks.count], number // ranks.count) for number in range(len(examples))]
    return EvalResult(
        correct=sum(each["correct"] for each in found),
        total=len(examples),
        seconds=max(each["seconds"] for each in found),
        texts=tuple(each["texts"][place] for each, place in places),
        right=tuple(each["right"][place] for each, place in places),
        figures=_figures([each["figures"] for each in found], len(examples)),
    )


def _figures(found: Sequence[dict[str, Any] | None], count: int) -> EpisodeFigures | None:
    """The figures of all ranks in the problems' order; None if no rank has any."""
    joined, places = EpisodeFigures(), {}
    for rank, columns in enumerate(found):
        if columns is None:
            return None
        own = EpisodeFigures(**{name: tuple(values) for name, values in columns.items()})
        for number in range(len(own.turns)):
            places[rank + number * len(found)] = len(joined.turns) + number
        joined = joined.concatenated(own)
    return joined.picked([places[number] for number in range(count)])
