"""Creates the records of completions.jsonl and evaluations.jsonl."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from runners.data.prompts import Example
from runners.rewards.experience import Experience
from runners.telemetry.run_statistics import mean_of


def completion_records(
    experience: Experience, batch_step: int, update: int
) -> Iterator[dict[str, Any]]:
    """Yields a record per completion for completions.jsonl. docs/rewards.md lists the keys."""
    size = experience.rollout.num_generations
    rewards = experience.rewards_pg.reshape(-1).tolist()
    lengths = experience.sampled_lengths.tolist()
    played = experience.played
    of_turns = _of_turns(experience)
    advantages = [float(np.mean(row)) for row in of_turns]
    if not of_turns:
        advantages = np.array(experience.advantages_pg).reshape(-1).tolist()
    finished = np.array(experience.rollout.finished_b).tolist()
    penalties = None if experience.penalty_b is None else experience.penalty_b.tolist()
    metrics = {name: mean_of(np.array(values)) for name, values in experience.logged.items()}
    for row, text in enumerate(experience.texts):
        if not experience.drawn_b[row]:
            continue
        example = experience.examples[row // size]
        values = zip(experience.reward_names, experience.values_kb[:, row].tolist(), strict=True)
        extra = {column: values[row] for column, values in experience.extras.items()}
        yield {
            "batch_step": batch_step,
            "update": update,
            **_prompt(example),
            "completion": text,
            "answer": example.answer,
            "reward": rewards[row],
            "rewards": {name: None if math.isnan(value) else value for name, value in values},
            **({"length_penalty": penalties[row]} if penalties else {}),
            "advantage": advantages[row],
            **({"turn_advantages": of_turns[row]} if of_turns else {}),
            "tokens": lengths[row],
            "finished": finished[row],
            **({"metrics": metrics} if metrics else {}),
            **({"extra": extra} if extra else {}),
            **({"messages": list(played[row].messages)} if played else {}),
        }


def _of_turns(experience: Experience) -> list[list[float]]:
    """Returns the turn advantages for each row, or an empty list if advantages belong to whole
    completions.
    """
    played = experience.played
    if experience.advantages_pg.ndim == 2 or played is None:
        return []
    rows = np.array(experience.advantages_pg).reshape(len(played), -1)
    return [
        row[: max(each.counts["turns"], 1)].tolist() for row, each in zip(rows, played, strict=True)
    ]


def evaluation_records(
    examples: Sequence[Example], completions: Sequence[Any], update: int
) -> Iterator[dict[str, Any]]:
    """Yields a record per held-out problem for evaluations.jsonl. docs/report.md lists the keys."""
    for index, (example, one) in enumerate(zip(examples, completions, strict=True)):
        yield {
            "update": update,
            "problem": index,
            **_prompt(example),
            "completion": one.text,
            **({"answer": example.answer} if example.answer else {}),
            **({} if one.right is None else {"extracted": one.answer, "correct": one.right}),
            "reward": one.reward,
            "rewards": one.rewards,
        }


def _prompt(example: Example) -> dict[str, Any]:
    """Returns the last user message (or, without one, the last message), the other messages, and
    the image names.
    """
    messages = list(example.messages)
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    prompt = messages.pop(asked[-1] if asked else -1)
    return {
        "prompt": prompt["content"],
        **({"context": messages} if messages else {}),
        **({"images": [image.name for image in example.images]} if example.images else {}),
    }
