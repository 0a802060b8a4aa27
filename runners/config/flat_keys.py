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

from runners.config import rules
from runners.config.sections import OptimConfig
from runners.errors import did_you_mean

TABLE = "mlx_grpo"


@attrs.frozen
class FlatKey:
    """One key of MLX-GRPO: its section and key here, its type, and MLX-GRPO's own default (None: not set)."""

    target: tuple[str, ...]
    kind: type
    default: Any = None
    low: int | None = None  # smaller values mean something else here


@attrs.frozen
class Entry:
    """One value for the config: its key in the sections, and the flat key that it comes from."""

    path: tuple[str, ...]
    value: Any
    key: str


@attrs.define
class Translation:
    """A translated flat table: values, faults as (key, reason), and notices for the user."""

    entries: list[Entry] = attrs.field(factory=list)
    problems: list[tuple[str, str]] = attrs.field(factory=list)
    notices: list[str] = attrs.field(factory=list)


FLAT_KEYS: dict[str, FlatKey] = {
    "model_name": FlatKey(("model", "path"), str, "Qwen/Qwen2.5-1.5B-Instruct"),
    "output_dir": FlatKey(("run", "output_dir"), str, "outputs/Qwen-1.5B-MLX-GRPO"),
    "run_name": FlatKey(("run", "name"), str, "Qwen-1.5B-MLX-GRPO-gsm8k"),
    "learning_rate": FlatKey(("optim", "learning_rate"), float, 1e-6),
    "batch_size": FlatKey(("optim", "batch_size"), int, 1),
    "gradient_accumulation_steps": FlatKey(("optim", "gradient_accumulation_steps"), int, 4),
    "num_epochs": FlatKey(("optim", "num_epochs"), int, 1),
    "max_train_samples": FlatKey(("data", "max_samples"), int, 0),
    "warmup_ratio": FlatKey(("optim", "warmup_ratio"), float, 0.1),
    "max_grad_norm": FlatKey(("optim", "max_grad_norm"), float, 0.1),
    "logging_steps": FlatKey(("log", "every"), int, 1),
    "num_generations": FlatKey(("rollout", "num_generations"), int, 64),
    "max_prompt_length": FlatKey(("data", "max_prompt_length"), int, 512),
    "max_completion_length": FlatKey(("rollout", "max_new_tokens"), int),
    "max_new_tokens": FlatKey(("rollout", "max_new_tokens"), int, 512),
    "temperature": FlatKey(("rollout", "temperature"), float, 0.7),
    "clip_eps": FlatKey(("loss", "epsilon_low"), float, 0.2),
    "kl_coeff": FlatKey(("loss", "beta"), float, 0.0),
    "adam_beta1": FlatKey(("optim", "betas"), float, 0.9),
    "adam_beta2": FlatKey(("optim", "betas"), float, 0.999),
    "weight_decay": FlatKey(("optim", "weight_decay"), float, 0.0),
    "lr_scheduler_type": FlatKey(("optim", "schedule"), str, "cosine"),
    "save_steps": FlatKey(("checkpoint", "every"), int, 100),
    "eval_steps": FlatKey(("eval", "every"), int),
    "eval_samples": FlatKey(("eval", "samples"), int, low=1),
    "eval_every_updates": FlatKey(("eval", "every"), int, 25),
    "eval_subset_size": FlatKey(("eval", "samples"), int, 200, low=1),
    "eval_max_new_tokens": FlatKey(("eval", "max_new_tokens"), int, 128, low=1),
    "seed": FlatKey(("run", "seed"), int, 0),
    "use_compile": FlatKey(("system", "compile"), bool, True),
    "quantize_for_rollouts": FlatKey(("rollout", "quantization"), bool, True),
    "log_jsonl": FlatKey(("log", "jsonl"), bool, True),
}

PAIRS = {
    "max_completion_length": "max_new_tokens",
    "eval_steps": "eval_every_updates",
    "eval_samples": "eval_subset_size",
}
"""Keys that are not used if another key is given."""

_WRITTEN_INTO_THE_SCRIPT: dict[tuple[str, ...], Any] = {
    ("data", "source"): "openai/gsm8k",
    ("reward", "functions"): [
        "correctness_reward_func",
        "xmlcount_reward_func",
        "soft_format_reward_func",
        "int_reward_func",
    ],
    ("rollout", "top_p"): 0.95,
    ("rollout", "stop"): ["</answer>"],
}
"""Values that are fixed in MLX-GRPO's script, without a key."""


