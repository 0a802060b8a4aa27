"""Models with learned positions: a command that could need more positions is refused before it starts."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gpt2

from tests.support.commands import grpo
from tests.support.tiny_models import make_tokenizer, write_tokenizer
from tests.support.tiny_runs import small

CONFIG = {
    "model_type": "gpt2", "n_ctx": 64, "n_positions": 64, "n_embd": 32, "n_head": 2, "n_layer": 1,
    "layer_norm_epsilon": 1e-5, "vocab_size": 320, "eos_token_id": 2,
}  # fmt: skip
TRAIN = small(
    model={"path": "model"},
    data={"source": "rows.jsonl", "eval_split": "test"},
    rollout={"max_new_tokens": 64},
    eval={"max_new_tokens": 20},
    reward={"functions": ["int_reward_func"]},
)


@pytest.fixture
def command(tmp_path):
    """Runs a command with a GPT-2 that has 64 positions; returns the last line of its output."""
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model", make_tokenizer())
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    weights = tree_flatten(gpt2.Model(gpt2.ModelArgs.from_dict(CONFIG)).parameters())
    mx.save_safetensors("model/model.safetensors", dict(weights))
    rows = [json.dumps({"question": f"{n} + {n}?", "answer": 2 * n}) + "\n" for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "train.toml").write_text(TRAIN)

    return lambda *arguments, code: (
        grpo(*arguments, code=code, input="7 + 7?\n").stderr.strip().splitlines()[-1]
    )


def test_only_what_fits_is_sampled(command):
    """Prompt and length limit (64 or 512 tokens) end at the last position."""
    evaluate = ("eval", "model", "--config", "train.toml")
    generate = ("generate", "model", "7 + 7?")
    for words in (("run", "train.toml"), generate, ("chat", "model"), (*evaluate, "--max-tokens", "64")):
        line = command(*words, code=2)
        assert "expected at most 64 learned positions, found " in line
        assert "a prompt of " in line
    command(*generate, "--max-tokens", "20", code=0)
    command(*evaluate, code=0)


def test_gold_completions_of_a_file_are_checked_too(command, tmp_path):
    """Their prompts are not those of the run."""
    line = {"prompt": "7 + 7? " * 40, "completion": "14", "reward": 1.0}
    (tmp_path / "gold.jsonl").write_text(json.dumps(line) + "\n")
    settings = ("--set", "sft.completions=gold.jsonl", "--set", "rollout.max_new_tokens=8")
    line = command("sft", "train.toml", *settings, code=2)
    assert "at most 64 learned positions" in line
    assert "reference completions of the train data with their prompts, " in line
