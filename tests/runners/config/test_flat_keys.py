"""MLX-GRPO's flat keys: the keys that they set, their defaults, and their error messages."""

import pytest

from runners.config.flat_keys import FIXED, FLAT_KEYS
from runners.config.loading import KEYS, ConfigError

# Flat key: its value in a file, our key, our value.
WRITTEN = {
    "model_name": ('"org/small-model"', "model.path", "org/small-model"),
    "output_dir": ('"outputs/small"', "run.output_dir", "outputs/small"),
    "run_name": ('"small-v1"', "run.name", "small-v1"),
    "seed": ("42", "run.seed", 42),
    "learning_rate": ("3e-6", "optim.learning_rate", 3e-6),
    "batch_size": ("2", "optim.batch_size", 2),
    "gradient_accumulation_steps": ("8", "optim.gradient_accumulation_steps", 8),
    "num_epochs": ("3", "optim.num_epochs", 3),
    "warmup_ratio": ("0.05", "optim.warmup_ratio", 0.05),
    "max_grad_norm": ("1", "optim.max_grad_norm", 1.0),
    "adam_beta1": ("0.8", "optim.betas", (0.8, 0.95)),
    "adam_beta2": ("0.95", "optim.betas", (0.8, 0.95)),
    "weight_decay": ("0.01", "optim.weight_decay", 0.01),
    "lr_scheduler_type": ('"linear"', "optim.schedule", "linear"),
    "max_train_samples": ("500", "data.max_samples", 500),
    "max_prompt_length": ("256", "data.max_prompt_length", 256),
    "logging_steps": ("5", "log.every", 5),
    "log_jsonl": ("false", "log.jsonl", False),
    "num_generations": ("4", "rollout.num_generations", 4),
    "max_completion_length": ("96", "rollout.max_new_tokens", 96),
    "max_new_tokens": ("96", "rollout.max_new_tokens", 96),
    "temperature": ("0.8", "rollout.temperature", 0.8),
    "quantize_for_rollouts": ("false", "rollout.quantization", "none"),
    "clip_eps": ("0.1", "loss.epsilon_low", 0.1),
    "kl_coeff": ("0.02", "loss.beta", 0.02),
    "save_steps": ("50", "checkpoint.every", 50),
    "eval_steps": ("80", "eval.every", 10),
    "eval_every_updates": ("10", "eval.every", 10),
    "eval_samples": ("20", "eval.samples", 20),
    "eval_subset_size": ("20", "eval.samples", 20),
    "eval_max_new_tokens": ("64", "eval.max_new_tokens", 64),
    "use_compile": ("false", "system.compile", False),
}
WHOLE = "".join(f"{key} = {text}\n" for key, (text, _, _) in WRITTEN.items())


def value(config, key):
    """The config's value at a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("header", ["", "[mlx_grpo]\n"])
def test_every_flat_key_reaches_its_section(load, header):
    """This holds at the top level and under [mlx_grpo]; the resolved config loads to the same config."""
    assert set(FLAT_KEYS) == set(WRITTEN)
    config = load(header + WHOLE)
    assert {key: value(config, ours) for key, (_, ours, _) in WRITTEN.items()} == {
        key: expected for key, (_, _, expected) in WRITTEN.items()
    }
    assert config.notices == ()
    resolved = config.check()
    assert not set(FLAT_KEYS) & set(resolved.to_dict())
    assert load(resolved.to_toml()) == resolved


@pytest.mark.parametrize("text", ["[mlx_grpo]\n", "seed = 0\n"])
def test_a_missing_flat_key_has_mlx_grpos_default(load, text):
    """The config has MLX-GRPO's defaults instead of ours, and the values that its script fixes."""
    config = load(text)
    for flat in FLAT_KEYS.values():
        assert tuple(flat.target.split(".")) in KEYS
        if isinstance(flat.default, int | float | str) and flat.target not in (
            "optim.betas",
            "rollout.quantization",
        ):
            assert value(config, flat.target) == flat.default
    assert config.optim.betas == (0.9, 0.999) and config.rollout.quantization == "affine-4"
    for ours, fixed in FIXED.items():
        found = value(config, ours)
        assert (list(found) if isinstance(found, tuple) else found) == fixed
    assert (config.data.name, config.loss.preset, config.notices) == ("main", "grpo", ())


