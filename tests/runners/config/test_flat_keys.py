"""MLX-GRPO's flat keys: what each becomes, its defaults, and what is said where two of them disagree."""

import attrs
import pytest

from runners.config.flat_keys import FLAT_KEYS, PAIRS
from runners.config.loading import KEYS, ConfigError
from runners.config.sections import RunConfig

# A file as that project's users have them: each key with a value that is not its default.
WHOLE = """\
model_name = "org/small-model"
output_dir = "outputs/small"
run_name = "small-v1"
learning_rate = 3e-6
batch_size = 2
gradient_accumulation_steps = 8
num_epochs = 3
max_train_samples = 500
warmup_ratio = 0.05
max_grad_norm = 1
logging_steps = 5
num_generations = 4
max_prompt_length = 256
max_completion_length = 96
max_new_tokens = 96
temperature = 0.8
clip_eps = 0.1
kl_coeff = 0.02
adam_beta1 = 0.8
adam_beta2 = 0.95
weight_decay = 0.01
lr_scheduler_type = "linear"
save_steps = 50
eval_steps = 80
eval_samples = 20
eval_every_updates = 10
eval_subset_size = 20
eval_max_new_tokens = 64
seed = 42
use_compile = false
quantize_for_rollouts = false
log_jsonl = false
"""

# Our key: what it is where the file says nothing, and what it is for the file above.
PLACES = {
    "model.path": ("Qwen/Qwen2.5-1.5B-Instruct", "org/small-model"),
    "run.output_dir": ("outputs/Qwen-1.5B-MLX-GRPO", "outputs/small"),
    "run.name": ("Qwen-1.5B-MLX-GRPO-gsm8k", "small-v1"),
    "run.seed": (0, 42),
    "optim.learning_rate": (1e-06, 3e-06),
    "optim.batch_size": (1, 2),
    "optim.gradient_accumulation_steps": (4, 8),
    "optim.num_epochs": (1, 3),
    "optim.warmup_ratio": (0.1, 0.05),
    "optim.max_grad_norm": (0.1, 1.0),
    "optim.betas": ((0.9, 0.999), (0.8, 0.95)),
    "optim.weight_decay": (0.0, 0.01),
    "optim.schedule": ("cosine", "linear"),
    "data.max_samples": (0, 500),
    "data.max_prompt_length": (512, 256),
    "log.every": (1, 5),
    "log.jsonl": (True, False),
    "rollout.num_generations": (64, 4),
    "rollout.max_new_tokens": (512, 96),
    "rollout.temperature": (0.7, 0.8),
    "rollout.quantization": ("affine-4", "none"),
    "loss.epsilon_low": (0.2, 0.1),
    "loss.beta": (0.0, 0.02),
    "checkpoint.every": (100, 50),
    "eval.every": (25, 10),
    "eval.samples": (200, 20),
    "eval.max_new_tokens": (128, 64),
    "system.compile": (True, False),
}
DEFAULTS = {key: default for key, (default, _) in PLACES.items()}
EXPECTED = {key: value for key, (_, value) in PLACES.items()}


def values(config, keys):
    """The config's values at dotted keys."""
    return {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in keys}


@pytest.mark.parametrize("header", ["", "[mlx_grpo]\n"])
def test_a_whole_file_is_taken_as_it_is(load, header):
    """Every flat key reaches its section, at top level and under [mlx_grpo], without a notice."""
    assert set(FLAT_KEYS) == {line.split(" = ")[0] for line in WHOLE.splitlines()}
    config = load(header + WHOLE)
    assert values(config, EXPECTED) == EXPECTED
    assert config.notices == ()
    assert all(value != DEFAULTS[key] for key, value in EXPECTED.items())


@pytest.mark.parametrize("text", ["[mlx_grpo]\n", "seed = 0\n"])
def test_what_a_flat_file_leaves_out_is_mlx_grpos_default(load, text):
    """Its defaults, not ours, and what its script has no key for."""
    config = load(text)
    assert values(config, DEFAULTS) == DEFAULTS
    assert (config.data.source, config.data.name) == ("openai/gsm8k", "main")
    assert (config.rollout.top_p, config.rollout.stop) == (0.95, ("</answer>",))
    assert config.reward.functions == (
        "correctness_reward_func",
        "xmlcount_reward_func",
        "soft_format_reward_func",
        "int_reward_func",
    )
    assert config.loss.preset == "grpo" and config.notices == ()


def test_the_resolved_config_shows_sections_only(load):
    """A flat file and the sections that it is shown as are the same config."""
    config = load(WHOLE).check()
    assert not set(FLAT_KEYS) & set(config.to_dict())
    assert load(config.to_toml()) == config


def test_every_flat_key_has_a_place():
    """The targets are keys of the config, and only overlapping flat keys share one."""
    assert {flat.target for flat in FLAT_KEYS.values()} <= set(KEYS)
    alone = [
        flat.target for key, flat in FLAT_KEYS.items() if key not in PAIRS and not key.startswith("adam_")
    ]
    assert len(alone) == len(set(alone))


