"""The flat keys of the MLX-GRPO project's TOML files, translated to this project's sections.

MLX-GRPO has one table, at the file's top level or under [mlx_grpo], and a default for every key. Such a file
keeps those defaults here, so that its meaning does not change. Two rules apply if keys overlap:

- `max_new_tokens` limits MLX-GRPO's rollouts (it never reads `max_completion_length`); `eval_every_updates`
  and `eval_subset_size` drive the exact match in its log (`eval_steps`, counted in batch steps, and
  `eval_samples` drive a second evaluation beside it). Of two such keys the first wins, and a notice says so
  if they disagree.
- The other key of such a pair is used if it stands alone, and a notice says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from runners.config.sections import OptimConfig
from runners.errors import did_you_mean

TABLE = "mlx_grpo"


@attrs.frozen
class FlatKey:
    """One key of MLX-GRPO: its `section.key` here, and MLX-GRPO's own default (None: not set)."""

    target: str
    default: Any = None


@attrs.define
class Translation:
    """A translated flat table: (section.key, value, flat key), faults as (flat key, reason), and notices."""

    entries: list[tuple[str, Any, str]] = attrs.field(factory=list)
    problems: list[tuple[str, str]] = attrs.field(factory=list)
    notices: list[str] = attrs.field(factory=list)


FLAT_KEYS: dict[str, FlatKey] = {
    "model_name": FlatKey("model.path", "Qwen/Qwen2.5-1.5B-Instruct"),
    "output_dir": FlatKey("run.output_dir", "outputs/Qwen-1.5B-MLX-GRPO"),
    "run_name": FlatKey("run.name", "Qwen-1.5B-MLX-GRPO-gsm8k"),
    "learning_rate": FlatKey("optim.learning_rate", 1e-6),
    "batch_size": FlatKey("optim.batch_size", 1),
    "gradient_accumulation_steps": FlatKey("optim.gradient_accumulation_steps", 4),
    "num_epochs": FlatKey("optim.num_epochs", 1),
    "max_train_samples": FlatKey("data.max_samples", 0),
    "warmup_ratio": FlatKey("optim.warmup_ratio", 0.1),
    "max_grad_norm": FlatKey("optim.max_grad_norm", 0.1),
    "logging_steps": FlatKey("log.every", 1),
    "num_generations": FlatKey("rollout.num_generations", 64),
    "max_prompt_length": FlatKey("data.max_prompt_length", 512),
    "max_completion_length": FlatKey("rollout.max_new_tokens"),
    "max_new_tokens": FlatKey("rollout.max_new_tokens", 512),
    "temperature": FlatKey("rollout.temperature", 0.7),
    "clip_eps": FlatKey("loss.epsilon_low", 0.2),
    "kl_coeff": FlatKey("loss.beta", 0.0),
    "adam_beta1": FlatKey("optim.betas", 0.9),
    "adam_beta2": FlatKey("optim.betas", 0.999),
    "weight_decay": FlatKey("optim.weight_decay", 0.0),
    "lr_scheduler_type": FlatKey("optim.schedule", "cosine"),
    "save_steps": FlatKey("checkpoint.every", 100),
    "eval_steps": FlatKey("eval.every"),
    "eval_samples": FlatKey("eval.samples"),
    "eval_every_updates": FlatKey("eval.every", 25),
    "eval_subset_size": FlatKey("eval.samples", 200),
    "eval_max_new_tokens": FlatKey("eval.max_new_tokens", 128),
    "seed": FlatKey("run.seed", 0),
    "use_compile": FlatKey("system.compile", True),
    "quantize_for_rollouts": FlatKey("rollout.quantization", True),
    "log_jsonl": FlatKey("log.jsonl", True),
}

PAIRS = {
    "max_completion_length": "max_new_tokens",
    "eval_steps": "eval_every_updates",
    "eval_samples": "eval_subset_size",
}
"""Keys that are not used if another key is given."""

_WRITTEN_INTO_THE_SCRIPT: dict[str, Any] = {
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
"""Values that are fixed in MLX-GRPO's script, without a key."""


def translate(table: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> Translation:
    """The sections' values for a flat table. Types and ranges are checked later, with the sections.

    Args:
        table: flat keys and their values.
        before: None for a whole file, whose missing keys get MLX-GRPO's defaults. For single keys of --set,
            [optim] so far: some mean a part of a key (`adam_beta1`) or count in its units (`eval_steps`).
    """
    result, given = Translation(), {}
    for key, value in table.items():
        if key in FLAT_KEYS:
            given[key] = value
        else:
            result.problems.append((key, f"unknown key{did_you_mean(key, FLAT_KEYS)}"))
    defaults = {key: flat.default for key, flat in FLAT_KEYS.items() if flat.default is not None}
    units = {"gradient_accumulation_steps": 1, **(defaults if before is None else before), **given}
    chosen = _resolve_pairs(given, units["gradient_accumulation_steps"], result.notices)
    if before is None:
        result.entries += [(path, value, "") for path, value in _WRITTEN_INTO_THE_SCRIPT.items()]
        chosen = defaults | chosen
    result.entries += _entries(chosen, before)
    return result


def _resolve_pairs(given: dict[str, Any], accumulation: Any, notices: list[str]) -> dict[str, Any]:
    """`given` with at most one key of each pair, under the name and in the units of the one that wins."""
    chosen = dict(given)
    for lesser, winner in PAIRS.items():
        if lesser not in given:
            continue
        found, steps, unit = chosen.pop(lesser), 1, ""
        if lesser == "eval_steps" and type(accumulation) is type(found) is int and accumulation > 0:
            steps, unit = accumulation, f" batch steps, {accumulation} to an update,"
        if winner not in given:
            chosen[winner] = max(1, round(found / steps)) if unit and found > 0 else found  # 0: never
            taken = f"{FLAT_KEYS[winner].target} = {chosen[winner]}"
            notices.append(f"{lesser} = {found}{unit} is taken for {winner}, which is not given: {taken}")
        elif found != (given[winner] * steps if type(given[winner]) is int else given[winner]):
            read = f"{winner} = {given[winner]} is what MLX-GRPO reads"
            notices.append(f"{lesser} = {found}{unit} is not used: {read}")
    return chosen


def _entries(chosen: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterator[tuple[str, Any, str]]:
    for key, value in chosen.items():
        if key == "quantize_for_rollouts" and isinstance(value, bool):
            yield FLAT_KEYS[key].target, "affine-4" if value else "none", key
            if value and before is None:
                # MLX-GRPO's ratio is against the quantized sampler, ours against the learner's own forward
                # pass: the sampler's part is added as a correction.
                yield "loss.correction", "token_truncate", key
        elif not key.startswith("adam_"):
            yield FLAT_KEYS[key].target, value, key
    if beta_keys := [key for key in ("adam_beta1", "adam_beta2") if key in chosen]:
        betas = (before or {}).get("betas", list(attrs.fields(OptimConfig).betas.default))
        if isinstance(betas, list) and len(betas) == 2:  # else a fault of the file, reported as such
            first, second = (chosen.get(f"adam_beta{i}", betas[i - 1]) for i in (1, 2))
            yield "optim.betas", [first, second], ", ".join(beta_keys)
