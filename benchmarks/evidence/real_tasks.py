"""The tasks of `real_model` as changes of real_model.toml, and the reward that is in no package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_RIGHT = ('reward.functions=["correctness_reward_func"]', "answer.form=last_number")
PROBLEMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Of reasoning-gym's chain_sum; a small model gets about 13 % of its completions right."""
SUMS = (
    *_RIGHT,
    'data.system_prompt=""',
    "data.nudge=The answer is",
    "rollout.max_new_tokens=8",
)
TASKS: dict[str, tuple[str, ...]] = {
    "JSON form": (
        'data.system_prompt=You reply with one line of JSON only, such as {"answer": 12}',
        'data.nudge={"',
        'reward.functions=["benchmarks.evidence.real_tasks:one_line_json"]',
        "answer.form=none",
        "rollout.max_new_tokens=128",
        "optim.max_steps=24",
    ),
    "sums": (*SUMS, "optim.max_steps=60"),
    "GSM8K": (*_RIGHT, "data.eval_split=test", "rollout.max_new_tokens=200", "optim.max_steps=40"),
}
"""Name -> overrides; the data of `sums` and `GSM8K` are options of the command."""


def one_line_json(completions: Sequence[Any], **_: Any) -> list[float]:
    """1 for one line of JSON with a number in `answer`; 0.4 for such an object somewhere, 0.1 for a brace."""
    return [_form(completion[-1]["content"].strip()) for completion in completions]


def _form(text: str) -> float:
    if "{" not in text:
        return 0.0
    inner = text[text.index("{") : text.rfind("}") + 1]
    try:
        found = json.loads(inner)
    except (ValueError, RecursionError):
        return 0.1
    if not isinstance(found, dict) or type(found.get("answer")) not in (int, float):
        return 0.1
    return 1.0 if inner == text and "\n" not in text else 0.4
