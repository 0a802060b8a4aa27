"""Maps MLX-GRPO's flat keys (at the top level or in the table [mlx_grpo]) to the config keys that
they set.

MLX-GRPO defines a default for every key, and its script fixes some values. Both apply to a flat
file, so the file's meaning does not change. docs/migrating.md is generated from the tables below.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs

TABLE = "mlx_grpo"


def _same(value: Any, table: Mapping[str, Any]) -> Any:
    return value


def _betas(value: Any, table: Mapping[str, Any]) -> Any:
    return [table["adam_beta1"], table["adam_beta2"]]


def _updates(value: Any, table: Mapping[str, Any]) -> Any:
    """Converts batch steps to updates. The result is at least one update.

    A value of another type is returned unchanged, and is rejected later with its section.
    """
    steps = table["gradient_accumulation_steps"]
    are_counts = all(type(each) is int and each > 0 for each in (value, steps))
    return max(1, round(value / steps)) if are_counts else value


def _quantization(value: Any, table: Mapping[str, Any]) -> Any:
    if isinstance(value, bool):
        return "affine-4" if value else "none"
    return value


@attrs.frozen
class FlatKey:
    """A flat key in MLX-GRPO."""

    target: str  # the key of this package that it sets
    default: Any = None  # its default in MLX-GRPO; None: the key is optional
    convert: Callable[[Any, Mapping[str, Any]], Any] = _same  # (its value, all flat values) -> ours
    unless: str = ""  # another flat key, which MLX-GRPO reads instead if both are set
    note: str = ""  # for docs/migrating.md


FLAT_KEYS: dict[str, FlatKey] = {
    "model_name": FlatKey("model.path", "Qwen/Qwen2.5-1.5B-Instruct"),
    "output_dir": FlatKey("run.output_dir", "outputs/Qwen-1.5B-MLX-GRPO"),
    "run_name": FlatKey("run.name", "Qwen-1.5B-MLX-GRPO-gsm8k"),
    "seed": FlatKey("run.seed", 0),
    "max_train_samples": FlatKey("data.max_samples", 0),
    "max_prompt_length": FlatKey("data.max_prompt_length", 512),
    "num_generations": FlatKey("rollout.num_generations", 64),
    "max_new_tokens": FlatKey("rollout.max_new_tokens", 512),
    "max_completion_length": FlatKey("rollout.max_new_tokens", unless="max_new_tokens"),
    "temperature": FlatKey("rollout.temperature", 0.7),
    "quantize_for_rollouts": FlatKey(
        "rollout.quantization",
        True,
        _quantization,
        note=': true is `"affine-4"`, with `loss.correction = "token_truncate"`; false is `"none"`',
    ),
    "clip_eps": FlatKey("loss.epsilon_low", 0.2, note=", which sets both sides"),
    "kl_coeff": FlatKey("loss.beta", 0.0),
    "learning_rate": FlatKey("optim.learning_rate", 1e-6),
    "lr_scheduler_type": FlatKey("optim.schedule", "cosine"),
    "warmup_ratio": FlatKey("optim.warmup_ratio", 0.1),
    "adam_beta1": FlatKey("optim.betas", 0.9, _betas, note=", the first"),
    "adam_beta2": FlatKey("optim.betas", 0.999, _betas, note=", the second"),
    "weight_decay": FlatKey("optim.weight_decay", 0.0),
    "max_grad_norm": FlatKey("optim.max_grad_norm", 0.1),
    "batch_size": FlatKey("optim.batch_size", 1),
    "gradient_accumulation_steps": FlatKey("optim.gradient_accumulation_steps", 4),
    "num_epochs": FlatKey("optim.num_epochs", 1),
    "eval_every_updates": FlatKey("eval.every", 25),
    "eval_steps": FlatKey(
        "eval.every",
        None,
        _updates,
        "eval_every_updates",
        " (updates; `eval_steps` counts batch steps)",
    ),
    "eval_subset_size": FlatKey("eval.samples", 200),
    "eval_samples": FlatKey("eval.samples", unless="eval_subset_size"),
    "eval_max_new_tokens": FlatKey("eval.max_new_tokens", 128),
    "save_steps": FlatKey("checkpoint.every", 100),
    "logging_steps": FlatKey("log.every", 1),
    "log_jsonl": FlatKey("log.jsonl", True),
    "use_compile": FlatKey("system.compile", True),
}
FIXED: dict[str, Any] = {
    "data.source": "openai/gsm8k",
    "reward.functions": [
        "correctness_reward_func",
        "xmlcount_reward_func",
        "soft_format_reward_func",
        "int_reward_func",
    ],
    "rollout.top_p": 0.95,
    "rollout.stop": ["</answer>"],
}
"""Values that MLX-GRPO's script sets without a key."""


def flat_table(table: Mapping[str, Any], sections: Collection[str]) -> Mapping[str, Any] | None:
    """Returns a file's flat keys, or None if the file has sections."""
    if set(table) == {TABLE} and isinstance(table[TABLE], Mapping):
        return table[TABLE]
    return table if FLAT_KEYS.keys() & table.keys() and not {*sections} & table.keys() else None


def in_sections(table: Mapping[str, Any]) -> tuple[list[tuple[str, Any, str]], list[str]]:
    """Returns (section.key, value, flat key) for each of a file's flat keys, and notices about
    unused values.

    Types and ranges are checked later, with the sections.
    """
    defaults = {key: flat.default for key, flat in FLAT_KEYS.items() if flat.default is not None}
    complete = defaults | dict(table)
    values = [(target, value, "") for target, value in FIXED.items()]
    notices = []
    # MLX-GRPO's ratio is relative to the quantized sampler, ours relative to the learner.
    if complete["quantize_for_rollouts"] is True:
        values.append(("loss.correction", "token_truncate", "quantize_for_rollouts"))
    for key, given in complete.items():
        flat = FLAT_KEYS[key]
        value = flat.convert(given, complete)
        if flat.unless not in table:
            values.append((flat.target, value, key))
        elif value != table[flat.unless]:
            notices.append(f"{key} is not used: {flat.unless} sets {flat.target}")
    return values, notices
