"""The config's keys: their defaults, their types, and their agreement with the core."""

import subprocess
import sys
from typing import get_args, get_origin

import attrs
import pytest

from runners.config import sections
from runners.config.loading import KEYS, ConfigError
from runners.config.reading import ANY_NAME, PRESET_FOLDER
from runners.config.rules import is_text


def test_defaults_are_the_documented_ones(load):
    """A config that names only a model has every default of the reference table."""
    config = load('model.path = "embedded"')
    found = {**config.to_dict(), "data": {**config.to_dict()["data"], "system_prompt": "..."}}
    assert found == {
        "run": {"name": "grpo", "output_dir": "outputs", "seed": 0, "overwrite": False},
        "model": {
            "path": "embedded",
            "tune": "full",
            "lora": {"rank": 8, "scale": 20.0, "layers": -1, "keys": []},
            "dtype": "auto",
            "master": "float32",
            "trust_remote_code": False,
            "loader": "",
        },
        "data": {
            "source": "openai/gsm8k",
            "name": "main",
            "split": "train",
            "eval_split": "test",
            "question": "question",
            "answer": "answer",
            "prompt": "",
            "image": "",
            "image_folder": "",
            "image_max_pixels": 0,
            "system_prompt": "...",
            "nudge": "<reasoning>",
            "chat_template_kwargs": {},
            "max_samples": 0,
            "max_prompt_length": 512,
            "on_bad_row": "raise",
            "transform": "",
        },
        "rollout": {
            "num_generations": 8,
            "max_new_tokens": 512,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "stop": [],
            "quantization": "none",
            "storage": "dequantized",
            "group_size": 0,
            "quantize_head": False,
            "mismatch_limit": 0.5,
            "launch": "auto",
            "check_every": 8,
            "max_batch": 0,
        },
        "reward": {
            "functions": [
                "correctness_reward_func",
                "int_reward_func",
                "strict_format_reward_func",
                "soft_format_reward_func",
                "xmlcount_reward_func",
            ],
            "weights": [],
            "aggregate": "sum_then_normalize",
            "timeout": 60.0,
            "on_error": "skip",
            "stop_if_all_fail": True,
        },
        "judge": {},
        "loss": {
            "preset": "grpo",
            "mask_truncated_completions": False,
            "max_resample": 3,
            "router_aux_coef": 0.0,
            "router_replay": False,
            "top_entropy_quantile": 1.0,
            "sync_every": 1,
            "ref_sync_every": 0,
            "ref_mixup": 0.6,
            "ref_quantization": "none",
            "ref_storage": "packed",
        },
        "optim": {
            "learning_rate": 1e-6,
            "schedule": "cosine",
            "warmup_ratio": 0.1,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.0,
            "moments": "float32",
            "max_grad_norm": 1.0,
            "batch_size": 1,
            "gradient_accumulation_steps": 1,
            "num_epochs": 1,
            "max_steps": 0,
            "num_iterations": 1,
            "minibatches": 1,
            "max_bad_updates": 10,
            "shard": False,
        },
        "env": {
            "factory": "",
            "tools": [],
            "max_turns": 8,
            "max_tool_calls": 0,
            "max_observation_tokens": 512,
            "timeout": 30.0,
            "workers": 32,
            "on_error": "observation",
            "schedule": "together",
        },
        "eval": {"every": 0, "samples": 200, "max_new_tokens": 0, "at_start": True},
        "checkpoint": {"every": 100, "keep_last": 3, "keep_best": 1, "on_error": "continue"},
        "log": {
            "every": 1,
            "jsonl": True,
            "completions": True,
            "tokens": "none",
            "report": True,
            "tensorboard": False,
            "wandb": False,
            "trackio": False,
            "project": "grpo_fn",
            "entity": "",
            "run_name": "",
            "table_rows": 8,
        },
        "watch": {"patience": 10, "min_entropy": 0.001, "max_kl": 10.0},
        "stop": {"when": []},
        "system": {
            "compile": True,
            "grad_checkpoint": False,
            "memory_limit_gb": 0.0,
            "micro_batch_tokens": 0,
            "share_prompts": "auto",
            "collective_timeout": 600.0,
            "check_model": True,
            "disable": [],
        },
    }


def test_the_schema_names_what_the_core_has():
    """The config's choices, spelled out so that loading needs no MLX, are grpo_fn's."""
    import grpo_fn as g
    from grpo_fn.algorithm import AGGREGATES, BASELINES, SCALES
    from grpo_fn.learner import SCHEDULES
    from grpo_fn.policy import MODES, STORAGES
    from runners.rewards import builtin as rewards

    assert set(sections.REWARD_NAMES) == set(rewards.REWARDS)
    assert get_args(sections.Aggregate) == AGGREGATES
    assert get_args(sections.Baseline) == tuple(BASELINES)
    assert get_args(sections.Scale) == tuple(SCALES)
    assert get_args(sections.ScheduleName) == SCHEDULES
    assert get_args(sections.QuantizationMode) == ("none", *MODES)
    assert get_args(sections.Storage) == STORAGES
    assert set(attrs.fields_dict(g.LossSpec)) <= set(attrs.fields_dict(sections.LossConfig))


def test_loading_imports_nothing_heavy():
    """A faulty config ends before MLX, datasets or transformers are imported."""
    code = (
        "import sys; from runners.config.loading import load_config; load_config('quickstart');"
        "heavy = {'mlx', 'mlx_lm', 'datasets', 'transformers', 'numpy', 'rich', 'grpo_fn'};"
        "loaded = heavy & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    root = PRESET_FOLDER.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


_SAMPLES = {int: "2", float: "2.5", bool: "true", str: '"x"', list: "[true]", dict: "{x = 1}"}


def taken(kind):
    """The TOML types that a key of this type takes."""
    if type(None) in get_args(kind):
        return taken(get_args(kind)[0])
    if get_origin(kind) is dict:
        return {dict}
    return {int: {int}, float: {int, float}, bool: {bool}}.get(kind, {str} if is_text(kind) else set())


@pytest.mark.parametrize("path", sorted(KEYS, key=".".join), ids=".".join)
def test_no_key_coerces(load, path):
    """Each key refuses every TOML type but its own; only an integer may stand for a number."""
    for sample in set(_SAMPLES) - taken(KEYS[path]):
        key = ".".join("x" if part == ANY_NAME else part for part in path)
        text = f"{key} = {_SAMPLES[sample]}\n"
        with pytest.raises(ConfigError) as caught:
            load(text if path == ("model", "path") else f'model.path = "embedded"\n{text}')
        start = f"train.toml: {key}: found {_SAMPLES[sample]}, want "
        assert [line.startswith(start) for line in caught.value.problems] == [True], caught.value
