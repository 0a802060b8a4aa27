"""MLX-GRPO's flat keys: what each becomes, its defaults, and what is said where two of them disagree."""

import pytest

from runners.config.flat_keys import FLAT_KEYS
from runners.config.loading import ConfigError

# A flat key: our key, our value where the file says nothing, what a file may say, and our value then.
KEYS = {
    "model_name": ("model.path", "Qwen/Qwen2.5-1.5B-Instruct", '"org/small-model"', "org/small-model"),
    "output_dir": ("run.output_dir", "outputs/Qwen-1.5B-MLX-GRPO", '"outputs/small"', "outputs/small"),
    "run_name": ("run.name", "Qwen-1.5B-MLX-GRPO-gsm8k", '"small-v1"', "small-v1"),
    "seed": ("run.seed", 0, "42", 42),
    "learning_rate": ("optim.learning_rate", 1e-6, "3e-6", 3e-6),
    "batch_size": ("optim.batch_size", 1, "2", 2),
    "gradient_accumulation_steps": ("optim.gradient_accumulation_steps", 4, "8", 8),
    "num_epochs": ("optim.num_epochs", 1, "3", 3),
    "warmup_ratio": ("optim.warmup_ratio", 0.1, "0.05", 0.05),
    "max_grad_norm": ("optim.max_grad_norm", 0.1, "1", 1.0),
    "adam_beta1": ("optim.betas", (0.9, 0.999), "0.8", (0.8, 0.95)),
    "adam_beta2": ("optim.betas", (0.9, 0.999), "0.95", (0.8, 0.95)),
    "weight_decay": ("optim.weight_decay", 0.0, "0.01", 0.01),
    "lr_scheduler_type": ("optim.schedule", "cosine", '"linear"', "linear"),
    "max_train_samples": ("data.max_samples", 0, "500", 500),
    "max_prompt_length": ("data.max_prompt_length", 512, "256", 256),
    "logging_steps": ("log.every", 1, "5", 5),
    "log_jsonl": ("log.jsonl", True, "false", False),
    "num_generations": ("rollout.num_generations", 64, "4", 4),
    "max_completion_length": ("rollout.max_new_tokens", 512, "96", 96),
    "max_new_tokens": ("rollout.max_new_tokens", 512, "96", 96),
    "temperature": ("rollout.temperature", 0.7, "0.8", 0.8),
    "quantize_for_rollouts": ("rollout.quantization", "affine-4", "false", "none"),
    "clip_eps": ("loss.epsilon_low", 0.2, "0.1", 0.1),
    "kl_coeff": ("loss.beta", 0.0, "0.02", 0.02),
    "save_steps": ("checkpoint.every", 100, "50", 50),
    "eval_steps": ("eval.every", 25, "80", 10),
    "eval_every_updates": ("eval.every", 25, "10", 10),
    "eval_samples": ("eval.samples", 200, "20", 20),
    "eval_subset_size": ("eval.samples", 200, "20", 20),
    "eval_max_new_tokens": ("eval.max_new_tokens", 128, "64", 64),
    "use_compile": ("system.compile", True, "false", False),
}
WHOLE = "".join(f"{key} = {text}\n" for key, (_, _, text, _) in KEYS.items())