@pytest.mark.parametrize(
    ("text", "unused", "key", "expected"),
    [
        (
            "max_completion_length = 9\nmax_new_tokens = 5",
            "max_completion_length",
            "rollout.max_new_tokens",
            5,
        ),
        ("max_completion_length = 7\nmax_new_tokens = 7", "", "rollout.max_new_tokens", 7),
        ("eval_steps = 50\neval_every_updates = 25", "eval_steps", "eval.every", 25),
        ("eval_steps = 100\neval_every_updates = 25", "", "eval.every", 25),
        ("eval_steps = 50\ngradient_accumulation_steps = 2", "", "eval.every", 25),
        ("eval_steps = 1", "", "eval.every", 1),
        ("eval_steps = 0", "", "eval.every", 0),
        ("eval_subset_size = 20\neval_samples = 50", "eval_samples", "eval.samples", 20),
    ],
)
def test_two_flat_keys_for_one_value(load, text, unused, key, expected):
    """The key that MLX-GRPO reads takes precedence; a notice names the other if the values differ."""
    config = load(text)
    assert value(config, key) == expected
    notices = [line.split(" is not used: ")[0] for line in config.notices]
    assert notices == ([f"train.toml: {unused}"] if unused else [])


def test_a_quantized_sampler_has_a_correction(load):
    """MLX-GRPO quantizes by default; --set can change both keys."""
    assert load("seed = 1").check().loss.correction == "token_truncate"
    assert load("quantize_for_rollouts = true").rollout.quantization == "affine-4"
    assert load("quantize_for_rollouts = false").check().loss.correction == "none"
    assert load("seed = 1", "loss.correction=none").check().loss.correction == "none"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("num_generation = 4\nseed = 1", "num_generation: unknown key; did you mean num_generations?"),
        ("[mlx_grpo]\nsed = 1", "train.toml: mlx_grpo.sed: unknown key; did you mean seed?"),
        ("num_generations = 1", "train.toml: num_generations: expected an integer >= 2, found 1"),
        ("[mlx_grpo]\nclip_eps = 1.0", "mlx_grpo.clip_eps: expected a number: 0 <= x < 1, found 1.0"),
        ("adam_beta2 = true", "adam_beta2: expected a list of 2 numbers, found [0.9, true]"),
        ("quantize_for_rollouts = 1", "train.toml: quantize_for_rollouts: expected one of none, "),
        ("model_name = './nope'", 'train.toml: model_name: no such file or folder: "./nope"'),
        ("eval_samples = 5\neval_subset_size = {}", "eval_subset_size: expected an integer"),
        ("mlx_grpo = 3", "train.toml: mlx_grpo: unknown key; MLX-GRPO's keys have other names in sections"),
        ("clip_eps = 0.1\nmodel.path = 'embedded'", "clip_eps: unknown key; did you mean loss.epsilon_low?"),
        ("mlx_grpo.seed = 1\nmodel.path = 'embedded'", "mlx_grpo: unknown key; MLX-GRPO's keys have other"),
    ],
)
def test_a_bad_flat_key_is_named_as_in_the_file(load, text, line):
    """The line contains the flat key instead of the section's; flat keys next to sections are refused."""
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert line in caught.value.problems[0] and len(caught.value.problems) <= 2, caught.value.problems


def test_a_faulty_set_option_for_a_flat_file(load):
    """The line names --set and the section's key."""
    with pytest.raises(ConfigError, match=r"^--set: run\.seed: expected an integer"):
        load("seed = 3", "run.seed=x")
    with pytest.raises(ConfigError, match=r"^--set: clip_eps: unknown key; did you mean loss\.epsilon_low"):
        load("seed = 3", "clip_eps=0.1")