@pytest.mark.parametrize(
    ("text", "notice", "key", "value"),
    [
        (
            "max_new_tokens = 512\nmax_completion_length = 1024",
            "max_completion_length = 1024 is not used: max_new_tokens = 512 is what MLX-GRPO reads",
            "rollout.max_new_tokens",
            512,
        ),
        (
            "max_completion_length = 100",
            "max_completion_length = 100 is taken for max_new_tokens, which is not given: "
            "rollout.max_new_tokens = 100",
            "rollout.max_new_tokens",
            100,
        ),
        (
            "eval_steps = 50\neval_every_updates = 25",
            "eval_steps = 50 batch steps, 4 to an update, is not used: eval_every_updates = 25 is what "
            "MLX-GRPO reads",
            "eval.every",
            25,
        ),
        (
            "eval_steps = 50\ngradient_accumulation_steps = 2",
            "eval_steps = 50 batch steps, 2 to an update, is taken for eval_every_updates, which is not "
            "given: eval.every = 25",
            "eval.every",
            25,
        ),
        (
            "eval_steps = 1",
            "eval_steps = 1 batch steps, 4 to an update, is taken for eval_every_updates, which is not "
            "given: eval.every = 1",
            "eval.every",
            1,
        ),
        (
            "eval_samples = 50\neval_subset_size = 20",
            "eval_samples = 50 is not used: eval_subset_size = 20 is what MLX-GRPO reads",
            "eval.samples",
            20,
        ),
        ("eval_steps = 100\neval_every_updates = 25", None, "eval.every", 25),
        ("eval_steps = 0\neval_every_updates = 0", None, "eval.every", 0),
        ("max_new_tokens = 7\nmax_completion_length = 7", None, "rollout.max_new_tokens", 7),
        ("max_new_tokens = 7", None, "rollout.max_new_tokens", 7),
    ],
)
def test_of_two_keys_the_one_that_is_read_wins(load, text, notice, key, value):
    """One line where they disagree (updates counted as batch steps), none where they agree."""
    config = load(text)
    assert values(config, [key]) == {key: value}
    assert config.notices == (() if notice is None else (f"train.toml: {notice}",))


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
        ("seed = 1\nzzz = 2", "train.toml: zzz: unknown key"),
        ("num_generations = 1", "train.toml: num_generations: expected an integer >= 2, found 1"),
        ("[mlx_grpo]\nclip_eps = 1.0", "mlx_grpo.clip_eps: expected a number: 0 <= x < 1, found 1.0"),
        ("adam_beta2 = 1.0", "train.toml: adam_beta1, adam_beta2: expected a list of 2 numbers, each: 0 <="),
        ("adam_beta2 = true", "train.toml: adam_beta2: expected a number, found true"),
        ("use_compile = 1", "train.toml: use_compile: expected true or false, found 1"),
        ("lr_scheduler_type = 'cosin'", "lr_scheduler_type: expected one of cosine, linear, constant, found"),
        ("eval_subset_size = 0", "train.toml: eval_subset_size: expected an integer >= 1, found 0"),
        ("model_name = './nope'", 'train.toml: model_name: no such file or folder: "./nope"'),
        ("mlx_grpo = 3", "train.toml: mlx_grpo: expected a table, found 3"),
        ("[mlx_grpo]\nseed = 1\n[optim]\n", "found the table [mlx_grpo] and sections ([optim])"),
        ("seed = 1\n[mlx_grpo]\n", "found MLX-GRPO's keys (seed) and the table [mlx_grpo]"),
        (
            "seed = 1\nbatch_size = 1\nnum_epochs = 1\nclip_eps = 0.2\n[run]\n[loss]\n",
            "(seed, batch_size, num_epochs, ...) and sections ([run], [loss])",
        ),
    ],
)
def test_a_fault_is_reported_in_the_words_of_the_file(load, text, line):
    """One line with the flat key as it was written, not the section's."""
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert len(caught.value.problems) == 1 and line in caught.value.problems[0]


def test_overrides_of_either_kind_go_with_files_of_either_kind(load):
    """--set with a flat name on a file with sections changes that value alone; the last one wins."""
    plain = load('model.path = "embedded"\n')
    assert load('model.path = "embedded"\n', "run_name=x") == attrs.evolve(plain, run=RunConfig(name="x"))
    config = load(WHOLE, "optim.learning_rate=1", "learning_rate=2", "loss.preset=dapo", "adam_beta1=0.5")
    assert (config.optim.learning_rate, config.optim.betas) == (2.0, (0.5, 0.95))
    assert (config.loss.preset, config.loss.epsilon_low) == ("dapo", 0.1)
    assert load(WHOLE, "learning_rate=2", "optim.learning_rate=1").optim.learning_rate == 1.0


def test_an_override_in_batch_steps_counts_in_the_files_updates(load):
    """--set eval_steps on a file with 8 batch steps an update, with the notice that it is taken so."""
    config = load('model.path = "embedded"\noptim.gradient_accumulation_steps = 8\n', "eval_steps=40")
    assert config.eval.every == 5
    assert config.notices == (
        "--set: eval_steps = 40 batch steps, 8 to an update, is taken for eval_every_updates, which is not "
        "given: eval.every = 5",
    )
