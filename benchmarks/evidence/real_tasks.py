"""The tasks of `real_model` as changes of real_model.toml."""

from __future__ import annotations

from pathlib import Path

_RIGHT = ('reward.functions=["correctness_reward_func"]', "answer.form=last_number")
PROBLEMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
"""Of reasoning-gym's chain_sum; a small model gets about 13 % of its completions right."""
SUMS = (*_RIGHT, 'data.system_prompt=""', "data.nudge=The answer is", "rollout.max_new_tokens=8")
TASKS: dict[str, tuple[str, ...]] = {
    "JSON form": (
        'data.system_prompt=You reply with one line of JSON only, such as {"answer": 12}',
        'data.nudge={"',
        f'reward.functions=["{Path(__file__).with_name("json_reward.py")}:one_line_json"]',
        "answer.form=none",
        "rollout.max_new_tokens=128",
        "optim.max_steps=24",
    ),
    "sums": (*SUMS, "optim.max_steps=60"),
    "GSM8K": (*_RIGHT, "data.eval_split=test", "rollout.max_new_tokens=200", "optim.max_steps=40"),
}
"""Name -> overrides; the data of `sums` and `GSM8K` are options of the command."""