def translate(
    table: Mapping[str, Any], *, complete: bool, sections: Mapping[str, Any] | None = None
) -> Translation:
    """The sections' values for a flat table.

    Args:
        table: flat keys and their values.
        complete: the table is a whole file: missing keys get MLX-GRPO's defaults.
        sections: the values so far, for keys that mean only a part of ours (`adam_beta1`) or count in other
            units (`eval_steps`).
    """
    result = Translation()
    given = {}
    for key, value in table.items():
        if key not in FLAT_KEYS:
            result.problems.append((key, f"unknown key{did_you_mean(key, FLAT_KEYS)}"))
            continue
        try:
            _check(value, FLAT_KEYS[key])
            given[key] = value
        except rules.Mismatch as error:
            result.problems.append((key, error.reason(value)))
    optim = _table(sections, "optim")
    defaults = {key: flat.default for key, flat in FLAT_KEYS.items() if flat.default is not None}
    accumulation = given.get(
        "gradient_accumulation_steps",
        defaults["gradient_accumulation_steps"] if complete else optim.get("gradient_accumulation_steps", 1),
    )
    chosen = _resolve_pairs(given, accumulation, result.notices)
    if complete:
        result.entries += [Entry(path, value, "") for path, value in _WRITTEN_INTO_THE_SCRIPT.items()]
        chosen = {**{key: value for key, value in defaults.items() if key not in table}, **chosen}
    result.entries += _entries(chosen, optim, correct=complete)
    return result


def _check(value: Any, flat: FlatKey) -> None:
    typed = rules.structure(value, flat.kind)
    if flat.low is not None and typed < flat.low:
        raise rules.Mismatch(value, f"{rules.words(flat.kind)} >= {flat.low}")


def _table(sections: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    found = (sections or {}).get(name)
    return found if isinstance(found, Mapping) else {}


def _resolve_pairs(given: dict[str, Any], accumulation: Any, notices: list[str]) -> dict[str, Any]:
    """`given` with at most one key of each pair, under the name and in the units of the one that wins."""
    chosen = dict(given)
    for lesser, winner in PAIRS.items():
        if lesser not in given:
            continue
        found = chosen.pop(lesser)
        steps = accumulation if lesser == "eval_steps" and isinstance(accumulation, int) else 1
        unit = f" batch steps, {steps} to an update," if lesser == "eval_steps" else ""
        if winner not in given:
            chosen[winner] = found if steps == 1 else _at_least_once(found, steps)
            taken = f"{'.'.join(FLAT_KEYS[winner].target)} = {chosen[winner]}"
            notices.append(f"{lesser} = {found}{unit} is taken for {winner}, which is not given: {taken}")
        elif found != given[winner] * steps:
            notices.append(
                f"{lesser} = {found}{unit} is not used: {winner} = {given[winner]} is what MLX-GRPO reads"
            )
    return chosen


def _at_least_once(batch_steps: int, steps_an_update: int) -> int:
    """Batch steps in updates, rounded to at least 1; 0, which means never, stays 0."""
    if batch_steps <= 0 or steps_an_update < 1:
        return batch_steps
    return max(1, round(batch_steps / steps_an_update))


def _entries(chosen: Mapping[str, Any], optim: Mapping[str, Any], *, correct: bool) -> Iterator[Entry]:
    for key, value in chosen.items():
        path = FLAT_KEYS[key].target
        if key in ("adam_beta1", "adam_beta2"):
            continue
        if key == "quantize_for_rollouts":
            yield Entry(path, "affine-4" if value else "none", key)
            if value and correct:
                # MLX-GRPO's ratio is against the quantized sampler, ours against the learner's own forward
                # pass: the sampler's part is added as a correction.
                yield Entry(("loss", "correction"), "token_truncate", key)
            continue
        yield Entry(path, value, key)
    beta_keys = [key for key in ("adam_beta1", "adam_beta2") if key in chosen]
    if beta_keys:
        before = optim.get("betas", list(attrs.fields(OptimConfig).betas.default))
        if not isinstance(before, list) or len(before) != 2:
            return  # a fault of the file, reported as such
        betas = list(before)
        for key in beta_keys:
            betas[int(key[-1]) - 1] = chosen[key]
        yield Entry(("optim", "betas"), betas, ", ".join(beta_keys))
