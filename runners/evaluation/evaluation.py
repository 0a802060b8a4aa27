"""Evaluates a run: completes the held-out problems greedily, with the prompt format of training."""

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import attrs
import mlx.core as mx

import grpo_fn as g
from runners.data.datasets import epoch_order
from runners.data.prompts import Example
from runners.evaluation.completions import Completion, Evaluator
from runners.ranks.ranks import Ranks

_Item = TypeVar("_Item")


@attrs.frozen
class EvalResult:
    """One greedy completion per problem."""

    seconds: float
    completions: tuple[Completion, ...]
    problems: tuple[str, ...] = ()  # messages about faults in scoring

    @property
    def score(self) -> float | None:
        """Exact match, 0 to 1: the share of problems with a right answer. None means that there are
        no reference answers.
        """
        return _mean([each.right for each in self.completions])

    @property
    def reward(self) -> float | None:
        """The mean reward, or None if there are no rewards."""
        return _mean([each.reward for each in self.completions])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics for the log; metrics without a value are omitted."""
        rows = self.completions
        rewards = [each.reward for each in rows if each.reward is not None]
        found: dict[str, Any] = {
            "em": self.score,
            "em_subset": len(rows),
            "eval/reward": self.reward,
            "eval/reward_std": statistics.pstdev(rewards) if rewards else None,
            "eval/truncated": _mean([each.cut for each in rows]),
        }
        found |= {
            f"eval/rewards/{name}": _mean([each.rewards[name] for each in rows])
            for name in (rows[0].rewards if rows else ())
        }
        if any(each.turns for each in rows):
            found |= {
                "eval/success": _mean([each.success for each in rows]),
                "eval/turns": _mean([each.turns for each in rows]),
                "eval/tool_calls": _mean([each.calls for each in rows]),
                "eval/failed_calls": _mean([each.failures for each in rows]),
            }
        found["time/eval"] = self.seconds
        return {name: value for name, value in found.items() if value is not None}


def held_out(examples: Sequence[_Item], samples: int) -> list[_Item]:
    """Returns the problems for evaluations on a data set: `samples` problems, which are the same
    ones in every run. If `samples` is 0, all problems are returned.
    """
    if samples == 0 or samples >= len(examples):
        return list(examples)
    return [examples[i] for i in sorted(epoch_order(len(examples), 0, 0)[:samples].tolist())]


def evaluate(evaluator: Evaluator, examples: Sequence[Example], sampling: g.Sampling) -> EvalResult:
    """Completes all examples greedily. `sampling` determines how completions end."""
    started = time.perf_counter()
    greedy = attrs.evolve(sampling, num_generations=1, temperature=0, with_entropy=False)
    completions = evaluator.complete_all(examples, greedy, mx.random.key(0))  # nothing is sampled
    seconds = time.perf_counter() - started
    return EvalResult(seconds, tuple(completions), tuple(evaluator.problems))


def evaluate_on_ranks(
    ranks: Ranks, evaluator: Evaluator, examples: Sequence[Example], sampling: g.Sampling
) -> EvalResult:
    """Runs `evaluate` on N ranks. Each rank completes every N-th problem, and all ranks return the
    complete result.
    """
    result = evaluate(evaluator, examples[ranks.number :: ranks.count], sampling)
    if ranks.is_alone:
        return result
    plain = attrs.asdict(result, filter=lambda field, _: field.name != "messages")
    return of_ranks(ranks.all_gather_object("the evaluation", plain))


def of_ranks(parts: Sequence[dict[str, Any]]) -> EvalResult:
    """Joins all ranks' results, given as plain JSON values, in the order of the problems."""
    rows = [
        [Completion(**{**each, "messages": ()}) for each in part["completions"]] for part in parts
    ]
    count = sum(map(len, rows))
    return EvalResult(
        max(part["seconds"] for part in parts),
        tuple(rows[number % len(rows)][number // len(rows)] for number in range(count)),
        tuple(dict.fromkeys(itertools.chain.from_iterable(part["problems"] for part in parts))),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