def value(config, key):
    """The config's value at a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize("header", ["", "[mlx_grpo]\n"])
def test_a_whole_file_is_taken_as_it_is(load, header):
    """Every flat key reaches its section, at top level and under [mlx_grpo], without a notice."""
    assert set(FLAT_KEYS) == set(KEYS)
    config = load(header + WHOLE)
    for key, (ours, default, _, expected) in KEYS.items():
        assert value(config, ours) == expected != default, key
    assert config.notices == ()
    resolved = config.check()  # and is shown in sections only
    assert not set(FLAT_KEYS) & set(resolved.to_dict()) and load(resolved.to_toml()) == resolved


@pytest.mark.parametrize("text", ["[mlx_grpo]\n", "seed = 0\n"])
def test_what_a_flat_file_leaves_out_is_mlx_grpos_default(load, text):
    """Its defaults, not ours, and what its script has no key for."""
    config = load(text)
    assert all(value(config, ours) == default for ours, default, _, _ in KEYS.values())
    assert (config.data.source, config.data.name) == ("openai/gsm8k", "main")
    assert (config.rollout.top_p, config.rollout.stop) == (0.95, ("</answer>",))
    assert "strict_format_reward_func" not in config.reward.functions and len(config.reward.functions) == 4
    assert config.loss.preset == "grpo" and config.notices == ()


@pytest.mark.parametrize(
    ("text", "notice", "key", "expected"),
    [
        ("max_new_tokens = 5\nmax_completion_length = 9", "is not used", "rollout.max_new_tokens", 5),
        ("max_completion_length = 100", "is taken for max_new_tokens", "rollout.max_new_tokens", 100),
        ("eval_steps = 50\neval_every_updates = 25", "4 to an update, is not used", "eval.every", 25),
        ("eval_steps = 50\ngradient_accumulation_steps = 2", "eval.every = 25", "eval.every", 25),
        ("eval_steps = 1", "eval.every = 1", "eval.every", 1),
        ("eval_samples = 50\neval_subset_size = 20", "is not used", "eval.samples", 20),
        ("eval_steps = 100\neval_every_updates = 25", None, "eval.every", 25),
        ("eval_steps = 0\neval_every_updates = 0", None, "eval.every", 0),
        ("max_new_tokens = 7\nmax_completion_length = 7", None, "rollout.max_new_tokens", 7),
    ],
)  # fmt: skip
def test_of_two_keys_the_one_that_is_read_wins(load, text, notice, key, expected):
    """One line where they disagree (updates counted as batch steps), none where they agree."""
    config = load(text)
    assert value(config, key) == expected
    assert len(config.notices) == (notice is not None)
    assert all(line.startswith("train.toml: ") and notice in line for line in config.notices)


def test_quantized_rollouts_come_with_a_correction(load):
    """MLX-GRPO quantizes unless told not to; the loss then corrects for a sampler that is not π_old."""
    assert load("seed = 1").check().loss.correction == "token_truncate"
    assert load("quantize_for_rollouts = true").rollout.quantization == "affine-4"
    assert load("quantize_for_rollouts = false").check().loss.correction == "none"
    assert load("seed = 1", "loss.correction=none").check().loss.correction == "none"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("num_generation = 4", "train.toml: num_generation: unknown key; did you mean num_generations?"),
        ("[mlx_grpo]\nsed = 1", "train.toml: mlx_grpo.sed: unknown key; did you mean seed?"),
        ("num_generations = 1", "train.toml: num_generations: expected an integer >= 2, found 1"),
        ("[mlx_grpo]\nclip_eps = 1.0", "mlx_grpo.clip_eps: expected a number: 0 <= x < 1, found 1.0"),
        ("adam_beta2 = true", "adam_beta2: expected a list of 2 numbers, found [0.9, true]"),
        ("quantize_for_rollouts = 1", "train.toml: quantize_for_rollouts: expected one of none, "),
        ("model_name = './nope'", 'train.toml: model_name: no such file or folder: "./nope"'),
        ("eval_samples = 5\neval_subset_size = {}", "eval_subset_size: expected an integer"),
        ("mlx_grpo = 3", "train.toml: mlx_grpo: expected a table, found 3"),
        ("[mlx_grpo]\nseed = 1\n[optim]\n", "found the table [mlx_grpo] and sections ([optim])"),
        ("seed = 1\nsave_steps = 1\nnum_epochs = 1\nclip_eps = 0\n[run]\n", "num_epochs, ...) and"),
    ],
)  # fmt: skip
def test_a_fault_is_reported_in_the_words_of_the_file(load, text, line):
    """One line with the flat key as it was written, not the section's."""
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert len(caught.value.problems) == 1 and line in caught.value.problems[0]
